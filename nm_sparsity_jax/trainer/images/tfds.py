"""Data sets of TensorFlow Datasets that were prepared before: nothing is downloaded here.

    tfds build imagenet2012 --file_format=array_record --data_dir=/data

Array records are read by their number. Prepared sets are looked for in DATA_DIR, else in
TFDS_DATA_DIR, else in ~/tensorflow_datasets.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from typing import Any

from nm_sparsity_jax.core.errors import quiet
from nm_sparsity_jax.trainer.images import indexed

_HOME = "~/tensorflow_datasets"


class Tfds(indexed.Indexed):
  """A prepared data set with the features 'image' and 'label'.

      Tfds("cifar10", size=224, batch_size=64, folder="/data")

  'validation' is evaluated, or 'test' where there is none.

  Args:
    name: of the data set [DATA].
    size: height and width of an image.
    batch_size: images of a batch.
    folder: where it is looked for; None = TFDS_DATA_DIR, else ~/tensorflow_datasets [DATA_DIR].
    **fields: of `indexed.Indexed`.
  """

  def __init__(
    self, name: str, size: int, batch_size: int = 128, folder: str | None = None, **fields: Any
  ):
    super().__init__(size, batch_size, **fields)
    self.name = name
    self.folder = os.path.expanduser(folder or os.environ.get("TFDS_DATA_DIR") or _HOME)

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
    how = f"tfds build {self.name} --file_format=array_record --data_dir={self.folder}"
    try:
      builder = tfds.builder(self.name, data_dir=self.folder, file_format="array_record")
      is_there = builder.is_prepared()
    except Exception as e:
      if isinstance(e, tfds.core.DatasetNotFoundError):
        raise ValueError(
          f"DATA={self.name!r}: choose 'rebus', a data set of TensorFlow Datasets such as "
          "'imagenet2012' or 'cifar10', or a folder, with a '/' in its name."
        ) from e
      builder, is_there = None, False
    if not is_there:
      raise ValueError(
        f"DATA={self.name!r} is not prepared as array records in {self.folder!r}: set DATA_DIR or "
        f"TFDS_DATA_DIR to where it is, or prepare it, `{how}`."
      )
    return builder

  @property
  def classes(self) -> int:  # type: ignore[override]
    """Returns how many labels there are."""
    return self._builder.info.features["label"].num_classes

  @functools.cached_property
  def tables(self) -> Mapping[str, Any]:
    """Returns 'train', and what is evaluated."""
    have = self._builder.info.splits
    split = next((name for name in ("validation", "test") if name in have), None)
    names = ["train", *([split] if split else [])]
    return {name: _Table(self._builder.as_data_source(split=name)) for name in names}

  def check(self) -> None:
    """Raises ValueError where the set is not prepared."""
    len(self.tables["train"])


class _Table:
  """Examples by their number."""

  def __init__(self, examples: Any):
    self._examples = examples

  def __len__(self) -> int:
    return len(self._examples)

  def read(self, number: int) -> tuple[Any, int]:
    """Returns the picture of an example, and its label."""
    from PIL import Image

    example = self._examples[number]
    image = example["image"]
    return Image.fromarray(image[..., 0] if image.shape[-1] == 1 else image).convert("RGB"), int(
      example["label"]
    )
