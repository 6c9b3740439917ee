"""Checkpoints: what their files hold, read by Orbax alone; and as T5X and others write them."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nm_sparsity_jax.core.trees import flatten
from nm_sparsity_jax.runs import checkpoint
from nm_sparsity_jax.training import rules_text


def load(folder, name="state"):
  """Returns the nested arrays of a checkpoint's folder."""
  import orbax.checkpoint as ocp

  reader, path = ocp.PyTreeCheckpointer(), pathlib.Path(folder) / name
  shapes = reader.metadata(path).item_metadata.tree
  as_numpy = lambda leaf: ocp.RestoreArgs(restore_type=np.ndarray)
  return reader.restore(path, restore_args=jax.tree.map(as_numpy, shapes))


def read(folder, number):
  """Returns path -> array of one checkpoint of a run."""
  return dict(flatten(load(pathlib.Path(folder) / f"checkpoint_{number}")))


def save(folder, variables, rules):
  """Writes checkpoint_7 as the local runner lays it out, at the end of its schedule."""
  tree = {"target": variables["params"], "state": {"step": np.int32(7)}, "flax_mutables": {}}
  if "batch_stats" in variables:
    tree["flax_mutables"]["batch_stats"] = variables["batch_stats"]
  if rules is not None:
    text = np.asarray(rules_text.pack(rules_text.describe(rules)))
    kept = {**variables.get("nm_sparsity", {}), "step": np.int32(7), "rules": text}
    tree["flax_mutables"]["nm_sparsity"] = kept
  checkpoint.write(f"{folder}/checkpoint_7", {key: np.asarray(x) for key, x in flatten(tree)})


def cut(folder, pattern):
  """Leaves a third of the largest file of a pattern."""
  path = max((p for p in folder.rglob(pattern) if p.is_file()), key=lambda p: p.stat().st_size)
  path.write_bytes(path.read_bytes()[: path.stat().st_size // 3])


# --- written as other programs write them ---------------------------------------------------------


def write_orbax(folder, tree):
  ocp = pytest.importorskip("orbax.checkpoint")
  ocp.PyTreeCheckpointer().save(folder / "state", tree)
  (folder / "dataset").mkdir()  # as T5X does
  return folder


def write_legacy(folder, tree):
  """As T5X writes: a msgpack file; arrays beside it as zarr, here every kernel."""
  from flax import serialization

  ts = pytest.importorskip("tensorstore")
  folder.mkdir(parents=True)

  def store(path, x):
    if not path[-1].key.endswith("kernel"):
      return x
    name = ".".join(k.key for k in path)
    spec = {"driver": "zarr", "kvstore": {"driver": "file", "path": str(folder / name)}}
    array = ts.open(spec, create=True, dtype=x.dtype, shape=x.shape).result()
    array.write(x).result()
    return {"driver": "zarr", "kvstore": {"driver": "file", "path": name}, "dtype": str(x.dtype),
            "metadata": {"shape": list(x.shape)}}  # fmt: skip

  state = jax.tree_util.tree_map_with_path(store, tree)
  data = serialization.msgpack_serialize({"version": 3, "optimizer": state})
  (folder / "checkpoint").write_bytes(data)
  return folder


# Of the T5 of t5x_tiny.gin and local_tiny.gin.
TINY_T5 = dict(
  vocab_size=384, emb_dim=16, num_heads=2, num_encoder_layers=1, num_decoder_layers=1, head_dim=8,
  mlp_dim=32,
)  # fmt: skip
WRITERS = {"Orbax": write_orbax, "T5X": write_legacy}


def zeros_of(module):
  """Zeros as the parameters of a T5, ours or T5X's."""
  tokens = jnp.ones((1, 4), jnp.int32)
  init = lambda: module.init(jax.random.key(0), tokens, tokens, tokens, enable_dropout=False)
  with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
    shapes = jax.eval_shape(init)["params"]
  return jax.tree.map(lambda x: np.zeros(x.shape, np.float32), shapes)


def t5x_dense(step=6):
  """A dense checkpoint of t5x_tiny.gin."""
  from t5x.examples.t5 import network

  more = dict(dtype="float32", mlp_activations=("gelu", "linear"), logits_via_embedding=False)
  target = zeros_of(network.Transformer(network.T5Config(**TINY_T5, **more)))
  return {
    "target": target,
    "state": {"step": np.int32(step), "param_states": {"0": {"mu": target}}},
  }


def t5x_sparse(rules):
  """One of a run that began at step 6, after four steps of its own."""
  mine = {"step": np.int32(4), "start": np.int32(6)}
  mine["rules"] = np.asarray(rules_text.pack(rules_text.describe(rules)))
  target = t5x_dense()["target"]
  moments = {"count": np.int32(4), "mu": target, "nu": target}
  state = {"step": np.int32(10), "param_states": {"0": moments}}
  return {"target": target, "state": state, "flax_mutables": {"nm_sparsity": mine}}
