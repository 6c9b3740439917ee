"""What a run left in its folder, as reports and scores read it.

DIR/train/                               tag -> step -> value
DIR/training_eval/TASK/                  the same by task: events*, metrics.jsonl
DIR/inference_eval/TASK-metrics.jsonl    seqio.JSONLogger: step -> metric -> value
DIR/inference_eval/TASK/events*          seqio.TensorBoardLogger, tags eval/METRIC
DIR/evaluations.json                     the local runner: tasks that inference_eval/ lacks
DIR/config.gin, run.json, checkpoint_N   what was trained, and from where
    -> [read] -> Run

A step is the global one, as it was written.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import operator
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nm_sparsity_jax.runs import events, files, folders, trained
from nm_sparsity_jax.trainer.workloads import base
from nm_sparsity_jax.training.rules import Rules

Points = dict[int, float]  # step -> value
Series = dict[int, dict[str, float]]  # step -> metric -> value
T5_LOSS = "loss_per_nonpadding_target_token"
# T5X writes some twenty tags more: sums over batches, parts of the loss, times.
_OF_T5X = ("nm/", "accuracy", "learning_rate", "timing/steps_per_second")


@dataclasses.dataclass(eq=False)
class Run:
  """A run's folder; each file is read when it is first asked for.

  Attributes:
    path: t5x.train's MODEL_DIR, t5x.eval's EVAL_OUTPUT_DIR, or the local runner's MODEL_DIR.
    name: for people.
  """

  path: pathlib.Path
  name: str = ""

  # --- what was trained ---------------------------------------------------------------------------

  @functools.cached_property
  def gin(self) -> str:
    """Returns the text of config.gin; '' where there is none."""
    return trained.gin_text(self.path)

  @functools.cached_property
  def settings(self) -> Mapping[str, Any]:
    """Returns the macros of config.gin."""
    return trained.read_settings(self.path)

  @functools.cached_property
  def _rules(self) -> tuple[Rules | None, str]:
    try:
      return trained.rules_of(self.path), ""
    except ValueError as e:
      return None, str(e)

  @property
  def rules(self) -> Rules | None:
    """Returns the rules that it trains with; None where they are not known."""
    return self._rules[0]

  @property
  def no_rules(self) -> str:
    """Returns why the rules are not known; '' where they are."""
    return self._rules[1]

  @functools.cached_property
  def sparse(self) -> Mapping[str, Any] | None:
    """Returns place -> recipe, of those that do not stay dense; None where no rules are known."""
    if self.rules is None:
      return None
    places = self.rules.places
    return {at: r for at, r in places.items() if any(s.pattern for s in r.timeline())}

  @property
  def recipe(self) -> str | None:
    """Returns the name of its recipe; None where it is not known, or there are several."""
    if self.sparse is None:
      return None
    names = {recipe.name for recipe in self.sparse.values()} or {"dense"}
    return names.pop() if len(names) == 1 else None

  @functools.cached_property
  def start(self) -> int | None:
    """Returns how many steps it inherited, the global step before its first one."""
    start = trained.started(self.path).get("start", self.settings.get("PRETRAINED_STEPS"))
    if isinstance(start, int):
      return start
    initial = self.settings.get("INITIAL_CHECKPOINT_PATH", "")
    if initial is None:  # from scratch
      return 0
    with contextlib.suppress(ValueError):  # nobody knows
      return trained.start_of(str(self.path), initial)

  @property
  def target(self) -> int | None:
    """Returns the first step whose weights have their patterns; None where that is not known."""
    if not self.sparse:
      return None if self.sparse is None else 0
    if self.start is None:
      return None
    return self.start + max(recipe.target_from() for recipe in self.sparse.values())

  # --- what was measured --------------------------------------------------------------------------

  @functools.cached_property
  def tasks(self) -> dict[str, Series]:
    """Returns task -> step -> metric -> value, of decoded predictions."""
    room = self.path / "inference_eval"
    names = {file.name.removesuffix("-metrics.jsonl") for file in room.glob("*-metrics.jsonl")}
    names |= {file.parent.name for file in room.glob("*/*tfevents*")}
    found = {name: _series(room / name, room / f"{name}-metrics.jsonl") for name in sorted(names)}
    noted: dict[str, Series] = {}
    for step, entry in folders.evaluations(self.path).items():
      for task, metrics in (entry.get("metrics") or {}).items():
        noted.setdefault(task, {})[step] = metrics
    return {task: series for task, series in (noted | found).items() if any(series.values())}

  @functools.cached_property
  def curves(self) -> dict[str, Points]:
    """Returns all numbers, by folder and tag: 'train/loss', 'inference_eval/nm_glue_rte/accuracy'.

    Of the many losses of T5X, `loss` is that of a target token.
    """
    rooms = [self.path / "train", *sorted((self.path / "training_eval").glob("*"))]
    found = {
      str(room.relative_to(self.path)): _series(room, room / "metrics.jsonl") for room in rooms
    }
    found |= {f"inference_eval/{task}": series for task, series in self.tasks.items()}
    return {
      f"{room}/{tag}": points
      for room, series in found.items()
      for tag, points in _by_tag(series).items()
    }

  @property
  def last_step(self) -> int:
    """Returns the last step for which anything was written."""
    return max(step for points in self.curves.values() for step in points)

  def less_is_better(self, metric: str) -> bool:
    """Returns whether less of a metric is better, as its workload or else its name says."""
    newest = max(folders.evaluations(self.path).items(), default=(0, {}))[1]
    # A run of T5X notes nothing.
    less = newest.get("less_is_better")
    return base.less_by_name(metric) if less is None else metric in less


def read(paths: Sequence[str | pathlib.Path]) -> list[Run]:
  """Returns runs, named by their folders, or by their paths where two folders are named alike.

  Raises:
    ValueError: a folder holds no metrics, or a file in it is broken.
  """
  names = [pathlib.Path(path).resolve().name for path in paths]
  found = []
  for path, name in zip(paths, names, strict=True):
    run = Run(pathlib.Path(path), name if names.count(name) == 1 else str(path))
    if not run.curves:
      raise ValueError(
        f"{path}: holds no metrics in train/, training_eval/ or inference_eval/. Name the "
        "MODEL_DIR of a run; copy one in a bucket first."
      )
    found.append(run)
  return found


def _by_tag(series: Series) -> dict[str, Points]:
  found: dict[str, Points] = {}
  for step, values in series.items():
    for tag, value in values.items():
      found.setdefault(tag, {})[step] = value
  if T5_LOSS in found:
    kept = {tag: points for tag, points in found.items() if tag.startswith(_OF_T5X)}
    found = {"loss": found[T5_LOSS], **kept}
  return found


def _series(folder: pathlib.Path, lines: pathlib.Path) -> Series:
  """Reads event files, and lines of JSON, which count where both have a step."""
  found: Series = {}
  for file in sorted(folder.glob("*tfevents*")):  # their names begin with the time
    with files.named(file):
      for step, tag, value in events.scalars(file):
        found.setdefault(step, {})[tag.removeprefix("eval/")] = value
  if lines.is_file():
    found |= _json_lines(lines)
  return dict(sorted(found.items()))


def _json_lines(file: pathlib.Path) -> Iterator[tuple[int, dict[str, float]]]:
  """Reads lines such as {"step": 100, "loss": 0.5}; yields (step, name -> number) of each."""
  *lines, _ = files.read_text(file).split("\n")  # one without an end is still being written
  for number, line in enumerate(lines, 1):
    with files.named(f"{file}, line {number}"):
      entry = json.loads(line)
      step = operator.index(entry.pop("step"))
      yield step, {k: float(v) for k, v in entry.items() if isinstance(v, int | float)}
