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
FLAX = "Transformer/encoderblock_1/"
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
  "Tunix": {
    "q": "layers/0/attn/q_proj/w layers/1/attn/q_einsum/w", "k": "layers/0/attn/k_proj/w",
    "v": "layers/0/attn/v_proj/w", "o": "layers/0/attn/o_proj/w layers/0/attn/attn_vec_einsum/w",
    "qkv": "layers/0/attn/kv_einsum/w layers/0/attn/qkv_einsum/w",
    "ff": "layers/0/mlp/up_proj layers/1/mlp/gate_proj layers/0/moe/gating_einsum",
    "": "lm_head/w layers/0/attn/q_norm/w layers/0/mlp/router layers/0/mlp/up_proj/kernel_lora_a"},
  "NNX": {role: f"attn/{x} layers/0/self_attention/{x} blocks/1/cross_attn/{x} mha/{x}"
          for role, x in ATTENTION.items()},
}  # fmt: skip


LEAVES = "/w", "_einsum", "/linear"  # not kernel, as elsewhere


def kernels_of(project):
  """path -> its role."""
  table = PROJECTS[project]
  name = lambda path: path if path.endswith(LEAVES) else f"{path}/kernel"
  return {name(path): role for role, paths in table.items() for path in paths.split()}


@pytest.mark.parametrize("project", PROJECTS)
def test_a_role_names_its_kernels_and_what_no_role_names_stays_dense(project):
  kernels = kernels_of(project)
  assert {path: roles.role_of(path) or "" for path in kernels} == kernels
  assert not roles.role_of(next(iter(kernels)).rpartition("/")[0] + "/bias")
  words = {word: (word,) for word in PROJECTS[project] if word}
  words |= {"qk": ("q", "k"), "qkv": ("q", "k", "v", "qkv")}
  for word, those in words.items():
    find = nms.Rules({word: RECIPE}).find
    assert {path: bool(find(path)) for path in kernels} == {
      path: role in those for path, role in kernels.items()
    }


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
