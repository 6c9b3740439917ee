"""The average of what is trained: what it is, that it is scored and deployed, that runs keep it."""

import json
import warnings
from typing import Any, NamedTuple

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
pytestmark = [
  pytest.mark.filterwarnings("ignore"),  # what it imports warns on its own account
]

with warnings.catch_warnings():
  warnings.simplefilter("ignore")
  from nm_sparsity_jax.trainer import averages, checkpoints, evaluation, optimizers, step, train

STEPS, DECAY = 8, 0.75


def model_of(devices=1, ema_decay: float | None = DECAY, **rules):
  rules = (
    dict(recipe="idp", pattern="1:8", sparse_steps=STEPS, dense_steps=2, finetune_steps=2) | rules
  )
  workload = vision.Images(tiny_vision.make(), rebus.Rebus(8, validation=16))
  return step.Model(
    workload=workload, rules=configure.rules({"mlp/fc./kernel": None}, **rules),
    devices=jax.devices()[:devices], ema_decay=ema_decay,
  )  # fmt: skip


def run_of(folder, model, **fields):
  fields = dict(
    optimizer=optimizers.adamw(0.05), sparse_steps=STEPS,
    evaluation=evaluation.Splits(), keep_checkpoints=None,
    periods=train.Periods(evaluate=4, checkpoint=1, report=4, metrics=None),
  ) | fields  # fmt: skip
  return train.Run(model=model, model_dir=str(folder), **fields)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
  folder = tmp_path_factory.mktemp("average") / "run"
  assert train.train(run_of(folder, model_of())) == 0
  return folder


AVERAGE = "state/average/"
KERNEL, STATISTICS = "target/mlp/fc1/kernel", "flax_mutables/batch_stats/"


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
  moving = (KERNEL, *(k for k in keys if k.startswith(STATISTICS)))
  assert len(moving) > 2
  for key in moving:
    assert not np.allclose(at[STEPS][AVERAGE + key], at[STEPS][key])
    assert at[STEPS][AVERAGE + key].dtype == np.float32


def test_it_begins_with_what_a_run_starts_from_and_leaves_whole_numbers():
  start = {"params": {"kernel": jnp.ones((4, 2))}, "state": {"seen": jnp.int32(3)}}
  average = averages.begin(start)
  new = {"params": {"kernel": jnp.full((4, 2), 3.0)}, "state": {"seen": jnp.int32(4)}}
  average = averages.moved(average, new, 0.9)
  np.testing.assert_allclose(average["params"]["kernel"], 1.2, rtol=1e-6)
  assert int(average["state"]["seen"]) == 4 and average["state"]["seen"].dtype == jnp.int32


class LookaheadState(NamedTuple):
  """Of an optimizer of another, with a copy of all parameters for a purpose of its own."""

  average: Any


def test_a_state_of_another_optimizer_is_not_taken_for_it(tmp_path):
  other = optax.GradientTransformation(
    lambda params: LookaheadState(jax.tree.map(jnp.zeros_like, params)),
    lambda updates, state, params=None: (updates, state),
  )
  model, key = model_of(ema_decay=None), jax.random.PRNGKey(0)
  kept = model.initial_collections(key)
  state = model.begin(model.initial_params(key), optax.chain(other, optax.sgd(0.1)), 0, kept)
  assert state.average == {}
  path = str(tmp_path / "checkpoint_0")
  checkpoint.write(path, jax.device_get(checkpoints.to_tree(state, model.rules)))
  stored = checkpoint.read(path)
  zeros = KERNEL.replace("target", "state/param_states/0/average")
  assert zeros in stored.leaves and not stored.average
  assert stored.deployed(KERNEL) == KERNEL
  got = checkpoints.load_for_evaluation(stored, model)
  jax.tree.map(np.testing.assert_array_equal, got["params"], state.params)


def test_an_evaluation_sees_it_under_the_stored_masks(trained, capsys, monkeypatch):
  model = model_of()
  path = str(trained / f"checkpoint_{STEPS}")
  variables = checkpoints.load_for_evaluation(checkpoint.read(path), model)
  saved = read(trained, STEPS)
  for name, leaf in flatten(variables["batch_stats"]):
    np.testing.assert_array_equal(leaf, saved[f"{AVERAGE}{STATISTICS}{name}"])
  for word in ("fc1", "fc2"):
    mask = saved[f"state/nm_sparsity/mask/mlp/{word}/kernel"]
    kernel = np.asarray(variables["params"]["mlp"][word]["kernel"])
    assert np.count_nonzero(kernel.reshape(4, 8, 32), axis=1).max() == 1
    kept = kernel != 0  # idp keeps the best of what the stored mask, its parent, keeps
    assert mask[kept].all()
    np.testing.assert_array_equal(kernel[kept], saved[f"{AVERAGE}target/mlp/{word}/kernel"][kept])
  found = evaluation.Splits().evaluator(model, None).evaluate(variables, STEPS)
  entry = json.loads((trained / "evaluations.json").read_text())[-1]
  assert entry["step"] == STEPS and entry["metrics"] == found.metrics and entry["at_target"]
  # A few images are often classified alike; the loss is that of these very weights.
  assert entry["loss"] == {split: scalars["loss"] for split, scalars in found.scalars.items()}
  opened, read_it = [], checkpoint.read
  monkeypatch.setattr(checkpoint, "read", lambda *args: opened.append(args) or read_it(*args))
  assert train.evaluate(model, evaluation.Splits(), path, str(trained.parent / "eval")) == 0
  assert len(opened) == 1
  assert "moving average" in capsys.readouterr().out


def test_what_is_scored_is_finalized(trained, tmp_path):
  model = model_of()
  load = lambda path: checkpoints.load_for_evaluation(checkpoint.read(str(path)), model)
  # Its parameters are n:m, but they are not what was scored.
  assert not nms.runs.verify(str(trained)).ok
  with pytest.raises(ValueError, match="n:m|not zero"):
    nms.runs.pack(str(trained), str(tmp_path / "f.safetensors"))
  made = nms.runs.finalize(str(trained), str(tmp_path))
  assert made.ok and made.as_dict()["average"] is True
  assert not checkpoint.read(made.path).average
  scored, final = load(trained / f"checkpoint_{STEPS}"), load(made.path)
  jax.tree.map(np.testing.assert_array_equal, final, scored)
  assert nms.verify(final["params"], model.rules).ok


def test_a_run_starts_from_it(trained):
  model, key = model_of(), jax.random.PRNGKey(0)
  path = str(trained / f"checkpoint_{STEPS}")
  with pytest.warns(UserWarning, match="not finalized"):  # it is one of W, and not n:m
    params, kept, number = checkpoints.load_initial(path, model, key)
  saved = read(trained, STEPS)
  assert number == STEPS
  np.testing.assert_array_equal(params["mlp"]["fc1"]["kernel"], saved[AVERAGE + KERNEL])
  for path, leaf in flatten(kept):
    np.testing.assert_array_equal(leaf, saved[f"{AVERAGE}flax_mutables/{path}"])


def test_microbatches_and_devices_move_it_once_a_step():
  """Eight devices, and four microbatches, have the average of one whole batch."""
  key, found = jax.random.PRNGKey(0), {}
  optimizer = optimizers.adamw(0.01, clip_norm=1.0)
  workload = vision.Images(tiny_vision.make(norm=False), rebus.Rebus(32))
  for name, devices, parts in (("one", 1, 1), ("eight", 8, 1), ("parts", 1, 4)):
    model = step.Model(
      workload=workload, rules=configure.rules({"mlp/fc./kernel": "1:8"}, "sr_ste", sparse_steps=8),
      devices=jax.devices()[:devices], ema_decay=DECAY,
    )  # fmt: skip
    state = model.begin(model.initial_params(key), optimizer, 0, {})
    update = model.train_step(optimizer, key, state, parts)
    for i in range(3):
      state, _ = update(state, model.put(next(workload.batches(0, i))))
    sharding = state.average["params"]["mlp"]["fc1"]["kernel"].sharding
    assert sharding == state.params["mlp"]["fc1"]["kernel"].sharding
    found[name] = jax.device_get(state.average)
  near = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5)
  jax.tree.map(near, found["one"], found["eight"])
  jax.tree.map(near, found["one"], found["parts"])


@pytest.fixture
def standard_promotion():
  """optax mixes its counts with floats."""
  with jax.numpy_dtype_promotion("standard"):
    yield


# --- AdamW and the learning rate ----------------------------------------------------------------


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
  grads = jax.tree.map(lambda x: 10 * jnp.ones_like(x), params)
  _, state = tx.update(grads, tx.init(params), params)
  (nu,) = [
    s.nu for s in jax.tree.leaves(state, is_leaf=lambda x: hasattr(x, "nu")) if hasattr(s, "nu")
  ]
  assert float(nu["a"]["bias"][0]) == pytest.approx(0.5 / 6)


@pytest.mark.usefixtures("standard_promotion")
def test_it_is_optax_adamw_where_nothing_is_asked_for():
  params = {"a": {"kernel": jnp.linspace(-1.0, 1.0, 6)}}
  grads = {"a": {"kernel": jnp.linspace(1.0, 3.0, 6)}}
  made = []
  for tx in (optimizers.adamw(0.1), optax.adamw(0.1, weight_decay=0.0001)):
    state, now = tx.init(params), params
    for _ in range(3):
      updates, state = tx.update(grads, state, now)
      now = optax.apply_updates(now, updates)
    made.append(now)
  np.testing.assert_array_equal(made[0]["a"]["kernel"], made[1]["a"]["kernel"])


@pytest.mark.usefixtures("standard_promotion")
def test_a_cosine_falls_from_the_warm_up_to_the_last_step():
  rate = optimizers.learning_rate(0.5, "constant * linear_warmup * cosine_decay", 10, 110)
  wanted = optax.warmup_cosine_decay_schedule(0.0, 0.5, 10, 110)
  for at in (0, 1, 5, 10, 11, 60, 109, 110, 200):
    assert float(rate(at)) == pytest.approx(max(float(wanted(at)), 1e-8), rel=1e-5, abs=1e-7)
  assert float(rate(60)) == pytest.approx(0.25)
  assert float(optimizers.learning_rate(0.5, "constant * cosine_decay", 0, 4)(2)) == pytest.approx(
    0.25
  )


@pytest.mark.parametrize(
  "make, said",
  [
    (
      lambda: model_of(ema_decay=1.0),
      "^EMA_DECAY=1.0: give a number between 0 and 1,",
    ),
    (lambda: optimizers.adamw(0.1, clip_norm=0), "^CLIP_NORM=0: give a number above 0, or None.$"),
    (lambda: optimizers.adamw(0.1, weight_decay=-1), "^WEIGHT_DECAY=-1: give a number from 0 on.$"),
    (
      lambda: optimizers.learning_rate(0.1, "constant * cosine_decay", 10),
      "^LEARNING_RATE_FACTORS has 'cosine_decay', which falls from WARMUP_STEPS=10 to SPARSE_STEP",
    ),
    (
      lambda: optimizers.learning_rate(0.1, "cosine_decay", 10, 10),
      "which falls from WARMUP_STEPS=10 to SPARSE_STEPS=10: give more SPARSE_STEPS or a smaller W",
    ),
  ],
)
def test_a_wrong_setting_is_one_sentence(make, said):
  with pytest.raises(ValueError, match=said):
    make()
