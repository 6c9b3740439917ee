"""Programs that an earlier `make test` compiled: with them the next one takes half of the time.

jax names a program by its code, its options and the versions, so a change of the code that matters
gives another name. A worker has a folder of its own, since jax writes a file in place and another
worker could read a part of it. At the start it gets what the store has; at the end the store gets
what is new. A run that is killed gives it nothing. Between two files of tests the workers of one
run give each other what they compiled (`Exchange`).

NM_TEST_PROGRAMS names the store; an empty value is for none.
"""

import contextlib
import hashlib
import os
import pathlib
import platform
import shutil

from jax._src import compilation_cache  # no public name says whether an entry is whole

MOST = 2**30  # bytes; then the store begins anew


def machine():
  """A name for this kind of processor: a program may use what another one lacks."""
  with contextlib.suppress(OSError):
    lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    features = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return hashlib.sha256(features.encode()).hexdigest()[:16]
  return platform.machine()


def store():
  """Returns the folder of programs of earlier runs, or None where there is to be none."""
  named = os.environ.get("NM_TEST_PROGRAMS", "~/.cache/nm-sparsity/programs")
  return pathlib.Path(named).expanduser() / machine() if named else None


def take(folder):
  """Puts what the store has into `folder`."""
  folder.mkdir(parents=True, exist_ok=True)
  if (kept := store()) is None or not kept.is_dir():
    return
  for entry in kept.glob("*-cache"):
    target = folder / entry.name
    with contextlib.suppress(FileNotFoundError):  # the store begins anew
      try:
        os.link(entry, target)
      except OSError:  # on another disk
        shutil.copyfile(entry, target)


class Exchange:
  """What the folders of one run give each other: a program is compiled by one of them alone.

  Args:
    place: a folder that all workers of a run know.
    folders: those of this worker.
  """

  def __init__(self, place, folders):
    self.place, self.folders = place, [(folder, set()) for folder in folders]
    place.mkdir(parents=True, exist_ok=True)

  def meet(self):
    """Puts what is new in the folders into the place, and then the other way round."""
    for folder, known in self.folders:
      for name in _names(folder) - known:
        known.add(name)
        target = self.place / name
        if not target.exists() and whole(folder / name):
          with contextlib.suppress(FileExistsError):  # another worker was faster
            os.link(folder / name, target)
    for folder, known in self.folders:
      for name in _names(self.place) - known:
        known.add(name)
        with contextlib.suppress(FileExistsError):  # a part, of a process that was killed
          os.link(self.place / name, folder / name)


def _names(folder):
  return {entry.name for entry in os.scandir(folder) if entry.name.endswith("-cache")}


def give(folder):
  """Puts what is new in `folder` into the store, each file whole or not at all."""
  if (kept := store()) is None:
    return
  with contextlib.suppress(OSError):  # a home that cannot be written to
    kept.mkdir(parents=True, exist_ok=True)
    if sum(entry.stat().st_size for entry in kept.iterdir()) > MOST:
      shutil.rmtree(kept)
      kept.mkdir()
    for entry in folder.glob("*-cache"):
      if not (kept / entry.name).exists() and whole(entry):
        part = kept / f"{entry.name}.{os.getpid()}"
        shutil.copyfile(entry, part)
        part.replace(kept / entry.name)


def whole(entry):
  """Says whether a file has its end: a process that was killed may have written a part."""
  read, written = compilation_cache.decompress_executable, entry.read_bytes()
  try:
    read(written)
  except Exception:  # of whichever library compressed it
    return False
  return True
