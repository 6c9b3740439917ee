"""What is installed, read from metadata, and what a run depends on of a machine.

version("jax")               -> "0.10.2", or None
versions("Python", "jax")    -> {"Python": "3.11.7", "jax": "0.10.2"}
folder_of("t5x")             -> the folder of a module
kernels()                    -> the library of C++ kernels, or why there is none
commit_of("t5x")             -> the git commit that it comes from, where that is known
environment()                -> devices, cores, platform, versions: what bits depend on

Only `environment` imports something, jax.
"""

from __future__ import annotations

import collections
import ctypes
import functools
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import platform
import re

from nm_sparsity_jax._version import __version__

NAME = "nm-sparsity-jax"  # of this package, as pip knows it

# Of what the bits of a run depend on.
_TRAINS = (
  "Python", NAME, "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "seqio", "tensorflow",
  "numpy",
)  # fmt: skip


LIBRARY = "libnm_sparsity.so"  # the kernels of packed weights; setup.py builds it
KERNELS_VERSION = 1  # as in packed/native/job.h


def kernels() -> tuple[ctypes.CDLL | None, str]:
  """Returns (the library of kernels, ''), or (None, why it cannot be used)."""
  return load_kernels(str(pathlib.Path(__file__).parent / "packed" / LIBRARY))


@functools.cache
def load_kernels(path: str) -> tuple[ctypes.CDLL | None, str]:
  """Returns what `kernels` does, of a library that lies at `path`."""
  again = "installing this package where g++ is builds it"
  if not pathlib.Path(path).is_file():
    return None, f"{LIBRARY} is not there: {again}"
  try:
    library = ctypes.CDLL(path)
    number = library.nm_sparsity_version()
    library.nm_sparsity_isa.restype = ctypes.c_char_p
  except (OSError, AttributeError) as e:  # of another machine, or something else
    return None, f"{LIBRARY} cannot be loaded ({e}): {again}"
  if number != KERNELS_VERSION:
    return None, f"{LIBRARY} is of version {number}, and {KERNELS_VERSION} is needed: {again}"
  return library, ""


def version(name: str) -> str | None:
  """Returns the version of a distribution, None where it is not installed.

  Args:
    name: what pip calls it, such as 'orbax-checkpoint'.
  """
  try:
    return importlib.metadata.version(name)
  except importlib.metadata.PackageNotFoundError:
    return None


def versions(*names: str) -> dict[str, str]:
  """Returns name -> version of what is installed, in the order of the names.

  >>> list(versions("nm-sparsity-jax", "Python", "no-such-package"))
  ['nm-sparsity-jax', 'Python']

  Args:
    names: distributions. 'Python' is the interpreter, and 'nm-sparsity-jax' the code that runs,
      which needs no installation.
  """
  known = {"Python": platform.python_version(), NAME: __version__}
  found = {name: known.get(name) or version(name) for name in names}
  return {name: text for name, text in found.items() if text is not None}


def environment() -> dict[str, str]:
  """Returns what the bits of a run depend on, beside its settings: name -> value."""
  import jax

  kinds = collections.Counter(d.device_kind for d in jax.local_devices())
  cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
  found = {
    "devices": ", ".join(f"{n} x {kind}" for kind, n in kinds.items()),
    "cores": str(cores),
    "platform": platform.platform(),
  }
  found |= versions(*_TRAINS)
  return found | {k: os.environ[k] for k in ("XLA_FLAGS", "PJRT_NPROC") if os.environ.get(k)}


def requires(name: str) -> list[str]:
  """Returns the requirements of a distribution, from its metadata; [] without any."""
  try:
    return importlib.metadata.requires(name) or []
  except importlib.metadata.PackageNotFoundError:
    return []


def required_for(name: str, extra: str) -> dict[str, str]:
  """Returns name -> specifiers of what only an extra of a distribution requires.

  Args:
    name: the distribution.
    extra: such as 'tpu'.
  """
  from packaging.requirements import Requirement

  wanted = map(Requirement, requires(name))
  return {
    r.name: str(r.specifier) for r in wanted if r.marker and r.marker.evaluate({"extra": extra})
  }


def meets(have: str, wanted: str) -> bool:
  """Returns whether a version meets a requirement; a release candidate counts as its release.

  >>> meets("0.10.2", ">=0.9"), meets("2.1rc1", ">=2.1"), meets("2.0", ">=2.1,<3")
  (True, True, False)

  Args:
    have: a version. One that is none by PEP 440 meets nothing but "".
    wanted: specifiers such as '>=1.2,<2'; "" is any version.
  """
  from packaging.specifiers import SpecifierSet
  from packaging.version import InvalidVersion, Version

  try:
    return not wanted or Version(have).base_version in SpecifierSet(wanted)
  except InvalidVersion:
    return False


def origin(name: str) -> dict:
  """Returns pip's note on where a distribution comes from (PEP 610); {} without one."""
  try:
    text = importlib.metadata.distribution(name).read_text("direct_url.json")
  except importlib.metadata.PackageNotFoundError:
    return {}
  return json.loads(text or "{}")


def folder_of(module: str) -> pathlib.Path | None:
  """Returns the folder of a top-level module without importing it, None where there is none."""
  try:
    spec = importlib.util.find_spec(module)
  except (ImportError, ValueError):
    return None
  if spec is None:
    return None
  if spec.origin and spec.origin not in ("built-in", "frozen"):
    return pathlib.Path(spec.origin).parent
  places = list(spec.submodule_search_locations or ())
  return pathlib.Path(places[0]) if places else None


def commit_of(name: str) -> str | None:
  """Returns the commit of an installation by pip from git, or of a checkout; None if unknown.

  Args:
    name: a distribution whose module has the same name.
  """
  if commit := origin(name).get("vcs_info", {}).get("commit_id"):
    return commit
  folder = folder_of(name)
  return None if folder is None else _commit_of_checkout(folder.parent / ".git")


def _commit_of_checkout(git: pathlib.Path) -> str | None:
  # By its files: git may not be installed, and asking it starts a process.
  try:
    head = (git / "HEAD").read_text().strip()
    if not head.startswith("ref: "):
      return head
    ref = head.removeprefix("ref: ")
    if (git / ref).is_file():
      return (git / ref).read_text().strip()
    packed = (git / "packed-refs").read_text()
  except OSError:
    return None
  found = re.search(rf"^([0-9a-f]{{40}}) {re.escape(ref)}$", packed, re.MULTILINE)
  return found[1] if found else None
