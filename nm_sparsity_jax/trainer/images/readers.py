"""Images that are read by their number: a folder, or a prepared set of TensorFlow Datasets.

    DATA -> [find] -> Source
    position in the endless stream -> (epoch, place) -> its permutation -> number -> picture
    (seed, position) -> the random stream of the picture

So batch i is a function of (seed, i), whoever reads it.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import pathlib
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from nm_sparsity_jax.core.errors import quiet
from nm_sparsity_jax.trainer.images import augment, rand_augment, rebus, source

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp")
_LOOKED_AT = 20_000  # files whose heads are read before the first step; those of others when read


def find(
  data: Any,
  size: int,
  batch_size: int = 128,
  folder: str | None = None,
  rand_augment: str | None = None,
  random_erasing: float = 0.0,
  crop: float | None = None,
  workers: int = 0,
) -> source.Source:
  """Returns the images that DATA names.

      find("rebus", size=16)
      find("/data/pets", size=224)  # train/CLASS/*.jpg and validation/CLASS/*.jpg
      find("cifar10", size=224)     # prepared by TensorFlow Datasets

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
  if data == "rebus":
    if rand_augment or random_erasing or crop:
      raise ValueError(
        "DATA='rebus' is generated, and not augmented: leave out RAND_AUGMENT, RANDOM_ERASING and "
        "RANDOM_CROP."
      )
    if size != rebus.SIZE:
      raise ValueError(
        f"IMAGE_SIZE={size}, but DATA='rebus' has pictures of {rebus.SIZE}: set "
        f"IMAGE_SIZE={rebus.SIZE}."
      )
    return rebus.Rebus(batch_size)
  how = dict(crop=crop, erasing=random_erasing, workers=workers, rand=rand_augment)
  if "/" in (path := os.fspath(data)):
    return Folder(path, size, batch_size, **how)
  return Tfds(path, size, batch_size, folder, **how)


class Indexed(source.Source):
  """Images of tables, one a split. Subclasses define `tables` and `read`.

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
    if crop is not None and not 0 < crop <= 1:
      raise ValueError(f"RANDOM_CROP={crop!r}: give a share above 0, at most 1, or None.")
    if not 0 <= erasing <= 1:
      raise ValueError(f"RANDOM_ERASING={erasing!r}: give a probability.")
    self.size, self.batch_size, self.workers = size, batch_size, workers
    self.crop, self.erasing = crop, erasing
    self.rand = None if rand is None else rand_augment.parse(rand)

  @property
  def tables(self) -> Mapping[str, Sequence[Any]]:
    """Returns split -> what `read` takes of each example; 'train' is trained on."""
    raise NotImplementedError

  def read(self, example: Any) -> tuple[Any, int]:
    """Returns Pillow's picture of an example, RGB, and its label."""
    raise NotImplementedError

  def train(self, seed: int, start: int) -> Iterator[source.Batch]:
    """Returns endless batches; batch i is a function of (seed, i)."""
    make = functools.partial(self._batch, seed)
    if not self.workers:
      yield from map(make, itertools.count(start))
    import grain
    from absl import flags

    if not flags.FLAGS.is_parsed():  # grain's own flags, which have their defaults then
      flags.FLAGS.mark_as_parsed()
    numbers = grain.MapDataset.range(start, 2**62).map(make).to_iter_dataset()
    options = grain.MultiprocessingOptions(num_workers=self.workers, per_worker_buffer_size=2)
    # Workers that are not closed leave shared memory behind.
    with contextlib.closing(iter(numbers.mp_prefetch(options))) as batches:
      yield from batches

  def splits(self) -> Mapping[str, Iterable[source.Batch]]:
    """Returns each split but 'train'."""
    return {name: self._split(table) for name, table in self.tables.items() if name != "train"}

  def _batch(self, seed: int, number: int) -> source.Batch:
    """Returns a training batch."""
    table, found = self.tables["train"], []
    for position in range(number * self.batch_size, (number + 1) * self.batch_size):
      epoch, place = divmod(position, len(table))
      picture, label = self.read(table[int(_order(seed, epoch, len(table))[place])])
      rng = augment.stream(seed, position, 1)
      found.append(
        (augment.training(picture, self.size, rng, self.crop, self.erasing, self.rand), label)
      )
    return self._joined(found)

  def _split(self, table: Sequence[Any]) -> Iterator[source.Batch]:
    for start in range(0, len(table), self.batch_size):
      examples = [table[i] for i in range(start, min(start + self.batch_size, len(table)))]
      read = map(self.read, examples)
      yield self._joined([(augment.centered(picture, self.size), label) for picture, label in read])

  def _joined(self, found: Sequence[tuple[np.ndarray, int]]) -> source.Batch:
    images, labels = zip(*found, strict=True)
    return source.batch_of(augment.normalized(np.stack(images)), np.array(labels), self.batch_size)


@functools.lru_cache(maxsize=4)
def _order(seed: int, epoch: int, count: int) -> np.ndarray:
  return augment.stream(seed, epoch, 0).permutation(count)


# --- a folder -------------------------------------------------------------------------------------


class Folder(Indexed):
  """Images in folders: PATH/train/CLASS/*.jpg, PATH/validation/CLASS/*.jpg.

      Folder("/data/pets", size=224, batch_size=128, crop=0.08)

  Classes are the folders of 'train' in alphabetical order. Every other folder is a split.

  Args:
    path: the folder [DATA].
    size: height and width of an image.
    batch_size: images of a batch.
    **fields: of `Indexed`.
  """

  def __init__(self, path: str | os.PathLike, size: int, batch_size: int = 128, **fields: Any):
    super().__init__(size, batch_size, **fields)
    self.path = pathlib.Path(path).expanduser()

  @functools.cached_property
  def names(self) -> tuple[str, ...]:
    """Returns the classes."""
    train = self.path / "train"
    found = tuple(p.name for p in _folders(train)) if train.is_dir() else ()
    if not found:
      raise ValueError(
        f"DATA={str(self.path)!r} has no folders train/CLASS: put images into train/CLASS/ and "
        "validation/CLASS/."
      )
    return found

  @property
  def classes(self) -> int:  # type: ignore[override]
    """Returns how many classes there are."""
    return len(self.names)

  @functools.cached_property
  def tables(self) -> Mapping[str, Sequence[tuple[pathlib.Path, int]]]:
    """Returns the files of each split."""
    self.names  # noqa: B018 (refuses a folder without classes)
    return {split.name: self._files(split) for split in _folders(self.path)}

  def _files(self, split: pathlib.Path) -> Sequence[tuple[pathlib.Path, int]]:
    found = []
    for folder in _folders(split):
      if folder.name not in self.names:
        raise ValueError(
          f"DATA={str(self.path)!r}: {split.name!r} has the class {folder.name!r}, and 'train' has "
          f"not: its classes are {', '.join(self.names)}."
        )
      files = sorted(p for p in folder.iterdir() if p.suffix.lower() in SUFFIXES)
      if split.name == "train" and not files:
        raise ValueError(_no_images(folder))
      found += [(file, self.names.index(folder.name)) for file in files]
    if not found:
      raise ValueError(_no_images(split))
    return found

  def read(self, example: tuple[pathlib.Path, int]) -> tuple[Any, int]:
    """Returns the picture of a file, and its label."""
    path, label = example
    with _opened(path) as picture:
      try:
        return picture.convert("RGB"), label
      except (OSError, SyntaxError, ValueError) as e:
        raise ValueError(f"DATA: {path} cannot be read ({e}): it is damaged. Take it out.") from e

  def check(self) -> None:
    """Raises ValueError for a file that cannot be read as an RGB image."""
    if list(self.tables) == ["train"]:
      warnings.warn(
        f"DATA={str(self.path)!r} has no folder beside 'train', so nothing is evaluated: put "
        "images into validation/CLASS/.",
        stacklevel=2,
      )
    for table in self.tables.values():
      for path, _ in table[:_LOOKED_AT]:
        _opened(path).close()


def _folders(path: pathlib.Path) -> list[pathlib.Path]:
  return sorted(p for p in path.iterdir() if p.is_dir())


def _no_images(path: pathlib.Path) -> str:
  return f"DATA: {path} has no images: a file ends in {', '.join(SUFFIXES)}."


def _opened(path: pathlib.Path) -> Any:
  """Returns Pillow's picture of a file, whose head alone is read."""
  try:
    from PIL import Image
  except ImportError as e:
    raise ImportError(
      "a folder of images needs Pillow: pip install 'nm-sparsity-jax[vision]'"
    ) from e
  try:
    picture = Image.open(path)
  except (OSError, SyntaxError, ValueError) as e:
    raise ValueError(f"DATA: {path} is not an image that can be read. Take it out.") from e
  if picture.mode in ("L", "LA", "1", "F") or picture.mode.startswith("I"):
    picture.close()
    raise ValueError(
      f"DATA: {path} is grey (mode {picture.mode}), and a network takes 3 channels. Convert it to "
      "RGB, or take it out."
    )
  return picture


# --- TensorFlow Datasets --------------------------------------------------------------------------


class Tfds(Indexed):
  """A data set of TensorFlow Datasets that is prepared as array records; nothing is downloaded.

      Tfds("cifar10", size=224, batch_size=64, folder="/data")

  It has the features 'image' and 'label'. 'validation' is evaluated, or 'test' where there is none.

      tfds build cifar10 --file_format=array_record --data_dir=/data

  Args:
    name: of the data set [DATA].
    size: height and width of an image.
    batch_size: images of a batch.
    folder: where it is looked for; None = TFDS_DATA_DIR, else ~/tensorflow_datasets [DATA_DIR].
    **fields: of `Indexed`.
  """

  def __init__(
    self, name: str, size: int, batch_size: int = 128, folder: str | None = None, **fields: Any
  ):
    super().__init__(size, batch_size, **fields)
    self.name = name
    folder = folder or os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets"
    self.folder = os.path.expanduser(folder)

  def __getstate__(self) -> dict[str, Any]:
    """Returns what a worker needs: it opens the files by itself."""
    return {k: x for k, x in vars(self).items() if k not in ("_builder", "tables")}

  @functools.cached_property
  def _builder(self) -> Any:
    try:
      with quiet():  # TensorFlow writes past Python
        import tensorflow_datasets as tfds
    except ImportError as e:
      raise ImportError(
        f"DATA={self.name!r} needs tensorflow-datasets: pip install 'nm-sparsity-jax[local]'"
      ) from e
    try:
      builder = tfds.builder(self.name, data_dir=self.folder, file_format="array_record")
      is_prepared = builder.is_prepared()
    except Exception:  # unknown, or of another format: TFDS has an error of its own for each
      builder, is_prepared = None, False
    if not is_prepared:
      raise ValueError(
        f"DATA={self.name!r} is not prepared as array records in {self.folder!r}: set DATA_DIR or "
        f"TFDS_DATA_DIR to where it is, or prepare it, `tfds build {self.name} "
        f"--file_format=array_record --data_dir={self.folder}`. DATA may also be 'rebus', or a "
        "folder, with a '/' in its name."
      )
    return builder

  @property
  def classes(self) -> int:  # type: ignore[override]
    """Returns how many labels there are."""
    return self._builder.info.features["label"].num_classes

  @functools.cached_property
  def tables(self) -> Mapping[str, Any]:
    """Returns 'train', and what is evaluated."""
    splits = self._builder.info.splits
    evaluated = [name for name in ("validation", "test") if name in splits][:1]
    return {name: self._builder.as_data_source(split=name) for name in ("train", *evaluated)}

  def read(self, example: Mapping[str, Any]) -> tuple[Any, int]:
    """Returns the picture of an example, and its label."""
    from PIL import Image

    image = example["image"]
    picture = Image.fromarray(image[..., 0] if image.shape[-1] == 1 else image)
    return picture.convert("RGB"), int(example["label"])

  def check(self) -> None:
    """Raises ValueError where the set is not prepared."""
    len(self.tables["train"])
