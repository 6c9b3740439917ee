"""Trackers: the curves of runs beside TensorBoard, live, in MLflow or in a tracker of your own."""

import importlib
import json
import pathlib
import sys
import threading
import types
import warnings

import pytest

from nm_sparsity_jax import cli
from nm_sparsity_jax.integrations import gin_files

pytest.importorskip("clu", reason="the local runner needs clu: pip install -e '.[local]'")
pytestmark = [
  pytest.mark.filterwarnings("ignore"),  # what it imports warns on its own account
]

with warnings.catch_warnings():
  warnings.simplefilter("ignore")
  from nm_sparsity_jax.trainer import reports, tracking, train, writers

EXAMPLE = pathlib.Path(__file__).resolve().parents[1] / "examples/own_workload"
sys.path.append(str(EXAMPLE))
NEEDED = "MLflow is not installed: pip install -e '.[tracking]'"


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


def lines(folder, room):
  """Step -> name -> value, as the run's own file has them."""
  text = (folder / room / "metrics.jsonl").read_text()
  found = {}
  for entry in map(json.loads, text.splitlines()):
    found.setdefault(entry.pop("step"), {}).update(entry)
  return found


OWN = """
from nm_sparsity_jax.local import writers

SEEN = []
ENDED = []


class Notes:
  def writer(self, folder, room):
    return Room(folder.name, room)

  def ends(self, folder, how):
    ENDED.append((folder.name, how))


class Room(writers.Scalars):
  def __init__(self, *where):
    self.where = where

  def write_scalars(self, step, scalars):
    SEEN.append((*self.where, step, dict(scalars)))
"""


@pytest.fixture
def notes(tmp_path, monkeypatch):
  """A tracker in a module of the reader's own: its module, and the gin file that names it."""
  (tmp_path / "notes_of_this_test.py").write_text(OWN)
  file = tmp_path / "notes.gin"
  file.write_text(
    "from __gin__ import dynamic_registration\nimport notes_of_this_test\n"
    "from nm_sparsity_jax.trainer import train\ntrain.Run.tracker = @notes_of_this_test.Notes()\n"
  )
  monkeypatch.syspath_prepend(tmp_path)
  module = importlib.import_module("notes_of_this_test")  # once: gin knows its class from then on
  module.SEEN.clear(), module.ENDED.clear()
  return module, str(file)


def test_a_tracker_of_your_own_gets_what_the_files_get(tmp_path, notes):
  """Issue 13, point 22: any object with a `writer` of clu is a tracker."""
  module, file = notes
  assert call(tmp_path / "run", file) == 0
  seen = module.SEEN
  assert {(folder, room) for folder, room, *_ in seen} == {
    ("run", room) for room in ("train", "training_eval/validation", "inference_eval/validation")
  }
  for room in ("train", "training_eval/validation"):
    mine = {}
    for _, where, step, values in seen:
      if where == room:
        mine.setdefault(step, {}).update(values)
    assert mine == lines(tmp_path / "run", room) and mine
  assert "tracker" not in (tmp_path / "run/settings.json").read_text()  # a run goes on without it
  assert module.ENDED == [("run", "finished")]


def test_a_tracker_is_told_that_a_run_failed_or_was_stopped(tmp_path, notes, monkeypatch):
  """It was told the same as of a run that is done."""
  module, file = notes
  assert call(tmp_path / "failed", file, LEARNING_RATE=1e30, WARMUP_STEPS=1) == 1
  save = train._save

  def save_and_stop(process, state, done):
    save(process, state, done)
    process.stop.name = "SIGTERM"

  monkeypatch.setattr(train, "_save", save_and_stop)
  assert call(tmp_path / "stopped", file) == 0
  assert module.ENDED == [("failed", "failed"), ("stopped", "stopped")]


def test_mlflow_has_the_runs_of_a_folder_in_one_experiment(tmp_path, monkeypatch):
  """Issue 13, point 22: offline, into files; names, steps, values and macros are the run's."""
  mlflow = pytest.importorskip("mlflow", reason=NEEDED)
  monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
  uri = (tmp_path / "mlruns").as_uri()
  for name in ("a", "b"):
    assert call(tmp_path / "out" / name, "gin_configs/runs/local_mlflow.gin", MLFLOW_URI=uri) == 0
  assert call(tmp_path / "out/a", "gin_configs/runs/local_mlflow.gin", MLFLOW_URI=uri) == 0  # done
  client = mlflow.MlflowClient(uri)
  experiment = client.get_experiment_by_name("out")
  runs = {run.info.run_name: run for run in client.search_runs([experiment.experiment_id])}
  assert set(runs) == {"a", "b"}
  for name, run in runs.items():
    folder = tmp_path / "out" / name
    assert run.data.params["PATTERN"] == "'1:4'" and run.info.status == "FINISHED"
    for room, tags in (("train", ("loss", "nm/D")), ("training_eval/validation", ("loss",))):
      for tag in tags:
        told = client.get_metric_history(
          run.info.run_id, f"{room.replace('/', '.')}/{tag.replace('/', '.')}"
        )
        expected = {s: v[tag] for s, v in lines(folder, room).items() if tag in v}
        assert {m.step: m.value for m in told} == expected and expected
    assert "inference_eval.validation/absolute_error" in run.data.metrics


class Client:
  """Stands in for MLflow's, and notes what it is sent."""

  def __init__(self):
    self.sent, self.params, self.error, self.free = [], [], None, threading.Event()
    self.free.set()

  def get_experiment_by_name(self, name):
    return types.SimpleNamespace(experiment_id=name)

  def create_run(self, experiment, run_name):
    return types.SimpleNamespace(info=types.SimpleNamespace(run_id=f"{experiment}/{run_name}"))

  def log_batch(self, run, metrics=(), params=()):
    assert self.free.wait(5)
    self.params += params
    if self.error:
      raise self.error
    self.sent += [(run, name, step, value) for name, value, _, step in metrics]

  def update_run(self, run, status):
    self.sent.append((run, status))

  def set_terminated(self, run, status):
    self.sent.append((run, status))


@pytest.fixture
def client(monkeypatch):
  """MLflow need not be installed for what is said of it here."""
  found = Client()
  entities = types.SimpleNamespace(Metric=lambda *of: of, Param=lambda *of: of)
  mlflow = types.SimpleNamespace(MlflowClient=lambda tracking_uri: found, entities=entities)
  monkeypatch.setitem(sys.modules, "mlflow", mlflow)
  monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
  return found


def test_a_tracker_that_cannot_be_reached_ends_no_run(tmp_path, client):
  """Issue 13, point 22: one warning, and the steps go on."""
  (tmp_path / "out/run").mkdir(parents=True)
  room = tracking.Mlflow().writer(tmp_path / "out/run", "train")
  client.error = OSError("no route to host")
  with pytest.warns(
    UserWarning, match="nothing at step 3, and gets no more: no route to host"
  ) as told:
    room.write_scalars(3, {"loss": 1.0})
    room.write_scalars(4, {"loss": 1.0})
    room.close()
  assert len(told) == 1 and not client.sent and isinstance(room, writers.Scalars)


def test_no_step_waits_for_mlflow(tmp_path, client):
  """Issue 13, point 22: a server that hangs would hold up the save after SIGTERM."""
  (tmp_path / "out/run").mkdir(parents=True)
  room = tracking.Mlflow().writer(tmp_path / "out/run", "train")
  client.free.clear()
  for step in (1, 2):
    room.write_scalars(step, {"nm/D": 0.5})  # a call that waited would fail, and send nothing
  client.free.set()
  room.close()
  assert client.sent == [
    ("out/run", "train/nm.D", 1, 0.5), ("out/run", "train/nm.D", 2, 0.5), ("out/run", "FINISHED")
  ]  # fmt: skip


def test_mlflow_shows_how_a_run_ended(tmp_path, client):
  """A run that failed, or that a signal stopped, was shown as finished."""
  (tmp_path / "out/run").mkdir(parents=True)
  for how, status in (("failed", "FAILED"), ("stopped", "KILLED"), ("finished", "FINISHED")):
    client.sent.clear()
    curves = reports.Curves(tmp_path / "out/run", tracking.Mlflow())  # of a new process
    curves.track("train", 1, {"loss": 1.0})
    curves.close(how)
    begun = [] if how == "failed" else [("out/run", "RUNNING")]  # the first one makes it
    assert client.sent == [*begun, ("out/run", "train/loss", 1, 1.0), ("out/run", status)]


def test_a_password_in_the_uri_is_not_sent(tmp_path, client):
  """Issue 13, point 22: whoever sees the run in MLflow sees its parameters."""
  (tmp_path / "config.gin").write_text("MLFLOW_URI = 'http://me:secret@host'\nPATTERN = '1:4'\n")
  room = tracking.Mlflow().writer(tmp_path, "train")
  room.write_scalars(1, {"loss": 1.0})
  room.close()
  assert client.params == [("PATTERN", "'1:4'")]


def test_each_room_of_a_tracker_is_opened_once_and_closed(tmp_path):
  """Issue 13, point 22: a tracker may hold a connection for each, also where another one fails."""
  opened, closed = [], []

  class Room(writers.Scalars):
    def __init__(self, room):
      self._room = room
      opened.append(room)

    def close(self):
      closed.append(self._room)
      raise OSError("gone")

  tracker = types.SimpleNamespace(writer=lambda folder, room: Room(room))
  curves = reports.Curves(tmp_path, tracker)
  for step in (1, 2):
    curves.track("inference_eval/rte", step, {"accuracy": 50.0})
    curves.track("inference_eval/sst2", step, {"accuracy": 50.0})
  with pytest.raises(OSError, match="gone"):
    curves.close()
  assert sorted(opened) == sorted(closed) == ["inference_eval/rte", "inference_eval/sst2"]


def test_without_mlflow_one_line_says_what_to_install(tmp_path, monkeypatch, capsys):
  """Issue 13, point 22: the extra is named before the first step."""
  monkeypatch.setitem(sys.modules, "mlflow", None)
  assert call(tmp_path / "run", "gin_configs/runs/local_mlflow.gin") == 1
  assert "pip install 'nm-sparsity-jax[tracking]'" in capsys.readouterr().err
  assert not (tmp_path / "run").exists()
