"""What no shape of a network tells, such as the window of a Swin V2: noted, and held against one.

run.json beside a checkpoint, or sha256.json in a finalized one -> [noted] -> setting: number
config of the network that takes it -> [refuse] -> ValueError
sha256.json in a finalized one -> [rules] -> text of the rules that somebody gave `finalize`
"""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any

from nm_sparsity_jax.runs import files, folders

_IN_RUN, _IN_CHECKPOINT = "run.json", "sha256.json"


def noted(name: str) -> dict[str, int]:
  """Returns setting -> number, as noted when a checkpoint was made; empty where nobody did.

  Args:
    name: of its folder.
  """
  folder = folders.path_of(name)
  if not isinstance(folder, pathlib.Path):  # a bucket, where no runner of ours writes
    return {}
  own = folder / _IN_CHECKPOINT
  file = own if own.is_file() else folder.parent / _IN_RUN
  found = files.read_json(file, {})
  within = found if file == own else found.get("workload")
  told = (within if isinstance(within, Mapping) else {}).get("untold", {})
  if not isinstance(told, Mapping) or not all(type(x) is int for x in told.values()):
    raise ValueError(f"{file} is damaged: under 'untold' it holds {told!r:.80}, not whole numbers.")
  return dict(told)


def rules(name: str) -> str | None:
  """Returns the text of the rules that somebody gave `finalize`; None where nobody did.

  A checkpoint of a sparse run keeps its rules as an array, and has no such note.

  Args:
    name: of its folder.
  """
  file = folders.path_of(name) / _IN_CHECKPOINT
  found = files.read_json(file, {}).get("rules")
  if not isinstance(found, str | None):
    raise ValueError(f"{file} is damaged: under 'rules' it holds {found!r:.80}, not a text.")
  return found


def refuse(name: str, config: Any) -> None:
  """Refuses a checkpoint of another network of the same shapes.

  Args:
    name: of its folder.
    config: of the network that takes it.

  Raises:
    ValueError: names the setting and both values.
  """
  for setting, there in noted(name).items():
    here = getattr(config, setting, there)
    if here != there:
      raise ValueError(
        f"{name} was trained with {setting}={there}, and this network has {setting}={here}, which "
        f"no shape tells: set {setting} of its config to {there}."
      )
