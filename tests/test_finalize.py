"""nm-sparsity verify and finalize: proof, exact zeros, and nothing left behind where they fail."""

import os

import jax
import ml_dtypes
import numpy as np
import pytest
from checkout import python
from checkpoint_files import WRITERS, cut, load, write_orbax

import nm_sparsity_jax as nms
from nm_sparsity_jax.core.trees import flatten, nested
from nm_sparsity_jax.training import configure, rules_text

pytest.importorskip("orbax.checkpoint", reason="checkpoints are Orbax's: pip install -e '.[dev]'")

SHAPES = {
  "encoder/layers_0/mlp/wi/kernel": (8, 12),
  "encoder/layers_0/mlp/wo/kernel": (12, 8),
  "encoder/layers_0/attention/query/kernel": (8, 8),
  "encoder/layers_0/scale": (8,),
  "token_embedder/embedding": (16, 8),
}
PLACES = {"ff": "1:4", "q": "2:4"}


def draw(seed=0, dtype=np.float32):
  rng = np.random.default_rng(seed)
  return nested({path: rng.normal(size=shape).astype(dtype) for path, shape in SHAPES.items()})


class Run:
  """A sparse run at a step, as T5X's trainer saves it: 10 + 2 of 12 steps, of weights that move."""

  def __init__(self, recipe="sr_ste", step=12, dtype=np.float32):
    self.rules = configure.rules(PLACES, recipe, sparse_steps=12, dense_steps=2, finetune_steps=4)
    self.params = draw(0, dtype)
    self.state = nms.init_state(self.params, self.rules)
    for t in range(1, step + 1):
      self.params = draw(t, dtype)
      grads = self.params if recipe == "snip" else None
      self.state = nms.update_state(
        self.state, self.params, self.rules, t, grads=grads, grads_at=self.params
      )
    kept = {k: v for k, v in jax.tree.map(np.asarray, self.state).items() if k != "step"}
    text = rules_text.pack(rules_text.describe(self.rules))
    self.tree = {
      "target": self.params,
      "state": {"step": np.int32(step + 100), "param_states": {"0": {"mu": draw(99)}}},
      "flax_mutables": {"nm_sparsity": {"step": np.int32(step), "rules": text, **kept}},
    }

  def write(self, folder, kind="Orbax"):
    step = int(self.tree["state"]["step"])
    return WRITERS[kind](folder / f"checkpoint_{step}", self.tree)


@pytest.mark.parametrize(
  "recipe, kind, dtype",
  [("mdgf_exponential", "Orbax", np.float32), ("snip", "Orbax", ml_dtypes.bfloat16),
   ("idp", "T5X", np.float32), ("s_ste", "T5X", np.float32)],
)  # fmt: skip
def test_zeros_are_those_of_finalize_and_are_proven(
  command, tmp_path, monkeypatch, recipe, kind, dtype
):
  """A folder stands for its newest checkpoint; Orbax wants absolute paths, users do not."""
  monkeypatch.chdir(tmp_path)
  run = Run(recipe, dtype=dtype)
  run.write(tmp_path / "run", kind)
  code, before = command("verify", "run")
  assert code == 1 and all(p["bad_groups"] == p["groups"] for p in before["sites"])
  code, report = command("finalize", "run", "out")
  path = "out/checkpoint_112"
  assert not code and report["ok"] and report["checkpoint"] == path
  found = load(tmp_path / path)
  want = dict(flatten(nms.finalize(run.params, run.rules, 12, run.state, early=True)))
  got = dict(flatten(found["target"]))
  assert got.keys() == want.keys() == SHAPES.keys()
  for name, w in want.items():
    np.testing.assert_array_equal(got[name], w, err_msg=name)
    assert got[name].dtype == dtype
  # The step and what the run knows of itself stay; the optimizer goes.
  assert found["state"] == {"step": 112}
  for name, x in flatten(run.tree["flax_mutables"]):
    x = np.ones_like(x) if "/scale/" in name else x  # what is scaled is not scaled again
    np.testing.assert_array_equal(dict(flatten(found["flax_mutables"]))[name], x, err_msg=name)

  # What was removed, place by place, against a plain sum.
  params = dict(flatten(run.params))
  for site in report["sites"]:
    w = abs(params[site["path"]].astype(np.float64))
    gone = np.asarray(want[site["path"]]) == 0
    assert report["removed"][site["path"]] == pytest.approx(w[gone].sum() / w.sum())

  code, again = command("finalize", path, "again")
  assert not code and {*again["removed"].values()} == {0}


@pytest.mark.parametrize("recipe, step", [("mdgf_linear", 4), ("idp", 3)])
def test_a_schedule_that_is_not_over_is_refused_unless_early(command, tmp_path, recipe, step):
  path = Run(recipe, step).write(tmp_path)
  code, text = command("finalize", path, tmp_path / "out")
  assert code == 1 and f"sparse step {step}" in text and "--early" in text
  code, report = command("finalize", path, tmp_path / "out", "--early")
  assert not code and report["ok"]
  path = Run(recipe, 8).write(tmp_path)  # the first step at which it is over
  assert command("finalize", path, tmp_path / "out8")[0] == 0


# --- rules --------------------------------------------------------------------------------------


def test_a_checkpoint_without_rules_needs_them_and_notes_them(command, tmp_path):
  path = tmp_path / "checkpoint_7"
  write_orbax(path, {"target": draw()})
  assert "holds no rules" in command("verify", path)[1]
  flags = ["--rules", str(PLACES)]
  assert command("finalize", path, tmp_path, *flags)[0] == 0
  made = configure.rules(PLACES, "sr_ste", sparse_steps=1)
  want = dict(flatten(nms.finalize(draw(), made, 0, early=True)))
  for name, w in flatten(load(tmp_path / "checkpoint_0")["target"]):
    np.testing.assert_array_equal(w, want[name])
  # What was finalized knows its rules; others may be given.
  assert command("verify", tmp_path / "checkpoint_0")[0] == 0
  assert command("verify", tmp_path / "checkpoint_0", "--rules", "{'o|q': '1:4'}")[0] == 1


def test_a_stacked_kernel_needs_its_axis(command, tmp_path):
  stacked = np.random.default_rng(0).normal(size=(8, 3, 4)).astype(np.float32)
  tree = {"target": {"encoder": {"mlp": {"wi": {"kernel": stacked}}}}}
  path = write_orbax(tmp_path / "checkpoint_1", tree)
  flags, axes = ["--rules", "{'ff': '1:4'}"], ["--axes", "{'.*/kernel': 0}"]
  code, text = command("verify", path, *flags)
  assert code == 1 and "(8, 3, 4)" in text and "axes=" in text
  _, report = command("verify", path, *flags, *axes)
  assert [(p["axis"], p["groups"]) for p in report["sites"]] == [(0, 2 * 3 * 4)]
  # What `finalize` notes has the axes, which other rules take over.
  assert not command("finalize", path, tmp_path / "out", *flags, *axes)[0]
  assert not command("verify", tmp_path / "out", "--rules", "{'ff': '2:4'}")[0]


# --- what can go wrong --------------------------------------------------------------------------


# tensorstore calls back from threads of its own, after Orbax has given up.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
  "kind, harm",
  [
    ("Orbax", lambda c: cut(c, "d/*")),
    ("T5X", lambda c: cut(c, "checkpoint")),
    ("T5X", lambda c: next(c.rglob("target*wo.kernel/0.0")).unlink()),  # zarr reads zeros
  ],
)
def test_damage_is_named_and_nothing_is_left(kind, harm, tmp_path):
  path = Run().write(tmp_path / "run", kind)
  harm(path)
  with pytest.raises(ValueError, match=f"{path}.* is damaged: "):
    nms.runs.finalize(path, tmp_path / "out")
  assert not (tmp_path / "out").exists()


def test_what_is_no_checkpoint_and_outputs_that_cannot_be(command, tmp_path):
  path = Run().write(tmp_path / "run")
  before = sorted(tmp_path.rglob("*"))
  for argv, word in (
    (["verify", tmp_path / "nowhere"], "there is no checkpoint"),
    (["finalize", path, tmp_path / "run"], "is there already"),
    (["finalize", path, "gs://bucket/x"], "on a local disk"),
  ):
    code, text = command(*argv)
    assert code == 1 and word in text and text.count("\n") == 1, text
  assert sorted(tmp_path.rglob("*")) == before


# --- memory ---------------------------------------------------------------------------------------

KERNELS = 12
MEASURED = f"""
import sys
import numpy as np
from nm_sparsity_jax import runs
from nm_sparsity_jax.runs import checkpoint

def peak():
  lines = open("/proc/self/status").read().splitlines()
  return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024

for count in (1, {KERNELS}):  # what is imported and compiled by the first does not count
  w = np.ones((1024, 1024), np.float32)
  folder = f"{{sys.argv[1]}}/{{count}}"
  arrays = {{f"target/mlp_{{i}}/wi/kernel": w for i in range(count)}}
  checkpoint.write(f"{{folder}}/checkpoint_1", arrays)
  open("/proc/self/clear_refs", "w").write("5")  # the peak begins anew
  before = peak()
  runs.verify(folder, {{".*": "1:4"}})
print(peak() - before)
"""


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux")
def test_verify_holds_one_array_at_a_time(tmp_path):
  # Else glibc keeps a heap for each thread.
  more = float(python("-c", MEASURED, tmp_path, MALLOC_ARENA_MAX="2"))
  assert more < 4 * KERNELS  # megabytes
