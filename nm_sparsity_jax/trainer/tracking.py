"""Curves of runs in MLflow: those of many runs in one place.

    train.Run.tracker = @tracking.Mlflow() -> one run of MLflow, in an experiment of the sweep

`writers.Writer` says how you write one for another service.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import json
import os
import pathlib
import re
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from nm_sparsity_jax.runs import files, trained
from nm_sparsity_jax.trainer.writers import Writer

_STATUS = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}  # MLflow's words


class Mlflow(Writer):
  """Writes the scalars of a run to MLflow while it goes on.

      tracking.Mlflow(uri="http://localhost:5000", experiment="glue")

  The run of MLflow is called as the folder, and has the macros of config.gin as its parameters. A
  resumed run goes on with it; steps that were done twice stand there twice, with equal values. A
  tracker that cannot be reached ends no run: a warning says so, and nothing more is sent.

  Args:
    uri: MLflow's tracking URI, such as 'http://localhost:5000'; None: MLFLOW_TRACKING_URI, or what
      MLflow takes without it.
    experiment: of MLflow; None: the name of the folder that the run's folder lies in, which is the
      sweep's for all runs of a sweep.
  """

  def __init__(self, uri: str | None = None, experiment: str | None = None):
    # MLflow retries for minutes by default. A run waits this long, once, for a server that is gone.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "5")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    import mlflow  # of the extra `tracking`

    self._mlflow: Any = mlflow
    self._uri, self._experiment = uri, experiment
    self._is_lost = False

  def open(self, folder: pathlib.Path) -> None:
    """Begins the run of MLflow, or goes on with it."""
    super().open(folder)
    self._try(self._start)

  def write(self, room: str, step: int, scalars: Mapping[str, float]) -> None:
    """Sends the scalars of a step: 'nm/D' of 'train' is 'train/nm.D' in MLflow."""
    named = {f"{_name(room)}/{_name(name)}": x for name, x in scalars.items()}
    self._try(lambda: self._mlflow.log_metrics(named, step=step))

  def close(self, how: str) -> None:
    """Says to MLflow how the process of the run ends."""
    self._try(lambda: self._mlflow.end_run(_STATUS[how]))

  def _try(self, send: Callable[[], Any]) -> None:
    """Sends, or warns where MLflow cannot be reached; nothing is sent from then on."""
    if not self._is_lost:
      try:
        send()
      except Exception as e:  # of MLflow, of its store, of the network
        self._is_lost = True
        warnings.warn(f"MLflow cannot be reached, and gets no more: {e}", stacklevel=2)

  def _start(self) -> None:
    note = self.folder / "mlflow.json"  # which run of MLflow goes on
    if self._uri is not None:
      self._mlflow.set_tracking_uri(self._uri)
    self._mlflow.set_experiment(self._experiment or self.folder.parent.name)
    known = files.read_json(note, {}).get("run")
    run = self._mlflow.start_run(run_id=known, run_name=None if known else self.folder.name)
    if known is None:
      files.write_atomically(note, json.dumps({"run": run.info.run_id}))
      macros = trained.macros(trained.gin_text(self.folder))
      macros.pop("MLFLOW_URI", None)  # it may hold a password
      params = [(name, text[:500]) for name, text in macros.items()]
      self._mlflow.log_params(dict(params[:100]))  # MLflow takes no more at once


def _name(text: str) -> str:
  """Returns a name that MLflow takes, with no folder in it: a metric may not lie below another.

  >>> _name("nm/n/.*wi/kernel")
  'nm.n..-wi.kernel'
  """
  return re.sub(r"[^\w.\- ]", "-", text.replace("/", "."))
