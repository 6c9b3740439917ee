"""What a program refuses between the making of a run and its first step: its own checks, and data.

run, settings       -> the checks of the local runner
task                -> vocabulary, splits, files: of T5X
path -> checkpoint  -> [T5X's transformations] -> keys: loaded, initialised, dropped
"""

# pyright: reportMissingImports=false, reportMissingModuleSource=false

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from nm_sparsity_jax.analysis.plan.build import Plan
from nm_sparsity_jax.core.trees import flatten, nested
from nm_sparsity_jax.deploy import unstack_layers
from nm_sparsity_jax.integrations import gin_files
from nm_sparsity_jax.runs import checkpoint, checkpoint_rules, files, folders

# Arguments of T5X's programs that say what data they read.
_DATASETS = ("train_dataset_cfg", "train_eval_dataset_cfg", "infer_eval_dataset_cfg", "dataset_cfg")


def check(plan: Plan) -> None:
  """Raises what the program would refuse before its first step."""
  config = plan.config
  if config.program is not None and not config.local:
    if isinstance(folder := config.get("MODEL_DIR"), str) and "://" not in folder:
      plan.attempt(files.refuse_unwritable, "MODEL_DIR", folder)
    _data(plan)
  elif plan.run is not None:
    from nm_sparsity_jax.trainer import train

    train.check(plan.run, train.settings_of(plan.settings))
  elif plan.model is not None:
    config.argument("evaluation")(plan.model)


def _data(plan: Plan) -> None:
  """Looks up T5X's task or mixture: vocabulary, splits and files, not what is in the files."""
  name, module = map(plan.config.get, ("MIXTURE_OR_TASK_NAME", "MIXTURE_OR_TASK_MODULE"))
  if name is None:
    return
  # Importing it takes seconds, as it imports TensorFlow.
  from nm_sparsity_jax.trainer import data

  if module:
    gin_files.refuse_missing_module(module)
  task = data.import_seqio(module).get_mixture_or_task(name)
  # A vocabulary in a bucket would have to be fetched first.
  vocabularies = [feature.vocabulary for feature in task.output_features.values()]
  in_a_bucket = any("://" in getattr(v, "sentencepiece_model_file", "") for v in vocabularies)
  if plan.workload is not None and not in_a_bucket:
    lengths = plan.config.get("TASK_FEATURE_LENGTHS")
    plan.attempt(data.check_task, name, lengths, plan.workload.network_config.vocab_size)
  for argument in _DATASETS:
    if dataset := plan.config.argument(argument):
      _check_split(plan, task, dataset, argument == "train_dataset_cfg")


def _check_split(plan: Plan, task: Any, dataset: Any, trains: bool) -> None:
  """Refuses a split that the task lacks, or that has no files.

  An evaluation without its split is only warned of: T5X leaves it out.
  """
  import seqio

  # TFDS would have to look for its splits.
  known = {m: getattr(m.source, "_splits", None) for m in seqio.get_subtasks(task)}
  if not all(known.values()):
    return
  having = [member for member in known if dataset.split in known[member]]
  if not having and trains:
    there = ", ".join(sorted(task.splits))
    raise ValueError(f"{task.name} has no split {dataset.split!r} to train on; there is {there}")
  if not having:
    plan.warnings.append(f"{task.name} has no split {dataset.split!r}: nothing is evaluated there")
  for member in having if not dataset.use_cached else ():
    getattr(member.source, "look", lambda split: None)(dataset.split)


# --- the checkpoint -------------------------------------------------------------------------------


def restore(plan: Plan, path: str | None) -> dict[str, Any] | None:
  """Returns the part `restore`; None without a checkpoint.

  Args:
    plan: of the run.
    path: the checkpoint to look at; None = the one that the run would open.
  """
  # A run resumes the newest checkpoint in MODEL_DIR, whatever else the settings name.
  folder = plan.config.get("MODEL_DIR")
  looks = plan.config.program == "train" and not path and isinstance(folder, str)
  newest = folders.latest(folder) if looks else None
  if newest is not None:
    plan.notes.append(f"MODEL_DIR has checkpoints: the run would resume from {newest}")
  name = newest or path
  if not name and (plan.config.local or plan.state is not None):  # a run that can be made
    name = plan.config.get("INITIAL_CHECKPOINT_PATH" if plan.trains else "CHECKPOINT_PATH")
  if not name:
    return None
  network_config = getattr(plan.workload, "network_config", None)
  stored = checkpoint.read(str(name), plan.variables, network_config)
  if plan.state is not None and stored.format not in ("Orbax", "T5X"):
    raise ValueError(
      f"{stored.path} is a file or folder of the format {stored.format!r}, which T5X cannot open: "
      "take a checkpoint, such as `nm-sparsity finalize` or `convert` writes"
    )
  if plan.config.program == "train":
    _check_steps(plan, stored, newest is not None)
  part = {name: getattr(stored, name) for name in ("path", "format", "step", "sparse_step")}
  if plan.state is not None:
    part["sections"] = _sections(plan, stored, newest is not None)
  elif (params := plan.params) is not None:
    if stored.packed and plan.config.program != "train":  # the network that runs it has no scan
      params, _ = unstack_layers.unstacked(params, plan.workload.network_config)
    plan.attempt(checkpoint.check_shapes, stored, {"target": params})
  return part


def _check_steps(plan: Plan, stored: checkpoint.Stored, resuming: bool) -> None:
  """Notes steps that do not fit to the checkpoint, and one that is not to be started from."""
  if not resuming and (said := checkpoint_rules.check_start(stored)):
    plan.warnings.append(f"INITIAL_CHECKPOINT_PATH: {said}")
  # A resumed run counts from the step at which it began.
  start = stored.start if resuming else stored.step or 0
  macros = "PRETRAINED_STEPS", "TRAIN_STEPS", "TRAIN_STEPS_RELATIVE"
  if start is not None:  # that of a dense run is not known
    steps = map(plan.config.get, macros)
    plan.attempt(checkpoint_rules.check_steps, plan.rules, start, *steps)


def _sections(
  plan: Plan, stored: checkpoint.Stored, resuming: bool
) -> dict[str, Mapping[str, int]]:
  """Returns how much of each section T5X loads, initialises and drops; notes what does not fit."""
  wanted = dict(flatten(plan.state.state_dict()))
  if plan.trains:
    settings = plan.config.argument("checkpoint_cfg").restore
  else:
    settings = plan.config.argument("restore_checkpoint_cfg")
  leaves = _transformed(plan, stored, settings, wanted, resuming)
  load = [key for key in wanted if key in leaves]
  missing = [key for key in wanted if key not in leaves]
  # T5X's transformations have refused what is missing, or let it start afresh. T5X fails at an
  # array that is missing, but for a start that may fall back.
  if missing and (resuming or not settings.fallback_to_scratch):
    plan.errors.append(
      f"{stored.path} lacks {len(missing)} arrays, such as {missing[0]}: continue with the "
      "OPTIMIZER and the model file of the config.gin in its folder"
    )
  params = {key: wanted[key] for key in load if key.startswith("target/")}
  plan.attempt(checkpoint.check_shapes, dataclasses.replace(stored, leaves=leaves), params)
  used = {leaves[key] for key in load}  # the transformations may have moved them
  dropped = [key for key, x in stored.leaves.items() if x not in used]
  kinds = {"load": load, "initialise": missing, "drop": dropped}
  section = lambda key: key.partition("/")[0]  # such as 'target'
  return {kind: collections.Counter(map(section, keys)) for kind, keys in kinds.items()}


def _transformed(
  plan: Plan, stored: checkpoint.Stored, settings: Any, wanted: Mapping[str, Any], resuming: bool
) -> dict[str, Any]:
  """Returns the keys that T5X's transformations make of a checkpoint; they refuse a dense one."""
  if settings.dtype == "bfloat16" and plan.rules is not None:
    raise ValueError(
      "utils.RestoreCheckpointConfig.dtype = 'bfloat16': masks need the stored dtype, since "
      "rounding changes which weights survive. Set 'float32'"
    )
  if (resuming or not plan.trains) and stored.rules and plan.rules is not None:
    checkpoint_rules.refuse_other_rules(stored.rules, plan.rules, stored.path)
  leaves = stored.leaves
  if stored.in_place:  # to T5X the weights are those of a dense model
    leaves = {key: x for key, x in leaves.items() if not key.startswith("flax_mutables/")}
  # No array is read: the transformations move and drop leaves.
  state: Any = nested(leaves)
  for function in settings.state_transformation_fns:
    called = functools.partial(function, is_resuming=True) if resuming else function
    state = called(state, nested(wanted))
  return dict(flatten(state))
