"""What a run trained, from what it left in its folder.

    config.gin        -> [read_settings] -> gin macro -> its value
    newest checkpoint -> [rules_of]      -> Rules, those of the macros where no checkpoint tells
    run.json          -> [started]       -> where it began, what it ran with

A checkpoint of a sparse run holds the text of its rules, so it is believed first: the macros may be
overridden by bindings that no macro shows. config.gin is read as text: nothing in it is executed.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import os
import pathlib
import re
from collections.abc import Mapping
from typing import Any

from nm_sparsity_jax.runs import checkpoint, files, folders, paper
from nm_sparsity_jax.training import configure, rules_text
from nm_sparsity_jax.training.rules import Rules

# Argument of `configure.rules` -> the macro that it comes from.
_MACROS = {
  "places": "SPARSITY_RULES", "recipe": "RECIPE", "pattern": "PATTERN",
  "sparse_steps": "SPARSE_STEPS", "dense_steps": "DENSE_STEPS",
  "finetune_steps": "FINETUNE_STEPS", "beta": "BETA", "gradient": "GRADIENT",
  "fields": "RECIPE_FIELDS", "indivisible": "INDIVISIBLE", "axes": "SPARSITY_AXES",
  "roles": "SPARSITY_ROLES",
}  # fmt: skip


def gin_text(folder: str | os.PathLike) -> str:
  """Returns the gin configuration of a run; '' where there is none."""
  file = pathlib.Path(folder) / "config.gin"
  return files.read_text(file) if file.is_file() else ""


def bound(text: str, function: str = "") -> dict[str, str]:
  """Returns what a gin configuration binds: name -> value as text, on one line.

  >>> bound("SPARSE_STEPS = 100\\nSPARSITY_RULES = \\\\\\n    {'ff': '1:8'}\\n")
  {'SPARSE_STEPS': '100', 'SPARSITY_RULES': "{'ff': '1:8'}"}
  >>> bound("vit.config.name = 'vit_b16'", "vit.config|swin.config")
  {'name': "'vit_b16'"}

  Args:
    text: the configuration.
    function: a regex of the function whose arguments are asked for; '' = macros.
  """
  owner = rf"(?:\w+\.)*(?:{function})\." if function else ""
  # gin breaks a long value into lines, all but the first indented.
  found = re.findall(rf"^{owner}(\w+) = (.*(?:\n[ \t]+.*)*)", text, re.MULTILINE)
  return {name: " ".join(value.replace("\\\n", "\n").split()) for name, value in found}


class Reference(str):
  """The text of a value that is not plain, such as '@sr_ste()'."""


def read_settings(folder: str | os.PathLike) -> dict[str, Any]:
  """Reads the macros that a run was configured with: name -> value, or `Reference`.

  Args:
    folder: the run's.
  """
  found = {name: plain(value) for name, value in bound(gin_text(folder)).items()}
  # A file of gin_configs/paper/ asks a function for what its row sets.
  if of_row := [name for name, value in found.items() if "paper.setting()" in str(value)]:
    row = paper.find(found["TABLE"], found["ROW"]).settings()
    found |= {name: row[name] for name in of_row}
  return found


def plain(text: str) -> Any:
  """Returns the value of a literal, the `Reference` of what is none.

  >>> plain("{'ff': '1:8'}"), plain("@sr_ste()")
  ({'ff': '1:8'}, '@sr_ste()')
  """
  try:
    return ast.literal_eval(text.strip())
  except Exception:  # `literal_eval` has five kinds of errors
    return Reference(text)


def started(folder: str | os.PathLike) -> Mapping[str, Any]:
  """Returns what the local runner noted when it started: `start`, `processes`; else empty."""
  return files.read_json(pathlib.Path(folder) / "run.json", {})


def rules_of(folder: str | os.PathLike) -> Rules:
  """Returns the rules of a run: those in its newest checkpoint, else those of its macros.

  Args:
    folder: the run's.

  Raises:
    ValueError: they are in neither, or the macros say what is refused.
  """
  # First, since bindings that no macro shows may have overridden the macros.
  text = None
  with contextlib.suppress(ValueError, FileNotFoundError):  # none is there yet, or it is damaged
    text = _opened(folder).rules
  if text:
    return rules_text.parse(text)
  settings = read_settings(folder)
  known = {name: settings[macro] for name, macro in _MACROS.items() if macro in settings}
  references = [_MACROS[k] for k, value in known.items() if isinstance(value, Reference)]
  if references or "RECIPE" not in settings:
    raise ValueError(
      f"config.gin: {', '.join(references) or 'RECIPE'} is not a plain value, or is not there"
    )
  return configure.rules(**{"places": None, **known})


def stored_rules(path: str, **settings: Any) -> Rules:
  """Returns the rules that a checkpoint holds; refuses a setting that says something else.

  Those of a dense checkpoint, or of one that is not there, are what the settings say.

  Args:
    path: the checkpoint, or a run's folder, whose newest one counts.
    **settings: arguments of `configure.rules`; None where nothing sets one.

  Raises:
    ValueError: a setting does not agree, or the rules are unknown.
  """
  try:
    stored = _opened(path)
  except (ValueError, FileNotFoundError):
    if settings.get("recipe") is None:
      raise
    stored = None  # a plan goes on, and says so where it looks at the checkpoint
  if stored is None or stored.rules is None:
    if settings.get("recipe") is None:
      raise ValueError(
        f"{path!r} holds no rules of a sparse run: set RECIPE = 'dense' to evaluate it as it is."
      )
    known = {name: value for name, value in settings.items() if value is not None}
    # `ff` is what gin_configs/sparsity.gin makes sparse.
    return configure.rules(**{"places": {"ff": None}, **known})
  rules = rules_text.parse(stored.rules)
  # A flag that disagrees would be ignored in silence otherwise.
  configure.agree(rules, stored.path, **settings)
  return rules


def start_of(run: str | None, initial: str | None = None) -> int | None:
  """Returns the global step at which a sparse run begins, or began; None where that is unknown.

  Args:
    run: its folder, or one of its checkpoints.
    initial: the checkpoint that it starts from, for a run that has none of its own yet.

  Raises:
    ValueError: there is an initial checkpoint, and its step cannot be known.
  """
  start = None
  # A run that resumes goes by its own checkpoints, whatever the settings still name.
  if run:
    with contextlib.suppress(ValueError, FileNotFoundError):  # it has none yet
      start = _opened(run).start
  if start is not None or not initial:
    return start
  try:
    step = _opened(initial).step
  except Exception:  # such as of a bucket; what restores the checkpoint says it again
    step = folders.named_step(initial)
  if step is None:
    raise ValueError(
      f"INITIAL_CHECKPOINT_PATH={initial!r} does not tell PRETRAINED_STEPS, its step. Set "
      "PRETRAINED_STEPS."
    )
  return step


# A checkpoint does not change, and gin asks again for each use of PRETRAINED_STEPS.
_read = functools.lru_cache(maxsize=16)(checkpoint.read)


def _opened(path: str | os.PathLike) -> checkpoint.Stored:
  """Returns a checkpoint, or the newest one of a run."""
  return _read(checkpoint.find(os.fspath(path)))
