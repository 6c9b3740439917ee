"""Settings to rules and back to a text: what a command line can say, and what it cannot."""

import dataclasses
import doctest

import pytest

import nm_sparsity_jax as nms
from nm_sparsity_jax.recipes import RECIPES
from nm_sparsity_jax.training import configure

CUSTOM = {"path": ((0, "2:4", 1.0), (5, "1:4", 0.5))}
PHASES = nms.Phases(total=20, dense=0, finetune=4)
STEPS = dict(sparse_steps=20, finetune_steps=4)


@pytest.mark.parametrize("name", RECIPES)
def test_the_settings_of_a_run_agree_with_the_text_that_it_stored(name):
  """A path, a list of a list, and 01:4 are what the checkpoint holds."""
  fields = CUSTOM if name == "custom" else {}
  rules = configure.rules({"ff": None}, name, "1:4", fields=fields, **STEPS)
  assert rules == nms.Rules({"ff": nms.recipe(name, pattern="1:4", phases=PHASES, **fields)})
  stored = configure.parse(configure.describe(rules))
  lists = {field: [list(entry) for entry in value] for field, value in fields.items()}
  for given in fields, lists:
    configure.agree(stored, "a", recipe=name, pattern="01:4", fields=given, **STEPS)
  if name == "custom":
    with pytest.raises(ValueError, match=r"RECIPE_FIELDS\['path'\]=.*a was trained with"):
      configure.agree(stored, "a", fields={"path": ((0, "2:4", 1.0), (6, "1:4", 0.5))})


def test_places_share_or_differ():
  mine = nms.recipe("idp", pattern="2:8", phases=PHASES)
  places = {"ff": None, "qkv": "1:8", "o": nms.NM(3, 4), r"decoder/logits_dense/kernel": mine}
  made = configure.rules(
    places, "mdgf_linear", "1:2", **STEPS, beta=0.3, gradient="straight_through", indivisible="skip"
  ).places
  assert [str(r.pattern) for r in made.values()] == ["1:2", "1:8", "3:4", "2:8"]
  assert made["ff"].beta == 0.3 and made["ff"].gradient == "straight_through"
  assert made["decoder/logits_dense/kernel"] is mine
  assert configure.rules({"ff": None}, "dense").places["ff"] == nms.recipe("dense")


@pytest.mark.parametrize(
  "places, settings, message",
  [
    ("ff", {}, "SPARSITY_RULES='ff'"),
    ({}, {}, "SPARSITY_RULES={}"),
    ({"ff": 8}, {}, "SPARSITY_RULES, 'ff': "),
    ({"ff": "8:1"}, {}, "SPARSITY_RULES, 'ff': "),
    ({"ff": None}, {"pattern": "8:1"}, "PATTERN: "),
    ({"ff": None}, {}, "PATTERN is not set"),
    ({"ff": "1:4"}, {"recipe": None}, "RECIPE is not set"),
    ({"ff": "1:4"}, {"recipe": "mdgf"}, "RECIPE.*no recipe 'mdgf'"),
    ({"ff": "1:4"}, {"sparse_steps": None}, "SPARSE_STEPS is not set"),
    ({"ff": "1:4"}, {"beta": 0.1}, "BETA.*beta=0.1"),
    ({"ff": "1:4"}, {"dense_steps": 30}, "SPARSE_STEPS, DENSE_STEPS"),
    ({"ff": "1:4"}, {"indivisible": "x"}, "indivisible='x'"),
    ({"*": "1:4"}, {}, "SPARSITY_RULES: "),
  ],
)
def test_a_mistake_names_the_macro(places, settings, message):
  with pytest.raises(ValueError, match=f"(?s)^.*{message}"):
    configure.rules(places, **{"recipe": "sr_ste", **STEPS, **settings})


@pytest.mark.parametrize(
  "macro, given",
  [
    ("SPARSITY_RULES", {"places": {"ff": "1:2", "q": None}}),
    ("RECIPE", {"recipe": "idp"}),
    ("PATTERN", {"pattern": "1:8"}),
    ("SPARSE_STEPS", {"sparse_steps": 21}),
    ("FINETUNE_STEPS", {"finetune_steps": 0}),
    ("BETA", {"beta": 0.5}),
    ("GRADIENT", {"gradient": "straight_through"}),
    ("RECIPE_FIELDS", {"fields": {"k": 3}}),
    ("INDIVISIBLE", {"indivisible": "pad"}),
  ],
)
def test_the_setting_that_differs_from_a_checkpoint_is_named(macro, given):
  """Equal ones pass, in whatever form: a pattern of places, a recipe object, None."""
  stored = configure.rules({"ff": None, "q": "1:2"}, "mdgf_linear", "1:4", beta=0.25, **STEPS)
  same = dict(recipe="mdgf_linear", pattern="1:4", beta=0.25, gradient=None, **STEPS)
  for places in (None, {"ff": None, "q": "01:2"}, dict(stored.places)):
    configure.agree(stored, "a", places=places, **same)
  with pytest.raises(ValueError, match=f"^{macro}.*, but a was trained with"):
    configure.agree(stored, "a", **given)


def test_train_steps():
  assert configure.train_steps(1_000_000, 500) == 1_000_500
  with pytest.raises(ValueError, match="SPARSE_STEPS='9'"):
    configure.train_steps(0, "9")  # type: ignore[arg-type]
  with pytest.raises(ValueError, match="PRETRAINED_STEPS=-1"):
    configure.train_steps(-1, 9)


def test_texts_are_equal_as_rules_are():
  phases = nms.Phases(total=9, dense=1)
  one = lambda **kw: nms.recipe("sr_ste", pattern="1:4", phases=phases, **kw)
  base = {"ff": one(), "qkv": one()}
  texts = [
    configure.describe(rules)
    for rules in (
      nms.Rules(base),
      nms.Rules({"ff": one(lam=0.1), "qkv": one()}),
      nms.Rules({"ff": one(), "qk": one()}),
      nms.Rules(base, axes={"a": 0, "b": 1}),
      nms.Rules(base, axes={"b": 1, "a": 0}),
      nms.Rules(base, indivisible="pad"),
      nms.Rules(base, roles={"mine": "x"}),
      nms.Rules({"ff": nms.recipe("idp", pattern="1:4", phases=phases), "qkv": one()}),
    )
  ]
  assert len(set(texts)) == len(texts)
  assert configure.describe(nms.Rules(dict(reversed(base.items())))) == texts[0]
  assert texts[0] == "ff: sr_ste 1:4, total=9, dense=1\nqkv: sr_ste 1:4, total=9, dense=1"


def test_a_text_gives_its_rules_back():
  phases = nms.Phases(total=9, dense=1, finetune=2)
  path = ((1, "2:4", 1.0), (5, "1:4", 0.5))
  many = nms.Rules(
    {
      "ff": nms.recipe("custom", pattern="1:4", phases=phases, path=path),
      "decoder/cross/qkv": nms.recipe("idp", pattern="1:8", phases=phases, lam=1e-3),
      r"(?:a|b: sr_ste 1:4)/[^/]+, k=3/kernel": nms.recipe("dense"),
      "mine": nms.recipe("sdgf_stepwise", pattern="2:4", phases=phases, decay_kind="exponential"),
    },
    axes={r"x: (0)/.*": (0, 2), "x.*": -2, "y": 1},
    indivisible="pad",
    roles={"mine": r"z/(u|v): kernel"},
  )
  for rules in (many, nms.Rules({"ff": nms.recipe("dense")})):
    assert configure.parse(configure.describe(rules)) == rules


@pytest.mark.parametrize(
  "text, why",
  [
    ("ff: sr_ste 1:4, total=9, later=3", "cannot read .*later=3"),
    ("ff: sr_stee 1:4, total=9", "'sr_stee', which is not registered"),
    ("ff: sr_ste 1:4, total=9, dense=0", "reads"),
    ("ff: sr_ste 1:4, total=9, lam=0", "reads"),
    ("ff: sr_ste 1:4, total=f()", "cannot read"),
    ("ff: sr_ste 1:4", "cannot read .*sr_ste needs phases"),
    ("", "cannot read"),
  ],
)
def test_a_text_of_another_version_is_refused(text, why):
  with pytest.raises(ValueError, match=f"(?s){why}"):
    configure.parse(text)


OTHERS = {
  "pattern": nms.NM(2, 4), "phases": nms.Phases(total=21, finetune=4), "lam": 0.5, "beta": 0.25,
  "k": 8, "batches": 2, "decay_kind": "linear", "gradient": "straight_through",
  "path": ((1, "2:4", 1.0),),
}  # fmt: skip


@pytest.mark.parametrize("name", RECIPES)
def test_every_field_of_every_recipe_is_in_the_text(name):
  given = {"custom": CUSTOM}.get(name, {})
  given |= {"decay_kind": "exponential"} if name.startswith("sdgf") else {}
  base = {"pattern": "1:4", "phases": PHASES, **given}
  make = lambda kw: nms.Rules({"ff": nms.recipe(name, **kw)})
  for field in dataclasses.fields(RECIPES[name]):
    other = make({**base, field.name: OTHERS[field.name]})
    assert configure.describe(other) != configure.describe(make(base)), field.name
    assert configure.parse(configure.describe(other)) == other


def test_docstrings():
  result = doctest.testmod(configure)
  assert result.attempted and not result.failed
