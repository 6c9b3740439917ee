"""Image networks go through every command and resume; what a workload of your own gets."""

import json
import os
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
from checkout import ROOT, gin_flags, read_lines
from checkpoint_files import read
from reference_arrays import assert_same

from nm_sparsity_jax import cli
from nm_sparsity_jax.analysis import charts
from nm_sparsity_jax.core.trees import flatten
from nm_sparsity_jax.models import resnet
from nm_sparsity_jax.runs import checkpoint, folders
from nm_sparsity_jax.trainer import workloads
from nm_sparsity_jax.trainer.images import rebus
from nm_sparsity_jax.trainer.workloads import vision
from nm_sparsity_jax.training import configure, flops

pytest.importorskip("tensorboard", reason="pip install -e '.[local]'")
pytestmark = pytest.mark.filterwarnings("ignore")  # what it imports warns on its own account

with warnings.catch_warnings(action="ignore"):
  from nm_sparsity_jax.trainer import checkpoints, evaluation, step, train

sys.path.append(str(ROOT / "examples" / "own_workload"))
import own_workload  # noqa: E402

STEPS, MIDDLE = 12, 6
DATA = dict(DATA="rebus", BATCH_SIZE=8, LOSS="sigmoid", DROP_PATH=0.2)  # evaluations need it too
# All phases, and all that is drawn or kept beside parameters.
MACROS = DATA | dict(
  RECIPE="idp", PATTERN="1:8", SPARSITY_RULES={"conv": None}, SPARSE_STEPS=STEPS, DENSE_STEPS=4,
  FINETUNE_STEPS=4, EVAL_PERIOD=MIDDLE, CHECKPOINT_PERIOD=1, STATS_PERIOD=1, METRICS_EVERY=MIDDLE,
  KEEP_CHECKPOINTS=None, WARMUP_STEPS=1, LEARNING_RATE=0.02, MIXUP=0.5, CUTMIX=1.0,
  LABEL_SMOOTHING=0.1, CLIP_NORM=1.0, EMA_DECAY=0.5, EVAL_STEPS=2,
)  # fmt: skip


def words(*names, **macros):
  """The flags of a command."""
  files = [f"gin_configs/runs/{name}.gin" for name in names]
  return gin_flags([*files, "tests/images_tiny.gin"], macros)


def train_words(folder, **macros):
  macros = MACROS | macros | {"MODEL_DIR": str(folder)}
  return ["train", *words("local_images", "local_images_adamw", **macros)]


def look(name, path, out, **macros):
  """Evaluates a checkpoint, or infers from it."""
  where = dict(CHECKPOINT_PATH=str(path)) | {f"{name.upper()}_OUTPUT_DIR": str(out)}
  return cli.main([name, *words(f"local_images_{name}", **(DATA | where | macros))])


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  """The folder of a whole run by the command, of a tiny ResNet."""
  folder = tmp_path_factory.mktemp("images")
  assert cli.main(train_words(folder)) == 0
  return folder


def lines_of(folder, room="train"):
  return read_lines(folder / room / "metrics.jsonl")


# --- every command ------------------------------------------------------------------------------


def test_it_trains_and_says_what_it_is(run, tmp_path, monkeypatch):
  lines = lines_of(run)
  assert {"accuracy", "grad_norm", "update_norm", "learning_rate"} < set(lines[-1])
  assert [x["step"] for x in lines if "nm/density" in x] == [MIDDLE, STEPS]
  noted = json.loads((run / "run.json").read_text())["workload"]
  params = sum(x.size for k, x in read(run, STEPS).items() if k.startswith("target/"))
  assert flops.Cost(tuple(flops.Op(**op) for op in noted["ops"])).params == params
  monkeypatch.setattr(charts, "svg", lambda chart: b"")  # tests/test_report.py draws
  assert cli.main(["report", str(run), "--out", str(tmp_path / "report.html")]) == 0


def test_the_average_is_that_of_parameters_and_statistics_after_each_update(run):
  """By numpy, from the checkpoints of all steps; of kernels it is that of W."""
  at, dense = {i: read(run, i) for i in range(1, 5)}, "state/nm_sparsity/dense/"
  for saved in at.values():
    saved.update({k.replace(dense, "target/"): x for k, x in saved.items() if k.startswith(dense)})
  keys = [k for k in at[1] if k.startswith(("target/", "flax_mutables/batch_stats/"))]
  assert {f"state/average/{k}" for k in keys} == {k for k in at[1] if k.startswith("state/average")}
  for key in keys:
    average = at[1][f"state/average/{key}"]
    for i in range(2, 5):
      average = 0.5 * average + 0.5 * at[i][key]  # EMA_DECAY
      np.testing.assert_allclose(at[i][f"state/average/{key}"], average, rtol=1e-4, atol=1e-6)


def test_killed_and_resumed_it_has_the_same_bits(run, tmp_path):
  """Also where the kill left a part of a checkpoint."""
  folder = tmp_path / "run"
  argv = train_words(folder)
  # Sums depend on the number of devices.
  env = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_NUM_CPU_DEVICES": str(jax.device_count())}
  with subprocess.Popen(
    [sys.executable, "-m", "nm_sparsity_jax.cli", *argv], env=env, stderr=subprocess.DEVNULL
  ) as process:
    while not folders.steps(folder)[1:] and process.poll() is None:
      time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
  assert process.returncode == -signal.SIGKILL and folders.steps(folder)[-1] < STEPS
  (folder / f"checkpoint_{STEPS}.orbax-checkpoint-tmp-7/state").mkdir(parents=True)
  assert cli.main(argv) == 0
  assert_same(read(folder, STEPS), read(run, STEPS))
  for room in ("train", "training_eval/validation"):
    assert lines_of(folder, room) == lines_of(run, room)
  assert folders.evaluations(folder) == folders.evaluations(run)


def test_eval_and_infer_say_what_the_run_says_of_a_checkpoint(run, tmp_path):
  middle = run / f"checkpoint_{MIDDLE}"
  assert look("eval", middle, tmp_path / "e", EVAL_STEPS=2) == 0
  (alone,) = lines_of(tmp_path / "e", "training_eval/validation")
  assert alone == lines_of(run, "training_eval/validation")[0]

  assert look("infer", middle, tmp_path / "i") == 0
  rows = read_lines(tmp_path / "i/validation-predict.jsonl-00000-of-00001")
  wanted = np.concatenate([batch["label"] for batch in rebus.Rebus(8).splits()["validation"]])
  assert [row["inputs"]["idx"] for row in rows] == list(range(len(wanted)))
  said = np.array([row["prediction"]["label"] for row in rows])
  assert (said == wanted)[:16].mean() == pytest.approx(alone["accuracy"])


def test_what_is_scored_is_finalized(run, tmp_path):
  """The average, which is one of dense weights."""
  rules = configure.rules({"conv": None}, "idp", pattern="1:8", sparse_steps=STEPS,
                          dense_steps=4, finetune_steps=4)  # fmt: skip
  network = resnet.ResNet(resnet.config("resnet_test", image_size=16, depths=(1,), widths=(8,)))
  model = step.Model(vision.Images(network, rebus.Rebus(8)), rules, devices=jax.devices()[:1])
  assert cli.main(["verify", str(run)]) == 1
  assert cli.main(["finalize", str(run), str(tmp_path)]) == 0
  assert cli.main(["verify", str(tmp_path)]) == 0
  end = f"checkpoint_{STEPS}"
  load = lambda path: checkpoints.load_for_evaluation(checkpoint.read(path), model)
  final = load(str(tmp_path / end))
  jax.tree.map(np.testing.assert_array_equal, final, load(str(run / end)))
  # A next run takes the finalized weights, or the dense average with a warning.
  start = lambda folder: checkpoints.load_initial(f"{folder}/{end}", model, jax.random.key(0))
  params, kept, _ = start(tmp_path)
  jax.tree.map(np.testing.assert_array_equal, {"params": params, **kept}, final)
  with pytest.warns(UserWarning, match="not finalized"):
    params, kept, _ = start(run)
  saved = read(run, STEPS)
  for name, leaf in flatten({"target": params, "flax_mutables": kept}):
    np.testing.assert_array_equal(leaf, saved[f"state/average/{name}"])


def test_a_run_goes_on_with_its_own_settings_alone(run, capsys):
  before = {p: p.stat().st_mtime_ns for p in run.rglob("*")}
  assert cli.main(train_words(run, PATTERN="1:4", LEARNING_RATE=0.5)) == 1
  said = capsys.readouterr().err
  assert "rate was 0.02, and is 0.5" in said and "pattern was '1:8', and is '1:4'" in said
  assert {p: p.stat().st_mtime_ns for p in run.rglob("*")} == before


def test_an_evaluation_that_does_not_fit_writes_nothing(run, tmp_path, capsys):
  path = run / f"checkpoint_{MIDDLE}"
  for out, macros, word in (
    (tmp_path / "new", dict(EVAL_SPLIT="tset"), "EVAL_SPLIT='tset'"),
    (tmp_path / "new", dict(PATTERN="1:4"), "PATTERN='1:4'"),
    (run, {}, "holds a run"),
  ):
    assert look("eval", path, out, **macros) == 1
    assert word in capsys.readouterr().err and not (tmp_path / "new").exists()


# --- predictions --------------------------------------------------------------------------------


class Answers(own_workload.Regression):
  """Says of each row what JSON can hold; two rows of the last batch only fill it."""

  def predict(self, params, state, batch):
    x = batch["x"]
    return {"class": jnp.argmax(x, 1), "half": jnp.bfloat16(x[:, :2] / 2), "sure": x[:, 0] > 0.5}

  def splits(self):
    batch, last = ({"x": np.full((4, 16), float(i), np.float32)} for i in range(2))
    return {"test": [batch | {"real": np.ones(4)}, last | {"real": np.array([1, 0, 1, 0])}]}


def test_predictions_are_plain_and_rows_that_fill_a_batch_are_left_out():
  model = model_of(Answers())
  params, state = model.initial(jax.random.PRNGKey(0))
  evaluator = evaluation.Splits(model, split="test")
  ((name, rows),) = evaluator.predictions({"params": params, **state})
  first = {"class": 0, "half": [0.0, 0.0], "sure": False}
  last = {"class": 0, "half": [0.5, 0.5], "sure": True}
  assert name == "test"
  assert list(rows) == [({"idx": i}, first if i < 4 else last) for i in range(6)]


@pytest.mark.parametrize(
  "predict, word",
  [
    (workloads.Workload.predict, "no method `predict`"),
    (lambda *_: {"x": jnp.zeros(8)}, "batch of 4 rows"),
  ],
)
def test_predictions_that_are_none_or_not_of_the_rows_are_refused(predict, word, monkeypatch):
  monkeypatch.setattr(Answers, "predict", predict)
  with pytest.raises(ValueError, match=word):
    test_predictions_are_plain_and_rows_that_fill_a_batch_are_left_out()


# --- the step -----------------------------------------------------------------------------------


def model_of(workload):
  rules = configure.rules({"hidden": None}, recipe="snip", pattern="1:4", sparse_steps=8)
  return step.Model(workload, rules, devices=jax.devices()[:1])


class Weighed(workloads.Workload):
  """Its loss is `scale` * (1 - w), summed over rows that weigh `scale` each; its state counts."""

  weight, batch_size = "rows", 4
  batches = splits = None

  def __init__(self, scale):
    self.scale = scale

  def init(self, rng):
    return {"params": {"w": jnp.zeros(())}, "seen": {"rows": jnp.zeros(())}}

  def loss(self, params, state, batch, rng):
    sums = {"rows": self.scale * jnp.sum(batch["x"])}
    state = {"seen": {"rows": state["seen"]["rows"] + jnp.sum(batch["x"])}}
    return jnp.sum(self.scale * batch["x"] * (1 - params["w"])), sums, state


@pytest.mark.parametrize("scale", [2.0**-9, 0.0])
def test_the_gradient_is_that_of_the_mean_however_small_the_weight(scale):
  """Without any weight there is nothing to divide. State goes through each microbatch."""
  optimizer, key = optax.sgd(1.0), jax.random.PRNGKey(0)
  model = step.Model(Weighed(scale), devices=jax.devices()[:1])
  for parts in (1, 2):
    params, state = model.initial(key)
    state = model.begin(params, optimizer, 0, state)
    batch = model.put({"x": np.ones(4, np.float32)})
    state, sums = model.train_step(optimizer, key, parts)(state, batch)
    assert state.params["w"] == float(scale > 0) and sums["rows"] == 4 * scale
    assert state.collections["seen"]["rows"] == 4


# --- what is incomplete -------------------------------------------------------------------------


def test_a_tracker_of_your_own_gets_what_the_files_get(tmp_path):
  seen = {}
  track = lambda room, step, scalars: seen.setdefault(room, []).append({"step": step, **scalars})
  run = train.Run(
    model=model_of(own_workload.Regression()), model_dir=str(tmp_path), optimizer=optax.sgd(0.01),
    sparse_steps=8, tracker=track, evaluation=evaluation.Splits, stats_period=1,
  )  # fmt: skip
  assert train.train(run) == 0
  rooms = "train", "training_eval/validation"
  assert [seen[room] for room in rooms] == [lines_of(tmp_path, room) for room in rooms]


class Masked(own_workload.Regression):
  def init(self, rng):
    return {**super().init(rng), "nm_sparsity": {"step": jnp.int32(0)}}


def test_a_network_that_masks_itself_is_refused():
  with pytest.raises(ValueError, match="RULES"):
    model_of(Masked())


def test_what_the_runner_cannot_share_or_does_itself_is_refused():
  with pytest.raises(ValueError, match="NUM_PARTITIONS=2"):
    step.Model(own_workload.Regression(), num_partitions=2, devices=jax.devices()[:2])
  several = optax.MultiSteps(optax.sgd(0.1), 2).gradient_transformation()
  run = train.Run(
    model=model_of(own_workload.Regression()), model_dir="-", sparse_steps=8,
    optimizer=optax.chain(optax.clip(1.0), several),
  )  # fmt: skip
  with pytest.raises(ValueError, match="MICROBATCHES"):
    run.check()


def test_a_run_does_without_flops_where_its_code_fails(monkeypatch, caplog):
  monkeypatch.setattr(own_workload.Regression, "example", lambda self: 1 / 0)
  assert workloads.describe(own_workload.Regression())["ops"] is None
  assert "no FLOPs of Regression" in caplog.text
