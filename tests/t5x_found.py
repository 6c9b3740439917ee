"""Where T5X is, for tests: as installed, in T5X_PATH, or in ~/.cache/nm-sparsity/t5x."""

import asyncio
import contextlib
import importlib.util
import os
import pathlib
import sys
from unittest import mock

from checkout import ROOT, gin_flags

_THREE = ("t5x", "airio", "jestimator")
_HOME = pathlib.Path.home() / ".cache/nm-sparsity/t5x"
NEEDED = ("seqio", "tensorflow", "gin", "fiddle", "cached_property", "clu", "tensorstore", "orbax")


def paths() -> list[str]:
  """What `sys.path` lacks so that t5x, airio and jestimator can be imported."""
  if importlib.util.find_spec("t5x") is not None:
    return []
  return [str(folder() / name) for name in _THREE if (folder() / name).is_dir()]


def folder() -> pathlib.Path:
  """Where the checkouts lie beside each other."""
  return pathlib.Path(os.environ.get("T5X_PATH") or _HOME)


def why_not() -> str:
  """Why T5X cannot be imported here; empty where it can. Puts it on `sys.path`."""
  sys.path.extend(p for p in paths() if p not in sys.path)
  if importlib.util.find_spec("t5x") is None:
    return "T5X is not here: install it, or set T5X_PATH to a folder with t5x, airio and jestimator"
  missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
  return f"T5X needs {', '.join(missing)}: pip install -e '.[t5x]'" if missing else ""


@contextlib.contextmanager
def closed_loops():
  """Closes what T5X's legacy checkpointer leaves open: an event loop for each."""
  made, make = [], asyncio.new_event_loop
  with mock.patch.object(asyncio, "new_event_loop", lambda: made.append(make()) or made[-1]):
    yield
  asyncio.set_event_loop(None)
  for loop in made:
    if not loop.is_running():  # one that runs is another thread's, which uses it still
      loop.close()


def command_line(files, macros, devices=1) -> tuple[list[str], dict[str, str]]:
  """Flags of `python -m t5x.COMMAND` for gin files and macros, and the environment to run it in."""
  found = importlib.util.find_spec("t5x")
  assert found is not None and found.origin is not None
  here = [str(ROOT), str(ROOT / "tests")]
  flags = gin_flags(files, macros, [*here, pathlib.Path(found.origin).parents[1]])
  path = os.pathsep.join([*here, *filter(None, sys.path)])
  own = {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)}
  return flags, os.environ | own
