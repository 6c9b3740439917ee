"""Places by name: what each family calls its kernels, and what others read of it."""

import doctest
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nm_sparsity_jax as nms
from nm_sparsity_jax.core import trees
from nm_sparsity_jax.models import resnet, swin, vit
from nm_sparsity_jax.training import flops, roles

PHASES = nms.Phases(total=8, dense=2, finetune=2)
RECIPE = nms.recipe("mdgf_linear", pattern="1:4", phases=PHASES)


@pytest.fixture
def families():
  """The vocabulary, put back afterwards."""
  before = roles.families()
  yield
  roles.registry._families.clear()
  roles.registry._families.update(before)


def tree(shapes):
  """A tree of shapes from 'a/b/kernel' -> shape."""
  return trees.nested({path: jax.ShapeDtypeStruct(s, "float32") for path, s in shapes.items()})


# --- what families know ---------------------------------------------------------------------------

# The kernels of each project, by role; under "" those that have none. Taken from the trees that the
# projects' own classes make.
_ATTENTION = {"q": "{}/query/kernel", "k": "{}/key/kernel", "v": "{}/value/kernel"}
_ATTENTION |= {"o": "{}/out/kernel"}


def attention(where):
  return {role: [path.format(where)] for role, path in _ATTENTION.items()}


def t5_stack(layers, decoder):
  stack = f"{decoder}/{layers}"
  own = {"ff": [f"{stack}/mlp/{name}/kernel" for name in ("wi", "wi_0", "wo")]}
  kinds = (
    ("self_attention", "encoder_decoder_attention") if decoder == "decoder" else ("attention",)
  )
  for kind in kinds:
    for role, paths in attention(f"{stack}/{kind}").items():
      own[role] = own.get(role, []) + paths
  return own


def both(one, other):
  return {role: one.get(role, []) + other.get(role, []) for role in {**one, **other}}


FLAX = "MultiHeadDotProductAttention_0"
TIMM = {role: [f"blocks_0/attn/{role}/kernel"] for role in "qkv"} | {
  "o": ["blocks_0/attn/proj/kernel"],
  "ff": ["blocks_0/mlp/fc1/kernel", "blocks_0/mlp/fc2/kernel"],
  "stem": ["patch_embed/proj/kernel"],
}
PROJECTS = {
  "T5X": both(t5_stack("layers_0", "encoder"), t5_stack("layers_0", "decoder"))
  | {"": ["token_embedder/embedding", "decoder/logits_dense/kernel", "my_mlp/wi/kernel",
          "encoder/layers_0/mlp/wi/bias", "encoder/layers_0/mlp/extra/kernel"]},
  "T5X, scanned": both(t5_stack("encoder", "encoder"), t5_stack("decoder", "decoder")),
  "flax's ViT": attention(f"Transformer/encoderblock_1/{FLAX}")
  | {"ff": ["Transformer/encoderblock_1/MlpBlock_3/Dense_0/kernel"],
     "stem": ["embedding/kernel"], "head": ["head/kernel"],
     "": ["pre_logits/kernel", f"Transformer/encoderblock_0/{FLAX}/out/bias"]},
  "big_vision's ResNet": {
    "stem": ["root_block/conv_root/kernel"], "conv": ["block1/unit1/conv2/kernel"],
    "shortcut": ["block1/unit01/conv_proj/kernel"], "head": ["head/kernel"]},
  "timm's ViT": TIMM | {"head": ["head/kernel"]},
  "timm's SwinV2": {
    role: [p.replace("blocks_0", "layers_0/blocks_1") for p in paths]
    for role, paths in TIMM.items()}
  | {"merge": ["layers_1/downsample/reduction/kernel"], "head": ["head/fc/kernel"],
     "": ["layers_0/blocks_1/attn/cpb_mlp_0/kernel", "layers_0/blocks_1/attn/cpb_mlp_2/kernel"]},
  "timm's ResNet": {
    "stem": ["conv1/kernel"], "conv": ["layer1_0/conv1/kernel", "layer1_0/conv3/kernel"],
    "shortcut": ["layer1_0/downsample_conv/kernel"], "head": ["fc/kernel"]},
  "Kauldron's ViT": attention("encoder/layers_0/attention")
  | {"stem": ["encoder/embedding/patchifier/kernel"], "head": ["classifier_head/kernel"],
     "ff": [f"encoder/layers_0/mlp/dense_{x}/kernel" for x in ("in", "out")],
     "": ["pre_logits/kernel"]},
  "jimm": both(attention("encoder/layers/attn"), attention("encoder/map_head/attn"))
  | {"stem": ["encoder/patch_embeddings/kernel"], "head": ["classifier/kernel"],
     "ff": ["encoder/layers/mlp/layers/0/kernel", "encoder/layers/gate/kernel",
            "encoder/map_head/mlp/layers/2/kernel"]},
}  # fmt: skip


@pytest.mark.parametrize("project", PROJECTS)
def test_a_role_names_its_kernels_and_what_no_role_names_stays_dense(project):
  kernels = {path: role for role, paths in PROJECTS[project].items() for path in paths}
  for path, role in kernels.items():
    assert roles.role_of(path) == (role or None), path
  words = {word: (word,) for word in PROJECTS[project] if word} | dict(roles.COMPOSITES)
  for word, those in words.items():
    find = nms.Rules({word: RECIPE}).find
    wanted = {path for path, role in kernels.items() if role in those}
    assert {path for path in kernels if find(path)} == wanted
    # The same under the collection's name, as in variables["params"] of a whole state.
    if project.startswith("T5X"):
      assert all(bool(find(f"params/{path}")) == (path in wanted) for path in kernels)


@pytest.mark.parametrize(
  "place, role, stack, kind",
  [
    ("encoder/ff", "ff", "encoder", ""),
    ("self/k", "k", "", "self"),
    ("decoder/cross/q", "q", "decoder", "cross"),
    ("cross/decoder/q", "q", "decoder", "cross"),
  ],
)
def test_words_narrow_a_role(place, role, stack, kind):
  is_cross = lambda path: "encoder_decoder_attention" in path
  find = nms.Rules({place: RECIPE}).find
  for those, paths in PROJECTS["T5X, scanned"].items():
    for path in paths:
      named = those == role and path.startswith(stack)
      assert bool(find(path)) == (named and (not kind or is_cross(path) == (kind == "cross"))), path


NETWORKS = [
  (module, network, name)
  for module, network in ((vit, vit.ViT), (swin, swin.Swin), (resnet, resnet.ResNet))
  for name in [*module.CONFIGS][:1]
]


@pytest.mark.parametrize("module, network, name", NETWORKS, ids=[n for *_, n in NETWORKS])
def test_the_networks_here_have_a_role_for_each_kernel(module, network, name):
  config = module.config(name)
  make = functools.partial(network(config).init, train=False)
  images = jnp.zeros((1, config.image_size, config.image_size, 3))
  found = dict(trees.flatten(jax.eval_shape(make, jax.random.key(0), images)["params"]))
  for path in found:
    named = {role for family in roles.families().values() if (role := family.role(path))}
    is_kernel = path.endswith("/kernel") and "cpb_mlp" not in path
    assert len(named) == is_kernel, path


# --- a family from outside ------------------------------------------------------------------------

OWN = roles.Family(
  name="own",
  roles={"ff": r"(.*/)?fc\d/kernel", "mix": r"(.*/)?mix/kernel"},
  narrow={"late": r"block_[5-9]/.*", "head": r"(.*/)?out/.*"},
)


@pytest.mark.usefixtures("families")
def test_a_family_from_outside_adds_to_the_vocabulary():
  paths = ("block_0/fc1/kernel", "block_0/mix/kernel", "block_7/fc1/kernel", "mlp/wi/kernel")
  params = tree(dict.fromkeys(paths, (4, 2)))
  assert list(nms.Rules({"ff": RECIPE}).assign(params).places) == ["mlp/wi/kernel"]
  with pytest.raises(ValueError, match="match no parameter"):
    nms.Rules({"mix": RECIPE}).assign(params)
  roles.register(OWN)
  for place, named in (("ff", (0, 2, 3)), ("late/ff", (2,)), ("mix", (1,))):
    found = nms.Rules({place: RECIPE}).assign(params).places
    assert list(found) == [paths[i] for i in named]
  assert roles.role_of(paths[1]) == "mix"
  # A word that narrows here is a role of vision models, too.
  narrowed = nms.Rules({"head/mix": RECIPE}).find
  assert narrowed("out/mix/kernel") and not narrowed("mix/kernel")
  assert nms.Rules({"head": RECIPE}).find("head/kernel")
  with pytest.raises(ValueError, match="mine.*mix|mix.*mine"):
    nms.Rules({"mxi": RECIPE}, roles={"mine": "a/.*"}).assign(params)
  roles.register(roles.Family(name="own", roles={"ff": "b/kernel"}))  # a cell that ran again
  assert "mix" not in roles.regexes() and roles.role_of("b/kernel") == "ff"


@pytest.mark.usefixtures("families")
@pytest.mark.parametrize(
  "fields, word",
  [
    ({"roles": {"qk": "x"}}, "twice"),
    ({"roles": {"decoder": "x"}}, "twice"),
    ({"roles": {"b": "x"}, "narrow": {"b": "y"}}, "twice"),
    ({"roles": {"b/c": "x"}}, "letters"),
    ({"roles": {"b": "("}}, "not a regular"),
  ],
)
def test_a_word_has_one_meaning(fields, word):
  before = roles.families()
  with pytest.raises(ValueError, match=word):
    roles.register(roles.Family(name="a", **fields))
  assert roles.families() == before


def test_a_role_of_rules_stands_in_place_of_what_families_call_so():
  """Also in 'qk', which went on to mean T5's."""
  own = nms.Rules({"ff": RECIPE}, roles={"ff": "lm/kernel"}).find
  assert own("lm/kernel") and not own("encoder/mlp/wi/kernel")
  own = nms.Rules({"qk": RECIPE}, roles={"q": r"(.*/)?wq/kernel", "k": r"(.*/)?wk/kernel"}).find
  assert [bool(own(f"{name}/kernel")) for name in ("wq", "wk", "wv")] == [True, True, False]


# --- a fused kernel -------------------------------------------------------------------------------

FUSED = "blocks_0/attn/qkv/kernel"


@pytest.mark.parametrize("place", ["qk", "v"])
def test_no_part_of_a_fused_kernel_can_be_named(place):
  params = tree({FUSED: (32, 96), "blocks_0/mlp/fc1/kernel": (32, 64)})
  rules = nms.Rules({"ff": RECIPE, place: RECIPE})
  with pytest.raises(ValueError, match="side by side"):
    rules.assign(params)
  assert roles.role_of(FUSED) == "qkv"
  own = {place: "(.*/)?fc1/kernel", "ff": FUSED}
  for whole in (nms.Rules({"ff": RECIPE, "qkv": RECIPE}), nms.Rules(rules.places, roles=own)):
    assert set(whole.assign(params).places) == {FUSED, "blocks_0/mlp/fc1/kernel"}


def test_qkv_on_a_fused_kernel_equals_three():
  rules = nms.Rules({"qkv": RECIPE})
  rng = np.random.default_rng(0)  # few values, so that ties are frequent
  parts = {w: rng.integers(-3, 4, (16, 3)).astype(np.float32) for w in "qkv"}
  whole = np.concatenate([*parts.values()], axis=1)
  apart = {f"apart/blocks_0/attn/{w}/kernel": x for w, x in parts.items()}
  found = dict(trees.flatten(nms.sparsify(trees.nested({FUSED: whole} | apart), rules, 4)))
  joined = [found[path] for path in apart]
  np.testing.assert_array_equal(found[FUSED], np.concatenate(joined, axis=1))


# --- what others read of it -----------------------------------------------------------------------


@pytest.mark.parametrize("module", [roles, roles.registry, trees, flops])
def test_doctests(module):
  found = doctest.testmod(module)
  assert found.attempted and not found.failed
