"""Checkpoints in the two formats of T5X's public models load into our T5, to the bit; and
what `nm-sparsity finalize` and `convert` write loads into T5X.

Dense models made here, of T5X's own networks, are written by T5X's own checkpointers: the legacy
format (a msgpack file beside tensorstore zarrs) and Orbax. They are read as `t5x.train` reads
INITIAL_CHECKPOINT_PATH, with the restore settings of gin_configs/runs/t5x_finetune.gin.
"""

import dataclasses

import huggingface_reference
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import t5x_world
import test_huggingface
from checkout import ROOT
from reference_arrays import drawn
from t5x_world import (
  Devices,
  assert_equal,
  begin,
  first_state,
  initializer_of,
  make,
  mine,
  scalable_network,
  utils,
  world,  # noqa: F401  (a fixture)
)

import nm_sparsity_jax as nms
from nm_sparsity_jax import cli
from nm_sparsity_jax.core.trees import flatten
from nm_sparsity_jax.integrations import gin_files

pytestmark = t5x_world.MARKS

STEP = 1_000_000  # as in checkpoint_1000000
NETWORKS = {"t5": "ours", "scanned": "ours_scanned"}  # T5X's network: ours in its place
RULES = nms.Rules({
  # Its mask is taken at step 0, so it must be that of the restored weights.
  "ff": nms.recipe("one_shot", pattern="1:4", phases=nms.Phases(total=4)),
})  # fmt: skip


def dense_state(network):
  """Of T5X's own model and optimizer after a long run: no value is as it was initialized."""
  model = make(None, network, "adafactor")
  state = first_state(model)
  return model, state.replace_params(drawn(state.params)).replace_step(jnp.int32(STEP))


def write(kind, model, state, folder):
  """Saves by one of T5X's checkpointers; the checkpoint's path."""
  shapes = initializer_of(model).global_train_state_shape
  folder.mkdir()
  settings = dict(
    save_cfg=utils.SaveCheckpointConfig(), partitioner=Devices(), model_dir=str(folder)
  )
  if kind == "legacy":
    manager = utils.LegacyCheckpointManager(**settings, restore_cfg=None, train_state_shape=shapes)
  else:
    manager = utils.create_orbax_checkpoint_manager(**settings, train_state=shapes)
  manager.save(state)
  manager.wait_until_finished()
  manager.close()
  return folder / f"checkpoint_{int(state.step)}"


def restore_settings(path):
  """What the run file makes of an INITIAL_CHECKPOINT_PATH."""
  files = ["gin_configs/runs/t5x_finetune.gin", "tests/t5x_tiny.gin"]
  macros = dict(
    INITIAL_CHECKPOINT_PATH=str(path), PRETRAINED_STEPS=STEP, MODEL_DIR="", RECIPE="one_shot",
    PATTERN="1:4", SPARSE_STEPS=4,
  )  # fmt: skip
  bindings = [f"{name} = {value!r}" for name, value in macros.items()]
  with gin_files.Config([ROOT, ROOT / "tests"], files, bindings) as config:
    return config.argument("checkpoint_cfg").restore


def restore(model, path, settings=None, rng=None, optimizer=None):
  """As t5x.train does with the settings of a run file; without, as t5x.eval."""
  settings = settings or utils.RestoreCheckpointConfig(
    path=str(path), mode="specific", dtype="float32"
  )
  state, manager = utils.create_checkpoint_manager_and_restore(
    initializer_of(model, optimizer_def=optimizer), Devices(), settings, str(path), rng,
    use_orbax=True,
  )  # fmt: skip
  manager.close()
  return state


@pytest.mark.parametrize(
  "kind, network, optimizer", [("legacy", "scanned", "adafactor"), ("orbax", "t5", "adamw")]
)
def test_a_dense_checkpoint_loads(kind, network, optimizer, tmp_path):
  dense, state = dense_state(network)
  path = write(kind, dense, state, tmp_path / kind)
  network = NETWORKS[network]
  model, key = make(RULES, network, optimizer), jax.random.PRNGKey(0)
  restored = restore(model, path, restore_settings(path), key, model.optimizer_def)
  fresh = first_state(model)

  # The parameters and the step are the checkpoint's, to the bit and in its dtype.
  assert_equal(restored.params, state.params)
  assert {w.dtype for w in jax.tree.leaves(restored.params)} == {jnp.dtype("float32")}
  assert int(restored.step) == STEP

  # The optimizer starts afresh, and so does the sparse run: step 0, our rules.
  moments = lambda state: state.state_dict()["state"]["param_states"]
  assert_equal(moments(restored), moments(fresh))
  assert_equal(restored.flax_mutables, fresh.flax_mutables)

  # The trainer takes it as a new run at that step, with masks of the restored weights.
  begun = begin(model, state=restored, pretrained_steps=STEP).train_state
  assert int(begun.step) == STEP and int(mine(begun)["step"]) == 0
  assert_equal(begun.params, state.params)
  weights, sites = dict(flatten(begun.params)), model.stored_rules.assign(begun.params).sites
  masks = dict(flatten(mine(begun)["mask"]))
  assert masks.keys() == sites.keys()
  for path, mask in masks.items():
    want = nms.nm_mask(jnp.abs(weights[path]), nms.NM.parse("1:4"), sites[path].axis)
    np.testing.assert_array_equal(mask, want, err_msg=path)


def test_t5x_restores_a_converted_folder_of_hugging_face(tmp_path):
  """Its own network gives the logits that transformers gives with these weights."""
  name = "v1_1"
  folder = test_huggingface.folder_of(name, tmp_path / "hf")
  assert cli.main(["convert", str(folder), str(tmp_path / "start"), "--scan-layers"]) == 0
  config = test_huggingface.config_of_name(name, scan_layers=True)
  theirs = scalable_network.T5Config
  shared = {field.name for field in dataclasses.fields(theirs)} & vars(config).keys()
  fields = {name: getattr(config, name) for name in shared}
  module = scalable_network.Transformer(theirs(**fields))
  state = restore(make(None, module=module), tmp_path / "start/checkpoint_0")
  x, y = huggingface_reference.inputs(name), huggingface_reference.targets(name)
  run = jax.jit(lambda params: module.apply(
    {"params": params}, x, huggingface_reference.shifted(y), y, enable_dropout=False
  ))  # fmt: skip
  want = test_huggingface.known.arrays[f"{name}/logits"]
  test_huggingface.assert_close(run(state.params), want)


# --- nm-sparsity verify, finalize ---------------------------------------------------------------


def sparse_state(network):
  """At the end of a run whose weights moved on after the mask was taken."""
  model = make(RULES, network)
  state = first_state(model)
  kept = nms.init_state(drawn(state.params, seed=1), model.stored_rules)
  state = state.replace_params(drawn(state.params, seed=2))
  kept = nms.update_state(kept, state.params, model.stored_rules, 4)
  mutables = model.write(state.flax_mutables, jnp.int32(4), kept)
  return model, state.replace_flax_mutables(mutables).replace_step(jnp.int32(STEP))


@pytest.mark.parametrize("kind, network", [("orbax", "t5"), ("legacy", "scanned")])
def test_a_finalized_checkpoint_is_the_run_to_t5xs_dense_model(kind, network, tmp_path):
  model, state = sparse_state(network)
  run = write(kind, model, state, tmp_path / "run").parent
  assert cli.main(["verify", str(run)]) == 1
  assert cli.main(["finalize", str(run), str(tmp_path / "out")]) == 0
  path = tmp_path / f"out/checkpoint_{STEP}"
  assert cli.main(["verify", str(path)]) == 0
  found = restore(make(None, network), path)
  assert int(found.step) == STEP and "flax_mutables" not in found.state_dict()
  assert_equal(found.params, model.effective(state.params, state.flax_mutables))
