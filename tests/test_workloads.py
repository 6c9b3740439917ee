"""A model family outside the package goes through every command; what it lacks is named."""

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from checkpoint_files import assert_same, read

import nm_sparsity_jax as nms
from nm_sparsity_jax import cli
from nm_sparsity_jax.core.trees import flatten
from nm_sparsity_jax.integrations import gin_files
from nm_sparsity_jax.runs import folders
from nm_sparsity_jax.trainer import workloads
from nm_sparsity_jax.training import configure, flops

pytest.importorskip("clu", reason="the local runner needs clu: pip install -e '.[local]'")
pytestmark = pytest.mark.filterwarnings("ignore")  # what it imports warns on its own account

with warnings.catch_warnings():
  warnings.simplefilter("ignore")
  from nm_sparsity_jax.trainer import checkpoints, evaluation, step, train
  from nm_sparsity_jax.trainer import folders as local_folders

ROOT = pathlib.Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples" / "own_workload"
sys.path.append(str(EXAMPLE))
import own_workload  # noqa: E402

STEPS = 48
RULES = dict(RECIPE="idp", PATTERN="1:8", SPARSE_STEPS=STEPS, DENSE_STEPS=4, FINETUNE_STEPS=4)
MACROS = RULES | dict(
  EVAL_PERIOD=24, CHECKPOINT_PERIOD=4, STATS_PERIOD=4, METRICS_EVERY=12, KEEP_CHECKPOINTS=None,
  WARMUP_STEPS=1, LEARNING_RATE=0.01,
)  # fmt: skip


def words(run="local_workload", **macros):
  """The flags of a command."""
  files = [f"gin_configs/runs/{run}.gin", str(EXAMPLE / "own_workload.gin")]
  files += ["gin_configs/runs/local_adamw.gin"] if run == "local_workload" else []
  return [
    f"--gin_search_paths={gin_files.folder()}", *(f"--gin_file={name}" for name in files),
    *(f"--gin.{name}={value!r}" for name, value in macros.items()),
  ]  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
  """A whole run by the command: stored masks, batch statistics, evaluations, samples."""
  folder = tmp_path_factory.mktemp("own") / "run"
  assert cli.main(["train", *words(**MACROS, MODEL_DIR=str(folder))]) == 0
  return folder


# --- every command ------------------------------------------------------------------------------


def test_it_trains_and_says_what_it_is(trained):
  saved = read(trained, STEPS)
  stats = [key for key in saved if key.startswith("flax_mutables/batch_stats/")]
  assert len(stats) == 4 and not np.allclose(saved[stats[0]], 0)
  assert [k for k in saved if "nm_sparsity/mask" in k and "hidden_1" in k]
  lines = [json.loads(x) for x in (trained / "train/metrics.jsonl").read_text().splitlines()]
  reported = [x["loss"] for x in lines if "loss" in x]
  assert reported[-1] < reported[0]
  assert {"absolute_error", "grad_norm", "learning_rate"} < set(lines[-1])
  assert [x["step"] for x in lines if "nm/density" in x] == [12, 24, 36, 48]
  found = json.loads((trained / "evaluations.json").read_text())
  assert [e["at_target"] for e in found] == [False, True]
  assert found[0]["less_is_better"] == list(found[0]["metrics"]["validation"]) == ["absolute_error"]
  noted = json.loads((trained / "run.json").read_text())["workload"]
  assert noted["class"] == "own_workload.Regression" and noted["batch_size"] == 32
  params = sum(x.size for k, x in saved.items() if k.startswith("target/"))
  assert flops.Cost(tuple(flops.Op(**op) for op in noted["ops"])).params == params


def test_killed_and_resumed_it_has_the_same_bits(trained, tmp_path):
  folder = tmp_path / "run"
  flags = words(**MACROS, MODEL_DIR=str(folder))
  command = [sys.executable, "-m", "nm_sparsity_jax.cli", "train", *flags]
  env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(EXAMPLE), str(ROOT)])}
  env["JAX_NUM_CPU_DEVICES"] = str(jax.device_count())  # sums depend on it
  with subprocess.Popen(command, env=env, stderr=subprocess.DEVNULL) as process:
    while not folders.steps(folder)[1:] and process.poll() is None:
      time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
  assert process.returncode == -signal.SIGKILL and folders.steps(folder)[-1] < STEPS
  assert cli.main(["train", *flags]) == 0
  assert_same(read(folder, STEPS), read(trained, STEPS))
  for room in ("train", "training_eval/validation"):
    file = f"{room}/metrics.jsonl"
    assert (folder / file).read_text() == (trained / file).read_text()


def test_eval_and_infer_say_what_the_run_says_of_a_checkpoint(trained, tmp_path, capsys):
  """Its rules are the checkpoint's; a finalized checkpoint predicts what the last one does."""
  call = lambda name, path, out, **macros: cli.main([
    name, *words(f"local_workload_{name}", CHECKPOINT_PATH=str(path),
                 **{f"{name.upper()}_OUTPUT_DIR": str(out)}, **macros),
  ])  # fmt: skip
  middle = trained / "checkpoint_24"
  assert call("eval", middle, tmp_path / "e") == 0
  (alone,) = (tmp_path / "e/training_eval/validation/metrics.jsonl").read_text().splitlines()
  then = (trained / "training_eval/validation/metrics.jsonl").read_text().splitlines()[0]
  assert json.loads(alone) == json.loads(then)

  assert call("infer", middle, tmp_path / "middle") == 0
  rows = predicted(tmp_path / "middle")
  assert [row["inputs"] for row in rows] == [{"idx": i} for i in range(64)]
  said = np.array([row["prediction"]["output"] for row in rows])
  wanted = [batch["y"] for batch in own_workload.Regression().splits()["validation"]]
  error = np.abs(said - np.concatenate(wanted)).mean()
  assert error == pytest.approx(json.loads(then)["absolute_error"], rel=1e-4)
  assert cli.main(["finalize", str(trained), str(tmp_path / "final")]) == 0
  for name, path in (("last", trained), ("of", tmp_path / "final")):
    assert call("infer", path, tmp_path / name) == 0
  assert predicted(tmp_path / "last") == predicted(tmp_path / "of") != rows

  capsys.readouterr()
  assert call("infer", middle, tmp_path / "none", EVAL_SPLIT="tset") == 1
  assert "EVAL_SPLIT='tset'" in capsys.readouterr().err and not (tmp_path / "none").exists()
  assert call("eval", middle, tmp_path / "none", PATTERN="1:4") == 1
  assert "PATTERN='1:4'" in capsys.readouterr().err and not (tmp_path / "none").exists()
  assert call("eval", middle, trained) == 1
  assert "holds a run" in capsys.readouterr().err


def predicted(folder, split="validation"):
  """The lines of a file of predictions."""
  text = (folder / f"{split}-predict.jsonl-00000-of-00001").read_text()
  return [json.loads(line) for line in text.splitlines()]


def test_an_evaluation_spares_the_folder_of_a_run_of_t5x(tmp_path):
  """t5x.train and t5x.eval both write model-info.txt; only a run has checkpoints."""
  for name in ("config.gin", "model-info.txt"):
    (tmp_path / name).write_text("")
  local_folders.refuse_run(tmp_path, "EVAL_OUTPUT_DIR")
  (tmp_path / "checkpoint_3/state").mkdir(parents=True)
  (tmp_path / "checkpoint_3/state/_METADATA").write_text("{}")
  with pytest.raises(ValueError, match="holds a run"):
    local_folders.refuse_run(tmp_path, "EVAL_OUTPUT_DIR")


def test_a_finished_run_is_n_m_and_one_under_way_is_not(trained, tmp_path):
  """Its parameters are what is deployed, so `finalize` removes nothing and a run may start."""
  assert cli.main(["verify", str(trained)]) == 0
  assert cli.main(["verify", str(trained / "checkpoint_24")]) == 1
  assert cli.main(["finalize", str(trained), str(tmp_path)]) == 0
  ends = [checkpoints.load_initial(f"{folder}/checkpoint_{STEPS}", model_of(), jax.random.key(0))
          for folder in (trained, tmp_path)]  # fmt: skip
  jax.tree.map(np.testing.assert_array_equal, *ends)
  _, kept, number = ends[0]
  saved = {k: x for k, x in read(trained, STEPS).items() if "batch_stats" in k}
  assert_same({f"flax_mutables/{k}": x for k, x in flatten(jax.device_get(kept))}, saved)
  assert number == STEPS


def test_plan_report_and_sweep(trained, tmp_path, capsys, monkeypatch):
  assert cli.main(["plan", "--json", *words(**MACROS, MODEL_DIR=str(tmp_path / "run"))]) == 0
  report = json.loads(capsys.readouterr().out)
  hidden = 2 * (16 * 32 + 32 * 32)
  assert report["cost"]["inference"] == {"dense": hidden + 64, "sparse": hidden / 8 + 64}
  odd = words(**MACROS, MODEL_DIR=str(tmp_path / "run"), BATCH_SIZE=15, MICROBATCHES=2)
  assert cli.main(["plan", "--json", *odd]) == 1
  assert "BATCH_SIZE=15 must be a multiple" in capsys.readouterr().out
  assert cli.main(["report", str(trained), "--out", str(tmp_path / "report.html")]) == 0
  assert "FLOPs" in (tmp_path / "report.html").read_text()

  monkeypatch.chdir(tmp_path)
  for name in ("own_workload.py", "own_workload.gin"):
    shutil.copy(EXAMPLE / name, tmp_path)
  files = ["gin_configs/runs/local_workload.gin", "own_workload.gin",
           "gin_configs/runs/local_adamw.gin"]  # fmt: skip
  pathlib.Path("sweep.toml").write_text(
    f"out = 'runs'\ngin_files = {files}\nrecipes = ['sr_ste']\npatterns = ['1:4']\n"
    "dense = false\nseeds = [0]\nbaseline = 'sr_ste'\n"
    "[macros]\nSPARSE_STEPS = 4\nEVAL_PERIOD = 4\nSTATS_PERIOD = 2\nMETRICS_EVERY = 2\n"
  )
  assert cli.main(["sweep", "sweep.toml"]) == 0
  capsys.readouterr()
  assert cli.main(["sweep", "sweep.toml", "--json"]) == 0
  report = json.loads(capsys.readouterr().out)
  assert report["done"] == 1 and report["rows"][0]["loss"]["mean"] > 0


# --- predictions --------------------------------------------------------------------------------


class Answers(own_workload.Regression):
  """Predicts what it is told to."""

  def __init__(self, predict, **fields):
    super().__init__()
    self.says = predict
    vars(self).update(fields)

  def predict(self, params, state, batch):
    return self.says(batch)

  def splits(self):
    batch, last = ({"x": np.full((4, 16), float(i), np.float32)} for i in range(2))
    return {"test": [batch | {"real": np.ones(4)}, last | {"real": np.array([1, 0, 1, 0])}]}


def rows_of(workload, **fields):
  """The rows that are predicted from new parameters."""
  model = model_of(workload)
  params, state = model.initial(jax.random.PRNGKey(0))
  wanted = evaluation.Splits(**fields).for_predictions(workload).evaluator(model, None)
  return {name: list(rows) for name, rows in wanted.predictions({"params": params, **state})}


def test_predictions_are_plain_and_rows_that_fill_a_batch_are_left_out():
  def says(batch):
    x = batch["x"]
    return {"class": jnp.argmax(x, 1), "half": jnp.bfloat16(x[:, :2] / 2), "sure": x[:, 0] > 0.5}

  first = {"class": 0, "half": [0.0, 0.0], "sure": False}
  last = {"class": 0, "half": [0.5, 0.5], "sure": True}
  rows = lambda count: [({"idx": i}, first if i < 4 else last) for i in range(count)]
  assert rows_of(Answers(says, real="real")) == {"test": rows(6)}
  assert rows_of(Answers(says), split="test") == {"test": rows(8)}
  assert rows_of(Answers(says), batches=1) == {"test": rows(4)}


@pytest.mark.parametrize(
  "says, word",
  [
    (lambda b: {"y": jnp.mean(b["x"], 0)}, r"shape \(16,\)"),
    (lambda b: {"y": 1 / (b["x"] - 1)}, "not finite for example 4"),
  ],
)
def test_predictions_that_cannot_be_written_are_refused(says, word):
  with pytest.raises(ValueError, match=word):
    rows_of(Answers(says))


def test_a_workload_without_predict_is_refused(tmp_path):
  class Silent(own_workload.Regression):
    predict = workloads.Workload.predict

  with pytest.raises(ValueError, match="lacks predict"):
    train.infer(model_of(Silent()), evaluation.Splits(), "checkpoint_1", str(tmp_path / "out"))
  assert not list(tmp_path.iterdir())


# --- the step -----------------------------------------------------------------------------------


def model_of(workload=None, devices=1, **rules):
  rules = dict(recipe="snip", pattern="1:4", sparse_steps=8, dense_steps=2) | rules
  return step.Model(
    workload or own_workload.Regression(), configure.rules({"hidden": None}, **rules),
    devices=jax.devices()[:devices],
  )  # fmt: skip


def run_of(folder, model, **fields):
  fields = dict(optimizer=optax.adamw(0.01), sparse_steps=8) | fields
  return train.Run(model=model, model_dir=str(folder), **fields)


def test_sampled_metrics_change_no_bit(tmp_path):
  for every in (None, 1):
    periods = train.Periods(evaluate=100, report=4, metrics=every)
    assert train.train(run_of(tmp_path / str(every), model_of(), periods=periods)) == 0
  assert_same(read(tmp_path / "None", 8), read(tmp_path / "1", 8))


def test_state_goes_through_microbatches():
  """Batch statistics see every part; sums are those of the whole batch where they can be."""
  model, key = model_of(), jax.random.PRNGKey(0)
  batch = model.put(next(own_workload.Regression().batches(0, 0)))
  found = {}
  for parts in (1, 4):
    params, state = model.initial(key)
    state = model.begin(params, optax.sgd(0.0), 0, state)
    state, sums = model.train_step(optax.sgd(0.0), key, state, parts)(state, batch)
    found[parts] = np.linalg.norm(state.collections["batch_stats"]["norm_0"]["mean"])
    assert sums["examples"] == 32
  # Four steps of momentum 0.9 toward means whose mean is the batch's.
  np.testing.assert_allclose(found[4] / found[1], 0.3439 / 0.1, rtol=0.1)


class Weighed(workloads.Workload):
  """Its loss of a step is `scale` * (1 - w), summed over rows that weigh `scale` each."""

  weight, batch_size = "rows", 4

  def __init__(self, scale):
    self.scale = scale

  def init(self, rng):
    return {"params": {"w": jnp.zeros(())}}

  def batches(self, seed, start):
    return iter([{"x": jnp.ones(4)}])

  def splits(self):
    return {}

  def loss(self, params, state, batch, rng):
    sums = {"rows": self.scale * jnp.sum(batch["x"])}
    return jnp.sum(self.scale * batch["x"] * (1 - params["w"])), sums, state


@pytest.mark.parametrize("scale, moved", [(2.0, 1.0), (2.0**-9, 1.0), (0.0, 0.0)])
def test_the_gradient_is_that_of_the_mean_however_small_the_weight(scale, moved):
  """Without any weight there is nothing to divide."""
  optimizer, key = optax.sgd(1.0), jax.random.PRNGKey(0)
  model = step.Model(Weighed(scale), nms.Rules({".*": nms.recipe("dense")}),
                     devices=jax.devices()[:1])  # fmt: skip
  for parts in (1, 2):
    state = model.begin(model.initial(key)[0], optimizer, 0)
    batch = model.put({"x": np.ones(4, np.float32)})
    state, _ = model.train_step(optimizer, key, state, parts)(state, batch)
    assert state.params["w"] == moved
  assert Weighed(1).scalars({"loss": 0.5, "rows": 0.25}) == {"loss": 2.0}
  assert Weighed(1).scalars({"loss": 0.0, "rows": 0.0}) == {"loss": 0.0}


# --- what is incomplete -------------------------------------------------------------------------


class Half(workloads.Workload):
  def init(self, rng): ...
  def batches(self, seed, start): ...


class Changed(own_workload.Regression):
  """Changes the sums of its loss."""

  def __init__(self, change):
    super().__init__()
    self.change = change

  def loss(self, *arguments):
    loss, sums, state = super().loss(*arguments)
    return loss, self.change(sums), state


class Taken(own_workload.Regression):
  def init(self, rng):
    return {**super().init(rng), "nm_sparsity": {"step": jnp.int32(0)}}


@pytest.mark.parametrize(
  "make, error, word",
  [
    (lambda: Half(), TypeError, "loss.*splits"),
    (lambda: step.Model(None), ValueError, "Workload"),
    (lambda: model_of(Taken()), ValueError, "nm_sparsity"),
    (lambda: model_of(Changed(lambda sums: {})), ValueError, "'examples'"),
    (lambda: model_of(Changed(lambda sums: sums | {"loss": 0.0})), ValueError, "no 'loss'"),
    (lambda: evaluation.Splits(batches=0), ValueError, "EVAL_STEPS=0"),
  ],
)
def test_what_is_incomplete_is_named(make, error, word, tmp_path):
  with pytest.raises(error, match=word):
    train.train(run_of(tmp_path, make()))


def test_a_run_does_without_flops_where_its_code_fails(monkeypatch, caplog):
  monkeypatch.setattr(own_workload.Regression, "example", lambda self: 1 / 0)
  assert workloads.describe(own_workload.Regression())["ops"] is None
  assert "no FLOPs of Regression" in caplog.text
