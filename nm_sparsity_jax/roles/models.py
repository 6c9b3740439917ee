"""The families of this package: how T5, and the vision models of several projects, name kernels.

Each regex is of whole paths. What a shape of `flops` calls the operation is said here as well.
"""

from __future__ import annotations

import re

from nm_sparsity_jax.roles.registry import Family, register

_T5_ATTENTION = r"(.*/)?(\w*attention(_\d+)?)/"
_FLAX_ATTENTION = r"(.*/)?(\w*Attention(_\d+)?)/"
# By the names that flax gives its own classes. (T5's self_attention may be one stacked by a scan.)
_FLAX_OWN = r"(.*/)?(MultiHeadDotProductAttention|MultiHeadAttention|SelfAttention)(_\d+)?/"


def _attention_roles(prefix: str) -> dict[str, str]:
  names = {"q": "query", "k": "key", "v": "value", "o": "out"}
  return {role: f"{prefix}{name}/kernel" for role, name in names.items()}


def _t5_op(path: str) -> str | None:
  kind = T5.role(path)
  if kind is None:
    return None
  stack = "decoder" if "decoder/" in path.replace("encoder_decoder", "") else "encoder"
  if kind == "ff":
    return f"{stack}/{path.split('/')[-2]}"
  return f"{stack}/{'cross' if 'encoder_decoder_attention' in path else 'self'}/{kind}"


_T5_ATTENTIONS = ("encoder/self", "decoder/self", "decoder/cross")

# T5X's names, also stacked by a scan. Any kernel of rank 2 contracts its first axis; one of another
# rank, such as one stacked by a scan, is ambiguous: (embed, layers, mlp) and (embed, heads,
# head_dim) look alike.
T5 = register(
  Family(
    name="t5",
    roles={
      "ff": r"(.*/)?mlp/(wi|wi_\d+|wo|Dense_\d+)/kernel",
      **_attention_roles(_T5_ATTENTION),
    },
    narrow={
      "encoder": r"(.*/)?encoder/.*",
      "decoder": r"(.*/)?decoder/.*",
      "self": r"(?!.*encoder_decoder_attention/).*[aA]ttention.*",
      "cross": r"(.*/)?encoder_decoder_attention/.*",
    },
    places={"ff": ("encoder", "decoder"), **dict.fromkeys("qkvo", _T5_ATTENTIONS)},
    op=_t5_op,
  )
)

# --- vision -----------------------------------------------------------------------------------

# Each regex names the container of its kernel, or begins at the root, so that the words of these
# families do not reach into other trees.

# The first and the last kernel of an MLP, and the two inputs of a gated one, as projects name them.
_MLP = {
  "encoder/wi": ("Dense_0", "fc1", "dense_in", "0"),
  "encoder/wo": ("Dense_1", "fc2", "dense_out", "3", "down"),
  "encoder/wi_0": ("gate",),
  "encoder/wi_1": ("up",),
}
_VIT_OPS = {"stem": "encoder/patch_embedding", "head": "encoder/logits"}
_VIT_PLACES = {"ff": ("encoder",), **dict.fromkeys("qkvo", ("encoder/self",))}


def _vit_op(path: str) -> str | None:
  """Returns the name in `flops.ViTShape`; None for a pooling head, which that shape lacks."""
  families = (VIT, BIG_VISION, KAULDRON, JIMM, TIMM_VIT)
  kind = next((role for family in families if (role := family.role(path))), None)
  if kind is None or re.search(r"map_?head", path, re.IGNORECASE):
    return None
  if kind == "ff":
    name = path.split("/")[-2]
    return next((op for op, names in _MLP.items() if name in names), None)
  return f"encoder/self/{kind}" if kind in tuple("qkvo") else _VIT_OPS.get(kind)


# flax's own attention and its ViT example, which big_vision's ViT shares.
VIT = register(
  Family(
    name="vit",
    roles={
      "ff": r"(.*/)?MlpBlock(_\d+)?/(wi|wi_\d+|wo|Dense_\d+)/kernel",
      **_attention_roles(_FLAX_ATTENTION),
    },
    narrow={"encoder": r"(.*/)?encoderblock(_\d+)?/.*"},
    places=_VIT_PLACES,
    op=_vit_op,
  )
)

# big_vision: what its ViT has beside flax's, also scanned, and its ResNets (bit, bit_paper).
_SCANNED = r"(.*/)?encoderblock/"
BIG_VISION = register(
  Family(
    name="big_vision",
    roles={
      "stem": r"(img/)?embedding/kernel|(root_block/)?conv_root/kernel",
      "conv": r"(.*/)?block\d+/unit\d+/conv\d/kernel",
      "shortcut": r"(.*/)?block\d+/unit\d+/conv_proj/kernel",
      "head": r"(img/)?head/kernel",
    },
    op=_vit_op,
  )
)

# Kauldron's ViT. Under a `layers/`, which a scan makes, an axis must be named.
_KAULDRON = r"(?!(.*/)?layers/)(.*/)?layers_\d+/attention/"
KAULDRON = register(
  Family(
    name="kauldron",
    roles={
      "ff": r"(.*/)?layers_\d+/mlp/dense_(in|out)/kernel",
      **_attention_roles(r"(.*/)?layers_\d+/attention/"),
      "stem": r"(.*/)?patchifier/kernel",
      "head": r"classifier_head/kernel",
    },
    places=_VIT_PLACES,
    op=_vit_op,
  )
)

# jimm (jax-image-models): its blocks are always stacked, on axis 0.
_JIMM_HEAD = r"(.*/)?map_head/attn/"
JIMM = register(
  Family(
    name="jimm",
    roles={
      "ff": r"(.*/)?((layers|map_head)/mlp/layers/\d+|encoder/layers/(gate|up|down))/kernel",
      **_attention_roles(r"(.*/)?(layers|map_head)/attn/"),
      "stem": r"(.*/)?patch_embeddings/kernel",
      "head": r"classifier/kernel",
    },
    places=_VIT_PLACES,
    op=_vit_op,
  )
)

# timm's names, in the order of flax: those of `models.vit`, `models.swin` and `models.resnet`. A
# fused kernel is one of your own; the models here keep q, k and v apart.
_BLOCK = r"(.*/)?blocks(_\d+)?/"
_PATCHES = r"patch_embed/proj/kernel"
_TIMM_BLOCK = {
  "ff": _BLOCK + r"mlp/fc[12]/kernel",
  **{role: _BLOCK + f"attn/{role}/kernel" for role in "qkv"},
  "o": _BLOCK + r"attn/proj/kernel",
  "stem": _PATCHES,
}
TIMM_VIT = register(
  Family(
    name="timm_vit",
    roles={**_TIMM_BLOCK, "head": r"head/kernel"},
    places=_VIT_PLACES,
    fused=r"(.*/)?\w*qkv\w*/kernel",
    op=_vit_op,
  )
)


def _swin_op(path: str) -> str | None:
  """Returns the name in `flops.SwinShape`, whose operations are summed over a stage."""
  kind = TIMM_SWIN.role(path)
  stage = re.search(r"(layers_\d+)/", path)
  if stage is None:
    return {"stem": "patch_embedding", "head": "logits"}.get(kind or "")
  own = {"merge": "reduction", "ff": "wi" if "/fc1/" in path else "wo"}
  name = own.get(kind or "", kind)
  return name and f"{stage[1]}/{name}"


TIMM_SWIN = register(
  Family(
    name="timm_swin",
    roles={
      **_TIMM_BLOCK,
      "merge": r"(.*/)?layers_\d+/downsample/reduction/kernel",
      "head": r"head/fc/kernel",
    },
    op=_swin_op,
  )
)


def _resnet_op(path: str) -> str | None:
  """Returns the name in `flops.ResNetShape`, which has an operation for each kernel."""
  return path.removesuffix("/kernel") if TIMM_RESNET.role(path) else None


TIMM_RESNET = register(
  Family(
    name="timm_resnet",
    roles={
      "stem": r"conv1/kernel",
      "conv": r"(.*/)?layer\d+_\d+/conv\d/kernel",
      "shortcut": r"(.*/)?layer\d+_\d+/downsample_conv/kernel",
      "head": r"fc/kernel",
    },
    op=_resnet_op,
  )
)
