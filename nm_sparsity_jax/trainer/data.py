"""Text: batches of a SeqIO task or mixture, as a function of (seed, position); vocabularies.

    task -> tokenized examples -> shuffled by the seed -> packed -> model features -> batches

So the position alone brings a stream back: batch i of a resumed run is batch i of the first one.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterator, Mapping
from typing import Any

from nm_sparsity_jax.trainer.workloads.base import Batch


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
  """Says what a T5 is trained on, and evaluated.

  Attributes:
    name: of the task or mixture.
    lengths: feature -> tokens, such as {'inputs': 512, 'targets': 128}; longer ones are cut. None =
      as long as the examples, for metrics of decoded text alone.
    batch_size: examples a step, or packed rows.
    module: imported first, to register the name; None = it is registered.
    pack: put several examples into a row.
    use_cached: read SeqIO's offline cache.
  """

  name: str
  lengths: Mapping[str, int] | None = None
  batch_size: int = 1
  module: str | None = None
  pack: bool = False
  use_cached: bool = False

  def batches(self, seed: int, start: int) -> Iterator[Batch]:
    """Returns endless batches from number `start` on.

    Args:
      seed: of the order of examples and of whatever chance the task's preprocessors use.
      start: the number of the first batch.
    """
    import tensorflow as tf

    seqio, lengths = import_seqio(self.module), dict(self.lengths or {})
    dataset = seqio.get_dataset(
      mixture_or_task_name=self.name,
      task_feature_lengths=lengths,
      feature_converter=seqio.EncDecFeatureConverter(pack=self.pack),
      dataset_split="train",
      use_cached=self.use_cached,
      shuffle=True,
      num_epochs=None,
      seed=seed,
      batch_size=self.batch_size,
      verbose=False,
    )
    options = tf.data.Options()
    options.deterministic = True  # in spite of parallel reads
    # Its thread sleeps for up to a minute, and a stream that ends may wait for it.
    options.autotune.enabled = False
    # No stream can be entered in the middle: what comes before `start` is made again, and dropped.
    return dataset.with_options(options).skip(start).prefetch(2).as_numpy_iterator()


def import_seqio(module: str | None = None) -> Any:
  """Imports seqio, then the module that registers tasks; leaves accelerators to jax."""
  import seqio
  import tensorflow as tf

  tf.config.set_visible_devices([], "GPU")  # it would take the memory that jax needs
  if module is not None:
    importlib.import_module(module)
  return seqio


def mixture(rates: Mapping[str, float], module: str | None = None) -> str:
  """Registers the mixture "mixture"; returns its name, so that gin can call it.

  Args:
    rates: task -> rate; 0 for a task that is only evaluated.
    module: imported first, to register the tasks.
  """
  seqio, name = import_seqio(module), "mixture"
  seqio.MixtureRegistry.remove(name)  # gin calls this for each argument that names the mixture
  seqio.MixtureRegistry.add(name, [(task, float(rate)) for task, rate in rates.items()])
  return name


def vocabulary(file: str) -> Any:
  """Returns a vocabulary of seqio, which is imported only here.

  Args:
    file: a SentencePiece model, 'bytes', or 'mini' for mini-GLUE's words [VOCABULARY_FILE].
  """
  import seqio  # type: ignore[import-not-found]

  if file == "mini":
    from t5x_tasks.vocabulary import mini_words

    return mini_words()
  return seqio.ByteVocabulary() if file == "bytes" else seqio.SentencePieceVocabulary(file)


def check_task(name: str, lengths: Mapping[str, int] | None, rows: int) -> None:
  """Refuses a feature without a length, and ids that the embedding has no row for.

  jax would clip such ids unseen.

  Args:
    name: of the task or mixture.
    lengths: feature -> tokens; None = not asked.
    rows: of the embedding.
  """
  import seqio

  for feature, spec in seqio.get_mixture_or_task(name).output_features.items():
    if lengths is not None and feature not in lengths:
      raise ValueError(f"TASK_FEATURE_LENGTHS={dict(lengths)}: {name} also has {feature!r}.")
    size = spec.vocabulary.vocab_size
    if size > rows:
      raise ValueError(
        f"{name}: {feature!r} has {size} ids, but the network embeds {rows}. "
        f"Set VOCAB_SIZE={-(-size // 128) * 128}."
      )
