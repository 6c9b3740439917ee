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


@pytest.fixture
def client(monkeypatch):
  """Stands in for MLflow, which need not be installed, and notes what it is told."""
  found = types.ModuleType("mlflow")
  found.told, found.error = [], None

  def function(name):
    def call(*args, **kwargs):
      if found.error:
        raise found.error
      found.told.append((name, *args, kwargs))
      return types.SimpleNamespace(info=types.SimpleNamespace(run_id="7"))

    return call

  for name in ("set_tracking_uri", "set_experiment", "start_run", "log_metrics", "log_params",
               "end_run"):  # fmt: skip
    setattr(found, name, function(name))
  monkeypatch.setitem(sys.modules, "mlflow", found)
  return found


def test_mlflow_gets_a_run_in_the_experiment_of_its_sweep(tmp_path, client):
  uri = "http://me:secret@host"
  assert call(tmp_path / "out/a", "gin_configs/runs/local_mlflow.gin", MLFLOW_URI=uri) == 0
  told = [(name, *rest) for name, *rest in client.told if name != "log_metrics"]
  (params,) = [rest[0] for name, *rest in told if name == "log_params"]
  assert params["PATTERN"] == "'1:4'"
  assert "secret" not in str(params)  # whoever sees the run in MLflow sees its parameters
  assert ("set_experiment", "out", {}) in told and told[-1] == ("end_run", "FINISHED", {})
  assert ("start_run", {"run_id": None, "run_name": "a"}) in told
  sent = {name: kw["step"] for call, *rest, kw in client.told if call == "log_metrics"
          for name in rest[0]}  # fmt: skip
  assert sent["train/loss"] == sent["inference_eval.validation/absolute_error"] == 4
  assert sent["train/nm.D"] == 4


def test_a_run_that_goes_on_is_the_same_run_of_mlflow(tmp_path, client):
  from nm_sparsity_jax.trainer import tracking

  for how in ("stopped", "finished"):
    tracker = tracking.Mlflow()
    tracker.open(tmp_path)
    (tmp_path / "config.gin").touch()
    tracker.write("train", 1, {"loss": 1.0})
    tracker.close(how)
  starts = [rest[-1]["run_id"] for name, *rest in client.told if name == "start_run"]
  ends = [rest[0] for name, *rest in client.told if name == "end_run"]
  assert starts == [None, "7"] and ends == ["KILLED", "FINISHED"]


def test_a_tracker_that_cannot_be_reached_ends_no_run(tmp_path, client):
  client.error = OSError("no route to host")
  with pytest.warns(UserWarning, match="no route to host") as told:
    assert call(tmp_path / "run", "gin_configs/runs/local_mlflow.gin") == 0
  assert len([w for w in told if "MLflow" in str(w.message)]) == 1 and not client.told


def test_without_mlflow_one_line_says_what_to_install(tmp_path, monkeypatch, capsys):
  monkeypatch.setitem(sys.modules, "mlflow", None)
  assert call(tmp_path / "run", "gin_configs/runs/local_mlflow.gin") == 1
  assert "pip install 'nm-sparsity-jax[tracking]'" in capsys.readouterr().err
  assert not (tmp_path / "run").exists()
