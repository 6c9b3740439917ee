"""The folder of a run or of an evaluation: held by one process, unmade where it is refused."""

from __future__ import annotations

import contextlib
import errno
import pathlib
from collections.abc import Iterator

from nm_sparsity_jax.runs import files, lock
from nm_sparsity_jax.runs import folders as run_folders


def of(model_dir: str, macro: str = "MODEL_DIR") -> pathlib.Path:
  """Returns the folder of a run, whether it exists or not; `macro` names it in errors."""
  if not isinstance(model_dir, str) or not model_dir.strip():
    raise ValueError(f"{macro}={model_dir!r}: name a folder, such as 'run'; '.' is this one.")
  if "://" in model_dir:
    raise ValueError(f"{macro}={model_dir!r}: the local runner writes to a local disk.")
  return pathlib.Path(model_dir).expanduser().absolute()


@contextlib.contextmanager
def held(folder: pathlib.Path, macro: str = "MODEL_DIR") -> Iterator[None]:
  """Makes a folder if need be, and locks it; removes it where the block fails and it is empty.

  Args:
    folder: of `of`.
    macro: names it in errors.

  Raises:
    ValueError: it cannot be written to, or another process holds it.
  """
  missing = [path for path in (folder, *folder.parents) if not path.exists()]
  try:
    folder.mkdir(parents=True, exist_ok=True)
    files.probe(folder)
  except OSError as e:
    raise ValueError(f"{macro}={str(folder)!r} cannot be written to: {e.strerror or e}.") from e
  had_lock = (folder / ".lock").exists()
  taken = (
    f"{folder}: another process trains there. Wait until it ends, or end it (SIGTERM saves "
    "first); the same command continues from there."
  )
  with lock.hold(folder, lambda _: taken):
    try:
      yield
    except Exception:
      if not had_lock and not (folder / "run.json").exists():
        (folder / ".lock").unlink()
      with contextlib.suppress(OSError):  # it is not empty
        for path in missing:
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


def is_no_room(error: BaseException) -> bool:
  """Returns True where a disk, a quota or a limit of file sizes is full."""
  import tensorflow as tf  # its errors are not Python's

  if isinstance(error, OSError):
    return error.errno in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)
  return isinstance(error, tf.errors.ResourceExhaustedError | tf.errors.OutOfRangeError)
