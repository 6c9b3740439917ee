"""The section of accuracy against cost: scores by training FLOPs and by pattern (Figure 4)."""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nm_sparsity_jax.analysis.report import parts, scored
from nm_sparsity_jax.analysis.report.charts import Chart, Line
from nm_sparsity_jax.analysis.report.reading import Run
from nm_sparsity_jax.runs import trained
from nm_sparsity_jax.training import roles


def cost(runs: Sequence[Run], checkpoint: str | int) -> Iterator[Chart | str]:
  """Yields the mean score of the runs' common tasks, by training FLOPs and by pattern.

  Args:
    runs: all runs of the page.
    checkpoint: of the chart by pattern: 'best', 'last' or a step.
  """
  judged = [run for run in runs if scored.measures(run)]
  common = scored.common(judged)
  if not common:
    yield "No task with metrics of decoded predictions (inference_eval/) is common to the runs."
    return
  quality = f"Mean of {', '.join(common)}" if len(common) > 1 else next(iter(common))
  quality += ", less is better" if any(m.less for m in common.values()) else ""
  lines, said = [], []
  for i, run in enumerate(runs):
    if run not in judged:
      said.append((run.name, "no metrics of decoded predictions"))
      continue
    found, why = parts.tried(_by_flops, runs, run, common)
    if why:
      said.append((run.name, f"no FLOPs, {why}"))
    elif found:
      points, names = zip(*found, strict=True)
      lines.append(Line(i, points, names=[f"{run.name}, {name}" for name in names]))
  yield from parts.told(said)
  chart = Chart("score_by_flops", f"{quality}, against training FLOPs", "training FLOPs", lines)
  yield from parts.some([chart if lines else None], "No run's training FLOPs are known.")
  yield from _by_pattern(runs, judged, common, quality, checkpoint)
  yield from scored.unknown_targets(judged, checkpoint)
  if lines:
    yield (
      "Training FLOPs up to an evaluation, of the matrix products alone and as on a machine that "
      "skips every pruned weight (Figure 4b). Those of inherited steps are in them where the page "
      "shows the run that did these steps."
    )
    yield from parts.told(
      (run.name, f"the FLOPs of its {run.offset:,} inherited steps are not in them")
      for run in runs
      if run.offset and _before(runs, run) is None
    )


def _before(runs: Sequence[Run], run: Run) -> Run | None:
  """Returns the run that did the steps that a run inherited; None where the page lacks it."""
  path = parts.tried(trained.plain, run.macros.get("INITIAL_CHECKPOINT_PATH", "None"))[0]
  folder = pathlib.Path(path).resolve().parent if isinstance(path, str) else None
  return next((r for r in runs if r.path.resolve() == folder and r.offset < run.offset), None)


def _inherited(runs: Sequence[Run], run: Run) -> float:
  """Returns the FLOPs of the steps that a run inherited, those that the page can know."""
  before = _before(runs, run)
  if before is None:
    return 0.0
  return _inherited(runs, before) + before.flops(run.offset - before.offset)[0]


def _by_flops(
  runs: Sequence[Run], run: Run, common: Mapping[str, scored.Measure]
) -> list[tuple[tuple[float, float], str]]:
  """Returns ((FLOPs, mean of the tasks), step) for each step where all tasks have a score."""
  inherited = _inherited(runs, run)
  return [
    ((inherited + run.flops(step - run.offset)[0], mean), f"step {step:,}")
    for step, mean in scored.means(run, common)
  ]


def _by_pattern(runs, judged, common, quality, checkpoint) -> Iterator[Chart | str]:
  """Yields a chart with a point for each run: its pattern, from dense to sparse, and its score."""
  found: dict[int, tuple[float, str, float]] = {}  # run -> (density, pattern, score)
  recipes: dict[str, list[int]] = {}
  for i, run in enumerate(runs):
    places = parts.tried(getattr, run, "sparse")[0]
    if run not in judged or places is None:
      continue
    found[i] = *_pattern_of(places), scored.mean_score(run, common, checkpoint)
    recipes.setdefault("/".join(dict.fromkeys(r.name for r in places.values())), []).append(i)
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


def _pattern_of(places: Mapping[str, Any]) -> tuple[float, str]:
  """Returns the mean density of the patterns of places, and the patterns for people."""
  patterns = {p: r.pattern for p, r in places.items()}
  label = roles.text_of(roles.single({p: str(n) for p, n in patterns.items()})) or "dense"
  shares = [n.density for n in patterns.values()] or [1.0]
  return math.fsum(shares) / len(shares), label
