"""Reads the folders of runs.

    DIR/train/events*, metrics.jsonl                 tag -> step -> value
    DIR/training_eval/TASK/events*, metrics.jsonl    the same by task
    DIR/inference_eval/                              seqio's metrics by task
    DIR/evaluations.json                             metrics of tasks that inference_eval/ lacks
    DIR/config.gin, run.json, checkpoint_N           see `network`, `runs.trained`
        -> [read] -> Run

A step here is the global one, as it was written.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from nm_sparsity_jax.analysis.report import charts, network
from nm_sparsity_jax.runs import events, folders, results, trained
from nm_sparsity_jax.trainer import evaluation

Points = dict[int, float]  # global step -> value
LOSS = "loss_per_nonpadding_target_token"


@dataclasses.dataclass
class Run:
  """A run's folder.

  Attributes:
    path: the folder, as it was given.
    name: for people.
    train: tag -> points.
    evals: task -> tag -> points, of training_eval/.
    tasks: task -> step -> metric -> value; `less_is_better` tells which way a metric gets better.
    gin: the text of config.gin; '' where there is none.
  """

  path: pathlib.Path
  name: str
  train: dict[str, Points]
  evals: dict[str, dict[str, Points]]
  tasks: dict[str, results.Series]
  gin: str

  @functools.cached_property
  def macros(self) -> dict[str, str]:
    """Returns the macros of config.gin: name -> value as text."""
    return trained.macros(self.gin)

  @functools.cached_property
  def settings(self) -> results.Run:
    """Returns what `glue score` knows of it: its start, and from which step it has its pattern."""
    return results.settings(self.path)

  @functools.cached_property
  def processes(self) -> Sequence[Mapping[str, Any]]:
    """Returns what the local runner ran with: {"from": step, "environment": {name: value}}."""
    return trained.started(self.path).get("processes", [])

  @functools.cached_property
  def _directions(self) -> Mapping[str, Any]:
    """Returns the newest entry of evaluations.json, which notes the directions of metrics."""
    return max(folders.evaluations(self.path).items(), default=(0, {}))[1]

  def less_is_better(self, metric: str) -> bool:
    """Returns whether less of a metric is better, as its workload noted it or its name tells.

    Args:
      metric: its name.
    """
    return evaluation.less_is_better(self._directions, metric)

  @property
  def offset(self) -> int:
    """Returns the global step before its first one: the number of steps that it inherited."""
    return self.settings.start or 0

  @property
  def last_step(self) -> int | None:
    """Returns the last step for which anything was written."""
    series = [*self.train.values(), *(p for tags in self.evals.values() for p in tags.values())]
    steps = [s for points in (*series, *self.tasks.values()) for s in points]
    return max(steps, default=None)

  @property
  def counts_tokens(self) -> bool:
    """Returns whether its losses are per target token, as T5's are; other families have others."""
    return any(LOSS in tags for tags in (self.train, *self.evals.values()))

  @property
  def loss(self) -> Points:
    """Returns its training loss, per target token where it counts these."""
    return self.train.get(LOSS if self.counts_tokens else "loss", {})

  def loss_of(self, task: str) -> Points:
    """Returns the validation loss of a task."""
    return self.evals.get(task, {}).get(LOSS if self.counts_tokens else "loss", {})

  @functools.cached_property
  def rules(self) -> Any:
    """Returns the `Rules` that it trains with; see `runs.trained.rules_of`."""
    return trained.rules_of(self.path, self.gin)

  @functools.cached_property
  def sparse(self) -> Mapping[str, Any]:
    """Returns place -> recipe, of those that do not stay dense."""
    places = self.rules.places
    return {at: r for at, r in places.items() if any(s.pattern for s in r.timeline())}

  @functools.cached_property
  def is_dense(self) -> bool:
    """Returns whether nothing of it is sparse; False too where nothing tells its rules."""
    try:
      return not self.sparse
    except ValueError:
      return False

  @property
  def span(self) -> tuple[int, int]:
    """Returns the global steps that it begins and ends at, once it is done."""
    steps = self.settings.sparse_steps
    return self.offset, (self.last_step or 0) if steps is None else self.offset + steps

  @functools.cached_property
  def cost(self) -> Any:
    """Returns the dense forward `flops.Cost` of its network; see `network.cost_of`."""
    return network.cost_of(self.path, self.gin)

  def flops(self, until: int) -> tuple[float, float]:
    """Returns FLOPs of the first steps, and what a dense run would have spent on them.

    Args:
      until: how many steps of the sparse run.

    Raises:
      ValueError: nothing tells the rules, the network or the batch size.
    """
    from nm_sparsity_jax.training import flops

    cost, rules = self.cost, self.rules
    settings = trained.parse_settings(self.gin)
    batch, steps = settings.get("BATCH_SIZE"), settings.get("SPARSE_STEPS")
    if not isinstance(batch, int) or not isinstance(steps, int):
      raise ValueError("BATCH_SIZE and SPARSE_STEPS are not numbers in config.gin")
    spent = lambda sparse: flops.training(cost, sparse, batch, steps=steps, until=until).flops
    return spent(rules), spent({})


def read(paths: Sequence[str | pathlib.Path]) -> list[Run]:
  """Reads folders of runs.

  Args:
    paths: t5x.train's MODEL_DIR, or the local runner's; at most `charts.MAX_RUNS`.

  Raises:
    ValueError: one is no run's, holds no metrics, or a file is broken.
  """
  if len(paths) > charts.MAX_RUNS:
    raise ValueError(
      f"{len(paths)} runs: more than {charts.MAX_RUNS} cannot be told apart by their colours; "
      "make several reports"
    )
  for path in paths:
    if not pathlib.Path(path).is_dir():
      hint = "; copy it from the bucket first" if "://" in str(path) else ""
      raise ValueError(f"{path}: there is no such folder{hint}")
  given = [pathlib.Path(path) for path in paths]
  resolved = [folder.resolve() for folder in given]
  if twice := [str(f) for f, r in zip(given, resolved, strict=True) if resolved.count(r) > 1]:
    raise ValueError(f"{' and '.join(twice)} are one folder: name it once")
  short = [folder.name for folder in resolved]
  names = [n if short.count(n) == 1 else str(f) for n, f in zip(short, given, strict=True)]
  return [_read(folder, name) for folder, name in zip(given, names, strict=True)]


def dense_beside(runs: Sequence[Run], run: Run) -> Run | None:
  """Returns the dense run that says what a sparse one lost: it began and ends where that one does.

  Args:
    runs: all runs of a page.
    run: one of them.

  Returns:
    The dense run; None where there is none, or the run is dense itself.
  """
  return (
    None if run.is_dense else next((r for r in runs if r.is_dense and r.span == run.span), None)
  )


def _read(folder: pathlib.Path, name: str) -> Run:
  rooms = [folder / room for room in ("train", "training_eval", "inference_eval")]
  if not any(room.is_dir() for room in rooms):
    raise ValueError(
      f"{folder}: is not a run's folder: it holds no train/, training_eval/ or inference_eval/. "
      "Name the MODEL_DIR of a run."
    )
  train, training_eval, _ = rooms
  evals = {room.name: _points(room) for room in sorted(training_eval.glob("*")) if room.is_dir()}
  run = Run(
    folder,
    name,
    _points(train),
    {task: points for task, points in evals.items() if points},
    tasks_of(folder),
    trained.gin_text(folder),
  )
  if run.last_step is None:
    raise ValueError(f"{folder}: holds no metrics yet: no event file in it has a number")
  return run


def tasks_of(folder: pathlib.Path) -> dict[str, results.Series]:
  """Returns task -> step -> metric -> value for all tasks of a run.

  A task's metrics come from inference_eval/, and from evaluations.json where that has none.

  Args:
    folder: the run's.
  """
  room = folder / "inference_eval"
  names = {file.name.removesuffix("-metrics.jsonl") for file in room.glob("*-metrics.jsonl")}
  names |= {file.parent.name for file in room.glob("*/*tfevents*")}
  found = {task: results.series_of(room, task, []) for task in sorted(names)}
  noted: dict[str, results.Series] = {}
  for step, entry in folders.evaluations(folder).items():
    for task, metrics in (entry.get("metrics") or {}).items():
      if task not in found and metrics:
        noted.setdefault(task, {})[step] = metrics
  return found | dict(sorted(noted.items()))


def _points(folder: pathlib.Path) -> dict[str, Points]:
  """Returns tag -> step -> value; what a resumed run wrote again counts.

  Event files count, and metrics.jsonl where they say nothing.
  """
  found: dict[str, Points] = {}
  if (lines := folder / "metrics.jsonl").is_file():
    for step, values in results.json_lines(lines, []):
      for tag, value in values.items():
        found.setdefault(tag, {})[step] = value
  for file in sorted(folder.glob("*tfevents*")):  # their names begin with the time
    for step, tag, value in events.scalars(file):
      found.setdefault(tag, {})[step] = value
  return {tag: dict(sorted(points.items())) for tag, points in found.items()}
