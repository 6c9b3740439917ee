"""Curves of runs in MLflow, beside TensorBoard: those of many runs in one place.

    train.Run.tracker = @tracking.Mlflow() -> one run of MLflow, in an experiment of the sweep

`writers.Writer` says how you write one for another service.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import os
import pathlib
import re
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from nm_sparsity_jax.runs import files, trained
from nm_sparsity_jax.trainer.writers import Writer

_NOTE = "mlflow.json"  # in the run's folder: which run of MLflow goes on
_STATUS = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}  # MLflow's words
# MLflow retries for minutes by default. A run waits this long, once, for a server that is gone.
_PATIENCE = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "5", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1"}


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
    for name, value in _PATIENCE.items():
      os.environ.setdefault(name, value)
    try:
      import mlflow
    except ImportError as e:
      raise ModuleNotFoundError(
        "MLflow is not installed: pip install 'nm-sparsity-jax[tracking]'"
      ) from e
    self._client: Any = mlflow.MlflowClient(tracking_uri=uri)
    self._experiment = experiment
    self._run: str | None = None  # MLflow's id; made at the first write
    self._lost = False

  def write(self, room: str, step: int, scalars: Mapping[str, float]) -> None:
    """Sends the scalars of a step: 'nm/D' of 'train' is 'train/nm.D' in MLflow."""
    from mlflow.entities import Metric

    now = int(1000 * time.time())
    named = {f"{_name(room)}/{_name(name)}": x for name, x in scalars.items()}

    def send():
      self._run = self._run or self._started(self.folder)
      metrics = [Metric(name, x, now, step) for name, x in named.items()]
      self._client.log_batch(self._run, metrics)

    self._try(send, f"step {step}")

  def close(self, how: str) -> None:
    """Says to MLflow how the process of the run ends."""
    if self._run is not None:
      self._try(lambda: self._client.set_terminated(self._run, _STATUS[how]), "the end")

  def _try(self, send: Callable[[], None], when: str) -> None:
    """Sends, or warns where MLflow cannot be reached; nothing is sent from then on."""
    if self._lost:
      return
    try:
      send()
    except Exception as e:  # of MLflow, of its store, of the network
      self._lost = True
      warnings.warn(f"MLflow took nothing at {when}, and gets no more: {e}", stacklevel=2)

  def _started(self, folder: pathlib.Path) -> str:
    """Returns the id of a folder's run of MLflow; begins one where there is none."""
    from mlflow.entities import Param

    note = folder / _NOTE
    if known := files.read_json(note, {}).get("run"):
      self._client.update_run(known, "RUNNING")  # an earlier process has ended it
      return known
    name = self._experiment or folder.parent.name
    found = self._client.get_experiment_by_name(name)
    experiment = found.experiment_id if found else self._client.create_experiment(name)
    run = self._client.create_run(experiment, run_name=folder.name).info.run_id
    files.write_atomically(note, f'{{"run": "{run}"}}\n')
    macros = trained.macros(trained.gin_text(folder))
    macros.pop("MLFLOW_URI", None)  # it may hold a password
    params = [Param(name, text[:500]) for name, text in macros.items()]
    self._client.log_batch(run, params=params[:100])
    return run


def _name(text: str) -> str:
  """Returns a name that MLflow takes, with no folder in it: a metric may not lie below another.

  >>> _name("nm/n/.*wi/kernel")
  'nm.n..-wi.kernel'
  """
  return re.sub(r"[^\w.\- ]", "-", text.replace("/", "."))
