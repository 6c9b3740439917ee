"""Checkpoints and timm's files: written, proven, read by verify, and started from."""

import json

import jax
import numpy as np
import pytest
import test_weights as weights

import nm_sparsity_jax as nms
from nm_sparsity_jax import cli
from nm_sparsity_jax.analysis.sweep import checks
from nm_sparsity_jax.core.trees import flatten
from nm_sparsity_jax.deploy import safetensors_file, timm
from nm_sparsity_jax.runs import arrays, checkpoint, trained
from nm_sparsity_jax.training import rules_text


def written(folder, name, finalized, sparse=True):
  """A checkpoint as the local runner lays it out, at the end of its schedule."""
  variables, rules = weights.variables_of(name), weights.some_rules(name)
  params = variables["params"]
  if finalized:
    params = jax.device_get(nms.finalize(params, rules, 0, early=True))
  tree = {"target": params, "state": {"step": np.int32(7)}, "flax_mutables": {}}
  if "batch_stats" in variables:
    tree["flax_mutables"]["batch_stats"] = variables["batch_stats"]
  if sparse:
    text = np.asarray(rules_text.pack(rules_text.describe(rules)))
    tree["flax_mutables"]["nm_sparsity"] = {"step": np.int32(7), "rules": text}
  flat = {key: np.asarray(x) for key, x in flatten(tree)}
  checkpoint.write(f"{folder}/checkpoint_7", flat)
  return {**variables, "params": params}


@weights.tiny
def test_export_writes_timms_names_with_the_zeros_and_proves_them(name, tmp_path, capsys):
  variables = written(tmp_path / "run", name, finalized=True)
  file = tmp_path / "model.safetensors"
  assert cli.main(["export", str(tmp_path / "run"), str(file), "--json"]) == 0
  told = json.loads(capsys.readouterr().out)
  assert told["ok"] and told["tensors"] == len(weights.names_of(name))
  assert {place["axis"] for place in told["places"]} == {1} and len(told["places"]) > 5
  weights.assert_same(timm.read(file), variables)
  # And back: `verify` reads the file by its own names.
  first, second = weights.PLACES[name]
  rules = str({first: "1:4", second: "2:8"})
  assert cli.main(["verify", str(file), "--rules", rules]) == 0
  assert "(timm)" in capsys.readouterr().out
  assert cli.main(["verify", str(file), "--rules", str({first: "1:8"})]) == 1
  capsys.readouterr()
  assert cli.main(["verify", str(file)]) == 1
  assert "holds no rules: say what should be n:m, --rules" in capsys.readouterr().err


def test_a_sparse_run_that_is_not_finalized_is_not_exported(tmp_path, capsys):
  written(tmp_path / "run", "vit_test", finalized=False)
  file = tmp_path / "model.safetensors"
  assert cli.main(["export", str(tmp_path / "run"), str(file)]) == 1
  assert "is not n:m: export what `nm-sparsity finalize` writes" in capsys.readouterr().err
  assert not file.exists()


def test_a_dense_checkpoint_is_exported_and_nothing_is_proven(tmp_path, capsys):
  variables = written(tmp_path / "run", "vit_test", finalized=False, sparse=False)
  file = tmp_path / "model.safetensors"
  assert cli.main(["export", str(tmp_path / "run"), str(file)]) == 0
  assert "32 tensors" in (out := capsys.readouterr().out) and "nothing to prove" in out
  weights.assert_same(timm.read(file), variables)
  assert cli.main(["export", str(tmp_path / "run"), str(file)]) == 1
  assert "is there already" in capsys.readouterr().err
  assert cli.main(["export", str(tmp_path / "run"), str(tmp_path / "model.bin")]) == 1
  assert "name a file that ends in .safetensors" in capsys.readouterr().err


def test_a_checkpoint_of_another_network_is_not_exported(tmp_path):
  tree = {"target/mlp/wi/kernel": np.ones((8, 4), np.float32)}
  checkpoint.write(str(tmp_path / "checkpoint_1"), tree)
  with pytest.raises(ValueError, match="is not of a ViT, a Swin V2 or a ResNet"):
    nms.runs.export(tmp_path / "checkpoint_1", tmp_path / "model.safetensors")


@pytest.mark.parametrize("name, scan", [("vit_test", True), ("resnet_test", False)])
def test_arrays_of_timms_file_load_as_those_of_any_checkpoint(name, scan, tmp_path):
  file = tmp_path / "model.safetensors"
  safetensors_file.write(file, weights.tensors_of(name))
  shapes = weights.shapes_of(weights.network(name, **({"scan": True} if scan else {})))
  stored = checkpoint.read(str(file), shapes)
  assert (stored.format, stored.step, stored.rules) == ("timm", None, None)
  like = {"target": shapes["params"]}
  if "batch_stats" in shapes:
    like["flax_mutables"] = {"batch_stats": shapes["batch_stats"]}
  device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  tree = arrays.load(stored, like, jax.tree.map(lambda _: device, like))
  want = timm.from_timm(weights.tensors_of(name), shapes)
  got = {"params": tree["target"], **tree.get("flax_mutables", {})}
  weights.assert_same(jax.device_get(got), want)
  other = weights.shapes_of(weights.network(name, classes=7))
  with pytest.raises(ValueError, match=r"another network: .* there and \(7,\) here"):
    checkpoint.read(str(file), other)


@pytest.mark.parametrize("name, scan", [("vit_test", True), ("swinv2_test", False)])
def test_a_network_is_held_against_the_header_alone(name, scan, tmp_path, monkeypatch):
  """So `plan` and `sweep` read no tensor of a start from timm's weights."""
  file = tmp_path / "model.safetensors"
  safetensors_file.write(file, weights.tensors_of(name))
  net = weights.network(name, **({"scan": True} if scan else {}))
  shapes = weights.shapes_of(net)
  monkeypatch.setattr(safetensors_file.Opened, "_read", lambda *_: pytest.fail("it read a tensor"))
  stored = checkpoint.read(str(file), shapes, net.config)
  want = {f"target/{path}": x.shape for path, x in flatten(shapes["params"])}
  assert {key: leaf.shape for key, leaf in stored.leaves.items()} == want
  assert checks._step_of(str(file)) == 0


def test_a_folder_is_what_lies_in_it_whatever_its_name(tmp_path):
  written(tmp_path / "run", "vit_test", finalized=False)
  path = (tmp_path / "run/checkpoint_7").rename(tmp_path / "start.safetensors")
  stored = checkpoint.read(str(path))
  assert (stored.format, stored.step, checks._step_of(str(path))) == ("Orbax", 7, 7)


def test_a_pickled_checkpoint_is_refused_where_checkpoints_are_read(tmp_path):
  (tmp_path / "pytorch_model.bin").write_bytes(b"PK\x03\x04")
  with pytest.raises(ValueError, match="torch pickled. Opening one can run any code"):
    nms.runs.verify(tmp_path / "pytorch_model.bin", {"ff": "1:4"})
  (tmp_path / "model.safetensors").write_bytes(b"nothing")
  with pytest.raises(ValueError, match="is not a safetensors file, or damaged"):
    nms.runs.verify(tmp_path / "model.safetensors", {"ff": "1:4"})


def test_a_file_of_no_known_kind_is_refused_in_one_sentence(tmp_path, capsys):
  file = tmp_path / "foreign.safetensors"
  safetensors_file.write(file, {"w": np.ones((8, 4), np.float32)})
  assert cli.main(["verify", str(file), "--rules", "{'ff': '1:4'}"]) == 1
  due = f"{str(file)!r} (its first tensor is 'w') is of no kind known here: give a file of `nm-spar"
  said = capsys.readouterr().err
  assert due in said and "(a Swin V2 has 'layers.0.blocks.0.attn.logit_scale', a " in said
  assert said.endswith("or the folder of a Hugging Face T5.\n") and said.count("\n") == 1
  with pytest.raises(ValueError, match="or the folder of a Hugging Face T5.$"):  # infer and eval
    trained.stored_rules(str(file))


def test_scanned_blocks_are_proven_one_by_one(tmp_path):
  variables = timm.from_timm(
    weights.tensors_of("vit_test"), weights.shapes_of(weights.network("vit_test", scan=True))
  )
  recipe = nms.recipe("sr_ste", pattern="1:4", phases=nms.Phases(total=1))
  rules = nms.Rules({r"blocks/mlp/fc\d/kernel": recipe}, axes={r"blocks/.*": 1})
  params = jax.device_get(nms.finalize(variables["params"], rules, 0, early=True))
  flat = {f"target/{key}": np.asarray(x) for key, x in flatten(params)}
  checkpoint.write(str(tmp_path / "checkpoint_1"), flat)
  made = nms.runs.export(tmp_path / "checkpoint_1", tmp_path / "m.safetensors", rules)
  assert made.ok and len(made.report.places) == 4
  assert "blocks.1.mlp.fc2.weight" in {place.path for place in made.report.places}
  assert "blocks.{0,1}.mlp.fc2.weight" in str(made.report)
