"""What is priced: operations of a network, and their sums.

shape -> [ops] -> costs
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeGuard

from nm_sparsity_jax import roles

# What a cost may be selected by, beside roles: several roles together.
_TOGETHER: Mapping[str, tuple[str, ...]] = {
  "attention": ("q", "k", "v", "o", "scores"),
  "embedding": ("embedding", "stem"),  # of tokens, of patches
  "logits": ("logits", "head"),
}


class Shape(Protocol):
  """The sizes of a network, from which its operations follow.

  Write one for your own family of models; `T5Shape` and `ResNetShape` are two.
  """

  def ops(self) -> tuple[Op, ...]:
    """Returns dense forward FLOPs for one example, and all parameters, operation by operation."""
    ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Op:
  """One kind of operation at one place, summed over its layers.

  Attributes:
    name: for people, such as "decoder/cross/q" or "encoder/wi_0".
    role: ff, q, k, v, o, conv, stem, shortcut, merge, head, scores (both Q K^T and its product with
      V), logits, embedding, norm, position, scale or bias.
    place: "encoder", "decoder" (the MLPs), "encoder/self", "decoder/self", "decoder/cross" (the
      attentions), "shared" (T5's token embedding), or a stage such as "layers_0" or "layer1".
    flops: dense and forward for one example in `ops()`; what `Cost` says elsewhere.
    params: stored weights; in an inference cost those that are kept.
    axis: length of the contraction axis, along which groups lie; 0 where there is no kernel.
    prunable: whether a pattern may be put on its kernel.
  """

  name: str
  role: str
  place: str
  flops: float = 0
  params: int = 0
  axis: int = 0
  prunable: bool = False


@dataclasses.dataclass(frozen=True)
class Cost:
  """FLOPs and parameters, op by op; the sums are taken on demand.

  >>> from nm_sparsity_jax.flops import ViTShape
  >>> cost = Cost(ViTShape().ops())
  >>> round(cost.select("ff").flops / 1e9, 2), cost.select("ff").params
  (22.2, 56623104)
  """

  ops: tuple[Op, ...]

  @property
  def flops(self) -> float:
    """Returns the sum over all ops."""
    return sum(op.flops for op in self.ops)

  @property
  def params(self) -> int:
    """Returns the sum over all ops."""
    return sum(op.params for op in self.ops)

  @property
  def by_role(self) -> dict[str, Cost]:
    """Returns role -> its part of the cost; the parts add up to the whole."""
    return {
      r: Cost(tuple(op for op in self.ops if op.role == r))
      for r in dict.fromkeys(op.role for op in self.ops)
    }

  @property
  def by_place(self) -> dict[str, Cost]:
    """Returns place -> its part of the cost; the parts add up to the whole."""
    return {
      p: Cost(tuple(op for op in self.ops if op.place == p))
      for p in dict.fromkeys(op.place for op in self.ops)
    }

  def select(self, *words: str) -> Cost:
    """Returns the part that any word names: "ff", "encoder", "cross/qk", "decoder/norm" ..."""
    found = {w: [op for op in self.ops if covers(w, op, self.ops, prunable=False)] for w in words}
    if idle := [w for w, ops in found.items() if not ops]:
      raise ValueError(
        f"nothing in this cost is called {idle}; it has the roles "
        f"{list(self.by_role)} and the places {list(self.by_place)}."
      )
    return Cost(tuple(op for op in self.ops if any(op in ops for ops in found.values())))


def covers(key: str, op: Op, ops: Sequence[Op], prunable: bool = True) -> bool:
  """Returns whether `key`, a word after words that narrow it, names an operation.

  Args:
    key: such as 'ff' or 'decoder/cross/qk'.
    op: the operation.
    ops: all operations of the network, which say what words there are.
    prunable: whether only kernels that a pattern may be put on have words; else all operations do,
      and the word may be left out, as in 'encoder'.
  """
  words = _words(ops, prunable)
  parts = (part for o in ops for part in o.place.split("/"))
  places = dict.fromkeys([*roles.narrowing(), *parts])
  *prefix, last = key.split("/")
  if last not in words and not prunable:
    prefix.append(last)
    named: Sequence[str] = (op.role,)
  else:
    named = words.get(last, ())
  if not named or not set(prefix) <= {*places}:
    raise ValueError(
      f"unknown place {key!r}: known are {', '.join(words)}, each optionally after one or more of "
      f"{', '.join(f'{place}/' for place in places)}."
    )
  return op.role in named and set(prefix) <= set(op.place.split("/"))


def _words(ops: Sequence[Op], prunable: bool) -> dict[str, tuple[str, ...]]:
  """Returns word -> the roles that it names."""
  words = {role: roles.COMPOSITES.get(role, (role,)) for role in roles.regexes()}
  words |= {op.role: (op.role,) for op in ops if op.prunable}
  if not prunable:
    words |= {**_TOGETHER, **{op.role: (op.role,) for op in ops}}
  return words


def is_int(value: Any) -> TypeGuard[int]:
  """Returns whether a value is a whole number, and no bool."""
  return isinstance(value, int) and not isinstance(value, bool)
