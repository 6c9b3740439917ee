"""A folder of Hugging Face's T5: config.json and tensors, one at a time.

folder -> [Folder] -> T5Config; name -> shape, dtype -> tensor, when it is asked for
name -> dtype, shape; tensors, one after the other -> [write] -> a folder, whole or not at all

FOLDER/config.json                       the sizes
FOLDER/model.safetensors                 all tensors, or
FOLDER/model.safetensors.index.json      name -> file, where there are several:
FOLDER/model-00001-of-00003.safetensors
"""

from __future__ import annotations

import json
import math
import os
import pathlib
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from nm_sparsity_jax.models.t5 import T5Config
from nm_sparsity_jax.weights import huggingface_config, safetensors_file
from nm_sparsity_jax.weights.huggingface_names import COPIES, UNREAD, difference, sources

WEIGHTS = "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"
SHARD_BYTES = 5_000_000_000  # as transformers writes them
_MOST_INDEX = 1 << 26  # bytes
# What a tokenizer and `generate` read: a folder that is made from another one keeps them.
_BESIDE = (
  "generation_config.json", "spiece.model", "tokenizer.json", "tokenizer_config.json",
  "special_tokens_map.json", "added_tokens.json",
)  # fmt: skip
_PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_SHARED, _HEAD = "shared.weight", "lm_head.weight"


def is_folder(path: str | os.PathLike) -> bool:
  """Returns whether a path is that of a folder as Hugging Face lays one out, readable or not."""
  folder = pathlib.Path(path)
  names = (WEIGHTS, INDEX, *_PICKLED)
  return folder.is_dir() and any((folder / name).is_file() for name in names)


class Folder:
  """A folder whose headers were read and checked: what it holds is a T5, all of it.

      folder = Folder("t5-small")
      folder.config.emb_dim, folder.array("shared.weight").shape

  Args:
    path: of the folder, on a local disk.

  Attributes:
    path: as given.
    json: the values of config.json.
    config: what they tell; without a scan.
    dtypes: name -> numpy's name of the dtype, for each tensor of the network.

  Raises:
    ValueError: there is no config.json, the tensors are pickled or damaged, or they are not those
      that config.json tells: all names are in one error.
  """

  def __init__(self, path: str | os.PathLike):
    self.path = os.fspath(path)
    self.json = huggingface_config.read_json(self._config_file())
    self.config: T5Config = huggingface_config.from_json(
      self.json, repr(os.path.join(self.path, huggingface_config.FILE))
    )
    self._files, shapes, dtypes = self._opened()
    self._like_embedding = {name for name in COPIES if name in shapes}
    if not self.config.logits_via_embedding:
      self._like_embedding.discard(_HEAD)
    # transformers 5 ties T5 1.1 too, where nobody gave it a head of its own. It does not scale.
    is_tied = not self.config.logits_via_embedding and self.json.get("tie_word_embeddings", True)
    self._borrowed = {_HEAD: _SHARED} if is_tied and _HEAD not in shapes else {}
    self.dtypes = self._checked(shapes, dtypes)

  def array(self, name: str) -> np.ndarray:
    """Reads one tensor.

    Args:
      name: of a tensor of the network.

    Raises:
      ValueError: the file is damaged, or holds a copy of the embedding that differs from it.
    """
    name = self._borrowed.get(name, name)
    found = self._files[name].array(name)
    if name == _SHARED:
      for copy in sorted(self._like_embedding):
        if not np.array_equal(self._files[copy].array(copy), found):
          raise ValueError(
            f"{self.path!r}: {copy!r} differs from {_SHARED!r}, and its config.json says that T5 "
            "keeps one of them: tie_word_embeddings may be wrong there."
          )
    return found

  def beside(self) -> list[pathlib.Path]:
    """Returns the files beside config.json and tensors that a tokenizer and `generate` read."""
    files = (pathlib.Path(self.path, name) for name in _BESIDE)
    return [file for file in files if file.is_file()]

  def _config_file(self) -> pathlib.Path:
    folder = pathlib.Path(self.path)
    if not folder.is_dir():
      raise FileNotFoundError(f"there is no folder {self.path!r}")
    file = folder / huggingface_config.FILE
    if not file.is_file():
      raise ValueError(
        f"{self.path!r} has no {huggingface_config.FILE}, which tells the sizes of the network: "
        "copy it there from where the weights come from."
      )
    return file

  def _opened(
    self,
  ) -> tuple[dict[str, safetensors_file.Opened], dict[str, tuple[int, ...]], dict[str, str]]:
    """Returns name -> file, shape and dtype, of all tensors in all files."""
    folder = pathlib.Path(self.path)
    if (folder / INDEX).is_file():
      told = huggingface_config.read_json(folder / INDEX, _MOST_INDEX).get("weight_map")
      names = sorted(set(told.values())) if told is not None and _is_map(told) else []
      if not names:
        raise ValueError(
          f"{os.fspath(folder / INDEX)!r} has no weight_map from names to files beside it."
        )
    elif (folder / WEIGHTS).is_file():
      told, names = None, [WEIGHTS]
    else:
      for name in _PICKLED[:1]:
        if (folder / name).is_file():
          safetensors_file.refuse_pickled(folder / name)
      raise ValueError(f"{self.path!r} has neither {WEIGHTS} nor {INDEX}.")
    files: dict[str, safetensors_file.Opened] = {}
    for file in names:
      opened = safetensors_file.Opened(folder / file)
      if twice := sorted(set(files) & set(opened.shapes)):
        raise ValueError(f"{self.path!r}: {twice[0]!r} is in two files.")
      files |= dict.fromkeys(opened.shapes, opened)
    for name, file in (told or {}).items():
      if name not in files or os.path.basename(files[name].path) != file:
        raise ValueError(f"{self.path!r}: {name!r} is not in {file!r}, where {INDEX} has it.")
    shapes = {name: opened.shapes[name] for name, opened in files.items()}
    return files, shapes, {name: opened.dtypes[name] for name, opened in files.items()}

  def _checked(
    self, shapes: dict[str, tuple[int, ...]], dtypes: Mapping[str, str]
  ) -> dict[str, str]:
    """Returns the dtype of each tensor of the network, after every check that needs no values."""
    depth = self.config.num_encoder_layers + self.config.num_decoder_layers
    if depth > len(shapes):
      raise ValueError(
        f"{self.path!r} has {len(shapes)} tensors, and its config.json tells {depth} layers."
      )
    wanted = {s.names[0]: s.theirs for s in sources(self.config).values()}
    found = {name: shape for name, shape in shapes.items() if name not in UNREAD}
    wanted |= {name: wanted[COPIES[name]] for name in self._like_embedding}
    for name, other in self._borrowed.items():
      found[name] = found.get(other, ())
    if said := difference(wanted, found):
      raise ValueError(
        f"{self.path!r} is not the T5 that its config.json tells: of tensors, {said}."
      )
    own = {name: dtypes[self._borrowed.get(name, name)] for name in wanted}
    for name in sorted(own):
      if own[name] not in FLOATS:
        raise ValueError(
          f"{self.path!r}: {name!r} is {own[name]}, and weights are read as {', '.join(FLOATS)}."
        )
    return {name: dtype for name, dtype in own.items() if name not in self._like_embedding}


FLOATS = ("float32", "bfloat16", "float16")


def _is_map(told: Any) -> bool:
  """Returns whether each name has a file that lies in the folder itself."""
  is_file = lambda x: (
    isinstance(x, str) and x == os.path.basename(x) and x.endswith(safetensors_file.SUFFIX)
  )
  return isinstance(told, dict) and all(map(is_file, told.values()))


# --- writing --------------------------------------------------------------------------------------


def write(
  path: str | os.PathLike,
  json_values: Mapping[str, Any],
  header: safetensors_file.Header,
  tensors: Iterable[np.ndarray],
  beside: Sequence[str | os.PathLike] = (),
  most: int = SHARD_BYTES,
) -> None:
  """Writes a new folder, one tensor in memory at a time: all of it, or nothing.

  Args:
    path: of the folder, which must not be there; what is above it is made.
    json_values: of config.json.
    header: name -> numpy's name of the dtype, and shape; in the order of `tensors`.
    tensors: their values.
    beside: more files, which are copied into it.
    most: bytes of the tensors of one file, where more than one tensor is in it.
  """
  folder = pathlib.Path(os.path.abspath(path))
  safetensors_file.refuse_existing(path)
  unfinished = folder.with_name(f".{folder.name}.{os.getpid()}")
  try:
    unfinished.mkdir(parents=True)
    _write_files(unfinished, header, iter(tensors), most)
    _write_json(unfinished / huggingface_config.FILE, json_values)
    for file in beside:
      shutil.copy(file, unfinished)
    os.rename(unfinished, folder)
  except OSError as e:
    raise ValueError(f"{os.fspath(path)!r} could not be written: {e.strerror or e}.") from e
  finally:
    shutil.rmtree(unfinished, ignore_errors=True)


def _write_files(
  folder: pathlib.Path, header: safetensors_file.Header, tensors: Iterator[np.ndarray], most: int
) -> None:
  shards = _shards(header, most)
  files: dict[str, str] = {}
  for i, shard in enumerate(shards, 1):
    several = f"model-{i:05}-of-{len(shards):05}{safetensors_file.SUFFIX}"
    file = several if len(shards) > 1 else WEIGHTS
    with safetensors_file.Writer(folder / file, shard) as writer:
      for name in shard:
        writer.add(name, next(tensors))
    files |= dict.fromkeys(shard, file)
  if len(shards) > 1:
    total = sum(map(_bytes, header.values()))
    _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": files})


def _write_json(file: pathlib.Path, values: Mapping[str, Any]) -> None:
  file.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n")


def _bytes(leaf: tuple[str, tuple[int, ...]]) -> int:
  dtype, shape = leaf
  return safetensors_file.dtype_of(dtype).itemsize * math.prod(shape)


def _shards(
  header: safetensors_file.Header, most: int
) -> list[dict[str, tuple[str, tuple[int, ...]]]]:
  """Returns the header in parts of at most `most` bytes; a larger tensor is alone in its own."""
  parts: list[dict[str, tuple[str, tuple[int, ...]]]] = [{}]
  size = 0
  for name, leaf in header.items():
    if parts[-1] and size + _bytes(leaf) > most:
      parts.append({})
      size = 0
    parts[-1][name] = leaf
    size += _bytes(leaf)
  return parts
