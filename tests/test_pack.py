"""`nm-sparsity pack`: checkpoints, and folders and files of others, become packed files."""

import json
import os
import subprocess
import sys

import jax
import numpy as np
import pytest
import test_export as vision
import test_huggingface as huggingface
import test_huggingface_runs as t5
import test_weights as weights

import nm_sparsity_jax as nms
from nm_sparsity_jax import cli
from nm_sparsity_jax.core.trees import flatten
from nm_sparsity_jax.deploy import inference_tree, packed_file, safetensors_file, timm
from nm_sparsity_jax.models.vit import ViTConfig
from nm_sparsity_jax.runs import checkpoint
from nm_sparsity_jax.training import rules_text


def pack(capsys, *argv):
  """What the command says; it must succeed."""
  code = cli.main(["pack", *map(str, argv)])
  said = capsys.readouterr()
  assert code == 0, said.err
  return said.out


def refused(capsys, *argv):
  """The one line of an error; no file is left."""
  before = os.listdir(argv[1].parent)
  assert cli.main(["pack", *map(str, argv)]) == 1
  assert os.listdir(argv[1].parent) == before
  said = capsys.readouterr().err
  assert said.count("\n") == 1
  return said


@pytest.mark.parametrize("name, scan", [("v1_0", False), ("v1_1", True)])
def test_a_t5_is_packed_and_proven(name, scan, tmp_path, capsys):
  params = t5.written(tmp_path / "run", name, scan_layers=scan)
  file = tmp_path / "new" / "model.safetensors"
  said = pack(capsys, tmp_path / "run", file)
  config = huggingface.config_of_name(name, scan_layers=scan)
  want, _ = inference_tree.unstacked(params, config)
  opened = packed_file.Opened(file)
  assert {key.removeprefix("params/") for key in opened.leaves} == {k for k, _ in flatten(want)}
  for path, x in flatten(want):
    np.testing.assert_array_equal(opened.array(f"params/{path}"), x, err_msg=path)
  assert len(opened.kernels) > 10 and all(k.is_matrix for k in opened.kernels.values())
  assert said.startswith(f"{file}: {file.stat().st_size:,} bytes, of {tmp_path}")
  assert "with zeros, no rule makes it sparse: " in said and "token_embedder/embedding" in said
  row = next(line for line in said.splitlines() if "/mlp/" in line)
  assert " 1:4 " in row and " 3.76x " in row and " 1.0625 " in row  # as docs/deploy.md has it
  assert cli.main(["verify", str(file)]) == 0
  assert "(packed), by its own rules" in (out := capsys.readouterr().out) and out.endswith("ok\n")
  assert cli.main(["verify", str(file), "--rules", "{'ff': '1:8'}"]) == 1
  assert "was trained with the rules" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["vit_test", "resnet_test"])
def test_a_network_of_images_is_packed_with_its_state(name, tmp_path, capsys):
  variables = vision.written(tmp_path / "run", name, finalized=True)
  file = tmp_path / "model.safetensors"
  told = json.loads(pack(capsys, tmp_path / "run", file, "--json"))
  opened = packed_file.Opened(file)
  for key, x in flatten(variables):
    np.testing.assert_array_equal(opened.array(key), x, err_msg=key)
  assert set(told["packed"]) == {key.removeprefix("params/") for key in opened.kernels}
  if name == "resnet_test":
    assert told["dense"]["batch_stats/bn1/mean"] == "no parameter"
    assert opened.kernels["params/layer1_0/conv1/kernel"].groups.axes == (2,)
  one = next(iter(told["packed"].values()))
  assert one["bytes_with_zeros"] == 4 * one["weights"] > 3 * one["bytes"]
  assert cli.main(["verify", str(file)]) == 0


def test_timms_file_and_theirs_of_a_t5_are_packed_by_given_rules(tmp_path, capsys):
  vision.written(tmp_path / "run", "vit_test", finalized=True)
  nms.runs.export(tmp_path / "run", tmp_path / "timm.safetensors")
  rules = str(dict(zip(weights.PLACES["vit_test"], ("1:4", "2:8"), strict=True)))
  pack(capsys, tmp_path / "timm.safetensors", tmp_path / "a.safetensors", "--rules", rules)
  opened = packed_file.Opened(tmp_path / "a.safetensors")
  for key, x in flatten(timm.read(tmp_path / "timm.safetensors")):
    np.testing.assert_array_equal(opened.array(key), x, err_msg=key)
  said = refused(capsys, tmp_path / "timm.safetensors", tmp_path / "b.safetensors")
  assert "holds no rules: say what should be n:m" in said

  folder = huggingface.folder_of("v1_0", tmp_path / "hf")
  ff = "{'ff': '1:8'}"
  assert cli.main(["finalize", str(folder), str(tmp_path / "final"), "--rules", ff]) == 0
  assert capsys.readouterr().out.endswith("`pack` and `export` as well.\n")
  pack(capsys, tmp_path / "final", tmp_path / "c.safetensors", "--rules", ff)
  kernels = packed_file.Opened(tmp_path / "c.safetensors").kernels
  assert {str(kernel.pattern) for kernel in kernels.values()} == {"1:8"}
  said = refused(capsys, folder, tmp_path / "d.safetensors", "--rules", ff)
  assert "is not 1:8 along axis 0: 8 of the 8 entries of group 0" in said
  assert "Finalize it first" in said
  said = refused(capsys, folder / "model.safetensors", tmp_path / "d.safetensors", "--rules", ff)
  assert "name its folder, which has config.json" in said


def test_values_are_rounded_to_int8(tmp_path, capsys):
  params = t5.written(tmp_path / "run", "v1_0")
  file = tmp_path / "model.safetensors"
  said = pack(capsys, tmp_path / "run", file, "--dtype", "int8")
  # One byte and a quarter for four weights, and four bytes of scale for a column of 16 or 32.
  assert f" {1.25 / 4 + 4 / 16:.4f} " in said and f" {1.25 / 4 + 4 / 32:.4f} " in said
  assert cli.main(["verify", str(file)]) == 0
  name = "encoder/layers_0/mlp/wo/kernel"
  w = dict(flatten(params))[name]
  back = packed_file.Opened(file).array(f"params/{name}")
  assert np.abs(back - w).max() <= np.abs(w).max() / 254 * 1.01


def test_what_cannot_be_packed_is_one_line(tmp_path, capsys):
  vision.written(tmp_path / "run", "vit_test", finalized=False)
  file = tmp_path / "model.safetensors"
  said = refused(capsys, tmp_path / "run", file)
  assert "is not 2:8 along axis 0: 8 of the 8" in said or "is not 1:4 along axis 0: 4 of" in said
  vision.written(tmp_path / "final", "vit_test", finalized=True)
  pack(capsys, tmp_path / "final", file)
  assert "is there already: it is never overwritten" in refused(capsys, tmp_path / "final", file)
  assert "is a packed file already" in refused(capsys, file, tmp_path / "b.safetensors")
  assert "name a file that ends in .safetensors" in refused(capsys, file, tmp_path / "b.bin")
  assert cli.main(["finalize", str(file), str(tmp_path / "again")]) == 1
  said = capsys.readouterr().err
  assert f"{str(file)!r} is a packed file, and finalized already: use it as it is, or `ex" in said
  assert not (tmp_path / "again").exists()


def test_a_regex_of_a_stack_becomes_that_of_its_layers(tmp_path, capsys):
  """The other rule's axis stays: its kernel is in no stack."""
  net = weights.network("vit_test", scan=True)
  variables = timm.from_timm(weights.tensors_of("vit_test"), weights.shapes_of(net))
  recipe = lambda pattern: nms.recipe("sr_ste", pattern=pattern, phases=nms.Phases(total=1))
  places = {r"blocks/mlp/fc\d/kernel": recipe("1:4"), "head/kernel": recipe("1:2")}
  rules = nms.Rules(places, axes={r"blocks/.*": 1, "head.*": 0})
  params = jax.device_get(nms.finalize(variables["params"], rules, 0, early=True))
  flat = {f"target/{key}": np.asarray(x) for key, x in flatten(params)}
  checkpoint.write(str(tmp_path / "checkpoint_1"), flat)
  file = tmp_path / "model.safetensors"
  nms.runs.pack(tmp_path / "checkpoint_1", file, rules)
  opened = packed_file.Opened(file)
  found = rules_text.parse(opened.rules)
  assert set(found.places) == {r"blocks_\d+/mlp/fc1/kernel", r"blocks_\d+/mlp/fc2/kernel",
                               "head/kernel"}  # fmt: skip
  assert found.axes == {"head/kernel": 0}
  assert len(opened.kernels) == 5
  want, _ = inference_tree.unstacked(params, ViTConfig(scan=True))
  for path, x in flatten(want):
    np.testing.assert_array_equal(opened.array(f"params/{path}"), x, err_msg=path)
  assert cli.main(["verify", str(file)]) == 0


def test_verify_reads_every_kernel_of_a_packed_file(tmp_path, capsys):
  """Also one that its rules do not name."""
  vision.written(tmp_path / "run", "vit_test", finalized=True)
  file = tmp_path / "model.safetensors"
  pack(capsys, tmp_path / "run", file)
  opened = safetensors_file.Opened(file)
  tensors = {name: np.asarray(x) for name, x in opened.tensors.items()}
  tensors["params/blocks_0/attn/q/kernel.nm_indices"][:] = 0xFF
  told = json.loads(opened.metadata["nm_sparsity_jax"])
  with_rules = lambda text: {"nm_sparsity_jax": json.dumps(told | {"rules": text})}
  rules = next(line for line in told["rules"].splitlines() if "mlp" in line)
  file.unlink()
  safetensors_file.write(file, tensors, opened.metadata)
  assert cli.main(["verify", str(file)]) == 1
  due = f"{str(file)!r} is damaged: 'blocks_0/attn/q/kernel' has an index of 15 in a group of 8: "
  for code in (
    cli.main(["verify", str(file)]),
    cli.main(["export", str(file), str(tmp_path / "a.safetensors")]),
  ):
    assert code == 1
  for line in capsys.readouterr().err.splitlines():
    assert line.partition(": ")[2] == f"{due}copy it again, or pack again."
  file.unlink()
  safetensors_file.write(file, tensors, with_rules("ff: srste 1:4, total=1"))
  assert cli.main(["verify", str(file)]) == 1
  assert f"{file}: the rules of this checkpoint name the recipe 'srste'" in capsys.readouterr().err
  file.unlink()
  safetensors_file.write(file, tensors, with_rules(rules))
  assert cli.main(["verify", str(file)]) == 1
  assert due in capsys.readouterr().err


# --- memory ---------------------------------------------------------------------------------------

MEASURED = """
import sys
import numpy as np
from nm_sparsity_jax import runs
from nm_sparsity_jax.runs import checkpoint

def now(name):
  lines = open("/proc/self/status").read().splitlines()
  return next(int(line.split()[1]) for line in lines if line.startswith(name)) * 1024

def pack(side, dtype):
  w = np.ones((side // 4, 4, side), np.float32)
  w[:, 1::2] = 0
  folder = f"{sys.argv[1]}/{side}-{dtype}"
  arrays = {"target/dense/kernel": w.reshape(side, side), "state/step": np.asarray(np.int32(1))}
  checkpoint.write(f"{folder}/checkpoint_1", arrays)
  del w, arrays
  open("/proc/self/clear_refs", "w").write("5")  # the peak begins anew
  before = now("VmRSS")
  runs.pack(folder, f"{folder}.safetensors", {"dense/kernel": "2:4"}, dtype=dtype)
  return (now("VmHWM") - before) / (side * side * 4)

pack(64, None)
print(pack(3072, None), pack(3072, "int8"))
"""


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="Linux tells of a peak")
def test_the_peak_of_memory_is_three_arrays(tmp_path):
  """2:4 has the largest part of packed values; int8 rounds in float64, some rows at a time."""
  ran = subprocess.run(
    [sys.executable, "-c", MEASURED, str(tmp_path)], capture_output=True, text=True, check=False
  )
  assert not ran.returncode, ran.stderr
  floats, rounded = map(float, ran.stdout.split())
  assert floats < 3 and rounded < 3
