"""Hugging Face's names and layouts of a T5, and ours: which array lies where.

    T5Config -> [sources] -> key of T5X's tree -> Source: their tensors, shapes, order of axes
    shapes of a tree -> [config_of] -> T5Config

Kernels are (in, out) here and (out, in) there, so groups of m lie along axis 0 here and along 1
there. Where T5X scans over layers, an array holds all layers, and attention kernels keep heads and
head_dim apart. There each layer has tensors of its own, and attention kernels have two axes.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from nm_sparsity_jax.models.t5 import T5Config
from nm_sparsity_jax.trees import group

BUCKETS = 32  # of relative positions; every T5 has as many

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]


@dataclasses.dataclass(frozen=True)
class Source:
  """Where one of our arrays lies among Hugging Face's tensors.

  Attributes:
    names: theirs; one for each layer where the array holds all layers.
    shape: of our array of one layer.
    turned: how many axes of ours, from the first one, are the second axis there; 0 = as here.
    axis: along which the array holds layers; None = it is of one layer, or of no layer.
  """

  names: tuple[str, ...]
  shape: Shape
  turned: int = 0
  axis: int | None = None

  @property
  def ours(self) -> Shape:
    """Returns the shape of our array."""
    if self.axis is None:
      return self.shape
    return (*self.shape[: self.axis], len(self.names), *self.shape[self.axis :])

  @property
  def theirs(self) -> Shape:
    """Returns the shape of each of their tensors."""
    if not self.turned:
      return self.shape
    return math.prod(self.shape[self.turned :]), math.prod(self.shape[: self.turned])

  def take(self, read: Callable[[str], np.ndarray]) -> np.ndarray:
    """Returns our array, a new one, from their tensors, which are read one after the other.

    Args:
      read: their name -> tensor.
    """
    if self.axis is None:
      return np.array(self._ours(read(self.names[0])), order="C")
    first = read(self.names[0])
    made = np.empty(self.ours, first.dtype)
    layers = np.moveaxis(made, self.axis, 0)
    layers[0] = self._ours(first)
    del first
    for i, name in enumerate(self.names[1:], 1):
      one = read(name)
      if one.dtype != made.dtype:
        raise ValueError(f"{name!r} is {one.dtype}, and {self.names[0]!r} {made.dtype}.")
      layers[i] = self._ours(one)
      del one  # or it would stay while the next one is read
    return made

  def layers(self, read: Callable[[str], np.ndarray]) -> Iterator[np.ndarray]:
    """Yields our array of one layer after the other, with an axis of length 1 where `axis` is.

    Args:
      read: their name -> tensor.
    """
    for name in self.names:
      one = np.array(self._ours(read(name)), order="C")
      yield one if self.axis is None else np.expand_dims(one, self.axis)
      del one

  def give(self, array: np.ndarray) -> np.ndarray:
    """Returns their tensor, a view of our array of one layer; see `unscanned.apart`."""
    return array.reshape(self.theirs[::-1]).T if self.turned else array

  def _ours(self, tensor: np.ndarray) -> np.ndarray:
    return tensor.T.reshape(self.shape) if self.turned else tensor


# --- the table ------------------------------------------------------------------------------------

_ONCE = {
  "token_embedder/embedding": "shared.weight",
  "encoder/relpos_bias/rel_embedding": "encoder.block.0.layer.0.SelfAttention"
  ".relative_attention_bias.weight",
  "encoder/encoder_norm/scale": "encoder.final_layer_norm.weight",
  "decoder/relpos_bias/rel_embedding": "decoder.block.0.layer.0.SelfAttention"
  ".relative_attention_bias.weight",
  "decoder/decoder_norm/scale": "decoder.final_layer_norm.weight",
  "decoder/logits_dense/kernel": "lm_head.weight",
}
# Blocks of a layer: ours -> the norm before it; theirs, by its number.
_BLOCKS = {
  "encoder": {
    "attention": ("pre_attention_layer_norm", "SelfAttention"),
    "mlp": ("pre_mlp_layer_norm", "DenseReluDense"),
  },
  "decoder": {
    "self_attention": ("pre_self_attention_layer_norm", "SelfAttention"),
    "encoder_decoder_attention": ("pre_cross_attention_layer_norm", "EncDecAttention"),
    "mlp": ("pre_mlp_layer_norm", "DenseReluDense"),
  },
}
_KERNELS = {"query": "q", "key": "k", "value": "v", "out": "o"}
_RELPOS = "relpos_bias/rel_embedding"

# What files may hold beside: copies of a tensor, which must be equal to it, and what no T5 reads.
COPIES = {
  "encoder.embed_tokens.weight": "shared.weight",
  "decoder.embed_tokens.weight": "shared.weight",
  "lm_head.weight": "shared.weight",  # where the logits come from the embedding
}
UNREAD = ("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",)


def sources(config: T5Config) -> dict[str, Source]:
  """Returns key of T5X's tree -> where its array lies among Hugging Face's tensors.

  >>> sources(T5Config.t5_1_1("tiny"))["decoder/logits_dense/kernel"].theirs
  (32128, 128)

  Args:
    config: of the network; scanned or not.
  """
  wide = (config.emb_dim,)
  table = (config.num_heads, BUCKETS)
  found = {
    "token_embedder/embedding": Source(
      (_ONCE["token_embedder/embedding"],), (config.vocab_size, *wide)
    )
  }
  depths = {"encoder": config.num_encoder_layers, "decoder": config.num_decoder_layers}
  for stack, depth in depths.items():
    for path, (name, shape, turned) in _layer(stack, config).items():
      names = tuple(f"{stack}.block.{i}.{name}" for i in range(depth))
      if config.scan_layers:
        key = f"{stack}/{stack}/{path}"
        found[key] = Source(names, shape, turned, config.param_scan_axis)
      else:
        for i, name in enumerate(names):
          found[f"{stack}/layers_{i}/{path}"] = Source((name,), shape, turned)
    relpos = _ONCE[f"{stack}/{_RELPOS}"]
    if config.scan_layers:
      each = Source((relpos,) * depth, table, 1, config.param_scan_axis)
      found[f"{stack}/{stack}/{_RELPOS}"] = each
    else:
      found[f"{stack}/{_RELPOS}"] = Source((relpos,), table, 1)
    key = f"{stack}/{stack}_norm/scale"
    found[key] = Source((_ONCE[key],), wide)
  if not config.logits_via_embedding:
    key = "decoder/logits_dense/kernel"
    found[key] = Source((_ONCE[key],), (*wide, config.vocab_size), 1)
  return found


def _layer(stack: str, config: T5Config) -> dict[str, tuple[str, Shape, int]]:
  """Returns what is in a layer: our path -> their name, our shape, axes that are turned."""
  embed, mlp, heads = config.emb_dim, config.mlp_dim, (config.num_heads, config.head_dim)
  joined = heads if config.scan_layers else (math.prod(heads),)
  inner = {f"wi_{i}": (embed, mlp) for i in range(len(config.mlp_activations))}
  if len(inner) == 1:
    inner = {"wi": (embed, mlp)}
  found: dict[str, tuple[str, Shape, int]] = {}
  for i, (block, (norm, theirs)) in enumerate(_BLOCKS[stack].items()):
    found[f"{norm}/scale"] = f"layer.{i}.layer_norm.weight", (embed,), 0
    if block == "mlp":
      shapes = {name: (name, shape, 1) for name, shape in {**inner, "wo": (mlp, embed)}.items()}
    else:
      shapes = {name: (their, (embed, *joined), 1) for name, their in _KERNELS.items()}
      shapes["out"] = "o", (*joined, embed), len(joined)
    for name, (their, shape, turned) in shapes.items():
      found[f"{block}/{name}/kernel"] = f"layer.{i}.{theirs}.{their}.weight", shape, turned
  return found


# --- the sizes that a tree has --------------------------------------------------------------------


def is_t5(keys: Collection[str]) -> bool:
  """Returns whether these are keys of T5X's parameter tree of a T5."""
  norms = ("encoder/encoder_norm/scale", "decoder/decoder_norm/scale")
  return {"token_embedder/embedding", *norms} <= set(keys)


def config_of(shapes: Shapes, what: str, activations: Sequence[str] | None = None) -> T5Config:
  """Returns the sizes of the T5 whose parameters have these shapes; every key must be known.

  Args:
    shapes: key of T5X's tree, scanned or not -> shape.
    what: says in an error what was looked at.
    activations: of the MLP, which shapes do not tell; None = T5.1.1's where there are two input
      projections, else T5.1.0's.

  Raises:
    ValueError: it is of no T5, or of another one than T5X's: the keys are named in groups.
  """
  if not is_t5(shapes):
    raise ValueError(f"{what} is not of a T5: it has no token_embedder/embedding, or no norms.")
  try:
    config = _config_of(shapes, activations)
  except (KeyError, IndexError, ZeroDivisionError) as e:
    raise ValueError(f"{what} is not of T5X's T5: {e.args[0]!r} is missing or too small.") from e
  wanted = {key: source.ours for key, source in sources(config).items()}
  if said := difference(wanted, shapes):
    raise ValueError(f"{what} is not of T5X's T5: {said}.")
  return config


def _config_of(shapes: Shapes, activations: Sequence[str] | None) -> T5Config:
  vocab, embed = shapes["token_embedder/embedding"]
  scans = any(key.startswith("encoder/encoder/") for key in shapes)
  depth, axis = {}, 1
  for stack in ("encoder", "decoder"):
    if scans:
      norm = shapes[f"{stack}/{stack}/pre_mlp_layer_norm/scale"]
      # (embed, layers), or (layers, embed) with param_scan_axis = 0; T5X's own value is 1.
      axis = 1 if norm[0] == embed else 0
      depth[stack] = norm[axis]
    else:
      found = (re.match(rf"{stack}/layers_(\d+)/", key) for key in shapes)
      depth[stack] = len({hit[1] for hit in found if hit})
  first = "encoder/encoder" if scans else "encoder/layers_0"
  inner = "wi" if f"{first}/mlp/wi/kernel" in shapes else "wi_0"
  count = sum(key.startswith(f"{first}/mlp/wi") for key in shapes)
  alone = lambda shape: tuple(n for i, n in enumerate(shape) if not (scans and i == axis))
  relpos = alone(shapes[f"encoder/{'encoder/' if scans else ''}{_RELPOS}"])
  kernel = alone(shapes[f"{first}/attention/query/kernel"])
  if activations is None:
    activations = ("relu",) if count == 1 else ("gelu", "linear")
  return T5Config(
    vocab_size=vocab,
    emb_dim=embed,
    num_heads=relpos[0],
    head_dim=math.prod(kernel[1:]) // relpos[0],
    num_encoder_layers=depth["encoder"],
    num_decoder_layers=depth["decoder"],
    mlp_dim=alone(shapes[f"{first}/mlp/{inner}/kernel"])[1],
    mlp_activations=tuple(activations),
    logits_via_embedding="decoder/logits_dense/kernel" not in shapes,
    scan_layers=scans,
    param_scan_axis=axis,
  )


# --- what does not fit ----------------------------------------------------------------------------


def difference(
  wanted: Shapes, found: Mapping[str, Any], where: tuple[str, str] = ("there", "here")
) -> str:
  """Says in one clause all that is missing, unknown and of another shape; '' where nothing is.

  >>> difference({"a.0.w": (2,), "a.1.w": (2,), "b": (3,)}, {"b": (4,)})
  '2 of 3 are missing (a.{0,1}.w), 1 has another shape (b is (4,) there and (3,) here)'

  Args:
    wanted: name -> shape, of all that must be there.
    found: name -> shape, of all that is.
    where: says where what is found lies, and where what is wanted.
  """
  said = []
  if missing := [name for name in wanted if name not in found]:
    are = "is" if len(missing) == 1 else "are"
    said.append(f"{len(missing)} of {len(wanted)} {are} missing ({grouped(missing)})")
  if unknown := [name for name in found if name not in wanted]:
    are = "is" if len(unknown) == 1 else "are"
    said.append(f"{len(unknown)} {are} unknown ({grouped(unknown)})")
  other = [n for n in wanted if n in found and tuple(found[n]) != tuple(wanted[n])]
  if other:
    have = "has another shape" if len(other) == 1 else "have other shapes"
    name = other[0]
    there, here = where
    example = f"{name} is {tuple(found[name])} {there} and {tuple(wanted[name])} {here}"
    said.append(f"{len(other)} {have} ({example})")
  return ", ".join(said)


_SHOWN = 3  # groups of names in an error


def grouped(names: Sequence[str]) -> str:
  """Returns names in few words: those of like layers are one, and names left out are counted."""
  parts = [re.sub(r"/\.(\d+)\b", r"/._\1", name.replace(".", "/.")) for name in names]
  rows = group(parts)
  shown = [name.replace("/._", ".").replace("/.", ".") for name, _ in rows[:_SHOWN]]
  left = sum(len(members) for _, members in rows[_SHOWN:])
  return ", ".join(shown) + (f" and {left} more" if left else "")
