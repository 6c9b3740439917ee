"""A sweep's file: recipes x patterns x seeds as runs of the local runner.

    FILE.toml -> [read] -> Sweep: its runs, seed by seed, each made as its own process will make it

A run is what `nm-sparsity train` makes of the file's gin files and macros, in a folder of its own.
"""

from __future__ import annotations

import dataclasses
import pathlib
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from nm_sparsity_jax.core import errors
from nm_sparsity_jax.integrations import gin_files
from nm_sparsity_jax.runs import files, folders, trained
from nm_sparsity_jax.trainer import train

_REQUIRED = ("out", "gin_files", "recipes", "seeds", "patterns")
_OPTIONAL = ("baseline", "macros", "start", "variants")
_SET_BY_SWEEP = {"PATTERN", "RANDOM_SEED", "DATA_SEED", "MODEL_DIR"}
START = "start"  # the name of the dense runs that others start from
# A dense run refuses these.
_DENSE: Mapping[str, Any] = dict.fromkeys(("PATTERN", "BETA", "GRADIENT", "RECIPE_FIELDS"))
_FROM_SCRATCH = {
  "RECIPE": "dense", "DENSE_STEPS": 0, "FINETUNE_STEPS": 0, "INITIAL_CHECKPOINT_PATH": None,
}  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
  """One run, and what its folder says of it.

  Attributes:
    recipe: its name, or a variant's; 'start' of a run that others start from.
    pattern: None for a dense run.
    seed: of parameters, dropout and data.
    folder: its MODEL_DIR.
    macros: all that the sweep's file says, and the above.
    steps: how many it has.
    start: the run that it starts from, with its last checkpoint.
  """

  recipe: str
  pattern: str | None
  seed: int
  folder: pathlib.Path
  macros: Mapping[str, Any]
  steps: int
  start: Run | None = None

  @property
  def name(self) -> str:
    """Returns the name of its folder, such as 'sr_ste-1_8-seed0'."""
    return self.folder.name

  @property
  def failure(self) -> pathlib.Path:
    """Returns the file that says, as JSON, why it failed, until it is tried again."""
    return self.folder / "failed.json"

  @property
  def last(self) -> int:
    """Returns the global step at which it ends, once it has begun."""
    return trained.started(self.folder).get("start", 0) + self.steps

  def why_failed(self) -> str:
    """Returns why it failed; '' if it did not."""
    return files.read_json(self.failure, {}).get("error", "")

  def is_done(self) -> bool:
    """Returns whether it has its last evaluation and checkpoint."""
    # The evaluation is noted while the checkpoint is being written, which a full disk may end.
    return self.last in folders.evaluations(self.folder) and self.last in folders.steps(self.folder)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sweep:
  """What a file asks for.

  Attributes:
    file: where it was read.
    out: the folder of all runs.
    gin_files: of each run, in order.
    recipes, patterns, seeds: the grid.
    baseline: the recipe that the others are compared with.
    runs: all runs in the order in which they are done: of each seed its start, if there is a
      table [start], and the others.
    imports: modules that each run imports first.
  """

  file: str
  out: pathlib.Path
  gin_files: Sequence[str]
  recipes: Sequence[str]
  patterns: Sequence[str]
  seeds: Sequence[int]
  baseline: str
  runs: Sequence[Run]
  imports: Sequence[str] = ()

  def command(self, run: Run) -> list[str]:
    """Returns the words of the command that makes a run, after `nm-sparsity`."""
    modules = [f"--import={name}" for name in self.imports]
    named = [f"--gin_file={file}" for file in self.gin_files]
    # A shell wants single quotes around the word, so a gin string has double ones where it can.
    double = lambda text: text if '"' in text else text.replace("'", '"')
    macros = [f"--gin.{name}={double(repr(value))}" for name, value in run.macros.items()]
    return ["train", *modules, *named, *macros]


def read(file: str, imports: Sequence[str] = (), data: bool = False) -> Sweep:
  """Reads a sweep's file, and makes every run as its own process will; starts nothing.

      grid = sweep.read("examples/sweep_mini_glue.toml")
      [run.name for run in grid.runs]    # ['start-seed0', 'dense-seed0', ...]

  Args:
    file: a path, from here or from the folder that `nm-sparsity gin-path` prints; docs/sweep.md
      describes what is in it.
    imports: modules of your own, such as one that registers a recipe. You have imported them; each
      run is a process of its own and imports them too.
    data: also lets the workload look at its data, such as tasks, which need seqio.

  Raises:
    ValueError: there is no such file, it is not TOML, a key or a setting is wrong, or a setting
      differs from that of a run that is there. It names the file and the run.
  """
  text = files.read_text(gin_files.find(file))
  gin_files.see_modules_here()
  try:
    table = tomllib.loads(text)  # its error is a ValueError too
    _check_keys(table)
    grid = {name: list(dict.fromkeys(table[name])) for name in _REQUIRED[2:]}
    baseline = table.get("baseline", grid["recipes"][0])
    if baseline not in grid["recipes"]:
      raise ValueError(f"baseline={baseline!r}: name one of the recipes.")
    sweep = Sweep(
      file=file, out=pathlib.Path(table["out"]).expanduser(), gin_files=table["gin_files"],
      **grid, baseline=baseline, runs=(), imports=tuple(imports),
    )  # fmt: skip
    return dataclasses.replace(sweep, runs=tuple(_runs(sweep, table, data)))
  except ValueError as e:
    raise ValueError(f"{file}: {e}") from e


def _check_keys(table: Mapping[str, Any]) -> None:
  if unknown := sorted(table.keys() - {*_REQUIRED, *_OPTIONAL}):
    raise ValueError(f"unknown keys {unknown}. A gin macro belongs in [macros].")
  is_right = lambda key, x: x and isinstance(x, list) != (key == "out")
  if wrong := [key for key in _REQUIRED if not is_right(key, table.get(key))]:
    raise ValueError(f"{', '.join(wrong)}: missing, empty or not a list, such as ['sr_ste'].")
  of_run = {*_SET_BY_SWEEP, "RECIPE"} | ({"INITIAL_CHECKPOINT_PATH"} if START in table else set())
  set_here = {*table.get("macros", {}), *table.get(START, {})} & of_run
  variants = table.get("variants", {}).values()
  if theirs := set_here.union(*(_SET_BY_SWEEP & variant.keys() for variant in variants)):
    raise ValueError(f"{', '.join(sorted(theirs))}: set by the sweep. Leave it out.")


def _runs(sweep: Sweep, table: Mapping[str, Any], data: bool) -> Iterator[Run]:
  """Yields all runs; raises at the first one with a mistake."""
  known: dict[tuple, int] = {}  # recipe, pattern -> steps; seeds change nothing of them

  def made(
    recipe: str, pattern: str | None, seed: int, macros: dict[str, Any], start: Run | None = None
  ) -> Run:
    words = [recipe, *([pattern.replace(":", "_")] if pattern else []), f"seed{seed}"]
    folder = sweep.out / "-".join(words)
    macros |= {"PATTERN": pattern} if pattern else _DENSE
    macros |= {"RANDOM_SEED": seed, "DATA_SEED": seed, "MODEL_DIR": str(folder)}
    bindings = [f"{name} = {value!r}" for name, value in macros.items()]
    try:
      with gin_files.read(sweep.gin_files, bindings, ["."], "train") as config:
        settings = train.settings_of(config.settings("Run"))
        partitions = config.argument("num_partitions", "Model") or 1
        if partitions > 1 and jax.local_device_count() % partitions:
          config.put("NUM_PARTITIONS", 1)  # the run has other devices; shapes do not depend on it
        if (recipe, pattern) not in known:
          run = config.argument("run")
          _check(run, pattern, data and not known)  # all runs share their data
          known[recipe, pattern] = run.sparse_steps
        # Of every run: a folder that is there may have other settings.
        train.refuse_changed(folder, settings)
    except Exception as e:  # gin calls the code of users
      raise ValueError(f"{folder.name}: {gin_files.message(e)}") from e
    return Run(
      recipe=recipe, pattern=pattern, seed=seed, folder=folder, macros=macros,
      steps=known[recipe, pattern], start=start,
    )  # fmt: skip

  shared = table.get("macros", {})
  # Seed by seed, so that a sweep that is stopped has whole seeds to compare.
  for seed in sweep.seeds:
    errors.check_seed("seeds", seed)
    start, own = None, dict(shared)
    if START in table:
      start = made(START, None, seed, {**shared, **table[START], **_FROM_SCRATCH})
      yield start
      own["INITIAL_CHECKPOINT_PATH"] = str(start.folder / f"checkpoint_{start.steps}")
    for recipe in sweep.recipes:
      variant = {"RECIPE": recipe, **own, **table.get("variants", {}).get(recipe, {})}
      for pattern in [None] if recipe == "dense" else sweep.patterns:
        yield made(recipe, pattern, seed, dict(variant), start)


def _check(run: Any, pattern: str | None, data: bool) -> None:
  """Asks a run what it refuses."""
  run.check()
  # Rules with patterns of their own would make the sweep's patterns idle.
  patterns = {str(recipe.pattern) for recipe in run.model.rules.places.values()}
  if pattern and pattern not in patterns:
    raise ValueError(
      f"its rules have the patterns {sorted(patterns)}. Write the sweep's in this form, and in a "
      "gin file give SPARSITY_RULES without any, {'ff': None}."
    )
  if data:
    run.check_data()
