"""A folder of images: DATA/train/CLASS/*.jpg, DATA/validation/CLASS/*.jpg.

Classes are the folders of 'train' in alphabetical order. Every other folder is a split.
"""

from __future__ import annotations

import functools
import os
import pathlib
import warnings
from collections.abc import Mapping
from typing import Any

from nm_sparsity_jax.trainer.images import indexed

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp")
_LOOKED_AT = 20_000  # files whose heads are read before the first step; those of others when read


class Folder(indexed.Indexed):
  """Images in folders, one a class.

      Folder("/data/pets", size=224, batch_size=128, crop=0.08)

  Args:
    path: the folder [DATA].
    size: height and width of an image.
    batch_size: images of a batch.
    **fields: of `indexed.Indexed`.
  """

  def __init__(self, path: str | os.PathLike, size: int, batch_size: int = 128, **fields: Any):
    super().__init__(size, batch_size, **fields)
    self.path = pathlib.Path(path).expanduser()

  @functools.cached_property
  def names(self) -> tuple[str, ...]:
    """Returns the classes."""
    train = self.path / "train"
    if not train.is_dir():
      raise ValueError(
        f"DATA={str(self.path)!r} has no folder 'train': put images into train/CLASS/ and "
        "validation/CLASS/."
      )
    found = tuple(sorted(p.name for p in train.iterdir() if p.is_dir()))
    if not found:
      raise ValueError(f"DATA={str(self.path)!r}: 'train' has no folders, and each is a class.")
    return found

  @property
  def classes(self) -> int:  # type: ignore[override]
    """Returns how many classes there are."""
    return len(self.names)

  @functools.cached_property
  def tables(self) -> Mapping[str, Files]:
    """Returns the files of each split."""
    splits = sorted(p.name for p in self.path.iterdir() if p.is_dir()) if self.names else ()
    return {split: self._files(split) for split in splits}

  def _files(self, split: str) -> Files:
    found = []
    for folder in sorted(p for p in (self.path / split).iterdir() if p.is_dir()):
      if folder.name not in self.names:
        raise ValueError(
          f"DATA={str(self.path)!r}: {split!r} has the class {folder.name!r}, and 'train' has not: "
          f"its classes are {', '.join(self.names[:5])}{', ...' * (len(self.names) > 5)}."
        )
      label = self.names.index(folder.name)
      files = sorted(p for p in folder.iterdir() if p.suffix.lower() in SUFFIXES)
      if split == "train" and not files:
        raise ValueError(self._empty(f"{split}/{folder.name}"))
      found += [(file, label) for file in files]
    if not found:
      raise ValueError(self._empty(split))
    return Files(found)

  def _empty(self, where: str) -> str:
    return (
      f"DATA={str(self.path)!r}: {where!r} has no images: a file ends in {', '.join(SUFFIXES)}."
    )

  def check(self) -> None:
    """Raises ValueError for a file that cannot be read as an RGB image."""
    if list(self.tables) == ["train"]:
      warnings.warn(
        f"DATA={str(self.path)!r} has no folder beside 'train', so nothing is evaluated: put "
        "images into validation/CLASS/.",
        stacklevel=2,
      )
    for table in self.tables.values():
      for number in range(min(len(table), _LOOKED_AT)):
        table.look(number)


class Files:
  """Files and their labels: a table of `indexed`.

  Args:
    files: of each number, a path and a label.
  """

  def __init__(self, files: list[tuple[pathlib.Path, int]]):
    self._files = files

  def __len__(self) -> int:
    return len(self._files)

  def look(self, number: int) -> None:
    """Reads the head of a file; refuses one that is empty, of no image, or not RGB."""
    with _opened(self._files[number][0]):
      pass

  def read(self, number: int) -> tuple[Any, int]:
    """Returns the picture of a file, and its label."""
    path, label = self._files[number]
    with _opened(path) as picture:
      try:
        return picture.convert("RGB"), label
      except (OSError, SyntaxError, ValueError) as e:
        raise ValueError(f"DATA: {path} cannot be read ({e}): it is damaged. Take it out.") from e


def _opened(path: pathlib.Path) -> Any:
  """Returns Pillow's picture of a file, whose head alone is read."""
  try:
    from PIL import Image
  except ImportError as e:
    raise ImportError(
      "a folder of images needs Pillow: pip install 'nm-sparsity-jax[vision]'"
    ) from e
  if not path.stat().st_size:
    raise ValueError(f"DATA: {path} is empty. Take it out.")
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
