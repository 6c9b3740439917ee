"""Finds the workload of what a gin file names, and says what it is for a run's files."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

from nm_sparsity_jax.core.text import listed
from nm_sparsity_jax.trainer.workloads.base import REQUIRED, Workload

_log = logging.getLogger(__name__)


def of(family: Any, **settings: Any) -> Workload:
  """Returns the workload of a network, or a workload itself.

      workloads.of(Regression())                      # itself
      workloads.of(Transformer(config), z_loss=1e-4)  # workloads.t5.T5

  Args:
    family: a `Workload`, or a network of T5's interface.
    **settings: of the workload of a network; those that are None are left at their defaults.

  Raises:
    ValueError: it is neither, or lacks a method, which is named.
  """
  given = {name: value for name, value in settings.items() if value is not None}
  if hasattr(family, "config") and hasattr(family, "decode"):
    from nm_sparsity_jax.trainer.workloads.t5 import T5

    return T5(family, **given)
  refuse_incomplete(family)
  if given:
    raise ValueError(
      f"{', '.join(given)}: {type(family).__name__} is a workload with its own loss. Pass these "
      "settings to the workload."
    )
  return family


def refuse_incomplete(workload: Any) -> None:
  """Raises ValueError where an object cannot serve as a workload, and names what is missing."""
  if isinstance(workload, type):
    raise ValueError(
      f"{workload.__name__} is a class, and a workload is an object: write {workload.__name__}(), "
      f"in gin @MODULE.{workload.__name__}()."
    )
  name = type(workload).__name__
  lacking = [
    method
    for method in REQUIRED
    if getattr(type(workload), method, None) in (None, getattr(Workload, method))
  ]
  if lacking:
    raise ValueError(
      f"{name} lacks {listed(lacking)}: define {'it' if len(lacking) == 1 else 'them'}. A "
      f"workload needs {listed(REQUIRED)} (nms.workloads.Workload says what each does)."
    )
  if not isinstance(workload, Workload):
    raise ValueError(f"{name} must be a subclass of nm_sparsity_jax.trainer.workloads.Workload.")


def refuse_without_predict(workload: Workload) -> None:
  """Raises ValueError where a workload cannot say what it predicts, and names the method."""
  if type(workload).predict is Workload.predict:
    raise ValueError(
      f"{type(workload).__name__} lacks predict: define predict(params, state, batch), which "
      "returns name -> an array with an entry a row."
    )


def describe(workload: Workload, lengths: Mapping[str, int] | None = None) -> dict[str, Any]:
  """Returns what run.json says of a workload: plain values.

  'class': module and name; 'weight'; 'lengths'; 'ops': of its cost, each a dict of the fields of
  `flops.Op`, or None where it cannot be traced, which is logged; 'network_settings', where there
  are such: those that shapes do not reveal.

  Args:
    workload: of any family.
    lengths: feature -> tokens of an example, where there are such.
  """
  kind, settings = type(workload), workload.network_settings()
  try:
    ops = [dataclasses.asdict(op) for op in workload.cost(lengths).ops]
  except Exception as e:  # of your own code: a run does without
    _log.warning("no FLOPs of %s: %s", kind.__name__, e)
    ops = None
  return {
    "class": f"{kind.__module__}.{kind.__qualname__}",
    "weight": workload.weight,
    "lengths": None if lengths is None else dict(lengths),
    "ops": ops,
    **({"network_settings": dict(settings)} if settings else {}),
  }
