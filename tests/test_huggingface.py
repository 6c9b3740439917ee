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
from reference_arrays import Reference, assert_close, assert_same, imported

from nm_sparsity_jax.deploy import huggingface, safetensors_file
from nm_sparsity_jax.deploy.huggingface import config_of
from nm_sparsity_jax.models.t5 import T5Config, Transformer
from nm_sparsity_jax.trainer.workloads import decoding


@pytest.fixture(autouse=True, scope="module")
def networks_are_traced_once():
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(huggingface, "shapes_of", functools.cache(huggingface.shapes_of))
    yield


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


# --- what transformers computes -------------------------------------------------------------------


@pytest.mark.parametrize("name, scan", [("v1_0", False), ("v1_1", False), ("v1_1", True)])
def test_logits_and_greedy_generations_are_those_of_transformers(name, scan):
  net, params = (
    Transformer(config_of_name(name, scan_layers=scan)),
    params_of(name, scan_layers=scan),
  )
  x, y = jnp.asarray(reference.inputs(name)), jnp.asarray(reference.targets(name))
  apply = jax.jit(functools.partial(net.apply, enable_dropout=False))
  logits = apply({"params": params}, x, jnp.asarray(reference.shifted(y)), y)
  assert_close(logits, known.arrays[f"{name}/logits"])
  if not scan:
    ids = jax.jit(lambda p: decoding.greedy(net, p, x, reference.NEW_TOKENS)[0])(params)
    np.testing.assert_array_equal(ids, known.arrays[f"{name}/ids"])
    assert len(np.unique(ids)) > 6  # no token that is always the likeliest


def test_the_committed_reference_is_what_transformers_computes():
  known.compare(*imported("torch", "transformers"))


@pytest.mark.parametrize("name", reference.TINY)
def test_transformers_loads_what_we_write_and_we_read_what_it_saves(name, tmp_path):
  torch, transformers = imported("torch", "transformers")
  model = transformers.T5ForConditionalGeneration
  net = model.from_pretrained(folder_of(name, tmp_path / "ours")).eval()
  assert net.config.dtype == torch.float32
  kept = {key: x.detach().numpy() for key, x in net.named_parameters()}
  assert_same({key: kept[key] for key in names_of(name)}, tensors_of(name))
  logits, ids = reference.run(torch, net, name)
  assert_close(logits, known.arrays[f"{name}/logits"])
  np.testing.assert_array_equal(ids, known.arrays[f"{name}/ids"])
  reference.network(torch, transformers, name).save_pretrained(tmp_path / "theirs")
  assert_same(huggingface.read(tmp_path / "theirs", config_of_name(name)), params_of(name))


# --- there and back -------------------------------------------------------------------------------


@pytest.mark.parametrize(
  "name, dtype, scan",
  [
    ("v1_0", "bfloat16", {"scan_layers": True}),
    ("v1_1", "float16", {}),
  ],
)
def test_weights_go_there_and_back_bit_for_bit(name, dtype, scan, tmp_path):
  config = config_of_name(name, **scan)
  tensors = {key: x.astype(jnp.dtype(dtype)) for key, x in tensors_of(name).items()}
  tensors["encoder.block.0.layer.0.SelfAttention.q.weight"][:, ::2] = -0.0  # of pruning
  if dtype == "float16":  # transformers keeps these in float32 beside float16
    for key in [key for key in tensors if key.endswith("wo.weight")]:
      tensors[key] = tensors[key].astype(np.float32)
  params = huggingface.from_huggingface(tensors, config)
  assert_same(huggingface.to_huggingface(params, config), tensors)
  huggingface.write(tmp_path / "out", params, config)
  assert_same(huggingface.read(tmp_path / "out", config), params)


# --- config.json ----------------------------------------------------------------------------------

# Parameters of the published checkpoints.
PUBLISHED = {
  ("t5_1_0", "small"): 60_506_624,
  ("t5_1_0", "base"): 222_903_552,
  ("t5_1_0", "large"): 737_668_096,
  ("t5_1_0", "3B"): 2_851_598_336,
  ("t5_1_0", "11B"): 11_307_321_344,
  ("t5_1_1", "small"): 76_961_152,
  ("t5_1_1", "base"): 247_577_856,
  ("t5_1_1", "large"): 783_150_080,
  ("t5_1_1", "xl"): 2_849_757_184,
  ("t5_1_1", "xxl"): 11_135_332_352,
}


@pytest.mark.parametrize("version, size", PUBLISHED)
def test_every_published_size_goes_there_and_back(version, size):
  config = T5Config.preset(version, size)
  shapes_of, scanned = huggingface.shapes_of, dataclasses.replace(config, scan_layers=True)
  shapes = shapes_of(config)
  assert sum(map(np.prod, shapes.values())) == PUBLISHED[version, size]
  assert huggingface.from_json(huggingface.to_json(config), "it") == config
  assert config_of(shapes, "it") == config and config_of(shapes_of(scanned), "it") == scanned


# --- folders --------------------------------------------------------------------------------------


def with_copies(tensors, config):
  for name in ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"):
    tensors[name] = tensors["shared.weight"].copy()


def tied(tensors, config):
  """T5 1.1 as transformers 5 ties it where nobody gave it a head of its own."""
  del tensors["lm_head.weight"]
  config |= dict(tie_word_embeddings=True, scale_decoder_outputs=False)


def changed(path, change, name):
  """A folder in which `change` has changed tensors and values of config.json."""
  config, tensors = huggingface.to_json(config_of_name(name)), tensors_of(name)
  change(tensors, config)
  path.mkdir()
  safetensors_file.write(path / "model.safetensors", tensors)
  (path / "config.json").write_text(json.dumps(config))
  return path


@pytest.mark.parametrize(
  "name, change, head",
  [("v1_0", with_copies, None), ("v1_1", tied, "shared.weight")],
)
def test_copies_of_the_embedding_are_not_read_and_a_tied_head_is(name, change, head, tmp_path):
  found = huggingface.read(changed(tmp_path / "folder", change, name), config_of_name(name))
  tensors = tensors_of(name)
  if head:
    tensors["lm_head.weight"] = tensors[head]
  assert_same(found, huggingface.from_huggingface(tensors, config_of_name(name)))


def test_a_folder_of_several_files_is_read(tmp_path):
  path, tensors = folder_of("v1_1", tmp_path / "folder"), tensors_of("v1_1")
  (path / "model.safetensors").unlink()
  files = {name: f"model-{i % 3}.safetensors" for i, name in enumerate(tensors)}
  for file in set(files.values()):
    own = {name: x for name, x in tensors.items() if files[name] == file}
    safetensors_file.write(path / file, own)
  (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
  assert_same(huggingface.read(path), params_of("v1_1"))


# --- what is refused ------------------------------------------------------------------------------


def misfit(tensors, config):
  for i in range(3):
    del tensors[f"encoder.block.{i}.layer.0.SelfAttention.q.weight"]
  tensors["classifier.weight"] = np.zeros((2, 16), np.float32)
  tensors["shared.weight"] = np.zeros((90, 16), np.float32)


@pytest.mark.parametrize(
  "change, words",
  [
    (misfit, r"3 of 55 missing \(encoder.block.0.*, 1 unknown .*, 1 of another shape"),
    (lambda tensors, config: config.update(model_type="mt5"), "mt5"),
  ],
)
def test_a_folder_of_what_we_do_not_compute_is_refused_by_name(change, words, tmp_path):
  path = changed(tmp_path / "folder", change, "v1_0")
  with pytest.raises(ValueError, match=words) as e:
    huggingface.read(path)
  assert str(path) in str(e.value)


def test_a_folder_of_another_network_is_refused_also_where_shapes_agree(tmp_path):
  path = folder_of("v1_1", tmp_path / "folder")
  with pytest.raises(ValueError, match="num_heads is 4 there and 8 here, head_dim is 6 there"):
    huggingface.read(path, config_of_name("v1_1", num_heads=8, head_dim=3))


def other_relative_positions(params):
  params["decoder"]["decoder"]["relpos_bias"]["rel_embedding"][0, 1, 0] += 1


@pytest.mark.parametrize(
  "spoil, changes, word",
  [
    (other_relative_positions, {}, "the layers differ"),
    (lambda params: None, dict(mlp_activations=("tanh",)), "tanh"),
  ],
)
def test_what_is_no_t5_of_transformers_is_not_written(spoil, changes, word, tmp_path):
  params = params_of("v1_0", scan_layers=True)
  spoil(params)
  with pytest.raises((ValueError, KeyError), match=word):
    huggingface.write(tmp_path / "out", params, config_of_name("v1_0", scan_layers=True, **changes))
  assert not list(tmp_path.iterdir())
