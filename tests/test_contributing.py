"""CONTRIBUTING says how to add a recipe, a role and a command; here each is added to a copy."""

import os
import pathlib
import re
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]

# In the copy: all three, then the conformance suite of the recipe, and tests that list all recipes.
PROGRAM = """
import subprocess
import sys
import jax.numpy as jnp
import nm_sparsity_jax as nms
from nm_sparsity_jax import cli, roles

print(nms.__file__)
recipe = nms.recipe("yours", pattern="1:4", phases=nms.Phases(total=4))
rules = nms.Rules({"yours": recipe})
params = {"yours": {"kernel": jnp.arange(16.0).reshape(8, 2) + 1}}
done = nms.finalize(params, rules, 4)
print(nms.verify(done, rules).ok, int((done["yours"]["kernel"] != 0).sum()))
print(roles.role_of("yours/kernel"))
print(cli.main(["yours", "reader"]))
try:
  cli.main(["yours", "--help"])
except SystemExit as e:
  print("help", e.code)
known = "yours or has_a_case or is_tested or the_names or registered or dense_phase_on"
words = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-k", known, "tests"]
sys.stdout.flush()
sys.exit(subprocess.call([sys.executable, "-m", "pytest", *words]))
"""


def section():
  """What CONTRIBUTING says of it."""
  text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
  return re.search(r"^## To add .*?(?=^## |\Z)", text, re.DOTALL | re.MULTILINE)[0]


def modules(text):
  """(file, code) of each block that is a new module: the text before it names the file."""
  return re.findall(r"`(\S+\.py)`:\n\n```python\n(.*?)```\n", text, re.DOTALL)


def lines(text):
  """(file, the line above, the new line) of each row of the tables."""
  return re.findall(r"^\| `(\S+\.py)` \| `(.+)` \| `(.+)` \|$", text, re.MULTILINE)


def add_line(path, above, new):
  """Writes a line below the one line that reads `above`, as far from the margin as it should be."""
  found = path.read_text("utf-8").splitlines(keepends=True)
  (at,) = [i for i, line in enumerate(found) if line.strip() == above]
  indent = len(found[at]) - len(found[at].lstrip()) + 2 * above.endswith(("{", "[", "("))
  found.insert(at + 1, f"{' ' * indent}{new}\n")
  path.write_text("".join(found))


def test_a_newcomer_adds_a_recipe_a_role_and_a_command(tmp_path):
  """Nothing is written but what CONTRIBUTING says."""
  ignored = shutil.ignore_patterns("__pycache__")
  shutil.copytree(ROOT / "nm_sparsity_jax", tmp_path / "nm_sparsity_jax", ignore=ignored)
  (tmp_path / "tests").mkdir()
  suite = "conftest", "test_every_recipe", "test_recipes", "test_registry"
  for name in (*(f"tests/{stem}.py" for stem in suite), "pyproject.toml"):
    shutil.copy(ROOT / name, tmp_path / name)
  package, said = tmp_path / "nm_sparsity_jax", section()

  written = modules(said)
  assert [name for name, _ in written] == [
    "nm_sparsity_jax/recipes/yours.py", "nm_sparsity_jax/cli/yours.py"
  ]  # fmt: skip
  for name, code in written:
    assert not (tmp_path / name).exists()
    (tmp_path / name).write_text(code)
  added = lines(said)
  assert len(added) == said.count("\n| `") == 3  # one each
  for name, above, new in added:
    add_line(tmp_path / name, above, new)

  done = subprocess.run(
    [sys.executable, "-c", PROGRAM],
    cwd=tmp_path,
    env={**os.environ, "PYTHONPATH": str(tmp_path)},
    capture_output=True,
    text=True,
    check=False,
  )
  assert not done.returncode, done.stdout[-3000:] + done.stderr[-3000:]
  first, *told = done.stdout.splitlines()
  assert first == str(package / "__init__.py")
  assert told[:4] == ["True 4", "yours", "hello reader", "0"]
  assert "usage: nm-sparsity yours [-h] [--debug] name" in done.stdout
  assert "Says hello." in done.stdout and "\nhelp 0\n" in done.stdout
  passed = re.search(r"(\d+) passed, \d+ deselected", done.stdout)
  assert passed and int(passed[1]) > 15, done.stdout[-300:]


def test_each_step_of_the_workflow_is_a_make_target():
  """Issue 13, point 20: what runs there also runs here, on every Python that setup.py names."""
  workflow = (ROOT / ".github/workflows/test.yml").read_text()
  targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
  steps = re.findall(r"- run: (.+)", workflow)
  assert len(steps) >= 9 and {step.split()[0] for step in steps} == {"make"}
  assert {step.split()[1] for step in steps} <= targets
  assert {"check", "test", "test-floors", "wheel"} <= {step.split()[1] for step in steps}
  newest = re.search(r"python: \[(.*)\]", workflow)[1]
  named = set(re.findall(r"\d\.\d+", newest))
  assert named == {"3.11", "3.12", "3.13"}
  setup = (ROOT / "setup.py").read_text()
  assert f'python_requires=">={min(named, key=lambda x: int(x[2:]))}' in setup
