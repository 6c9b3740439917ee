"""Checkpoints and folders of Hugging Face's T5: proven, finalized, converted, started from."""

import json
import pathlib

import huggingface_reference as reference
import jax
import numpy as np
import pytest
import test_huggingface as weights

import nm_sparsity_jax as nms
from nm_sparsity_jax import cli
from nm_sparsity_jax.core.trees import flatten
from nm_sparsity_jax.deploy import huggingface, safetensors_file
from nm_sparsity_jax.deploy.huggingface import Folder
from nm_sparsity_jax.models.t5 import Transformer
from nm_sparsity_jax.runs import checkpoint
from nm_sparsity_jax.trainer import checkpoints, step
from nm_sparsity_jax.trainer.workloads.t5 import T5
from nm_sparsity_jax.training import rules_text

RULES = {"ff": "1:4", "qkv": "2:8", "o": "1:4"}


def some_rules(**changes):
  recipe = lambda pattern: nms.recipe("sr_ste", pattern=pattern, phases=nms.Phases(total=7))
  return nms.Rules({place: recipe(pattern) for place, pattern in (RULES | changes).items()})


def written(folder, name, **changes):
  """A finalized checkpoint as T5X lays it out; its parameters."""
  config = weights.config_of_name(name, **changes)
  params = huggingface.from_huggingface(weights.tensors_of(name), config)
  rules = some_rules()
  if config.scan_layers:
    axes = {r".*/(query|key|value|wi.*|wo)/kernel": 0, r".*/out/kernel": (0, 2)}
    rules = rules.with_axes(axes)
  params = jax.device_get(nms.finalize(params, rules, 0, early=True))
  text = np.asarray(rules_text.pack(rules_text.describe(rules)))
  tree = {"target": params, "state": {"step": np.int32(7)}}
  tree["flax_mutables"] = {"nm_sparsity": {"step": np.int32(7), "rules": text}}
  flat = {key: np.asarray(x) for key, x in flatten(tree)}
  checkpoint.write(f"{folder}/checkpoint_7", flat)
  return params


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
  """A folder of theirs, and the checkpoint that `convert` makes of it."""
  folder = tmp_path_factory.mktemp("converted")
  weights.folder_of("v1_1", folder / "hf")
  assert cli.main(["convert", str(folder / "hf"), str(folder / "start")]) == 0
  return folder / "hf", folder / "start/checkpoint_0"


@pytest.mark.parametrize("name, scan", [("v1_0", False), ("v1_1", True)])
def test_export_writes_a_folder_with_the_zeros_and_proves_them(name, scan, tmp_path, capsys):
  params = written(tmp_path / "run", name, scan_layers=scan)
  out = tmp_path / "model"
  assert cli.main(["export", str(tmp_path / "run"), str(out), "--json"]) == 0
  told = json.loads(capsys.readouterr().out)
  assert told["ok"] and told["tensors"] == len(weights.names_of(name))
  kernels = [n for n in weights.names_of(name) if "Attention." in n or "Dense." in n]
  kernels = [n for n in kernels if "relative_attention_bias" not in n]
  assert {place["path"] for place in told["places"]} == set(kernels)
  assert {place["axis"] for place in told["places"]} == {1}
  assert "sparsity_config" not in json.loads((out / "config.json").read_text())
  weights.assert_same(huggingface.read(out, weights.config_of_name(name, scan_layers=scan)), params)
  # And back: `verify` reads the folder in T5X's names.
  assert cli.main(["verify", str(out), "--rules", str(RULES)]) == 0
  assert "(Hugging Face)" in capsys.readouterr().out
  assert cli.main(["verify", str(out), "--rules", "{'ff': '1:8'}"]) == 1


def test_what_is_not_n_m_or_goes_elsewhere_is_not_exported(dense, tmp_path, capsys):
  (tmp_path / "there").mkdir()
  for source, out, said in (
    (dense[1], "model", "is not n:m: export what `nm-sparsity finalize` writes"),
    (dense[1], "model.safetensors", "name a folder for a T5: config.json lies beside its tensors"),
    (dense[1], "there", "is there already"),
    (dense[0], "again", "is a folder of Hugging Face's T5 already"),
  ):
    assert cli.main(["export", str(source), str(tmp_path / out), "--rules", str(RULES)]) == 1
    assert said in capsys.readouterr().err
  place = {"token_embedder/embedding": "8:8"}  # all of it, so that it is proven
  with pytest.raises(ValueError, match="'token_embedder/embedding' is no kernel"):
    nms.runs.export(dense[1], tmp_path / "model", place, {"token_embedder/embedding": 0})
  assert [x.name for x in tmp_path.iterdir()] == ["there"]


def test_weights_do_not_tell_the_activation_so_you_may(dense, tmp_path, capsys):
  args = ["export", str(dense[1]), str(tmp_path / "model"), "--feed-forward", "gated-silu"]
  assert cli.main(args) == 0
  out = capsys.readouterr().out
  assert "T5 with feed_forward_proj = 'gated-silu'" in out and "nothing to prove" in out
  assert Folder(tmp_path / "model").config.mlp_activations == ("silu", "linear")
  tensors = safetensors_file.Opened(tmp_path / "model/model.safetensors")
  got = {name: np.asarray(x) for name, x in tensors.tensors.items()}
  weights.assert_same(got, weights.tensors_of("v1_1"))
  args[2:] = [str(tmp_path / "other"), "--feed-forward", "gelu"]
  assert cli.main(args) == 1
  assert "feed_forward_proj is 'gelu': relu, gated-gelu" in capsys.readouterr().err


def test_finalize_reads_and_writes_a_folder_and_keeps_what_lies_beside(tmp_path, capsys):
  folder = weights.folder_of("v1_1", tmp_path / "dense", most=4000)
  values = json.loads((folder / "config.json").read_text()) | {"task_specific_params": {"a": 1}}
  (folder / "config.json").write_text(json.dumps(values))
  (folder / "tokenizer.json").write_text("{}")
  (folder / "secret.txt").write_text("not copied")
  out = tmp_path / "final"
  assert cli.main(["verify", str(folder), "--rules", str(RULES)]) == 1
  assert cli.main(["finalize", str(folder), str(out), "--rules", str(RULES)]) == 0
  assert "lost" not in capsys.readouterr().err
  assert cli.main(["verify", str(out), "--rules", str(RULES)]) == 0
  assert json.loads((out / "config.json").read_text()) == values
  assert sorted(x.name for x in out.iterdir()) == [
    "config.json", "model.safetensors", "tokenizer.json"
  ]  # fmt: skip
  dense, sparse = dict(flatten(huggingface.read(folder))), dict(flatten(huggingface.read(out)))
  want = dict(
    flatten(jax.device_get(nms.finalize(huggingface.read(folder), some_rules(), 0, early=True)))
  )
  for key, x in sparse.items():
    np.testing.assert_array_equal(x, want[key], err_msg=key)
  kernel = "encoder/layers_0/mlp/wi_0/kernel"
  assert np.mean(sparse[kernel] == 0) == 0.75 and np.all(dense[kernel] != 0)


@pytest.mark.parametrize("scan", [False, True])
def test_convert_makes_a_checkpoint_of_the_network(scan, dense, tmp_path):
  folder, path = dense
  if scan:
    path = pathlib.Path(nms.runs.convert(folder, tmp_path / "start", scan_layers=True))
  stored = checkpoint.read(str(path))
  config = weights.config_of_name("v1_1", scan_layers=scan)
  want = huggingface.from_huggingface(weights.tensors_of("v1_1"), config)
  got = {k.removeprefix("target/"): stored.array(k) for k in stored.leaves if "target" in k}
  weights.assert_same(got, dict(flatten(want)))
  assert (stored.format, stored.step, stored.rules) == ("Orbax", 0, None)
  with pytest.raises(ValueError, match="is there already"):
    nms.runs.convert(folder, path.parent)


@pytest.mark.parametrize("scan", [False, True])
def test_a_local_run_starts_from_a_folder_of_its_network(scan, dense):
  folder = str(dense[0])
  config = weights.config_of_name("v1_1", scan_layers=scan)
  model = step.Model(T5(Transformer(config)), some_rules())
  params, _, number = checkpoints.load_initial(folder, model, jax.random.key(0))
  want = huggingface.from_huggingface(weights.tensors_of("v1_1"), config)
  weights.assert_same(jax.device_get(params), want)
  assert number == 0
  other = step.Model(T5(Transformer(weights.config_of_name("v1_1", mlp_dim=48))), some_rules())
  with pytest.raises(ValueError, match="is of another network: mlp_dim is 40 there and 48 here"):
    checkpoints.load_initial(folder, other, jax.random.key(0))
  relu = weights.config_of_name("v1_1", mlp_activations=("relu", "linear"))  # the same shapes
  with pytest.raises(ValueError, match="mlp_activations is .'gelu', 'linear'. there"):
    checkpoints.load_initial(
      folder, step.Model(T5(Transformer(relu)), some_rules()), jax.random.key(0)
    )


def test_a_file_of_a_t5_and_a_pickled_one_are_refused_where_checkpoints_are_read(tmp_path):
  folder = weights.folder_of("v1_0", tmp_path / "hf")
  with pytest.raises(ValueError, match="holds a T5 in Hugging Face's names: name its folder"):
    nms.runs.verify(folder / "model.safetensors", {"ff": "1:4"})
  (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
  with pytest.raises(ValueError, match="torch pickled. Opening one can run any code|damaged"):
    nms.runs.verify(folder, {"ff": "1:4"})
  (folder / "pytorch_model.bin").unlink()
  safetensors_file.write(folder / "model.safetensors", {"a": reference.hashed("a", (4, 4))})
  with pytest.raises(ValueError) as e:
    nms.runs.verify(folder, {"ff": "1:4"})
  assert "55 of 55 are missing" in str(e.value) and "damaged" not in str(e.value)
