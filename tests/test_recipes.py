"""Recipes by name: the package's own and those that a user registers, and what is refused."""

from unittest import mock

import pytest

import nm_sparsity_jax as nms
from nm_sparsity_jax import recipes
from nm_sparsity_jax.recipes import RECIPES

PHASES = nms.Phases(total=100, dense=10, finetune=20)
PATH = ((10, "4:8", 1.0), (40, "1:8", 0.5))


def make(name, pattern="1:8", phases=PHASES, **fields):
  if name == "custom":
    fields = {"path": PATH, **fields}
  return nms.recipe(name, pattern=pattern, phases=phases, **fields)


@pytest.mark.parametrize("name", RECIPES)
def test_one_set_of_settings_makes_every_recipe(name):
  phases = nms.Phases(total=100) if name == "hold" else PHASES
  recipe = make(name, phases=phases, beta=None, gradient=None)
  assert type(recipe) is RECIPES[name] and recipe.name == name
  assert recipe.lam == (2e-4 if name in ("sr_ste", "idp") else 0)


@pytest.mark.parametrize(
  "name, fields, word",
  [
    ("mdgf_exp", {}, "choose one of dense, one_shot"),
    ("sr_ste", {"phases": 100}, "phases=100"),
    ("mdgf_linear", {"beta": 0.0}, "beta=0.0"),
    ("sdgf_stepwise", {"beta": 0.1}, "needs decay_kind"),
    ("mdgf_linear", {"phases": nms.Phases(total=100, dense=70)}, "give beta"),
    ("idp", {"phases": nms.Phases(total=8, dense=3, finetune=2)}, "4 levels"),
    ("one_shot", {"gradient": "ste"}, "gradient='ste'"),
    ("sdgf_geometric", {"k": 3}, "power of two"),
    ("sr_ste", {"lam": -1.0}, "lam=-1.0"),
    ("sr_ste", {"decoupled": 1}, "decoupled=1"),
    ("sr_ste", {"beta": 0.5}, "'sr_ste' got an unexpected .*'beta'"),
    ("idp", {"lam": float("inf")}, "lam=inf"),
    ("snip", {"batches": 71}, "from 1 to 70"),
    ("custom", {"path": ((9, "4:8", 1.0),)}, "sparsify phase"),
    ("custom", {"path": ((20, "4:8", 1.0), (20, "1:8", 0.0))}, "rising steps"),
    ("custom", {"path": ((10, "4:8", 1.5),)}, r"D in \[0, 1\]"),
  ],
)
def test_a_wrong_field_is_named(name, fields, word):
  with pytest.raises(ValueError, match=word):
    make(name, **fields)


# --- recipes of a user ----------------------------------------------------------------------------


def defined(name, called="Other"):
  """A class as a module defines it, anew with each call."""
  return type(called, (nms.Recipe,), {"name": name})


@mock.patch.dict(RECIPES)  # puts them back
def test_a_name_is_taken_once_by_a_frozen_dataclass():
  recipes.register(defined("mine"))
  again = defined("mine")  # a cell of a notebook, or importlib.reload
  assert recipes.register(again) is again is RECIPES["mine"]
  for cls in (defined("mine", called="Third"), nms.NM, defined("a b"), defined(None)):
    with pytest.raises(ValueError, match="register.*give"):
      recipes.register(cls)
