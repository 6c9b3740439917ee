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
    import matplotlib
  except ImportError as e:
    raise ModuleNotFoundError("a picture needs matplotlib: pip install matplotlib") from e
  matplotlib.use("Agg")
  import matplotlib.pyplot as plt

  schedule = report.get("schedule") or []
  if not schedule:
    raise ValueError("there is no schedule to draw: the report has none.")
  figure, rows = plt.subplots(
    len(schedule), 1, figsize=(8, 2.6 * len(schedule)), squeeze=False, sharex=True
  )
  for axes, part in zip(rows[:, 0], schedule, strict=True):
    segments = part["segments"]
    for s in segments:
      n, m = map(int, s["pattern"].split(":")) if s["pattern"] else (1, 1)
      steps = (s["start"], s["stop"])
      axes.plot(steps, (s["decay_start"], s["decay_stop"]), color="tab:orange")
      axes.plot(steps, (n / m, n / m), color="tab:blue", linewidth=2)
      axes.annotate(
        s["pattern"] or "dense", (sum(steps) / 2, n / m), ha="center", va="bottom", fontsize=8
      )
    offset = segments[0]["t5x_start"] - segments[0]["start"]
    axes.set_title(title(part), fontsize=9)
    axes.set_ylim(-0.03, 1.15)
    axes.plot([], [], color="tab:blue", label="n / m")
    axes.plot([], [], color="tab:orange", label="D")
    axes.legend(loc="upper right", fontsize=8)
  rows[-1, 0].set_xlabel(f"sparse step (the global step is {offset:,} more)")
  figure.tight_layout()
  figure.savefig(path, dpi=120)
  plt.close(figure)
