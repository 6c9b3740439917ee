"""The section of accuracy against cost: scores by training FLOPs and by pattern (Figure 4)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from nm_sparsity_jax import roles
from nm_sparsity_jax.report import parts, scored
from nm_sparsity_jax.report.charts import Chart, Line
from nm_sparsity_jax.report.reading import Run

if TYPE_CHECKING:
  from nm_sparsity_jax.rules import Rules


def cost(runs: Sequence[Run], checkpoint: str | int) -> Iterator[Chart | str]:
  """Yields the mean score of the runs' common tasks, by training FLOPs and by pattern.

  Args:
    runs: all runs of the page.
    checkpoint: of the chart by pattern: 'best', 'last' or a step.
  """
  judged = [run for run in runs if scored.measures(run)]
  first = scored.measures(judged[0]) if judged else {}
  common = [name for name in first if all(name in scored.measures(run) for run in judged)]
  if not common:
    yield "No task with metrics of decoded predictions (inference_eval/) is common to the runs."
    return
  quality = f"Mean of {', '.join(common)}" if len(common) > 1 else common[0]
  lines = []
  for i, run in enumerate(runs):
    if run not in judged:
      yield f"{run.name}: has no metrics of decoded predictions."
      continue
    found, why = parts.tried(_by_flops, run, common)
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
  yield from parts.some([chart if lines else None], "No run's training FLOPs are known.")
  yield from _by_pattern(runs, judged, common, quality, checkpoint)
  yield from scored.unknown_targets(judged, checkpoint)
  if lines:
    yield flops_note


def _by_flops(run: Run, common: Sequence[str]) -> list[tuple[tuple[float, float], str]]:
  """Returns ((FLOPs, mean of the tasks), step) for each step where all tasks have a score."""
  of = [scored.measures(run)[name] for name in common]
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
  """Yields a chart with a point for each run: its pattern, from dense to sparse, and its score."""
  found: dict[int, tuple[float, str, float]] = {}  # run -> (density, pattern, score)
  recipes: dict[str, list[int]] = {}
  for i, run in enumerate(runs):
    rules = parts.tried(getattr, run, "rules")[0]
    if run not in judged or rules is None:
      continue
    found[i] = *_pattern_of(rules), _score_of(run, common, checkpoint)
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
    note=f"Checkpoint: {scored.of_target(checkpoint)}. Runs of one recipe are joined (Figure 4a).",
  )


def _pattern_of(rules: Rules) -> tuple[float, str]:
  """Returns the mean density of the patterns of rules, and the patterns for people."""
  patterns = {p: r.pattern for p, r in rules.places.items() if r.pattern is not None}
  label = roles.text_of(roles.single({p: str(n) for p, n in patterns.items()})) or "dense"
  shares = [n.density for n in patterns.values()] or [1.0]
  return math.fsum(shares) / len(shares), label


def _score_of(run: Run, common: Sequence[str], checkpoint: str | int) -> float:
  """Returns the mean of the tasks, each at the step that counts; NaN if one has no such step."""
  means = []
  for task, metrics in (scored.measures(run)[name] for name in common):
    step = scored.step_of(run, run.tasks[task], metrics, checkpoint)
    means.append(math.nan if step is None else _mean_at(run.tasks[task][step], metrics))
  return math.fsum(means) / len(means)
