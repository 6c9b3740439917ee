"""Places in vision models, by the names of timm, big_vision, Kauldron and jimm."""

import functools
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import nm_sparsity_jax as nms
from nm_sparsity_jax import flops, roles, trees
from nm_sparsity_jax.models import resnet, swin, vit
from nm_sparsity_jax.plan import places

PHASES = nms.Phases(total=8, dense=2, finetune=2)


def linear(pattern="1:4"):
  return nms.recipe("mdgf_linear", pattern=pattern, phases=PHASES)


def tree(shapes):
  """A tree of shapes from 'a/b/kernel' -> shape."""
  out: dict = {}
  for path, shape in shapes.items():
    *folders, last = path.split("/")
    at = out
    for name in folders:
      at = at.setdefault(name, {})
    at[last] = jax.ShapeDtypeStruct(shape, "float32")
  return out


# Kernels of each project: path -> (shape, role, contraction axis). D = 32, 2 heads, MLP 64, and of
# those that are stacked 3 layers. Taken from the trees that the projects' own classes make.
TIMM_VIT = {
  "patch_embed/proj/kernel": ((4, 4, 3, 32), "stem", 2),
  **{f"blocks_0/attn/{name}/kernel": ((32, 32), name, 0) for name in "qkv"},
  "blocks_0/attn/proj/kernel": ((32, 32), "o", 0),
  "blocks_0/mlp/fc1/kernel": ((32, 64), "ff", 0),
  "blocks_0/mlp/fc2/kernel": ((64, 32), "ff", 0),
  "head/kernel": ((32, 10), "head", 0),
}
STACKED = {
  "blocks/attn/q/kernel": ((3, 32, 32), "q", 1),
  "blocks/attn/proj/kernel": ((3, 32, 32), "o", 1),
  "blocks/mlp/fc1/kernel": ((3, 32, 64), "ff", 1),
}
SWIN = {
  "patch_embed/proj/kernel": ((4, 4, 3, 32), "stem", 2),
  **{f"layers_0/blocks_1/attn/{name}/kernel": ((32, 32), name, 0) for name in "qkv"},
  "layers_0/blocks_1/attn/proj/kernel": ((32, 32), "o", 0),
  "layers_0/blocks_1/attn/cpb_mlp_0/kernel": ((2, 512), None, 0),
  "layers_0/blocks_1/attn/cpb_mlp_2/kernel": ((512, 4), None, 0),
  "layers_0/blocks_1/mlp/fc1/kernel": ((32, 128), "ff", 0),
  "layers_1/downsample/reduction/kernel": ((128, 64), "merge", 0),
  "head/fc/kernel": ((64, 10), "head", 0),
}
RESNET = {
  "conv1/kernel": ((7, 7, 3, 64), "stem", 2),
  "layer1_0/conv1/kernel": ((1, 1, 64, 64), "conv", 2),
  "layer1_0/conv2/kernel": ((3, 3, 64, 64), "conv", 2),
  "layer1_0/conv3/kernel": ((1, 1, 64, 256), "conv", 2),
  "layer1_0/downsample_conv/kernel": ((1, 1, 64, 256), "shortcut", 2),
  "fc/kernel": ((2048, 10), "head", 0),
}
FLAX = "MultiHeadDotProductAttention_0"
BIG_VISION = {
  "embedding/kernel": ((4, 4, 3, 32), "stem", 2),
  f"Transformer/encoderblock_0/{FLAX}/query/kernel": ((32, 2, 16), "q", 0),
  f"Transformer/encoderblock_0/{FLAX}/out/kernel": ((2, 16, 32), "o", (0, 1)),
  "Transformer/encoderblock_0/MlpBlock_0/Dense_0/kernel": ((32, 64), "ff", 0),
  "MAPHead_0/MlpBlock_0/Dense_1/kernel": ((64, 32), "ff", 0),
  "pre_logits/kernel": ((32, 32), None, 0),
  "head/kernel": ((32, 10), "head", 0),
}
BIG_VISION_SCANNED = {
  f"Transformer/encoderblock/{FLAX}/key/kernel": ((3, 32, 2, 16), "k", 1),
  f"Transformer/encoderblock/{FLAX}/out/kernel": ((3, 2, 16, 32), "o", (1, 2)),
  "Transformer/encoderblock/MlpBlock_0/Dense_1/kernel": ((3, 64, 32), "ff", 1),
}
BIG_VISION_RESNET = {
  "root_block/conv_root/kernel": ((7, 7, 3, 64), "stem", 2),
  "block1/unit1/conv2/kernel": ((3, 3, 64, 64), "conv", 2),
  "block1/unit01/conv_proj/kernel": ((1, 1, 64, 256), "shortcut", 2),
  "head/kernel": ((2048, 10), "head", 0),
}
KAULDRON = {
  "encoder/embedding/patchifier/kernel": ((4, 4, 3, 32), "stem", 2),
  "encoder/layers_0/attention/value/kernel": ((32, 2, 16), "v", 0),
  "encoder/layers_0/attention/out/kernel": ((2, 16, 32), "o", (0, 1)),
  "encoder/layers_0/mlp/dense_in/kernel": ((32, 64), "ff", 0),
  "encoder/layers_0/mlp/dense_out/kernel": ((64, 32), "ff", 0),
  "pre_logits/kernel": ((32, 32), None, 0),
  "classifier_head/kernel": ((32, 10), "head", 0),
}
JIMM = {
  "encoder/patch_embeddings/kernel": ((4, 4, 3, 32), "stem", 2),
  "encoder/layers/attn/query/kernel": ((3, 32, 2, 16), "q", 1),
  "encoder/layers/attn/out/kernel": ((3, 2, 16, 32), "o", (1, 2)),
  "encoder/layers/mlp/layers/0/kernel": ((3, 32, 64), "ff", 1),
  "encoder/layers/mlp/layers/3/kernel": ((3, 64, 32), "ff", 1),
  "encoder/layers/gate/kernel": ((3, 32, 64), "ff", 1),
  "encoder/map_head/attn/key/kernel": ((32, 2, 16), "k", 0),
  "encoder/map_head/mlp/layers/2/kernel": ((64, 32), "ff", 0),
  "classifier/kernel": ((32, 10), "head", 0),
}
PROJECTS = {
  "timm's ViT": TIMM_VIT, "the same, stacked": STACKED, "timm's SwinV2": SWIN,
  "timm's ResNet": RESNET, "big_vision's ViT": BIG_VISION, "the same, scanned": BIG_VISION_SCANNED,
  "big_vision's ResNet": BIG_VISION_RESNET, "Kauldron's ViT": KAULDRON, "jimm": JIMM,
}  # fmt: skip


@pytest.mark.parametrize("project", PROJECTS)
def test_each_project_has_its_roles_and_axes(project):
  kernels = PROJECTS[project]
  assert {path: roles.role_of(path) for path in kernels} == {
    path: role for path, (_, role, _) in kernels.items()
  }
  rules = nms.Rules({".*/kernel|conv1/kernel": linear("1:1")})
  for path, (shape, _, axis) in kernels.items():
    found = rules.place(path, shape)
    assert not isinstance(found, str) and found
    assert found.axes == (axis if isinstance(axis, tuple) else (axis,)), path


@pytest.mark.parametrize("project", PROJECTS)
def test_a_role_names_its_kernels_and_what_no_role_names_stays_dense(project):
  kernels = PROJECTS[project]
  params = tree({path: shape for path, (shape, _, _) in kernels.items()})
  for role in roles.roles_of([*kernels]):
    assigned, failed, idle = nms.Rules({role: linear("1:1")}).examine(params)
    assert not failed and not idle
    wanted = {path for path, (_, its, _) in kernels.items() if its == role}
    assert set(assigned.places) == wanted and set(assigned.dense) == {*kernels} - wanted


NETWORKS = [
  (module, network, shape, name)
  for module, network, shape in (
    (vit, vit.ViT, flops.ViTShape),
    (swin, swin.Swin, flops.SwinShape),
    (resnet, resnet.ResNet, flops.ResNetShape),
  )
  for name in module.CONFIGS
]


def shapes_of(network):
  images = jnp.zeros((1, network.config.image_size, network.config.image_size, 3))
  make = functools.partial(network.init, train=False)
  return dict(trees.flatten(jax.eval_shape(make, jax.random.key(0), images)["params"]))


@pytest.mark.parametrize("module, network, shape, name", NETWORKS, ids=[n for *_, n in NETWORKS])
def test_the_networks_here_have_a_role_and_an_operation_for_each_kernel(
  module, network, shape, name
):
  found = shapes_of(network(module.config(name)))
  ops = {op.name: op for op in shape.of(module.config(name)).ops()}
  assert sum(op.params for op in ops.values()) == sum(x.size for x in found.values())
  weights: dict = {}
  for path, leaf in found.items():
    named = {role for family in roles.families().values() if (role := family.role(path))}
    is_kernel = path.endswith("/kernel") and "cpb_mlp" not in path
    assert len(named) == is_kernel, path
    if is_kernel:
      op = ops[roles.op_of(path, ops)]
      assert {op.role} == named and roles.axis_of(path, leaf.ndim) is not None
      weights[op.name] = weights.get(op.name, 0) + leaf.size
  assert weights == {op.name: op.params for op in ops.values() if op.prunable}


def test_blocks_that_are_stacked_need_no_axes():
  found = shapes_of(vit.ViT(vit.config("vit_test", scan=True)))
  kernels = {
    path: x.ndim for path, x in found.items() if re.match("blocks/(attn|mlp)/.*kernel", path)
  }
  assert len(kernels) == 6
  assert {roles.axis_of(path, rank) for path, rank in kernels.items()} == {1}


def test_words_of_vision_may_narrow_the_roles_of_a_family_of_ones_own(monkeypatch):
  monkeypatch.setattr(roles.registry, "_families", dict(roles.families()))
  roles.register(
    roles.Family(name="mine", roles={"mix": r"(.*/)?mix/kernel"}, narrow={"head": r"(.*/)?out/.*"})
  )
  rules = nms.Rules({"head/mix": linear()})
  assert rules.find("out/mix/kernel") and not rules.find("mix/kernel")
  assert nms.Rules({"head": linear()}).find("head/kernel")
  own = nms.Rules({"head": linear()}, roles={"head": "lm/kernel"})
  assert own.find("lm/kernel") and not own.find("head/kernel")


def test_a_convolution_is_grouped_along_its_input_channels_at_one_offset():
  kernel = jax.random.normal(jax.random.key(0), (3, 3, 8, 5))
  place = nms.Rules({"conv": linear("2:8")}).place("layer2_0/conv2/kernel", kernel.shape)
  mask = np.asarray(place.mask(kernel, 7))
  assert (mask.sum(2) == 2).all() and mask.sum() == 3 * 3 * 5 * 2


def test_what_cannot_be_is_told_by_its_setting():
  """1:8 on three channels, and a role that the network lacks."""
  vit = tree({path: shape for path, (shape, _, _) in TIMM_VIT.items()})
  with pytest.raises(ValueError) as error:
    nms.Rules({"stem": linear("1:8")}).assign(vit)
  said = str(error.value)
  assert said.startswith(
    "'patch_embed/proj/kernel': axis -2 has length 3 (shape (4, 4, 3, 32)), no"
  )
  assert "no multiple of 8, so 1:8 cannot be applied" in said and "INDIVISIBLE" in said
  has = "The network has the roles ff, q, k, v, o, stem, head."
  with pytest.raises(ValueError, match="match no parameter.*'conv'") as error:
    nms.Rules({"conv": linear()}).assign(vit)
  assert has in str(error.value) and "in SPARSITY_RULES" in str(error.value)
  found = types.SimpleNamespace(errors=[])
  places.assign(found, nms.Rules({"conv": linear()}), vit)
  assert f"match no parameter: 'conv'. {has} A place in SPARSITY_RULES" in found.errors[0]


def test_a_plan_shows_the_roles():
  shapes = {path: shape for path, (shape, _, _) in {**SWIN, **RESNET}.items()}
  assigned = nms.Rules({r"(.*/)?kernel": linear("1:1")}).examine(tree(shapes)).assignment
  shown = {row["path"]: row["role"] for row in places.kernels(assigned)["sparse"]}
  assert shown["layers_1/downsample/reduction/kernel"] == "merge"
  assert shown["layers_0/blocks_1/attn/cpb_mlp_0/kernel"] is None
  # Like kernels share a row.
  words = {word for role in shown.values() if role for word in role.split(",")}
  assert {"stem", "conv", "shortcut", "head", "merge"} <= words


# --- a fused kernel -----------------------------------------------------------------------------

FUSED = "blocks_0/attn/qkv/kernel"


@pytest.mark.parametrize("place", ["qk", "q", "k", "v"])
def test_no_part_of_a_fused_kernel_can_be_named(place):
  params = tree({FUSED: (32, 96), "blocks_0/mlp/fc1/kernel": (32, 64)})
  rules = nms.Rules({"ff": linear(), place: linear()})
  with pytest.raises(
    ValueError, match=f"'{FUSED}' holds q, k and v .* the place '{place}' .* split"
  ):
    rules.assign(params)
  assert list(rules.examine(params).failed) == [FUSED]
  whole = nms.Rules({"ff": linear(), "qkv": linear()}).assign(params)
  assert whole.places[FUSED].axes == (0,) and roles.role_of(FUSED) == "qkv"
  assert list(nms.Rules({"ff": linear()}).assign(params).places) == ["blocks_0/mlp/fc1/kernel"]
  own = nms.Rules({"ff": linear(), place: linear()}, roles={place: "(.*/)?fc1/kernel", "ff": FUSED})
  assert set(own.assign(params).places) == {FUSED, "blocks_0/mlp/fc1/kernel"}


effective = jax.jit(nms.sparsify, static_argnums=1)


@given(
  seed=st.integers(0, 2**31 - 1),
  pattern=st.sampled_from(["2:4", "1:8"]),
  name=st.sampled_from(["mdgf_linear", "sdgf_stepwise"]),
  step=st.integers(0, 7),
)
def test_qkv_on_a_fused_kernel_equals_three(seed, pattern, name, step):
  rules = nms.Rules({"qkv": nms.recipe(name, pattern=pattern, phases=PHASES)})
  rng = np.random.default_rng(seed)
  # Few values, so that ties are frequent.
  parts = {w: rng.integers(-3, 4, (16, 3)).astype(np.float32) for w in "qkv"}
  params = {
    "apart": {"blocks_0": {"attn": {w: {"kernel": x} for w, x in parts.items()}}},
    "whole": {"attn": {"qkv": {"kernel": np.concatenate([*parts.values()], axis=1)}}},
  }
  found = effective(params, rules, np.int32(step))
  joined = [found["apart"]["blocks_0"]["attn"][w]["kernel"] for w in "qkv"]
  np.testing.assert_array_equal(
    found["whole"]["attn"]["qkv"]["kernel"], np.concatenate(joined, axis=1)
  )
