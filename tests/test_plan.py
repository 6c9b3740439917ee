"""nm-sparsity plan: what it shows, and every error at once."""

import dataclasses
import doctest
import json
import pathlib
import re
import shlex
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import t5x_found
import tasks_found

import nm_sparsity_jax as nms
from nm_sparsity_jax import cli
from nm_sparsity_jax.analysis import plan
from nm_sparsity_jax.analysis.plan import data, model
from nm_sparsity_jax.analysis.plan import report as whole
from nm_sparsity_jax.core import trees
from nm_sparsity_jax.integrations import gin_files
from nm_sparsity_jax.models.t5 import network
from nm_sparsity_jax.runs import checkpoint, folders
from nm_sparsity_jax.trainer.workloads.t5 import T5
from nm_sparsity_jax.training import configure, rules_text

pytest.importorskip("gin", reason="plan reads gin files: pip install gin-config")

ROOT = pathlib.Path(__file__).resolve().parents[1]
MODEL = """
from __gin__ import dynamic_registration
from nm_sparsity_jax.models.t5 import network
NETWORK = @network.Transformer()
network.Transformer.config = @network.T5Config()
network.T5Config:
  vocab_size = 64
  emb_dim = 32
  num_heads = 2
  num_encoder_layers = 2
  num_decoder_layers = 3
  head_dim = 8
  mlp_dim = 48
  mlp_activations = ('gelu', 'linear')
"""
# T5X's may be registered too, by another test.
OURS = "nm_sparsity_jax.models.t5.network.T5Config"
SETTINGS = dict(RECIPE="sr_ste", PATTERN="1:4", SPARSE_STEPS=100)
LENGTHS = {"inputs": 10, "targets": 6}


@pytest.fixture
def run(tmp_path, capsys, monkeypatch):
  """Plans MODEL with macros: (exit code, report)."""
  monkeypatch.chdir(tmp_path)
  monkeypatch.setenv("JAX_PLATFORMS", "cpu")
  (tmp_path / "model.gin").write_text(MODEL)

  def call(*flags, files=("model.gin", "gin_configs/sparsity.gin"), raw=(), **macros):
    argv = ["plan", f"--gin_search_paths={ROOT},{tmp_path}", *flags]
    argv += [f"--gin_file={f}" for f in files]
    argv += [f"--gin.{k}={v!r}" for k, v in macros.items()] + [f"--gin.{b}" for b in raw]
    capsys.readouterr()
    with jax.numpy_dtype_promotion("standard"):
      code = cli.main([*argv, "--json"])
    return code, json.loads(capsys.readouterr().out)

  return call


def test_kernels_alike_are_told_together_and_nothing_is_lost(run):
  code, report = run(**SETTINGS, SPARSITY_RULES={"ff": None, "decoder/cross/qk": "2:8"})
  assert not code and report["ok"] and not report["errors"]
  found = {k["path"]: k for k in report["kernels"]["sparse"]}
  assert list(found) == [
    "decoder/layers_{0..2}/encoder_decoder_attention/{key,query}/kernel",
    "decoder/layers_{0..2}/mlp/wi_{0,1}/kernel",
    "encoder/layers_{0,1}/mlp/wi_{0,1}/kernel",
    "decoder/layers_{0..2}/mlp/wo/kernel",
    "encoder/layers_{0,1}/mlp/wo/kernel",
  ]
  wi = found["decoder/layers_{0..2}/mlp/wi_{0,1}/kernel"]
  want = dict(count=6, role="ff", rule="ff", shape=[32, 48], axis=0, pattern="1:4", groups=384)
  assert wi.items() >= want.items() and wi["recipe"] == "sr_ste"
  qk = found["decoder/layers_{0..2}/encoder_decoder_attention/{key,query}/kernel"]
  assert qk["role"] == "k,q" and qk["pattern"] == "2:8" and qk["groups"] == 4 * 16
  # Every path once, sparse or dense.
  part = report["kernels"]
  paths = [p for kind in ("sparse", "dense") for k in part[kind] for p in k["paths"]]
  assert len(paths) == len(set(paths)) == sum(k["count"] for k in [*part["sparse"], *part["dense"]])
  assert len(paths) == 2 * 7 + 3 * 11 + 1 and part["other_dense"] > 0


def test_what_is_dropped_and_skipped_and_why(run):
  wide = [f"{OURS}.emb_dim = 768", f"{OURS}.mlp_dim = 1024"]
  settings = {**SETTINGS, "RECIPE": "sdgf_geometric", "PATTERN": "1:32"}
  code, report = run(raw=wide, **settings)
  assert not code
  remarks = {k["path"]: k["remarks"] for k in report["kernels"]["sparse"]}
  assert remarks["encoder/layers_{0,1}/mlp/wi_{0,1}/kernel"] == [
    "levels 16:512 do not divide 768: dropped"
  ]
  assert remarks["encoder/layers_{0,1}/mlp/wo/kernel"] == []
  timelines = {tuple(s["axis_sizes"]): s["segments"] for s in report["schedule"]}
  assert [s["pattern"] for s in timelines[768,]] == ["8:256", "4:128", "2:64", "1:32"]
  assert [s["pattern"] for s in timelines[1024,]][0] == "16:512"

  code, report = run(raw=[f"{OURS}.mlp_dim = 50"], **SETTINGS, INDIVISIBLE="skip")
  assert not code
  skipped = report["kernels"]["skipped"]
  assert {k["path"] for k in skipped} == {
    "encoder/layers_{0,1}/mlp/wo/kernel", "decoder/layers_{0..2}/mlp/wo/kernel",
  }  # fmt: skip
  assert all("length 50" in k["why"] and "no multiple of 4" in k["why"] for k in skipped)


def test_the_schedule_counts_sparse_and_t5x_steps(run):
  settings = dict(RECIPE="mdgf_linear", PATTERN="1:4", SPARSE_STEPS=100, DENSE_STEPS=10)
  _, report = run(**settings, FINETUNE_STEPS=20, raw=["PRETRAINED_STEPS = 1_000_000"])
  (schedule,) = report["schedule"]
  segments = schedule["segments"]
  assert [(s["start"], s["stop"]) for s in segments] == [(0, 10), (10, 70), (70, 100)]
  assert all(s["t5x_start"] == s["start"] + 1_000_000 for s in segments)
  assert all(s["t5x_stop"] == s["stop"] + 1_000_000 for s in segments)
  assert [s["decay_start"] for s in segments] == [1, 1, 0]
  assert [s["phase"] for s in segments] == ["dense", "sparsify", "sparsify, fine-tune from 80"]


@pytest.mark.parametrize("recipe", ["sr_ste", "mdgf_linear", "sdgf_stepwise", "idp"])
def test_cost_is_that_of_flops(run, recipe):
  settings = {
    **SETTINGS,
    "RECIPE": recipe,
    "SPARSITY_RULES": {"ff": None, "decoder/cross/qkv": "2:8"},
  }
  _, report = run(**settings, raw=[f"TASK_FEATURE_LENGTHS = {LENGTHS}", "BATCH_SIZE = 7"])
  sizes = dict(num_encoder_layers=2, num_decoder_layers=3, emb_dim=32, mlp_dim=48, num_heads=2)
  made = network.T5Config.t5_1_1("tiny", vocab_size=64, head_dim=8, **sizes)
  dense = T5(network.Transformer(made), lengths={"inputs": 10, "targets": 6}).cost()
  places = configure.rules(settings["SPARSITY_RULES"], recipe, "1:4", sparse_steps=100).places
  once, whole = nms.flops.inference(dense, places), nms.flops.training(dense, places, 7)
  cost = report["cost"]
  assert cost["inference"]["sparse"] == pytest.approx(once.flops, rel=1e-9)
  assert cost["inference"]["dense"] == dense.flops
  assert cost["training"]["sparse"] == pytest.approx(whole.flops, rel=1e-9)
  assert cost["training"]["dense"] == 3 * 7 * 100 * dense.flops
  assert cost["parameters"]["kept"] == once.params and cost["parameters"]["dense"] == dense.params
  assert cost["lengths_known"]


def test_lambda_beside_each_kind_of_loss(run):
  raw = [f"TASK_FEATURE_LENGTHS = {LENGTHS}", "BATCH_SIZE = 7"]
  _, report = run(**SETTINGS, raw=raw)
  assert report["loss"]["lambda"] == {"ff": 2e-4}
  assert report["loss"]["lambda_in_t5x_at_most"] == {"ff": pytest.approx(2e-4 * 42)}
  _, report = run(**SETTINGS, raw=[*raw, "LOSS_NORMALIZING_FACTOR = 84"])
  assert report["loss"]["lambda_in_t5x_at_most"] == {"ff": pytest.approx(1e-4)}
  _, report = run(**SETTINGS, raw=[*raw, "LOSS_NORMALIZING_FACTOR = 'NUM_REAL_TARGET_TOKENS'"])
  assert report["loss"]["lambda_in_t5x_at_most"] == {"ff": pytest.approx(2e-4)}


def test_the_largest_t5_is_planned_in_seconds_and_not_allocated(run):
  before, start = {id(a) for a in jax.live_arrays()}, time.process_time()
  files = ("gin_configs/models/t5.gin", "gin_configs/sparsity.gin")
  code, report = run(
    files=files, **SETTINGS, T5_SIZE="xxl", SPARSITY_RULES={"ff": "1:128", "qkv": None}
  )
  assert time.process_time() - start < 10
  assert not code and report["cost"]["parameters"]["dense"] > 1e10
  assert all(a.size < 100 for a in jax.live_arrays() if id(a) not in before)


def test_scanned_kernels_have_their_axis(run):
  scan = [f"{OURS}.scan_layers = True"]
  code, report = run(raw=scan, **SETTINGS, SPARSITY_RULES={"ff": None, "qkv": None})
  assert not code
  shapes = {tuple(k["shape"]): k["axis"] for k in report["kernels"]["sparse"]}
  assert shapes[32, 3, 48] == 0 and shapes[48, 2, 32] == 0


# --- errors -------------------------------------------------------------------------------------


def has(texts, *words):
  """Whether one text has all the words."""
  return any(all(w in text for w in words) for text in texts)


def test_all_that_is_not_set_is_asked_for_at_once(run):
  code, report = run()
  assert code == 1
  assert sorted(e.split()[0] for e in report["errors"]) == ["PATTERN", "RECIPE", "SPARSE_STEPS"]
  assert has(report["errors"], "--gin.PATTERN=\"'1:8'\"")


def test_errors_of_several_kinds_come_together(run):
  rules = {"ff": "1:5", "decodr/ff": None}
  code, report = run("--checkpoint=nowhere", **SETTINGS, SPARSITY_RULES=rules, raw=["X.y=1"])
  errors = report["errors"]
  assert code == 1 and len(errors) == 5
  assert has(errors, "X.y", "no gin file")
  assert has(errors, "mlp/wi_{0,1}/kernel", "length 32", "1:5")
  assert has(errors, "mlp/wo/kernel", "length 48", "1:5")
  assert has(errors, "match no parameter: 'decodr/ff'")
  assert has(errors, "there is no checkpoint 'nowhere'")


@pytest.mark.parametrize(
  "macros, words",
  [
    (dict(RECIPE="sr_stee"), ["sr_stee"]),
    (dict(PATTERN="8:1"), ["PATTERN: '8:1'", "mean '1:8'"]),
    (dict(DENSE_STEPS=90, FINETUNE_STEPS=20), ["SPARSE_STEPS >= DENSE_STEPS + FINETUNE_STEPS"]),
    (dict(SPARSITY_RULES="1:8"), ["SPARSITY_RULES"]),
    (dict(SPARSITY_RULES={"ff": None, "encoder/ff": None}), ["two rules claim"]),
    (dict(RECIPE="sdgf_stepwise", SPARSE_STEPS=1), ["3 levels"]),
    (dict(BETA=0.5), ["sr_ste has no field BETA=0.5"]),
    (dict(RECIPE="mdgf_linear", DENSE_STEPS=80), ["BETA=None", "DENSE_STEPS=80"]),
  ],
)
def test_what_recipes_and_rules_refuse(run, macros, words):
  code, report = run(**{**SETTINGS, **macros})
  assert code == 1 and has(report["errors"], *words), report["errors"]
  assert not has(report["errors"], "In call to configurable")
  assert not has(report["notes"], "there are no rules")


def test_each_mistake_in_the_rules_is_told_and_the_rest_goes_on(run):
  """Each place on its own; schedule, fields, network and checkpoint beside them."""
  rules = {"ff": "8:1", "qkv": "1:x", "encoder/o": 3, "*/kernel": None, "encoder/ffn": "2:4"}
  rules["decoder/cross/o"] = "1:2"
  code, report = run(
    "--checkpoint=nowhere", **{**SETTINGS, "SPARSITY_RULES": rules}, INDIVISIBLE="skipp"
  )
  errors = report["errors"]
  assert code == 1 and len(errors) == 7
  for words in (
    ["SPARSITY_RULES, 'ff'", "'8:1'"], ["SPARSITY_RULES, 'qkv'", "'1:x' is not a pattern"],
    ["'encoder/o' has 3"], ["SPARSITY_RULES", "'*/kernel'", "not a regular expression"],
    ["INDIVISIBLE='skipp'"], ["match no parameter: 'encoder/ffn'."], ["no checkpoint 'nowhere'"],
  ):  # fmt: skip
    assert has(errors, *words), (words, errors)
  # The one good place is shown, with its schedule; not what would be wrong: the cost of the whole.
  assert len(parameters(report)) == 3 and "cost" not in report
  assert [part["rules"] for part in report["schedule"]] == [["decoder/cross/o"]]
  assert has(report["notes"], "shown as dense") and not has(report["notes"], "there are no rules")


@pytest.mark.parametrize(
  "macros, words",
  [
    (
      dict(RECIPE="sr_stee", PATTERN="8:1", DENSE_STEPS=90, FINETUNE_STEPS=20),
      [["'sr_stee'", "'sr_ste'?"], ["PATTERN: '8:1'"], ["SPARSE_STEPS=100, DENSE_STEPS=90"]],
    ),
    (
      dict(RECIPE="sdgf_stepwise", SPARSE_STEPS=2, GRADIENT="maskd", RECIPE_FIELDS={"lamda": 1}),
      [["3 levels", "SPARSE_STEPS=2"], ["GRADIENT='maskd'"], ["no field lamda=1"]],
    ),
    (
      dict(RECIPE="mdgf_linear", BETA=-1, DENSE_STEPS=80, GRADIENT="x"),  # not: of BETA=None
      [["BETA=-1"], ["GRADIENT='x'"]],
    ),
    (
      dict(SPARSE_STEPS="100", DENSE_STEPS=1e4, FINETUNE_STEPS=-3),
      [["SPARSE_STEPS='100'"], ["DENSE_STEPS=10000.0"], ["FINETUNE_STEPS=-3"]],
    ),
    (dict(RECIPE="sr_stee", PATTERN=None), [["PATTERN is not set"], ["'sr_stee'"]]),
    (dict(SPARSITY_RULES={}, INDIVISIBLE="x"), [["SPARSITY_RULES={}"], ["INDIVISIBLE='x'"]]),
  ],
)
def test_independent_mistakes_come_together(run, macros, words):
  code, report = run(**{**SETTINGS, **macros})
  assert code == 1 and len(report["errors"]) == len(words), report["errors"]
  for few in words:
    assert has(report["errors"], *few), (few, report["errors"])


@pytest.mark.parametrize(
  "given, shown",
  [("RECIPE=sr_ste", "'sr_ste'"), ("PATTERN=1:8", "'1:8'"), ("RECIPE_FIELDS={lam: 1:8}", "{'ff'")],
)
def test_a_string_without_quotes_is_explained(run, given, shown):
  name = given.partition("=")[0]
  code, report = run(raw=[given], **{k: v for k, v in SETTINGS.items() if k != name})
  (error,) = report["errors"]
  assert code == 1 and "quotes" in error and f'--gin.{name}="{shown}' in error


def test_what_cannot_be_read_is_not_asked_for_as_well(run):
  code, report = run(raw=["SPARSE_STEPS=10k"], RECIPE="sr_ste")
  assert code == 1 and len(report["errors"]) == 2
  assert has(report["errors"], "SPARSE_STEPS", "'10k'")
  assert has(report["errors"], "PATTERN is not set")
  code, report = run(raw=[f"{OURS}.emb_dim = %WIDTH", "WIDTH=3k"], **SETTINGS)
  assert code == 1 and len(report["errors"]) == 1 and "WIDTH" in report["errors"][0]


def test_a_macro_that_nothing_reads_is_an_error_that_a_flag_lets_pass(run):
  """Point 3: `plan && train` sailed through a misspelt macro, which was a warning."""
  said = "SPARSE_STEP is set, but nothing reads it; did you mean SPARSE_STEPS?"
  code, report = run(**SETTINGS, SPARSE_STEP=5)
  assert code == 1 and report["errors"] == [f"{said} Or let it pass: --allow-unknown"]
  code, report = run("--allow-unknown", **SETTINGS, SPARSE_STEP=5)
  assert not code and report["warnings"] == [said]
  # The local runner refuses it whatever `plan` is told.
  local = ["model.gin", "gin_configs/runs/local_adamw.gin", "gin_configs/runs/local_train.gin"]
  code, report = run("--allow-unknown", files=local, **SETTINGS, SPARSE_STEP=5)
  assert code == 1 and said in report["errors"]
  # Without a run file, a macro that one of ours reads may be meant for that.
  code, report = run(**SETTINGS, MODEL_DIR="x")
  assert not code and report["warnings"] == ["MODEL_DIR is set, but nothing reads it"]


def test_a_file_that_is_not_there(run, tmp_path, capsys, caplog):
  file = "gin_configs/none_of_these.gin"
  code, report = run(files=["model.gin", file], **SETTINGS)
  assert code == 1 and has(report["errors"], file, str(ROOT))
  assert "Path not found" not in caplog.text  # what gin says of every place that it tries


def test_a_run_file_without_t5x_says_so(run, monkeypatch):
  class Block:
    def find_spec(self, name, path=None, target=None):
      if name.split(".")[0] == "t5x":
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

  for name in [name for name in sys.modules if name.split(".")[0] == "t5x"]:
    monkeypatch.delitem(sys.modules, name)
  for name in [name for name in sys.modules if name == "nm_sparsity_jax.integrations.t5x"]:
    monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr("nm_sparsity_jax.integrations.t5x", raising=False)
  monkeypatch.setattr(sys, "meta_path", [Block(), *sys.meta_path])
  code, report = run(files=["model.gin", "gin_configs/runs/t5x_finetune.gin"], **SETTINGS)
  assert code == 1 and has(report["errors"], "'t5x'", "nm-sparsity doctor")


def test_a_flag_without_a_value_is_a_mistake_of_the_command_line(capsys):
  with pytest.raises(SystemExit) as e:
    cli.main(["plan", "--gin.RECIPE", "x"])
  assert e.value.code == 2 and "--gin.RECIPE=VALUE" in capsys.readouterr().err


# --- a model family of one's own ---------------------------------------------------------------

OWN = """
import itertools, os
import jax.numpy as jnp
from nm_sparsity_jax.trainer.workloads import Workload

class Own(Workload):
  weight = "pixels"

  def __init__(self, width=4, batch_size=48):
    self.width, self.batch_size = width, batch_size

  def init(self, rng):
    return {"params": {f"layer_{i}": {"kernel": jnp.zeros((8, self.width))} for i in range(2)}}

  def loss(self, params, state, batch, rng):
    outs = [batch["x"] @ params[f"layer_{i}"]["kernel"] for i in range(2)]
    return sum(map(jnp.sum, outs)), {"pixels": jnp.ones(())}, state

  def batches(self, seed, start):
    return itertools.repeat({"x": jnp.zeros((self.batch_size, 8))})

  def splits(self):
    return {}

  def check(self):
    if self.width > 9:
      raise ValueError("width=10: too wide for these data.")

class Silent(Own):
  def example(self):
    raise OSError("no data here")

class Wide(Own):
  def __init__(self):
    super().__init__(width=10)

class Elsewhere(Own):
  def __init__(self):
    super().__init__()
    self.data = os.environ["PLAN_OWN_DATA"]

class Lacking(Workload):
  def init(self, rng):
    return {}
"""
OWN_GIN = """
from __gin__ import dynamic_registration
import plan_own_workload as own
WORKLOAD = @own.%s()
"""
WORKLOAD = ("gin_configs/runs/local_workload.gin", "gin_configs/runs/local_adamw.gin", "own.gin")


@pytest.fixture(scope="module")
def own_module(tmp_path_factory):
  """A folder with the module of OWN: gin knows a class by one module for good."""
  folder = tmp_path_factory.mktemp("own")
  (folder / "plan_own_workload.py").write_text(OWN)
  return folder


@pytest.fixture
def own(run, own_module, tmp_path, monkeypatch):
  """Plans a run of a class of OWN."""
  from nm_sparsity_jax.training import roles

  monkeypatch.syspath_prepend(str(own_module))
  monkeypatch.setattr(roles.registry, "_families", dict(roles.families()))
  roles.register(roles.Family(name="plan_own", roles={"ply": r"layer_\d/kernel"}))

  def call(name="Own", files=WORKLOAD, **macros):
    (tmp_path / "own.gin").write_text(OWN_GIN % name)
    settings = {**SETTINGS, "SPARSITY_RULES": {"ply": None}, "MODEL_DIR": str(tmp_path / "run")}
    return run(files=files, **{**settings, **macros})

  return call


def test_a_workload_is_planned_like_t5(own):
  code, report = own()
  assert not code, report["errors"]
  (kernel,) = report["kernels"]["sparse"]
  assert kernel["path"] == "layer_{0,1}/kernel" and kernel["role"] == "ply"
  assert report["loss"] == {"lambda": {"ply": 2e-4}, "mean_over": "pixels"}
  assert report["cost"]["parameters"] == {"dense": 64, "kept": 16, "in_sparse_kernels": 64}
  assert report["cost"]["inference"] == {"dense": 128, "sparse": 32}
  text = plan.render(report)
  assert "FLOPs (25.0%) for one example" in text and "mean loss over pixels (ply)" in text


def test_what_a_workload_refuses_or_does_not_tell(own):
  code, report = own("Lacking")
  assert code == 1 and has(report["errors"], "abstract class Lacking")
  code, report = own("Elsewhere")
  said = (
    "WORKLOAD: a setting is missing, or has a value of the wrong kind (KeyError: 'PLAN_OWN_DATA')"
  )
  assert code == 1 and report["errors"] == [said]
  code, report = own(MICROBATCHES=7)
  assert code == 1 and has(report["errors"], "BATCH_SIZE=48 must be a multiple of 7 microbatches")
  code, report = own("Silent")
  assert not code and "cost" not in report
  assert has(report["notes"], "no FLOPs", "OSError: no data here")
  code, report = own("Own", SPARSITY_RULES={"ply": "1:3"})
  assert code == 1 and has(report["errors"], "layer_{0,1}/kernel", "length 8", "1:3")
  code, report = own("Wide")
  assert code == 1 and report["errors"] == ["width=10: too wide for these data."]


# --- from a notebook ----------------------------------------------------------------------------


def test_the_examples_in_docstrings_run():
  for module in (whole, trees):
    failed, tried = doctest.testmod(module)
    assert tried and not failed


def test_the_library_says_what_the_command_prints(run, tmp_path, capsys):
  import gin

  before = gin.config_str()
  _, report = run("--checkpoint=nowhere", **SETTINGS, SPARSITY_RULES={"ff": "1:5", "qkv": None})
  macros = {**SETTINGS, "SPARSITY_RULES": {"ff": "1:5", "qkv": None}}
  bindings = [f"{name} = {value!r}" for name, value in macros.items()]
  files = ["model.gin", "gin_configs/sparsity.gin"]
  found = plan.plan(files, bindings, [ROOT, tmp_path], checkpoint="nowhere")
  assert found == report and not found["ok"] and len(found["errors"]) == 3
  argv = [f"--gin_file={f}" for f in files] + [f"--gin.{b}" for b in bindings]
  cli.main(["plan", f"--gin_search_paths={ROOT},{tmp_path}", "--checkpoint=nowhere", *argv])
  assert capsys.readouterr().out == plan.render(found) + "\n"
  assert gin.config_str() == before  # what was read is forgotten: the next plan begins anew


def test_examine_takes_a_configuration_that_was_read(run, tmp_path):
  run()
  bindings = ["RECIPE = 'sr_ste'", "PATTERN = '1:4'", "SPARSE_STEPS = 9"]
  files = ["model.gin", "gin_configs/sparsity.gin"]
  config = gin_files.Config([ROOT, tmp_path], files, bindings)
  found = plan.examine(config)
  assert found["ok"] and found["schedule"][0]["segments"][0]["stop"] == 9
  assert config.get("RECIPE") == "sr_ste"  # still open


def test_shapes_are_those_of_the_dense_network():
  from nm_sparsity_jax.models.t5 import network

  config = network.T5Config(
    vocab_size=8, emb_dim=8, num_heads=1, num_encoder_layers=2, num_decoder_layers=1, head_dim=4,
    mlp_dim=12, scan_layers=True,
  )  # fmt: skip
  rules = configure.rules({"ff": None}, "sr_ste", "1:5", 9)  # fits nothing: it is not asked
  params, axes = plan.shapes(network.Transformer(dataclasses.replace(config, rules=rules)))
  plain, _ = plan.shapes(network.Transformer(config), {"inputs": 3, "targets": 2})
  assert trees.flatten(params) == trees.flatten(plain)
  found = {path: leaf.shape for path, leaf in trees.flatten(params)}
  assert found["encoder/encoder/mlp/wi/kernel"] == (8, 2, 12)
  assert axes["encoder"]["encoder"]["mlp"]["wi"]["kernel_axes"].names[1] == "layers"


# --- text and picture ---------------------------------------------------------------------------


def test_the_text_is_short_and_says_it_all(run):
  macros = {**SETTINGS, "RECIPE": "mdgf_exponential", "SPARSITY_RULES": {"ff": None, "nope": None}}
  _, report = run(**macros, raw=["PRETRAINED_STEPS = 1_000"])
  text = plan.render(report)
  for words in (
    "encoder/layers_{0,1}/mlp/wo/kernel         x2 ", "1,000 .. 1,099", "1 -> 5.18e-05", "1 error",
    "LOSS_NORMALIZING_FACTOR = None", "kept", "FLOPs", "ends with D = 5.18e-05", "'nope'",
  ):  # fmt: skip
    assert words in text, text
  assert "Nothing stands in the way" not in text
  assert len(text.splitlines()) < 30


def test_the_plot_is_a_picture(run, tmp_path):
  pytest.importorskip("matplotlib")
  run(f"--plot={tmp_path / 'p.png'}", **SETTINGS)
  assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_a_plot_without_matplotlib_says_how_to_get_it(monkeypatch):
  monkeypatch.setitem(sys.modules, "matplotlib", None)
  with pytest.raises(ModuleNotFoundError, match="pip install matplotlib"):
    plan.plot({}, "p.png")


def test_group_merges_one_word_at_a_time():
  alike = [f"{s}/layers_{i}/{k}" for s in "ab" for i in (0, 1, 2, 10) for k in ("x", "y_0", "y_1")]
  groups = trees.group(alike)
  assert sorted(p for _, of in groups for p in of) == sorted(alike)
  assert [n for n, _ in groups] == [
    "a/layers_{0,1,2,10}/x", "a/layers_{0,1,2,10}/y_{0,1}",
    "b/layers_{0,1,2,10}/x", "b/layers_{0,1,2,10}/y_{0,1}",
  ]  # fmt: skip
  assert [n for n, _ in trees.group(alike, words=True)] == ["{a,b}/layers_{0,1,2,10}/{x,y_{0,1}}"]
  uneven = ["a/l_0/x", "a/l_1/x", "b/l_0/x"]  # not a product: must not be told as one
  assert {n: len(p) for n, p in trees.group(uneven, words=True)} == {
    "a/l_{0,1}/x": 2,
    "b/l_0/x": 1,
  }


# --- checkpoints --------------------------------------------------------------------------------


def parameters(report):
  """path -> shape of a plan's kernels."""
  kernels = report["kernels"]["sparse"]
  return {p: k["shape"] for k in kernels for p in k["paths"]}


def write_orbax(folder, tree):
  ocp = pytest.importorskip("orbax.checkpoint")
  ocp.PyTreeCheckpointer().save(folder / "state", tree)
  (folder / "dataset").mkdir()  # as T5X does
  return folder


def write_legacy(folder, tree):
  """As T5X writes: a msgpack file; arrays beside it as zarr, here every kernel."""
  from flax import serialization

  ts = pytest.importorskip("tensorstore")
  folder.mkdir(parents=True)

  def store(path, x):
    if not path[-1].key.endswith("kernel"):
      return x
    name = ".".join(k.key for k in path)
    spec = {"driver": "zarr", "kvstore": {"driver": "file", "path": str(folder / name)}}
    array = ts.open(spec, create=True, dtype=x.dtype, shape=x.shape).result()
    array.write(x).result()
    return {"driver": "zarr", "kvstore": {"driver": "file", "path": name}, "dtype": str(x.dtype),
            "metadata": {"shape": list(x.shape)}}  # fmt: skip

  state = jax.tree_util.tree_map_with_path(store, tree)
  data = serialization.msgpack_serialize({"version": 3, "optimizer": state})
  (folder / "checkpoint").write_bytes(data)
  return folder


WRITERS = {"Orbax": write_orbax, "T5X": write_legacy}


def dense_checkpoint(step=6, dtype=np.float32, **more):
  """A checkpoint of MODEL."""
  from nm_sparsity_jax.models.t5 import network

  config = network.T5Config(
    vocab_size=64, emb_dim=32, num_heads=2, num_encoder_layers=2, num_decoder_layers=3, head_dim=8,
    mlp_dim=48, mlp_activations=("gelu", "linear"),
  )  # fmt: skip
  tokens = jnp.ones((1, 4), jnp.int32)
  shapes = jax.eval_shape(
    lambda: network.Transformer(config).init(
      jax.random.key(0), tokens, tokens, tokens, enable_dropout=False
    )
  )
  target = jax.tree.map(lambda x: np.zeros(x.shape, dtype), shapes["params"])
  moments = {"v": {"kernel": np.zeros((3, 2), np.float32)}}
  return {"target": target, "state": {"step": np.int32(step), "param_states": moments}, **more}


@pytest.mark.parametrize("kind", WRITERS)
def test_a_checkpoint_that_fits(run, tmp_path, kind):
  path = WRITERS[kind](tmp_path / "checkpoint_6", dense_checkpoint())
  code, report = run(f"--checkpoint={path}", **SETTINGS)
  assert not code, report["errors"]
  found = report["restore"]
  assert (found["format"], found["step"], found["sparse_step"]) == (kind, 6, None)
  part = found["sections"]["parameters"]
  assert part["initialise"] == part["drop"] == 0 and part["dtypes"] == {"float32": part["load"]}
  assert (
    part["load"]
    == len(parameters(report))
    + sum(k["count"] for k in report["kernels"]["dense"])
    + report["kernels"]["other_dense"]
  )


@pytest.mark.parametrize("kind", WRITERS)
def test_a_checkpoint_that_does_not_fit(run, tmp_path, kind):
  tree = dense_checkpoint()
  mlp = tree["target"]["encoder"]["layers_0"]["mlp"]
  mlp["wo"]["kernel"] = np.zeros((32, 48), np.float32)
  mlp["wi"] = mlp.pop("wi_1")
  path = WRITERS[kind](tmp_path / "checkpoint_6", tree)
  code, report = run(f"--checkpoint={path}", **SETTINGS)
  errors = report["errors"]
  assert code == 1 and len(errors) == 2
  assert has(errors, "target/encoder/layers_0/mlp/wo/kernel has shape (32, 48)", "(48, 32) here")
  lost = "target/encoder/layers_0/mlp/wi_1/kernel"
  extra = "target/encoder/layers_0/mlp/wi/kernel"
  assert has(errors, "random values", lost), errors
  assert has(report["warnings"], "this model lacks", extra)
  assert report["restore"]["sections"]["parameters"]["initialise"] == 1
  assert report["restore"]["drop"] == [extra]


@pytest.mark.parametrize("kind", WRITERS)
def test_the_metadata_of_a_sparse_checkpoint(tmp_path, kind):
  import zlib

  text = "ff: sr_ste 1:4, total=9"
  packed = np.frombuffer(zlib.compress(text.encode()), np.uint8)
  mine = {"step": np.int32(4), "rules": np.pad(packed, (0, 100))}
  tree = dense_checkpoint(10, jnp.bfloat16, flax_mutables={"nm_sparsity": mine})
  stored = checkpoint.read(str(WRITERS[kind](tmp_path / "checkpoint_10", tree)))
  assert (stored.step, stored.sparse_step, stored.rules) == (10, 4, text)
  leaf = stored.leaves["target/encoder/layers_1/mlp/wo/kernel"]
  assert (leaf.shape, leaf.dtype) == ((48, 32), "bfloat16")
  assert folders.latest(str(tmp_path)) == str(tmp_path / "checkpoint_10")
  with pytest.raises(ValueError, match="is a folder of checkpoints: name one"):
    checkpoint.read(str(tmp_path))


def test_a_folder_that_is_no_checkpoint(tmp_path):
  with pytest.raises(ValueError, match="is not a checkpoint"):
    checkpoint.read(str(tmp_path))
  with pytest.raises(FileNotFoundError, match="there is no checkpoint"):
    checkpoint.read(str(tmp_path / "x"))
  assert folders.latest(str(tmp_path)) is folders.latest(str(tmp_path / "x")) is None


# --- docs/t5x.md --------------------------------------------------------------------------------


def documented_overrides():
  """The flags in the table of docs/t5x.md, a list a row, as a shell splits them."""
  text = (ROOT / "docs/t5x.md").read_text().partition("## Overrides")[2].partition("\n## ")[0]
  rows = [line for line in text.splitlines() if line.startswith("| ") and "`--gin." in line]
  return [shlex.split(re.search("`(--gin.*?)`( |$)", row)[1]) for row in rows]


OF_T5X = ("t5x_adapter.", "utils.", "partitioning.", "METRICS_EVERY")  # no part of a plan
BASE = dict(RECIPE="mdgf_exponential", PATTERN="1:4", SPARSE_STEPS=100, FINETUNE_STEPS=20)


def is_of_t5x(flags):
  return any(flag.removeprefix("--gin.").startswith(OF_T5X) for flag in flags)


@pytest.mark.parametrize("flags", [f for f in documented_overrides() if not is_of_t5x(f)], ids=str)
def test_documented_overrides_work(run, flags):
  names = {flag.removeprefix("--gin.").partition("=")[0] for flag in flags}
  macros = {k: v for k, v in BASE.items() if k not in names}
  code, report = run(**macros, raw=[flag.removeprefix("--gin.") for flag in flags])
  assert not code, report["errors"]
  _, plain = run(**BASE)
  same = report["schedule"] == plain["schedule"] and report["kernels"] == plain["kernels"]
  assert not same or names == {"INDIVISIBLE"}  # each changes something; all divides here


def test_there_are_documented_overrides():
  assert len(documented_overrides()) >= 10


# --- with T5X -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def t5x():
  if reason := t5x_found.why_not():
    pytest.skip(reason)
  import warnings

  with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import t5x.train

    sys.path.insert(0, str(ROOT / "tests"))
    yield t5x
    sys.path.remove(str(ROOT / "tests"))


TINY = ("gin_configs/runs/t5x_finetune.gin", str(ROOT / "tests/t5x_tiny.gin"))
FINETUNE = dict(
  RECIPE="idp", PATTERN="1:4", SPARSE_STEPS=12, DENSE_STEPS=2, FINETUNE_STEPS=4,
  PRETRAINED_STEPS=6, BATCH_SIZE=16, EVAL_PERIOD=5000,
)  # fmt: skip


def t5x_checkpoint(**more):
  """A dense checkpoint of t5x_tiny.gin."""
  from t5x.examples.t5 import network

  config = network.T5Config(
    vocab_size=384, dtype="float32", emb_dim=16, num_heads=2, num_encoder_layers=1,
    num_decoder_layers=1, head_dim=8, mlp_dim=32, mlp_activations=("gelu", "linear"),
    logits_via_embedding=False,
  )  # fmt: skip
  tokens = jnp.ones((1, 4), jnp.int32)
  with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
    shapes = jax.eval_shape(
      lambda: network.Transformer(config).init(
        jax.random.key(0), tokens, tokens, tokens, enable_dropout=False
      )
    )
  target = jax.tree.map(lambda x: np.zeros(x.shape, np.float32), shapes["params"])
  moments = {"0": {"mu": target}}
  return {"target": target, "state": {"step": np.int32(6), "param_states": moments}, **more}


@pytest.mark.t5x
@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.usefixtures("t5x")
def test_cost_of_t5xs_own_networks(scan):
  """Word and position look-ups by one-hots are no FLOPs, in T5X's code as in ours."""
  from t5x.examples.decoder_only import network as decoder_only
  from t5x.examples.scalable_t5 import network as scalable
  from t5x.examples.t5 import network as plain

  theirs, more = (scalable, dict(scan_layers=True)) if scan else (plain, {})
  sizes = dict(vocab_size=64, emb_dim=16, num_heads=2, head_dim=8, mlp_dim=32)
  stacks = dict(num_encoder_layers=2, num_decoder_layers=3)

  def cost(module):
    return model.cost_of(module, plan.shapes(module, LENGTHS)[0], LENGTHS)

  with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
    found = cost(theirs.Transformer(theirs.T5Config(**sizes, **stacks, **more)))
    alone = cost(decoder_only.DecoderWrapper(decoder_only.TransformerConfig(
      **sizes, num_layers=3, mlp_activations=("relu",))))  # fmt: skip
  ours = cost(network.Transformer(network.T5Config(**sizes, **stacks)))
  assert found.flops == ours.flops
  for place in ("ff", "encoder/q", "decoder/cross/qkv", "decoder/self/scores", "attention"):
    assert found.select(place).flops == ours.select(place).flops, place
  tokens = LENGTHS["targets"]
  products = 3 * (4 * 16 * 16 + 2 * 16 * 32 + 2 * tokens * 16) + 16 * 64
  assert alone.flops == 2 * tokens * products


@pytest.fixture
def run_t5x(t5x, run):
  def call(*flags, **macros):
    with jax.numpy_rank_promotion("allow"):
      return run(*flags, files=macros.pop("files", TINY), **macros)

  return call


@pytest.fixture(autouse=True)
def closed_loops():
  with t5x_found.closed_loops():
    yield


@pytest.mark.t5x
@pytest.mark.parametrize("kind", WRITERS)
def test_a_fine_tune_from_a_dense_checkpoint(run_t5x, tmp_path, kind):
  path = WRITERS[kind](tmp_path / "checkpoint_6", t5x_checkpoint())
  where = dict(MODEL_DIR=str(tmp_path / "new"), INITIAL_CHECKPOINT_PATH=str(path))
  code, report = run_t5x(**FINETUNE, **where)
  assert not code, report["errors"]
  assert report["program"] == "train"
  sections = report["restore"]["sections"]
  load = sections["parameters"]["load"]
  assert load == 29 and not sections["parameters"]["initialise"] + sections["parameters"]["drop"]
  assert not sections["optimizer"]["load"]
  assert sections["optimizer"]["drop"] == 29 and sections["optimizer"]["initialise"] == 2 * 29 + 1
  assert sections["step"] == dict(load=1, initialise=0, drop=0, dtypes={"int32 -> float32": 1})
  # Step, start and rules; of each kernel a mask and its stamp.
  assert sections["sparse state"]["initialise"] == 3 + 3 * 6
  assert report["schedule"][0]["segments"][-1]["t5x_stop"] == 18
  assert report["cost"] and report["loss"]["target_tokens_at_most"] == 16 * 8


@pytest.mark.t5x
def test_what_t5x_itself_writes_is_read(t5x, tmp_path):
  import optax
  from flax.core import freeze
  from flax.linen.partitioning import AxisMetadata
  from t5x import checkpoints, optimizers, partitioning, train_state

  params = jax.tree.map(jnp.asarray, t5x_checkpoint()["target"])
  axes = jax.tree.map(lambda x: AxisMetadata(names=(None,) * x.ndim), params)
  rename = lambda tree: {
    k + ("" if isinstance(v, dict) else "_axes"): rename(v) if isinstance(v, dict) else v
    for k, v in tree.items()
  }
  optimizer = optimizers.wrap_optax_optimizer(optax.adamw)(1e-3)
  with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
    state = train_state.FlaxOptimTrainState.create(
      optimizer, freeze({"params": params, "params_axes": rename(axes)})
    )
    state = state.replace_step(np.int32(6))
    partitioner = partitioning.PjitPartitioner(num_partitions=1)
    checkpoints.Checkpointer(state, partitioner, str(tmp_path)).save(state)
  stored = checkpoint.read(str(tmp_path / "checkpoint_6"))
  assert (stored.format, stored.step, stored.sparse_step) == ("T5X", 6, None)
  want = {f"target/{path}": x for path, x in trees.flatten(params)}
  found = {key: leaf for key, leaf in stored.leaves.items() if key.startswith("target/")}
  assert {k: (x.shape, str(x.dtype)) for k, x in want.items()} == {
    k: (leaf.shape, leaf.dtype) for k, leaf in found.items()
  }


@pytest.mark.t5x
def test_every_error_of_a_run_at_once(run_t5x, tmp_path):
  path = write_orbax(tmp_path / "checkpoint_6", t5x_checkpoint())
  macros = dict(
    MODEL_DIR=str(tmp_path / "new"), INITIAL_CHECKPOINT_PATH=str(path), PRETRAINED_STEPS=7,
    PATTERN="1:3", TRAIN_STEPS_RELATIVE=5, EVAL_PERIOD=5001, MIXTURE_OR_TASK_NAME="nope",
  )  # fmt: skip
  raw = ["utils.RestoreCheckpointConfig.dtype = 'bfloat16'", "trainer.Nope.x = 1"]
  raw += ["TRAIN_STEPS = 40", "t5x_adapter.SparseTrainer.num_microbatches = 5"]
  code, report = run_t5x(**{**FINETUNE, **macros}, raw=raw)
  errors = report["errors"]
  assert code == 1
  for words in (
    ["trainer.Nope"], ["wi_{0,1}/kernel", "1:3"], ["wo/kernel", "1:3"], ["TRAIN_STEPS_RELATIVE"],
    ["TRAIN_STEPS is 40", "19"], ["EVAL_PERIOD=5001"], ["'nope'", "t5x_task"], ["bfloat16"],
    ["set PRETRAINED_STEPS=6"], ["5 microbatches"],
  ):  # fmt: skip
    assert has(errors, *words), (words, errors)
  assert len(errors) == 10


@pytest.mark.t5x
def test_a_mistake_in_the_rules_hides_no_other(run_t5x, tmp_path):
  """The model is made of the places that are right, so that restore and optimizer are looked at."""
  path = write_orbax(tmp_path / "checkpoint_6", t5x_checkpoint())
  macros = dict(MODEL_DIR=str(tmp_path / "new"), INITIAL_CHECKPOINT_PATH=str(path))
  rules = {"ff": "1:4", "qkv": "4:1"}
  raw = ["utils.RestoreCheckpointConfig.fallback_to_scratch = False", "EVAL_PERIOD = 5001"]
  code, report = run_t5x(**{**FINETUNE, **macros, "SPARSITY_RULES": rules}, raw=raw)
  errors = report["errors"]
  assert code == 1 and len(errors) == 3, errors
  for words in (["'qkv'", "'4:1'"], ["fallback_to_scratch is not set"], ["EVAL_PERIOD=5001"]):
    assert has(errors, *words), (words, errors)
  assert report["schedule"][0]["rules"] == ["ff"]


@pytest.mark.t5x
def test_a_model_dir_with_checkpoints_is_resumed_or_refused(run_t5x, tmp_path):
  import zlib

  dense = write_orbax(tmp_path / "dense/checkpoint_6", t5x_checkpoint())
  start = {**FINETUNE, "RECIPE": "sr_ste", "INITIAL_CHECKPOINT_PATH": str(dense)}
  code, report = run_t5x(**start, MODEL_DIR=str(dense.parent))
  assert code == 1 and has(report["errors"], "dense run, and T5X would resume that one")

  rules = configure.rules({"ff": None}, "sr_ste", "1:4", 12, 2, 4)
  packed = np.frombuffer(zlib.compress(configure.describe(rules).encode(), 9), np.uint8)
  mine = {"step": np.int32(4), "start": np.int32(6)}
  mine["rules"] = np.pad(packed, (0, 4096 - packed.size))
  tree = t5x_checkpoint(flax_mutables={"nm_sparsity": mine})
  mu = tree["target"]
  tree["state"] = {
    "step": np.int32(10), "param_states": {"0": {"count": np.int32(4), "mu": mu, "nu": mu}},
  }  # fmt: skip
  sparse = write_orbax(tmp_path / "sparse/checkpoint_10", tree)
  code, report = run_t5x(**start, MODEL_DIR=str(sparse.parent))
  assert not code, report["errors"]
  assert has(report["notes"], "would resume from", "checkpoint_10")
  assert report["restore"]["sparse_step"] == 4
  assert all(not s["initialise"] + s["drop"] for s in report["restore"]["sections"].values())
  code, report = run_t5x(**{**start, "PATTERN": "2:4"}, MODEL_DIR=str(sparse.parent))
  assert code == 1 and has(report["errors"], "sr_ste 1:4", "sr_ste 2:4", "use its rules")


@pytest.mark.t5x
@pytest.mark.parametrize("local", [False, True])
def test_eval_of_a_dense_checkpoint_is_refused(run_t5x, tmp_path, local):
  """One of a local run is such a one to T5X, though it holds rules."""
  tree = t5x_checkpoint()
  if local:
    text = rules_text.describe(configure.rules({"ff": None}, "sr_ste", "1:4", 12))
    mine = {"step": np.int32(6), "rules": np.asarray(rules_text.pack(text))}
    tree["state"]["nm_sparsity"] = mine | {"dense": tree["target"]}
  path = write_orbax(tmp_path / "checkpoint_6", tree)
  files = ("gin_configs/runs/t5x_eval.gin", TINY[1])
  macros = dict(RECIPE="sr_ste", PATTERN="1:4", SPARSE_STEPS=12, CHECKPOINT_PATH=str(path))
  code, report = run_t5x(files=files, **macros, EVAL_OUTPUT_DIR="x")
  assert code == 1 and report["program"] == "evaluate"
  assert has(report["errors"], "is dense", "masked already" if local else "no sparse step")


@pytest.mark.t5x
@pytest.mark.parametrize("run_file", ["t5x_infer", "t5x_infer_glue_test"])
def test_files_of_infer_are_read(run_t5x, run_file):
  files = (f"gin_configs/runs/{run_file}.gin", TINY[1])
  macros = dict(RECIPE="sr_ste", PATTERN="1:4", SPARSE_STEPS=12, CHECKPOINT_PATH="/none")
  _, report = run_t5x(files=files, **macros, INFER_OUTPUT_DIR="/x")
  assert report["program"] == "infer" and not has(report["errors"], "resolve")
  assert [e for e in report["errors"] if "/none" not in e] == []


@pytest.fixture
def tasks():
  """`t5x_tasks`; what a test registers again is as it was afterwards."""
  t5x_tasks = pytest.importorskip("t5x_tasks")
  yield t5x_tasks
  tasks_found.register_again()


MINE = {**FINETUNE, "MODEL_DIR": "x", "INITIAL_CHECKPOINT_PATH": "", "PRETRAINED_STEPS": 0}
MINE |= dict(MIXTURE_OR_TASK_MODULE="t5x_tasks")


def of_data(report):
  return [x for x in report["errors"] + report["warnings"] if "nm_glue" in x or "GLUE" in x]


@pytest.mark.t5x
def test_a_run_that_would_evaluate_nothing_is_warned_of(run_t5x, tasks, monkeypatch):
  import seqio

  mine = [name for name in seqio.MixtureRegistry.names() if name.startswith("nm_")]
  monkeypatch.setattr(seqio.MixtureRegistry, "names", lambda: mine)  # none of another test
  for name, found in {
    "nm_glue_mini_mnli": [
      "nm_glue_mini_mnli has no split 'validation', so nothing is evaluated: choose "
      "nm_glue_mini_mnli_and_dev or nm_glue_mini_proportional"
    ],
    "nm_glue_mini_mnli_and_dev": [], "nm_glue_mini_proportional": [], "nm_glue_mini_rte": [],
  }.items():  # fmt: skip
    _, report = run_t5x(**MINE, MIXTURE_OR_TASK_NAME=name)
    assert of_data(report) == found and has(report["warnings"], "no split", *found) == bool(found)
  _, report = run_t5x(**MINE, MIXTURE_OR_TASK_NAME="nm_glue_mini_ax")
  assert of_data(report) == ["nm_glue_mini_ax has no split 'train' to train on; there is test"]


@pytest.mark.t5x
def test_files_of_a_task_that_are_not_there(run_t5x, tasks, tmp_path):
  import seqio

  folder = tmp_path / "glue"
  for name, split in (("train", "train"), ("dev", "validation")):
    tasks.register_glue(vocabulary=seqio.ByteVocabulary(), data_dir=str(folder))
    _, report = run_t5x(**MINE, MIXTURE_OR_TASK_NAME="nm_glue_rte")
    (error,) = of_data(report)
    assert f"no file {folder}/RTE/{name}.tsv, for the split {split}" in error
    (folder / "RTE").mkdir(parents=True, exist_ok=True)
    (folder / f"RTE/{name}.tsv").touch()  # what is in it is not looked at
  _, report = run_t5x(**MINE, MIXTURE_OR_TASK_NAME="nm_glue_rte")
  assert of_data(report) == []
  _, report = run_t5x(**MINE, MIXTURE_OR_TASK_NAME="nm_glue_cola", USE_CACHED_TASKS=True)
  assert of_data(report) == []


@pytest.mark.t5x
def test_a_vocabulary_that_the_network_does_not_embed(run_t5x, tasks):
  import seqio

  name = dict(MIXTURE_OR_TASK_NAME="nm_glue_rte")
  few = ["t5x.examples.t5.network.T5Config.vocab_size = 256"]
  tasks.register_glue(vocabulary=seqio.ByteVocabulary())
  _, report = run_t5x(**MINE, **name, raw=few)
  assert of_data(report) == [
    "nm_glue_rte: 'inputs' has 259 ids, but the network embeds 256. Set VOCAB_SIZE=384."
  ]
  assert of_data(run_t5x(**MINE, **name)[1]) == []  # 384
  tasks.register_glue()  # T5's own lies in a bucket, which is not asked
  assert of_data(run_t5x(**MINE, **name, raw=few)[1]) == []


@pytest.mark.t5x
def test_documented_overrides_of_t5x_work(run_t5x, tmp_path):
  path = write_orbax(tmp_path / "checkpoint_6", t5x_checkpoint())
  flags = [
    f.removeprefix("--gin.") for row in documented_overrides() if is_of_t5x(row) for f in row
  ]
  where = dict(MODEL_DIR=str(tmp_path / "new"), INITIAL_CHECKPOINT_PATH=str(path))
  code, report = run_t5x(**{**FINETUNE, **where}, raw=flags)
  assert len(flags) == 4 and not code, report["errors"]
  assert report["loss"]["microbatches"] == 4


@pytest.mark.t5x
def test_tfds_is_not_asked_for_splits():
  import seqio

  vague = seqio.Task("vague", seqio.TfdsDataSource("no_such/set:1.0.0"), {}, [])
  assert data.splits(vague) is None


@pytest.mark.t5x
def test_what_a_program_needs_is_asked_for_at_once(run_t5x):
  code, report = run_t5x(files=TINY[:1])
  asked = {e.split()[0] for e in report["errors"]}
  assert code == 1 and {
    "MODEL_DIR", "INITIAL_CHECKPOINT_PATH", "RECIPE", "PATTERN", "NETWORK",
    "SPARSE_STEPS", "MIXTURE_OR_TASK_NAME", "TASK_FEATURE_LENGTHS", "OPTIMIZER", "VOCABULARY",
  } <= asked  # fmt: skip
