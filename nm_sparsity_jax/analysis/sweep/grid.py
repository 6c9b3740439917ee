"""A sweep's file: recipes x patterns x seeds as runs of the local runner.

    FILE.toml -> [read] -> Sweep: the start runs and the cells, seed by seed

A cell is what `nm-sparsity train` makes of the file's gin files and macros, in a folder of its own.
Here the file alone is looked at; `sweep.check` reads the gin files.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import pathlib
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nm_sparsity_jax.core import errors
from nm_sparsity_jax.core.patterns import NM
from nm_sparsity_jax.integrations import gin_files
from nm_sparsity_jax.runs import files, folders

_KEYS = {
  "out": "the folder of the sweep, a string",
  "gin_files": "the gin files of each run, a list of strings",
  "recipes": "recipes, a list of names of recipes and of variants",
  "patterns": "patterns, a list of strings such as '1:8'",
  "seeds": "seeds, a list of whole numbers",
  "baseline": "the recipe that the others are compared with, one of the recipes",
  "dense": "whether a dense run of the same steps is beside the sparse ones, true or false",
  "macros": "a table of gin macros",
  "variants": "tables of gin macros by name, each with a RECIPE",
  "start": "a table of gin macros, for a dense run from scratch that a seed's runs start from",
}
# What the sweep itself sets.
_OURS = {
  "RECIPE": "recipes", "PATTERN": "patterns", "RANDOM_SEED": "seeds", "DATA_SEED": "seeds",
  "MODEL_DIR": "out",
}  # fmt: skip
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*([./][A-Za-z_][A-Za-z0-9_]*)*")  # one line of gin
_INCLUDE = re.compile(r"""(?m)^\s*include\s+['"]([^'"]+)['"]""")
_OF_SPARSE = ("BETA", "GRADIENT", "RECIPE_FIELDS")  # a dense run refuses them
_FROM_START = {"INITIAL_CHECKPOINT_PATH": "start", "PRETRAINED_STEPS": "start"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
  """One run.

  Attributes:
    recipe: its name, or a variant's.
    pattern: None for a dense run.
    seed: of parameters, dropout and data.
    folder: its MODEL_DIR.
    macros: all that the sweep's file says, and the above.
    start: the run whose last checkpoint it starts from.
  """

  recipe: str
  pattern: str | None
  seed: int
  folder: pathlib.Path
  macros: Mapping[str, Any]
  start: Cell | None = None

  @property
  def name(self) -> str:
    """Returns the name of its folder, such as 'sr_ste-1_8-seed0'."""
    return self.folder.name

  @property
  def bindings(self) -> list[str]:
    """Returns its macros as lines for gin."""
    return [f"{name} = {value!r}" for name, value in self.macros.items()]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sweep:
  """What a file asks for.

  Attributes:
    file: where it was read.
    out: the folder of all runs.
    gin_files: of each run, in order.
    recipes, patterns, seeds: the grid.
    baseline: the recipe that the others are compared with.
    starts: seed -> the dense run that its cells start from; empty without a table `start`.
    cells: the grid's runs, seed by seed; `dense` once a seed.
    imports: modules that each run imports first.
  """

  file: str
  out: pathlib.Path
  gin_files: Sequence[str]
  recipes: Sequence[str]
  patterns: Sequence[str]
  seeds: Sequence[int]
  baseline: str
  starts: Mapping[int, Cell]
  cells: Sequence[Cell]
  imports: Sequence[str] = ()

  def runs(self) -> Iterator[Cell]:
    """Yields all runs in the order in which they are done: each seed's start, then its cells."""
    for seed in self.seeds:
      yield from [self.starts[seed]] if seed in self.starts else []
      yield from (cell for cell in self.cells if cell.seed == seed)

  def is_start(self, cell: Cell) -> bool:
    """Returns whether a run is one that others start from."""
    return self.starts.get(cell.seed) is cell

  def command(self, cell: Cell) -> list[str]:
    """Returns the words of the command that makes a run, after `nm-sparsity`."""
    files = [f"--gin_file={file}" for file in self.gin_files]
    modules = [f"--import={name}" for name in self.imports]
    return ["train", *modules, *files, *(f"--gin.{name}={v!r}" for name, v in cell.macros.items())]


_MOST_RUNS = 10_000


def read(file: str, imports: Sequence[str] = ()) -> Sweep:
  """Reads a sweep's file.

      sweep = read("examples/sweep_mini_glue.toml")
      [cell.name for cell in sweep.runs()]    # ['start-seed0', 'dense-seed0', ...]

  Args:
    file: a path, from here or from the folder that `nm-sparsity gin-path` prints; docs/sweep.md
      describes what is in it.
    imports: modules of your own, such as one that registers a recipe. You have imported them; each
      run is a process of its own and imports them too.

  Raises:
    ValueError: there is no such file, it is not TOML, or a key is unknown, missing or wrong.
  """
  text = files.read_text(gin_files.find(file))
  try:
    given = tomllib.loads(text)
  except (ValueError, RecursionError) as e:
    raise ValueError(f"{file} is not TOML: {e}") from e
  try:
    return dataclasses.replace(_sweep(file, given), imports=tuple(imports))
  except ValueError as e:
    raise ValueError(f"{file}: {e}") from None


def _sweep(file: str, given: Mapping[str, Any]) -> Sweep:
  """Makes the sweep of what TOML gave."""
  _check_keys(given)
  named = _list(given, "recipes", str)
  recipes = _with_dense(given, named)
  is_sparse = any(recipe != "dense" for recipe in recipes)
  patterns = [_pattern(text) for text in _list(given, "patterns", str, needed=is_sparse)]
  _distinct("patterns", patterns)
  seeds = _list(given, "seeds", int)
  for seed in seeds:
    errors.check_seed("seeds", seed)
  variants = _variants(given)
  _check_recipes(recipes, variants)
  _refuse_too_many(recipes, patterns, seeds)
  baseline = given.get("baseline", named[0])
  if baseline not in recipes:
    raise ValueError(f"baseline: {baseline!r} is not one of the recipes, {', '.join(recipes)}.")
  out = given.get("out")
  if not isinstance(out, str) or not out or "://" in out:
    raise ValueError(f"out: give {_KEYS['out']} of this machine, such as out = 'sweeps/first'.")
  macros = _macros(given, "macros", {})
  folder = pathlib.Path(out).expanduser()
  files.check_folder("out", folder)
  if run := folders.run_around(folder):
    raise ValueError(f"out: {out!r} is, or lies in, the folder of a run, {run!r}: take another.")
  named_files = _list(given, "gin_files", str)
  unset = dict.fromkeys(_of_sparse_in(named_files))
  starts = {
    seed: dataclasses.replace(start, macros={**start.macros, **unset})
    for seed, start in _starts(given, macros, seeds, folder).items()
  }
  cells = [
    _cell_of(recipe, pattern, seed, folder, macros, variants, starts.get(seed))
    for seed in seeds
    for recipe in recipes
    for pattern in ([None] if recipe == "dense" else patterns)
  ]
  cells = [
    dataclasses.replace(cell, macros={**cell.macros, **unset}) if cell.recipe == "dense" else cell
    for cell in cells
  ]
  return Sweep(
    file=file, out=folder, gin_files=named_files, recipes=recipes,
    patterns=patterns, seeds=seeds, baseline=baseline, starts=starts, cells=cells,
  )  # fmt: skip


def _refuse_too_many(recipes: Sequence[str], patterns: Sequence[str], seeds: Sequence[int]) -> None:
  """Raises ValueError where the grid has more runs than a sweep may have; dense is one a seed."""
  of_a_seed = sum(1 if recipe == "dense" else max(len(patterns), 1) for recipe in recipes)
  if (runs := of_a_seed * len(seeds)) > _MOST_RUNS:
    raise ValueError(f"recipes x patterns x seeds are {runs:,} runs, and at most {_MOST_RUNS:,}.")


def _with_dense(given: Mapping[str, Any], recipes: list[str]) -> list[str]:
  """Returns the recipes with `dense` among them, unless the file leaves it out.

  Without a dense run of the same steps, nothing says what sparsity costs: training on makes a dense
  network better too.
  """
  wanted = given.get("dense", True)
  if not isinstance(wanted, bool):
    raise ValueError(f"dense: give true or false; not {wanted!r}.")
  if not wanted and "dense" in recipes:
    raise ValueError("dense: it is false, but 'dense' is among the recipes: keep one.")
  return ["dense", *recipes] if wanted and "dense" not in recipes else recipes


def _of_sparse_in(names: Sequence[str]) -> list[str]:
  """Returns the macros of sparse runs that gin files set, which a dense run must unset.

  What is None is unset already, as in gin_configs/sparsity.gin, which every run includes.
  """
  texts = _texts(names, {})
  is_set = lambda m: any(re.search(rf"(?m)^{m}\s*=(?!\s*None\b)", text) for text in texts)
  return [m for m in _OF_SPARSE if is_set(m)]


def _texts(names: Sequence[str], seen: dict[str, str]) -> list[str]:
  """Returns the texts of gin files and of all that they include, each once; fills `seen`."""
  for name in names:
    if name not in seen:
      seen[name] = ""  # also where it includes itself
      with contextlib.suppress(ValueError):  # `check` says which file is not there
        seen[name] = files.read_text(gin_files.find(name))
        _texts(_INCLUDE.findall(seen[name]), seen)
  return list(seen.values())


# --- cells --------------------------------------------------------------------------------------


def _starts(
  given: Mapping[str, Any], macros: Mapping[str, Any], seeds: Sequence[int], folder: pathlib.Path
) -> dict[int, Cell]:
  """Makes the dense run of each seed that [start] asks for."""
  if "start" not in given:
    return {}
  if also := sorted(_FROM_START.keys() & macros.keys()):
    raise ValueError(f"macros: {also[0]} is set, but [start] makes the checkpoint: keep one.")
  own = {"DENSE_STEPS": 0, "FINETUNE_STEPS": 0, "INITIAL_CHECKPOINT_PATH": None}
  of_start = {"RECIPE": "dense", **macros, **own, **_macros(given, "start", own)}
  if "SPARSE_STEPS" not in given["start"]:
    raise ValueError("start: SPARSE_STEPS is missing, the steps of that dense run.")
  return {seed: _cell("start", "dense", None, seed, folder, of_start) for seed in seeds}


def _cell_of(
  recipe: str,
  pattern: str | None,
  seed: int,
  folder: pathlib.Path,
  macros: Mapping[str, Any],
  variants: Mapping[str, Mapping[str, Any]],
  start: Cell | None,
) -> Cell:
  """Makes a cell of the grid."""
  name = recipe if pattern is None else f"{recipe}-{pattern.replace(':', '_')}"
  own = {"RECIPE": recipe, **macros}
  if start is not None:
    last = f"checkpoint_{start.macros['SPARSE_STEPS']}"
    own["INITIAL_CHECKPOINT_PATH"] = str(start.folder / last)
  own |= variants.get(recipe, {})
  return _cell(name, recipe, pattern, seed, folder, own, start)


def _cell(name, recipe, pattern, seed, out, macros, start=None) -> Cell:
  """Makes a cell; a dense one loses the macros that only sparse runs take."""
  folder = out / f"{name}-seed{seed}"
  if recipe == "dense":
    macros = {name: value for name, value in macros.items() if name not in _OF_SPARSE}
  ours = {"PATTERN": pattern, "RANDOM_SEED": seed, "DATA_SEED": seed, "MODEL_DIR": str(folder)}
  macros = {**macros, **ours}
  return Cell(recipe=recipe, pattern=pattern, seed=seed, folder=folder, macros=macros, start=start)


# --- keys ---------------------------------------------------------------------------------------


def _check_keys(given: Mapping[str, Any]) -> None:
  """Refuses a key that a sweep's file does not have."""
  for key in given:
    if key not in _KEYS:
      close = difflib.get_close_matches(key, _KEYS, 1)
      # A macro behind the header of no table lands here.
      meant = f"did you mean {close[0]!r}?" if close else "A gin macro belongs in [macros]."
      raise ValueError(f"unknown key {key!r}; there is {', '.join(_KEYS)}. {meant}")


def _check_recipes(recipes: Sequence[str], variants: Mapping[str, Any]) -> None:
  """Refuses a recipe that is not there, and a variant that no run has."""
  from nm_sparsity_jax.recipes import RECIPES

  for recipe in recipes:
    if recipe not in (*RECIPES, *variants):
      raise ValueError(
        f"recipes: {recipe!r} is not one of {', '.join((*RECIPES, *variants))}. For a recipe of "
        "own, name the module that registers it: --import MODULE."
      )
  if idle := [name for name in variants if name not in recipes]:
    raise ValueError(f"variants: {idle[0]!r} is not among the recipes: add it there.")


def _variants(given: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
  """Reads the variants: name -> macros, RECIPE among them."""
  from nm_sparsity_jax.recipes import RECIPES

  tables = given.get("variants", {})
  if not isinstance(tables, dict):
    raise ValueError(f"variants: give {_KEYS['variants']}, [variants.NAME]; not {tables!r}.")
  found = {}
  for name in tables:
    if not re.fullmatch(r"\w+", name) or name in (*RECIPES, "start"):
      raise ValueError(f"variants: {name!r} cannot be a variant's name: take another one, of \\w.")
    recipe = tables[name].get("RECIPE") if isinstance(tables[name], dict) else None
    if recipe not in RECIPES or recipe == "dense":
      raise ValueError(
        f"variants: {name} needs a RECIPE, one of {', '.join(r for r in RECIPES if r != 'dense')}."
      )
    rest = {macro: value for macro, value in tables[name].items() if macro != "RECIPE"}
    found[name] = {**_macros({name: rest}, name, _FROM_START), "RECIPE": recipe}
  return found


def _list(given: Mapping[str, Any], key: str, kind: type, needed: bool = True) -> list[Any]:
  """Reads a list of values of one kind, each of them once."""
  values = given.get(key, [])
  if (
    not isinstance(values, list)
    or not all(isinstance(v, kind) and not isinstance(v, bool) for v in values)
    or (needed and not values)
  ):
    was = f"not {given[key]!r}" if key in given else "it is missing"
    raise ValueError(f"{key}: give {_KEYS[key]}; {was}.")
  _distinct(key, values)
  return values


def _distinct(key: str, values: Sequence[Any]) -> None:
  """Refuses a value that stands there twice."""
  if twice := [v for v in values if values.count(v) > 1]:
    raise ValueError(f"{key}: {twice[0]!r} stands there twice, which would be one run twice.")


def _pattern(text: str) -> str:
  """Returns a pattern as it is written everywhere: '01:4' is '1:4'."""
  try:
    return str(NM.parse(text))
  except ValueError as e:
    raise ValueError(f"patterns: {e}") from None


def _check_value(where: str, value: Any) -> None:
  """Refuses a value that gin would read as another one, such as a date or a very long number."""
  if isinstance(value, list):
    for item in value:
      _check_value(where, item)
  elif isinstance(value, dict):
    for item in value.values():
      _check_value(where, item)
  elif not isinstance(value, str | int | float | bool) or (
    isinstance(value, int) and not -(1 << 63) <= value < 1 << 63
  ):
    raise ValueError(f"{where} is {str(value)[:40]}: give text, numbers of 64 bits, true or false.")


def _macros(given: Mapping[str, Any], key: str, fixed: Mapping[str, Any]) -> dict[str, Any]:
  """Reads a table of macros, none of which is set elsewhere or `fixed`."""
  table = given.get(key, {})
  if not isinstance(table, dict):
    raise ValueError(f"{key}: give a table of gin macros, [{key}]; not {table!r}.")
  for name, value in table.items():
    if not _NAME.fullmatch(name):
      raise ValueError(
        f"{key}: {name!r} is not the name of a gin macro or parameter: write letters, digits and "
        "underscores, with dots between the words of a parameter."
      )
    _check_value(f"{key}: {name}", value)
    if name in _OURS:
      raise ValueError(f"{key}: {name} is set by the sweep, from {_OURS[name]!r}; leave it out.")
    if name in fixed:
      raise ValueError(f"{key}: {name} cannot be set there; leave it out.")
  return table
