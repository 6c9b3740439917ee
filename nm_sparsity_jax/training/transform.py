"""One optax transformation that trains sparse weights in place.

    params = W~ of this step -> the user's loss -> gradients
    gradients -> [pull_back: to W, + SR-STE's term] -> wrapped optimizer -> W of the next step
                          |-> count + 1, stored masks
    W, count, masks -> W~ -> updates = W~ - params

The dense weights W of the sparse kernels lie in the state, as a master copy does in training of
mixed precision. So loss, evaluation, checkpoint and export see the weights that are deployed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding

from nm_sparsity_jax.core.gradients import wider
from nm_sparsity_jax.core.trees import flatten, map_with_names
from nm_sparsity_jax.training import stored
from nm_sparsity_jax.training.apply import check_floating
from nm_sparsity_jax.training.rules import Rules
from nm_sparsity_jax.training.sites import Site


class SparseState(NamedTuple):
  """The state of `nms.sparse`. All leaves are arrays.

  Attributes:
    count: the updates applied so far, an int32 scalar.
    fingerprint: `Rules.fingerprint` of the rules that made the state, an int32 scalar.
    dense: W of the sparse kernels, float32 where the parameter is shorter; `optax.MaskedNode` in
      place of all other parameters.
    masks: what `nms.init_state` keeps; `{}` where no recipe keeps a mask.
    inner_state: the state of the wrapped transformation.
  """

  count: Any
  fingerprint: Any
  dense: Any
  masks: Any
  inner_state: Any


def sparse(tx: optax.GradientTransformation, rules: Rules) -> optax.GradientTransformationExtraArgs:
  """Wraps an optimizer so that it trains N:M sparse weights, in any loop that takes an optimizer.

      tx = nms.sparse(optax.adamw(1e-2), rules)
      ...                                   # a program for dense weights, as it is
      print(nms.verify(params, rules))

  `params` are the effective weights W~ of the step, so a loss, an evaluation or an export takes
  them as they are, and at the end of the schedule they are n:m. With W the dense weights that lie
  in the state, t the updates so far and g the gradient at W~, an update does

      g_W = g * (mask + D(t) * (1 - mask)) or g, by the recipe's mode   + lam * (1 - mask) * W
      W   = W + update of `tx` for g_W at W
      W~  = W * (mask + D(t + 1) * (1 - mask)),   the new `params`

  It is the outermost transformation, but for `optax.MultiSteps` and `optax.apply_if_finite`, which
  stand around it: what they skip counts nothing. Clipping and schedules go inside.

  The first forward pass sees the weights that you start from, also with `dense=0`. They are taken
  as W at the first update, so weights may be loaded after `init`. `optax.apply_updates` adds
  W~ - params to params, so a weight that is kept may differ from W~ in its last bit. Zeros are
  exact.

  Args:
    tx: any optax optimizer.
    rules: what becomes sparse, and how.

  Returns:
    A transformation whose state is a `SparseState`. Its `update` needs the parameters.
  """
  # MultiSteps and masked hand extra arguments on, which not every optimizer takes.
  inner = optax.with_extra_args_support(tx)

  def init(params):
    nonlocal rules
    check_whole(params, rules)
    sites = rules.assign(params).places
    rules = _with_shardings_of(params, rules)
    dense = map_with_names(lambda p, w: _master(p, w) if p in sites else _NONE, params)
    with _relaxed():
      inner_state = inner.init(params)
    if isinstance(inner_state, optax.MultiStepsState | optax.ApplyIfFiniteState):
      raise ValueError(
        f"nms.sparse is wrapped around a {type(inner_state).__name__}, and would count updates "
        "that it skips: put nms.sparse inside, as in optax.MultiSteps(nms.sparse(tx, rules), k)."
      )
    masks = stored.init_state(params, rules)
    return SparseState(jnp.int32(0), jnp.int32(rules.fingerprint), dense, masks, inner_state)

  def update(updates, state, params=None, **extra):
    if params is None:
      raise ValueError("nms.sparse needs the parameters: tx.update(grads, opt_state, params).")
    sites = rules.assign(params).places
    seen, grads = dict(flatten(params)), dict(flatten(updates))
    step = _checked_step(state, rules, sites)
    dense, masks = _at_start(state, sites, seen)
    pulled = {}
    for path, site in sites.items():
      at, mask = stored.current(site, step, masks)
      pulled[path] = site.recipe.pull_back(grads[path], dense[path], seen[path], at, mask)
    # Weight decay and trust ratios of the wrapped optimizer are those of W, not of W~.
    at_w = map_with_names(lambda p, x: dense[p].astype(x.dtype) if p in sites else x, params)
    full = map_with_names(lambda p, g: pulled.get(p, g), updates)
    with _relaxed():
      moves, inner_state = inner.update(full, state.inner_state, at_w, **extra)
    moved = {p: dense[p] + u.astype(dense[p].dtype) for p, u in flatten(moves) if p in sites}
    count = jnp.where(step < 0, step, step + 1)  # below 0: the rules are others
    if masks:
      # The gradient at W~ without SR-STE's term: snip scores |g * W|.
      masks = stored.renewed_masks(sites, masks, moved, count, grads, dense)

    def change(path, u):
      if path not in sites:
        return u
      now = sites[path].effective(moved[path], *stored.current(sites[path], count, masks))
      old = seen[path]
      move = now - old.astype(now.dtype)
      # Zeros are exact only where the update is not shorter than the parameter.
      return move.astype(old.dtype) if grads[path].dtype == old.dtype else move

    kept = map_with_names(lambda path, _: moved[path], state.dense)
    new = SparseState(count, state.fingerprint, kept, masks, inner_state)
    return map_with_names(change, moves), new

  return optax.GradientTransformationExtraArgs(init, update)


def dense_params(params: Any, opt_state: Any) -> Any:
  """Returns the dense weights W of a run whose optimizer is `nms.sparse(tx, rules)`.

      w = nms.dense_params(params, opt_state)   # to average them, or to look at what is pruned

  What no rule names is passed through. A kernel is float32 where its parameter is shorter.

  Args:
    params: the parameters, W~.
    opt_state: the optimizer's state, which holds a `SparseState`.
  """
  state = sparse_state(opt_state)
  begins = scalar(state.count) == 0  # the weights may have been loaded since
  kept = dict(flatten(state.dense))
  pick = lambda p, w: jnp.where(begins, w.astype(kept[p].dtype), kept[p]) if p in kept else w
  return map_with_names(pick, params)


def sparse_state(opt_state: Any) -> SparseState:
  """Returns the one state of `nms.sparse` in an optimizer state; raises where there is not one."""
  found = states(opt_state, SparseState)
  if len(found) != 1:
    raise ValueError(
      f"the optimizer state holds {len(found)} states of nms.sparse, not one: make the optimizer "
      "by tx = nms.sparse(tx, rules) and pass the state of that tx."
    )
  return found[0]


def states(opt_state: Any, *kinds: type) -> list[Any]:
  """Returns the states of these types in an optimizer state, outer ones alone, in order."""
  is_one = lambda x: isinstance(x, kinds)
  return [x for x in jax.tree.leaves(opt_state, is_leaf=is_one) if is_one(x)]


def check_whole(params: Any, rules: Rules) -> None:
  """Refuses parameters that a wrapper such as `optax.masked` hides from what the rules name."""
  is_hidden = lambda x: isinstance(x, optax.MaskedNode)
  for path, leaf in flatten(params, is_hidden):
    if is_hidden(leaf) and rules.find(path):
      raise ValueError(
        f"a rule names {path!r}, but a wrapper such as optax.masked hides it here: put "
        "the wrapper inside, as in nms.sparse(optax.masked(tx, mask), rules)."
      )


def scalar(count: Any) -> jax.Array:
  """Returns a count as int32, out of the box that `nnx.Optimizer` keeps it in."""
  (found,) = jax.tree.leaves(count)
  return jnp.asarray(found, jnp.int32)


_NONE = optax.MaskedNode()


def _master(path: str, w: jax.Array) -> jax.Array:
  """Returns a copy, since trainers donate both, in float32 or the longer dtype of the parameter."""
  check_floating(path, w)
  return jnp.array(w, wider(w.dtype), copy=True)


def _with_shardings_of(params: Any, rules: Rules) -> Rules:
  # A tracer does not tell how its array is sharded, and a TPU's kernel must know it.
  known = lambda w: isinstance(w, jax.Array) and not isinstance(w, jax.core.Tracer)
  shardings = jax.tree.map(lambda w: w.sharding if known(w) else None, params)
  is_named = any(isinstance(s, NamedSharding) for s in jax.tree.leaves(shardings))
  return rules.with_shardings(shardings) if is_named else rules


def _checked_step(state: SparseState, rules: Rules, sites: Mapping[str, Site]) -> jax.Array:
  """Returns the count of `state`; -1, which makes weights NaN, where other rules made it.

  Raises where that is known: while nothing is traced, and where the state is of other kernels.
  """
  same = (state.fingerprint == rules.fingerprint) & (state.count >= 0)
  stateful = {path for path, site in sites.items() if site.recipe.stateful}
  kernels = dict(flatten(state.dense)).keys(), stored.stored_masks(state.masks).keys()
  # Names of kernels are static, so this raises under jit, too.
  others = kernels != (sites.keys(), stateful)
  if others or (not isinstance(same, jax.core.Tracer) and not bool(same)):
    raise ValueError(
      "the optimizer state was made by nms.sparse with other rules than these: go on with the "
      "rules of its checkpoint, or start a new run by tx.init(params)."
    )
  return jnp.where(same, state.count, jnp.int32(-1))


def _at_start(
  state: SparseState, sites: Mapping[str, Site], params: Mapping[str, Any]
) -> tuple[dict[str, jax.Array], Any]:
  """Returns W by path, and the stored masks; before the first update they are of the parameters.

  These may have been loaded after `init`.
  """
  begins = state.count == 0
  kept = dict(flatten(state.dense))
  dense = {path: jnp.where(begins, params[path].astype(w.dtype), w) for path, w in kept.items()}
  if not state.masks:
    return dense, state.masks
  first = lambda: stored.first_masks(sites, dense)
  return dense, jax.lax.cond(begins, first, lambda: state.masks)


@contextlib.contextmanager
def _relaxed():
  """Allows standard promotion, for code that is not ours."""
  with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
    yield
