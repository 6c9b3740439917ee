"""Checkpoints in files of timm, Hugging Face and without zeros: written, proven, read, started."""

import dataclasses
import pathlib

import jax
import pytest
import test_huggingface as t5
import test_weights as images
from checkpoint_files import save
from test_deployed import rules_of

import nm_sparsity_jax as nms
from nm_sparsity_jax import cli
from nm_sparsity_jax.core import files
from nm_sparsity_jax.core.packed import NMPacked
from nm_sparsity_jax.core.trees import flatten
from nm_sparsity_jax.deploy import (
  huggingface,
  inference_tree,
  packed_file,
  safetensors_file,
  timm,
  unstack_layers,
)
from nm_sparsity_jax.models.t5 import Transformer
from nm_sparsity_jax.runs import checkpoint
from nm_sparsity_jax.trainer import checkpoints, step
from nm_sparsity_jax.trainer.workloads.t5 import T5
from nm_sparsity_jax.training import rules_text

RULES = {"ff": "1:4", "qkv": "2:8", "o": "1:4"}  # of a T5


RULES_OF_T5 = rules_of(RULES)


def with_zeros(variables, rules):
  params = jax.device_get(nms.finalize(variables["params"], rules, 0, early=True))
  return {**variables, "params": params}


def written(folder, name, finalized=True):
  """A checkpoint of a network of images; its variables."""
  variables, rules = images.variables_of(name), images.some_rules(name)
  if finalized:
    variables = with_zeros(variables, rules)
  save(folder, variables, rules)
  return variables


def written_t5(folder, name, **changes):
  """A finalized checkpoint of a T5; its parameters."""
  config, rules = t5.config_of_name(name, **changes), RULES_OF_T5
  if config.scan_layers:
    rules = rules.with_axes({r".*/(query|key|value|wi.*|wo)/kernel": 0, r".*/out/kernel": (0, 2)})
  variables = with_zeros({"params": t5.params_of(name, **changes)}, rules)
  save(folder, variables, rules)
  return variables["params"]


def run(*argv):
  return cli.main([*map(str, argv)])


def exported(folder, out, rules, count, command):
  """Writes a checkpoint for another library, proven there; `verify` reads it back."""
  _, report = command("export", folder, out)
  assert report["ok"] and len(report["sites"]) > count
  assert not any(p["bad_groups"] for p in report["sites"])
  assert run("verify", out, "--rules", rules) == 0
  assert run("verify", out, "--rules", dict.fromkeys(rules, "1:8")) == 1
  return out


both = pytest.mark.parametrize("name, scan", [("v1_0", False), ("v1_1", True)])

# --- images -------------------------------------------------------------------------------------


@images.tiny
def test_export_writes_timms_names_with_the_zeros_and_proves_them(name, tmp_path, command):
  variables = written(tmp_path / "run", name)
  rules = dict(zip(images.PLACES[name], ("1:4", "2:8"), strict=True))
  file = exported(tmp_path / "run", tmp_path / "model.safetensors", rules, 5, command)
  images.assert_same(timm.read(file), variables)
  assert "holds no rules" in command("verify", file)[1]


def test_a_file_is_compared_by_its_header(tmp_path, monkeypatch):
  """`plan` and `sweep` read no tensor of a start from timm's weights."""
  file, net = tmp_path / "model.safetensors", images.network("vit_test")
  safetensors_file.write(file, images.tensors_of("vit_test"))
  unread = lambda *_: pytest.fail("it read a tensor")
  monkeypatch.setattr(files.Lazy, "__array__", unread)
  checkpoint.read(str(file), images.shapes_of(net), net.config)
  other = images.shapes_of(images.network("vit_test", classes=7))
  with pytest.raises(ValueError, match=r"another network: .* there and \(7,\) here"):
    checkpoint.read(str(file), other)


# --- T5 -----------------------------------------------------------------------------------------


@both
def test_export_writes_a_folder_with_the_zeros_and_proves_them(name, scan, tmp_path, command):
  params = written_t5(tmp_path / "run", name, scan_layers=scan)
  out = exported(tmp_path / "run", tmp_path / "model", RULES, 10, command)
  t5.assert_same(huggingface.read(out, t5.config_of_name(name, scan_layers=scan)), params)


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
  """A folder of Hugging Face's T5, and the checkpoint that `convert` makes of it."""
  folder = tmp_path_factory.mktemp("converted")
  t5.folder_of("v1_1", folder / "hf")
  assert run("convert", folder / "hf", folder / "start") == 0
  return folder / "hf", folder / "start/checkpoint_0"


def test_weights_do_not_tell_the_activation_so_you_may(dense, tmp_path, command):
  argv = ["export", dense[1], tmp_path / "model", "--feed-forward"]
  assert run(*argv, "gated-silu") == 0
  assert huggingface.config_in(tmp_path / "model").mlp_activations == ("silu", "linear")
  argv[2] = tmp_path / "other"
  assert "feed_forward_proj='gelu'" in command(*argv, "gelu")[1]


def test_a_folder_is_pruned_by_finalize_and_export(tmp_path):
  silu = lambda tensors, config: config.update(feed_forward_proj="gated-silu")
  folder = t5.changed(tmp_path / "dense", silu, "v1_1")
  assert run("verify", folder, "--rules", RULES) == 1
  assert run("finalize", folder, tmp_path / "final", "--rules", RULES) == 0
  assert run("export", tmp_path / "final", tmp_path / "model") == 0
  want = nms.finalize(huggingface.read(folder), RULES_OF_T5, 0, early=True)
  t5.assert_same(huggingface.read(tmp_path / "model"), jax.device_get(want))
  assert huggingface.config_in(tmp_path / "model").mlp_activations == ("silu", "linear")


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
  model = step.Model(T5(Transformer(config)), RULES_OF_T5)
  params, _, number = checkpoints.load_initial(str(folder), model, jax.random.key(0))
  t5.assert_same(jax.device_get(params), want)
  assert number == 0


# --- without the zeros --------------------------------------------------------------------------


def assert_holds(file, tree):
  """A packed file holds these values; its rules, and how many kernels are packed."""
  found, rules = packed_file.read(file)
  images.assert_same(inference_tree.unpack_tree(found), tree)
  leaves = jax.tree.leaves(found, is_leaf=lambda x: isinstance(x, NMPacked))
  return rules_text.parse(rules), sum(isinstance(x, NMPacked) for x in leaves)


@both
def test_a_t5_is_packed_and_proven(name, scan, tmp_path, capsys, command):
  params = written_t5(tmp_path / "run", name, scan_layers=scan)
  file = tmp_path / "new" / "model.safetensors"
  assert run("pack", tmp_path / "run", file) == 0
  want, _ = unstack_layers.unstacked(params, t5.config_of_name(name, scan_layers=scan))
  assert assert_holds(file, {"params": want})[1] > 10
  row = next(line for line in capsys.readouterr().out.splitlines() if "/mlp/" in line)
  assert " 1:4 " in row and " 3.76x " in row  # as docs/deploy.md has it
  assert run("verify", file) == 0 and "own rules" in capsys.readouterr().out
  assert "trained with the rules" in command("verify", file, "--rules", "{'ff': '1:8'}")[1]


def test_a_resnet_is_packed_with_its_state(tmp_path, command):
  rules = {"head": "1:4", "conv": "1:4"}
  variables = with_zeros(images.variables_of("resnet_test"), rules_of(rules))
  save(tmp_path / "run", variables, None)
  file = tmp_path / "model.safetensors"
  _, report = command("pack", tmp_path / "run", file, "--rules", rules)
  assert assert_holds(file, variables)[1] == 1
  assert report["packed"].keys() == {"fc/kernel"}
  assert "(in, out)" in report["dense"]["layer1_0/conv1/kernel"]
  maybe = dataclasses.replace(rules_of({**rules, "merge": "1:4"}), optional=["merge"])
  nms.runs.pack(tmp_path / "run", tmp_path / "maybe.safetensors", maybe)
  # What it was made of can be made of it again, also with the file among its checkpoints.
  file.rename(tmp_path / "run" / file.name)
  assert run("verify", tmp_path / "run", "--rules", rules) == 0
  (tmp_path / "run" / file.name).rename(file)
  nms.runs.finalize(file, tmp_path / "again")
  assert run("verify", file) == run("verify", tmp_path / "again") == 0


def test_rules_of_a_stack_become_those_of_its_layers(tmp_path):
  """The other rule's axis stays: its kernel is in no stack."""
  stack = r"encoder/encoder/mlp/w[io]\w*/kernel"
  places = {stack: "1:4", "decoder/logits_dense/kernel": "1:2"}
  rules = rules_of(places, axes={stack: 0, "decoder/logits.*": 0})
  variables = with_zeros({"params": t5.params_of("v1_1", scan_layers=True)}, rules)
  save(tmp_path, variables, None)
  file = tmp_path / "model.safetensors"
  nms.runs.pack(tmp_path, file, rules)
  config = t5.config_of_name("v1_1", scan_layers=True)
  want, _ = unstack_layers.unstacked(variables["params"], config)
  found, count = assert_holds(file, {"params": want})
  names = "wi_0", "wi_1", "wo"
  layers = {f"encoder/layers_{i}/mlp/{name}/kernel" for i in range(3) for name in names}
  assert set(found.places) == {*layers, "decoder/logits_dense/kernel"}
  assert found.axes == {"decoder/logits_dense/kernel": 0} and count == 10
  assert run("verify", file) == 0


# --- what is refused ----------------------------------------------------------------------------


def test_what_cannot_be_written_is_one_line(dense, tmp_path, command):
  written(tmp_path / "vit", "vit_test", finalized=False)
  (tmp_path / "there").mkdir()
  before = sorted(tmp_path.rglob("*"))
  rules = ["--rules", RULES]
  for name, source, out, flags, word in (
    ("export", tmp_path / "vit", "m.safetensors", [], "is not n:m"),
    ("export", dense[1], "model.safetensors", rules, "name a folder for a T5"),
    ("export", dense[1], "there", [], "is there already"),
    ("pack", tmp_path / "vit", "m.safetensors", [], "is not 2:8 along axis 0"),
    ("pack", dense[1], "m.safetensors", ["--rules", "{'ff': '8:8'}"], "nothing can be packed"),
  ):
    code, text = command(name, source, tmp_path / out, *flags)
    assert code == 1 and word in text and text.count("\n") == 1, text
  assert sorted(tmp_path.rglob("*")) == before
