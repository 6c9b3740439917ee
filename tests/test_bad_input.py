"""What a user may get wrong with parts of their own is one sentence of a command."""

import shutil

import pytest
import test_own_recipe

from nm_sparsity_jax import cli

MODULES = {
  "half_a_workload": (
    "from nm_sparsity_jax.trainer.workloads import Workload\nclass Half(Workload):\n"
    "  def init(self, rng): ...\n"
  ),
  "taken_recipe": test_own_recipe.RECIPE.replace('"soft"', '"sr_ste"').replace("Soft", "Mine"),
}
HEAD = "from __gin__ import dynamic_registration\nimport {module}\n"
WORKLOAD = ["--gin_file=own_workload.gin"]
ADAM = ["--gin_file=gin_configs/runs/local_adamw.gin"]


@pytest.fixture
def here(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  monkeypatch.syspath_prepend(str(tmp_path))
  for name in ("own_workload.py", "own_workload.gin"):
    shutil.copy(test_own_recipe.EXAMPLE / name, tmp_path)
  for name, code in MODULES.items():
    (tmp_path / f"{name}.py").write_text(code)
  return tmp_path


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
  "module, line, files, word",
  [
    ("half_a_workload", "WORKLOAD = @half_a_workload.Half()", ADAM, "abstract"),
    ("taken_recipe", "", [*WORKLOAD, *ADAM], "is taken"),
  ],
)
def test_by_gin(module, line, files, word, here, capsys):
  """plan names it, and train says it in one line before its first step."""
  (here / "mine.gin").write_text(HEAD.format(module=module) + line + "\n")
  macros = dict(RECIPE="sr_ste", PATTERN="1:4", SPARSE_STEPS=4, MODEL_DIR="run")
  argv = ["--gin_file=gin_configs/runs/local_workload.gin", *files, "--gin_file=mine.gin"]
  argv += [f"--gin.{k}={v!r}" for k, v in macros.items()]
  where = f"--gin_search_paths=.,{test_own_recipe.ROOT}"
  assert cli.main(["plan", where, *argv]) == 1
  assert word in "".join(capsys.readouterr())
  assert cli.main(["train", *argv]) == 1
  (said,) = capsys.readouterr().err.splitlines()
  assert said.startswith("nm-sparsity train: ") and word in said
  assert not [*here.glob("run/checkpoint_*")]
