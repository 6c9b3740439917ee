"""What happens to an image that was read: a crop, a flip, RandAugment, an erased box.

picture, its own random stream -> [training] -> uint8 [size, size, 3]
picture                        -> [centered] -> uint8 [size, size, 3]
uint8 -> [normalized] -> float32, by ImageNet's mean and deviation
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

MEAN = np.array([0.485, 0.456, 0.406], np.float32)
DEVIATION = np.array([0.229, 0.224, 0.225], np.float32)
_KEPT = 0.875  # of the shorter side, which an evaluation looks at
_ERASED = 0.02, 1 / 3  # share of the area, as in timm
_BICUBIC, _FLIP = 3, 0  # Pillow's numbers


def training(
  picture: Any,
  size: int,
  rng: np.random.Generator,
  crop: float | None,
  erasing: float,
  rand: Callable | None = None,
) -> np.ndarray:
  """Returns a picture as training sees it: cropped, flipped by a coin, changed, erased.

  Args:
    picture: Pillow's, RGB.
    size: height and width of the result.
    rng: the stream of this picture.
    crop: least share of its area that is shown; None = what an evaluation looks at.
    erasing: probability that a box is replaced by noise.
    rand: such as `rand_augment.RandAugment`; None = nothing.
  """
  # All is drawn from the picture's own stream, so workers may read in any order.
  box = _middle(picture)
  if crop is not None:
    side = min(picture.width, picture.height)
    left, upper = (picture.width - side) // 2, (picture.height - side) // 2
    square = left, upper, left + side, upper + side
    box = _box(picture.width, picture.height, rng, (crop, 1.0), 3 / 4) or square
  picture = picture.resize((size, size), resample=_BICUBIC, box=box)
  if rng.random() < 0.5:
    picture = picture.transpose(_FLIP)
  image = np.array(picture if rand is None else rand(picture, rng))
  if erasing and rng.random() < erasing:
    if found := _box(size, size, rng, _ERASED, 0.3):
      left, upper, right, lower = found
      shape = lower - upper, right - left, image.shape[-1]
      image[upper:lower, left:right] = rng.integers(0, 256, shape, np.uint8)
  return image


def _box(
  width: int, height: int, rng: np.random.Generator, areas: tuple[float, float], ratio: float
) -> tuple[int, int, int, int] | None:
  """Returns a random box of a share of the area: left, upper, right, lower.

  The ratio of its sides is between `ratio` and 1 / `ratio`. None = ten of them did not fit, where
  timm gives up too.
  """
  for _ in range(10):
    area = rng.uniform(*areas) * width * height
    drawn = math.exp(rng.uniform(math.log(ratio), -math.log(ratio)))
    w, h = round(math.sqrt(area * drawn)), round(math.sqrt(area / drawn))
    if 0 < w <= width and 0 < h <= height:
      left, upper = int(rng.integers(width - w + 1)), int(rng.integers(height - h + 1))
      return left, upper, left + w, upper + h
  return None


def centered(picture: Any, size: int) -> np.ndarray:
  """Returns the middle of a picture, 7/8 of its shorter side, as uint8 [size, size, 3].

  Args:
    picture: Pillow's, RGB.
    size: height and width of the result.
  """
  return np.asarray(picture.resize((size, size), resample=_BICUBIC, box=_middle(picture)))


def _middle(picture: Any) -> tuple[float, ...]:
  """Returns the box that an evaluation looks at."""
  side = min(picture.width, picture.height) * _KEPT
  left, upper = (picture.width - side) / 2, (picture.height - side) / 2
  return left, upper, left + side, upper + side


def normalized(images: np.ndarray) -> np.ndarray:
  """Returns float32 images of ImageNet's mean 0 and deviation 1.

  Args:
    images: uint8 [..., 3].
  """
  return (images.astype(np.float32) / np.float32(255) - MEAN) / DEVIATION
