"""Makes reports: folders of runs in; plain values, a page or pictures out.

folders -> [report] -> Report(runs, sections) -> [write] -> HTML
                                              -> [png]   -> a file for each chart
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Sequence

from nm_sparsity_jax.analysis.report import charts, page, reading
from nm_sparsity_jax.analysis.report.charts import Chart
from nm_sparsity_jax.analysis.report.parts import Part, Section
from nm_sparsity_jax.analysis.report.reading import Run
from nm_sparsity_jax.analysis.report.sections import sections
from nm_sparsity_jax.core import installed
from nm_sparsity_jax.runs import files


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
    ValueError: a folder is no run's, has no metrics, or a file in it is broken.
  """
  runs = reading.read(folders)
  return Report(runs, sections(runs, checkpoint))


def write(report: Report, path: str | os.PathLike) -> pathlib.Path:
  """Writes a report as one HTML page, and returns its path.

  Args:
    report: what is shown.
    path: the file; its folder is made where it is missing.

  Raises:
    ModuleNotFoundError: jinja2 is not installed.
  """
  text = page.render(report.runs, report.sections, versions())
  path = pathlib.Path(path)
  path.parent.mkdir(parents=True, exist_ok=True)
  files.write_atomically(path, text)
  return path


def png(report: Report, folder: str | os.PathLike) -> list[pathlib.Path]:
  """Writes each chart that can be drawn as KEY.png, and returns the paths.

  Args:
    report: whose charts.
    folder: it is made where it is missing.

  Raises:
    ModuleNotFoundError: matplotlib is not installed.
  """
  folder = pathlib.Path(folder)
  folder.mkdir(parents=True, exist_ok=True)
  names = [run.name for run in report.runs]
  written = []
  for chart in report.charts.values():
    if charts.axes_of(chart):
      written.append(folder / f"{chart.key}.png")
      charts.png(chart, names, written[-1])
  return written


def versions() -> dict[str, str]:
  """Returns name -> version of what makes a page."""
  return installed.versions(installed.NAME, "Python", "jax", "flax", "optax")
