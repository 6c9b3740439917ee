"""Messages about mistakes in gin files and overrides.

an error of gin's -> message -> one line without gin's account of the way there
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection

# gin's words for a function, and for an argument that it lacks.
_NO_ARGUMENT = re.compile(r"Configurable '(\S+)' doesn't have a parameter named '(\S+)'\.?")


def lacks(error: BaseException) -> tuple[str, str] | None:
  """Returns a function and the argument that it lacks; None for another error.

  Args:
    error: of gin's.
  """
  found = _NO_ARGUMENT.search(str(error))
  return (found[1], found[2]) if found else None


def message(error: BaseException) -> str:
  """Returns the text of an error without gin's account of where it came from."""
  text = re.split(r"\s*\n\s*In call to configurable", str(error))[0]
  where = re.search(r"\s*\n\s*In (?:file|bindings string).*", text, re.DOTALL)
  if where:
    text = text[: where.start()]
    if place := re.search(r'In file "?([^"\n]+?)"?,? line (\d+)', where[0]):
      text += f" ({place[1]}, line {place[2]})"
  text = re.sub(
    r"No configurable matching (?:reference )?'(\S+)'\.?", _unknown, " ".join(text.split())
  )
  text = _NO_ARGUMENT.sub(r"\1 has no argument '\2'", text)
  if found := re.search(r"Ambiguous selector '(\S+)', matches (\[.*?\])", text):  # a KeyError
    place = text.rpartition(" (")[2] if text.endswith(")") else ""
    where = f" ({place}" if place else ""
    return f"{found[1]!r} may be any of {found[2]}: write more of its module{where}"
  plain = isinstance(error, ValueError | RuntimeError | FileNotFoundError | ModuleNotFoundError)
  return text if plain and text else f"{type(error).__name__}: {text}".rstrip(": ")


# First what needs no quotes: a string, a reference, a number. Then words that may lack theirs.
_WORD = re.compile(
  r"""('[^']*'|"[^"]*"|[@%][\w./]+(?:\(\))?|\b(?:None|True|False)\b|\d[\d._]*(?:[eE][-+]?\d+)?(?![\w:]))"""
  r"""|(\d+:\d+|[A-Za-z_][\w/.+*-]*)"""
)


def quote(value: str) -> str:
  """Returns the value with quotes around its words, or around all of it; leaves "10k" alone.

  >>> quote("1:8"), quote("{ff: 1:8, 'qkv': None}"), quote("/tmp/run"), quote("10k")
  ("'1:8'", "{'ff': '1:8', 'qkv': None}", "'/tmp/run'", '10k')
  """
  if value[:1] in "{[(":
    return _WORD.sub(lambda found: found[1] or f"'{found[2]}'", value)
  return f"'{value}'" if re.match(r"\d+:\d+$|[^\W\d]|[/~.]", value) else value


def _unknown(found: re.Match) -> str:
  text = f"nothing here is called {found[1]!r}: no file that was read imports it"
  if found[1].startswith("@") and "." in found[1]:  # a reference on the command line, say
    module = found[1].lstrip("@").rpartition(".")[0]
    text += f". A gin file of yours may set it below its line `import {module}`"
  return text


def how_to_get(module: str) -> str:
  """Says how to install a module that a gin file needs."""
  root = module.split(".")[0]
  if root in ("t5x", "airio", "jestimator"):
    return "which is not on PyPI: docs/t5x.md says how to install it"
  if root == "nm_sparsity_jax":
    return "which this version does not have"
  return "which is not installed (`nm-sparsity doctor` says what is missing)"


_EXAMPLES = {
  "RECIPE": "\"'mdgf_exponential'\"",
  "PATTERN": "\"'1:8'\"",
  "SPARSE_STEPS": "100_000",
  "PRETRAINED_STEPS": "1_000_000  (the step in the checkpoint's name)",
  "MODEL_DIR": "\"'gs://bucket/run'\"",
  "INITIAL_CHECKPOINT_PATH": "\"'gs://bucket/run/checkpoint_1000000'\"",
  "CHECKPOINT_PATH": "\"'gs://bucket/run/checkpoint_1100000'\"",
  "TASK_FEATURE_LENGTHS": "\"{'inputs': 512, 'targets': 128}\"",
  "DROPOUT_RATE": "0.1",
}


def ask_for(name: str) -> str:
  """Returns what to say about a macro that is not set."""
  if name == "OPTIMIZER":
    return (
      "OPTIMIZER is not set: an optimizer file does that, such as "
      "--gin_file=gin_configs/runs/local_adamw.gin (of images "
      "local_images_adamw.gin, of T5X t5x_adamw.gin), the command line cannot"
    )
  if name in ("NETWORK", "VOCABULARY", "MODEL"):
    return f"{name} is not set: a model file does that (--gin_file=...), the command line cannot"
  return f"{name} is not set: --gin.{name}={_EXAMPLES.get(name, '...')}"


def unread(
  name: str, read: Collection[str], ours: Collection[str], is_local: bool, allow_unknown: bool
) -> tuple[str, bool]:
  """Returns what to say about an override that nothing reads, and whether it is an error.

  Args:
    name: the macro.
    read: macros that the files read.
    ours: macros that may be meant for a run file that is not there; these are warnings.
    is_local: for the local runner, which refuses every unread macro itself.
    allow_unknown: make it a warning elsewhere.
  """
  text = f"{name} is set, but nothing reads it"
  if name in ours:
    return text, False
  close = difflib.get_close_matches(name, sorted({*read, *ours}), 1)
  text += f"; did you mean {close[0]}?" if close else ""
  if is_local or allow_unknown:
    return text, is_local
  return f"{text}{'' if close else '.'} Or let it pass: --allow-unknown", True
