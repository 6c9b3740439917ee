"""What is found of one run: errors, warnings, notes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from nm_sparsity_jax.integrations import gin_files


@dataclasses.dataclass
class Findings:
  """Collects what is found of a run.

  Attributes:
    config: the gin files and overrides of the run.
    checkpoint: the checkpoint to look at; None = the one that the run would restore.
    errors: what stands in the way of the run.
    warnings: what you probably do not mean.
    notes: what you should know.
  """

  config: gin_files.Config
  checkpoint: str | None = None
  errors: list[str] = dataclasses.field(default_factory=list)
  warnings: list[str] = dataclasses.field(default_factory=list)
  notes: list[str] = dataclasses.field(default_factory=list)

  @property
  def trains(self) -> bool:
    """Returns True unless the run file is of an evaluation or of predictions."""
    return self.config.program in (None, "train")

  @property
  def lengths(self) -> dict[str, int] | None:
    """Returns feature -> tokens of an example; None where TASK_FEATURE_LENGTHS does not say it."""
    value = self.config.get("TASK_FEATURE_LENGTHS")
    return dict(value) if isinstance(value, Mapping) else None

  def number(self, macro: str) -> int | None:
    """Returns the whole number that a macro is set to; None where it is none."""
    value = self.config.get(macro)
    return value if isinstance(value, int) else None

  def attempt(self, what: str, function: Callable[..., Any], *args: Any) -> Any:
    """Returns function(*args); notes an error and returns None where it fails.

    Args:
      what: names the part in errors that are Python's, which name no setting.
      function: to be called.
      *args: what it is called with.
    """
    try:
      return function(*args)
    except gin_files.Unset:  # the configuration asks for it already
      return None
    except Exception as e:
      text = gin_files.message(e)
      if not isinstance(e, ValueError | OSError | ImportError):
        text = f"{what}: {text}"
      # The whole run fails where a part of it does, with the same words.
      if not any(error.startswith(text) for error in self.errors):
        self.errors.append(text)
      return None
