"""What a program refuses between the making of a run and its first step."""

# pyright: reportMissingImports=false, reportMissingModuleSource=false

from __future__ import annotations

import inspect
from typing import Any

from nm_sparsity_jax.analysis.plan.build import Built
from nm_sparsity_jax.analysis.plan.findings import Findings
from nm_sparsity_jax.integrations import gin_files
from nm_sparsity_jax.runs import files, settings

# Arguments of T5X's programs that say what data they read.
_DATASETS = ("train_dataset_cfg", "train_eval_dataset_cfg", "infer_eval_dataset_cfg", "dataset_cfg")


def check(found: Findings, built: Built) -> None:
  """Notes what the program would refuse before its first step."""
  if found.config.local:
    found.attempt("the run", _local, found, built)
  if found.config.program == "train" and not found.config.local:
    found.attempt("the trainer", _trainer, found, built)
    _steps(found)
  if found.config.program is not None:
    found.attempt("data", _data, found, built)


def _local(found: Findings, built: Built) -> None:
  """Asks the run, as `train` does."""
  from nm_sparsity_jax.trainer import folders, train

  if found.config.program == "infer" and built.workload is not None:
    found.config.argument("evaluation").for_predictions(built.workload)
  if found.config.program != "train":
    return
  if built.run is not None:
    built.run.check()
    if not built.has_tokens:  # the part `data` looks at tasks and their vocabulary
      built.run.model.workload.check()
    if built.run.best_metric is not None:
      found.notes.append(
        f"BEST_METRIC={built.run.best_metric!r} is not checked here: the run looks for it before "
        "its first step, among what the metrics of the tasks return"
      )
  model_dir = found.config.argument("model_dir", "Run")
  folder = folders.of(model_dir)
  if why := files.cannot_write(folder):
    raise ValueError(f"MODEL_DIR={model_dir!r} cannot be written to: {why}")
  settings.refuse_changed(folder, train.settings_of(found.config.settings("Run")))


# --- T5X ------------------------------------------------------------------------------------------


def restore_settings(found: Findings) -> Any:
  """Returns T5X's settings of what the program restores; None where nothing sets them."""
  if found.config.program == "train":
    return getattr(found.config.argument("checkpoint_cfg"), "restore", None)
  return found.config.argument("restore_checkpoint_cfg")


def _trainer(found: Findings, built: Built) -> None:
  """Refuses a trainer that is not ours."""
  from nm_sparsity_jax.integrations import t5x as t5x_adapter

  cls = found.config.argument("trainer_cls")
  if built.model is None or built.rules is None or cls is None:
    return
  if inspect.isclass(cls) and not issubclass(cls, t5x_adapter.SparseTrainer):
    raise ValueError(
      f"the trainer is {cls.__name__}: it never counts a sparse step. Set "
      "train_script.train.trainer_cls = @t5x_adapter.SparseTrainer"
    )


def _steps(found: Findings) -> None:
  """Notes steps that do not go together; T5X says so only once it has restored."""
  config = found.config
  steps, sparse, offset = map(found.number, ("TRAIN_STEPS", "SPARSE_STEPS", "PRETRAINED_STEPS"))
  if config.get("TRAIN_STEPS_RELATIVE"):
    found.errors.append(
      "TRAIN_STEPS_RELATIVE is set: T5X adds it to the restored step, so each restart adds a "
      "whole run. Leave it out; the run ends at PRETRAINED_STEPS + SPARSE_STEPS"
    )
  if steps is not None and sparse is not None and offset is not None and steps != sparse + offset:
    found.errors.append(
      f"TRAIN_STEPS is {steps:,}, but the schedule ends at PRETRAINED_STEPS + SPARSE_STEPS = "
      f"{offset + sparse:,}: leave TRAIN_STEPS alone"
    )
  parts = found.attempt("microbatches", config.argument, "num_microbatches", "SparseTrainer")
  batch = found.number("BATCH_SIZE")
  if parts and batch and batch % parts:
    found.errors.append(f"BATCH_SIZE={batch} does not split into {parts} microbatches")
  saved = found.attempt("checkpoints", config.argument, "checkpoint_cfg")
  saves = getattr(getattr(saved, "save", None), "period", None)
  evaluates = found.number("EVAL_PERIOD")
  if saves and evaluates and max(saves, evaluates) % min(saves, evaluates):
    found.errors.append(
      f"EVAL_PERIOD={evaluates} and utils.SaveCheckpointConfig.period={saves}: T5X wants one to "
      "be a multiple of the other"
    )


# --- data -----------------------------------------------------------------------------------------


def _data(found: Findings, built: Built) -> None:
  """Looks up the task or mixture: its features, vocabulary and splits, not what is in its files."""
  name = found.config.get("MIXTURE_OR_TASK_NAME")
  if name is None:
    return
  from nm_sparsity_jax.trainer import data

  module = found.config.get("MIXTURE_OR_TASK_MODULE")
  if module:
    gin_files.refuse_missing_module(module)
  data.import_seqio(module)
  task = data.mixture_or_task(name, module)
  if unknown := sorted({*(found.lengths or {})} - {*task.output_features}):
    raise ValueError(
      f"TASK_FEATURE_LENGTHS names {', '.join(unknown)}, but {name} has the features "
      f"{', '.join(task.output_features)}"
    )
  rows = getattr(getattr(built.workload, "network_config", None), "vocab_size", None)
  # A vocabulary in a bucket would have to be fetched first.
  vocabularies = [feature.vocabulary for feature in task.output_features.values()]
  in_a_bucket = any("://" in getattr(v, "sentencepiece_model_file", "") for v in vocabularies)
  if rows is not None and not in_a_bucket:
    found.attempt("the vocabulary", data.check_vocabulary, name, rows)
  for argument in () if found.config.local else _DATASETS:
    _split(found, task, argument)


def _split(found: Findings, task: Any, argument: str) -> None:
  """Notes a split that a program of T5X reads and the task lacks, and files that are not there."""
  import seqio

  dataset = found.config.argument(argument)
  split, members = getattr(dataset, "split", None), seqio.get_subtasks(task)
  # TFDS would have to look for its splits.
  known = {member: getattr(member.source, "_splits", None) for member in members}
  if split is None or not all(known.values()):
    return
  having = [member for member in members if split in known[member]]
  if not having and argument == "train_dataset_cfg":
    there = ", ".join(sorted(task.splits))
    raise ValueError(f"{task.name} has no split {split!r} to train on; there is {there}")
  if not having:
    done = "predicted" if found.config.program == "infer" else "evaluated"
    found.warnings.append(f"{task.name} has no split {split!r}, so nothing is {done}")
  for member in having if not dataset.use_cached else ():
    getattr(member.source, "look", lambda split: None)(split)
