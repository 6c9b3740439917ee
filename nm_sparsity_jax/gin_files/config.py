"""One configuration: gin files and overrides, read as t5x.train reads them.

    files, bindings -> Config: values, errors, warnings

gin stops at its first error. `Config` notes a file or binding that fails, and reads the next.
"""

# pyright: reportMissingImports=false, reportMissingModuleSource=false

from __future__ import annotations

import difflib
import importlib
import importlib.util  # gin uses it and forgets to import it
import inspect
import logging
import os
import pathlib
import re
import sys
import types
from collections.abc import Collection, Sequence
from typing import Any

from nm_sparsity_jax.gin_files import guard
from nm_sparsity_jax.gin_files.bound import PROGRAMS, Bound
from nm_sparsity_jax.gin_files.folders import macros_of_files, not_found
from nm_sparsity_jax.gin_files.messages import ask_for, how_to_get, lacks, message, quote, unread
from nm_sparsity_jax.gin_files.order import Order

# The run files of its programs, as an error names them.
_RUNS = {
  "train": "local_train.gin, local_finetune.gin or local_workload.gin",
  "evaluate": "local_eval.gin or local_workload_eval.gin",
  "infer": "local_infer.gin or local_workload_infer.gin",
}


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


class Config(Bound):
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

  Attributes (beside those of `Bound`):
    errors: what is wrong with files and bindings.
    warnings: what you probably do not mean.
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
    self.errors: list[str] = []
    self.warnings: list[str] = []
    self.lost: set[str] = set()
    self._imports = imports
    self._outer = [table.copy() for table in _tables(gin)], gin.config_is_locked()
    self._allow_unknown, self._order = allow_unknown, Order()
    gin.clear_config()
    super().__init__(gin, gin._CONFIG)  # as it grows
    before = list(gin._LOCATION_PREFIXES)
    main = sys.modules["__main__"]
    sys.modules["__main__"] = _Main("__main__")
    logging.getLogger().addFilter(not_found)
    self._folders = [pathlib.Path(path) for path in search_paths]
    try:
      for path in search_paths:
        gin.add_config_file_search_path(os.fspath(path))
      with guard.reading(gin, imports):
        self._read_all(files, bindings)
    finally:
      logging.getLogger().removeFilter(not_found)
      sys.modules["__main__"] = main
      gin._LOCATION_PREFIXES[:] = before
    self._table = dict(gin._CONFIG)
    self._find_program()
    if self.complete:  # else what is unset may have been set in what could not be read
      unset = self.unset() - self.lost
      late = self._order.late(self._texts(), unset, self._is_sparse_model())
      self.errors += [*late.errors, *(ask_for(name) for name in sorted(unset - {*late.lost}))]
      self.warnings += late.warnings
      self._unread(bindings)

  def _read_all(self, files: Sequence[str], bindings: Sequence[str]) -> None:
    for file in files:
      self._read(file, self._gin.parse_config_file)
      self._find_program()
      self._order.note(file, self.program is not None, self._texts())
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
      self.errors.append(f"{what}: {message(e)}{self._meant(e)}")

  def _meant(self, error: Exception) -> str:
    """Returns advice about a misspelt argument of a function that is known."""
    name, argument = lacks(error) or ("", "")
    known = self._gin._REGISTRY.get_match(name) if name else None
    if known is None:
      return ""
    close = difflib.get_close_matches(argument, inspect.signature(known.wrapped).parameters, 1)
    return f"; did you mean {close[0]}?" if close else ""

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
        raise SyntaxError(f"{value!r} is not a Python value") from None
      self.errors.append(
        f"{name} = {value}: a string needs quotes beside those of the shell, "
        f'--gin.{name}="{quoted}". Nothing was run; other mistakes are named as if they were there'
      )
    except Exception:
      self.lost.add(name)
      raise

  def _unread(self, bindings: Sequence[str]) -> None:
    """Names macros set on the command line that nothing reads: gin takes a typo silently.

    Without a run file, a macro of one of our gin files is a warning: the run file may read it.
    """
    read = self.read_macros()
    ours = macros_of_files() if self.program is None else set()
    for binding in bindings:
      name = binding.partition("=")[0].strip()
      if name not in read and self._macro(name) is not None:
        text, is_wrong = unread(name, read, ours, self.local, self._allow_unknown)
        (self.errors if is_wrong else self.warnings).append(text)

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


def unread_flags(argv: Sequence[str]) -> list[str]:
  """Says which macros a program of T5X was given by flags that nothing in gin's table reads.

  gin takes a misspelt macro without a word, and the run has the default.

  Args:
    argv: the flags, such as "--gin.PATTERN='1:8'".
  """
  from gin import config as gin

  bound = Bound(gin, dict(gin._CONFIG))
  read, found = bound.read_macros(), []
  for flag in argv:
    given = re.match(r"--?gin(?:\.|_bindings=)\s*(\w+)\s*=", flag)
    if given and given[1] not in read and bound.is_set(given[1]):
      found.append(unread(given[1], read, (), False, True)[0])
  return found
