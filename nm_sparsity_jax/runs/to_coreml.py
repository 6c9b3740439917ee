"""A checkpoint as a Core ML package: the encoder of a T5, or a ViT, with zeros that are not stored.

checkpoint -> [export] -> their names -> torch module -> its results are ours, to 1e-4
           -> F.mlpackage -> read back -> the bits that were written, and n:m along axis 1
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from nm_sparsity_jax.coreml import package
from nm_sparsity_jax.errors import SettingError
from nm_sparsity_jax.models.t5 import T5Config, Transformer
from nm_sparsity_jax.models.vit import ViT, ViTConfig
from nm_sparsity_jax.runs import checkpoint, exported, foreign, given, proof
from nm_sparsity_jax.runs.checkpoint import Stored
from nm_sparsity_jax.weights import (
  huggingface,
  huggingface_folder,
  huggingface_names,
  safetensors_file,
  timm,
  timm_names,
)

_AGREES = 1e-4  # of the largest result
_LENGTH = 128  # ids that a T5 takes


@dataclasses.dataclass(frozen=True)
class Converted(exported.Exported):
  """What `export_coreml` wrote.

  Attributes:
    bytes: of the package.
    bytes_with_zeros: of the same package with its zeros.
    difference: of what torch and JAX make of one random example, the largest.
    sparse: how many arrays are stored without zeros.
  """

  bytes: int = 0
  bytes_with_zeros: int = 0
  difference: float = 0.0
  sparse: int = 0

  @property
  def sizes(self) -> str:
    """Returns one line about bytes and what was compared."""
    return (
      f"{self.bytes:,} bytes, and {self.bytes_with_zeros:,} with zeros; {self.sparse} arrays are "
      f"stored without. torch and JAX differ by {self.difference:.2g} at most on a random example."
    )

  def as_dict(self) -> dict[str, Any]:
    """Returns the findings as values that JSON knows."""
    own = {field: getattr(self, field) for field in ("bytes", "bytes_with_zeros", "difference")}
    return super().as_dict() | own | {"sparse": self.sparse}


def export_coreml(
  path: str | os.PathLike | Stored,
  out: str | os.PathLike,
  rules: given.Given = None,
  axes: Mapping[str, Any] | None = None,
  feed_forward: str | None = None,
  heads: int | None = None,
  length: int | None = None,
) -> Converted:
  """Writes the encoder of a T5, or a ViT, as a Core ML package in float32, and proves it there.

      nms.runs.export_coreml("runs/final", "model.mlpackage").bytes

  All weights are in memory, several times. The package takes one example: ids [1, length] of int32,
  0 = padding, or normalized images [1, channels, h, w].

  Args:
    path: as in `export`.
    out: F.mlpackage, which must not be there.
    rules: as in `export`.
    axes: as in `export`.
    feed_forward: as in `export`.
    heads: attention heads of a ViT, which its weights do not tell; None for a T5.
    length: ids of a text that a T5 takes; None = 128, and for a ViT.

  Raises:
    ValueError: as in `export`; or the network is neither, or torch computes something else.
    ModuleNotFoundError: torch or coremltools is not there.
  """
  file = os.fspath(out)
  if not file.endswith(package.SUFFIX):
    raise ValueError(f"{file!r}: name a package that ends in {package.SUFFIX}.")
  if length is not None and (type(length) is not int or length < 1):
    raise SettingError(
      "length", "{length=}{given!r}: it is a whole number of ids, at least 1.", given=length
    )
  safetensors_file.refuse_existing(file)
  stored = checkpoint.opened(path)
  if stored.format == foreign.HUGGING_FACE:
    raise ValueError(
      f"{stored.path!r} is a folder of Hugging Face's T5: make a checkpoint of it first "
      "(nm-sparsity convert), and name that with its rules."
    )
  is_t5 = huggingface_names.is_t5([key.removeprefix("target/") for key in stored.leaves])
  _refuse_other_settings(stored, is_t5, heads, length)
  package.require()  # takes seconds
  with tempfile.TemporaryDirectory() as folder:
    if is_t5:
      theirs = os.path.join(folder, "model")
      exported.export(stored, theirs, rules, axes, feed_forward)
      return _encoder(stored, theirs, file, _found(stored, rules, axes), length or _LENGTH)
    theirs = os.path.join(folder, "model.safetensors")
    exported.export(stored, theirs, rules, axes)
    assert heads is not None
    return _vit(stored, theirs, file, _found(stored, rules, axes), heads)


def _refuse_other_settings(
  stored: Stored, is_t5: bool, heads: int | None, length: int | None
) -> None:
  """Refuses another network, and settings that are not this network's."""
  if is_t5:
    why = "is of a ViT, and {path!r} is a T5, whose weights tell its heads"
    _refuse_given("heads", heads, why, stored.path)
    return
  leaves = exported.keys(stored)
  names = [source.name for source in timm.sources(leaves).values()]
  if (family := timm_names.family_of(names, repr(stored.path))) != "ViT":
    raise ValueError(
      f"{stored.path!r} is a {family}, and Core ML packages are of a ViT or a T5's encoder."
    )
  why = "is of a T5, and {path!r} is a ViT, which takes images"
  _refuse_given("length", length, why, stored.path)
  _check_heads(heads, (stored.leaves[leaves["params/pos_embed"]].shape or (0,))[-1])


def _refuse_given(name: str, value: int | None, why: str, path: str) -> None:
  """Refuses a setting that belongs to the other kind of network."""
  if value is not None:
    template = f"{{{name}=}}{{given!r}} {why}: leave {{{name}}} out."
    raise SettingError(name, template, given=value, path=path)


def _check_heads(heads: int | None, embed: int) -> None:
  """Refuses a number of heads that a ViT of this width cannot have."""
  if heads is None:
    raise SettingError(
      "heads",
      "the weights of a ViT do not tell its attention heads: give {heads}, a divisor of its width, "
      "{embed}; a published ViT of this width has {published}.",
      embed=embed, published=max(1, embed // 64),
    )  # fmt: skip
  if type(heads) is not int or heads < 1 or embed % heads:
    raise SettingError(
      "heads",
      "{heads=}{given!r} does not divide the ViT's width, {embed}: give its number of heads.",
      given=heads, embed=embed,
    )  # fmt: skip


def _found(stored: Stored, rules: Any, axes: Any) -> proof.Proof | None:
  return None if stored.known_rules is None and rules is None else proof.verify(stored, rules, axes)


def _encoder(
  stored: Stored, folder: str, out: str, found: proof.Proof | None, length: int
) -> Converted:
  networks: Any = importlib.import_module("nm_sparsity_jax.coreml.networks")
  source = huggingface_folder.Folder(folder)
  config: T5Config = source.config
  params = huggingface.read(folder, config)
  shapes = {
    key.removeprefix("target/"): leaf.shape or ()
    for key, leaf in stored.leaves.items()
    if key.startswith("target/")
  }  # of a network that may scan over its layers
  table = huggingface_names.sources(huggingface_names.config_of(shapes, stored.path))
  tensors = {name: source.array(name) for s in table.values() for name in s.names}
  ids = np.random.default_rng(0).integers(1, config.vocab_size, (1, length)).astype(np.int32)
  ids[0, length - length // 4 :] = 0
  network = Transformer(config)
  ours = jax.jit(lambda p: network.apply({"params": p}, ids, None, False, method=network.encode))
  module = networks.encoder(config, length)
  package.load(module, tensors)
  told = ids[0] != 0  # what a padded place gets is nobody's
  difference = _difference(
    package.run(module, ids)[:, told], np.asarray(ours(params))[:, told], stored.path
  )
  if found is not None:
    encoder = [place for place in found.report.places if place.path.startswith("encoder/")]
    report = dataclasses.replace(found.report, places=tuple(encoder))
    found = dataclasses.replace(found, report=report)
  report = lambda array: found and exported.report_of_folder(array, found, table)
  return _written(stored, out, module, (ids, "ids", "encoded"), tensors, report, difference)


def _vit(stored: Stored, file: str, out: str, found: proof.Proof | None, heads: int) -> Converted:
  networks: Any = importlib.import_module("nm_sparsity_jax.coreml.networks")
  source = safetensors_file.Opened(file)
  tensors = {name: source.array(name) for name in source.shapes}
  config = _config(source.shapes, heads)
  variables = timm.from_timm(tensors)
  shape = 1, config.image_size, config.image_size, config.channels
  images = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
  theirs = np.ascontiguousarray(images.transpose(0, 3, 1, 2))
  module = networks.vit(config)
  package.load(module, tensors)
  ours = np.asarray(jax.jit(ViT(config).apply)(variables, images))
  difference = _difference(package.run(module, theirs), ours, stored.path)
  table = timm.sources(timm.keys_of(source.shapes, stored.path))
  report = lambda array: found and exported.report_of_file(array, found, table)
  return _written(stored, out, module, (theirs, "images", "logits"), tensors, report, difference)


def _config(shapes: Mapping[str, tuple[int, ...]], heads: int) -> ViTConfig:
  """Returns what timm's tensors tell of a ViT."""
  embed, channels, patch, _ = shapes["patch_embed.proj.weight"]
  class_token = "cls_token" in shapes
  side = round((shapes["pos_embed"][1] - class_token) ** 0.5)
  blocks = {hit[1] for name in shapes if (hit := re.match(r"blocks\.(\d+)\.", name))}
  return ViTConfig(
    image_size=side * patch,
    patch=patch,
    channels=channels,
    layers=len(blocks),
    embed=embed,
    heads=heads,
    mlp=shapes.get("blocks.0.mlp.fc1.weight", (0,))[0],
    classes=shapes["head.weight"][0],
    class_token=class_token,
  )


def _difference(theirs: np.ndarray, ours: np.ndarray, what: str) -> float:
  """Returns the largest difference; refuses one that is no rounding."""
  found = float(np.abs(theirs - ours).max())
  if not found <= _AGREES * max(1.0, float(np.abs(ours).max())):
    raise ValueError(
      f"{what}: torch and JAX differ by {found:.3g} on a random example, and may by {_AGREES} of "
      "the largest result. Do the heads and feed_forward_proj fit the network?"
    )
  return found


def _written(
  stored: Stored,
  out: str,
  module: Any,
  example: tuple[np.ndarray, str, str],
  tensors: Mapping[str, np.ndarray],
  report: Any,
  difference: float,
) -> Converted:
  """Writes the package and reads it back; it gets its name when it is proven."""
  folder, name = os.path.split(os.path.abspath(out))
  unfinished = os.path.join(folder, f".{os.getpid()}.{name}")  # coremltools wants the suffix
  try:
    os.makedirs(folder, exist_ok=True)
    size = package.convert(module, *example, unfinished)
    read = package.Package(unfinished)
    compared = _read_back(out, read, module, tensors)
    made = Converted(
      stored,
      out,
      compared,
      report(read.array),
      None,
      read.bytes,
      size,
      difference,
      len(read.sparse),
    )
    os.rename(unfinished, out)
  except OSError as e:
    raise ValueError(f"{out!r} could not be written: {e.strerror or e}.") from e
  finally:
    shutil.rmtree(unfinished, ignore_errors=True)
  return made


def _read_back(out: str, read: Any, module: Any, tensors: Mapping[str, np.ndarray]) -> int:
  """Compares each array of two axes and more in a package with what was written; counts them."""
  kernels = [name for name, w in module.named_parameters() if w.ndim > 1]
  folded = package.folded(module)
  for name in kernels:
    # A zero that is not stored has no sign.
    wanted = np.asarray(folded.get(name, tensors[name]), np.float32) + np.float32(0)
    same = read.holds(wanted) if name in folded else read.array(name).tobytes() == wanted.tobytes()
    if not same:
      raise ValueError(f"{out!r}: {name!r} is not what was written.")
  return len(kernels)
