"""Finds the source that a setting names."""

from __future__ import annotations

import os
from typing import Any

from nm_sparsity_jax.trainer.images.source import Source


def source(
  data: Any,
  size: int,
  batch_size: int = 128,
  folder: str | None = None,
  rand_augment: str | None = None,
  random_erasing: float = 0.0,
  crop: float | None = None,
  workers: int = 0,
) -> Source:
  """Returns the images that DATA names.

      source("rebus", size=16)
      source("/data/pets", size=224)  # train/CLASS/*.jpg and validation/CLASS/*.jpg
      source("cifar10", size=224)     # prepared by TensorFlow Datasets

  Args:
    data: 'rebus'; 'cifar10', 'imagenet2012' or another data set of TensorFlow Datasets; a folder,
      with a '/' in its name; or a `Source`, which is returned as it is [DATA].
    size: height and width of an image [IMAGE_SIZE].
    batch_size: images of a batch [BATCH_SIZE].
    folder: where prepared data sets are looked for; None = TFDS_DATA_DIR, else
      ~/tensorflow_datasets [DATA_DIR].
    rand_augment: timm's words, such as 'rand-m15-n2'; None = none [RAND_AUGMENT].
    random_erasing: probability that a box of an image is erased [RANDOM_ERASING].
    crop: least share of an image's area that a random crop shows; None = no crop [RANDOM_CROP].
    workers: processes that read and augment; 0 = this one [DATA_WORKERS].
  """
  if not isinstance(data, str | os.PathLike):
    return data
  augments = {"RAND_AUGMENT": rand_augment, "RANDOM_ERASING": random_erasing, "RANDOM_CROP": crop}
  if data == "rebus":
    from nm_sparsity_jax.trainer.images import rebus

    if given := next((name for name, value in augments.items() if value), None):
      raise ValueError(
        f"{given}={augments[given]!r}, but DATA='rebus' is generated, and not augmented: leave "
        f"{given} out."
      )
    if size != rebus.SIZE:
      raise ValueError(
        f"IMAGE_SIZE={size}, but DATA='rebus' has pictures of {rebus.SIZE}: set "
        f"IMAGE_SIZE={rebus.SIZE}."
      )
    return rebus.Rebus(batch_size)
  fields = {
    "crop": crop, "erasing": random_erasing, "workers": workers, "rand": rand_augment
  }  # fmt: skip
  if "/" in (path := os.fspath(data)):
    from nm_sparsity_jax.trainer.images import folder as folders

    return folders.Folder(path, size, batch_size, **fields)
  from nm_sparsity_jax.trainer.images import tfds

  return tfds.Tfds(path, size, batch_size, folder, **fields)
