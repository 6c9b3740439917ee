"""What to watch during a run: density, D, pattern, flips, and the variances of figure 3.

    params, rules, step, state, gradients, optimizer state -> [metrics] -> scalars -> a writer

Pure functions for use inside jit: the step is traced and one compilation serves all steps. Give
them the parameters, the step and the state of one forward pass, and the gradients of that pass.
`summary` is all of them at once, under flat names. It takes the masks anew and reads each sparse
kernel a few times, so a trainer samples it. `before` and `after` are the two halves of such a
sample, one on each side of an optimizer update: compile them as programs of their own, and the
train step costs nothing more when it is not sampled.

Masks are True = kept. Everything is counted in integers and summed in float32, whatever the
dtype of the parameters; of nothing at all (no sparse place) the density is 1, D is 1, and rates
and variances are 0.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from nm_sparsity_jax.opt_states import named
from nm_sparsity_jax.places import Place
from nm_sparsity_jax.rules import Rules
from nm_sparsity_jax.schedules import as_step
from nm_sparsity_jax.stored import State, current
from nm_sparsity_jax.trees import flatten

_MAX_COUNT = 2**32 - 1  # what one uint32 can count


class Density(NamedTuple):
  """Shares of sparse-place weights, float32 scalars.

  Attributes:
    overall: the share that is in use now, over all places, each weighted by its size.
    target: the share that the target patterns keep, weighted in the same way.
    places: path -> the share in use now.
    targets: path -> n / m of the target pattern.
  """

  overall: jax.Array
  target: jax.Array
  places: dict[str, jax.Array]
  targets: dict[str, jax.Array]


class PatternNow(NamedTuple):
  """The pattern n:m that holds at a step, int32 scalars."""

  n: jax.Array
  m: jax.Array


class FlipRate(NamedTuple):
  """How much two masks differ, float32 scalars.

  Attributes:
    all: changed positions / positions.
    kept: positions that were kept and no longer are / positions that were kept.
  """

  all: jax.Array
  kept: jax.Array


class Variance(NamedTuple):
  """The variance of one quantity, float32 scalars.

  Attributes:
    all: over all weights.
    kept: over those that the mask of this step keeps.
  """

  all: jax.Array
  kept: jax.Array


class Variances(NamedTuple):
  """The variance over all places together, and path -> the variance of one place."""

  overall: Variance
  places: dict[str, Variance]


class SecondMoments(NamedTuple):
  """Second moments by path, for `summary` and `after` in place of an optax state.

  Attributes:
    nu: path -> second moment, of the parameter's shape.
    is_factored: whether they are estimates, rebuilt from factors as Adafactor does.
  """

  nu: Mapping[str, jax.Array]
  is_factored: bool = False


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
  """path -> the bool mask that the effective weight of this step uses, True = kept.

  Sparse places only; a place with the dense recipe is none. All True in the dense phase, and for
  one_shot and snip until their mask has been taken. While D > 0 a pruned weight is faded, not
  yet zero, and its mask already False.
  """
  step = as_step(step)
  arrays = dict(flatten(params))
  return {
    path: place.mask(arrays[path], *current(place, step, state))
    for path, place in rules.assign(params).places.items()
  }


def decay(params: Any, rules: Rules, step: jax.Array | int) -> dict[str, jax.Array]:
  """path -> D at `step`, a float32 scalar: 1 in the dense phase, 0 in the fine-tune phase."""
  places = rules.assign(params).places
  return {path: place.recipe.decay(step) for path, place in places.items()}


def pattern_now(params: Any, rules: Rules, step: jax.Array | int) -> dict[str, PatternNow]:
  """path -> the pattern that holds at `step`, levels of a schedule included.

  While a place is dense that is 1:1 (keep all). It is 0:0 at a traced negative step, which
  stands for a step that nobody gave.
  """
  step = as_step(step)
  found = {}
  for path, place in rules.assign(params).places.items():
    n = m = jnp.where(step < 0, jnp.int32(0), jnp.int32(1))
    for start, pattern in place.recipe.levels(place.axis_size):
      n = jnp.where(step >= start, jnp.int32(pattern.n), n)
      m = jnp.where(step >= start, jnp.int32(pattern.m), m)
    found[path] = PatternNow(n, m)
  return found


def rule_patterns(
  params: Any, rules: Rules, step: jax.Array | int
) -> dict[str, tuple[PatternNow, jax.Array]]:
  """rule -> the pattern of its places at `step`, and whether they share one; 0:0 if they do not."""
  patterns, found = pattern_now(params, rules, step), {}
  places = rules.assign(params).places
  for rule in dict.fromkeys(place.key for place in places.values()):
    n, m = jnp.array([patterns[path] for path, place in places.items() if place.key == rule]).T
    shared = jnp.all((n == n[0]) & (m == m[0]))
    found[rule] = PatternNow(*(jnp.where(shared, x[0], 0) for x in (n, m))), shared
  return found


def density(
  params: Any, rules: Rules, step: jax.Array | int, state: State | None = None
) -> Density:
  """The share of sparse-place weights in use: those whose factor in W~ is not zero.

  With the mask Phi and W~ = W * (Phi + D * (1 - Phi)), of a place with |W| weights

      density = 1              while D > 0
      density = sum(Phi) / |W| where D = 0
      target  = n / m

  so a stored weight that happens to be 0 counts as used if it is kept. In a padded place the
  short last group keeps up to n of what it has, which can be more than n / m of it. NaN at a
  traced negative step.
  """
  return _density(rules.assign(params).places, masks_of(params, rules, step, state), step)


def flip_rate(mask_before: Any, mask_after: Any) -> FlipRate:
  """How much of a mask, or of a tree of masks, changed from one time to another.

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
  return _flip_rate(list(_flips(mask_before, mask_after).values()))


def second_moments(opt_state: Any, params: Any = None) -> dict[str, jax.Array]:
  """path -> second moment, from an optax state: Adam's v as stored, or Adafactor's estimate of it.

      v[i, j] = rows[i] * columns[j] / mean(rows)

  Found are the `nu` trees of all states inside, such as that of `optax.scale_by_adam` (no bias
  correction), and the factors of `optax.scale_by_factored_rms`, of small weights the v that it
  keeps whole, under chain, MultiSteps, inject_hyperparams, masked or multi_transform. Weights that
  a transformation is masked from have none.

  Args:
    opt_state: the state.
    params: the parameters, whose shapes tell the axes that Adafactor factors.
  """
  found: dict[str, jax.Array] = {}
  keeps_any = False
  for state in named(opt_state):
    if getattr(state, "nu", None) is not None:
      moments = dict(flatten(state.nu))
    elif _is_factored(state):
      if params is None:
        raise ValueError(
          "Adafactor's second moment is factored: pass params, whose shapes it needs."
        )
      moments = _rebuilt(state, {path: jnp.shape(leaf) for path, leaf in flatten(params)})
    else:
      continue
    if both := sorted(found.keys() & moments.keys()):
      raise ValueError(
        f"the optimizer state holds two second moments (`nu`) of {both[0]!r}, the later one in "
        f"a {type(state).__name__}. Pass the part that is meant, such as opt_state[1]."
      )
    found |= moments
    keeps_any = True
  if not keeps_any:  # one of no weights keeps {}
    raise ValueError(
      f"the optimizer state ({type(opt_state).__name__}) holds no second moment: no state in it "
      "has a field `nu`, as that of optax.adam, adamw or scale_by_adam does, or `v_row`, as "
      "optax.adafactor's. SGD and Lion keep none; leave opt_state out for them."
    )
  return found


def adafactor_estimate(rows: jax.Array, columns: jax.Array, row_axes, column_axes) -> jax.Array:
  """What Adafactor takes for v (arXiv:1804.04235, algorithm 4; there sums, here means).

  Args:
    rows: the means over the column axes.
    columns: the means over the row axes.
    row_axes: of the whole array.
    column_axes: of the whole array.
  """
  rows, columns = jnp.expand_dims(rows, column_axes), jnp.expand_dims(columns, row_axes)
  mean = jnp.mean(rows, row_axes, keepdims=True)
  return rows / jnp.where(mean == 0, 1, mean) * columns  # 0 before the first gradient


def _is_factored(state: Any) -> bool:
  return hasattr(state, "v_row") and hasattr(state, "v_col")


def _rebuilt(state: Any, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, jax.Array]:
  """The estimates of one state of `optax.scale_by_factored_rms`."""
  rows, columns = dict(flatten(state.v_row)), dict(flatten(state.v_col))
  found = {}
  for path, v in flatten(state.v):
    if v.shape == shapes[path]:
      found[path] = v
    else:  # by its two largest axes
      row, column = (int(axis) for axis in np.argsort(shapes[path])[-2:])
      found[path] = adafactor_estimate(rows[path], columns[path], (row,), (column,))
  return found


def grad_abs_variance(
  grads: Any, params: Any, rules: Rules, step: jax.Array | int, state: State | None = None
) -> Variances:
  """Var(|g|) over the sparse kernels, over all weights and over the kept ones.

      Var(x) = mean((x - mean(x))^2)

  Figure 3b of arXiv:2402.04744 shows `all`. In masked mode a pruned weight's gradient carries
  the factor D, so `all` falls with D whatever the noise; `kept` is free of that.

  Args:
    grads: gradients with respect to the stored parameters, nested as `params`.
    params: the parameters that they were taken at.
    rules: the rules.
    step: the step that they were taken at.
    state: the state of stateful recipes at that step.
  """
  return _grad_abs_variance(grads, masks_of(params, rules, step, state))


def second_moment_variance(
  opt_state: Any, params: Any, rules: Rules, step: jax.Array | int, state: State | None = None
) -> Variances:
  """Var(v) of Adam's second moment over the sparse kernels, over all weights and the kept ones.

  Figure 3a of arXiv:2402.04744 shows `all`, which is confounded as in `grad_abs_variance`. A
  variance below 1e-38 reads 0. Arguments as there; `opt_state` is read by `second_moments`.
  """
  moments = second_moments(opt_state, params)
  return _second_moment_variance(moments, masks_of(params, rules, step, state))


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
  """All of it as float32 scalars under flat names, for `clu` writers and their like.

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
    params: the stored parameters of a forward pass.
    rules: the rules.
    step: the step of that pass, int32 scalar.
    state: the state of stateful recipes at that step.
    grads: the gradients of that pass.
    opt_state: an optax state with a second moment, Adam's or Adafactor's, or `SecondMoments`.
    masks_before: what `masks_of` returned at an earlier step.
    per_place: also the names that end in a path; or which of them, such as ("density", "D").
  """
  places = rules.assign(params).places
  masks = masks_of(params, rules, step, state)
  out: dict[str, jax.Array] = {}
  put = functools.partial(_put, out, per_place)
  shares = _density(places, masks, step)
  put("density", shares.overall, shares.places)
  put("density_target", shares.target, shares.targets)
  factors = decay(params, rules, step)
  put("D", _mean_by_size(places, factors), factors)
  patterns = pattern_now(params, rules, step).items()
  for name in PatternNow._fields:
    by_path = {path: getattr(now, name).astype(jnp.float32) for path, now in patterns}
    put(name, None, by_path)

  pairs: dict[str, tuple[Any, dict[str, Any]]] = {}
  if masks_before is not None:
    counts = _flips(masks_before, masks)
    rates = {path: _flip_rate([c]) for path, c in counts.items()}
    pairs["flip_rate"] = _flip_rate(list(counts.values())), rates
  if grads is not None:
    pairs["grad_abs_var"] = _grad_abs_variance(grads, masks)
  if opt_state is not None:
    kind = f"second_moment_var{'_factored' if _any_factored(opt_state, places) else ''}"
    pairs[kind] = _second_moment_variance(second_moments(opt_state, params), masks)
  for name, pair in pairs.items():
    _put_both(put, name, pair)
  return out


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
    params: the stored parameters that the gradient was taken at.
    rules: the rules.
    step: the step that it was taken at, int32 scalar.
    state: the state of stateful recipes at that step.
    grads: the gradient, without SR-STE's term; None = no names of gradients.
    per_place: as in `summary`.
  """
  masks, out = masks_of(params, rules, step, state), {}
  if grads is not None:
    put = functools.partial(_put, out, per_place)
    _put_both(put, "grad_abs_var", _grad_abs_variance(grads, masks))
  return Before(masks, out)


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

      nm/n/<rule>, nm/m/<rule>   of its places; 0 where they do not share one

  Args:
    params: the stored parameters after the update.
    rules: the rules.
    step: the step after the update.
    state: the state of stateful recipes after the update.
    seen: what `before` returned.
    opt_state: the optimizer's state after the update, or `SecondMoments`. Where it does not hold
      a second moment of every sparse kernel, there are no names for it.
    per_place: as in `summary`.
  """
  places = rules.assign(params).places
  try:
    moments = {} if opt_state is None else second_moments(opt_state, params)
  except ValueError:  # it keeps none, or two of one weight
    moments = {}
  keeps_any = bool(moments) or isinstance(opt_state, SecondMoments)
  opt_state = opt_state if keeps_any and set(places) <= set(moments) else None
  out = summary(params, rules, step, state, None, opt_state, seen.masks, per_place=per_place)
  out |= seen.scalars
  for rule, (pattern, _) in rule_patterns(params, rules, step).items():
    out |= {f"nm/{name}/{rule}": jnp.float32(x) for name, x in pattern._asdict().items()}
  return out


def _put(out: dict, per_place: bool | Collection[str], name: str, overall: Any, by_path: Mapping):
  """Puts a number, and those of its places where they are wanted, under their names."""
  if overall is not None:
    out[f"nm/{name}"] = overall
  wanted = per_place if isinstance(per_place, bool) else name in per_place
  if wanted:
    out.update({f"nm/{name}/{path}": value for path, value in by_path.items()})


def _put_both(put: Callable, name: str, pair: tuple[Any, Mapping[str, Any]]) -> None:
  """Puts the fields `all` and `kept` of a value and of those of its places."""
  overall, by_path = pair
  for kind in ("all", "kept"):
    by_kind = {path: getattr(v, kind) for path, v in by_path.items()}
    put(f"{name}/{kind}", getattr(overall, kind), by_kind)


def _any_factored(opt_state: Any, places: Mapping[str, Place]) -> bool:
  """Whether the second moment of any of these places is rebuilt from factors."""
  if isinstance(opt_state, SecondMoments):
    return opt_state.is_factored
  states = [state for state in named(opt_state) if _is_factored(state)]
  whole = {path: v.shape for state in states for path, v in flatten(state.v)}
  return any(whole.get(path, place.shape) != place.shape for path, place in places.items())


def _density(places: Mapping[str, Place], masks: dict[str, jax.Array], step) -> Density:
  shares, targets = {}, {}
  for path, place in places.items():
    d, pattern = place.recipe.decay(step), place.recipe.pattern
    kept = _ratio(_count(masks[path]), masks[path].size)
    # D itself where it is NaN: no step was given.
    shares[path] = jnp.where(d == 0, kept, jnp.where(d > 0, jnp.float32(1), d))
    targets[path] = jnp.float32(1 if pattern is None else pattern.density)
  return Density(_mean_by_size(places, shares), _mean_by_size(places, targets), shares, targets)


def _mean_by_size(places: Mapping[str, Place], values: dict[str, jax.Array]) -> jax.Array:
  """The mean over all weights, exact where all values agree; 1 where there are no weights."""
  sizes = {path: math.prod(place.shape) for path, place in places.items()}
  total = sum(sizes.values())
  if not total:
    return jnp.float32(1)
  first = next(iter(values.values()))
  return first + _sum([(values[p] - first) * jnp.float32(n / total) for p, n in sizes.items()])


class _Flips(NamedTuple):
  changed: jax.Array
  lost: jax.Array
  kept: jax.Array
  size: int


def _flips(before: Any, after: Any) -> dict[str, _Flips]:
  """path -> counts of one pair of masks."""
  a, b = dict(flatten(before)), dict(flatten(after))
  if odd := sorted(set(a) ^ set(b)):
    has = "before" if odd[0] in a else "after"
    raise ValueError(
      f"the masks do not pair up: only the one {has} has {odd[0]!r} ({len(odd)} such). Compare "
      "what metrics.masks_of returned for the same parameters and rules at two steps."
    )
  for path in a:
    kinds = [(jnp.shape(x), getattr(x, "dtype", type(x).__name__)) for x in (a[path], b[path])]
    if kinds[0][0] != kinds[1][0] or any(dtype != jnp.bool_ for _, dtype in kinds):
      raise ValueError(
        f"the masks {path!r} are {kinds[0][1]} {kinds[0][0]} before and {kinds[1][1]} "
        f"{kinds[1][0]} after, but must be bool (True = kept) of one shape. For a float mask "
        "pass mask != 0."
      )
  return {
    path: _Flips(_count(a[path] ^ b[path]), _count(a[path] & ~b[path]), _count(a[path]), m.size)
    for path, m in b.items()
  }


def _flip_rate(counts: Sequence[_Flips]) -> FlipRate:
  return FlipRate(
    _ratio(_sum([c.changed for c in counts]), sum(c.size for c in counts)),
    _ratio(_sum([c.lost for c in counts]), _sum([c.kept for c in counts])),
  )


def _grad_abs_variance(grads: Any, masks: dict[str, jax.Array]) -> Variances:
  return _variances(dict(flatten(grads)), masks, "gradient (grads)", jnp.abs)


def _second_moment_variance(moments: Any, masks: dict[str, jax.Array]) -> Variances:
  return _variances(moments, masks, "second moment (opt_state)", lambda v: v)


def _variances(
  values: Mapping[str, jax.Array], masks: Mapping[str, jax.Array], what: str, of: Callable
) -> Variances:
  """The variances of of(values) at the places of `masks`."""
  moments = {}
  for path, mask in masks.items():
    if path not in values:
      some = ", ".join(list(values)[:4])
      raise ValueError(
        f"there is no {what} of the sparse kernel {path!r}, only of: {some or 'nothing'}. It "
        "must be nested as `params` and cover every place of the rules."
      )
    x = values[path]
    if x.shape != mask.shape:
      raise ValueError(
        f"the {what} of {path!r} has shape {x.shape}, but the parameter has {mask.shape}. It "
        "must be kept per weight and belong to these parameters."
      )
    x = of(x.astype(jnp.float32))
    moments[path] = _moments(x), _moments(x, mask)

  def pool(pairs):
    return Variance(_pool([a for a, _ in pairs]), _pool([k for _, k in pairs]))

  return Variances(pool(list(moments.values())), {p: pool([pair]) for p, pair in moments.items()})


class _Moments(NamedTuple):
  """How many, their mean, and the sum of their squared deviations from it."""

  count: jax.Array
  mean: jax.Array
  squares: jax.Array


def _moments(x: jax.Array, mask: jax.Array | None = None) -> _Moments:
  """Two passes over x[mask], the second one corrected for what rounding left in the mean.

  Chan, Golub and LeVeque, "Algorithms for computing the sample variance", 1983, equation 1.7.
  """
  chosen = (lambda y: y) if mask is None else (lambda y: jnp.where(mask, y, jnp.zeros_like(y)))
  count = jnp.float32(x.size) if mask is None else _count(mask)
  mean = _ratio(jnp.sum(chosen(x)), count)
  off = chosen(x - mean)
  left = jnp.sum(off)
  squares = jnp.sum(off * off) - left * _ratio(left, count)
  return _Moments(count, mean, jnp.maximum(squares, jnp.float32(0)))


def _pool(parts: Sequence[_Moments]) -> jax.Array:
  """The variance of several samples together (Chan, Golub and LeVeque 1983, equation 2.1)."""
  if not parts:
    return jnp.float32(0)
  if len(parts) == 1:
    return _ratio(parts[0].squares, parts[0].count)
  total = _sum([p.count for p in parts])
  first = parts[0].mean  # the mean by differences: exact where all agree
  mean = first + _sum([(p.mean - first) * _ratio(p.count, total) for p in parts])
  between = [p.count * (p.mean - mean) * (p.mean - mean) for p in parts]
  return _ratio(_sum([p.squares + b for p, b in zip(parts, between, strict=True)]), total)


def _count(mask: jax.Array) -> jax.Array:
  """How many are True, float32: counted exactly, rounded once."""
  if mask.size <= _MAX_COUNT:
    return jnp.sum(mask, dtype=jnp.uint32).astype(jnp.float32)
  rows = jnp.sum(mask, axis=tuple(range(1, mask.ndim)), dtype=jnp.uint32)
  return jnp.sum(rows.astype(jnp.float32))


def _ratio(part: jax.Array, whole: jax.Array | int) -> jax.Array:
  """part / whole: 1 of all, whatever the division rounds to, and 0 of nothing."""
  whole = jnp.asarray(whole, jnp.float32)
  share = part / jnp.maximum(whole, jnp.float32(1))
  return jnp.where((part == whole) & (whole > 0), jnp.float32(1), share)


def _sum(values: Sequence[jax.Array]) -> jax.Array:
  return jnp.sum(jnp.stack(values)) if values else jnp.float32(0)
