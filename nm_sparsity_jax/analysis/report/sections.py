"""All sections of a report: runs in, plain values out.

    [reading.read] -> Run -> [sections] -> Section(Chart | Table | Strip | a sentence)

A step on an x axis is the global one: a run that begins at a checkpoint begins at that one's step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nm_sparsity_jax.analysis.charts import Chart, Line
from nm_sparsity_jax.analysis.page import Cell, Part, Section, Strip, Table
from nm_sparsity_jax.analysis.report import scored
from nm_sparsity_jax.analysis.report.parts import by_step, curve, grouped, heads
from nm_sparsity_jax.analysis.report.reading import Run
from nm_sparsity_jax.core.text import Strong
from nm_sparsity_jax.runs import trained


def sections(runs: Sequence[Run], checkpoint: str | int = "best") -> list[Section]:
  """Returns all sections, in the order of the page.

  Args:
    runs: what `reading.read` returned.
    checkpoint: of the scores: 'best', 'last' or a step, as for `nm-sparsity glue score`.
  """
  flips = {
    "nm/flip_rate/all": "Mask flips per step, of all positions",
    "nm/flip_rate/kept": "Kept weights lost per step, of kept",
  }
  return [
    Section("summary", "Summary", list(scored.summary(runs, checkpoint))),
    Section("metrics", "Metrics by task", _metrics(runs)),
    Section("runs", "Runs", list(_overview(runs))),
    Section("scores", "Scores", list(scored.table(runs, checkpoint))),
    Section("loss", "Loss", _curves(runs)),
    Section("schedule", "Pattern and D", list(_schedule(runs))),
    Section("flips", "Mask flips", _samples(runs, flips)),
    Section("variance", "Variance", _samples(runs, _VARIANCES, log=True)),
    Section("cost", "Accuracy against cost", list(scored.cost(runs))),
    Section("settings", "Settings and environment", list(_settings(runs)), folded=True),
  ]


# --- curves ---------------------------------------------------------------------------------------

_VARIANCES = {
  f"nm/{kind}/{share}": f"{title}, {share} weights"
  for kind, title in {
    "second_moment_var": "Variance of the second moment",
    "grad_abs_var": "Variance of the gradient's absolute value",
  }.items()
  for share in ("all", "kept")
}


def _samples(runs: Sequence[Run], titles: Mapping[str, str], log: bool = False) -> Sequence[Part]:
  """Returns a chart for each tag of the samples that a run wrote of its masks and gradients."""
  charts = []
  for tag, title in titles.items():
    key = tag.removeprefix("nm/").replace("/", "_")
    charts += curve(runs, key, title, [run.train.get(tag, {}) for run in runs], log=log)
  return charts or ["No run has such samples (METRICS_EVERY)."]


def _metrics(runs: Sequence[Run]) -> Sequence[Part]:
  series = [(t, values) for run in runs for t, by in run.tasks.items() for values in by.values()]
  charts = []
  for task, metric in sorted({(task, metric) for task, values in series for metric in values}):
    points = [
      {step: values[metric] for step, values in run.tasks.get(task, {}).items() if metric in values}
      for run in runs
    ]
    charts += curve(runs, f"{task}_{metric}", f"{task}: {metric}", points)
  return charts or ["No run has metrics of decoded predictions (inference_eval/)."]


def _curves(runs: Sequence[Run]) -> Sequence[Part]:
  """Returns a chart for each tag of train/ and training_eval/; the losses come first."""
  loss_first = lambda key: (key[-1] != "loss", key)
  tags = {(tag,) for run in runs for tag in run.train if not tag.startswith("nm/")}
  charts = []
  for (tag,) in sorted(tags, key=loss_first):
    points = [run.train.get(tag, {}) for run in runs]
    title = f"Training: {tag.removeprefix('timing/').replace('_', ' ')}"
    charts += curve(runs, f"train_{tag}", title, points)
  pairs = set()
  for run in runs:
    for task, tags_of in run.evals.items():
      decoded = {m for values in run.tasks.get(task, {}).values() for m in values}
      pairs |= {(task, tag) for tag in tags_of.keys() - decoded}  # those are metrics by task
  for task, tag in sorted(pairs, key=loss_first):
    points = [run.evals.get(task, {}).get(tag, {}) for run in runs]
    title = f"Validation, {task}: {tag.replace('_', ' ')}"
    charts += curve(runs, f"eval_{tag}_{task}", title, points)
  return charts or ["No run has curves of training (train/, training_eval/)."]


def _schedule(runs: Sequence[Run]) -> Iterator[Part]:
  """Yields a strip for each recipe of each run, then charts of D and of the density."""
  lines = []
  for i, run in enumerate(runs):
    by_recipe: dict[Any, list[str]] = {}
    for place, recipe in run.rules.places.items() if run.rules else ():
      by_recipe.setdefault(recipe, []).append(place)
    for recipe, places in by_recipe.items():
      segments = [
        (run.offset + s.start, run.offset + s.stop, str(s.pattern or "dense"),
         s.pattern.density if s.pattern else 1.0, float(s.decay_start), float(s.decay_stop))
        for s in recipe.timeline()
      ]  # fmt: skip
      yield Strip(i, f"{', '.join(places)}: {recipe.name}", segments)
      lines.append(Line(i, [(run.offset + s, d) for s, d in decay(recipe)], "dashed"))
  unknown = [(run.name, f"no schedule, {run.settings.no_rules}") for run in runs if not run.rules]
  yield from grouped(unknown)
  sampled = {i: run.train["nm/D"] for i, run in enumerate(runs) if "nm/D" in run.train}
  lines += [Line(i, sorted(points.items()), "dots") for i, points in sampled.items()]
  charts: list[Chart] = []
  if lines:
    charts.append(by_step(runs, "decay", "D, by schedule (dashed) and as sampled (dots)", lines))
  density = [run.train.get("nm/density", {}) for run in runs]
  charts += curve(runs, "density", "Density in use: 1 while D > 0", density, "steps")
  yield from charts or ["No run has a schedule in its config.gin, or samples of D and density."]


def decay(recipe: Any) -> list[tuple[int, float]]:
  """Returns (step, D) at the ends of all segments and in between, as the recipe itself computes D.

  Args:
    recipe: the recipe. Its first step is 0.
  """
  import jax
  import numpy as np

  segments = recipe.timeline()
  # D jumps at the ends of segments, so a grid alone would draw a slope there.
  ends = [step for s in segments for step in (s.start, s.stop - 1)]
  steps = np.union1d(np.linspace(0, segments[-1].stop - 1, 101).round(), ends).astype(np.int32)
  values = np.asarray(jax.vmap(recipe.decay)(steps))
  return [(int(s), float(d)) for s, d in zip(steps, values, strict=True)]


# --- tables ---------------------------------------------------------------------------------------


def _overview(runs: Sequence[Run]) -> Iterator[Part]:
  """Yields a table with a row for each run: recipe, steps, last loss, density, FLOPs."""
  rows = []
  for i, run in enumerate(runs):
    places = run.rules.places.items() if run.rules else ()
    what = (
      "; ".join(f"{place}: {_trained(recipe)}" for place, recipe in places) or run.settings.no_rules
    )
    done, steps = (run.last_step or 0) - run.offset, run.settings.sparse_steps
    own = f"{done:,}" if steps is None else f"{done:,} of {steps:,}"
    own += f", after {run.offset:,} inherited" if run.offset else ""
    last = [run.train.get(tag, {}) for tag in ("loss", "nm/density")]
    values = [f"{[*points.values()][-1]:.4g}" if points else "–" for points in last]
    try:
      spent, dense = run.flops(done)
      flops = f"{spent:.3g} ({spent / dense:.1%})"
    except (ValueError, TypeError, ZeroDivisionError):  # the section of costs says why
      flops = "–"
    rows.append([Cell(run.name, run=i), what, own, *values, flops])
  head = ["run", "recipe", "steps", "last loss", "density now", "training FLOPs (of dense)"]
  yield Table(head, rows, words=True)


def _trained(recipe: Any) -> str:
  if not any(segment.pattern for segment in recipe.timeline()):
    return recipe.name
  phases = {"dense": recipe.phases.dense, "finetune": recipe.phases.finetune}
  lengths = [f"{name} {steps:,}" for name, steps in phases.items() if steps]
  return ", ".join([f"{recipe.name} {recipe.pattern}", *lengths])


def _settings(runs: Sequence[Run]) -> Iterator[Part]:
  """Yields a table of all macros and of what each run ran with: seeds first, then what differs."""
  # A process that resumes a run notes its own environment; the last one counts.
  processes = [trained.started(run.path).get("processes") for run in runs]
  environments = [noted[-1]["environment"] if noted else {} for noted in processes]
  macros = [trained.macros(run.gin) for run in runs]
  values = {
    name: [one.get(name, "–") for one in known]
    for known in (macros, environments)
    for name in dict.fromkeys(sorted(name for one in known for name in one))
  }
  if not values:
    yield "No run has a config.gin or a run.json."
    return
  differs = lambda name: len(set(values[name])) > 1
  order = sorted(values, key=lambda name: (not name.endswith("SEED"), not differs(name)))
  rows = [[n, *(Strong(x) if differs(n) else x for x in values[n])] for n in order]
  yield Table(["", *heads(runs)], rows, words=True)
  yield "Seeds stand first, then what differs between the runs, in bold."
