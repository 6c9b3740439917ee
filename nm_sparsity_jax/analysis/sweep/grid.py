"""A sweep's file: recipes x patterns x seeds as runs of the local runner.

    FILE.toml -> [read] -> Sweep: its cells, seed by seed

A cell is what `nm-sparsity train` makes of the file's gin files and macros, in a folder of its own.
`sweep.check` reads the gin files; this module looks at the file alone.
"""

from __future__ import annotations

import dataclasses
import pathlib
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any

from nm_sparsity_jax.core import errors
from nm_sparsity_jax.core.patterns import NM
from nm_sparsity_jax.integrations import gin_files
from nm_sparsity_jax.runs import files

_REQUIRED: Mapping[str, type] = {"out": str, "gin_files": list, "recipes": list, "seeds": list}
_KEYS: Mapping[str, type] = {
  **_REQUIRED, "patterns": list, "baseline": str, "dense": bool, "macros": dict, "start": dict,
  "variants": dict,
}  # fmt: skip
_SET_BY_SWEEP = {"PATTERN", "RANDOM_SEED", "DATA_SEED", "MODEL_DIR"}
START = "start"  # the name of the dense runs that others start from
# A dense run refuses these.
_DENSE: Mapping[str, Any] = dict.fromkeys(("BETA", "GRADIENT", "RECIPE_FIELDS"))
_FROM_SCRATCH = {
  "RECIPE": "dense", "DENSE_STEPS": 0, "FINETUNE_STEPS": 0, "INITIAL_CHECKPOINT_PATH": None,
}  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
  """One run.

  Attributes:
    recipe: its name, or a variant's; 'start' of a run that others start from.
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sweep:
  """What a file asks for.

  Attributes:
    file: where it was read.
    out: the folder of all runs.
    gin_files: of each run, in order.
    recipes, patterns, seeds: the grid.
    baseline: the recipe that the others are compared with.
    cells: all runs in the order in which they are done: of each seed its start, if there is a
      table [start], its dense run, and the others.
    imports: modules that each run imports first.
  """

  file: str
  out: pathlib.Path
  gin_files: Sequence[str]
  recipes: Sequence[str]
  patterns: Sequence[str]
  seeds: Sequence[int]
  baseline: str
  cells: Sequence[Cell]
  imports: Sequence[str] = ()

  def command(self, cell: Cell) -> list[str]:
    """Returns the words of the command that makes a run, after `nm-sparsity`."""
    modules = [f"--import={name}" for name in self.imports]
    named = [f"--gin_file={file}" for file in self.gin_files]
    return ["train", *modules, *named, *(f"--gin.{name}={v!r}" for name, v in cell.macros.items())]


def read(file: str, imports: Sequence[str] = ()) -> Sweep:
  """Reads a sweep's file.

      sweep = read("examples/sweep_mini_glue.toml")
      [cell.name for cell in sweep.cells]    # ['start-seed0', 'dense-seed0', ...]

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
    return _sweep(file, tomllib.loads(text), imports)
  except ValueError as e:
    raise ValueError(f"{file}: {e}") from e


def _sweep(file: str, table: Mapping[str, Any], imports: Sequence[str]) -> Sweep:
  _check_keys(table)
  recipes = list(dict.fromkeys(table["recipes"]))
  baseline = table.get("baseline", recipes[0])
  # Without a dense run of the same steps, nothing says what sparsity costs: training on makes a
  # dense network better too.
  if "dense" not in recipes and table.get("dense", True):
    recipes.insert(0, "dense")
  if baseline not in recipes:
    raise ValueError(f"baseline={baseline!r}: name one of the recipes, {', '.join(recipes)}.")
  seeds = list(dict.fromkeys(table["seeds"]))
  patterns = [str(NM.parse(text)) for text in table.get("patterns", [])]
  if not patterns and recipes != ["dense"]:
    raise ValueError("patterns is missing or empty: give a list such as ['1:8'].")
  out, macros = pathlib.Path(table["out"]).expanduser(), table.get("macros", {})
  cells = []
  for seed in seeds:
    errors.check_seed("seeds", seed)
    start, own = None, dict(macros)
    if START in table:
      dense = {**macros, **table[START], **_FROM_SCRATCH}
      start = _cell(START, None, seed, out, dense)
      last = start.folder / f"checkpoint_{dense['SPARSE_STEPS']}"
      own["INITIAL_CHECKPOINT_PATH"] = str(last)
      cells.append(start)
    for recipe in recipes:
      mine = {"RECIPE": recipe, **own, **table.get("variants", {}).get(recipe, {})}
      for pattern in [None] if recipe == "dense" else patterns:
        cells.append(_cell(recipe, pattern, seed, out, mine, start))
  return Sweep(
    file=file, out=out, gin_files=table["gin_files"], recipes=recipes, patterns=patterns,
    seeds=seeds, baseline=baseline, cells=cells, imports=tuple(imports),
  )  # fmt: skip


def _check_keys(table: Mapping[str, Any]) -> None:
  for key, value in table.items():
    if key not in _KEYS:
      there = ", ".join(_KEYS)
      raise ValueError(f"unknown key {key!r}: there is {there}. A gin macro belongs in [macros].")
    if not isinstance(value, _KEYS[key]):
      raise ValueError(f"{key}={value!r}: give a {_KEYS[key].__name__}.")
  if missing := [key for key in _REQUIRED if not table.get(key)]:
    raise ValueError(f"{', '.join(missing)}: missing or empty.")
  of_run = {*_SET_BY_SWEEP, "RECIPE"} | ({"INITIAL_CHECKPOINT_PATH"} if START in table else set())
  for macros, elsewhere in (
    (table.get("macros", {}), of_run),
    (table.get(START, {}), of_run),
    *((variant, _SET_BY_SWEEP) for variant in table.get("variants", {}).values()),
  ):
    if theirs := sorted(elsewhere & macros.keys()):
      raise ValueError(f"{', '.join(theirs)}: set by the sweep. Leave it out.")
  if START in table and not {**table.get("macros", {}), **table[START]}.get("SPARSE_STEPS"):
    raise ValueError("start: SPARSE_STEPS is missing: set the steps of that dense run.")


def _cell(
  recipe: str,
  pattern: str | None,
  seed: int,
  out: pathlib.Path,
  macros: Mapping[str, Any],
  start: Cell | None = None,
) -> Cell:
  words = [recipe, *([pattern.replace(":", "_")] if pattern else []), f"seed{seed}"]
  folder = out / "-".join(words)
  ours = {"PATTERN": pattern, "RANDOM_SEED": seed, "DATA_SEED": seed, "MODEL_DIR": str(folder)}
  macros = {**macros, **ours, **({} if pattern else _DENSE)}
  return Cell(recipe=recipe, pattern=pattern, seed=seed, folder=folder, macros=macros, start=start)
