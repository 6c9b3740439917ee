"""What a resumed run must share with its beginning: settings.json, and how settings differ.

    Config.settings -> nested values -> [write] -> settings.json -> [refuse_changed]

A nested value is what JSON holds. `{"": "Model", "batch_size": 8}` stands for Model(batch_size=8):
"" holds the name of a class or function.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

from nm_sparsity_jax.runs import files, folders

_FILE = "settings.json"
_UNSET = "not set"


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
  """Yields the path and the value of each leaf, such as ('model.batch_size', 8)."""
  if isinstance(value, Mapping) and value:
    for key in sorted(value):
      yield from _leaves(".".join(filter(None, (path, key))), value[key])
  elif isinstance(value, list | tuple) and value:
    for i, x in enumerate(value):
      yield from _leaves(f"{path}[{i}]", x)
  else:
    yield path, value


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[tuple[str, str, str]]:
  """Returns what differs: its name, the old and the new value as texts.

  >>> differences({"seed": 1, "run": {"": "Run", "size": 8}}, {"run": {"": "Run", "size": 8}})
  [('seed', '1', 'not set')]

  Args:
    old: name -> nested value.
    new: the same, later.
  """
  before, now = ({path: repr(x) for path, x in _leaves("", values)} for values in (old, new))
  pairs = {path: (before.get(path, _UNSET), now.get(path, _UNSET)) for path in before | now}
  found = {path: pair for path, pair in pairs.items() if pair[0] != pair[1]}
  # Where another function stands, its arguments say nothing more.
  inside = lambda path: any(path.startswith((f"{p}.", f"{p}[")) for p in found)
  return [(path, *pair) for path, pair in sorted(found.items()) if not inside(path)]


def refuse_changed(folder: pathlib.Path, settings: Mapping[str, Any]) -> None:
  """Refuses to continue a run with other settings, or a run of another program.

  A run without a checkpoint may begin anew, with any settings.

  Args:
    folder: the run's; it may be missing.
    settings: name -> nested value.

  Raises:
    ValueError: names what differs, such as "random_seed was 0, and is 3".
  """
  if not folders.steps(folder):
    return
  before = files.read_json(folder / _FILE, None)
  if before is None:
    raise ValueError(
      f"{folder} holds checkpoints that another program wrote. Take an empty MODEL_DIR and name "
      "one of them as INITIAL_CHECKPOINT_PATH."
    )
  if found := differences(before, settings):
    what = "; ".join(f"{name} was {old}, and is {new}" for name, old, new in found)
    raise ValueError(
      f"the run in {folder} was started with other settings: {what}. Keep the old ones, or "
      "take another MODEL_DIR."
    )


def agree(folder: pathlib.Path, settings: Mapping[str, Any]) -> None:
  """Refuses a changed run; writes the settings of a new one, which has no checkpoint yet."""
  refuse_changed(folder, settings)
  if not folders.steps(folder):
    write(folder, settings)


def write(folder: pathlib.Path, settings: Mapping[str, Any]) -> None:
  """Writes settings.json.

  Args:
    folder: the run's.
    settings: name -> nested value.
  """
  files.write_atomically(folder / _FILE, json.dumps(settings, indent=1) + "\n")
