"""In T5X: the same sparse step in training, evaluation and inference; one term, one counter."""

import contextlib
import dataclasses
import functools
import os
import re
import shutil
import warnings

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import t5x_found

import nm_sparsity_jax as nms
from nm_sparsity_jax.core import groups
from nm_sparsity_jax.core.trees import flatten, map_with_names
from nm_sparsity_jax.recipes import RECIPES

pytestmark = [
  pytest.mark.t5x,
  # T5X and what it imports (TensorFlow, seqio, clu, orbax) warn on their own account.
  pytest.mark.filterwarnings("ignore"),
]

if reason := t5x_found.why_not():
  pytest.skip(reason, allow_module_level=True)

with warnings.catch_warnings(), jax.numpy_dtype_promotion("standard"):
  warnings.simplefilter("ignore")
  import t5x_task
  from t5x import adafactor, models, optimizers, partitioning, trainer, utils
  from t5x import train as t5x_train
  from t5x.examples.decoder_only import network as decoder_network
  from t5x.examples.scalable_t5 import network as scalable_network
  from t5x.examples.t5 import network as t5_network

  from nm_sparsity_jax.integrations import t5x as t5x_adapter
  from nm_sparsity_jax.models.t5 import network


T5X_WANTS = {
  # It does not run under strict promotion; its threads neither, so no context manager helps.
  "jax_numpy_dtype_promotion": "standard",
  "jax_numpy_rank_promotion": "allow",
}


@pytest.fixture(autouse=True, scope="module")
def what_t5x_wants():
  before = {name: jax.config.values[name] for name in T5X_WANTS}
  for name, value in T5X_WANTS.items():
    jax.config.update(name, value)
  yield
  for name, value in before.items():
    jax.config.update(name, value)


@pytest.fixture(autouse=True, scope="module")
def one_initialization():
  """Each network is initialized once: compiling that would be half of all the time."""
  with pytest.MonkeyPatch.context() as patch:
    for cls in (models.EncoderDecoderModel, models.DecoderOnlyModel):
      init = cls.get_initial_variables

      def initial(self, rng, input_shapes, input_types=None, init=init):
        key = repr(self.module)
        if key not in INITIAL:
          with jax.ensure_compile_time_eval():
            make = functools.partial(init, self, jax.random.PRNGKey(0), input_shapes, input_types)
            axes = {k: v for k, v in jax.eval_shape(make).items() if k != "params"}
            INITIAL[key] = {"params": jax.jit(lambda: make()["params"])(), **axes}
        return flax.core.freeze(INITIAL[key])

      patch.setattr(cls, "get_initial_variables", initial)
    yield


INITIAL = {}


# --- a tiny world -------------------------------------------------------------------------------

PHASES = nms.Phases(total=12, dense=3, finetune=3)
BOUNDARIES = {"dense ends": 3, "level 2": 5, "fine-tune": 9}
PATTERN = "1:4"
CUSTOM = ((3, "2:4", 1.0), (6, "1:4", 0.5))


def recipe(name, phases=PHASES, pattern=PATTERN, **fields):
  if name == "custom":
    fields = {"path": CUSTOM, **fields}
  return nms.recipe(name, pattern=pattern, phases=phases, **fields)


def rules_of(name, **kwargs):
  return nms.Rules({"ff": recipe(name, **kwargs), "decoder/cross/o": recipe(name, **kwargs)})


SIZES = dict(
  vocab_size=384, emb_dim=16, num_heads=2, head_dim=8, mlp_dim=32, dropout_rate=0.0,
  mlp_activations=("gelu", "linear"), logits_via_embedding=False, dtype="float32",
)  # fmt: skip
ENC_DEC = dict(num_encoder_layers=1, num_decoder_layers=1)
NETWORKS = {
  "t5": lambda: t5_network.Transformer(t5_network.T5Config(**SIZES, **ENC_DEC)),
  "scanned": lambda: scalable_network.Transformer(
    scalable_network.T5Config(
      **{**SIZES, "num_encoder_layers": 2, "num_decoder_layers": 2}, scan_layers=True,
      remat_policy="full",
    )
  ),
  "ours": lambda: network.Transformer(network.T5Config(**SIZES, **ENC_DEC)),
  "ours_scanned": lambda: network.Transformer(
    network.T5Config(
      **{**SIZES, "num_encoder_layers": 2, "num_decoder_layers": 2}, scan_layers=True,
      remat_policy="full",
    )
  ),
  "decoder": lambda: decoder_network.DecoderWrapper(
    decoder_network.TransformerConfig(**SIZES, num_layers=1)
  ),
}  # fmt: skip
OPTIMIZERS = {
  "adamw": lambda first=0: optimizers.adamw(0.01),
  "adafactor": lambda first=0: adafactor.Adafactor(
    decay_rate=0.8,
    step_offset=first,  # its decay counts global steps
    logical_factor_rules=adafactor.standard_logical_factor_rules(),
  ),
  "sgd": lambda: optimizers.sgd(1.0),
}


def make(rules, network="t5", optimizer="adamw", dense=False, **kwargs):
  """A model: ours, or T5X's own."""
  kwargs = {"module": NETWORKS[network](), "optimizer_def": OPTIMIZERS[optimizer](), **kwargs}
  kwargs |= {} if dense else {"rules": rules}
  if network == "decoder":
    cls = models.DecoderOnlyModel if dense else t5x_adapter.SparseDecoderOnlyModel
    return cls(vocabulary=t5x_task.VOCABULARY, **kwargs)
  cls = models.EncoderDecoderModel if dense else t5x_adapter.SparseEncoderDecoderModel
  both = dict.fromkeys(("input_vocabulary", "output_vocabulary"), t5x_task.VOCABULARY)
  return cls(**both, **kwargs)


def batch_of(seed=0, size=16, length=8, network="t5", padded=True):
  rng = np.random.default_rng(seed)
  targets = rng.integers(3, 380, (size, length)).astype(np.int32)
  if padded:
    targets *= np.arange(length) < rng.integers(2, length + 1, (size, 1))
  batch = {
    "decoder_target_tokens": targets,
    "decoder_input_tokens": np.pad(targets[:, :-1], ((0, 0), (1, 0))),
    "decoder_loss_weights": (targets > 0).astype(np.int32),
  }
  if network != "decoder":
    batch["encoder_input_tokens"] = rng.integers(3, 380, (size, length)).astype(np.int32)
  return batch


class Devices(partitioning.PjitPartitioner):
  """T5X's partitioner on the first devices, not on all."""

  def __init__(self, count=1, num_partitions=1):
    super().__init__(
      num_partitions=num_partitions,
      logical_axis_rules=partitioning.standard_logical_axis_rules(),
    )
    self._count = count

  @functools.cached_property
  def mesh(self):
    shape = (self._count // self._num_partitions, self._num_partitions)
    return jax.sharding.Mesh(np.reshape(jax.devices()[: self._count], shape), ("data", "model"))


def initializer_of(model, partitioner, network="t5", cls=utils.TrainStateInitializer, **kwargs):
  batch = batch_of(network=network)
  return cls(
    optimizer_def=kwargs.get("optimizer_def", model.optimizer_def),
    init_fn=model.get_initial_variables,
    input_shapes={k: v.shape for k, v in batch.items()},
    input_types={k: v.dtype for k, v in batch.items()},
    partitioner=partitioner,
  )


def begin(model, partitioner=None, network="t5", cls=t5x_adapter.SparseTrainer, state=None, **kw):
  """A trainer on a fresh train state."""
  partitioner = partitioner or Devices()
  start = initializer_of(model, partitioner, network)
  state = start.from_scratch(jax.random.PRNGKey(0)) if state is None else state
  return cls(
    model=model,
    train_state=state,
    partitioner=partitioner,
    eval_names=[],
    summary_dir=None,
    train_state_axes=start.train_state_axes,
    rng=jax.random.PRNGKey(1),
    **{"learning_rate_fn": lambda step: jnp.float32(0.01), "num_microbatches": None, **kw},
  )


def mine(state):
  return state.flax_mutables[t5x_adapter.COLLECTION]


def the_step(state):
  return int(mine(state)["step"])


def assert_equal(got, want, **close):
  got, want = dict(flatten(got)), dict(flatten(want))
  assert list(got) == list(want)
  for path in want:
    check = np.testing.assert_allclose if close else np.testing.assert_array_equal
    check(np.asarray(got[path]), np.asarray(want[path]), err_msg=path, **close)


# --- every recipe, every optimizer --------------------------------------------------------------


def finish(rules, optimizer, network="t5"):
  """Trains a whole run; the schedule, the masks and the end are right."""
  model = make(rules, network, optimizer)
  run = begin(model, network=network)
  step, effective = run._partitioned_train_step, jax.jit(model.effective)
  state = run.train_state
  assert the_step(state) == 0
  for t in range(PHASES.total):
    if t in (0, PHASES.dense - 1):  # equals dense until then
      assert_equal(effective(state.params, state.flax_mutables), state.params)
    state, _ = step(state, batch_of(t, network=network))
    assert the_step(state) == t + 1
  rules, last = model.stored_rules, model.read(state.params, state.flax_mutables)[1]
  final = jax.jit(lambda p, kept: nms.finalize(p, rules, 0, kept, early=True))(state.params, last)
  # Exactly n:m is also what the model predicts with now.
  assert_equal(effective(state.params, state.flax_mutables), final)
  sparse = set(rules.assign(state.params).places)
  for path, w in flatten(final):
    assert path in sparse or (w == dict(flatten(state.params))[path]).all(), path
  if not sparse:  # dense alone
    return
  report = nms.verify(final, rules)
  assert report.ok and {p.density for p in report.places} == {0.25}, str(report)
  assert {p.path for p in report.places} == sparse


# A kernel for each recipe in one network, hence one program: what is true of them there is true of
# each alone, as the slow tests have it.
PARTS = "encoder", "decoder/self", "decoder/cross"
KERNELS = [f"{part}/{kernel}" for part in PARTS for kernel in "qkvo"]
EVERY_RECIPE = nms.Rules({k: recipe(name) for k, name in zip(KERNELS, RECIPES, strict=False)})


@pytest.mark.parametrize("optimizer", ["adamw", "adafactor"])
def test_a_run_of_every_recipe_ends_sparse(optimizer):
  assert {r.name for r in EVERY_RECIPE.places.values()} == set(RECIPES)
  finish(EVERY_RECIPE, optimizer)


@pytest.mark.slow
@pytest.mark.parametrize("network", list(NETWORKS))
@pytest.mark.parametrize("optimizer", ["adamw", "adafactor"])
@pytest.mark.parametrize("name", RECIPES)
def test_a_run_ends_sparse_everywhere(name, optimizer, network):
  finish(rules_of(name) if network == "t5" else nms.Rules({"ff": recipe(name)}), optimizer, network)


def test_a_run_ends_sparse_in_a_scanned_network():
  finish(nms.Rules({"ff": recipe("idp")}), "adamw", "scanned")


# --- the loss, the term, the counter ------------------------------------------------------------


def one_step(model, state, batch, num_microbatches=None):
  @jax.jit
  def step(state, batch):
    return t5x_adapter.sparse_train_step(
      model, state, batch, jnp.float32(1), jax.random.PRNGKey(0), num_microbatches
    )[0]

  return step(state, batch)


def at_step(model, state, step):
  _, stored = model.read(state.params, state.flax_mutables)
  return state.replace_flax_mutables(model.write(state.flax_mutables, jnp.int32(step), stored))


def gradient(model, state, batch, num_microbatches=None):
  """By SGD with learning rate 1: what the step took off the parameters."""
  new = one_step(model, state, batch, num_microbatches)
  return jax.tree.map(lambda a, b: np.asarray(a) - np.asarray(b), state.params, new.params)


LAM = 0.3  # large, so that the term stands out of the rounding of the gradients
WITH_TERM = nms.Rules({"ff": recipe("sr_ste", lam=LAM)})


@functools.cache
def mean_gradient():
  """(params, batch) -> the gradient of the mean loss per target, from its definition: -log p."""
  model = make(WITH_TERM, optimizer="sgd")

  def mean_loss(params, batch):
    params = nms.sparsify(params, WITH_TERM, PHASES.dense)
    logits = models.EncoderDecoderModel._compute_logits(model, params, batch)
    ll = jnp.take_along_axis(
      jax.nn.log_softmax(logits), batch["decoder_target_tokens"][..., None], -1
    )
    weights = batch["decoder_loss_weights"]
    return -jnp.sum(ll[..., 0] * weights) / weights.sum()

  return jax.jit(jax.grad(mean_loss))


FIXED = [None, 40.0]
OF_THE_BATCH = ["NUM_REAL_TARGET_TOKENS", "NUM_TOTAL_TARGET_TOKENS", "AVERAGE_PER_SEQUENCE"]
SCALES = [(factor, None) for factor in FIXED + OF_THE_BATCH]
# Microbatches share a fixed factor, and each makes one of its own from its tokens; the rest of
# these repeat one or the other.
SCALES += [(40.0, 4), ("NUM_REAL_TARGET_TOKENS", 4)]
SCALES += [
  pytest.param(factor, 4, marks=pytest.mark.slow)
  for factor in (None, "NUM_TOTAL_TARGET_TOKENS", "AVERAGE_PER_SEQUENCE")
]


@pytest.mark.filterwarnings("ignore:step=.* is a constant:UserWarning")
@pytest.mark.filterwarnings("ignore:sr_ste at .* adds lam:UserWarning")
@pytest.mark.parametrize("factor, num_microbatches", SCALES)
def test_lambda_is_relative_to_the_mean_loss_per_target(factor, num_microbatches):
  """Taking T5X's gradient down to that of the mean loss takes the term down to lambda * W."""
  batch = batch_of(padded=factor != "AVERAGE_PER_SEQUENCE" and num_microbatches is None)
  model = make(WITH_TERM, optimizer="sgd", loss_normalizing_factor=factor)
  state = at_step(model, begin(model).train_state, PHASES.dense)
  found = dict(flatten(gradient(model, state, batch, num_microbatches)))
  mean = dict(flatten(jax.device_get(mean_gradient()(state.params, batch))))
  # Where no rule asks for it, no term.
  o = "decoder/layers_0/self_attention/out/kernel"
  scale = np.vdot(found[o], mean[o]) / np.vdot(mean[o], mean[o])
  np.testing.assert_allclose(found[o] / scale, mean[o], atol=2e-6)
  wi = "encoder/layers_0/mlp/wi_0/kernel"
  w = np.asarray(dict(flatten(state.params))[wi])
  pruned = np.where(nms.nm_mask(jnp.abs(w), nms.NM.parse(PATTERN)), 0, w)
  np.testing.assert_allclose(found[wi] / scale - mean[wi], LAM * pruned, atol=2e-5)


def test_microbatches_give_the_same_gradients():
  """With the term, with D between 1 and 0, and with scores, which are of the whole batch."""
  places = {"ff": "sr_ste", "decoder/cross/o": "snip", "encoder/qkv": "mdgf_linear"}
  rules = nms.Rules({place: recipe(name) for place, name in places.items()})
  model = make(rules, optimizer="sgd", loss_normalizing_factor=100.0)
  state = at_step(model, begin(model).train_state, PHASES.dense + 2)
  whole, parts = (one_step(model, state, batch_of(), k) for k in (1, 4))
  assert_equal(parts.params, whole.params, atol=1e-5)
  assert the_step(parts) == the_step(whole) == PHASES.dense + 3
  assert_equal(mine(parts)["score"], mine(whole)["score"], rtol=1e-4, atol=1e-7)


def test_snip_scores_the_plain_gradient_at_the_weights_where_it_was_taken():
  both = {"ff": recipe("snip"), "decoder/self/o": recipe("sr_ste", lam=1.0)}
  model = make(nms.Rules(both), optimizer="sgd", loss_normalizing_factor=1.0)
  state = at_step(model, begin(model).train_state, PHASES.dense)
  new = one_step(model, state, batch_of())
  loss = lambda p: model.loss_fn(p, batch_of(), None, state.flax_mutables)[0]
  g = jax.jit(jax.grad(loss))(state.params)
  for path, score in flatten(mine(new)["score"]):
    w, grad = (dict(flatten(tree))[path] for tree in (state.params, g))
    np.testing.assert_allclose(score, np.abs(w * grad), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
  "optimizer, counts",
  [
    (lambda: optimizers.chain([nms.count_steps(), optax.sgd(0.1)]), [1, 2, 3, 4]),
    (lambda: optimizers.sgd(0.1), [1, 2, 3, 4]),  # keeps no count
    (lambda: optimizers.chain([optax.apply_if_finite(optax.adam(0.1), 9)]), [1, 1, 2, 3]),
  ],
  ids=["count_steps", "no count", "apply_if_finite"],
)  # fmt: skip
def test_the_step_counts_applied_updates(optimizer, counts):
  model = make(rules_of("idp"), optimizer_def=optimizer())
  run = begin(model)
  state, seen = run.train_state, []
  for t in range(4):
    batch = broken(batch_of(t)) if t == 1 and counts[1] == 1 else batch_of(t)
    state, _ = run._partitioned_train_step(state, batch)
    seen.append(the_step(state))
  assert seen == counts


def broken(batch):
  """One that makes the loss NaN."""
  nan = np.full(batch["decoder_loss_weights"].shape, np.nan, np.float32)
  return {**batch, "decoder_loss_weights": nan}


def test_a_count_that_came_with_the_optimizer_state_does_not_matter():
  model = make(rules_of("sr_ste"))
  run = begin(model)
  old = lambda leaf: jnp.full_like(leaf, 1_000_000) if leaf.dtype == jnp.int32 else leaf
  dense = run.train_state._optimizer
  dense = dense.replace(state=jax.tree.map(old, dense.state))
  state = run.train_state.replace(_optimizer=dense)
  assert int(state.step) == int(nms.step_count(state.param_states)) == 1_000_000
  new = one_step(model, state, batch_of())
  assert the_step(new) == 1 and int(new.step) == 1_000_001


# --- what the model sees ------------------------------------------------------------------------


# "ours" and "scanned" have each half of "ours_scanned"; test_t5_t5x.py compares it with "scanned".
@pytest.mark.parametrize(
  "network",
  [
    pytest.param(name, marks=pytest.mark.slow if name == "ours_scanned" else ())
    for name in NETWORKS
  ],
)
def test_loss_scores_and_predictions_are_those_of_the_effective_weights(network):
  """Of a mask that is derived, with D between 1 and 0, and of one that is stored."""
  derived, kept = r".*/wi(_\d)?/kernel", r".*/mlp/wo/kernel"
  rules = nms.Rules({derived: recipe("mdgf_linear"), kept: recipe("snip")})
  model, twin = make(rules, network), make(None, network, dense=True)
  state = begin(model, network=network).train_state
  # As if it had been taken.
  weights, places = dict(flatten(state.params)), model.stored_rules.assign(state.params).places
  take = lambda path, _: nms.nm_mask(jnp.abs(weights[path]), PATTERN, places[path].axis)
  read = model.read(state.params, state.flax_mutables)[1]
  renewed = jax.tree.map(jnp.ones_like, mine(state)["renewed"])
  stored = {**read, "mask": map_with_names(take, mine(state)["mask"]), "renewed": renewed}
  state = state.replace_flax_mutables(model.write(state.flax_mutables, jnp.int32(0), stored))
  state = at_step(model, state, 6)
  batch = batch_of(network=network)
  if network == "decoder":
    batch["decoder_causal_attention"] = (np.arange(8) < 3).astype(np.int32) * np.ones((16, 1), int)
  sparse = jax.jit(model.effective)(state.params, state.flax_mutables)
  changed = {k for k, w in flatten(sparse) if (w != weights[k]).any()}
  assert changed == set(places) and all("/mlp/" in path for path in changed)
  assert {re.sub(r"_\d", "", path.split("/")[-2]) for path in changed} == {"wi", "wo"}

  def seen(model, params, **told):
    run = lambda p: (
      model.loss_fn(p, batch, None, **told)[0],
      model.score_batch(p, batch, **told),
      model.predict_batch(p, batch, jax.random.PRNGKey(0), **told),
    )
    return dict(zip(("loss", "scores", "predictions"), jax.jit(run)(params), strict=True))

  assert_equal(seen(model, state.params, flax_mutables=state.flax_mutables), seen(twin, sparse))


def test_one_shot_without_a_dense_phase_takes_its_mask_from_restored_weights():
  phases = nms.Phases(total=4)
  model = make(nms.Rules({"ff": recipe("one_shot", phases=phases)}))
  # T5X restores parameters and fills in `flax_mutables` from an initialization.
  fresh = initializer_of(model, Devices()).from_scratch(jax.random.PRNGKey(0))
  restored = fresh.replace_params(jax.tree.map(lambda w: w[::-1] if w.ndim else w, fresh.params))
  state = begin(model, state=restored).train_state
  for path, mask in flatten(mine(state)["mask"]):
    w = dict(flatten(restored.params))[path]
    np.testing.assert_array_equal(mask, nms.nm_mask(jnp.abs(w), nms.NM.parse(PATTERN)))


def test_an_adafactor_that_counts_from_elsewhere_is_told(capsys):
  """A model file after the run file takes `step_offset` back."""
  for first in (0, 5):
    model = make(rules_of("sr_ste"), optimizer_def=OPTIMIZERS["adafactor"](first))
    state = initializer_of(model, Devices()).from_scratch(jax.random.PRNGKey(0))
    begin(model, state=state.replace_step(jnp.int32(5)))
    said = "Adafactor has step_offset=0, but its moments start at step 5: name the model file"
    assert (said in capsys.readouterr().out) == (first == 0)


def test_groups_that_devices_cut_are_named():
  """Nothing said that masks make devices exchange weights in each step."""
  from nm_sparsity_jax.integrations.t5x.initializers import cuts

  shapes = {f"layers_{i}": {"mlp": {"wo": {"kernel": np.zeros((48, 16))}}} for i in range(2)}
  places = nms.Rules({"ff": recipe("sr_ste", pattern="1:8")}).assign({"encoder": shapes}).places
  split = dict.fromkeys(places, ("model", None))
  (line,) = cuts(places, split, {"data": 1, "model": 4})
  assert line.startswith("encoder/layers_{0,1}/mlp/wo/kernel: 4 devices share 48 weights along ax")
  for whole in ((split, {"model": 3}), (dict.fromkeys(places, (None, "model")), {"model": 4})):
    assert not [*cuts(places, *whole)]
  assert not [*cuts(places, {}, {"model": 4})]


# --- refusals -----------------------------------------------------------------------------------


def test_what_cannot_go_on_is_refused():
  model = make(rules_of("sr_ste"))
  state = begin(model).train_state
  half = state.replace_params(jax.tree.map(lambda w: w.astype(jnp.bfloat16), state.params))
  with pytest.raises(ValueError, match="restored as bfloat16.*dtype = 'float32'"):
    model.predict_batch(half.params, batch_of(), flax_mutables=state.flax_mutables)
  with pytest.raises(ValueError, match="no 'nm_sparsity' in flax_mutables"):
    model.score_batch(state.params, batch_of())
  other = make(rules_of("sr_ste", lam=0.5))
  for refuse in (lambda: begin(other, state=state), lambda: other.check(state)):
    with pytest.raises(
      ValueError, match="(?s)trained with.*ff: sr_ste 1:4, total=12.*has\n.*lam=0.5"
    ):
      refuse()
  with pytest.raises(ValueError, match="PRETRAINED_STEPS=7, but .* global step 0.*STEPS=0"):
    begin(model, pretrained_steps=7)
  begin(model, train_steps=12)
  with pytest.raises(ValueError, match=r"TRAIN_STEPS=11, but .* ends at .* = 12. Leave TRAIN"):
    begin(model, train_steps=11)
  with pytest.raises(ValueError, match="TRAIN_STEPS_RELATIVE=5: .* each restart adds a whole run"):
    begin(model, train_steps_relative=5)
  chain = optimizers.chain([nms.sr_ste(rules_of("sr_ste")), optax.adam(0.1)])
  with pytest.raises(ValueError, match="holds nms.sr_ste.*act twice"):
    begin(make(rules_of("sr_ste"), optimizer_def=chain))
  for tx in (
    nms.sparse(optax.adam(0.1), rules_of("idp")),
    nms.sparse(optax.sgd(0.1), rules_of("sr_ste")),
  ):
    with pytest.raises(ValueError, match="holds nms.sparse.*act twice"):
      begin(make(rules_of("sr_ste"), optimizer_def=optimizers.OptaxWrapper(tx)))
  steps = optimizers.chain([optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation()])
  with pytest.raises(ValueError, match="optax.MultiSteps.*num_microbatches"):
    begin(make(rules_of("sr_ste"), optimizer_def=steps))
  # Of a wider network; of another start than the run began with, at its beginning and later.
  wide = state.replace_params(jax.tree.map(lambda w: jnp.concatenate([w, w], -1), state.params))
  with pytest.raises(ValueError, match=r"restored with the shape .* has .*another size"):
    begin(model, state=wide)
  for now, step in ((0, 0), (3, 3)):
    later = state.replace_step(jnp.int32(now))
    stored = {k: v for k, v in mine(state).items() if k == "mask"}
    later = later.replace_flax_mutables(model.write(later.flax_mutables, jnp.int32(step), stored))
    begin(model, state=later, pretrained_steps=0)
    with pytest.raises(ValueError, match="PRETRAINED_STEPS=2, but .* global step 0.*STEPS=0"):
      begin(model, state=later, pretrained_steps=2)
  with pytest.raises(ValueError, match="has no rules"):
    begin(make(None, dense=True), state=state)
  with pytest.raises(ValueError, match="needs rules="):
    make(None)
  many = {
    f"decoder/layers_{i}/mlp/wo/kernel_{os.urandom(9).hex()}": recipe("idp") for i in range(300)
  }
  with pytest.raises(ValueError, match="bytes, and a checkpoint keeps 4096"):
    make(nms.Rules(many))


def test_other_rules_that_nothing_checked_give_no_number():
  model, other = make(rules_of("mdgf_linear")), make(rules_of("mdgf_linear", beta=0.1))
  state = begin(model).train_state
  initializer_of(other, Devices())
  loss = lambda m: jax.jit(lambda s: m.eval_fn(s.params, batch_of(), s.flax_mutables)[0])(state)
  assert np.isfinite(loss(model)) and np.isnan(loss(other))


def test_a_network_and_a_model_agree_on_rules():
  ours = lambda rules: network.Transformer(network.T5Config(**SIZES, **ENC_DEC, rules=rules))
  model = make(None, module=ours(rules_of("idp")))
  assert model.rules == rules_of("idp") and model.module.config.rules is None
  assert make(rules_of("idp"), module=ours(rules_of("idp"))).rules == rules_of("idp")
  with pytest.raises(ValueError, match="model and its network have different rules"):
    make(rules_of("snip"), module=ours(rules_of("idp")))


def test_a_train_state_is_checked_when_it_is_restored():
  model, other = make(rules_of("sr_ste")), make(rules_of("sr_ste", lam=0.5))
  state = begin(model).train_state
  checked = lambda m: (
    initializer_of(
      m, Devices(), cls=t5x_adapter.SparseTrainStateInitializer
    ).global_train_state_shape
  )
  assert_equal(checked(model).restore_state(state.state_dict()).params, state.params)
  with pytest.raises(ValueError, match="trained with the rules"):
    checked(other).restore_state(state.state_dict())


def test_structures_of_checkpoints():
  sparse = {"target": {"w": 0}, "flax_mutables": {"nm_sparsity": {"step": 0, "rules": 0}}}
  stored = {
    "target": {"w": 0},
    "flax_mutables": {"nm_sparsity": {"step": 0, "rules": 0, "mask": {"w": 0}}},
  }
  dense = {"target": {"w": 0}}
  assert t5x_adapter.require_sparse(sparse, sparse) is sparse
  assert t5x_adapter.resume_sparse(dense, stored) is dense  # starts from it
  more = {"target": {"w": 0, "a": {"b": 0}}}
  with pytest.raises(ValueError, match="has no a/b, which would start from random values"):
    t5x_adapter.resume_sparse(dense, more)
  assert t5x_adapter.resume_sparse(dense, more, fresh="a/.*") is dense
  with pytest.raises(ValueError, match="checkpoint is dense"):
    t5x_adapter.require_sparse(dense, sparse)
  with pytest.raises(ValueError, match="MODEL_DIR holds checkpoints of a dense run"):
    t5x_adapter.resume_sparse(dense, sparse, is_resuming=True)
  for refuse in (
    t5x_adapter.require_sparse,
    functools.partial(t5x_adapter.resume_sparse, is_resuming=True),
  ):
    with pytest.raises(ValueError, match="other rules: this run keeps nm_sparsity/mask/w"):
      refuse(sparse, stored)


# --- devices ------------------------------------------------------------------------------------


def collectives(compiled):
  kinds = "all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter"
  text = compiled.as_text()
  return {kind: len(re.findall(rf" {kind}(-start)?\(", text)) for kind in kinds}


# Our network has the tree and the logical axes of T5X's: test_t5_t5x.py.
@pytest.mark.parametrize("network", ["t5", pytest.param("ours", marks=pytest.mark.slow)])
def test_model_parallel(network):
  """A derived mask and a stored one, of kernels that are cut along each of their axes."""
  names = {"ff": "sr_ste", "decoder/qkv": "sr_ste", "encoder/qkv": "idp", "o": "idp"}
  rules = nms.Rules({place: recipe(name) for place, name in names.items()})
  make_model = lambda: make(rules, network, optimizer="sgd", loss_normalizing_factor=100.0)
  got = {}
  for count, parts in ((1, 1), (8, 2)):
    model = make_model()
    run = begin(model, Devices(count, parts), network)
    state = at_step(model, run.train_state, PHASES.dense + 3)
    weights = jax.tree.map(np.asarray, state.params)
    sparse = jax.jit(model.effective)(state.params, state.flax_mutables)
    if parts == 2:
      wi = dict(flatten(state.params))["encoder/layers_0/mlp/wi_0/kernel"]
      assert wi.sharding.spec[-1] == "model"
      for path, mask in flatten(mine(state).get("mask", {})):
        assert mask.sharding == dict(flatten(state.params))[path].sharding
    new = run._partitioned_train_step(state, batch_of())[0]
    grads = jax.tree.map(lambda a, b: a - np.asarray(b), weights, new.params)
    got[count] = jax.tree.map(np.asarray, (sparse, mine(new).get("mask", {}))), grads
  assert_equal(*(jax.tree.map(lambda w: w != 0, got[c][0]) for c in (8, 1)))
  assert_equal(got[8][1], got[1][1], atol=1e-5)


def test_evaluation_and_inference_mask_by_shard(monkeypatch):
  """Without a trainer too: on several TPUs each device makes the masks of its shard in one pass."""
  model, devices = make(rules_of("sr_ste")), Devices(8, 2)
  state = begin(model, devices).train_state
  model = make(rules_of("sr_ste"))  # one that no trainer told anything
  initializer_of(model, devices, cls=t5x_adapter.SparseTrainStateInitializer)
  want = jax.jit(model.effective)(state.params, state.flax_mutables)
  calls = []
  monkeypatch.setattr(
    jax, "shard_map", lambda *a, m=jax.shard_map, **k: calls.append(k["in_specs"]) or m(*a, **k)
  )
  monkeypatch.setattr(groups, "_PLATFORM", "cpu")
  compiled = jax.jit(lambda *a: model.effective(*a)).lower(state.params, state.flax_mutables)
  assert len(calls) == len(model.stored_rules.assign(model.made).places)
  assert all("model" in spec for spec in calls)
  compiled = compiled.compile()
  assert not any(collectives(compiled).values())
  assert_equal(compiled(state.params, state.flax_mutables), want)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Averaged(nms.Recipe):
  """A recipe of a user's own: it masks by an average of the weight, and calls a scalar a score."""

  name = "averaged"
  stateful = True
  pattern: nms.NM
  phases: nms.Phases

  def chosen(self, w, step, axis, stored):
    return stored

  def renewals(self, step):
    return jnp.asarray(step, jnp.int32)

  def first_state(self, groups, w):
    mask = groups.magnitude_mask(w, self.pattern)
    return {"mask": mask, "average": w, "score": jnp.max(jnp.abs(w))}

  def next_state(self, groups, state, w, step, last, grad, grad_at):
    return self.first_state(groups, (state["average"] + w) / 2)


def test_what_a_recipe_of_ones_own_keeps_is_sharded_by_its_shape():
  """Before, 'mask' and 'score' were sharded, whatever their shape, and all else was copied."""
  rules = nms.Rules({"encoder/ff": Averaged(pattern=PATTERN, phases=PHASES)})
  run = begin(make(rules, optimizer="sgd"), Devices(8, 2))
  state, _ = run._partitioned_train_step(run.train_state, batch_of())
  assert the_step(state) == 1
  weights, kept = dict(flatten(state.params)), mine(state)
  for path, average in flatten(kept["average"]):
    assert average.sharding == weights[path].sharding
    assert not average.sharding.is_fully_replicated
  assert [x.shape for _, x in flatten(kept["score"])] == [()] * 3


@functools.cache
def collectives_of(name, network, parts):
  """Those of the train step with a recipe in all places; name None = T5X's own, dense."""
  rules = name and nms.Rules({place: recipe(name) for place in ("ff", "qkv", "o")})
  model, partitioner = make(rules, network, dense=name is None), Devices(8, 2)
  cls = t5x_adapter.SparseTrainer if name else trainer.Trainer
  run = begin(model, partitioner, network, cls=cls, num_microbatches=parts)
  batch = batch_of(network=network)
  return collectives(partitioner.compile(run._partitioned_train_step, run.train_state, batch))


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
  "name, network, parts",
  [
    ("sr_ste", "t5", None),
    # That of each recipe, without T5X: test_train_sharded.py.
    pytest.param("sdgf_stepwise", "t5", None, marks=SLOW),
    pytest.param("sr_ste", "ours", 4, marks=SLOW),
    pytest.param("idp", "t5", 4, marks=SLOW),
    pytest.param("idp", "ours_scanned", None, marks=SLOW),
  ],
)
def test_masks_add_no_communication(name, network, parts):
  """The compiled train step has the collectives of the dense one.

  With microbatches lambda needs the number of the whole batch's targets: one scalar to reduce.
  """
  counts = collectives_of(name, network, parts)
  wanted = dict(collectives_of(None, network, parts))
  wanted["all-reduce"] += bool(parts)
  assert sum(wanted.values()) > 1 and counts == wanted


# --- checkpoints --------------------------------------------------------------------------------


def train(model, model_dir, steps, restore=None, cls=None, **kw):
  """t5x.train.train, configured as gin_configs/runs/t5x_finetune.gin does it."""
  data = utils.DatasetConfig(
    mixture_or_task_name="nm_test_sort", task_feature_lengths={"inputs": 8, "targets": 8},
    split="train", batch_size=16, shuffle=True, seed=0, pack=True,
  )  # fmt: skip
  if restore is not None:
    restore = utils.RestoreCheckpointConfig(
      path=str(restore), mode="specific", dtype="float32", fallback_to_scratch=True,
      assignment_map=((r"flax_mutables.*|state/param_states.*", None),),
      state_transformation_fns=[t5x_adapter.resume_sparse],
    )  # fmt: skip
  with contextlib.suppress(FileExistsError):
    os.makedirs(model_dir)
  return t5x_train.train(
    model=model, train_dataset_cfg=data, train_eval_dataset_cfg=None, infer_eval_dataset_cfg=None,
    checkpoint_cfg=utils.CheckpointConfig(
      save=utils.SaveCheckpointConfig(
        period=100, save_dataset=True, checkpoint_steps=kw.pop("save_at", [])
      ),
      restore=restore,
    ),
    partitioner=Devices(),
    trainer_cls=functools.partial(
      cls or t5x_adapter.SparseTrainer, num_microbatches=None,
      learning_rate_fn=lambda step: jnp.float32(0.01), **kw,
    ),
    model_dir=str(model_dir), total_steps=steps, eval_steps=0, eval_period=0, random_seed=0,
    summarize_config_fn=lambda *args: None,
    get_dataset_fn=functools.partial(t5x_adapter.get_dataset, model_dir=str(model_dir)),
  )[1]  # fmt: skip


@pytest.fixture(scope="module")
def dense_checkpoints(tmp_path_factory):
  """Of T5X's own model and trainer: after two steps, and the same with its step rewritten."""
  root = tmp_path_factory.mktemp("dense")
  state = train(make(None, dense=True), root / "two", 2, cls=trainer.Trainer)
  old = state.replace_step(jnp.int32(1_000_000))
  saved = utils.SaveCheckpointConfig(save_dataset=False)
  shapes = initializer_of(make(None, dense=True), Devices()).global_train_state_shape
  manager = utils.create_orbax_checkpoint_manager(
    save_cfg=saved, train_state=shapes, partitioner=Devices(), model_dir=str(root)
  )
  manager.save(old)
  manager.wait_until_finished()
  return {2: root / "two/checkpoint_2", 1_000_000: root / "checkpoint_1000000"}, state.params


def assert_same_state(got, want):
  assert_equal(got.state_dict(), want.state_dict())


# The first kills a run within its levels and takes one of the two starts; that the global step of
# a start does not matter, test_a_count_that_came_with_the_optimizer_state_does_not_matter holds.
EVERY = [pytest.param("idp", "adamw", [2], ["level 2"], id="idp-adamw")]
EVERY += [
  pytest.param(name, optimizer, [2, 1_000_000], list(BOUNDARIES), marks=pytest.mark.slow)
  for name in RECIPES
  for optimizer in ("adamw", "adafactor")
]


@pytest.mark.parametrize("name, optimizer, starts, kills", EVERY)
def test_a_run_from_a_dense_checkpoint_and_its_resumption(
  name, optimizer, starts, kills, dense_checkpoints, tmp_path
):
  paths, params = dense_checkpoints
  make_it = lambda pretrained: make(rules_of(name), optimizer_def=OPTIMIZERS[optimizer](pretrained))
  finals = {}
  for pretrained in starts:
    model, path = make_it(pretrained), paths[pretrained]
    seen = []
    read = model.read

    def spy(params, flax_mutables, read=read, seen=seen):
      step, state = read(params, flax_mutables)
      if not isinstance(step, jax.core.Tracer):
        seen.append((int(step), jax.tree.map(np.array, params)))  # the step is given its memory
      return step, state

    model.read = spy
    final = train(
      model, tmp_path / str(pretrained), pretrained + PHASES.total, path,
      # The end too: past the last of these T5X saves that one again.
      save_at=[pretrained + b for b in (*BOUNDARIES.values(), PHASES.total)],
      pretrained_steps=pretrained,
    )  # fmt: skip
    assert seen[0][0] == 0  # before the first step
    assert_equal(seen[0][1], params)  # of the dense checkpoint
    assert int(final.step) == pretrained + PHASES.total and the_step(final) == PHASES.total
    finals[pretrained] = final
    _, last = read(final.params, final.flax_mutables)
    done = nms.finalize(final.params, model.stored_rules, 0, last, early=True)
    if name != "dense":
      report = nms.verify(done, rules_of(name))
      assert report.ok and {p.density for p in report.places} == {0.25}
    assert_equal(finals[2].params, final.params)
  for boundary in (BOUNDARIES[kill] for kill in kills):  # the restore settings stay as they were
    again = tmp_path / f"again_{boundary}"
    shutil.copytree(tmp_path / f"2/checkpoint_{2 + boundary}", again / f"checkpoint_{2 + boundary}")
    resumed = train(make_it(2), again, 2 + PHASES.total, paths[2], pretrained_steps=2)
    assert_same_state(resumed, finals[2])
