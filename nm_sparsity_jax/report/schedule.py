"""Sections of the schedule: pattern and D by step, density by layer."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from nm_sparsity_jax.report import parts
from nm_sparsity_jax.report.charts import Chart, Line
from nm_sparsity_jax.report.parts import Cell, Strip, Table
from nm_sparsity_jax.report.reading import Run


def schedule(runs: Sequence[Run]) -> Iterator[Strip | Chart | str]:
  """Yields a strip for each recipe of each run, then charts of D, patterns and density."""
  lines = []
  for i, run in enumerate(runs):
    rules, why = parts.tried(getattr, run, "rules")
    if why:
      yield f"{run.name}: no schedule, {why}."
      continue
    by_recipe: dict[Any, list[str]] = {}
    for place, recipe in rules.places.items():
      by_recipe.setdefault(recipe, []).append(place)
    for recipe, places in by_recipe.items():
      if found := segments(recipe):
        yield Strip(i, f"{', '.join(places)}: {recipe.name}", found)
        lines.append(Line(i, decay(recipe, found), "dashed"))
  for i, run in enumerate(runs):
    if points := run.train.get("nm/D"):
      lines.append(Line(i, parts.by_sparse_step(run, points), "dots"))

  def pattern(key: str) -> Chart | None:
    return parts.chart(
      runs, f"pattern_{key}", f"Pattern n/m of {key}", lambda run: _kept(run, key), note=parts.MEAN
    )

  title = "D, by schedule (dashed) and as sampled (dots)"
  charts = [
    parts.by_step(runs, "decay", title, lines, note=parts.MEAN) if lines else None,
    *map(pattern, sorted({t[5:] for run in runs for t in run.train if _is_rule(run, t)})),
    parts.tagged(runs, "density", "Density in use: 1 while D > 0", "nm/density", note=parts.MEAN),
  ]
  otherwise = "No run has a schedule in its config.gin, or samples of D and patterns."
  yield from parts.some(charts, otherwise)


def _is_rule(run: Run, tag: str) -> bool:
  """Returns whether a tag is nm/n/RULE; beside a tag nm/n/PATH stands nm/D/PATH."""
  return tag.startswith("nm/n/") and f"nm/D/{tag[5:]}" not in run.train


def _kept(run: Run, key: str) -> dict[int, float]:
  n, m = (run.train.get(f"nm/{x}/{key}", {}) for x in "nm")
  return {step: n[step] / m[step] for step in n if m.get(step)}


def segments(recipe: Any) -> list[tuple[int, int, str, float, float, float]]:
  """Returns the timeline of a recipe as the segments of a `Strip`."""
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


def decay(recipe: Any, segments: Sequence[tuple]) -> list[tuple[float, float]]:
  """Returns (step, D) at the ends of segments and in between, as the recipe itself computes D.

  Args:
    recipe: the recipe.
    segments: what `segments` returned for it.
  """
  import jax
  import numpy as np

  total = segments[-1][1]
  steps = {round(k * (total - 1) / 100) for k in range(101)}
  steps |= {s for start, stop, *_ in segments for s in (start, stop - 1)}
  ordered = np.array(sorted(steps), np.int32)
  return [(int(s), float(d)) for s, d in zip(ordered, jax.vmap(recipe.decay)(ordered), strict=True)]


def density(runs: Sequence[Run]) -> Iterator[Table | str]:
  """Yields a table of the share of weights in use, by layer, at the last sample."""
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
  yield Table(["sparse kernel", *parts.heads(runs)], rows)
  yield (
    "The share of weights in use at the last sample: 1 while D > 0, as a fading weight still "
    "counts. 'of' names the target's share where the two differ."
  )
  has = lambda run: any(t.startswith(prefix) for t in run.train)
  yield from parts.lacking(runs, has, "no samples by layer")
