"""A report's schedule as a picture."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nm_sparsity_jax.analysis.plan.text import title


def plot(report: Mapping[str, Any], path: str) -> None:
  """Draws D and density over the steps of a run.

  Args:
    report: what `plan` returns; it must have a schedule.
    path: the file, such as 'schedule.png'; its ending says the format.
  """
  try:
    from matplotlib.figure import Figure
  except ImportError as e:
    raise ModuleNotFoundError("a picture needs matplotlib: pip install matplotlib") from e
  schedule = report.get("schedule")
  if not schedule:
    raise ValueError("there is no schedule to draw: the report has none.")
  figure = Figure(figsize=(8, 2.6 * len(schedule)), dpi=120, layout="constrained")
  rows = figure.subplots(len(schedule), 1, squeeze=False, sharex=True)[:, 0]
  for axes, part in zip(rows, schedule, strict=True):
    for s in part["segments"]:
      n, m = map(int, (s["pattern"] or "1:1").split(":"))
      steps, density = (s["start"], s["stop"]), n / m
      axes.plot(steps, (s["decay_start"], s["decay_stop"]), color="tab:orange")
      axes.plot(steps, (density, density), color="tab:blue", linewidth=2)
      axes.annotate(s["pattern"] or "dense", (sum(steps) / 2, density), ha="center", va="bottom")
    axes.set_title(title(part), fontsize=9)
    axes.set_ylim(-0.03, 1.15)
    axes.legend(axes.lines[:2], ["D", "n / m"], loc="upper right", fontsize=8)
  first = schedule[-1]["segments"][0]
  offset = first["t5x_start"] - first["start"]
  rows[-1].set_xlabel(f"sparse step (the global step is {offset:,} more)")
  figure.savefig(path)
