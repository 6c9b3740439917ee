"""Whether the data of a run are there and fit: the task, its features, vocabulary and splits.

What is in the files is not looked at.
"""

# pyright: reportMissingImports=false, reportMissingModuleSource=false

from __future__ import annotations

import importlib
from typing import Any

from nm_sparsity_jax.analysis.plan.findings import Findings
from nm_sparsity_jax.integrations import gin_files

# Arguments of T5X's programs that say what data they read.
_DATASETS = ("train_dataset_cfg", "train_eval_dataset_cfg", "infer_eval_dataset_cfg", "dataset_cfg")


def check(found: Findings, network: Any) -> None:
  """Notes what is wrong with the task or mixture of a run.

  Args:
    found: of the run.
    network: the flax module, which must embed every id.
  """
  task = found.attempt("data", _task, found)
  if task is not None:
    found.attempt("data", _check_vocabulary, task, network)
    found.attempt("data", _check_splits, found, task)


def _task(found: Findings) -> Any:
  """Returns the task or mixture, which must have the features that TASK_FEATURE_LENGTHS names."""
  name = found.config.get("MIXTURE_OR_TASK_NAME")
  if found.config.program is None or name is None:
    return None
  from nm_sparsity_jax.trainer import data

  if module := found.config.get("MIXTURE_OR_TASK_MODULE"):
    gin_files.refuse_missing_module(module)
    importlib.import_module(module)
  task = data.mixture_or_task(name, module)
  lengths = found.config.get("TASK_FEATURE_LENGTHS") or {}
  if unknown := sorted(set(lengths) - set(task.output_features)):
    raise ValueError(
      f"TASK_FEATURE_LENGTHS names {', '.join(unknown)}, but {name} has the features "
      f"{', '.join(task.output_features)}"
    )
  return task


def _check_vocabulary(task: Any, network: Any) -> None:
  """Refuses ids without an embedding; leaves out vocabularies that lie in a bucket."""
  from nm_sparsity_jax.trainer import data

  rows = getattr(getattr(network, "config", None), "vocab_size", None)
  vocabularies = [feature.vocabulary for feature in task.output_features.values()]
  files = [getattr(v, "sentencepiece_model_file", "") for v in vocabularies]
  if rows is not None and not any("://" in file for file in files):
    data.check_vocabulary(task.name, rows)


def _check_splits(found: Findings, task: Any) -> None:
  """Refuses a task without the splits to be read, or without the files of a split."""
  import seqio

  for argument in () if found.config.local else _DATASETS:
    dataset = found.argument(argument)
    split, members = getattr(dataset, "split", None), seqio.get_subtasks(task)
    if split is None or any(splits(member) is None for member in members):
      continue
    having = [member for member in members if split in splits(member)]
    if not having:
      text = f"{task.name} has no split {split!r}"
      if argument == "train_dataset_cfg":
        raise ValueError(f"{text} to train on; there is {', '.join(sorted(task.splits))}")
      done = "predicted" if found.config.program == "infer" else "evaluated"
      mixtures = " or ".join(_mixtures_of(task, split))
      hint = f": choose {mixtures}" if mixtures else ""
      found.warnings.append(f"{text}, so nothing is {done}{hint}")
    if not dataset.use_cached:
      for member in having:
        getattr(member.source, "look", lambda split: None)(split)


def splits(task: Any) -> Any:
  """Returns the splits of a task of seqio; None where TFDS would have to look for them."""
  return getattr(task.source, "_splits", None) or None


def _mixtures_of(task: Any, split: str) -> list[str]:
  """Returns the mixtures that train on a task and have a split which it lacks."""
  import seqio

  mixtures = {
    name: seqio.get_subtasks(seqio.get_mixture_or_task(name))
    for name in seqio.MixtureRegistry.names()
  }
  has = lambda members: any(split in (splits(member) or ()) for member in members)
  return sorted(n for n, members in mixtures.items() if task in members and has(members))
