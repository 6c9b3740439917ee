"""Recipes by name, and what they say about bad input."""

import doctest

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nm_sparsity_jax as nms
from nm_sparsity_jax import recipes
from nm_sparsity_jax.core import errors
from nm_sparsity_jax.core.patterns import NM
from nm_sparsity_jax.recipes import RECIPES, custom, registry

PHASES = nms.Phases(total=100, dense=10, finetune=20)
PATH = ((10, "4:8", 1.0), (40, "1:8", 0.5))
STATEFUL = ("one_shot", "snip", "idp")


def make(name, pattern="1:8", phases=PHASES, **fields):
  if name == "custom":
    fields = {"path": PATH, **fields}
  return nms.recipe(name, pattern=pattern, phases=phases, **fields)


@pytest.mark.parametrize("names", [("7:8", "4:8", "1:8"), ("4:16", "2:8", "1:4"), ("6:8", "1:4")])
@pytest.mark.parametrize("call", [jax.jit, lambda f: f], ids=["traced", "known"])
def test_the_last_level_holds_from_its_first_step(names, call):
  """Of one length, of doubling lengths, and of others."""
  levels = [(5 * i, NM.parse(name)) for i, name in enumerate(names)]
  w = jax.random.normal(jax.random.PRNGKey(0), (32, 3))
  take = call(lambda step: recipes.levels.leveled_mask(levels, w, step, 0))
  for i, (start, pattern) in enumerate(levels):
    wanted = nms.masks.magnitude_mask(w, pattern)
    np.testing.assert_array_equal(take(jnp.int32(start)), wanted)
    if i + 1 < len(levels):
      np.testing.assert_array_equal(take(jnp.int32(start + 4)), wanted)


def refuses(*words):
  """A ValueError whose message says each of `words`: the value, the rule, the fix."""
  return _Refuses(words)


class _Refuses:
  def __init__(self, words):
    self.words, self.raises = words, pytest.raises(ValueError)

  def __enter__(self):
    self.info = self.raises.__enter__()

  def __exit__(self, *exception):
    handled = self.raises.__exit__(*exception)
    for word in self.words:
      assert word in str(self.info.value)
    return handled


# --- by name ----------------------------------------------------------------------------------


def test_the_names():
  assert list(RECIPES)[:10] == [
      "dense", "one_shot", "sr_ste", "mdgf_linear", "mdgf_exponential", "sdgf_stepwise",
      "sdgf_geometric", "custom", "snip", "idp",
  ]  # fmt: skip


@pytest.mark.parametrize("name", RECIPES)
def test_one_call_makes_every_recipe(name):
  path = {"path": PATH} if name == "custom" else {}
  recipe = nms.recipe(name, pattern="1:8", phases=PHASES, beta=None, gradient=None, **path)
  assert type(recipe) is RECIPES[name] and recipe.name == name
  assert recipe.pattern == NM(1, 8) and recipe.phases == PHASES
  assert recipe == nms.recipe(name, pattern=NM(1, 8), phases=PHASES, **path)
  assert recipe.stateful == (name in STATEFUL)
  assert recipe.lam == (2e-4 if name in ("sr_ste", "idp") else 0)
  straight = name in ("sr_ste", "idp")
  assert recipe.gradient_mode == ("straight_through" if straight else "masked")
  w = jnp.ones((8, 2))
  keep = jnp.ones((8, 2), bool) if recipe.stateful else None
  assert recipe.effective(w, 0, 0, keep).shape == w.shape


def test_what_one_recipe_alone_has():
  assert make("sdgf_geometric", phases=nms.Phases(total=100)).k == 16
  assert make("snip").batches == 1
  assert make("mdgf_linear", gradient="straight_through").gradient_mode == "straight_through"
  assert nms.recipe("dense").timeline() == ()


@pytest.mark.parametrize(
  "name, guess",
  [
    ("mdgf_exp", "mdgf_exponential"),
    ("sdgf-stepwise", "sdgf_stepwise"),
    ("srste", "sr_ste"),
    ("SNIP", None),
    ("xyz", None),
    (None, None),
  ],
)
def test_an_unknown_name_lists_them_all_and_guesses(name, guess):
  with refuses(f"no recipe {name!r}", *RECIPES):
    make(name)
  if guess:
    with refuses(f"Did you mean {guess!r}?"):
      make(name)


@pytest.mark.parametrize(
  "name, fields, words",
  [
    ("dense", {"beta": 0.1}, ["dense has no field beta=0.1", "pattern, phases"]),
    ("sr_ste", {"beta": 0.1}, ["sr_ste has no field beta=0.1", "lam, pattern"]),
    ("sr_ste", {"gradient": "masked"}, ["sr_ste has no field gradient='masked'"]),
    ("idp", {"gradient": "masked"}, ["idp has no field gradient='masked'"]),
    ("mdgf_linear", {"lam": 1.0}, ["mdgf_linear has no field lam=1.0", "beta, gradient"]),
    ("sdgf_stepwise", {"k": 8}, ["sdgf_stepwise has no field k=8", "decay_kind"]),
    ("one_shot", {"a": 1, "b": 2}, ["one_shot has no field a=1, b=2", "Leave the others None"]),
  ],
)
def test_a_field_that_a_recipe_lacks(name, fields, words):
  with refuses(*words):
    make(name, **fields)


@pytest.mark.parametrize("name", [name for name in RECIPES if name != "dense"])
def test_pattern_and_phases_are_needed(name):
  with refuses(f"{name} needs pattern", "pattern='1:8'"):
    make(name, pattern=None)
  with refuses(f"{name} needs phases", "nms.Phases(total="):
    make(name, phases=None)
  with refuses("phases=100", "Phases(total="):
    make(name, phases=100)
  for bad in ("1;8", "1:0", "4:2"):
    with pytest.raises(ValueError, match=bad.replace(":", ".*")):
      make(name, pattern=bad)


# --- fields -----------------------------------------------------------------------------------

DECAYING = [
  ("mdgf_linear", {}),
  ("mdgf_exponential", {}),
  ("sdgf_stepwise", {"decay_kind": "linear"}),
]


@pytest.mark.parametrize("beta", [0.0, -0.1, float("inf"), float("nan")])
@pytest.mark.parametrize("name, fields", DECAYING)
def test_beta_is_positive(name, fields, beta):
  with refuses(f"{name}(beta={beta!r})", "give a positive", "None chooses it"):
    make(name, beta=beta, **fields)


def test_beta_needs_a_kind_of_decay():
  with refuses("sdgf_stepwise(beta=0.1)", "decay_kind='linear'"):
    make("sdgf_stepwise", beta=0.1)
  with refuses("sdgf_stepwise(decay_kind='cosine')", "'linear', 'exponential' or None"):
    make("sdgf_stepwise", decay_kind="cosine")


@pytest.mark.parametrize("name, fields", DECAYING)
def test_no_room_for_a_default_decay(name, fields):
  phases = nms.Phases(total=100, dense=70, finetune=10)
  with refuses("min(0.7 * total, total - finetune) - dense = 0 steps", str(phases), "give beta"):
    make(name, phases=phases, **fields)
  make(name, phases=phases, beta=0.1, **fields)


@pytest.mark.parametrize("name, count", [("sdgf_stepwise", 4), ("sdgf_geometric", 5), ("idp", 4)])
def test_fewer_steps_than_levels(name, count):
  phases = nms.Phases(total=count + 4, dense=3, finetune=2)
  short = f"{phases} has {count - 1}"
  with refuses(f"{count} levels", "1:8", short, "Raise total", "fewer levels"):
    make(name, phases=phases)
  make(name, phases=nms.Phases(total=count + 5, dense=3, finetune=2))


@pytest.mark.parametrize("name", ["one_shot", "mdgf_linear", "sdgf_geometric", "custom", "snip"])
def test_a_gradient_is_one_of_two(name):
  with refuses("gradient='ste'", "'masked'", "'straight_through'", "None"):
    make(name, gradient="ste")


@pytest.mark.parametrize("k", [0, 3, -16, 16.0, True])
def test_k_is_a_power_of_two(k):
  with refuses(f"k={k!r}", "power of two", "halves"):
    make("sdgf_geometric", k=k)


@pytest.mark.parametrize("name", ["sr_ste", "idp"])
@pytest.mark.parametrize("lam", [-1e-4, float("nan"), float("inf")])
def test_lambda_is_not_negative(name, lam):
  with refuses(f"{name}(lam={lam!r})", ">= 0", "2e-4"):
    make(name, lam=lam)
  assert make(name, lam=0.0).lam == 0


@pytest.mark.parametrize("batches", [0, -1, 1.0, True])
def test_snip_needs_a_batch(batches):
  with refuses(f"snip(batches={batches!r})", "at least 1"):
    make("snip", batches=batches)


def test_snip_needs_the_steps_for_its_batches():
  with refuses("snip(batches=71)", "70 steps", "Raise total or lower batches"):
    make("snip", batches=71)
  assert make("snip", batches=70).timeline()[0].stop == 80


@pytest.mark.parametrize(
  "path, words",
  [
    ((), ["needs a path", "path=((0, '4:8', 1.0)"]),
    (None, ["needs a path", "(step, pattern, D)"]),
    (5, ["path=5", "(step, pattern, D)"]),
    ("1:8", ["path='1:8'", "(step, pattern, D)"]),
    (((10, "4:8"),), ["path=((10, '4:8'),)", "(step, pattern, D)"]),
    (((10, "4;8", 1.0),), ["'4;8' is not a pattern", "'1:8'"]),
    (((10, "4:8", "x"),), ["(step, pattern, D)", "'x'"]),
    (((10, "8:4", 1.0),), ["'8:4'", "Did you mean '4:8'?"]),
    (((9, "4:8", 1.0),), ["entry 0 starts at step 9", "sparsify phase [10, 80)"]),
    (((80, "4:8", 1.0),), ["entry 0 starts at step 80", "sparsify phase [10, 80)"]),
    (((10.0, "4:8", 1.0),), ["entry 0 starts at step 10.0", "give a whole number"]),
    (((True, "4:8", 1.0),), ["entry 0 starts at step True", "give a whole number"]),
    (((10, "4:8", 1.5),), ["entry 0 has D = 1.5", "choose D in [0, 1]"]),
    (((10, "4:8", -0.1),), ["entry 0 has D = -0.1", "choose D in [0, 1]"]),
    (((10, "4:8", float("nan")),), ["entry 0 has D = nan", "choose D in [0, 1]"]),
    (((20, "4:8", 1.0), (20, "1:8", 0.0)), ["entry 1 at step 20", "after 20", "sort the path"]),
    (((20, "4:8", 1.0), (15, "1:8", 0.0)), ["entry 1 at step 15", "after 20", "sort the path"]),
  ],
)
def test_bad_paths(path, words):
  with refuses(*words):
    make("custom", path=path)


# --- arguments --------------------------------------------------------------------------------

SPARSE = [name for name in RECIPES if name != "dense"]


def keep_for(recipe, w):
  return jnp.ones(w.shape, bool) if recipe.stateful else None


@pytest.mark.parametrize("name", SPARSE)
def test_a_step_is_one_whole_number(name):
  recipe, w = make(name), jnp.ones((8, 2))
  keep = keep_for(recipe, w)
  calls = (
    lambda t: recipe.effective(w, t, 0, keep),
    lambda t: recipe.mask(w, t, 0, keep),
    recipe.decay,
  )
  for call in calls:
    for step in (12.0, np.float32(12), True):
      with refuses(f"step={step!r}", "not a whole number", "nms.step_count"):
        call(step)
    with refuses("not a whole number", "jnp.int32(step)"):
      jax.jit(call)(12.0)  # a float tracer
    with refuses("step has shape (2,)", "one scalar", "step[0]"):
      call(jnp.arange(2))
    with refuses("step=-1 is negative", "first step of the sparse run is 0"):
      call(-1)


@pytest.mark.parametrize("name", STATEFUL)
def test_a_stateful_recipe_needs_its_mask(name):
  recipe, w = make(name), jnp.ones((8, 2))
  for call in (recipe.effective, recipe.mask):
    with refuses(name, "no mask was given", "nms.init_state", "nms.update_state", "mask=..."):
      call(w, jnp.int32(0))
    with refuses(name, "(2, 8)", "needs (8, 2) bool", "other parameters?"):
      call(w, jnp.int32(0), 0, jnp.ones((2, 8), bool))
    with refuses(name, "float32", "needs (8, 2) bool"):
      call(w, jnp.int32(0), 0, w)


@pytest.mark.parametrize("name", [name for name in SPARSE if name not in STATEFUL])
def test_a_derived_mask_cannot_be_given(name):
  recipe, w = make(name), jnp.ones((8, 2))
  with refuses(name, "derives its mask", "mask= was given"):
    recipe.effective(w, jnp.int32(0), 0, jnp.ones((8, 2), bool))


@pytest.mark.parametrize("name", [name for name in SPARSE if name not in ("one_shot", "snip")])
def test_a_weight_that_cannot_be_grouped(name):
  recipe = make(name)
  for w, words in (
    (jnp.ones((12, 2)), ["length 12", "groups of 8"]),
    (jnp.ones((8, 2), jnp.int32), ["int32", "jnp.float32"]),
    (jnp.ones((8, 2), jnp.complex64), ["complex64", "jnp.abs"]),
  ):
    with refuses(*words):
      recipe.effective(w, jnp.int32(50), 0, keep_for(recipe, w))
  with refuses("axis=2", "(8, 2)"):
    recipe.effective(jnp.ones((8, 2)), jnp.int32(50), 2, keep_for(recipe, jnp.ones((8, 2))))


def test_recipes_are_made_by_keyword():
  with pytest.raises(TypeError):
    recipes.MdgfLinear("1:8", PHASES)


def test_docstring_examples():
  for module in (custom, registry, errors):
    failed, tried = doctest.testmod(module)
    assert tried and not failed
