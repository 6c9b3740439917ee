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
from nm_sparsity_jax.core.trees import flatten, map_with_names
from nm_sparsity_jax.integrations import gin_files
from nm_sparsity_jax.runs import checkpoint, folders
from nm_sparsity_jax.trainer import workloads
from nm_sparsity_jax.training import configure, flops

pytest.importorskip("clu", reason="the local runner needs clu: pip install -e '.[local]'")
pytestmark = [
  pytest.mark.filterwarnings("ignore"),  # what it imports warns on its own account
]

with warnings.catch_warnings():
  warnings.simplefilter("ignore")
  from nm_sparsity_jax.trainer import checkpoints, evaluation, step, train
  from nm_sparsity_jax.trainer import folders as local_folders

ROOT = pathlib.Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples" / "own_workload"
sys.path.append(str(EXAMPLE))
import own_workload  # noqa: E402

STEPS = 48
MACROS = dict(
  RECIPE="idp", PATTERN="1:8", SPARSE_STEPS=STEPS, DENSE_STEPS=4, FINETUNE_STEPS=4,
  EVAL_PERIOD=24, CHECKPOINT_PERIOD=4, STATS_PERIOD=4, METRICS_EVERY=12, KEEP_CHECKPOINTS=None,
  WARMUP_STEPS=1, LEARNING_RATE=0.01,
)  # fmt: skip


def words(run="local_workload", optimizer=True, **macros):
  """The flags of a command."""
  files = [f"gin_configs/runs/{run}.gin", str(EXAMPLE / "own_workload.gin")]
  files += ["gin_configs/runs/local_adamw.gin"] if optimizer else []
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
  assert set(found[0]["metrics"]["validation"]) == {"absolute_error"}
  noted = json.loads((trained / "run.json").read_text())["workload"]
  assert noted["class"] == "own_workload.Regression" and noted["weight"] == "examples"
  ops = tuple(flops.Op(**op) for op in noted["ops"])
  params = sum(x.size for k, x in saved.items() if k.startswith("target/"))
  assert flops.Cost(ops).params == params and noted["batch_size"] == 32


def test_killed_and_resumed_it_has_the_same_bits(trained, tmp_path, capfd):
  folder = tmp_path / "run"
  flags = words(**MACROS, MODEL_DIR=str(folder))
  command = [sys.executable, "-m", "nm_sparsity_jax.cli", "train", *flags]
  env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(EXAMPLE), str(ROOT)])}
  env["JAX_NUM_CPU_DEVICES"] = str(jax.device_count())  # sums depend on it
  with subprocess.Popen(command, env=env, stderr=subprocess.DEVNULL) as process:
    for _ in range(6000):
      if folders.steps(folder)[1:] or process.poll() is not None:
        break
      time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
  assert process.returncode == -signal.SIGKILL
  done = folders.steps(folder)
  assert done and done[-1] < STEPS
  assert cli.main(["train", *flags]) == 0
  out = capfd.readouterr().err
  assert f"from step {folders.steps(folder)[0]:,}" not in out and "examples/s" in out
  assert_same(read(folder, STEPS), read(trained, STEPS))
  for room in ("train", "training_eval/validation"):
    file = f"{room}/metrics.jsonl"
    assert (folder / file).read_text() == (trained / file).read_text()


def test_a_best_metric_that_no_split_has_is_refused_before_the_first_step(
  tmp_path, capsys, monkeypatch
):
  monkeypatch.setattr(train, "_steps", lambda *_: pytest.fail("a step was made"))
  flags = words(**MACROS, MODEL_DIR=str(tmp_path / "run"), BEST_METRIC="absolute_eror")
  assert cli.main(["train", *flags]) == 1
  said = "BEST_METRIC='absolute_eror' is not a metric of the tasks: absolute_error."
  assert said in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_an_evaluator_of_your_own_may_find_what_is_not_known_before():
  class Own(evaluation.Evaluator):
    def evaluate(self, variables, step):
      return evaluation.Found({}, {"validation": {"f1": 1.0}})

  assert Own.__new__(Own).metric_names({}) is None


def test_eval_says_the_same_of_a_checkpoint(trained, tmp_path, capsys):
  where = dict(CHECKPOINT_PATH=str(trained / "checkpoint_24"), EVAL_OUTPUT_DIR=str(tmp_path))
  flags = words("local_workload_eval", optimizer=False, **where)  # no rules: the checkpoint's
  assert cli.main(["eval", *flags]) == 0
  assert "validation: loss" in capsys.readouterr().out
  (alone,) = (tmp_path / "training_eval/validation/metrics.jsonl").read_text().splitlines()
  then = (trained / "training_eval/validation/metrics.jsonl").read_text().splitlines()[0]
  assert json.loads(alone) == json.loads(then)


def test_eval_refuses_a_flag_that_the_checkpoint_denies(trained, tmp_path, capsys):
  """The checkpoint holds the rules; before, each flag of the training had to be typed again."""
  where = dict(CHECKPOINT_PATH=str(trained / "checkpoint_24"), EVAL_OUTPUT_DIR=str(tmp_path / "e"))
  evaluated = lambda **rules: cli.main(
    ["eval", *words("local_workload_eval", optimizer=False, **rules, **where)]
  )
  for macro, wrong, has in (
    ("PATTERN", "1:4", "1:8"), ("RECIPE", "sr_ste", "idp"), ("DENSE_STEPS", 0, 4),
    ("SPARSE_STEPS", 99, STEPS),
  ):  # fmt: skip
    assert evaluated(**{macro: wrong}) == 1
    said = f"{macro}={wrong!r}, but {trained}/checkpoint_24 was trained with {has!r}: leave {macro}"
    assert said in capsys.readouterr().err
  assert not (tmp_path / "e").exists()
  agreeing = {k: MACROS[k] for k in ("RECIPE", "PATTERN", "SPARSE_STEPS", "DENSE_STEPS")}
  assert evaluated(**agreeing) == 0


def test_eval_spares_the_folder_of_a_run(trained, capsys):
  """It wrote over config.gin, and dropped the curves of later steps."""
  before = {p: p.read_bytes() for p in trained.rglob("*") if p.is_file()}
  where = dict(CHECKPOINT_PATH=str(trained / "checkpoint_24"), EVAL_OUTPUT_DIR=str(trained))
  assert cli.main(["eval", *words("local_workload_eval", optimizer=False, **where)]) == 1
  assert f"EVAL_OUTPUT_DIR='{trained}' holds a run" in capsys.readouterr().err
  assert {p: p.read_bytes() for p in trained.rglob("*") if p.is_file()} == before


def test_eval_spares_the_folder_of_a_run_of_t5x(tmp_path):
  """t5x.train and t5x.eval both write model-info.txt; only a run has checkpoints."""
  for name in ("config.gin", "model-info.txt"):
    (tmp_path / name).write_text("")
  local_folders.refuse_run(tmp_path, "EVAL_OUTPUT_DIR")
  (tmp_path / "checkpoint_3/state").mkdir(parents=True)
  (tmp_path / "checkpoint_3/state/_METADATA").write_text("{}")
  with pytest.raises(ValueError, match=r"^EVAL_OUTPUT_DIR='.*' holds a run, whose curves"):
    local_folders.refuse_run(tmp_path, "EVAL_OUTPUT_DIR")


def test_a_finished_run_is_n_m_before_finalize_and_one_under_way_is_not(trained, tmp_path, capsys):
  """Its parameters are what is deployed, so `finalize` removes nothing and a run may start."""
  model, key = model_of(), jax.random.PRNGKey(0)
  assert cli.main(["verify", str(trained)]) == 0
  assert cli.main(["verify", str(trained / "checkpoint_24")]) == 1
  assert "schedule" in capsys.readouterr().out
  assert cli.main(["finalize", str(trained), str(tmp_path / "final"), "--json"]) == 0
  told = json.loads(capsys.readouterr().out)
  assert {place["magnitude"] for place in told["places"]} == {0}
  files = [tmp_path / f"{name}.safetensors" for name in ("run", "final")]
  for source, file in zip((trained, tmp_path / "final"), files, strict=True):
    assert cli.main(["pack", str(source), str(file)]) == 0
  assert files[0].read_bytes() == files[1].read_bytes()
  load = lambda folder: checkpoints.load_initial(f"{folder}/checkpoint_{STEPS}", model, key)[0]
  with warnings.catch_warnings():
    warnings.simplefilter("error")
    jax.tree.map(np.testing.assert_array_equal, load(trained), load(tmp_path / "final"))


def predicted(folder, split="validation"):
  """The lines of a file of predictions."""
  text = (folder / f"{split}-predict.jsonl-00000-of-00001").read_text()
  return [json.loads(line) for line in text.splitlines()]


def mlp(params, stats, x):
  """What the example's network says, by numpy, from effective parameters."""
  for i in range(2):
    x, norm, seen = x @ params[f"hidden_{i}"]["kernel"], params[f"norm_{i}"], stats[f"norm_{i}"]
    x = (x - seen["mean"]) / np.sqrt(seen["var"] + 1e-5) * norm["scale"] + norm["bias"]
    x = np.maximum(x, 0)
  return (x @ params["out"]["kernel"])[:, 0]


def test_infer_writes_what_sparsified_parameters_say(trained, tmp_path, capsys):
  """Of a checkpoint in the middle, whose rules it holds, and of the finalized one."""
  infer = lambda path, folder, **macros: cli.main(
    ["infer", *words("local_workload_infer", optimizer=False, CHECKPOINT_PATH=str(path),
                     INFER_OUTPUT_DIR=str(folder), **macros)]
  )  # fmt: skip
  middle = trained / "checkpoint_24"
  assert infer(middle, tmp_path / "middle") == 0
  assert "validation: 64 predictions" in capsys.readouterr().out
  batches = own_workload.Regression().splits()["validation"]
  model = model_of(**{k.lower(): MACROS[k] for k in ("RECIPE", "PATTERN", "SPARSE_STEPS",
                   "DENSE_STEPS", "FINETUNE_STEPS")})  # fmt: skip
  found = checkpoints.load_for_evaluation(checkpoints.opened(str(middle), model), model)
  saved = read(trained, 24)
  kernel, dense = "hidden_1/kernel", {k.rpartition("dense/")[2]: saved[k] for k in saved}
  assert np.any(dense[kernel] != found["params"]["hidden_1"]["kernel"])
  w = map_with_names(lambda path, x: dense.get(path, x), found["params"])
  masks = checkpoint.read(str(middle)).masks()
  effective = nms.sparsify(w, model.rules, 24, masks)
  near = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6)  # updates are added: a last bit
  jax.tree.map(near, effective, found["params"])
  tree = jax.device_get((effective, found["batch_stats"]))
  wanted = np.concatenate([mlp(*tree, batch["x"]) for batch in batches])
  lines = predicted(tmp_path / "middle")
  assert [line["inputs"] for line in lines] == [{"idx": i} for i in range(64)]
  got = [line["prediction"]["output"] for line in lines]
  np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)

  assert cli.main(["finalize", str(trained), str(tmp_path / "final")]) == 0
  ends = [trained / f"checkpoint_{STEPS}", tmp_path / f"final/checkpoint_{STEPS}"]
  for i, path in enumerate(ends):
    assert infer(path, tmp_path / str(i), EVAL_SPLIT="validation") == 0
  assert predicted(tmp_path / "0") == predicted(tmp_path / "1") != lines
  assert infer(middle, tmp_path / "none", EVAL_SPLIT="tset") == 1
  said = "EVAL_SPLIT='tset' is not a split of Regression: choose one of validation"
  assert said in capsys.readouterr().err and not (tmp_path / "none").exists()


def rows_of(workload, **fields):
  """The rows that are predicted from new parameters."""
  model, key = model_of(workload), jax.random.PRNGKey(0)
  variables = {"params": model.initial_params(key), **model.initial_collections(key)}
  wanted = evaluation.Splits(**fields).for_predictions(workload)
  return {name: list(rows) for name, rows in wanted.evaluator(model, None).predictions(variables)}


class Answers(own_workload.Regression):
  """Predicts what it is told to."""

  def __init__(self, predict, **fields):
    super().__init__()
    self.says = predict
    for name, value in fields.items():
      setattr(self, name, value)

  def predict(self, params, state, batch):
    return self.says(batch)

  def splits(self):
    batch, last = ({"x": np.full((4, 16), float(i), np.float32)} for i in range(2))
    return {"test": [batch | {"real": np.ones(4)}, last | {"real": np.array([1, 0, 1, 0])}]}


def test_predictions_are_plain_and_rows_that_fill_a_batch_are_left_out():
  def says(batch):
    x = batch["x"]
    return {
      "class": jnp.argmax(x, 1), "half": jnp.bfloat16(x[:, :2] / 2), "sure": x[:, 0] > 0.5,
    }  # fmt: skip

  first = {"class": 0, "half": [0.0, 0.0], "sure": False}
  last = {"class": 0, "half": [0.5, 0.5], "sure": True}
  rows = lambda count: [({"idx": i}, first if i < 4 else last) for i in range(count)]
  assert rows_of(Answers(says, real="real")) == {"test": rows(6)}
  assert rows_of(Answers(says)) == {"test": rows(8)}
  two = Answers(says, splits=lambda: dict.fromkeys(("dev", "test"), Answers(says).splits()["test"]))
  assert rows_of(two) == {"dev": rows(8), "test": rows(8)}
  assert rows_of(two, split="test") == {"test": rows(8)}
  assert len(rows_of(two, split="test", batches=1)["test"]) == 4


def test_predictions_that_cannot_be_written_are_refused(tmp_path):
  class Silent(own_workload.Regression):
    predict = workloads.Workload.predict

  where = str(tmp_path / "checkpoint_1"), str(tmp_path / "out")
  with pytest.raises(ValueError, match="^Silent lacks predict: define predict.params, state, batc"):
    train.infer(model_of(Silent()), evaluation.Splits(), *where)
  assert not list(tmp_path.iterdir())
  for says, fields, said in (
    (lambda b: {"y": jnp.mean(b["x"], 0)}, {}, r"'y' of shape \(16,\) for a batch of 4 rows"),
    (lambda b: {"y": jnp.mean(b["x"])}, {}, r"'y' of shape \(\) for a batch of 4 rows"),
    (lambda b: b["x"], {}, "^Answers.predict returned .*: give a mapping, name -> an array"),
    (lambda b: {}, {}, "^Answers.predict returned {}: give a mapping"),
    (
      lambda b: {"y": jnp.complex64(b["x"])},
      {},
      "'y' of dtype complex64: a file of predictions holds real",
    ),
    (lambda b: {"y": 1 / (b["x"] - 1)}, {}, "'y' that is not finite for example 4 of 'test'"),
    (lambda b: b, {"real": "rael"}, "Answers.real is 'rael', but a batch of 'test' has no such"),
    (lambda b: b, {"real": "x"}, r"Answers.real: 'x' of 'test' has the shape \(4, 16\)"),
    (lambda b: b, {"splits": lambda: {"test": []}}, "the split 'test' has no examples"),
  ):
    with pytest.raises(ValueError, match=said):
      rows_of(Answers(says, **fields))


def test_plan_refuses_to_infer_what_has_no_predict(trained, tmp_path, capsys, monkeypatch):
  where = dict(CHECKPOINT_PATH=str(trained / "checkpoint_24"), INFER_OUTPUT_DIR=str(tmp_path / "p"))
  command = ["plan", "--json", *words("local_workload_infer", optimizer=False, **where)]
  assert cli.main(command) == 0
  report = json.loads(capsys.readouterr().out)
  assert report["program"] == "infer" and report["cost"]["training"] is None
  monkeypatch.delattr(own_workload.Regression, "predict")
  assert cli.main(command) == 1
  assert "Regression lacks predict: define" in capsys.readouterr().out


def test_finalize_and_verify(trained, tmp_path, capsys):
  final = tmp_path / "final"
  assert cli.main(["finalize", str(trained), str(final)]) == 0
  assert cli.main(["verify", str(final), "--json"]) == 0
  saved = read(final, STEPS)
  kernel = saved["target/hidden_1/kernel"].reshape(4, 8, 32)
  assert (np.count_nonzero(kernel, axis=1) <= 1).all() and np.count_nonzero(
    saved["target/out/kernel"]
  )
  before = read(trained, STEPS)
  for key in (k for k in before if "batch_stats" in k):  # what an evaluation of it needs
    np.testing.assert_array_equal(saved[key], before[key])


def test_plan(tmp_path, capsys):
  assert cli.main(["plan", "--json", *words(**MACROS, MODEL_DIR=str(tmp_path / "run"))]) == 0
  report = json.loads(capsys.readouterr().out)
  kernels = {k["path"]: k for k in report["kernels"]["sparse"]}
  assert sum(k["count"] for k in kernels.values()) == 2 and report["program"] == "train"
  once = report["cost"]["inference"]
  hidden = 2 * (16 * 32 + 32 * 32)
  assert once == {"dense": hidden + 2 * 32, "sparse": hidden / 8 + 2 * 32}
  odd = words(**MACROS, MODEL_DIR=str(tmp_path / "run"), BATCH_SIZE=15, MICROBATCHES=2)
  assert cli.main(["plan", "--json", *odd]) == 1
  assert "BATCH_SIZE=15 must be a multiple" in capsys.readouterr().out


def test_plan_asks_for_the_example_that_a_run_notes(trained, tmp_path, capsys, monkeypatch):
  """It was asked for the lengths that a T5 usually has."""
  asked = []
  monkeypatch.setattr(
    own_workload.Regression, "example", lambda self, lengths=None: asked.append(lengths)
  )
  assert cli.main(["plan", "--json", *words(**MACROS, MODEL_DIR=str(tmp_path / "run"))]) == 0
  noted = json.loads((trained / "run.json").read_text())["workload"]["lengths"]
  assert asked == [noted] == [None]


def test_a_run_does_without_flops_where_its_code_fails(monkeypatch, caplog):
  monkeypatch.setattr(own_workload.Regression, "example", lambda self, lengths=None: 1 / 0)
  assert workloads.describe(own_workload.Regression())["ops"] is None
  assert "no FLOPs of Regression" in caplog.text


def test_plan_for_people(tmp_path, capsys):
  macros = MACROS | dict(RECIPE="sr_ste", MODEL_DIR=str(tmp_path / "run"))
  assert cli.main(["plan", *words(**macros)]) == 0
  text = capsys.readouterr().out
  assert "FLOPs (" in text and "for one example" in text
  assert "0.0002 of the mean loss over examples (hidden)" in text


def test_report(trained, tmp_path):
  page = tmp_path / "report.html"
  assert cli.main(["report", str(trained), "--out", str(page)]) == 0
  text = page.read_text()
  assert "validation" in text and "FLOPs" in text


# A dense run beside the sparse ones: test_sweep.py has it of runs that are not trained.
@pytest.mark.parametrize("dense", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_sweep(dense, tmp_path, capsys, monkeypatch):
  monkeypatch.chdir(tmp_path)
  for name in ("own_workload.py", "own_workload.gin"):
    shutil.copy(EXAMPLE / name, tmp_path)
  files = [f"gin_configs/runs/{run}.gin" for run in ("local_workload", "local_adamw")]
  files.insert(1, "own_workload.gin")
  pathlib.Path("sweep.toml").write_text(
    f"out = 'runs'\ngin_files = {files}\nrecipes = ['sr_ste']\npatterns = ['1:4']\n"
    f"dense = {str(dense).lower()}\nseeds = [0]\nbaseline = 'sr_ste'\n"
    "[macros]\nSPARSE_STEPS = 4\nEVAL_PERIOD = 4\nSTATS_PERIOD = 2\nMETRICS_EVERY = 2\n"
  )
  assert cli.main(["sweep", "sweep.toml"]) == 0
  capsys.readouterr()
  assert cli.main(["sweep", "sweep.toml", "--json"]) == 0
  report = json.loads(capsys.readouterr().out)
  assert report["done"] == 1 + dense and all(row["loss"]["mean"] > 0 for row in report["rows"])


# --- the step -----------------------------------------------------------------------------------


def model_of(workload=None, devices=1, **rules):
  rules = dict(recipe="snip", pattern="1:4", sparse_steps=8, dense_steps=2) | rules
  return step.Model(
    workload=workload or own_workload.Regression(),
    rules=configure.rules({"hidden": None}, **rules),
    devices=jax.devices()[:devices],
  )


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
  optimizer = optax.sgd(0.0)
  batch = model.put(next(own_workload.Regression().batches(0, 0)))
  found = {}
  for parts in (1, 4):
    state = model.begin(model.initial_params(key), optimizer, 0, model.initial_collections(key))
    state, sums = model.train_step(optimizer, key, state, parts)(state, batch)
    found[parts] = jax.device_get(state.collections["batch_stats"])
    assert sums.values[sums.names.index("examples")] == 32
  one, four = found[1]["norm_0"]["mean"], found[4]["norm_0"]["mean"]
  # Four steps of momentum 0.9 toward means whose mean is the batch's.
  np.testing.assert_allclose(np.linalg.norm(four) / np.linalg.norm(one), 0.3439 / 0.1, rtol=0.1)


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


@pytest.mark.parametrize("parts", [1, 2])
def test_the_gradient_is_that_of_the_mean_however_small_the_weight(parts):
  """Before, a weight below 1 scaled the gradient; without any weight there is nothing to divide."""
  optimizer, key = optax.sgd(1.0), jax.random.PRNGKey(0)
  for scale, moved in ((2.0, 1.0), (2.0**-9, 1.0), (0.0, 0.0)):
    model = step.Model(
      Weighed(scale), nms.Rules({".*": nms.recipe("dense")}), devices=jax.devices()[:1]
    )
    state = model.begin(model.initial_params(key), optimizer, 0)
    batch = model.put({"x": np.ones(4, np.float32)})
    state, _ = model.train_step(optimizer, key, state, parts)(state, batch)
    assert state.params["w"] == moved
  mean = workloads.Workload.scalars
  assert mean(Weighed(1), {"loss": 0.5, "rows": 0.25}) == {"loss": 2.0}
  assert mean(Weighed(1), {"loss": 0.0, "rows": 0.0}) == {"loss": 0.0}


def test_rules_that_no_checkpoint_can_keep_are_refused_before_the_first_step(tmp_path):
  for place, why in (
    (".*|a\nb", "a checkpoint cannot keep the rule"),
    (".*|" + LONG, "takes .* bytes"),
  ):
    model = step.Model(
      Weighed(1), nms.Rules({place: nms.recipe("dense")}), devices=jax.devices()[:1]
    )
    with pytest.raises(ValueError, match=why):
      run_of(tmp_path, model).check()


LONG = "".join(map(chr, np.random.default_rng(0).integers(0x4E00, 0x9F00, 4000)))


def test_a_fine_tune_takes_the_state_of_its_checkpoint(trained):
  model, key = model_of(), jax.random.PRNGKey(5)
  path = str(trained / f"checkpoint_{STEPS}")
  _, kept, number = checkpoints.load_initial(path, model, key)
  saved = read(trained, STEPS)
  assert number == STEPS
  got = {f"flax_mutables/{k}": x for k, x in flatten(jax.device_get(kept))}
  assert_same(got, {k: x for k, x in saved.items() if "batch_stats" in k})


# --- what is incomplete -------------------------------------------------------------------------


def test_what_lacks_a_method_is_named():
  class Half(workloads.Workload):
    def init(self, rng): ...
    def batches(self, seed, start): ...

  class Alien:
    init = loss = batches = splits = lambda self: None

  with pytest.raises(ValueError, match="^Half lacks loss and splits: define them. A workload"):
    workloads.of(Half())
  with pytest.raises(ValueError, match="Alien must be a subclass of"):
    workloads.of(Alien())
  with pytest.raises(ValueError, match=r"^Half is a class, .* an object: write Half\(\), in gin @"):
    workloads.of(Half)
  with pytest.raises(ValueError, match="NoneType lacks init, loss, batches and splits: define"):
    step.Model()
  with pytest.raises(ValueError, match="z_loss: Regression is a workload with its own loss"):
    step.Model(workload=own_workload.Regression(), z_loss=0.1)
  with pytest.raises(ValueError, match="a network, Half, and a workload, Regression: bind one"):
    step.Model(Half(), workload=own_workload.Regression())


def test_a_loss_without_its_weight_is_named(tmp_path):
  class Careless(own_workload.Regression):
    def loss(self, *arguments):
      loss, sums, state = super().loss(*arguments)
      return loss, {"absolute_error": sums["absolute_error"]}, state

  with pytest.raises(ValueError, match="Careless.loss must return the sum 'examples'"):
    train.train(run_of(tmp_path, model_of(Careless())))


def test_a_sum_under_the_name_of_the_loss_is_refused(tmp_path):
  class Doubled(own_workload.Regression):
    def loss(self, *arguments):
      loss, sums, state = super().loss(*arguments)
      return loss, {**sums, "loss": loss}, state

  with pytest.raises(ValueError, match="^Doubled.loss returns a sum 'loss', the name of"):
    train.train(run_of(tmp_path, model_of(Doubled())))


def test_what_a_run_needs_of_a_workload_is_named(tmp_path):
  class Sizeless(own_workload.Regression):
    def __init__(self):
      super().__init__()
      self.batch_size = None

  class Taken(own_workload.Regression):
    def init(self, rng):
      return {**super().init(rng), "nm_sparsity": {"step": jnp.int32(0)}}

  with pytest.raises(ValueError, match="Sizeless has no batch_size: set it"):
    run_of(tmp_path, model_of(Sizeless())).check()
  with pytest.raises(ValueError, match="Taken: the collection 'nm_sparsity' is the runner's own"):
    model_of(Taken())
  with pytest.raises(ValueError, match="EVAL_STEPS=0: batches of each split"):
    evaluation.Splits(batches=0)


def test_a_workload_is_required(tmp_path, capsys):
  files = ["local_workload", "local_adamw"]
  flags = [f"--gin_file=gin_configs/runs/{name}.gin" for name in files]
  flags += [f"--gin.{k}={v!r}" for k, v in (MACROS | {"MODEL_DIR": str(tmp_path)}).items()]
  assert cli.main(["train", *flags]) == 1
  assert "WORKLOAD is not set" in capsys.readouterr().err
