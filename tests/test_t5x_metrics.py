"""In T5X: what training measures of itself, when, and what it writes to the event file."""

import functools

import jax
import numpy as np
import t5x_world as t
from t5x_world import world  # noqa: F401  (a fixture)

import nm_sparsity_jax as nms
from nm_sparsity_jax.core.trees import flatten
from nm_sparsity_jax.runs import events
from nm_sparsity_jax.training import metrics

pytestmark = t.MARKS

RULES = nms.Rules({
  "ff": t.recipe("sr_ste", lam=0.5),
  "decoder/cross/o": t.recipe("idp", pattern="1:8"),
  "encoder/qk": t.recipe("mdgf_linear", pattern="2:4"),
})  # fmt: skip


def expected(model, before, batch, after):
  """The same by metrics.py, at this batch, before and after its update."""
  rules = model.stored_rules
  read = lambda s: (s.params, rules, *model.read(s.flax_mutables))
  grads = jax.grad(lambda p: model.loss_fn(p, batch, None, before.flax_mutables)[0])(before.params)
  seen = metrics.before(*read(before), grads)
  moments = metrics.second_moments(after.param_states, after.params)
  return metrics.summary(*read(after), moments, seen)


def written(folder):
  """(step, name) -> value, of all scalars that a run wrote."""
  (file,) = folder.glob("train/events*")
  scalars = [*events.scalars(file)]
  found = {(step, name): value for step, name, value in scalars}
  assert len(found) == len(scalars)
  return found


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
  found = written(tmp_path)
  assert {step for step, name in found if name == "loss"} == {2, 7}
  assert {step for step, name in found if name.startswith("nm/")} == {3, 6}
  got = {name: value for (i, name), value in found.items() if i == 6}
  before, after = seen[5]
  want = jax.jit(functools.partial(expected, run._model))(before, t.batch_of(5), after)
  assert got["nm/flip_rate/all"] > 0
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
