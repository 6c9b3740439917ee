"""Checkpoints in T5X's layout, written by Orbax in the background.

    TrainState <-> {target, state/{step, param_states, nm_sparsity}, flax_mutables}
               <-> checkpoint_N/

`target` holds the effective weights, so T5X and everybody else reads it as any dense checkpoint.
`state/nm_sparsity` holds what `nms.sparse` keeps beside `param_states`, the state of the optimizer
within. `flax_mutables` are the workload's own collections.

A checkpoint is written beside its name and renamed when it is whole, so what is called
checkpoint_N is complete however the process ended. `t5x.eval` opens these, and this opens T5X's.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import serialization, traverse_util

from nm_sparsity_jax.core.errors import warn
from nm_sparsity_jax.core.text import first_line
from nm_sparsity_jax.core.trees import flatten, map_with_names, nested
from nm_sparsity_jax.runs import checkpoint, checkpoint_rules, folders, orbax
from nm_sparsity_jax.trainer.step import Model, TrainState
from nm_sparsity_jax.training import rules_text
from nm_sparsity_jax.training.layers import COLLECTION
from nm_sparsity_jax.training.rules import Rules
from nm_sparsity_jax.training.transform import SparseState

MUTABLES = "flax_mutables"  # T5X's name for all collections
_PREFIX = folders.PREFIX
_DOOMED = ".removed"  # behind the name of a checkpoint that is being removed


def to_tree(state: TrainState, rules: Rules) -> dict[str, Any]:
  """Returns the nested dict that T5X would save.

  Args:
    state: a state, or its shapes or shardings.
    rules: as stored, those of the step.
  """
  inner = serialization.to_state_dict(state.opt_state.inner_state)
  opt_state = traverse_util.flatten_dict(inner, sep="/")
  kept = {k: v for k, v in state.masks.items() if k != "step"}
  if dense := dict(flatten(state.opt_state.dense)):
    kept["dense"] = nested(dense)
  text = rules_text.pack(rules_text.describe(rules))
  return {
    "target": state.params,
    "state": {
      "step": state.step,
      # Without empty nodes, as T5X saves it.
      "param_states": traverse_util.unflatten_dict(opt_state, sep="/"),
      COLLECTION: {"step": state.sparse_step, "rules": text, **kept},
      **_average(state.average),
    },
    MUTABLES: dict(state.collections),
  }


def _average(average: Mapping[str, Any]) -> dict[str, Any]:
  """Returns an average where `Stored.deployed` looks for it; no optimizer has names there."""
  collections = {name: x for name, x in average.items() if name != "params"}
  mutables = {MUTABLES: collections} if collections else {}
  return {"average": {"target": average["params"], **mutables}} if average else {}


def from_tree(tree: Mapping[str, Any], like: TrainState, rules: Rules) -> TrainState:
  """Returns the train state of a tree.

  Args:
    tree: what `to_tree` made.
    like: its shapes, for the structure of the optimizer state.
    rules: as stored, those of the step.
  """
  inner = like.opt_state.inner_state
  empty = serialization.to_state_dict(inner)
  empty = traverse_util.flatten_dict(empty, keep_empty_nodes=True, sep="/")
  filled = traverse_util.flatten_dict(tree["state"]["param_states"], sep="/")
  inner = serialization.from_state_dict(
    inner, traverse_util.unflatten_dict({**empty, **filled}, sep="/")
  )
  opt_state = _sparse_state(tree["state"][COLLECTION], like.opt_state, rules, inner)
  average = tree["state"].get("average", {})
  if average:
    average = {"params": average["target"], **average.get(MUTABLES, {})}
  collections = dict(tree.get(MUTABLES, {}))
  return TrainState(tree["state"]["step"], tree["target"], opt_state, collections, average)


def _sparse_state(mine: Mapping[str, Any], like: Any, rules: Rules, inner: Any) -> SparseState:
  """Returns the state of `nms.sparse`, from its part of a checkpoint."""
  masks = {k: v for k, v in mine.items() if k not in ("step", "rules", "dense")}
  # Its own copy: a buffer cannot be donated twice.
  masks = {**masks, "step": jnp.copy(mine["step"])} if masks else {}
  dense = dict(flatten(mine.get("dense", {})))
  dense = map_with_names(lambda path, _: dense[path], like.dense)
  fingerprint = jnp.full_like(mine["step"], rules.fingerprint)
  return SparseState(mine["step"], fingerprint, dense, masks, inner)


class Checkpoints:
  """Keeps the checkpoints of one run.

  Args:
    folder: of the run; it exists.
    keep: how many of the newest stay, beside the best; None = all.
  """

  def __init__(self, folder: str | os.PathLike, keep: int | None):
    if keep is not None and keep < 1:
      raise ValueError(f"KEEP_CHECKPOINTS={keep}: keep at least one, or None for all.")
    import orbax.checkpoint as ocp

    self._ocp, self._keep = ocp, keep
    self.folder = pathlib.Path(folder).absolute()
    self.best: int | None = None  # the step that is never removed
    self._saving: int | None = None  # the step that is being written
    options = ocp.CheckpointManagerOptions(
      step_prefix=_PREFIX, cleanup_tmp_directories=True, create=False
    )
    self._quiet = contextlib.ExitStack()
    self._quiet.enter_context(orbax.quiet())
    with orbax.quiet():
      self._manager = ocp.CheckpointManager(
        self.folder, options=options, item_handlers={"state": ocp.PyTreeCheckpointHandler()}
      )

  def steps(self) -> Sequence[int]:
    """Returns the steps of complete checkpoints, ascending."""
    return folders.steps(self.folder)

  def newest(self) -> str:
    """Returns the name of the newest complete checkpoint; 'none' without one."""
    return f"{_PREFIX}_{steps[-1]}" if (steps := self.steps()) else "none"

  def save(self, step: int, tree: Mapping[str, Any]) -> None:
    """Starts to write; the tree may be donated afterwards."""
    if step == self._saving or step in self.steps():
      return
    with self._explained(step), orbax.quiet():
      self.wait()
      self._prune()
      # A copy on the host: on a CPU the background would else read what the next step writes to.
      tree = jax.tree.map(lambda x: np.array(x), tree)
      args = self._ocp.args.Composite(state=self._ocp.args.PyTreeSave(tree))
      self._saving = step
      self._manager.save(step, args=args, force=True)

  def wait(self) -> None:
    """Waits until the last one is complete."""
    if self._saving is not None:
      with self._explained(self._saving), orbax.quiet():
        self._manager.wait_until_finished()
        self._saving = None

  def abandon(self) -> None:
    """Ends Orbax' threads, which would otherwise print much at the end of a refused process."""
    with contextlib.suppress(Exception), orbax.quiet():
      self._manager.close()

  def close(self) -> None:
    """Waits, and removes what need not stay."""
    try:
      self.wait()
      self._prune()
    finally:
      with contextlib.suppress(Exception), orbax.quiet():
        self._manager.close()
      self._quiet.close()

  @contextlib.contextmanager
  def _explained(self, step: int) -> Iterator[None]:
    try:
      yield
    except _Said:
      raise
    except Exception as e:
      raise _Said(self.no_room(f"{self.folder}/{_PREFIX}_{step}", e)) from e

  def no_room(self, what: str, error: BaseException) -> str:
    """Returns a sentence: what could not be written, why, and where the run continues."""
    return (
      f"{what} could not be written ({first_line(error)}). The newest complete checkpoint is "
      f"{self.newest()}; with room on the disk, the same command continues from it."
    )

  def _prune(self) -> None:
    for path in self.folder.glob(f"*{_DOOMED}"):  # what a kill left
      if re.fullmatch(rf"{_PREFIX}_\d+{re.escape(_DOOMED)}", path.name) and path.is_dir():
        _remove(path)
    if self._keep is not None:
      for step in self.steps()[: -self._keep]:
        if step != self.best:
          path = self.folder / f"{_PREFIX}_{step}"
          doomed = path.with_name(path.name + _DOOMED)
          os.replace(path, doomed)  # at once: what a kill leaves of it is no checkpoint
          _remove(doomed)

  def restore(self, step: int, like: TrainState, model: Model) -> tuple[Any, str]:
    """Reads one of these checkpoints onto the devices: its tree, and the text of its rules."""
    path = self.folder / f"{_PREFIX}_{step}"
    rules, shardings = model.rules, model.shardings(like)
    wanted, where = to_tree(like, rules), to_tree(shardings, rules)
    text = jax.ShapeDtypeStruct((rules_text.TEXT_BYTES,), np.uint8)
    wanted["state"][COLLECTION]["rules"] = text
    where["state"][COLLECTION]["rules"] = model.replicated
    for tree in (wanted, where):
      if not tree[MUTABLES]:
        tree.pop(MUTABLES)
    try:
      tree = checkpoint.restore(path / "state", wanted, where)
    except Exception as e:
      others = [s for s in self.steps() if s < step]
      then = f"continues from {_PREFIX}_{others[-1]}" if others else "starts over"
      raise ValueError(
        f"{path} cannot be read: it is damaged, or of another program ({first_line(e)}). Move it "
        f"away, and the same command {then}."
      ) from e
    return tree, rules_text.unpack(tree["state"][COLLECTION]["rules"])


def _remove(folder: pathlib.Path) -> None:
  """Removes what it can. The rest is no checkpoint any more, and the next call tries again."""
  shutil.rmtree(folder, ignore_errors=True)


class _Said(ValueError):
  """An error that is already explained."""


def opened(path: str, model: Model, newest: bool = False) -> checkpoint.Stored:
  """Opens any checkpoint; a file of timm's weights is held against the model's network.

  Args:
    path: of the checkpoint.
    model: what takes it.
    newest: a run's folder stands for its newest checkpoint.
  """
  path = checkpoint.find(path) if newest else path
  variables = {"params": model.shapes, **model.collections}
  return checkpoint.read(path, variables, model.workload.network_config)


def load_initial(path: str, model: Model, key: jax.Array) -> tuple[Any, Any, int]:
  """Reads what a new run takes from any checkpoint: Orbax, T5X's own format, or timm's weights.

  Of a run that kept an average, that is taken: it is what was scored.

  Args:
    path: the checkpoint.
    model: what is trained.
    key: for collections of the workload that the checkpoint lacks.

  Returns:
    Parameters, the workload's collections, and the global step. All are float32.
  """
  stored = opened(path, model)
  if stored.packed is not None:
    raise ValueError(
      f"INITIAL_CHECKPOINT_PATH: {path!r} is a packed file, which is deployed and does not learn: "
      "start from the checkpoint that was packed."
    )
  like, where = {"target": model.shapes}, {"target": model.shardings(model.shapes)}
  wanted = [f"{MUTABLES}/{path}" for path, _ in flatten(model.collections)]
  is_held = bool(wanted) and set(wanted) <= set(stored.leaves)
  if is_held:
    like[MUTABLES], where[MUTABLES] = model.collections, model.shardings(model.collections)
  tree = _load(stored, like, where, model)
  if said := checkpoint_rules.check_start(stored):
    warn(f"INITIAL_CHECKPOINT_PATH: {said}")
  collections = tree[MUTABLES] if is_held else model.initial_collections(key)
  return tree["target"], collections, stored.step or 0


def _load(stored: checkpoint.Stored, like: Any, where: Any, model: Model) -> Any:
  """Loads what trees name, from the average where the run kept one."""
  if not stored.average:
    return checkpoint.load(stored, like, where, model.workload.setting_of)
  moved = lambda tree: nested({stored.deployed(key): x for key, x in flatten(tree)})
  setting_of = model.workload.setting_of
  found = dict(flatten(checkpoint.load(stored, moved(like), moved(where), setting_of)))
  leaves = [found[stored.deployed(key)] for key, _ in flatten(like)]
  return jax.tree.unflatten(jax.tree.structure(like), leaves)


def load_for_evaluation(stored: checkpoint.Stored, model: Model) -> dict[str, Any]:
  """Reads what is scored of a checkpoint that the model's rules made: W~, and the workload's state.

  It is that of the average where the run kept one. A dense checkpoint has no sparse step, so it is
  only taken where all rules are dense.

  Args:
    stored: what `opened` returns.
    model: workload and rules, as in training.
  """
  if stored.rules is not None:
    refuse_other_rules(stored.rules, model.rules, stored.path)
  elif not model.rules.is_dense:
    raise ValueError(
      f"{stored.path!r} is dense: it has no sparse step. Evaluate it with RECIPE = 'dense', or "
      "fine-tune it first (gin_configs/runs/local_finetune.gin)."
    )
  like: dict[str, Any] = {"target": model.shapes}
  if model.collections:
    like[MUTABLES] = model.collections
  tree = _load(stored, like, {name: model.shardings(x) for name, x in like.items()}, model)
  params = tree["target"]
  if stored.sparse_step is not None and (stored.average or not stored.in_place):
    params = model.effective(params, jnp.int32(stored.sparse_step), stored.masks())
  return {"params": params, **tree.get(MUTABLES, {})}


def refuse_other_rules(stored: str, rules: Rules, path: str) -> None:
  """Raises where the text of a checkpoint's rules differs from that of these rules."""
  now = rules_text.describe(rules)
  if stored != now:
    raise ValueError(
      f"{path} was trained with the rules [{_joined(stored)}], but this run has [{_joined(now)}]. "
      "Continue with the checkpoint's rules. For a new run with the others, take another MODEL_DIR "
      "and name the checkpoint as INITIAL_CHECKPOINT_PATH."
    )


def _joined(text: str) -> str:
  return "; ".join(text.splitlines())
