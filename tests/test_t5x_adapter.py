"""In T5X: the same sparse step in training, evaluation and inference; one term, one counter."""

import functools
import re
import warnings

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import t5x_found

import nm_sparsity_jax as nms
from nm_sparsity_jax.core.trees import flatten
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
  from t5x.examples.decoder_only import network as decoder_network
  from t5x.examples.scalable_t5 import network as scalable_network
  from t5x.examples.t5 import network as t5_network

  from nm_sparsity_jax.integrations import t5x as t5x_adapter
  from nm_sparsity_jax.integrations.t5x import models as t5x_models
  from nm_sparsity_jax.models.t5 import network


@pytest.fixture(autouse=True, scope="module")
def what_t5x_wants():
  """T5X does not run under strict promotion; its threads neither, so no context manager helps."""
  wanted = {"jax_numpy_dtype_promotion": "standard", "jax_numpy_rank_promotion": "allow"}
  before = {name: jax.config.values[name] for name in wanted}
  for name, value in wanted.items():
    jax.config.update(name, value)
  yield
  for name, value in before.items():
    jax.config.update(name, value)


INITIAL = {}


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


# --- a tiny world -------------------------------------------------------------------------------

PHASES = nms.Phases(total=12, dense=3, finetune=3)
PATTERN = "1:4"


def recipe(name, phases=PHASES, pattern=PATTERN, **fields):
  if name == "custom":
    fields = {"path": ((3, "2:4", 1.0), (6, "1:4", 0.5)), **fields}
  return nms.recipe(name, pattern=pattern, phases=phases, **fields)


def rules_of(name, **kwargs):
  return nms.Rules({"ff": recipe(name, **kwargs), "decoder/cross/o": recipe(name, **kwargs)})


SIZES = dict(
  vocab_size=384, emb_dim=16, num_heads=2, head_dim=8, mlp_dim=32, dropout_rate=0.0,
  mlp_activations=("gelu", "linear"), logits_via_embedding=False, dtype="float32",
)  # fmt: skip
ENC_DEC = dict(num_encoder_layers=1, num_decoder_layers=1)
TWO = dict(num_encoder_layers=2, num_decoder_layers=2, scan_layers=True, remat_policy="full")


def of(module, **fields):
  return lambda: module.Transformer(module.T5Config(**SIZES, **fields))


NETWORKS = {
  "t5": of(t5_network, **ENC_DEC),
  "scanned": of(scalable_network, **TWO),
  "ours": of(network, **ENC_DEC),
  "ours_scanned": of(network, **TWO),
  "decoder": lambda: decoder_network.DecoderWrapper(
    decoder_network.TransformerConfig(**SIZES, num_layers=1)
  ),
}
OPTIMIZERS = {
  "adamw": lambda: optimizers.adamw(0.01),
  "adafactor": lambda first=0: adafactor.Adafactor(
    decay_rate=0.8,
    step_offset=first,  # its decay counts global steps
    logical_factor_rules=adafactor.standard_logical_factor_rules(),
  ),
  "sgd": lambda: optimizers.sgd(1.0),
}


def make(rules, network="t5", optimizer="adamw", dense=False, **kwargs):
  """A model: T5X's own, or the same with rules."""
  kwargs = {"module": NETWORKS[network](), "optimizer_def": OPTIMIZERS[optimizer](), **kwargs}
  if network == "decoder":
    model = models.DecoderOnlyModel(vocabulary=t5x_task.VOCABULARY, **kwargs)
  else:
    both = dict.fromkeys(("input_vocabulary", "output_vocabulary"), t5x_task.VOCABULARY)
    model = models.EncoderDecoderModel(**both, **kwargs)
  return model if dense else t5x_adapter.sparse(model, rules)


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
  defaults = dict(
    eval_names=[], summary_dir=None, rng=jax.random.PRNGKey(1), num_microbatches=None,
    learning_rate_fn=lambda step: jnp.float32(0.01),
  )  # fmt: skip
  return cls(
    model=model,
    train_state=state,
    partitioner=partitioner,
    train_state_axes=start.train_state_axes,
    **defaults | kw,
  )


def mine(state):
  return state.flax_mutables[t5x_adapter.COLLECTION]


def the_step(state):
  return int(mine(state)["step"])


def at_step(model, state, step):
  _, stored = model.read(state.flax_mutables)
  return state.replace_flax_mutables(model.write(state.flax_mutables, jnp.int32(step), stored))


def assert_equal(got, want, **close):
  got, want = dict(flatten(got)), dict(flatten(want))
  assert list(got) == list(want)
  for path in want:
    check = np.testing.assert_allclose if close else np.testing.assert_array_equal
    check(np.asarray(got[path]), np.asarray(want[path]), err_msg=path, **close)


# --- every recipe -------------------------------------------------------------------------------

# A kernel for each recipe in one network, hence one program.
KERNELS = [f"{x}/{k}" for x in ("encoder", "decoder/self", "decoder/cross") for k in "qkvo"]
EVERY_RECIPE = nms.Rules({k: recipe(name) for k, name in zip(KERNELS, RECIPES, strict=False)})


@pytest.mark.parametrize(
  "network, optimizer", [("t5", "adamw"), ("scanned", "adafactor"), ("decoder", "adamw")]
)
def test_a_run_counts_equals_dense_at_first_and_ends_sparse(network, optimizer):
  rules = EVERY_RECIPE if network == "t5" else nms.Rules({"ff": recipe("idp")})
  model = make(rules, network, optimizer)
  run = begin(model, network=network)
  step, effective = run._partitioned_train_step, jax.jit(model.effective)
  state = run.train_state
  for t in range(PHASES.total):
    if t in (0, PHASES.dense - 1):
      assert_equal(effective(state.params, state.flax_mutables), state.params)
    state, _ = step(state, batch_of(t, network=network))
    assert the_step(state) == t + 1
  rules = model.stored_rules
  final = nms.finalize(state.params, rules, 0, model.read(state.flax_mutables)[1], early=True)
  # Exactly n:m is also what the model predicts with now.
  assert_equal(effective(state.params, state.flax_mutables), final)
  report = nms.verify(final, rules)
  assert report.ok and {p.density for p in report.places} == {0.25}, str(report)


def test_the_recipe_dense_is_t5xs_own_run_bit_for_bit():
  runs = (
    begin(make(nms.Rules({"ff": recipe("dense")}))),
    begin(make(None, dense=True), cls=trainer.Trainer),
  )
  found = []
  for run in runs:
    state = run.train_state
    for t in range(3):
      state, metrics = run._partitioned_train_step(state, batch_of(t))
    found.append((state.params, state.param_states, metrics["loss"].compute()))
  assert_equal(*found)


# --- the loss, the term, the counter ------------------------------------------------------------


@functools.partial(jax.jit, static_argnums=(0, 3))
def one_step(model, state, batch, num_microbatches=None):
  return t5x_adapter.sparse_train_step(
    model, state, batch, jnp.float32(1), jax.random.PRNGKey(0), num_microbatches
  )[0]


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


@pytest.mark.parametrize(
  "factor, num_microbatches",
  [
    (None, None),
    ("NUM_REAL_TARGET_TOKENS", None),
    ("AVERAGE_PER_SEQUENCE", None),
    # Microbatches share a fixed factor, and each makes one of its own from its tokens.
    (40.0, 4),
    ("NUM_REAL_TARGET_TOKENS", 4),
  ],
)
def test_lambda_is_relative_to_the_mean_loss_per_target(factor, num_microbatches):
  """Taking T5X's gradient down to that of the mean loss takes the term down to lambda * W."""
  batch = batch_of(padded=factor != "AVERAGE_PER_SEQUENCE" and num_microbatches is None)
  model = make(WITH_TERM, optimizer="sgd", loss_normalizing_factor=factor)
  state = at_step(model, begin(model).train_state, PHASES.dense)
  # By SGD with learning rate 1 a step takes the gradient off the parameters.
  new = one_step(model, state, batch, num_microbatches)
  weights, moved = (dict(flatten(jax.device_get(x.params))) for x in (state, new))
  mean = dict(flatten(jax.device_get(mean_gradient()(state.params, batch))))
  # Where no rule asks for it, no term.
  o, wi = "decoder/layers_0/self_attention/out/kernel", "encoder/layers_0/mlp/wi_0/kernel"
  plain = weights[o] - moved[o]
  scale = np.vdot(plain, mean[o]) / np.vdot(mean[o], mean[o])
  np.testing.assert_allclose(plain / scale, mean[o], atol=2e-6)
  w = weights[wi]
  pruned = np.where(nms.nm_mask(jnp.abs(w), nms.NM.parse(PATTERN)), 0, w)
  np.testing.assert_allclose((w - moved[wi]) / scale - mean[wi], LAM * pruned, atol=2e-5)


def test_microbatches_change_nothing_and_snip_scores_the_plain_gradient():
  """Scores are of the whole batch and without the term."""
  rules = nms.Rules({"ff": recipe("sr_ste"), "decoder/cross/o": recipe("snip")})
  model = make(rules, optimizer="sgd", loss_normalizing_factor=100.0)
  state = at_step(model, begin(model).train_state, PHASES.dense)
  whole, parts = (one_step(model, state, batch_of(), k) for k in (None, 4))
  assert_equal(parts.params, whole.params, atol=1e-5)
  assert_equal(mine(parts)["score"], mine(whole)["score"], rtol=1e-4, atol=1e-7)
  loss = lambda p: model.loss_fn(p, batch_of(), None, state.flax_mutables)[0]
  weights, grads = (dict(flatten(x)) for x in (state.params, jax.jit(jax.grad(loss))(state.params)))
  for path, score in flatten(mine(whole)["score"]):
    np.testing.assert_allclose(score, np.abs(weights[path] * grads[path]), rtol=1e-4, atol=1e-6)


def test_the_step_counts_applied_updates():
  optimizer = optimizers.chain([optax.apply_if_finite(optax.adam(0.1), 9)])
  model = make(rules_of("sr_ste"), optimizer_def=optimizer)
  state = begin(model).train_state
  # A count that came with the optimizer's state does not matter.
  old = lambda leaf: jnp.full_like(leaf, 1_000_000) if leaf.dtype == jnp.int32 else leaf
  inner = state._optimizer
  state = state.replace(_optimizer=inner.replace(state=jax.tree.map(old, inner.state)))
  assert int(state.step) == int(nms.step_count(state.param_states)) == 1_000_000
  nan = np.full((16, 8), np.nan, np.float32)
  seen = []
  for broken in ({}, {"decoder_loss_weights": nan}, {}):
    state = one_step(model, state, batch_of() | broken)
    seen.append(the_step(state))
  assert seen == [1, 1, 2]


# --- what the model sees ------------------------------------------------------------------------


@pytest.mark.parametrize("network", ["t5", "ours_scanned", "decoder"])
def test_loss_scores_and_predictions_are_those_of_the_effective_weights(network):
  """Of a mask that is derived, with D between 1 and 0, and of one that is stored."""
  derived, kept = r".*/wi(_\d)?/kernel", r".*/mlp/wo/kernel"
  stored = recipe("one_shot", phases=nms.Phases(total=12))
  rules = nms.Rules({derived: recipe("mdgf_linear"), kept: stored})
  model, twin = make(rules, network), make(None, network, dense=True)
  state = at_step(model, begin(model, network=network).train_state, 6)
  batch = batch_of(network=network)
  if network == "decoder":
    batch["decoder_causal_attention"] = (np.arange(8) < 3).astype(np.int32) * np.ones((16, 1), int)
  sparse = jax.jit(model.effective)(state.params, state.flax_mutables)
  weights = dict(flatten(state.params))
  changed = {k for k, w in flatten(sparse) if (w != weights[k]).any()}
  assert changed == set(model.stored_rules.assign(state.params).places)

  def seen(model, params, **mutables):
    run = lambda p: (
      model.loss_fn(p, batch, None, **mutables)[0],
      model.score_batch(p, batch, **mutables),
      model.predict_batch(p, batch, jax.random.PRNGKey(0), **mutables),
    )
    return dict(zip(("loss", "scores", "predictions"), jax.jit(run)(params), strict=True))

  assert_equal(seen(model, state.params, flax_mutables=state.flax_mutables), seen(twin, sparse))


def test_what_a_recipe_of_ones_own_keeps_is_sharded_by_its_shape():
  axes = {"ff": {"kernel_axes": flax.linen.partitioning.AxisMetadata(("embed", "mlp"))}}
  made = {"ff/kernel": np.zeros((4, 2))}
  kept = {
    name: {"ff": {"kernel": x}} for name, x in (("average", made["ff/kernel"]), ("m", jnp.int32(1)))
  }
  found = t5x_models.axes_like(kept, axes, made)
  assert found["average"]["ff"]["kernel_axes"].names == ("embed", "mlp")
  assert found["m"]["ff"]["kernel_axes"].names == ()


# --- refusals -----------------------------------------------------------------------------------


@functools.cache
def started():
  """(model, its first train state)."""
  model = make(rules_of("sr_ste"))
  return model, begin(model).train_state


def restored(change=lambda w: w, lam=2e-4):
  """Restores the first train state, changed, as T5X does."""
  state = started()[1]
  state = state.replace_params(jax.tree.map(change, state.params))
  model = make(rules_of("sr_ste", lam=lam))
  start = initializer_of(model, Devices(), cls=t5x_adapter.SparseTrainStateInitializer)
  return start.global_train_state_shape.restore_state(state.state_dict())


def as_started(**steps):
  return begin(started()[0], state=started()[1], **steps)


def chain(part):
  return begin(make(rules_of("sr_ste"), optimizer_def=optimizers.chain([part])))


@pytest.mark.parametrize(
  "act, words",
  [
    (lambda: restored(lambda w: w.astype(jnp.bfloat16)), "bfloat16.*dtype = 'float32'"),
    (lambda: restored(lambda w: jnp.concatenate([w, w], -1)), "model file"),
    (lambda: restored(lam=0.5), "(?s)has.*lam=0.5"),
    (lambda: started()[0].score_batch(started()[1].params, batch_of()), "no 'nm_sparsity'"),
    (lambda: as_started(pretrained_steps=7), "PRETRAINED_STEPS=7.*starts at global step 0"),
    (lambda: as_started(train_steps=11), "TRAIN_STEPS=11.*ends at 12"),
    (lambda: as_started(train_steps_relative=5), "TRAIN_STEPS_RELATIVE=5"),
    (lambda: chain(nms.sr_ste(rules_of("sr_ste"))), "SrSteState"),
    (lambda: chain(nms.sparse(optax.sgd(1.0), rules_of("idp"))), "SparseState"),
    (
      lambda: chain(optax.MultiSteps(optax.sgd(1.0), 2).gradient_transformation()),
      "MultiSteps.*num_microbatches",
    ),
  ],
)
def test_what_cannot_go_on_is_refused(act, words):
  with pytest.raises(ValueError, match=words):
    act()


def test_what_agrees_is_taken():
  as_started(train_steps=12, pretrained_steps=0)
  assert_equal(restored().params, started()[1].params)


def test_other_rules_that_nothing_checked_give_no_number():
  model, state = started()
  other = make(rules_of("mdgf_linear"))
  initializer_of(other, Devices())
  loss = lambda m: jax.jit(lambda s: m.eval_fn(s.params, batch_of(), s.flax_mutables)[0])(state)
  assert np.isfinite(loss(model)) and np.isnan(loss(other))


def test_an_adafactor_that_counts_from_elsewhere_is_warned_of(capsys):
  """A model file after the run file takes `step_offset` back."""
  for first in (0, 5):
    model = make(rules_of("sr_ste"), optimizer_def=OPTIMIZERS["adafactor"](first))
    state = initializer_of(model, Devices()).from_scratch(jax.random.PRNGKey(0))
    begin(model, state=state.replace_step(jnp.int32(5)))
    assert ("step_offset=0" in capsys.readouterr().out) == (first == 0)


DENSE = {"target": {"w": 0}}
SPARSE = {**DENSE, "flax_mutables": {"nm_sparsity": {"step": 0}}}
MORE = {"target": {"w": 0, "a": {"b": 0}}}
resume = functools.partial(t5x_adapter.resume_sparse, is_resuming=True)


@pytest.mark.parametrize(
  "read, checkpoint, wanted, words",
  [
    (t5x_adapter.require_sparse, SPARSE, SPARSE, None),
    (t5x_adapter.require_sparse, DENSE, SPARSE, "is dense"),
    (resume, SPARSE, SPARSE, None),
    (resume, DENSE, SPARSE, "is dense"),
    (t5x_adapter.resume_sparse, DENSE, SPARSE, None),  # starts from it
    (t5x_adapter.resume_sparse, DENSE, MORE, "a/b.*random"),
    (functools.partial(t5x_adapter.resume_sparse, fresh="a/.*"), DENSE, MORE, None),
  ],
)
def test_structures_of_checkpoints(read, checkpoint, wanted, words):
  if words is None:
    assert read(checkpoint, wanted) is checkpoint
    return
  with pytest.raises(ValueError, match=words):
    read(checkpoint, wanted)


# --- devices ------------------------------------------------------------------------------------


def collectives(compiled):
  kinds = "all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter"
  text = compiled.as_text()
  return {kind: len(re.findall(rf" {kind}(-start)?\(", text)) for kind in kinds}


def test_model_parallel_changes_nothing_and_masks_add_no_communication():
  """A derived mask and a stored one, of kernels that are cut along each of their axes."""
  names = {"ff": "sr_ste", "decoder/qkv": "sr_ste", "encoder/qkv": "idp", "o": "idp"}
  rules = nms.Rules({place: recipe(name) for place, name in names.items()})
  got = {}
  for count, parts in ((1, 1), (8, 2)):
    model = make(rules, optimizer="sgd", loss_normalizing_factor=100.0)
    run = begin(model, Devices(count, parts))
    state = at_step(model, run.train_state, PHASES.dense + 3)
    weights = jax.tree.map(np.asarray, state.params)
    sparse = jax.jit(model.effective)(state.params, state.flax_mutables)
    if parts == 2:
      placed = dict(flatten(state.params))
      assert placed["encoder/layers_0/mlp/wi_0/kernel"].sharding.spec[-1] == "model"
      for path, mask in flatten(mine(state)["mask"]):
        assert mask.sharding == placed[path].sharding
      step = run._partitioner.compile(run._partitioned_train_step, state, batch_of())
      dense = begin(make(None, optimizer="sgd", dense=True), Devices(8, 2), cls=trainer.Trainer)
      plain = dense._partitioner.compile(
        dense._partitioned_train_step, dense.train_state, batch_of()
      )
      assert sum(collectives(plain).values()) > 1 and collectives(step) == collectives(plain)
      # Without a trainer, as in evaluation, the model knows how devices share its weights too.
      alone = make(rules)
      initializer_of(alone, Devices(8, 2), cls=t5x_adapter.SparseTrainStateInitializer)
      assert alone.stored_rules.shardings == model.stored_rules.shardings
    new = run._partitioned_train_step(state, batch_of())[0]
    grads = jax.tree.map(lambda a, b: a - np.asarray(b), weights, new.params)
    got[count] = jax.tree.map(np.asarray, (sparse, mine(new)["mask"])), grads
  assert_equal(*(jax.tree.map(lambda w: w != 0, got[c][0]) for c in (8, 1)))
  assert_equal(got[8][1], got[1][1], atol=1e-5)
