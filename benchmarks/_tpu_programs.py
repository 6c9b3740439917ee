"""The programs that benchmarks/tpu.py compiles for chips that are not there.

    devices, T5.1.1, recipe -> [train step, evaluation, decoding, metrics] -> lowered, not compiled

Those of the local runner, and those of T5X with its partitioner, trainer and Adafactor. `args` are
the flags of tpu.py.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

import nm_sparsity_jax as nms
from nm_sparsity_jax.models.t5 import network

PHASES = nms.Phases(total=1000, dense=100, finetune=200)
BATCH, INPUTS, TARGETS = 128, 512, 64  # rows, and tokens of a row
LENGTHS = {
  "encoder_input_tokens": INPUTS,
  "decoder_input_tokens": TARGETS,
  "decoder_target_tokens": TARGETS,
  "decoder_loss_weights": TARGETS,
}


def _tokens(sharding: Any) -> dict[str, jax.ShapeDtypeStruct]:
  make = lambda n: jax.ShapeDtypeStruct((BATCH, n), jnp.int32, sharding=sharding)
  return {name: make(n) for name, n in LENGTHS.items()}


def _config(args: Any) -> network.T5Config:
  return network.T5Config.preset(
    "t5_1_1", args.size, dtype="bfloat16", scan_layers=args.scan, remat_policy=args.remat
  )


class Local:
  """The programs of the local runner."""

  def __init__(self, args: Any, devices: Any, recipe: nms.Recipe):
    from nm_sparsity_jax.trainer.step import Model
    from nm_sparsity_jax.trainer.workloads.t5 import T5

    self.microbatches, self.tx = args.microbatches, optax.adafactor(1e-3)
    workload, rules = T5(network.Transformer(_config(args))), nms.Rules({"ff": recipe})
    self.model = Model(workload, rules, num_partitions=args.partitions, devices=devices)
    if args.plain:
      self.model.rules = self.model.rules.with_shardings({})
    self.state = self.model.state_like(self.tx)
    self.batch = _tokens(NamedSharding(self.model.mesh, PartitionSpec("data")))

  def step(self):
    """Returns the train step."""
    step = self.model.train_step(self.tx, jax.random.PRNGKey(0), self.microbatches)
    return step.lower(self.state, self.batch)

  def eval(self):
    """Returns a batch's sums: the parameters are the effective weights."""
    return self.model.eval_step.lower(self.model.variables(self.state), self.batch)

  def decode(self):
    """Returns the greedy decoding of a batch."""
    from nm_sparsity_jax.trainer.workloads import decoding

    module: Any = self.model.workload.network

    def run(params, inputs):
      return decoding.greedy(module, params, inputs, TARGETS, 1)

    return self.model.jit(run).lower(self.state.params, self.batch["encoder_input_tokens"])

  def metrics(self):
    """Returns the first program of a sampled step, which takes the gradient a second time."""
    before, _ = self.model.samplers(jax.random.PRNGKey(0), self.microbatches)
    return before.lower(self.state, self.batch)


class T5X:
  """The programs of T5X, for its own network: dense as it is, else made sparse."""

  def __init__(self, args: Any, devices: Any, recipe: nms.Recipe):
    import _t5x
    from t5x.examples.scalable_t5 import network as scanned
    from t5x.examples.t5 import network as plain

    from nm_sparsity_jax.integrations.t5x.ahead import Ahead

    theirs, config = scanned if args.scan else plain, _config(args)
    shared = {f.name for f in dataclasses.fields(theirs.T5Config)} & vars(config).keys()
    fields = {name: getattr(config, name) for name in shared}
    rules = None if recipe.name == "dense" else nms.Rules({"ff": recipe})
    self.model = _t5x.model(theirs.Transformer(theirs.T5Config(**fields)), rules)
    self.ahead = Ahead(self.model, devices, _tokens(None), args.partitions, args.microbatches)

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
