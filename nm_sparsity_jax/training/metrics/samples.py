"""All metrics of a step as scalars under flat names, at once or in two halves around an update."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from nm_sparsity_jax.training.metrics import flips, sums, variances
from nm_sparsity_jax.training.metrics.moments import SecondMoments, any_factored, second_moments
from nm_sparsity_jax.training.metrics.now import (
  PatternNow,
  decay,
  density_of,
  masks_of,
  pattern_now,
  rule_patterns,
)
from nm_sparsity_jax.training.rules import Rules
from nm_sparsity_jax.training.stored import State


class Before(NamedTuple):
  """What `before` saw, for `after`.

  Attributes:
    masks: path -> the mask that the step used, bool.
    scalars: name -> the variances of the step's gradient, float32 scalars.
  """

  masks: dict[str, jax.Array]
  scalars: dict[str, jax.Array]


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
  places = rules.assign(params).places
  masks = masks_of(params, rules, step, state)
  out: dict[str, jax.Array] = {}
  put = functools.partial(_put, out, per_place)
  shares = density_of(places, masks, step)
  put("density", shares.overall, shares.places)
  put("density_target", shares.target, shares.targets)
  factors = decay(params, rules, step)
  put("D", sums.mean_by_size(places, factors), factors)
  patterns = pattern_now(params, rules, step).items()
  for name in PatternNow._fields:
    by_path = {path: getattr(now, name).astype(jnp.float32) for path, now in patterns}
    put(name, None, by_path)

  pairs: dict[str, tuple[Any, dict[str, Any]]] = {}
  if masks_before is not None:
    counts = flips.count_flips(masks_before, masks)
    rates = {path: flips.rate_of([c]) for path, c in counts.items()}
    pairs["flip_rate"] = flips.rate_of(list(counts.values())), rates
  if grads is not None:
    pairs["grad_abs_var"] = variances.of_gradient(grads, masks)
  if opt_state is not None:
    kind = f"second_moment_var{'_factored' if any_factored(opt_state, places) else ''}"
    pairs[kind] = variances.of_second_moment(second_moments(opt_state, params), masks)
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
    params: the dense parameters that the gradient was taken at.
    rules: the rules.
    step: the step that it was taken at, int32 scalar.
    state: the state of stateful recipes at that step.
    grads: the gradient, without SR-STE's term; None = no names of gradients.
    per_place: as in `summary`.
  """
  masks, out = masks_of(params, rules, step, state), {}
  if grads is not None:
    put = functools.partial(_put, out, per_place)
    _put_both(put, "grad_abs_var", variances.of_gradient(grads, masks))
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
    params: the dense parameters after the update.
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
