"""One configuration: gin files and overrides, read as T5X's programs read them.

    files, bindings -> Config: values, errors

gin stops at its first error. `Config` notes a file or binding that fails, and reads the next.
"""

# pyright: reportMissingImports=false, reportMissingModuleSource=false

from __future__ import annotations

import contextlib
import copy
import difflib
import importlib
import importlib.util  # gin uses it and forgets to import it
import logging
import os
import re
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any
from unittest import mock

from nm_sparsity_jax.core.text import printable
from nm_sparsity_jax.integrations.gin_files.folders import folder, not_found

try:
  from gin import config as gin
except ImportError:  # what else is here does without
  gin: Any = None
logging.getLogger().addFilter(not_found)

# What t5x's programs call the function that a run file configures.
PROGRAMS = {"train": "t5x.train", "evaluate": "t5x.eval", "infer": "t5x.infer"}
# Macros that `plan` makes, and others that it reads, whether a function does or not.
MADE = ("RULES", "NETWORK", "MODEL", "WORKLOAD")
READ = ("PRETRAINED_STEPS", "BATCH_SIZE", "TASK_FEATURE_LENGTHS")


class Unset(ValueError):
  """A value needs macros that are not set; `Config.errors` asks for them."""


class Config:
  """Holds one gin configuration and the mistakes in it.

  A gin file is a program: what it imports runs, and making a value calls what it names.

  gin has one table for a process: a `Config` empties it, and so does the end of its `with` block.

  Args:
    search_paths: folders to look for gin files in, first one first; the last one is that of this
      package.
    files: gin files, in order.
    bindings: overrides such as "PATTERN = '1:8'", read after the files.

  Attributes:
    errors: what is wrong with files and bindings.
    program: 'train', 'evaluate' or 'infer'; None without a run file.
    local: True for a program of the local runner, False for one of T5X.
  """

  def __init__(
    self,
    search_paths: Sequence[str | os.PathLike],
    files: Sequence[str],
    bindings: Sequence[str],
  ):
    if gin is None:
      raise ModuleNotFoundError("gin files need gin: pip install gin-config")
    self.errors: list[str] = []
    gin.clear_config()
    with _reading(search_paths):
      for file in files:
        self._read(file, gin.parse_config_file)
      for binding in bindings:
        self._read(binding, gin.parse_config)
    self._table = gin._CONFIG
    self.program: str | None = None
    self.local = False
    for scope, selector in self._table:
      # A selector begins with the module as the file imported it, so its last word is the name.
      name = selector.split(".")[-1]
      if not scope and name in PROGRAMS:
        module = gin._REGISTRY[selector].wrapped.__module__
        self.local = module.startswith("nm_sparsity_jax.trainer.")
        if self.local or module == PROGRAMS[name]:
          self.program = name
          break
    if not self.errors:  # else what is unset may be set in what could not be read
      self.errors += map(_ask_for, sorted(self._unset()))
      own = [binding.partition("=")[0].strip() for binding in bindings]
      self.errors += _unread(own)
      # A file may set what another program reads, so of those only what looks misspelt is an error.
      in_files = [name for name, selector in self._table if selector == "gin.macro"]
      self.errors += _unread([name for name in in_files if name not in own], least_alike=0.9)

  def _read(self, what: str, parse: Callable[[str], Any]) -> None:
    """Reads a file or a binding; notes an error where that fails."""
    try:
      parse(what)
    except Exception as e:  # what a file imports may raise anything
      self.errors.append(f"{what}: {message(e)}")

  # --- what is set --------------------------------------------------------------------------------

  def _macro(self, name: str) -> dict[str, Any]:
    return self._table.get((name, "gin.macro"), {})

  def is_set(self, name: str) -> bool:
    """Returns True for a macro that has a value."""
    bound = self._macro(name)
    return bool(bound) and repr(bound["value"]) != "%gin.REQUIRED"

  def _unset(self) -> set[str]:
    """Returns the macros that the run needs and that have no value.

    Without a run file, only the needs of RULES, NETWORK, MODEL and WORKLOAD count.
    """
    if self.program is not None:
      # A run file says `X = %gin.REQUIRED` of what it needs, whether a value refers to it or not.
      required = {name for name, _ in self._table if self._macro(name) and not self.is_set(name)}
      return required | self._needs(self._table)
    return self._needs([self._macro(name) for name in MADE])

  def _needs(self, value: Any, seen: set | None = None) -> set[str]:
    """Returns the unset macros that a value needs, directly or through others."""
    seen = set() if seen is None else seen
    found: set[str] = set()
    for reference in gin.iterate_references({"": value}):
      selector = reference.configurable.selector
      name = "/".join(reference.scopes)
      is_macro = selector == "gin.macro"
      if is_macro and not self.is_set(name):
        found.add(name)
        continue
      for key in self._table:
        of_it = key == (name, selector) if is_macro else key[1] == selector
        if of_it and key not in seen:
          seen.add(key)
          found |= self._needs(self._table[key], seen)
    return found

  # --- values -------------------------------------------------------------------------------------

  def value(self, name: str) -> Any:
    """Returns the value of a macro; makes the objects that it refers to.

    Raises:
      Unset: the macro, or one that it needs, has no value.
    """
    if not self.is_set(name):
      raise Unset(_ask_for(name))
    return self._make(self._macro(name)["value"])

  def get(self, name: str) -> Any:
    """Returns the value of a macro; None where it has none or cannot be made."""
    with contextlib.suppress(Exception):
      return self.value(name)

  def put(self, name: str, value: Any) -> None:
    """Sets a macro, for all values made afterwards."""
    self._table[name, "gin.macro"]["value"] = value

  def argument(self, name: str, of: str | None = None) -> Any:
    """Returns an argument of a function; None where none is bound.

    Args:
      name: of the argument.
      of: the function, or a macro that calls one, such as OPTIMIZER = @optimizers.adamw(); None =
        the program.
    """
    called = self._macro(of or "").get("value")
    bound = self._bound_by(called) if _is_reference(called) else self._bound(of or self.program)
    return self._make(bound.get(name))

  def _make(self, value: Any) -> Any:
    if missing := self._needs(value):
      raise Unset("; ".join(map(_ask_for, sorted(missing))))
    return copy.deepcopy(value)  # this is how gin evaluates references

  def _bound(self, function: str | None) -> dict[str, Any]:
    """Returns the arguments of a function by its name without a module."""
    found: dict[str, Any] = {}
    # gin knows a function by the module that a file imported it from; here its name is enough.
    for (scope, selector), bound in self._table.items():
      if not scope and selector.split(".")[-1] == function:
        found |= bound
    return found

  def _bound_by(self, reference: Any) -> dict[str, Any]:
    """Returns the arguments of a reference; those of an inner scope win."""
    scopes, selector = reference.scopes, reference.configurable.selector
    found: dict[str, Any] = {}
    for i in range(len(scopes) + 1):
      found |= self._table.get(("/".join(scopes[:i]), selector), {})
    return found

  def settings(self, of: str) -> dict[str, Any]:
    """Returns all bound arguments of a function as nested plain values, macros replaced.

    A reference becomes a dict with its name at "": `@Source()` with a bound seed becomes
    {"": "Source", "seed": 3}. JSON can hold all of it.

    Args:
      of: the function's name, without its module.
    """
    return self._nested(self._bound(of))

  def _nested(self, value: Any) -> Any:
    if isinstance(value, dict):
      return {str(key): self._nested(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
      return [self._nested(v) for v in value]
    if not _is_reference(value):
      return value if isinstance(value, bool | int | float | str | None) else repr(value)
    if value.configurable.selector == "gin.macro":
      bound = self._macro("/".join(value.scopes))
      return self._nested(bound["value"]) if bound else repr(value)
    name = value.configurable.selector.split(".")[-1]
    return {"": name} | self._nested(self._bound_by(value))

  def text(self) -> str:
    """Returns the whole configuration as the text of one gin file."""
    return gin.config_str()

  def __enter__(self) -> Config:
    return self

  def __exit__(self, *error: object) -> None:
    gin.clear_config()


class _Program(types.ModuleType):
  """Stands for the program that T5X's run files import as `__main__`; imports T5X on demand."""

  def __getattr__(self, name: str) -> Any:
    if not name.startswith("_"):
      for program in map(importlib.import_module, PROGRAMS.values()):
        if hasattr(program, name):
          return getattr(program, name)
    raise AttributeError(f"no T5X program has {name!r}; there are {', '.join(PROGRAMS)}")


@contextlib.contextmanager
def _reading(search_paths: Sequence[str | os.PathLike]) -> Iterator[None]:
  """Lets gin read as a program of T5X would, and leaves nothing behind."""
  main = sys.modules["__main__"]
  prefixes = [*gin._LOCATION_PREFIXES, *map(str, (*search_paths, folder()))]
  # T5X's own files bind `train`, `evaluate` or `infer` of the module `__main__`.
  sys.modules["__main__"] = _Program("__main__")
  try:
    with mock.patch.object(gin, "_LOCATION_PREFIXES", prefixes):
      yield
  finally:
    sys.modules["__main__"] = main


def _is_reference(value: Any) -> bool:
  return isinstance(value, gin.ConfigurableReference)


def message(error: BaseException) -> str:
  """Returns an error as one line: its text, with its class where the text alone says too little.

  gin's account of the calls that led there is left out.
  """
  # A name from outside must not control the terminal.
  text = printable(" ".join(str(error).partition("In call to configurable")[0].split()))
  if isinstance(error, SyntaxError):
    text += "; a string needs quotes inside those of the shell: --gin.NAME=\"'...'\""
  if module := re.match(r"No module named '[\w.]+'", text):
    return f"{module[0]}: `nm-sparsity doctor` says what is missing and how to install it"
  plain = isinstance(error, ValueError | RuntimeError | OSError | ImportError | SyntaxError)
  return text if plain and text else f"{type(error).__name__}: {text}"


_EXAMPLES = {
  "OPTIMIZER": "an optimizer file does that, such as --gin_file=gin_configs/runs/local_adamw.gin "
  "(of images local_images_adamw.gin, of T5X t5x_adamw.gin)",
  **dict.fromkeys(("NETWORK", "VOCABULARY", "MODEL"), "a model file does that (--gin_file=...)"),
  "ROW": "--gin.ROW=\"'...'\", a row that `nm-sparsity rows` lists",
  "TASK_FEATURE_LENGTHS": "--gin.TASK_FEATURE_LENGTHS=\"{'inputs': 512, 'targets': 62}\"",
}


def _ask_for(name: str) -> str:
  """Returns what to say about a macro that is not set."""
  is_text = name in ("RECIPE", "PATTERN") or name.endswith(("_NAME", "_PATH", "_DIR"))
  value = "\"'...'\"" if is_text else "..."
  return f"{name} is not set: {_EXAMPLES.get(name, f'--gin.{name}={value}')}"


def _unread(names: Iterable[str], least_alike: float = 0.0) -> list[str]:
  """Returns what to say about macros that nothing reads: gin takes a misspelt one silently.

  Args:
    names: of macros.
    least_alike: how much, from 0 to 1, a macro must look like one that is read.
  """
  macros = gin.iterate_references(gin._CONFIG, gin.get_configurable(gin.macro))
  read = {"/".join(reference.scopes) for reference in macros} | {*MADE, *READ}
  found = []
  for name in names:
    if (name, "gin.macro") in gin._CONFIG and name not in read:
      close = difflib.get_close_matches(name, sorted(read), 1, cutoff=least_alike or 0.6)
      hint = f"; did you mean {close[0]}?" if close else ""
      if close or not least_alike:
        found.append(f"{name} is set, but nothing reads it{hint}")
  return found


def read(
  files: Sequence[str],
  bindings: Sequence[str],
  search_paths: Sequence[str | os.PathLike],
  program: str,
) -> Config:
  """Reads a run of the local runner and refuses it if anything is wrong.

  Args:
    files: gin files, in order.
    bindings: overrides such as "PATTERN = '1:8'".
    search_paths: folders to look for the files in.
    program: what the run file must configure: 'train', 'evaluate' or 'infer'.

  Raises:
    ValueError: names every mistake.
  """
  config = Config(search_paths, files, bindings)
  if not config.errors and config.program != program:
    name = {"evaluate": "eval"}.get(program, program)
    config.errors.append(f"no run file of this command: gin_configs/runs/local_{name}.gin")
  if config.errors:
    raise ValueError("; ".join(config.errors))
  return config


def unread_flags(argv: Sequence[str]) -> list[str]:
  """Says which macros a program of T5X was given by flags that nothing in gin's table reads.

  Args:
    argv: the flags, such as "--gin.PATTERN='1:8'".
  """
  names = [re.match(r"--?gin(?:\.|_bindings=)\s*(\w+)\s*=", flag) for flag in argv]
  return _unread(name[1] for name in names if name)
