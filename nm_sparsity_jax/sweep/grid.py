"""A sweep's file: recipes x patterns x seeds as runs of the local runner, all checked beforehand.

    FILE.toml -> [read] -> Sweep: a start run and its cells, seed by seed
              -> [check] gin files, macros, rules, shapes, settings of runs that are there
              -> a cell's folder -> its state: done, begun, failed, open

A cell is what `nm-sparsity train` makes of the file's gin files and macros, in a folder of its own.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import pathlib
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nm_sparsity_jax import gin_files
from nm_sparsity_jax.patterns import NM
from nm_sparsity_jax.plan import planner
from nm_sparsity_jax.runs import files, folders
from nm_sparsity_jax.runs import settings as run_settings

_KEYS = {
  "out": "the folder of the sweep, a string",
  "gin_files": "the gin files of each run, a list of strings",
  "recipes": "recipes, a list of names of recipes and of variants",
  "patterns": "patterns, a list of strings such as '1:8'",
  "seeds": "seeds, a list of whole numbers",
  "baseline": "the recipe that the others are compared with, one of the recipes",
  "macros": "a table of gin macros",
  "variants": "tables of gin macros by name, each with a RECIPE",
  "start": "a table of gin macros, for a dense run from scratch that a seed's runs start from",
}
# What the sweep itself sets.
_OURS = {
  "RECIPE": "recipes", "PATTERN": "patterns", "RANDOM_SEED": "seeds", "DATA_SEED": "seeds",
  "MODEL_DIR": "out",
}  # fmt: skip
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
    return self.folder.name

  @property
  def bindings(self) -> list[str]:
    """For gin."""
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

  def runs(self) -> Iterator[Cell]:
    """All runs in the order in which they are done: each seed's start, then its cells."""
    for seed in self.seeds:
      yield from [self.starts[seed]] if seed in self.starts else []
      yield from (cell for cell in self.cells if cell.seed == seed)

  def command(self, cell: Cell) -> list[str]:
    """The words of the command that makes a run, after `nm-sparsity`."""
    files = [f"--gin_file={file}" for file in self.gin_files]
    return ["train", *files, *(f"--gin.{name}={v!r}" for name, v in cell.macros.items())]


# --- the file -----------------------------------------------------------------------------------


def read(file: str) -> Sweep:
  """The sweep of a file.

  Raises:
    ValueError: it is no TOML, or a key is unknown, missing or wrong.
  """
  try:
    given = tomllib.loads(pathlib.Path(file).read_text("utf-8"))
  except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
    raise ValueError(f"{file} is no TOML: {e}") from e
  try:
    return _sweep(file, given)
  except ValueError as e:
    raise ValueError(f"{file}: {e}") from None


def _sweep(file: str, given: Mapping[str, Any]) -> Sweep:
  for key in given:
    if key not in _KEYS:
      close = difflib.get_close_matches(key, _KEYS, 1)
      # A macro behind the header of no table lands here.
      meant = f"did you mean {close[0]!r}?" if close else "A gin macro belongs into [macros]."
      raise ValueError(f"unknown key {key!r}; there is {', '.join(_KEYS)}. {meant}")
  recipes = _list(given, "recipes", str)
  sparse = [recipe for recipe in recipes if recipe != "dense"]
  patterns = [_pattern(text) for text in _list(given, "patterns", str, needed=bool(sparse))]
  _distinct("patterns", patterns)
  seeds = _list(given, "seeds", int)
  if below := [seed for seed in seeds if seed < 0]:
    raise ValueError(f"seeds: {below[0]} is below 0.")
  variants = _variants(given)
  from nm_sparsity_jax.recipes import RECIPES

  for recipe in recipes:
    if recipe not in (*RECIPES, *variants):
      raise ValueError(f"recipes: {recipe!r} is none of {', '.join((*RECIPES, *variants))}.")
  if idle := [name for name in variants if name not in recipes]:
    raise ValueError(f"variants: {idle[0]!r} is not among the recipes: add it there.")
  baseline = given.get("baseline", recipes[0])
  if baseline not in recipes:
    raise ValueError(f"baseline: {baseline!r} is none of the recipes, {', '.join(recipes)}.")
  out = given.get("out")
  if not isinstance(out, str) or not out or "://" in out:
    raise ValueError(f"out: give {_KEYS['out']} of this machine, such as out = 'sweeps/first'.")
  macros = _macros(given, "macros", {})
  folder = pathlib.Path(out).expanduser()
  files.check_folder("out", folder)
  starts = {}
  if "start" in given:
    if also := sorted(_FROM_START.keys() & macros.keys()):
      raise ValueError(f"macros: {also[0]} is set, but [start] makes the checkpoint: keep one.")
    own = {"DENSE_STEPS": 0, "FINETUNE_STEPS": 0, "INITIAL_CHECKPOINT_PATH": None}
    of_start = {"RECIPE": "dense", **macros, **own, **_macros(given, "start", own)}
    if "SPARSE_STEPS" not in given["start"]:
      raise ValueError("start: SPARSE_STEPS is missing, the steps of that dense run.")
    starts = {seed: _cell("start", "dense", None, seed, folder, of_start) for seed in seeds}
  cells = []
  for seed in seeds:
    start = starts.get(seed)
    if start is not None:
      last = f"checkpoint_{start.macros['SPARSE_STEPS']}"
      macros = {**macros, "INITIAL_CHECKPOINT_PATH": str(start.folder / last)}
    for recipe in recipes:
      for pattern in [None] if recipe == "dense" else patterns:
        name = recipe if pattern is None else f"{recipe}-{pattern.replace(':', '_')}"
        own = {"RECIPE": recipe, **macros, **variants.get(recipe, {})}
        cells.append(_cell(name, recipe, pattern, seed, folder, own, start))
  return Sweep(
    file=file, out=folder, gin_files=_list(given, "gin_files", str), recipes=recipes,
    patterns=patterns, seeds=seeds, baseline=baseline, starts=starts, cells=cells,
  )  # fmt: skip


def _cell(name, recipe, pattern, seed, out, macros, start=None) -> Cell:
  folder = out / f"{name}-seed{seed}"
  if recipe == "dense":
    macros = {name: value for name, value in macros.items() if name not in _OF_SPARSE}
  ours = {"PATTERN": pattern, "RANDOM_SEED": seed, "DATA_SEED": seed, "MODEL_DIR": str(folder)}
  macros = {**macros, **ours}
  return Cell(recipe=recipe, pattern=pattern, seed=seed, folder=folder, macros=macros, start=start)


def _variants(given: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
  """Name -> macros, RECIPE among them."""
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
  if twice := [v for v in values if values.count(v) > 1]:
    raise ValueError(f"{key}: {twice[0]!r} stands there twice, which would be one run twice.")


def _pattern(text: str) -> str:
  try:
    return str(NM.parse(text))
  except ValueError as e:
    raise ValueError(f"patterns: {e}") from None


def _macros(given: Mapping[str, Any], key: str, fixed: Mapping[str, Any]) -> dict[str, Any]:
  """A table of macros, none of which is set elsewhere or `fixed`."""
  table = given.get(key, {})
  if not isinstance(table, dict):
    raise ValueError(f"{key}: give a table of gin macros, [{key}]; not {table!r}.")
  for name in table:
    if name in _OURS:
      raise ValueError(f"{key}: {name} is set by the sweep, from {_OURS[name]!r}; leave it out.")
    if name in fixed:
      raise ValueError(f"{key}: {name} cannot be set there; leave it out.")
  return table


# --- the check ----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Checked:
  """What is known of a run from its configuration.

  Attributes:
    first: the global step before its first one.
    steps: how many it has.
    evaluation: the settings of its evaluations, as text.
  """

  first: int
  steps: int
  evaluation: str


class Check:
  """Reads every run's configuration, and raises with what is wrong; nothing is started.

  Attributes:
    runs: name of a run -> what is known of it.
    tasks: name, module, and rows of the embedding: what `check_tasks` looks at.
  """

  def __init__(self, sweep: Sweep):
    gin_files.see_modules_here()
    self.sweep = sweep
    self.runs: dict[str, Checked] = {}
    self.tasks: set[tuple[str, str | None, int]] = set()
    self._described: dict[tuple[str, str], str] = {}  # recipe, text of rules -> the cell
    self._wrong: list[str] = []
    self._refused: dict[str, list[Cell]] = {}  # what is said of rules -> of which runs
    changed: list[str] = []
    seen: set[tuple[str, str | None, bool]] = set()
    for cell in sweep.runs():
      config = gin_files.Config([".", gin_files.folder()], sweep.gin_files, cell.bindings)
      kind = cell.recipe, cell.pattern, cell in sweep.starts.values()
      if kind not in seen:  # seeds change nothing of what is looked at here
        seen.add(kind)
        self._configuration(cell, config, is_start=kind[2])
        if self._wrong and len(seen) == 1:  # wrong files, which the others have too
          break
      if not self._wrong and not self._refused:
        self.runs[cell.name] = self._steps(cell, config)
        changed += self._changed(cell, config)
    self._wrong += [f"{_of(cells)}: {text}" for text, cells in self._refused.items()]
    if changed and not self._wrong:
      more = f" So were {len(changed) - 1} more runs." if len(changed) > 1 else ""
      self._wrong.append(
        f"{changed[0]}.{more} Go on with the former settings, or take another `out`."
      )
    if self._wrong:
      raise ValueError(f"{sweep.file}: " + "; ".join(dict.fromkeys(self._wrong)))

  def _configuration(self, cell: Cell, config: gin_files.Config, is_start: bool) -> None:
    """Looks at files, macros, rules, and whether the rules fit the network."""
    section = "macros or start" if is_start else "macros"
    wrong = [f"gin_files, {section}: {text}" for text in config.errors]
    if not config.settings("Run"):
      wrong.append(
        "gin_files: none is a run file of `nm-sparsity train`: gin_configs/runs/local_train.gin or "
        "local_finetune.gin"
      )
    self._wrong += wrong
    if wrong:
      return
    try:
      rules = config.value("RULES")
      network = config.value("NETWORK")
      names = {config.value("MIXTURE_OR_TASK_NAME")}
      if "name" in config.settings("Evaluation"):
        names.add(config.argument("name", "Evaluation"))
      module, rows = config.get("MIXTURE_OR_TASK_MODULE"), network.config.vocab_size
      self.tasks |= {(name, module, rows) for name in names}
      params, axes = self._shapes(config, network)
      rules.with_logical_axes(axes).assign(params)
    except Exception as e:
      self._refused.setdefault(gin_files.message(e), []).append(cell)
      return
    if cell.pattern is not None:
      from nm_sparsity_jax import configure

      # A variant may differ from its recipe in what is none of the rules'.
      key = cell.recipe, configure.describe(rules)
      other = self._described.setdefault(key, cell.name)
      if other != cell.name:
        self._wrong.append(
          f"patterns: {cell.name} has the rules of {other}: SPARSITY_RULES names patterns of its "
          "own. Give places without one, {'ff': None}, in a gin file"
        )

  def _shapes(self, config: gin_files.Config, network: Any) -> Any:
    """Parameters and logical axes; all runs have one network."""
    if not hasattr(self, "_found"):
      self._found = planner.Planner(config)._shapes(network)
    return self._found

  def _steps(self, cell: Cell, config: gin_files.Config) -> Checked:
    steps = config.get("SPARSE_STEPS")
    if not isinstance(steps, int) or steps < 1:
      raise ValueError(f"{self.sweep.file}: SPARSE_STEPS is {steps!r}: give whole steps.")
    evaluation = run_settings.text(config.settings("Run").get("evaluation"))
    if cell.start is not None:
      return Checked(self.runs[cell.start.name].steps, steps, evaluation)
    initial = config.get("INITIAL_CHECKPOINT_PATH")
    try:
      return Checked(_step_of(initial) if initial else 0, steps, evaluation)
    except (OSError, ValueError) as e:
      # What is done needs its checkpoint no more: the name says the step.
      name = re.fullmatch(r"checkpoint_(\d+)", pathlib.PurePath(initial).name)
      known = name and Checked(int(name[1]), steps, evaluation)
      if known and is_done(cell, known):
        return known
      raise ValueError(
        f"{self.sweep.file}: INITIAL_CHECKPOINT_PATH: {e}. Name one that is there, or use [start]."
      ) from e

  def _changed(self, cell: Cell, config: gin_files.Config) -> list[str]:
    from nm_sparsity_jax.local import train

    settings = train.settings_of(config.settings("Run"))
    if what := run_settings.changed(cell.folder, settings):
      return [f"{cell.folder} was started with other settings: {what}"]
    # A run may go on with another evaluation. Runs of one table may not differ in it.
    file, now = evaluated_with(cell), self.runs[cell.name].evaluation
    before = file.read_text() if file.exists() else now
    return [f"{cell.folder} was evaluated by {before}, not by {now}"] if before != now else []

  def check_tasks(self) -> None:
    """Whether tasks are registered, and fit the embedding; imports seqio."""
    from nm_sparsity_jax.local import data

    for name, module, rows in sorted(self.tasks, key=str):
      try:
        data.import_seqio(module)
        data.mixture_or_task(name, module)
        data.check_vocabulary(name, rows)
      except ImportError as e:
        raise ValueError(f"{self.sweep.file}: MIXTURE_OR_TASK_MODULE={module!r}: {e}") from e
      except ValueError as e:
        raise ValueError(f"{self.sweep.file}: macros: {e}") from e


def _of(cells: Sequence[Cell]) -> str:
  """The key that runs with one mistake have in common, and what they are."""
  names = [c.name.rpartition("-")[0] for c in cells]
  if names == ["start"]:
    return "start"
  patterns, recipes = {c.pattern for c in cells}, {c.recipe for c in cells}
  one_pattern = len(patterns) == 1 and None not in patterns
  key = "patterns" if one_pattern else "recipes" if len(recipes) == 1 else "macros"
  return f"{key}: {', '.join(names)}"


@functools.cache
def _step_of(path: str) -> int:
  from nm_sparsity_jax.runs import checkpoint

  return checkpoint.read(path).step or 0


# --- states -------------------------------------------------------------------------------------


def failure(cell: Cell) -> pathlib.Path:
  """The file that says why a run failed, until it is tried again."""
  return cell.folder / "failed.txt"


def evaluated_with(cell: Cell) -> pathlib.Path:
  """The file that says how a run is evaluated."""
  return cell.folder / "evaluation.txt"


def steps_done(cell: Cell, known: Checked) -> int:
  """Those that a run would not do again."""
  found = folders.steps(cell.folder)
  return found[-1] - known.first if found else 0


def is_done(cell: Cell, known: Checked) -> bool:
  """Whether a run has its last evaluation and checkpoint."""
  return folders.is_done(cell.folder, known.first + known.steps)
