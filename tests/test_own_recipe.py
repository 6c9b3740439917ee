"""A recipe that lives outside the package goes through every command as the package's own do.

The module lies in a folder of its own. A gin file imports it, or the flag --import names it.
"""

import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
from checkout import ROOT, gin_flags

from nm_sparsity_jax import cli
from nm_sparsity_jax.analysis import charts
from nm_sparsity_jax.runs import checkpoint

pytest.importorskip("tensorboard", reason="pip install -e '.[local]'")

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

  def renewals_due(self, step):
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


FILES = (
  "gin_configs/runs/local_workload.gin", "own_workload.gin", "gin_configs/runs/local_adamw.gin",
  "soft.gin",
)  # fmt: skip
TRAIN = gin_flags(FILES, dict(
  PATTERN="1:8", SPARSE_STEPS=STEPS, DENSE_STEPS=4, FINETUNE_STEPS=4, EVAL_PERIOD=24,
  CHECKPOINT_PERIOD=12, METRICS_EVERY=None, MODEL_DIR="run", LEARNING_RATE=0.01,
), (".", ROOT))  # fmt: skip
MODULES = ["--import", "own_workload", "--import", "soft_recipe"]  # the role, and the recipe


def typed(folder, *commands):
  """Runs commands in one process that knows the package alone: exit codes, output and errors."""
  code = f"from nm_sparsity_jax import cli\nprint([cli.main(argv) for argv in {commands!r}])"
  done = subprocess.run(
    [sys.executable, "-c", code], cwd=folder, text=True,
    capture_output=True, env={**os.environ, "PYTHONPATH": str(ROOT)},
  )  # fmt: skip
  out, _, codes = done.stdout.rstrip().rpartition("\n")
  return json.loads(codes or "null"), out, done.stderr


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
  """A folder with a recipe, a gin file that imports it, the example's workload, and a run."""
  folder = tmp_path_factory.mktemp("own")
  (folder / "soft_recipe.py").write_text(RECIPE)
  (folder / "soft.gin").write_text(GIN)
  for name in ("own_workload.py", "own_workload.gin"):
    shutil.copy(ROOT / "examples" / "own_workload" / name, folder)
  codes, out, err = typed(folder, ["plan", "--json", *TRAIN], ["train", *TRAIN])
  assert codes == [0, 0], out + err
  assert {part["recipe"] for part in json.loads(out)["schedule"]} == {"soft"}
  return folder


def test_it_ends_with_its_own_deployed_weights(trained):
  """finalize writes `Recipe.final` of what the checkpoint keeps, and verify proves it."""
  commands = ["finalize", "run", "final", *MODULES], ["verify", "final", *MODULES]
  codes, out, err = typed(trained, *commands)
  assert codes == [0, 0], out + err
  before, after = (checkpoint.read(str(trained / name / f"checkpoint_{STEPS}"))
                   for name in ("run", "final"))  # fmt: skip
  for name in ("hidden_0", "hidden_1"):
    w = before.array(f"target/{name}/kernel")
    groups = abs(w).reshape(-1, 8, w.shape[1])
    mask = (groups == groups.max(1, keepdims=True)).reshape(w.shape)
    shift = abs(w)[mask].min() / 2
    kept = before.array(f"flax_mutables/nm_sparsity/shift/{name}/kernel")
    np.testing.assert_allclose(kept, shift, rtol=1e-6)
    want = np.where(mask, 2 * w - np.sign(w) * shift, 0)
    np.testing.assert_allclose(after.array(f"target/{name}/kernel"), want, rtol=1e-6)


def test_without_the_module_one_line_names_recipe_or_role(trained, monkeypatch):
  monkeypatch.chdir(trained)
  codes, _, err = typed(trained, ["verify", "run"], ["verify", "run", "--import=soft_recipe"])
  recipe, role = err.splitlines()
  assert codes == [1, 1] and "--import MODULE" in recipe and "none that is left: 'hidden'" in role
  monkeypatch.setattr(charts, "svg", lambda chart: b"")  # tests/test_report.py draws
  assert cli.main(["report", "run", "--out", "without.html"]) == 0


COMMANDS = (
  "train --gin_file=x.gin", "eval --gin_file=x.gin", "infer --gin_file=x.gin",
  "plan --gin_file=x.gin", "verify x", "finalize x y", "report x", "glue score x", "sweep x.toml",
  "export x y", "pack x y.safetensors", "bench x --gin_file=x.gin",
)  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_that_reads_rules_imports_a_module_before_it_reads(
  command, tmp_path, monkeypatch, capsys
):
  monkeypatch.chdir(tmp_path)
  monkeypatch.syspath_prepend(tmp_path)
  name = f"broken_{command.split()[0]}"
  (tmp_path / f"{name}.py").write_text("1 / 0\n")
  assert cli.main([*command.split(), f"--import={name}"]) == 1
  err = capsys.readouterr().err
  assert f"--import {name}" in err and "ZeroDivisionError" in err and err.count("\n") == 1
