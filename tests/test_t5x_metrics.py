"""In T5X: what training measures of itself, when, and what it writes to the event file."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import t5x_found

import nm_sparsity_jax as nms
from nm_sparsity_jax.core.trees import flatten
from nm_sparsity_jax.training import metrics

pytestmark = [pytest.mark.t5x, pytest.mark.filterwarnings("ignore")]

if reason := t5x_found.why_not():
  pytest.skip(reason, allow_module_level=True)

with warnings.catch_warnings():
  warnings.simplefilter("ignore")
  import tensorflow as tf
  import test_t5x_adapter as t
  from t5x import adafactor, trainer
  from test_t5x_adapter import one_initialization, what_t5x_wants  # noqa: F401  (fixtures)

  from nm_sparsity_jax.integrations.t5x import COLLECTION, measure

RULES = {
  "ff": t.recipe("sr_ste", lam=0.5),
  "decoder/cross/o": t.recipe("idp", pattern="1:8"),
  "encoder/qk": t.recipe("mdgf_linear", pattern="2:4"),
}
OPTIMIZERS = {
  "adamw": t.OPTIMIZERS["adamw"],
  "adafactor": lambda: adafactor.Adafactor(
    decay_rate=0.8,
    logical_factor_rules=adafactor.standard_logical_factor_rules(),
    min_dim_size_to_factor=8,
  ),
  "sgd": t.OPTIMIZERS["sgd"],
}


def make(optimizer="adamw", rules=None):
  return t.make(nms.Rules(rules or RULES), optimizer_def=OPTIMIZERS[optimizer]())


def written(samples):
  """(step, name) -> what is written of these samples."""
  found = {}
  note = lambda step, scalars: found.update({(step, name): x for name, x in scalars.items()})
  measure.write(samples, note)
  return found


@pytest.fixture(scope="module")
def sampled(what_t5x_wants, one_initialization):
  """(trainer, its first state again, seen) of seven steps, every third of which is sampled.

  seen: step -> (state before, state after, what is written, programs of the sampling).
  """
  run = t.begin(make(), metrics_every=3)
  step, state = run._partitioned_train_step, run.train_state
  start, shardings = jax.tree.map(np.asarray, state), jax.tree.map(lambda x: x.sharding, state)
  before, seen = start, {}
  for i in range(7):
    state, _ = step(state, t.batch_of(i))
    after = jax.tree.map(np.asarray, state)  # the next step is given its memory
    programs = [x._pjitted_fn._cache_size() for x in (step.before, step.after)]
    found = {name: value for (_, name), value in written(step.taken).items()}
    seen[i + 1], before = (before, after, found, programs), after
    step.taken.clear()
  yield run, lambda: jax.device_put(start, shardings), seen
  run.close()


def expected(model, before, batch, after):
  """The same from the definitions: by `metrics`, at this batch, before and after its update."""
  rules = model.stored_rules
  read = lambda s: (s.params, rules, *model.read(s.flax_mutables))
  grads = jax.grad(lambda p: model.loss_fn(p, batch, None, before.flax_mutables)[0])(before.params)
  seen = metrics.before(*read(before), grads)
  return metrics.summary(*read(after), None, after.param_states, seen, per_place=False)


def test_values_are_those_of_the_sampled_steps_alone(sampled):
  run, _, seen = sampled
  for i, (*_, got, programs) in seen.items():
    assert (bool(got), programs) == (i % 3 == 0, [1, 1] if i >= 3 else [0, 0])
  before, after, got, _ = seen[6]
  want = jax.jit(functools.partial(expected, run._model))(before, t.batch_of(5), after)
  assert sorted(got) == sorted(want)
  for name in want:
    np.testing.assert_allclose(got[name], float(want[name]), rtol=2e-4, atol=1e-30, err_msg=name)
  # Numbers that tell something.
  assert got["nm/flip_rate/all"] > 0 and got["nm/density"] < 1
  assert (got["nm/n/decoder/cross/o"], got["nm/m/encoder/qk"]) == (2, 4)


def test_the_gradient_that_is_measured_is_the_one_that_the_step_applies():
  """The same dropout, which microbatches draw anew: SGD with rate 1 shows what it applied."""
  module = t.t5_network.Transformer(
    t.t5_network.T5Config(**{**t.SIZES, "dropout_rate": 0.5}, **t.ENC_DEC)
  )
  rules = nms.Rules({"ff": t.recipe("mdgf_linear")})
  model = t.make(rules, module=module, optimizer="sgd", loss_normalizing_factor=10.0)
  run = t.begin(model, num_microbatches=4, metrics_every=1)
  before, step = jax.tree.map(np.asarray, run.train_state), run._partitioned_train_step
  after, _ = step(run.train_state, t.batch_of())
  grads = jax.tree.map(lambda a, b: a - b, before.params, after.params)
  state = model.read(before.flax_mutables)
  want = metrics.summary(before.params, model.stored_rules, *state, grads)
  got = {name: value for (_, name), value in written(step.taken).items()}
  name = "nm/grad_abs_var/all"
  np.testing.assert_allclose(got[name], want[name], rtol=1e-3)


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


@pytest.mark.parametrize("compiled", [False, True])
def test_a_sample_stands_at_its_own_step(sampled, tmp_path, monkeypatch, compiled):
  """T5X writes the mean over the steps of a summary under the last of them."""
  run, start, seen = sampled
  monkeypatch.setattr(run, "_compiled_train_step", None)
  run.train_state = start()
  run.train_metrics_manager.close()
  run.train_metrics_manager = trainer.MetricsManager("train", summary_dir=str(tmp_path))
  if compiled:
    run.compile_train(t.batch_of())
  batches = map(t.batch_of, range(7))
  for length in (2, 5):  # summaries at 2 and 7
    assert "loss" in run.train(batches, length).result()
  run._writes.join()
  run.train_metrics_manager.flush()
  found = events(tmp_path)
  assert {step for step, name in found if name == "loss"} == {2, 7}
  ours = {key: value for key, value in found.items() if key[1].startswith("nm/")}
  want = {(i, name): value for i in (3, 6) for name, value in seen[i][2].items()}
  assert sorted(ours) == sorted(want)
  for key in want:
    np.testing.assert_allclose(ours[key], want[key], rtol=1e-5, err_msg=key)


def names_of(model, per_place=False):
  state = t.initializer_of(model, t.Devices()).global_train_state_shape

  def look(state, batch):
    seen = measure.look_before(model, state, batch, jax.random.PRNGKey(0), per_place=per_place)
    return measure.look_after(model, state, seen, per_place)

  return set(jax.eval_shape(look, state, t.batch_of()).values)


def test_names():
  variances = {f"nm/{k}/{x}" for k in ("flip_rate", "grad_abs_var") for x in ("all", "kept")}
  patterns = {f"nm/{x}/{rule}" for rule in RULES for x in ("n", "m")}
  common = {"nm/density", "nm/density_target", "nm/D"} | variances | patterns
  both = lambda name: {f"nm/{name}/all", f"nm/{name}/kept"}
  assert names_of(make("sgd")) == common
  assert names_of(make("adafactor")) == common | both("second_moment_var_factored")
  whole = t.make(nms.Rules(RULES), optimizer="adafactor")  # too small to be factored
  assert names_of(whole) == common | both("second_moment_var")
  assert common < names_of(make("sgd"), per_place=True)


@pytest.mark.parametrize(
  "shape, axes",
  [
    ((24, 16), None),
    ((16, 24), None),
    ((16, 16), None),
    ((16, 3, 24), ("embed", "layers", "mlp")),
    ((4, 8, 16), ("heads", "kv", "embed")),
    ((24,), None),
  ],
)
def test_the_estimate_is_what_adafactor_divides_by(shape, axes):
  optimizer = adafactor.Adafactor(
    learning_rate=1.0, decay_rate=0.8, clipping_threshold=None, multiply_by_parameter_scale=False,
    min_dim_size_to_factor=8,
  )  # fmt: skip
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


def test_a_step_whose_update_was_skipped_is_no_sample(sampled):
  run, start, _ = sampled
  step, state = run._partitioned_train_step, start()
  assert not step.after(state, step.before(state, t.batch_of())).is_applied


def test_a_rule_with_two_patterns_and_a_skipped_update_are_not_written():
  of = lambda values, applied: measure.Sample(jnp.int32(7), jnp.bool_(applied), values)
  values = {"nm/n/ff": jnp.float32(0), "nm/m/ff": jnp.float32(4), "nm/D": jnp.float32(0)}
  assert written([of(values, True)]) == {(7, "nm/m/ff"): 4, (7, "nm/D"): 0}
  assert written([of(values, False)]) == {}


def test_training_is_the_same_program_with_metrics_and_without():
  texts = set()
  for every, per_place in ((None, False), (1, True), (3, False)):
    kw = {"metrics_every": every, "metrics_per_place": per_place}
    run = t.begin(make(), num_microbatches=4, **kw)
    step = run._partitioned_train_step
    assert isinstance(step, measure.SampledStep) == bool(every)
    texts.add(step.lower(run.train_state, t.batch_of()).as_text() if not every else
              step.lower(run.train_state, t.batch_of()).plain.as_text())  # fmt: skip
  assert len(texts) == 1


def test_sampling_communicates_nothing_for_masks():
  """Each device keeps the masks of its own shard from the one program to the other."""
  run = t.begin(make(), t.Devices(8, 2), metrics_every=1)
  seen = run._partitioned_train_step.before(run.train_state, t.batch_of())
  weights = dict(flatten(run.train_state.params))
  for path, mask in seen[0].masks.items():
    assert mask.sharding == weights[path].sharding, path
  assert any("model" in str(m.sharding.spec) for m in seen[0].masks.values())


class State:
  """A train state of a sparse step alone; notes when the host reads it."""

  def __init__(self, step, reads):
    self.flax_mutables = {COLLECTION: {"step": self}}
    self.step, self.reads = step, reads

  def __int__(self):
    self.reads.append(self.step)
    return self.step


@pytest.mark.parametrize(
  "every, first, count, skipped, due, read",
  [
    # The first; before each sampled step; after it.
    (4, 0, 13, (), [4, 8, 12], [0, 3, 4, 7, 8, 11, 12]),
    (100, 1000, 99, (), [], [1000]),
    (4, 0, 16, (1, 5, 10), [4, 8, 12], None),  # skipped updates shift nothing
    (4, 0, 6, (3,), [3, 4], None),  # where the skipped one was to be sampled, the next one is
  ],
)
def test_the_host_counts_and_reads_the_device_at_sampled_steps_alone(
  every, first, count, skipped, due, read
):
  reads, taken = [], []
  advance = lambda state, i: (State(state.step + (i not in skipped), reads), None)
  step = measure.SampledStep(advance, lambda *_: None, lambda new, _: new.step, every, taken)
  state = State(first, reads)
  for i in range(count):
    state, _ = step(state, i)
  assert taken == due and read in (None, reads)
