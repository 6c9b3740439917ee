"""Breaks the code on purpose, one place at a time, and sees that the named tests fail.

    python tests/mutations.py                    all of tests/mutations.toml
    python tests/mutations.py masks              those whose name or file holds the word
    python tests/mutations.py --after "a name"   those that come after it: goes on where you stopped

Each mutation is applied to a copy of the checkout, so nothing here changes, even if you stop it.
It prints the test that noticed. At the end the tests that noticed run once more, on a copy without
a mutation, where they must pass. A mutation that no test notices is a survivor: the exit code is 1
then. `make test-slow` runs all of them.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Sequence

ROOT = pathlib.Path(__file__).resolve().parents[1]
COPIED = (  # and all files beside them
  "nm_sparsity_jax", "t5x_tasks", "gin_configs", "tests", "examples", "docs", "benchmarks",
)  # fmt: skip
# What is compiled does not depend on the copy it is compiled in.
CACHE = {
  "JAX_COMPILATION_CACHE_DIR": str(pathlib.Path(tempfile.gettempdir()) / "nm-sparsity-mutations"),
  "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
}


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


@contextlib.contextmanager
def checkout() -> Iterator[pathlib.Path]:
  """Makes a copy of the checkout, with all that tests read, for a block."""
  with tempfile.TemporaryDirectory() as folder:
    for source in ROOT.iterdir():
      if source.is_dir() and source.name in COPIED:
        target = pathlib.Path(folder, source.name)
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
      elif source.is_file():
        shutil.copy(source, folder)
    yield pathlib.Path(folder)


def pytest(copy: pathlib.Path, *args: str) -> subprocess.CompletedProcess[str]:
  """Runs tests of a copy, slow ones too."""
  words = [sys.executable, "-m", "pytest", "-q", "-rfE", "-m", "", "-p", "no:cacheprovider"]
  env = {**CACHE, **os.environ, "PYTHONPATH": str(copy)}
  return subprocess.run([*words, *args], cwd=copy, env=env, capture_output=True, text=True)


def tried(mutation: Mutation) -> tuple[str, str]:
  """Applies a mutation to a copy and runs its tests.

  Returns:
    The test that failed, "" if none did, and then why not.
  """
  with checkout() as copy:
    broken = copy / mutation.file
    broken.write_text(broken.read_text("utf-8").replace(mutation.old, mutation.new), "utf-8")
    ran = pytest(copy, "-x", *mutation.tests)
  found = re.search(r"^(?:FAILED|ERROR) (\S+?\.py(?:::.*?)?)(?: - .*)?$", ran.stdout, re.MULTILINE)
  if ran.returncode == 1 and found:
    return found[1], ""
  last = (ran.stdout.strip() or ran.stderr.strip() or "no output").splitlines()[-1]
  return "", f"exit code {ran.returncode}: {last}"


def survives(mutation: Mutation) -> str:
  """Returns "" where a test notices a mutation, else why none did."""
  return tried(mutation)[1]


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the mutations that the words choose; returns 1 where one survives."""
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("words", nargs="*", help="only those whose name or file holds one of them")
  parser.add_argument("--after", metavar="NAME", help="only those that come after this one")
  args = parser.parse_args(argv)
  signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the copy is removed
  known = read()
  if args.after is not None:
    names = [m.name for m in known]
    if args.after not in names:
      parser.error(f"there is no mutation {args.after!r}: give a name of tests/mutations.toml")
    known = known[names.index(args.after) + 1 :]
  chosen = [
    m for m in known if not args.words or any(w in f"{m.name} {m.file}" for w in args.words)
  ]
  noticed, survivors = {}, 0
  for mutation in chosen:
    test, why = tried(mutation) if not (wrong := mutation.mistakes()) else ("", "; ".join(wrong))
    survivors += not test
    noticed.setdefault(test, mutation.name)
    word = "seen    " if test else "SURVIVES"
    print(f"{word}  {mutation.name} ({test or why})", flush=True)
  print(f"{len(chosen) - survivors} of {len(chosen)} mutations were seen")
  noticed.pop("", None)
  if noticed:
    with checkout() as copy:
      ran = pytest(copy, *noticed)
    said = ran.stdout.strip().splitlines()
    print(f"without a mutation these tests say: {said[-1] if said else ran.stderr.strip()}")
    survivors += ran.returncode != 0
    print("\n".join(line for line in said if line.startswith(("FAILED", "ERROR"))), end="")
  return 1 if survivors or not chosen else 0


if __name__ == "__main__":
  sys.exit(main())
