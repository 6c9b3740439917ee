"""Settings to rules and back to a text: what a command line can say, and what it cannot."""

import numpy as np
import pytest

import nm_sparsity_jax as nms
from nm_sparsity_jax.training import configure, rules_text

PHASES = nms.Phases(total=20, dense=0, finetune=4)
STEPS = dict(sparse_steps=20, finetune_steps=4)


def test_places_share_or_differ():
  mine = nms.recipe("idp", pattern="2:8", phases=PHASES)
  places = {"ff": None, "qkv": "1:8", "o": nms.NM(3, 4), r"decoder/logits_dense/kernel": mine}
  made = configure.rules(places, "mdgf_linear", "1:2", **STEPS, beta=0.3).places
  assert [str(r.pattern) for r in made.values()] == ["1:2", "1:8", "3:4", "2:8"]
  assert made["ff"].beta == 0.3
  # Roles of a network that nobody knows, and its axes. A checkpoint needs neither.
  given = dict(roles={"ff": "(.*/)?up/w"}, axes={"(.*/)?up/w": -1})
  made = configure.rules({"decoder/ff": "1:4", "q": None}, "sr_ste", "1:2", **STEPS, **given)
  stored = rules_text.parse(rules_text.describe(made))
  assert stored.match("decoder/up/w") and not stored.match("encoder/up/w")
  assert stored.axes == given["axes"] and not stored.match("decoder/mlp/wi/kernel")
  configure.agree(stored, "a", places={"decoder/ff": "1:4", "q": None}, **given)


@pytest.mark.parametrize(
  "places, settings, message",
  [
    ("ff", {}, "SPARSITY_RULES='ff': give place"),
    ({"ff": 8}, {}, "SPARSITY_RULES, 'ff': "),
    ({"ff": None}, {"pattern": "8:1"}, "PATTERN: "),
    ({"ff": "1:4"}, {"dense_steps": 30}, "SPARSE_STEPS, DENSE_STEPS"),
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
    ("PATTERN='1:8'.*'1:4', '1:2'", {"pattern": "1:8"}),
    ("SPARSE_STEPS", {"sparse_steps": 21}),
    ("RECIPE='sr_ste'", {"recipe": "sr_ste", "places": {"ff": None, "q": "1:2"}}),
    ("DENSE_STEPS=1", {"dense_steps": 1}),
    ("FINETUNE_STEPS=3", {"finetune_steps": 3}),
    ("BETA=0.5", {"beta": 0.5}),
    ("GRADIENT='straight_through'", {"gradient": "straight_through"}),
    ("RECIPE_FIELDS=.*beta=0.5", {"fields": {"beta": 0.5}}),
    ("INDIVISIBLE='pad'", {"indivisible": "pad"}),
    ("SPARSITY_AXES, 'a'=0", {"axes": {"a": 0}}),
    ("SPARSITY_RULES", {"places": {"ff": None, "q": "1:2"}, "roles": {"q": "b"}}),
  ],
)
def test_the_setting_that_differs_from_a_checkpoint_is_named(macro, given):
  """Equal ones pass, in whatever form: a pattern of places, a recipe object, None."""
  stored = configure.rules({"ff": None, "q": "1:2"}, "mdgf_linear", "1:4", beta=0.25, **STEPS)
  same = dict(recipe="mdgf_linear", pattern="01:4", beta=0.25, gradient=None, **STEPS)
  for places in (None, {"ff": None, "q": "01:2"}, dict(stored.places)):
    configure.agree(stored, "a", places=places, **same)
  with pytest.raises(ValueError, match=f"^{macro}.*leave .* out"):
    configure.agree(stored, "a", **given)


# --- the text of rules ----------------------------------------------------------------------------


LONG = "".join(np.random.default_rng(0).choice([*"abcdefghijklmnop"], 20_000))


def test_a_text_gives_whole_rules_back():
  rules = nms.Rules(
    {
      "decoder/cross/qkv": nms.recipe("idp", pattern="1:8", phases=PHASES, lam=1e-3),
      r"(?:a|b: sr_ste 1:4)/[^/]+, k=3/kernel": nms.recipe("dense"),
    },
    axes={r"x: (0)/.*": (0, 2), "x.*": -2, "y": 1},
    indivisible="pad",
  )
  text = rules_text.describe(rules)
  assert rules_text.parse(text) == rules
  for one, size in ((text, 4096), (LONG, 12288)):
    packed = rules_text.pack(one)
    assert rules_text.unpack(packed) == one and packed.size == size
  assert "decoder/cross/qkv: idp 1:8, total=20, finetune=4, lam=0.001\n" in text


@pytest.mark.parametrize(
  "do, why",
  [
    (lambda: rules_text.parse("ff: sr_ste 1:4, total=9, later=3"), "cannot read .*later"),
    (lambda: rules_text.parse("ff: sr_stee 1:4, total=9"), "'sr_stee'.*not registered"),
    (lambda: rules_text.parse("ff: sr_ste 1:4, total=9, dense=0"), "it reads"),
    (lambda: rules_text.describe(nms.Rules({"a\nb": nms.recipe("dense")})), "rules"),
  ],
)
def test_what_no_checkpoint_can_keep_and_what_no_version_wrote_is_refused(do, why):
  with pytest.raises(ValueError, match=f"(?s){why}"):
    do()
