"""What is found of one run, part by part: errors, warnings, notes and the parts of the report.

    Config -> Findings -> [model, places, schedule, cost, settings, data, restore] -> report

Each part adds to one `Findings`. A part that fails notes its error, and the others go on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from nm_sparsity_jax.integrations import gin_files

# What a wrong value makes Python raise, where nobody looked at it first.
_PYTHONS = (AttributeError, LookupError, TypeError, NameError, AssertionError, ArithmeticError)


@dataclasses.dataclass
class Findings:
  """Collects what is found of a run.

  Attributes:
    config: the gin files and overrides of the run.
    checkpoint: the checkpoint to look at; None = the one that the run would restore.
    errors: what stands in the way of the run.
    warnings: what you probably do not mean.
    notes: what you should know.
    parts: name -> part of the report.
    whole: False where the settings ask for rules that could not be made.
    lengths: feature -> tokens of an example; None where TASK_FEATURE_LENGTHS does not say them.
    batch_size: examples of a step, None if unknown.
  """

  config: gin_files.Config
  checkpoint: str | None = None
  errors: list[str] = dataclasses.field(default_factory=list)
  warnings: list[str] = dataclasses.field(default_factory=list)
  notes: list[str] = dataclasses.field(default_factory=list)
  parts: dict[str, Any] = dataclasses.field(default_factory=dict)
  whole: bool = True
  lengths: dict[str, int] | None = dataclasses.field(init=False)
  batch_size: int | None = dataclasses.field(init=False)

  def __post_init__(self):
    self.errors += self.config.errors
    self.warnings += self.config.warnings
    lengths, self.batch_size = self.config.get("TASK_FEATURE_LENGTHS"), self._whole("BATCH_SIZE")
    self.lengths = None
    is_whole = lambda n: isinstance(n, int) and not isinstance(n, bool) and n > 0
    if isinstance(lengths, Mapping) and all(map(is_whole, lengths.values())):
      self.lengths = dict(lengths)
    elif lengths is not None:
      self.errors.append(
        f"TASK_FEATURE_LENGTHS={lengths!r}: give a dict from feature to tokens, such as "
        "{'inputs': 512, 'targets': 128}"
      )

  def _whole(self, name: str) -> int | None:
    """Returns a macro that must be a whole number, 1 or more; notes any other value."""
    value = self.config.get(name)
    if value is None or isinstance(value, int) and not isinstance(value, bool) and value > 0:
      return value
    self.errors.append(f"{name}={value!r}: give a whole number, 1 or more")
    return None

  @property
  def trains(self) -> bool:
    """Returns True unless the run file is of an evaluation or of predictions."""
    return self.config.program in (None, "train")

  @property
  def offset(self) -> int | None:
    """Returns T5X's step at which the run begins, None if PRETRAINED_STEPS does not say it."""
    given = self.config.get("PRETRAINED_STEPS")
    return given if isinstance(given, int) and not isinstance(given, bool) else None

  def attempt(self, what: str, function: Callable[..., Any], *args: Any) -> Any:
    """Returns function(*args); notes an error and returns None where it fails.

    Args:
      what: names the part; a macro's name if the macro itself may be missing.
      function: to be called.
      *args: what it is called with.
    """
    try:
      return function(*args)
    except gin_files.Unset:  # said already
      return None
    except gin_files.Unbound as e:
      if what not in ("NETWORK", "RULES", "MODEL", "WORKLOAD"):
        self.note(e, what)
    except Exception as e:
      self.note(e, what)
    return None

  def note(self, error: Exception, what: str = "the run") -> None:
    """Adds an error, in the words of the command line.

    Args:
      error: what was raised.
      what: the part that failed, for errors of Python's, which name no setting.
    """
    if isinstance(error, _PYTHONS):
      text = " ".join(str(error).split("\n  In call to")[0].split())
      text = f"(KeyError: {text})" if isinstance(error, KeyError) else f"({text})"
      if not any(e.endswith(text) for e in self.errors):  # a run fails where a part of it did
        self.errors.append(f"{what}: a setting is missing, or has a value of the wrong kind {text}")
      return
    text = gin_files.message(error)
    if not any(e.startswith(text) for e in self.errors):  # the rules were to come from there too
      self.errors.append(text)

  def argument(self, name: str, of: str | None = None) -> Any:
    """Returns an argument of the program, or of another function `of`.

    None where it is unset, or fails, which is noted.
    """
    try:
      return self.config.argument(name, of)
    except (gin_files.Unset, gin_files.Unbound):
      return None
    except Exception as e:
      self.note(e, name)
      return None

  def restore_settings(self) -> Any:
    """Returns T5X's settings of what the program restores; None where nothing sets them."""
    if self.config.program == "train":
      return getattr(self.argument("checkpoint_cfg"), "restore", None)
    return self.argument("restore_checkpoint_cfg") if self.config.program else None

  def optimizer_rate(self) -> Any:
    """Returns the learning rate that OPTIMIZER is made with; None where nothing sets one."""
    try:
      return self.config.argument_of("OPTIMIZER", "learning_rate")
    except (gin_files.Unbound, gin_files.Unset):
      return None
    except Exception as e:
      self.note(e, "OPTIMIZER")
      return None

  def microbatches(self) -> int | None:
    """Returns the microbatches of T5X's trainer, None if nothing sets them."""
    try:
      return self.config.argument("num_microbatches", "SparseTrainer")
    except (gin_files.Unbound, gin_files.Unset):
      return None

  def report(self) -> dict[str, Any]:
    """Returns all that was found; each error and warning once."""
    errors = [*{error.rstrip("."): error for error in self.errors}.values()]
    parts = {name: part for name, part in self.parts.items() if part is not None}
    warnings = list(dict.fromkeys(self.warnings))
    return {
      "ok": not errors, **parts, "errors": errors, "warnings": warnings, "notes": self.notes
    }  # fmt: skip
