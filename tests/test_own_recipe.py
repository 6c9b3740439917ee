"""A recipe that lives outside the package goes through every command as the package's own do.

The module lies in a folder of its own. A gin file imports it, or the flag --import names it.
"""

import html
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from nm_sparsity_jax import cli
from nm_sparsity_jax.analysis.sweep import grid
from nm_sparsity_jax.runs import checkpoint, folders

pytest.importorskip("clu", reason="the local runner needs clu: pip install -e '.[local]'")

ROOT = pathlib.Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples" / "own_workload"
STEPS = 24

RECIPE = '''\
"""A recipe whose deployed weights are scaled, and shrunk by what it stores."""

import dataclasses

import jax.numpy as jnp

import nm_sparsity_jax as nms


@nms.recipes.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class Soft(nms.Recipe):
  name = "soft"
  stateful = True
  pattern: nms.NM
  phases: nms.Phases
  scale: float = 1.0

  def levels(self, axis_size=None):
    return ((self.sparse_from, self.pattern),)

  def chosen(self, w, step, axis, stored):
    return stored

  def renewals(self, step):
    return jnp.asarray(step, jnp.int32)

  def first_state(self, groups, w):
    mask = groups.magnitude_mask(w, self.pattern)
    return {"mask": mask, "shift": jnp.min(jnp.where(mask, jnp.abs(w), jnp.inf)) / 2}

  def next_state(self, groups, state, w, step, last, grad, grad_at):
    return self.first_state(groups, w)

  def final(self, w, groups, state=None):
    shrunk = self.scale * w - jnp.sign(w) * state["shift"]
    return jnp.where(state["mask"], shrunk, jnp.zeros_like(w))
'''

GIN = """\
from __gin__ import dynamic_registration
import soft_recipe

RECIPE = 'soft'
RECIPE_FIELDS = {'scale': 2.0}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  """A folder with a recipe, a gin file that imports it, and the example's workload."""
  found = tmp_path_factory.mktemp("own")
  (found / "soft_recipe.py").write_text(RECIPE)
  (found / "soft.gin").write_text(GIN)
  for name in ("own_workload.py", "own_workload.gin"):
    shutil.copy(EXAMPLE / name, found)
  return found


def flags(run, *files, **macros):
  files = [f"gin_configs/runs/{run}.gin", "own_workload.gin", *files]
  return [*(f"--gin_file={f}" for f in files), *(f"--gin.{k}={v!r}" for k, v in macros.items())]


RULES = dict(PATTERN="1:8", SPARSE_STEPS=STEPS, DENSE_STEPS=4, FINETUNE_STEPS=4)
PERIODS = dict(EVAL_PERIOD=24, CHECKPOINT_PERIOD=4, STATS_PERIOD=8, METRICS_EVERY=None)
TRAIN = flags(
  "local_workload", "gin_configs/runs/local_adamw.gin", "soft.gin", **RULES, **PERIODS,
  MODEL_DIR="run", KEEP_CHECKPOINTS=None, LEARNING_RATE=0.01,
)  # fmt: skip


MODULES = ["--import", "own_workload", "--import", "soft_recipe"]  # the role, and the recipe


def begin(folder, *argv):
  """Starts a command in a folder, in a process that knows the package alone."""
  return subprocess.Popen(
    [sys.executable, "-m", "nm_sparsity_jax.cli", *argv], cwd=folder, text=True,
    stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    env={**os.environ, "PYTHONPATH": str(ROOT)},
  )  # fmt: skip


def typed(folder, *argv):
  """What a command says: its exit code, output and errors."""
  process = begin(folder, *argv)
  out, err = process.communicate()
  return process.returncode, out, err


@pytest.fixture(scope="module")
def trained(folder):
  """A run that was killed after its second checkpoint, and resumed by the same command."""
  process = begin(folder, "train", *TRAIN)
  while process.poll() is None and not folders.steps(folder / "run")[1:]:
    time.sleep(0.02)
  process.kill()
  process.communicate()
  assert process.returncode == -signal.SIGKILL
  assert folders.steps(folder / "run")[-1] < STEPS
  code, _, err = typed(folder, "train", *TRAIN)
  assert not code, err
  assert "from step 0 " not in err
  return folder


def test_it_is_planned(folder):
  search = f"--gin_search_paths=.,{ROOT}"
  code, out, err = typed(folder, "plan", "--json", search, *TRAIN)
  assert not code, out + err
  report = json.loads(out)
  assert {k["recipe"] for k in report["kernels"]["sparse"]} == {"soft"}


def test_killed_and_resumed_it_ends_with_its_own_deployed_weights(trained):
  """finalize writes `Recipe.final` of what the checkpoint keeps, and verify proves it."""
  code, out, err = typed(trained, "finalize", "run", "final", *MODULES)
  assert not code, out + err
  code, out, err = typed(trained, "verify", "final", "--json", *MODULES)
  assert not code, out + err
  found = json.loads(out)
  assert found["ok"] and len(found["places"]) == 2
  assert f"hidden: soft 1:8, total={STEPS}, dense=4, finetune=4, scale=2.0" in found["rules"]
  before = checkpoint.read(str(trained / f"run/checkpoint_{STEPS}"))
  after = checkpoint.read(str(trained / f"final/checkpoint_{STEPS}"))
  for name in ("hidden_0", "hidden_1"):
    w = before.array(f"target/{name}/kernel")
    groups = abs(w).reshape(-1, 8, w.shape[1])
    mask = (groups == groups.max(1, keepdims=True)).reshape(w.shape)
    shift = abs(w)[mask].min() / 2
    kept = before.array(f"flax_mutables/nm_sparsity/shift/{name}/kernel")
    np.testing.assert_allclose(kept, shift, rtol=1e-6)
    want = np.where(mask, 2 * w - np.sign(w) * shift, 0)
    np.testing.assert_allclose(after.array(f"target/{name}/kernel"), want, rtol=1e-6)


def test_without_the_module_one_line_names_recipe_or_role(trained, monkeypatch, capsys):
  monkeypatch.chdir(trained)
  for modules, unknown in ([], "--import MODULE"), (["soft_recipe"], "no parameter: 'hidden'"):
    code, _, err = typed(trained, "verify", "run", *(f"--import={name}" for name in modules))
    assert code == 1 and unknown in err
  assert cli.main(["report", "run", "--out", "without.html"]) == 0
  assert "which is not registered" in html.unescape((trained / "without.html").read_text())


SWEEP = (
  "out = 'sweep'\ngin_files = ['gin_configs/runs/local_workload.gin', 'own_workload.gin', "
  "'gin_configs/runs/local_adamw.gin']\nrecipes = ['idp']\npatterns = ['1:4']\nseeds = [0]\n"
  "[macros]\nSPARSE_STEPS = 4\nEVAL_PERIOD = 4\nMETRICS_EVERY = 4\n"
)


def test_a_sweep_hands_the_flag_to_its_runs(folder, monkeypatch):
  monkeypatch.chdir(folder)
  (folder / "known.toml").write_text(SWEEP)
  sweep = grid.read("known.toml", ["a.b", "c"])
  assert sweep.command(sweep.cells[0])[:3] == ["train", "--import=a.b", "--import=c"]


# --- the flag -----------------------------------------------------------------------------------

COMMANDS = {
  "train": ["--gin_file=x.gin"], "eval": ["--gin_file=x.gin"], "infer": ["--gin_file=x.gin"],
  "plan": ["--gin_file=x.gin"], "verify": ["x"], "finalize": ["x", "y"], "report": ["x"],
  "glue score": ["x"], "sweep": ["x.toml"], "export": ["x", "y"], "pack": ["x", "y.safetensors"],
  "bench": ["x", "--gin_file=x.gin"],
}  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_that_reads_rules_takes_it(command, tmp_path, monkeypatch, capsys):
  """Each imports the module before it reads anything, and says in one line why it cannot."""
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(sys, "path", list(sys.path))
  name = f"broken_{command.replace(' ', '_')}"
  (tmp_path / f"{name}.py").write_text("1 / 0\n")
  words = [*command.split(), *COMMANDS[command]]
  assert cli.main([*words, f"--import={name}"]) == 1
  err = capsys.readouterr().err
  assert f"--import {name}" in err and "ZeroDivisionError" in err and err.count("\n") == 1


def test_what_is_no_module_is_named(tmp_path, monkeypatch, capsys):
  monkeypatch.chdir(tmp_path)
  for name in ("lost.soft_recipe", "soft_recipe.py", "os;x"):
    assert cli.main(["verify", "x", f"--import={name}"]) == 1
    assert f"--import {name}: ModuleNotFoundError" in capsys.readouterr().err
