"""Breaks the code on purpose, one place at a time, and sees that the named tests fail.

    python tests/mutations.py            all of tests/mutations.toml
    python tests/mutations.py masks      those whose name or file holds the word

Each mutation is applied to a copy of the checkout, so nothing here changes. A mutation that no test
notices is a survivor: the exit code is 1 then. `make test-slow` runs all of them.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence

ROOT = pathlib.Path(__file__).resolve().parents[1]
COPIED = ("nm_sparsity_jax", "t5x_tasks", "gin_configs", "tests", "examples", "pyproject.toml")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mutation:
  """One wrong edit, and who must notice it.

  Attributes:
    name: what is broken, in words.
    file: relative to the root of the checkout.
    old: a text that the file holds exactly once.
    new: what replaces it.
    tests: what pytest is given; at least one of these tests must fail.
  """

  name: str
  file: str
  old: str
  new: str
  tests: Sequence[str]

  def mistakes(self) -> list[str]:
    """Says what is wrong with the entry itself: the code may have moved on."""
    path = ROOT / self.file
    if not path.is_file():
      return [f"{self.name}: there is no file {self.file}"]
    found = path.read_text("utf-8").count(self.old)
    wrong = [] if found == 1 else [f"{self.name}: {self.file} holds its old text {found} times"]
    for test in self.tests:
      file, *names = test.split("::")
      text = (ROOT / file).read_text("utf-8") if (ROOT / file).is_file() else ""
      if not text or any(f"def {name.split('[')[0]}" not in text for name in names[-1:]):
        wrong.append(f"{self.name}: there is no test {test}")
    return wrong


def read() -> list[Mutation]:
  """Returns the mutations of tests/mutations.toml."""
  table = tomllib.loads((ROOT / "tests" / "mutations.toml").read_text("utf-8"))
  return [Mutation(**entry) for entry in table["mutation"]]


def survives(mutation: Mutation) -> str:
  """Applies a mutation to a copy and runs its tests; returns "" where one fails, else why not."""
  with tempfile.TemporaryDirectory() as folder:
    copy = pathlib.Path(folder)
    for name in COPIED:
      source = ROOT / name
      if source.is_dir():
        shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
      elif source.is_file():
        shutil.copy(source, copy / name)
    broken = copy / mutation.file
    broken.write_text(broken.read_text("utf-8").replace(mutation.old, mutation.new), "utf-8")
    ran = subprocess.run(
      [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *mutation.tests],
      cwd=copy,
      env={**os.environ, "PYTHONPATH": str(copy)},
      capture_output=True,
      text=True,
    )
  if ran.returncode == 1 and " failed" in ran.stdout:
    return ""
  last = (ran.stdout.strip() or ran.stderr.strip() or "no output").splitlines()[-1]
  return f"exit code {ran.returncode}: {last}"


def main(words: Sequence[str]) -> int:
  """Runs the mutations that the words choose; returns 1 where one survives."""
  chosen = [m for m in read() if not words or any(w in f"{m.name} {m.file}" for w in words)]
  survivors = 0
  for mutation in chosen:
    why = survives(mutation) if not (wrong := mutation.mistakes()) else "; ".join(wrong)
    survivors += bool(why)
    print(
      f"{'SURVIVES' if why else 'seen    '}  {mutation.name}{f' ({why})' if why else ''}",
      flush=True,
    )
  print(f"{len(chosen) - survivors} of {len(chosen)} mutations were seen")
  return 1 if survivors or not chosen else 0


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
