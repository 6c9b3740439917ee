"""The recipes: (weight, step) -> effective weight. Pure, traced step, one compilation.

    params, step -> rules -> [recipe: pattern and D now -> mask -> W~] -> layer -> loss

Each recipe is a frozen dataclass that can be hashed, and composes three things: levels (which
pattern holds from which step on), a curve (D) and a gradient mode. What all share is written once,
in `Recipe`: D = 1 before `dense` steps, so every recipe equals dense there; D = 0 from the
fine-tune phase on, so every one (`Dense` apart) is binary n:m there.

With Phi the magnitude mask of the pattern that holds at step t and j = t - dense,

    W~ = W * (Phi + D(j) * (1 - Phi)),

but for `s_ste`, which has a soft threshold in place of a mask.

Reference of all but the baselines: Bambhaniya et al., "Progressive Gradient Flow for Robust
N:M Sparsity Training in Transformers", CPAL 2025, arXiv:2402.04744.
"""

import importlib
import pkgutil

from nm_sparsity_jax.core.schedules import Curve
from nm_sparsity_jax.recipes.base import Recipe
from nm_sparsity_jax.recipes.baselines import Dense, SrSte
from nm_sparsity_jax.recipes.custom import Custom
from nm_sparsity_jax.recipes.progressive import (
  MdgfExponential,
  MdgfLinear,
  SdgfGeometric,
  SdgfStepwise,
)
from nm_sparsity_jax.recipes.registry import RECIPES, recipe, register
from nm_sparsity_jax.recipes.soft import SSte
from nm_sparsity_jax.recipes.stateful import Hold, Idp, OneShot, Snip

__all__ = [
    "RECIPES", "Curve", "Custom", "Dense", "Hold", "Idp", "MdgfExponential", "MdgfLinear",
    "OneShot", "Recipe", "SSte", "SdgfGeometric", "SdgfStepwise", "Snip", "SrSte",
    "recipe", "register",
]  # fmt: skip

# In the order in which messages list them.
for _cls in (
    Dense, OneShot, SrSte, SSte, MdgfLinear, MdgfExponential, SdgfStepwise, SdgfGeometric, Custom,
    Snip, Idp, Hold,
):  # fmt: skip
  register(_cls)
# A recipe in a module of its own needs no other line here: its class says `@register`.
for _module in pkgutil.iter_modules(__path__):
  importlib.import_module(f"{__name__}.{_module.name}")
