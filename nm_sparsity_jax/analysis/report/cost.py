"""The section of accuracy against cost: scores by training FLOPs and by pattern (Figure 4)."""

from __future__ import annotations

import pathlib
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nm_sparsity_jax.analysis.charts import Chart, Line
from nm_sparsity_jax.analysis.page import Part
from nm_sparsity_jax.analysis.report import scored
from nm_sparsity_jax.analysis.report.parts import grouped
from nm_sparsity_jax.analysis.report.reading import Run
from nm_sparsity_jax.runs import trained
from nm_sparsity_jax.training import roles


def of_dense(run: Run, steps: int) -> str:
  """Returns the training FLOPs of a run and their share of a dense run's, for people.

  Args:
    run: the run.
    steps: how many of its steps count.
  """
  try:
    spent, dense = run.flops(steps)
  except (ValueError, TypeError):
    return "–"
  return f"{spent:.3g} ({spent / dense:.1%})" if dense else "–"


def cost(runs: Sequence[Run], checkpoint: str | int) -> Iterator[Part]:
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
  lines, missing = [], []
  for i, run in enumerate(runs):
    if run not in judged:
      missing.append((run.name, "no metrics of decoded predictions"))
      continue
    try:
      inherited = _inherited(runs, run)
      points = [
        (inherited + run.flops(step - run.offset)[0], mean)
        for step, mean in scored.means(run, common)
      ]
      lines += [Line(i, points)] if points else []
    except (ValueError, TypeError) as e:
      missing.append((run.name, f"no FLOPs, {e}"))
  yield from grouped(missing)
  if lines:
    title = f"{quality}, against training FLOPs"
    yield Chart("score_by_flops", title, "training FLOPs", lines)
  else:
    yield "No run's training FLOPs are known."
  yield from _by_pattern(runs, judged, common, quality, checkpoint)
  yield from scored.unknown_targets(judged, checkpoint)
  if lines:
    yield (
      "Training FLOPs up to an evaluation, of the matrix products alone and as on a machine that "
      "skips every pruned weight (Figure 4b). Those of inherited steps are in them where the page "
      "shows the run that did these steps."
    )
    yield from grouped(
      (run.name, f"the FLOPs of its {run.offset:,} inherited steps are not in them")
      for run in runs
      if run.offset and _before(runs, run) is None
    )


def _before(runs: Sequence[Run], run: Run) -> Run | None:
  """Returns the run that did the steps that a run inherited; None where the page lacks it."""
  path = trained.parse_settings(run.gin).get("INITIAL_CHECKPOINT_PATH")
  folder = pathlib.Path(path).resolve().parent if isinstance(path, str) else None
  return next((r for r in runs if r.path.resolve() == folder and r.offset < run.offset), None)


def _inherited(runs: Sequence[Run], run: Run) -> float:
  """Returns the FLOPs of the steps that a run inherited, those that the page can know."""
  before = _before(runs, run)
  if before is None:
    return 0.0
  return _inherited(runs, before) + before.flops(run.offset - before.offset)[0]


def _by_pattern(
  runs: Sequence[Run],
  judged: Sequence[Run],
  common: Mapping[str, scored.Measure],
  quality: str,
  checkpoint: str | int,
) -> Iterator[Part]:
  """Yields a chart with a point for each run: its pattern, from dense to sparse, and its score."""
  found: dict[int, tuple[float, str, float]] = {}  # run -> (density, pattern, score)
  recipes: dict[str, list[int]] = {}
  for i, run in enumerate(runs):
    if run in judged and run.sparse is not None:
      found[i] = *_pattern_of(run.sparse), scored.mean_score(run, common, checkpoint)
      names = dict.fromkeys(recipe.name for recipe in run.sparse.values())
      recipes.setdefault("/".join(names), []).append(i)
  if not found:
    yield "No run's pattern is known."
    return
  labels = list(dict.fromkeys(label for _, label, _ in sorted(found.values(), reverse=True)))
  at = {i: (float(labels.index(label)), score) for i, (_, label, score) in found.items()}
  joined = [Line(None, sorted(at[i] for i in of), "dashed") for of in recipes.values() if of[1:]]
  yield Chart(
    "score_by_pattern",
    f"{quality}, against pattern",
    "pattern, from dense to sparse",
    [*joined, *(Line(i, [point], "dots") for i, point in at.items())],
    labels=labels,
    note=f"Checkpoint: {scored.of_target(checkpoint)}. Runs of one recipe are joined (Figure 4a).",
  )


def _pattern_of(places: Mapping[str, Any]) -> tuple[float, str]:
  """Returns the mean density of the patterns of places, and the patterns for people."""
  if not places:
    return 1.0, "dense"
  label = roles.text_of(roles.single({p: str(r.pattern) for p, r in places.items()}))
  return statistics.fmean(recipe.pattern.density for recipe in places.values()), label
