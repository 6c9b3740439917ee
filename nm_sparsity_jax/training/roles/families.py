"""The families of this package: how T5, and the vision models of several projects, name kernels.

Each regex is of whole paths.
"""

from __future__ import annotations

from nm_sparsity_jax.training.roles.registry import Family, register

_T5_ATTENTION = r"(.*/)?(\w*attention(_\d+)?)/"
_FLAX_ATTENTION = r"(.*/)?(\w*Attention(_\d+)?)/"


def _attention_roles(prefix: str) -> dict[str, str]:
  names = {"q": "query", "k": "key", "v": "value", "o": "out"}
  return {role: f"{prefix}{name}/kernel" for role, name in names.items()}


# T5X's names, also stacked by a scan. Any kernel of rank 2 contracts its first axis; one of another
# rank, such as one stacked by a scan, is ambiguous: (embed, layers, mlp) and (embed, heads,
# head_dim) look alike.
register(
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
  )
)

# --- vision -----------------------------------------------------------------------------------

# Each regex names the container of its kernel, or begins at the root, so that the words of these
# families do not reach into other trees.

# flax's own attention and its ViT example, which big_vision's ViT shares.
register(
  Family(
    name="vit",
    roles={
      "ff": r"(.*/)?MlpBlock(_\d+)?/(wi|wi_\d+|wo|Dense_\d+)/kernel",
      **_attention_roles(_FLAX_ATTENTION),
    },
    narrow={"encoder": r"(.*/)?encoderblock(_\d+)?/.*"},
  )
)

# big_vision: what its ViT has beside flax's, also scanned, and its ResNets (bit, bit_paper).
register(
  Family(
    name="big_vision",
    roles={
      "stem": r"(img/)?embedding/kernel|(root_block/)?conv_root/kernel",
      "conv": r"(.*/)?block\d+/unit\d+/conv\d/kernel",
      "shortcut": r"(.*/)?block\d+/unit\d+/conv_proj/kernel",
      "head": r"(img/)?head/kernel",
    },
  )
)

# Kauldron's ViT.
register(
  Family(
    name="kauldron",
    roles={
      "ff": r"(.*/)?layers_\d+/mlp/dense_(in|out)/kernel",
      **_attention_roles(r"(.*/)?layers_\d+/attention/"),
      "stem": r"(.*/)?patchifier/kernel",
      "head": r"classifier_head/kernel",
    },
  )
)

# jimm (jax-image-models): its blocks are always stacked, on axis 0.
register(
  Family(
    name="jimm",
    roles={
      "ff": r"(.*/)?((layers|map_head)/mlp/layers/\d+|encoder/layers/(gate|up|down))/kernel",
      **_attention_roles(r"(.*/)?(layers|map_head)/attn/"),
      "stem": r"(.*/)?patch_embeddings/kernel",
      "head": r"classifier/kernel",
    },
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
register(
  Family(
    name="timm_vit",
    roles={**_TIMM_BLOCK, "head": r"head/kernel", "qkv": r"(.*/)?\w*qkv\w*/kernel"},
  )
)

register(
  Family(
    name="timm_swin",
    roles={
      **_TIMM_BLOCK,
      "merge": r"(.*/)?layers_\d+/downsample/reduction/kernel",
      "head": r"head/fc/kernel",
    },
  )
)

register(
  Family(
    name="timm_resnet",
    roles={
      "stem": r"conv1/kernel",
      "conv": r"(.*/)?layer\d+_\d+/conv\d/kernel",
      "shortcut": r"(.*/)?layer\d+_\d+/downsample_conv/kernel",
      "head": r"fc/kernel",
    },
  )
)
