"""Checkpoints in the names of timm and Hugging Face: written, proven, read, and started from."""

import functools
import json
import pathlib

import jax
import numpy as np
import pytest
import test_huggingface as t5
import test_weights as images

import nm_sparsity_jax as nms
from nm_sparsity_jax import cli
from nm_sparsity_jax.core.trees import flatten
from nm_sparsity_jax.deploy import huggingface, safetensors_file, timm
from nm_sparsity_jax.models.t5 import Transformer
from nm_sparsity_jax.runs import checkpoint
from nm_sparsity_jax.trainer import checkpoints, step
from nm_sparsity_jax.trainer.workloads.t5 import T5
from nm_sparsity_jax.training import rules_text

RULES = {"ff": "1:4", "qkv": "2:8", "o": "1:4"}  # of a T5


def rules_of_t5():
  recipe = lambda pattern: nms.recipe("sr_ste", pattern=pattern, phases=nms.Phases(total=7))
  return nms.Rules({place: recipe(pattern) for place, pattern in RULES.items()})


def save(folder, variables, rules):
  """Writes checkpoint_7 as the local runner lays it out, at the end of its schedule."""
  tree = {"target": variables["params"], "state": {"step": np.int32(7)}, "flax_mutables": {}}
  if "batch_stats" in variables:
    tree["flax_mutables"]["batch_stats"] = variables["batch_stats"]
  if rules is not None:
    text = np.asarray(rules_text.pack(rules_text.describe(rules)))
    tree["flax_mutables"]["nm_sparsity"] = {"step": np.int32(7), "rules": text}
  flat = {key: np.asarray(x) for key, x in flatten(tree)}
  checkpoint.write(f"{folder}/checkpoint_7", flat)


def written(folder, name, finalized=True, sparse=True):
  """A checkpoint of a network of images; its variables."""
  variables, rules = images.variables_of(name), images.some_rules(name)
  if finalized:
    params = jax.device_get(nms.finalize(variables["params"], rules, 0, early=True))
    variables = {**variables, "params": params}
  save(folder, variables, rules if sparse else None)
  return variables


def written_t5(folder, name, **changes):
  """A finalized checkpoint of a T5; its parameters."""
  config = t5.config_of_name(name, **changes)
  params, rules = huggingface.from_huggingface(t5.tensors_of(name), config), rules_of_t5()
  if config.scan_layers:
    axes = {r".*/(query|key|value|wi.*|wo)/kernel": 0, r".*/out/kernel": (0, 2)}
    rules = rules.with_axes(axes)
  params = jax.device_get(nms.finalize(params, rules, 0, early=True))
  save(folder, {"params": params}, rules)
  return params


def refused(capsys, *argv):
  """The one line of a command that fails."""
  capsys.readouterr()
  assert cli.main([*map(str, argv)]) == 1
  (line,) = capsys.readouterr().err.splitlines()
  return line


# --- images -------------------------------------------------------------------------------------


@images.tiny
def test_export_writes_timms_names_with_the_zeros_and_proves_them(name, tmp_path, capsys):
  variables = written(tmp_path / "run", name)
  file = tmp_path / "model.safetensors"
  assert cli.main(["export", str(tmp_path / "run"), str(file), "--json"]) == 0
  report = json.loads(capsys.readouterr().out)
  assert report["ok"] and report["tensors"] == len(images.names_of(name))
  assert {place["axis"] for place in report["places"]} == {1} and len(report["places"]) > 5
  images.assert_same(timm.read(file), variables)
  # And back: `verify` reads the file by its own names.
  first, second = images.PLACES[name]
  assert cli.main(["verify", str(file), "--rules", str({first: "1:4", second: "2:8"})]) == 0
  assert cli.main(["verify", str(file), "--rules", str({first: "1:8"})]) == 1
  assert "holds no rules" in refused(capsys, "verify", file)


def test_a_dense_checkpoint_is_exported_and_nothing_is_proven(tmp_path, capsys):
  variables = written(tmp_path / "run", "vit_test", finalized=False, sparse=False)
  file = tmp_path / "model.safetensors"
  assert cli.main(["export", str(tmp_path / "run"), str(file)]) == 0
  assert "nothing to prove" in capsys.readouterr().out
  images.assert_same(timm.read(file), variables)


def test_a_file_is_compared_by_its_header_and_loads_as_any_checkpoint(tmp_path, monkeypatch):
  file, net = tmp_path / "model.safetensors", images.network("vit_test")
  safetensors_file.write(file, images.tensors_of("vit_test"))
  shapes = images.shapes_of(net)
  stored = checkpoint.read(str(file), shapes, net.config)
  like = {"target": shapes["params"]}
  device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  tree = checkpoint.load(stored, like, jax.tree.map(lambda _: device, like))
  want = timm.from_timm(images.tensors_of("vit_test"), shapes)
  images.assert_same({"params": jax.device_get(tree["target"])}, want)
  # `plan` and `sweep` read no tensor of a start from timm's weights.
  unread = lambda *_: pytest.fail("it read a tensor")
  monkeypatch.setattr(safetensors_file.Lazy, "__array__", unread)
  checkpoint.read(str(file), shapes, net.config)
  other = images.shapes_of(images.network("vit_test", classes=7))
  with pytest.raises(ValueError, match=r"another network: .* there and \(7,\) here"):
    checkpoint.read(str(file), other)


# --- T5 -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, scan", [("v1_0", False), ("v1_1", True)])
def test_export_writes_a_folder_with_the_zeros_and_proves_them(name, scan, tmp_path, capsys):
  params = written_t5(tmp_path / "run", name, scan_layers=scan)
  out = tmp_path / "model"
  assert cli.main(["export", str(tmp_path / "run"), str(out), "--json"]) == 0
  report = json.loads(capsys.readouterr().out)
  assert report["ok"] and report["tensors"] == len(t5.names_of(name))
  kernels = {n for n in t5.names_of(name) if "Attention." in n or "Dense." in n}
  kernels -= {n for n in kernels if "relative_attention_bias" in n}
  assert {place["path"] for place in report["places"]} == kernels
  assert {place["axis"] for place in report["places"]} == {1}
  t5.assert_same(huggingface.read(out, t5.config_of_name(name, scan_layers=scan)), params)
  # And back: `verify` reads the folder in T5X's names.
  assert cli.main(["verify", str(out), "--rules", str(RULES)]) == 0
  assert cli.main(["verify", str(out), "--rules", "{'ff': '1:8'}"]) == 1


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
  """A folder of Hugging Face's T5, and the checkpoint that `convert` makes of it."""
  folder = tmp_path_factory.mktemp("converted")
  t5.folder_of("v1_1", folder / "hf")
  assert cli.main(["convert", str(folder / "hf"), str(folder / "start")]) == 0
  return folder / "hf", folder / "start/checkpoint_0"


def test_weights_do_not_tell_the_activation_so_you_may(dense, tmp_path, capsys):
  argv = ["export", str(dense[1]), str(tmp_path / "model"), "--feed-forward", "gated-silu"]
  assert cli.main(argv) == 0
  assert huggingface.Folder(tmp_path / "model").config.mlp_activations == ("silu", "linear")
  argv[2:] = [str(tmp_path / "other"), "--feed-forward", "gelu"]
  assert "feed_forward_proj is 'gelu'" in refused(capsys, *argv)


def test_finalize_reads_and_writes_a_folder_and_keeps_its_other_files(tmp_path):
  folder = t5.folder_of("v1_1", tmp_path / "dense")
  values = json.loads((folder / "config.json").read_text()) | {"task_specific_params": {"a": 1}}
  (folder / "config.json").write_text(json.dumps(values))
  (folder / "tokenizer.json").write_text("{}")
  (folder / "secret.txt").write_text("not copied")
  out = tmp_path / "final"
  assert cli.main(["verify", str(folder), "--rules", str(RULES)]) == 1
  assert cli.main(["finalize", str(folder), str(out), "--rules", str(RULES)]) == 0
  assert cli.main(["verify", str(out), "--rules", str(RULES)]) == 0
  assert json.loads((out / "config.json").read_text()) == values
  kept = ["config.json", "model.safetensors", "tokenizer.json"]
  assert sorted(x.name for x in out.iterdir()) == kept
  want = nms.finalize(huggingface.read(folder), rules_of_t5(), 0, early=True)
  t5.assert_same(huggingface.read(out), jax.device_get(want))


@pytest.mark.parametrize("scan", [False, True])
def test_a_folder_is_converted_for_t5x_and_starts_a_local_run(scan, dense, tmp_path):
  folder, path = dense
  if scan:
    path = pathlib.Path(nms.runs.convert(folder, tmp_path / "start", scan_layers=True))
  stored = checkpoint.read(str(path))
  config = t5.config_of_name("v1_1", scan_layers=scan)
  want = huggingface.from_huggingface(t5.tensors_of("v1_1"), config)
  got = {k.removeprefix("target/"): stored.array(k) for k in stored.leaves if "target" in k}
  t5.assert_same(got, dict(flatten(want)))
  assert (stored.format, stored.step, stored.rules) == ("Orbax", 0, None)
  load = functools.partial(checkpoints.load_initial, str(folder), key=jax.random.key(0))
  params, _, number = load(step.Model(T5(Transformer(config)), rules_of_t5()))
  t5.assert_same(jax.device_get(params), want)
  assert number == 0
  relu = t5.config_of_name("v1_1", mlp_activations=("relu", "linear"))  # the same shapes
  with pytest.raises(ValueError, match="mlp_activations is .'gelu', 'linear'. there"):
    load(step.Model(T5(Transformer(relu)), rules_of_t5()))


# --- what is refused ----------------------------------------------------------------------------


def test_what_cannot_be_exported_is_one_line(dense, tmp_path, capsys):
  written(tmp_path / "vit", "vit_test", finalized=False)
  checkpoint.write(str(tmp_path / "other/checkpoint_1"), {"target/wi/kernel": np.ones((8, 4))})
  (tmp_path / "there").mkdir()
  before = sorted(tmp_path.rglob("*"))
  rules = ["--rules", str(RULES)]
  for source, out, flags, word in (
    (tmp_path / "vit", "m.safetensors", [], "is not n:m"),
    (tmp_path / "vit", "m.bin", [], "ends in .safetensors"),
    (tmp_path / "other", "m.safetensors", [], "is not of timm's ViT"),
    (dense[1], "model", rules, "is not n:m"),
    (dense[1], "model.safetensors", rules, "name a folder for a T5"),
    (dense[1], "there", rules, "is there already"),
    (dense[0], "again", rules, "is a folder of Hugging Face's T5 already"),
  ):
    assert word in refused(capsys, "export", source, tmp_path / out, *flags)
  assert sorted(tmp_path.rglob("*")) == before


def test_other_files_are_refused_where_checkpoints_are_read(tmp_path):
  folder = t5.folder_of("v1_0", tmp_path / "hf")
  (tmp_path / "pickled.bin").write_bytes(b"PK\x03\x04")
  (tmp_path / "damaged.safetensors").write_bytes(b"nothing")
  safetensors_file.write(tmp_path / "unknown.safetensors", {"w": np.ones((8, 4), np.float32)})
  for path, word in (
    (folder / "model.safetensors", "name its folder"),
    (tmp_path / "pickled.bin", "torch pickled"),
    (tmp_path / "damaged.safetensors", "not a safetensors file"),
    (tmp_path / "unknown.safetensors", "is not of timm's ViT"),
  ):
    with pytest.raises(ValueError, match=word) as e:
      nms.runs.verify(path, {"ff": "1:4"})
    assert str(path) in str(e.value)
