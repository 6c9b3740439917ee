"""Checkpoints in T5X's layout, written by Orbax in the background.

    TrainState <-> {target, state/{step, param_states, nm_sparsity}, flax_mutables}
               <-> checkpoint_N/

`target` holds the effective weights, so T5X and everybody else reads it as any dense checkpoint.
`state/nm_sparsity` holds what `nms.sparse` keeps apart from `param_states`, the state of the
optimizer within. `flax_mutables` are the workload's own collections.

A checkpoint is written under another name and renamed when it is whole, so what is called
checkpoint_N is complete however the process ended. `t5x.eval` opens these, and this opens T5X's.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import contextlib
import copy
import pathlib
import shutil
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import serialization, traverse_util

from nm_sparsity_jax.core.text import first_line
from nm_sparsity_jax.core.trees import flatten, nested
from nm_sparsity_jax.deploy import unstack_layers
from nm_sparsity_jax.runs import checkpoint, checkpoint_rules, folders
from nm_sparsity_jax.trainer.step import Model, TrainState
from nm_sparsity_jax.training import rules_text
from nm_sparsity_jax.training.layers import COLLECTION

MUTABLES = "flax_mutables"  # T5X's name for all collections
_REMOVED = ".removed_"


def to_tree(state: TrainState) -> dict[str, Any]:
  """Returns the nested dict that T5X would save.

  Args:
    state: a state, or anything in its structure, such as shapes.
  """
  inner = serialization.to_state_dict(state.opt_state.inner_state)
  kept = {k: v for k, v in state.masks.items() if k != "step"}
  if dense := dict(flatten(state.opt_state.dense)):
    kept["dense"] = nested(dense)
  tree = {
    "step": state.step,
    "param_states": nested(traverse_util.flatten_dict(inner, sep="/")),  # without empty nodes
    COLLECTION: {"step": state.sparse_step, "rules": state.opt_state.rules, **kept},
  }
  if state.average:  # where `runs.orbax.read` looks for it
    average = dict(state.average)
    tree["average"] = {"target": average.pop("params"), **({MUTABLES: average} if average else {})}
  return {"target": state.params, "state": tree, MUTABLES: dict(state.collections)}


def from_tree(tree: Mapping[str, Any], like: TrainState) -> TrainState:
  """Returns the train state of a tree.

  Args:
    tree: what `to_tree` made.
    like: its shapes, for the structure.
  """
  # A state of numbers as leaves shows which leaf of the tree is which of the state.
  shapes, structure = jax.tree.flatten(like)
  numbered = to_tree(jax.tree.unflatten(structure, range(len(shapes))))
  arrays = dict(flatten(tree))
  found = {number: arrays[path] for path, number in flatten(numbered) if isinstance(number, int)}
  state = jax.tree.unflatten(structure, [found.get(i) for i in range(len(shapes))])
  count = state.opt_state.count
  # Its own copy: a buffer cannot be donated twice.
  masks = {**state.masks, "step": jnp.copy(count)} if state.masks else {}
  return state.replace(opt_state=state.opt_state._replace(masks=masks))


class Checkpoints:
  """Keeps the checkpoints of one run, in a `with` block.

  Args:
    folder: of the run, absolute; it exists.
    keep: how many of the newest stay, with the best; None = all.
  """

  def __init__(self, folder: pathlib.Path, keep: int | None):
    import orbax.checkpoint as ocp

    self._ocp, self._keep, self.folder = ocp, keep, folder
    self.best: int | None = None  # the step that is never removed
    options = ocp.CheckpointManagerOptions(
      step_prefix="checkpoint", cleanup_tmp_directories=True, create=False
    )
    self._manager = ocp.CheckpointManager(self.folder, options=options)

  def __enter__(self) -> Checkpoints:
    return self

  def __exit__(self, *error: Any) -> None:
    # Orbax' threads would otherwise print much at the end of a refused process.
    with contextlib.suppress(Exception):
      self._manager.close()

  def save(self, step: int, tree: Mapping[str, Any]) -> None:
    """Starts to write; the tree may be donated afterwards."""
    self.wait()
    if step in folders.steps(self.folder):
      return
    self.remove_old()
    with self._explained():
      # A copy on the host: on a CPU the background would else read what the next step writes to.
      tree = jax.tree.map(np.array, tree)
      args = self._ocp.args
      # T5X asks for a folder `dataset` where a run of its own starts from this.
      args = args.Composite(state=args.PyTreeSave(tree), dataset=args.JsonSave({}))
      self._manager.save(step, args=args, force=True)

  def wait(self) -> None:
    """Waits until the last one is complete."""
    with self._explained():
      self._manager.wait_until_finished()

  @contextlib.contextmanager
  def _explained(self) -> Iterator[None]:
    try:
      yield
    except Exception as e:
      raise ValueError(
        f"a checkpoint in {self.folder} could not be written ({first_line(e)}). The newest "
        f"complete one is {folders.latest(self.folder) or 'none'}; with room on the disk, the same "
        "command continues from it."
      ) from e

  def remove_old(self) -> None:
    """Removes all but the newest and the best."""
    # Orbax' policies keep the newest or the best by a metric of the save; ours is known after it.
    for step in folders.steps(self.folder)[: -self._keep] if self._keep else ():
      if step != self.best:
        # Under another name a kill leaves nothing that looks like a whole checkpoint.
        path = self.folder / f"checkpoint_{step}"
        path.rename(self.folder / f"{_REMOVED}{step}")
    for path in self.folder.glob(f"{_REMOVED}*"):
      shutil.rmtree(path, ignore_errors=True)

  def restore(self, step: int, like: TrainState, model: Model) -> TrainState:
    """Reads one of these checkpoints onto the devices; refuses one of other rules.

    Args:
      step: its number.
      like: what `Model.state_like` returns.
      model: of the run.
    """
    path, wanted = self.folder / f"checkpoint_{step}", to_tree(like)
    if not wanted[MUTABLES]:
      wanted.pop(MUTABLES)
    # Each shard goes onto its device.
    args = self._ocp.checkpoint_utils.construct_restore_args(wanted)
    restore = self._ocp.args.PyTreeRestore(item=wanted, restore_args=args, partial_restore=True)
    try:
      with self._ocp.PyTreeCheckpointer() as reader:
        tree = reader.restore(path / "state", args=restore)
    except Exception as e:
      raise ValueError(
        f"{path} cannot be read: it is damaged, or of another program ({first_line(e)}). Move it "
        "away, and the same command continues from the newest that is left."
      ) from e
    rules = rules_text.unpack(tree["state"][COLLECTION]["rules"])
    checkpoint_rules.refuse_other_rules(rules, model.rules, str(path))
    return from_tree(tree, like)


def opened(path: str, model: Model) -> checkpoint.Stored:
  """Opens any checkpoint; a file of timm's weights is held against the model's network.

  Args:
    path: of the checkpoint; a run's folder stands for its newest one.
    model: what takes it.
  """
  like = {"params": model.shapes, **model.collections}
  return checkpoint.read(path, like, model.workload.network_config)


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
  wanted = {f"{MUTABLES}/{path}" for path, _ in flatten(model.collections)}
  is_held = wanted <= set(stored.leaves)
  params, collections = _load(stored, model, model.collections if is_held else {})
  if said := checkpoint_rules.check_start(stored):
    warnings.warn(f"INITIAL_CHECKPOINT_PATH: {said}", stacklevel=2)
  return params, collections if is_held else model.initial(key)[1], stored.step or 0


def load_for_evaluation(stored: checkpoint.Stored, model: Model) -> dict[str, Any]:
  """Reads what is scored of a checkpoint that the model's rules made: W~, and the workload's state.

  It is that of the average where the run kept one. A dense checkpoint has no sparse step, so it is
  only taken where all rules are dense.

  Args:
    stored: what `opened` returns.
    model: workload and rules, as in training.
  """
  if stored.rules is not None:
    checkpoint_rules.refuse_other_rules(stored.rules, model.rules, stored.path)
  elif not model.rules.is_dense:
    raise ValueError(
      f"{stored.path!r} is dense: it has no sparse step. Evaluate it with RECIPE = 'dense', or "
      "fine-tune it first (gin_configs/runs/local_finetune.gin)."
    )
  params, collections = _load(stored, model, model.collections)
  if stored.sparse_step is not None and (stored.average or not stored.in_place):
    params = model.effective(params, jnp.int32(stored.sparse_step), stored.masks())
  return {"params": params, **collections}


def _load(stored: checkpoint.Stored, model: Model, collections: Any) -> tuple[Any, Any]:
  """Loads parameters and these collections, from the average where the run kept one."""
  like = {"target": model.shapes, MUTABLES: collections}
  tree = checkpoint.load(stored, like, model.shardings(like))
  return tree["target"], tree[MUTABLES]


def packed_model(stored: checkpoint.Stored, model: Model) -> Model:
  """Returns the model that runs on a packed file: without rules and a scan, whole on each device.

  Args:
    stored: the file.
    model: of the same network, scanned or not.
  """
  workload: Any = copy.copy(model.workload)
  plain = unstack_layers.without_scan(workload.network_config)
  if plain != workload.network_config:  # a kernel of a scan is one stack, which no file packs
    workload.network = workload.network.clone(config=plain)
    workload.network_config = plain
  # Without rules: the file holds the effective weights, and a mask of zeros would change nothing.
  made = Model(workload, devices=model.mesh.devices.flatten().tolist())
  checkpoint.check_shapes(stored, {"target": made.shapes, MUTABLES: made.collections})
  return made
