"""What a compiler says of a program: bytes moved, FLOPs, memory, collectives.

    jax.jit(f).lower(...).compile() -> [account] -> Account

XLA's own cost analysis counts the body of a loop once, however often it runs, and no bytes of a
Pallas kernel. Here a loop counts by its trips, and a kernel reads each operand once and writes each
result once.
"""

from __future__ import annotations

import collections
import functools
import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

_COMPUTATION = re.compile(r"^(ENTRY )?(%[\w.-]+) \([^\n]*\{\n(.*?)^\}", re.MULTILINE | re.DOTALL)
_LOOP = re.compile(r" while\(.*?condition=(%[\w.-]+), body=(%[\w.-]+)")
_CALLED = re.compile(r" call\([^\n]*?to_apply=(\S+)")
_BRANCHES = re.compile(
  r" conditional\([^\n]*?((?:true|false)_computation=\S+ \S+|branch_computations=\{.*?\})"
)
_LIMIT = re.compile(r"= s32\[\]\S* constant\((\d+)\)")
_COLLECTIVE = re.compile(
  r" (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
)
_KERNEL = re.compile(r"= (.+?) custom-call\((.*?)\), custom_call_target=\"tpu_custom_call\"")
_DEFINED = re.compile(r"(%[\w.-]+) = ([^ ]+?\]\S*) ")
_ARRAY = re.compile(r"\b(pred|[suf]\d+|bf16)\[([\d,]*)\]")


class Account(NamedTuple):
  """What a compiler says of one run of a program, on each device.

  Attributes:
    bytes: read from and written to memory, where each condition takes its dearest branch.
    flops: floating-point operations.
    memory: bytes of all arguments and temporaries together.
    collectives: kind -> how many stand in the program.
    kernels: how many Pallas kernels stand in the program.
    peak: bytes held at once at most, results included. It is what must fit. A TPU's temporaries
      need not all live at one time, so it may be below `memory`.
  """

  bytes: float
  flops: float
  memory: int
  collectives: Mapping[str, int]
  kernels: int
  peak: int


def account(compiled: Any) -> Account:
  """Returns what a compiled program costs.

      account(jax.jit(f).lower(x).compile()).bytes

  Args:
    compiled: of `jax.stages.Lowered.compile`, for one platform.
  """
  text = compiled.as_text()
  program, memory = _Program(text), compiled.memory_analysis()
  moved, flops = program.cost(program.entry).tolist()
  return Account(
    moved,
    flops,
    memory.temp_size_in_bytes + memory.argument_size_in_bytes,
    collections.Counter(_COLLECTIVE.findall(text)),
    len(_KERNEL.findall(text)),
    memory.peak_memory_in_bytes,
  )


class _Program:
  """The computations of an optimized program, by name, as text.

  A cost is an array: bytes moved, FLOPs.
  """

  def __init__(self, text: str):
    self.text, self.bodies = text, {}
    for entry, name, body in _COMPUTATION.findall(text):
      self.bodies[name] = body
      self.entry = name if entry else getattr(self, "entry", name)
    self.types = dict(_DEFINED.findall(text))

  def cost(self, name: str) -> np.ndarray:
    """Returns what one run of a computation costs, loops by their trips."""
    return self._once(name) + self._left_out(name)

  def _left_out(self, name: str) -> np.ndarray:
    """Returns what XLA's analysis leaves out: kernels, and the trips of a loop after the first."""
    body = self.bodies[name]
    found = np.array([self._bytes_of_kernels(body), 0.0])
    for condition, inner in _LOOP.findall(body):
      # The number that the loop's counter is compared with.
      trips = max(map(int, _LIMIT.findall(self.bodies[condition])), default=1)
      found += trips * self.cost(inner) - self._once(inner)
    for names in _CALLED.findall(body):
      found += sum(self._left_out(x) for x in self._named(names))
    for names in _BRANCHES.findall(body):
      branches = self._named(names)
      found += max(map(self.cost, branches), key=tuple)
      # XLA's analysis counts the dearest branch.
      found -= np.max([self._once(x) for x in branches], axis=0)
    return found

  def _named(self, names: str) -> list[str]:
    return [x for x in re.findall(r"%[\w.-]+", names) if x in self.bodies]

  @functools.cache  # noqa: B019  (a program lives as long as its account)
  def _once(self, name: str) -> np.ndarray:
    """Returns XLA's cost analysis of a computation, which counts each loop's body once."""
    # No public way leads to a part of a program.
    from jaxlib import _jax  # pyright: ignore[reportAttributeAccessIssue]

    try:
      from jaxlib import _hlo  # pyright: ignore[reportAttributeAccessIssue]
    except ImportError:  # before jaxlib 0.10.2
      _hlo = _jax
    text = self.text.partition("\n")[2].replace("\nENTRY ", "\n", 1)
    text = text.replace(f"\n{name} (", f"\nENTRY {name} (", 1)
    module = _hlo.hlo_module_from_text("HloModule part\n" + text)
    cost = _jax.hlo_module_cost_analysis(jax.devices("cpu")[0].client, module)
    return np.array([max(cost.get(key, 0.0), 0.0) for key in ("bytes accessed", "flops")])

  def _bytes_of_kernels(self, body: str) -> int:
    """Returns the bytes that the Pallas kernels of a computation read and write."""
    total = 0
    for result, operands in _KERNEL.findall(body):
      found = [result, *(self.types.get(x, "") for x in re.findall(r"%[\w.-]+", operands))]
      total += sum(_size(*array) for one in found for array in _ARRAY.findall(one))
    return total


def _size(kind: str, shape: str) -> int:
  """Returns the bytes of an array of HLO, such as ("bf16", "8,128")."""
  width = 1 if kind == "pred" else max(1, int(re.sub(r"\D", "", kind)) // 8)
  return width * math.prod(int(n) for n in shape.split(",") if n)
