"""The rules of a checkpoint: its own, or those that somebody gives.

checkpoint, rules or none -> [rules_for]   -> Rules
checkpoint                -> [parameters]  -> what is deployed of it
checkpoint to start from  -> [check_start] -> a warning, or ''
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nm_sparsity_jax.core.patterns import NM
from nm_sparsity_jax.core.schedules import Phases
from nm_sparsity_jax.core.trees import nested
from nm_sparsity_jax.recipes import Recipe, SrSte
from nm_sparsity_jax.runs.checkpoint import Stored
from nm_sparsity_jax.training import rules_text
from nm_sparsity_jax.training.rules import Rules

Given = Rules | Mapping[str, Any] | None


def rules_for(stored: Stored, given: Given, axes: Mapping[str, Any] | None = None) -> Rules:
  """Returns the checkpoint's own rules, or those that the caller gives; a run's own must agree.

  Args:
    stored: the checkpoint.
    given: as in `runs.verify`.
    axes: as in `runs.verify`.
  """
  if given is not None and not isinstance(given, Rules):
    # A pattern alone is by magnitude. The recipe and its phases change nothing in a finished run.
    by_magnitude = lambda x: SrSte(pattern=NM.parse(x), phases=Phases(total=1))
    given = Rules({k: x if isinstance(x, Recipe) else by_magnitude(x) for k, x in given.items()})
  if stored.known_rules is None:
    if given is None:
      raise ValueError(
        f"{stored.path} holds no rules: say what should be n:m, such as rules={{'ff': '1:8'}} "
        "(--rules of `verify`, `finalize`, `pack` and `export`)"
      )
    return given.with_axes(axes or {})
  own = rules_text.parse(stored.known_rules)
  patterns = lambda rules: {place: str(r.pattern) for place, r in rules.places.items() if r.pattern}
  # What `finalize` noted binds nobody: a stricter pattern may be asked for.
  is_other = given is not None and stored.rules is not None and patterns(own) != patterns(given)
  if axes or is_other:
    raise ValueError(
      f"{stored.path} was trained with the rules {patterns(own)} and knows their axes, so it takes "
      "no other rules and axes: leave them out"
    )
  return own if given is None or stored.rules is not None else given.with_axes(own.axes)


def refuse_other_rules(stored: str, rules: Rules, path: str) -> None:
  """Raises where the text of a checkpoint's rules differs from that of these rules."""
  now = rules_text.describe(rules)
  if stored != now:
    there, here = ("; ".join(text.splitlines()) for text in (stored, now))
    raise ValueError(
      f"{path} was trained with the rules [{there}], but this run has [{here}]. Continue with the "
      "checkpoint's rules. For a new run with the others, take another MODEL_DIR and name the "
      "checkpoint as INITIAL_CHECKPOINT_PATH."
    )


def parameters(stored: Stored) -> dict[str, Any]:
  """Returns the tree of the parameters that are deployed, not read yet."""
  return nested(stored.variables()).get("params", {})


def check_steps(
  rules: Rules | None,
  start: int,
  pretrained_steps: int | None,
  train_steps: int | None = None,
  train_steps_relative: int | None = None,
) -> None:
  """Refuses steps with which a sparse run would end at another step than its schedule.

  Args:
    rules: of the run, whose recipes know how many steps it has.
    start: the global step of the checkpoint that it starts from.
    pretrained_steps: the same, as the settings say it; None = any.
    train_steps: the global step at which T5X ends the run, as the settings say it; None = any.
    train_steps_relative: T5X adds it to the restored step, so each restart adds a whole run.
  """
  # T5X counts global steps, and a schedule those of its run: a wrong sum ends before or after it.
  recipes = rules.places.values() if rules else ()
  ends = {start + recipe.phases.total for recipe in recipes if recipe.phases}
  right = {  # macro -> its value, and those that fit
    "PRETRAINED_STEPS": (pretrained_steps, {start}),
    "TRAIN_STEPS": (train_steps, ends or {train_steps}),
    "TRAIN_STEPS_RELATIVE": (train_steps_relative, {0}),
  }
  wrong = {k: value for k, (value, fit) in right.items() if value is not None and value not in fit}
  if wrong:
    raise ValueError(
      f"{', '.join(f'{name}={value}' for name, value in wrong.items())}: the sparse run starts at "
      f"global step {start}, and its schedule ends at {max(ends, default=None)}. Leave "
      f"{', '.join(wrong)} out."
    )


def check_start(stored: Stored) -> str:
  """Says that a run starts from a sparse run that is not finalized; '' where it does not.

      if warning := check_start(stored):
        warnings.warn(f"INITIAL_CHECKPOINT_PATH: {warning}")

  T5X stores dense weights, and so does a moving average; masks act on them on the fly. A run that
  starts from them without `finalize` trains another network than the one that was scored.

  Args:
    stored: the checkpoint.
  """
  # `finalize` leaves the optimizer out.
  is_run = any(key.startswith("state/param_states/") for key in stored.leaves)
  if not (stored.rules and is_run) or stored.in_place and not stored.average:
    return ""
  if rules_text.parse(stored.rules).is_dense:
    return ""
  return (
    f"{stored.path} is of a sparse run and not finalized, so it holds dense weights that its "
    "network never saw: start from what `nm-sparsity finalize` writes, or go on in its MODEL_DIR."
  )
