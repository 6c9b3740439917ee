"""What a workload asks of images, wherever they come from."""

from __future__ import annotations

import numbers
from collections.abc import Iterable, Iterator, Mapping

import numpy as np

Batch = dict[str, np.ndarray]


class Source:
  """Images with one label each. Subclass it for data of your own.

  Attributes:
    classes: how many labels there are; a label is below.
    size: height and width of an image.
    channels: of an image.
    batch_size: images of a batch, in training and in a split.
  """

  classes: int
  size: int
  channels: int = 3
  batch_size: int

  def train(self, seed: int, start: int) -> Iterator[Batch]:
    """Returns endless training batches from number `start` on.

    Batch i is a function of (seed, i) alone, so that a run that resumes reads what it would have
    read.
    """
    raise NotImplementedError

  def splits(self) -> Mapping[str, Iterable[Batch]]:
    """Returns name -> the finite batches of an evaluation; the last one is filled up."""
    raise NotImplementedError

  def check(self) -> None:
    """Raises ValueError where the data cannot be read; called before the first step."""


def whole(macro: str, value: object, least: int = 1) -> int:
  """Returns a setting that must be a whole number; refuses any other.

  >>> whole("BATCH_SIZE", 128)
  128

  Args:
    macro: its name.
    value: what was given.
    least: the smallest that is allowed.
  """
  if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < least:
    raise ValueError(f"{macro}={value!r}: give a whole number, {least} or more.")
  return int(value)


def batch_of(images: np.ndarray, labels: np.ndarray, size: int) -> Batch:
  """Returns a batch of `size` rows; those that are missing are zeros, and 'real' is 0 there.

  Args:
    images: float32 [rows, height, width, channels], at most `size` rows.
    labels: int32 [rows].
    size: rows of the batch.
  """
  rows = len(images)
  fill = lambda x: np.concatenate([x, np.zeros((size - rows, *x.shape[1:]), x.dtype)])
  images, labels = images.astype(np.float32, copy=False), labels.astype(np.int32, copy=False)
  if rows < size:
    images, labels = fill(images), fill(labels)
  return {"image": images, "label": labels, "real": (np.arange(size) < rows).astype(np.int32)}
