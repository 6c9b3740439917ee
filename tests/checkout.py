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


def python(*words, cwd=None, timeout=600, **environment):
  """What Python prints with these words, in a process that sees the checkout."""
  done = subprocess.run(
    [sys.executable, *map(str, words)], cwd=cwd, timeout=timeout, check=False, text=True,
    capture_output=True, env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
  )  # fmt: skip
  assert not done.returncode, done.stdout[-3000:] + done.stderr[-3000:]
  return done.stdout


def read_lines(file):
  """What each line of a file says in JSON."""
  return [json.loads(line) for line in file.read_text("utf-8").splitlines()]
