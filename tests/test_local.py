"""The local runner: what it learns, and that nothing that ends a process changes the result."""

import dataclasses
import functools
import gc
import itertools
import json
import os
import pathlib
import resource
import shutil
import signal
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
from nm_sparsity_jax.core.trees import flatten, nested
from nm_sparsity_jax.models.t5 import network
from nm_sparsity_jax.runs import checkpoint, folders
from nm_sparsity_jax.training import configure

pytest.importorskip("seqio", reason="the local runner needs seqio: pip install -e '.[local]'")
# seqio, TensorFlow, clu and Orbax warn on their own account.
pytestmark = pytest.mark.filterwarnings("ignore")

with warnings.catch_warnings():
  warnings.simplefilter("ignore")
  import t5x_task  # registers the task

  from nm_sparsity_jax.trainer import checkpoints, data, evaluation, reports, step, train
  from nm_sparsity_jax.trainer import text_evaluation as text
  from nm_sparsity_jax.trainer.workloads.t5 import T5

LENGTHS = {"inputs": 8, "targets": 8}
SIZES = dict(
  vocab_size=384, emb_dim=16, num_heads=2, num_encoder_layers=1, num_decoder_layers=1, head_dim=8,
  mlp_dim=32,
)  # fmt: skip
# 8 dense steps, 3 levels until 20, then the target.
IDP = dict(recipe="idp", pattern="1:8", sparse_steps=24, dense_steps=8, finetune_steps=4)
SR_STE = dict(recipe="sr_ste", pattern="1:4", dense_steps=0, fields={"lam": 0.5})
DENSE = dict(recipe="dense", pattern=None, dense_steps=0, finetune_steps=0)
MODELS = {}
ADAMW = optax.adamw(0.01)
EVALUATION = text.Evaluation(name="nm_test_sort", batch_size=32, lengths=LENGTHS)


@pytest.fixture(autouse=True, scope="module")
def no_model_stays():
  yield
  MODELS.clear()
  gc.collect()  # what Orbax never awaited warns here, not in another file's tests


class Model(step.Model):
  """A model that traces its step once, where each run would trace it anew."""

  def train_step(self, optimizer, rng, microbatches=1):
    key, made = (optimizer, str(rng), microbatches), vars(self).setdefault("made", {})
    if key not in made:
      made[key] = super().train_step(optimizer, rng, microbatches)
    return made[key]


def model_of(devices=1, partitions=1, dropout=0.0, dtype="float32", source=None, **rules):
  source = source or source_of()
  key = repr((devices, partitions, dropout, dtype, source, sorted(rules.items())))
  if key not in MODELS:
    config = network.T5Config.t5_1_1("tiny", **SIZES, dropout_rate=dropout, dtype=dtype)
    rules = configure.rules({"ff": None}, **(IDP | rules))
    family = T5(network.Transformer(config), source)
    chosen = jax.devices()[:devices]
    MODELS[key] = Model(family, rules, num_partitions=partitions, devices=chosen)
  return MODELS[key]


def source_of(**fields):
  return data.Source(**(dict(name="nm_test_sort", lengths=LENGTHS, batch_size=16) | fields))


def run_of(folder, model=None, **fields):
  fields = dict(
    optimizer=ADAMW, sparse_steps=24, keep_checkpoints=None,
    periods=train.Periods(evaluate=100, checkpoint=6, report=1, metrics=None),
  ) | fields  # fmt: skip
  return train.Run(model=model or model_of(), model_dir=str(folder), **fields)


def at_step(number, do):
  """A learning rate, which is asked for at every report, that does something at one step."""
  return lambda done: do() or 0.0 if done == number else 0.0


def killed_at(number, how=signal.SIGTERM):
  return at_step(number, lambda: os.kill(os.getpid(), how))


def lines(folder, room="train"):
  return [json.loads(x) for x in (folder / room / "metrics.jsonl").read_text().splitlines()]


# --- the thread --------------------------------------------------------------------------------


def test_learns_dense_then_sparse_from_that_checkpoint(tmp_path, capfd):
  dense, sparse = tmp_path / "dense", tmp_path / "sparse"
  packed = source_of(pack=True)
  steps = train.Periods(evaluate=60, report=20, metrics=None)
  model = model_of(source=packed, **DENSE, sparse_steps=120)
  assert train.train(run_of(dense, model, sparse_steps=120, periods=steps)) == 0
  assert lines(dense)[-1]["loss"] < 0.3 < 2 < lines(dense)[0]["loss"]

  model = model_of(source=packed, **(SR_STE | dict(sparse_steps=60, dense_steps=30)),
                   finetune_steps=0)  # fmt: skip
  steps = train.Periods(evaluate=20, report=20, metrics=20)
  start = dict(initial_checkpoint=str(dense / "checkpoint_120"), pretrained_steps=120)
  run = run_of(sparse, model, sparse_steps=60, periods=steps, evaluation=EVALUATION,
               keep_checkpoints=1, **start)  # fmt: skip
  assert train.train(run) == 0
  # The step goes on; a checkpoint of the dense phase is never the best.
  found = {e["step"]: e for e in json.loads((sparse / "evaluations.json").read_text())}
  assert [e["at_target"] for e in found.values()] == [False, True, True]
  best = min((160, 180), key=lambda s: found[s]["loss"]["nm_test_sort"])
  assert set(folders.steps(sparse)) == {best, 180}
  assert lines(sparse)[1]["loss"] < 0.5  # started from the dense weights
  sampled = [x for x in lines(sparse) if "nm/density" in x]
  assert [(x["step"], x["nm/density"]) for x in sampled] == [(140, 1), (160, 0.25), (180, 0.25)]
  names = {"nm/D", "nm/n/ff", "nm/m/ff", "nm/flip_rate/all", "nm/second_moment_var/all"}
  assert names < set(sampled[0])

  # What seqio and T5X would have written.
  (scores,) = (sparse / "inference_eval").glob("nm_test_sort-metrics.jsonl")
  scores = [json.loads(x) for x in scores.read_text().splitlines()]
  assert [x["step"] for x in scores] == [140, 160, 180]
  assert scores[-1]["letters"] == found[180]["metrics"]["nm_test_sort"]["letters"] > 0.2
  assert list((sparse / "training_eval/nm_test_sort").glob("events.*"))

  # The files prove n:m.
  saved = read(sparse, 180)
  params = {k.removeprefix("target/"): v for k, v in saved.items() if k.startswith("target/")}
  assert nms.verify(nested(params), model.rules).ok
  assert (int(saved["state/step"]), int(saved["state/nm_sparsity/step"])) == (180, 60)
  out = capfd.readouterr().err
  assert "step 160/180  loss" in out and "1:4  density 0.25" in out and "left" in out

  # `evaluate` says the same of the same checkpoint; `infer` writes what was judged there.
  checkpoint, room = str(sparse / "checkpoint_180"), "training_eval/nm_test_sort"
  assert train.evaluate(model, EVALUATION, checkpoint, str(tmp_path / "e")) == 0
  assert lines(tmp_path / "e", room)[0] == lines(sparse, room)[-1]
  assert train.infer(model, EVALUATION, checkpoint, str(tmp_path / "i"), "# it") == 0
  assert (tmp_path / "i/config.gin").read_text() == "# it"
  text = (tmp_path / "i/nm_test_sort-predict.jsonl-00000-of-00001").read_text()
  rows = [json.loads(x) for x in text.splitlines()]
  targets = ["".join(sorted(x["inputs"]["inputs_pretokenized"])) for x in rows]
  letters = t5x_task.letters_in_place(targets, [x["prediction"] for x in rows])
  assert letters == {"letters": scores[-1]["letters"]} and len(rows) == 32
  with pytest.raises(ValueError, match="TASK_FEATURE_LENGTHS"):
    train.infer(model, dataclasses.replace(EVALUATION, lengths=None), checkpoint, str(tmp_path))
  with pytest.raises(ValueError, match="was trained with the rules"):
    train.evaluate(model_of(), EVALUATION, checkpoint, str(tmp_path / "o"))


# --- resume ------------------------------------------------------------------------------------


def hard():
  return model_of(dropout=0.1, source=source_of(pack=True))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
  """An uninterrupted run: idp, packed data, dropout, microbatches."""
  folder = tmp_path_factory.mktemp("whole")
  assert train.train(run_of(folder, hard(), microbatches=2)) == 0
  return folder, read(folder, 24)


def test_resumed_is_uninterrupted_bit_for_bit(whole, tmp_path):
  """Stopped at the end of the dense phase, where a level begins, and within one."""
  go = lambda **fields: train.train(run_of(tmp_path, hard(), microbatches=2, **fields))
  for number, how in ((8, signal.SIGTERM), (11, signal.SIGINT), (16, signal.SIGTERM)):
    code = 130 if how == signal.SIGINT else 0
    assert go(learning_rate=killed_at(number - 1, how)) == code
    assert number <= folders.steps(tmp_path)[-1] <= number + 3  # some steps were under way
    # What is saved in the background is that step, though later ones were given its buffers.
    if number == 8:
      assert_same(read(tmp_path, 6), read(whole[0], 6))
  assert go() == 0
  assert_same(read(tmp_path, 24), whole[1])
  losses = lambda folder: [(x["step"], x["loss"]) for x in lines(folder)]
  assert losses(tmp_path) == losses(whole[0])
  noted = json.loads((tmp_path / "run.json").read_text())
  assert noted["processes"][0]["environment"]["jax"] == jax.__version__ and noted["start"] == 0


def test_a_mixture_resumes_on_several_devices(tmp_path):
  """A frozen mask that lies on several devices comes back whole; so does the order of tasks."""
  rules = dict(recipe="snip", fields={"batches": 3})
  model = model_of(4, 2, source=source_of(name="tests_mixed"), **rules)
  assert train.train(run_of(tmp_path / "whole", model)) == 0
  assert train.train(run_of(tmp_path / "part", model, learning_rate=killed_at(12))) == 0
  assert 12 < folders.steps(tmp_path / "part")[-1] < 24
  assert train.train(run_of(tmp_path / "part", model)) == 0
  saved = read(tmp_path / "whole", 24)
  assert_same(read(tmp_path / "part", 24), saved)
  assert any("/mask/" in k and k.endswith("wo/kernel") for k in saved)


def test_one_process_at_a_time(tmp_path):
  """A second one would remove the checkpoint that the first is writing."""
  found = []

  def another():
    with pytest.raises(ValueError, match="another process"):
      train.train(run_of(tmp_path))
    found.append(True)

  assert train.train(run_of(tmp_path, learning_rate=at_step(6, another))) == 0 and found


@pytest.mark.parametrize("at, how, code", [(12, signal.SIGTERM, 0), (24, signal.SIGINT, 130)])
def test_stopped_in_an_evaluation(at, how, code, tmp_path, capsys, monkeypatch):
  """It ends at once, at the last step too, and the same command evaluates what is saved."""
  steps = train.Periods(evaluate=12, report=12, metrics=None)
  run, original = run_of(tmp_path, periods=steps, evaluation=EVALUATION), text.Evaluator._decoded

  def decoded(*args):
    if len(folders.evaluations(tmp_path)) == at // 12 - 1:
      os.kill(os.getpid(), how)
      pytest.fail("the evaluation goes on")
    return original(*args)

  with monkeypatch.context() as patch:
    patch.setattr(text.Evaluator, "_decoded", decoded)
    assert train.train(run) == code
  assert f"{how.name}: saved checkpoint_{at}" in capsys.readouterr().err
  assert at not in folders.evaluations(tmp_path) and not folders.is_done(tmp_path, 24)
  assert train.train(run) == 0
  assert list(folders.evaluations(tmp_path)) == [12, 24] and folders.is_done(tmp_path, 24)


def test_the_best_stays_when_the_run_goes_on(tmp_path):
  model = model_of(recipe="one_shot", dense_steps=1, finetune_steps=0)
  steps = train.Periods(evaluate=8, checkpoint=4, report=1, metrics=None)
  losses = dataclasses.replace(EVALUATION, num_examples=0)  # they alone say what is best
  fields = dict(periods=steps, evaluation=losses, keep_checkpoints=1)
  for number in (10, 13):
    assert train.train(run_of(tmp_path, model, learning_rate=killed_at(number - 1), **fields)) == 0
    assert set(folders.steps(tmp_path)[:-1]) == {8}
  assert train.train(run_of(tmp_path, model, **fields)) == 0
  found = {at: e["loss"]["nm_test_sort"] for at, e in folders.evaluations(tmp_path).items()}
  assert set(folders.steps(tmp_path)) == {min(found, key=found.get), 24}


# --- what goes wrong ---------------------------------------------------------------------------


def test_a_number_that_is_not_finite_stops_the_run(tmp_path):
  rate = lambda count: jnp.where(count == 9, jnp.nan, 0.01)
  run = run_of(tmp_path, optimizer=optax.adamw(rate))
  with pytest.raises(ValueError, match="update of step 10 .* good step is 9, .* checkpoint_6"):
    train.train(run)
  assert folders.steps(tmp_path) == [6] and lines(tmp_path)[-1]["step"] == 9


@pytest.mark.parametrize("size, what", [(20_000, "checkpoint_12"), (300, "curves or scores")])
def test_a_full_disk_loses_nothing(size, what, whole, tmp_path):
  limits = resource.getrlimit(resource.RLIMIT_FSIZE)

  def fill():
    while folders.steps(tmp_path) != [6]:
      time.sleep(0.01)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))

  run = run_of(tmp_path, hard(), learning_rate=at_step(8, fill), microbatches=2)
  try:
    with pytest.raises(ValueError, match=f"{what}.* could not be written .*checkpoint_6"):
      train.train(run)
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
  assert train.train(run_of(tmp_path, hard(), microbatches=2)) == 0
  assert_same(read(tmp_path, 24), whole[1])
  assert [x["step"] for x in lines(tmp_path)] == list(range(1, 25))
  assert not [p for p in tmp_path.iterdir() if "tmp" in p.name]


def test_a_truncated_checkpoint_is_named(whole, tmp_path):
  """Whichever of its files is cut in half, nothing that is wrong is returned."""
  model, found = hard(), 0
  like = model.state_like(ADAMW)
  shutil.copytree(whole[0] / "checkpoint_18", tmp_path / "checkpoint_18")
  files = [p for p in (whole[0] / "checkpoint_24").rglob("*") if p.is_file() and p.stat().st_size]
  for file in files:
    shutil.copytree(whole[0] / "checkpoint_24", tmp_path / "checkpoint_24", dirs_exist_ok=True)
    cut = tmp_path / file.relative_to(whole[0])
    cut.write_bytes(cut.read_bytes()[: cut.stat().st_size // 2])
    try:
      with checkpoints.Checkpoints(tmp_path, None) as store:
        state = store.restore(24, like, model)
    except ValueError as e:
      found += 1
      assert "checkpoint_24 cannot be read" in str(e) and "from checkpoint_18" in str(e)
    else:  # a file that nothing depends on
      tree = checkpoints.to_tree(state, model.rules)
      assert_same(jax.device_get(dict(flatten(tree))), whole[1])
    gc.collect()  # what Orbax began and never awaited warns here, where warnings are expected
  assert found >= 3


GIN = ["local_train.gin", "local_adamw.gin"]
MACROS = dict(RECIPE="sr_ste", PATTERN="1:4", SPARSE_STEPS=9)


def command(*names, **macros):
  root = pathlib.Path(__file__).resolve().parents[1]
  files = [f"gin_configs/runs/{name}" for name in names] + ["tests/local_tiny.gin"]
  return [
    f"--gin_search_paths={root}", *(f"--gin_file={name}" for name in files),
    *(f"--gin.{name}={value!r}" for name, value in macros.items()),
  ]  # fmt: skip


@pytest.mark.parametrize(
  "change, words",
  [
    (dict(MODEL_DIR="/dev/null/run"), "Not a directory"),
    (dict(MIXTURE_OR_TASK_NAME="nm_test_sor"), "did you mean nm_test_sort?"),
    (dict(BATCH_SIZE=15), "BATCH_SIZE=15 must be a multiple"),
    (dict(NUM_PARTITIONS=3), "NUM_PARTITIONS=3 does not divide"),
    (dict(VOCAB_SIZE=128), "Set VOCAB_SIZE=384"),
    (dict(DECODER="beams"), "DECODER='beams'"),
    (dict(LEARNING_RATE_FACTORS="constant * cosine"), "FACTORS='constant * cosine'"),
    (dict(SPARSE_STEPS=None, RECIPE="dense"), "SPARSE_STEPS=None"),
    (dict(EVAL_PERIOD=0), "EVAL_PERIOD=0"),
    (dict(MIXTURE_OR_TASK_MODULE="no_such.one"), "no_such"),
    (dict(INITIAL_CHECKPOINT_PATH="none/checkpoint_7"), "none/checkpoint_7"),
  ],
  ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_mistakes_are_one_line(change, words, tmp_path, capsys):
  macros = MACROS | dict(MODEL_DIR=str(tmp_path / "a/run")) | change
  assert cli.main(["train", *command(*GIN, **macros)]) == 1
  error = capsys.readouterr().err
  assert words in error and len(error.splitlines()) == 1, error
  assert not list(tmp_path.iterdir())
  # `plan` says the same before; how many devices there will be it cannot know.
  cli.main(["plan", "--json", *command(*GIN, **macros)])
  report = json.loads(capsys.readouterr().out)
  if "NUM_PARTITIONS" in change:
    assert report["ok"] and "NUM_PARTITIONS is not checked" in " ".join(report["notes"])
  else:
    assert not report["ok"] and any(words in text for text in report["errors"]), report["errors"]


@pytest.mark.parametrize("program", ["train", "evaluate", "infer"])
def test_a_late_refusal_leaves_what_is_in_the_folder(program, tmp_path):
  """It is seen when the folder is held; config.gin there may be the user's."""
  (tmp_path / "config.gin").write_text("mine")
  start = str(tmp_path / "start/checkpoint_3")
  checkpoint.write(start, {"target": {"w": np.zeros(3, "float32")}})
  with pytest.raises(ValueError, match="another model"):
    if program == "train":
      train.train(run_of(tmp_path, initial_checkpoint=start), config="theirs")
    else:
      getattr(train, program)(model_of(**DENSE), EVALUATION, start, str(tmp_path), "theirs")
  assert (tmp_path / "config.gin").read_text() == "mine"


# --- the step ----------------------------------------------------------------------------------


def stepped(model, microbatches=1, steps=3):
  """Parameters and losses after some steps of sr_ste on the first batches."""
  optimizer, key = optax.sgd(0.1), jax.random.PRNGKey(1)
  state = model.begin(model.initial(jax.random.PRNGKey(0))[0], optimizer, 0)
  step_of = model.train_step(optimizer, key, microbatches)
  batches, losses = model.workload.batches(0, 0), []
  for _ in range(steps):
    state, sums = step_of(state, model.put(next(batches)))
    assert set(sums) == {"loss", "z_loss", "correct", "tokens", "grad_norm", "update_norm"}
    losses.append([float(sums[name]) for name in ("loss", "z_loss", "correct", "tokens")])
  return jax.device_get(state.params), losses


@pytest.fixture(scope="module")
def one_device():
  return stepped(model_of(**SR_STE))


@pytest.mark.parametrize("devices, partitions, microbatches", [(1, 1, 4), (8, 2, 2)])
def test_microbatches_and_devices_change_nothing(devices, partitions, microbatches, one_device):
  params, losses = one_device
  model = model_of(devices, partitions, **SR_STE)
  got, got_losses = stepped(model, microbatches)
  np.testing.assert_allclose(got_losses, losses, rtol=1e-5)
  jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), got, params)
  if partitions == 2:
    specs = dict(flatten(model.shardings(model.shapes)))
    assert specs["encoder/layers_0/mlp/wo/kernel"].spec == jax.P("model", None)


def test_the_step_is_what_the_parts_say():
  """Smoothed loss and z-loss written out, without the runner; the first pass sees dense weights."""
  model = model_of(**SR_STE)
  model = Model(T5(model.workload.network, source_of(), label_smoothing=0.2), model.given_rules,
                devices=jax.devices()[:1])  # fmt: skip
  batch = next(model.workload.batches(0, 0))
  params, net = model.initial(jax.random.PRNGKey(0))[0], model.workload.network
  entropy = -(0.8 * np.log(0.8) + 0.2 * np.log(0.2 / 383))

  def loss(params):
    tokens = [batch[k] for k in ("encoder_input_tokens", "decoder_input_tokens")]
    targets = batch["decoder_target_tokens"]
    logits = net.apply({"params": params}, *tokens, targets, enable_dropout=False)
    log_z = jax.nn.logsumexp(logits, -1)
    soft = 0.2 / 383 + (0.8 - 0.2 / 383) * jax.nn.one_hot(targets, 384)
    cross = -jnp.sum(soft * jax.nn.log_softmax(logits), -1) - np.float32(entropy)
    losses = cross + 1e-4 * log_z**2
    return jnp.sum(jnp.where(targets > 0, losses, 0.0)) / np.float32(np.sum(targets > 0))

  value, grads = jax.jit(jax.value_and_grad(loss))(params)
  want = jax.tree.map(lambda w, g: w - 0.1 * g, params, grads)
  want = nms.sparsify(want, model.rules, 1)
  got, losses = stepped(model, steps=1)
  np.testing.assert_allclose(losses[0][0] / losses[0][3], value, rtol=1e-5)
  jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), got, want)


# --- data and reports --------------------------------------------------------------------------


@pytest.mark.parametrize("name, pack", [("nm_test_sort", True), ("tests_mixed", False)])
def test_the_stream_is_a_function_of_seed_and_position(name, pack):
  def take(n, start=0, seed=0):
    return list(itertools.islice(source_of(name=name, pack=pack).batches(seed, start), n))

  whole = take(20)  # more than an epoch
  same = lambda a, b: all((x == y).all() for x, y in zip(a.values(), b.values(), strict=True))
  assert same(take(1, 1)[0], whole[1]) and same(take(1, 18)[0], whole[18])
  assert not same(whole[0], whole[16]) and not same(take(1, seed=1)[0], whole[0])
  assert ("encoder_segment_ids" in whole[0]) == pack


def noted(number, at_target, loss, **metrics):
  return dict(step=number, at_target=at_target, loss={"a": loss}, metrics={"a": metrics},
              less_is_better=["error"])  # fmt: skip


EARLY = noted(1, False, 0.1, f1=9.0, error=0.1)
FIRST = noted(2, True, 0.5, f1=1.0, error=0.2)
LAST = noted(3, True, 0.5, f1=3.0, error=0.3)


@pytest.mark.parametrize(
  "rows, metric, best",
  [
    ([EARLY, FIRST, LAST], None, 2),
    ([EARLY, FIRST, LAST], "f1", 3),
    ([EARLY, FIRST, LAST], "error", 2),
    ([EARLY], None, None),
    ([], "f1", None),
    # A correlation of equal predictions is NaN, early on.
    ([noted(2, True, 0.5, f1=np.nan), LAST], "f1", 3),
    ([noted(2, True, 0.5, f1=np.nan)], "f1", None),
  ],
)
def test_the_best_is_at_the_target_pattern_and_the_first_of_equals(rows, metric, best):
  assert evaluation.best_step(rows, metric) == best


def test_a_metric_that_is_none_of_the_tasks_is_named():
  with pytest.raises(ValueError, match="BEST_METRIC='bleu'"):
    evaluation.best_step([FIRST], "bleu")


def test_a_line_says_the_patterns_of_a_step(capfd):
  progress = reports.Progress(100, 200)
  shapes = {x: {"kernel": jax.ShapeDtypeStruct((8, 8), "float32")} for x in ("a", "b")}
  recipe = functools.partial(nms.recipe, "sr_ste", phases=nms.Phases(total=9, finetune=1))
  rules = nms.Rules({"a/kernel": recipe(pattern="2:8"), "b/kernel": recipe(pattern="1:8")})
  for number in (101, 102):
    progress.count(64)
    progress.show(number, 1.5, reports.sparsity(rules, shapes, 8))
  _, line = capfd.readouterr().err.splitlines()
  start = "step 102/200  loss 1.5000  D 0  a/kernel 2:8, b/kernel 1:8  density 0.188"
  assert line.startswith(start) and "tokens/s" in line and line.endswith("left")


def test_a_removal_that_is_cut_off_leaves_no_checkpoint(tmp_path, monkeypatch):
  def cut_off(path, ignore_errors):
    next(path.rglob("*.zarray"), next(path.rglob("*"))).unlink()
    raise KeyboardInterrupt

  with checkpoints.Checkpoints(tmp_path, keep=1) as kept:
    for number in (1, 2):
      kept.save(number, {"a": np.ones(3)})
    kept.wait()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
      patch.setattr(shutil, "rmtree", cut_off)
      kept.remove_old()
    assert kept.steps() == [2]
    kept.remove_old()
  assert [path.name for path in tmp_path.iterdir()] == ["checkpoint_2"]
