"""Hugging Face's T5 and T5X's parameter tree, there and back.

    params      <-> [to_huggingface, from_huggingface] <-> Hugging Face's name -> tensor
    config.json <-> [from_json, to_json]               <-> T5Config
    FOLDER -> [config_in, arrays_in] -> config, arrays; params -> [write] -> another FOLDER

A folder has config.json and model.safetensors, or several files that an index names. Trees are
those of T5X and of `models.t5`, scanned or not. `names.Name` says how an array lies in either
library; `unstack_layers` says which arrays a scan stacks.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nm_sparsity_jax.core.errors import choose
from nm_sparsity_jax.core.files import Lazy, whole
from nm_sparsity_jax.core.trees import flatten, nested
from nm_sparsity_jax.deploy import names, safetensors_file
from nm_sparsity_jax.deploy.names import Name, difference
from nm_sparsity_jax.deploy.unstack_layers import apart_all, restacked, without_scan
from nm_sparsity_jax.models.t5 import T5Config, Transformer

_WEIGHTS, _CONFIG = "model.safetensors", "config.json"
_INDEX = f"{_WEIGHTS}.index.json"
_PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")

# --- the table of names ---------------------------------------------------------------------------

_SHARED, _HEAD = "shared.weight", "lm_head.weight"
# Regex -> its replacement, applied to a key from top to bottom: each one sees what those above it
# made. The MLP is the last part of a layer, behind two kinds of attention in the decoder.
_NAMES = (
  ("token_embedder/embedding", "shared"),
  ("decoder/logits_dense", "lm_head"),
  ("relpos_bias/rel_embedding", "block/0/layer/0/SelfAttention/relative_attention_bias"),
  ("(en|de)coder_norm", "final_layer_norm"),
  (r"encoder/layers_(\d+)/(pre_)?mlp", r"encoder/block/\1/layer/1/\2mlp"),
  (r"decoder/layers_(\d+)/(pre_)?mlp", r"decoder/block/\1/layer/2/\2mlp"),
  ("layers_", "block/"),
  ("pre_mlp_", ""),
  ("mlp", "DenseReluDense"),
  ("pre_cross_attention_layer_norm", "layer/1/layer_norm"),
  ("pre_(self_)?attention_layer_norm", "layer/0/layer_norm"),
  ("encoder_decoder_attention", "layer/1/EncDecAttention"),
  ("/(self_)?attention/", "/layer/0/SelfAttention/"),
  (r"/(q|k|v|o)(uery|ey|alue|ut)/", r"/\1/"),
  ("/(kernel|scale)$", ""),
)
# What files may hold as well: copies of the embedding, and what no T5 reads.
_UNREAD = (
  "encoder.embed_tokens.weight", "decoder.embed_tokens.weight",
  "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",
)  # fmt: skip


def name_of(key: str) -> Name:
  """Returns what an array of T5X's tree without a scan is in Hugging Face's T5.

  >>> name_of("decoder/layers_3/mlp/wi_0/kernel").name
  'decoder.block.3.layer.2.DenseReluDense.wi_0.weight'
  >>> name_of("encoder/layers_3/pre_mlp_layer_norm/scale").name
  'encoder.block.3.layer.1.layer_norm.weight'
  >>> name_of("decoder/layers_3/encoder_decoder_attention/query/kernel").name
  'decoder.block.3.layer.1.EncDecAttention.q.weight'
  >>> name_of("encoder/relpos_bias/rel_embedding").name
  'encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight'
  """
  name = key
  for ours, theirs in _NAMES:
    name = re.sub(ours, theirs, name)
  transposed = key.endswith(("kernel", "rel_embedding"))
  return Name(f"{name.replace('/', '.')}.weight", transposed)


# --- the network of a tree ------------------------------------------------------------------------

# T5Config's field -> theirs.
_SIZES = {
  "vocab_size": "vocab_size",
  "emb_dim": "d_model",
  "num_heads": "num_heads",
  "num_encoder_layers": "num_layers",
  "num_decoder_layers": "num_decoder_layers",
  "head_dim": "d_kv",
  "mlp_dim": "d_ff",
}
_CHOICES = (*_SIZES, "mlp_activations", "logits_via_embedding")


def shapes_of(config: T5Config) -> dict[str, tuple[int, ...]]:
  """Returns key -> shape of the parameters of a network, scanned or not."""
  # The trace of a scan is one layer, so it is fast for any depth.
  network = Transformer(dataclasses.replace(config, scan_layers=True))
  ids = jax.ShapeDtypeStruct((1, 1), jnp.int32)
  found = jax.eval_shape(network.init, jax.random.key(0), ids, ids, ids)["params"]
  found = dict(flatten(found))
  if not config.scan_layers:
    found = apart_all(found)
  return {key: x.shape for key, x in found.items()}


def config_of(shapes: Mapping[str, tuple[int, ...]], what: str) -> T5Config:
  """Returns the sizes of the T5 with parameters of these shapes.

  No shape shows the activations: they are T5.1.1's where there are two input projections, and
  T5.1.0's where there is one.

  Args:
    shapes: key of T5X's tree, scanned or not -> shape.
    what: says in an error what was looked at.

  Raises:
    KeyError: it is of no T5.
    ValueError: it is of another T5 than T5X's: all keys are in one error.
  """
  likes = {key: jax.ShapeDtypeStruct(shape, jnp.float32) for key, shape in shapes.items()}
  layers = {key: x.shape for key, x in apart_all(likes).items()}
  first = "encoder/layers_0"
  vocab, embed = shapes["token_embedder/embedding"]
  heads = layers["encoder/relpos_bias/rel_embedding"][0]
  query = layers[f"{first}/attention/query/kernel"]
  mlp_out = layers[f"{first}/mlp/wo/kernel"]

  def depth(stack: str) -> int:
    # Every layer has one norm of this name.
    return len([key for key in layers if re.search(rf"{stack}/.*/pre_mlp_layer_norm", key)])

  is_gated = f"{first}/mlp/wi_0/kernel" in layers
  config = T5Config(
    vocab,
    emb_dim=embed,
    num_heads=heads,
    head_dim=query[1] // heads,
    num_encoder_layers=depth("encoder"),
    num_decoder_layers=depth("decoder"),
    mlp_dim=mlp_out[0],
    mlp_activations=("gelu", "linear") if is_gated else ("relu",),
    logits_via_embedding="decoder/logits_dense/kernel" not in layers,
    scan_layers="encoder/encoder/mlp/wo/kernel" in shapes,
  )
  if said := difference(shapes_of(config), shapes):
    raise ValueError(f"{what} is not of T5X's T5: {said}.")
  return config


# --- there and back -------------------------------------------------------------------------------


def to_huggingface(params: Mapping[str, Any], config: T5Config) -> dict[str, np.ndarray]:
  """Returns the state dict of a T5's parameters: Hugging Face's name -> array, a view.

      model.load_state_dict({k: torch.tensor(x) for k, x in to_huggingface(params, config).items()},
                            strict=False)  # which has the embedding three times

  Args:
    params: of T5X's T5 or `models.t5`, finalized or dense; a tree, or key -> array.
    config: of their network, scanned or not.

  Raises:
    ValueError: they are of another network, or layers differ in what is one tensor there.
  """
  arrays = dict(flatten(params))
  if said := difference(shapes_of(config), {key: x.shape for key, x in arrays.items()}):
    raise ValueError(f"the tree is not of the network of this config: {said}.")
  return names.to_tensors(apart_all(arrays), name_of)


def from_huggingface(tensors: Mapping[str, Any], config: T5Config) -> dict[str, Any]:
  """Returns parameters, of numpy arrays, of a state dict.

      params = from_huggingface({k: x.numpy() for k, x in model.state_dict().items()}, config)

  Args:
    tensors: Hugging Face's name -> array; copies of the embedding are not read.
    config: of the network that takes the parameters, scanned or not.

  Raises:
    ValueError: a name is missing or unknown, or a tensor has another shape: all in one error.
  """
  what = "the state dict is of another network"
  return nested({key: np.asarray(x) for key, x in _from_tensors(tensors, config, what).items()})


def _from_tensors(tensors: Mapping[str, Any], config: T5Config, what: str) -> dict[str, Lazy]:
  unread = {*_UNREAD, *([_HEAD] if config.logits_via_embedding else [])}
  # A name that nobody knows stays: it is refused, since it may be a weight.
  own = {name: x for name, x in tensors.items() if name not in unread}
  layers = names.from_tensors(own, name_of, shapes_of(without_scan(config)), what)
  return {key: restacked(key, layers, shape) for key, shape in shapes_of(config).items()}


def read(path: str | os.PathLike, config: T5Config | None = None) -> dict[str, Any]:
  """Returns the parameters in a folder of Hugging Face's T5.

      params = read("t5-small", network.config)

  Args:
    path: of the folder, on a local disk.
    config: of the network, which must have the folder's sizes and choices; None = the folder's.

  Raises:
    ValueError: as in `arrays_in`.
  """
  return nested({key: np.asarray(x) for key, x in arrays_in(path, config).items()})


def write(path: str | os.PathLike, params: Mapping[str, Any], config: T5Config) -> None:
  """Writes a new folder of Hugging Face's T5: all of it, or nothing.

      write("model", params, network.config)

  Args:
    path: of the folder, which must not be there; its parents are made.
    params: as in `to_huggingface`.
    config: of their network.
  """
  tensors = to_huggingface(params, config)
  values = to_json(config, str(tensors[_SHARED].dtype))
  with whole(path) as unfinished:
    unfinished.mkdir()
    safetensors_file.write(unfinished / _WEIGHTS, tensors)
    (unfinished / _CONFIG).write_text(json.dumps(values, indent=2, sort_keys=True) + "\n")


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
  """Returns the sizes and choices of a config.json.

  Args:
    found: its values.
    what: says in an error what was looked at.

  Raises:
    KeyError: a size is missing.
    ValueError: it is of another model, or of a T5 that differs from T5X's in more than sizes.
  """
  for name, value in {"model_type": "t5", **_FIXED}.items():
    if found.get(name, _FIXED.get(name)) != value:
      raise ValueError(f"{what}: {name} is {found.get(name)!r}, and {value!r} in every T5 of T5X.")
  # The first T5s have as many decoder layers as encoder layers, and say it once.
  said = {name: value for name, value in found.items() if value is not None}
  known = {"num_decoder_layers": found.get("num_layers"), **said}
  # T5 1.0 ties its logits to the embedding and scales them by d_model ** -0.5; T5 1.1 does neither.
  # `tie_word_embeddings` says both, but transformers 5 saves it as true for T5 1.1 as well, and
  # says by `scale_decoder_outputs` which one it is.
  ties = found.get("scale_decoder_outputs", found.get("tie_word_embeddings", True))
  return T5Config(
    **{field: known[name] for field, name in _SIZES.items()},
    mlp_activations=activations_of(found.get("feed_forward_proj", "relu"), what),
    dropout_rate=found.get("dropout_rate", 0.1),
    logits_via_embedding=bool(ties),
  )


def activations_of(words: str, what: str) -> tuple[str, ...]:
  """Returns the activations that `feed_forward_proj` names.

  >>> activations_of("gated-silu", "it")
  ('silu', 'linear')

  Args:
    words: its value.
    what: says in an error what was looked at.
  """
  return choose(_ACTIVATIONS, f"{what}: feed_forward_proj", words)


def to_json(config: T5Config, dtype: str = "float32") -> dict[str, Any]:
  """Returns the values of the config.json of a T5.

  >>> to_json(T5Config.preset("t5_1_1", "small"))["feed_forward_proj"]
  'gated-gelu'

  Args:
    config: of the network.
    dtype: of the tensors, as numpy calls it.

  Raises:
    KeyError: transformers has no such activations.
  """
  words = {of: word for word, of in _ACTIVATIONS.items()}
  return {
    "architectures": ["T5ForConditionalGeneration"],
    "model_type": "t5",
    **{name: getattr(config, field) for field, name in _SIZES.items()},
    **_FIXED,
    "feed_forward_proj": words[tuple(config.mlp_activations)],
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
  files = (_WEIGHTS, _INDEX, *_PICKLED)
  return any(pathlib.Path(path, name).is_file() for name in files)


def config_in(path: str | os.PathLike) -> T5Config:
  """Returns what config.json of a folder says; without a scan.

  Args:
    path: of the folder, on a local disk.

  Raises:
    ValueError: as in `from_json`.
  """
  return from_json(_values(path), repr(os.path.join(path, _CONFIG)))


def _values(path: str | os.PathLike) -> dict[str, Any]:
  return json.loads(pathlib.Path(path, _CONFIG).read_bytes())


def arrays_in(path: str | os.PathLike, config: T5Config | None = None) -> dict[str, Lazy]:
  """Returns key of T5X's tree -> array of a folder, which is read when it is asked for.

      np.asarray(arrays_in("t5-small")["token_embedder/embedding"])

  Args:
    path: of the folder, on a local disk.
    config: of the network, which must have the folder's sizes and choices; None = the folder's.

  Raises:
    ValueError: the tensors are absent, pickled or damaged, or they are not those of config.json:
      all names are in one error. Or the folder is of another network.
  """
  own, folder = config_in(path), pathlib.Path(path)
  config = own if config is None else config
  # Not by shapes: those of 8 heads of 64 are those of 16 heads of 32.
  pairs = {name: (getattr(own, name), getattr(config, name)) for name in _CHOICES}
  if differs := [f"{k} is {x} there and {y} here" for k, (x, y) in pairs.items() if x != y]:
    raise ValueError(
      f"{os.fspath(path)!r} is of another network: {', '.join(differs)}. Choose its model file."
    )
  files = {_WEIGHTS}
  # Large models lie in several files.
  if (folder / _INDEX).is_file():
    files = set(json.loads((folder / _INDEX).read_bytes())["weight_map"].values())
  elif not (folder / _WEIGHTS).is_file():
    safetensors_file.refuse_pickled(folder / _PICKLED[0])
  tensors: dict[str, Lazy] = {}
  for file in sorted(files):
    tensors |= safetensors_file.read(folder / file)[0]
  if _SHARED in tensors and _values(path).get("tie_word_embeddings", True):
    # transformers 5 ties T5 1.1 too, where nobody gave it a head of its own. It does not scale.
    tensors.setdefault(_HEAD, tensors[_SHARED])
  return _from_tensors(tensors, config, f"{os.fspath(path)!r} is not the T5 of its {_CONFIG}")
