"""What happens to an image that was read: a crop, a flip, RandAugment, an erased box.

    picture, its own random stream -> [training] -> uint8 [size, size, 3]
    picture                        -> [centered] -> uint8 [size, size, 3]
    uint8 -> [normalized] -> float32, by ImageNet's mean and deviation

A random stream is numpy's Philox of (seed, position), so an image of a batch is a function of
these.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

MEAN = np.array([0.485, 0.456, 0.406], np.float32)
DEVIATION = np.array([0.229, 0.224, 0.225], np.float32)
_KEPT = 0.875  # of the shorter side, which an evaluation looks at
_RATIO = 3 / 4  # of the sides of a crop, or its inverse
_ERASED = 0.02, 1 / 3  # share of the area
_BICUBIC, _FLIP = 3, 0  # Pillow's numbers


def stream(*key: int) -> np.random.Generator:
  """Returns a random stream of its own for a key, such as (seed, position).

  Args:
    *key: whole numbers from 0 on.
  """
  return np.random.Generator(np.random.Philox(np.random.SeedSequence(key)))


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
  box = _middle(picture) if crop is None else _crop(picture.width, picture.height, rng, crop)
  picture = picture.resize((size, size), resample=_BICUBIC, box=box)
  if rng.random() < 0.5:
    picture = picture.transpose(_FLIP)
  image = np.asarray(picture if rand is None else rand(picture, rng))
  return _erased(image, rng) if erasing and rng.random() < erasing else image


def _crop(width: int, height: int, rng: np.random.Generator, least: float) -> tuple[int, ...]:
  """Returns a random box: left, upper, right, lower."""
  for _ in range(10):
    area = rng.uniform(least, 1.0) * width * height
    ratio = math.exp(rng.uniform(math.log(_RATIO), -math.log(_RATIO)))
    w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
    if 0 < w <= width and 0 < h <= height:
      left, upper = int(rng.integers(width - w + 1)), int(rng.integers(height - h + 1))
      return left, upper, left + w, upper + h
  side = min(width, height)
  left, upper = (width - side) // 2, (height - side) // 2
  return left, upper, left + side, upper + side


def _erased(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
  """Returns an image with a box of noise."""
  height, width, _ = image.shape
  left, upper, right, lower = _box_of(width, height, rng)
  image = image.copy()
  shape = lower - upper, right - left, image.shape[-1]
  image[upper:lower, left:right] = rng.integers(0, 256, shape, np.uint8)
  return image


def _box_of(width: int, height: int, rng: np.random.Generator) -> tuple[int, int, int, int]:
  """Returns the box that is erased."""
  area = rng.uniform(*_ERASED) * width * height
  ratio = math.exp(rng.uniform(math.log(0.3), -math.log(0.3)))
  w, h = min(width, round(math.sqrt(area * ratio))), min(height, round(math.sqrt(area / ratio)))
  left, upper = int(rng.integers(width - w + 1)), int(rng.integers(height - h + 1))
  return left, upper, left + w, upper + h


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
