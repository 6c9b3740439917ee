"""infer and eval on a packed file: the tokens and numbers of the finalized checkpoint."""

import warnings

import jax
import pytest
from checkout import read_lines
from checkpoint_files import save
from reference_arrays import drawn

import nm_sparsity_jax as nms
from nm_sparsity_jax import cli
from nm_sparsity_jax.core.packed import choice
from nm_sparsity_jax.deploy import inference_tree

pytest.importorskip("seqio", reason="the local runner needs seqio: pip install -e '.[local]'")
# seqio, TensorFlow, clu and Orbax warn on their own account.
pytestmark = pytest.mark.filterwarnings("ignore")

with warnings.catch_warnings(action="ignore"):
  import test_local  # (it skips as well)

# Its deployed values are scaled.
RULES = nms.configure.rules({"ff": "1:8", "qkv": "2:4"}, "s_ste", sparse_steps=7)


@pytest.fixture(scope="module")
def finalized(tmp_path_factory):
  """A finalized checkpoint of the network of local_tiny.gin, of random weights that say much."""
  folder = tmp_path_factory.mktemp("finalized")
  weights = drawn(test_local.model_of().shapes, 0.3)
  state = nms.init_state(weights, RULES)
  save(folder / "run", {"params": weights, "nm_sparsity": state}, RULES)
  assert cli.main(["finalize", str(folder / "run"), str(folder / "done")]) == 0
  return folder / "done/checkpoint_7"


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


def test_bench_takes_a_checkpoint_and_a_packed_file(finalized, packed, command, monkeypatch):
  monkeypatch.setattr(choice, "speed", lambda *_: 2.0)  # no kernel so small stays packed else
  for path in (finalized, packed):
    argv = ["bench", path, *test_local.command(), "--inputs=8"]
    told = command(*argv)[1]["timings"]
    assert [t["what"] for t in told] == ["the inputs", "inputs and 16 tokens"]
    assert all(t["dense_bytes"] > t["packed_bytes"] > 0 for t in told)
    error = command(*argv, "--gin.network.T5Config.preset.logits_via_embedding=True")[1]
    assert "1 unknown" in error


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


def test_plan_finds_every_parameter_of_a_network_that_scans(packed, tmp_path, command):
  _, *flags = words("infer", packed, tmp_path / "out", **SCANNED)
  code, report = command("plan", *flags)
  assert not code and report["restore"]["format"] == "packed"
  start = dict(MODEL_DIR=str(tmp_path), INITIAL_CHECKPOINT_PATH=str(packed), **SCANNED)
  for macros, fits in ((start, False), (start | dict.fromkeys(SCANNED, False), True)):
    _, report = command("plan", *test_local.command("local_finetune.gin", **macros))
    assert any("of another model" in error for error in report["errors"]) != fits
