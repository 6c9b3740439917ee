"""Trackers: curves of runs beside TensorBoard, those of many runs in one place.

    train.Run.tracker = @tracking.Mlflow()
        -> writer(folder, room) for train, training_eval/<task>, inference_eval/<task>
        -> one run of MLflow, in an experiment that all runs of a sweep share

Any object with such a `writer`, which returns a writer of clu, is a tracker: that is how you write
one for another service. If it has `ends(folder, how)`, it is told how a run ended.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import concurrent.futures
import contextlib
import pathlib
import re
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nm_sparsity_jax.runs import files, trained
from nm_sparsity_jax.trainer.writers import Scalars

_NOTE = "mlflow.json"  # in the run's folder: which run of MLflow goes on
_STATUS = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}  # MLflow's words


class Mlflow:
  """Writes the scalars of a run to MLflow while it goes on, in a thread that no step waits for.

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
    try:
      import mlflow
    except ImportError as e:
      raise ModuleNotFoundError(
        "MLflow is not installed: pip install 'nm-sparsity-jax[tracking]'"
      ) from e
    self._client: Any = mlflow.MlflowClient(tracking_uri=uri)
    self._experiment = experiment
    self._lost = False
    self._how: dict[pathlib.Path, str] = {}  # how the run in a folder ended
    self._going: set[pathlib.Path] = set()  # folders whose run of MLflow is said to go on
    # MLflow waits minutes for a server that is gone. A step, or a save after SIGTERM, must not.
    self._thread = concurrent.futures.ThreadPoolExecutor(1, "mlflow")

  def writer(self, folder: pathlib.Path, room: str) -> Scalars:
    """Returns what takes the scalars of one room of a run.

    Args:
      folder: of the run.
      room: such as 'train'.
    """
    return _Room(self, folder, room)

  def send(self, folder: pathlib.Path, step: int, scalars: Mapping[str, Any]) -> None:
    """Sends scalars of a step, and does not wait.

    Args:
      folder: of the run.
      step: the global one.
      scalars: by names that MLflow takes.
    """
    from mlflow.entities import Metric

    now = int(1000 * time.time())
    metrics = [Metric(name, float(x), now, step) for name, x in scalars.items()]
    self._thread.submit(self._send, folder, f"step {step}", metrics)

  def _send(self, folder: pathlib.Path, when: str, metrics: Sequence[Any]) -> None:
    with self._unless_lost(when):
      self._client.log_batch(self._run(folder), metrics)

  def ends(self, folder: pathlib.Path, how: str) -> None:
    """Notes how a run's process ends, before its rooms are closed.

    Args:
      folder: of the run.
      how: 'finished'; 'stopped', by a signal, to be resumed; 'failed'.
    """
    self._how[folder] = how

  def end(self, folder: pathlib.Path) -> None:
    """Waits until all is sent, and says to MLflow that a run's process ends, and how."""
    self._thread.submit(self._end, folder).result()

  def _end(self, folder: pathlib.Path) -> None:
    with self._unless_lost("the end"):
      if (folder / _NOTE).is_file():
        status = _STATUS[self._how.get(folder, "finished")]
        self._client.set_terminated(self._run(folder), status)

  @contextlib.contextmanager
  def _unless_lost(self, when: str) -> Iterator[None]:
    """Warns where MLflow cannot be reached; from then on `_run` raises, and nothing is said."""
    try:
      yield
    except Exception as e:
      if not self._lost:
        self._lost = True
        warnings.warn(f"MLflow took nothing at {when}, and gets no more: {e}", stacklevel=2)

  def _run(self, folder: pathlib.Path) -> str:
    """Returns the id of a folder's run of MLflow; begins one where there is none."""
    if self._lost:
      raise ConnectionError
    note = folder / _NOTE
    if known := files.read_json(note, {}).get("run"):
      if folder not in self._going:  # an earlier process has ended it
        self._client.update_run(known, "RUNNING")
        self._going.add(folder)
      return known
    name = self._experiment or folder.parent.name
    found = self._client.get_experiment_by_name(name)
    experiment = found.experiment_id if found else self._client.create_experiment(name)
    run = self._client.create_run(experiment, run_name=folder.name).info.run_id
    files.write_atomically(note, f'{{"run": "{run}"}}\n')
    self._going.add(folder)
    from mlflow.entities import Param

    macros = trained.macros(trained.gin_text(folder))
    macros.pop("MLFLOW_URI", None)  # it may hold a password
    params = [Param(name, text[:500]) for name, text in macros.items()]
    self._client.log_batch(run, params=params[:100])
    return run


class _Room(Scalars):
  """Sends the scalars of one room: 'nm/D' of 'train' is 'train/nm.D' in MLflow."""

  def __init__(self, tracker: Mlflow, folder: pathlib.Path, room: str):
    self._tracker, self._folder, self._room = tracker, folder, _name(room)

  def write_scalars(self, step: int, scalars: Mapping[str, Any]):
    named = {f"{self._room}/{_name(name)}": x for name, x in scalars.items()}
    self._tracker.send(self._folder, step, named)

  def close(self):
    self._tracker.end(self._folder)


def _name(text: str) -> str:
  """Returns a name that MLflow takes, with no folder in it: a metric may not lie below another.

  >>> _name("nm/n/.*wi/kernel")
  'nm.n..-wi.kernel'
  """
  return re.sub(r"[^\w.\- ]", "-", text.replace("/", "."))
