"""Core ML packages: torch computes what JAX does, and the package has the weights and their zeros.

Nothing runs a package on Linux. Tests that need the extra `coreml` skip without it.
"""

import importlib.util
import json
import sys
import types

import numpy as np
import pytest
import test_export
import test_huggingface_runs

import nm_sparsity_jax as nms
from nm_sparsity_jax import apply, cli
from nm_sparsity_jax.coreml import package
from nm_sparsity_jax.runs import to_coreml
from nm_sparsity_jax.weights import huggingface, timm

pytestmark = [pytest.mark.usefixtures("short_runs"), pytest.mark.filterwarnings("ignore")]

MISSING = [name for name in ("torch", "coremltools") if importlib.util.find_spec(name) is None]
extra = pytest.mark.skipif(
  bool(MISSING), reason=f"no {' and no '.join(MISSING)} here: pip install -e '.[coreml]'"
)


@extra
@pytest.mark.parametrize("name", ["v1_0", "v1_1"])
def test_the_encoder_of_a_t5_keeps_its_bits_its_zeros_and_n_m(name, tmp_path, capsys):
  scan = name == "v1_1"
  params = test_huggingface_runs.written(tmp_path / "run", name, scan_layers=scan)
  out = str(tmp_path / "encoder.mlpackage")
  words = ["export", str(tmp_path / "run"), out, "--to", "coreml", "--length", "12", "--json"]
  assert cli.main(words) == 0
  told = json.loads(capsys.readouterr().out)
  assert told["ok"] and told["difference"] < 1e-4
  read, tensors = package.Package(out), huggingface.to_huggingface(params)
  kernels = [name for name in tensors if ".layer." in name and tensors[name].ndim == 2]
  kernels = [k for k in kernels if k.startswith("encoder.") and "relative_attention" not in k]
  assert {place["path"] for place in told["places"]} == set(kernels)
  assert {place["axis"] for place in told["places"]} == {1} and told["sparse"] == len(kernels)
  assert set(read.sparse) == {package.name_of(kernel) for kernel in kernels}
  for kernel in [*kernels, "shared.weight"]:
    np.testing.assert_array_equal(read.array(kernel), tensors[kernel])
  assert told["bytes"] == read.bytes < told["bytes_with_zeros"]


@extra
def test_a_vit_keeps_its_bits_its_zeros_and_n_m(tmp_path, capsys):
  variables = test_export.written(tmp_path / "run", "vit_test", finalized=True)
  out = str(tmp_path / "model.mlpackage")
  words = ["export", str(tmp_path / "run"), out, "--to", "coreml", "--heads", "2"]
  assert cli.main(words) == 0
  said = capsys.readouterr().out
  assert "and " in said and "with zeros" in said and "torch and JAX differ by" in said
  read, tensors = package.Package(out), timm.to_timm(variables)
  assert "blocks_0_mlp_fc1_weight" in read.sparse
  for name in ("blocks.0.attn.qkv.weight", "blocks.1.mlp.fc2.weight", "pos_embed", "head.weight"):
    np.testing.assert_array_equal(read.array(name), tensors[name])
  recipe = nms.recipe("sr_ste", pattern="1:4", phases=nms.Phases(total=1))
  kernel = read.array("blocks.0.mlp.fc1.weight")
  counted = apply.verify({"kernel": kernel}, nms.Rules({"kernel": recipe}, {"kernel": 1}))
  assert counted.ok and len(counted.places) == 1


@extra
def test_what_torch_computes_otherwise_is_refused(tmp_path, monkeypatch):
  test_export.written(tmp_path / "run", "vit_test", finalized=True)
  with pytest.raises(ValueError, match="torch and JAX differ by .* Do heads"):
    monkeypatch.setattr(to_coreml, "_AGREES", 1e-12)
    nms.runs.export_coreml(tmp_path / "run", tmp_path / "model.mlpackage", heads=2)
  assert not (tmp_path / "model.mlpackage").exists()


@pytest.mark.parametrize("factor", [1, 2])
def test_a_package_with_other_weights_is_refused(factor, monkeypatch):
  """A package and a module that are not there: so it runs without the extra."""
  w = np.array([[0.0, -0.0, 1e-40, 3.0]], np.float32)
  read = types.SimpleNamespace(array=lambda _: (w + 0) * factor, bytes=1, sparse=("w",))
  module = types.SimpleNamespace(named_parameters=lambda: [("w", w), ("bias", w[0])])
  monkeypatch.setattr(package, "Package", lambda _: read)
  call = lambda: to_coreml._read_back(None, "m", module, {"w": w}, lambda _: None, 1, 0.0)
  if factor == 1:
    assert call().tensors == 1
  else:
    with pytest.raises(ValueError, match="'m': 'w' is not what was written"):
      call()


@extra
@pytest.mark.parametrize("heads", [None, 3, 0])
def test_a_vit_needs_its_heads(heads, tmp_path):
  test_export.written(tmp_path / "run", "vit_test", finalized=True)
  with pytest.raises(ValueError, match="say how many attention heads the ViT has.* width, 32"):
    nms.runs.export_coreml(tmp_path / "run", tmp_path / "model.mlpackage", heads=heads)


@extra
def test_another_network_is_refused(tmp_path):
  test_export.written(tmp_path / "run", "resnet_test", finalized=True)
  with pytest.raises(ValueError, match="is a ResNet, and Core ML packages are of a ViT or a T5's"):
    nms.runs.export_coreml(tmp_path / "run", tmp_path / "model.mlpackage", heads=2)


@pytest.mark.parametrize(
  "words, said",
  [
    (["model.safetensors", "--to", "coreml"], "name a package that ends in .mlpackage"),
    (["model.safetensors", "--heads", "2"], "--heads is for Core ML: add --to coreml"),
    (["m.mlpackage", "--to", "coreml", "--length", "-1"], "length=-1: it is a whole number"),
  ],
)
def test_words_that_do_not_fit_are_refused_in_a_sentence(words, said, tmp_path, capsys):
  assert cli.main(["export", str(tmp_path), str(tmp_path / words[0]), *words[1:]]) == 1
  assert said in capsys.readouterr().err


@pytest.mark.parametrize("name", ["torch", "coremltools"])
def test_without_the_extra_one_sentence_says_what_brings_it(name, tmp_path, monkeypatch):
  for other in ("torch", "coremltools"):
    monkeypatch.setitem(sys.modules, other, None if other == name else np)
  with pytest.raises(ModuleNotFoundError, match=rf"Core ML needs {name}: pip install .*\[coreml\]"):
    nms.runs.export_coreml(tmp_path, tmp_path / "model.mlpackage", heads=2)
