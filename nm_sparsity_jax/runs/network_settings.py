"""Network settings that shapes do not reveal, such as Swin's window: saved and compared.

run.json of the run of a checkpoint, or notes.json in a finalized one -> [read]  -> setting: number
config of the network that takes it                                   -> [check] -> ValueError
"""

from __future__ import annotations

from typing import Any

from nm_sparsity_jax.runs import files, folders
from nm_sparsity_jax.runs.stored import NOTES


def read(name: str) -> dict[str, int]:
  """Returns setting -> number, as saved when a checkpoint was made; empty where nobody did.

  Args:
    name: of its folder.
  """
  folder = folders.path_of(name)
  found = files.read_json(folder / NOTES, None)
  if found is None:
    found = files.read_json(folder.parent / "run.json", {}).get("workload") or {}
  return dict(found.get("network_settings", {}))


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
