"""The programs that benchmarks/tpu.py compiles for chips that are not there.

    devices, T5.1.1, recipe -> [train step, evaluation, decoding, metrics] -> lowered, not compiled

Those of the local runner, and those of T5X with its partitioner, trainer and Adafactor.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

import nm_sparsity_jax as nms

PHASES = nms.Phases(total=1000, dense=100, finetune=200)
BATCH, INPUTS, TARGETS = 128, 512, 64  # rows, and tokens of a row
LENGTHS = {
  "encoder_input_tokens": INPUTS,
  "decoder_input_tokens": TARGETS,
  "decoder_target_tokens": TARGETS,
  "decoder_loss_weights": TARGETS,
}


class Setting(NamedTuple):
  """What a program is compiled for.

  Attributes:
    devices: of the topology.
    size: of T5.1.1.
    recipe: of the FF kernels.
    microbatches: parts of the batch in the train step.
    partitions: devices that share each weight; the others share the batch.
    scan: whether the layers are scanned.
    remat: the policy of the network.
    plain: leave our kernel out.
  """

  devices: Any
  size: str
  recipe: nms.Recipe
  microbatches: int = 1
  partitions: int = 1
  scan: bool = True
  remat: str = "none"
  plain: bool = False

  @property
  def rules(self) -> nms.Rules:
    """Returns the rules: all FF kernels."""
    return nms.Rules({"ff": self.recipe})


def _tokens(sharding: Any) -> dict[str, jax.ShapeDtypeStruct]:
  make = lambda n: jax.ShapeDtypeStruct((BATCH, n), jnp.int32, sharding=sharding)
  return {name: make(n) for name, n in LENGTHS.items()}


# --- the local runner -----------------------------------------------------------------------------


class Local:
  """The programs of the local runner."""

  def __init__(self, setting: Setting):
    from nm_sparsity_jax.models.t5 import network
    from nm_sparsity_jax.trainer.step import Model
    from nm_sparsity_jax.trainer.workloads.t5 import T5

    self.setting, self.tx = setting, optax.adafactor(1e-3)
    config = network.T5Config.t5_1_1(
      setting.size, dtype=jnp.bfloat16, scan_layers=setting.scan, remat_policy=setting.remat
    )
    self.model = model = Model(
      T5(network.Transformer(config)),
      setting.rules,
      num_partitions=setting.partitions,
      devices=setting.devices,
    )
    if setting.plain:
      model.rules = model.rules.with_shardings({})
    self.state = model.state_like(self.tx)
    self.batch = _tokens(NamedSharding(model.mesh, PartitionSpec("data")))

  def step(self):
    """Returns the train step."""
    key = jax.random.PRNGKey(0)
    step = self.model.train_step(self.tx, key, self.state, self.setting.microbatches)
    return step.lower(self.state, self.batch)

  def eval(self):
    """Returns a batch's sums: the parameters are the effective weights."""
    return self.model.eval_step().lower(self.model.variables(self.state), self.batch)

  def decode(self):
    """Returns the greedy decoding of a batch."""
    from nm_sparsity_jax.trainer.workloads import decoding

    network: Any = self.model.workload.network

    def run(params, inputs):
      return decoding.greedy(network, params, inputs, TARGETS, 1)

    return self.model.jit(run).lower(self.state.params, self.batch["encoder_input_tokens"])

  def metrics(self):
    """Returns the first program of a sampled step, which takes the gradient a second time."""
    before, _ = self.model.samplers(jax.random.PRNGKey(0), self.setting.microbatches)
    return before.lower(self.state, self.batch)


# --- T5X ------------------------------------------------------------------------------------------


class T5X:
  """The programs of T5X, for its own network: dense as it is, else made sparse."""

  def __init__(self, setting: Setting):
    import _t5x

    from nm_sparsity_jax.integrations.t5x.ahead import Ahead

    rules = None if setting.recipe.name == "dense" else setting.rules
    self.model = _t5x.model(self._network(setting), rules)
    batch, parts = _tokens(None), setting.microbatches
    self.ahead = Ahead(self.model, setting.devices, batch, setting.partitions, parts)

  @staticmethod
  def _network(setting: Setting) -> Any:
    """Returns T5X's network."""
    from nm_sparsity_jax.models.t5 import network as ours

    sizes = ours.T5Config.t5_1_1(setting.size)
    names = (
      "vocab_size", "emb_dim", "num_heads", "head_dim", "mlp_dim", "dropout_rate",
      "num_encoder_layers", "num_decoder_layers", "mlp_activations", "logits_via_embedding",
    )  # fmt: skip
    known: dict[str, Any] = {name: getattr(sizes, name) for name in names}
    if setting.scan:
      from t5x.examples.scalable_t5 import network as theirs

      known |= dict(scan_layers=True, remat_policy=setting.remat)
    else:
      from t5x.examples.t5 import network as theirs
    return theirs.Transformer(theirs.T5Config(**known, dtype="bfloat16"))

  def step(self):
    """Returns the train step of T5X's trainer."""
    return self.ahead.train_step()

  def eval(self):
    """Returns the evaluation step of T5X's trainer."""
    return self.ahead.lower(self.ahead.trainer._partitioned_eval_step)

  def decode(self):
    """Returns greedy decoding as T5X's inference does it."""
    partitioner = self.ahead.partitioner

    def run(state, batch):
      mutables = {"flax_mutables": state.flax_mutables} if state.flax_mutables else {}
      return self.model.predict_batch(state.params, batch, **mutables)

    specs = partitioner.data_partition_spec
    program = partitioner.partition(
      run, in_axis_resources=(self.ahead.axes, specs), out_axis_resources=specs
    )
    return self.ahead.lower(program)
