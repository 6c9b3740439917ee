"""In T5X: what training measures of itself, when, and what it writes to the event file."""

import functools

import jax
import numpy as np
import pytest
import t5x_world as t
from t5x_world import (
  adafactor,
  measure,
  one_initialization,  # noqa: F401  (a fixture)
  tf,
  what_t5x_wants,  # noqa: F401  (a fixture)
)

import nm_sparsity_jax as nms
from nm_sparsity_jax.core.trees import flatten
from nm_sparsity_jax.training import metrics

pytestmark = t.MARKS

RULES = nms.Rules({
  "ff": t.recipe("sr_ste", lam=0.5),
  "decoder/cross/o": t.recipe("idp", pattern="1:8"),
  "encoder/qk": t.recipe("mdgf_linear", pattern="2:4"),
})  # fmt: skip
FACTORED = dict(decay_rate=0.8, min_dim_size_to_factor=8)


def expected(model, before, batch, after):
  """The same by metrics.py, at this batch, before and after its update."""
  rules = model.stored_rules
  read = lambda s: (s.params, rules, *model.read(s.flax_mutables))
  grads = jax.grad(lambda p: model.loss_fn(p, batch, None, before.flax_mutables)[0])(before.params)
  seen = metrics.before(*read(before), grads)
  moments = metrics.second_moments(after.param_states, after.params)
  return metrics.summary(*read(after), moments, seen)


def events(folder):
  """(step, name) -> value, of all scalars that a run wrote."""
  out = {}
  for file in folder.glob("train/events*"):
    for record in tf.data.TFRecordDataset(str(file)):
      event = tf.compat.v1.Event.FromString(record.numpy())
      for value in event.summary.value:
        assert (event.step, value.tag) not in out
        out[event.step, value.tag] = float(tf.make_ndarray(value.tensor))
  return out


def test_every_third_step_is_measured_and_written_under_its_own_step(tmp_path):
  """T5X writes the mean over the steps of a summary under the last of them."""
  run = t.begin(t.make(RULES), metrics_every=3, summary_dir=str(tmp_path))
  plain, seen = run._partitioned_train_step, []

  def step(state, batch):
    before = jax.tree.map(np.asarray, state)
    new, found = plain(state, batch)
    seen.append((before, jax.tree.map(np.asarray, new)))
    return new, found

  run.__dict__["_partitioned_train_step"] = step  # a cached property
  batches = map(t.batch_of, range(7))
  for length in (2, 5):  # summaries at 2 and 7
    assert "loss" in run.train(batches, length).result()
  run.close()
  assert [x._pjitted_fn._cache_size() for x in run.measuring] == [1, 1]
  found = events(tmp_path)
  assert {step for step, name in found if name == "loss"} == {2, 7}
  assert {step for step, name in found if name.startswith("nm/")} == {3, 6}
  got = {name: value for (i, name), value in found.items() if i == 6}
  before, after = seen[5]
  want = jax.jit(functools.partial(expected, run._model))(before, t.batch_of(5), after)
  # The kernels of two rules have one pattern each.
  assert got["nm/m/decoder/cross/o"] == 8 and got["nm/flip_rate/all"] > 0
  assert sorted(got) == sorted(want)
  for name in want:
    np.testing.assert_allclose(got[name], float(want[name]), rtol=2e-4, atol=1e-30, err_msg=name)


def test_what_is_measured_is_the_applied_gradient_and_masks_stay_on_their_devices():
  """The same dropout, which microbatches draw anew: SGD with rate 1 shows what it applied."""
  rules, module = nms.Rules({"ff": t.recipe("mdgf_linear")}), t.NETWORKS["t5"](dropout_rate=0.5)
  model = t.make(rules, module=module, optimizer="sgd", loss_normalizing_factor=10.0)
  run = t.begin(model, t.Devices(8, 2), num_microbatches=2, metrics_every=1)
  seen = run.measuring[0](run.train_state, t.batch_of())
  placed = dict(flatten(run.train_state.params))
  assert all(mask.sharding == placed[path].sharding for path, mask in seen.masks.items())
  assert any("model" in str(mask.sharding.spec) for mask in seen.masks.values())
  before = jax.tree.map(np.asarray, run.train_state)
  after, _ = run._partitioned_train_step(run.train_state, t.batch_of())
  grads = jax.tree.map(lambda a, b: a - b, before.params, jax.device_get(after.params))
  state = model.read(before.flax_mutables)
  want, name = metrics.before(before.params, rules, *state, grads).scalars, "nm/grad_abs_var/all"
  np.testing.assert_allclose(seen.scalars[name], want[name], rtol=1e-3)


def factoring():
  rules = adafactor.standard_logical_factor_rules()
  return adafactor.Adafactor(logical_factor_rules=rules, **FACTORED)


@pytest.mark.parametrize(
  "optimizer, moment",
  [(t.OPTIMIZERS["sgd"], None), (factoring, "second_moment_var")],
)
def test_names_of_second_moments(optimizer, moment):
  run = t.begin(t.make(RULES, optimizer_def=optimizer()), metrics_every=1)
  before, after = run.measuring
  state = jax.eval_shape(lambda: run.train_state)
  with run._partitioner.mesh:
    names = set(after.lower(state, before.lower(state, t.batch_of()).out_info).out_info)
  found = {name.split("/")[1] for name in names if "second_moment" in name}
  assert found == ({moment} if moment else set())


@pytest.mark.parametrize(
  "shape, axes",
  [
    ((16, 16), None),
    ((16, 3, 24), ("embed", "layers", "mlp")),
    ((4, 8, 16), ("heads", "kv", "embed")),
    ((24,), None),
  ],
)
def test_the_estimate_is_what_adafactor_divides_by(shape, axes):
  optimizer = adafactor.Adafactor(
    learning_rate=1.0, clipping_threshold=None, multiply_by_parameter_scale=False, **FACTORED
  )
  if axes:
    roles = adafactor.standard_logical_factor_rules()
    rule = adafactor.HParamMap([("w", tuple(roles[name] for name in axes))])
    optimizer.hyper_params = optimizer.hyper_params.replace(factor_map=rule)
  zeros = {"w": np.zeros(shape, np.float32)}
  state = jax.jit(optimizer.init_state)(zeros)
  step = jax.jit(functools.partial(optimizer.apply_gradient, optimizer.hyper_params))
  for seed in range(2):
    grads = {"w": np.random.default_rng(seed).normal(size=shape).astype(np.float32)}
    new, state = step(zeros, state, grads)
  dims = measure.factored_dims(optimizer, "w", shape)
  assert bool(dims) == (len(shape) > 1)
  got = jax.jit(lambda state: measure.estimate(state, dims))(state.param_states["w"])
  np.testing.assert_allclose(got, np.square(grads["w"] / new["w"]), rtol=1e-4)
