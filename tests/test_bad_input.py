"""What a user may get wrong with parts of their own: each mistake is one sentence.

A sentence names the value, the rule and the fix. A command says the same, with exit code 1.
"""

import dataclasses
import re
import shutil

import jax.numpy as jnp
import optax
import pytest
import test_own_recipe

import nm_sparsity_jax as nms
from nm_sparsity_jax import cli, roles, workloads
from nm_sparsity_jax.recipes import RECIPES

PARAMS = {"mlp": {"wi": {"kernel": jnp.ones((8, 4))}}}
RULES = nms.Rules({"ff": nms.recipe("sr_ste", pattern="1:4", phases=nms.Phases(total=9))})

LACKS = (
  "Half lacks loss, batches and splits: define them. A workload needs init, loss, batches and "
  "splits (nm_sparsity_jax.workloads.Workload says what each does)."
)
NO_STATE = (
  "the optimizer state holds no state of nms.sparse: make the optimizer by tx = nms.sparse(tx, "
  "rules) and pass the state of that tx."
)
TWO = (
  "the optimizer state holds 2 states of nms.sparse, but each would count and act by itself: put "
  "one nms.sparse around the whole optimizer, nms.sparse(optax.chain(...), rules)."
)
TAKEN = "register(Mine): the name 'sr_ste' is taken by SrSte; give yours another name."
TWICE = (
  "roles: the family 'mine' defines 'encoder' twice: it is a word for paths already. Choose "
  "another word."
)
IN_RUNNER = (
  "the optimizer holds nms.sparse, but the runner wraps the optimizer itself: leave nms.sparse out."
)


class Half(workloads.Workload):
  def init(self, rng): ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mine(nms.Recipe):
  name = "sr_ste"
  pattern: nms.NM
  phases: nms.Phases

  def levels(self, axis_size=None):
    return ((0, self.pattern),)


def no_rules(call, got):
  return (
    f"{call} got a {got} as its rules: give nms.Rules, such as nms.Rules({{'.*/kernel': recipe}}), "
    "in that order of arguments."
  )


def of_dtype(dtype):
  return (
    f"'mlp/wi/kernel' has dtype {dtype}, and masks need real floating-point weights: leave it out "
    "of the rules, or convert it, such as w.astype(jnp.float32)."
  )


def torch(kernel):
  return nms.Rules({".*/kernel": RULES.places["ff"]}).assign({"a": {"kernel": kernel}})


EMPTY = (
  "there are no parameters in this dict, so the rules match none: give a tree of arrays, such as "
  "model.init(...)['params'] or nnx.state(model, nnx.Param)."
)


def two():
  ours = nms.sparse(optax.sgd(0.1), RULES)
  return optax.chain(ours, ours).init(PARAMS)


@pytest.mark.parametrize(
  "sentence, do",
  [
    (LACKS, lambda: workloads.of(Half())),
    (NO_STATE, lambda: nms.sparsify(PARAMS, RULES, optax.adam(0.1).init(PARAMS))),
    (NO_STATE, lambda: nms.finalize(PARAMS, RULES, optax.adam(0.1).init(PARAMS))),
    (TWO, lambda: nms.sparsify(PARAMS, RULES, two())),
    (TWO, lambda: nms.finalize(PARAMS, RULES, two())),
    (TWO, lambda: nms.step_count(two())),
    (TAKEN, lambda: nms.recipes.register(Mine)),
    (TWICE, lambda: roles.register(roles.Family(name="mine", roles={"encoder": ".*"}))),
    (
      "roles: the family 't5' is registered already; give yours another name.",
      lambda: roles.register(roles.Family(name="t5")),
    ),
    (
      no_rules("nms.sparsify(params, rules, opt)", "dict"),
      lambda: nms.sparsify(RULES, PARAMS, 3),
    ),
    (no_rules("nms.finalize(params, rules, opt)", "NoneType"), lambda: nms.finalize(PARAMS, None)),
    (no_rules("nms.verify(params, rules)", "dict"), lambda: nms.verify(PARAMS, RULES.places)),
    (no_rules("nms.init_state(params, rules)", "dict"), lambda: nms.init_state(RULES, PARAMS)),
    (no_rules("nms.sr_ste(rules)", "SrSte"), lambda: nms.sr_ste(RULES.places["ff"])),
    (
      no_rules("nms.step_count(opt, rules)", "int"),
      lambda: nms.step_count(nms.sparse(optax.sgd(0.1), RULES).init(PARAMS), 9),
    ),
    (
      "Rules(..., axes=0): give a dict, such as axes={'w1': 1}.",
      lambda: nms.Rules(RULES.places, axes=0),
    ),
    (
      r"Rules(..., roles='.*'): give a dict, such as roles={'hidden': r'.*/hidden_\d/kernel'}.",
      lambda: nms.Rules(RULES.places, roles=".*"),
    ),
    (EMPTY, lambda: RULES.assign({})),
    (
      of_dtype("int8"),
      lambda: nms.sparsify({"mlp": {"wi": {"kernel": jnp.ones((8, 4), "int8")}}}, RULES, 3),
    ),
    (
      of_dtype("complex64"),
      lambda: nms.finalize({"mlp": {"wi": {"kernel": jnp.ones((8, 4), "complex64")}}}, RULES, 9),
    ),
    (EMPTY, lambda: nms.sparse(optax.sgd(0.1), RULES).init({"a": {"kernel": [[1.0, 2.0]]}})),
    (
      "'a/kernel': axis 0 has length 6 (shape (6, 16)), no multiple of 4, so 1:4 cannot be "
      "applied. Choose another pattern for it, or Rules(..., indivisible='skip') (gin: "
      "INDIVISIBLE) to leave it dense, or 'pad'. If it is (out, in), as in torch, the axis is "
      "wrong: Rules(..., "
      "axes={'a/kernel': 1}).",
      lambda: torch(jnp.ones((6, 16))),
    ),
  ],
)
def test_in_python(sentence, do):
  with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
    do()
  assert RECIPES["sr_ste"] is not Mine and "mine" not in roles.families()


# --- the same by commands -----------------------------------------------------------------------

MODULES = {
  "half_a_workload": (
    "from nm_sparsity_jax.workloads import Workload\nclass Half(Workload):\n"
    "  def init(self, rng): ...\n"
  ),
  "two_sparse": (
    "import optax\nimport nm_sparsity_jax as nms\ndef adam():\n"
    "  recipe = nms.recipe('sr_ste', pattern='1:4', phases=nms.Phases(total=4))\n"
    "  return nms.sparse(optax.adam(0.1), nms.Rules({'hidden': recipe}))\n"
  ),
  "taken_recipe": test_own_recipe.RECIPE.replace('"soft"', '"sr_ste"').replace("Soft", "Mine"),
  "role_twice": (
    "from nm_sparsity_jax import roles\n"
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
  "module, line, files, sentence",
  [
    ("half_a_workload", "WORKLOAD = @half_a_workload.Half()", ADAM, LACKS),
    ("two_sparse", "OPTIMIZER = @two_sparse.adam()", WORKLOAD, IN_RUNNER),
    ("taken_recipe", "", [*WORKLOAD, *ADAM], TAKEN),
    ("role_twice", "", [*WORKLOAD, *ADAM], TWICE),
  ],
)
def test_by_gin(module, line, files, sentence, here, capsys):
  """plan counts one error, and train says the same sentence before its first step."""
  (here / "mine.gin").write_text(HEAD.format(module=module) + line + "\n")
  macros = dict(RECIPE="sr_ste", PATTERN="1:4", SPARSE_STEPS=4, MODEL_DIR="run")
  argv = ["--gin_file=gin_configs/runs/local_workload.gin", *files, "--gin_file=mine.gin"]
  argv += [f"--gin.{k}={v!r}" for k, v in macros.items()]
  named = ["--import=own_workload", f"--import={module}"]
  where = f"--gin_search_paths=.,{test_own_recipe.ROOT}"
  assert cli.main(["plan", where, *named, *argv]) == 1
  told, refused = capsys.readouterr()
  if files[0] == ADAM[0] or module == "two_sparse":
    assert "\n1 error\n" in told and sentence in told
  else:  # the module cannot be imported at all
    assert sentence.rstrip(".") in refused and refused.count("\n") == 1
  assert cli.main(["train", *argv]) == 1
  (told,) = capsys.readouterr().err.splitlines()
  assert told.startswith("nm-sparsity train: ") and sentence in told
  assert not [*here.glob("run/checkpoint_*")]


@pytest.mark.parametrize("module, sentence", [("taken_recipe", TAKEN), ("role_twice", TWICE)])
def test_by_the_flag(module, sentence, here, capsys):
  assert cli.main(["verify", "run", "--import", module]) == 1
  assert capsys.readouterr().err == (
    f"nm-sparsity verify: --import {module}: this module cannot be imported (ValueError: "
    f"{sentence.rstrip('.')}). Fix it first.\n"
  )
