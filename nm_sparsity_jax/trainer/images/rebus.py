"""Rebus: two glyphs in a picture, and a table of labels. Generated, the same everywhere.

    two alphabets of 20 glyphs, and a table [20, 20] of labels: always the same
    (seed, i, word) -> [words] -> which glyphs, where, how far shifted, how dim, the noise

A picture is 16 x 16 x 3, four cells of 8 x 8. One cell holds a glyph of the first alphabet, another
one of the second; each is shifted by up to one pixel and dimmed, and all is noisy. The label is
table[a, b], so a network must recognize both and remember 400 pairs: that is what feed-forward
layers are for.

Everything is whole numbers, by a hash of our own (`words`), until the last product, which is by a
power of two. No library's random stream has a part in it, so a batch has the same bits on every
platform and with every version.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from nm_sparsity_jax.trainer.images import Batch, Source, batch_of

GLYPHS, CLASSES, CELL, CELLS, CHANNELS = 20, 10, 8, 4, 3
SIZE, VALIDATION = 16, 2048
ONE = 4096  # 1.0, as a whole number
NOISE = 0.4  # its deviation; that of a glyph is 1
_PAIRS = np.array([*itertools.permutations(range(CELLS), 2)])
_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_EACH = 8  # words that say what a picture shows


def _mixed(x: np.ndarray) -> np.ndarray:
  """Returns 64 bits that each depend on all bits of the input (MurmurHash3's last steps)."""
  x = x ^ (x >> np.uint64(33))
  x *= np.uint64(0xFF51AFD7ED558CCD)
  x ^= x >> np.uint64(33)
  x *= np.uint64(0xC4CEB9FE1A85EC53)
  x ^= x >> np.uint64(33)
  return x


def words(*key: int, count: int) -> np.ndarray:
  """Returns the first words of the stream of a key, uint64 [count].

  >>> [hex(x) for x in words(0, 1, count=2).tolist()]
  ['0xb6134cb95433dd7b', '0xde398c39c0599b04']

  Args:
    *key: whole numbers, each below 2 ** 64.
    count: of words.
  """
  state = np.zeros(1, np.uint64)
  for number in key:
    state = _mixed(state + _GAMMA + np.uint64(number))
  return _mixed(state + _GAMMA * np.arange(1, count + 1, dtype=np.uint64))


def _noise(bits: np.ndarray) -> np.ndarray:
  """Returns two numbers of each word, int32 [..., 2]: sums of four bytes, about normal.

  Their mean is 0 and their deviation 147.8.
  """
  halves = np.ascontiguousarray(bits).astype("<u8", copy=False).view(np.uint8)
  sums = halves.reshape(*bits.shape, 2, 4).sum(-1, dtype=np.int32)
  return sums - np.int32(510)


@functools.cache
def _task() -> tuple[np.ndarray, np.ndarray]:
  """Returns the glyphs in all nine shifts, int32 [40, 9, 8, 8, 3], and the table of labels."""
  count = 2 * GLYPHS
  coarse, fine = count * CELL * CELL // 4 * CHANNELS, count * CELL * CELL * CHANNELS
  low = _noise(words(0, 1, count=coarse // 2)).reshape(count, CELL // 2, CELL // 2, CHANNELS)
  high = _noise(words(0, 2, count=fine // 2)).reshape(count, CELL, CELL, CHANNELS)
  glyph = (2 * low.repeat(2, 1).repeat(2, 2) + high).astype(np.int64)
  # Each glyph is as bright as the others. The root is one of whole numbers.
  power = (glyph**2).sum((1, 2, 3)) // glyph[0].size
  root = np.array([math.isqrt(int(p)) for p in power]).reshape(-1, 1, 1, 1)
  glyph = (glyph * ONE // root).astype(np.int32)
  shifts = itertools.product((-1, 0, 1), repeat=2)
  shifted = np.stack([np.roll(glyph, by, (1, 2)) for by in shifts], 1)
  table = words(0, 3, count=GLYPHS**2) % np.uint64(CLASSES)
  return shifted, table.reshape(GLYPHS, GLYPHS).astype(np.int32)


def pictures(key: tuple[int, ...], count: int) -> tuple[np.ndarray, np.ndarray]:
  """Returns pictures and their labels: a function of the arguments.

      images, labels = pictures((0, 1), 128)  # float32 [128, 16, 16, 3], int32 [128]

  Args:
    key: of the stream, such as a seed and the number of a batch.
    count: of pictures.
  """
  glyphs, table = _task()
  draws = words(*key, 1, count=count * _EACH).reshape(count, _EACH)
  pick = lambda column, n: (draws[:, column] % np.uint64(n)).astype(np.int64)
  first, second = pick(0, GLYPHS), pick(1, GLYPHS)
  where = _PAIRS[pick(2, len(_PAIRS))]
  shape = count, CELLS, CELL, CELL, CHANNELS
  # One rounding on the host; all that follows is whole numbers.
  scale = round(NOISE * ONE * 256 / 147.8)  # of 256
  image = _noise(words(*key, 2, count=math.prod(shape) // 2)).reshape(shape)
  image = (image * np.int32(scale)) >> 8
  rows = np.arange(count)
  for i, (which, shift, dim) in enumerate(((first, 3, 4), (second + GLYPHS, 5, 6))):
    # From 0.7 to 1.3, of 2048.
    bright = (1434 + pick(dim, 1229)).astype(np.int32).reshape(-1, 1, 1, 1)
    image[rows, where[:, i]] += (glyphs[which, pick(shift, 9)] * bright) >> 11
  grid = image.reshape(count, 2, 2, CELL, CELL, CHANNELS).swapaxes(2, 3)
  picture = grid.reshape(count, SIZE, SIZE, CHANNELS).astype(np.float32) * np.float32(1 / ONE)
  return picture, table[first, second]


class Rebus(Source):
  """The task 'rebus': 'train' without end, and 2,048 pictures of 'validation'.

      batch = next(Rebus(batch_size=128).train(seed=0, start=0))

  Args:
    batch_size: pictures of a batch.
  """

  def __init__(self, batch_size: int = 128):
    self.batch_size = batch_size

  def train(self, seed: int, start: int) -> Iterator[Batch]:
    """Returns endless batches; batch i is a function of (seed, i)."""
    for i in itertools.count(start):
      images, labels = pictures((1, seed, i), self.batch_size)
      yield batch_of(images, labels, self.batch_size)

  def splits(self) -> Mapping[str, Iterable[Batch]]:
    """Returns 'validation': the same pictures for every size of a batch."""
    images, labels = pictures((2,), VALIDATION)
    size = self.batch_size
    parts = [slice(at, at + size) for at in range(0, VALIDATION, size)]
    return {"validation": (batch_of(images[part], labels[part], size) for part in parts)}
