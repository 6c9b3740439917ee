"""Places by name: what each family calls its kernels, and what others read of it."""

import jax
import pytest

import nm_sparsity_jax as nms
from nm_sparsity_jax.core.trees import nested
from nm_sparsity_jax.training import roles

RECIPE = nms.recipe("sr_ste", pattern="1:4", phases=nms.Phases(total=8))

# The kernels of each project by role, under "" those that have none. Taken from the trees that the
# projects' own classes make.
ATTENTION = {"q": "query", "k": "key", "v": "value", "o": "out"}
FLAX, FLAX_ATTENTION = "Transformer/encoderblock_1/", "MultiHeadDotProductAttention"
PROJECTS = {
  "T5X": {
    "ff": "encoder/layers_0/mlp/wi decoder/layers_0/mlp/wi_0 decoder/decoder/mlp/wo",
    **{role: f"encoder/layers_0/attention/{name} decoder/decoder/self_attention/{name} "
             f"decoder/layers_0/encoder_decoder_attention/{name}"
       for role, name in ATTENTION.items()},
    "": "decoder/logits_dense my_mlp/wi encoder/layers_0/mlp/extra"},
  "flax's ViT": {
    "ff": f"{FLAX}MlpBlock_3/Dense_0", "stem": "embedding", "head": "head", "": "pre_logits",
    **{role: f"{FLAX}MultiHeadDotProductAttention_0/{x}" for role, x in ATTENTION.items()}},
  "flax's WMT": {
    "ff": "encoder/encoderblock_1/MlpBlock_0/Dense_0 "
          "decoder/encoderdecoderblock_1/MlpBlock_0/Dense_1",
    **{role: f"encoder/encoderblock_1/{FLAX_ATTENTION}_0/{x} "
             f"decoder/encoderdecoderblock_1/{FLAX_ATTENTION}_0/{x} "
             f"decoder/encoderdecoderblock_1/{FLAX_ATTENTION}_1/{x}"
       for role, x in ATTENTION.items()},
    "": "decoder/logitdense"},
  "big_vision's ResNet": {
    "stem": "root_block/conv_root", "conv": "block1/unit1/conv2",
    "shortcut": "block1/unit01/conv_proj", "head": "head"},
  "timm's ViT": {
    **{role: f"blocks_0/attn/{role}" for role in "qkv"}, "o": "blocks_0/attn/proj",
    "qkv": "blocks_1/attn/qkv", "ff": "blocks_0/mlp/fc1 blocks_0/mlp/fc2",
    "stem": "patch_embed/proj", "head": "head"},
  "timm's SwinV2": {
    "q": "layers_0/blocks_1/attn/q", "ff": "layers_0/blocks_1/mlp/fc1", "head": "head/fc",
    "merge": "layers_1/downsample/reduction", "": "layers_0/blocks_1/attn/cpb_mlp_0"},
  "timm's ResNet": {
    "stem": "conv1", "conv": "layer1_0/conv1 layer1_0/conv3", "head": "fc",
    "shortcut": "layer1_0/downsample_conv"},
  "Kauldron's ViT": {
    **{role: f"encoder/layers_0/attention/{x}" for role, x in ATTENTION.items()},
    "stem": "encoder/embedding/patchifier", "head": "classifier_head", "": "pre_logits",
    "ff": "encoder/layers_0/mlp/dense_in encoder/layers_0/mlp/dense_out"},
  "jimm": {
    **{role: f"encoder/layers/attn/{x} encoder/map_head/attn/{x}"
       for role, x in ATTENTION.items()},
    "stem": "encoder/patch_embeddings", "head": "classifier",
    "ff": "encoder/layers/mlp/layers/0 encoder/layers/gate encoder/map_head/mlp/layers/2"},
}  # fmt: skip


def kernels_of(project):
  """path -> its role."""
  table = PROJECTS[project]
  return {f"{path}/kernel": role for role, paths in table.items() for path in paths.split()}


@pytest.mark.parametrize("project", PROJECTS)
def test_a_role_names_its_kernels_and_what_no_role_names_stays_dense(project):
  kernels = kernels_of(project)
  assert {path: roles.role_of(path) or "" for path in kernels} == kernels
  assert not roles.role_of(next(iter(kernels)).replace("kernel", "bias"))
  words = {word: (word,) for word in PROJECTS[project] if word}
  words |= {"qk": ("q", "k"), "qkv": ("q", "k", "v", "qkv")}
  for word, those in words.items():
    find = nms.Rules({word: RECIPE}).find
    assert {path: bool(find(path)) for path in kernels} == {
      path: role in those for path, role in kernels.items()
    }


@pytest.mark.parametrize(
  "attention, kind",
  [
    ("decoder/layers_0/self_attention", "self"),
    ("encoder/layers_0/attention", "self"),
    ("decoder/layers_0/encoder_decoder_attention", "cross"),
    ("decoder/layers_0/cross_attention_2", "cross"),
    (f"{FLAX}{FLAX_ATTENTION}_0", "self"),
    (f"decoder/encoderdecoderblock_11/{FLAX_ATTENTION}_0", "self"),
    (f"decoder/encoderdecoderblock_11/{FLAX_ATTENTION}_1", "cross"),
    # The second of a block, in a program that we do not know.
    (f"decoder/block_0/{FLAX_ATTENTION}_1", None),
    ("decoder/block_0/MultiHeadSelfAttention_1", "self"),
    ("decoder/block_0/CrossAttention_0", "cross"),
  ],
)
def test_self_and_cross_name_what_is_surely_one_of_them(attention, kind):
  find = lambda place: nms.Rules({place: RECIPE}).find(f"{attention}/query/kernel")
  assert [word for word in ("self", "cross") if find(f"{word}/q")] == ([kind] if kind else [])


def test_a_family_from_outside_adds_to_the_vocabulary(monkeypatch):
  monkeypatch.setattr(roles, "_families", {**roles._families})
  paths = ("block_0/fc1/kernel", "block_0/mix/kernel", "block_7/fc1/kernel", "mlp/wi/kernel")
  named = lambda place: [p for p in paths if nms.Rules({place: RECIPE}).find(p)]
  assert named("ff") == [paths[3]] and named("mix") == []
  own = {"ff": r"(.*/)?fc\d/kernel", "mix": r"(.*/)?mix/kernel"}
  # A word that narrows here is a role of vision models, too.
  roles.register("own", own, {"head": r"(.*/)?block_7/.*"})
  assert named("ff") == [paths[i] for i in (0, 2, 3)] and named("mix") == [paths[1]]
  assert named("head/ff") == [paths[2]] and nms.Rules({"head": RECIPE}).find("head/kernel")
  layouts = {r"(.*/)?fc1/kernel": "iio -io"}
  roles.register("own", own, layouts=layouts)
  for shape, axis in (((2, 4, 8), (0, 1)), ((8, 4), 0)):
    params = nested({paths[0]: jax.ShapeDtypeStruct(shape, "float32")})
    assert nms.Rules({"ff": RECIPE}).assign(params).places[paths[0]].axis == axis
  roles.register("own", {"ff": "b/kernel"})  # a cell that ran again
  assert "mix" not in roles.regexes() and roles.role_of("b/kernel") == "ff"
