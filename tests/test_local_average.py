"""The average of what is trained: what it is, that it is scored and deployed, that runs keep it."""

import json
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny_vision
from checkpoint_files import read

import nm_sparsity_jax as nms
from nm_sparsity_jax.core.trees import flatten
from nm_sparsity_jax.runs import checkpoint
from nm_sparsity_jax.trainer.images import rebus
from nm_sparsity_jax.trainer.workloads import vision
from nm_sparsity_jax.training import configure

pytest.importorskip("clu", reason="the local runner needs clu: pip install -e '.[local]'")
pytestmark = pytest.mark.filterwarnings("ignore")  # what it imports warns on its own account

with warnings.catch_warnings():
  warnings.simplefilter("ignore")
  from nm_sparsity_jax.trainer import checkpoints, evaluation, optimizers, step, train

STEPS, DECAY = 8, 0.75
AVERAGE = "state/average/"
KERNEL, STATISTICS = "target/mlp/fc1/kernel", "flax_mutables/batch_stats/"
RULES = dict(recipe="idp", pattern="1:8", sparse_steps=STEPS, dense_steps=2, finetune_steps=2)


def model_of():
  workload = vision.Images(tiny_vision.make(), rebus.Rebus(8, validation=16))
  rules = configure.rules({"mlp/fc./kernel": None}, **RULES)
  return step.Model(workload, rules, devices=jax.devices()[:1], ema_decay=DECAY)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
  folder = tmp_path_factory.mktemp("average") / "run"
  run = train.Run(
    model=model_of(), model_dir=str(folder), optimizer=optimizers.adamw(0.05), sparse_steps=STEPS,
    evaluation=evaluation.Splits(), keep_checkpoints=None,
    periods=train.Periods(evaluate=4, checkpoint=1, report=4, metrics=None),
  )  # fmt: skip
  assert train.train(run) == 0
  return folder


def test_it_is_that_of_parameters_and_batch_statistics_after_each_update(trained):
  """By numpy, from the checkpoints of all steps; of kernels it is that of W."""
  at = {i: read(trained, i) for i in range(1, STEPS + 1)}
  dense = "state/nm_sparsity/dense/"
  for saved in at.values():
    saved.update({k.replace(dense, "target/"): x for k, x in saved.items() if k.startswith(dense)})
  keys = [k for k in at[1] if k.startswith(("target/", STATISTICS))]
  assert {AVERAGE + k for k in keys} == {k for k in at[1] if k.startswith(AVERAGE)}
  for key in keys:
    average = at[1][AVERAGE + key]
    for i in range(2, STEPS + 1):
      average = DECAY * average + (1 - DECAY) * at[i][key]
      np.testing.assert_allclose(at[i][AVERAGE + key], average, rtol=1e-4, atol=1e-6)
  for key in (KERNEL, *(k for k in keys if k.startswith(STATISTICS))):
    assert not np.allclose(at[STEPS][AVERAGE + key], at[STEPS][key])


def test_an_evaluation_sees_it_under_the_stored_masks(trained, tmp_path, capsys):
  model, path = model_of(), str(trained / f"checkpoint_{STEPS}")
  variables = checkpoints.load_for_evaluation(checkpoint.read(path), model)
  saved = read(trained, STEPS)
  for name, leaf in flatten(variables["batch_stats"]):
    np.testing.assert_array_equal(leaf, saved[f"{AVERAGE}{STATISTICS}{name}"])
  kernel = np.asarray(variables["params"]["mlp"]["fc1"]["kernel"])
  assert np.count_nonzero(kernel.reshape(4, 8, 32), axis=1).max() == 1
  kept = kernel != 0  # idp keeps the best of what the stored mask, its parent, keeps
  assert saved["state/nm_sparsity/mask/mlp/fc1/kernel"][kept].all()
  np.testing.assert_array_equal(kernel[kept], saved[AVERAGE + KERNEL][kept])
  assert train.evaluate(model, evaluation.Splits(), path, str(tmp_path)) == 0
  assert "moving average" in capsys.readouterr().out
  alone = json.loads((tmp_path / "training_eval/validation/metrics.jsonl").read_text())
  entry = json.loads((trained / "evaluations.json").read_text())[-1]
  assert entry["loss"] == {"validation": alone["loss"]} and entry["at_target"]


def test_what_is_scored_is_finalized_and_started_from(trained, tmp_path):
  model, path = model_of(), str(trained / f"checkpoint_{STEPS}")
  load = lambda path: checkpoints.load_for_evaluation(checkpoint.read(path), model)
  assert not nms.runs.verify(str(trained)).ok  # its parameters are n:m, but were not scored
  made = nms.runs.finalize(str(trained), str(tmp_path))
  scored, final = load(path), load(made.path)
  jax.tree.map(np.testing.assert_array_equal, final, scored)
  assert made.ok and nms.verify(final["params"], model.rules).ok
  with pytest.warns(UserWarning, match="not finalized"):  # the average is one of W, and not n:m
    params, kept, _ = checkpoints.load_initial(path, model, jax.random.PRNGKey(0))
  saved = read(trained, STEPS)
  np.testing.assert_array_equal(params["mlp"]["fc1"]["kernel"], saved[AVERAGE + KERNEL])
  for name, leaf in flatten(kept):
    np.testing.assert_array_equal(leaf, saved[f"{AVERAGE}flax_mutables/{name}"])


def test_microbatches_and_devices_move_it_once_a_step():
  """Eight devices, and four microbatches, have the average of one whole batch."""
  key, found, optimizer = jax.random.PRNGKey(0), [], optimizers.adamw(0.01, clip_norm=1.0)
  workload = vision.Images(tiny_vision.make(norm=False), rebus.Rebus(32))
  rules = configure.rules({"mlp/fc./kernel": "1:8"}, "sr_ste", sparse_steps=8)
  for devices, parts in ((1, 1), (8, 1), (1, 4)):
    model = step.Model(workload, rules, devices=jax.devices()[:devices], ema_decay=DECAY)
    state = model.begin(model.initial(key)[0], optimizer, 0)
    update = model.train_step(optimizer, key, state, parts)
    for i in range(2):
      state, _ = update(state, model.put(next(workload.batches(0, i))))
    found.append(jax.device_get(state.average))
  near = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5)
  jax.tree.map(near, found[0], found[1])
  jax.tree.map(near, found[0], found[2])


# --- AdamW and the learning rate ----------------------------------------------------------------


@pytest.fixture
def standard_promotion():
  """optax mixes its counts with floats."""
  with jax.numpy_dtype_promotion("standard"):
    yield


@pytest.mark.usefixtures("standard_promotion")
def test_kernels_alone_are_decayed_and_the_gradient_is_clipped():
  params = {"a": {"kernel": jnp.ones((2,)), "bias": jnp.ones((2,))}, "pos_embed": jnp.ones((2,))}
  zeros = jax.tree.map(jnp.zeros_like, params)
  tx = optimizers.adamw(0.1, weight_decay=0.5)
  updates, _ = tx.update(zeros, tx.init(params), params)
  assert float(updates["a"]["kernel"][0]) == pytest.approx(-0.05)
  assert not updates["a"]["bias"].any() and not updates["pos_embed"].any()
  # The second moment tells what Adam was given.
  tx = optimizers.adamw(0.1, b2=0.5, clip_norm=1.0)
  _, state = tx.update(jax.tree.map(lambda x: 10 * x, params), tx.init(params), params)
  nu = optax.tree_utils.tree_get(state, "nu")
  assert float(nu["a"]["bias"][0]) == pytest.approx(0.5 / 6)


@pytest.mark.usefixtures("standard_promotion")
def test_a_cosine_falls_from_the_warm_up_to_the_last_step():
  rate = optimizers.learning_rate(0.5, "constant * linear_warmup * cosine_decay", 10, 110)
  wanted = optax.warmup_cosine_decay_schedule(0.0, 0.5, 10, 110)
  for at in (0, 1, 10, 11, 60, 109, 110, 200):
    assert float(rate(at)) == pytest.approx(max(float(wanted(at)), 1e-8), rel=1e-5, abs=1e-7)


@pytest.mark.parametrize(
  "make, word",
  [
    (lambda: step.Model(vision.Images(tiny_vision.make(), None), ema_decay=1.0), "EMA_DECAY=1.0"),
    (lambda: optimizers.adamw(0.1, clip_norm=0), "CLIP_NORM=0"),
    (lambda: optimizers.adamw(0.1, weight_decay=-1), "WEIGHT_DECAY=-1"),
    (lambda: optimizers.learning_rate(0.1, "cosine_decay", 10), "SPARSE_STEPS=None"),
  ],
)
def test_a_wrong_setting_is_named(make, word):
  with pytest.raises(ValueError, match=word):
    make()
