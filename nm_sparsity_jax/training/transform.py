"""The optax transformation that trains sparse weights in place, and links for other loops.

    params = W~ of this step -> the user's loss -> gradients
    gradients -> [pull_back: to W, + SR-STE's term] -> wrapped optimizer
    W, its updates, SR-STE's term where it is decoupled -> W of the next step
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
from jax.sharding import NamedSharding, PartitionSpec

from nm_sparsity_jax.core.gradients import wider
from nm_sparsity_jax.core.schedules import NO_STEP
from nm_sparsity_jax.core.trees import flatten, map_with_names
from nm_sparsity_jax.recipes.levels import when
from nm_sparsity_jax.training import rules_text, stored
from nm_sparsity_jax.training.rules import Rules
from nm_sparsity_jax.training.sites import Site

# In place of W where no rule names a parameter: a node without leaves, so all leaves are arrays.
_NONE = optax.MaskedNode()
# States of optimizers that skip updates.
SKIPPING = optax.MultiStepsState, optax.ApplyIfFiniteState
# States of optimizers that move parameters away from what another one makes of them.
MOVING = (
  optax.LookaheadState,
  optax.contrib.MechanicState,
  optax.contrib.SAMState,
  optax.contrib.ScheduleFreeState,
)


class SparseState(NamedTuple):
  """The state of `nms.sparse`. All leaves are arrays.

  Attributes:
    count: the updates applied so far, an int32 scalar.
    rules: the text of the rules that made the state, uint8; `rules_text.unpack` reads it.
    dense: W of the sparse kernels, float32 where the parameter is narrower; `optax.MaskedNode` in
      place of all other parameters.
    masks: what `nms.init_state` keeps; `{}` where no recipe keeps a mask.
    inner_state: the state of the wrapped transformation.
  """

  count: Any
  rules: Any
  dense: Any
  masks: Any
  inner_state: Any


def sparse(
  tx: optax.GradientTransformation,
  rules: Rules,
  learning_rate: optax.ScalarOrSchedule | None = None,
) -> optax.GradientTransformationExtraArgs:
  """Wraps an optimizer so that it trains N:M sparse weights, in any loop that takes an optimizer.

      tx = nms.sparse(optax.adamw(1e-2), rules)
      ...                                   # a program for dense weights, as it is
      print(nms.verify(params, rules))

  `params` are the effective weights W~ of the step, so a loss, an evaluation or an export takes
  them as they are, and at the end of the schedule they are n:m. The state holds the dense weights
  W. The mask marks the n weights of each group that are kept. D(t) in [0, 1] is the recipe's decay
  at update t: 1 is dense, 0 is sparse. lam weighs SR-STE's term, and g is the gradient at W~. An
  update does

      g_W = pull_back(g) + lam * (1 - mask) * W
      W   = W + update of `tx` for g_W at W
      W~  = W * (mask + D(t + 1) * (1 - mask)),   the new `params`

  where pull_back(g) is g * (mask + D(t) * (1 - mask)), or g itself, by the recipe's gradient mode.
  A `decoupled` term is in the second line instead: W also loses eta(t) * lam * (1 - mask) * W. Of
  `s_ste` W~ is another function of W: see `nms.recipes.SSte`.

  Transformations that move parameters go inside: clipping, schedules, `optax.flatten`, and
  `mechanize`, `sam` and `schedule_free` of `optax.contrib`. They then move W. `sam` takes two
  updates a step, and both count. `schedule_free` averages W.

  `optax.MultiSteps` and `optax.apply_if_finite` go around `sparse`. They skip an update or pass it
  on whole, and a skipped update does not count. `optax.masked`, `optax.multi_transform` and
  `optax.inject_hyperparams` may go inside or around. Nothing else goes around: a later link of a
  chain, for example, changes the updates, and the parameters are then not W~. `sparse` cannot see
  that, but `nms.step_count` and `nms.dense_params` refuse the states of optax' wrappers.
  `nms.verify` says "NOT n:m" if a zero of W~ is lost by that.

  One `tx` is for one mesh of devices, since `init` notes how parameters are sharded.

  The first forward pass sees the weights that you start from, also with `dense=0`. They are taken
  as W at the first update, so weights may be loaded after `init`. `optax.apply_updates` adds
  W~ - params to params, so a weight that is kept may differ from W~ in its last bit. Zeros are
  exact, since no update is narrower than its parameter: where the dtype of the gradient is another
  one, the update has that of W.

  Args:
    tx: any optax optimizer.
    rules: what becomes sparse, and how.
    learning_rate: eta, a number or a schedule (update t -> number): that of `tx`, or another.
      Only a `decoupled` term needs it.

  Returns:
    A transformation whose state is a `SparseState`. Its `update` needs the parameters.
  """
  if learning_rate is None and any(recipe.decoupled for recipe in rules.places.values()):
    raise ValueError(
      "sr_ste(decoupled=True) decays pruned weights by lam times a learning rate: pass it, as in "
      "nms.sparse(optax.adamw(rate), rules, learning_rate=rate)."
    )
  # MultiSteps and masked hand extra arguments on, which not every optimizer takes.
  inner = optax.with_extra_args_support(tx)

  def init(params):
    # Under jit `update` cannot see how arrays are sharded, so `init` notes it. It changes the speed
    # of masks, and no bit.
    nonlocal rules
    sites = rules.assign(params).sites
    for phases in {site.recipe.phases: None for site in sites.values()}:
      if phases.dense == phases.total:
        rules.warn(f"{phases} has no step that is sparse: the last update prunes at one stroke")
      elif phases.finetune < phases.total < 20:
        rules.warn(f"{phases} count updates of the optimizer, not epochs: so few?")
    # A tracer does not tell how its array is sharded.
    known = rules.with_shardings(jax.tree.map(lambda w: getattr(w, "sharding", None), params))
    rules = known if known.shardings else rules

    def master(path, w):
      if path not in sites:
        return _NONE
      # Of int8 weights, W would be float32 ones.
      if not jnp.issubdtype(w.dtype, jnp.floating):
        raise ValueError(
          f"{path!r} has dtype {w.dtype}, and masks need real floating-point weights: leave it out "
          "of the rules, or convert it, such as w.astype(jnp.float32)."
        )
      # A copy, since a trainer donates params and state, and one buffer cannot be donated twice.
      return jnp.array(w, wider(w.dtype), copy=True)

    dense = map_with_names(master, params)
    # A box of flax around nothing is a leaf to nnx, and has no shape.
    is_empty = lambda x: not jax.tree.leaves(x)
    dense = jax.tree.map(lambda x: _NONE if is_empty(x) else x, dense, is_leaf=is_empty)
    with _relaxed():
      inner_state = inner.init(params)
    if found := states(inner_state, *SKIPPING):
      raise ValueError(
        f"nms.sparse is wrapped around a {type(found[0]).__name__}, and would count updates "
        "that it skips: put nms.sparse inside, as in optax.MultiSteps(nms.sparse(tx, rules), k)."
      )
    if states(inner_state, SrSteState):
      raise ValueError(
        "nms.sparse adds SR-STE's term by itself: leave nms.sr_ste out of its chain."
      )
    if states(inner_state, optax.LookaheadState):
      raise ValueError(
        "optax.lookahead trains fast and slow parameters, and nms.sparse has one W: leave one out."
      )
    masks = stored.init_state(params, rules)
    # An array, so that every trainer saves it, and a checkpoint knows its own rules.
    text = jnp.asarray(rules_text.pack(rules.text))
    if known.shardings:  # it lies where the parameters do
      mesh = next(iter(known.shardings.values())).mesh
      text = jax.device_put(text, NamedSharding(mesh, PartitionSpec()))
    return SparseState(jnp.int32(0), text, dense, masks, inner_state)

  def update(updates, state, params=None, **extra):
    if params is None:
      raise ValueError("nms.sparse needs the parameters: tx.update(grads, state, params).")
    if functions := [name for name, value in extra.items() if callable(value)]:
      raise ValueError(
        f"{functions[0]}=: the optimizer would call it at the dense weights W, and the network "
        "computes with W~: take one that needs no such function (of sam: opaque_mode=False)."
      )
    # The gradient at W.
    sites = rules.assign(params).sites
    step = _checked_step(state, rules, sites)
    effective = dict(flatten(params))
    grads = dict(flatten(updates))
    w_by_path = _dense(state, params)
    masks = state.masks
    if masks:
      # Parameters may be loaded after `init`, so the first update makes the masks anew.
      first = lambda: stored.init_state(_replaced(params, w_by_path), rules)
      masks = when(scalar(state.count) == 0, first, lambda: state.masks)
    g_w, decays = {}, {}
    for path, site in sites.items():
      seen = w_by_path[path], effective[path], *stored.current(site, step, masks)
      g_w[path] = site.recipe.pull_back(grads[path], *seen)
      if site.recipe.decoupled:
        term = site.recipe.pruned_term(*seen)
        decays[path] = _rate(learning_rate, step).astype(term.dtype) * term

    # The inner update. Its weight decay and trust ratios are those of W, not of W~.
    w_tree = _replaced(params, {p: w.astype(effective[p].dtype) for p, w in w_by_path.items()})
    with _relaxed():
      g_tree = _replaced(updates, g_w)
      w_updates, inner_state = inner.update(g_tree, state.inner_state, w_tree, **extra)
    # W may be wider than the parameter: a narrow W would lose updates that are below its last bit.
    new_w = {
      p: w_by_path[p] + u.astype(w_by_path[p].dtype) for p, u in flatten(w_updates) if p in sites
    }
    new_w |= {path: new_w[path] - decay for path, decay in decays.items()}
    count = jnp.where(step < 0, step, step + 1)  # below 0: the rules are others

    # The stored masks.
    if masks:
      # The gradient at W~ without SR-STE's term: snip scores |g * W|.
      after, before = _replaced(params, new_w), _replaced(params, w_by_path)
      masks = stored.update_state(masks, after, rules, count, updates, before)

    # W~ - params.
    moves = {}
    for path, site in sites.items():
      now = site.effective(new_w[path], *stored.current(site, count, masks))
      old = effective[path]
      move = now - old.astype(now.dtype)
      # A move in the dtype of a narrower gradient would leave a rest where W~ is 0.
      moves[path] = move.astype(old.dtype) if grads[path].dtype == old.dtype else move

    dense = _replaced(state.dense, new_w)
    new_state = SparseState(count, state.rules, dense, masks, inner_state)
    return _replaced(w_updates, moves), new_state

  # With extra arguments, as line searches and `optax.contrib.reduce_on_plateau` need the loss.
  return optax.GradientTransformationExtraArgs(init, update)


def dense_params(params: Any, opt_state: Any) -> Any:
  """Returns the dense weights W of a run whose optimizer is `nms.sparse(tx, rules)`.

      w = nms.dense_params(params, opt_state)   # to average them, or to look at what is pruned

  What no rule names is passed through. A kernel is float32 where its parameter is narrower.

  Args:
    params: the parameters, W~.
    opt_state: the optimizer's state, which holds a `SparseState`.
  """
  found = states(opt_state, SparseState)
  if len(found) != 1:
    raise ValueError(
      f"the optimizer state holds {len(found)} states of nms.sparse, not one: make the optimizer "
      "by tx = nms.sparse(tx, rules) and pass the state of that tx."
    )
  return _replaced(params, _dense(found[0], params))


def states(opt_state: Any, *kinds: type) -> list[Any]:
  """Returns the states of these types in an optimizer state, outer ones alone, in order.

  Refuses what must not stand around `nms.sparse`: it cannot look outside itself.
  """
  is_one = lambda x: isinstance(x, kinds)
  if SparseState in kinds:
    for around in states(opt_state, *MOVING):
      if states(tuple(around), SparseState):
        raise ValueError(
          f"a {type(around).__name__} is around the state of nms.sparse, and its wrapper moves the "
          "parameters away from W~: put it inside, as in nms.sparse(wrapper(tx), rules), or leave "
          "it out where it is optax.lookahead."
        )
  return [x for x in jax.tree.leaves(opt_state, is_leaf=is_one) if is_one(x)]


def scalar(count: Any) -> jax.Array:
  """Returns a count as int32, out of the box that `nnx.Optimizer` keeps it in."""
  (found,) = jax.tree.leaves(count)
  return jnp.asarray(found, jnp.int32)


# --- links of an optax chain, for those who compose by hand -----------------------------------


class SrSteState(NamedTuple):
  """The state of `nms.sr_ste`: the updates applied so far, an int32 scalar."""

  count: jax.Array


def sr_ste(
  rules: Rules, learning_rate: optax.ScalarOrSchedule | None = None
) -> optax.GradientTransformationExtraArgs:
  """Adds lambda * (1 - mask) * W to the gradient of every weight whose recipe asks for it.

  Put it first in the chain, before anything that scales or accumulates the gradient's moments,
  and inside `optax.MultiSteps`, so that it acts once per optimizer step:

      optax.MultiSteps(optax.chain(nms.sr_ste(rules), optax.adamw(1e-3)), every_k_schedule=4)

  A `decoupled` term is no gradient: the last link takes it off, times the learning rate.

      optax.chain(optax.adamw(rate), nms.sr_ste(rules, learning_rate=rate))

  The mask is the one that the forward pass of this step applied: it is taken from the same
  weights at the same step (the count of this transformation). Without an SR-STE rule it changes
  nothing but still counts. Stored masks (idp) come as an extra argument:

      tx.update(grads, opt_state, params, nm_state=state)

  Args:
    rules: what is sparse, and how.
    learning_rate: as in `sparse`; None = this link is the first one.

  Reference: Zhou et al., ICLR 2021, arXiv:2102.04010, equation 8.
  """

  def init(params):
    recipes = [site.recipe for site in rules.assign(params).sites.values() if site.recipe.lam]
    if recipes and all(r.decoupled == (learning_rate is None) for r in recipes):
      raise ValueError(
        "nms.sr_ste would add nothing: a decoupled term is the last link of the chain, "
        "nms.sr_ste(rules, learning_rate=rate), and a term in the gradient the first, "
        "nms.sr_ste(rules)."
      )
    return SrSteState(jnp.int32(0))

  def update(updates, state, params=None, *, nm_state: stored.State | None = None, **extra):
    decoupled = learning_rate is not None
    scale = -_rate(learning_rate, state.count) if decoupled else 1.0
    updates = add_sr_ste(updates, params, rules, state.count, nm_state, scale, decoupled)
    return updates, SrSteState(state.count + 1)

  return optax.GradientTransformationExtraArgs(init, update)


def add_sr_ste(
  tree: Any,
  params: Any,
  rules: Rules,
  step: jax.Array | int,
  state: stored.State | None = None,
  scale: jax.Array | float = 1.0,
  decoupled: bool = False,
) -> Any:
  """Returns x + scale * lambda * (1 - mask) * W where a recipe asks for it, as `sr_ste` does.

  Args:
    tree: x, like `params`: gradients; of decoupled recipes updates, or updated parameters.
    params: the dense parameters W.
    rules: the rules.
    step: the step that the gradients were taken at.
    state: stored masks (idp).
    scale: lambda is meant for the gradient of the mean loss per target; where the loss is that
      mean times a factor, the factor. Of decoupled recipes minus the learning rate.
    decoupled: adds the terms of decoupled recipes, and of no others.
  """
  sites, arrays = rules.assign(params).sites, dict(flatten(params))

  def add(path, x):
    site = sites.get(path)
    if site is None or not site.recipe.lam or site.recipe.decoupled != decoupled:
      return x
    w = arrays[path]
    # The mask of the forward pass of this step, made anew: nothing carries it here.
    kept = site.mask(w, *stored.current(site, step, state))
    pruned = jnp.where(kept, jnp.zeros_like(w), w)
    # In float32 at least, since lambda * W may be a subnormal of a narrower dtype.
    wide = wider(w.dtype)
    lam = jnp.asarray(site.recipe.lam * scale, wide)
    return x + (lam * pruned.astype(wide)).astype(x.dtype)

  return map_with_names(add, tree)


def count_steps() -> optax.GradientTransformation:
  """Counts updates and changes nothing: for optimizers that keep no count, such as plain SGD.

      tx = optax.chain(nms.count_steps(), optax.sgd(0.1))
      nms.step_count(tx.init(params))  # 0

  Put it first in the chain: `nms.step_count` takes the first count there.
  """
  return optax.scale_by_schedule(lambda count: 1.0)


def step_count(opt_state: Any) -> jax.Array:
  """Returns the number of optimizer updates applied, an int32 scalar: the `step`.

      step = nms.step_count(opt_state)

  It is the count of `nms.sparse`; else under `optax.MultiSteps` its `gradient_step`; else the count
  of `sr_ste`; else the first `count` in the chain. (Counts that begin anew, of `optax.apply_every`
  and `reduce_on_plateau`, are skipped.)

  Args:
    opt_state: the state of any optax optimizer.
  """
  # Outer counts first: an optimizer inside may count mini-steps, or be skipped.
  for kinds, field in (
    ((SparseState,), "count"),
    ((optax.MultiStepsState,), "gradient_step"),
    ((SrSteState,), "count"),
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


# --- helpers of `sparse` ----------------------------------------------------------------------


def _checked_step(state: SparseState, rules: Rules, sites: Mapping[str, Site]) -> jax.Array:
  """Returns the count of `state`; NO_STEP where other rules made it.

  Raises where that is known: while nothing is traced, and where the state is of other kernels.
  """
  text = rules_text.pack(rules.text)
  same = jnp.array_equal(state.rules, text) & (state.count >= 0)
  # Names of kernels are static, so this raises under jit, too.
  others = dict(flatten(state.dense)).keys() != sites.keys()
  if others or (not isinstance(same, jax.core.Tracer) and not bool(same)):
    is_known = not isinstance(state.rules, jax.core.Tracer)
    theirs = repr(rules_text.unpack(state.rules)) if is_known else "others"
    raise ValueError(
      f"nms.sparse has the rules {rules.text!r}, but the optimizer state was made by {theirs}: go "
      "on with those, or start a new run by tx.init(params)."
    )
  return jnp.where(same, state.count, NO_STEP)


def _rate(learning_rate: Any, count: jax.Array) -> jax.Array:
  with _relaxed():
    return jnp.float32(learning_rate(count) if callable(learning_rate) else learning_rate)


def _dense(state: SparseState, params: Any) -> dict[str, jax.Array]:
  """Returns W by path; before the first update, of parameters that may have been loaded since."""
  begins, now = scalar(state.count) == 0, dict(flatten(params))
  return {p: jnp.where(begins, now[p].astype(w.dtype), w) for p, w in flatten(state.dense)}


def _replaced(tree: Any, new: Mapping[str, jax.Array]) -> Any:
  """Returns the tree with other leaves at some paths."""
  return map_with_names(lambda path, x: new.get(path, x), tree)


@contextlib.contextmanager
def _relaxed():
  """Allows standard promotion, for code that is not ours."""
  with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
    yield
