"""CONTRIBUTING says how to add a recipe, a role and a command; here each is added to a copy."""

import functools
import re
import shutil

from checkout import ROOT, python

PROGRAM = """
import jax.numpy as jnp
import nm_sparsity_jax as nms
from nm_sparsity_jax import cli

rules = nms.Rules({"yours": nms.recipe("yours", pattern="1:4", phases=nms.Phases(total=4))})
params = {"yours": {"kernel": jnp.arange(16.0).reshape(8, 2) + 1}}
assert nms.roles.role_of("yours/kernel") == "yours"
assert nms.verify(nms.finalize(params, rules, 4), rules).ok
assert cli.main(["yours", "reader"]) == 0
"""


def test_a_newcomer_adds_a_recipe_a_role_and_a_command(tmp_path):
  """Nothing is written but what CONTRIBUTING says."""
  shutil.copytree(ROOT / "nm_sparsity_jax", tmp_path / "nm_sparsity_jax")
  (tmp_path / "tests").mkdir()
  for name in ("conftest", "reference_arrays", "test_every_recipe"):
    shutil.copy(ROOT / f"tests/{name}.py", tmp_path / "tests")
  shutil.copy(ROOT / "pyproject.toml", tmp_path)

  page = (ROOT / "CONTRIBUTING.md").read_text("utf-8").partition("## To add ")[2]
  modules = re.findall(r"`(\S+\.py)`:\n\n```python\n(.*?)```\n", page, re.DOTALL)
  lines = re.findall(r"^\| `(\S+\.py)` \| `(.+)` \| `(.+)` \|$", page, re.MULTILINE)
  assert len(modules) == 2 and len(lines) == 3
  for name, code in modules:
    (tmp_path / name).write_text(code)
  for name, above, new in lines:
    text = (tmp_path / name).read_text("utf-8")
    assert text.count(f"{above}\n") == 1, f"{name} lacks {above}"
    (tmp_path / name).write_text(text.replace(f"{above}\n", f"{above}\n{new}\n"))

  run = functools.partial(python, cwd=tmp_path, PYTHONPATH=str(tmp_path))
  assert "hello reader" in run("-c", PROGRAM)
  suite = run(
    "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-k", "yours", "tests"
  )
  assert int(re.search(r"(\d+) passed", suite)[1]) >= 5
