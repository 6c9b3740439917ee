"""All sections of a report: runs in, plain values out.

    [run_folder.read] -> Run -> [sections] -> Section(Chart | Table | a sentence)

A step on an x axis is the global one: a run that begins at a checkpoint begins at that one's step.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from nm_sparsity_jax.analysis.charts import Chart, Line
from nm_sparsity_jax.analysis.page import Part, Section, Table
from nm_sparsity_jax.analysis.report.costs import training_flops
from nm_sparsity_jax.analysis.run_folder import Run
from nm_sparsity_jax.analysis.scores import table
from nm_sparsity_jax.runs import trained


def sections(runs: Sequence[Run], checkpoint: table.Checkpoint = "best") -> list[Section]:
  """Returns all sections, in the order of the page.

  Args:
    runs: what `run_folder.read` returned.
    checkpoint: of the scores: 'best', 'last' or a step, as for `nm-sparsity glue score`.
  """
  return [
    Section("runs", "Runs", list(_overview(runs, checkpoint))),
    Section("scores", "Scores", list(_scores(runs, checkpoint))),
    Section("metrics", "Metrics by task", _curves(runs, "inference_eval/.*")),
    Section("loss", "Loss", _curves(runs, "(train/(?!nm/)|training_eval/).*")),
    Section("schedule", "Pattern and D", list(_schedule(runs))),
    Section("flips", "Mask flips", _curves(runs, "train/nm/flip_rate/.*")),
    Section("variance", "Variance", _curves(runs, "train/nm/.*_var.*", log=True)),
    Section("cost", "Accuracy against cost", list(_cost(runs))),
    Section("settings", "Settings and environment", [_settings(runs)]),
  ]


# --- curves ---------------------------------------------------------------------------------------


def _curves(
  runs: Sequence[Run], tags: str, style: str = "line", log: bool = False
) -> Sequence[Part]:
  """Returns a chart for each tag, with a line for each run that has it.

  Args:
    runs: all runs.
    tags: a regex, which matches the whole of a tag.
    style: of the lines.
    log: whether y is logarithmic.
  """
  parts = []
  for tag in sorted({tag for run in runs for tag in run.curves if re.fullmatch(tags, tag)}):
    points = {i: run.curves[tag] for i, run in enumerate(runs) if tag in run.curves}
    values = {y for by_step in points.values() for y in by_step.values()}
    if len(values) == 1:
      parts.append(f"{tag}: {values.pop():.6g} throughout.")
    else:
      lines = [Line(i, list(by_step.items()), style) for i, by_step in points.items()]
      parts.append(Chart(re.sub(r"\W", "_", tag), tag, "step", lines, log))
  return parts or ["No run has written such curves."]


def _schedule(runs: Sequence[Run]) -> Iterator[Part]:
  """Yields a table of each run's recipes, then charts of D and of the density."""
  rows, lines = [], []
  for i, run in enumerate(runs):
    by_recipe: dict[Any, list[str]] = {}
    for place, recipe in (run.sparse or {}).items():
      by_recipe.setdefault(recipe, []).append(place)
    for recipe, places in by_recipe.items():
      start = run.start or 0
      for s in recipe.timeline():
        steps = f"{start + s.start:,} .. {start + s.stop - 1:,}"
        decay = " to ".join(dict.fromkeys(f"{float(d):.3g}" for d in (s.decay_start, s.decay_stop)))
        pattern = str(s.pattern or "dense")
        rows.append([run.name, recipe.name, ", ".join(places), steps, pattern, decay])
      lines.append(Line(i, [(start + step, d) for step, d in decays(recipe)], "dashed"))
    if not run.rules:
      yield f"{run.name}: no schedule, {run.no_rules}."
  if rows:
    yield Table(["run", "recipe", "places", "steps", "pattern", "D"], rows)
  sampled = [(i, run.curves.get("train/nm/D", {})) for i, run in enumerate(runs)]
  lines += [Line(i, list(points.items()), "dots") for i, points in sampled if points]
  if lines:
    yield Chart("D", "D, by schedule (dashed) and as sampled (dots)", "step", lines)
  yield from _curves(runs, "train/nm/density", "steps")


def decays(recipe: Any) -> list[tuple[int, float]]:
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


def _overview(runs: Sequence[Run], checkpoint: table.Checkpoint) -> Iterator[Part]:
  """Yields a table with a row for each run, and what to know of it."""
  shared = table.common(runs)
  scores: dict[Run, float] = {}
  for run in runs:
    found = [measure.at(run, checkpoint) for measure in shared.values()]
    if found and all(found):
      scores[run] = statistics.fmean(at[1] for at in found if at)
  dense = [run for run in scores if run.sparse == {}]
  rows = []
  for run in runs:
    done, inherited = run.last_step - (run.start or 0), run.start or 0
    left = sorted({recipe.pattern.density for recipe in (run.sparse or {}).values()})
    weights = ", ".join(f"{100 * share:.4g} %" for share in left)
    # The nearest in length, for training on makes a dense network better too.
    distance = lambda other, run=run: abs(other.last_step - run.last_step)
    near, kept = min(dense, key=distance, default=None), "-"
    if left and run in scores and near is not None and scores[near]:
      kept = f"{scores[run] / scores[near]:.1%} of {near.name}"
    last = [run.curves.get(tag, {}) for tag in ("train/loss", "train/nm/density")]
    values = [f"{[*points.values()][-1]:.4g}" if points else "-" for points in last]
    try:
      spent, all_of_it = training_flops(run, done)
      flops = f"{spent:.3g} ({spent / all_of_it:.1%})"
    except (ValueError, TypeError, ZeroDivisionError):  # the section of costs says why
      flops = "-"
    rows.append([
      run.name, f"{scores[run]:.4g}" if run in scores else "-", kept,
      weights or ("-" if run.sparse is None else "all"), flops, f"{done:,}", f"{inherited:,}",
      *values,
    ])  # fmt: skip
  head = [
    "run", "score", "kept", "weights", "training FLOPs (of dense)", "steps", "inherited",
    "last loss", "density now",
  ]  # fmt: skip
  # A column without a value is left out.
  columns = [c for c in zip(head, *rows, strict=True) if {*c[1:]} != {"-"}]
  head, *rows = zip(*columns, strict=True)
  yield Table(head, rows)
  if scores:
    yield (
      f"Score: {'the mean of ' * (len(shared) > 1)}{' and '.join(shared)}. "
      f"Checkpoint: {checkpoint}. Weights: what the patterns leave of the sparse kernels."
    )
    yield (
      "Compare a sparse run with a dense one of as many updates. One seed shows that a recipe "
      "works, not which is best: that takes a sweep over several."
    )


def _scores(runs: Sequence[Run], checkpoint: table.Checkpoint) -> Iterator[Part]:
  """Yields a table of all measures, with the paper's scores where it has the run's row."""
  report = table.of_runs(runs, checkpoint)
  head, *lines = table.cells(report)
  if lines:
    yield Table(head, [line for line in lines if {*line[1:]} != {"-"}])
    yield from table.notes(report)
  else:
    yield "No run has metrics in inference_eval/ or evaluations.json."


def _settings(runs: Sequence[Run]) -> Table:
  """Returns a table of rules, macros and what each run ran with; what differs stands first."""
  found: list[dict[str, str]] = []
  for run in runs:
    # A process that resumes a run notes its own environment; the last one counts.
    processes = trained.started(run.path).get("processes") or [{}]
    rules = {"rules": run.rules.text if run.rules else run.no_rules}
    found.append({**rules, **trained.bound(run.gin), **processes[-1].get("environment", {})})
  names = sorted({name for one in found for name in one})
  rows = [[name, *(one.get(name, "-") for one in found)] for name in names]
  rows.sort(key=lambda row: len({*row[1:]}) == 1)
  return Table(["", *(run.name for run in runs)], rows)


# --- accuracy against cost ------------------------------------------------------------------------


def _cost(runs: Sequence[Run]) -> Iterator[Part]:
  """Yields the mean score of the runs' common tasks by training FLOPs (Figure 4b)."""
  shared = table.common(runs)
  if not shared:
    yield "No metric of which more is better is common to the runs."
    return
  lines = []
  for i, run in enumerate(runs):
    by_step = [measure.means(run) for measure in shared.values()]
    steps = sorted(set.intersection(*map(set, by_step)))  # those where all have a value
    means = [statistics.fmean(found[step] for found in by_step) for step in steps]
    try:
      costs = [training_flops(run, step - (run.start or 0))[0] for step in steps]
    except (ValueError, TypeError) as e:  # TypeError: a config.gin with fields of another T5
      yield f"{run.name}: no FLOPs, {e}."
    else:
      lines += [Line(i, [*zip(costs, means, strict=True)])] if steps else []
  if lines:
    note = (
      "FLOPs of the run's own steps up to an evaluation: of matrix products alone, on a machine "
      "that skips all pruned weights (Figure 4b)."
    )
    title = f"{'Mean of ' * (len(shared) > 1)}{', '.join(shared)}, against training FLOPs"
    yield Chart("score_by_flops", title, "training FLOPs", lines, note=note)
