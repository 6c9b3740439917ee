"""Recipes that a user registers: known by name wherever the package's own are."""

import contextlib
import dataclasses
import functools
import pickle
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nm_sparsity_jax as nms
from nm_sparsity_jax import recipes
from nm_sparsity_jax.core.errors import SettingError, UnknownRecipe
from nm_sparsity_jax.recipes import RECIPES, curves, registry
from nm_sparsity_jax.runs import results
from nm_sparsity_jax.training import configure, rules_text, stored

PHASES = nms.Phases(total=20, dense=4, finetune=4)
STEPS = dict(sparse_steps=20, dense_steps=4, finetune_steps=4)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Halving(nms.Recipe):
  """D halves at the middle of the sparsify phase; what is deployed is `scale` times the weight."""

  name = "halving"
  needs = {"scale": recipes.Need("2.0", "what to multiply with")}
  pattern: nms.NM
  phases: nms.Phases
  scale: float | None = None
  kept: nms.NM | None = None
  gradient: str | None = None

  def __post_init__(self):
    super().__post_init__()
    if self.kept is not None:
      object.__setattr__(self, "kept", nms.NM.parse(self.kept))
    if self.scale is not None and self.scale <= 0:
      raise SettingError("scale", "{name}: {scale} must be positive.", name=self.name)

  def levels(self, axis_size=None):
    return ((self.sparse_from, self.pattern),)

  @property
  def curve(self):
    middle = self.phases.dense + self.phases.sparsify // 2
    ends = (self.phases.finetune_start, 0.0)
    return curves.piecewise([(self.phases.dense, 1.0), (middle, 0.5), ends], self.phases.dense)

  def final(self, w, groups, state=None):
    return super().final(w, groups, state) * w.dtype.type(self.scale)


@contextlib.contextmanager
def registered(cls):
  recipes.register(cls)
  try:
    yield cls
  finally:
    registry._recipes.pop(cls.name, None)


@pytest.fixture
def halving():
  with registered(Halving):
    yield Halving


def params(seed=0):
  w = np.random.default_rng(seed).normal(size=(16, 3)).astype(np.float32)
  return {"mlp": {"wi": {"kernel": jnp.asarray(w)}}}


def kernel(tree):
  return np.asarray(tree["mlp"]["wi"]["kernel"])


def test_it_is_known_by_name_and_trains(halving):
  assert RECIPES["halving"] is halving and list(RECIPES)[-1] == "halving"
  recipe = nms.recipe("halving", pattern="1:4", phases=PHASES, scale=2.0, beta=None)
  assert type(recipe) is halving and recipe.pattern == nms.NM(1, 4)
  assert [(s.start, s.decay_start, s.decay_stop) for s in recipe.timeline(16)] == [
    (0, 1.0, 1.0), (4, 1.0, 0.5), (10, 0.5, 0.0), (16, 0.0, 0.0),
  ]  # fmt: skip
  assert recipe.target_from() == 16
  tree, rules = params(), nms.Rules({"ff": recipe})
  mask = np.asarray(nms.nm_mask(jnp.abs(tree["mlp"]["wi"]["kernel"]), "1:4"))
  for step, d in ((0, 1.0), (10, 0.5), (19, 0.0)):
    got = kernel(nms.sparsify(tree, rules, step))
    np.testing.assert_allclose(got, np.where(mask, kernel(tree), d * kernel(tree)), rtol=1e-6)


def test_what_is_deployed_is_what_it_says(halving):
  recipe = nms.recipe("halving", pattern="1:4", phases=PHASES, scale=2.0)
  tree, rules = params(), nms.Rules({"ff": recipe})
  mask = np.asarray(nms.nm_mask(jnp.abs(tree["mlp"]["wi"]["kernel"]), "1:4"))
  done = nms.finalize(tree, rules, 0, early=True)
  np.testing.assert_array_equal(kernel(done), np.where(mask, 2 * kernel(tree), 0))
  assert nms.verify(done, rules).ok and not nms.verify(tree, rules).ok
  same = jax.jit(functools.partial(nms.finalize, early=True), static_argnums=1)(tree, rules, 0)
  np.testing.assert_array_equal(kernel(same), kernel(done))


@pytest.mark.filterwarnings("ignore:rule .* seems to be that of the outputs:UserWarning")
def test_deployed_values_may_need_what_is_stored():
  """Shifted by what the recipe stores beside its mask; along any axis, padding included."""

  @dataclasses.dataclass(frozen=True, kw_only=True)
  class Shifted(nms.Recipe):
    name = "shifted"
    stateful = True
    pattern: nms.NM
    phases: nms.Phases

    def levels(self, axis_size=None):
      return ((self.sparse_from, self.pattern),)

    def chosen(self, w, step, axis, stored):
      return stored

    def renewals(self, step):
      return jnp.asarray(step, jnp.int32)

    def first_state(self, groups, w):
      mask = groups.magnitude_mask(w, self.pattern)
      return {"mask": mask, "shift": jnp.min(jnp.where(mask, jnp.abs(w), jnp.inf)) / 2}

    def next_state(self, groups, state, w, step, last, grad, grad_at):
      return self.first_state(groups, w)

    def final(self, w, groups, state=None):
      shifted = jnp.sign(w) * (jnp.abs(w) - state["shift"])
      return jnp.where(state["mask"], shifted, jnp.zeros_like(w))

  recipe = Shifted(pattern=nms.NM(1, 4), phases=PHASES)
  rules = nms.Rules({"ff": recipe}, axes={".*": 1}, indivisible="pad")
  tree = params(3)
  state = stored.init_state(tree, rules)
  state = stored.update_state(state, tree, rules, 20)
  done = nms.finalize(tree, rules, 20, state)
  w = kernel(tree)
  mask = abs(w) == abs(w).max(1, keepdims=True)
  shift = abs(w)[mask].min() / 2
  np.testing.assert_allclose(kernel(done), np.where(mask, np.sign(w) * (abs(w) - shift), 0), 1e-6)
  assert nms.verify(done, rules).ok


def test_settings_make_it(halving):
  made = configure.rules({"ff": "1:4"}, "halving", fields={"scale": 3.0}, **STEPS)
  recipe = nms.recipe("halving", pattern="1:4", phases=PHASES, scale=3.0)
  assert made == nms.Rules({"ff": recipe})
  for fields, words in (
    ({"scale": -1.0}, "halving: scale must be positive."),
    ({"scale": 1.0, "k": 2}, "halving has no field k=2"),
  ):
    with pytest.raises(ValueError, match=words):
      configure.rules({"ff": "1:4"}, "halving", fields=fields, **STEPS)


def test_a_field_is_judged_beside_those_it_goes_with():
  """A beta without a kind of decay is wrong; with one it is right, in whatever order they come."""
  fields = {"decay_kind": "linear"}
  made = configure.rules({"ff": "1:4"}, "sdgf_stepwise", beta=0.2, fields=fields, **STEPS)
  assert made.places["ff"].beta == 0.2
  with pytest.raises(ValueError, match="beta=0.2.*decay_kind"):
    configure.rules({"ff": "1:4"}, "sdgf_stepwise", beta=0.2, **STEPS)


def test_the_text_in_a_checkpoint_means_it():
  recipe = Halving(pattern=nms.NM(1, 4), phases=PHASES, scale=2.0, kept="2:4")
  rules = nms.Rules({"ff": recipe}, roles={"mine": "a/.*"}, axes={"b": (0, 1)})
  text = rules_text.describe(rules)
  assert text.splitlines()[0] == (
    "ff: halving 1:4, total=20, dense=4, finetune=4, scale=2.0, kept=NM(n=2, m=4)"
  )
  with pytest.raises(UnknownRecipe, match="the recipe 'halving', which is not registered"):
    rules_text.parse(text)
  with registered(Halving):
    assert rules_text.parse(rules_text.unpack(rules_text.pack(text))) == rules
  assert configure.parse is rules_text.parse and configure.describe is rules_text.describe


def test_settings_may_bring_roles():
  made = configure.rules({"mine": "1:4"}, "sr_ste", roles={"mine": "a/.*"}, **STEPS)
  assert made.roles == {"mine": "a/.*"} and made.find("a/kernel") is made.places["mine"]


def defined(name, of=("pattern", "phases"), bases=(nms.Recipe,), called="Other", **namespace):
  """A class as a module defines it, anew with each call."""
  return dataclasses.make_dataclass(
    called, of, bases=bases, frozen=True, kw_only=True, namespace={"name": name, **namespace}
  )


def test_a_name_is_taken_once(halving):
  assert recipes.register(halving) is halving  # a module may be imported twice
  with pytest.raises(ValueError, match="the name 'halving' is taken by Halving"):
    recipes.register(defined("halving"))
  other = defined("sr_ste")
  with pytest.raises(ValueError, match=r"register\(Other\): the name 'sr_ste' is taken by SrSte"):
    recipes.register(other)
  assert RECIPES["sr_ste"] is recipes.SrSte


def test_a_definition_that_runs_again_replaces_itself():
  """A cell of a notebook, or importlib.reload."""
  with registered(defined("mine")):
    again = defined("mine")
    assert recipes.register(again) is again is RECIPES["mine"]
    with pytest.raises(ValueError, match="the name 'mine' is taken by Other"):
      recipes.register(defined("mine", called="Third"))


def test_equal_values_have_one_text():
  """Before, no checkpoint with numpy's scalars could be read, and 1 and 1.0 were other rules."""
  for name, field, values in (
    ("sr_ste", "lam", (1.0, 1, np.float64(1), np.float32(1), np.int8(1))),
    ("mdgf_linear", "beta", (0.5, np.float64(0.5), np.float16(0.5))),
    ("snip", "batches", (2, np.int64(2))),
    ("sdgf_stepwise", "decay_kind", ("linear", np.str_("linear"))),
    ("custom", "path", (((5, "1:4", 1),), ((np.int64(5), nms.NM(1, 4), np.float64(1)),))),
  ):
    made = [
      nms.Rules({"ff": nms.recipe(name, pattern="1:4", phases=phases, **{field: value})})
      for value in values
      for phases in (PHASES, nms.Phases(total=np.int64(20), dense=np.int8(4), finetune=4))
    ]
    assert len(set(made)) == len({r.fingerprint for r in made}) == 1
    (text,) = {rules_text.describe(r) for r in made}
    assert rules_text.parse(text) == made[0]
  axes = [nms.Rules(made[0].places, axes={".*": a}) for a in ((0, 1), (np.int64(0), np.int8(1)))]
  assert len({r.fingerprint for r in axes}) == 1


def test_a_text_that_could_not_be_read_is_not_written(halving):
  recipe = nms.recipe("halving", pattern="1:4", phases=PHASES, scale=float("inf"))
  for rules in (nms.Rules({"ff": recipe}), nms.Rules({"a\nb": nms.recipe("dense")})):
    with pytest.raises(ValueError, match="a checkpoint cannot keep"):
      rules_text.describe(rules)


@pytest.mark.parametrize(
  "cls, why",
  [
    (5, "give a frozen dataclass"),
    (nms.NM, "give a frozen dataclass"),
    (type("A", (nms.Recipe,), {"name": "a"}), "give a frozen dataclass"),
    (dataclasses.make_dataclass("A", [], bases=(Halving,), frozen=True,
                                namespace={"name": "a b"}), "its name is 'a b'"),
    (dataclasses.make_dataclass("A", [], bases=(nms.Recipe,), frozen=True,
                                namespace={"name": "a"}), "fields pattern and phases"),
    (dataclasses.make_dataclass("A", ["pattern", "phases"], bases=(nms.Recipe,),
                                namespace={"name": "a"}), "frozen=True"),
    (defined("deep", (), (recipes.SrSte,)), "below SrSte, but a recipe stands directly below"),
    (defined("half", stateful=True), "must define first_state and next_state"),
  ],
)  # fmt: skip
def test_what_cannot_be_registered(cls, why):
  before = dict(RECIPES)
  with pytest.raises(ValueError, match=f"register.*{why}"):
    recipes.register(cls)
  assert dict(RECIPES) == before


def test_the_table_is_a_view():
  assert isinstance(RECIPES, types.MappingProxyType)
  with pytest.raises(TypeError):
    RECIPES["mine"] = Halving  # type: ignore[index]


def test_recipes_stand_directly_below_recipe():
  for cls in RECIPES.values():
    assert cls.__bases__ == (nms.Recipe,)
    assert cls.__dataclass_params__.frozen and cls.__dataclass_fields__["phases"].kw_only


def test_two_recipes_mask_from_the_end_of_the_dense_phase_on():
  ours = list(RECIPES)[:10]
  assert [name for name in ours if results.masks_at_once(name)] == ["one_shot", "sr_ste"]
  for name in ("one_shot", "sr_ste"):
    for phases in (PHASES, nms.Phases(total=9)):
      recipe = nms.recipe(name, pattern="1:4", phases=phases)
      assert recipe.target_from(16) == phases.dense


@pytest.mark.parametrize(
  "name, fields, first",
  [
    ("snip", {"batches": 3}, 7),
    ("mdgf_linear", {}, 14),  # D = 0 at 70 % of the steps
    ("mdgf_linear", {"beta": 0.01}, 16),
    ("mdgf_exponential", {}, 16),
    ("sdgf_stepwise", {}, 12),
    ("custom", {"path": ((5, "1:4", 1.0), (9, "1:4", 0.0))}, 9),
    ("custom", {"path": ((5, "2:4", 0.0),)}, 16),
  ],
)
def test_when_the_target_holds_for_good(name, fields, first):
  assert nms.recipe(name, pattern="1:4", phases=PHASES, **fields).target_from(16) == first


def test_a_target_may_never_be_reached():
  forever = nms.recipe("mdgf_exponential", pattern="1:4", phases=nms.Phases(total=20))
  assert forever.target_from() == 20
  assert nms.recipe("dense").target_from() == 0


def test_an_error_about_a_setting_is_told_in_either_vocabulary():
  with pytest.raises(SettingError) as e:
    nms.Phases(total=9, dense=8, finetune=2)
  again = pickle.loads(pickle.dumps(e.value))
  for error in (e.value, again):
    assert error.field == "total"
    assert str(error).startswith("Phases(total=9, dense=8, finetune=2): total >= dense + finetune")
    assert str(error).endswith("Raise total (SPARSE_STEPS) or shorten a phase.")
