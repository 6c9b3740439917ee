"""Where a Python with Kauldron is, for tests: this one, KAULDRON_PYTHON, or .venv-kauldron."""

import functools
import importlib.metadata
import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
HOW = "`make kauldron` makes .venv-kauldron, or name one by KAULDRON_PYTHON"


@functools.cache
def python() -> str | None:
  """The interpreter whose Kauldron the tests run; None where there is none."""
  try:
    importlib.metadata.version("kauldron")
    return sys.executable
  except importlib.metadata.PackageNotFoundError:
    pass
  beside = os.environ.get("KAULDRON_PYTHON") or ROOT / ".venv-kauldron/bin/python"
  return str(beside) if pathlib.Path(beside).is_file() else None


@functools.cache
def why_not() -> str:
  """Why Kauldron's tests cannot run here; empty where they can."""
  if (found := python()) is None:
    return f"no Python with Kauldron is here: {HOW}"
  code = "from nm_sparsity_jax.integrations.kauldron import release; release.require()"
  env = {**os.environ, "PYTHONPATH": str(ROOT)}
  done = subprocess.run([found, "-c", code], capture_output=True, text=True, env=env, check=False)
  return done.stderr.strip().rpartition("\n")[2] if done.returncode else ""
