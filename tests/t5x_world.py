"""A tiny world of T5X for tests: networks, optimizers, devices, batches, a trainer.

A file that imports it is skipped where T5X is not.
"""

import functools
import warnings

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import t5x_found
from checkpoint_files import TINY_T5

import nm_sparsity_jax as nms
from nm_sparsity_jax.core.trees import flatten

# T5X and what it imports (TensorFlow, seqio, clu, orbax) warn on their own account.
MARKS = [pytest.mark.t5x, pytest.mark.filterwarnings("ignore")]

if reason := t5x_found.why_not():
  pytest.skip(reason, allow_module_level=True)

with warnings.catch_warnings(action="ignore"), jax.numpy_dtype_promotion("standard"):
  import seqio  # noqa: F401  (for those who import this file)
  import t5x_task
  from t5x import adafactor, decoding, models, optimizers, partitioning, trainer, utils  # noqa: F401
  from t5x import eval as t5x_eval  # noqa: F401
  from t5x.examples.scalable_t5 import network as scalable_network
  from t5x.examples.t5 import network as t5_network

  from nm_sparsity_jax.integrations import t5x as t5x_adapter
  from nm_sparsity_jax.models.t5 import network


INITIAL = {}


@pytest.fixture(autouse=True, scope="module")
def world():
  """What T5X wants of a process, and each network initialized once.

  T5X does not run under strict promotion; its threads neither, so no context manager helps.
  Compiling initializations would be half of all the time.
  """
  wanted = {"jax_numpy_dtype_promotion": "standard", "jax_numpy_rank_promotion": "allow"}
  before = {name: jax.config.values[name] for name in wanted}
  jax.config.update("jax_numpy_dtype_promotion", "standard")
  jax.config.update("jax_numpy_rank_promotion", "allow")
  with pytest.MonkeyPatch.context() as patch, t5x_found.closed_loops():
    init = models.EncoderDecoderModel.get_initial_variables

    def initial(self, rng, input_shapes, input_types=None):
      key = repr(self.module)
      if key not in INITIAL:
        with jax.ensure_compile_time_eval():
          make = functools.partial(init, self, jax.random.PRNGKey(0), input_shapes, input_types)
          axes = {k: v for k, v in jax.eval_shape(make).items() if k != "params"}
          INITIAL[key] = {"params": jax.jit(lambda: make()["params"])(), **axes}
      return flax.core.freeze(INITIAL[key])

    patch.setattr(models.EncoderDecoderModel, "get_initial_variables", initial)
    yield
  for name, value in before.items():
    jax.config.update(name, value)


PHASES = nms.Phases(total=12, dense=3, finetune=3)


def recipe(name, phases=PHASES, pattern="1:4", **fields):
  if name == "custom":
    fields = {"path": ((3, "2:4", 1.0), (6, "1:4", 0.5)), **fields}
  return nms.recipe(name, pattern=pattern, phases=phases, **fields)


SIZES = TINY_T5 | dict(
  dropout_rate=0.0, mlp_activations=("gelu", "linear"), logits_via_embedding=False, dtype="float32",
)  # fmt: skip
TWO = dict(num_encoder_layers=2, num_decoder_layers=2, scan_layers=True, remat_policy="full")


def of(module, **fields):
  return lambda **more: module.Transformer(module.T5Config(**SIZES | fields | more))


NETWORKS = {
  "t5": of(t5_network),
  "scanned": of(scalable_network, **TWO),
  "ours": of(network),
  "ours_scanned": of(network, **TWO),
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


def make(rules=None, network="t5", optimizer="adamw", **kwargs):
  """A model with rules; T5X's own without."""
  kwargs = {"module": NETWORKS[network](), "optimizer_def": OPTIMIZERS[optimizer](), **kwargs}
  both = dict.fromkeys(("input_vocabulary", "output_vocabulary"), t5x_task.VOCABULARY)
  model = models.EncoderDecoderModel(**both, **kwargs)
  return model if rules is None else t5x_adapter.sparse(model, rules)


def batch_of(seed=0, padded=True):
  rng, size, length = np.random.default_rng(seed), 16, 8
  targets = rng.integers(3, 380, (size, length)).astype(np.int32)
  if padded:
    targets *= np.arange(length) < rng.integers(2, length + 1, (size, 1))
  return {
    "encoder_input_tokens": rng.integers(3, 380, (size, length)).astype(np.int32),
    "decoder_target_tokens": targets,
    "decoder_input_tokens": np.pad(targets[:, :-1], ((0, 0), (1, 0))),
    "decoder_loss_weights": (targets > 0).astype(np.int32),
  }


class Devices(partitioning.PjitPartitioner):
  """T5X's partitioner on the first devices, not on all."""

  def __init__(self, count=1, num_partitions=1):
    rules = partitioning.standard_logical_axis_rules()
    super().__init__(num_partitions=num_partitions, logical_axis_rules=rules)
    self._count = count

  @functools.cached_property
  def mesh(self):
    shape = (self._count // self._num_partitions, self._num_partitions)
    return jax.sharding.Mesh(np.reshape(jax.devices()[: self._count], shape), ("data", "model"))


def initializer_of(model, partitioner=None, cls=utils.TrainStateInitializer, **more):
  batch = batch_of()
  return cls(
    optimizer_def=more.get("optimizer_def", model.optimizer_def),
    init_fn=model.get_initial_variables,
    input_shapes={k: v.shape for k, v in batch.items()},
    input_types={k: v.dtype for k, v in batch.items()},
    partitioner=partitioner or Devices(),
  )


def first_state(model, **kwargs):
  return initializer_of(model, **kwargs).from_scratch(jax.random.PRNGKey(0))


def begin(model, partitioner=None, cls=t5x_adapter.SparseTrainer, state=None, **kw):
  """A trainer on a fresh train state."""
  partitioner = partitioner or Devices()
  start = initializer_of(model, partitioner)
  defaults = dict(
    eval_names=[], summary_dir=None, rng=jax.random.PRNGKey(1), num_microbatches=None,
    learning_rate_fn=lambda step: jnp.float32(0.01),
  )  # fmt: skip
  return cls(
    model=model,
    train_state=start.from_scratch(jax.random.PRNGKey(0)) if state is None else state,
    partitioner=partitioner,
    train_state_axes=start.train_state_axes,
    **defaults | kw,
  )


def mine(state):
  return state.flax_mutables[t5x_adapter.COLLECTION]


def at_step(model, state, step):
  _, stored = model.read(state.flax_mutables)
  return state.replace_flax_mutables(model.write(state.flax_mutables, jnp.int32(step), stored))


def assert_equal(got, want, **close):
  got, want = dict(flatten(got)), dict(flatten(want))
  assert list(got) == list(want)
  for path in want:
    check = np.testing.assert_allclose if close else np.testing.assert_array_equal
    check(np.asarray(got[path]), np.asarray(want[path]), err_msg=path, **close)
