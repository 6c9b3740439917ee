"""CONTRIBUTING says how to add a recipe, a role and a command; here each is added to a copy."""

import os
import pathlib
import re
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]

RECIPE = '''\
"""A recipe that a newcomer writes."""

import dataclasses
from typing import ClassVar

from nm_sparsity_jax.patterns import NM
from nm_sparsity_jax.recipes.base import Recipe
from nm_sparsity_jax.schedules import Phases


@dataclasses.dataclass(frozen=True, kw_only=True)
class Yours(Recipe):
  """A hard mask of the target pattern: W~ = W * Phi."""

  name: ClassVar[str] = "yours"
  pattern: NM
  phases: Phases
'''

COMMAND = '''\
"""Says hello."""


def add_arguments(parser):
  parser.add_argument("name")


def run(args):
  print(f"hello {args.name}")
  return 0
'''

# In the copy: all three, then the conformance suite of the recipe.
PROGRAM = """
import sys
import jax.numpy as jnp
import nm_sparsity_jax as nms
from nm_sparsity_jax import cli, roles

print(nms.__file__)
recipe = nms.recipe("yours", pattern="1:4", phases=nms.Phases(total=4))
rules = nms.Rules({"yours": recipe})
params = {"yours": {"kernel": jnp.arange(16.0).reshape(8, 2) + 1}}
done = nms.finalize(params, rules)
print(nms.verify(done, rules).ok, int((done["yours"]["kernel"] != 0).sum()))
print(roles.role_of("yours/kernel"))
print(cli.main(["yours", "reader"]))
try:
  cli.main(["yours", "--help"])
except SystemExit as e:
  print("help", e.code)
import pytest
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-k", "yours",
                      "tests/test_every_recipe.py"]))
"""


def edit(path, old, new):
  """Puts `new` where `old` stands, once."""
  text = path.read_text("utf-8")
  assert text.count(old) == 1, f"{path.name}: {old!r}"
  path.write_text(text.replace(old, new))


def section():
  """What CONTRIBUTING says of it."""
  text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
  return re.search(r"^## To add .*?(?=^## |\Z)", text, re.DOTALL | re.MULTILINE)[0]


def test_a_newcomer_adds_a_recipe_a_role_and_a_command(tmp_path):
  ignored = shutil.ignore_patterns("__pycache__")
  shutil.copytree(ROOT / "nm_sparsity_jax", tmp_path / "nm_sparsity_jax", ignore=ignored)
  (tmp_path / "tests").mkdir()
  for name in ("tests/test_every_recipe.py", "tests/conftest.py", "pyproject.toml"):
    shutil.copy(ROOT / name, tmp_path / name)
  package, said = tmp_path / "nm_sparsity_jax", section()

  # A recipe: the class, the registry, the conformance suite.
  (package / "recipes/yours.py").write_text(RECIPE)
  registry = package / "recipes/registry.py"
  after = "from nm_sparsity_jax.schedules import Phases\n"
  edit(registry, after, f"from nm_sparsity_jax.recipes.yours import Yours\n{after}")
  edit(registry, "    Idp,\n)", "    Idp, Yours,\n)")
  line = "from nm_sparsity_jax.recipes.yours import Yours\n\n__all__ = [\n  'Yours',\n"
  edit(package / "recipes/__init__.py", "\n__all__ = [\n", line)
  suite = tmp_path / "tests/test_every_recipe.py"
  edit(suite, "CASES = {\n", 'CASES = {\n  "yours": Case(make("yours"), ((3, "1:4"),)),\n')
  changes = '  ("yours", "pattern"): "2:4",\n  ("yours", "phases"): SHORTER,\n'
  edit(suite, "CHANGES = {\n", f"CHANGES = {{\n{changes}")
  # A role.
  edit(package / "roles.py", '    name="t5",\n    roles={\n',
       '    name="t5",\n    roles={\n      "yours": r"(.*/)?yours/kernel",\n')  # fmt: skip
  # A command.
  (package / "commands/yours.py").write_text(COMMAND)
  edit(package / "cli.py", "COMMANDS = {\n", 'COMMANDS = {\n  "yours": ("yours", "say hello"),\n')

  for place in (
      "nm_sparsity_jax/recipes/", "registry.py", "`__init__.py`", "tests/test_every_recipe.py",
      "`CASES`", "`CHANGES`", "nm_sparsity_jax/roles.py", "nm_sparsity_jax/commands/",
      "nm_sparsity_jax/cli.py", "`COMMANDS`",
  ):  # fmt: skip
    assert place in said, place

  done = subprocess.run(
    [sys.executable, "-c", PROGRAM],
    cwd=tmp_path,
    env={**os.environ, "PYTHONPATH": str(tmp_path), "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"},
    capture_output=True,
    text=True,
    check=False,
  )
  assert not done.returncode, done.stdout[-3000:] + done.stderr[-3000:]
  first, *lines = done.stdout.splitlines()
  assert first == str(package / "__init__.py")
  assert lines[:4] == ["True 4", "yours", "hello reader", "0"]
  assert "usage: nm-sparsity yours [-h] [--debug] name" in done.stdout
  assert "Says hello." in done.stdout and "\nhelp 0\n" in done.stdout
  passed = re.search(r"(\d+) passed, \d+ deselected", done.stdout)
  assert passed and int(passed[1]) > 15, done.stdout[-300:]
