"""Model families outside the package and of images go through every command and resume."""

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

from nm_sparsity_jax import cli
from nm_sparsity_jax.core.trees import flatten
from nm_sparsity_jax.integrations import gin_files
from nm_sparsity_jax.runs import checkpoint, folders
from nm_sparsity_jax.trainer import workloads
from nm_sparsity_jax.trainer.images import rebus
from nm_sparsity_jax.training import configure, flops

pytest.importorskip("clu", reason="the local runner needs clu: pip install -e '.[local]'")
pytestmark = pytest.mark.filterwarnings("ignore")  # what it imports warns on its own account

with warnings.catch_warnings():
  warnings.simplefilter("ignore")
  from nm_sparsity_jax.trainer import checkpoints, evaluation, step, train

ROOT = pathlib.Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples" / "own_workload"
sys.path.append(str(EXAMPLE))
import own_workload  # noqa: E402

STEPS, MIDDLE = 16, 8
# All phases, and all that is drawn or kept beside parameters.
MACROS = dict(
  RECIPE="idp", PATTERN="1:8", SPARSE_STEPS=STEPS, DENSE_STEPS=4, FINETUNE_STEPS=4,
  EVAL_PERIOD=MIDDLE, CHECKPOINT_PERIOD=1, STATS_PERIOD=1, METRICS_EVERY=MIDDLE,
  KEEP_CHECKPOINTS=None, WARMUP_STEPS=1, LEARNING_RATE=0.02,
)  # fmt: skip
DATA = dict(DATA="rebus", BATCH_SIZE=8, LOSS="sigmoid", DROP_PATH=0.2)  # evaluations need it too
IMAGES = DATA | dict(
  SPARSITY_RULES={"conv": None}, MIXUP=0.5, CUTMIX=1.0, LABEL_SMOOTHING=0.1, CLIP_NORM=1.0,
  EMA_DECAY=0.5, EVAL_STEPS=2,
)  # fmt: skip
TINY = """
from __gin__ import dynamic_registration
from nm_sparsity_jax.models import resnet
include 'gin_configs/models/resnet.gin'
IMAGE_SIZE = 16
CLASSES = 10
resnet.config:
  name = 'resnet_test'
  depths = (1,)
  widths = (8,)
"""


class Run:
  """A whole run by the command, of an MLP of the example or of a tiny ResNet on images."""

  def __init__(self, name, folder):
    self.folder, self.own = folder / "run", name == "own"
    self.gin = EXAMPLE / "own_workload.gin" if self.own else folder / "tiny.gin"
    if not self.own:
      self.gin.write_text(TINY)

  def files(self, kind):
    run = f"local_{'workload' if self.own else 'images'}"
    optimizer = "local_adamw" if self.own else "local_images_adamw"
    names = [f"gin_configs/runs/{run}{kind}.gin", str(self.gin)]
    return names + [f"gin_configs/runs/{optimizer}.gin"] * (not kind)

  def macros(self, kind=""):
    return ({} if kind else MACROS) | ({} if self.own else DATA if kind else IMAGES)

  def words(self, kind="", **macros):
    """The flags of a command."""
    return [
      f"--gin_search_paths={gin_files.folder()}",
      *(f"--gin_file={name}" for name in self.files(kind)),
      *(f"--gin.{name}={value!r}" for name, value in (self.macros(kind) | macros).items()),
    ]

  def train(self, folder):
    return cli.main(["train", *self.words(MODEL_DIR=str(folder))])

  def call(self, name, path, out, **macros):
    where = dict(CHECKPOINT_PATH=str(path)) | {f"{name.upper()}_OUTPUT_DIR": str(out)}
    return cli.main([name, *self.words(f"_{name}", **where, **macros)])

  def model(self):
    bindings = [f"{name} = {value!r}" for name, value in self.macros().items()]
    with gin_files.Config(
      [gin_files.folder()], self.files(""), [*bindings, "MODEL_DIR = '-'"], "train"
    ) as config:
      return config.argument("run").model


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
  made = {}

  def get(name):
    if name not in made:
      made[name] = Run(name, tmp_path_factory.mktemp(name))
      assert made[name].train(made[name].folder) == 0
    return made[name]

  return get


@pytest.fixture(params=["own", "images"])
def run(request, runs):
  return runs(request.param)


def lines_of(folder, room="train"):
  return [json.loads(x) for x in (folder / room / "metrics.jsonl").read_text().splitlines()]


# --- every command ------------------------------------------------------------------------------


def test_it_trains_and_says_what_it_is(run, tmp_path):
  saved, metric = read(run.folder, STEPS), "absolute_error" if run.own else "accuracy"
  means = [x for k, x in saved.items() if k.startswith("flax_mutables/") and k.endswith("mean")]
  assert means and all(map(np.any, means)) and any("nm_sparsity/mask" in k for k in saved)
  assert any(k.startswith("state/average/target/") for k in saved) != run.own
  lines = lines_of(run.folder)
  assert {metric, "grad_norm", "update_norm", "learning_rate"} < set(lines[-1])
  assert [x["step"] for x in lines if "nm/density" in x] == [MIDDLE, STEPS]
  found = folders.evaluations(run.folder).values()
  assert [e["at_target"] for e in found] == [False, True]
  assert all(metric in e["metrics"]["validation"] for e in found)
  noted = json.loads((run.folder / "run.json").read_text())["workload"]
  assert noted["class"].endswith("own_workload.Regression" if run.own else ".vision.Images")
  params = sum(x.size for k, x in saved.items() if k.startswith("target/"))
  assert flops.Cost(tuple(flops.Op(**op) for op in noted["ops"])).params == params
  assert cli.main(["report", str(run.folder), "--out", str(tmp_path / "report.html")]) == 0


def test_the_average_is_that_of_parameters_and_statistics_after_each_update(runs):
  """By numpy, from the checkpoints of all steps; of kernels it is that of W."""
  at, dense = {i: read(runs("images").folder, i) for i in range(1, 5)}, "state/nm_sparsity/dense/"
  for saved in at.values():
    saved.update({k.replace(dense, "target/"): x for k, x in saved.items() if k.startswith(dense)})
  keys = [k for k in at[1] if k.startswith(("target/", "flax_mutables/batch_stats/"))]
  assert {f"state/average/{k}" for k in keys} == {k for k in at[1] if k.startswith("state/average")}
  for key in keys:
    average = at[1][f"state/average/{key}"]
    for i in range(2, 5):
      average = 0.5 * average + 0.5 * at[i][key]  # EMA_DECAY
      np.testing.assert_allclose(at[i][f"state/average/{key}"], average, rtol=1e-4, atol=1e-6)


def assert_same_run(folder, run):
  assert_same(read(folder, STEPS), read(run.folder, STEPS))
  for room in ("train", "training_eval/validation"):
    assert lines_of(folder, room) == lines_of(run.folder, room)
  assert folders.evaluations(folder) == folders.evaluations(run.folder)


def test_killed_and_resumed_it_has_the_same_bits(runs, tmp_path):
  run, folder = runs("own"), tmp_path / "run"
  flags = run.words(MODEL_DIR=str(folder))
  command = [sys.executable, "-m", "nm_sparsity_jax.cli", "train", *flags]
  env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(EXAMPLE), str(ROOT)])}
  env["JAX_NUM_CPU_DEVICES"] = str(jax.device_count())  # sums depend on it
  with subprocess.Popen(command, env=env, stderr=subprocess.DEVNULL) as process:
    while not folders.steps(folder)[1:] and process.poll() is None:
      time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
  assert process.returncode == -signal.SIGKILL and folders.steps(folder)[-1] < STEPS
  assert run.train(folder) == 0
  assert_same_run(folder, run)


def test_resumed_from_what_a_kill_leaves_it_has_the_same_bits(runs, tmp_path):
  """The checkpoints so far, and a part of the next."""
  run, folder, done = runs("images"), tmp_path / "run", 6
  shutil.copytree(run.folder, folder)
  for later in range(done + 1, STEPS + 1):
    shutil.rmtree(folder / f"checkpoint_{later}")
  (folder / f"checkpoint_{done + 1}.orbax-checkpoint-tmp-7/state").mkdir(parents=True)
  assert run.train(folder) == 0
  assert_same_run(folder, run)


def predicted(folder, split="validation"):
  text = (folder / f"{split}-predict.jsonl-00000-of-00001").read_text()
  return [json.loads(line) for line in text.splitlines()]


def test_eval_and_infer_say_what_the_run_says_of_a_checkpoint(run, tmp_path, capsys):
  middle, few = run.folder / f"checkpoint_{MIDDLE}", {} if run.own else dict(EVAL_STEPS=2)
  assert run.call("eval", middle, tmp_path / "e", **few) == 0
  assert ("the moving average of its parameters" in capsys.readouterr().out) != run.own
  (alone,) = lines_of(tmp_path / "e", "training_eval/validation")
  assert alone == lines_of(run.folder, "training_eval/validation")[0]

  assert run.call("infer", middle, tmp_path / "i") == 0
  rows = predicted(tmp_path / "i")
  splits = own_workload.Regression().splits() if run.own else rebus.Rebus(8).splits()
  batches, key = list(splits["validation"]), "y" if run.own else "label"
  wanted = np.concatenate([batch[key] for batch in batches])
  assert [row["inputs"]["idx"] for row in rows] == list(range(len(wanted)))
  said = np.array([row["prediction"]["output" if run.own else "label"] for row in rows])
  if run.own:
    assert np.abs(said - wanted).mean() == pytest.approx(alone["absolute_error"], rel=1e-4)
  else:
    assert (said == wanted)[:16].mean() == pytest.approx(alone["accuracy"])


def test_what_is_scored_is_finalized(run, tmp_path):
  """Without an average the parameters are n:m already; an average is one of dense weights."""
  end, model = f"checkpoint_{STEPS}", run.model()
  assert (cli.main(["verify", str(run.folder)]) == 0) == run.own
  assert cli.main(["verify", str(run.folder / f"checkpoint_{MIDDLE}")]) == 1
  assert cli.main(["finalize", str(run.folder), str(tmp_path)]) == 0
  assert cli.main(["verify", str(tmp_path)]) == 0
  load = lambda path: checkpoints.load_for_evaluation(checkpoint.read(path), model)
  final = load(str(tmp_path / end))
  jax.tree.map(np.testing.assert_array_equal, final, load(str(run.folder / end)))
  # A next run takes the finalized weights, or the dense average with a warning.
  start = lambda folder: checkpoints.load_initial(f"{folder}/{end}", model, jax.random.key(0))
  params, kept, number = start(tmp_path)
  jax.tree.map(np.testing.assert_array_equal, {"params": params, **kept}, final)
  assert number == STEPS
  with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    params, kept, _ = start(run.folder)
  assert any("not finalized" in str(w.message) for w in seen) != run.own
  saved, average = read(run.folder, STEPS), "" if run.own else "state/average/"
  for name, leaf in flatten({"target": params, "flax_mutables": kept}):
    np.testing.assert_array_equal(leaf, saved[average + name])


def test_a_run_goes_on_with_its_own_settings_alone(runs, capsys):
  run = runs("own")
  where = dict(MODEL_DIR=str(run.folder), PATTERN="1:4", LEARNING_RATE=0.5, STATS_PERIOD=3)
  before = {p: p.stat().st_mtime_ns for p in run.folder.rglob("*")}
  assert cli.main(["train", *run.words(**where)]) == 1
  said = capsys.readouterr().err
  assert "rate was 0.02, and is 0.5" in said and "pattern was '1:8', and is '1:4'" in said
  assert {p: p.stat().st_mtime_ns for p in run.folder.rglob("*")} == before


@pytest.mark.parametrize(
  "macros, word",
  [(dict(EVAL_SPLIT="tset"), "EVAL_SPLIT='tset'"), (dict(PATTERN="1:4"), "PATTERN='1:4'")],
)
def test_an_evaluation_that_does_not_fit_writes_nothing(macros, word, runs, tmp_path, capsys):
  path = runs("own").folder / f"checkpoint_{MIDDLE}"
  assert runs("own").call("eval", path, tmp_path / "new", **macros) == 1
  assert word in capsys.readouterr().err and not (tmp_path / "new").exists()
  assert runs("own").call("eval", path, path.parent) == 1
  assert "holds a run" in capsys.readouterr().err


# --- predictions --------------------------------------------------------------------------------


class Answers(own_workload.Regression):
  """Says of each row what JSON can hold; two rows of the last batch only fill it."""

  real = "real"

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


@pytest.mark.parametrize("scale, moved", [(2.0, 1.0), (2.0**-9, 1.0), (0.0, 0.0)])
def test_the_gradient_is_that_of_the_mean_however_small_the_weight(scale, moved):
  """Without any weight there is nothing to divide. State goes through each microbatch."""
  optimizer, key = optax.sgd(1.0), jax.random.PRNGKey(0)
  model = step.Model(Weighed(scale), devices=jax.devices()[:1])
  for parts in (1, 2):
    params, state = model.initial(key)
    state = model.begin(params, optimizer, 0, state)
    batch = model.put({"x": np.ones(4, np.float32)})
    state, sums = model.train_step(optimizer, key, parts)(state, batch)
    assert state.params["w"] == moved and sums["rows"] == 4 * scale
    assert state.collections["seen"]["rows"] == 4
  sums = {"loss": 2 * scale, "rows": scale}
  assert Weighed(scale).scalars(sums) == {"loss": 2.0 if scale else 0.0}


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
  assert {*seen} == {*rooms, "inference_eval/validation"}  # seqio writes files of the third
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
