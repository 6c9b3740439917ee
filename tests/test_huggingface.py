"""Hugging Face's T5: the same logits and generations, bit for bit there and back, every name.

What transformers computes lies in huggingface_reference.npz; where it is installed it is asked.
"""

import dataclasses
import functools
import json

import huggingface_found
import huggingface_reference as reference
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference_arrays import Reference

from nm_sparsity_jax.core.trees import flatten
from nm_sparsity_jax.deploy import huggingface, safetensors_file
from nm_sparsity_jax.deploy.huggingface import Folder, config_of, shapes_of
from nm_sparsity_jax.deploy.names import difference
from nm_sparsity_jax.models.t5 import T5Config, Transformer
from nm_sparsity_jax.trainer.workloads import decoding

both = pytest.mark.parametrize("name", reference.TINY)
SCANS = {
  "layers": {},
  "scan": dict(scan_layers=True),
  "scan0": dict(scan_layers=True, param_scan_axis=0),
}
scans = pytest.mark.parametrize("scan", SCANS)


known = Reference(reference)
names_of, tensors_of = known.names, known.tensors


def config_of_name(name, **changes):
  config = huggingface.from_json({**reference.COMMON, **reference.TINY[name]}, name)
  return dataclasses.replace(config, **changes)


def folder_of(name, path, **changes):
  """A folder of their names that holds hashed weights, written by us."""
  config = config_of_name(name)
  huggingface.write(path, huggingface.from_huggingface(tensors_of(name), config), config, **changes)
  return path


def assert_same(got, want):
  got, want = dict(flatten(got)), dict(flatten(want))
  assert set(got) == set(want)
  for key, x in want.items():
    assert got[key].dtype == x.dtype and got[key].shape == x.shape, key
    assert got[key].tobytes() == x.tobytes(), key


def assert_close(got, want, what):
  error = np.abs(np.asarray(got, np.float64) - want).max()
  assert error < 1e-4, f"{what}: {error:.1e}"


# --- what transformers computes -------------------------------------------------------------------


def logits_of(config, params, name):
  x, y = jnp.asarray(reference.inputs(name)), jnp.asarray(reference.targets(name))
  run = jax.jit(functools.partial(Transformer(config).apply, enable_dropout=False))
  return run({"params": params}, x, jnp.asarray(reference.shifted(y)), y)


def ids_of(config, params, name):
  net, x = Transformer(config), jnp.asarray(reference.inputs(name))
  return jax.jit(lambda p, x: decoding.greedy(net, p, x, reference.NEW_TOKENS)[0])(params, x)


@both
def test_logits_and_greedy_generations_are_those_of_transformers(name):
  config = config_of_name(name)
  params = huggingface.from_huggingface(tensors_of(name), config)
  assert_close(logits_of(config, params, name), known.arrays[f"{name}/logits"], "logits")
  np.testing.assert_array_equal(ids_of(config, params, name), known.arrays[f"{name}/ids"])
  assert len(np.unique(known.arrays[f"{name}/ids"])) > 6  # no token that is always the likeliest


def test_a_scanned_network_has_the_same_logits():
  config = config_of_name("v1_1", scan_layers=True)
  params = huggingface.from_huggingface(tensors_of("v1_1"), config)
  assert_close(logits_of(config, params, "v1_1"), known.arrays["v1_1/logits"], "logits")


@pytest.mark.parametrize("both_ways", [True, False])
def test_distances_fall_into_the_buckets_of_transformers(both_ways):
  from nm_sparsity_jax.models.t5.layers import RelativePositionBiases

  mine = RelativePositionBiases._relative_position_bucket(reference.FAR, both_ways)
  np.testing.assert_array_equal(mine, known.arrays[f"buckets/{both_ways}"])


def test_the_committed_reference_is_what_transformers_computes():
  made = reference.make(*huggingface_found.load())
  assert set(made) == set(known.arrays)
  for key, x in made.items():
    np.testing.assert_allclose(x, known.arrays[key], rtol=1e-4, atol=1e-5, err_msg=key)


@both
def test_transformers_loads_what_we_write_and_we_read_what_it_saves(name, tmp_path):
  torch, transformers = huggingface_found.load()
  model = transformers.T5ForConditionalGeneration
  net = model.from_pretrained(folder_of(name, tmp_path / "ours")).eval()
  kept = dict(net.named_parameters())
  for key, x in tensors_of(name).items():
    np.testing.assert_array_equal(kept[key].detach().numpy(), x, err_msg=key)
  logits, ids = reference.run(torch, net, name)
  assert_close(logits, known.arrays[f"{name}/logits"], "logits")
  np.testing.assert_array_equal(ids, known.arrays[f"{name}/ids"])
  reference.network(torch, transformers, name).save_pretrained(tmp_path / "theirs")
  config = config_of_name(name)
  want = huggingface.from_huggingface(tensors_of(name), config)
  assert_same(huggingface.read(tmp_path / "theirs", config), want)
  assert model.from_pretrained(tmp_path / "ours").config.dtype == torch.float32


# --- there and back -------------------------------------------------------------------------------


@both
@scans
def test_weights_go_there_and_back_bit_for_bit(name, scan, tmp_path):
  config = config_of_name(name, **SCANS[scan])
  tensors = tensors_of(name)
  tensors["encoder.block.0.layer.0.SelfAttention.q.weight"][:, ::2] = 0  # of pruning
  tensors["encoder.block.0.layer.0.SelfAttention.q.weight"][:, 1] = -0.0
  params = huggingface.from_huggingface(tensors, config)
  net, ids = Transformer(config), jnp.ones((1, 1), jnp.int32)
  shapes = jax.eval_shape(lambda: net.init(jax.random.key(0), ids, ids, ids, enable_dropout=False))
  assert {k: x.shape for k, x in flatten(params)} == {
    k: x.shape for k, x in flatten(shapes["params"])
  }
  assert_same(huggingface.to_huggingface(params), tensors)
  huggingface.write(tmp_path / "out", params, config)
  assert_same(huggingface.read(tmp_path / "out", config), params)
  opened = safetensors_file.Opened(tmp_path / "out/model.safetensors")
  assert_same({key: np.asarray(x) for key, x in opened.tensors.items()}, tensors)
  written = json.loads((tmp_path / "out/config.json").read_text())
  assert "sparsity_config" not in written and written["model_type"] == "t5"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_half_of_the_bytes_and_several_files_keep_every_bit(dtype, tmp_path):
  config = config_of_name("v1_1")
  params = huggingface.from_huggingface(tensors_of("v1_1"), config)
  params = jax.tree.map(lambda x: x.astype(jnp.dtype(dtype)), params)
  params["encoder"]["layers_1"]["mlp"]["wo"]["kernel"] = tensors_of("v1_1")[
    "encoder.block.1.layer.1.DenseReluDense.wo.weight"
  ].T  # transformers keeps these in float32 beside float16
  huggingface.write(tmp_path / "out", params, config, most=4000)
  files = sorted(x.name for x in (tmp_path / "out").iterdir())
  assert "model.safetensors.index.json" in files and len(files) > 10
  index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
  sizes = [x.nbytes for _, x in flatten(params)]
  assert index["metadata"]["total_size"] == sum(sizes)
  assert_same(huggingface.read(tmp_path / "out"), params)


def test_layers_that_differ_where_t5_shares_are_refused(tmp_path):
  config = config_of_name("v1_0", scan_layers=True)
  params = huggingface.from_huggingface(tensors_of("v1_0"), config)
  table = params["decoder"]["decoder"]["relpos_bias"]["rel_embedding"]
  table[0, 1, 0] += 1
  with pytest.raises(ValueError, match="the layers differ"):
    huggingface.write(tmp_path / "out", params, config)
  assert not list(tmp_path.iterdir())


# --- config.json ----------------------------------------------------------------------------------

# d_model, num_heads, num_layers, d_kv, d_ff of the published config.json.
PUBLISHED = {
  "t5_1_0": {
    "small": (512, 8, 6, 64, 2048),
    "base": (768, 12, 12, 64, 3072),
    "large": (1024, 16, 24, 64, 4096),
    "3B": (1024, 32, 24, 128, 16384),
    "11B": (1024, 128, 24, 128, 65536),
  },
  "t5_1_1": {
    "small": (512, 6, 8, 64, 1024),
    "base": (768, 12, 12, 64, 2048),
    "large": (1024, 16, 24, 64, 2816),
    "xl": (2048, 32, 24, 64, 5120),
    "xxl": (4096, 64, 24, 64, 10240),
  },
}
SIZES = [(version, size) for version, sizes in PUBLISHED.items() for size in sizes]


@pytest.mark.parametrize("version, size", SIZES)
def test_every_published_size_goes_there_and_back(version, size):
  config = T5Config.preset(version, size)
  made = huggingface.to_json(config)
  names = ("d_model", "num_heads", "num_layers", "d_kv", "d_ff")
  assert tuple(made[name] for name in names) == PUBLISHED[version][size]
  assert made["tie_word_embeddings"] == (version == "t5_1_0")
  assert made["feed_forward_proj"] == {"t5_1_0": "relu", "t5_1_1": "gated-gelu"}[version]
  assert huggingface.from_json(made, "it") == config
  for scanned in (config, dataclasses.replace(config, scan_layers=True)):
    shapes = shapes_of(scanned)
    assert config_of(shapes, "it") == scanned


def test_what_config_json_leaves_out_is_what_transformers_takes():
  config = huggingface.from_json({"model_type": "t5", "num_layers": 3}, "it")
  assert config == T5Config.t5_1_0("small", num_encoder_layers=3, num_decoder_layers=3)
  # transformers 5 says by two words what transformers 4 says by one.
  five = dict(model_type="t5", tie_word_embeddings=True, scale_decoder_outputs=False)
  assert not huggingface.from_json(five, "it").logits_via_embedding


@pytest.mark.parametrize(
  "changes, word",
  [
    (dict(model_type="mt5"), "mt5"),
    (dict(quantization_config={"bits": 8}), "quantization_config"),
    (dict(relative_attention_num_buckets=64), "num_buckets is 64"),
    (dict(feed_forward_proj="gelu"), "feed_forward_proj is 'gelu'"),
    (dict(tie_word_embeddings=False, scale_decoder_outputs=True), "as in no T5"),
  ],
)
def test_a_config_of_what_we_do_not_compute_is_refused(changes, word):
  with pytest.raises(ValueError, match=word):
    huggingface.from_json({"model_type": "t5", **changes}, "it")


def test_an_activation_that_transformers_lacks_is_refused():
  config = config_of_name("v1_0", mlp_activations=("tanh", "relu"))
  with pytest.raises(ValueError, match=r"\('tanh', 'relu'\): transformers' T5 has"):
    huggingface.to_json(config)


# --- what does not fit ----------------------------------------------------------------------------


def changed(tmp_path, change, name="v1_0"):
  """A folder in which `change` has changed tensors and values of config.json."""
  path = folder_of(name, tmp_path / "folder")
  values = json.loads((path / "config.json").read_text())
  tensors = tensors_of(name)
  change(tensors, values)
  (path / "config.json").write_text(json.dumps(values))
  (path / "model.safetensors").unlink()
  safetensors_file.write(path / "model.safetensors", tensors)
  return path


def test_all_names_that_do_not_fit_are_in_one_error(tmp_path):
  def change(tensors, values):
    for i in range(3):
      del tensors[f"encoder.block.{i}.layer.0.SelfAttention.q.weight"]
    tensors["classifier.weight"] = np.zeros((2, 16), np.float32)
    tensors["shared.weight"] = np.zeros((90, 16), np.float32)

  path = changed(tmp_path, change)
  with pytest.raises(ValueError) as e:
    huggingface.read(path)
  for words in (
    str(path), "3 of 55 missing (encoder.block.{0..2}.layer.0.SelfAttention.q.weight)",
    "1 unknown (classifier.weight)", "shared.weight is (90, 16) there and (96, 16) here",
  ):  # fmt: skip
    assert words in str(e.value)


def test_names_that_are_left_out_of_an_error_are_counted():
  wanted = dict.fromkeys(("q", "r", "s", "layers_0/k", "layers_1/k"), (1,))
  said = difference(wanted, {})
  assert said == "5 of 5 missing (q, r, s and 2 more)"


def test_copies_of_the_embedding_must_be_equal_to_it(tmp_path):
  def copies(tensors, values):
    for name in ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"):
      tensors[name] = tensors["shared.weight"].copy()
    tensors["decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"] = np.zeros(
      (32, 4), np.float32
    )

  path = changed(tmp_path / "a", copies)
  want = huggingface.from_huggingface(tensors_of("v1_0"), config_of_name("v1_0"))
  assert_same(huggingface.read(path), want)

  def untied(tensors, values):
    tensors["lm_head.weight"] = tensors["shared.weight"] + 1

  with pytest.raises(ValueError, match=r"'lm_head.weight' differs from 'shared.weight'"):
    huggingface.read(changed(tmp_path / "b", untied))


def test_a_t5_1_1_that_transformers_5_tied_has_the_embedding_as_its_head(tmp_path):
  def tie(tensors, values):
    del tensors["lm_head.weight"]
    values |= dict(tie_word_embeddings=True, scale_decoder_outputs=False)

  params = huggingface.read(changed(tmp_path, tie, "v1_1"), config_of_name("v1_1"))
  table = params["token_embedder"]["embedding"]
  np.testing.assert_array_equal(params["decoder"]["logits_dense"]["kernel"], table.T)


def test_a_folder_of_another_size_names_each_size_that_differs(tmp_path):
  path = folder_of("v1_1", tmp_path / "folder")
  other = config_of_name("v1_1", emb_dim=32, num_heads=8, mlp_activations=("silu", "linear"))
  with pytest.raises(ValueError) as e:
    huggingface.read(path, other)
  for words in (
    str(path), "emb_dim is 16 there and 32 here", "num_heads is 4 there and 8 here",
    "mlp_activations is ('gelu', 'linear') there and ('silu', 'linear') here",
  ):  # fmt: skip
    assert words in str(e.value)


def _pickled(path):
  (path / "model.safetensors").rename(path / "pytorch_model.bin")


def _outside(path):
  index = {"weight_map": {"shared.weight": "../model.safetensors"}}
  (path / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
  "harm, word",
  [
    (lambda path: (path / "config.json").unlink(), "has no config.json"),
    (lambda path: (path / "config.json").write_text("{"), "is no JSON"),
    (lambda path: (path / "model.safetensors").unlink(), "neither model.safetensors"),
    (lambda path: (path / "model.safetensors").write_bytes(b"cut"), "not a safetensors file"),
    (_pickled, "torch pickled"),
    (_outside, "of another folder"),
  ],
)
def test_a_folder_that_cannot_be_read_is_refused_in_a_sentence(harm, word, tmp_path):
  path = folder_of("v1_0", tmp_path / "folder")
  harm(path)
  with pytest.raises(ValueError, match=word) as e:
    Folder(path)
  assert str(path) in str(e.value) and "\n" not in str(e.value)


def test_integers_are_no_weights(tmp_path):
  def change(tensors, values):
    tensors["shared.weight"] = np.zeros((96, 16), np.int8)

  with pytest.raises(ValueError, match="'shared.weight' is int8"):
    Folder(changed(tmp_path, change))


def test_another_tree_is_refused_and_a_failure_leaves_nothing(tmp_path):
  path = folder_of("v1_0", tmp_path / "folder")
  with pytest.raises(ValueError, match="is there already"):
    folder_of("v1_0", path)
  params = huggingface.from_huggingface(tensors_of("v1_0"), config_of_name("v1_0"))
  with pytest.raises(ValueError, match="is not of the network of this config"):
    huggingface.write(tmp_path / "new", params, config_of_name("v1_0", mlp_dim=48))
  del params["encoder"]["encoder_norm"]
  with pytest.raises(ValueError, match="is not of T5X's T5"):
    huggingface.to_huggingface(params)
  assert [x.name for x in tmp_path.iterdir()] == ["folder"]
