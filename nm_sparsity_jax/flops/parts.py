"""What shapes are made of: attention, MLPs, checks of sizes."""

from __future__ import annotations

import dataclasses
from typing import Any

from nm_sparsity_jax.flops.ops import Op, is_int


def kernel(
  name: str,
  role: str,
  place: str,
  positions: int,
  inputs: int,
  outputs: int,
  axis: int | None = None,
) -> Op:
  """Returns the product of an (inputs, outputs) kernel, at so many tokens or pixels.

  Args:
    name: of the operation.
    role: of the kernel.
    place: where it stands.
    positions: how often the kernel is applied to an example.
    inputs: numbers that an output is summed over.
    outputs: of one position.
    axis: length of the axis of groups; None = `inputs`.
  """
  return Op(
    name=name,
    role=role,
    place=place,
    flops=2 * positions * inputs * outputs,
    params=inputs * outputs,
    axis=inputs if axis is None else axis,
    prunable=True,
  )


def attention(
  place: str,
  layers: int,
  queries: int,
  keys: int,
  embed: int,
  joined: int,
  window: int | None = None,
) -> tuple[Op, ...]:
  """Returns multi-head attention of `queries` over `keys` tokens; joined = heads * head_dim.

  Args:
    place: where it stands.
    layers: how many alike.
    queries: tokens that look.
    keys: tokens that are looked at.
    embed: width of a token.
    joined: width of all heads together.
    window: keys that each query looks at; None = all.
  """

  def kernel(role: str, tokens: int, axis: int) -> Op:
    return Op(
      name=f"{place}/{role}",
      role=role,
      place=place,
      axis=axis,
      prunable=True,
      flops=2 * tokens * embed * joined * layers,
      params=embed * joined * layers,
    )

  square = 2 * queries * (keys if window is None else window) * joined * layers
  return (
    kernel("q", queries, embed),
    kernel("k", keys, embed),
    kernel("v", keys, embed),
    Op(name=f"{place}/scores", role="scores", place=place, flops=square),
    Op(name=f"{place}/values", role="scores", place=place, flops=square),
    kernel("o", queries, joined),
  )


def mlp(place: str, layers: int, tokens: int, embed: int, mlp: int, gated: bool) -> tuple[Op, ...]:
  """Returns (wi_0, wi_1, wo) where gated, else (wi, wo)."""
  kernels = [(name, embed) for name in (("wi_0", "wi_1") if gated else ("wi",))] + [("wo", mlp)]
  return tuple(
    Op(
      name=f"{place}/{name}",
      role="ff",
      place=place,
      axis=axis,
      prunable=True,
      flops=2 * tokens * embed * mlp * layers,
      params=embed * mlp * layers,
    )
    for name, axis in kernels
  )


def check_sizes(shape: Any, zero: tuple[str, ...] = ()) -> None:
  """Refuses a size that is no positive int; those in `zero` may be 0."""
  for field in dataclasses.fields(shape):
    value = getattr(shape, field.name)
    said = f"{type(shape).__name__}({field.name}={value!r})"
    if field.type == "bool":
      if not isinstance(value, bool):
        raise ValueError(f"{said}: give True or False.")
    elif str(field.type).startswith("tuple"):
      if not (isinstance(value, tuple) and value and all(is_int(v) and v >= 1 for v in value)):
        raise ValueError(f"{said}: give a tuple with a size for each stage, ints >= 1.")
    elif not (value is None and field.default is None):
      least = 0 if field.name in zero else 1
      if not (is_int(value) and value >= least):
        raise ValueError(f"{said}: a size counts things, so it must be an int >= {least}.")


def check_same_length(shape: Any, *names: str) -> None:
  """Refuses tuples of sizes that speak of different numbers of stages."""
  given = {name: getattr(shape, name) for name in names}
  if len({len(value) for value in given.values()}) > 1:
    told = ", ".join(f"{name}={value}" for name, value in given.items())
    raise ValueError(f"{type(shape).__name__}({told}): give each a size for each stage.")
