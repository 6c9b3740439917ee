"""Hugging Face's T5: the same logits and generations, bit for bit there and back, every name.

What transformers computes lies in huggingface_reference.npz; where it is installed it is asked.
"""

import dataclasses
import functools
import json

import huggingface_reference as reference
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference_arrays import Reference, assert_same, imported

from nm_sparsity_jax.core.trees import flatten
from nm_sparsity_jax.deploy import huggingface, safetensors_file
from nm_sparsity_jax.deploy.huggingface import Folder, config_of, shapes_of
from nm_sparsity_jax.models.t5 import T5Config, Transformer
from nm_sparsity_jax.models.t5.layers import RelativePositionBiases
from nm_sparsity_jax.trainer.workloads import decoding

both = pytest.mark.parametrize("name", reference.TINY)
known = Reference(reference)
names_of, tensors_of = known.names, known.tensors


def config_of_name(name, **changes):
  config = huggingface.from_json({**reference.COMMON, **reference.TINY[name]}, name)
  return dataclasses.replace(config, **changes)


def params_of(name, **changes):
  return huggingface.from_huggingface(tensors_of(name), config_of_name(name, **changes))


def folder_of(name, path):
  """A folder of their names that holds hashed weights, written by us."""
  huggingface.write(path, params_of(name), config_of_name(name))
  return path


def assert_close(got, want, what):
  error = np.abs(np.asarray(got, np.float64) - want).max()
  assert error < 1e-4, f"{what}: {error:.1e}"


# --- what transformers computes -------------------------------------------------------------------


def logits_of(config, params, name):
  x, y = jnp.asarray(reference.inputs(name)), jnp.asarray(reference.targets(name))
  run = jax.jit(functools.partial(Transformer(config).apply, enable_dropout=False))
  return run({"params": params}, x, jnp.asarray(reference.shifted(y)), y)


@pytest.mark.parametrize("name, scan", [("v1_0", False), ("v1_1", False), ("v1_1", True)])
def test_logits_and_greedy_generations_are_those_of_transformers(name, scan):
  config, params = config_of_name(name, scan_layers=scan), params_of(name, scan_layers=scan)
  assert_close(logits_of(config, params, name), known.arrays[f"{name}/logits"], "logits")
  if not scan:
    net, x = Transformer(config), jnp.asarray(reference.inputs(name))
    ids = jax.jit(lambda p: decoding.greedy(net, p, x, reference.NEW_TOKENS)[0])(params)
    np.testing.assert_array_equal(ids, known.arrays[f"{name}/ids"])
    assert len(np.unique(ids)) > 6  # no token that is always the likeliest


@pytest.mark.parametrize("both_ways", [True, False])
def test_distances_fall_into_the_buckets_of_transformers(both_ways):
  mine = RelativePositionBiases._relative_position_bucket(reference.FAR, both_ways)
  np.testing.assert_array_equal(mine, known.arrays[f"buckets/{both_ways}"])


def test_the_committed_reference_is_what_transformers_computes():
  known.compare(*imported("torch", "transformers"))


@both
def test_transformers_loads_what_we_write_and_we_read_what_it_saves(name, tmp_path):
  torch, transformers = imported("torch", "transformers")
  model = transformers.T5ForConditionalGeneration
  net = model.from_pretrained(folder_of(name, tmp_path / "ours")).eval()
  assert net.config.dtype == torch.float32
  kept = {key: x.detach().numpy() for key, x in net.named_parameters()}
  assert_same({key: kept[key] for key in names_of(name)}, tensors_of(name))
  logits, ids = reference.run(torch, net, name)
  assert_close(logits, known.arrays[f"{name}/logits"], "logits")
  np.testing.assert_array_equal(ids, known.arrays[f"{name}/ids"])
  reference.network(torch, transformers, name).save_pretrained(tmp_path / "theirs")
  assert_same(huggingface.read(tmp_path / "theirs", config_of_name(name)), params_of(name))


# --- there and back -------------------------------------------------------------------------------


@pytest.mark.parametrize(
  "name, dtype, scan",
  [
    ("v1_0", "float32", {}),
    ("v1_0", "bfloat16", {"scan_layers": True}),
    ("v1_1", "float16", {}),
    ("v1_1", "float32", {"scan_layers": True, "param_scan_axis": 0}),
  ],
)
def test_weights_go_there_and_back_bit_for_bit(name, dtype, scan, tmp_path):
  config = config_of_name(name, **scan)
  tensors = {key: x.astype(jnp.dtype(dtype)) for key, x in tensors_of(name).items()}
  tensors["encoder.block.0.layer.0.SelfAttention.q.weight"][:, ::2] = 0  # of pruning
  tensors["encoder.block.0.layer.0.SelfAttention.q.weight"][:, 1] = -0.0
  if dtype == "float16":  # transformers keeps these in float32 beside float16
    for key in [key for key in tensors if key.endswith("wo.weight")]:
      tensors[key] = tensors[key].astype(np.float32)
  params = huggingface.from_huggingface(tensors, config)
  net, ids = Transformer(config), jnp.ones((1, 1), jnp.int32)
  init = functools.partial(net.init, enable_dropout=False)
  shapes = jax.eval_shape(init, jax.random.key(0), ids, ids, ids)["params"]
  assert jax.tree.map(np.shape, params) == jax.tree.map(lambda x: x.shape, shapes)
  assert_same(huggingface.to_huggingface(params, config), tensors)
  huggingface.write(tmp_path / "out", params, config)
  assert_same(huggingface.read(tmp_path / "out", config), params)
  opened = safetensors_file.Opened(tmp_path / "out/model.safetensors")
  assert_same({key: np.asarray(x) for key, x in opened.tensors.items()}, tensors)


def test_layers_that_differ_where_t5_shares_are_refused(tmp_path):
  params = params_of("v1_0", scan_layers=True)
  params["decoder"]["decoder"]["relpos_bias"]["rel_embedding"][0, 1, 0] += 1
  with pytest.raises(ValueError, match="the layers differ"):
    huggingface.write(tmp_path / "out", params, config_of_name("v1_0", scan_layers=True))
  assert not list(tmp_path.iterdir())


# --- config.json ----------------------------------------------------------------------------------

# d_model, num_heads, num_layers, d_kv, d_ff of the published config.json.
PUBLISHED = {
  ("t5_1_0", "small"): (512, 8, 6, 64, 2048),
  ("t5_1_0", "base"): (768, 12, 12, 64, 3072),
  ("t5_1_0", "large"): (1024, 16, 24, 64, 4096),
  ("t5_1_0", "3B"): (1024, 32, 24, 128, 16384),
  ("t5_1_0", "11B"): (1024, 128, 24, 128, 65536),
  ("t5_1_1", "small"): (512, 6, 8, 64, 1024),
  ("t5_1_1", "base"): (768, 12, 12, 64, 2048),
  ("t5_1_1", "large"): (1024, 16, 24, 64, 2816),
  ("t5_1_1", "xl"): (2048, 32, 24, 64, 5120),
  ("t5_1_1", "xxl"): (4096, 64, 24, 64, 10240),
}


@pytest.mark.parametrize("version, size", PUBLISHED)
def test_every_published_size_goes_there_and_back(version, size):
  config = T5Config.preset(version, size)
  made = huggingface.to_json(config)
  names = ("d_model", "num_heads", "num_layers", "d_kv", "d_ff")
  assert tuple(made[name] for name in names) == PUBLISHED[version, size]
  assert made["tie_word_embeddings"] == (version == "t5_1_0")
  assert made["feed_forward_proj"] == {"t5_1_0": "relu", "t5_1_1": "gated-gelu"}[version]
  assert huggingface.from_json(made, "it") == config
  for scanned in (config, dataclasses.replace(config, scan_layers=True)):
    assert config_of(shapes_of(scanned), "it") == scanned


def test_what_config_json_leaves_out_is_what_transformers_takes():
  config = huggingface.from_json({"model_type": "t5", "num_layers": 3}, "it")
  assert config == T5Config.t5_1_0("small", num_encoder_layers=3, num_decoder_layers=3)


@pytest.mark.parametrize(
  "changes, word",
  [
    (dict(model_type="mt5"), "mt5"),
    (dict(relative_attention_num_buckets=64), "num_buckets is 64"),
    (dict(feed_forward_proj="gelu"), "feed_forward_proj is 'gelu'"),
  ],
)
def test_a_config_of_what_we_do_not_compute_is_refused(changes, word):
  with pytest.raises(ValueError, match=word):
    huggingface.from_json({"model_type": "t5", **changes}, "it")
  with pytest.raises(ValueError, match=r"\('tanh',\): transformers"):
    huggingface.to_json(config_of_name("v1_0", mlp_activations=("tanh",)))


# --- folders --------------------------------------------------------------------------------------


def changed(tmp_path, change, name="v1_0"):
  """A folder in which `change` has changed tensors and values of config.json."""
  config = huggingface.to_json(config_of_name(name))
  tensors = tensors_of(name)
  change(tensors, config)
  huggingface.write_folder(tmp_path / "folder", tensors, config)
  return tmp_path / "folder"


def misfit(tensors, config):
  for i in range(3):
    del tensors[f"encoder.block.{i}.layer.0.SelfAttention.q.weight"]
  tensors["classifier.weight"] = np.zeros((2, 16), np.float32)
  tensors["shared.weight"] = np.zeros((90, 16), np.float32)
  tensors["decoder.final_layer_norm.weight"] = np.zeros(9, np.float32)


def test_all_names_that_do_not_fit_are_in_one_error(tmp_path):
  path = changed(tmp_path, misfit)
  with pytest.raises(ValueError) as e:
    huggingface.read(path)
  for words in (
    str(path), "3 of 55 missing (encoder.block.{0..2}.layer.0.SelfAttention.q.weight)",
    "1 unknown (classifier.weight)", "2 of another shape", "(9,) there and (16,) here",
  ):  # fmt: skip
    assert words in str(e.value)


def copies(tensors, config):
  for name in ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"):
    tensors[name] = tensors["shared.weight"].copy()
  name = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
  tensors[name] = np.zeros((32, 4), np.float32)


def test_copies_of_the_embedding_are_not_read(tmp_path):
  assert_same(huggingface.read(changed(tmp_path, copies)), params_of("v1_0"))


def test_a_t5_1_1_that_transformers_5_tied_has_the_embedding_as_its_head(tmp_path):
  def tie(tensors, config):
    del tensors["lm_head.weight"]
    config |= dict(tie_word_embeddings=True, scale_decoder_outputs=False)

  params = huggingface.read(changed(tmp_path, tie, "v1_1"), config_of_name("v1_1"))
  table = params["token_embedder"]["embedding"]
  np.testing.assert_array_equal(params["decoder"]["logits_dense"]["kernel"], table.T)


def test_a_folder_of_several_files_is_read(tmp_path):
  path, tensors = folder_of("v1_1", tmp_path / "folder"), tensors_of("v1_1")
  (path / "model.safetensors").unlink()
  files = {name: f"model-{i % 3}.safetensors" for i, name in enumerate(tensors)}
  for file in set(files.values()):
    own = {name: x for name, x in tensors.items() if files[name] == file}
    safetensors_file.write(path / file, own)
  (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
  assert_same(huggingface.read(path), params_of("v1_1"))


@pytest.mark.parametrize(
  "changes, words",
  [
    (dict(num_heads=8, head_dim=3), "num_heads is 4 there and 8 here, head_dim is 6 there"),
    (dict(mlp_activations=("silu", "linear")), r"is \('gelu', 'linear'\) there and \('silu'"),
  ],
)
def test_a_folder_of_another_network_is_refused_also_where_shapes_agree(changes, words, tmp_path):
  path = folder_of("v1_1", tmp_path / "folder")
  with pytest.raises(ValueError, match=words):
    huggingface.read(path, config_of_name("v1_1", **changes))


def _pickled(path):
  (path / "model.safetensors").rename(path / "pytorch_model.bin")


@pytest.mark.parametrize(
  "harm, word",
  [
    (lambda path: (path / "config.json").unlink(), "No such file .*config.json"),
    (lambda path: (path / "model.safetensors").write_bytes(b"cut"), "not a safetensors file"),
    (_pickled, "torch pickled"),
  ],
)
def test_a_folder_that_cannot_be_read_is_refused_in_a_sentence(harm, word, tmp_path):
  path = folder_of("v1_0", tmp_path / "folder")
  harm(path)
  with pytest.raises((ValueError, FileNotFoundError), match=word) as e:
    Folder(path)
  assert str(path) in str(e.value) and "\n" not in str(e.value)


def test_another_tree_is_refused_and_a_failure_leaves_nothing(tmp_path):
  path = folder_of("v1_0", tmp_path / "folder")
  with pytest.raises(ValueError, match="is there already"):
    folder_of("v1_0", path)
  params = params_of("v1_0")
  with pytest.raises(ValueError, match="is not of the network of this config"):
    huggingface.write(tmp_path / "new", params, config_of_name("v1_0", mlp_dim=48))
  del params["encoder"]["layers_0"]["mlp"]
  with pytest.raises(ValueError, match="is not of T5X's T5: .*mlp/wo/kernel.* missing"):
    config_of({key: x.shape for key, x in flatten(params)}, "it")
  assert [x.name for x in tmp_path.iterdir()] == ["folder"]
