"""Core ML packages: torch computes what JAX does, and the package has the weights and their zeros.

Nothing runs a package on Linux. Tests that need the extra `coreml` skip without it.
"""

import importlib.util
import json
import logging
import sys
import types

import numpy as np
import pytest
import test_export
import test_huggingface
import test_huggingface_runs

import nm_sparsity_jax as nms
from nm_sparsity_jax import apply, cli
from nm_sparsity_jax.coreml import package
from nm_sparsity_jax.models import vit
from nm_sparsity_jax.models.t5 import Transformer
from nm_sparsity_jax.runs import to_coreml
from nm_sparsity_jax.weights import huggingface, timm

pytestmark = pytest.mark.filterwarnings("ignore")

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
  token = np.zeros((1, 17, 32), np.float32)
  token[:, :1] = tensors["cls_token"]
  assert read.holds(token) and not read.holds(token * 2)
  for name in ("blocks.0.attn.qkv.weight", "blocks.1.mlp.fc2.weight", "pos_embed", "head.weight"):
    np.testing.assert_array_equal(read.array(name), tensors[name])
  recipe = nms.recipe("sr_ste", pattern="1:4", phases=nms.Phases(total=1))
  kernel = read.array("blocks.0.mlp.fc1.weight")
  counted = apply.verify({"kernel": kernel}, nms.Rules({"kernel": recipe}, {"kernel": 1}))
  assert counted.ok and len(counted.places) == 1


@extra
@pytest.mark.parametrize("name", ["v1_0", "v1_1"])
def test_the_program_of_a_t5s_package_computes_what_jax_does(name, tmp_path):
  import mil

  params = test_huggingface_runs.written(tmp_path / "run", name, scan_layers=False)
  out = tmp_path / "encoder.mlpackage"
  nms.runs.export_coreml(tmp_path / "run", out, length=12)
  tensors = huggingface.to_huggingface(params)
  ids = np.random.default_rng(1).integers(1, len(tensors["shared.weight"]), (1, 12))
  ids = ids.astype(np.int32)
  ids[0, 9:] = 0
  network = Transformer(test_huggingface.config_of_name(name))
  ours = network.apply({"params": params}, ids, None, False, method=network.encode)
  made = mil.run(out, ids)
  np.testing.assert_allclose(made[:, :9], np.asarray(ours)[:, :9], atol=1e-4, rtol=0)


@extra
def test_the_program_of_a_vits_package_computes_what_jax_does(tmp_path):
  import mil

  variables = test_export.written(tmp_path / "run", "vit_test", finalized=True)
  out = tmp_path / "model.mlpackage"
  nms.runs.export_coreml(tmp_path / "run", out, heads=2)
  images = np.random.default_rng(1).standard_normal((1, 16, 16, 3)).astype(np.float32)
  ours = np.asarray(vit.ViT(vit.config("vit_test")).apply(variables, images))
  made = mil.run(out, images.transpose(0, 3, 1, 2))
  np.testing.assert_allclose(made, ours, atol=1e-4, rtol=0)
  assert np.abs(ours).max() > 1e-2


@extra
def test_what_torch_computes_otherwise_is_refused(tmp_path, monkeypatch):
  test_export.written(tmp_path / "run", "vit_test", finalized=True)
  with pytest.raises(ValueError, match="torch and JAX differ by .* Do the heads"):
    monkeypatch.setattr(to_coreml, "_AGREES", 1e-12)
    nms.runs.export_coreml(tmp_path / "run", tmp_path / "model.mlpackage", heads=2)
  assert not (tmp_path / "model.mlpackage").exists()


@pytest.mark.parametrize("wrong", ["", "w", "token"])
def test_a_package_with_other_weights_is_refused(wrong, monkeypatch):
  """A package and a module that are not there: so it runs without the extra."""
  w, padded = np.array([[0.0, -0.0, 1e-40, 3.0]], np.float32), np.array([[5.0, 0.0]], np.float32)
  read = package.Package.__new__(package.Package)
  read._arrays = {"w": (w + 0) * (1 + (wrong == "w")), "op_1": padded + (wrong == "token")}
  named = [("w", w), ("bias", w[0]), ("token", padded[:, :1])]
  module = types.SimpleNamespace(named_parameters=lambda: named)
  monkeypatch.setattr(package, "folded", lambda _: {"token": padded})
  call = lambda: to_coreml._read_back("m", read, module, dict(named))
  if not wrong:
    assert call() == 2
  else:
    with pytest.raises(ValueError, match=f"'m': '{wrong}' is not what was written"):
      call()


@extra
def test_a_package_that_is_refused_leaves_no_file(tmp_path, monkeypatch):
  test_export.written(tmp_path / "run", "vit_test", finalized=True)
  monkeypatch.setattr(package.Package, "holds", lambda *_: False)
  with pytest.raises(ValueError, match=r"model.mlpackage': 'cls_token' is not what was written"):
    nms.runs.export_coreml(tmp_path / "run", tmp_path / "new" / "model.mlpackage", heads=2)
  assert not list((tmp_path / "new").iterdir())


@extra
def test_what_is_not_finalized_is_refused(tmp_path, capsys):
  test_export.written(tmp_path / "run", "vit_test", finalized=False)
  words = ["export", str(tmp_path / "run"), str(tmp_path / "m.mlpackage"), "--to", "coreml"]
  assert cli.main([*words, "--heads", "2"]) == 1
  assert "export what `nm-sparsity finalize` writes" in capsys.readouterr().err
  assert not (tmp_path / "m.mlpackage").exists()


@extra
def test_zeros_take_no_bytes(tmp_path):
  """1:8 of float32: a value of 4 bytes in 8, and a bit for each."""
  torch = pytest.importorskip("torch")
  module = torch.nn.Linear(1024, 512, bias=False)
  w = np.asarray(np.random.default_rng(0).standard_normal((512, 1024)), np.float32)
  w *= np.asarray(nms.nm_mask(np.abs(w), nms.NM(1, 8), axis=1))
  package.load(module, {"weight": w})
  out = str(tmp_path / "m.mlpackage")
  whole = package.convert(module, np.ones((1, 1024), np.float32), "x", "y", out)
  read = package.Package(out)
  np.testing.assert_array_equal(read.array("weight"), w)
  assert read.bytes / w.size == pytest.approx(0.625, abs=0.02) and whole / w.size > 4


@pytest.fixture
def no_import(monkeypatch):
  """What is checked here is checked before torch and coremltools are imported, which takes long."""
  monkeypatch.setattr(package, "require", lambda: pytest.fail("they are imported"))


@pytest.mark.parametrize(
  "words, said",
  [
    ([], "the weights of a ViT do not tell its attention heads: give --heads, a divisor of its wi"),
    (["--heads=3"], "--heads=3 does not divide the ViT's width, 32: give its number of heads."),
    (["--heads=0"], "--heads=0 does not divide the ViT's width, 32: give its number of heads."),
    (["--heads=2", "--length=5"], "which takes images: leave --length out."),
  ],
)
def test_settings_that_are_no_vits_are_refused(words, said, no_import, tmp_path, capsys):
  test_export.written(tmp_path / "run", "vit_test", finalized=True)
  out = str(tmp_path / "model.mlpackage")
  assert cli.main(["export", str(tmp_path / "run"), out, "--to", "coreml", *words]) == 1
  assert said in (told := capsys.readouterr().err) and told.count("\n") == 1


def test_a_t5_takes_no_heads(no_import, tmp_path, capsys):
  test_huggingface_runs.written(tmp_path / "run", "v1_0")
  words = ["export", str(tmp_path / "run"), str(tmp_path / "m.mlpackage"), "--to", "coreml"]
  assert cli.main([*words, "--heads", "12"]) == 1
  told = capsys.readouterr().err
  assert "--heads=12 is of a ViT, and '" in told
  assert told.endswith("is a T5, whose weights tell its heads: leave --heads out.\n")


def test_what_coremltools_tells_when_it_is_imported_is_silenced(monkeypatch, caplog):
  warned = []
  noisy = lambda name: warned.append(name) or logging.warning("Failed to load _MLModelProxy")
  monkeypatch.setattr(package.importlib, "import_module", noisy)
  package.require()
  assert warned == ["torch", "coremltools"] and not caplog.records
  logging.warning("others are told")
  assert caplog.records


def test_another_network_is_refused(no_import, tmp_path):
  test_export.written(tmp_path / "run", "resnet_test", finalized=True)
  with pytest.raises(ValueError, match="is a ResNet, and Core ML packages are of a ViT or a T5's"):
    nms.runs.export_coreml(tmp_path / "run", tmp_path / "model.mlpackage", heads=2)


@pytest.mark.parametrize(
  "words, said",
  [
    (["model.safetensors", "--to", "coreml"], "name a package that ends in .mlpackage"),
    (["model.safetensors", "--heads", "2"], "--heads is for Core ML: add --to coreml"),
    (["m.mlpackage", "--to", "coreml", "--length", "-1"], "--length=-1: it is a whole number"),
    (["m.mlpackage", "--to", "coreml", "--length", "0"], "--length=0: it is a whole number"),
    (["", "--to", "coreml"], "name a package that ends in .mlpackage"),
  ],
)
def test_words_that_do_not_fit_are_refused_in_a_sentence(words, said, tmp_path, capsys):
  assert cli.main(["export", str(tmp_path), str(tmp_path / words[0]), *words[1:]]) == 1
  assert said in capsys.readouterr().err


def test_an_existing_package_is_never_overwritten(tmp_path, capsys):
  (tmp_path / "m.mlpackage").mkdir()
  words = ["export", str(tmp_path), str(tmp_path / "m.mlpackage"), "--to", "coreml"]
  assert cli.main(words) == 1
  assert "m.mlpackage' is there already" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["torch", "coremltools"])
def test_without_the_extra_one_sentence_says_what_brings_it(name, tmp_path, monkeypatch):
  test_export.written(tmp_path / "run", "vit_test", finalized=True)
  for other in ("torch", "coremltools"):
    monkeypatch.setitem(sys.modules, other, None if other == name else np)
  with pytest.raises(ModuleNotFoundError, match=rf"Core ML needs {name}: pip install .*\[coreml\]"):
    nms.runs.export_coreml(tmp_path / "run", tmp_path / "model.mlpackage", heads=2)
