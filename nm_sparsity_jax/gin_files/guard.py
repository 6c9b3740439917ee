"""What a gin file may import and call while it is only looked at.

    with guard.reading(gin, {"my_models"}):   # what the user named, beside `ALLOWED`
      gin.parse_config_file(file)

gin's `import` runs a module, and `@os.system()` runs a command. A program that trains does what its
file says; `plan` reads files that somebody else wrote. This is a list of packages, and no sandbox:
what they offer is called with the values of the file.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator
from typing import Any

# Packages that define models, optimizers and tasks.
ALLOWED = frozenset(
    {"nm_sparsity_jax", "t5x_tasks", "t5x", "t5", "seqio", "airio", "jestimator", "clu", "flax",
     "jax", "optax", "gin"}
)  # fmt: skip
# Of these packages: what runs or writes, so no value may be made by calling it.
_RUN = (
    "nm_sparsity_jax.runs", "nm_sparsity_jax.local.train", "nm_sparsity_jax.commands",
    "nm_sparsity_jax.cli", "nm_sparsity_jax.sweep", "nm_sparsity_jax.quickstart",
    "nm_sparsity_jax.environment", "t5x.train", "t5x.eval", "t5x.infer", "t5x.main", "t5x.export",
    "jax.profiler", "jax._src.profiler", "jax.distributed", "jax._src.distributed",
)  # fmt: skip
_READ = "nm_sparsity_jax.runs.trained"  # reads the rules of a checkpoint, and writes nothing
_NEVER = frozenset(
    {"load", "save", "savez", "savez_compressed", "savetxt", "loadtxt", "fromfile", "genfromtxt",
     "memmap", "fromregex", "io_callback", "pure_callback", "rmtree", "remove", "write"}
)  # fmt: skip


def refuse_import(module: str, named: Collection[str]) -> None:
  """Refuses a module that is neither in the list nor of a package that the user named.

  Raises:
    ValueError: says which, and how to allow it.
  """
  root = module.partition(".")[0]
  if root not in ALLOWED and root not in _roots(named):
    raise ValueError(
      f"imports the module {module!r}, which would run it. If you trust that module, name it: "
      f"--import {module}"
    )


def refuse_call(function: Any, text: str, named: Collection[str]) -> None:
  """Refuses a function that gin reached through a module, and that is of another package.

  Args:
    function: a function or a class.
    text: how the file names it.
    named: modules that the user named.

  Raises:
    ValueError: says which, and how to allow it.
  """
  module = str(getattr(function, "__module__", None) or "an unknown module")
  root, name = module.partition(".")[0], str(getattr(function, "__name__", ""))
  if root in _roots(named):
    return
  hidden = any(word.startswith("__") for word in text.split(".")[1:])
  if root not in ALLOWED or name in _NEVER or hidden:
    raise ValueError(
      f"@{text} is {name or 'a function'!r} of {module}, which is not called. If you trust it, "
      f"name its module: --import {root}"
    )


def programs(gin: Any, named: Collection[str]) -> str:
  """Says which value is made by calling a program, such as @train.train(); '' for none.

  Args:
    gin: gin's module `gin.config`, which holds all bindings.
    named: modules that the user named.
  """
  for reference in gin.iterate_references(dict(gin._CONFIG)):
    function = reference.configurable.wrapped
    module = str(getattr(function, "__module__", ""))
    if module.partition(".")[0] in _roots(named) or module == _READ:
      continue
    if reference.evaluate and any(module == m or module.startswith(f"{m}.") for m in _RUN):
      return f"{reference!r} would run {module}.{function.__name__}, a program that makes no value"
  return ""


@contextlib.contextmanager
def reading(gin: Any, named: Collection[str] | None) -> Iterator[None]:
  """Reads gin files: names those that include each other, and lets them do what they may.

  Args:
    gin: gin's module `gin.config`.
    named: modules that the user named; None lets the files do anything.
  """
  with without_cycles(gin), contextlib.nullcontext() if named is None else within(gin, named):
    yield


@contextlib.contextmanager
def within(gin: Any, named: Collection[str]) -> Iterator[None]:
  """Reads gin files without importing or registering what is not allowed.

  Args:
    gin: gin's module `gin.config`.
    named: modules that the user named.
  """
  context = gin.ParseContext
  process_import, get_configurable = context.process_import, context.get_configurable

  def import_allowed(self: Any, statement: Any) -> Any:
    module = statement.module
    if module != "__main__" and not (statement.is_from and module.startswith("__gin__.")):
      refuse_import(module, named)
    return process_import(self, statement)

  def get_allowed(self: Any, selector: str) -> Any:
    if self._dynamic_registration:
      refuse_call(self._resolve_selector(selector)[1][-1], selector, named)
    found = get_configurable(self, selector)
    if found is not None:
      refuse_call(found.wrapped, selector, named)
    return found

  with _replaced(context, "process_import", import_allowed):
    with _replaced(context, "get_configurable", get_allowed):
      yield


@contextlib.contextmanager
def without_cycles(gin: Any) -> Iterator[None]:
  """Reads gin files, and names those that include each other.

  Args:
    gin: gin's module `gin.config`.
  """
  parse, above = gin.parse_config_file, []

  def parse_once(config_file: Any, *args: Any, **kwargs: Any) -> Any:
    name = os.path.normpath(os.fspath(config_file))
    if name in above:
      raise ValueError(f"gin files include each other: {' -> '.join([*above, name])}")
    above.append(name)
    try:
      return parse(config_file, *args, **kwargs)
    finally:
      above.pop()

  with _replaced(gin, "parse_config_file", parse_once):
    yield


@contextlib.contextmanager
def _replaced(owner: Any, name: str, new: Any) -> Iterator[None]:
  before = getattr(owner, name)
  setattr(owner, name, new)
  try:
    yield
  finally:
    setattr(owner, name, before)


def _roots(named: Collection[str]) -> set[str]:
  return {module.partition(".")[0] for module in named}
