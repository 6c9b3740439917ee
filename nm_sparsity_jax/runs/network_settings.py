"""Network settings that shapes do not reveal, such as Swin's window: saved and compared.

run.json beside a checkpoint, or notes.json in a finalized one -> [read]  -> setting: number
config of the network that takes it                            -> [check] -> ValueError
"""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any

from nm_sparsity_jax.runs import files, folders

NOTES = "notes.json"  # in a checkpoint of `checkpoint.write`
_OF_RUN = "run.json"


def read(name: str) -> dict[str, int]:
  """Returns setting -> number, as saved when a checkpoint was made; empty where nobody did.

  Args:
    name: of its folder.
  """
  folder = folders.path_of(name)
  if not isinstance(folder, pathlib.Path):  # a bucket, where no runner of ours writes
    return {}
  own = folder / NOTES
  file = own if own.is_file() else folder.parent / _OF_RUN
  found = files.read_json(file, {})
  within = found if file == own else found.get("workload")
  saved = (within if isinstance(within, Mapping) else {}).get("network_settings", {})
  if not isinstance(saved, Mapping) or not all(type(x) is int for x in saved.values()):
    raise ValueError(
      f"{file} is damaged: under 'network_settings' it holds {saved!r:.80}, not whole numbers."
    )
  return dict(saved)


def check(name: str, config: Any) -> None:
  """Refuses a checkpoint of another network of the same shapes.

  Args:
    name: of its folder.
    config: of the network that takes it.

  Raises:
    ValueError: names the setting and both values.
  """
  for setting, there in read(name).items():
    here = getattr(config, setting, there)
    if here != there:
      raise ValueError(
        f"{name} was trained with {setting}={there}, and this network has {setting}={here}, which "
        f"no shape tells: set {setting} of its config to {there}."
      )
