"""What a run left behind: GLUE's metrics by task and step, and what was sparse.

    DIR/inference_eval/TASK-metrics.jsonl   seqio.JSONLogger
    DIR/inference_eval/TASK/events.*        seqio.TensorBoardLogger: float32, tags eval/METRIC
    DIR/config.gin                          the gin macros
    DIR/run.json                            of the local runner: start, environment
        -> [read] -> Run

T5X writes the first three, in t5x.train's MODEL_DIR and in t5x.eval's EVAL_OUTPUT_DIR.
DIR/training_eval is not read: its accuracies are of tokens, given the right ones before them.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nm_sparsity_jax.runs import events, files, folders, glue
from nm_sparsity_jax.runs.trained import config_of, parse_settings, start_of, started

Series = dict[int, dict[str, float]]  # step -> metric -> value


@dataclasses.dataclass
class Run:
  """A run.

  Attributes:
    path: as it was given.
    tasks: config of GLUE -> its metrics.
    mini: whether they are of mini-GLUE.
    recipe: its name; None: not known.
    places: place -> pattern, empty for a dense run; None: not known.
    dense_steps: steps of the dense phase; None: not known.
    sparse_steps: all steps of the sparse run; None: not known.
    finetune_steps: the last of them, with the target pattern for certain; None: not known.
    start: the global step before the first of them; None: not known.
    size: of the T5, such as 'base'; None: not known.
    network: of images, by its name in `models`, such as 'vit_b16'; None: another, or not known.
    data: the images, such as 'imagenet2012'; None: not known.
    remarks: what was odd.
    name: of its row; empty: that of the folder.
    joined: the folders of the runs that it was joined of.
  """

  path: pathlib.Path
  tasks: dict[str, Series]
  mini: bool
  recipe: str | None = None
  places: Mapping[str, str] | None = None
  dense_steps: int | None = None
  sparse_steps: int | None = None
  finetune_steps: int | None = None
  start: int | None = None
  size: str | None = None
  network: str | None = None
  data: str | None = None
  remarks: list[str] = dataclasses.field(default_factory=list)
  name: str = ""
  joined: tuple[pathlib.Path, ...] = ()

  def target_from(self) -> int | None:
    """Returns the first global step whose weights certainly have the target patterns.

    That is the end of the dense phase for a recipe that masks to its pattern at once, else the
    beginning of the fine-tune phase. None: not known.
    """
    if self.recipe == "dense" or self.places == {}:
      return 0
    start, dense, finetune = self.start, self.dense_steps, self.finetune_steps
    if start is None or dense is None or finetune is None or self.sparse_steps is None:
      return None
    if self.recipe is not None and masks_at_once(self.recipe):
      return start + dense
    return start + self.sparse_steps - finetune

  def target_remark(self) -> str:
    """Says that `target_from` is not known; '' where it is known, or where no recipe is."""
    if not self.recipe or self.target_from() is not None:
      return ""
    return "it is not known from which step the weights have the target pattern"


@functools.cache
def masks_at_once(recipe: str) -> bool:
  """Returns whether a recipe's weights have the target pattern from the end of the dense phase on.

  >>> masks_at_once("sr_ste"), masks_at_once("mdgf_linear"), masks_at_once("sdgf_stepwise")
  (True, False, False)

  Args:
    recipe: its name; False for one that is not known here.
  """
  from nm_sparsity_jax import recipes
  from nm_sparsity_jax.core.schedules import Phases

  # Long phases and a pattern with many levels, so that whatever comes between shows.
  phases = Phases(total=10_000, dense=1_000, finetune=1_000)
  try:
    made = recipes.recipe(recipe, pattern="1:8", phases=phases)
  except (ValueError, TypeError):  # not known, or it needs more than these
    return False
  return made.target_from(axis_size=1024) == phases.dense


def read(path: str) -> Run:
  """Reads a run's folder, or its inference_eval/.

  Raises:
    ValueError: there are no metrics of GLUE, or a file is broken.
  """
  folder = pathlib.Path(path)
  if not folder.is_dir():
    hint = "; copy it from the bucket first" if "://" in path else ""
    raise ValueError(f"{path}: there is no such folder{hint}")
  metrics = folder / "inference_eval"
  if not metrics.is_dir():
    if folder.name != "inference_eval":
      raise ValueError(f"{path}: holds no inference_eval/, where seqio's metrics of a run lie")
    metrics = folder
  run = Run(folder, *_tasks(metrics, remarks := []), remarks=remarks)
  _read_settings(run, metrics.absolute().parent)
  return run


def settings(folder: pathlib.Path) -> Run:
  """Reads a run's folder without its metrics."""
  run = Run(folder, {}, False)
  _read_settings(run, folder)
  return run


# What runs of one row have in common.
_COMMON = (
  "mini", "recipe", "places", "dense_steps", "sparse_steps", "finetune_steps", "start", "size",
)  # fmt: skip


def join(name: str, runs: Sequence[Run]) -> Run:
  """Returns runs that were trained alike, each on tasks of its own, as one run.

  Raises:
    ValueError: two differ in what was trained, or have metrics of the same task.
  """
  first, *others = runs
  tasks, owners = dict(first.tasks), dict.fromkeys(first.tasks, first)
  for run in others:
    for field in _COMMON:
      if (here := getattr(first, field)) != (there := getattr(run, field)):
        raise ValueError(
          f"{name}: {first.path} has {field} {here}, and {run.path} {there}, so they are not "
          "one row. Score them apart"
        )
    if twice := sorted(tasks.keys() & run.tasks.keys()):
      raise ValueError(
        f"{name}: {owners[twice[0]].path} and {run.path} both have metrics of "
        f"{', '.join(twice)}: leave one out"
      )
    tasks |= run.tasks
    owners |= dict.fromkeys(run.tasks, run)
  paths = tuple(run.path for run in runs)
  parent = pathlib.Path(os.path.commonpath([path.absolute() for path in paths]))
  remarks = [f"{run.path}: {remark}" for run in runs for remark in run.remarks]
  return dataclasses.replace(
    first, path=parent, tasks=tasks, remarks=remarks, name=name, joined=paths
  )


# --- metrics ------------------------------------------------------------------------------------


def _tasks(folder: pathlib.Path, remarks: list[str]) -> tuple[dict[str, Series], bool]:
  names = {p.name.removesuffix("-metrics.jsonl") for p in folder.glob("*-metrics.jsonl")}
  names |= {p.parent.name for p in folder.glob("*/*tfevents*")}
  wanted = {column.task for column in glue.COLUMNS}
  owners: dict[str, str] = {}
  kinds = set()
  for name in sorted(names):
    config, mini = glue.config_of(name) or ("", False)
    if config not in wanted:
      continue
    if config in owners:
      raise ValueError(f"{folder}: {owners[config]} and {name} are the same task of GLUE; keep one")
    owners[config] = name
    kinds.add(mini)
  if not owners:
    found = f"; there is {', '.join(sorted(names))}" if names else ""
    raise ValueError(f"{folder}: no metrics of GLUE, such as nm_glue_rte-metrics.jsonl{found}")
  if len(kinds) > 1:
    raise ValueError(f"{folder}: has metrics of GLUE and of mini-GLUE; keep one kind")
  tasks = {config: series_of(folder, name, remarks) for config, name in owners.items()}
  return tasks, kinds.pop()


def series_of(folder: pathlib.Path, name: str, remarks: list[str]) -> Series:
  """Reads metrics from JSONL, and from events for the steps that it lacks."""
  series: Series = {}
  for file in sorted((folder / name).glob("*tfevents*")):
    for step, tag, value in events.scalars(file):
      if tag.startswith("eval/"):
        series.setdefault(step, {})[tag.removeprefix("eval/")] = value
  if not (file := folder / f"{name}-metrics.jsonl").is_file():
    return series
  lines: Series = {}
  for step, values in json_lines(file, remarks):
    if step in lines and not _same(lines[step], values):
      remarks.append(
        f"{name} was evaluated again at step {step} with other results: the later ones count"
      )
    lines[step] = values
  return series | lines


def json_lines(file: pathlib.Path, remarks: list[str]) -> Iterator[tuple[int, dict[str, float]]]:
  """Reads lines such as {"step": 100, "loss": 0.5}; yields (step, name -> number) of each.

  Args:
    file: what seqio's JSONLogger wrote, or the local runner.
    remarks: gets a remark if the last line is only half written.

  Raises:
    ValueError: a line is no JSON object with a step.
  """
  *lines, last = files.read_text(file).split("\n")
  if last:
    try:
      json.loads(last)
      lines.append(last)
    except ValueError:  # it is being written
      remarks.append(f"{file.name}: its last line has no end yet, and was left out")
  for number, line in enumerate(lines, 1):
    if line.strip():
      try:
        entry = json.loads(line)
        if type(step := entry.pop("step")) is not int:
          raise ValueError(f"step {step!r}")
      except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as e:
        raise ValueError(f"{file}, line {number}: no JSON object with a step ({e})") from e
      yield step, {k: float(v) for k, v in entry.items() if isinstance(v, int | float)}


def _same(a: Mapping[str, float], b: Mapping[str, float]) -> bool:
  """Returns whether two are equal in float32, where both have a value."""
  pairs = [(a[k], b[k]) for k in a.keys() & b.keys()]
  return all(math.isclose(x, y, rel_tol=1e-6, abs_tol=1e-6) or x != x and y != y for x, y in pairs)


# --- settings -----------------------------------------------------------------------------------


_MACROS = (
  "RECIPE", "PATTERN", "SPARSITY_RULES", "DENSE_STEPS", "SPARSE_STEPS", "FINETUNE_STEPS",
  "PRETRAINED_STEPS", "INITIAL_CHECKPOINT_PATH", "T5_SIZE", "DATA",
)  # fmt: skip
_NAMED = re.compile(r"^(?:\w+\.)*(vit|swin|resnet)\.config\.(\w+) = (.*)$", re.MULTILINE)
# Of a named configuration; another field makes it a network of other sizes.
_NO_SIZES = {
  "name", "image_size", "classes", "dropout", "drop_path", "dtype", "remat", "scan", "std",
}  # fmt: skip


def _network(gin: str) -> str | None:
  """Returns the name of the network of images that a config binds; None where it changes sizes."""
  found = {field: value for _, field, value in _NAMED.findall(gin)}
  name = re.fullmatch(r"'(\w+)'", found.get("name", ""))
  return name[1] if name and not set(found) - _NO_SIZES else None


def _read_settings(run: Run, folder: pathlib.Path) -> None:
  """Reads macros of gin_configs/sparsity.gin and gin_configs/models/, and the run's start."""
  if (file := config_of(folder)) is None:
    return
  given = parse_settings(files.read_text(file))
  value, reference = given.values.get, given.references.get
  for name in _MACROS:
    is_known_below = name == "PRETRAINED_STEPS" and "start_of()" in str(reference(name))
    if reference(name) is not None and not is_known_below:
      run.remarks.append(f"{name} in {file.name} is not a plain value: {reference(name)}")
  run.recipe, run.size, run.data = value("RECIPE"), value("T5_SIZE"), value("DATA")
  run.network = _network(given.text)
  run.sparse_steps = value("SPARSE_STEPS")
  run.dense_steps, run.finetune_steps = value("DENSE_STEPS"), value("FINETUNE_STEPS")
  if run.sparse_steps is not None:
    from nm_sparsity_jax.training import configure  # imports jax

    # A phase that is set to None has its share of all steps.
    dense, finetune = configure.phase_steps(run.sparse_steps, None, None)
    if value("DENSE_STEPS", 0) is None:
      run.dense_steps = dense
    if value("FINETUNE_STEPS", 0) is None:
      run.finetune_steps = finetune
  run.start = started(folder).get("start", value("PRETRAINED_STEPS"))
  if run.start is None and "INITIAL_CHECKPOINT_PATH" in given.values:  # its name may tell
    path = value("INITIAL_CHECKPOINT_PATH")
    run.start = folders.named_step(path) if path else 0
  if run.start is None and "PRETRAINED_STEPS" in given.references:
    run.start = start_of(str(folder))
  with files.named(file):
    run.places = _places(run.recipe, given.values)


def _places(recipe: str | None, found: Mapping[str, Any]) -> dict[str, str] | None:
  """Returns place -> pattern; None where the macros do not tell."""
  if recipe == "dense":
    return {}
  if not isinstance(found.get("SPARSITY_RULES"), Mapping):
    return None
  whole = found.get("PATTERN")
  patterns: dict[str, Any] = {k: v or whole for k, v in found["SPARSITY_RULES"].items()}
  return patterns if all(patterns.values()) else None
