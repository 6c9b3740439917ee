"""The shape of a run's network, from what it left in its folder.

    run.json   -> {"workload": {"shape": [...]}} \\
    config.gin -> the T5 that it binds           /  flops.Shape
    rules, checkpoint                            -> flops.Kernel of each sparse parameter
"""

from __future__ import annotations

import dataclasses
import pathlib
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from nm_sparsity_jax.runs import trained

if TYPE_CHECKING:
  from nm_sparsity_jax import flops
  from nm_sparsity_jax.models.t5 import T5Config
  from nm_sparsity_jax.rules import Rules


@dataclasses.dataclass(frozen=True)
class NotedShape:
  """A `flops.Shape` of operations that a run noted of its network."""

  noted: tuple[flops.Op, ...]

  def ops(self) -> tuple[flops.Op, ...]:
    """Returns the operations."""
    return self.noted


def shape_of(folder: pathlib.Path, gin: str) -> flops.Shape:
  """Returns the shape of a run's network.

  A run of any model family notes its operations in run.json, {"workload": {"shape": [...]}},
  each with the fields of a `flops.Op`. Without such a note it is the T5 that config.gin binds.

  Args:
    folder: the run's.
    gin: the text of its config.gin; '' where there is none.

  Raises:
    ValueError: neither tells the network.
  """
  from nm_sparsity_jax import flops

  noted = (trained.started(folder).get("workload") or {}).get("shape")
  if noted is None:
    return _configured_t5(gin)
  try:
    return NotedShape(tuple(flops.Op(**op) for op in noted))
  except TypeError as e:
    raise ValueError(f"run.json notes operations that cannot be read: {e}") from e


def kernels_of(
  folder: pathlib.Path, gin: str, rules: Rules, shape: flops.Shape
) -> list[flops.Kernel]:
  """Returns a run's sparse parameters, one by one, whatever its rules call them.

  Args:
    folder: the run's. Its newest checkpoint tells the parameters; without one they are those of the
      T5 that config.gin binds.
    gin: the text of its config.gin.
    rules: the run's.
    shape: of its network.

  Raises:
    ValueError: nothing tells the parameters, or the shape has no operation for one.
  """
  from nm_sparsity_jax import flops, plan, trees
  from nm_sparsity_jax.models.t5 import Transformer

  params = trained.shapes_of(folder)
  if params is None:
    params, axes = plan.shapes(Transformer(_t5(gin)[0]))
    rules = rules.with_logical_axes(axes)
  sizes = trees.sizes(params)
  if flops.Cost(shape.ops()).params != sum(sizes.values()):
    raise ValueError("its parameters are not those of the network that config.gin or run.json says")
  kernels, lost = flops.kernels(shape, rules.assign(params).places, sizes)
  if lost:
    raise ValueError(f"{lost} is not a part of an operation whose cost is known")
  return kernels


_BOUND = re.compile(r"^(?:\w+\.)*T5Config\.(?:(preset|wmt)\.)?(\w+) = (.*(?:\n[ \t]+.*)*)", re.M)
# Of T5X's own class, which has the names of ours: what its parameters and its FLOPs depend on.
_SIZES = (
  "vocab_size", "emb_dim", "num_heads", "num_encoder_layers", "num_decoder_layers", "head_dim",
  "mlp_dim", "mlp_activations", "logits_via_embedding",
)  # fmt: skip


def _t5(gin: str) -> tuple[T5Config, Mapping[str, int]]:
  """Returns the T5 that a config binds, of this package or T5X's own, and the lengths of tasks."""
  from nm_sparsity_jax.models.t5 import T5Config

  settings = trained.parse_settings(gin)
  found = _BOUND.findall(gin)
  if len({how for how, *_ in found}) != 1:
    raise ValueError("config.gin binds no T5Config")
  how = found[0][0]
  values = {}
  for _, name, text in found:
    if how or name in _SIZES:
      macro = text.removeprefix("%")
      values[name] = settings.get(macro) if macro != text else _literal(name, text)
  lengths = settings.get("TASK_FEATURE_LENGTHS") or {}
  if not {"inputs", "targets"} <= set(lengths):
    raise ValueError("config.gin has no TASK_FEATURE_LENGTHS of inputs and targets")
  try:
    return (getattr(T5Config, how) if how else T5Config)(**values), lengths
  except TypeError as e:
    raise ValueError(f"config.gin binds a T5Config that cannot be made: {e}") from e


def _configured_t5(gin: str) -> flops.T5Shape:
  """Returns the shape of the T5 that the config binds."""
  from nm_sparsity_jax import flops

  config, lengths = _t5(gin)
  return flops.T5Shape.of(config, lengths["inputs"], lengths["targets"])


def _literal(name: str, text: str) -> Any:
  try:
    return trained.plain(text.replace("\\\n", " "))
  except ValueError:
    raise ValueError(f"{name} is not a plain value in config.gin: {text}") from None
