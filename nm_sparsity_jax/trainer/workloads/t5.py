"""T5: a teacher-forced loss per target token, on batches of seqio.

The network is the dense one. `trainer.data.Source` brings the batches, and
`trainer.text_evaluation.Evaluation` evaluates the tasks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from nm_sparsity_jax.trainer import data as text
from nm_sparsity_jax.trainer.workloads.base import Batch, Workload

PACKED = ("encoder_segment_ids", "decoder_segment_ids")
POSITIONS = ("encoder_positions", "decoder_positions")
LENGTHS = {"inputs": 512, "targets": 128}  # of an example, where the settings do not say


def known_lengths(lengths: Mapping[str, int] | None) -> dict[str, int]:
  """Returns the tokens of an example by feature: `lengths`, else `LENGTHS`."""
  return {**LENGTHS, **(lengths or {})}


def tokens(lengths: Mapping[str, int] | None, rows: int, packed: bool = False) -> Batch:
  """Returns the shapes of a batch of an encoder-decoder.

  Args:
    lengths: tokens of an example, by feature.
    rows: examples.
    packed: whether a row holds several short ones.
  """
  known = known_lengths(lengths)
  own = "decoder_input_tokens", "decoder_target_tokens", "decoder_loss_weights"
  names = "encoder_input_tokens", *own, *((*PACKED, *POSITIONS) if packed else ())
  length = lambda name: known["inputs" if name.startswith("encoder") else "targets"]
  return {name: jax.ShapeDtypeStruct((rows, length(name)), jnp.int32) for name in names}


class T5(Workload):
  """A T5 of this package.

      T5(Transformer(T5Config.t5_1_1("small")), data.Source(name="rte", lengths=..., batch_size=8))

  Args:
    network: dense, without rules of its own.
    data: what it is trained on and evaluated; None = nothing, for a plan.
    lengths: feature -> tokens of an example; None = those of the data.
    z_loss: weight of log(Z)^2, which keeps the logits from drifting.
    label_smoothing: share of the probability that goes to all other tokens.
  """

  weight = "tokens"
  headline = ("loss", "accuracy")

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
    self.lengths = known_lengths(lengths or (data.lengths if data else None))
    self.z_loss, self.label_smoothing = z_loss, label_smoothing

  @property
  def batch_size(self) -> int:  # type: ignore[override]
    """Returns the examples of a training batch; 1 without data."""
    return self.data.batch_size if self.data else 1

  def init(self, rng: jax.Array) -> Mapping[str, Any]:
    """Returns parameters, T5X's for its key, and their logical axes."""
    tokens = jnp.ones((1, 1), jnp.int32)  # no parameter depends on the length
    return self.network.init(rng, tokens, tokens, tokens, enable_dropout=False)

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
    tokens = max(sums["tokens"], 1.0)
    return {
      "loss": sums["loss"] / tokens,
      "loss_per_nonpadding_target_token": sums["loss"] / tokens,
      "cross_ent_loss": (sums["loss"] - sums["z_loss"]) / tokens,
      "z_loss": sums["z_loss"] / tokens,
      "accuracy": sums["correct"] / tokens,
    }

  def example(self) -> Batch:
    """Returns the shapes of one row of a training batch."""
    return tokens(self.lengths, 1, self.data is not None and self.data.pack)

  def check(self) -> None:
    """Raises ValueError where the vocabulary has ids that the embedding has no row for."""
    if self.data is not None:
      text.import_seqio(self.data.module)
      text.check_vocabulary(self.data.name, self.network.config.vocab_size)
