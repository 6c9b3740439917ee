"""Roles of kernels: what 'ff', 'qkv' or 'decoder/cross/q' names in each family of models.

    'decoder/cross/qkv' -> [matcher] -> a test of whole parameter paths -> rules
    parameter path      -> [role_of] -> its role                        -> rules
    path, shapes        -> [axis_of] -> the axis that it is summed over -> rules

The families are T5, flax's ViT and its attention, timm's (of the vision models here),
big_vision's, Kauldron's, jimm's, and those of decoders and Keras below. `register` adds a family.

>>> role_of("layers_0/blocks_1/attn/q/kernel"), role_of("layer1_0/downsample_conv/kernel")
('q', 'shortcut')
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

# What several roles are called together.
COMPOSITES: Mapping[str, tuple[str, ...]] = {
  "qk": ("q", "k"),
  "qkv": ("q", "k", "v"),
}

_Words = Mapping[str, str]


class _Family(NamedTuple):
  """What `register` takes."""

  roles: _Words
  narrow: _Words
  layouts: _Words


_families: dict[str, _Family] = {}


def register(
  family: str, roles: _Words, narrow: _Words | None = None, layouts: _Words | None = None
) -> None:
  """Adds how a family of models names its kernels, for all rules made from then on.

  Call it where your module defines its models, so that a run that names the module knows them. A
  family replaces one of the same name, so a cell of a notebook may run again. Families add up: 'ff'
  names what any of them calls so.

      nms.roles.register("own", {"ff": r"(.*/)?(fc1|fc2)/kernel"})

  Args:
    family: its name, such as 't5'.
    roles: role -> regex of the whole '/'-joined paths of kernels that have it. A kernel that holds
      several of q, k and v has the role 'qkv'.
    narrow: word -> regex of the paths that it narrows a role to, as 'decoder' in 'decoder/ff'.
    layouts: regex of whole paths -> a letter for each axis. Leave out what a configuration
      changes; `Rules.for_model` tells it.

        letters  'i' is an axis that the product sums over, 'o' one of outputs, '.' one of a
                 window: 'iio' is a kernel (heads, head_dim, embed).
        several  'io oio' has a layout for each rank. The one that fits counts.
        stacks   's' is the axis of a stack's layers, as in 'sio'. The regex names the folder of
                 the stack, '(?P<stack>layers/).*'. All parameters below it must be equally long
                 there, and on no other of the first two axes.
        proof    A kernel of more than two axes may be a stack of smaller ones. So its layout fits
                 only beside a bias that has the shape of the outputs, or where a parameter with
                 one axis, such as a norm's, stands in its block.
  """
  made = _Family(roles, narrow or {}, layouts or {})
  for regex in (*made.roles.values(), *made.narrow.values()):
    compiled(regex, f"the family {family!r}")
  for regex, texts in made.layouts.items():
    has_stack = "stack" in compiled(regex, f"the family {family!r}").groupindex
    for layout in texts.split():
      if not re.fullmatch(r"[ios.]*i[ios.]*", layout) or ("s" in layout and not has_stack):
        raise ValueError(
          f"the family {family!r}: the layout {layout!r} needs an 'i', no other letters than i, o, "
          "s and '.', and with an 's' a folder (?P<stack>...) in its regex."
        )
  _families[family] = made


# Python's own cache keeps 512 patterns, and a large network has more.
@functools.cache
def compiled(regex: str, owner: str) -> re.Pattern[str]:
  """Returns the compiled regex; `owner` says in an error where it stands."""
  try:
    return re.compile(regex)
  except re.error as e:
    raise ValueError(f"{owner}: {regex!r} is not a regular expression: {e}.") from e


def regexes() -> dict[str, str]:
  """Returns role -> regex of all families, with the words for several roles.

  >>> list(regexes())[:4]
  ['ff', 'q', 'qk', 'qkv']
  """
  return _joined(
    (word, regex)
    for family in _families.values()
    for role, regex in family.roles.items()
    for word in (role, *(whole for whole, parts in COMPOSITES.items() if role in parts))
  )


def matcher(place: str, more: _Words | None = None) -> re.Pattern[str]:
  """Returns the regex of whole paths for a place: a role, narrowed by words, or a regex.

  >>> regex = matcher("encoder/ff")
  >>> paths = "encoder/layers_0/mlp/wi/kernel", "decoder/layers_0/mlp/wi/kernel"
  >>> [bool(regex.fullmatch(path)) for path in paths]
  [True, False]

  Args:
    place: what rules name.
    more: role -> regex, of roles that no rules name.
  """
  known = regexes() | dict(more or {})
  words = _joined(pair for family in _families.values() for pair in family.narrow.items())
  *narrow, role = place.split("/")
  if role not in known or not words.keys() >= set(narrow):
    return compiled(place, f"the place {place!r}")
  # The path must match each narrowing word as well as the role.
  narrowed = "".join(rf"(?=(?:{words[word]})\Z)" for word in narrow)
  return compiled(f"{narrowed}(?:{known[role]})", f"the place {place!r}")


def role_of(path: str) -> str | None:
  """Returns the role of a kernel in whatever family names it, None where none does."""
  known = (pair for family in _families.values() for pair in family.roles.items())
  return next((role for role, regex in known if re.fullmatch(regex, path)), None)


def axis_of(path: str, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...] | None:
  """Returns the axes that the product sums over, where the family of a kernel is sure of them."""
  for family in _families.values():
    for regex, texts in family.layouts.items():
      if not (found := compiled(regex, "a family").fullmatch(path)):
        continue
      stack = found.groupdict().get("stack", "")
      fitting = [layout for layout in texts.split() if _fits(layout, path, shapes, stack)]
      if len(fitting) == 1:
        return tuple(i for i, letter in enumerate(fitting[0]) if letter == "i")
  return None


def bias_of(path: str, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...] | None:
  """Returns the shape of the bias beside a kernel, None where it has none."""
  module, mark, name = path.rpartition("/")
  return shapes.get(f"{module}{mark}{'b' if name == 'w' else 'bias'}")


def is_output(path: str, shapes: Mapping[str, tuple[int, ...]], axis: int) -> bool:
  """Returns whether the bias of a kernel with two axes has the length of this one alone."""
  shape = shapes[path]
  return len(shape) == 2 and shape[0] != shape[1] and bias_of(path, shapes) == (shape[axis],)


def _fits(layout: str, path: str, shapes: Mapping[str, tuple[int, ...]], stack: str) -> bool:
  """Returns whether a kernel has this layout, by its rank, its bias and what stands around it."""
  shape, bias = shapes[path], bias_of(path, shapes)
  if len(layout) != len(shape):
    return False
  outputs = [n for n, letter in zip(shape, layout, strict=True) if letter in "os" and n > 1]
  # haiku and Equinox write the bias of a convolution as (out, 1, 1).
  if bias is not None and [n for n in bias if n > 1] != outputs:
    return False
  if "s" in layout:
    layers = [x for p, x in shapes.items() if p.startswith(stack) and len(x) > 1]
    equal = [axis for axis in (0, 1) if len({x[axis] for x in layers}) == 1]
    return equal == [layout.index("s")]
  # All parameters of a stack have one more axis. The block of attention/query is what holds
  # attention. haiku writes the scale of a norm as (1, 1, 1, channels).
  block, mark, _ = path.rpartition("/")[0].rpartition("/")[0].rpartition("/")
  in_block = [x for p, x in shapes.items() if p.startswith(block + mark)]
  is_single = any(sum(n > 1 for n in x) == 1 for x in in_block)
  return len(shape) == 2 or bias is not None or is_single


def _joined(pairs: Iterable[tuple[str, str]]) -> dict[str, str]:
  """Returns word -> a regex for all that has this word."""
  found: dict[str, list[str]] = {}
  for word, regex in pairs:
    found.setdefault(word, []).append(f"(?:{regex})")
  return {word: "|".join(dict.fromkeys(those)) for word, those in found.items()}


# --- the families here: each regex is of whole paths ----------------------------------------------

_T5_ATTENTION = r"(.*/)?(\w*attention(_\d+)?)/"
_FLAX_ATTENTION = r"(.*/)?(\w*Attention(_\d+)?)/"


# flax's WMT example tells its second attention by a number, and its block fixes the order.
_CROSS = (
  r"(.*/)?(\w*([cC]ross|enc(oder)?_?dec(oder)?)\w*[aA]tt(n|ention)\w*"
  r"|encoderdecoderblock_\d+/MultiHeadDotProductAttention_1)/"
)
# Neither `self` nor `cross`: what a number alone tells from another attention, as in the names that
# Keras gives, and what may look at a memory.
_UNSURE = (
  r"(.*/)?(((?![sS]elf)\w)*[aA]tt(n|ention)_[1-9]\d*|(multi_head|grouped_query)_attention"
  r"|\w*(memory|context|encoder)_\w*att(n|ention)\w*)/"
)


def _attention_roles(prefix: str, out: str = "out", suffix: str = "/kernel") -> dict[str, str]:
  names = {"q": "query", "k": "key", "v": "value", "o": out}
  return {role: f"{prefix}{name}{suffix}" for role, name in names.items()}


# T5X's names, also stacked by a scan. Any kernel of rank 2 contracts its first axis; one of another
# rank, such as one stacked by a scan, is ambiguous: (embed, layers, mlp) and (embed, heads,
# head_dim) look alike.
register(
  "t5",
  {
    "ff": r"(.*/)?mlp/(wi|wi_\d+|wo|Dense_\d+)/kernel",
    **_attention_roles(_T5_ATTENTION),
  },
  {
    "encoder": r"(.*/)?encoder/.*",
    "decoder": r"(.*/)?decoder/.*",
    "self": rf"(?!{_CROSS})(?!{_UNSURE}).*[aA]tt(n|ention).*",
    "cross": rf"{_CROSS}.*",
  },
)

# --- vision -----------------------------------------------------------------------------------

# Each regex names the container of its kernel, or begins at the root, so that the words of these
# families do not reach into other trees.

# flax's own attention and its ViT example, which big_vision's ViT shares.
register(
  "vit",
  {
    "ff": r"(.*/)?MlpBlock(_\d+)?/(wi|wi_\d+|wo|Dense_\d+)/kernel",
    **_attention_roles(_FLAX_ATTENTION),
  },
  {"encoder": r"(.*/)?encoderblock(_\d+)?/.*"},
  # Of flax's own class, under the name that flax gives it.
  {
    r"(.*/)?MultiHeadDotProductAttention_\d+/(query|key|value)/kernel": "ioo",
    r"(.*/)?MultiHeadDotProductAttention_\d+/out/kernel": "iio",
  },
)

# big_vision: what its ViT has beside flax's, also scanned, and its ResNets (bit, bit_paper).
register(
  "big_vision",
  {
    "stem": r"(img/)?embedding/kernel|(root_block/)?conv_root/kernel",
    "conv": r"(.*/)?block\d+/unit\d+/conv\d/kernel",
    "shortcut": r"(.*/)?block\d+/unit\d+/conv_proj/kernel",
    "head": r"(img/)?head/kernel",
  },
)

# Kauldron's ViT.
register(
  "kauldron",
  {
    "ff": r"(.*/)?layers_\d+/mlp/dense_(in|out)/kernel",
    **_attention_roles(r"(.*/)?layers_\d+/attention/"),
    "stem": r"(.*/)?patchifier/kernel",
    "head": r"classifier_head/kernel",
  },
)

# jimm (jax-image-models): its blocks are always stacked. Those of `map_head` are not.
register(
  "jimm",
  {
    "ff": r"(.*/)?((layers|map_head)/mlp/layers/\d+|encoder/layers/(gate|up|down))/kernel",
    **_attention_roles(r"(.*/)?(layers|map_head)/attn/"),
    "stem": r"(.*/)?patch_embeddings/kernel",
    "head": r"classifier/kernel",
  },
  layouts={
    r"(?P<stack>(.*/)?layers/)(mlp/layers/\d+|gate|up|down)/kernel": "sio",
    r"(?P<stack>(.*/)?layers/)attn/(query|key|value)/kernel": "sioo",
    r"(?P<stack>(.*/)?layers/)attn/out/kernel": "siio",
    r"(.*/)?map_head/attn/(query|key|value)/kernel": "ioo",
    r"(.*/)?map_head/attn/out/kernel": "iio",
  },
)

# timm's names, in the order of flax: those of `models.vit`, `models.swin` and `models.resnet`. A
# fused kernel is one of your own; the models here keep q, k and v apart.
_BLOCK = r"(.*/)?blocks(_\d+)?/"
register(
  "timm",
  {
    "ff": _BLOCK + r"mlp/fc[12]/kernel",
    **{role: _BLOCK + f"attn/{role}/kernel" for role in "qkv"},
    "qkv": r"(.*/)?\w*qkv\w*/kernel",
    "o": _BLOCK + r"attn/proj/kernel",
    "stem": r"patch_embed/proj/kernel|conv1/kernel",
    "merge": r"(.*/)?layers_\d+/downsample/reduction/kernel",
    "conv": r"(.*/)?layer\d+_\d+/conv\d/kernel",
    "shortcut": r"(.*/)?layer\d+_\d+/downsample_conv/kernel",
    "head": r"head/(fc/)?kernel|fc/kernel",
  },
)

# Keras' attention under its default names, and the blocks of keras-hub. A T5X attention is also
# called self_attention, and may be stacked by a scan, so the block is part of these names.
_KERAS_GEMMA = r"(.*/)?decoder_block_\d+/"
_KERAS_ATTENTION = (
  r"(.*/)?((multi_head|grouped_query)_attention(_\d+)?|transformer_block_\d+/mha"
  r"|transformer_(layer|encoder|decoder)\w*/((self|cross)_)?attention(_layer)?)/"
)
register(
  "keras",
  {
    "ff": r"(.*/)?feedforward_(intermediate|gate|output)_dense/kernel"
    rf"|(.*/)?transformer_block_\d+/mlp/dense_[12]/kernel|{_KERAS_GEMMA}ffw_\w+/kernel",
    **_attention_roles(f"({_KERAS_ATTENTION}|{_KERAS_GEMMA}attention/)", "attention_output"),
  },
  {"encoder": r"(.*/)?transformer_encoder\w*/.*", "decoder": r"(.*/)?transformer_decoder\w*/.*"},
  {
    r"(.*/)?conv1d(_\d+)?/kernel": ".io",
    r"(.*/)?conv2d(_\d+)?/kernel": "..io",
    r"(.*/)?conv3d(_\d+)?/kernel": "...io",
    rf"{_KERAS_ATTENTION}(query|key|value)/kernel": "ioo",
    rf"({_KERAS_ATTENTION}|{_KERAS_GEMMA}attention/)attention_output/kernel": "iio",
  },
)

# --- MaxText ----------------------------------------------------------------------------------

# Its `param_scan_axis` is 1 or 0, which no path tells. A scanned T5 of T5X has a folder
# decoder/decoder/ and is another matter: there a rank of 3 is one of layers. A `wi` of rank 3 may
# be a fused one, or stacked.
_MAXTEXT_LAYER = r"(.*/)?decoder/(layers_remainder/)?(\w+_)?layers_\d+/"
_MAXTEXT_STACK = r"(?P<stack>(.*/)?decoder/layers/)(.*/)?"
_MAXTEXT_ATTENTION = r"self_attention(_local|_global)?/"
_MAXTEXT_QKV = _MAXTEXT_ATTENTION + r"(query|key|value|qkv_proj)/kernel"
_MAXTEXT_OUT = _MAXTEXT_ATTENTION + r"out/kernel"
_MAXTEXT_FF = r"mlp(_local|_global)?/w[io](_\d)?/kernel"
register(
  "maxtext",
  {
    "ff": r"(.*/)?decoder/.*" + _MAXTEXT_FF,
    **_attention_roles(r"(.*/)?decoder/.*" + _MAXTEXT_ATTENTION),
    "qkv": r"(.*/)?decoder/.*" + _MAXTEXT_ATTENTION + r"qkv_proj/kernel",
  },
  layouts={
    _MAXTEXT_LAYER + _MAXTEXT_QKV: "ioo",
    _MAXTEXT_LAYER + _MAXTEXT_OUT: "iio",
    _MAXTEXT_LAYER + _MAXTEXT_FF: "io",
    _MAXTEXT_STACK + _MAXTEXT_QKV: "isoo sioo",
    _MAXTEXT_STACK + _MAXTEXT_OUT: "isio siio",
    _MAXTEXT_STACK + _MAXTEXT_FF: "iso sio",
  },
)

# --- Gemma -----------------------------------------------------------------------------------

# google-deepmind's Gemma 2, 3, 3n and 4. A configuration may turn gating_einsum, but not that of
# Gemma 4's experts, so `Rules.for_model` tells its axis.
_GEMMA = r"(.*/)?layer_\d+/"
register(
  "gemma",
  {
    "ff": _GEMMA + r"mlp2?/(gating_einsum|linear)(/w)?",
    **{role: f"{_GEMMA}attn/{role}_einsum/w" for role in "qk"},
    "qkv": _GEMMA + r"attn/q?kv_einsum/w",
    "o": _GEMMA + r"attn/attn_vec_einsum/w",
  },
  # Images and T5Gemma have encoders beside it.
  {"decoder": r"(?!(.*/)?\w*encoder\w*/)" + _GEMMA + r"(attn|mlp2?)/.*"},
  {
    _GEMMA + r"attn/attn_vec_einsum/w": "iio",
    _GEMMA + r"attn/(q|k|kv|qkv)_einsum/w": "oio ooio",
    _GEMMA + r"mlp2?/linear(/w)?": "io oio",
    _GEMMA + r"mlp/gating_einsum/w": "oooi",
  },
)

# --- Equinox, haliax, haiku -----------------------------------------------------------------------

# Equinox: its own attention and MLP, one by one or stacked by `filter_vmap`. haliax has weight/0: a
# NamedArray, whose axes lie in the order that a program names them in.
register(
  "equinox",
  {
    "ff": r"(.*/)?mlp/layers/\d+/weight(/0)?",
    **_attention_roles(r"(.*/)?", "output", "_proj/weight"),
  },
  layouts={r"(.*/)?(mlp/layers/\d+|(query|key|value|output)_proj)/weight": "oi ooi"},
)

# haiku: its attention, MLP and ResNet, and the transformer of its examples. `layer_stack` stacks on
# axis 0.
_HAIKU_LINEAR = r"(linear(_\d+)?|logits|multi_head_attention(_\d+)?/(query|key|value))"
_HAIKU_BLOCK = r"(.*/)?block_group_\d+/~/block_\d+/~/"
register(
  "haiku",
  {
    "ff": r"(.*/)?(mlp(_\d+)?/~/linear_\d+|transformer/linear(_\d+)?)/w",
    **_attention_roles(r"(.*/)?multi_head_attention(_\d+)?/", "linear", "/w"),
    "stem": r"(.*/)?initial_conv/w",
    "conv": f"{_HAIKU_BLOCK}conv_\\d/w",
    "shortcut": f"{_HAIKU_BLOCK}shortcut_conv/w",
    "head": r"(.*/)?(logits|language_model/linear)/w",
  },
  layouts={
    rf"(.*/)?{_HAIKU_LINEAR}/w": "io",
    rf"(.*/)?__layer_stack\w*/(.*/)?{_HAIKU_LINEAR}/w": "oio",
    r"(.*/)?(conv2_d(_\d+)?|initial_conv)/w": "..io",
    f"{_HAIKU_BLOCK}(conv_\\d|shortcut_conv)/w": "..io",
  },
)

# --- Tunix and NNX ------------------------------------------------------------------------------

# Tunix's Llama 3, Qwen 2 and 3 and Gemma 1 to 4, and what else in NNX has the names of Llama. The
# layers of Tunix are a list and no stack, so a rank is sure of the axis.
_TUNIX = r"(.*/)?layers/\d+/"
register(
  "tunix",
  {
    "ff": r"(.*/)?mlp/(gate|up|down)_proj(/kernel)?|(.*/)?moe/(gating_einsum|linear)",
    **{role: rf"(.*/)?(self_)?attn/{role}(_proj|_einsum)/(w|kernel)" for role in "qkv"},
    "o": r"(.*/)?(self_)?attn/(o_proj|attn_vec_einsum)/(w|kernel)",
    "qkv": r"(.*/)?attn/q?kv_einsum/(w|kernel)",
  },
  layouts={
    _TUNIX + r"mlp/(gate|up|down)_proj": "oio",  # experts
    _TUNIX + r"moe/linear": "oio",
    _TUNIX + r"moe/gating_einsum": "oooi",
    _TUNIX + r"attn/[qkv]_proj/w": "ioo",
    _TUNIX + r"attn/(q|k|kv|qkv)_einsum/w": "oio ooio",
    _TUNIX + r"attn/(o_proj|attn_vec_einsum)/w": "iio",
  },
)

# nnx.MultiHeadAttention under any name of the usual kind. Stacked kernels of two axes have as many
# axes as it has, so something beside it must tell.
_NNX_ATTENTION = r"\w*(attn|attention|mha)/"
register(
  "nnx",
  _attention_roles(rf"(.*/)?{_NNX_ATTENTION}"),
  layouts={
    rf"(.*/)?{_NNX_ATTENTION}(query|key|value)/kernel": "ioo",
    rf"(.*/)?{_NNX_ATTENTION}out/kernel": "iio",
  },
)
