"""What a user may get wrong with parts of their own: an error of one sentence, by commands too."""

import dataclasses
import shutil

import jax.numpy as jnp
import pytest
import test_own_recipe

import nm_sparsity_jax as nms
from nm_sparsity_jax import cli
from nm_sparsity_jax.recipes import RECIPES
from nm_sparsity_jax.training import roles

RULES = nms.Rules({"ff": nms.recipe("sr_ste", pattern="1:4", phases=nms.Phases(total=9))})


def params_of(dtype="float32"):
  return {"mlp": {"wi": {"kernel": jnp.ones((8, 4), dtype)}}}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mine(nms.Recipe):
  name = "sr_ste"
  pattern: nms.NM
  phases: nms.Phases


@pytest.mark.parametrize(
  "word, do",
  [
    ("is taken", lambda: nms.recipes.register(Mine)),
    ("twice", lambda: roles.register(roles.Family(name="mine", roles={"encoder": ".*"}))),
  ],
)
def test_in_python(word, do):
  with pytest.raises(ValueError, match=word) as error:
    do()
  assert "\n" not in str(error.value)
  assert RECIPES["sr_ste"] is not Mine and "mine" not in roles.families()


MODULES = {
  "half_a_workload": (
    "from nm_sparsity_jax.trainer.workloads import Workload\nclass Half(Workload):\n"
    "  def init(self, rng): ...\n"
  ),
  "a_sparse_optimizer": (
    "import optax\nimport nm_sparsity_jax as nms\ndef adam():\n"
    "  recipe = nms.recipe('sr_ste', pattern='1:4', phases=nms.Phases(total=4))\n"
    "  return nms.sparse(optax.adam(0.1), nms.Rules({'hidden': recipe}))\n"
  ),
  "taken_recipe": test_own_recipe.RECIPE.replace('"soft"', '"sr_ste"').replace("Soft", "Mine"),
  "role_twice": (
    "from nm_sparsity_jax.training import roles\n"
    "roles.register(roles.Family(name='mine', roles={'encoder': '.*'}))\n"
  ),
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
    ("a_sparse_optimizer", "OPTIMIZER = @a_sparse_optimizer.adam()", WORKLOAD, "nms.sparse"),
    ("taken_recipe", "", [*WORKLOAD, *ADAM], "is taken"),
    ("role_twice", "", [*WORKLOAD, *ADAM], "twice"),
  ],
)
def test_by_gin(module, line, files, word, here, capsys):
  """plan counts one error, and train says it in one line before its first step."""
  (here / "mine.gin").write_text(HEAD.format(module=module) + line + "\n")
  macros = dict(RECIPE="sr_ste", PATTERN="1:4", SPARSE_STEPS=4, MODEL_DIR="run")
  argv = ["--gin_file=gin_configs/runs/local_workload.gin", *files, "--gin_file=mine.gin"]
  argv += [f"--gin.{k}={v!r}" for k, v in macros.items()]
  where = f"--gin_search_paths=.,{test_own_recipe.ROOT}"
  assert cli.main(["plan", where, *argv]) == 1
  told, refused = capsys.readouterr()
  assert ("\n1 error\n" in told and word in told) or (word in refused and refused.count("\n") == 1)
  assert cli.main(["train", *argv]) == 1
  (told,) = capsys.readouterr().err.splitlines()
  assert told.startswith("nm-sparsity train: ") and word in told
  assert not [*here.glob("run/checkpoint_*")]


@pytest.mark.parametrize("module, word", [("taken_recipe", "is taken"), ("role_twice", "twice")])
def test_by_the_flag(module, word, here, capsys):
  assert cli.main(["verify", "run", "--import", module]) == 1
  (told,) = capsys.readouterr().err.splitlines()
  assert module in told and word in told
