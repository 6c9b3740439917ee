"""Hugging Face's T5 and T5X's parameter tree, there and back.

    key of T5X's tree -> [name_of] -> Hugging Face's name
    key -> array <-> [to_tensors, from_tensors] <-> Hugging Face's name -> tensor
    config.json  <-> [from_json, to_json] <-> T5Config
    FOLDER -> [Folder] -> config, tensors -> [write_folder] -> another FOLDER

    FOLDER/config.json                       the sizes
    FOLDER/model.safetensors                 all tensors, or
    FOLDER/model.safetensors.index.json      name -> file, where there are several:
    FOLDER/model-00001-of-00003.safetensors

Nothing is computed, so weights come back bit for bit, and zeros of pruning are zeros there. Trees
are those of T5X and of `models.t5`, scanned or not. Kernels are (in, out) here and (out, in) there,
so groups of m lie along axis 0 here and along 1 there.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import pathlib
import re
import shutil
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nm_sparsity_jax.core.trees import flatten, nested
from nm_sparsity_jax.deploy import safetensors_file
from nm_sparsity_jax.deploy.names import difference
from nm_sparsity_jax.deploy.safetensors_file import Lazy
from nm_sparsity_jax.deploy.unstack_layers import apart, restacked, without_scan
from nm_sparsity_jax.models.t5 import T5Config, Transformer

_WEIGHTS, _CONFIG = "model.safetensors", "config.json"
_INDEX = f"{_WEIGHTS}.index.json"
_SHARD_BYTES = 5_000_000_000  # as transformers writes them
# What a tokenizer and `generate` read: a folder that is made from another one keeps them.
_COMPANIONS = (
  "generation_config.json", "spiece.model", "tokenizer.json", "tokenizer_config.json",
  "special_tokens_map.json", "added_tokens.json",
)  # fmt: skip
_PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")

# --- the table of names ---------------------------------------------------------------------------

_SHARED, _HEAD = "shared.weight", "lm_head.weight"
_RELPOS = "block.0.layer.0.SelfAttention.relative_attention_bias.weight"
# What lies outside of the layers, and what lies in one: ours -> theirs.
_OUTSIDE = {
  "token_embedder/embedding": _SHARED,
  "encoder/relpos_bias/rel_embedding": f"encoder.{_RELPOS}",
  "decoder/relpos_bias/rel_embedding": f"decoder.{_RELPOS}",
  "encoder/encoder_norm/scale": "encoder.final_layer_norm.weight",
  "decoder/decoder_norm/scale": "decoder.final_layer_norm.weight",
  "decoder/logits_dense/kernel": _HEAD,
}
_MODULES = {
  "pre_attention_layer_norm": "layer.0.layer_norm",
  "attention": "layer.0.SelfAttention",
  "pre_self_attention_layer_norm": "layer.0.layer_norm",
  "self_attention": "layer.0.SelfAttention",
  "pre_cross_attention_layer_norm": "layer.1.layer_norm",
  "encoder_decoder_attention": "layer.1.EncDecAttention",
}
_MLP = {"pre_mlp_layer_norm": "layer_norm", "mlp": "DenseReluDense"}
_KERNELS = {"query": "q", "key": "k", "value": "v", "out": "o"}
# What files may hold as well: copies of the embedding, and what no T5 reads.
_COPIES = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
_UNREAD = ("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",)


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
_SHAPED = (*_SIZES, "logits_via_embedding", "param_scan_axis")  # what shapes depend on


def name_of(key: str) -> str:
  """Returns Hugging Face's name of an array of T5X's tree without a scan.

  >>> name_of("decoder/layers_3/mlp/wi_0/kernel")
  'decoder.block.3.layer.2.DenseReluDense.wi_0.weight'
  """
  if key in _OUTSIDE:
    return _OUTSIDE[key]
  stack, layer, block, *kernel = key.split("/")
  # The MLP is the last part of a layer, behind two kinds of attention in the decoder.
  last = 1 if stack == "encoder" else 2
  module = _MODULES.get(block) or f"layer.{last}.{_MLP[block]}"
  words = [stack, "block", layer.removeprefix("layers_"), module]
  return ".".join([*words, *(_KERNELS.get(word, word) for word in kernel[:-1]), "weight"])


def is_transposed(key: str) -> bool:
  """Returns whether the axes of an array are in the other order there."""
  return key.endswith(("kernel", "rel_embedding"))


def shapes_of(config: T5Config) -> dict[str, tuple[int, ...]]:
  """Returns key -> shape of the parameters of a network, scanned or not."""
  activations = tuple(config.mlp_activations)
  scanned = _scanned_shapes(activations, *(getattr(config, field) for field in _SHAPED))
  if not config.scan_layers:
    scan = dataclasses.replace(config, scan_layers=True)
    scanned = {k: x for key, one in scanned.items() for k, x in apart(key, one, scan).items()}
  return {key: x.shape for key, x in scanned.items()}


@functools.lru_cache(maxsize=8)
def _scanned_shapes(activations: tuple[str, ...], *sizes: Any) -> dict[str, jax.ShapeDtypeStruct]:
  # The trace of a scan is one layer, so it is fast for any depth.
  fields: dict[str, Any] = dict(zip(_SHAPED, sizes, strict=True))
  net = Transformer(T5Config(**fields, mlp_activations=activations, scan_layers=True))
  ids = jax.ShapeDtypeStruct((1, 1), jnp.int32)
  init = functools.partial(net.init, enable_dropout=False)
  return dict(flatten(jax.eval_shape(init, jax.random.key(0), ids, ids, ids)["params"]))


# --- there and back -------------------------------------------------------------------------------


def to_tensors(arrays: Mapping[str, np.ndarray], config: T5Config) -> dict[str, np.ndarray]:
  """Returns Hugging Face's name -> tensor, a view of an array.

  Args:
    arrays: key of T5X's tree -> array.
    config: of their network.

  Raises:
    ValueError: they are of another network, or layers differ in what is one tensor there.
  """
  if said := difference(shapes_of(config), {key: x.shape for key, x in arrays.items()}):
    raise ValueError(f"the tree is not of the network of this config: {said}.")
  layers = {k: x for key, array in arrays.items() for k, x in apart(key, array, config).items()}
  return {name_of(key): x.T if is_transposed(key) else x for key, x in layers.items()}


def from_tensors(tensors: Mapping[str, Any], config: T5Config, what: str) -> dict[str, Lazy]:
  """Returns key of T5X's tree -> array, a new one each time it is asked for.

  Args:
    tensors: Hugging Face's name -> array, or `Lazy`.
    config: of the network that takes the arrays, scanned or not.
    what: says in an error what was looked at.

  Raises:
    ValueError: a name is missing or unknown, or a tensor has another shape: all in one error.
  """
  layers = shapes_of(without_scan(config))
  wanted = {name_of(k): s[::-1] if is_transposed(k) else s for k, s in layers.items()}
  if said := difference(wanted, {name: x.shape for name, x in tensors.items()}):
    raise ValueError(f"{what}: of tensors, {said}.")
  for name, x in tensors.items():
    if not jnp.issubdtype(x.dtype, jnp.floating):
      raise ValueError(f"{what}: {name!r} is {x.dtype}, and weights are floating.")
  made = {key: _lazy(tensors[name_of(key)], is_transposed(key)) for key in layers}
  return restacked(made, shapes_of(config), config)


def _lazy(tensor: Any, transposed: bool) -> Lazy:
  def make() -> np.ndarray:
    array = np.asarray(tensor)
    return np.array(array.T if transposed else array, order="C")

  return Lazy(tensor.shape[::-1] if transposed else tensor.shape, np.dtype(tensor.dtype), make)


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
  unread = {*_COPIES, *_UNREAD, *([_HEAD] if config.logits_via_embedding else [])}
  own = {name: x for name, x in tensors.items() if name not in unread}
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
  """Returns the sizes of the T5 whose parameters have these shapes.

  Args:
    shapes: key of T5X's tree, scanned or not -> shape.
    what: says in an error what was looked at.
    activations: of the MLP, which shapes do not tell; None = T5.1.1's where there are two input
      projections, else T5.1.0's.

  Raises:
    ValueError: it is of no T5, or of another one than T5X's: all keys are in one error.
  """
  try:
    config = _config_of(shapes, activations)
  except (KeyError, IndexError) as e:
    raise ValueError(f"{what} is not of T5X's T5: {e.args[0]!r} is missing.") from e
  if said := difference(shapes_of(config), shapes):
    raise ValueError(f"{what} is not of T5X's T5: {said}.")
  return config


def _config_of(
  shapes: Mapping[str, tuple[int, ...]], activations: Sequence[str] | None
) -> T5Config:
  vocab, embed = shapes["token_embedder/embedding"]
  norm = shapes.get("encoder/encoder/pre_mlp_layer_norm/scale")
  # (embed, layers), or (layers, embed) with param_scan_axis = 0; T5X's own value is 1.
  axis = 0 if norm is not None and norm[0] != embed else 1
  scan = T5Config(vocab, scan_layers=norm is not None, param_scan_axis=axis)
  layers: dict[str, Any] = {}
  for key, shape in shapes.items():
    layers |= apart(key, jax.ShapeDtypeStruct(shape, jnp.float32), scan)
  depth = lambda stack: len([k for k in layers if re.search(rf"{stack}/.*/pre_mlp_layer_norm", k)])
  heads = layers["encoder/relpos_bias/rel_embedding"].shape[0]
  first = "encoder/layers_0"
  is_gated = f"{first}/mlp/wi_0/kernel" in layers
  return dataclasses.replace(
    scan,
    emb_dim=embed,
    num_heads=heads,
    head_dim=layers[f"{first}/attention/query/kernel"].shape[1] // heads,
    num_encoder_layers=depth("encoder"),
    num_decoder_layers=depth("decoder"),
    mlp_dim=layers[f"{first}/mlp/wo/kernel"].shape[0],
    mlp_activations=tuple(activations or (("gelu", "linear") if is_gated else ("relu",))),
    logits_via_embedding="decoder/logits_dense/kernel" not in layers,
  )


# --- config.json ----------------------------------------------------------------------------------

# What every T5 here has.
_FIXED = {
  "layer_norm_epsilon": 1e-6,
  "relative_attention_num_buckets": 32,
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
}


def from_json(found: Mapping[str, Any], what: str) -> T5Config:
  """Returns the sizes and choices that a config.json tells.

  T5 1.0 ties its logits to the embedding, and scales them by d_model ** -0.5. T5 1.1 does neither.
  One switch says both here (`logits_via_embedding`). There `tie_word_embeddings` says both; what
  transformers 5 saves always ties by its word, and has `scale_decoder_outputs` as well.

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
  if found.get("quantization_config"):
    raise ValueError(f"{what} has a quantization_config, and only plain weights are read.")
  for name, value in _FIXED.items():
    if found.get(name, value) != value:
      raise ValueError(f"{what}: {name} is {found[name]!r}, and {value!r} in every T5 of T5X.")
  sizes = {field: found.get(name) or usual for field, (name, usual) in _SIZES.items()}
  sizes["num_decoder_layers"] = sizes["num_decoder_layers"] or sizes["num_encoder_layers"]
  ties = found.get("tie_word_embeddings", True)
  scales = found.get("scale_decoder_outputs", ties)
  if scales and not ties:
    raise ValueError(
      f"{what}: scale_decoder_outputs is true and tie_word_embeddings false, as in no T5: T5 1.0 "
      "ties and scales, T5 1.1 does neither."
    )
  return T5Config(
    **sizes,
    mlp_activations=activations_of(found.get("feed_forward_proj", "relu"), what),
    dropout_rate=found.get("dropout_rate", 0.1),
    logits_via_embedding=bool(scales),
  )


def activations_of(words: str, what: str) -> tuple[str, ...]:
  """Returns the activations that `feed_forward_proj` names.

  >>> activations_of("gated-silu", "it")
  ('silu', 'linear')

  Args:
    words: its value.
    what: says in an error what was looked at.
  """
  if words not in _ACTIVATIONS:
    known = ", ".join(_ACTIVATIONS)
    raise ValueError(f"{what}: feed_forward_proj is {words!r}: choose one of {known}.")
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
    if not (folder / _CONFIG).is_file():
      raise ValueError(
        f"{self.path!r} has no {_CONFIG}, which tells the sizes of the network: copy it there from "
        "where the weights come from."
      )
    self.json = _read_json(folder / _CONFIG)
    self.config = from_json(self.json, repr(os.path.join(self.path, _CONFIG)))
    tensors = _tensors(folder)
    for name in _UNREAD:
      tensors.pop(name, None)
    copies = _COPIES
    if self.config.logits_via_embedding:
      copies = (*_COPIES, _HEAD)
    elif self.json.get("tie_word_embeddings", True) and _SHARED in tensors:
      # transformers 5 ties T5 1.1 too, where nobody gave it a head of its own. It does not scale.
      tensors.setdefault(_HEAD, tensors[_SHARED])
    found = {name: tensors.pop(name) for name in copies if name in tensors}
    if found and (shared := tensors.get(_SHARED)):
      tensors[_SHARED] = dataclasses.replace(shared, make=lambda: self._equal(shared, found))
    self.tensors = tensors
    from_tensors(tensors, self.config, f"{self.path!r} is not the T5 that its config.json tells")

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
      config = self.config
    config = dataclasses.replace(config, mlp_activations=tuple(config.mlp_activations))
    fields = (*_SIZES, "mlp_activations", "logits_via_embedding")
    pairs = ((field, getattr(self.config, field), getattr(config, field)) for field in fields)
    if differs := [
      f"{f} is {there} there and {here} here" for f, there, here in pairs if there != here
    ]:
      raise ValueError(
        f"{self.path!r} is of another network: {', '.join(differs)}. Choose its model file."
      )
    return from_tensors(self.tensors, config, repr(self.path))

  def companions(self) -> list[pathlib.Path]:
    """Returns the files that a tokenizer and `generate` read."""
    files = (pathlib.Path(self.path, name) for name in _COMPANIONS)
    return [file for file in files if file.is_file()]


def _tensors(folder: pathlib.Path) -> dict[str, Lazy]:
  """Returns name -> array, of all files in a folder."""
  if (folder / _INDEX).is_file():
    files = set(_read_json(folder / _INDEX)["weight_map"].values())
    if any(file != os.path.basename(file) for file in files):
      raise ValueError(f"{str(folder / _INDEX)!r} names files of another folder.")
  elif (folder / _WEIGHTS).is_file():
    files = {_WEIGHTS}
  else:
    safetensors_file.refuse_pickled(folder / _PICKLED[0])
    raise ValueError(f"{str(folder)!r} has neither {_WEIGHTS} nor {_INDEX}.")
  opened = [safetensors_file.Opened(folder / file).tensors for file in sorted(files)]
  return {name: x for tensors in opened for name, x in tensors.items()}


def _read_json(file: pathlib.Path) -> dict[str, Any]:
  try:
    return json.loads(file.read_bytes())
  except ValueError as e:
    raise ValueError(f"{str(file)!r} is no JSON ({e}).") from e


def write_folder(
  path: str | os.PathLike,
  tensors: Mapping[str, np.ndarray],
  json_values: Mapping[str, Any],
  companions: Sequence[str | os.PathLike] = (),
  most: int = _SHARD_BYTES,
) -> None:
  """Writes a new folder: all of it, or nothing.

  Args:
    path: of the folder, which must not be there; its parents are made.
    tensors: of `to_tensors`.
    json_values: of config.json.
    companions: more files, which are copied into it.
    most: bytes of the tensors of one file, where more than one tensor is in it.
  """
  shards: list[dict[str, np.ndarray]] = [{}]
  for name, x in tensors.items():
    if shards[-1] and sum(held.nbytes for held in shards[-1].values()) + x.nbytes > most:
      shards.append({})
    shards[-1][name] = x
  with safetensors_file.whole(path) as unfinished:
    unfinished.mkdir()
    files: dict[str, str] = {}
    for i, shard in enumerate(shards, 1):
      file = f"model-{i:05}-of-{len(shards):05}.safetensors" if len(shards) > 1 else _WEIGHTS
      safetensors_file.write(unfinished / file, shard)
      files |= dict.fromkeys(shard, file)
    if len(shards) > 1:
      total = sum(x.nbytes for x in tensors.values())
      _write_json(unfinished / _INDEX, {"metadata": {"total_size": total}, "weight_map": files})
    _write_json(unfinished / _CONFIG, json_values)
    for file in companions:
      shutil.copy(file, unfinished)


def _write_json(file: pathlib.Path, values: Mapping[str, Any]) -> None:
  file.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n")
