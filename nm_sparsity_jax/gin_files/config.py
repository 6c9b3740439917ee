"""One configuration: gin files and overrides, read as t5x.train reads them.

    files, bindings -> Config: values, errors, warnings

gin stops at its first error. `Config` notes a file or binding that fails, and reads the next.
"""

# pyright: reportMissingImports=false, reportMissingModuleSource=false

from __future__ import annotations

import copy
import difflib
import importlib
import importlib.util  # gin uses it and forgets to import it
import logging
import os
import pathlib
import re
import sys
import types
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from nm_sparsity_jax.gin_files import guard
from nm_sparsity_jax.gin_files.folders import macros_of_files
from nm_sparsity_jax.gin_files.messages import ask_for, how_to_get, message, quote, unread
from nm_sparsity_jax.gin_files.order import Order

# What t5x's programs call the function that a run file configures.
PROGRAMS = {"train": "t5x.train", "evaluate": "t5x.eval", "infer": "t5x.infer"}
# The package of those of the local runner: train, evaluate, infer.
LOCAL = "nm_sparsity_jax.local"
# Macros that `plan` reads, whether a function does or not.
_MADE = ("RULES", "NETWORK", "MODEL", "WORKLOAD")
# The run files of its programs, as an error names them.
_RUNS = {
  "train": "local_train.gin or local_finetune.gin",
  "evaluate": "local_eval.gin",
  "infer": "local_infer.gin",
}


class Unset(Exception):
  """A value needs macros that are not set; `Config.errors` names them already."""


class _Main(types.ModuleType):
  """Stands for the program that run files import as `__main__`; imports T5X on demand."""

  def __getattr__(self, name: str):
    if name in PROGRAMS:
      return getattr(importlib.import_module(PROGRAMS[name]), name)
    if not name.startswith("_"):
      for program in map(importlib.import_module, PROGRAMS.values()):
        if hasattr(program, name):  # such as infer's write_inferences_to_file
          return getattr(program, name)
    raise AttributeError(f"no T5X program has {name!r}; there are {', '.join(PROGRAMS)}")


class Config:
  """Holds one gin configuration and all mistakes in it.

  gin has one table for a process. A `Config` takes it until `close`, which gives back what was in
  it before. In a `with` block it is closed at the end. Two threads cannot hold one each.

  Args:
    search_paths: folders to look for gin files in, first one first.
    files: gin files, in order.
    bindings: overrides such as "PATTERN = '1:8'", read after the files.
    imports: modules beside `guard.ALLOWED` that the files may import and call; None allows all, as
      for a program that is going to run.
    allow_unknown: an override that nothing reads is a warning; the local runner refuses it anyway.

  Attributes:
    errors: what is wrong with files and bindings.
    warnings: what you probably do not mean.
    program: 'train', 'evaluate' or 'infer'; None without a run file.
    local: True for a program of the local runner, False for one of T5X.
    complete: True if every file could be read.
    lost: macros whose bindings could not be read.
  """

  def __init__(
    self,
    search_paths: Sequence[str | os.PathLike[str]],
    files: Sequence[str],
    bindings: Sequence[str],
    imports: Collection[str] | None = None,
    allow_unknown: bool = False,
  ):
    try:
      from gin import config as gin
    except ImportError as e:
      raise ModuleNotFoundError("plan reads gin files: pip install gin-config") from e
    self._gin: Any = gin
    self.errors: list[str] = []
    self.warnings: list[str] = []
    self.lost: set[str] = set()
    self._imports = imports
    self._outer = [table.copy() for table in _tables(gin)], gin.config_is_locked()
    self._allow_unknown, self._order = allow_unknown, Order()
    gin.clear_config()
    self.local, self._table = False, gin._CONFIG  # as it grows
    before = list(gin._LOCATION_PREFIXES)
    main = sys.modules["__main__"]
    sys.modules["__main__"] = _Main("__main__")
    logging.getLogger().addFilter(_not_found)
    self._folders = [pathlib.Path(path) for path in search_paths]
    try:
      for path in search_paths:
        gin.add_config_file_search_path(os.fspath(path))
      with guard.reading(gin, imports):
        self._read_all(files, bindings)
    finally:
      logging.getLogger().removeFilter(_not_found)
      sys.modules["__main__"] = main
      gin._LOCATION_PREFIXES[:] = before
    self._table: dict[tuple[str, str], dict[str, Any]] = dict(gin._CONFIG)
    self._program_key, self.program = self._find_program()
    if self.complete:  # else what is unset may have been set in what could not be read
      unset = self.unset() - self.lost
      late = self._order.late(self._texts(), unset, self._is_sparse_model())
      self.errors += [*late.errors, *(ask_for(name) for name in sorted(unset - {*late.lost}))]
      self.warnings += late.warnings
      self._unread(bindings)

  def _read_all(self, files: Sequence[str], bindings: Sequence[str]) -> None:
    for file in files:
      self._read(file, self._gin.parse_config_file)
      self._order.note(file, self._find_program()[1] is not None, self._texts())
    self.complete = not self.errors
    for binding in bindings:
      self._read(binding, self._parse)
    if self._imports is not None and (why := guard.programs(self._gin, self._imports)):
      self.errors.append(why)
      self._gin.clear_config()  # so that nothing calls it
      self.complete = False

  def refuse_module(self, module: str) -> None:
    """Raises ValueError where a setting names a module that may not be imported."""
    if self._imports is not None:
      guard.refuse_import(module, self._imports)

  def _find_program(self) -> tuple[tuple[str, str] | None, str | None]:
    for scope, selector in self._table:
      name = selector.split(".")[-1]
      if not scope and name in PROGRAMS:
        function = self._gin._REGISTRY[selector].wrapped
        local = function.__module__.startswith(f"{LOCAL}.")
        if local or function.__module__ == PROGRAMS[name]:
          self.local = local
          return (scope, selector), name
    return None, None

  def _read(self, what: str, parse) -> None:
    try:
      parse(what)
    except ModuleNotFoundError as e:
      found = re.search(r"No module named '([\w.]+)'", str(e))  # gin's copy of it has no name
      name = found[1] if found else str(e.name)
      self.errors.append(f"{what}: needs the Python module {name!r}, {how_to_get(name)}")
    except OSError as e:
      text = message(e)
      hint = ""
      if found := re.search(r"Unable to open file: (\S+?)\. ", text):
        text = f"{found[1]} is not in {text.partition('paths: ')[2].rstrip('.')}"
        if found[1].startswith("gin_configs/"):
          hint = f"; {self._near(found[1])}"
        elif found[1].startswith("t5x/"):
          hint = "; T5X is not installed, or without its gin files (docs/t5x.md)"
      self.errors.append(f"{what}: {text}{hint}" if what not in text else text + hint)
    except Exception as e:
      self.errors.append(f"{what}: {message(e)}")

  def _near(self, file: str) -> str:
    """Returns advice about a file of this package that is not there."""
    ours = [folder for folder in self._folders if (folder / "gin_configs").is_dir()]
    if not ours:
      return "add --gin_search_paths=$(nm-sparsity gin-path)"
    there = {f.stem: f.relative_to(d) for d in ours for f in d.glob("gin_configs/**/*.gin")}
    close = difflib.get_close_matches(pathlib.Path(file).stem, there, 1)
    folder = ours[0] / "gin_configs"
    return f"did you mean {there[close[0]]}?" if close else f"what there is lies in {folder}"

  def _parse(self, binding: str) -> None:
    """Reads one binding; where quotes are missing, adds them and notes the mistake."""
    name, _, value = (part.strip() for part in binding.partition("="))
    try:
      self._gin.parse_config([binding])
    except SyntaxError:
      quoted = quote(value)
      try:
        self._gin.parse_config([f"{name} = {quoted}"])
      except Exception:
        self.lost.add(name)
        raise SyntaxError(f"{value!r} is no value of Python's") from None
      self.errors.append(
        f"{name} = {value}: a string needs quotes beside those of the shell, "
        f'--gin.{name}="{quoted}". Nothing was run; what else is wrong is said as if you had'
      )
    except Exception:
      self.lost.add(name)
      raise

  # --- macros -----------------------------------------------------------------------------------

  def _macro(self, name: str) -> dict[str, Any] | None:
    return self._table.get((name, "gin.macro"))

  def is_set(self, name: str) -> bool:
    """Returns True for a macro that has a value."""
    bound = self._macro(name)
    return bound is not None and not self._required(bound["value"])

  def _texts(self) -> dict[str, str | None]:
    """Returns macro -> its value as text, None for one that must still be set."""
    of_macros = {k[0]: v["value"] for k, v in self._table.items() if k[1] == "gin.macro"}
    return {n: None if self._required(v) else repr(v) for n, v in of_macros.items()}

  def _is_sparse_model(self) -> bool:
    """Returns False where MODEL is a class of T5X that takes no rules."""
    value: Any = (self._macro("MODEL") or {}).get("value")
    if not isinstance(value, self._gin.ConfigurableReference) or self._is_macro(value):
      return True
    above = getattr(value.configurable.wrapped, "__mro__", ())
    return not above or any(one.__name__ == "SparseModel" for one in above)

  def _required(self, value) -> bool:
    if not isinstance(value, self._gin.ConfigurableReference):
      return False
    return value.scoped_selector.endswith("gin.REQUIRED/gin.constant") or repr(value) == (
      "%gin.REQUIRED"
    )

  def _references(self, value) -> Iterator[Any]:
    return self._gin.iterate_references({"": value})

  def _is_macro(self, reference) -> bool:
    return reference.configurable.wrapped is self._gin.macro

  def needs(self, value, seen: set | None = None) -> set[str]:
    """Returns the unset macros that a value needs, directly or through others."""
    seen = set() if seen is None else seen
    found: set[str] = set()
    for reference in self._references(value):
      if self._is_macro(reference):
        name = "/".join(reference.scopes)
        if not self.is_set(name):
          found.add(name)
          continue
        keys = [(name, "gin.macro")]
      else:
        keys = [k for k in self._table if k[1] == reference.configurable.selector]
      for key in keys:
        if key not in seen:
          seen.add(key)
          found |= self.needs(self._table.get(key, {}), seen)
    return found

  def unset(self) -> set[str]:
    """Returns the macros that the run needs and that have no value.

    A program needs all. Without a run file, only the needs of RULES, NETWORK, MODEL and WORKLOAD
    count.
    """
    if self.program is None:
      names = [n for n in _MADE if self._macro(n)]
      return set().union(*(self.needs(self._macro(n)) for n in names)) if names else set()
    found = self.needs(self._table)
    for (scope, selector), bound in self._table.items():
      for name, value in bound.items():
        if self._required(value):
          found.add(scope if selector == "gin.macro" else f"{selector.split('.')[-1]}.{name}")
    return found

  def _unread(self, bindings: Sequence[str]) -> None:
    """Names macros set on the command line that nothing reads: gin takes a typo silently.

    Without a run file, a macro of one of our gin files is a warning: the run file may read it.
    """
    read = {
      "/".join(r.scopes) for r in self._references(self._table) if self._is_macro(r)
    }  # fmt: skip
    read |= set(_MADE)
    ours = macros_of_files() if self.program is None else set()
    for binding in bindings:
      name = binding.partition("=")[0].strip()
      if name not in read and self._macro(name) is not None:
        text, is_wrong = unread(name, read, ours, self.local, self._allow_unknown)
        (self.errors if is_wrong else self.warnings).append(text)

  # --- values -----------------------------------------------------------------------------------

  def value(self, name: str) -> Any:
    """Returns the value of a macro; makes the objects that it refers to.

    Raises:
      Unset: the macro, or one that it needs, has no value.
      KeyError: no file mentions the macro.
    """
    bound = self._macro(name)
    if bound is None:
      raise KeyError(name)
    return self._make(bound["value"])

  def get(self, name: str, default: Any = None) -> Any:
    """Returns the value of a macro, or `default` if it has none or cannot be made."""
    try:
      return self.value(name)
    except Exception:
      return default

  def put(self, name: str, value: Any) -> None:
    """Sets a macro, for all values made afterwards."""
    self._table[name, "gin.macro"]["value"] = value

  def argument(self, name: str, of: str | None = None) -> Any:
    """Returns an argument of the program, or of another function `of`; KeyError if unbound."""
    if of is None:
      if self._program_key is None:
        raise KeyError(name)
      return self._make(self._table[self._program_key][name])
    for (scope, selector), bound in self._table.items():
      if not scope and selector.split(".")[-1] == of and name in bound:
        return self._make(bound[name])
    raise KeyError(name)

  def argument_of(self, macro: str, name: str) -> Any:
    """Returns an argument that is bound for the function that a macro calls; KeyError if unbound.

    Args:
      macro: such as OPTIMIZER = @optimizers.adamw().
      name: of the argument.
    """
    bound = self._macro(macro)
    value: Any = None if bound is None else bound["value"]
    if not isinstance(value, self._gin.ConfigurableReference):
      raise KeyError(macro)
    for scope in dict.fromkeys(("/".join(value.scopes), "")):
      arguments = self._table.get((scope, value.configurable.selector), {})
      if name in arguments:
        return self._make(arguments[name])
    raise KeyError(name)

  def _make(self, value) -> Any:
    if self._required(value) or self.needs(value):
      raise Unset(sorted(self.needs(value)))
    return copy.deepcopy(value)  # this is how gin evaluates references

  def settings(self, of: str) -> dict[str, Any]:
    """Returns all bound arguments of a function as nested plain values, macros replaced.

    A reference becomes a dict with its name at "": `@Source()` with a bound seed becomes
    {"": "Source", "seed": 3}. `runs.settings` says all forms; JSON can hold them.

    Args:
      of: the function's name, without its module.
    """
    found = {}
    for (scope, selector), bound in self._table.items():
      if not scope and selector.split(".")[-1] == of:
        found |= {name: self._nested(value) for name, value in bound.items()}
    return found

  def _nested(self, value) -> Any:
    if isinstance(value, dict):
      if all(isinstance(key, str) and key for key in value):
        return {key: self._nested(v) for key, v in value.items()}
      return {"": "{}"} | {repr(key): self._nested(v) for key, v in sorted(value.items())}
    if isinstance(value, list | tuple):
      return [self._nested(v) for v in value]
    if not isinstance(value, self._gin.ConfigurableReference):
      plain = value is None or type(value) in (bool, int, float, str)
      return value if plain else {"": "=", "text": repr(value)}
    if self._is_macro(value):
      bound = self._macro("/".join(value.scopes))
      return {"": repr(value)} if bound is None else self._nested(bound["value"])
    selector = value.configurable.selector
    bound = {**self._table.get(("", selector), {})}
    for i in range(len(value.scopes)):
      bound |= self._table.get(("/".join(value.scopes[: i + 1]), selector), {})
    arguments = {name: self._nested(v) for name, v in bound.items()}
    return {"": selector.split(".")[-1]} | arguments

  def text(self) -> str:
    """Returns the whole configuration as the text of one gin file."""
    return self._gin.config_str()

  def close(self) -> None:
    """Gives gin's table back, with what was in it before."""
    self._gin.clear_config()
    tables, is_locked = self._outer
    for table, outer in zip(_tables(self._gin), tables, strict=True):
      table.update(outer)
    self._gin._set_config_is_locked(is_locked)

  def __enter__(self) -> Config:
    return self

  def __exit__(self, *error: object) -> None:
    self.close()


def _tables(gin: Any) -> tuple[Any, ...]:
  """Returns what `gin.clear_config` empties, but for constants, which it keeps."""
  return gin._CONFIG, gin._IMPORTS, gin._SINGLETONS, gin._OPERATIVE_CONFIG


def _not_found(record: logging.LogRecord) -> bool:
  """Drops gin's log line about each search path that lacks a file."""
  return not str(record.msg).startswith("Path not found")


def read(
  files: Sequence[str],
  bindings: Sequence[str],
  search_paths: Sequence[str | os.PathLike[str]],
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
  if config.errors:
    raise ValueError("; ".join(config.errors))
  if config.program != program:
    raise ValueError(f"no run file of this command: gin_configs/runs/{_RUNS[program]}")
  return config
