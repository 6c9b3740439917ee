"""What lies in a run's folder, by name: which checkpoints, which of them is the newest.

    MODEL_DIR/checkpoint_1000/state/_METADATA    Orbax: T5X and the local runner
    MODEL_DIR/checkpoint_1000/checkpoint         T5X's own format
    WORKDIR/checkpoints/ckpt_1000/default/       Kauldron's, by Orbax
    MODEL_DIR/evaluations.json                   the local runner: losses and metrics, by step

A checkpoint is a folder checkpoint_N, N as Python writes it, that holds what either format begins
with. An empty folder and a dangling link do not count.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import os
import pathlib
import re
from collections.abc import Sequence
from typing import Any

from nm_sparsity_jax.runs import files

_NAME = re.compile(r"(?:checkpoint|ckpt)_(0|[1-9][0-9]*)")  # Kauldron's: ckpt_1000


def path_of(name: str | os.PathLike) -> Any:
  """Returns an absolute path; one of `etils.epath` for a URL such as 'gs://bucket/run'."""
  name = os.fspath(name)
  if "://" in name:
    from etils import epath

    return epath.Path(name)
  # Orbax finds no array below a relative path, and does not say so.
  return pathlib.Path(os.path.abspath(name))


def latest(folder: str | os.PathLike) -> str | None:
  """Returns the newest checkpoint in a folder, None where there is none.

  >>> import tempfile
  >>> latest(tempfile.mkdtemp()) is None
  True
  """
  for inside in ("", "checkpoints"):  # where Kauldron's lie
    path = path_of(folder) / inside
    for _, name in reversed(_named(path)):
      if contents(path / name):
        return os.path.join(folder, inside, name)
  return None


def _named(path: Any) -> list[tuple[int, str]]:
  """Returns (step, name) of what is named as a checkpoint, ascending, whatever is in it."""
  names = [child.name for child in path.iterdir()] if path.is_dir() else []
  return sorted((int(found[1]), name) for name in names if (found := _NAME.fullmatch(name)))


def named_step(checkpoint: str) -> int | None:
  """Reads the step in a checkpoint's name; None where it has none.

  >>> named_step("gs://bucket/run/checkpoint_1000"), named_step("run/checkpoint_0058")
  (1000, None)
  """
  found = _NAME.fullmatch(checkpoint.rstrip("/").rpartition("/")[2])
  return int(found[1]) if found else None


def contents(checkpoint: Any) -> tuple[str, Any] | None:
  """Returns the format of a checkpoint, and what its reader opens; None where it is none.

  T5X's own format has a file. Orbax reads the folder state/, Kauldron's default/, or the
  checkpoint's folder itself.

  Args:
    checkpoint: a path of `path_of`, its folder.
  """
  # A link that leads nowhere is no file, and a folder that a kill left empty holds none.
  own = checkpoint / "checkpoint"
  if own.is_file():
    return "T5X", own
  inside = (checkpoint / "state", checkpoint / "default", checkpoint)
  return next((("Orbax", p) for p in inside if (p / "_METADATA").is_file()), None)


def steps(folder: str | os.PathLike) -> Sequence[int]:
  """Returns the steps of the complete checkpoints of a run by Orbax, ascending.

  Orbax gives a folder its name when it is complete, so a kill leaves no half of one.
  """
  path = path_of(folder)
  return [step for step, name in _named(path) if (path / name / "state" / "_METADATA").is_file()]


def evaluations(folder: str | os.PathLike) -> dict[int, dict[str, Any]]:
  """Reads what the local runner noted of its evaluations: step -> entry."""
  file = pathlib.Path(folder) / "evaluations.json"
  noted = files.read_json(file, [])
  with files.named(file):
    return {int(entry["step"]): entry for entry in noted}
