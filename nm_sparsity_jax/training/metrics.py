"""What to watch during a run: density, D, pattern, flips, and the variances of figure 3.

    params, rules, step, state, gradients, optimizer state -> [metrics] -> scalars -> a writer

Pure functions for use inside jit: the step is traced and one compilation serves all steps. Give
them the parameters, the step and the state of one forward pass, and the gradients of that pass.
`summary` is all of them at once, under flat names. It takes the masks anew and reads each sparse
kernel a few times, so a trainer samples it. `before` and `summary` can look at the two sides of an
optimizer update: compile them as programs of their own, and the train step costs nothing more when
it is not sampled.

Masks are True = kept. Counts are integers and sums are float32, whatever the dtype of the
parameters. Without a sparse kernel the density is 1, D is 1, and rates and variances are 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from nm_sparsity_jax.core.patterns import NM
from nm_sparsity_jax.core.schedules import as_step
from nm_sparsity_jax.core.trees import flatten
from nm_sparsity_jax.recipes.levels import value_at
from nm_sparsity_jax.training.rules import Rules
from nm_sparsity_jax.training.sites import Site
from nm_sparsity_jax.training.stored import State, current


class FlipRate(NamedTuple):
  """How much two masks differ, float32 scalars.

  Attributes:
    all: changed positions / positions.
    kept: positions that were kept and no longer are / positions that were kept.
  """

  all: jax.Array
  kept: jax.Array


class Before(NamedTuple):
  """What `before` saw of a step, for `summary`.

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
  step, arrays = as_step(step), dict(flatten(params))
  return {
    path: site.mask(arrays[path], *current(site, step, state))
    for path, site in rules.assign(params).sites.items()
  }


def flip_rate(mask_before: Any, mask_after: Any) -> FlipRate:
  """Returns how much of a mask, or of a tree of masks, changed from one time to another.

      all  = sum(before xor after) / size
      kept = sum(before and not after) / sum(before)

  With equal n:m both times, `all` = 2 * density * `kept`. A tree counts as one long mask.

  Args:
    mask_before: bool array or tree of them, such as what `masks_of` returns.
    mask_after: the same shapes in the same tree.

  >>> f = flip_rate(jnp.array([True, False, True, False]), jnp.array([False, True, True, False]))
  >>> float(f.all), float(f.kept)
  (0.5, 0.5)
  """
  total = lambda function, *trees: _sum(jax.tree.leaves(jax.tree.map(function, *trees)))
  changed = total(lambda a, b: _count(a ^ b), mask_before, mask_after)
  lost = total(lambda a, b: _count(a & ~b), mask_before, mask_after)
  size = sum(x.size for x in jax.tree.leaves(mask_before))
  return FlipRate(_ratio(changed, size), _ratio(lost, total(_count, mask_before)))


def summary(
  params: Any,
  rules: Rules,
  step: jax.Array | int,
  state: State | None = None,
  moments: Mapping[str, jax.Array] | None = None,
  seen: Before | None = None,
) -> dict[str, jax.Array]:
  """Returns all metrics as float32 scalars under flat names, for `clu` writers and their like.

      nm/density                      share of weights in use now
      nm/density_target               n / m of the target
      nm/D                            decay factor, the mean by size
      nm/n/<rule>, nm/m/<rule>        pattern now, 1:1 while dense; 0 where kernels of one rule
                                      differ
      nm/flip_rate/all, /kept         with seen: flips since then
      nm/grad_abs_var/all, /kept      with seen, if it was given the gradient
      nm/second_moment_var/all, /kept with moments, if they are of every sparse kernel

  A weight is in use where its factor in W~ is not zero: the density of a kernel is 1 while D > 0,
  and the share that its mask keeps where D = 0. A short last group keeps up to n of what it has.

  Var(x) = mean((x - mean(x))^2), of |g| and of Adam's second moment; figure 3 of arXiv:2402.04744
  shows `all`. In masked mode a pruned weight's gradient carries the factor D, so `all` falls with
  D whatever the noise; `kept`, over the weights that the mask keeps, is free of that.

  The names depend on the arguments that are given, never on values or the step. At a traced
  `schedules.NO_STEP` density and D are NaN and the pattern is 0:0.

  Args:
    params: the dense parameters of a forward pass.
    rules: the rules.
    step: the step of that pass, int32 scalar.
    state: the state of stateful recipes at that step.
    moments: path -> second moment, as `second_moments` reads them from an optimizer's state.
    seen: what `before` returned at an earlier step.
  """
  sites, masks = rules.assign(params).sites, masks_of(params, rules, step, state)
  decays = {path: site.recipe.decay(step) for path, site in sites.items()}
  kept = {path: _ratio(_count(mask), mask.size) for path, mask in masks.items()}
  # D itself where it is NaN, at NO_STEP.
  in_use = lambda path, d: jnp.where(d == 0, kept[path], jnp.where(d > 0, jnp.float32(1), d))
  shares = {path: in_use(path, d) for path, d in decays.items()}
  targets = {path: jnp.float32(site.pattern.density) for path, site in sites.items()}
  out = {
    "nm/density": _mean(shares, masks),
    "nm/density_target": _mean(targets, masks),
    "nm/D": _mean(decays, masks),
    **_patterns(sites, step),
  }
  if seen is not None:
    rate = flip_rate(seen.masks, masks)
    out |= {"nm/flip_rate/all": rate.all, "nm/flip_rate/kept": rate.kept, **seen.scalars}
  # A trainer hands over whatever its optimizer keeps, so a missing moment is no error.
  if moments is not None and sites.keys() <= moments.keys():
    out |= _variances("second_moment_var", moments, masks)
  return out


def before(
  params: Any,
  rules: Rules,
  step: jax.Array | int,
  state: State | None = None,
  grads: Any = None,
) -> Before:
  """Looks at a train step before its update: at its masks, and at its gradient.

  Run it as a program of its own at the steps that you sample, and `summary` once the update is
  done. The parameters may be donated in between.

      seen = metrics.before(params, rules, step, state, grads)
      params, opt_state, state = update(params, opt_state, state, grads)
      moments = metrics.second_moments(opt_state, params)
      scalars = metrics.summary(params, rules, step + 1, state, moments, seen)

  Args:
    params: the dense parameters that the gradient was taken at.
    rules: the rules.
    step: the step that it was taken at, int32 scalar.
    state: the state of stateful recipes at that step.
    grads: the gradient, without SR-STE's term; None = no names of gradients.
  """
  masks = masks_of(params, rules, step, state)
  if grads is None:
    return Before(masks, {})
  sizes = {path: jnp.abs(g) for path, g in flatten(grads)}
  return Before(masks, _variances("grad_abs_var", sizes, masks))


def second_moments(opt_state: Any, params: Any) -> dict[str, jax.Array]:
  """Returns path -> second moment in an optax state: Adam's v, or Adafactor's estimate of it.

      v[i, j] = rows[i] * columns[j] / mean(rows)

  (arXiv:1804.04235, algorithm 4, has sums in place of these means.)
  Found are the `nu` trees of all states inside, such as that of `optax.scale_by_adam` (no bias
  correction), and the factors of `optax.scale_by_factored_rms`, of small weights the v that it
  keeps whole, under chain, MultiSteps, inject_hyperparams, masked or multi_transform. Optimizers
  without one, such as SGD and Lion, and weights that a transformation is masked from have none.

  Args:
    opt_state: the state.
    params: the parameters, whose shapes tell the axes that Adafactor factors.
  """
  shapes, found = {path: jnp.shape(leaf) for path, leaf in flatten(params)}, {}
  is_state = lambda x: hasattr(x, "nu") or hasattr(x, "v_row")
  for state in jax.tree.leaves(opt_state, is_leaf=is_state):
    if hasattr(state, "nu"):
      found |= dict(flatten(state.nu))
    elif hasattr(state, "v_row"):
      rows, columns = dict(flatten(state.v_row)), dict(flatten(state.v_col))
      for path, v in flatten(state.v):
        if v.shape != shapes[path]:  # optax factors the two largest axes
          row, column = np.argsort(shapes[path])[-2:]
          by_row = jnp.expand_dims(rows[path], column)
          mean = jnp.mean(by_row, row, keepdims=True)
          # All of it is 0 before the first gradient, and 0 / 0 would be NaN.
          by_row = by_row / jnp.where(mean == 0, 1, mean)
          v = by_row * jnp.expand_dims(columns[path], row)
        found[path] = v
  return found


def _patterns(sites: Mapping[str, Site], step: jax.Array | int) -> dict[str, jax.Array]:
  """Returns n and m of the level that holds at `step`, by rule, float32; 1:1 while dense."""
  step, found = as_step(step), {}
  for site in sites.values():
    levels = [(0, NM(1, 1)), *site.recipe.levels(site.axis_size)]
    for name in ("n", "m"):
      now = value_at(levels, step, [getattr(pattern, name) for _, pattern in levels])
      now = jnp.where(step < 0, 0, now).astype(jnp.float32)
      found.setdefault(f"nm/{name}/{site.place}", []).append(now)
  # Levels depend on the length of an axis, so kernels of one rule may differ.
  shared = lambda x: jnp.where(jnp.min(x) == jnp.max(x), x[0], jnp.float32(0))
  return {name: shared(jnp.stack(values)) for name, values in found.items()}


def _mean(values: Mapping[str, jax.Array], masks: Mapping[str, jax.Array]) -> jax.Array:
  """Returns the mean over all weights; 1 without weights."""
  sizes = jnp.array([masks[path].size for path in values], jnp.float32)
  return jnp.average(jnp.stack([*values.values()]), weights=sizes) if masks else jnp.float32(1)


def _variances(
  name: str, values: Mapping[str, jax.Array], masks: Mapping[str, jax.Array]
) -> dict[str, jax.Array]:
  # bfloat16 has 8 bits, and a variance is a difference of sums.
  wide = [values[path].astype(jnp.float32) for path in masks]
  kept = [*masks.values()]
  whole = [jnp.ones_like(mask) for mask in kept]
  return {f"nm/{name}/all": _variance(wide, whole), f"nm/{name}/kept": _variance(wide, kept)}


def _variance(xs: Sequence[jax.Array], masks: Sequence[jax.Array]) -> jax.Array:
  """Returns the variance of all entries of several arrays that masks keep."""
  total = _sum([_count(mask) for mask in masks])
  chosen = lambda x, mask: jnp.sum(jnp.where(mask, x, jnp.zeros_like(x)))
  mean = _ratio(_sum([chosen(x, mask) for x, mask in zip(xs, masks, strict=True)]), total)
  return _ratio(_sum([chosen((x - mean) ** 2, m) for x, m in zip(xs, masks, strict=True)]), total)


def _count(mask: jax.Array) -> jax.Array:
  # Counted exactly and rounded once: a sum of ones in float32 stalls at 2^24.
  return jnp.sum(mask, dtype=jnp.uint32).astype(jnp.float32)


def _ratio(part: jax.Array, whole: jax.Array | int) -> jax.Array:
  """Returns part / whole: exactly 1 where they are equal, and 0 where the whole is 0."""
  whole = jnp.asarray(whole, jnp.float32)
  share = part / jnp.maximum(whole, jnp.float32(1))
  # XLA may multiply by 1 / whole, which is not 1 for part = whole.
  return jnp.where((part == whole) & (whole > 0), jnp.float32(1), share)


def _sum(values: Sequence[jax.Array]) -> jax.Array:
  return jnp.sum(jnp.stack(values)) if values else jnp.float32(0)
