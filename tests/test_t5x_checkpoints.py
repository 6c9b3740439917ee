"""Checkpoints in the two formats of T5X's public models load into our T5, to the bit; and
what `nm-sparsity finalize` writes loads into T5X.

Dense models made here, of T5X's own networks, are written by T5X's own checkpointers: the legacy
format (a msgpack file beside tensorstore zarrs) and Orbax. They are read as `t5x.train` reads
INITIAL_CHECKPOINT_PATH, with the restore settings of gin_configs/runs/t5x_finetune.gin.
"""

import dataclasses
import importlib
import json
import pathlib
import sys
import warnings

import flax
import gin
import gin_probe
import huggingface_reference
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import t5x_found
import test_huggingface
import test_own_recipe

import nm_sparsity_jax as nms
from nm_sparsity_jax import cli
from nm_sparsity_jax.core.trees import flatten
from nm_sparsity_jax.recipes import registry
from nm_sparsity_jax.training import apply

pytestmark = [
  pytest.mark.t5x,
  # T5X and what it imports (TensorFlow, seqio, clu, orbax) warn on their own account.
  pytest.mark.filterwarnings("ignore"),
]

if reason := t5x_found.why_not():
  pytest.skip(reason, allow_module_level=True)

with warnings.catch_warnings(), jax.numpy_dtype_promotion("standard"):
  warnings.simplefilter("ignore")
  import t5x
  import tensorflow as tf
  from t5x import utils
  from t5x.examples.scalable_t5 import network as scalable_network
  from t5x.examples.t5 import network as t5_network
  from test_t5x_adapter import (
    Devices,
    assert_equal,
    batch_of,
    begin,
    initializer_of,
    make,
    mine,
    one_initialization,  # noqa: F401  (a fixture)
    what_t5x_wants,  # noqa: F401  (a fixture)
  )

  from nm_sparsity_jax.integrations import t5x as t5x_adapter

ROOT = pathlib.Path(__file__).resolve().parents[1]
STEP = 1_000_000  # as in checkpoint_1000000
NETWORKS = {"t5": "ours", "scanned": "ours_scanned"}  # T5X's network: ours in its place
RULES = nms.Rules({
  # Its mask is taken at step 0, so it must be that of the restored weights.
  "ff": nms.recipe("one_shot", pattern="1:4", phases=nms.Phases(total=4)),
})  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def closed_loops():
  with t5x_found.closed_loops():
    yield


def dense_state(network):
  """Of T5X's own model and optimizer after a long run: no value is as it was initialized."""
  model = make(None, network, "adafactor", dense=True)
  state = initializer_of(model, Devices()).from_scratch(jax.random.PRNGKey(0))
  rng = np.random.default_rng(0)
  drawn = lambda w: jnp.asarray(rng.normal(size=w.shape), w.dtype)
  state = state.replace_params(jax.tree.map(drawn, state.params))
  return model, state.replace_step(jnp.int32(STEP))


def write(kind, model, state, folder):
  """One of T5X's checkpointers."""
  shapes = initializer_of(model, Devices()).global_train_state_shape
  folder.mkdir()
  settings = dict(save_cfg=utils.SaveCheckpointConfig(), partitioner=Devices())
  if kind == "legacy":
    manager = utils.LegacyCheckpointManager(
      **settings, restore_cfg=None, train_state_shape=shapes, model_dir=str(folder)
    )
  else:
    manager = utils.create_orbax_checkpoint_manager(
      **settings, train_state=shapes, model_dir=str(folder)
    )
  manager.save(state)
  manager.wait_until_finished()
  manager.close()
  return folder / f"checkpoint_{STEP}"


@pytest.fixture(scope="module", params=NETWORKS)
def dense(request, tmp_path_factory):
  """(our network's name, the dense state, {format: checkpoint})."""
  model, state = dense_state(request.param)
  root = tmp_path_factory.mktemp(request.param)
  paths = {kind: write(kind, model, state, root / kind) for kind in ("legacy", "orbax")}
  return NETWORKS[request.param], state, paths


@pytest.fixture
def restore_settings(monkeypatch):
  """What the run file makes of an INITIAL_CHECKPOINT_PATH."""
  monkeypatch.setitem(sys.modules, "__main__", importlib.import_module("t5x.train"))
  for path in (ROOT, pathlib.Path(t5x.__file__).parent.parent):
    gin.add_config_file_search_path(str(path))

  def settings(path):
    files = ["gin_configs/runs/t5x_finetune.gin", "tests/t5x_tiny.gin"]
    macros = dict(
      INITIAL_CHECKPOINT_PATH=str(path), PRETRAINED_STEPS=STEP, MODEL_DIR="", RECIPE="one_shot",
      PATTERN="1:4", SPARSE_STEPS=4,
    )  # fmt: skip
    gin_probe.read(files, [f"{name} = {value!r}" for name, value in macros.items()])
    return gin.query_parameter("utils.CheckpointConfig.restore").scoped_configurable_fn()

  yield settings
  gin.clear_config()


def test_both_formats_are_what_they_are_called(dense):
  _, state, paths = dense
  kernels = {"target." + path.replace("/", ".") for path, _ in flatten(state.params)}
  packed = flax.serialization.msgpack_restore((paths["legacy"] / "checkpoint").read_bytes())
  assert packed["version"] == 3 and int(packed["optimizer"]["state"]["step"]) == STEP
  arrays = {path.parent.name for path in paths["legacy"].glob("*/.zarray")}
  assert kernels < arrays and any(name.startswith("state.param_states.") for name in arrays)
  spec = json.loads((paths["legacy"] / min(kernels) / ".zarray").read_text())
  assert spec["zarr_format"] == 2 and spec["compressor"]["id"] == "gzip"
  assert not (paths["orbax"] / "checkpoint").exists()
  assert (paths["orbax"] / "state" / "manifest.ocdbt").exists()


# A format, the checkpointer that reads it, an optimizer. Each of them once; the others repeat them.
LOADS = [
  ("legacy", "orbax", "adafactor"),
  ("legacy", "legacy", "adamw"),
  ("orbax", "orbax", "adamw"),
]
OTHERS = [("legacy", "orbax", "adamw"), ("legacy", "legacy", "adafactor")]
OTHERS += [("orbax", "orbax", "adafactor")]
LOADS += [pytest.param(*other, marks=pytest.mark.slow) for other in OTHERS]


@pytest.mark.parametrize("kind, by, optimizer", LOADS)
def test_a_dense_checkpoint_loads(kind, by, optimizer, dense, restore_settings):
  network, state, paths = dense
  model = make(RULES, network, optimizer)
  start = initializer_of(model, Devices())
  restored, manager = utils.create_checkpoint_manager_and_restore(
    start, Devices(), restore_settings(paths[kind]), str(paths[kind]), jax.random.PRNGKey(0),
    use_orbax=by == "orbax",
  )  # fmt: skip
  manager.close()
  fresh = start.from_scratch(jax.random.PRNGKey(0))
  assert jax.tree.structure(restored) == jax.tree.structure(fresh)

  # The parameters and the step are the checkpoint's, to the bit and in its dtype.
  assert_equal(restored.params, state.params)
  assert {w.dtype for w in jax.tree.leaves(restored.params)} == {jnp.dtype("float32")}
  kernel = lambda s: dict(flatten(s.params))["token_embedder/embedding"]
  assert (kernel(restored) != kernel(fresh)).any()  # so equality says something
  assert int(restored.step) == STEP

  # The optimizer starts afresh, and so does the sparse run: step 0, our rules.
  moments = lambda state: state.state_dict()["state"]["param_states"]
  assert_equal(moments(restored), moments(fresh))
  assert_equal(restored.flax_mutables, fresh.flax_mutables)
  assert int(mine(restored)["step"]) == 0

  # The trainer takes it as a new run at that step, with masks of the restored weights.
  begun = begin(model, network=network, state=restored, pretrained_steps=STEP).train_state
  assert int(begun.step) == STEP and int(mine(begun)["step"]) == 0
  assert_equal(begun.params, state.params)
  model.check(begun)
  weights, places = dict(flatten(begun.params)), model.stored_rules.assign(begun.params).places
  masks = dict(flatten(mine(begun)["mask"]))
  assert masks.keys() == places.keys() and len(masks) >= 3
  for path, mask in masks.items():
    want = nms.nm_mask(jnp.abs(weights[path]), nms.NM.parse("1:4"), places[path].axis)
    np.testing.assert_array_equal(mask, want, err_msg=path)


def test_evaluation_refuses_a_dense_checkpoint(dense):
  network, _, paths = dense
  start = initializer_of(make(RULES, network), Devices())
  for path in paths.values():
    settings = utils.RestoreCheckpointConfig(
      path=str(path), mode="specific", dtype="float32",
      state_transformation_fns=[t5x_adapter.require_sparse],
    )  # fmt: skip
    with pytest.raises(ValueError, match="this checkpoint is dense"):
      utils.create_checkpoint_manager_and_restore(
        start, Devices(), settings, str(path), None, use_orbax=True
      )


# --- nm-sparsity convert ------------------------------------------------------------------------


@pytest.mark.parametrize("name, scan", [("v1_0", False), ("v1_1", True)])
def test_t5x_restores_a_converted_folder_of_hugging_face(name, scan, tmp_path):
  """Its own network gives the logits that transformers gives with these weights."""
  folder = test_huggingface.folder_of(name, tmp_path / "hf")
  to = ["convert", str(folder), str(tmp_path / "start")]
  assert cli.main([*to, *["--scan-layers"] * scan]) == 0
  theirs = scalable_network if scan else t5_network
  config = test_huggingface.config_of_name(name, scan_layers=scan)
  fields = (field.name for field in dataclasses.fields(theirs.T5Config))
  module = theirs.Transformer(theirs.T5Config(**{f: getattr(config, f) for f in fields}))
  state = restore(make(None, module=module, dense=True), tmp_path / "start/checkpoint_0")
  assert int(state.step) == 0
  x, y = huggingface_reference.inputs(name), huggingface_reference.targets(name)
  run = jax.jit(lambda params: module.apply(
    {"params": params}, x, huggingface_reference.shifted(y), y, enable_dropout=False
  ))  # fmt: skip
  want = test_huggingface.known.arrays[f"{name}/logits"]
  test_huggingface.assert_close(run(state.params), want, "logits")


# --- nm-sparsity verify, finalize ---------------------------------------------------------------


def sparse_state(network):
  """At the end of a run whose weights moved on after the mask was taken."""
  model = make(RULES, network)
  state = initializer_of(model, Devices()).from_scratch(jax.random.PRNGKey(0))
  rng = np.random.default_rng(1)
  drawn = lambda w: jnp.asarray(rng.normal(size=w.shape), w.dtype)
  kept = apply.init_state(jax.tree.map(drawn, state.params), model.stored_rules)
  state = state.replace_params(jax.tree.map(drawn, state.params))
  kept = apply.update_state(kept, state.params, model.stored_rules, 4)
  mutables = model.write(state.flax_mutables, jnp.int32(4), kept)
  return model, state.replace_flax_mutables(mutables).replace_step(jnp.int32(STEP))


def restore(model, path, use_orbax=True, cls=utils.TrainStateInitializer, **settings):
  """As t5x.eval does."""
  settings = utils.RestoreCheckpointConfig(
    path=str(path), mode="specific", dtype="float32", **settings
  )
  start = initializer_of(model, Devices(), cls=cls, optimizer_def=None)
  state, manager = utils.create_checkpoint_manager_and_restore(
    start, Devices(), settings, str(path), None, use_orbax=use_orbax
  )
  manager.close()
  return state


@pytest.mark.parametrize("kind, network", [("legacy", "t5"), ("orbax", "t5"), ("orbax", "scanned")])
def test_a_finalized_checkpoint_is_the_run_to_t5x(
  kind, network, tmp_path, restore_settings, capsys, monkeypatch
):
  model, state = sparse_state(network)
  run = write(kind, model, state, tmp_path / "run").parent
  assert cli.main(["verify", str(run)]) == 1
  assert "NOT n:m" in (out := capsys.readouterr().out)
  assert ("axis encoder" in out) == (network == "scanned")  # its rules know where groups lie
  wrong = ["finalize", str(run), str(tmp_path / "out"), "--axes", "{'.*/kernel': 1}"]
  assert cli.main(wrong) == 1 and not (tmp_path / "out").exists()
  assert "leave --axes out" in capsys.readouterr().err
  assert cli.main(["finalize", str(run), str(tmp_path / "out")]) == 0
  path = tmp_path / "out" / run.joinpath(f"checkpoint_{STEP}").name
  assert cli.main(["verify", str(path)]) == 0

  # With the dense model: the effective weights of the sparse one, and so its numbers.
  dense = make(None, network, dense=True)
  found = restore(dense, path)
  assert int(found.step) == STEP and "flax_mutables" not in found.state_dict()
  assert_equal(found.params, model.effective(state.params, state.flax_mutables))
  if (kind, network) != ("orbax", "t5"):  # the rest follows from the weights, in every format
    return
  batch = batch_of()
  want = model.eval_fn(state.params, batch, state.flax_mutables)[0]
  assert dense.eval_fn(found.params, batch)[0] == want
  assert dense.eval_fn(state.params, batch)[0] != want  # so equality says something

  # With the sparse model, as t5x_eval.gin says.
  found = restore(
    model, path, cls=t5x_adapter.SparseTrainStateInitializer,
    state_transformation_fns=[t5x_adapter.require_sparse],
  )  # fmt: skip
  assert model.eval_fn(found.params, batch, found.flax_mutables)[0] == want

  # As the start of another run, whose checkpoints have a position in the data. This one has none.
  start = initializer_of(model, Devices())
  monkeypatch.setattr(
    utils, "get_dataset", lambda *args: tf.data.Dataset.from_tensor_slices({"x": [1, 2]})
  )
  found, manager = utils.create_checkpoint_manager_and_restore(
    start, Devices(), restore_settings(path), str(path), jax.random.PRNGKey(0), use_orbax=True,
    save_checkpoint_cfg=utils.SaveCheckpointConfig(period=1, save_dataset=True),
    model_dir=str(tmp_path / "longer"),
    ds_iter=t5x_adapter.get_dataset(None, 0, 1, None, model_dir=str(tmp_path / "longer")),
  )  # fmt: skip
  manager.close()
  assert int(mine(found)["step"]) == 0 and int(found.step) == STEP
  assert_equal(found.params, model.effective(state.params, state.flax_mutables))


def test_a_recipe_from_outside_trains_and_is_deployed(tmp_path, monkeypatch, capsys):
  """What it stores beside its mask is saved by T5X, and finalize deploys what it says."""
  monkeypatch.chdir(tmp_path)
  monkeypatch.syspath_prepend(str(tmp_path))
  (tmp_path / "soft_recipe.py").write_text(test_own_recipe.RECIPE)
  importlib.import_module("soft_recipe")
  try:
    phases = nms.Phases(total=3, dense=1, finetune=1)
    model = make(nms.Rules({"ff": nms.recipe("soft", pattern="1:4", phases=phases, scale=2.0)}))
    run = begin(model)
    state = run.train_state
    for t in range(3):
      state, _ = run._partitioned_train_step(state, batch_of(t))
    write("orbax", model, state.replace_step(jnp.int32(STEP)), tmp_path / "run")
    assert cli.main(["finalize", "run", "out", "--import=soft_recipe"]) == 0
    assert cli.main(["verify", "out", "--import=soft_recipe"]) == 0
  finally:
    registry._recipes.pop("soft", None)
    sys.modules.pop("soft_recipe", None)
  found = dict(flatten(restore(make(None, dense=True), tmp_path / f"out/checkpoint_{STEP}").params))
  kernels = [path for path in found if "/mlp/" in path]
  assert kernels
  for path, w in flatten(jax.device_get(state.params)):
    want = w
    if path in kernels:
      groups = abs(w).reshape(-1, 4, w.shape[1])
      mask = (groups == groups.max(1, keepdims=True)).reshape(w.shape)
      want = np.where(mask, 2 * w - np.sign(w) * abs(w)[mask].min() / 2, 0)
    np.testing.assert_allclose(found[path], want, rtol=1e-6, err_msg=path)
