"""Recipes that a user registers: known by name wherever the package's own are."""

import contextlib
import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import nm_sparsity_jax as nms
from nm_sparsity_jax import recipes
from nm_sparsity_jax.core import schedules
from nm_sparsity_jax.core.errors import UnknownRecipe
from nm_sparsity_jax.recipes import RECIPES, registry
from nm_sparsity_jax.training import configure, rules_text

PHASES = nms.Phases(total=20, dense=4, finetune=4)
STEPS = dict(sparse_steps=20, dense_steps=4, finetune_steps=4)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Halving(nms.Recipe):
  """D halves at the middle of the sparsify phase; what is deployed is `scale` times the weight."""

  name = "halving"
  pattern: nms.NM
  phases: nms.Phases
  scale: float | None = None
  kept: nms.NM | None = None
  gradient: str | None = None

  def __post_init__(self):
    super().__post_init__()
    if self.kept is not None:
      object.__setattr__(self, "kept", nms.NM.parse(self.kept))
    if not self.scale or self.scale <= 0:
      raise ValueError(f"{self.name}: scale must be positive.")

  def levels(self, axis_size=None):
    return ((self.sparse_from, self.pattern),)

  @property
  def curve(self):
    middle = self.phases.dense + self.phases.sparsify // 2
    ends = (self.phases.finetune_start, 0.0)
    return schedules.piecewise([(self.phases.dense, 1.0), (middle, 0.5), ends], self.phases.dense)

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


def test_settings_make_it(halving):
  made = configure.rules({"ff": "1:4"}, "halving", fields={"scale": 3.0}, **STEPS)
  assert made == nms.Rules({"ff": nms.recipe("halving", pattern="1:4", phases=PHASES, scale=3.0)})
  for fields, word in (
    (None, "scale must be positive"),
    ({"scale": -1.0}, "scale must be positive"),
    ({"scale": 1.0, "k": 2}, "k=2"),
  ):
    with pytest.raises(ValueError, match=word):
      configure.rules({"ff": "1:4"}, "halving", fields=fields, **STEPS)


def test_a_field_is_judged_beside_those_it_goes_with():
  """A beta without a kind of decay is wrong; with one it is right, in whatever order they come."""
  fields = {"decay_kind": "linear"}
  made = configure.rules({"ff": "1:4"}, "sdgf_stepwise", beta=0.2, fields=fields, **STEPS)
  assert made.places["ff"].beta == 0.2
  with pytest.raises(ValueError, match="beta=0.2.*decay_kind"):
    configure.rules({"ff": "1:4"}, "sdgf_stepwise", beta=0.2, **STEPS)


def test_the_text_in_a_checkpoint_means_it():
  rules = nms.Rules({"ff": Halving(pattern=nms.NM(1, 4), phases=PHASES, scale=2.0, kept="2:4")})
  text = rules_text.describe(rules)
  with pytest.raises(UnknownRecipe, match="halving"):
    rules_text.parse(text)
  with registered(Halving):
    assert rules_text.parse(text) == rules


def defined(name, of=("pattern", "phases"), bases=(nms.Recipe,), called="Other", **namespace):
  """A class as a module defines it, anew with each call."""
  return dataclasses.make_dataclass(
    called, of, bases=bases, frozen=True, kw_only=True, namespace={"name": name, **namespace}
  )


def test_a_name_is_taken_once(halving):
  assert recipes.register(halving) is halving  # a module may be imported twice
  with registered(defined("mine")):
    again = defined("mine")  # a cell of a notebook, or importlib.reload
    assert recipes.register(again) is again is RECIPES["mine"]
    with pytest.raises(ValueError, match="taken by Other"):
      recipes.register(defined("mine", called="Third"))
  with pytest.raises(ValueError, match="the name 'halving' is taken by Halving"):
    recipes.register(defined("halving"))


def test_equal_values_have_one_text():
  """Before, no checkpoint with numpy's scalars could be read, and 1 and 1.0 were other rules."""
  for name, field, values in (
    ("sr_ste", "lam", (1.0, 1, np.float64(1), np.float32(1), np.int8(1))),
    ("mdgf_linear", "beta", (1, np.float64(1.0), np.float16(1.0))),
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


@pytest.mark.parametrize(
  "cls, why",
  [
    (5, "give a frozen dataclass"),
    (nms.NM, "give a frozen dataclass"),
    (dataclasses.make_dataclass("A", [], bases=(Halving,), frozen=True,
                                namespace={"name": "a b"}), "its name is 'a b'"),
    (dataclasses.make_dataclass("A", [], bases=(nms.Recipe,), frozen=True,
                                namespace={"name": "a"}), "fields pattern and phases"),
    (dataclasses.make_dataclass("A", ["pattern", "phases"], bases=(nms.Recipe,),
                                namespace={"name": "a"}), "frozen=True"),
  ],
)  # fmt: skip
def test_what_cannot_be_registered(cls, why):
  before = dict(RECIPES)
  with pytest.raises(ValueError, match=f"register.*{why}"):
    recipes.register(cls)
  assert dict(RECIPES) == before


@pytest.mark.parametrize(
  "name, fields, first",
  [
    ("snip", {"batches": 3}, 7),
    ("mdgf_linear", {}, 14),  # D = 0 at 70 % of the steps
    ("mdgf_linear", {"beta": 0.01}, 16),
    ("mdgf_exponential", {}, 16),
    ("one_shot", {}, 4),
    ("sr_ste", {}, 4),
    ("sdgf_stepwise", {}, 12),
    ("custom", {"path": ((5, "1:4", 1.0), (9, "1:4", 0.0))}, 9),
    ("custom", {"path": ((5, "2:4", 0.0),)}, 16),
  ],
)
def test_when_the_target_holds_for_good(name, fields, first):
  assert nms.recipe(name, pattern="1:4", phases=PHASES, **fields).target_from(16) == first
