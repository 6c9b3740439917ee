"""Images that are read by their number: a folder, or a prepared set of TensorFlow Datasets.

    DATA -> [find] -> Source -> tables of examples -> grain: shuffled, augmented, batched

grain makes batch i a function of (seed, i), whoever reads it.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import abc
import contextlib
import dataclasses
import functools
import os
import pathlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from nm_sparsity_jax.core.errors import quiet
from nm_sparsity_jax.runs import files
from nm_sparsity_jax.trainer import images
from nm_sparsity_jax.trainer.images import augment, rebus

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp")


def find(data: Any, batch_size: int = 128, **how: Any) -> images.Source:
  """Returns the images that DATA names.

      find("rebus")
      find("/data/pets", size=224)  # train/CLASS/*.jpg and validation/CLASS/*.jpg
      find("cifar10", size=224)     # prepared by TensorFlow Datasets

  Args:
    data: 'rebus'; 'cifar10', 'imagenet2012' or another data set of TensorFlow Datasets; a folder,
      with a '/' in its name; or a `Source`, which is returned as it is [DATA].
    batch_size: images of a batch [BATCH_SIZE].
    **how: the attributes of `Indexed`; rebus has none of them.
  """
  if not isinstance(data, str | os.PathLike):
    return data
  if data == "rebus":
    return rebus.Rebus(batch_size)
  path = os.path.expanduser(data)
  return (Folder if "/" in path else Tfds)(path, batch_size=batch_size, **how)


@dataclasses.dataclass(eq=False)
class Indexed(images.Source):
  """Images of tables, one a split. Subclasses define `tables` and `read`.

  Attributes:
    data: the folder, or the name of the data set [DATA].
    size: height and width of an image [IMAGE_SIZE].
    batch_size: images of a batch.
    folder: where prepared data sets are looked for; None = TFDS_DATA_DIR, else
      ~/tensorflow_datasets [DATA_DIR].
    crop: least share of an image's area that a random crop shows; None = no crop [RANDOM_CROP].
    random_erasing: probability that a box of an image is erased [RANDOM_ERASING].
    rand_augment: timm's words, such as 'rand-m15-n2'; None = nothing [RAND_AUGMENT].
    workers: processes of grain that read ahead; 0 = this one [DATA_WORKERS].
  """

  data: str
  size: int
  batch_size: int = 128
  folder: str | None = None
  crop: float | None = None
  random_erasing: float = 0.0
  rand_augment: str | None = None
  workers: int = 0

  def __post_init__(self):
    self._augment = None
    if self.rand_augment is not None:
      from nm_sparsity_jax.trainer.images import rand_augment  # Pillow, of the extra `local`

      self._augment = rand_augment.parse(self.rand_augment)

  @property
  @abc.abstractmethod
  def tables(self) -> Mapping[str, Sequence[Any]]:
    """Returns split -> what `read` takes of each example; 'train' is trained on."""

  @abc.abstractmethod
  def read(self, example: Any) -> tuple[Any, int]:
    """Returns Pillow's picture of an example, RGB, and its label."""

  def train(self, seed: int, start: int) -> Iterator[images.Batch]:
    """Returns endless batches; batch i is a function of (seed, i)."""
    import grain
    from absl import flags

    examples = grain.MapDataset.source(self.tables["train"]).seed(seed).shuffle().repeat()
    batches = examples.random_map(self._drawn).batch(self.batch_size, batch_fn=self._joined)
    # By default grain holds 500 batches.
    read = batches[start:].to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
    if self.workers:
      if not flags.FLAGS.is_parsed():  # grain's own flags, which have their defaults then
        flags.FLAGS.mark_as_parsed()
      read = read.mp_prefetch(grain.MultiprocessingOptions(self.workers, per_worker_buffer_size=2))
    # Workers that are not closed leave shared memory behind.
    with contextlib.closing(iter(read)) as found:
      yield from found

  def splits(self) -> Mapping[str, Iterable[images.Batch]]:
    """Returns each split but 'train'."""
    return {name: self._split(table) for name, table in self.tables.items() if name != "train"}

  def _drawn(self, example: Any, rng: np.random.Generator) -> tuple[np.ndarray, int]:
    """Returns an example as training sees it, by the random stream of its position."""
    picture, label = self.read(example)
    how = self.crop, self.random_erasing, self._augment
    return augment.training(picture, self.size, rng, *how), label

  def _split(self, table: Sequence[Any]) -> Iterator[images.Batch]:
    for start in range(0, len(table), self.batch_size):
      examples = [table[i] for i in range(start, min(start + self.batch_size, len(table)))]
      read = map(self.read, examples)
      yield self._joined([(augment.centered(picture, self.size), label) for picture, label in read])

  def _joined(self, found: Sequence[tuple[np.ndarray, int]]) -> images.Batch:
    pictures, labels = zip(*found, strict=True)
    pixels = augment.normalized(np.stack(pictures))
    return images.batch_of(pixels, np.array(labels), self.batch_size)


class Folder(Indexed):
  """Images in folders: PATH/train/CLASS/*.jpg, PATH/validation/CLASS/*.jpg.

      find("/data/pets", size=224, batch_size=128, crop=0.08)

  Classes are the folders of 'train' in alphabetical order. Every other folder is a split.
  """

  @functools.cached_property
  def tables(self) -> Mapping[str, Sequence[tuple[pathlib.Path, int]]]:
    """Returns the files of each split."""
    # Also a class without images counts: a label is a position among them.
    names = sorted(path.name for path in pathlib.Path(self.data).glob("train/*/"))
    tables: dict[str, list[tuple[pathlib.Path, int]]] = {"train": []}
    # Sorted: the order of a folder differs between file systems.
    for path in sorted(pathlib.Path(self.data).glob("*/*/*")):
      split, name = path.parts[-3:-1]
      if path.suffix.lower() not in SUFFIXES:
        continue
      if name not in names:
        raise ValueError(f"DATA: {path} is of a class without a folder train/{name}/. Make one.")
      tables.setdefault(split, []).append((path, names.index(name)))
    if not tables["train"]:
      raise ValueError(f"DATA={self.data!r} has no images train/CLASS/*{'|'.join(SUFFIXES)}.")
    return tables

  def read(self, example: tuple[pathlib.Path, int]) -> tuple[Any, int]:
    """Returns the picture of a file, and its label."""
    from PIL import Image

    path, label = example
    with files.named(path), Image.open(path) as picture:
      return picture.convert("RGB"), label


class Tfds(Indexed):
  """A data set of TensorFlow Datasets that is prepared as array records; nothing is downloaded.

      find("cifar10", size=224, batch_size=64, folder="/data")

  It has the features 'image' and 'label'. 'validation' is evaluated, or 'test' where there is none.

      tfds build cifar10 --file_format=array_record --data_dir=/data
  """

  @functools.cached_property
  def tables(self) -> Mapping[str, Any]:
    """Returns 'train', and what is evaluated."""
    with quiet():  # TensorFlow writes past Python
      import tensorflow_datasets as tfds
    builder: Any = tfds.builder(self.data, data_dir=self.folder, file_format="array_record")
    evaluated = [name for name in ("validation", "test") if name in builder.info.splits][:1]
    return {name: builder.as_data_source(split=name) for name in ("train", *evaluated)}

  def read(self, example: Mapping[str, Any]) -> tuple[Any, int]:
    """Returns the picture of an example, and its label."""
    from PIL import Image

    image = example["image"]
    picture = Image.fromarray(image[..., 0] if image.shape[-1] == 1 else image)
    return picture.convert("RGB"), int(example["label"])
