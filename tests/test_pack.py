"""`nm-sparsity pack`: checkpoints, and folders and files of others, become packed files."""

import json

import jax
import numpy as np
import pytest
import test_export as exported
import test_huggingface as huggingface
import test_weights as images
from test_packed_file import kernels_of

import nm_sparsity_jax as nms
from nm_sparsity_jax import cli
from nm_sparsity_jax.core.trees import flatten
from nm_sparsity_jax.deploy import inference_tree, packed_file, safetensors_file
from nm_sparsity_jax.training import rules_text


def assert_holds(opened, tree):
  for path, x in flatten(tree):
    np.testing.assert_array_equal(opened.array(path), x, err_msg=path)


@pytest.mark.parametrize("name, scan", [("v1_0", False), ("v1_1", True)])
def test_a_t5_is_packed_and_proven(name, scan, tmp_path, capsys):
  params = exported.written_t5(tmp_path / "run", name, scan_layers=scan)
  file = tmp_path / "new" / "model.safetensors"
  assert cli.main(["pack", str(tmp_path / "run"), str(file)]) == 0
  config = huggingface.config_of_name(name, scan_layers=scan)
  want, _ = inference_tree.unstacked(params, config)
  opened = packed_file.Opened(file)
  assert set(opened.leaves) == {f"params/{key}" for key, _ in flatten(want)}
  assert_holds(opened, {"params": want})
  assert len(kernels_of(opened)) > 10
  row = next(line for line in capsys.readouterr().out.splitlines() if "/mlp/" in line)
  assert " 1:4 " in row and " 3.76x " in row and " 1.0625 " in row  # as docs/deploy.md has it
  assert cli.main(["verify", str(file)]) == 0
  assert "own rules" in capsys.readouterr().out
  assert "was trained with" in exported.refused(capsys, "verify", file, "--rules", "{'ff': '1:8'}")


def test_a_resnet_is_packed_with_its_state(tmp_path, capsys):
  variables = images.variables_of("resnet_test")
  rules = {"head": "1:4", "conv": "1:4"}
  recipe = nms.recipe("sr_ste", pattern="1:4", phases=nms.Phases(total=1))
  params = nms.finalize(variables["params"], nms.Rules(dict.fromkeys(rules, recipe)), 0, early=True)
  variables = {**variables, "params": jax.device_get(params)}
  exported.save(tmp_path / "run", variables, None)
  file = tmp_path / "model.safetensors"
  command = ["pack", str(tmp_path / "run"), str(file), "--json", "--rules", str(rules)]
  assert cli.main(command) == 0
  report, opened = json.loads(capsys.readouterr().out), packed_file.Opened(file)
  assert_holds(opened, variables)
  assert report["packed"].keys() == {"fc/kernel"}
  assert "(in, out)" in report["dense"]["layer1_0/conv1/kernel"]
  one = report["packed"]["fc/kernel"]
  assert one["bytes_with_zeros"] == 4 * one["weights"] > 3 * one["bytes"]
  assert cli.main(["verify", str(file)]) == 0


def test_timms_file_and_a_folder_of_a_t5_are_packed_by_given_rules(tmp_path):
  variables = exported.written(tmp_path / "run", "vit_test")
  nms.runs.export(tmp_path / "run", tmp_path / "timm.safetensors")
  rules = dict(zip(images.PLACES["vit_test"], ("1:4", "2:8"), strict=True))
  nms.runs.pack(tmp_path / "timm.safetensors", tmp_path / "a.safetensors", rules)
  assert_holds(packed_file.Opened(tmp_path / "a.safetensors"), variables)
  folder = huggingface.folder_of("v1_0", tmp_path / "hf")
  nms.runs.finalize(folder, tmp_path / "final", {"ff": "1:8"})
  nms.runs.pack(tmp_path / "final", tmp_path / "c.safetensors", {"ff": "1:8"})
  kernels = kernels_of(packed_file.Opened(tmp_path / "c.safetensors"))
  assert {str(kernel.pattern) for kernel in kernels.values()} == {"1:8"}
  with pytest.raises(ValueError, match="is not 1:8 along axis 0: 8 of the 8 .* Finalize it first"):
    nms.runs.pack(folder, tmp_path / "d.safetensors", {"ff": "1:8"})
  assert not (tmp_path / "d.safetensors").exists()


def test_values_are_rounded_to_int8(tmp_path):
  params = exported.written_t5(tmp_path / "run", "v1_0")
  file = tmp_path / "model.safetensors"
  made = nms.runs.pack(tmp_path / "run", file, dtype="int8")
  name = "encoder/layers_0/mlp/wo/kernel"
  w = dict(flatten(params))[name]
  # One byte and a quarter for four weights, and four bytes of scale for a column.
  assert made.report.packed[name].bytes == w.size * 1.25 / 4 + 4 * w.shape[1]
  back = packed_file.Opened(file).array(f"params/{name}")
  assert np.abs(back - w).max() <= np.abs(w).max() / 254 * 1.01


def test_what_cannot_be_packed_is_one_line(tmp_path, capsys):
  exported.written(tmp_path / "run", "vit_test", finalized=False)
  exported.written(tmp_path / "final", "vit_test")
  file = tmp_path / "model.safetensors"
  assert "is not 2:8 along axis 0" in exported.refused(capsys, "pack", tmp_path / "run", file)
  assert not file.exists()
  assert cli.main(["pack", str(tmp_path / "final"), str(file)]) == 0
  for argv, word in (
    (("pack", tmp_path / "final", file), "is there already"),
    (("pack", file, tmp_path / "b.safetensors"), "is a packed file already"),
    (("pack", file, tmp_path / "b.bin"), "ends in .safetensors"),
    (("finalize", file, tmp_path / "again"), "finalized already"),
  ):
    assert word in exported.refused(capsys, *argv)


def test_a_regex_of_a_stack_becomes_that_of_its_layers(tmp_path):
  """The other rule's axis stays: its kernel is in no stack."""
  recipe = lambda pattern: nms.recipe("sr_ste", pattern=pattern, phases=nms.Phases(total=1))
  stack = r"encoder/encoder/mlp/w[io]\w*/kernel"
  places = {stack: recipe("1:4"), "decoder/logits_dense/kernel": recipe("1:2")}
  rules = nms.Rules(places, axes={stack: 0, "decoder/logits.*": 0})
  params = huggingface.params_of("v1_1", scan_layers=True)
  params = jax.device_get(nms.finalize(params, rules, 0, early=True))
  exported.save(tmp_path, {"params": params}, None)
  file = tmp_path / "model.safetensors"
  nms.runs.pack(tmp_path, file, rules)
  opened = packed_file.Opened(file)
  found = rules_text.parse(opened.rules)
  layers = {rf"encoder/layers_\d+/mlp/{name}/kernel" for name in ("wi_0", "wi_1", "wo")}
  assert set(found.places) == {*layers, "decoder/logits_dense/kernel"}
  assert found.axes == {"decoder/logits_dense/kernel": 0} and len(kernels_of(opened)) == 10
  config = huggingface.config_of_name("v1_1", scan_layers=True)
  assert_holds(opened, {"params": inference_tree.unstacked(params, config)[0]})
  assert cli.main(["verify", str(file)]) == 0


def test_verify_reads_every_kernel_also_one_that_no_rule_names(tmp_path, capsys):
  exported.written(tmp_path / "run", "vit_test")
  file = tmp_path / "model.safetensors"
  nms.runs.pack(tmp_path / "run", file)
  opened = safetensors_file.Opened(file)
  tensors = {name: np.asarray(x) for name, x in opened.tensors.items()}
  tensors["params/blocks_0/attn/q/kernel.nm_indices"][:] = 0xFF
  header = json.loads(opened.metadata["nm_sparsity_jax"])
  header["rules"] = next(line for line in header["rules"].splitlines() if "mlp" in line)
  file.unlink()
  safetensors_file.write(file, tensors, {"nm_sparsity_jax": json.dumps(header)})
  assert "blocks_0/attn/q/kernel" in (line := exported.refused(capsys, "verify", file))
  assert str(file) in line and "an index of 15 in a group of 8" in line
