"""All sections of a report: runs in, plain values out.

    [reading.read] -> Run -> [sections] -> Section(Chart | Table | Strip | a sentence)

A step on an x axis is the global one: a run that begins at a checkpoint begins at that one's step.
"""

from __future__ import annotations

from collections.abc import Sequence

from nm_sparsity_jax.analysis.report import cost, curves, schedule, scored, settings, summary
from nm_sparsity_jax.analysis.report.parts import Section
from nm_sparsity_jax.analysis.report.reading import Run


def sections(runs: Sequence[Run], checkpoint: str | int = "best", seeds: int = 1) -> list[Section]:
  """Returns all sections, in the order of the page.

  Args:
    runs: what `reading.read` returned.
    checkpoint: of the scores: 'best', 'last' or a step, as for `nm-sparsity glue score`.
    seeds: how many runs each of them is the mean of, at most.
  """
  return [
    Section("summary", "Summary", list(summary.summary(runs, checkpoint, seeds))),
    Section("metrics", "Metrics by task", list(curves.metrics(runs))),
    Section("runs", "Runs", list(settings.overview(runs))),
    Section("scores", "Scores", list(scored.table(runs, checkpoint))),
    Section("loss", "Loss", list(curves.loss(runs))),
    Section("schedule", "Pattern and D", list(schedule.schedule(runs))),
    Section("density", "Density by layer", list(schedule.density(runs))),
    Section("flips", "Mask flips", list(curves.flips(runs))),
    Section("variance", "Variance", list(curves.variance(runs))),
    Section("cost", "Accuracy against cost", list(cost.cost(runs, checkpoint))),
    Section("settings", "Settings and seeds", list(settings.settings(runs)), folded=True),
    Section("environment", "Environment", list(settings.environment(runs)), folded=True),
  ]
