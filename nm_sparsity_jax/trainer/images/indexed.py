"""Images that are read by their number: what a folder and a prepared data set share.

    position in the endless stream -> (epoch, place) -> its permutation -> number -> picture
    (seed, position) -> the random stream of the picture

So batch i is a function of (seed, i), whoever reads it. With workers, grain's processes read whole
batches ahead.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from nm_sparsity_jax.trainer.images import augment, rand_augment, source


class Table(Protocol):
  """Pictures by their number."""

  def __len__(self) -> int: ...
  def read(self, number: int) -> tuple[Any, int]:
    """Returns Pillow's picture, RGB, and its label."""
    ...


class Indexed(source.Source):
  """Images of tables, one a split. Subclasses define `tables`.

  Args:
    size: height and width of an image.
    batch_size: images of a batch.
    crop: see `augment.training` [RANDOM_CROP].
    erasing: see `augment.training` [RANDOM_ERASING].
    workers: processes of grain that read ahead; 0 = this one [DATA_WORKERS].
    rand: see `rand_augment.parse`; None = nothing [RAND_AUGMENT].
  """

  def __init__(
    self, size: int, batch_size: int, crop: float | None = None, erasing: float = 0.0,
    workers: int = 0, rand: str | None = None,
  ):  # fmt: skip
    self.size = source.whole("IMAGE_SIZE", size)
    self.batch_size = source.whole("BATCH_SIZE", batch_size)
    self.workers = source.whole("DATA_WORKERS", workers, least=0)
    if crop is not None and not 0 < crop <= 1:
      raise ValueError(f"RANDOM_CROP={crop!r}: give a share above 0, at most 1, or None.")
    if not 0 <= erasing <= 1:
      raise ValueError(f"RANDOM_ERASING={erasing!r}: give a probability.")
    self.crop, self.erasing = crop, erasing
    self.rand = None if rand is None else rand_augment.parse(rand)

  @property
  def tables(self) -> Mapping[str, Table]:
    """Returns split -> its table; 'train' is trained on."""
    raise NotImplementedError

  def train(self, seed: int, start: int) -> Iterator[source.Batch]:
    """Returns endless batches; batch i is a function of (seed, i)."""
    make = functools.partial(batch_of, self, seed)
    if not self.workers:
      return map(make, itertools.count(start))
    import grain
    from absl import flags

    if not flags.FLAGS.is_parsed():  # grain's own flags, which have their defaults then
      flags.FLAGS.mark_as_parsed()
    numbers = grain.MapDataset.range(start, 2**62).map(make).to_iter_dataset()
    options = grain.MultiprocessingOptions(num_workers=self.workers, per_worker_buffer_size=2)
    return ended(iter(numbers.mp_prefetch(options)))

  def splits(self) -> Mapping[str, Iterable[source.Batch]]:
    """Returns each split but 'train'."""
    return {name: _Split(self, table) for name, table in self.tables.items() if name != "train"}


def ended(batches: Any) -> Iterator[source.Batch]:
  """Yields batches, and closes what makes them when the reader is done.

  Workers that are not closed leave shared memory behind.

  Args:
    batches: an iterator with a method `close`, such as grain's.
  """
  with contextlib.closing(batches):
    yield from batches


@functools.lru_cache(maxsize=4)
def _order(seed: int, epoch: int, count: int) -> np.ndarray:
  """Returns the order in which an epoch reads."""
  return augment.stream(seed, epoch, 0).permutation(count)


def batch_of(data: Indexed, seed: int, number: int) -> source.Batch:
  """Returns a training batch."""
  table, size = data.tables["train"], data.batch_size
  found = []
  for position in range(number * size, (number + 1) * size):
    epoch, place = divmod(position, len(table))
    picture, label = table.read(int(_order(seed, epoch, len(table))[place]))
    rng = augment.stream(seed, position, 1)
    image = augment.training(picture, data.size, rng, data.crop, data.erasing, data.rand)
    found.append((image, label))
  return _of(found, size)


def _of(found: Sequence[tuple[np.ndarray, int]], size: int) -> source.Batch:
  """Returns a batch of images and labels."""
  images = augment.normalized(np.stack([image for image, _ in found]))
  return source.batch_of(images, np.array([label for _, label in found], np.int32), size)


class _Split:
  """The batches of a split, read each time."""

  def __init__(self, data: Indexed, table: Table):
    self._data, self._table = data, table

  def __iter__(self) -> Iterator[source.Batch]:
    size = self._data.batch_size
    for start in range(0, len(self._table), size):
      read = map(self._table.read, range(start, min(start + size, len(self._table))))
      yield _of(
        [(augment.centered(picture, self._data.size), label) for picture, label in read], size
      )
