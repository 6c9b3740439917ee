"""What a resumed run must share with its beginning: settings.json, and how settings differ.

    Config.settings -> nested values -> [write] -> settings.json -> [changed] -> a sentence

A nested value is a number, a text, a bool, None, a list, or a dict:

    {"ff": "1:8"}                      a dictionary
    {"": "Model", "batch_size": 8}     Model(batch_size=8): "" holds the name
    {"": "{}", "512": 2}               a dictionary with keys that are no texts, by their `repr`
    {"": "=", "text": "b'x'"}          any other value, by its `repr`
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

from nm_sparsity_jax.runs import files, folders

_FILE = "settings.json"
_UNSET = {"": "=", "text": "not set"}
_MACROS = {"optimizer": "OPTIMIZER"}  # another function as a whole: a file binds the macro
_SHOWN = 6  # differences that a message names


def text(value: Any) -> str:
  """Returns a nested value as one line of Python-like text, for messages.

  >>> text({"": "Source", "name": "rte", "sizes": [8, 4]})
  "Source(name='rte', sizes=(8, 4))"
  """
  if isinstance(value, list | tuple):
    return f"({', '.join(map(text, value))})"
  if not isinstance(value, Mapping):
    return repr(value)
  kind = value.get("")
  inside = [(k, text(value[k])) for k in sorted(value) if k]
  if kind is None:
    return "{" + ", ".join(f"{k!r}: {v}" for k, v in inside) + "}"
  if kind == "{}":
    return "{" + ", ".join(f"{k}: {text(v)}" for k, v in value.items() if k) + "}"
  if kind == "=":
    return value["text"]
  if kind.startswith("%"):  # a macro without a value
    return kind
  return f"{kind}({', '.join(f'{k}={v}' for k, v in inside)})"


def differences(name: str, old: Any, new: Any) -> Iterator[tuple[str, str, str]]:
  """Yields what differs within two nested values: its name, the old and the new text.

  >>> list(differences("run", {"": "Run", "seed": 1, "size": 8}, {"": "Run", "size": 8}))
  [('run.seed', '1', 'not set')]

  Args:
    name: what the values are called.
    old: a nested value.
    new: another.
  """
  if text(old) == text(new):
    return
  kind = old.get("") if isinstance(old, Mapping) else None
  if isinstance(old, Mapping) and isinstance(new, Mapping):
    if kind == new.get("") and kind != "=":
      shown = repr if kind is None else str
      for key in dict.fromkeys((*sorted(old), *sorted(new))):
        yield from differences(f"{name}.{shown(key)}", old.get(key, _UNSET), new.get(key, _UNSET))
      return
  if isinstance(old, list) and isinstance(new, list) and len(old) == len(new) == 1:
    yield from differences(name, old[0], new[0])
    return
  yield name, text(old), text(new)


def changed(folder: pathlib.Path, settings: Mapping[str, Any]) -> str:
  """Says how settings differ from those that a run began with.

  Args:
    folder: the run's.
    settings: name -> nested value.

  Returns:
    Such as "random_seed was 0, and is 3"; "" if nothing differs or no checkpoint was saved yet.
  """
  before = files.read_json(folder / _FILE, None)
  if before is None or not folders.steps(folder):
    return ""
  found = [
    difference
    for name in sorted({*before, *settings})
    for difference in differences(name, before.get(name, _UNSET), settings.get(name, _UNSET))
  ]
  found = [(_MACROS.get(name, name), old, new) for name, old, new in found]
  more = f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
  return "; ".join(f"{name} was {old}, and is {new}" for name, old, new in found[:_SHOWN]) + more


def refuse_changed(folder: pathlib.Path, settings: Mapping[str, Any]) -> None:
  """Refuses to continue a run with other settings, or a run of another program.

  Args:
    folder: the run's; it may be missing.
    settings: name -> nested value.

  Raises:
    ValueError: names what differs, with the old and the new value.
  """
  if folders.steps(folder) and not (folder / _FILE).is_file():
    raise ValueError(
      f"{folder} holds checkpoints that another program wrote. Take an empty MODEL_DIR and name "
      "one of them as INITIAL_CHECKPOINT_PATH."
    )
  if what := changed(folder, settings):
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
  found = json.dumps(settings, indent=1)
  files.write_atomically(folder / _FILE, found + "\n")
