"""Reports of runs: sections of plain values, charts, one HTML page.

    from nm_sparsity_jax import report

    found = report.report(["runs/sr_ste", "runs/stepwise"], checkpoint="last")
    found["scores"]                                   # tables and sentences
    found.charts["train_loss"].lines[0].points        # [(step, loss), ...]
    report.write(found, "report.html")                # needs jinja2 and matplotlib

What stands where:

    run_folder (of `analysis`)     folders of runs -> Run
    sections, costs                Run -> Section
    charts, page (of `analysis`)   lines of points -> SVG; sections -> HTML
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Sequence

from nm_sparsity_jax.analysis import charts, page, run_folder
from nm_sparsity_jax.analysis.charts import Chart
from nm_sparsity_jax.analysis.page import Part, Section
from nm_sparsity_jax.analysis.report import sections
from nm_sparsity_jax.analysis.run_folder import Run


@dataclasses.dataclass(frozen=True)
class Report:
  """What is shown of some runs.

  Attributes:
    runs: the runs, in the order of their colours.
    sections: what is shown, in order.
  """

  runs: Sequence[Run]
  sections: Sequence[Section]

  def __getitem__(self, key: str) -> Sequence[Part]:
    """Returns the parts of one section, such as 'scores'."""
    return next(s.parts for s in self.sections if s.key == key)

  @property
  def charts(self) -> dict[str, Chart]:
    """Returns all charts, by key."""
    parts = [part for section in self.sections for part in section.parts]
    return {part.key: part for part in parts if isinstance(part, Chart)}


def report(folders: Sequence[str | pathlib.Path], checkpoint: str | int = "best") -> Report:
  """Reads runs and returns all that the page shows of them.

      found = report.report(["runs/sr_ste", "runs/stepwise"])
      found.charts["train_loss"].lines[0].points
      report.write(found, "report.html")

  Args:
    folders: t5x.train's MODEL_DIR or the local runner's, at most nine.
    checkpoint: of the scores: 'best', 'last' or a step, as for `nm-sparsity glue score`.

  Raises:
    ValueError: a folder has no metrics, or a file in it is broken.
  """
  if len(folders) > charts.MAX_RUNS:
    raise ValueError(f"{len(folders)} runs: a page has colours for {charts.MAX_RUNS}")
  runs = run_folder.read(folders)
  return Report(runs, sections.sections(runs, checkpoint))


def write(report: Report, path: str | os.PathLike) -> pathlib.Path:
  """Writes a report as one HTML page, and returns its path."""
  configs = {run.name: run.gin for run in report.runs}
  title = f"N:M sparsity: {', '.join(configs)}"
  return page.write(path, title, [*configs], report.sections, configs)
