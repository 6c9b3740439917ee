"""RandAugment by Pillow, in timm's words: 'rand-m9-mstd0.5-inc1'.

    'rand-m15-n2' -> [parse] -> RandAugment(magnitude=15, operations=2)
    picture, its random stream -> [RandAugment.__call__] -> picture

Each of n operations is one of 15, by chance, and half of the time it does nothing. Magnitudes go to
10, as in timm, which takes a larger one for 10.

Reference: Cubuk et al., RandAugment: Practical Automated Data Augmentation with a Reduced Search
Space, NeurIPS 2020, arXiv:1909.13719.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import numpy as np
from PIL import ImageEnhance, ImageOps

_MOST = 10.0
_WORD = re.compile(r"(m|n|mstd|inc)(\d+(?:\.\d+)?)")
_FILL = 124, 116, 104  # ImageNet's mean, where a picture was moved away
_BICUBIC, _AFFINE = 3, 0  # Pillow's numbers


@dataclasses.dataclass(frozen=True)
class RandAugment:
  """Changes a picture by chance.

  Attributes:
    magnitude: from 0 to 10, how much an operation changes.
    operations: how many there are, one after the other.
    deviation: of the magnitude, which is drawn for each operation; 0 = it is always the same.
    increasing: a larger magnitude always changes more; else of some operations the middle one
      changes least, as in the paper.
  """

  magnitude: float = 9.0
  operations: int = 2
  deviation: float = 0.0
  increasing: bool = False

  def __call__(self, picture: Any, rng: np.random.Generator) -> Any:
    """Returns the changed picture.

    Args:
      picture: Pillow's, RGB.
      rng: the stream of this picture.
    """
    for _ in range(self.operations):
      change = CHANGES[int(rng.integers(len(CHANGES)))]
      is_done, sign = rng.random() < 0.5, 1 if rng.random() < 0.5 else -1
      level = self.magnitude + self.deviation * rng.standard_normal()
      if is_done:
        picture = change(picture, min(max(level, 0.0), _MOST) / _MOST, sign, self.increasing)
    return picture


def parse(words: str) -> RandAugment:
  """Returns what timm's words say.

  >>> parse("rand-m9-mstd0.5-inc1")
  RandAugment(magnitude=9.0, operations=2, deviation=0.5, increasing=True)

  Args:
    words: 'rand', then m (magnitude), n (operations), mstd (deviation) and inc (1 = increasing).
  """
  first, *rest = str(words).split("-")
  found = [_WORD.fullmatch(word) for word in rest]
  if first != "rand" or not all(found):
    raise ValueError(
      f"RAND_AUGMENT={words!r}: give timm's words, such as 'rand-m15-n2' or 'rand-m9-mstd0.5-inc1'."
    )
  said = {hit[1]: float(hit[2]) for hit in found if hit}
  return RandAugment(
    said.get("m", 9.0), int(said.get("n", 2)), said.get("mstd", 0.0), bool(said.get("inc", 0))
  )


# --- the operations: (picture, level from 0 to 1, sign, increasing) -> picture --------------------


def _plain(operation: Callable) -> Callable:
  return lambda picture, level, sign, increasing: operation(picture)


def _enhanced(kind: Any) -> Callable:
  def change(picture, level, sign, increasing):
    factor = 1 + sign * 0.9 * level if increasing else 0.1 + 1.8 * level  # 1 changes nothing
    return kind(picture).enhance(max(factor, 0.1))

  return change


def _affine(matrix: Callable) -> Callable:  # of the signed level and the sides
  def change(picture, level, sign, increasing):
    how = matrix(sign * level, *picture.size)
    return picture.transform(picture.size, _AFFINE, how, resample=_BICUBIC, fillcolor=_FILL)

  return change


def _rotated(picture, level, sign, increasing):
  return picture.rotate(sign * 30 * level, resample=_BICUBIC, fillcolor=_FILL)


def _posterized(picture, level, sign, increasing):
  bits = 4 - int(4 * level) if increasing else int(4 * level)
  return ImageOps.posterize(picture, max(bits, 1))


def _solarized(picture, level, sign, increasing):
  threshold = int(256 * level)
  return ImageOps.solarize(picture, 256 - threshold if increasing else threshold)


def _brightened(picture, level, sign, increasing):  # only what is dark
  more = int(110 * level)
  return picture.point([min(255, i + more) if i < 128 else i for i in range(256)] * 3)


CHANGES = (
  *map(_plain, (ImageOps.autocontrast, ImageOps.equalize, ImageOps.invert)),
  _rotated, _posterized, _solarized, _brightened,
  *map(_enhanced, (ImageEnhance.Color, ImageEnhance.Contrast)),
  *map(_enhanced, (ImageEnhance.Brightness, ImageEnhance.Sharpness)),
  _affine(lambda x, width, height: (1, 0.3 * x, 0, 0, 1, 0)),
  _affine(lambda x, width, height: (1, 0, 0, 0.3 * x, 1, 0)),
  _affine(lambda x, width, height: (1, 0, 0.45 * x * width, 0, 1, 0)),
  _affine(lambda x, width, height: (1, 0, 0, 0, 1, 0.45 * x * height)),
)  # fmt: skip
