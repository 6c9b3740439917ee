"""Says what is missing or in conflict in this environment, and how to fix it.

It looks at installed metadata and imports neither jax, T5X nor TensorFlow. What you need depends on
what you do, so --for says which parts must be there:

  core    masks, rules and layers in your own training loop
  local   nm-sparsity quickstart, train, eval, plan, sweep and report, and SeqIO tasks
  t5x     t5x.train with our gin files (docs/t5x.md)
  tpu     a TPU's compiler that fits the installed jax (docs/tpu.md)

Each line is ok, BAD (to fix) or ! (slower than it could be).

Exit code: 0 = nothing is bad, 1 = something is.
"""

from __future__ import annotations

import argparse
import importlib.util
import pathlib
from collections.abc import Iterator
from typing import NamedTuple

from nm_sparsity_jax.core import installed
from nm_sparsity_jax.core.text import columns

# Not in the package index; docs/t5x.md has the commits that were tested.
UNPUBLISHED = ("t5x", "airio", "jestimator")
# Packages that write the same files as others: package -> those others.
_CONFLICTS = {
  "tensorflow-cpu": ("tensorflow",),
  "t5": ("seqio", "tensorflow-datasets"),
  "seqio-nightly": ("seqio",),
  "tfds-nightly": ("tensorflow-datasets",),
}


class Finding(NamedTuple):
  """One thing that was looked at: its status, its name, what was found, and what mends it."""

  status: str
  name: str
  text: str
  remedy: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Adds what must be there."""
  parser.add_argument(
    "--for", dest="purpose", choices=("core", "local", "t5x", "tpu"),
    help="what must be there; by default t5x where T5X is found, else core",
  )  # fmt: skip


def run(args: argparse.Namespace) -> int:
  """Prints the findings."""
  purpose = args.purpose or ("t5x" if folder_of("t5x") else "core")
  findings = list(examine(purpose))
  for line in columns([f[:3] for f in findings]):
    print(line)
  bad = [f for f in findings if f.status == "BAD"]
  for f in findings:
    if f.remedy:
      print(f"\n{f.name}: {f.remedy}")
  print(f"\n{len(bad)} to fix for {purpose}." if bad else f"\nReady for {purpose}.")
  return 1 if bad else 0


def install_command(purpose: str) -> str:
  """Returns the command that installs what a purpose needs, from a checkout where this is one.

  Args:
    purpose: what --for takes.
  """
  extra = "" if purpose == "core" else f"[{purpose}]"
  package = folder_of("nm_sparsity_jax")
  if package is None or not (package.parent / "setup.py").is_file():
    return f"pip install '{installed.NAME}{extra}'"
  return f"pip install -e '.{extra}' in {package.parent}"


def examine(purpose: str) -> Iterator[Finding]:
  """Yields what it finds of packages, conflicts and kernels.

  Args:
    purpose: what must be there: what --for takes.
  """
  if installed.version(installed.NAME) is None:
    text = "runs from a folder, but is not installed"
    yield Finding("BAD", installed.NAME, text, install_command("core"))
  yield from _required(installed.NAME, purpose, install_command(purpose))
  if purpose == "t5x":
    yield from map(_unpublished, UNPUBLISHED)
  if purpose == "tpu":  # jax says which jaxlib and libtpu it was released with
    yield from _required("jax", "tpu", f"pip install 'jax[tpu]=={installed.version('jax')}'")
  for name, others in _CONFLICTS.items():
    # Alone, such as tensorflow-cpu, it writes over nothing.
    if installed.version(name) and any(map(installed.version, others)):
      both, words = f"pip uninstall -y {name} {' '.join(others)}", " and ".join(others)
      text = f"writes the same files as {words}, and the last one wins"
      yield Finding("BAD", name, text, f"{both}; then pip install {' '.join(others)}")
  library, why = installed.kernels()
  if library is None:
    remedy = f"where g++ is, install this package again: {install_command('core')}"
    yield Finding("!", "packed kernels", why, remedy)  # XLA multiplies
  else:
    yield Finding("ok", "packed kernels", library.nm_sparsity_isa(0).decode())


def _required(distribution: str, extra: str, remedy: str) -> Iterator[Finding]:
  from packaging.requirements import Requirement

  requires = list(map(Requirement, installed.requires(distribution)))
  asked = lambda r, *extras: not r.marker or any(r.marker.evaluate({"extra": e}) for e in extras)
  # An extra of ours may have another: t5x has local.
  within = [e for r in requires if r.name == distribution and asked(r, extra) for e in r.extras]
  for found in requires:
    if found.name != distribution and asked(found, extra, *within):
      have, wanted = installed.version(found.name), found.specifier
      if have and wanted.contains(have, prereleases=True):
        yield Finding("ok", found.name, have)
      else:
        text = f"{have}, but {wanted} is needed" if have else "is not installed"
        yield Finding("BAD", found.name, text, remedy)


def _unpublished(name: str) -> Finding:
  if folder := folder_of(name):
    return Finding("ok", name, str(folder))
  return Finding("BAD", name, "is not installed", "install it from its source: docs/t5x.md")


def folder_of(module: str) -> pathlib.Path | None:
  """Returns the folder of a package without importing it, None where there is none.

  Args:
    module: such as 't5x'.
  """
  # find_spec imports nothing: jax and T5X take seconds.
  spec = importlib.util.find_spec(module)
  folders = spec.submodule_search_locations if spec else None
  return pathlib.Path(folders[0]) if folders else None
