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
SPARSE = [name for name in RECIPES if name != "dense"]


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


@pytest.mark.parametrize("name", RECIPES)
def test_one_set_of_settings_makes_every_recipe(name):
  path = {"path": PATH} if name == "custom" else {}
  recipe = nms.recipe(name, pattern="1:8", phases=PHASES, beta=None, gradient=None, **path)
  assert type(recipe) is RECIPES[name] and recipe.name == name
  assert recipe.pattern == NM(1, 8) and recipe.phases == PHASES
  assert recipe.stateful == (name in STATEFUL)
  straight = name in ("sr_ste", "idp")
  assert recipe.lam == (2e-4 if straight else 0)
  assert recipe.gradient_mode == ("straight_through" if straight else "masked")


@pytest.mark.parametrize(
  "name, fields, word",
  [
    ("mdgf_exp", {}, "Did you mean 'mdgf_exponential'"),
    (None, {}, "Choose one of: dense, one_shot, sr_ste"),
    ("dense", {"beta": 0.1}, "dense has no field beta=0.1"),
    ("idp", {"gradient": "masked"}, "Its fields: lam, pattern, phases"),
    ("one_shot", {"a": 1, "b": 2}, "a=1, b=2"),
    *((name, {"pattern": None}, f"{name} needs pattern") for name in SPARSE),
    ("idp", {"phases": None}, "idp needs phases"),
    ("sr_ste", {"phases": 100}, "phases=100"),
    ("sr_ste", {"pattern": "1;8"}, "1;8"),
    ("mdgf_linear", {"beta": 0.0}, "beta=0.0"),
    ("mdgf_exponential", {"beta": -0.1}, "beta=-0.1"),
    ("sdgf_stepwise", {"beta": float("inf"), "decay_kind": "linear"}, "beta=inf"),
    ("sdgf_geometric", {"beta": float("nan"), "decay_kind": "linear"}, "beta=nan"),
    ("sdgf_stepwise", {"beta": 0.1}, "needs decay_kind"),
    ("sdgf_stepwise", {"decay_kind": "cosine"}, "decay_kind='cosine'"),
    ("mdgf_linear", {"phases": nms.Phases(total=100, dense=70)}, "give beta"),
    ("sdgf_stepwise", {"phases": nms.Phases(total=8, dense=3, finetune=2)}, "4 levels"),
    ("sdgf_geometric", {"phases": nms.Phases(total=9, dense=3, finetune=2)}, "5 levels"),
    ("idp", {"phases": nms.Phases(total=8, dense=3, finetune=2)}, "4 levels"),
    ("one_shot", {"gradient": "ste"}, "gradient='ste'"),
    ("sdgf_geometric", {"k": 3}, "power of two"),
    ("sdgf_geometric", {"k": 16.0}, "power of two"),
    ("sr_ste", {"lam": -1e-4}, "lam=-0.0001"),
    ("idp", {"lam": float("nan")}, "lam=nan"),
    ("idp", {"lam": float("inf")}, "lam=inf"),
    ("snip", {"batches": 0}, "batches=0"),
    ("snip", {"batches": 71}, "has 70 steps"),
    ("custom", {"path": ()}, "needs a path"),
    ("custom", {"path": 5}, "path=5"),
    ("custom", {"path": ((10, "4;8", 1.0),)}, "4;8"),
    ("custom", {"path": ((10.0, "4:8", 1.0),)}, "integer"),
    ("custom", {"path": ((9, "4:8", 1.0),)}, "sparsify phase"),
    ("custom", {"path": ((80, "4:8", 1.0),)}, "sparsify phase"),
    ("custom", {"path": ((20, "4:8", 1.0), (20, "1:8", 0.0))}, "rising steps"),
    ("custom", {"path": ((10, "4:8", 1.5),)}, "choose D"),
    ("custom", {"path": ((10, "4:8", float("nan")),)}, "choose D"),
  ],
)
def test_a_wrong_field_is_named(name, fields, word):
  with pytest.raises(ValueError, match=word.replace("(", r"\(")):
    make(name, **fields)


@pytest.mark.parametrize("name", SPARSE)
def test_a_step_is_one_whole_number(name):
  recipe, w = make(name), jnp.ones((8, 2))
  keep = jnp.ones(w.shape, bool) if recipe.stateful else None
  for call in (lambda t: recipe.effective(w, t, 0, keep), recipe.decay):
    for step in (12.0, True):
      with pytest.raises(ValueError, match="not a whole number"):
        call(step)
    with pytest.raises(ValueError, match="step has shape"):
      call(jnp.arange(2))
    with pytest.raises(ValueError, match="negative"):
      call(-1)
  with pytest.raises(ValueError, match="not a whole number"):
    jax.jit(recipe.decay)(12.0)  # a float tracer


@pytest.mark.parametrize("name", SPARSE)
def test_a_stored_mask_is_for_stateful_recipes_alone(name):
  recipe, w, keep = make(name), jnp.ones((8, 2)), jnp.ones((8, 2), bool)
  if not recipe.stateful:
    with pytest.raises(ValueError, match="derives its mask"):
      recipe.effective(w, jnp.int32(0), 0, keep)
    return
  for wrong, word in ((None, "no mask was given"), (keep.T, "has shape"), (w, "float32")):
    with pytest.raises(ValueError, match=word):
      recipe.effective(w, jnp.int32(0), 0, wrong)


def test_docstring_examples():
  for module in (custom, registry, errors):
    failed, tried = doctest.testmod(module)
    assert tried and not failed
