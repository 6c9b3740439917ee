"""The checkout, what is typed and run in it, and the lines of JSON that a run writes."""

import json
import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]


def gin_flags(files, macros, folders=(ROOT,)):
  """Flags for gin files, looked for in these folders, and for macros."""
  return [
    f"--gin_search_paths={','.join(map(str, folders))}",
    *(f"--gin_file={file}" for file in files),
    *(f"--gin.{name}={value!r}" for name, value in macros.items()),
  ]


def python(code, *arguments, flags=(), cwd=None, **environment):
  """What code prints in a new interpreter that sees the checkout."""
  env = os.environ | {"PYTHONPATH": str(ROOT)} | environment
  command = [sys.executable, *flags, "-c", code, *map(str, arguments)]
  done = subprocess.run(command, env=env, cwd=cwd, capture_output=True, text=True, check=False)
  assert not done.returncode, done.stderr[-3000:]
  return done.stdout


def read_lines(file):
  """What each line of a file says in JSON."""
  return [json.loads(line) for line in file.read_text("utf-8").splitlines()]
