"""What to watch during a run: density, D, pattern, flips, and the variances of figure 3.

    params, rules, step, state, gradients, optimizer state -> [metrics] -> scalars -> a writer

Pure functions for use inside jit: the step is traced and one compilation serves all steps. Give
them the parameters, the step and the state of one forward pass, and the gradients of that pass.
`summary` is all of them at once, under flat names. It takes the masks anew and reads each sparse
kernel a few times, so a trainer samples it. `before` and `after` are the two halves of such a
sample, one on each side of an optimizer update: compile them as programs of their own, and the
train step costs nothing more when it is not sampled.

Masks are True = kept. Everything is counted in integers and summed in float32, whatever the
dtype of the parameters; of nothing at all (no sparse kernel) the density is 1, D is 1, and rates
and variances are 0.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from nm_sparsity_jax.core.schedules import as_step
from nm_sparsity_jax.core.trees import flatten
from nm_sparsity_jax.training.rules import Rules
from nm_sparsity_jax.training.sites import Site
from nm_sparsity_jax.training.stored import State, current
from nm_sparsity_jax.training.variances import (
  SecondMoments,
  Variance,
  Variances,
  adafactor_estimate,
  add_up,
  any_factored,
  count,
  ratio,
  second_moments,
  variances,
)

__all__ = [
    "Before", "Density", "FlipRate", "PatternNow", "SecondMoments", "Variance", "Variances",
    "adafactor_estimate", "after", "before", "decay", "density", "flip_rate", "grad_abs_variance",
    "masks_of", "pattern_now", "second_moment_variance", "second_moments", "summary",
]  # fmt: skip


class PatternNow(NamedTuple):
  """The pattern n:m that holds at a step, int32 scalars."""

  n: jax.Array
  m: jax.Array


class Density(NamedTuple):
  """Shares of weights of sparse kernels, float32 scalars.

  Attributes:
    overall: the share that is in use now, over all kernels, each weighted by its size.
    target: the share that the target patterns keep, weighted in the same way.
    places: path -> the share in use now.
    targets: path -> n / m of the target pattern.
  """

  overall: jax.Array
  target: jax.Array
  places: dict[str, jax.Array]
  targets: dict[str, jax.Array]


class FlipRate(NamedTuple):
  """How much two masks differ, float32 scalars.

  Attributes:
    all: changed positions / positions.
    kept: positions that were kept and no longer are / positions that were kept.
  """

  all: jax.Array
  kept: jax.Array


class Before(NamedTuple):
  """What `before` saw, for `after`.

  Attributes:
    masks: path -> the mask that the step used, bool.
    scalars: name -> the variances of the step's gradient, float32 scalars.
  """

  masks: dict[str, jax.Array]
  scalars: dict[str, jax.Array]


def masks_of(
  params: Any, rules: Rules, step: jax.Array | int, state: State | None = None
) -> dict[str, jax.Array]:
  """Returns path -> the bool mask that the effective weight of this step uses, True = kept.

  Only sparse kernels have one, not those with the dense recipe. It is all True in the dense phase,
  and for one_shot and snip until their mask is taken. While D > 0 a pruned weight is faded, not yet
  zero, but its mask is False already.
  """
  step = as_step(step)
  arrays = dict(flatten(params))
  return {
    path: site.mask(arrays[path], *current(site, step, state))
    for path, site in rules.assign(params).places.items()
  }


def decay(params: Any, rules: Rules, step: jax.Array | int) -> dict[str, jax.Array]:
  """Returns path -> D at `step`, float32: 1 in the dense phase, 0 in the fine-tune phase."""
  sites = rules.assign(params).places
  return {path: site.recipe.decay(step) for path, site in sites.items()}


def pattern_now(params: Any, rules: Rules, step: jax.Array | int) -> dict[str, PatternNow]:
  """Returns path -> the pattern that holds at `step`, levels of a schedule included.

  It is 1:1 (keep all) while a kernel is dense, and 0:0 at a traced negative step, which means that
  no step was given.
  """
  step = as_step(step)
  found = {}
  for path, site in rules.assign(params).places.items():
    n = m = jnp.where(step < 0, jnp.int32(0), jnp.int32(1))
    for start, pattern in site.recipe.levels(site.axis_size):
      n = jnp.where(step >= start, jnp.int32(pattern.n), n)
      m = jnp.where(step >= start, jnp.int32(pattern.m), m)
    found[path] = PatternNow(n, m)
  return found


def density(
  params: Any, rules: Rules, step: jax.Array | int, state: State | None = None
) -> Density:
  """Returns the share of weights in use of sparse kernels: those whose factor in W~ is not zero.

  With the mask Phi and W~ = W * (Phi + D * (1 - Phi)), of a kernel with |W| weights

      density = 1              while D > 0
      density = sum(Phi) / |W| where D = 0
      target  = n / m

  so a stored weight that happens to be 0 counts as used if it is kept. In a padded kernel the
  short last group keeps up to n of what it has, which can be more than n / m of it. NaN at a
  traced negative step.
  """
  return _density(rules.assign(params).places, masks_of(params, rules, step, state), step)


def _density(sites: Mapping[str, Site], masks: dict[str, jax.Array], step) -> Density:
  shares, targets = {}, {}
  for path, site in sites.items():
    d, kept = site.recipe.decay(step), ratio(count(masks[path]), masks[path].size)
    # D itself where it is NaN: no step was given.
    shares[path] = jnp.where(d == 0, kept, jnp.where(d > 0, jnp.float32(1), d))
    targets[path] = jnp.float32(site.pattern.density)
  return Density(_mean(sites, shares), _mean(sites, targets), shares, targets)


def _mean(sites: Mapping[str, Site], values: dict[str, jax.Array]) -> jax.Array:
  """Returns the mean over all weights, exact where all values agree; 1 without weights."""
  sizes = {path: math.prod(site.shape) for path, site in sites.items()}
  total = sum(sizes.values())
  if not total:
    return jnp.float32(1)
  # By differences from one of them, which are exactly 0 where all agree.
  first = next(iter(values.values()))
  return first + add_up([(values[p] - first) * jnp.float32(n / total) for p, n in sizes.items()])


def flip_rate(mask_before: Any, mask_after: Any) -> FlipRate:
  """Returns how much of a mask, or of a tree of masks, changed from one time to another.

      all  = sum(before xor after) / size
      kept = sum(before and not after) / sum(before)

  With equal n:m both times, `all` = 2 * density * `kept`. A tree counts as one long mask.

  Args:
    mask_before: bool array or tree of them, such as what `masks_of` returns.
    mask_after: the same shapes under the same paths.

  >>> f = flip_rate(jnp.array([True, False, True, False]), jnp.array([False, True, True, False]))
  >>> float(f.all), float(f.kept)
  (0.5, 0.5)
  """
  return _rate(_flips(mask_before, mask_after).values())


class _Flips(NamedTuple):
  """Counts of one pair of masks, float32: positions that differ, that were lost, were kept."""

  changed: jax.Array
  lost: jax.Array
  kept: jax.Array
  size: int


def _flips(before: Any, after: Any) -> dict[str, _Flips]:
  a, b = dict(flatten(before)), dict(flatten(after))
  if odd := sorted(set(a) ^ set(b)):
    raise ValueError(
      f"the masks do not pair up: only one side has {odd[0]!r}. Compare what metrics.masks_of "
      "returned for the same parameters and rules at two steps."
    )
  flips = lambda x, y: _Flips(count(x ^ y), count(x & ~y), count(x), x.size)
  return {path: flips(a[path], b[path]) for path in a}


def _rate(counts: Collection[_Flips]) -> FlipRate:
  total = lambda field: add_up([getattr(c, field) for c in counts])
  size = sum(c.size for c in counts)
  return FlipRate(ratio(total("changed"), size), ratio(total("lost"), total("kept")))


def grad_abs_variance(
  grads: Any, params: Any, rules: Rules, step: jax.Array | int, state: State | None = None
) -> Variances:
  """Returns Var(|g|) over the sparse kernels, over all weights and over the kept ones.

      Var(x) = mean((x - mean(x))^2)

  Figure 3b of arXiv:2402.04744 shows `all`. In masked mode a pruned weight's gradient carries
  the factor D, so `all` falls with D whatever the noise; `kept` is free of that.

  Args:
    grads: gradients with respect to the dense parameters, nested as `params`.
    params: the parameters that they were taken at.
    rules: the rules.
    step: the step that they were taken at.
    state: the state of stateful recipes at that step.
  """
  return _of_gradient(grads, masks_of(params, rules, step, state))


def _of_gradient(grads: Any, masks: Mapping[str, jax.Array]) -> Variances:
  return variances({path: jnp.abs(g) for path, g in flatten(grads)}, masks, "gradient (grads)")


def second_moment_variance(
  opt_state: Any, params: Any, rules: Rules, step: jax.Array | int, state: State | None = None
) -> Variances:
  """Returns Var(v) of Adam's second moment over the sparse kernels, all weights and kept ones.

  Figure 3a of arXiv:2402.04744 shows `all`, which is confounded as in `grad_abs_variance`. A
  variance below 1e-38 reads 0. Arguments as there; `opt_state` is read by `second_moments`.
  """
  masks = masks_of(params, rules, step, state)
  return variances(second_moments(opt_state, params), masks, "second moment (opt_state)")


def summary(
  params: Any,
  rules: Rules,
  step: jax.Array | int,
  state: State | None = None,
  grads: Any = None,
  opt_state: Any = None,
  masks_before: Any = None,
  *,
  per_place: bool | Collection[str] = True,
) -> dict[str, jax.Array]:
  """Returns all metrics as float32 scalars under flat names, for `clu` writers and their like.

      nm/density             nm/density/<path>              share of weights in use now
      nm/density_target      nm/density_target/<path>       n / m of the target
      nm/D                   nm/D/<path>                    decay factor (overall: mean by size)
                             nm/n/<path>, nm/m/<path>       pattern now, 1:1 while dense
      nm/flip_rate/all       nm/flip_rate/all/<path>        with masks_before
      nm/flip_rate/kept      nm/flip_rate/kept/<path>
      nm/grad_abs_var/all    nm/grad_abs_var/all/<path>     with grads
      nm/grad_abs_var/kept   nm/grad_abs_var/kept/<path>
      nm/second_moment_var/all, .../kept, and each /<path>  with opt_state; its name ends in
                                                            _factored where Adafactor factors

  The names depend on the arguments that are given, never on values or the step.

  Args:
    params: the dense parameters of a forward pass.
    rules: the rules.
    step: the step of that pass, int32 scalar.
    state: the state of stateful recipes at that step.
    grads: the gradients of that pass.
    opt_state: an optax state with a second moment, Adam's or Adafactor's, or `SecondMoments`.
    masks_before: what `masks_of` returned at an earlier step.
    per_place: also the names that end in a path; or which of them, such as ("density", "D").
  """
  sites = rules.assign(params).places
  masks = masks_of(params, rules, step, state)
  shares, factors = _density(sites, masks, step), decay(params, rules, step)
  patterns = pattern_now(params, rules, step)
  values: dict[str, tuple[Any, Mapping[str, Any]]] = {
    "density": (shares.overall, shares.places),
    "density_target": (shares.target, shares.targets),
    "D": (_mean(sites, factors), factors),
    "n": (None, {path: now.n.astype(jnp.float32) for path, now in patterns.items()}),
    "m": (None, {path: now.m.astype(jnp.float32) for path, now in patterns.items()}),
  }
  if masks_before is not None:
    counts = _flips(masks_before, masks)
    values |= _both("flip_rate", _rate(counts.values()), {p: _rate([c]) for p, c in counts.items()})
  if grads is not None:
    values |= _both("grad_abs_var", *_of_gradient(grads, masks))
  if opt_state is not None:
    is_factored = any_factored(opt_state, {path: site.shape for path, site in sites.items()})
    name = f"second_moment_var{'_factored' if is_factored else ''}"
    moments = second_moments(opt_state, params)
    values |= _both(name, *variances(moments, masks, "second moment (opt_state)"))
  return _named(values, per_place)


def before(
  params: Any,
  rules: Rules,
  step: jax.Array | int,
  state: State | None = None,
  grads: Any = None,
  *,
  per_place: bool | Collection[str] = False,
) -> Before:
  """Looks at a train step before its update: at its masks, and at its gradient.

  Run it as a program of its own at the steps that you sample, and `after` once the update is
  done. The parameters may be donated in between.

      seen = metrics.before(params, rules, step, state, grads)
      params, opt_state, state = update(params, opt_state, state, grads)
      scalars = metrics.after(params, rules, step + 1, state, seen, opt_state)

  Args:
    params: the dense parameters that the gradient was taken at.
    rules: the rules.
    step: the step that it was taken at, int32 scalar.
    state: the state of stateful recipes at that step.
    grads: the gradient, without SR-STE's term; None = no names of gradients.
    per_place: as in `summary`.
  """
  masks = masks_of(params, rules, step, state)
  values = {} if grads is None else _both("grad_abs_var", *_of_gradient(grads, masks))
  return Before(masks, _named(values, per_place))


def after(
  params: Any,
  rules: Rules,
  step: jax.Array | int,
  state: State | None,
  seen: Before,
  opt_state: Any = None,
  *,
  per_place: bool | Collection[str] = False,
) -> dict[str, jax.Array]:
  """Returns the metrics of a sampled step, once its update is done.

  They are those of `summary` at the new parameters, with the flips since `before`, the variances
  of the gradient that it saw, and the pattern of each rule:

      nm/n/<rule>, nm/m/<rule>   of its kernels; 0 where they do not share one

  Args:
    params: the dense parameters after the update.
    rules: the rules.
    step: the step after the update.
    state: the state of stateful recipes after the update.
    seen: what `before` returned.
    opt_state: the optimizer's state after the update, or `SecondMoments`. Where it does not hold
      a second moment of every sparse kernel, there are no names for it.
    per_place: as in `summary`.
  """
  sites = rules.assign(params).places
  try:
    moments = second_moments(opt_state, params)
  except ValueError:  # it keeps none, or two of one weight
    moments = {}
  if not sites.keys() <= moments.keys():
    opt_state = None
  out = summary(params, rules, step, state, None, opt_state, seen.masks, per_place=per_place)
  out |= seen.scalars
  patterns = pattern_now(params, rules, step)
  for rule in dict.fromkeys(site.key for site in sites.values()):
    n, m = jnp.array([patterns[path] for path, site in sites.items() if site.key == rule]).T
    # Levels depend on the length of an axis, so kernels of one rule may differ.
    is_shared = jnp.all((n == n[0]) & (m == m[0]))
    out[f"nm/n/{rule}"] = jnp.where(is_shared, n[0], 0).astype(jnp.float32)
    out[f"nm/m/{rule}"] = jnp.where(is_shared, m[0], 0).astype(jnp.float32)
  return out


def _both(name: str, overall: Any, by_path: Mapping[str, Any]) -> dict[str, Any]:
  """Returns name/kind -> its overall value and its values by path, for the fields of a value."""
  return {
    f"{name}/{kind}": (getattr(overall, kind), {p: getattr(v, kind) for p, v in by_path.items()})
    for kind in ("all", "kept")
  }


def _named(values: Mapping[str, tuple[Any, Mapping[str, Any]]], per_place) -> dict[str, Any]:
  """Returns the values under their flat names."""
  out = {}
  for name, (overall, by_path) in values.items():
    if overall is not None:
      out[f"nm/{name}"] = overall
    if per_place if isinstance(per_place, bool) else name in per_place:
      out |= {f"nm/{name}/{path}": value for path, value in by_path.items()}
  return out
