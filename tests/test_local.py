"""The local runner: what it learns, and that nothing that ends a process changes the result."""

import functools
import gc
import itertools
import json
import os
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
from checkout import gin_flags, read_lines
from checkpoint_files import TINY_T5, cut, read
from reference_arrays import assert_same

import nm_sparsity_jax as nms
from nm_sparsity_jax import cli
from nm_sparsity_jax.models.t5 import network
from nm_sparsity_jax.runs import checkpoint_rules, folders
from nm_sparsity_jax.training import configure

pytest.importorskip("seqio", reason="the local runner needs seqio: pip install -e '.[local]'")
# seqio, TensorFlow, clu and Orbax warn on their own account.
pytestmark = pytest.mark.filterwarnings("ignore")

with warnings.catch_warnings(action="ignore"):
  import t5x_task  # registers the task

  from nm_sparsity_jax.trainer import checkpoints, data, evaluation, step, train, workloads
  from nm_sparsity_jax.trainer import text_evaluation as text
  from nm_sparsity_jax.trainer.workloads.t5 import T5

LENGTHS = {"inputs": 8, "targets": 8}
# 8 dense steps, 3 levels until 20, then the target.
IDP = dict(recipe="idp", pattern="1:8", sparse_steps=24, dense_steps=8, finetune_steps=4)
SR_STE = dict(recipe="sr_ste", pattern="1:4", dense_steps=0, fields={"lam": 0.5})
DENSE = dict(recipe="dense", pattern=None, dense_steps=0, finetune_steps=0)
FF = {"ff": None}
PHASES = nms.Phases(total=24, dense=8, finetune=4)
DECOUPLED = nms.recipe("sr_ste", pattern="1:4", phases=PHASES, decoupled=True)
S_STE = nms.recipe("s_ste", pattern="2:4", phases=PHASES)
MODELS, INITIAL = {}, {}
ADAMW = optax.adamw(0.01)
EVALUATION = functools.partial(text.Evaluation, batch_size=32)


@pytest.fixture(autouse=True, scope="module")
def no_model_stays():
  with pytest.MonkeyPatch.context() as patch:
    # Each run notes the FLOPs of its model, which are traced for that.
    patch.setattr(workloads, "describe", functools.cache(workloads.describe))
    yield
  for kept in (MODELS, INITIAL):
    kept.clear()
  gc.collect()  # what Orbax never awaited warns here, not in another file's tests


class Model(step.Model):
  """A model that draws its parameters and traces its step once, where each run would anew."""

  def initial(self, seed_key):
    if (key := str(seed_key)) not in INITIAL:  # all have the same shapes
      INITIAL[key] = jax.device_get(super().initial(seed_key))
    # Copies, since a run donates them.
    params, collections = jax.tree.map(np.copy, INITIAL[key])
    return jax.device_put(params, self.shardings(params)), collections

  def train_step(self, optimizer, rng, microbatches=1, learning_rate=None):
    # The rate is of the step where a recipe decays weights by it.
    of_step = learning_rate if "decoupled" in self.rules.text else None
    key, made = (optimizer, str(rng), microbatches, of_step), vars(self).setdefault("made", {})
    if key not in made:
      made[key] = super().train_step(optimizer, rng, microbatches, learning_rate)
    return made[key]


def model_of(
  devices=1, partitions=1, dropout=0.0, dtype="float32", source=None, places=FF, **rules
):
  source = source or source_of()
  key = repr((devices, partitions, dropout, dtype, source, places, sorted(rules.items())))
  if key not in MODELS:
    config = network.T5Config.preset("t5_1_1", "tiny", **TINY_T5, dropout_rate=dropout, dtype=dtype)
    rules = configure.rules(places, **(IDP | rules))
    family = T5(network.Transformer(config), source)
    chosen = jax.devices()[:devices]
    MODELS[key] = Model(family, rules, num_partitions=partitions, devices=chosen)
  return MODELS[key]


def source_of(**fields):
  return data.Source(**(dict(name="nm_test_sort", lengths=LENGTHS, batch_size=16) | fields))


def run_of(folder, model=None, **fields):
  fields = dict(
    optimizer=ADAMW, sparse_steps=24, keep_checkpoints=None, eval_period=100, checkpoint_period=6,
    stats_period=1, metrics_every=None,
  ) | fields  # fmt: skip
  return train.Run(model=model or model_of(), model_dir=str(folder), **fields)


def falling(step):
  return 0.1 / (1 + step)


def at_step(number, do):
  """A learning rate, which is asked for at every report, that does something at one step."""

  def rate(step):
    if isinstance(step, int) and step == number:  # a decoupled term traces it
      do()
    return falling(step)

  return rate


def lines(folder, room="train"):
  return read_lines(folder / room / "metrics.jsonl")


# --- the thread --------------------------------------------------------------------------------


def test_learns_dense_then_sparse_from_that_checkpoint(tmp_path):
  dense, sparse = tmp_path / "dense", tmp_path / "sparse"
  steps = dict(eval_period=60, checkpoint_period=None, stats_period=20)
  model = model_of(**DENSE, sparse_steps=120)
  assert train.train(run_of(dense, model, sparse_steps=120, **steps)) == 0
  assert lines(dense)[-1]["loss"] < 0.3 < 2 < lines(dense)[0]["loss"]
  assert not checkpoint_rules.check_start(checkpoints.opened(str(dense), model))

  model = model_of(**(SR_STE | dict(sparse_steps=60, dense_steps=30)), finetune_steps=0)
  start = steps | dict(
    eval_period=20, metrics_every=20,
    initial_checkpoint=str(dense / "checkpoint_120"), pretrained_steps=120,
  )  # fmt: skip
  run = run_of(sparse, model, sparse_steps=60, evaluation=EVALUATION, keep_checkpoints=1, **start)
  assert train.train(run) == 0
  # The step goes on; a checkpoint of the dense phase is never the best.
  found = folders.evaluations(sparse)
  assert [e["at_target"] for e in found.values()] == [False, True, True]
  best = min((160, 180), key=lambda s: found[s]["loss"]["nm_test_sort"])
  assert set(folders.steps(sparse)) == {best, 180}
  assert lines(sparse)[1]["loss"] < 0.5  # started from the dense weights
  sampled = [(x["step"], x["nm/density"]) for x in lines(sparse) if "nm/density" in x]
  assert sampled == [(140, 1), (160, 0.25), (180, 0.25)]

  # What seqio would have written.
  (scores,) = (sparse / "inference_eval").glob("nm_test_sort-metrics.jsonl")
  scores = read_lines(scores)
  assert [x["step"] for x in scores] == [140, 160, 180]
  assert scores[-1]["letters"] == found[180]["metrics"]["nm_test_sort"]["letters"] > 0.2
  checkpoint = str(sparse / "checkpoint_180")
  assert nms.runs.verify(checkpoint).ok

  # `infer` writes what was judged there.
  train.infer(model, EVALUATION, checkpoint, str(tmp_path / "i"))
  rows = read_lines(tmp_path / "i/nm_test_sort-predict.jsonl-00000-of-00001")
  targets = ["".join(sorted(x["inputs"]["inputs_pretokenized"])) for x in rows]
  letters = t5x_task.letters_in_place(targets, [x["prediction"] for x in rows])
  assert letters == {"letters": scores[-1]["letters"]} and len(rows) == 32


def test_a_decoupled_term_decays_by_the_rate_of_the_run(tmp_path):
  """The optimizer moves nothing, so pruned weights alone change."""
  model = model_of(places={"ff": DECOUPLED}, **DENSE, sparse_steps=24)
  assert train.train(run_of(tmp_path, model, optimizer=optax.sgd(0.0), learning_rate=falling)) == 0
  begin, end = read(tmp_path, 12), read(tmp_path, 18)
  wo = "encoder/layers_0/mlp/wo/kernel"
  kept, w = (begin[f"{of}/{wo}"] for of in ("target", "state/nm_sparsity/dense"))
  factor = np.prod([1 - 0.2 * falling(step) for step in range(12, 18)])
  want = np.where(kept == 0, w * factor, w)
  np.testing.assert_allclose(end[f"state/nm_sparsity/dense/{wo}"], want, rtol=1e-5)


# --- resume ------------------------------------------------------------------------------------


def hard(folder, **fields):
  """A run of all that is drawn, kept or decays: masks, dropout, a mixture; on several devices."""
  places = FF | {"qkv": DECOUPLED, "o": S_STE}
  source = source_of(name="tests_mixed", pack=True)
  model = model_of(4, 2, dropout=0.1, source=source, places=places)
  return run_of(folder, model, microbatches=2, **{"learning_rate": falling} | fields)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
  """An uninterrupted one. It learns on packed rows."""
  folder = tmp_path_factory.mktemp("whole")
  assert train.train(hard(folder)) == 0
  assert lines(folder)[-1]["loss"] < 0.9 * lines(folder)[0]["loss"]
  return folder, read(folder, 24)


def test_resumed_is_uninterrupted_bit_for_bit(whole, tmp_path):
  """Stopped at the end of the dense phase, where a level begins, and within one."""
  go = lambda **fields: train.train(hard(tmp_path, **fields))
  for number, how in ((8, signal.SIGTERM), (11, signal.SIGINT), (16, signal.SIGTERM)):

    def stop(how=how):
      # Two processes would remove the checkpoint that the other is writing.
      with pytest.raises(ValueError, match="another process"):
        go()
      os.kill(os.getpid(), how)

    code = 130 if how == signal.SIGINT else 0
    assert go(learning_rate=at_step(number - 1, stop)) == code
    assert number <= folders.steps(tmp_path)[-1] <= number + 3  # some steps were under way
    # What is saved in the background is that step, though later ones were given its buffers.
    if number == 8:
      assert_same(read(tmp_path, 6), read(whole[0], 6))
  assert go() == 0
  assert_same(read(tmp_path, 24), whole[1])
  assert any("/mask/" in k and k.endswith("wo/kernel") for k in whole[1])
  losses = lambda folder: [(x["step"], x["loss"]) for x in lines(folder)]
  assert losses(tmp_path) == losses(whole[0])


def test_hold_keeps_the_zeros_of_another_run(whole, tmp_path):
  start = dict(initial_checkpoint=str(whole[0] / "checkpoint_24"), pretrained_steps=24)
  assert train.train(run_of(tmp_path, model_of(recipe="hold", dense_steps=0), **start)) == 0
  end = read(tmp_path, 48)
  kernels = [k for k in end if k.startswith("target/") and "/mlp/" in k]
  assert len(kernels) == 6
  for key in kernels:
    before, after = whole[1][key] != 0, end[key] != 0
    assert not (after & ~before).any() and (whole[1][key] != end[key]).any()
    assert not after.reshape(-1, 8, after.shape[-1]).sum(1).max() > 1


def test_an_evaluation_that_a_kill_cut_off_is_made_up_for(tmp_path):
  model = model_of(recipe="one_shot", dense_steps=1, finetune_steps=0)
  losses = functools.partial(EVALUATION, num_examples=0)
  run = run_of(tmp_path, model, eval_period=8, evaluation=losses, keep_checkpoints=1)
  assert train.train(run) == 0
  found = {at: e["loss"]["nm_test_sort"] for at, e in folders.evaluations(tmp_path).items()}
  assert set(folders.steps(tmp_path)) == {min(found, key=found.get), 24}
  file = tmp_path / "evaluations.json"
  all_of_it = json.loads(file.read_text())
  file.write_text(json.dumps(all_of_it[:-1]))
  assert train.train(run) == 0
  assert json.loads(file.read_text()) == all_of_it and 24 in folders.steps(tmp_path)


# --- what goes wrong ---------------------------------------------------------------------------


def test_a_number_that_is_not_finite_stops_the_run(tmp_path):
  rate = lambda count: jnp.where(count == 9, jnp.nan, 0.01)
  run = run_of(tmp_path, optimizer=optax.adamw(rate))
  with pytest.raises(ValueError, match="update_norm of step 10.* good step is 9, .*checkpoint_6"):
    train.train(run)
  assert folders.steps(tmp_path) == [6] and lines(tmp_path)[-1]["step"] == 9


def test_a_full_disk_loses_nothing(whole, tmp_path):
  limits = resource.getrlimit(resource.RLIMIT_FSIZE)

  def fill():
    while folders.steps(tmp_path) != [6]:
      time.sleep(0.01)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))

  try:
    with pytest.raises(ValueError, match="could not be written .*checkpoint_6"):
      train.train(hard(tmp_path, learning_rate=at_step(8, fill)))
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
  assert train.train(hard(tmp_path)) == 0
  assert_same(read(tmp_path, 24), whole[1])


def test_a_truncated_checkpoint_is_named(whole, tmp_path):
  shutil.copytree(whole[0], tmp_path, dirs_exist_ok=True)
  cut(tmp_path / "checkpoint_24", "d/*")
  with pytest.raises(ValueError, match="checkpoint_24 cannot be read"):
    train.train(hard(tmp_path))
  gc.collect()  # what Orbax began and never awaited warns here, where warnings are expected


def test_a_removal_that_is_cut_off_leaves_no_checkpoint(tmp_path, monkeypatch):
  def cut_off(path, ignore_errors):
    raise KeyboardInterrupt

  with checkpoints.Checkpoints(tmp_path, keep=1) as kept:
    for number in (1, 2):
      kept.save(number, {"a": np.ones(3)})
    kept.wait()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
      patch.setattr(shutil, "rmtree", cut_off)
      kept.remove_old()
    assert folders.steps(tmp_path) == [2]
    kept.remove_old()
  assert [path.name for path in tmp_path.iterdir()] == ["checkpoint_2"]


def command(*names, **macros):
  files = [f"gin_configs/runs/{name}" for name in names]
  return gin_flags([*files, "tests/local_tiny.gin"], macros)


@pytest.mark.parametrize(
  "macros, words",
  [
    (dict(NUM_PARTITIONS=3, SPARSE_STEPS=9), "NUM_PARTITIONS=3 does not divide"),
    (dict(SPARSE_STEPS=None), "SPARSE_STEPS=None"),
  ],
)
def test_mistakes_are_one_line(macros, words, tmp_path, capsys):
  names = ["local_train.gin", "local_adamw.gin"]
  where = dict(RECIPE="dense", MODEL_DIR=str(tmp_path))
  assert cli.main(["train", *command(*names, **where, **macros)]) == 1
  error = capsys.readouterr().err
  assert words in error and len(error.splitlines()) == 1, error


# --- the step, loss and data ----------------------------------------------------------------------


def test_devices_that_share_weights_change_nothing():
  optimizer, key, found = optax.sgd(0.1), jax.random.PRNGKey(0), []
  for devices, partitions in ((1, 1), (8, 2)):
    model = model_of(devices, partitions, **SR_STE)
    params, _ = step.Model.initial(model, key)  # drawn on these devices
    state, step_of = model.begin(params, optimizer, 0, {}), model.train_step(optimizer, key)
    for batch in itertools.islice(model.workload.batches(0, 0), 2):
      state, sums = step_of(state, model.put(batch))
    found.append(jax.device_get((state.params, sums)))
  kernel = state.params["encoder"]["layers_0"]["mlp"]["wo"]["kernel"]
  assert kernel.sharding.spec == jax.P("model", None)
  near = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
  jax.tree.map(near, *found)


def test_the_loss_is_its_definition():
  """Smoothed cross entropy and z-loss of the targets that are no padding, by optax."""
  workload = T5(model_of().workload.network, source_of(), label_smoothing=0.2)
  batch = next(workload.batches(0, 0))
  params = model_of().initial(jax.random.PRNGKey(0))[0]
  targets = batch["decoder_target_tokens"]
  logits = workload.logits(params, batch, None)
  soft = jnp.where(jax.nn.one_hot(targets, 384, dtype=bool), 0.8, 0.2 / 383)
  cross = optax.softmax_cross_entropy(logits, soft) + jnp.sum(soft * jnp.log(soft), -1)
  z_loss = 1e-4 * jax.nn.logsumexp(logits, -1) ** 2
  hits = jnp.argmax(logits, -1) == targets
  loss, sums, _ = workload.loss(params, {}, batch, None)
  got = loss, sums["z_loss"], sums["correct"], sums["tokens"]
  want = [np.sum(x, where=targets > 0) for x in (cross + z_loss, z_loss, hits, targets > 0)]
  np.testing.assert_allclose(got, want, rtol=1e-5)


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
    ([EARLY, FIRST, LAST], "error", 2),
    ([EARLY], None, None),
    # A correlation of equal predictions is NaN, early on.
    ([noted(2, True, 0.5, f1=np.nan), LAST], "f1", 3),
  ],
)
def test_the_best_is_at_the_target_pattern_and_the_first_of_equals(rows, metric, best):
  assert evaluation.best_step(rows, metric) == best
  with pytest.raises(ValueError, match="BEST_METRIC='bleu'"):
    evaluation.best_step(rows, "bleu")
