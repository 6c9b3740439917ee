"""What a run takes from a checkpoint: which one it opens, what fits, what is refused."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax

from nm_sparsity_jax.analysis.plan import places
from nm_sparsity_jax.analysis.plan.findings import Findings
from nm_sparsity_jax.analysis.plan.model import Made
from nm_sparsity_jax.analysis.plan.restore import Restore, restore
from nm_sparsity_jax.core.trees import flatten, group
from nm_sparsity_jax.deploy import unstack_layers
from nm_sparsity_jax.integrations import gin_files
from nm_sparsity_jax.runs import checkpoint, checkpoint_rules, folders, other_formats
from nm_sparsity_jax.trainer import workloads
from nm_sparsity_jax.training import rules_text
from nm_sparsity_jax.training.rules import Rules

# The beginning of a key -> the section that counts it.
_SECTIONS = {
  "target": "parameters",
  "state/param_states": "optimizer",
  "state/average": "average",
  "state": "step",
  "flax_mutables/nm_sparsity": "sparse state",
  "flax_mutables": "mutables",
}


def check(found: Findings, made: Made) -> dict[str, Any] | None:
  """Returns the part `restore`; None without a checkpoint, or for one that is refused.

  Args:
    found: of the run; gets what is wrong.
    made: what its settings make.
  """
  resumed = found.attempt("MODEL_DIR", _resumed, found)
  asks = resumed is None or not found.config.local  # the local runner opens none if it resumes
  initial = found.attempt("checkpoint", _initial, found, made) if asks else None
  if initial is not None:
    _check_settings(found, initial)
    if resumed is None and found.trains and (said := checkpoint_rules.check_start(initial)):
      found.warnings.append(f"INITIAL_CHECKPOINT_PATH: {said}")
  stored = initial if resumed is None else resumed
  if stored is None or _refused(found, stored, made.rules, resumed is not None):
    return None
  return _restore(found, stored, made, resumed is not None)


def _named(found: Findings) -> Any:
  """Returns the path of the checkpoint that you asked for, or that the settings name, if any."""
  if found.checkpoint is not None:
    return found.checkpoint
  if found.config.local:
    if found.config.program == "train":
      return found.config.get("INITIAL_CHECKPOINT_PATH")
    path = found.config.get("CHECKPOINT_PATH")
    return checkpoint.find(str(path)) if path else None  # a folder stands for its newest
  path = getattr(found.restore_settings(), "path", None)
  if isinstance(path, list | tuple):
    path = path[0] if path else None
  return path


def _initial(found: Findings, made: Made) -> checkpoint.Stored | None:
  """Opens the checkpoint that the settings name, or that you asked for."""
  path = _named(found)
  if not path:
    return None
  if made.params is not None and isinstance(made.network, workloads.Workload):
    like = jax.eval_shape(made.network.init, jax.random.PRNGKey(0))
    stored = checkpoint.read(str(path), like, made.network.network_config)
  else:
    own = getattr(made.network, "config", None) if found.config.local else None
    stored = checkpoint.read(str(path), config=own)
  if stored.packed is not None and not (found.config.local and found.config.program != "train"):
    why = "no run starts from one" if found.config.program == "train" else "T5X reads none"
    raise ValueError(
      f"{stored.path!r} is a packed file, and {why}: name the checkpoint that was packed"
    )
  if stored.format == other_formats.HUGGING_FACE and not found.config.local:
    raise ValueError(
      f"{stored.path} is a folder of Hugging Face's T5, which T5X does not read: `nm-sparsity "
      "convert` makes a checkpoint of it"
    )
  return stored


def _resumed(found: Findings) -> checkpoint.Stored | None:
  """Opens the newest checkpoint in MODEL_DIR: a run resumes it, whatever else the settings name."""
  if found.config.program != "train" or found.checkpoint:
    return None
  local = found.config.local
  folder = found.config.get("MODEL_DIR") if local else found.argument("model_dir")
  if not isinstance(folder, str):
    return None
  try:
    newest = folders.latest(folder)
    stored = checkpoint.read(newest) if newest else None
  except Exception as e:
    found.warnings.append(f"MODEL_DIR={folder!r} could not be looked at: {gin_files.message(e)}")
    return None
  if stored is not None:
    found.notes.append(f"MODEL_DIR has checkpoints: the run would resume from {newest}")
    steps = found.argument("total_steps")
    if None not in (steps, stored.step) and stored.step >= steps:
      found.warnings.append(f"{newest} is at TRAIN_STEPS={steps:,} already: nothing would be done")
  return stored


def _check_settings(found: Findings, stored: checkpoint.Stored) -> None:
  """Notes where settings and checkpoint disagree."""
  has_rules = found.config.is_set("RULES")
  if has_rules and getattr(found.restore_settings(), "dtype", 0) == "bfloat16":
    found.errors.append(
      "utils.RestoreCheckpointConfig.dtype = 'bfloat16': masks need the stored dtype, since "
      "rounding changes which weights survive. Set 'float32'"
    )
  offset = found.offset
  if found.config.program == "train" and None not in (offset, stored.step):
    if stored.step != offset:
      found.errors.append(
        f"PRETRAINED_STEPS={offset}, but {stored.path} is of step {stored.step}: set "
        f"PRETRAINED_STEPS={stored.step}"
      )


def _refused(
  found: Findings, stored: checkpoint.Stored, rules: Rules | None, resuming: bool
) -> bool:
  """Notes a checkpoint that a run with these rules cannot continue, and returns True for it."""
  local, evaluates = found.config.local, found.config.program in ("evaluate", "infer")
  if rules is None or not found.whole or not (resuming or evaluates):
    return False
  if local and resuming:  # the check of its settings says it
    return False
  # To T5X the weights of a local run are those of a dense model.
  if stored.rules is None or (stored.in_place and not local):
    if local and rules.is_dense:
      return False
    found.errors.append(_dense(stored, local, resuming))
    return True
  if checkpoint_rules.is_of(stored, rules):
    return False
  found.errors.append(
    f"{stored.path} was trained with the rules ({_in_line(stored.rules)}), not with these "
    f"({_in_line(rules_text.describe(rules))}): use its rules"
    + (", or another MODEL_DIR" if resuming else "")
  )
  return True


def _dense(stored: checkpoint.Stored, local: bool, resuming: bool) -> str:
  """Says why a model with rules does not open a dense checkpoint."""
  if resuming:
    return (
      f"{stored.path} is of a dense run, and T5X would resume that one: take an empty MODEL_DIR "
      "and name the dense checkpoint as INITIAL_CHECKPOINT_PATH"
    )
  how = "RECIPE = 'dense'" if local else "T5X's own model"
  why = "its weights are masked already" if stored.rules is not None else "it has no sparse step"
  return f"{stored.path} is dense: {why}. Evaluate it with {how}"


def _in_line(text: str) -> str:
  return text.replace("\n", "; ")


def _restore(
  found: Findings, stored: checkpoint.Stored, made: Made, resuming: bool
) -> dict[str, Any] | None:
  """Returns what is loaded, initialised and dropped; notes what T5X refuses."""
  settings = found.restore_settings()
  fallback = True
  if made.state is not None and settings is not None:
    fallback = settings.fallback_to_scratch and not resuming
    taken = _t5x_restore(found, stored, made.state, settings, resuming)
  elif made.params is not None:  # the optimizer and the like do not matter to a fragment
    params = made.params
    if stored.packed is not None:  # its network does not scan
      whose = "network_config" if isinstance(made.network, workloads.Workload) else "config"
      params, _ = unstack_layers.unstacked(params, getattr(made.network, whose, None))
    model = {f"target/{path}": leaf for path, leaf in flatten(params)}
    taken = restore(stored, model, getattr(settings, "dtype", None), fallback=fallback)
    drop = [key for key in taken.drop if key.startswith("target/")]
    taken = dataclasses.replace(taken, drop=drop)
  else:
    return None
  found.errors += taken.errors
  _check_parameters(found, stored, taken, fallback)
  return {
    "path": stored.path,
    "format": stored.format,
    "step": stored.step,
    "sparse_step": stored.sparse_step,
    "rules": stored.rules,
    "sections": _sections(taken),
    "initialise": [name for name, _ in group(taken.initialise)],
    "drop": [name for name, _ in group(taken.drop)],
  }


def _t5x_restore(
  found: Findings, stored: checkpoint.Stored, state: Any, settings: Any, resuming: bool
) -> Restore:
  """Restores a whole state as T5X does; with `resuming`, as t5x.train resumes its own run."""
  model = dict(flatten(state.state_dict()))
  functions: Sequence = tuple(settings.state_transformation_fns)
  if not resuming:
    return restore(stored, model, settings.dtype, functions, settings.fallback_to_scratch)
  functions = tuple(functools.partial(f, is_resuming=True) for f in functions)
  save = getattr(found.argument("checkpoint_cfg"), "save", None)
  return restore(stored, model, save.dtype if save else "float32", functions, False)


def _check_parameters(
  found: Findings, stored: checkpoint.Stored, taken: Restore, fallback: bool
) -> None:
  """Notes parameters that the model or the checkpoint lacks."""
  lost = [key for key in taken.initialise if key.startswith("target/")]
  extra = [key for key in taken.drop if key.startswith("target/")]
  if lost and fallback:
    how = "" if found.config.local else ", which would silently start from random values"
    found.errors.append(f"{stored.path} lacks parameters of this model{how}: {places.names(lost)}")
  if extra:
    found.warnings.append(
      f"{stored.path} has parameters that this model lacks: {places.names(extra)}"
    )


def _sections(taken: Restore) -> dict[str, dict[str, Any]]:
  """Counts what is loaded, initialised and dropped of parameters, optimizer and so on."""
  found: dict[str, dict[str, Any]] = {}
  for key in {*taken.load, *taken.initialise, *taken.drop}:
    found.setdefault(_section(key), {"load": 0, "initialise": 0, "drop": 0, "dtypes": {}})
  for key, (leaf, after) in taken.load.items():
    part = found[_section(key)]
    part["load"] += 1
    name = after if after == leaf.dtype else f"{leaf.dtype} -> {after}"
    part["dtypes"][name] = part["dtypes"].get(name, 0) + 1
  for kind in ("initialise", "drop"):
    for key in getattr(taken, kind):
      found[_section(key)][kind] += 1
  return {name: found[name] for name in _SECTIONS.values() if name in found}


def _section(key: str) -> str:
  for prefix, name in _SECTIONS.items():
    if key == prefix or key.startswith(prefix + "/"):
      return name
  return "mutables"
