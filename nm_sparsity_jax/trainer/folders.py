"""The folder of a run: made, held by one process, and left as it was where the run is refused."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import pathlib
import shutil
from collections.abc import Iterator, Sequence

from nm_sparsity_jax.runs import files
from nm_sparsity_jax.runs import folders as run_folders


def of(model_dir: str, macro: str = "MODEL_DIR") -> pathlib.Path:
  """Returns the folder of a run, whether it exists or not; `macro` names it in errors."""
  if not isinstance(model_dir, str) or not model_dir.strip():
    raise ValueError(f"{macro}={model_dir!r}: name a folder, such as 'run'; '.' is this one.")
  if "://" in model_dir:
    raise ValueError(f"{macro}={model_dir!r}: the local runner writes to a local disk.")
  return pathlib.Path(model_dir).expanduser().absolute()


def make(model_dir: str, macro: str = "MODEL_DIR") -> pathlib.Path:
  """Makes the folder of a run, and checks that it is writable; `macro` names it in errors."""
  folder = of(model_dir, macro)
  try:
    folder.mkdir(parents=True, exist_ok=True)
    files.probe(folder)
  except OSError as e:
    raise ValueError(f"{macro}={model_dir!r} cannot be written to: {e.strerror or e}.") from e
  return folder


_NOTES = ("config.gin", "settings.json", "run.json")  # written before the first step


@dataclasses.dataclass(frozen=True)
class Before:
  """Knows what was there before a run made its folder and took its lock.

  Attributes:
    missing: the folder and those above it that were not there, the innermost first.
    locked: whether the folder had a file for the lock.
  """

  missing: Sequence[pathlib.Path]
  locked: bool

  @classmethod
  def of(cls, folder: pathlib.Path) -> Before:
    """Looks at a folder that may not be there yet."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    return cls(missing, (folder / ".lock").exists())


@contextlib.contextmanager
def as_it_was(folder: pathlib.Path, was: Before) -> Iterator[None]:
  """Leaves a folder as it was where a run is refused before its first step.

  Args:
    folder: of the run; this process holds its lock.
    was: what was there.
  """
  names = {path.name for path in folder.iterdir()} - (set() if was.locked else {".lock"})
  notes = {name: (folder / name).read_bytes() for name in _NOTES if name in names}
  try:
    yield
  except Exception:
    if not (folder / "train").exists():  # its curves: steps have been made
      for path in folder.iterdir():
        if path.name not in names:
          shutil.rmtree(path) if path.is_dir() else path.unlink()
      for name, content in notes.items():
        (folder / name).write_bytes(content)
      with contextlib.suppress(OSError):  # somebody else has put something there
        for path in was.missing:
          path.rmdir()
    raise


def refuse_run(folder: pathlib.Path, macro: str) -> None:
  """Refuses the folder of a run where an evaluation would write over its curves and config.gin."""
  ours = any((folder / name).exists() for name in ("run.json", "settings.json"))
  # t5x.eval writes model-info.txt too, but saves nothing.
  of_t5x = (folder / "model-info.txt").exists() and run_folders.latest(folder) is not None
  if ours or of_t5x:
    raise ValueError(
      f"{macro}={str(folder)!r} holds a run, whose curves and config.gin would be written over: "
      "take another folder."
    )


def taken(folder: pathlib.Path) -> str:
  """Says that another process writes to a folder."""
  return (
    f"{folder}: another process trains there. Wait until it ends, or end it (SIGTERM saves "
    "first); the same command continues from there."
  )


def is_no_room(error: BaseException) -> bool:
  """Returns True where a disk, a quota or a limit of file sizes is full."""
  import tensorflow as tf  # its errors are not Python's

  if isinstance(error, OSError):
    return error.errno in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)
  return isinstance(error, tf.errors.ResourceExhaustedError | tf.errors.OutOfRangeError)
