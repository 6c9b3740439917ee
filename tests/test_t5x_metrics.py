"""In T5X: what training measures of itself, when, and what it writes to the event file."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
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
  from t5x import adafactor, optimizers, trainer
  from test_t5x_adapter import one_initialization, what_t5x_wants  # noqa: F401  (fixtures)

  from nm_sparsity_jax.integrations.t5x import COLLECTION, SampledStep, measure

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
  "finite": lambda: optimizers.chain([optax.apply_if_finite(optax.adam(0.01), 9)]),
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


def steps(run, count, broken=None):
  """(state before, batch, state after, what is written) of each step."""
  after = jax.tree.map(np.asarray, run.train_state)
  state, step = run.train_state, run._partitioned_train_step
  for i in range(count):
    before, batch = after, t.broken(t.batch_of(i)) if i == broken else t.batch_of(i)
    state, _ = step(state, batch)
    after = jax.tree.map(np.asarray, state)  # the next step is given its memory
    found = written(step.taken)
    step.taken.clear()
    assert {at for at, _ in found} <= {int(after.step)}
    yield before, batch, after, {name: value for (_, name), value in found.items()}


def expected(model, before, batch, after):
  """The same from the definitions: by metrics.py, at this batch, before and after its update."""
  rules = model.stored_rules
  read = lambda s: (s.params, rules, *model.read(s.params, s.flax_mutables))
  grads = jax.grad(lambda p: model.loss_fn(p, batch, None, before.flax_mutables)[0])(before.params)
  out = {}

  def put(name, overall, places):
    out.update({name: overall} | {f"{name}/{path}": v for path, v in places.items()})

  def put_both(name, overall, places):
    for kind in ("all", "kept"):
      rest = {path: getattr(v, kind) for path, v in places.items()}
      put(f"nm/{name}/{kind}", getattr(overall, kind), rest)

  shares = metrics.density(*read(after))
  put("nm/density", shares.overall, shares.places)
  put("nm/density_target", shares.target, shares.targets)
  factors = metrics.decay(*read(after)[:3])
  sizes = {path: dict(flatten(after.params))[path].size for path in factors}
  mean = sum(factors[p] * n for p, n in sizes.items()) / sum(sizes.values())
  put("nm/D", mean, factors)
  places = rules.assign(after.params).places
  for path, now in metrics.pattern_now(*read(after)[:3]).items():
    for name, x in (("n", now.n), ("m", now.m)):
      out[f"nm/{name}/{path}"] = out[f"nm/{name}/{places[path].key}"] = x
  a, b = metrics.masks_of(*read(before)), metrics.masks_of(*read(after))
  put_both("flip_rate", metrics.flip_rate(a, b), {p: metrics.flip_rate(a[p], b[p]) for p in a})
  put_both("grad_abs_var", *metrics.grad_abs_variance(grads, *read(before)))
  if isinstance(model.optimizer_def, adafactor.Adafactor):
    estimates = optax.ScaleByAdamState(None, None, {p: estimate(after, p) for p in sizes})
    factored = metrics.second_moment_variance(estimates, *read(after))
    put_both("second_moment_var_factored", *factored)
  else:
    put_both("second_moment_var", *metrics.second_moment_variance(after.param_states, *read(after)))
  return out


def estimate(state, path):
  """Adafactor's v of a kernel (a, b), where its longer axis is the one of the columns."""
  node = state.param_states
  for name in path.split("/"):
    node = node[name]
  outer = jnp.outer(node.v_row, node.v_col) / jnp.mean(node.v_row)
  return outer if node.v_row.size == dict(flatten(state.params))[path].shape[0] else outer.T


def assert_close(got, want):
  assert sorted(got) == sorted(want)
  for name in want:
    np.testing.assert_allclose(got[name], float(want[name]), rtol=2e-4, atol=1e-30, err_msg=name)


@pytest.mark.parametrize(
  "optimizer, num_microbatches, due",
  [
    ("adamw", None, [3, 6]),
    # Microbatches are in the next test, and what Adafactor's numbers are is in
    # test_names and test_the_estimate_is_what_adafactor_divides_by.
    pytest.param("adafactor", 4, [3, 6], marks=pytest.mark.slow),
    ("finite", None, [4]),
  ],
)
def test_values_are_those_of_the_sampled_steps(optimizer, num_microbatches, due):
  model = make(optimizer, {"ff": RULES["ff"]} if optimizer == "finite" else None)
  run = t.begin(model, num_microbatches=num_microbatches, metrics_every=3, metrics_per_place=True)
  # The update that is left out is the third: the fourth is the one that was due.
  found = list(steps(run, 6, broken=2 if optimizer == "finite" else None))
  assert [i for i, (*_, got) in enumerate(found, 1) if got] == due
  before, batch, after, got = found[due[-1] - 1]
  assert_close(got, jax.jit(functools.partial(expected, model))(before, batch, after))
  if t.the_step(after) > t.PHASES.dense:  # numbers that tell something
    assert got["nm/flip_rate/all"] > 0 and got["nm/density"] < 1
    assert got["nm/grad_abs_var/all"] != got["nm/grad_abs_var/kept"]
    assert (got["nm/n/decoder/cross/o"], got["nm/m/encoder/qk"]) == (2, 4)


@pytest.mark.parametrize("num_microbatches", [None, 4])
def test_the_gradient_that_is_measured_is_the_one_that_the_step_applies(num_microbatches):
  """The same dropout, which microbatches draw anew: SGD with rate 1 shows what it applied."""
  module = t.t5_network.Transformer(
    t.t5_network.T5Config(**{**t.SIZES, "dropout_rate": 0.5}, **t.ENC_DEC)
  )
  rules = nms.Rules({"ff": t.recipe("mdgf_linear")})
  model = t.make(rules, module=module, optimizer="sgd", loss_normalizing_factor=10.0)
  run = t.begin(model, num_microbatches=num_microbatches, metrics_every=1)

  @jax.jit
  def variance(before, after):
    grads = jax.tree.map(lambda a, b: a - b, before.params, after.params)
    state = model.read(before.params, before.flax_mutables)
    return metrics.grad_abs_variance(grads, before.params, model.stored_rules, *state).overall

  for before, _, after, got in steps(run, 2):
    want = variance(before, after)
    np.testing.assert_allclose(got["nm/grad_abs_var/all"], want.all, rtol=1e-3)


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


@pytest.fixture(scope="module")
def every_third(what_t5x_wants, one_initialization):
  """A trainer that samples every third step, its first state again, and what eleven steps gave.

  That is {step: (what is written, how many programs the sampling had)}.
  """
  run = t.begin(make(), metrics_every=3)
  step, state = run._partitioned_train_step, run.train_state
  start, shardings = jax.tree.map(np.asarray, state), jax.tree.map(lambda x: x.sharding, state)
  seen = {}
  for i in range(11):
    state, _ = step(state, t.batch_of(i))
    compiled = [x._pjitted_fn._cache_size() for x in (step.before, step.after)]
    seen[i + 1] = {name: value for (_, name), value in written(step.taken).items()}, compiled
    step.taken.clear()
  yield run, lambda: jax.device_put(start, shardings), seen
  run.close()


def test_nothing_but_the_train_step_runs_or_compiles_where_it_is_not_sampled(every_third):
  _, _, seen = every_third
  for i, (got, compiled) in seen.items():
    assert (bool(got), compiled) == (i % 3 == 0, [1, 1] if i >= 3 else [0, 0])


def test_a_sample_stands_at_its_own_step(every_third, tmp_path):
  """Point 8: T5X's summary of step 920 showed the sample of 900, or a mean of several."""
  run, start, seen = every_third
  sampled = {i: got for i, (got, _) in seen.items()}
  assert [i for i, got in sampled.items() if got] == [3, 6, 9]
  run.train_state = start()
  run.train_metrics_manager.close()
  run.train_metrics_manager = trainer.MetricsManager("train", summary_dir=str(tmp_path))
  batches = map(t.batch_of, range(11))
  for length in (2, 1, 5, 3):  # summaries at 2, 3, 8 and 11
    summary = run.train(batches, length).result()
    assert "loss" in summary and "timing/uptime" in summary
  run._writes.join()
  run.train_metrics_manager.close()
  found = events(tmp_path)
  assert {step for step, name in found if name == "loss"} == {2, 3, 8, 11}
  ours = {key: value for key, value in found.items() if key[1].startswith("nm/")}
  want = {(i, k): value for i in (3, 6, 9) for k, value in sampled[i].items()}
  assert sorted(ours) == sorted(want)
  for key in want:
    np.testing.assert_allclose(ours[key], want[key], rtol=1e-5, err_msg=key)
  assert ours[3, "nm/flip_rate/all"] != ours[6, "nm/flip_rate/all"]
  assert not any("/layers_" in name for _, name in ours)


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
  assert names_of(make("adamw")) == common | both("second_moment_var")
  assert names_of(make("adafactor")) == common | both("second_moment_var_factored")
  nothing = {"ff": t.recipe("dense")}
  assert names_of(make("adafactor", nothing)) == names_of(make("adamw", nothing)) != set()
  whole = t.make(nms.Rules(RULES), optimizer="adafactor")  # too small to be factored
  assert names_of(whole) == common | both("second_moment_var")
  assert common < names_of(make("sgd"), per_place=True)
  with pytest.raises(ValueError, match="METRICS_EVERY=-1"):
    t.begin(make(), state=0, metrics_every=-1)


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


def test_a_window_of_one_rule_with_two_patterns_shows_none():
  """Geometric levels depend on the axis: 16 takes fewer than 32."""
  model = make(rules={"ff": t.recipe("sdgf_geometric", pattern="1:4")})
  run = t.begin(model, metrics_every=1, metrics_per_place=True)
  for *_, after, got in steps(run, 7):
    patterns = {
      tuple(got[f"nm/{x}/{p}"] for x in "nm")
      for p in model.stored_rules.assign(after.params).places
    }
    assert ("nm/n/ff" in got) == ("nm/m/ff" in got) == (len(patterns) == 1)
    if len(patterns) == 1:
      assert patterns == {(got["nm/n/ff"], got["nm/m/ff"])}


# --- what they cost ---------------------------------------------------------------------------


def test_training_is_the_same_program_and_the_same_bits_with_metrics_and_without():
  states, texts = {}, {}
  for every, per_place in ((None, False), (0, False), (1, True), (3, False)):
    kw = {"metrics_every": every, "metrics_per_place": per_place}
    run = t.begin(make(), num_microbatches=4, **kw)
    step, state = run._partitioned_train_step, run.train_state
    assert isinstance(step, SampledStep) == bool(every)
    texts[every] = step.lower(state, t.batch_of()).as_text()
    if every in (None, 1):  # never, and at every step
      for i in range(6):
        state, _ = step(state, t.batch_of(i))
      assert t.the_step(state) == 6
      states[every] = jax.tree.map(np.asarray, state.state_dict())
  assert len(set(texts.values())) == 1
  t.assert_equal(states[1], states[None])


def test_a_step_that_was_compiled_beforehand_samples_too(every_third, monkeypatch, tmp_path):
  run, start, _ = every_third
  monkeypatch.setattr(run, "_compiled_train_step", None)
  run.train_state = start()
  run.train_metrics_manager = trainer.MetricsManager("train", summary_dir=str(tmp_path))
  run.compile_train(t.batch_of())
  assert run._compiled_train_step.cost_analysis()  # of the train step
  got = run.train(map(t.batch_of, range(3)), 3).result()
  assert "loss" in got and not any(name.startswith("nm/") for name in got)
  run._writes.join()
  run.train_metrics_manager.flush()
  assert (3, "nm/density") in events(tmp_path)


def test_sampling_communicates_nothing_for_masks(request):
  """Each device keeps the masks of its own shard from the one program to the other."""
  partitioner = t.Devices(8, 2)
  run = t.begin(make(), partitioner, metrics_every=1)
  step, state = run._partitioned_train_step, run.train_state
  seen = step.before(state, t.batch_of())
  weights = dict(flatten(state.params))
  for path, mask in seen[0].masks.items():
    assert mask.sharding == weights[path].sharding, path
  assert any("model" in str(m.sharding.spec) for m in seen[0].masks.values())


class Device:
  """A train state of a sparse step alone; says when the host reads it."""

  def __init__(self, step, reads):
    self.flax_mutables = {COLLECTION: {"step": self}}
    self.step, self._reads = step, reads

  def __int__(self):
    self._reads.append(self.step)
    return self.step


def run_clock(clock, state, count, skipped=()):
  """The sparse steps that were sampled, and those that the host read."""
  sampled, reads = [], state._reads
  reads.clear()
  for i in range(count):
    is_due = clock.is_due(state)
    if is_due:
      sampled.append(state.step + (i not in skipped))
    state = Device(state.step + (i not in skipped), reads)
    clock.passed(state, is_due)
  return sampled, list(reads), state


def test_the_host_counts_and_reads_the_device_at_sampled_steps_alone():
  sampled, reads, state = run_clock(measure.Clock(4), Device(0, []), 13)
  assert sampled == [4, 8, 12]
  assert reads == [0, 3, 4, 7, 8, 11, 12]  # the first; before each sampled step; after it
  clock = measure.Clock(100)
  assert run_clock(clock, Device(1000, []), 99)[:2] == ([], [1000])
  # A restored state is another than the last one.
  assert run_clock(clock, Device(498, []), 3)[:2] == ([500], [498, 499, 500])


def test_an_update_that_was_skipped_does_not_shift_the_sampled_steps():
  sampled, reads, state = run_clock(measure.Clock(4), Device(0, []), 16, skipped=(1, 5, 10))
  assert sampled == [4, 8, 12] and state.step == 13
  # Where the skipped one was to be sampled, the next one is.
  sampled, _, state = run_clock(measure.Clock(4), Device(0, []), 6, skipped=(3,))
  assert sampled == [3, 4] and state.step == 5
