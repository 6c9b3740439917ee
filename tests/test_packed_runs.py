"""infer and eval on a packed file: the tokens and numbers of the finalized checkpoint."""

import functools
import json
import warnings

import jax
import numpy as np
import pytest
from checkout import read_lines

import nm_sparsity_jax as nms
from nm_sparsity_jax import cli
from nm_sparsity_jax.core.packed import choice
from nm_sparsity_jax.core.trees import flatten
from nm_sparsity_jax.deploy import inference_tree
from nm_sparsity_jax.runs import checkpoint
from nm_sparsity_jax.training import rules_text

pytest.importorskip("seqio", reason="the local runner needs seqio: pip install -e '.[local]'")
# seqio, TensorFlow, clu and Orbax warn on their own account.
pytestmark = pytest.mark.filterwarnings("ignore")

with warnings.catch_warnings():
  warnings.simplefilter("ignore")
  import test_local  # (it skips as well)

RECIPE = functools.partial(nms.recipe, "sr_ste", phases=nms.Phases(total=7))
RULES = nms.Rules({"ff": RECIPE(pattern="1:8"), "qkv": RECIPE(pattern="2:4")})


@pytest.fixture(scope="module")
def finalized(tmp_path_factory):
  """A finalized checkpoint of the network of local_tiny.gin, of random weights that say much."""
  folder, rng = tmp_path_factory.mktemp("finalized"), np.random.default_rng(0)
  shapes = test_local.model_of().shapes
  params = jax.tree.map(lambda x: rng.normal(0, 0.3, x.shape).astype(np.float32), shapes)
  params = jax.device_get(nms.finalize(params, RULES, 7))
  text = np.asarray(rules_text.pack(rules_text.describe(RULES)))
  tree = {"target": params, "state": {"step": np.int32(7)}}
  tree["flax_mutables"] = {"nm_sparsity": {"step": np.int32(7), "rules": text}}
  checkpoint.write(f"{folder}/checkpoint_7", {key: np.asarray(x) for key, x in flatten(tree)})
  return folder / "checkpoint_7"


def words(program, path, out, **macros):
  """The command that looks at a checkpoint."""
  where = {f"{program.upper()}_OUTPUT_DIR": str(out), "CHECKPOINT_PATH": str(path)}
  macros = {"EVAL_SPLIT": "validation", **where, **macros}
  return [program, *test_local.command(f"local_{program}.gin", **macros)]


@pytest.fixture(scope="module")
def packed(finalized):
  """The packed file that `pack` makes of it."""
  path = finalized.with_name("packed.safetensors")
  assert cli.main(["pack", str(finalized), str(path)]) == 0
  return path


@pytest.fixture
def multiplied(monkeypatch):
  """Layers multiply by packed kernels, whatever the table has; counts how many were asked."""
  asked = []
  monkeypatch.setattr(choice, "best", lambda kernel, *a, **k: asked.append(kernel) or "xla_scan")
  return asked


SCANNED = {"network.T5Config.preset.scan_layers": True}


@pytest.mark.parametrize(
  "more", [{}, pytest.param(SCANNED, marks=pytest.mark.slow)], ids=["layers", "scan"]
)
def test_infer_says_token_by_token_what_the_finalized_one_says(
  finalized, packed, multiplied, more, tmp_path
):
  said = []
  for path, settings in ((finalized, {}), (packed, more)):
    out = tmp_path / path.name
    assert cli.main(words("infer", path, out, DECODER="greedy", **settings)) == 0
    (file,) = out.glob("*.jsonl-*")
    said.append([line["prediction"] for line in read_lines(file)])
  assert said[0] == said[1] and len(set(said[0])) > 3
  assert len(multiplied) > 2 * 15  # of fifteen kernels: once prepared, and where they are traced


def test_with_memory_every_kernel_stays_packed(packed, tmp_path, monkeypatch):
  monkeypatch.setattr(choice, "speed", lambda *_: 0.5)  # a dense product is faster throughout
  made, prepare = [], inference_tree.prepare
  spy = lambda *args, **fields: made.append(prepare(*args, **fields)) or made[-1]
  monkeypatch.setattr(inference_tree, "prepare", spy)
  few = {"EVALUATOR_NUM_EXAMPLES": 0, "EVAL_STEPS": 1}
  for flags in ([], ["--memory"]):
    assert cli.main([*words("eval", packed, tmp_path / "out", **few), *flags]) == 0
  is_packed = lambda x: isinstance(x, nms.packed.NMPacked)
  leaves = [jax.tree.leaves(tree, is_leaf=is_packed) for tree in made]
  assert [any(map(is_packed, of)) for of in leaves] == [False, True]


def test_bench_takes_a_checkpoint_and_a_packed_file(finalized, packed, capsys, monkeypatch):
  monkeypatch.setattr(choice, "speed", lambda *_: 2.0)  # no kernel so small stays packed else
  for path in (finalized, packed):
    argv = ["bench", str(path), *test_local.command(), "--inputs=8"]
    assert cli.main([*argv, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["timings"]
    assert [t["what"] for t in told] == ["the inputs", "inputs and 16 tokens"]
    assert all(t["dense_bytes"] > t["packed_bytes"] > 0 for t in told)
    assert cli.main([*argv, "--gin.network.T5Config.preset.logits_via_embedding=True"]) == 1
    assert "1 unknown" in capsys.readouterr().err


@pytest.mark.parametrize(
  "macros, said",
  [
    ({"network.T5Config.preset.logits_via_embedding": True}, "1 unknown"),
    (dict(PATTERN="1:4"), "1:4"),
  ],
)
def test_a_file_that_does_not_fit_is_refused(macros, said, packed, tmp_path, capsys):
  assert cli.main(words("infer", packed, tmp_path / "out", **macros)) == 1
  assert said in capsys.readouterr().err


def test_plan_finds_every_parameter_of_a_network_that_scans(packed, tmp_path, capsys):
  command = words("infer", packed, tmp_path / "out", **SCANNED)
  assert cli.main(["plan", "--json", *command[1:]]) == 0
  restore = json.loads(capsys.readouterr().out)["restore"]
  assert restore["format"] == "packed"
  start = dict(MODEL_DIR=str(tmp_path), INITIAL_CHECKPOINT_PATH=str(packed), **SCANNED)
  for macros, fits in ((start, False), (start | dict.fromkeys(SCANNED, False), True)):
    cli.main(["plan", *test_local.command("local_finetune.gin", **macros)])
    assert ("of another model" in capsys.readouterr().out) != fits
