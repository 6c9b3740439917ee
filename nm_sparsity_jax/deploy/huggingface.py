"""Hugging Face's T5 and T5X's parameter tree, there and back.

    T5Config -> [sources] -> key of T5X's tree -> Source: their tensors, shapes, order of axes
    key -> array <-> [to_tensors, from_tensors] <-> Hugging Face's name -> tensor
    config.json  <-> [from_json, to_json] <-> T5Config
    FOLDER -> [Folder] -> config, tensors -> [write_folder] -> another FOLDER

    FOLDER/config.json                       the sizes
    FOLDER/model.safetensors                 all tensors, or
    FOLDER/model.safetensors.index.json      name -> file, where there are several:
    FOLDER/model-00001-of-00003.safetensors

Nothing is computed, so weights come back bit for bit, and zeros of pruning are zeros there. Trees
are those of T5X and of `models.t5`, scanned or not. Kernels are (in, out) here and (out, in) there,
so groups of m lie along axis 0 here and along 1 there. Where T5X scans over layers, an array holds
all layers, and attention kernels keep heads and head_dim apart. There each layer has tensors of its
own, and attention kernels have two axes.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pathlib
import re
import shutil
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from nm_sparsity_jax.core.text import first_line
from nm_sparsity_jax.core.trees import flatten, nested
from nm_sparsity_jax.deploy import safetensors_file
from nm_sparsity_jax.deploy.names import difference
from nm_sparsity_jax.deploy.safetensors_file import Lazy
from nm_sparsity_jax.models.t5 import T5Config

_WEIGHTS, _CONFIG = "model.safetensors", "config.json"
_INDEX = f"{_WEIGHTS}.index.json"
_SHARD_BYTES = 5_000_000_000  # as transformers writes them
# What a tokenizer and `generate` read: a folder that is made from another one keeps them.
_BESIDE = (
  "generation_config.json", "spiece.model", "tokenizer.json", "tokenizer_config.json",
  "special_tokens_map.json", "added_tokens.json",
)  # fmt: skip
_PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_FLOATS = ("float32", "bfloat16", "float16")

# --- the table of names ---------------------------------------------------------------------------

_SHARED, _HEAD = "shared.weight", "lm_head.weight"
_BUCKETS = 32  # of relative positions; every T5 has as many
# Blocks of a layer: ours -> the norm before it; theirs, by its number.
_ATTENTION = ("pre_attention_layer_norm", "SelfAttention")
_MLP = ("pre_mlp_layer_norm", "DenseReluDense")
_BLOCKS = {
  "encoder": {"attention": _ATTENTION, "mlp": _MLP},
  "decoder": {
    "self_attention": ("pre_self_attention_layer_norm", "SelfAttention"),
    "encoder_decoder_attention": ("pre_cross_attention_layer_norm", "EncDecAttention"),
    "mlp": _MLP,
  },
}
_KERNELS = {"query": "q", "key": "k", "value": "v", "out": "o"}
_RELPOS = "relpos_bias/rel_embedding"
# What files may hold beside: copies of a tensor, which must be equal to it, and what no T5 reads.
# The head is a copy where the logits come from the embedding.
_COPIES = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", _HEAD)
_UNREAD = ("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",)


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
  shape: tuple[int, ...]
  turned: int = 0
  axis: int | None = None

  @property
  def ours(self) -> tuple[int, ...]:
    """Returns the shape of our array."""
    if self.axis is None:
      return self.shape
    return (*self.shape[: self.axis], len(self.names), *self.shape[self.axis :])

  @property
  def theirs(self) -> tuple[int, ...]:
    """Returns the shape of each of their tensors."""
    if not self.turned:
      return self.shape
    return math.prod(self.shape[self.turned :]), math.prod(self.shape[: self.turned])

  def take(self, tensors: Mapping[str, Any]) -> np.ndarray:
    """Returns our array of their tensors.

    Args:
      tensors: their name -> array, or `Lazy`.
    """
    if len(dtypes := {str(tensors[name].dtype) for name in self.names}) > 1:
      raise ValueError(f"{self.names[0]!r} and its like in other layers are {sorted(dtypes)}.")
    arrays = [np.asarray(tensors[name]) for name in self.names]
    if self.turned:
      arrays = [x.T.reshape(self.shape) for x in arrays]
    return np.array(arrays[0], order="C") if self.axis is None else np.stack(arrays, self.axis)

  def give(self, key: str, array: np.ndarray) -> dict[str, np.ndarray]:
    """Returns their tensors of our array, which are views of it.

    Args:
      key: of the array, for an error.
      array: ours.

    Raises:
      ValueError: layers differ in what is one tensor there.
    """
    layers = [array] if self.axis is None else list(np.moveaxis(array, self.axis, 0))
    if len(set(self.names)) < len(layers) and any((x != layers[0]).any() for x in layers):
      raise ValueError(
        f"the layers differ in {key!r}: T5X learns a table of relative positions for each layer "
        "where it scans over them, and Hugging Face's T5 has one for all: train with "
        "scan_layers=False."
      )
    if self.turned:
      layers = [x.reshape(self.theirs[::-1]).T for x in layers]
    return dict(zip(self.names, layers, strict=True))


def sources(config: T5Config) -> dict[str, Source]:
  """Returns key of T5X's tree -> where its array lies among Hugging Face's tensors.

  >>> sources(T5Config.t5_1_1("tiny"))["decoder/logits_dense/kernel"].theirs
  (32128, 128)

  Args:
    config: of the network; scanned or not.
  """
  wide = (config.emb_dim,)
  found = {"token_embedder/embedding": Source((_SHARED,), (config.vocab_size, *wide))}
  depths = {"encoder": config.num_encoder_layers, "decoder": config.num_decoder_layers}
  for stack, depth in depths.items():
    of_layers = {f"{path}": (f"{stack}.block.{{}}.{name}", shape, turned)
                 for path, (name, shape, turned) in _layer(stack, config).items()}  # fmt: skip
    relpos = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    table = (config.num_heads, _BUCKETS)
    if config.scan_layers:
      of_layers[_RELPOS] = relpos, table, 1  # of each layer, and equal
    else:
      found[f"{stack}/{_RELPOS}"] = Source((relpos,), table, 1)
    for path, (name, shape, turned) in of_layers.items():
      names = tuple(name.format(i) for i in range(depth))
      if config.scan_layers:
        found[f"{stack}/{stack}/{path}"] = Source(names, shape, turned, config.param_scan_axis)
      else:
        for i, one in enumerate(names):
          found[f"{stack}/layers_{i}/{path}"] = Source((one,), shape, turned)
    found[f"{stack}/{stack}_norm/scale"] = Source((f"{stack}.final_layer_norm.weight",), wide)
  if not config.logits_via_embedding:
    found["decoder/logits_dense/kernel"] = Source((_HEAD,), (*wide, config.vocab_size), 1)
  return found


def _layer(stack: str, config: T5Config) -> dict[str, tuple[str, tuple[int, ...], int]]:
  """Returns what is in a layer: our path -> their name, our shape, axes that are turned."""
  embed, mlp, heads = config.emb_dim, config.mlp_dim, (config.num_heads, config.head_dim)
  joined = heads if config.scan_layers else (math.prod(heads),)
  inner = [f"wi_{i}" for i in range(len(config.mlp_activations))]
  found: dict[str, tuple[str, tuple[int, ...], int]] = {}
  for i, (block, (norm, theirs)) in enumerate(_BLOCKS[stack].items()):
    found[f"{norm}/scale"] = f"layer.{i}.layer_norm.weight", (embed,), 0
    if block == "mlp":
      shapes = dict.fromkeys(inner if len(inner) > 1 else ["wi"], (embed, mlp))
      shapes["wo"] = mlp, embed
    else:
      shapes = {**dict.fromkeys(_KERNELS, (embed, *joined)), "out": (*joined, embed)}
    for name, shape in shapes.items():
      turned = len(joined) if name == "out" else 1
      their = f"layer.{i}.{theirs}.{_KERNELS.get(name, name)}.weight"
      found[f"{block}/{name}/kernel"] = their, shape, turned
  return found


# --- there and back -------------------------------------------------------------------------------


def to_tensors(arrays: Mapping[str, np.ndarray], config: T5Config) -> dict[str, np.ndarray]:
  """Returns Hugging Face's name -> tensor, a view of an array.

  Args:
    arrays: key of T5X's tree -> array.
    config: of their network.

  Raises:
    ValueError: they are of another network, or layers differ in what is one tensor there.
  """
  table = sources(config)
  if said := difference(
    {key: source.ours for key, source in table.items()}, {k: x.shape for k, x in arrays.items()}
  ):
    raise ValueError(f"the tree is not of the network of this config: {said}.")
  for key, x in arrays.items():
    if str(x.dtype) not in _FLOATS:
      raise ValueError(f"{key} is {x.dtype}, and weights are {', '.join(_FLOATS)}.")
  given = (source.give(key, np.asarray(arrays[key])) for key, source in table.items())
  return {name: x for tensors in given for name, x in tensors.items()}


def from_tensors(tensors: Mapping[str, Any], config: T5Config, what: str) -> dict[str, Lazy]:
  """Returns key of T5X's tree -> array, a new one each time it is asked for.

  Args:
    tensors: Hugging Face's name -> array, or `Lazy`.
    config: of the network that takes the arrays, scanned or not.
    what: says in an error what was looked at.

  Raises:
    ValueError: a name is missing or unknown, or a tensor has another shape: all in one error.
  """
  table = sources(config)
  wanted = {name: source.theirs for source in table.values() for name in source.names}
  if said := difference(wanted, {name: x.shape for name, x in tensors.items()}):
    raise ValueError(f"{what}: of tensors, {said}.")
  return {
    key: Lazy(s.ours, np.dtype(tensors[s.names[0]].dtype), lambda s=s: s.take(tensors))
    for key, s in table.items()
  }


def to_huggingface(params: Mapping[str, Any]) -> dict[str, np.ndarray]:
  """Returns the state dict of a T5's parameters: Hugging Face's name -> array.

      model.load_state_dict({k: torch.tensor(x) for k, x in to_huggingface(params).items()},
                            strict=False)  # which has the embedding three times

  Args:
    params: of T5X's T5 or `models.t5`, finalized or dense, scanned or not.

  Raises:
    ValueError: they are of another network, or their layers differ in what they share there.
  """
  arrays = dict(flatten(params))
  config = config_of({key: x.shape for key, x in arrays.items()}, "the tree")
  return to_tensors(arrays, config)


def from_huggingface(tensors: Mapping[str, Any], config: T5Config) -> dict[str, Any]:
  """Returns parameters, of numpy arrays, of a state dict.

      params = from_huggingface({k: x.numpy() for k, x in model.state_dict().items()}, config)

  Args:
    tensors: Hugging Face's name -> array; copies of the embedding are not read.
    config: of the network that takes the parameters, scanned or not.

  Raises:
    ValueError: as in `from_tensors`.
  """
  copies = _COPIES if config.logits_via_embedding else _COPIES[:2]
  own = {name: x for name, x in tensors.items() if name not in (*copies, *_UNREAD)}
  found = from_tensors(own, config, "the state dict is of another network")
  return nested({key: np.asarray(x) for key, x in found.items()})


def read(path: str | os.PathLike, config: T5Config | None = None) -> dict[str, Any]:
  """Returns the parameters in a folder of Hugging Face's T5.

      params = read("t5-small", network.config)

  Args:
    path: of the folder, on a local disk.
    config: of the network, which must have the folder's sizes and choices; None = the folder's.

  Raises:
    ValueError: the folder is what `Folder` refuses, or of another network.
  """
  return nested({key: np.asarray(x) for key, x in Folder(path).arrays(config).items()})


def write(
  path: str | os.PathLike, params: Mapping[str, Any], config: T5Config, most: int = _SHARD_BYTES
) -> None:
  """Writes a new folder of Hugging Face's T5.

      write("model", params, network.config)

  Args:
    path: of the folder, which must not be there.
    params: as in `to_huggingface`.
    config: of their network.
    most: bytes of one file of tensors; a larger model has several.
  """
  tensors = to_tensors(dict(flatten(params)), config)
  write_folder(path, tensors, to_json(config, str(tensors[_SHARED].dtype)), most=most)


# --- the sizes that a tree has --------------------------------------------------------------------


def is_t5(keys: Collection[str]) -> bool:
  """Returns whether these are keys of T5X's parameter tree of a T5."""
  norms = ("encoder/encoder_norm/scale", "decoder/decoder_norm/scale")
  return {"token_embedder/embedding", *norms} <= set(keys)


def config_of(
  shapes: Mapping[str, tuple[int, ...]], what: str, activations: Sequence[str] | None = None
) -> T5Config:
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
  if said := difference({key: source.ours for key, source in sources(config).items()}, shapes):
    raise ValueError(f"{what} is not of T5X's T5: {said}.")
  return config


def _config_of(
  shapes: Mapping[str, tuple[int, ...]], activations: Sequence[str] | None
) -> T5Config:
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
  wi = sorted(key for key in shapes if key.startswith(f"{first}/mlp/wi"))
  alone = lambda shape: tuple(n for i, n in enumerate(shape) if not (scans and i == axis))
  heads = alone(shapes[f"encoder/{'encoder/' if scans else ''}{_RELPOS}"])[0]
  kernel = alone(shapes[f"{first}/attention/query/kernel"])
  return T5Config(
    vocab_size=vocab,
    emb_dim=embed,
    num_heads=heads,
    head_dim=math.prod(kernel[1:]) // heads,
    num_encoder_layers=depth["encoder"],
    num_decoder_layers=depth["decoder"],
    mlp_dim=alone(shapes[wi[0]])[1],
    mlp_activations=tuple(activations or (("relu",) if len(wi) == 1 else ("gelu", "linear"))),
    logits_via_embedding="decoder/logits_dense/kernel" not in shapes,
    scan_layers=scans,
    param_scan_axis=axis,
  )


# --- config.json ----------------------------------------------------------------------------------

# T5Config's field -> theirs, and what it is where config.json does not say.
_SIZES = {
  "vocab_size": ("vocab_size", 32128),
  "emb_dim": ("d_model", 512),
  "num_heads": ("num_heads", 8),
  "num_encoder_layers": ("num_layers", 6),
  "num_decoder_layers": ("num_decoder_layers", None),  # as many as the encoder has
  "head_dim": ("d_kv", 64),
  "mlp_dim": ("d_ff", 2048),
}
# What every T5 here has.
_FIXED = {
  "layer_norm_epsilon": 1e-6,
  "relative_attention_num_buckets": _BUCKETS,
  "relative_attention_max_distance": 128,
}
# `feed_forward_proj` -> activations. flax's gelu is the approximation by tanh, their `gelu_new`.
_ACTIVATIONS = {
  "relu": ("relu",),
  "gated-gelu": ("gelu", "linear"),
  "gated-relu": ("relu", "linear"),
  "gated-silu": ("silu", "linear"),
  "gelu_new": ("gelu",),
  "silu": ("silu",),
  "gated-gelu_new": ("gelu", "linear"),
  "gated-swish": ("silu", "linear"),
  "swish": ("silu",),
}


def from_json(found: Mapping[str, Any], what: str) -> T5Config:
  """Returns the sizes and choices that a config.json tells.

  T5 1.0 ties its logits to the embedding, and scales them by d_model ** -0.5. T5 1.1 does neither.
  One switch says both here (`logits_via_embedding`). There `tie_word_embeddings` says both; what
  transformers 5 saves always ties by its word, and has `scale_decoder_outputs` beside it.

  >>> from_json({"model_type": "t5", "d_model": 64, "tie_word_embeddings": False}, "it").emb_dim
  64

  Args:
    found: its values.
    what: says in an error what was looked at.

  Raises:
    ValueError: it is of another model, or of a T5 that differs from T5X's in more than sizes.
  """
  if found.get("model_type") != "t5":
    raise ValueError(f"{what} is of the model {found.get('model_type')!r}: only 't5' is read.")
  for name in ("quantization_config", "sparsity_config"):
    if found.get(name):
      raise ValueError(f"{what} has a {name}: its tensors are no plain weights, which are read.")
  for name, value in _FIXED.items():
    if found.get(name, value) != value:
      raise ValueError(f"{what}: {name} is {found[name]!r}, and {value!r} in every T5 of T5X.")
  sizes: dict[str, Any] = {}
  for field, (name, usual) in _SIZES.items():
    value = found.get(name)
    if value is None:
      value = sizes["num_encoder_layers"] if usual is None else usual
    if type(value) is not int or value < 1:
      raise ValueError(f"{what}: {name} is {value!r}, and must be a positive integer.")
    sizes[field] = value
  dropout = found.get("dropout_rate", 0.1)
  if not isinstance(dropout, int | float) or not 0 <= dropout < 1:
    raise ValueError(
      f"{what}: dropout_rate is {dropout!r}, and must be a number from 0 to below 1."
    )
  is_tied = found.get("tie_word_embeddings", True)
  scales = found.get("scale_decoder_outputs", is_tied is not False)
  if scales and is_tied is False:
    raise ValueError(
      f"{what}: scale_decoder_outputs is true and tie_word_embeddings false, as in no T5: T5 1.0 "
      "ties and scales, T5 1.1 does neither."
    )
  return T5Config(
    **sizes,
    mlp_activations=activations_of(found.get("feed_forward_proj", "relu"), what),
    dropout_rate=float(dropout),
    logits_via_embedding=bool(scales),
  )


def activations_of(words: Any, what: str) -> tuple[str, ...]:
  """Returns the activations that `feed_forward_proj` names.

  >>> activations_of("gated-silu", "it")
  ('silu', 'linear')

  Args:
    words: its value.
    what: says in an error what was looked at.
  """
  if not isinstance(words, str) or words not in _ACTIVATIONS:
    known = ", ".join(_ACTIVATIONS)
    raise ValueError(f"{what}: feed_forward_proj is {words!r}: {known} are known.")
  return _ACTIVATIONS[words]


def to_json(config: T5Config, dtype: str = "float32") -> dict[str, Any]:
  """Returns the values of the config.json of a T5.

  >>> to_json(T5Config.t5_1_1("small"))["feed_forward_proj"]
  'gated-gelu'

  Args:
    config: of the network. Its rules do not matter: zeros of weights are weights.
    dtype: of the tensors, as numpy calls it.

  Raises:
    ValueError: transformers has no such activation.
  """
  activations = tuple(config.mlp_activations)
  words = next((word for word, of in _ACTIVATIONS.items() if of == activations), None)
  if words is None:
    known = ", ".join(str(of) for of in dict.fromkeys(_ACTIVATIONS.values()))
    raise ValueError(f"mlp_activations={activations}: transformers' T5 has {known} only.")
  return {
    "architectures": ["T5ForConditionalGeneration"],
    "model_type": "t5",
    **{name: getattr(config, field) for field, (name, _) in _SIZES.items()},
    **_FIXED,
    "feed_forward_proj": words,
    "dropout_rate": config.dropout_rate,
    "tie_word_embeddings": bool(config.logits_via_embedding),
    "is_encoder_decoder": True,
    "use_cache": True,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": dtype,
  }


# --- folders --------------------------------------------------------------------------------------


def is_folder(path: str | os.PathLike) -> bool:
  """Returns whether a path is that of a folder as Hugging Face lays one out, readable or not."""
  names = (_WEIGHTS, _INDEX, *_PICKLED)
  return any(pathlib.Path(path, name).is_file() for name in names)


class Folder:
  """A folder whose headers were read: what it holds is a T5, all of it.

      folder = Folder("t5-small")
      folder.config.emb_dim, np.asarray(folder.tensors["shared.weight"])

  Args:
    path: of the folder, on a local disk.

  Attributes:
    path: as given.
    json: the values of config.json.
    config: what they tell; without a scan.
    tensors: name -> array, which is read when it is asked for.

  Raises:
    ValueError: there is no config.json, the tensors are pickled or damaged, or they are not those
      that config.json tells: all names are in one error.
  """

  def __init__(self, path: str | os.PathLike):
    self.path = os.fspath(path)
    folder = pathlib.Path(path)
    if not folder.is_dir():
      raise FileNotFoundError(f"there is no folder {self.path!r}")
    if not (folder / _CONFIG).is_file():
      raise ValueError(
        f"{self.path!r} has no {_CONFIG}, which tells the sizes of the network: copy it there from "
        "where the weights come from."
      )
    self.json = _read_json(folder / _CONFIG)
    self.config = from_json(self.json, repr(os.path.join(self.path, _CONFIG)))
    self.tensors = _tensors(folder)
    copies = _COPIES
    if not self.config.logits_via_embedding:
      copies = _COPIES[:2]
      # transformers 5 ties T5 1.1 too, where nobody gave it a head of its own. It does not scale.
      if self.json.get("tie_word_embeddings", True) and _SHARED in self.tensors:
        self.tensors.setdefault(_HEAD, self.tensors[_SHARED])
    for name in _UNREAD:
      self.tensors.pop(name, None)
    found = {name: self.tensors.pop(name) for name in copies if name in self.tensors}
    if found and (shared := self.tensors.get(_SHARED)):
      checked = lambda: self._equal(shared, found)
      self.tensors[_SHARED] = Lazy(shared.shape, shared.dtype, checked)
    from_tensors(
      self.tensors, self.config, f"{self.path!r} is not the T5 that its config.json tells"
    )
    for name, x in self.tensors.items():
      if x.dtype.name not in _FLOATS:
        raise ValueError(
          f"{self.path!r}: {name!r} is {x.dtype}, and weights are read as {', '.join(_FLOATS)}."
        )

  def _equal(self, shared: Lazy, copies: Mapping[str, Lazy]) -> np.ndarray:
    array = np.asarray(shared)
    for name, copy in copies.items():
      if not np.array_equal(copy, array):
        raise ValueError(
          f"{self.path!r}: {name!r} differs from {_SHARED!r}, and its config.json says that T5 "
          "keeps one of them: tie_word_embeddings may be wrong there."
        )
    return array

  def arrays(self, config: T5Config | None = None) -> dict[str, Lazy]:
    """Returns key of T5X's tree -> array, which is read when it is asked for.

    Args:
      config: of the network, which must have the folder's sizes and choices; None = the folder's.
    """
    if config is None:
      return from_tensors(self.tensors, self.config, repr(self.path))
    value = lambda config, field: (
      tuple(config.mlp_activations) if field == "mlp_activations" else getattr(config, field)
    )
    pairs = {
      field: (value(self.config, field), value(config, field))
      for field in (*_SIZES, "mlp_activations", "logits_via_embedding")
    }
    if differs := [f"{f} is {a} there and {b} here" for f, (a, b) in pairs.items() if a != b]:
      raise ValueError(
        f"{self.path!r} is of another network: {', '.join(differs)}. Choose its model file."
      )
    return from_tensors(self.tensors, config, repr(self.path))

  def beside(self) -> list[pathlib.Path]:
    """Returns the files beside config.json and tensors that a tokenizer and `generate` read."""
    files = (pathlib.Path(self.path, name) for name in _BESIDE)
    return [file for file in files if file.is_file()]


def _tensors(folder: pathlib.Path) -> dict[str, Lazy]:
  """Returns name -> array, of all files in a folder."""
  if (folder / _INDEX).is_file():
    told: Any = _read_json(folder / _INDEX).get("weight_map")
    files = set(told.values()) if isinstance(told, dict) else set()
    # A file that lies elsewhere is not of this folder.
    if not files or any(not isinstance(x, str) or x != os.path.basename(x) for x in files):
      raise ValueError(f"{str(folder / _INDEX)!r} has no weight_map from names to files beside it.")
    opened = {file: safetensors_file.Opened(folder / file).tensors for file in files}
    for name, file in told.items():
      if name not in opened[file]:
        raise ValueError(f"{str(folder)!r}: {name!r} is not in {file!r}, where {_INDEX} has it.")
    return {name: opened[file][name] for name, file in told.items()}
  if (folder / _WEIGHTS).is_file():
    return dict(safetensors_file.Opened(folder / _WEIGHTS).tensors)
  if (folder / _PICKLED[0]).is_file():
    safetensors_file.refuse_pickled(folder / _PICKLED[0])
  raise ValueError(f"{str(folder)!r} has neither {_WEIGHTS} nor {_INDEX}.")


def _read_json(file: pathlib.Path) -> dict[str, Any]:
  try:
    found = json.loads(file.read_bytes())
    if not isinstance(found, dict):
      raise ValueError(f"it holds a {type(found).__name__}")
  except (ValueError, RecursionError) as e:
    raise ValueError(f"{str(file)!r} is no JSON object ({first_line(e)}).") from e
  return found


def write_folder(
  path: str | os.PathLike,
  tensors: Mapping[str, np.ndarray],
  json_values: Mapping[str, Any],
  beside: Sequence[str | os.PathLike] = (),
  most: int = _SHARD_BYTES,
) -> None:
  """Writes a new folder: all of it, or nothing.

  Args:
    path: of the folder, which must not be there; what is above it is made.
    tensors: of `to_tensors`.
    json_values: of config.json.
    beside: more files, which are copied into it.
    most: bytes of the tensors of one file, where more than one tensor is in it.
  """
  shards: list[dict[str, np.ndarray]] = [{}]
  for name, x in tensors.items():
    if shards[-1] and sum(held.nbytes for held in shards[-1].values()) + x.nbytes > most:
      shards.append({})
    shards[-1][name] = x
  with safetensors_file.whole(path) as unfinished:
    unfinished.mkdir()
    dump = lambda file, values: (unfinished / file).write_text(
      json.dumps(values, indent=2, sort_keys=True) + "\n"
    )
    files: dict[str, str] = {}
    for i, shard in enumerate(shards, 1):
      file = f"model-{i:05}-of-{len(shards):05}.safetensors" if len(shards) > 1 else _WEIGHTS
      safetensors_file.write(unfinished / file, shard)
      files |= dict.fromkeys(shard, file)
    if len(shards) > 1:
      total = sum(x.nbytes for x in tensors.values())
      dump(_INDEX, {"metadata": {"total_size": total}, "weight_map": files})
    dump(_CONFIG, json_values)
    for file in beside:
      shutil.copy(file, unfinished)
