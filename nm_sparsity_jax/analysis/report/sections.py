"""All sections of a report: runs in, plain values out.

    [reading.read] -> Run -> [sections] -> Section(Chart | Table | Strip | a sentence)

A step on an x axis is the global one: a run that begins at a checkpoint begins at that one's step.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from nm_sparsity_jax.analysis.charts import Line
from nm_sparsity_jax.analysis.page import Cell, Part, Section, Strip, Table
from nm_sparsity_jax.analysis.report import cost, scored, summary
from nm_sparsity_jax.analysis.report.parts import by_step, curve, grouped, heads, lacking
from nm_sparsity_jax.analysis.report.reading import LOSS, Run
from nm_sparsity_jax.core.text import Strong


def sections(runs: Sequence[Run], checkpoint: str | int = "best", seeds: int = 1) -> list[Section]:
  """Returns all sections, in the order of the page.

  Args:
    runs: what `reading.read` returned.
    checkpoint: of the scores: 'best', 'last' or a step, as for `nm-sparsity glue score`.
    seeds: how many runs each of them is the mean of, at most.
  """
  return [
    Section("summary", "Summary", list(summary.summary(runs, checkpoint, seeds))),
    Section("metrics", "Metrics by task", _metrics(runs)),
    Section("runs", "Runs", list(_overview(runs))),
    Section("scores", "Scores", list(scored.table(runs, checkpoint))),
    Section("loss", "Loss", _loss(runs)),
    Section("schedule", "Pattern and D", list(_schedule(runs))),
    Section("density", "Density by layer", list(_density(runs))),
    Section("flips", "Mask flips", _flips(runs)),
    Section("variance", "Variance", _variance(runs)),
    Section("cost", "Accuracy against cost", list(cost.cost(runs, checkpoint))),
    Section("settings", "Settings and seeds", list(_settings(runs)), folded=True),
    Section("environment", "Environment", list(_environment(runs)), folded=True),
  ]


# --- curves ---------------------------------------------------------------------------------------


def _metrics(runs: Sequence[Run]) -> Sequence[Part]:
  series = [(t, values) for run in runs for t, by in run.tasks.items() for values in by.values()]
  charts = []
  for task, metric in sorted({(task, metric) for task, values in series for metric in values}):
    of = lambda run, task=task, metric=metric: {
      step: values[metric] for step, values in run.tasks.get(task, {}).items() if metric in values
    }
    charts += curve(runs, f"{task}_{metric}", f"{task}: {metric}", of)
  return charts or ["No run has metrics of decoded predictions (inference_eval/)."]


def _loss(runs: Sequence[Run]) -> Sequence[Part]:
  """Returns charts of losses and accuracies; of runs whose losses are not per token, of all."""
  others = [run for run in runs if not run.counts_tokens]
  charts = curve(runs, "train_loss", "Training loss per target token", LOSS)
  accuracy = lambda run: run.train.get("accuracy", {}) if run.counts_tokens else {}
  charts += curve(runs, "train_accuracy", "Training accuracy of tokens", accuracy)
  own = ("nm/", "timing/", "learning_rate")  # in charts of their own
  for tag in sorted({t for run in others for t in run.train if not t.startswith(own)}):
    of = lambda run, tag=tag: {} if run.counts_tokens else run.train.get(tag, {})
    charts += curve(runs, f"train_{tag}", f"Training {tag}", of)
  pairs = set()
  for run in others:
    for task, tags in run.evals.items():
      of_decoding = {m for values in run.tasks.get(task, {}).values() for m in values}
      pairs |= {(task, tag) for tag in tags.keys() - of_decoding}
  for task, tag in sorted(pairs):
    of = lambda run, task=task, tag=tag: (
      {} if run.counts_tokens else run.evals.get(task, {}).get(tag, {})
    )
    charts += curve(runs, f"eval_{tag}_{task}", f"{task}: {tag}", of)
  charts += curve(runs, "learning_rate", "Learning rate", "learning_rate")
  charts += curve(runs, "steps_per_second", "Steps per second", "timing/steps_per_second")
  for task in sorted({task for run in runs for task in run.evals}):
    of = lambda run, task=task: run.evals.get(task, {}).get(LOSS, {})
    charts += curve(runs, f"eval_loss_{task}", f"Validation loss per target token, {task}", of)
  return charts or ["No run has curves of training (train/, training_eval/)."]


def _flips(runs: Sequence[Run]) -> Sequence[Part]:
  charts = [
    *curve(runs, "flips_all", "Mask flips per step, of all positions", "nm/flip_rate/all"),
    *curve(runs, "flips_kept", "Kept weights lost per step, of kept", "nm/flip_rate/kept"),
  ]
  note = "From the mask before an update to the one after it, at sampled steps."
  return [*charts, note] if charts else ["No run has samples of its masks (METRICS_EVERY)."]


def _variance(runs: Sequence[Run]) -> Sequence[Part]:
  kinds = {
    # By what was measured: Adafactor keeps a small parameter's second moment whole, as Adam does.
    "second_moment_var": "Variance of the second moment",
    "second_moment_var_factored": "Variance of Adafactor's factored second moment",
    "grad_abs_var": "Variance of the gradient's absolute value",
  }
  charts = []
  for kind, title in kinds.items():
    for share in ("all", "kept"):
      tag = f"nm/{kind}/{share}"
      charts += curve(runs, f"{kind}_{share}", f"{title}, {share} weights", tag, log=True)
  note = (
    "Over the sparse kernels. The paper's Figure 3 shows that of all weights; in masked mode a "
    "pruned weight's gradient carries the factor D, so it falls with D whatever the noise."
  )
  return [*charts, note] if charts else ["No run has samples of variances (METRICS_EVERY)."]


# --- the schedule ---------------------------------------------------------------------------------


def _schedule(runs: Sequence[Run]) -> Iterator[Part]:
  """Yields a strip for each recipe of each run, then charts of D, patterns and density."""
  lines = []
  for i, run in enumerate(runs):
    by_recipe: dict[Any, list[str]] = {}
    for place, recipe in run.rules.places.items() if run.rules else ():
      by_recipe.setdefault(recipe, []).append(place)
    for recipe, places in by_recipe.items():
      found = segments(recipe, run.offset)
      yield Strip(i, f"{', '.join(places)}: {recipe.name}", found)
      lines.append(Line(i, decay(recipe, found, run.offset), "dashed"))
  yield from grouped((run.name, f"no schedule, {run.no_rules}") for run in runs if run.no_rules)
  for i, run in enumerate(runs):
    if points := run.train.get("nm/D"):
      lines.append(Line(i, sorted(points.items()), "dots"))
  charts = []
  if lines:
    title = "D, by schedule (dashed) and as sampled (dots)"
    charts.append(by_step(runs, "decay", title, lines))
  # A tag is nm/n/RULE, or nm/n/PATH; only beside the latter stands nm/D/PATH.
  tags = [(run, tag[5:]) for run in runs for tag in run.train if tag.startswith("nm/n/")]
  for key in sorted({key for run, key in tags if f"nm/D/{key}" not in run.train}):
    kept = lambda run, key=key: {
      step: n / run.train[f"nm/m/{key}"][step]
      for step, n in run.train.get(f"nm/n/{key}", {}).items()
    }
    charts += curve(runs, f"pattern_{key}", f"Pattern n/m of {key}", kept, "steps")
  charts += curve(runs, "density", "Density in use: 1 while D > 0", "nm/density", "steps")
  yield from charts or ["No run has a schedule in its config.gin, or samples of D and patterns."]


def segments(recipe: Any, offset: int = 0) -> list[tuple[int, int, str, float, float, float]]:
  """Returns the timeline of a recipe as the segments of a `Strip`.

  Args:
    recipe: the recipe.
    offset: the step before its first one.
  """
  return [
    (
      offset + s.start,
      offset + s.stop,
      str(s.pattern or "dense"),
      s.pattern.density if s.pattern else 1.0,
      float(s.decay_start),
      float(s.decay_stop),
    )
    for s in recipe.timeline()
  ]


def decay(recipe: Any, segments: Sequence[tuple], offset: int = 0) -> list[tuple[float, float]]:
  """Returns (step, D) at the ends of segments and in between, as the recipe itself computes D.

  Args:
    recipe: the recipe.
    segments: what `segments` returned for it.
    offset: the step before its first one.
  """
  import jax
  import numpy as np

  total = segments[-1][1] - offset
  ends = [step - offset for start, stop, *_ in segments for step in (start, stop - 1)]
  steps = np.union1d(np.linspace(0, total - 1, 101).round(), ends).astype(np.int32)
  values = np.asarray(jax.vmap(recipe.decay)(steps))
  return [(offset + int(s), float(d)) for s, d in zip(steps, values, strict=True)]


def _density(runs: Sequence[Run]) -> Iterator[Part]:
  """Yields a table of the share of weights in use, by layer, at the last sample."""
  prefix = "nm/density/"
  paths = {tag.removeprefix(prefix) for run in runs for tag in run.train if tag.startswith(prefix)}
  if not paths:
    yield (
      "No run has samples by layer. The local runner writes them with its other metrics "
      "(METRICS_EVERY), t5x.train with --gin.t5x_adapter.SparseTrainer.metrics_per_place=True."
    )
    return

  def cell(run: Run, number: int, path: str) -> str | Cell:
    now = [*run.train.get(f"nm/density/{path}", {}).values()][-1:]
    target = [*run.train.get(f"nm/density_target/{path}", {}).values()][-1:]
    if not now:
      return "–"
    of_target = f" of {target[0]:.4g}" if target and target != now else ""
    return Cell(f"{now[0]:.4g}{of_target}", bar=now[0], run=number)

  numbered = lambda path: [int(w) if w.isdigit() else w for w in re.split(r"(\d+)", path)]
  rows = [
    [path, *(cell(run, i, path) for i, run in enumerate(runs))]
    for path in sorted(paths, key=numbered)  # layer 2 before layer 10
  ]
  yield Table(["sparse kernel", *heads(runs)], rows)
  yield (
    "The share of weights in use at the last sample: 1 while D > 0, as a fading weight still "
    "counts. 'of' names the target's share where the two differ."
  )
  has = lambda run: any(tag.startswith(prefix) for tag in run.train)
  yield from lacking(runs, has, "no samples by layer")


# --- what ran -------------------------------------------------------------------------------------


def _overview(runs: Sequence[Run]) -> Iterator[Part]:
  """Yields a table with a row for each run: recipe, steps, last loss, density, FLOPs."""
  rows = []
  for i, run in enumerate(runs):
    places = run.rules.places.items() if run.rules else ()
    what = "; ".join(f"{place}: {_trained(recipe)}" for place, recipe in places) or run.no_rules
    done, steps = (run.last_step or 0) - run.offset, run.settings.sparse_steps
    own = f"{done:,}" if steps is None else f"{done:,} of {steps:,}"
    own += f", after {run.offset:,} inherited" if run.offset else ""
    last = [run.loss, run.train.get("nm/density", {})]
    values = [f"{[*points.values()][-1]:.4g}" if points else "–" for points in last]
    rows.append([Cell(run.name, run=i), what, own, *values, cost.of_dense(run, done)])
  head = ["run", "recipe", "steps", "last loss", "density now", "training FLOPs (of dense)"]
  yield Table(head, rows, words=True)
  yield from grouped(
    (run.name, f"start at a checkpoint of step {run.offset:,}, and inherit the steps before it")
    for run in runs
    if run.offset
  )


def _trained(recipe: Any) -> str:
  if not any(segment.pattern for segment in recipe.timeline()):
    return recipe.name
  phases = {"dense": recipe.phases.dense, "finetune": recipe.phases.finetune}
  lengths = [f"{name} {steps:,}" for name, steps in phases.items() if steps]
  return ", ".join([f"{recipe.name} {recipe.pattern}", *lengths])


def _marked(values: Sequence[str]) -> list[str]:
  """Returns the values of a row of settings, in bold where they differ."""
  return [Strong(value) if len(set(values)) > 1 else value for value in values]


def _settings(runs: Sequence[Run]) -> Iterator[Part]:
  """Yields a table of all macros: seeds first, then what differs between the runs."""
  names = sorted({name for run in runs for name in run.macros})
  if not names:
    yield "No run has a config.gin."
    return
  values = {name: [run.macros.get(name, "–") for run in runs] for name in names}
  is_last = lambda name: (not name.endswith("SEED"), len(set(values[name])) == 1)
  rows = [[name, *_marked(values[name])] for name in sorted(names, key=is_last)]
  yield Table(["macro", *heads(runs)], rows, words=True)
  yield "Seeds stand first, then what differs between the runs, in bold."
  yield from lacking(runs, lambda run: run.gin, "no config.gin")


def _environment(runs: Sequence[Run]) -> Iterator[Part]:
  """Yields a table of what each run ran with, and names the runs that went on elsewhere."""
  known = [run.processes[-1]["environment"] if run.processes else {} for run in runs]
  if not any(known):
    yield "No run noted what it ran with: the local runner does, in run.json; T5X does not."
    return
  names = dict.fromkeys(name for found in known for name in found)
  rows = [[name, *_marked([found.get(name, "–") for found in known])] for name in names]
  yield Table(["", *heads(runs)], rows, words=True)
  at = lambda run: ", ".join(f"{p['from']:,}" for p in run.processes[1:])
  yield from grouped(
    (run.name, f"went on at step {at(run)} in another environment; the last one is shown")
    for run in runs
    if len(run.processes) > 1
  )
  yield from lacking(runs, lambda run: run.processes, "no note of what it ran with")
