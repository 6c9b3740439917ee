"""T5: a teacher-forced loss per target token, on batches of seqio.

The network is the dense one. `trainer.data.Source` brings the batches, and
`trainer.text_evaluation.Evaluation` evaluates the tasks.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from nm_sparsity_jax.trainer import data as text
from nm_sparsity_jax.trainer.workloads.base import Batch, Workload

PACKED = ("encoder_segment_ids", "decoder_segment_ids")
LENGTHS = {"inputs": 512, "targets": 128}  # of an example, where the settings do not say


class T5(Workload):
  """A T5 of this package.

      network = Transformer(T5Config.preset("t5_1_1", "small"))
      T5(network, data.Source(name="rte", lengths=..., batch_size=8))

  Args:
    network: dense, without rules of its own.
    data: what it is trained on and evaluated; None = nothing, for a plan.
    lengths: feature -> tokens of an example; None = those of the data.
    z_loss: weight of log(Z)^2, which keeps the logits from drifting.
    label_smoothing: share of the probability that goes to all other tokens.
  """

  weight = "tokens"

  def __init__(
    self,
    network: nn.Module,
    data: text.Source | None = None,
    lengths: Mapping[str, int] | None = None,
    z_loss: float = 0.0001,
    label_smoothing: float = 0.0,
  ):
    self.network: Any = network
    self.network_config = self.network.config
    self.data = data
    self.batch_size = data.batch_size if data else 1
    known = data.lengths if data and lengths is None else lengths
    self.lengths = {**LENGTHS, **(known or {})}
    self.z_loss, self.label_smoothing = z_loss, label_smoothing

  def init(self, rng: jax.Array) -> Mapping[str, Any]:
    """Returns parameters, T5X's for its key, and their logical axes."""
    return _init(self.network, rng)

  def loss(self, params, state, batch, rng):
    """Returns the cross entropy and z-loss of the target tokens; z_loss, correct, tokens."""
    targets = batch["decoder_target_tokens"]
    logits = self.logits(params, batch, rng)
    # 0 where a row only fills the batch, and on padding.
    weights = batch["decoder_loss_weights"].astype(jnp.float32)
    log_z = jax.nn.logsumexp(logits, -1)
    hit = jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]
    cross_entropy = log_z - hit
    # T5X's loss, without its one-hot targets: [batch, length, vocabulary] is the largest array.
    if self.label_smoothing:
      share = self.label_smoothing
      each = share / (logits.shape[-1] - 1)  # of every other token
      others = logits.shape[-1] * log_z - jnp.sum(logits, -1) - cross_entropy
      entropy = -((1 - share) * np.log(1 - share) + share * np.log(each))
      cross_entropy = (1 - share) * cross_entropy + each * others - entropy
    z_loss = self.z_loss * log_z**2
    correct = (jnp.argmax(logits, -1) == targets).astype(jnp.float32)
    summed = [jnp.sum(weights * x) for x in (cross_entropy + z_loss, z_loss, correct)]
    sums = {"z_loss": summed[1], "correct": summed[2], "tokens": jnp.sum(weights)}
    return summed[0], sums, state

  def logits(self, params: Any, batch: Batch, rng: jax.Array | None) -> jax.Array:
    """Returns the float32 logits of each target position; with a key, under dropout."""
    return self.network.apply(
      {"params": params},
      batch["encoder_input_tokens"],
      batch["decoder_input_tokens"],
      batch["decoder_target_tokens"],
      **{name: batch[name] for name in PACKED if name in batch},
      enable_dropout=rng is not None,
      rngs=None if rng is None else {"dropout": rng},
    ).astype(jnp.float32)

  def batches(self, seed: int, start: int) -> Iterator[Batch]:
    """Returns endless batches of the data; batch i is a function of (seed, i)."""
    assert self.data is not None, "a T5 for evaluation alone"
    return self.data.batches(seed, start)

  def splits(self) -> Mapping[str, Iterable[Batch]]:
    """Returns none: a T5 is evaluated on tasks, by `text_evaluation.Evaluation`."""
    return {}

  def scalars(self, sums: Mapping[str, float]) -> dict[str, float]:
    """Returns means per target token, under T5X's names."""
    means = super().scalars(sums)
    loss, z_loss = means["loss"], means["z_loss"]
    return {
      "loss": loss,
      "loss_per_nonpadding_target_token": loss,
      "cross_ent_loss": loss - z_loss,
      "z_loss": z_loss,
      "accuracy": means["correct"],
    }

  def example(self) -> Batch:
    """Returns the shapes of one row of a training batch."""
    return self.tokens(1, bool(self.data and self.data.pack))

  def tokens(self, rows: int, packed: bool = False) -> Batch:
    """Returns the shapes of a batch.

    Args:
      rows: examples.
      packed: whether a row holds several short ones.
    """
    own = "decoder_input_tokens", "decoder_target_tokens", "decoder_loss_weights"
    of_packed = *PACKED, "encoder_positions", "decoder_positions"
    names = "encoder_input_tokens", *own, *(of_packed if packed else ())
    length = lambda name: self.lengths["inputs" if name.startswith("encoder") else "targets"]
    return {name: jax.ShapeDtypeStruct((rows, length(name)), jnp.int32) for name in names}


# Under jit, equal networks share one trace: a sweep makes a network for each of its runs.
@functools.partial(jax.jit, static_argnums=0)
def _init(network: nn.Module, rng: jax.Array) -> Mapping[str, Any]:
  tokens = jnp.ones((1, 1), jnp.int32)  # no parameter depends on the length
  return network.init(rng, tokens, tokens, tokens, enable_dropout=False)
