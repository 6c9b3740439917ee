"""What T5X, its trainer or the local runner would refuse, from the settings alone."""

# pyright: reportMissingImports=false, reportMissingModuleSource=false

from __future__ import annotations

import inspect

from nm_sparsity_jax.analysis.plan.findings import Findings
from nm_sparsity_jax.analysis.plan.model import Made
from nm_sparsity_jax.runs import files, settings


def check(found: Findings, made: Made) -> None:
  """Notes what the program would refuse before its first step.

  Args:
    found: of the run.
    made: what its settings make.
  """
  for name in ("MODEL_DIR", "INITIAL_CHECKPOINT_PATH"):
    if found.config.get(name) == "":
      found.errors.append(f"{name} is empty")
  if found.config.program and not found.config.local:
    _check_paths(found)
  if found.config.local:
    found.attempt("run", _check_local, found, made)
  elif found.config.program == "train":
    _check_t5x(found, made)


def _check_local(found: Findings, made: Made) -> None:
  """Makes the run, so that its parts check themselves."""
  from nm_sparsity_jax.trainer import folders, step, train

  if found.config.program != "train":
    evaluation = found.argument("evaluation")
    if found.config.program == "infer" and None not in (evaluation, made.network):
      evaluation.for_predictions(made.network)
    return
  try:
    run = found.config.argument("run")
    run.check()
    if found.config.is_set("WORKLOAD"):  # the data of a T5 are looked at by `data.check`
      run.model.workload.check()
    if run.best_metric is not None:
      found.notes.append(
        f"BEST_METRIC={run.best_metric!r} is not checked here: the run looks for it at its "
        "first evaluation, among what the metrics of the tasks return"
      )
  except step.WrongDevices:
    found.notes.append("NUM_PARTITIONS is not checked: this command sees one CPU")
  except Exception as e:
    if not _is_of_places(made, e):
      raise
  model_dir = found.config.argument("model_dir", "Run")
  folder = folders.of(model_dir)
  if why := files.cannot_write(folder):
    found.errors.append(f"MODEL_DIR={model_dir!r} cannot be written to: {why}")
  settings.refuse_changed(folder, train.settings_of(found.config.settings("Run")))


def _is_of_places(made: Made, error: Exception) -> bool:
  """Returns True for a mistake of rules and parameters, which `places` has noted in its words."""
  if made.rules is None or made.params is None:
    return False
  try:
    made.rules.assign(made.params)
  except ValueError as e:
    return str(e) in str(error)
  return False


def _check_paths(found: Findings) -> None:
  """Notes paths that are relative still: the run files of this package make them absolute."""
  from nm_sparsity_jax.integrations import t5x as t5x_adapter

  paths = {"MODEL_DIR": found.argument("model_dir")}
  restore = found.restore_settings()
  names = {"train": "INITIAL_CHECKPOINT_PATH"}
  paths[names.get(str(found.config.program), "CHECKPOINT_PATH")] = getattr(restore, "path", None)
  for name, path in paths.items():
    found.attempt(name, t5x_adapter.refuse_relative, name, path)


def _check_t5x(found: Findings, made: Made) -> None:
  _check_steps(found)
  _check_trainer(found, made)
  _check_periods(found)
  parts = found.microbatches()
  if parts and found.batch_size and found.batch_size % parts:
    found.errors.append(f"BATCH_SIZE={found.batch_size} does not split into {parts} microbatches")


def _check_steps(found: Findings) -> None:
  steps = found.argument("total_steps")
  if found.argument("relative_steps"):
    found.errors.append(
      "TRAIN_STEPS_RELATIVE is set: T5X adds it to the restored step, so each restart adds a "
      "whole run. Leave it out; the run ends at PRETRAINED_STEPS + SPARSE_STEPS"
    )
  sparse, offset = found.config.get("SPARSE_STEPS"), found.offset
  if None not in (steps, sparse, offset) and steps != sparse + offset:
    found.errors.append(
      f"TRAIN_STEPS is {steps:,}, but the schedule ends at PRETRAINED_STEPS + SPARSE_STEPS = "
      f"{offset + sparse:,}: leave TRAIN_STEPS alone"
    )


def _check_trainer(found: Findings, made: Made) -> None:
  trainer = found.argument("trainer_cls")
  if inspect.isclass(trainer) and found.config.is_set("METRICS_EVERY"):
    from nm_sparsity_jax.integrations import t5x as t5x_adapter

    found.attempt(
      "METRICS_EVERY", t5x_adapter.check_metrics_every, found.config.get("METRICS_EVERY")
    )
  if made.model is None or made.rules is None or trainer is None:
    return
  from nm_sparsity_jax.integrations import t5x as t5x_adapter

  if inspect.isclass(trainer) and not issubclass(trainer, t5x_adapter.SparseTrainer):
    found.errors.append(
      f"the trainer is {trainer.__name__}: it never counts a sparse step. Set "
      "train_script.train.trainer_cls = @t5x_adapter.SparseTrainer"
    )


def _check_periods(found: Findings) -> None:
  save = getattr(found.argument("checkpoint_cfg"), "save", None)
  save_period = getattr(save, "period", None) or 0
  eval_period = found.argument("eval_period") or 0
  if not save_period or not eval_period:
    return
  least = min(save_period, eval_period)
  if save_period % least or eval_period % least:
    found.errors.append(
      f"EVAL_PERIOD={eval_period} and utils.SaveCheckpointConfig.period={save_period}: T5X "
      "wants one to be a multiple of the other"
    )
