"""What a report shows: the folders of runs in, sections of charts and tables out, as plain values.

    DIR/train/events*                    tag -> step -> value
    DIR/training_eval/TASK/events*       the same by task
    DIR/inference_eval/                  seqio's metrics by task
    DIR/config.gin                       macros -> rules -> timeline, D; network -> FLOPs
    DIR/run.json                         of the local runner: its start, what it ran with
        -> [read] -> Run -> [sections] -> Section(Chart | Table | Strip | text)

A step on an x axis is one of the sparse run: T5X's less PRETRAINED_STEPS, so runs lie over one
another.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import math
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from nm_sparsity_jax import glue, roles, scores
from nm_sparsity_jax.report import charts
from nm_sparsity_jax.report.charts import Chart, Line
from nm_sparsity_jax.runs import events, results

Points = dict[int, float]  # T5X's step -> value


@dataclasses.dataclass
class Run:
  """A run's folder.

  Attributes:
    path: as it was given.
    name: for people.
    train: tag -> points.
    evals: task -> tag -> points, of training_eval/.
    tasks: task -> step -> metric -> value, of inference_eval/.
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
    """Name -> value as text."""
    return results.macros(self.gin)

  def setting(self, name: str) -> Any:
    """A macro that is a plain value; None where it is not there.

    Raises:
      ValueError: it is a reference.
    """
    return _literal(name, self.macros.get(name, "None"))

  @functools.cached_property
  def settings(self) -> results.Run:
    """What `glue score` knows of it: where it starts, from which step on it has its pattern."""
    return results.settings(self.path)

  @functools.cached_property
  def processes(self) -> Sequence[Mapping[str, Any]]:
    """What the local runner ran with: {"from": step, "environment": {name: value}}."""
    return results.started(self.path).get("processes", [])

  @property
  def offset(self) -> int:
    """T5X's step before the first one of the sparse run."""
    return self.settings.start or 0

  @property
  def last_step(self) -> int | None:
    """The last step that anything was written of."""
    series = [*self.train.values(), *(p for tags in self.evals.values() for p in tags.values())]
    steps = [s for points in (*series, *self.tasks.values()) for s in points]
    return max(steps, default=None)

  @functools.cached_property
  def rules(self) -> Any:
    """`Rules` from the macros of gin_configs/sparsity.gin.

    Raises:
      ValueError: config.gin does not tell, or tells what is refused.
    """
    from nm_sparsity_jax import configure

    if not self.gin:
      raise ValueError("there is no config.gin")
    if "RECIPE" not in self.macros:
      raise ValueError("config.gin has no macro RECIPE")
    names = {"places": "SPARSITY_RULES", "fields": "RECIPE_FIELDS"}
    given = ("recipe", "pattern", "sparse_steps", "beta", "gradient", *names)
    settings = {name: self.setting(names.get(name, name.upper())) for name in given}
    for name in ("dense_steps", "finetune_steps"):
      settings[name] = self.setting(name.upper()) or 0
    return configure.rules(**settings)

  def flops(self, until: int) -> tuple[float, float]:
    """FLOPs of the first steps, and what a dense run would have spent on them.

    Raises:
      ValueError: config.gin does not tell.
    """
    from nm_sparsity_jax import flops

    recipes, shape = dict(self.rules.places), self._shape
    batch = self.setting("BATCH_SIZE")
    steps = self.setting("SPARSE_STEPS")
    if not isinstance(batch, int) or not isinstance(steps, int):
      raise ValueError("BATCH_SIZE and SPARSE_STEPS are no numbers in config.gin")
    cost = flops.training(shape, recipes, batch, steps=steps, until=until)
    return cost.flops, flops.training(shape, {}, batch, steps=steps, until=until).flops

  @functools.cached_property
  def _shape(self) -> Any:
    """A `flops.T5Shape` of the network that the config binds."""
    from nm_sparsity_jax import flops
    from nm_sparsity_jax.models.t5 import T5Config

    found = re.findall(r"^(?:\w+\.)*T5Config\.(preset|wmt)\.(\w+) = (.*)$", self.gin, re.MULTILINE)
    if len({how for how, *_ in found}) != 1:
      raise ValueError("config.gin binds no T5Config.preset or T5Config.wmt")
    values = {}
    for _, name, text in found:
      macro = text.removeprefix("%")
      values[name] = self.setting(macro) if macro != text else _literal(name, text)
    lengths = self.setting("TASK_FEATURE_LENGTHS") or {}
    if not {"inputs", "targets"} <= set(lengths):
      raise ValueError("config.gin has no TASK_FEATURE_LENGTHS of inputs and targets")
    try:
      config = getattr(T5Config, found[0][0])(**values)
    except TypeError as e:
      raise ValueError(f"config.gin binds a T5Config that cannot be made: {e}") from e
    return flops.T5Shape.of(config, lengths["inputs"], lengths["targets"])


def _literal(name: str, text: str) -> Any:
  try:
    return ast.literal_eval(text)
  except (ValueError, SyntaxError):
    raise ValueError(f"{name} is no plain value in config.gin: {text}") from None


# --- reading ------------------------------------------------------------------------------------


def read(paths: Sequence[str]) -> list[Run]:
  """Reads folders of runs.

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
      hint = "; copy it from the bucket first" if "://" in path else ""
      raise ValueError(f"{path}: there is no such folder{hint}")
  folders = [pathlib.Path(path) for path in paths]
  resolved = [folder.resolve() for folder in folders]
  if twice := [str(f) for f, r in zip(folders, resolved, strict=True) if resolved.count(r) > 1]:
    raise ValueError(f"{' and '.join(twice)} are one folder: name it once")
  short = [folder.name for folder in resolved]
  names = [n if short.count(n) == 1 else str(f) for n, f in zip(short, folders, strict=True)]
  return [_read(folder, name) for folder, name in zip(folders, names, strict=True)]


def _read(folder: pathlib.Path, name: str) -> Run:
  rooms = [folder / room for room in ("train", "training_eval", "inference_eval")]
  if not any(room.is_dir() for room in rooms):
    raise ValueError(
      f"{folder}: is no run's folder: it holds no train/, training_eval/ or inference_eval/. "
      "Name the MODEL_DIR of a run."
    )
  train, training_eval, inference_eval = rooms
  evals = {room.name: _points(room) for room in sorted(training_eval.glob("*")) if room.is_dir()}
  config = results.config_of(folder)
  run = Run(
    folder,
    name,
    _points(train),
    {task: points for task, points in evals.items() if points},
    tasks_in(inference_eval),
    config.read_text() if config else "",
  )
  if run.last_step is None:
    raise ValueError(f"{folder}: holds no metrics yet: no event file in it has a number")
  return run


def tasks_in(inference_eval: pathlib.Path) -> dict[str, results.Series]:
  """Task -> step -> metric -> value, of all tasks."""
  files = sorted(inference_eval.glob("*-metrics.jsonl"))
  tasks = {file.name.removesuffix("-metrics.jsonl") for file in files}
  tasks |= {file.parent.name for file in inference_eval.glob("*/*tfevents*")}
  return {task: results.series_of(inference_eval, task, []) for task in sorted(tasks)}


def _points(folder: pathlib.Path) -> dict[str, Points]:
  """tag -> step -> value; what a resumed run wrote again counts."""
  found: dict[str, Points] = {}
  for file in sorted(folder.glob("*tfevents*")):  # their names begin with the time
    for step, tag, value in events.scalars(file):
      found.setdefault(tag, {})[step] = value
  return {tag: dict(sorted(points.items())) for tag, points in found.items()}


# --- sections -----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Cell:
  """A cell of a table that is more than a text.

  Attributes:
    text: what stands in it.
    bar: a share from 0 to 1 to show beside it.
    run: whose colour it has.
    strong: whether it stands out.
  """

  text: str
  bar: float | None = None
  run: int | None = None
  strong: bool = False


@dataclasses.dataclass(frozen=True)
class Table:
  """Rows of cells; the first column is text, the others are numbers unless `words` says so."""

  head: Sequence[str | Cell]
  rows: Sequence[Sequence[str | Cell]]
  words: bool = False


@dataclasses.dataclass(frozen=True)
class Strip:
  """A bar of segments along the steps of a run.

  Attributes:
    run: its number.
    title: what it shows.
    segments: (start, stop, label, density, D at start, D at stop), one after the other.
  """

  run: int
  title: str
  segments: Sequence[tuple[int, int, str, float, float, float]]


@dataclasses.dataclass(frozen=True)
class Section:
  """A heading and what is below it; `parts` are charts, tables, strips and sentences."""

  key: str
  title: str
  parts: Sequence[Chart | Table | Strip | str]


_STEP = "step of the sparse run"
_MEAN = (
  "Where T5X wrote it, a point is the mean over the samples since the one before, so it lags the "
  "schedule by up to one such interval."
)


def sections(runs: Sequence[Run], checkpoint: str | int = "best") -> list[Section]:
  """All sections, in the order of the page.

  Args:
    runs: what was read.
    checkpoint: of the scores: 'best', 'last' or a step, as for `nm-sparsity glue score`.
  """
  return [
    Section("runs", "Runs", list(_overview(runs))),
    Section("scores", "Scores", list(_scores(runs, checkpoint))),
    Section("loss", "Loss", list(_loss(runs))),
    Section("metrics", "Metrics by task", list(_metrics(runs))),
    Section("schedule", "Pattern and D", list(_schedule(runs))),
    Section("density", "Density by layer", list(_density(runs))),
    Section("flips", "Mask flips", list(_flips(runs))),
    Section("variance", "Variance", list(_variance(runs))),
    Section("cost", "Accuracy against cost", list(_cost(runs, checkpoint))),
    Section("settings", "Settings and seeds", list(_settings(runs))),
    Section("environment", "Environment", list(_environment(runs))),
  ]


def _sparse(run: Run, points: Mapping[int, float]) -> list[tuple[float, float]]:
  return [(step - run.offset, value) for step, value in sorted(points.items())]


def _chart(
  runs: Sequence[Run], key: str, title: str, of: Callable[[Run], Mapping[int, float]], **more
) -> Chart | None:
  """A chart with a line for each run that has points; None where none has."""
  lines = [Line(i, _sparse(run, points)) for i, run in enumerate(runs) if (points := of(run))]
  return _by_step(runs, key, title, lines, **more) if lines else None


def _by_step(runs: Sequence[Run], key: str, title: str, lines: Sequence[Line], **more) -> Chart:
  key = re.sub(r"[^\w.-]", "_", key)  # it names a file
  until = max((run.last_step or 0) - run.offset for run in runs)
  return Chart(key, title, _STEP, lines, until=until, **more)


def _tagged(runs, key, title, tag, **more) -> Chart | None:
  return _chart(runs, key, title, lambda run: run.train.get(tag, {}), **more)


def _some(charts: Iterable[Chart | None], otherwise: str) -> Iterator[Chart | str]:
  found = [chart for chart in charts if chart is not None]
  yield from found or [otherwise]


def _lacking(runs: Sequence[Run], has: Callable[[Run], Any], what: str) -> Iterator[str]:
  """Names the runs that lack what others have."""
  names = [run.name for run in runs if not has(run)]
  if names and len(names) < len(runs):
    yield f"{', '.join(names)}: {what}."


def _cells(runs: Sequence[Run]) -> list[Cell]:
  return [Cell(run.name, run=i) for i, run in enumerate(runs)]


def _value(value: float | None) -> str:
  return "–" if value is None else f"{value:.4g}"


def _tried(function: Callable[..., Any], *args) -> tuple[Any, str]:
  """(its value, ''), or (None, why not)."""
  try:
    return function(*args), ""
  except ValueError as e:
    return None, str(e)


def _overview(runs: Sequence[Run]) -> Iterator[Table | str]:
  rows = []
  for i, run in enumerate(runs):
    step = run.last_step or 0
    rules, why = _tried(getattr, run, "rules")
    what = "; ".join(f"{p}: {_what(r)}" for p, r in rules.places.items()) if rules else why
    steps = run.macros.get("SPARSE_STEPS", "?")
    loss = list(run.train.get(_LOSS, {}).values())
    density = list(run.train.get("nm/density", {}).values())
    cost = _tried(run.flops, step - run.offset)[0]
    rows.append(
      [
        Cell(run.name, run=i),
        what,
        f"{step - run.offset:,} of {int(steps):,}" if steps.isdigit() else f"{step:,}",
        _value(loss[-1] if loss else None),
        _value(density[-1] if density else None),
        f"{charts.number(cost[0])} ({cost[0] / cost[1]:.1%})" if cost and cost[1] else "–",
      ]
    )
  head = ["run", "recipe", "steps", "last loss", "density now", "training FLOPs (of dense)"]
  yield Table(head, rows, words=True)
  for run in runs:
    if run.offset:
      yield f"{run.name}: a checkpoint's step is {run.offset:,} more than that of the sparse run."


def _what(recipe: Any) -> str:
  words = [recipe.name if recipe.pattern is None else f"{recipe.name} {recipe.pattern}"]
  for name in ("dense", "finetune") if recipe.pattern is not None else ():
    if steps := getattr(recipe.phases, name):
      words.append(f"{name} {steps:,}")
  return ", ".join(words)


# --- scores -------------------------------------------------------------------------------------


def _scores(runs: Sequence[Run], checkpoint: str | int) -> Iterator[Table | str]:
  if any(_columns(run) for run in runs):
    scored = [run for run in runs if _columns(run)]
    report, why = _tried(_score_of, scored, checkpoint)
    yield from _glue_table(runs, scored, report) if report else [f"No table of GLUE: {why}."]
    yield from _lacking(runs, _columns, "no metrics of GLUE")
  others = sorted({t for run in runs for t in run.tasks if not glue.config_of(t)})
  rows = [
    [f"{task} {metric}", *(_chosen(run, task, metric, checkpoint) for run in runs)]
    for task in others
    for metric in sorted({m for r in runs for s in r.tasks.get(task, {}).values() for m in s})
  ]
  if rows:
    yield Table(["metric", *_cells(runs)], rows)
    yield f"Behind a value stands its step. Checkpoint: {_of_target(checkpoint)}."
    yield from _unknown_targets(runs, checkpoint)
  if not any(run.tasks for run in runs):
    yield "No run has metrics of decoded predictions (inference_eval/)."


def _score_of(runs: Sequence[Run], checkpoint: str | int) -> dict[str, Any]:
  return scores.score([results.read(str(run.path)) for run in runs], checkpoint)


def _chosen(run: Run, task: str, metric: str, checkpoint: str | int) -> str:
  series = run.tasks.get(task, {})
  step = _step_of(run, series, [metric], checkpoint) if series else None
  return "–" if step is None else f"{series[step][metric]:.4g} @ {step - run.offset:,}"


def _of_target(checkpoint: str | int) -> str:
  """For people."""
  return "the best one at the target pattern" if checkpoint == "best" else str(checkpoint)


def _unknown_targets(runs: Sequence[Run], checkpoint: str | int) -> Iterator[str]:
  """Names the runs whose best step may be one of denser weights."""
  for run in runs if checkpoint == "best" else ():
    if remark := run.settings.target_remark():
      yield f"{run.name}: {remark}, so its best step may be one before it."


def _step_of(run: Run, series, metrics: Sequence[str], checkpoint: str | int) -> int | None:
  """The step that counts, as in `glue score`: the best is none that is denser than the pattern."""
  return scores.choose(series, metrics, checkpoint, run.settings.target_from() or 0)[0]


def _glue_table(runs, scored, report) -> Iterator[Table | str]:
  titles = ["overall", *report["columns"]]
  rows = []

  def cells(source, best=()):
    means = {t: c["mean"] for t, c in source["columns"].items()} | {"overall": source["overall"]}
    for title in titles:
      mean = means.get(title)
      yield Cell("–" if mean is None else f"{mean:.1f}", strong=title in best)

  for run, row in zip(scored, report["runs"], strict=True):
    best = [title for title, names in report["best"].items() if row["run"] in names]
    rows.append([Cell(run.name, run=runs.index(run)), *cells(row, best)])
    steps = {t: f"{c['step'] - run.offset:,}" for t, c in row["columns"].items()}
    rows.append(["at step", *(steps.get(t, "") for t in titles)])
    if published := row["published"]:
      rows.append([f"published, Table {published['table']}", *cells(published)])
      delta = {t: f"{round(d, 1) + 0.0:+.1f}" for t, d in row["delta"].items()}
      rows.append(["delta", *(delta.get(t, "–") for t in titles)])
  yield Table(["", *titles], rows)
  meaning = {
    "best": "the best step of each task, on the set that it is reported on, which flatters it",
    "last": "the last one of each task",
  }
  yield f"Checkpoint: {meaning.get(report['checkpoint'], report['checkpoint'])}."
  for row in report["runs"]:
    reasons = dict.fromkeys(row["missing"].values())
    missing = [
      f"{', '.join(t for t, why in row['missing'].items() if why == reason)} ({reason})"
      for reason in reasons
    ]
    said = [f"no overall, missing {'; '.join(missing)}"] if missing else []
    yield from (f"{row['run']}: {'; '.join(said)}." for said in [[*said, *row["remarks"]]] if said)


def _columns(run: Run) -> dict[str, tuple[str, tuple[str, ...]]]:
  """Column of GLUE -> (task, metrics) of this run; those of mini-GLUE have names of their own."""
  found = {glue.config_of(name): name for name in run.tasks}
  return {
    f"{'mini ' if mini else ''}{c.title}": (found[c.task, mini], c.metrics)
    for c in glue.COLUMNS
    for mini in (False, True)
    if (c.task, mini) in found
  }


# --- curves -------------------------------------------------------------------------------------

_LOSS = "loss_per_nonpadding_target_token"


def _loss(runs: Sequence[Run]) -> Iterator[Chart | str]:
  def validation(task: str) -> Chart | None:
    of = lambda run: run.evals.get(task, {}).get(_LOSS, {})
    return _chart(runs, f"eval_loss_{task}", f"Validation loss per target token, {task}", of)

  charts = [
    _tagged(runs, "train_loss", "Training loss per target token", _LOSS),
    _tagged(runs, "train_accuracy", "Training accuracy of tokens", "accuracy"),
    _tagged(runs, "learning_rate", "Learning rate", "learning_rate"),
    _tagged(runs, "steps_per_second", "Steps per second", "timing/steps_per_second"),
    *map(validation, sorted({task for run in runs for task in run.evals})),
  ]
  yield from _some(charts, "No run has curves of training (train/, training_eval/).")


def _metrics(runs: Sequence[Run]) -> Iterator[Chart | str]:
  names = {
    (task, metric)
    for run in runs
    for task, series in run.tasks.items()
    for values in series.values()
    for metric in values
  }

  def chart(task: str, metric: str) -> Chart | None:
    def of(run: Run) -> Points:
      series = run.tasks.get(task, {})
      return {step: values[metric] for step, values in series.items() if metric in values}

    return _chart(runs, f"{task}_{metric}", f"{task}: {metric}", of)

  charts = [chart(*name) for name in sorted(names)]
  yield from _some(charts, "No run has metrics of decoded predictions (inference_eval/).")


def _schedule(runs: Sequence[Run]) -> Iterator[Strip | Chart | str]:
  lines = []
  for i, run in enumerate(runs):
    rules, why = _tried(getattr, run, "rules")
    if why:
      yield f"{run.name}: no schedule, {why}."
      continue
    by_recipe: dict[Any, list[str]] = {}
    for place, recipe in rules.places.items():
      by_recipe.setdefault(recipe, []).append(place)
    for recipe, places in by_recipe.items():
      if segments := _segments(recipe):
        yield Strip(i, f"{', '.join(places)}: {recipe.name}", segments)
        lines.append(Line(i, _decay(recipe, segments), "dashed"))
  for i, run in enumerate(runs):
    if points := run.train.get("nm/D"):
      lines.append(Line(i, _sparse(run, points), "dots"))

  def pattern(key: str) -> Chart | None:
    return _chart(
      runs, f"pattern_{key}", f"Pattern n/m of {key}", lambda run: _kept(run, key), note=_MEAN
    )

  title = "D, by schedule (dashed) and as sampled (dots)"
  charts = [
    _by_step(runs, "decay", title, lines, note=_MEAN) if lines else None,
    *map(pattern, sorted({t[5:] for run in runs for t in run.train if _is_rule(run, t)})),
    _tagged(runs, "density", "Density in use: 1 while D > 0", "nm/density", note=_MEAN),
  ]
  yield from _some(charts, "No run has a schedule in its config.gin, or samples of D and patterns.")


def _is_rule(run: Run, tag: str) -> bool:
  """Whether it is nm/n/RULE; beside that of a path stands nm/D/PATH."""
  return tag.startswith("nm/n/") and f"nm/D/{tag[5:]}" not in run.train


def _kept(run: Run, key: str) -> dict[int, float]:
  n, m = (run.train.get(f"nm/{x}/{key}", {}) for x in "nm")
  return {step: n[step] / m[step] for step in n if m.get(step)}


def _segments(recipe: Any) -> list[tuple[int, int, str, float, float, float]]:
  return [
    (
      s.start,
      s.stop,
      str(s.pattern) if s.pattern else "dense",
      s.pattern.density if s.pattern else 1.0,
      float(s.decay_start),
      float(s.decay_stop),
    )
    for s in recipe.timeline()
  ]


def _decay(recipe: Any, segments) -> list[tuple[float, float]]:
  """D at the ends of segments and in between, as the recipe itself computes it."""
  import jax
  import numpy as np

  total = segments[-1][1]
  steps = {round(k * (total - 1) / 100) for k in range(101)}
  steps |= {s for start, stop, *_ in segments for s in (start, stop - 1)}
  ordered = np.array(sorted(steps), np.int32)
  return [(int(s), float(d)) for s, d in zip(ordered, jax.vmap(recipe.decay)(ordered), strict=True)]


def _density(runs: Sequence[Run]) -> Iterator[Table | str]:
  prefix = "nm/density/"
  paths = sorted({t.removeprefix(prefix) for r in runs for t in r.train if t.startswith(prefix)})
  paths.sort(key=lambda path: [int(w) if w.isdigit() else w for w in re.split(r"(\d+)", path)])
  if not paths:
    yield (
      "No run has samples by layer. The local runner writes them with its other metrics "
      "(METRICS_EVERY), t5x.train with --gin.t5x_adapter.SparseTrainer.metrics_per_place=True."
    )
    return
  rows = []
  for path in paths:
    cells: list[str | Cell] = [path]
    for i, run in enumerate(runs):
      now = list(run.train.get(f"nm/density/{path}", {}).values())
      target = list(run.train.get(f"nm/density_target/{path}", {}).values())
      if not now:
        cells.append("–")
        continue
      behind = f" of {target[-1]:.4g}" if target and target[-1] != now[-1] else ""
      cells.append(Cell(f"{now[-1]:.4g}{behind}", bar=now[-1], run=i))
    rows.append(cells)
  yield Table(["sparse kernel", *_cells(runs)], rows)
  yield (
    "The share of weights in use at the last sample: 1 while D > 0, for a fading weight still "
    "counts. 'of' names the target's share where the two differ."
  )
  has = lambda run: any(t.startswith(prefix) for t in run.train)
  yield from _lacking(runs, has, "no samples by layer")


def _flips(runs: Sequence[Run]) -> Iterator[Chart | str]:
  charts = [
    _tagged(runs, "flips_all", "Mask flips per step, of all positions", "nm/flip_rate/all"),
    _tagged(runs, "flips_kept", "Kept weights lost per step, of kept", "nm/flip_rate/kept"),
  ]
  yield from _some(charts, "No run has samples of its masks (METRICS_EVERY).")
  if any(charts):
    yield "From the mask before an update to the one after it, at sampled steps."


def _variance(runs: Sequence[Run]) -> Iterator[Chart | str]:
  kinds = {
    "second_moment_var": "Variance of Adam's second moment",
    "second_moment_var_factored": "Variance of Adafactor's second moment",
    "grad_abs_var": "Variance of the gradient's absolute value",
  }
  parts = {"all": "all weights", "kept": "kept weights"}
  charts = [
    _tagged(runs, f"{kind}_{part}", f"{title}, {of}", f"nm/{kind}/{part}", log=True)
    for kind, title in kinds.items()
    for part, of in parts.items()
  ]
  yield from _some(charts, "No run has samples of variances (METRICS_EVERY).")
  if any(charts):
    yield (
      "Over the sparse kernels. The paper's Figure 3 shows that of all weights; in masked mode a "
      "pruned weight's gradient carries the factor D, so it falls with D whatever the noise."
    )


# --- cost ---------------------------------------------------------------------------------------


def _cost(runs: Sequence[Run], checkpoint: str | int) -> Iterator[Chart | str]:
  judged = [run for run in runs if measures(run)]
  first = measures(judged[0]) if judged else {}
  common = [name for name in first if all(name in measures(run) for run in judged)]
  if not common:
    yield "No task with metrics of decoded predictions (inference_eval/) is common to the runs."
    return
  quality = f"Mean of {', '.join(common)}" if len(common) > 1 else common[0]
  lines = []
  for i, run in enumerate(runs):
    if run not in judged:
      yield f"{run.name}: has no metrics of decoded predictions."
      continue
    found, why = _tried(_by_flops, run, common)
    if why:
      yield f"{run.name}: no FLOPs, {why}."
    elif found:
      points, names = zip(*found, strict=True)
      lines.append(Line(i, points, names=[f"{run.name}, {name}" for name in names]))
  flops_note = (
    "Training FLOPs of this run up to an evaluation, of the matrix products alone and as on a "
    "machine that skips every pruned weight (Figure 4b). Pre-training is not in them."
  )
  chart = Chart("score_by_flops", f"{quality}, against training FLOPs", "training FLOPs", lines)
  yield from _some([chart if lines else None], "No run's training FLOPs are known.")
  yield from _by_pattern(runs, judged, common, quality, checkpoint)
  yield from _unknown_targets(judged, checkpoint)
  if lines:
    yield flops_note


def measures(run: Run) -> dict[str, tuple[str, tuple[str, ...]]]:
  """Name -> (task, metrics): columns of GLUE where there are any, else all tasks of the run."""
  if columns := _columns(run):
    return columns
  found = {}
  for task, series in run.tasks.items():
    if metrics := sorted(set.intersection(*map(set, series.values()))) if series else []:
      found[task] = task, tuple(metrics)
  return found


def _by_flops(run: Run, common: Sequence[str]) -> list[tuple[tuple[float, float], str]]:
  """((FLOPs, mean of the tasks), step) where all tasks have a score; see `measures`."""
  of = [measures(run)[name] for name in common]
  found = []
  for step in sorted(set.intersection(*(set(run.tasks[task]) for task, _ in of))):
    means = [_mean_at(run.tasks[task][step], metrics) for task, metrics in of]
    if all(map(math.isfinite, means)):
      flops, _ = run.flops(step - run.offset)
      found.append(((flops, math.fsum(means) / len(means)), f"step {step - run.offset:,}"))
  return found


def _mean_at(values: Mapping[str, float], metrics: Sequence[str]) -> float:
  return math.fsum(values.get(m, math.nan) for m in metrics) / len(metrics)


def _by_pattern(runs, judged, common, quality, checkpoint) -> Iterator[Chart | str]:
  """One point a run: its pattern, from dense to sparse, and its score (Figure 4a)."""
  found: dict[int, tuple[float, str, float]] = {}  # run -> (density, pattern, score)
  recipes: dict[str, list[int]] = {}
  for i, run in enumerate(runs):
    rules = _tried(getattr, run, "rules")[0]
    if run not in judged or rules is None:
      continue
    means = []
    for task, metrics in (measures(run)[name] for name in common):
      step = _step_of(run, run.tasks[task], metrics, checkpoint)
      means.append(math.nan if step is None else _mean_at(run.tasks[task][step], metrics))
    patterns = {p: r.pattern for p, r in rules.places.items() if r.pattern is not None}
    label = roles.text_of(roles.single({p: str(n) for p, n in patterns.items()})) or "dense"
    shares = [n.density for n in patterns.values()] or [1.0]
    found[i] = math.fsum(shares) / len(shares), label, math.fsum(means) / len(means)
    recipes.setdefault("/".join(dict.fromkeys(r.name for r in rules.places.values())), []).append(i)
  if not found:
    yield "No run's pattern is known."
    return
  labels = list(dict.fromkeys(label for _, label, _ in sorted(found.values(), reverse=True)))
  at = {i: (float(labels.index(label)), score) for i, (_, label, score) in found.items()}
  joined = [Line(None, sorted(at[i] for i in of)) for of in recipes.values() if len(of) > 1]
  yield Chart(
    "score_by_pattern",
    f"{quality}, against pattern",
    "pattern, from dense to sparse",
    [
      *(dataclasses.replace(line, style="dashed") for line in joined),
      *(Line(i, [p], "dots") for i, p in at.items()),
    ],
    labels=labels,
    note=f"Checkpoint: {_of_target(checkpoint)}. Runs of one recipe are joined (Figure 4a).",
  )


# --- settings -----------------------------------------------------------------------------------


def _settings(runs: Sequence[Run]) -> Iterator[Table | str]:
  names = sorted({name for run in runs for name in run.macros})
  if not names:
    yield "No run has a config.gin."
    return
  differ = [n for n in names if len({run.macros.get(n) for run in runs}) > 1]
  first = [n for n in names if n.endswith("SEED")]
  ordered = [*first, *(n for n in differ if n not in first)]
  rest = [n for n in names if n not in ordered]

  def row(name: str) -> list[str | Cell]:
    return [name, *(Cell(run.macros.get(name, "–"), strong=name in differ) for run in runs)]

  yield Table(["macro", *_cells(runs)], [row(n) for n in [*ordered, *rest]], words=True)
  if differ:
    yield "Seeds stand first, then what differs between the runs, in bold."
  yield from _lacking(runs, lambda run: run.gin, "no config.gin")


def _environment(runs: Sequence[Run]) -> Iterator[Table | str]:
  """What each run ran with, a column a run; a run that went on elsewhere says so."""
  known = {run.name: run.processes[-1]["environment"] for run in runs if run.processes}
  if not known:
    yield "No run noted what it ran with: the local runner does, in run.json; T5X does not."
    return

  def row(name: str) -> list[str | Cell]:
    values = [known.get(run.name, {}).get(name, "–") for run in runs]
    return [name, *(Cell(value, strong=len(set(values)) > 1) for value in values)]

  names = dict.fromkeys(name for found in known.values() for name in found)
  yield Table(["", *_cells(runs)], [row(name) for name in names], words=True)
  for run in runs:
    if len(run.processes) > 1:
      steps = ", ".join(f"{p['from'] - run.offset:,}" for p in run.processes[1:])
      yield f"{run.name}: went on at step {steps} in another environment; the last one is shown."
  yield from _lacking(runs, lambda run: run.processes, "no note of what it ran with")
