"""A sweep's file: recipes x patterns x seeds as runs of the local runner.

    FILE.toml -> [read] -> Sweep: the start runs and the cells, seed by seed

A cell is what `nm-sparsity train` makes of the file's gin files and macros, in a folder of its own.
`sweep.check` reads the gin files; this module looks at the file alone.
"""

from __future__ import annotations

import dataclasses
import pathlib
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from nm_sparsity_jax.core import errors
from nm_sparsity_jax.core.patterns import NM
from nm_sparsity_jax.integrations import gin_files
from nm_sparsity_jax.runs import files, folders

_KEYS: Mapping[str, type] = {
  "out": str, "gin_files": list, "recipes": list, "patterns": list, "seeds": list, "baseline": str,
  "dense": bool, "macros": dict, "start": dict, "variants": dict,
}  # fmt: skip
_SET_BY_SWEEP = ("RECIPE", "PATTERN", "RANDOM_SEED", "DATA_SEED", "MODEL_DIR")
_SET_BY_START = ("INITIAL_CHECKPOINT_PATH", "PRETRAINED_STEPS")
_DENSE_RUN = dict.fromkeys(("BETA", "GRADIENT", "RECIPE_FIELDS"))  # a dense run refuses them
_FROM_SCRATCH = {"DENSE_STEPS": 0, "FINETUNE_STEPS": 0, "INITIAL_CHECKPOINT_PATH": None}


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
    modules = [f"--import={name}" for name in self.imports]
    named = [f"--gin_file={file}" for file in self.gin_files]
    return ["train", *modules, *named, *(f"--gin.{name}={v!r}" for name, v in cell.macros.items())]


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
    return _sweep(file, tomllib.loads(text), imports)
  except (ValueError, RecursionError) as e:
    raise ValueError(f"{file}: {e}") from e


def _sweep(file: str, table: Mapping[str, Any], imports: Sequence[str]) -> Sweep:
  for key, value in table.items():
    if key not in _KEYS:
      there = ", ".join(_KEYS)
      raise ValueError(f"unknown key {key!r}: there is {there}. A gin macro belongs in [macros].")
    if not isinstance(value, _KEYS[key]):
      raise ValueError(f"{key}={value!r}: give a {_KEYS[key].__name__}.")
  named, seeds = _values(table, "recipes"), _values(table, "seeds")
  # Without a dense run of the same steps, nothing says what sparsity costs: training on makes a
  # dense network better too.
  recipes = named if "dense" in named or not table.get("dense", True) else ["dense", *named]
  patterns = _values(table, "patterns") if recipes != ["dense"] else []
  for seed in seeds:
    errors.check_seed("seeds", seed)
  variants = _variants(table)
  _check_recipes(recipes, variants)
  baseline = table.get("baseline", named[0])
  if baseline not in recipes:
    raise ValueError(f"baseline={baseline!r}: name one of the recipes, {', '.join(recipes)}.")
  out = _folder(table.get("out", ""))
  starts = _starts(table, seeds, out)
  from_start = _SET_BY_START if starts else ()
  macros = _macros(table, "macros", from_start)
  cells = []
  for seed in seeds:
    start = starts.get(seed)
    own = dict(macros)
    if start is not None:
      last = f"checkpoint_{start.macros['SPARSE_STEPS']}"
      own["INITIAL_CHECKPOINT_PATH"] = str(start.folder / last)
    for recipe in recipes:
      mine = {"RECIPE": recipe, **own, **variants.get(recipe, {})}
      for pattern in [None] if recipe == "dense" else map(_pattern, patterns):
        name = "-".join([recipe, *([pattern.replace(":", "_")] if pattern else [])])
        cells.append(_cell(name, recipe, pattern, seed, out, mine, start))
  return Sweep(
    file=file, out=out, gin_files=_values(table, "gin_files"), recipes=recipes,
    patterns=list(map(_pattern, patterns)), seeds=seeds, baseline=baseline, starts=starts,
    cells=cells, imports=tuple(imports),
  )  # fmt: skip


def _starts(table: Mapping[str, Any], seeds: Sequence[int], out: pathlib.Path) -> dict[int, Cell]:
  """Returns the dense run of each seed that [start] asks for."""
  if "start" not in table:
    return {}
  own = _macros(table, "start", (*_FROM_SCRATCH, "PRETRAINED_STEPS"))
  if "SPARSE_STEPS" not in own:
    raise ValueError("start: SPARSE_STEPS is missing: set the steps of that dense run.")
  macros = {"RECIPE": "dense", **_macros(table, "macros"), **own, **_FROM_SCRATCH}
  return {seed: _cell("start", "dense", None, seed, out, macros) for seed in seeds}


def _cell(
  name: str,
  recipe: str,
  pattern: str | None,
  seed: int,
  out: pathlib.Path,
  macros: Mapping[str, Any],
  start: Cell | None = None,
) -> Cell:
  folder = out / f"{name}-seed{seed}"
  ours = {"PATTERN": pattern, "RANDOM_SEED": seed, "DATA_SEED": seed, "MODEL_DIR": str(folder)}
  macros = {**macros, **ours}
  if recipe == "dense":
    macros |= _DENSE_RUN
  return Cell(recipe=recipe, pattern=pattern, seed=seed, folder=folder, macros=macros, start=start)


# --- values of keys -------------------------------------------------------------------------------


def _values(table: Mapping[str, Any], key: str) -> list[Any]:
  values = table.get(key, [])
  if not values:
    raise ValueError(f"{key} is missing or empty: give a list.")
  if twice := [v for v in values if values.count(v) > 1]:
    raise ValueError(f"{key}: {twice[0]!r} stands there twice, which would be one run twice.")
  return values


def _pattern(text: str) -> str:
  """Returns a pattern as it is written everywhere: '01:4' is '1:4'."""
  return str(NM.parse(text))


def _folder(out: str) -> pathlib.Path:
  if not out or "://" in out:
    raise ValueError(f"out={out!r}: give a folder of this machine, such as out = 'sweeps/first'.")
  folder = pathlib.Path(out).expanduser()
  files.check_folder("out", folder)
  if run := folders.run_around(folder):
    raise ValueError(f"out={out!r} is, or lies in, the folder of a run, {run!r}: take another.")
  return folder


def _macros(
  table: Mapping[str, Any], key: str, elsewhere: Collection[str] = ()
) -> Mapping[str, Any]:
  """Returns a table of macros, none of which the sweep itself sets."""
  macros = table.get(key, {})
  for name in (*_SET_BY_SWEEP, *elsewhere):
    if name in macros:
      raise ValueError(f"{key}: {name} is set by the sweep: leave it out.")
  return macros


def _variants(table: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
  """Returns the variants: name -> macros, RECIPE among them."""
  from nm_sparsity_jax.recipes import RECIPES

  found = {}
  for name, macros in table.get("variants", {}).items():
    recipe = macros.get("RECIPE") if isinstance(macros, dict) else None
    if name in (*RECIPES, "start") or recipe not in RECIPES:
      raise ValueError(
        f"variants.{name}: give a name that no recipe has, and a RECIPE, one of "
        f"{', '.join(RECIPES)}."
      )
    rest = {macro: value for macro, value in macros.items() if macro != "RECIPE"}
    found[name] = {"RECIPE": recipe, **_macros({name: rest}, name, _SET_BY_START)}
  return found


def _check_recipes(recipes: Sequence[str], variants: Mapping[str, Any]) -> None:
  from nm_sparsity_jax.recipes import RECIPES

  for recipe in recipes:
    if recipe not in (*RECIPES, *variants):
      raise ValueError(
        f"recipes: {recipe!r} is not one of {', '.join((*RECIPES, *variants))}. For a recipe of "
        "your own, name the module that registers it: --import MODULE."
      )
