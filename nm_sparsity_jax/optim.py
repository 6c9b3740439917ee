"""The optax side: where the step comes from, and SR-STE's term.

gradients -> [sr_ste: + lambda * (1 - mask) * W] -> any optax optimizer -> updates
"""

from __future__ import annotations

from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import optax

from nm_sparsity_jax import witness
from nm_sparsity_jax.opt_states import (
  CountStepsState,
  SparseState,
  SrSteState,
  field,
  holds_sparse,
  is_part,
  named,
  read,
  sparse_state,
  unboxed,
  walk,
)
from nm_sparsity_jax.rules import Rules, require
from nm_sparsity_jax.stored import State, current
from nm_sparsity_jax.trees import flatten, map_with_names

__all__ = [
    "CountStepsState", "SparseState", "SrSteState", "add_sr_ste", "count_steps", "holds_sparse",
    "sr_ste", "step_count",
]  # fmt: skip


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

  witness.optimizes(require(rules, "nms.sr_ste(rules)"))

  def init(params):
    rules.assign(params, partial=is_part(params))
    return SrSteState(jnp.zeros((), jnp.int32))

  def update(updates, state, params=None, *, nm_state: State | None = None, **extra):
    del extra
    if params is None:
      raise ValueError("nms.sr_ste needs the parameters: tx.update(grads, opt_state, params).")
    witness.updated(rules, "nms.sr_ste", params)
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
    params: the parameters that they were taken at.
    rules: the rules.
    step: the step that they were taken at.
    state: stored masks (idp).
    scale: lambda is meant for the gradient of the mean loss per target; where the loss is that
      mean times a factor, the factor.
  """
  places = rules.assign(params, partial=is_part(params)).places
  wanted = {path: p for path, p in places.items() if p.recipe.lam}
  arrays = dict(flatten(params))

  def add(path, g):
    if path not in wanted:
      return g
    w, place = arrays[path], wanted[path]
    pruned = jnp.where(place.mask(w, *current(place, step, state)), jnp.zeros_like(w), w)
    lam = jnp.float32(place.recipe.lam * scale)
    return g + (lam * pruned.astype(jnp.float32)).astype(g.dtype)

  return map_with_names(add, grads) if wanted else grads


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


def step_count(opt_state: Any, rules: Rules | None = None) -> jax.Array:
  """Returns the number of optimizer updates applied, an int32 scalar: the `step`.

      step = nms.step_count(opt_state)

  It is the count of `nms.sparse`; else under `optax.MultiSteps` its `gradient_step`; else the count
  of `sr_ste` or `count_steps`; else the first `count` in the chain. (Counts that begin anew, of
  `optax.apply_every` and `reduce_on_plateau`, are skipped.)

  Args:
    opt_state: the state of any optax optimizer.
    rules: with rules, `opt_state` must be of an optimizer made by `nms.sparse(tx, rules)`; other
      rules raise. Pass them where a run goes on from a checkpoint.
  """
  witness.count_read()
  if rules is not None:
    require(rules, "nms.step_count(opt, rules)")
    return read(opt_state, rules.fingerprint)[0]
  sparse = sparse_state(opt_state)
  if sparse is not None:
    if not isinstance(sparse.count, jax.core.Tracer) and sparse.count < 0:
      raise ValueError(
        "the optimizer state has lost its count: under jit nms.sparse met rules or a state of "
        "another run, and the weights became NaN. Go back to the last checkpoint with finite "
        "weights, and give nms.sparse, nms.sparsify and nms.finalize the same Rules."
      )
    return sparse.count
  found = named(opt_state)
  _refuse_late_term(list(walk(opt_state)))
  multi = [s for s in found if isinstance(s, optax.MultiStepsState)]
  ours = [s for s in found if isinstance(s, SrSteState | CountStepsState)]
  if multi:
    inside = named(multi[0])
    outside = [s for s in ours if not any(s is t for t in inside)]
    if any(isinstance(s, SrSteState) for s in outside):
      raise ValueError(
        "nms.sr_ste stands outside optax.MultiSteps, where it counts and acts on every "
        "mini-step. Write optax.MultiSteps(optax.chain(nms.sr_ste(rules), ...), k)."
      )
    return unboxed(multi[0].gradient_step)
  for state in (*ours, *(s for s in found if type(s).__name__ not in _CYCLES)):
    count = jax.tree.leaves(field(state, "count"))
    if count and jnp.shape(count[0]) == ():
      return unboxed(count)
  raise ValueError(
    "the optimizer state has no step count: add one, "
    "optax.chain(nms.count_steps(), your_optimizer)."
  )


def _refuse_late_term(nodes: list[Any]) -> None:
  """Raises where `nms.sr_ste` stands behind a link that keeps moments of the gradient."""
  has_term = lambda link: any(isinstance(s, SrSteState) for s in walk(link))
  for links in (n for n in nodes if type(n) is tuple):
    late = next((i for i, link in enumerate(links) if has_term(link)), 0)
    moments = (x for link in links[:late] for x in jax.tree.leaves(link) if jnp.ndim(x))
    if next(moments, None) is not None:
      raise ValueError(
        f"nms.sr_ste is link {late + 1} of its optax.chain, behind a link that keeps moments of "
        "the gradient, so its term is added to the update with the wrong sign and scale: put it "
        "first, optax.chain(nms.sr_ste(rules), ...), or use nms.sparse(tx, rules)."
      )


_CYCLES = ("ApplyEvery", "ReduceLROnPlateauState")
