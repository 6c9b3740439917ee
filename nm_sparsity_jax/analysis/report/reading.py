"""Reads the folders of runs. A step is the global one, as it was written.

DIR/train/events*, metrics.jsonl                 tag -> step -> value
DIR/training_eval/TASK/events*, metrics.jsonl    the same by task
DIR/inference_eval/                              seqio's metrics by task
DIR/evaluations.json                             metrics of tasks that inference_eval/ lacks
DIR/config.gin, run.json, checkpoint_N           its rules and its network
    -> [read] -> Run
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from nm_sparsity_jax.analysis import charts
from nm_sparsity_jax.runs import events, folders, results, trained
from nm_sparsity_jax.trainer import evaluation

Points = dict[int, float]  # global step -> value
T5_LOSS = "loss_per_nonpadding_target_token"


@dataclasses.dataclass
class Run:
  """A run's folder.

  Attributes:
    path: the folder, as it was given.
    name: for people.
    train: tag -> points, of train/. Of the many losses of T5X, `loss` is that of a target token.
    evals: task -> tag -> points, of training_eval/.
    tasks: task -> step -> metric -> value.
    gin: the text of config.gin; '' where there is none.
  """

  path: pathlib.Path
  name: str
  train: dict[str, Points]
  evals: dict[str, dict[str, Points]]
  tasks: dict[str, results.Series]
  gin: str

  @functools.cached_property
  def _newest_evaluation(self) -> Mapping[str, Any]:
    return max(folders.evaluations(self.path).items(), default=(0, {}))[1]

  def less_is_better(self, metric: str) -> bool:
    """Returns whether less of a metric is better, as its workload or else its name says."""
    return evaluation.less_is_better(self._newest_evaluation, metric)

  @property
  def offset(self) -> int:
    """Returns the global step before its first one: the number of steps that it inherited."""
    return self.settings.start or 0

  @property
  def last_step(self) -> int | None:
    """Returns the last step for which anything was written."""
    series = [*self.train.values(), *(p for tags in self.evals.values() for p in tags.values())]
    return max((s for points in (*series, *self.tasks.values()) for s in points), default=None)

  @functools.cached_property
  def settings(self) -> results.Run:
    """Returns what `glue score` knows of it: its rules, its start, where it has its pattern."""
    return results.settings(self.path)

  @property
  def rules(self) -> Any:
    """Returns the `Rules` that it trains with; None where they are not known."""
    return self.settings.rules

  @functools.cached_property
  def sparse(self) -> Mapping[str, Any] | None:
    """Returns place -> recipe, of those that do not stay dense; None where no rules are known."""
    if self.rules is None:
      return None
    places = self.rules.places
    return {at: r for at, r in places.items() if any(s.pattern for s in r.timeline())}

  @functools.cached_property
  def cost(self) -> Any:
    """Returns the dense forward `flops.Cost` of its network, for one example.

    The local runner notes the operations of any network in run.json. Without such a note it is the
    T5 that config.gin binds.
    """
    from nm_sparsity_jax.training import flops

    noted = (trained.started(self.path).get("workload") or {}).get("ops")
    return _t5_cost(self.gin) if noted is None else flops.Cost(tuple(flops.Op(**o) for o in noted))

  def flops(self, until: int) -> tuple[float, float]:
    """Returns FLOPs of the first steps, and what a dense run would have spent on them.

    Args:
      until: how many steps of the sparse run.

    Raises:
      ValueError: the rules, the network or the batch size are not known.
    """
    from nm_sparsity_jax.training import flops

    if self.rules is None:
      raise ValueError(self.settings.no_rules)
    settings = trained.parse_settings(self.gin)
    batch, steps = settings.get("BATCH_SIZE"), settings.get("SPARSE_STEPS")
    if not isinstance(batch, int) or not isinstance(steps, int):
      raise ValueError("BATCH_SIZE and SPARSE_STEPS are not numbers in config.gin")
    spent = lambda rules: flops.training(self.cost, rules, batch, steps=steps, until=until).flops
    return spent(self.rules), spent({})


def read(paths: Sequence[str | pathlib.Path]) -> list[Run]:
  """Reads folders of runs.

  Args:
    paths: t5x.train's MODEL_DIR, or the local runner's; at most `charts.MAX_RUNS`.

  Raises:
    ValueError: one is no run's, holds no metrics, or a file is broken.
  """
  resolved = [pathlib.Path(path).resolve() for path in paths]
  if len(paths) > charts.MAX_RUNS or len(set(resolved)) < len(resolved):
    raise ValueError(
      f"{len(paths)} runs, {', '.join(map(str, paths))}: a page has colours for "
      f"{charts.MAX_RUNS}, and each folder is named once"
    )
  short = [folder.name for folder in resolved]
  return [
    _read(pathlib.Path(path), name if short.count(name) == 1 else str(path))
    for path, name in zip(paths, short, strict=True)
  ]


def _read(folder: pathlib.Path, name: str) -> Run:
  rooms = sorted((folder / "training_eval").glob("*"))
  evals = {room.name: points for room in rooms if (points := _points(room))}
  train, tasks = _points(folder / "train"), tasks_of(folder)
  if not (train or evals or tasks):
    raise ValueError(
      f"{folder}: holds no metrics in train/, training_eval/ or inference_eval/. Name the "
      "MODEL_DIR of a run; copy one in a bucket first."
    )
  return Run(folder, name, train, evals, tasks, trained.gin_text(folder))


def tasks_of(folder: pathlib.Path) -> dict[str, results.Series]:
  """Returns task -> step -> metric -> value for all tasks of a run.

  A task's metrics come from inference_eval/, and from evaluations.json where that has none.
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
  """Returns tag -> step -> value; what a resumed run wrote again counts."""
  found: dict[str, Points] = {}
  if (lines := folder / "metrics.jsonl").is_file():
    for step, values in results.json_lines(lines, []):
      for tag, value in values.items():
        found.setdefault(tag, {})[step] = value
  for file in sorted(folder.glob("*tfevents*")):  # their names begin with the time
    for step, tag, value in events.scalars(file):
      found.setdefault(tag, {})[step] = value
  if T5_LOSS in found:
    # T5X writes some twenty tags more: sums over batches, parts of the loss, times.
    kept = ("nm/", "accuracy", "learning_rate", "timing/steps_per_second")
    found = {"loss": found[T5_LOSS]} | {t: p for t, p in found.items() if t.startswith(kept)}
  return {tag: dict(sorted(points.items())) for tag, points in found.items()}


# --- the network of a T5 --------------------------------------------------------------------------

_BOUND = re.compile(r"^(?:\w+\.)*T5Config\.(?:(preset|wmt)\.)?(\w+) = (.*(?:\n[ \t]+.*)*)", re.M)
# Of T5X's own class, which has the names of ours: what its parameters and its FLOPs depend on.
_SIZES = (
  "vocab_size", "emb_dim", "num_heads", "num_encoder_layers", "num_decoder_layers", "head_dim",
  "mlp_dim", "mlp_activations", "logits_via_embedding",
)  # fmt: skip


def _t5_cost(gin: str) -> Any:
  """Returns the cost of the T5 that a config binds, of this package or T5X's own."""
  from nm_sparsity_jax.models.t5 import T5Config

  settings = trained.parse_settings(gin)
  bound = _BOUND.findall(gin)
  lengths = settings.get("TASK_FEATURE_LENGTHS")
  if not bound or not isinstance(lengths, Mapping):
    raise ValueError("config.gin binds no T5Config, or no TASK_FEATURE_LENGTHS")
  how = bound[0][0]
  values: dict[str, Any] = {
    name: settings.get(text[1:]) if text[0] == "%" else trained.plain(text.replace("\\\n", " "))
    for _, name, text in bound
    if how or name in _SIZES
  }
  if any(isinstance(value, trained.Reference) for value in values.values()):
    raise ValueError("config.gin binds T5Config to values that are not plain")
  config: Any = (getattr(T5Config, how) if how else T5Config)(**values)
  return _traced_cost(config, tuple(lengths.items()))


@functools.cache  # runs of one page often have one network
def _traced_cost(config: Any, lengths: tuple[tuple[str, int], ...]) -> Any:
  from nm_sparsity_jax.models.t5 import Transformer
  from nm_sparsity_jax.trainer.workloads.t5 import T5

  return T5(Transformer(config), lengths=dict(lengths)).cost()
