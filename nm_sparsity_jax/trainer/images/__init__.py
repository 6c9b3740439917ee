"""Where images come from: `rebus` generates them, `readers` reads folders and TensorFlow Datasets.

    source.train(seed, start) -> batch `start`, `start + 1`, ... of (seed, number)
    source.splits()           -> name -> finite batches

A batch holds 'image' (float32 [batch, size, size, channels]), 'label' and 'real' (int32 [batch]).
"""

from __future__ import annotations

import abc
from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from nm_sparsity_jax.trainer.workloads.base import Batch, filled


class Source(abc.ABC):
  """Images with one label each. Subclass it for data of your own.

  Attributes:
    batch_size: images of a batch, in training and in a split.
  """

  batch_size: int

  @abc.abstractmethod
  def train(self, seed: int, start: int) -> Iterator[Batch]:
    """Returns endless training batches from number `start` on.

    Batch i must be a function of (seed, i) alone, so that a run that resumes reads what it would
    have read.
    """

  @abc.abstractmethod
  def splits(self) -> Mapping[str, Iterable[Batch]]:
    """Returns name -> the finite batches of an evaluation; the last one is filled up.

    It is called before the first step, and raises ValueError where there are no images.
    """


def batch_of(images: np.ndarray, labels: np.ndarray, size: int) -> Batch:
  """Returns a batch of `size` rows; those that are missing are zeros, and 'real' is 0 there.

  Args:
    images: float32 [rows, height, width, channels], at most `size` rows.
    labels: int32 [rows].
    size: rows of the batch.
  """
  real = np.ones(len(images), np.int32)
  batch = {"image": images.astype(np.float32), "label": labels.astype(np.int32), "real": real}
  return filled(batch, size)
