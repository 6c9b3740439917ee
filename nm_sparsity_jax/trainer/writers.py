"""What takes the scalars of a run, room by room: writers of clu.

scalars of a step -> MultiWriter -> JsonLines (metrics.jsonl), clu's SummaryWriter (event files)
                                 -> those of a tracker, such as `tracking.Mlflow`
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from clu import metric_writers


class Scalars(metric_writers.MetricWriter):
  """Takes scalars alone; subclass it for a tracker of your own, and define `write_scalars`."""

  def write_scalars(self, step: int, scalars: Mapping[str, Any]): ...
  def write_summaries(self, *args, **kwargs): ...
  def write_images(self, *args, **kwargs): ...
  def write_videos(self, *args, **kwargs): ...
  def write_audios(self, *args, **kwargs): ...
  def write_texts(self, *args, **kwargs): ...
  def write_histograms(self, *args, **kwargs): ...
  def write_hparams(self, *args, **kwargs): ...
  def flush(self): ...
  def close(self): ...


class JsonLines(Scalars):
  """Writes one line a call: {"step": ..., name: value, ...}.

  Args:
    path: the file, which is added to.
  """

  def __init__(self, path: pathlib.Path):
    path.parent.mkdir(parents=True, exist_ok=True)
    self._file = path.open("a")

  def write_scalars(self, step: int, scalars: Mapping[str, Any]):
    values = {name: float(x) for name, x in scalars.items()}
    self._file.write(json.dumps({"step": step, **values}) + "\n")

  def flush(self):
    self._file.flush()

  def close(self):
    self._file.close()


def joined(folder: pathlib.Path, also: Sequence[metric_writers.MetricWriter]) -> Any:
  """Returns a writer of event files and metrics.jsonl in a folder, and of others."""
  own = [JsonLines(folder / "metrics.jsonl"), metric_writers.SummaryWriter(str(folder))]
  return metric_writers.MultiWriter([*own, *also])
