"""What is installed, read from metadata, and what a run depends on of a machine.

version("jax")               -> "0.10.2", or None
versions("Python", "jax")    -> {"Python": "3.11.7", "jax": "0.10.2"}
kernels()                    -> the library of C++ kernels, or why there is none
environment()                -> devices, cores, platform, versions: what bits depend on

Only `environment` imports something, jax.
"""

from __future__ import annotations

import collections
import ctypes
import functools
import importlib.metadata
import os
import pathlib
import platform

from nm_sparsity_jax._version import __version__

NAME = "nm-sparsity-jax"  # of this package, as pip knows it

# Of what the bits of a run depend on.
_TRAINS = (
  "Python", NAME, "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "seqio", "tensorflow",
  "numpy",
)  # fmt: skip


LIBRARY = "libnm_sparsity.so"  # the kernels of packed weights; setup.py builds it
KERNELS_VERSION = 1  # as in packed/native/job.h


@functools.cache
def kernels(folder: str = "") -> tuple[ctypes.CDLL | None, str]:
  """Returns (the library of kernels, ''), or (None, why it cannot be used)."""
  path = pathlib.Path(folder or pathlib.Path(__file__).parent / "packed") / LIBRARY
  again = "installing this package where g++ is builds it"
  try:
    library = ctypes.CDLL(str(path))
    number = library.nm_sparsity_version()
    library.nm_sparsity_isa.restype = ctypes.c_char_p
  except (OSError, AttributeError) as e:  # not there, of another machine, or something else
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


def cores() -> int:
  """Returns how many cores this process may use."""
  allowed = getattr(os, "sched_getaffinity", None)  # not there outside Linux
  return len(allowed(0)) if allowed else os.cpu_count() or 1


def environment() -> dict[str, str]:
  """Returns what the bits of a run depend on in addition to its settings: name -> value."""
  import jax

  kinds = collections.Counter(d.device_kind for d in jax.local_devices())
  found = {
    "devices": ", ".join(f"{n} x {kind}" for kind, n in kinds.items()),
    "cores": str(cores()),
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
