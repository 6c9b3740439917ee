"""Trackers: the curves of runs in a writer of your own, or in MLflow."""

import json
import os
import pathlib
import signal
import sys
import types
import warnings

import jax
import optax
import pytest

from nm_sparsity_jax import cli
from nm_sparsity_jax.integrations import gin_files
from nm_sparsity_jax.training import configure

pytest.importorskip("clu", reason="the local runner needs clu: pip install -e '.[local]'")
pytestmark = pytest.mark.filterwarnings("ignore")  # what it imports warns on its own account

with warnings.catch_warnings():
  warnings.simplefilter("ignore")
  from nm_sparsity_jax.trainer import evaluation, step, tracking, train, writers

EXAMPLE = pathlib.Path(__file__).resolve().parents[1] / "examples/own_workload"
sys.path.append(str(EXAMPLE))
import own_workload  # noqa: E402

ROOMS = ("train", "training_eval/validation", "inference_eval/validation")


class Notes(writers.Writer):
  """A tracker of your own, which asks the run to stop at a step."""

  def __init__(self, stop=None):
    self.seen, self.stop = {}, stop

  def write(self, room, step, scalars):
    self.seen.setdefault(room, []).append({"step": step, **scalars})
    if step == self.stop:
      os.kill(os.getpid(), signal.SIGTERM)

  def close(self, how):
    self.seen["how"] = how


@pytest.mark.parametrize(
  "rate, stop, how",
  [(0.01, None, "finished"), (0.01, 2, "stopped"), (float("nan"), None, "failed")],
)
def test_a_tracker_of_your_own_gets_what_the_files_get(rate, stop, how, tmp_path):
  rules = configure.rules({"hidden": None}, recipe="sr_ste", pattern="1:4", sparse_steps=8)
  notes = Notes(stop)
  run = train.Run(
    model=step.Model(own_workload.Regression(), rules, devices=jax.devices()[:1]),
    model_dir=str(tmp_path), optimizer=optax.sgd(rate), sparse_steps=8, tracker=notes,
    evaluation=evaluation.Splits(), periods=train.Periods(evaluate=4, report=1, metrics=2),
  )  # fmt: skip
  if how == "failed":
    with pytest.raises(ValueError, match="not finite"):
      train.train(run)
  else:
    assert train.train(run) == 0
  assert notes.seen.pop("how") == how
  if how == "finished":
    assert set(notes.seen) == set(ROOMS)
  for room in set(notes.seen) - {ROOMS[2]}:  # seqio writes the files of the third
    text = (tmp_path / room / "metrics.jsonl").read_text()
    assert notes.seen[room] == [json.loads(line) for line in text.splitlines()]


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


def write(folder, how="finished"):
  """One process of a run, whose macros hold a password."""
  folder.mkdir(parents=True, exist_ok=True)
  (folder / "config.gin").write_text("PATTERN = '1:4'\nMLFLOW_URI = 'http://me:secret@host'\n")
  curves = writers.Curves(folder, tracking.Mlflow(uri="http://me:secret@host"))
  curves.write("train", 4, {"nm/D": 1.0})
  curves.write("inference_eval/validation", 4, {"absolute_error": 2.0})
  curves.close(how)


def test_mlflow_gets_one_run_in_the_experiment_of_its_sweep(tmp_path, client):
  for how in ("stopped", "finished"):
    write(tmp_path / "out/a", how)
  told = lambda name: [rest for called, *rest in client.told if called == name]
  (((params, _)),) = told("log_params")
  assert params["PATTERN"] == "'1:4'"
  assert "secret" not in str(params)  # whoever sees the run in MLflow sees its parameters
  assert told("set_experiment")[0][0] == "out"
  assert [x[0] for x in told("start_run")] == [
    {"run_id": None, "run_name": "a"}, {"run_id": "7", "run_name": None},
  ]  # fmt: skip
  assert [x[0] for x in told("end_run")] == ["KILLED", "FINISHED"]
  sent = [(dict(x), kw["step"]) for x, kw in told("log_metrics")]
  assert sent[:2] == [
    ({"train/nm.D": 1.0}, 4), ({"inference_eval.validation/absolute_error": 2.0}, 4),
  ]  # fmt: skip


def test_a_tracker_that_cannot_be_reached_ends_no_run(tmp_path, client):
  client.error = OSError("no route to host")
  with pytest.warns(UserWarning, match="no route to host") as told:
    write(tmp_path / "run")
  assert len([w for w in told if "MLflow" in str(w.message)]) == 1 and not client.told


def test_without_mlflow_nothing_starts(tmp_path, monkeypatch, capsys):
  monkeypatch.setitem(sys.modules, "mlflow", None)
  files = ["gin_configs/runs/local_workload.gin", str(EXAMPLE / "own_workload.gin"),
           "gin_configs/runs/local_adamw.gin", "gin_configs/runs/local_mlflow.gin"]  # fmt: skip
  macros = dict(RECIPE="sr_ste", PATTERN="1:4", SPARSE_STEPS=4, MODEL_DIR=str(tmp_path / "run"))
  words = [*(f"--gin_file={name}" for name in files),
           *(f"--gin.{name}={value!r}" for name, value in macros.items())]  # fmt: skip
  assert cli.main(["train", f"--gin_search_paths={gin_files.folder()}", *words]) == 1
  assert "mlflow" in capsys.readouterr().err
  assert not (tmp_path / "run").exists()
