"""What a run takes from a checkpoint: which one it opens, what fits, what is refused.

path -> runs.checkpoint -> [T5X's transformations] -> keys: loaded, initialised, dropped
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from nm_sparsity_jax.analysis.plan.build import Built
from nm_sparsity_jax.analysis.plan.checks import restore_settings
from nm_sparsity_jax.analysis.plan.findings import Findings
from nm_sparsity_jax.core.trees import alike, flatten, group, nested
from nm_sparsity_jax.deploy import unstack_layers
from nm_sparsity_jax.runs import checkpoint, checkpoint_rules, folders
from nm_sparsity_jax.training import rules_text

# The first word of a key -> the section that counts it.
_SECTIONS = {"target": "parameters", "state": "step and optimizer", "flax_mutables": "mutables"}
_Taken = Mapping[str, list[str]]  # 'load', 'initialise', 'drop' -> keys


def check(found: Findings, built: Built) -> dict[str, Any] | None:
  """Returns the part `restore`; None without a checkpoint, or for one that is refused."""
  resumed = found.attempt("MODEL_DIR", _resumed, found)
  initial = None
  if resumed is None or not found.config.local:  # the local runner opens none if it resumes
    initial = found.attempt("the checkpoint", _initial, found, built)
  if initial is not None and found.config.program == "train":
    _check_start(found, initial, resumed is not None)
  stored = initial if resumed is None else resumed
  if stored is None or built.params is None:
    return None
  taken = found.attempt("restore", _taken, found, built, stored, resumed is not None)
  return None if taken is None else _part(stored, taken)


def _resumed(found: Findings) -> checkpoint.Stored | None:
  """Opens the newest checkpoint in MODEL_DIR: a run resumes it, whatever else the settings name."""
  config = found.config
  if config.program != "train" or found.checkpoint:
    return None
  folder = config.get("MODEL_DIR") if config.local else config.argument("model_dir")
  newest = folders.latest(folder) if isinstance(folder, str) and folder else None
  if newest is None:
    return None
  stored, steps = checkpoint.read(newest), found.number("TRAIN_STEPS")
  found.notes.append(f"MODEL_DIR has checkpoints: the run would resume from {newest}")
  if steps is not None and (stored.step or 0) >= steps:
    found.warnings.append(f"{newest} is at TRAIN_STEPS={steps:,} already: nothing would be done")
  return stored


def _initial(found: Findings, built: Built) -> checkpoint.Stored | None:
  """Opens the checkpoint that the settings name, or that you asked for."""
  config, path = found.config, found.checkpoint
  evaluates = config.program in ("evaluate", "infer")
  if path is None and config.local:
    path = config.get("CHECKPOINT_PATH" if evaluates else "INITIAL_CHECKPOINT_PATH")
    path = checkpoint.find(str(path)) if path and evaluates else path
  elif path is None and config.program is not None:
    path = getattr(restore_settings(found), "path", None)
    path = path[0] if isinstance(path, list | tuple) and path else path
  if not path:
    return None
  network_config = getattr(built.workload, "network_config", None)
  stored = checkpoint.read(str(path), built.variables, network_config)
  if stored.packed is not None and not (config.local and evaluates):
    why = "no run starts from one" if config.program == "train" else "T5X reads none"
    raise ValueError(
      f"{stored.path!r} is a packed file, and {why}: name the checkpoint that was packed"
    )
  return stored


def _check_start(found: Findings, stored: checkpoint.Stored, resuming: bool) -> None:
  """Notes what is wrong with the checkpoint that a run starts from."""
  offset = found.number("PRETRAINED_STEPS")
  if offset is not None and stored.step not in (None, offset):
    found.errors.append(
      f"PRETRAINED_STEPS={offset}, but {stored.path} is of step {stored.step}: set "
      f"PRETRAINED_STEPS={stored.step}"
    )
  if not resuming and (said := checkpoint_rules.check_start(stored)):
    found.warnings.append(f"INITIAL_CHECKPOINT_PATH: {said}")


def _taken(found: Findings, built: Built, stored: checkpoint.Stored, resuming: bool) -> _Taken:
  """Returns what is loaded, initialised and dropped; notes what does not fit."""
  leaves: Mapping[str, Any] = stored.leaves
  wanted, fallback = _wanted(built, stored), True
  if built.state is not None:
    settings = restore_settings(found)
    fallback = settings.fallback_to_scratch and not resuming
    leaves = _transformed(built, stored, settings, resuming)
  load = {key: leaves[key] for key in wanted if key in leaves}
  used = {leaf.key for leaf in load.values()}
  drop = [key for key in stored.leaves if key not in used]
  if built.state is None:  # what else a program keeps is not known here
    drop = [key for key in drop if key.startswith("target/")]
  taken = {"load": list(load), "initialise": [x for x in wanted if x not in load], "drop": drop}
  sizes = {key: (leaf.shape, tuple(wanted[key].shape)) for key, leaf in load.items()}
  other = {key: both for key, both in sizes.items() if None not in both and both[0] != both[1]}
  if other:
    found.errors.append(_of_another_size(stored.path, other, len(wanted)))
  else:
    _note_missing(found, stored.path, taken, fallback)
  return taken


def _note_missing(found: Findings, path: str, taken: _Taken, fallback: bool) -> None:
  """Notes what the checkpoint or the model lacks."""
  lost, extra = (_parameters(taken[kind]) for kind in ("initialise", "drop"))
  if taken["initialise"] and not fallback:
    found.errors.append(
      f"{path} lacks {len(taken['initialise'])} arrays, such as {taken['initialise'][0]}, and "
      "RestoreCheckpointConfig.fallback_to_scratch is not set"
    )
  elif lost:
    found.errors.append(
      f"{path} lacks parameters of this model, which would start from random values: {lost}"
    )
  if extra:
    found.warnings.append(f"{path} has parameters that this model lacks: {extra}")


def _wanted(built: Built, stored: checkpoint.Stored) -> dict[str, Any]:
  """Returns key -> shape of what the run takes: T5X's state, else parameters alone."""
  if built.state is not None:
    return dict(flatten(built.state.state_dict()))
  params = built.params
  if stored.packed is not None:  # its network does not scan
    params, _ = unstack_layers.unstacked(params, built.workload.network_config)
  return {f"target/{path}": leaf for path, leaf in flatten(params)}


def _transformed(
  built: Built, stored: checkpoint.Stored, settings: Any, resuming: bool
) -> dict[str, Any]:
  """Returns the keys that T5X's transformations make of a checkpoint; they refuse a dense one."""
  if settings.dtype == "bfloat16" and built.rules is not None:
    raise ValueError(
      "utils.RestoreCheckpointConfig.dtype = 'bfloat16': masks need the stored dtype, since "
      "rounding changes which weights survive. Set 'float32'"
    )
  if resuming and stored.rules and built.rules and not checkpoint_rules.is_of(stored, built.rules):
    was, now = stored.rules, rules_text.describe(built.rules)
    raise ValueError(
      f"{stored.path} was trained with the rules {was!r}, not with these, {now!r}: use its rules, "
      "or another MODEL_DIR"
    )
  leaves = stored.leaves
  if stored.in_place:  # to T5X the weights are those of a dense model
    leaves = {key: x for key, x in leaves.items() if not key.startswith("flax_mutables/")}
  state: Any = nested(leaves)
  for function in settings.state_transformation_fns:
    called = functools.partial(function, is_resuming=True) if resuming else function
    state = called(state, nested(_wanted(built, stored)))
  return dict(flatten(state))


def _of_another_size(path: str, other: Mapping[str, tuple], count: int) -> str:
  """Says which arrays have another shape; like layers count once, parameters come first."""
  kinds = sorted(alike(other), key=lambda kind: not kind[0].startswith("target/"))
  shown = [f"{name} has shape {there} there and {here} here" for name, _, (there, here) in kinds]
  return (
    f"{path} is of a model of another size: {len(other)} of {count} arrays differ. "
    f"{'; '.join(shown[:3])}. Take the model file that it was made with"
  )


def _parameters(keys: list[str]) -> str:
  paths = [key for key in keys if key.startswith("target/")]
  return ", ".join(name for name, _ in group(paths, words=True))


def _part(stored: checkpoint.Stored, taken: _Taken) -> dict[str, Any]:
  sections: dict[str, dict[str, int]] = {}
  for kind, keys in taken.items():
    for key in keys:
      name = _SECTIONS.get(key.partition("/")[0], key)
      sections.setdefault(name, dict.fromkeys(taken, 0))[kind] += 1
  return {
    "path": stored.path,
    "format": stored.format,
    "step": stored.step,
    "sparse_step": stored.sparse_step,
    "rules": stored.rules,
    "sections": sections,
    "initialise": [name for name, _ in group(taken["initialise"])],
    "drop": [name for name, _ in group(taken["drop"])],
  }
