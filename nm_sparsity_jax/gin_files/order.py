"""The order of gin files: a model file that comes after the run file takes back what that set.

after each file: macros -> [Order.note]
at the end: [Order.late] -> errors, warnings, macros that need not be asked for
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping

# A macro, or an argument as function.argument -> its value as text, None for one without.
_Texts = Mapping[str, str | None]
_HOW = "name the model file before the run file"
_FLAGS = "name the model file before the run file, or set it by a flag"
_OF_MODELS = ("NETWORK", "MODEL")  # what a model file sets, one of ours or of T5X
# What a file with rules of its own sets, such as those in gin_configs/paper: it follows a run file.
_OF_RULES = ("RECIPE", "PATTERN", "SPARSE_STEPS")


@dataclasses.dataclass(frozen=True)
class Late:
  """What files that come too late break.

  Attributes:
    errors: sentences.
    warnings: sentences.
    lost: macros that the run file set and a later file took back.
  """

  errors: list[str]
  warnings: list[str]
  lost: set[str]


@dataclasses.dataclass
class Order:
  """Notes what each file set.

  Attributes:
    files: (file, whether a program is bound after it, macro -> its text after it); the text of a
      macro without a value is None.
  """

  files: list[tuple[str, bool, _Texts]] = dataclasses.field(default_factory=list)

  def note(self, file: str, has_program: bool, macros: _Texts) -> None:
    """Notes the state after a file."""
    self.files.append((file, has_program, dict(macros)))

  def late(self, now: _Texts, unset: Collection[str], is_sparse: bool) -> Late:
    """Says what files after the run file broke.

    Args:
      now: macro -> its text, after all files and overrides.
      unset: macros that the run needs and that have no value.
      is_sparse: whether the class of MODEL takes rules.
    """
    found, run, before = Late([], [], set()), None, {}
    for file, has_program, macros in self.files:
      if run is not None:
        changed = {name for name, text in macros.items() if before.get(name) not in (None, text)}
        taken = {name for name in changed if macros[name] is None and name in unset}
        is_last = macros.get("MODEL") == now.get("MODEL")
        replaced = {"MODEL"} & changed if is_last and not is_sparse else set()
        if names := sorted(taken | replaced):
          text = f"{file} comes after {run} and takes back {', '.join(names)}: {_HOW}"
          found.errors.append(text)
          found.lost.update(taken)
        elif told := _moved(before, macros, changed, now):
          found.warnings.append(f"{file} comes after {run} and changes {told}: {_FLAGS}")
      if has_program and run is None:
        run = file
      before = macros
    return found


def _moved(before: _Texts, macros: _Texts, changed: Collection[str], now: _Texts) -> str:
  """Says what a model file changed that the run file had set, and that nothing set again."""
  is_model = any(macros.get(name) != before.get(name) for name in _OF_MODELS)
  if not is_model or not {*_OF_RULES}.isdisjoint(changed):
    return ""
  moved = (n for n in sorted(changed) if macros[n] is not None and macros[n] == now[n])
  return ", ".join(f"{n} from {before[n]} to {macros[n]}" for n in moved if n not in _OF_MODELS)
