"""Trackers: the curves of runs beside TensorBoard, in MLflow or in a writer of your own."""

import json
import pathlib
import sys
import types
import warnings

import pytest

from nm_sparsity_jax import cli
from nm_sparsity_jax.integrations import gin_files

pytest.importorskip("clu", reason="the local runner needs clu: pip install -e '.[local]'")
pytestmark = pytest.mark.filterwarnings("ignore")  # what it imports warns on its own account

with warnings.catch_warnings():
  warnings.simplefilter("ignore")
  from nm_sparsity_jax.trainer import train, writers

EXAMPLE = pathlib.Path(__file__).resolve().parents[1] / "examples/own_workload"
sys.path.append(str(EXAMPLE))
ROOMS = ("train", "training_eval/validation", "inference_eval/validation")


def call(folder, *files, **macros):
  """Trains four steps of an MLP."""
  files = ["gin_configs/runs/local_workload.gin", str(EXAMPLE / "own_workload.gin"),
           "gin_configs/runs/local_adamw.gin", *files]  # fmt: skip
  macros = dict(
    RECIPE="sr_ste", PATTERN="1:4", SPARSE_STEPS=4, EVAL_PERIOD=2, STATS_PERIOD=2, METRICS_EVERY=2,
    MODEL_DIR=str(folder), **macros,
  )  # fmt: skip
  return cli.main([
    "train", f"--gin_search_paths={gin_files.folder()}", *(f"--gin_file={name}" for name in files),
    *(f"--gin.{name}={value!r}" for name, value in macros.items()),
  ])  # fmt: skip


class Notes(writers.Writer):
  """A tracker of your own."""

  def __init__(self):
    self.seen = {}

  def write(self, room, step, scalars):
    self.seen.setdefault(room, []).append({"step": step, **scalars})

  def close(self, how):
    self.seen["how"] = how


@pytest.fixture
def notes(monkeypatch):
  """It gets what every run writes."""
  found = Notes()
  curves = writers.Curves
  monkeypatch.setattr(writers, "Curves", lambda folder, _=None: curves(folder, found))
  return found.seen


def test_a_tracker_of_your_own_gets_what_the_files_get(tmp_path, notes):
  assert call(tmp_path / "run") == 0
  assert set(notes) == {*ROOMS, "how"} and notes["how"] == "finished"
  for room in ROOMS[:2]:  # seqio writes the files of the third
    text = (tmp_path / "run" / room / "metrics.jsonl").read_text()
    assert notes[room] == [json.loads(line) for line in text.splitlines()]


def test_a_tracker_is_told_that_a_run_failed_or_was_stopped(tmp_path, notes, monkeypatch):
  assert call(tmp_path / "failed", LEARNING_RATE=1e30, WARMUP_STEPS=1) == 1
  assert notes["how"] == "failed"
  save = train._Process._save

  def save_and_stop(self, state):
    save(self, state)
    self.stop.name = "SIGTERM"

  monkeypatch.setattr(train._Process, "_save", save_and_stop)
  assert call(tmp_path / "stopped") == 0 and notes["how"] == "stopped"


class Client:
  """Stands in for MLflow's, and notes what it is sent."""

  def __init__(self):
    self.sent, self.params, self.status, self.error = [], [], [], None

  def get_experiment_by_name(self, name):
    return types.SimpleNamespace(experiment_id=name)

  def create_run(self, experiment, run_name):
    return types.SimpleNamespace(info=types.SimpleNamespace(run_id=f"{experiment}/{run_name}"))

  def log_batch(self, run, metrics=(), params=()):
    if self.error:
      raise self.error
    self.params += params
    self.sent += [(run, name, step) for name, value, _, step in metrics]

  def update_run(self, run, status):
    self.status.append(status)

  def set_terminated(self, run, status):
    self.status.append(status)


@pytest.fixture
def client(monkeypatch):
  """MLflow need not be installed."""
  found = Client()
  entities = types.SimpleNamespace(Metric=lambda *of: of, Param=lambda *of: of)
  mlflow = types.SimpleNamespace(MlflowClient=lambda tracking_uri: found, entities=entities)
  monkeypatch.setitem(sys.modules, "mlflow", mlflow)
  monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
  return found


def test_mlflow_gets_a_run_in_the_experiment_of_its_sweep(tmp_path, client):
  uri = "http://me:secret@host"
  for _ in range(2):  # it goes on, and is done
    assert call(tmp_path / "out/a", "gin_configs/runs/local_mlflow.gin", MLFLOW_URI=uri) == 0
  names = {("out/a", "train/loss", 4), ("out/a", "train/nm.D", 2),
           ("out/a", "inference_eval.validation/absolute_error", 4)}  # fmt: skip
  assert names < set(client.sent) and client.status == ["FINISHED"]
  assert ("PATTERN", "'1:4'") in client.params
  assert "secret" not in str(client.params)  # whoever sees the run in MLflow sees its parameters


def test_a_tracker_that_cannot_be_reached_ends_no_run(tmp_path, client):
  client.error = OSError("no route to host")
  with pytest.warns(UserWarning, match="no route to host") as told:
    assert call(tmp_path / "run", "gin_configs/runs/local_mlflow.gin") == 0
  assert len([w for w in told if "MLflow" in str(w.message)]) == 1 and not client.sent


def test_without_mlflow_one_line_says_what_to_install(tmp_path, monkeypatch, capsys):
  monkeypatch.setitem(sys.modules, "mlflow", None)
  assert call(tmp_path / "run", "gin_configs/runs/local_mlflow.gin") == 1
  assert "pip install 'nm-sparsity-jax[tracking]'" in capsys.readouterr().err
  assert not (tmp_path / "run").exists()
