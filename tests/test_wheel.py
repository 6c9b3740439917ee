"""The wheel as a user meets it: in a new environment, and in an empty folder."""

import glob
import os
import pathlib
import re
import subprocess
import sys

import floors
import pytest
from checkout import ROOT


def run(*command, cwd):
  """Runs a command as a user would, far from this checkout."""
  env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "XLA_FLAGS")}
  done = subprocess.run(
    list(map(str, command)), cwd=cwd, env=env, capture_output=True, text=True, check=False
  )
  assert not done.returncode, done.stdout[-2000:] + done.stderr[-4000:]
  return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
  """The wheel that WHEEL names, or one of this checkout."""
  if named := os.environ.get("WHEEL"):
    return (ROOT / named).resolve(strict=True)
  folder = tmp_path_factory.mktemp("wheel")
  run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", folder, ".", cwd=ROOT)
  return pathlib.Path(*glob.glob(f"{folder}/*.whl"))


@pytest.mark.slow
def test_the_quickstart_runs_from_a_wheel_in_an_empty_folder(wheel, tmp_path):
  empty = tmp_path / "empty"
  empty.mkdir()
  run(sys.executable, "-m", "venv", tmp_path / "new", cwd=empty)
  programs = tmp_path / "new/bin"
  run(programs / "python", "-m", "pip", "install", "-q", f"{wheel}[local]", cwd=empty)
  ours = programs / "nm-sparsity"
  assert run(ours, "--version", cwd=empty) == "nm-sparsity 0.1.0\n"
  inside = pathlib.Path(run(ours, "gin-path", cwd=empty).strip())
  assert inside.is_relative_to(tmp_path) and (inside / "docs/quickstart.md").is_file()
  run(ours, "doctor", "--for", "local", cwd=empty)
  table = run(ours, "sweep", "examples/sweep_mini_glue.toml", "--table", cwd=empty)
  assert "0 of 54 runs" in table
  assert sorted(os.listdir(empty)) == []
  said = run(ours, "quickstart", cwd=empty)
  assert said.count("\nok\n") == 3 and (empty / "quickstart/curves.html").is_file()


def test_floors_are_what_the_package_asks_of_users():
  """`make test-floors` installs the oldest versions that users may have."""
  found = floors.floors()
  assert found["jax"] == "0.10.0" and found["clu"] == "0.0.12" and found["seqio"] == "0.0.20"
  assert "pytest" not in found and "mkdocs" not in found and "packaging" not in found


def test_ci_runs_every_trainer_and_pinned_actions():
  lists = {f.stem: f.read_text() for f in (ROOT / "tests/integrations").glob("*.txt")}
  named = re.findall(r"tests/integrations/\w+\.py", "".join(lists.values()))
  assert {str(f.relative_to(ROOT)) for f in ROOT.glob("tests/integrations/test_*")} <= {*named}
  flows = "".join(f.read_text() for f in (ROOT / ".github/workflows").iterdir())
  (matrix,) = re.findall(r"trainer: \[(.*)\]", flows)
  assert set(matrix.split(", ")) >= lists.keys()
  pinned = re.findall(r"uses: \S+@[0-9a-f]{40}  # v\d", flows)
  assert len(pinned) == flows.count("uses:") > 0
