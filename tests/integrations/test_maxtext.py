"""MaxText, unmodified: two lines around its optimizer, in its own loop, on 2 x 2 devices."""

import os
import pathlib
import pickle
import signal
import subprocess
import sys

import numpy as np
import pytest
from conformance import ROOT, assert_same, assert_sparse, rules_of

pytest.importorskip("maxtext")

HERE = pathlib.Path(__file__).resolve().parent
STEPS = 12
RULES = rules_of("1:8", STEPS)["sr_ste"]  # the places of every run


@pytest.fixture(scope="module")
def found(tmp_path_factory):
  """name -> what that run left; MaxText is imported once for all of them."""
  folder = tmp_path_factory.mktemp("maxtext")
  done = subprocess.run(
    [sys.executable, str(HERE / "maxtext_runs.py"), str(folder)],
    capture_output=True,
    text=True,
    timeout=2400,
    env=os.environ | {"JAX_NUM_CPU_DEVICES": "4", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)},
  )
  assert not done.returncode, done.stderr[-4000:]
  return pickle.loads((folder / "all").read_bytes())


def result(found, name):
  assert not isinstance(found[name], str), found[name]
  return found[name]


@pytest.mark.parametrize("name", ["whole", "resumed", "accumulated", "bf16", "int8", "fp8"])
def test_all_recipes_end_1_of_8(found, name):
  """`whole` has sr_ste, mdgf_exponential, sdgf_stepwise and idp side by side."""
  ran = result(found, name)
  # Two layers, in a scan but for bf16; test_families_know_the_axes_of_the_products proves the axes.
  assert_sparse(ran["params"], RULES, "1:8", places=14 if name == "bf16" else 7)
  assert np.isfinite(ran["losses"]).all() and ran["losses"][-1] < ran["losses"][0]
  dense = {path: w for path, w in ran["opt"].items() if path.startswith("dense/")}
  assert all(w.dtype == np.float32 and w.all() for w in dense.values())


@pytest.mark.parametrize("kind", ["", "dense"])
def test_a_killed_run_resumes_to_the_same_bits(found, kind):
  """As exactly as a dense run of MaxText does."""
  whole, killed = ("dense", "dense_killed") if kind else ("whole", "killed")
  again = result(found, f"{kind} resumed".strip())
  assert found[killed] == signal.SIGKILL  # as `os.waitpid` tells it
  assert again["steps"] == list(range(7, STEPS))
  for part in ("params", "opt"):
    assert_same(again[part], result(found, whole)[part])


def test_losses_are_those_of_a_loop_by_hand_though_gradients_accumulate(found):
  whole = result(found, "whole")
  for losses in (whole["losses"], result(found, "accumulated")["losses"]):
    np.testing.assert_allclose(losses, result(found, "by hand"), rtol=0, atol=1e-5)
  # MaxText evaluated after the update of step 8, on synthetic data that never changes.
  np.testing.assert_allclose(whole["evaluated"][-1], whole["losses"][9], rtol=0, atol=1e-5)


def test_dense_weights_lie_as_their_parameters(found):
  """The state's other leaves are on every device."""
  ran = result(found, "whole")
  dense = {path for path in ran["opt placed"] if path.startswith("dense/")}
  assert len(dense) == 7
  for path in dense:
    spec, is_everywhere = ran["placed"][path.removeprefix("dense/")]
    assert ran["opt placed"][path] == (spec, is_everywhere) and not is_everywhere
  assert ran["opt placed"]["rules"][1] and ran["opt placed"]["count"][1]


def test_a_skipped_step_counts_for_the_schedule_unless_the_skip_stands_outside(found):
  """MaxText skips all but the first step here. W stays, and the schedule ends with the run."""
  outside, inside = result(found, "spikes"), result(found, "spikes inside")
  assert outside["opt"]["count"] == STEPS and inside["opt"]["inner_state/count"] < STEPS
  assert_sparse(outside["params"], RULES, "1:8", places=7)
  assert all(inside["params"][path].all() for path in RULES.assign(inside["params"]).sites)


def test_families_know_the_axes_of_the_products(found):
  """Each kernel of the layers, as a trace of MaxText's forward pass multiplies by it."""
  names = [name for name in found if name.startswith("axes")]
  assert len(names) == 6 * 3
  for name in names:
    named, traced = result(found, name)
    assert named == traced and len(named) >= 7, name


def test_a_wrong_word_is_one_sentence_and_another_schedule_is_seen(found):
  assert "match no parameter" in found["a wrong word"]
  # A checkpoint knows its rules. What is traced cannot raise, so the weights are NaN, and MaxText
  # ends a run with such a loss.
  assert "SystemExit" in found["a longer schedule"]
