"""The cost of a run's network, from what it left in its folder.

    run.json   -> {"workload": {"ops": [...]}} \\
    config.gin -> the T5 that it binds         /  flops.Cost
"""

from __future__ import annotations

import pathlib
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from nm_sparsity_jax.runs import trained

if TYPE_CHECKING:
  from nm_sparsity_jax.models.t5 import T5Config
  from nm_sparsity_jax.training import flops


def cost_of(folder: pathlib.Path, gin: str) -> flops.Cost:
  """Returns the dense forward cost of a run's network, for one example.

  A run of any model family notes its operations in run.json, {"workload": {"ops": [...]}}, each
  with the fields of a `flops.Op`. Without such a note it is the T5 that config.gin binds.

  Args:
    folder: the run's.
    gin: the text of its config.gin; '' where there is none.

  Raises:
    ValueError: neither tells the network.
  """
  from nm_sparsity_jax.training import flops

  noted = (trained.started(folder).get("workload") or {}).get("ops")
  if noted is None:
    return _t5_cost(gin)
  try:
    return flops.Cost(tuple(flops.Op(**op) for op in noted))
  except TypeError as e:
    raise ValueError(f"run.json notes operations that cannot be read: {e}") from e


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


def _t5_cost(gin: str) -> flops.Cost:
  """Returns the cost of the T5 that the config binds."""
  from nm_sparsity_jax.models.t5 import Transformer
  from nm_sparsity_jax.trainer.workloads.t5 import T5

  config, lengths = _t5(gin)
  return T5(Transformer(config), lengths=lengths).cost()


def _literal(name: str, text: str) -> Any:
  try:
    return trained.plain(text.replace("\\\n", " "))
  except ValueError:
    raise ValueError(f"{name} is not a plain value in config.gin: {text}") from None
