"""config.json of Hugging Face's T5, and our T5Config.

    config.json -> [from_json] -> T5Config -> [to_json] -> config.json

T5 1.0 ties its logits to the embedding, and scales them by d_model ** -0.5. T5 1.1 does neither.
One switch says both here (`logits_via_embedding`). There `tie_word_embeddings` says both; what
transformers 5 saves always ties by its word, and has `scale_decoder_outputs` beside it.
"""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

from nm_sparsity_jax.models.t5 import T5Config
from nm_sparsity_jax.text import first_line
from nm_sparsity_jax.weights.huggingface_names import BUCKETS

FILE = "config.json"
_MOST = 1 << 20  # bytes of a config.json
_MODEL = "t5"

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
  "relative_attention_num_buckets": BUCKETS,
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
# What makes the tensors something else than weights of a T5.
_REFUSED = ("quantization_config", "sparsity_config")


def from_json(found: Mapping[str, Any], what: str) -> T5Config:
  """Returns the sizes and choices that a config.json tells.

  >>> from_json({"model_type": "t5", "d_model": 64, "tie_word_embeddings": False}, "it").emb_dim
  64

  Args:
    found: its values.
    what: says in an error what was looked at.

  Raises:
    ValueError: it is of another model, or of a T5 that differs from T5X's in more than sizes.
  """
  if found.get("model_type") != _MODEL:
    raise ValueError(
      f"{what} is of the model {found.get('model_type')!r}: only {_MODEL!r} is read."
    )
  for name in _REFUSED:
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
    if type(value) is not int or not 0 < value < 1 << 31:
      raise ValueError(f"{what}: {name} is {value!r}, and must be a positive integer.")
    sizes[field] = value
  activations = activations_of(found.get("feed_forward_proj", "relu"), what)
  dropout = found.get("dropout_rate", 0.1)
  if not isinstance(dropout, int | float) or not 0 <= dropout < 1:
    raise ValueError(
      f"{what}: dropout_rate is {dropout!r}, and must be a number from 0 to below 1."
    )
  return T5Config(
    **sizes,
    mlp_activations=activations,
    dropout_rate=float(dropout),
    logits_via_embedding=_scales(found, what),
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


def _scales(found: Mapping[str, Any], what: str) -> bool:
  """Returns whether the logits come from the embedding, and are scaled."""
  is_tied = found.get("tie_word_embeddings", True)
  scales = found.get("scale_decoder_outputs", is_tied is not False)
  if scales and is_tied is False:
    raise ValueError(
      f"{what}: scale_decoder_outputs is true and tie_word_embeddings false, as in no T5: T5 1.0 "
      "ties and scales, T5 1.1 does neither."
    )
  return bool(scales)


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
  sizes = {name: getattr(config, field) for field, (name, _) in _SIZES.items()}
  return {
    "architectures": ["T5ForConditionalGeneration"],
    "model_type": _MODEL,
    **sizes,
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


def read_json(path: str | os.PathLike, most: int = _MOST) -> dict[str, Any]:
  """Reads a JSON file that holds an object.

  Args:
    path: of the file.
    most: bytes that it may have.

  Raises:
    ValueError: it is larger, or holds something else.
  """
  file = pathlib.Path(path)
  if (size := file.stat().st_size) > most:
    raise ValueError(f"{os.fspath(path)!r} has {size:,} bytes, and at most {most:,} are read.")
  try:
    found = json.loads(file.read_bytes())
    if not isinstance(found, dict):
      raise ValueError(f"it holds a {type(found).__name__}")
  except (ValueError, RecursionError) as e:
    raise ValueError(f"{os.fspath(path)!r} is no JSON object ({first_line(e)}).") from e
  return found


def check_equal(theirs: T5Config, ours: T5Config, what: str) -> None:
  """Refuses a checkpoint of another network, and names each size or choice that differs.

  Args:
    theirs: the checkpoint's.
    ours: the network's.
    what: says in an error what was looked at.
  """
  fields = (*_SIZES, "mlp_activations", "logits_via_embedding")
  value = lambda config, field: (
    tuple(getattr(config, field)) if field == "mlp_activations" else getattr(config, field)
  )
  differs = [
    f"{field} is {value(theirs, field)} there and {value(ours, field)} here"
    for field in fields
    if value(theirs, field) != value(ours, field)
  ]
  if differs:
    raise ValueError(f"{what} is of another network: {', '.join(differs)}. Choose its model file.")
