"""The folder of a run or of an evaluation, held by one process."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Iterator

from nm_sparsity_jax.runs import files, lock
from nm_sparsity_jax.runs import folders as run_folders


def of(model_dir: str, macro: str = "MODEL_DIR") -> pathlib.Path:
  """Returns the folder of a run, whether it exists or not; `macro` names it in errors."""
  if not model_dir.strip() or "://" in model_dir:
    raise ValueError(f"{macro}={model_dir!r}: name a folder of this machine, such as 'run'.")
  return pathlib.Path(model_dir).expanduser().absolute()


@contextlib.contextmanager
def held(folder: pathlib.Path, macro: str = "MODEL_DIR") -> Iterator[None]:
  """Makes a folder if need be, and locks it against other processes."""
  files.check_folder(macro, folder)
  # Two processes would remove the checkpoints that the other is writing.
  taken = (
    f"{folder}: another process trains there. Wait until it ends, or end it (SIGTERM saves "
    "first); the same command continues from there."
  )
  with lock.hold(folder, lambda _: taken):
    yield


def refuse_run(folder: pathlib.Path, macro: str) -> None:
  """Refuses the folder of a run where an evaluation would write over its curves and config.gin."""
  # A run of T5X has no run.json, and a new run of ours no checkpoint.
  if (folder / "run.json").exists() or run_folders.latest(folder) is not None:
    raise ValueError(f"{macro}={str(folder)!r} holds a run: take another folder.")
