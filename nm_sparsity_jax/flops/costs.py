"""FLOPs of what is sparse: of one example, and of a run.

ops -> x density = inference;  ops -> x timeline = training
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from nm_sparsity_jax import roles
from nm_sparsity_jax.flops.ops import Cost, Op, Shape, covers, is_int


class Pattern(Protocol):
  """Keep `n` of every `m` weights along the contraction axis, such as `NM(1, 8)`."""

  @property
  def n(self) -> int: ...

  @property
  def m(self) -> int: ...


class Segment(Protocol):
  """Steps [start, stop) of a timeline: a pattern (None = dense), D from one value to another."""

  @property
  def start(self) -> int: ...

  @property
  def stop(self) -> int: ...

  @property
  def pattern(self) -> Pattern | None: ...

  @property
  def decay_start(self) -> float: ...

  @property
  def decay_stop(self) -> float: ...


class Recipe(Protocol):
  """What is read of a recipe: `nm_sparsity_jax.recipe(...)` gives one."""

  @property
  def phases(self) -> Any: ...

  @property
  def gradient_mode(self) -> str | None: ...

  def timeline(self, axis_size: int) -> Sequence[Segment]: ...


def inference(shape: Shape, densities: Mapping[str, Pattern | float | Recipe]) -> Cost:
  """Returns the forward FLOPs of one example, and the parameters that are kept.

  With density s = n/m of each op (1 where no key names it; S_FF in the paper's Table 18, which
  calls it "sparsity"):

    FLOPs = sum_op s * F_op,    params = sum_op s * P_op

  Args:
    shape: of the network, such as a `T5Shape` or a `ViTShape`.
    densities: place -> pattern, density in (0, 1], or recipe (its last pattern). A place is a
      role, such as ff, q, qkv or conv, after "encoder/", "decoder/", "self/", "decoder/cross/",
      "layers_0/" ... to narrow it.

  Returns:
    a `Cost` per example.

  Raises:
    ValueError: for an unknown place, one that names nothing, two that name one op, a density
      outside (0, 1], or a pattern whose groups do not divide an op's contraction axis.

  >>> from nm_sparsity_jax.flops import ViTShape
  >>> cost = inference(ViTShape(), {"ff": 0.125, "qkv": 0.25})
  >>> round(cost.select("attention", "ff").flops / 1e9, 2)
  9.05
  """
  ops = shape.ops()
  chosen = _assign(ops, densities)
  kept = []
  for op in ops:
    s = _density(chosen[op], op) if op in chosen else 1.0
    kept.append(dataclasses.replace(op, flops=op.flops * s, params=round(op.params * s)))
  return Cost(tuple(kept))


def training(
  shape: Shape,
  recipes: Mapping[str, Recipe],
  batch_size: int = 1,
  *,
  steps: int | None = None,
  until: int | None = None,
) -> Cost:
  """Returns the FLOPs of a run, forward and backward, and the parameters that it stores (all).

  At each step an op of dense forward FLOPs F costs

    forward  F s  +  input gradient  F s  +  weight gradient  F     (straight_through)
                                                              F s   (masked)

  where s = 1 while D > 0 or before a pattern holds, else the density n/m of that step's pattern.
  A straight-through weight gradient needs every entry; a masked one is exactly 0 where D = 0 and
  the weight is pruned. Ops without a recipe cost 3 F. Recomputation (remat) is not counted.

  Args:
    shape: of the network, such as a `T5Shape` or a `ViTShape`.
    recipes: place -> recipe, places as in `inference`. All have one `phases.total`.
    batch_size: examples per step.
    steps: length of the run; needed only where there is no recipe to tell it.
    until: count the steps [0, until) alone, what it has cost so far; None = all.

  Returns:
    a `Cost` of these steps.

  Raises:
    ValueError: as `inference`; also for runs of different lengths, and for a timeline that does
      not cover [0, total) without gaps.

  >>> from nm_sparsity_jax.flops import Cost, ViTShape
  >>> 3 * 10 * Cost(ViTShape().ops()).flops == training(ViTShape(), {}, steps=10).flops
  True
  """
  if not is_int(batch_size) or batch_size < 1:
    raise ValueError(f"batch_size={batch_size!r}: examples per step must be an int >= 1.")
  for place, recipe in recipes.items():
    if not hasattr(recipe, "timeline"):
      raise ValueError(
        f"recipes[{place!r}]={recipe!r}: training needs a recipe, since a pattern or a density "
        "alone does not say from which step on it holds. Use nms.recipe(name, pattern=..., "
        "phases=...), or inference() for the FLOPs of the result."
      )
  totals = {place: recipe.phases.total for place, recipe in recipes.items()}
  if steps is not None:
    totals["steps"] = steps
  if len(set(totals.values())) > 1:
    raise ValueError(
      f"the runs differ in length: {totals}. The parts of one model train together: "
      "give every recipe the same Phases.total."
    )
  if not totals:
    raise ValueError(
      "recipes={} and steps=None: nothing says how long the run is. Give `steps`, "
      "or a recipe (the dense one too has phases)."
    )
  total = next(iter(totals.values()))
  if not is_int(total) or total < 1:
    raise ValueError(f"a run of {total!r} steps: the length must be an int >= 1.")
  until = _step_of(until, total)

  ops = shape.ops()
  chosen = _assign(ops, recipes)
  done = []
  for op in ops:
    weighed = 3.0 * until if op not in chosen else _weighed_steps(chosen[op], op, total, until)
    done.append(dataclasses.replace(op, flops=op.flops * batch_size * weighed))
  return Cost(tuple(done))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernel:
  """One sparse parameter of a network, to be priced.

  Attributes:
    op: name of its operation in the shape, as `roles.op_of(path)` gives it.
    params: its weights; an operation may be the sum of several layers.
    axis: length of the axis of its groups, padding included.
    recipe: what is applied to it.
  """

  op: str
  params: int
  axis: int
  recipe: Recipe


class Place(Protocol):
  """What is read of a place: `rules.assign(params).places` has them by path."""

  @property
  def axis_size(self) -> int: ...

  @property
  def recipe(self) -> Recipe: ...


def kernels(
  shape: Shape, places: Mapping[str, Place], sizes: Mapping[str, int]
) -> tuple[list[Kernel], str]:
  """Returns the sparse parameters of a network, and the first that no operation counts, or "".

      found, lost = flops.kernels(shape, rules.assign(params).places, sizes)

  Args:
    shape: of the network.
    places: path -> what is sparse there.
    sizes: path -> number of weights.
  """
  ops, found = {op.name for op in shape.ops()}, []
  for path, place in places.items():
    if (name := roles.op_of(path, ops)) is None:
      return found, path
    found.append(Kernel(op=name, params=sizes[path], axis=place.axis_size, recipe=place.recipe))
  return found, ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Priced:
  """What sparse kernels cost beside dense ones.

  Attributes:
    steps: those that are trained, 0 where no recipe says the length of the run.
    inference_dense: forward FLOPs of one example of the dense network.
    inference_sparse: the same of the finalized network.
    training_dense: FLOPs of the run if it were dense.
    training_sparse: FLOPs of the run.
    params: all weights of the network.
    kept: those that the finalized network keeps.
    sparse_params: weights in sparse kernels, kept or not.
  """

  steps: int
  inference_dense: float
  inference_sparse: float
  training_dense: float
  training_sparse: float
  params: int
  kept: int
  sparse_params: int


def price(
  shape: Shape, kernels: Sequence[Kernel], batch_size: int = 1, until: int | None = None
) -> Priced:
  """Prices a network whose sparse kernels are given one by one.

  `inference` and `training` take places by name; this takes what rules chose, whatever the places
  are called. A kernel's share of its operation's FLOPs is its share of the operation's weights.

  Args:
    shape: of the network.
    kernels: the sparse ones. Their recipes have one length.
    batch_size: examples per step.
    until: train the steps [0, until) alone; None = all.

  Raises:
    ValueError: for a kernel whose operation the shape lacks, and for a step that no run has.
  """
  ops = {op.name: op for op in shape.ops()}
  if lacking := [kernel.op for kernel in kernels if kernel.op not in ops]:
    raise ValueError(f"the shape has no operation {lacking[0]!r}; it has {', '.join(ops)}.")
  total = next((k.recipe.phases.total for k in kernels if k.recipe.phases), 0)
  length = _step_of(until, total)
  dense = sum(op.flops for op in ops.values())
  params = sum(op.params for op in ops.values())
  saved = trained = 0.0
  kept = params
  for kernel in kernels:
    op = ops[kernel.op]
    own = op.flops * kernel.params / op.params
    last = kernel.recipe.timeline(kernel.axis)[-1]
    density = last.pattern.n / last.pattern.m if last.pattern else 1.0  # of what `finalize` makes
    saved += own * (1 - density)
    kept -= round(kernel.params * (1 - density))
    at_its_axis = dataclasses.replace(op, axis=kernel.axis)
    trained += own * (3 * length - _weighed_steps(kernel.recipe, at_its_axis, total, length))
  return Priced(
    steps=length,
    inference_dense=dense,
    inference_sparse=dense - saved,
    training_dense=3 * dense * length * batch_size,
    training_sparse=(3 * dense * length - trained) * batch_size,
    params=params,
    kept=kept,
    sparse_params=sum(kernel.params for kernel in kernels),
  )


def _step_of(until: int | None, total: int) -> int:
  """Returns the step that a run is counted to: all its steps where none is given."""
  until = total if until is None else until
  if not is_int(until) or not 0 <= until <= total:
    raise ValueError(f"until={until!r}: a step of the run, an int from 0 to {total}.")
  return until


def _weighed_steps(recipe: Recipe, op: Op, total: int, until: int | None = None) -> float:
  """Returns the training FLOPs of steps [0, until) in units of F: the sum of s + s + (1 or s)."""
  until = total if until is None else until
  segments = recipe.timeline(axis_size=op.axis)
  bounds = [0, *(s.stop for s in segments)]
  if [s.start for s in segments] != bounds[:-1] or bounds[-1] != total:
    raise ValueError(
      f"the timeline of {recipe!r} for {op.name} has the segments "
      f"{[(s.start, s.stop) for s in segments]}: they must follow one another "
      f"from 0 to phases.total={total}."
    )
  sparse_steps = 0.0  # sum of s
  for segment in segments:
    length = max(0, min(segment.stop, until) - segment.start)
    if segment.pattern is None or segment.decay_start > 0 or length < 1:
      # D runs linearly and reaches decay_stop only at `stop`, which is the next segment's.
      at_zero = 0
    elif segment.decay_stop > 0:
      at_zero = 1  # D rises from 0: only the first step is sparse
    else:
      at_zero = length
    s = _density(segment.pattern, op) if at_zero else 1.0
    sparse_steps += at_zero * s + (length - at_zero)
  if recipe.gradient_mode == "straight_through":
    return 2 * sparse_steps + until
  if recipe.gradient_mode == "masked" or sparse_steps == until:
    return 3 * sparse_steps
  raise ValueError(
    f"{recipe!r} has gradient_mode={recipe.gradient_mode!r}; known are 'masked' and "
    "'straight_through', and the cost of the weight gradient depends on it."
  )


def _density(value: Any, op: Op) -> float:
  """Returns the density of a pattern, a number or a recipe's last segment, for one op's kernel."""
  if hasattr(value, "timeline"):
    value = value.timeline(axis_size=op.axis)[-1].pattern
    if value is None:
      return 1.0
  if hasattr(value, "n") and hasattr(value, "m"):
    if op.axis % value.m:
      raise ValueError(
        f"{value} on {op.name}: groups of {value.m} do not divide its contraction axis of "
        f"{op.axis}. Choose another pattern, or give the density as a number."
      )
    return value.n / value.m
  if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= 1:
    return float(value)
  raise ValueError(
    f"density {value!r} for {op.name}: give a pattern such as NM(1, 8), a recipe, "
    "or the share of weights *kept*, a number in (0, 1]."
  )


def _assign(ops: Sequence[Op], places: Mapping[str, Any]) -> dict[Op, Any]:
  """Gives each op the value of the one key that names it; ops without a key are left out."""
  owner: dict[Op, str] = {}
  for key in places:
    mine = [op for op in ops if op.prunable and covers(key, op, ops)]
    if not mine:
      raise ValueError(
        f"{key!r} names nothing in this model; it has {[op.name for op in ops if op.prunable]}."
      )
    for op in mine:
      if op in owner:
        raise ValueError(
          f"{owner[op]!r} and {key!r} both name {op.name}: one op, one value. "
          "Narrow one of them, for example by 'encoder/' or 'decoder/cross/'."
        )
      owner[op] = key
  return {op: places[key] for op, key in owner.items()}
