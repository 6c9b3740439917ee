"""Links of an optax chain, for those who compose by hand: SR-STE's term, and a count of steps.

gradients -> [sr_ste: + lambda * (1 - mask) * W] -> any optax optimizer -> updates
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from nm_sparsity_jax.core.trees import flatten, map_with_names
from nm_sparsity_jax.training.rules import Rules
from nm_sparsity_jax.training.stored import State, current
from nm_sparsity_jax.training.transform import SparseState, check_whole, scalar, states


class SrSteState(NamedTuple):
  """The state of `nms.sr_ste`, as `CountStepsState`."""

  count: jax.Array


class CountStepsState(NamedTuple):
  """The state of `nms.count_steps`.

  Attributes:
    count: the updates applied so far, an int32 scalar.
  """

  count: jax.Array


def sr_ste(rules: Rules) -> optax.GradientTransformationExtraArgs:
  """Adds lambda * (1 - mask) * W to the gradient of every weight whose recipe asks for it.

  Put it first in the chain, before anything that scales or accumulates the gradient's moments,
  and inside `optax.MultiSteps`, so that it acts once per optimizer step:

      optax.MultiSteps(optax.chain(nms.sr_ste(rules), optax.adamw(1e-3)), every_k_schedule=4)

  The mask is the one that the forward pass of this step applied: it is taken from the same
  weights at the same step (the count of this transformation). Without an SR-STE rule it changes
  nothing but still counts. Stored masks (idp) come as an extra argument:

      tx.update(grads, opt_state, params, nm_state=state)

  Args:
    rules: what is sparse, and how.

  Reference: Zhou et al., ICLR 2021, arXiv:2102.04010, equation 8.
  """

  def init(params):
    check_whole(params, rules)
    rules.assign(params)
    return SrSteState(jnp.zeros((), jnp.int32))

  def update(updates, state, params=None, *, nm_state: State | None = None, **extra):
    del extra
    if params is None:
      raise ValueError("nms.sr_ste needs the parameters: tx.update(grads, opt_state, params).")
    updates = add_sr_ste(updates, params, rules, state.count, nm_state)
    return updates, SrSteState(state.count + 1)

  return optax.GradientTransformationExtraArgs(init, update)


def add_sr_ste(
  grads: Any,
  params: Any,
  rules: Rules,
  step: jax.Array | int,
  state: State | None = None,
  scale: jax.Array | float = 1.0,
) -> Any:
  """Returns g + scale * lambda * (1 - mask) * W where a recipe asks for it, as `sr_ste` does.

  Args:
    grads: gradients, like `params`.
    params: the dense parameters W.
    rules: the rules.
    step: the step that the gradients were taken at.
    state: stored masks (idp).
    scale: lambda is meant for the gradient of the mean loss per target; where the loss is that
      mean times a factor, the factor.
  """
  sites, arrays = rules.assign(params).places, dict(flatten(params))

  def add(path, g):
    site = sites.get(path)
    if site is None or not site.recipe.lam:
      return g
    w = arrays[path]
    # The mask of the forward pass of this step, made anew: nothing carries it here.
    pruned = jnp.where(site.mask(w, *current(site, step, state)), jnp.zeros_like(w), w)
    # In float32, since lambda * W may be a subnormal of a shorter dtype.
    lam = jnp.float32(site.recipe.lam * scale)
    return g + (lam * pruned.astype(jnp.float32)).astype(g.dtype)

  return map_with_names(add, grads)


def count_steps() -> optax.GradientTransformation:
  """Counts updates and changes nothing: for optimizers that keep no count, such as plain SGD.

      tx = optax.chain(nms.count_steps(), optax.sgd(0.1))
      nms.step_count(tx.init(params))  # 0

  Give it no arguments. `nms.step_count` finds its count.
  """

  def init(params):
    del params
    return CountStepsState(jnp.zeros((), jnp.int32))

  def update(updates, state, params=None):
    del params
    return updates, CountStepsState(state.count + 1)

  return optax.GradientTransformation(init, update)


def step_count(opt_state: Any) -> jax.Array:
  """Returns the number of optimizer updates applied, an int32 scalar: the `step`.

      step = nms.step_count(opt_state)

  It is the count of `nms.sparse`; else under `optax.MultiSteps` its `gradient_step`; else the count
  of `sr_ste` or `count_steps`; else the first `count` in the chain. (Counts that begin anew, of
  `optax.apply_every` and `reduce_on_plateau`, are skipped.)

  Args:
    opt_state: the state of any optax optimizer.
  """
  # Outer counts first: an optimizer inside may count mini-steps, or be skipped.
  for kinds, field in (
    ((SparseState,), "count"),
    ((optax.MultiStepsState,), "gradient_step"),
    ((SrSteState, CountStepsState), "count"),
  ):
    if found := states(opt_state, *kinds):
      return scalar(getattr(found[0], field))
  for path, count in optax.tree.get_all_with_path(opt_state, "count"):
    begins_anew = getattr(path[-1], "tuple_name", "") in ("ApplyEvery", "ReduceLROnPlateauState")
    if not begins_anew and len(jax.tree.leaves(count)) == 1:
      return scalar(count)
  raise ValueError(
    "the optimizer state has no step count: add one, "
    "optax.chain(nms.count_steps(), your_optimizer)."
  )
