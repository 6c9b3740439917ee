"""What gin has bound: macros, arguments of functions, and what is still unset.

    gin's table -> Bound: program, value, argument, settings, unset

`Config` is a `Bound` that reads files first.
"""

# pyright: reportMissingImports=false, reportMissingModuleSource=false

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

# What t5x's programs call the function that a run file configures.
PROGRAMS = {"train": "t5x.train", "evaluate": "t5x.eval", "infer": "t5x.infer"}
# The package of those of the local runner: train, evaluate, infer.
LOCAL = "nm_sparsity_jax.trainer"
# Macros that `plan` reads, whether a function does or not.
MADE = ("RULES", "NETWORK", "MODEL", "WORKLOAD")


class Unset(Exception):
  """A value needs macros that are not set; `Config.errors` names them already."""


class Unbound(KeyError):
  """No file mentions a macro, or binds an argument. (A `KeyError` of what gin calls is another.)"""


class Bound:
  """Holds one table of gin's: scope and selector -> argument -> value.

  Args:
    gin: the module `gin.config`.
    table: such as gin's own, which grows while files are read.

  Attributes:
    program: 'train', 'evaluate' or 'infer'; None without a run file.
    local: True for a program of the local runner, False for one of T5X.
  """

  def __init__(self, gin: Any, table: dict[tuple[str, str], dict[str, Any]]):
    self._gin, self._table = gin, table
    self.program: str | None = None
    self.local = False
    self._program_key: tuple[str, str] | None = None

  def _find_program(self) -> None:
    """Looks for the program that a run file configures."""
    self.program = self._program_key = None
    for scope, selector in self._table:
      name = selector.split(".")[-1]
      if not scope and name in PROGRAMS:
        function = self._gin._REGISTRY[selector].wrapped
        local = function.__module__.startswith(f"{LOCAL}.")
        if local or function.__module__ == PROGRAMS[name]:
          self.local, self.program, self._program_key = local, name, (scope, selector)
          return

  # --- macros -----------------------------------------------------------------------------------

  def _macro(self, name: str) -> dict[str, Any] | None:
    return self._table.get((name, "gin.macro"))

  def is_set(self, name: str) -> bool:
    """Returns True for a macro that has a value."""
    bound = self._macro(name)
    return bound is not None and not self._required(bound["value"])

  def read_macros(self) -> set[str]:
    """Returns the macros that a value, or `plan`, reads."""
    references = self._references(self._table)
    return {"/".join(r.scopes) for r in references if self._is_macro(r)} | set(MADE)

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
      names = [n for n in MADE if self._macro(n)]
      return set().union(*(self.needs(self._macro(n)) for n in names)) if names else set()
    found = self.needs(self._table)
    for (scope, selector), bound in self._table.items():
      for name, value in bound.items():
        if self._required(value):
          found.add(scope if selector == "gin.macro" else f"{selector.split('.')[-1]}.{name}")
    return found

  # --- values -----------------------------------------------------------------------------------

  def value(self, name: str) -> Any:
    """Returns the value of a macro; makes the objects that it refers to.

    Raises:
      Unset: the macro, or one that it needs, has no value.
      Unbound: no file mentions the macro.
    """
    bound = self._macro(name)
    if bound is None:
      raise Unbound(name)
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
    """Returns an argument of the program, or of another function `of`; else Unbound."""
    if of is None:
      if self._program_key is None or name not in self._table[self._program_key]:
        raise Unbound(name)
      return self._make(self._table[self._program_key][name])
    for (scope, selector), bound in self._table.items():
      if not scope and selector.split(".")[-1] == of and name in bound:
        return self._make(bound[name])
    raise Unbound(name)

  def argument_of(self, macro: str, name: str) -> Any:
    """Returns an argument that is bound for the function that a macro calls; else Unbound.

    Args:
      macro: such as OPTIMIZER = @optimizers.adamw().
      name: of the argument.
    """
    bound = self._macro(macro)
    value: Any = None if bound is None else bound["value"]
    if not isinstance(value, self._gin.ConfigurableReference):
      raise Unbound(macro)
    for scope in dict.fromkeys(("/".join(value.scopes), "")):
      arguments = self._table.get((scope, value.configurable.selector), {})
      if name in arguments:
        return self._make(arguments[name])
    raise Unbound(name)

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
