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
import re
import sys
import types
from collections.abc import Collection, Sequence
from typing import Any

from nm_sparsity_jax.integrations.gin_files.bound import PROGRAMS, Bound
from nm_sparsity_jax.integrations.gin_files.folders import macros_of_files, not_found

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

  A gin file is a program: what it imports runs, and making a value calls what it names.

  gin has one table for a process. A `Config` takes it until `close`, which gives back what was in
  it before. In a `with` block it is closed at the end. Two threads cannot hold one each.

  Args:
    search_paths: folders to look for gin files in, first one first.
    files: gin files, in order.
    bindings: overrides such as "PATTERN = '1:8'", read after the files.
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
    allow_unknown: bool = False,
  ):
    try:
      from gin import config as gin
    except ImportError as e:
      raise ModuleNotFoundError("plan reads gin files: pip install gin-config") from e
    self.errors: list[str] = []
    self.warnings: list[str] = []
    self.lost: set[str] = set()
    self._outer = [table.copy() for table in _tables(gin)], gin.config_is_locked()
    self._allow_unknown = allow_unknown
    gin.clear_config()
    super().__init__(gin, gin._CONFIG)  # as it grows
    before = list(gin._LOCATION_PREFIXES)
    main = sys.modules["__main__"]
    sys.modules["__main__"] = _Main("__main__")
    logging.getLogger().addFilter(not_found)
    try:
      for path in search_paths:
        gin.add_config_file_search_path(os.fspath(path))
      for file in files:
        self._read(file, gin.parse_config_file)
      self.complete = not self.errors
      for binding in bindings:
        self._read(binding, self._parse)
    finally:
      logging.getLogger().removeFilter(not_found)
      sys.modules["__main__"] = main
      gin._LOCATION_PREFIXES[:] = before
    self._table = dict(gin._CONFIG)
    self._find_program()
    if self.complete:  # else what is unset may have been set in what could not be read
      self.errors += [ask_for(name) for name in sorted(self.unset() - self.lost)]
      self._unread(bindings)

  def _read(self, what: str, parse) -> None:
    """Reads a file or a binding; notes an error and goes on where that fails."""
    try:
      parse(what)
    except RecursionError:
      self.errors.append(f"{what}: gin files include each other: leave one `include` out")
    except Exception as e:
      text = f"{message(e)}{self._meant(e)}"
      self.errors.append(text if what in text else f"{what}: {text}")

  def _meant(self, error: Exception) -> str:
    """Returns advice about a misspelt argument of a function that is known."""
    found = _NO_ARGUMENT.search(str(error))
    known = self._gin._REGISTRY.get_match(found[1]) if found else None
    if found is None or known is None:
      return ""
    close = difflib.get_close_matches(found[2], inspect.signature(known.wrapped).parameters, 1)
    return f"; did you mean {close[0]}?" if close else ""

  def _parse(self, binding: str) -> None:
    name, _, value = (part.strip() for part in binding.partition("="))
    try:
      self._gin.parse_config([binding])
    except SyntaxError:
      self.lost.add(name)
      quoted = "{'ff': '1:8'}" if {*value} & {*"'\"{[("} else f"'{value}'"
      raise SyntaxError(
        "not a Python value; a string needs quotes beside those of the shell, such as "
        f'--gin.{name}="{quoted}"'
      ) from None
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
      if name in read or self._macro(name) is None:
        continue
      text = unread(name, () if name in ours else {*read, *ours})
      if name in ours:
        self.warnings.append(text)
      elif self.local:  # which refuses it anyway
        self.errors.append(text)
      elif self._allow_unknown:
        self.warnings.append(text)
      else:
        more = "" if text.endswith("?") else "."
        self.errors.append(f"{text}{more} Or let it pass: --allow-unknown")

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


# gin's words for a function, and for an argument that it lacks.
_NO_ARGUMENT = re.compile(r"Configurable '(\S+)' doesn't have a parameter named '(\S+)'\.?")


_NOT_FOUND = re.compile(r"Unable to open file: (\S+)\. Searched config paths: \['', (.*)\]\.")
_UNKNOWN = re.compile(r"No configurable matching (?:reference )?'(\S+)'\.?")


def message(error: BaseException) -> str:
  """Returns the text of an error as one line, without gin's account of where it came from."""
  text = re.split(r"\s*\n\s*In call to configurable", str(error))[0]
  where = re.search(r"\s*\n\s*In (?:file|bindings string).*", text, re.DOTALL)
  if where:
    text = text[: where.start()]
    if place := re.search(r'In file "?([^"\n]+?)"?,? line (\d+)', where[0]):
      text += f" ({place[1]}, line {place[2]})"
  text = _NO_ARGUMENT.sub(r"\1 has no argument '\2'", " ".join(text.split()))
  text = _UNKNOWN.sub(
    r"no gin file that was read imports '\1': set it in one, below its line `import ...`", text
  )
  text = _NOT_FOUND.sub(r"\1 is not here, nor in \2", text)
  if module := re.search(r"No module named '([\w.]+)'", text):
    return (
      f"needs the Python module {module[1]!r}, which is not installed: `nm-sparsity doctor` says "
      "what is missing"
    )
  plain = isinstance(error, ValueError | RuntimeError | OSError | SyntaxError | NameError)
  if text and (plain or "Ambiguous selector" in text):
    return text
  return f"{type(error).__name__}: {text}".rstrip(": ")


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
  "ROW": "\"'...'\", a row that `nm-sparsity rows` lists",
  "T5_SIZE": "\"'base'\"",
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


def unread(name: str, known: Collection[str]) -> str:
  """Returns what to say about an override that nothing reads.

  Args:
    name: the macro.
    known: macros that the user may have meant.
  """
  close = difflib.get_close_matches(name, sorted(known), 1)
  return f"{name} is set, but nothing reads it" + (f"; did you mean {close[0]}?" if close else "")


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
      found.append(unread(given[1], read))
  return found
