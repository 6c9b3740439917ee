"""What a resumed run must share with its beginning: settings.json.

    Config.settings -> nested values -> [write] -> settings.json -> [refuse_changed]

A nested value is what JSON holds. `{"": "Model", "batch_size": 8}` stands for Model(batch_size=8):
"" holds the name of a class or function.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping
from typing import Any

from nm_sparsity_jax.core.trees import flatten
from nm_sparsity_jax.runs import files, folders

_FILE = "settings.json"


def refuse_changed(folder: pathlib.Path, settings: Mapping[str, Any]) -> None:
  """Refuses to continue a run with other settings, or a run of another program.

  A run without a checkpoint may begin anew, with any settings.

  Args:
    folder: the run's; it may be missing.
    settings: name -> nested value.

  Raises:
    ValueError: names what differs, such as "random_seed was 0, and is 3".
  """
  if not folders.steps(folder):  # nothing would be continued
    return
  before = files.read_json(folder / _FILE, None)
  if before is None:
    raise ValueError(
      f"{folder} holds checkpoints that another program wrote. Take an empty MODEL_DIR and name "
      "one of them as INITIAL_CHECKPOINT_PATH."
    )
  leaves = lambda tree: flatten(tree, lambda x: x is None or x in ({}, []))  # jax has no such leaf
  old, new = ({k.rstrip("/"): repr(x) for k, x in leaves(tree)} for tree in (before, settings))
  said = [
    f"{name} was {old.get(name, 'not set')}, and is {new.get(name, 'not set')}"
    for name in sorted(old | new)
    if old.get(name) != new.get(name)
  ]
  if said:
    raise ValueError(
      f"the run in {folder} was started with other settings: {'; '.join(said)}. Keep the old ones, "
      "or take another MODEL_DIR."
    )


def write(folder: pathlib.Path, settings: Mapping[str, Any]) -> None:
  """Writes settings.json.

  Args:
    folder: the run's.
    settings: name -> nested value.
  """
  files.write_atomically(folder / _FILE, json.dumps(settings, indent=1) + "\n")
