"""What holds at a step: phases, levels of a pattern, curves of D, the timeline.

    step -> [schedules: pattern now, D now] -> masks -> effective weight

A step counts the optimizer updates that this sparse run has applied: 0 in the first forward
pass. It is never a global step of a checkpoint that the run started from.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nm_sparsity_jax.core.patterns import NM

# The step where none was given, or where a stored mask is wrong. A traced value cannot raise, so
# each recipe makes D and the weights NaN at a step below 0, and NaN is seen.
NO_STEP = np.int32(-1)


def as_step(step: jax.Array | int) -> jax.Array:
  """Returns `step` as an int32 scalar; refuses floats, and arrays with axes."""
  if not jnp.issubdtype(jnp.result_type(step), jnp.integer) or jnp.shape(step):
    raise ValueError(
      f"step={step!r} is not a whole number: pass the optimizer's step count, a Python int or a "
      "traced integer scalar such as nms.step_count(opt_state). Under jit a Python float becomes "
      "a float tracer, so pass jnp.int32(step); where every device keeps a count, pass step[0]."
    )
  if isinstance(step, int | np.integer) and step < 0:
    raise ValueError(f"step={step} is negative: the first step of the sparse run is 0.")
  return jnp.asarray(step, jnp.int32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Phases:
  """The three phases of a run: dense, sparsify, fine-tune.

      dense [0, dense) -> sparsify [dense, total - finetune) -> fine-tune [total - finetune, total)

  >>> Phases(total=100_000, dense=10_000, finetune=20_000).sparsify
  70000

  Attributes:
    total: steps of the sparse run.
    dense: steps at the start in which every recipe equals dense.
    finetune: steps at the end with the binary target mask and D = 0.
  """

  total: int
  dense: int = 0
  finetune: int = 0

  def __post_init__(self):
    steps = dataclasses.asdict(self)
    are_steps = all(isinstance(x, int | np.integer) and 0 <= x < 2**31 for x in steps.values())
    if not are_steps or self.total < max(1, self.dense + self.finetune):  # steps are int32
      raise ValueError(
        f"{self}: give whole numbers of steps below 2**31. dense and finetune must be at least 0, "
        "and total at least 1 and at least dense + finetune: raise total or shorten a phase."
      )
    for name, value in steps.items():
      object.__setattr__(self, name, int(value))  # numpy's too: equal phases have one text

  @property
  def sparsify(self) -> int:
    """Returns the steps of the sparsify phase, total - dense - finetune."""
    return self.total - self.dense - self.finetune

  @property
  def finetune_start(self) -> int:
    """Returns the first step of the fine-tune phase, total - finetune."""
    return self.total - self.finetune


# --- levels -----------------------------------------------------------------------------------


def stepwise_levels(pattern: NM) -> tuple[NM, ...]:
  """Returns m-1, then floor(m / 2^d) while larger than n, then n (of m), strictly decreasing.

  >>> [str(p) for p in stepwise_levels(NM(1, 8))]
  ['7:8', '4:8', '2:8', '1:8']
  """
  # As in the paper, the first level prunes one weight of a group.
  halves = [pattern.m >> d for d in range(1, pattern.m.bit_length())]
  larger = [n for n in (pattern.m - 1, *halves) if n > pattern.n]
  return tuple(NM(n, pattern.m) for n in (*larger, pattern.n))


def geometric_levels(pattern: NM, k: int = 16, axis_size: int | None = None) -> tuple[NM, ...]:
  """Returns k*n/2^d : k*m/2^d down to n:m, without levels whose group does not divide `axis_size`.

  Only the first levels can fall away: what a longer group divides, a shorter one divides too.

  >>> [str(p) for p in geometric_levels(NM(1, 8))]
  ['16:128', '8:64', '4:32', '2:16', '1:8']
  >>> [str(p) for p in geometric_levels(NM(1, 32), axis_size=768)]
  ['8:256', '4:128', '2:64', '1:32']
  """
  if not isinstance(k, int) or k < 1 or k & (k - 1):
    raise ValueError(f"k={k!r} must be a power of two: the group halves from k*m down to m.")
  factors = [k >> d for d in range(k.bit_length())]
  levels = tuple(NM(f * pattern.n, f * pattern.m) for f in factors)
  return tuple(p for p in levels if p == pattern or axis_size is None or axis_size % p.m == 0)


def share_phase(levels: Sequence[NM], phases: Phases) -> tuple[tuple[int, NM], ...]:
  """Returns the start of each of L levels that share S sparsify steps: dense + floor(i * S / L)."""
  if phases.sparsify < len(levels):
    raise ValueError(
      f"{len(levels)} levels ({', '.join(map(str, levels))}) need at least as many sparsify steps, "
      f"but {phases} has {phases.sparsify}. Raise total, or choose a recipe or pattern with fewer "
      "levels."
    )
  return tuple((phases.dense + i * phases.sparsify // len(levels), p) for i, p in enumerate(levels))


# --- curves of D ------------------------------------------------------------------------------
#
# D(j) in [0, 1], j = step - dense; D = 1 for j <= 0. Each is written so that jit and eager
# mode agree to the bit: no product is followed by a sum that a compiler could fuse with it.


@dataclasses.dataclass(frozen=True)
class Curve:
  """How D(j) falls within the sparsify phase, j = step - dense.

  In the fine-tune phase D = 0 in any case.

  Attributes:
    value: (j, xp) -> D(j), float32, for an array j of the library `xp`, jax.numpy or numpy.
    knots: the j at which D(j) has a corner, or becomes 0, for the timeline; where it rises from 0
      also the next j.
  """

  value: Callable[[Any, Any], Any]
  knots: tuple[int, ...]


def exponential(beta: float) -> Curve:
  """Returns D = exp(-beta * j), as MDGF-Exponential has it."""
  end = min(math.ceil(87 / beta), 2**31 - 1)  # e^-87 is the last normal float32

  def value(j, xp):
    j = xp.asarray(j)
    d = xp.exp(xp.float32(-beta) * xp.maximum(j.astype(xp.float32), xp.float32(0)))
    return xp.where(j < end, d, xp.float32(0))

  return Curve(value, (end,))


def piecewise(*knots: tuple[float, float]) -> Curve:
  """Returns D that runs linearly between knots (j, D), j rising, and is constant outside."""
  # D is computed from the knots that float32 holds, so it turns where those are passed.
  starts = [min(math.ceil(np.float32(j)), 2**31 - 1) for j, _ in knots]
  pairs = list(itertools.pairwise(zip(starts, knots, strict=True)))

  def value(j, xp):
    j = xp.asarray(j)
    d = xp.full(j.shape, knots[0][1], xp.float32)
    for (start, (a, da)), (stop, (b, db)) in pairs:
      if da == db:
        continue
      # The line by its zero: one difference, one product.
      zero = xp.float32(a - da * (b - a) / (db - da))
      line = (j.astype(xp.float32) - zero) * xp.float32((db - da) / (b - a))
      line = xp.clip(line, xp.float32(min(da, db)), xp.float32(max(da, db)))
      d = xp.where(j > start, line, d)
      d = xp.where(j >= stop, xp.float32(db), d)
    return d

  # Where D rises from 0, it is 0 for one step: a segment of its own.
  rises = [start + 1 for (start, (_, da)), (_, (_, db)) in pairs if not da and db]
  return Curve(value, (*starts, *rises))


HARD = piecewise((0, 0.0))  # a pruned weight is 0 at once


def decay(kind: str | None, beta: float | None, phases: Phases) -> Curve:
  """Returns the curve of a kind of decay: 'linear', 'exponential', or None for hard masks.

      linear        D = max(1 - beta * j, 0)
      exponential   D = exp(-beta * j)

  By default D is 0, or 1 / 1000, after j* = min(0.7 * total, total - finetune) - dense steps. The
  paper's rule of thumb is 70 % of the budget.

  Args:
    kind: of decay.
    beta: how fast D falls; None takes 1 / j* (linear) or ln(1000) / j* (exponential).
    phases: the steps of the sparse run.
  """
  is_beta = beta is None or (kind is not None and 0 < beta < math.inf)
  if kind not in (None, "linear", "exponential") or not is_beta:
    raise ValueError(
      f"decay_kind={kind!r} with beta={beta!r}: choose 'linear', 'exponential' or None, and beta "
      "needs decay_kind and is a positive number, or D would not fall."
    )
  if kind is None:
    return HARD
  horizon = min(0.7 * phases.total, phases.finetune_start) - phases.dense
  if beta is None and horizon <= 0:
    raise ValueError(
      "beta=None lets D reach 0 after min(0.7 * total, total - finetune) - dense = "
      f"{horizon:g} steps of the sparsify phase, which must be positive: {phases}. Shorten the "
      "dense or fine-tune phase, or give beta."
    )
  if kind == "exponential":
    return exponential(math.log(1000) / horizon if beta is None else beta)
  # float32 holds 1e30 and its inverse.
  return piecewise((0, 1.0), (min(horizon if beta is None else 1 / beta, 1e30), 0.0))


# --- timeline ---------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Segment:
  """Steps [start, stop) with one pattern; D runs from `decay_start` to `decay_stop`.

  Attributes:
    start: first step.
    stop: first step that no longer belongs to it.
    pattern: the pattern, None = dense.
    decay_start: D at `start`.
    decay_stop: where D is heading at `stop`; a jump belongs to the next segment. In a segment
      with `decay_start` > 0 D is positive at each of its steps.
  """

  start: int
  stop: int
  pattern: NM | None
  decay_start: float
  decay_stop: float
