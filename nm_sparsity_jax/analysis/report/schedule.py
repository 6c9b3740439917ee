"""Sections of the schedule: pattern and D by step, density by layer."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from nm_sparsity_jax.analysis.report import parts
from nm_sparsity_jax.analysis.report.charts import Chart, Line
from nm_sparsity_jax.analysis.report.parts import Cell, Strip, Table
from nm_sparsity_jax.analysis.report.reading import Run


def schedule(runs: Sequence[Run]) -> Iterator[Strip | Chart | str]:
  """Yields a strip for each recipe of each run, then charts of D, patterns and density."""
  lines = []
  for i, run in enumerate(runs):
    rules = parts.tried(getattr, run, "rules")[0]
    if rules is None:
      continue
    by_recipe: dict[Any, list[str]] = {}
    for place, recipe in rules.places.items():
      by_recipe.setdefault(recipe, []).append(place)
    for recipe, places in by_recipe.items():
      if found := segments(recipe, run.offset):
        yield Strip(i, f"{', '.join(places)}: {recipe.name}", found)
        lines.append(Line(i, decay(recipe, found, run.offset), "dashed"))
  reasons = ((run.name, parts.tried(getattr, run, "rules")[1]) for run in runs)
  yield from parts.told((name, f"no schedule, {why}") for name, why in reasons if why)
  for i, run in enumerate(runs):
    if points := run.train.get("nm/D"):
      lines.append(Line(i, sorted(points.items()), "dots"))

  def pattern(key: str) -> Chart | None:
    of = lambda run: _kept(run, key)
    return parts.chart(runs, f"pattern_{key}", f"Pattern n/m of {key}", of, "steps")

  title = "D, by schedule (dashed) and as sampled (dots)"
  charts = [
    parts.by_step(runs, "decay", title, lines) if lines else None,
    *map(pattern, sorted({t[5:] for run in runs for t in run.train if _is_rule(run, t)})),
    parts.tagged(runs, "density", "Density in use: 1 while D > 0", "nm/density", style="steps"),
  ]
  otherwise = "No run has a schedule in its config.gin, or samples of D and patterns."
  yield from parts.some(charts, otherwise)


def _is_rule(run: Run, tag: str) -> bool:
  """Returns whether a tag is nm/n/RULE; beside a tag nm/n/PATH stands nm/D/PATH."""
  return tag.startswith("nm/n/") and f"nm/D/{tag[5:]}" not in run.train


def _kept(run: Run, key: str) -> dict[int, float]:
  n, m = (run.train.get(f"nm/{x}/{key}", {}) for x in "nm")
  return {step: n[step] / m[step] for step in n if m.get(step)}


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
      str(s.pattern) if s.pattern else "dense",
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
  steps = {round(k * (total - 1) / 100) for k in range(101)}
  steps |= {s - offset for start, stop, *_ in segments for s in (start, stop - 1)}
  ordered = np.array(sorted(steps), np.int32)
  values = jax.vmap(recipe.decay)(ordered)
  return [(offset + int(s), float(d)) for s, d in zip(ordered, values, strict=True)]


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
