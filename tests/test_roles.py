"""Places by name: what each family calls its kernels, and what others read of it."""

import jax
import jax.numpy as jnp
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
  "Keras and keras-hub": {
    **{role: f"multi_head_attention/{x} sequential_1/grouped_query_attention_2/{x} "
             f"transformer_encoder/self_attention_layer/{x} transformer_layer_0/self_attention/{x} "
             f"transformer_decoder_1/cross_attention/{x} decoder_block_0/attention/{x} "
             f"vit_encoder/transformer_block_1/mha/{x}"
       for role, x in {**ATTENTION, "o": "attention_output"}.items()},
    "ff": "transformer_layer_0/feedforward_gate_dense decoder_block_0/ffw_linear "
          "vit_encoder/transformer_block_1/mlp/dense_1",
    "": "dense_1 conv2d my_own/attention_output pooled_dense"},
  "MaxText": {
    "ff": "decoder/layers/mlp/wi_0 decoder/layers_3/mlp/wo decoder/layers/mlp_global/wi_1",
    "qkv": "decoder/layers/self_attention/qkv_proj", "": "decoder/logits_dense",
    **{role: f"decoder/layers/self_attention/{name} decoder/layers/self_attention_local/{name}"
       for role, name in ATTENTION.items()}},
  "Gemma": {
    "q": "layer_0/attn/q_einsum/w", "k": "layer_1/attn/k_einsum/w",
    "qkv": "layer_0/attn/kv_einsum/w layer_0/attn/qkv_einsum/w",
    "o": "layer_11/attn/attn_vec_einsum/w",
    "ff": "layer_0/mlp/gating_einsum layer_0/mlp2/linear layer_0/mlp/linear/w",
    "": "layer_0/laurel/linear_left/w layer_0/mlp/router_logits/w"},
  "Equinox": {
    **{role: f"attention/{x}_proj/weight" for role, x in (ATTENTION | {"o": "output"}).items()},
    "ff": "blocks/1/mlp/layers/0/weight", "": "norm/weight embedding/weight layers/0/weight"},
  "haliax": {"ff": "block/mlp/layers/0/weight/0", "": "out/weight/0"},
  "haiku": {
    **{role: f"language_model/transformer/multi_head_attention_1/{x}/w"
       for role, x in (ATTENTION | {"o": "linear"}).items()},
    "ff": "language_model/transformer/linear_3/w net/~/mlp/~/linear_0/w",
    "conv": "res_net18/~/block_group_0/~/block_1/~/conv_0/w", "stem": "res_net18/~/initial_conv/w",
    "shortcut": "res_net18/~/block_group_1/~/block_0/~/shortcut_conv/w",
    "head": "language_model/linear/w res_net18/~/logits/w", "": "linear/w lstm/linear/w"},
  "Tunix": {
    "q": "layers/0/attn/q_proj/w layers/1/attn/q_einsum/w", "k": "layers/0/attn/k_proj/w",
    "v": "layers/0/attn/v_proj/w", "o": "layers/0/attn/o_proj/w layers/0/attn/attn_vec_einsum/w",
    "qkv": "layers/0/attn/kv_einsum/w layers/0/attn/qkv_einsum/w",
    "ff": "layers/0/mlp/up_proj layers/1/mlp/gate_proj layers/0/moe/gating_einsum",
    "": "lm_head/w layers/0/attn/q_norm/w layers/0/mlp/router layers/0/mlp/up_proj/kernel_lora_a"},
  "NNX": {role: f"attn/{x} layers/0/self_attention/{x} blocks/1/cross_attn/{x} mha/{x}"
          for role, x in ATTENTION.items()},
}  # fmt: skip
LEAVES = "/weight", "/weight/0", "/w", "_einsum", "layer_0/mlp2/linear"  # not kernel


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
    match = nms.Rules({word: RECIPE}).match
    assert {path: bool(match(path)) for path in kernels} == {
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
    ("decoder/layer_0/cross_multihead_attention", "cross"),
    ("decoder/layer_0/encdec_attention", "cross"),
    ("decoder/layer_0/memory_attention", None),
    ("layers/0/self_attn", "self"),
    ("multi_head_attention_1", None),
  ],
)
def test_self_and_cross_name_what_is_surely_one_of_them(attention, kind):
  match = lambda place: nms.Rules({place: RECIPE}).match(f"{attention}/query/kernel")
  assert [word for word in ("self", "cross") if match(f"{word}/q")] == ([kind] if kind else [])


def test_the_decoder_of_gemma_is_no_encoder():
  match = nms.Rules({"decoder/ff": RECIPE}).match
  paths = [f"{part}layer_0/mlp/linear/w" for part in ("", "decoder/", "encoder/")]
  assert [bool(match(path)) for path in paths] == [True, True, False]


def test_a_family_from_outside_adds_to_the_vocabulary(monkeypatch):
  monkeypatch.setattr(roles, "_families", {**roles._families})
  paths = ("block_0/fc1/kernel", "block_0/mix/kernel", "block_7/fc1/kernel", "mlp/wi/kernel")
  named = lambda place: [p for p in paths if nms.Rules({place: RECIPE}).match(p)]
  assert named("ff") == [paths[3]] and named("mix") == []
  own = {"ff": r"(.*/)?fc\d/kernel", "mix": r"(.*/)?mix/kernel"}
  # A word that narrows here is a role of vision models, too.
  roles.register("own", own, {"head": r"(.*/)?block_7/.*"})
  assert named("ff") == [paths[i] for i in (0, 2, 3)] and named("mix") == [paths[1]]
  assert named("head/ff") == [paths[2]] and nms.Rules({"head": RECIPE}).match("head/kernel")
  layouts = {r"(.*/)?fc1/kernel": "iio io"}
  roles.register("own", own, layouts=layouts)
  for shape, axis in (((2, 4, 8), (0, 1)), ((8, 4), 0)):
    shapes = {paths[0]: shape, "scale": (8,)}
    params = nested({path: jax.ShapeDtypeStruct(x, "float32") for path, x in shapes.items()})
    assert nms.Rules({"ff": RECIPE}).assign(params).sites[paths[0]].axis == axis
  for layout in ("oo", "IO", "sio"):
    with pytest.raises(ValueError, match="layout"):
      roles.register("own", own, layouts={"b/kernel": layout})
  roles.register("own", {"ff": "b/kernel"})  # a cell that ran again
  assert "mix" not in roles.regexes() and roles.role_of("b/kernel") == "ff"


# Of MaxText's layers: embed 32, 4 heads of 8, mlp 64.
MAXTEXT = {
  "self_attention/query": ((32, 4, 8), 0), "self_attention/out": ((4, 8, 32), (0, 1)),
  "self_attention_local/qkv_proj": ((32, 8, 8), 0),
  "mlp/wi_0": ((32, 64), 0), "mlp/wo": ((64, 32), 0), "mlp_global/wi_1": ((32, 64), 0),
}  # fmt: skip


@pytest.mark.parametrize("layers", [2, 32, 64])
@pytest.mark.parametrize("scan_axis", [None, 0, 1])
def test_maxtext_kernels_have_the_axes_of_their_layers(scan_axis, layers):
  """Each is the axis of the one layer, where the scan put the layers before it or into it."""
  shapes, wanted = {}, {}
  for name, (shape, axis) in MAXTEXT.items():
    path = f"decoder/layers{'' if scan_axis is not None else '_1'}/{name}/kernel"
    axes = [axis] if isinstance(axis, int) else [*axis]
    if scan_axis is not None:
      shape = (*shape[:scan_axis], layers, *shape[scan_axis:])
      axes = [a + (a >= scan_axis) for a in axes]
    shapes[path], wanted[path] = jax.ShapeDtypeStruct(shape, "float32"), tuple(axes)
  norm = {0: (layers, 32), 1: (32, layers), None: (32,)}[scan_axis]
  folder = next(iter(shapes)).split("/self_attention")[0]
  shapes[f"{folder}/norm/scale"] = jax.ShapeDtypeStruct(norm, "float32")
  rules = nms.Rules(dict.fromkeys(("ff", "q", "qkv", "o"), RECIPE), optional=("qkv",))
  sites = rules.assign(nested(shapes)).sites
  assert {path: site.groups.axes for path, site in sites.items()} == wanted


def test_a_trace_agrees_with_a_layout_across_the_layers():
  """The heads and their features lie around the layers; equal axes add no text to a checkpoint."""
  path = "decoder/layers/self_attention/out/kernel"
  shapes = {path: (4, 2, 8, 32), "decoder/layers/norm/scale": (32, 2)}
  params = nested({name: jax.ShapeDtypeStruct(x, "float32") for name, x in shapes.items()})
  rules = nms.Rules({"o": RECIPE})

  def forward(params, x):
    scale, w = jax.tree.leaves(params)
    return jnp.einsum("bhk,hlke->ble", x, w) * scale.T[None]

  found = rules.for_model(forward, params, jax.ShapeDtypeStruct((3, 4, 8), "float32"))
  assert found == rules and found.assign(params).sites[path].axis == (0, 2)
