"""How a task of this package is made for seqio, and how it takes the place of an older one."""

# pyright: reportMissingImports=false, reportMissingModuleSource=false

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import seqio


def add_task(
  name: str,
  source: Any,
  vocabulary: seqio.Vocabulary,
  text_format: Callable,
  postprocess: Callable | None,
  metrics: Sequence[Callable],
) -> None:
  """Registers a text-to-text task: tokenized, cached from there on if asked for, then trimmed."""
  seqio.TaskRegistry.remove(name)
  seqio.TaskRegistry.add(
    name,
    source=source,
    preprocessors=[
      text_format,
      seqio.preprocessors.tokenize,
      seqio.CacheDatasetPlaceholder(),
      seqio.preprocessors.append_eos_after_trim,
    ],
    output_features={
      feature: seqio.Feature(vocabulary, add_eos=True) for feature in ("inputs", "targets")
    },
    postprocess_fn=postprocess,
    metric_fns=list(metrics),
  )


def add_mixture(name: str, rates: Mapping[str, float]) -> None:
  """Registers a mixture of tasks; rate 0 for a member that is only evaluated."""
  seqio.MixtureRegistry.remove(name)
  seqio.MixtureRegistry.add(name, [(task, float(rate)) for task, rate in rates.items()])


def known(name: str) -> str:
  """Returns `name`, if there is a task or mixture of that name."""
  names = {*seqio.TaskRegistry.names(), *seqio.MixtureRegistry.names()}
  if name not in names:
    ours = ", ".join(sorted(n for n in names if n.startswith("nm_")))
    raise ValueError(f"no task or mixture {name!r}: choose one of {ours}.")
  return name
