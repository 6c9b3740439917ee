"""Which parameter gets which recipe, along which axis, and what is said about the rest."""

import functools
import logging
import pickle
import types

import flax.core
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.linen import partitioning
from jax.sharding import PartitionSpec

import nm_sparsity_jax as nms
from nm_sparsity_jax.trees import flatten

PHASES = nms.Phases(total=100, dense=10, finetune=20)
LINEAR = nms.recipe("mdgf_linear", pattern="1:8", phases=PHASES)
OTHER = nms.recipe("sr_ste", pattern="2:4", phases=PHASES)


def normal(seed, *shape):
  """By numpy: jax.random compiles anew for every shape."""
  return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def tree(shapes):
  """Nested shapes of 'a/b/kernel': shape."""
  out = {}
  for path, shape in shapes.items():
    *parents, leaf = path.split("/")
    node = out
    for word in parents:
      node = node.setdefault(word, {})
    node[leaf] = jax.ShapeDtypeStruct(shape, jnp.float32)
  return out


# The parameter names of T5X's examples/t5 (two layers' worth) and examples/scalable_t5.
_BLOCKS = {
  "encoder/{}/attention/{}/kernel": ("query", "key", "value", "out"),
  "encoder/{}/mlp/{}/kernel": ("wi_0", "wi_1", "wo"),
  "decoder/{}/self_attention/{}/kernel": ("query", "key", "value", "out"),
  "decoder/{}/encoder_decoder_attention/{}/kernel": ("query", "key", "value", "out"),
  "decoder/{}/mlp/{}/kernel": ("wi_0", "wi_1", "wo"),
}
T5 = [
  path.format(f"layers_{i}", name)
  for path, names in _BLOCKS.items()
  for name in names
  for i in range(2)
]
SCANNED = [
  path.format(path.split("/")[0], name) for path, names in _BLOCKS.items() for name in names
]
DENSE = [
  "token_embedder/embedding",
  "decoder/logits_dense/kernel",
  "encoder/relpos_bias/rel_embedding",
  "encoder/encoder_norm/scale",
  "encoder/layers_0/pre_attention_layer_norm/scale",
  "encoder/layers_0/pre_mlp_layer_norm/scale",
]
VIT = [
  *(
    f"Transformer/encoderblock_{i}/{name}"
    for i in range(2)
    for name in (
      "MlpBlock_3/Dense_0/kernel",
      "MlpBlock_3/Dense_1/kernel",
      "MultiHeadDotProductAttention_1/query/kernel",
      "MultiHeadDotProductAttention_1/key/kernel",
      "MultiHeadDotProductAttention_1/value/kernel",
      "MultiHeadDotProductAttention_1/out/kernel",
    )
  )
]
VIT_DENSE = [
  "embedding/kernel",
  "head/kernel",
  "Transformer/encoderblock_0/MlpBlock_3/Dense_0/bias",
  "Transformer/encoderblock_0/MultiHeadDotProductAttention_1/out/bias",
  "Transformer/encoderblock_0/LayerNorm_0/scale",
  "Transformer/posembed_input/pos_embedding",
]


def chosen(place, paths):
  rules = nms.Rules({place: LINEAR})
  return {path for path in paths if rules.find(path) is LINEAR}


def having(paths, *words, without=()):
  """The paths that contain one of `words` and none of `without`, as whole segments."""
  return {
    p
    for p in paths
    if any(w in p.split("/") for w in words) and not any(w in p.split("/") for w in without)
  }


FF = ("mlp",)
CROSS = "encoder_decoder_attention"


@pytest.mark.parametrize("paths", [T5, SCANNED], ids=["t5", "scanned"])
@pytest.mark.parametrize(
  "place, words, top, attention",
  [
    ("ff", FF, None, None),
    ("q", ("query",), None, None),
    ("k", ("key",), None, None),
    ("v", ("value",), None, None),
    ("o", ("out",), None, None),
    ("qk", ("query", "key"), None, None),
    ("qkv", ("query", "key", "value"), None, None),
    ("encoder/ff", FF, "encoder", None),
    ("decoder/ff", FF, "decoder", None),
    ("encoder/qkv", ("query", "key", "value"), "encoder", None),
    ("decoder/o", ("out",), "decoder", None),
    ("self/qk", ("query", "key"), None, "self"),
    ("cross/v", ("value",), None, "cross"),
    ("decoder/self/q", ("query",), "decoder", "self"),
    ("decoder/cross/qkv", ("query", "key", "value"), "decoder", "cross"),
    ("cross/decoder/qkv", ("query", "key", "value"), "decoder", "cross"),
  ],
)
def test_roles_on_t5(paths, place, words, top, attention):
  expected = having(paths, *words)
  if top:
    expected = {p for p in expected if p.split("/")[0] == top}
  if attention:
    expected = {p for p in expected if (CROSS in p.split("/")) == (attention == "cross")}
  assert expected
  assert chosen(place, paths + DENSE) == expected
  # The same under the collection's name, as in variables["params"] of a whole state.
  assert chosen(place, [f"params/{p}" for p in paths]) == {f"params/{p}" for p in expected}


def test_gated_and_plain_feed_forward():
  assert chosen("ff", ["encoder/layers_0/mlp/wi/kernel"])
  assert not chosen("ff", ["encoder/layers_0/mlp/wi/bias", "encoder/layers_0/mlp/extra/kernel"])
  assert not chosen("ff", ["my_mlp/wi/kernel"])


@pytest.mark.parametrize(
  "place, words",
  [
    ("ff", ("MlpBlock_3",)),
    ("q", ("query",)),
    ("qkv", ("query", "key", "value")),
    ("encoder/o", ("out",)),
    ("self/k", ("key",)),
  ],
)
def test_roles_on_flax_vit(place, words):
  assert chosen(place, VIT + VIT_DENSE) == having(VIT, *words)


def test_encoder_is_not_the_encoder_decoder_attention():
  assert not chosen("encoder/qkv", [p for p in T5 if p.startswith("decoder/")])
  assert not chosen("decoder/ff", VIT)


def test_a_regex_must_match_the_whole_path():
  assert chosen(r"a/b/kernel", ["a/b/kernel", "x/a/b/kernel", "a/b/kernel/x"]) == {"a/b/kernel"}
  assert chosen(r".*/wo/kernel", T5) == having(T5, "wo")
  # A word that is no qualifier makes the key a regex, not a role.
  assert not chosen("middle/ff", T5)


def test_users_extend_the_roles():
  rules = nms.Rules({"encoder/head": LINEAR}, roles={"head": r".*/head_\d+/kernel"})
  assert rules.find("encoder/head_1/kernel") is LINEAR
  assert rules.find("decoder/head_1/kernel") is None
  assert rules.find("encoder/head_1/kernel/x") is None


def test_two_rules_on_one_path_name_both():
  rules = nms.Rules({"qkv": LINEAR, "encoder/q": OTHER})
  with pytest.raises(ValueError) as error:
    rules.assign(tree({"encoder/layers_0/attention/query/kernel": (16, 16)}))
  for word in ("'qkv'", "'encoder/q'", "encoder/layers_0/attention/query/kernel", "Narrow"):
    assert word in str(error.value)
  with pytest.raises(ValueError, match="two rules claim"):
    rules.find("encoder/layers_0/attention/query/kernel")
  assert rules.find("encoder/layers_0/attention/key/kernel") is LINEAR


def test_a_rule_that_matches_nothing_is_named_unless_the_tree_is_partial():
  rules = nms.Rules({"ff": LINEAR, "qvk": OTHER})
  params = tree({"encoder/layers_0/mlp/wo/kernel": (16, 16)})
  with pytest.raises(ValueError, match=r"match no parameter.*'qvk'.*mlp/wo/kernel.*qkv") as error:
    rules.assign(params)
  assert "'ff'," not in str(error.value).split("The 1 parameters")[0]
  assert list(rules.assign(params, partial=True).places) == ["encoder/layers_0/mlp/wo/kernel"]


def test_examine_returns_every_mistake_and_what_can_be_assigned(caplog):
  wide, narrow, out = "encoder/l_0/mlp/wi/kernel", "encoder/l_1/mlp/wi/kernel", "l_0/mlp/wo/kernel"
  params = tree({wide: (8, 4), narrow: (4, 8), out: (8, 8), "norm/scale": (8,)})
  rules = nms.Rules({"ff": LINEAR, "encoder/ff": OTHER, "qkv": OTHER, r"l_0/mlp/wo/kernel": OTHER})
  found = rules.examine(params)
  assert set(found.failed) == {wide, narrow, out}
  assert found.idle == tuple(rules.places)  # no path is left that one of them alone claims
  assert all("two rules claim" in str(e) for e in found.failed.values())
  assert set(found.assignment.dense) == {*found.failed, "norm/scale"} and not caplog.messages

  rules = nms.Rules({"ff": LINEAR})
  found = rules.examine(params)
  assert list(found.failed) == [narrow] and set(found.assignment.places) == {wide, out}
  with pytest.raises(ValueError, match="no multiple of 8") as error:
    rules.assign(params)
  assert str(error.value) == str(found.failed[narrow]) and not found.idle
  assert nms.Rules({"ff": LINEAR, "qkv": OTHER}).examine(params).idle == ("qkv",)
  assert not rules.examine(tree({narrow: (4, 8)})).idle  # its one parameter fails, but it has one
  del params["encoder"]["l_1"]
  assert rules.examine(params).assignment == rules.assign(params)


def test_an_axis_for_nothing_is_named_too():
  params = tree({"a/kernel": (16, 16)})
  rules = nms.Rules({"a/kernel": LINEAR}, axes={r"a/kernle": 1})
  with pytest.raises(ValueError, match=r"match no parameter.*axes=\{'a/kernle': 1\}"):
    rules.assign(params)
  assert rules.assign(params, partial=True).places["a/kernel"].axis == 0


def test_a_dense_recipe_counts_as_a_rule_and_leaves_the_weight_alone():
  rules = nms.Rules({"ff": nms.recipe("dense"), "q": LINEAR})
  params = tree({"mlp/wi/kernel": (7, 3), "attention/query/kernel": (16, 2)})
  assignment = rules.assign(params)
  assert list(assignment.places) == ["attention/query/kernel"]
  assert assignment.dense == ("mlp/wi/kernel",)


@pytest.mark.parametrize(
  "make, words",
  [
    (lambda: nms.Rules({}), ("dense", "Name a place")),
    (lambda: nms.Rules({"ff": "1:8"}), ("'ff'", "'1:8'", "nms.recipe")),
    (lambda: nms.Rules({"ff": None}), ("'ff'", "None", "nms.recipe")),
    (lambda: nms.Rules({"ff": type(LINEAR)}), ("'ff'", "MdgfLinear", "nms.recipe")),
    (lambda: nms.Rules({"ff": LINEAR}, indivisible="drop"), ("'drop'", "error", "skip", "pad")),
    (lambda: nms.Rules({"(": LINEAR}), ("'('", "regular expression")),
    (lambda: nms.Rules({"ff": LINEAR}, axes={"[": 0}), ("'['", "regular expression")),
    (lambda: nms.Rules({"ff": LINEAR}, roles={"x": "*"}), ("'*'", "regular expression")),
  ],
)
def test_bad_tables_say_what_is_wrong(make, words):
  with pytest.raises(ValueError) as error:
    make()
  for word in words:
    assert word in str(error.value)


@pytest.mark.filterwarnings("ignore:rule .* keeps:UserWarning")
def test_different_patterns_per_place_do_not_touch_each_other():
  params = {
    "mlp": {"wi": {"kernel": normal(0, 16, 8)}},
    "attention": {"query": {"kernel": normal(1, 16, 8)}},
  }
  wide = nms.recipe("sr_ste", pattern="1:8", phases=nms.Phases(total=10))
  fine = nms.recipe("sr_ste", pattern="3:4", phases=nms.Phases(total=10))
  both = nms.sparsify(params, nms.Rules({"ff": wide, "q": fine}), 3)
  for w, out, pattern in (
    (params["mlp"]["wi"]["kernel"], both["mlp"]["wi"]["kernel"], nms.NM(1, 8)),
    (params["attention"]["query"]["kernel"], both["attention"]["query"]["kernel"], nms.NM(3, 4)),
  ):
    mask = nms.nm_mask(jnp.abs(w), pattern)
    np.testing.assert_array_equal(np.asarray(out), np.where(mask, w, 0))


def test_the_table_is_a_copy():
  given = {"ff": LINEAR}
  rules = nms.Rules(given)
  given["q"] = OTHER
  rules.places["v"] = OTHER
  assert rules.places == {"ff": LINEAR}


# --- an axis that m does not divide ---------------------------------------------------------------

ODD = tree({"mlp/wi/kernel": (20, 3), "mlp/wo/kernel": (16, 4)})


def test_indivisible_is_an_error_by_default():
  with pytest.raises(ValueError) as error:
    nms.Rules({"ff": LINEAR}).assign(ODD)
  for word in ("mlp/wi/kernel", "20", "(20, 3)", "multiple of 8", "1:8", "skip", "pad"):
    assert word in str(error.value)


def test_skip_leaves_it_dense_and_says_so(caplog):
  # Equal rules and shapes are assigned, and so reported, once: these are used nowhere else.
  recipe = nms.recipe("mdgf_linear", pattern="1:8", phases=nms.Phases(total=101))
  rules = nms.Rules({"ff": recipe}, indivisible="skip")
  with caplog.at_level(logging.WARNING, logger="nm_sparsity_jax"):
    assignment = rules.assign(ODD)
  assert list(assignment.places) == ["mlp/wo/kernel"]
  assert list(assignment.skipped) == ["mlp/wi/kernel"] and not assignment.dense
  for text in (caplog.text, str(assignment)):
    assert "mlp/wi/kernel" in text and "20" in text and "multiple of 8" in text
  assert "skipped" in str(assignment)


def test_pad_shortens_the_last_group_and_says_so(caplog):
  recipe = nms.recipe("sr_ste", pattern="1:8", phases=nms.Phases(total=102))
  rules = nms.Rules({"ff": recipe}, indivisible="pad")
  with caplog.at_level(logging.WARNING, logger="nm_sparsity_jax"):
    assignment = rules.assign(ODD)
  place = assignment.places["mlp/wi/kernel"]
  assert (place.pad, place.axis_size, place.count) == (4, 24, 9)
  assert assignment.places["mlp/wo/kernel"].pad == 0
  for text in (caplog.text, str(assignment)):
    assert "mlp/wi/kernel" in text and "padded by 4" in text
  w = normal(0, 20, 3)
  mask = place.mask(w, 0)
  assert mask.shape == w.shape
  for start, stop in ((0, 8), (8, 16), (16, 20)):
    best = np.abs(np.asarray(w))[start:stop].argmax(0)
    np.testing.assert_array_equal(np.asarray(mask)[start:stop].argmax(0), best)
    np.testing.assert_array_equal(np.asarray(mask)[start:stop].sum(0), 1)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_pad_works_on_joint_axes_and_keeps_zeros_of_the_weight_before_its_own(dtype):
  recipe = nms.recipe("sr_ste", pattern="2:4", phases=nms.Phases(total=10))
  rules = nms.Rules({"o": recipe}, axes={".*": (0, 1)}, indivisible="pad")
  w = jnp.zeros((3, 2, 5), dtype)
  place = rules.assign({"attention": {"out": {"kernel": w}}}).places["attention/out/kernel"]
  assert (place.pad, place.axis_size) == (2, 8)
  mask = np.asarray(place.mask(w, 0)).reshape(6, 5)
  np.testing.assert_array_equal(mask[:, 0], [True, True, False, False, True, True])
  assert place.effective(w, 0).dtype == dtype


def test_geometric_levels_that_do_not_fit_are_reported(caplog):
  recipe = nms.recipe("sdgf_geometric", pattern="1:32", phases=nms.Phases(total=103))
  rules = nms.Rules({"ff": recipe})
  with caplog.at_level(logging.WARNING, logger="nm_sparsity_jax"):
    assignment = rules.assign(tree({"mlp/wi/kernel": (768, 4), "mlp/wo/kernel": (2048, 4)}))
  assert assignment.places["mlp/wi/kernel"].dropped == ("16:512",)
  assert assignment.places["mlp/wo/kernel"].dropped == ()
  for text in (caplog.text, str(assignment)):
    assert "16:512" in text
  assert "dropped" in str(assignment) and "768" in str(assignment)
  assert "wo" not in caplog.text


def test_the_printed_assignment_names_everything():
  rules = nms.Rules({"mlp/wo/kernel": LINEAR})
  text = str(rules.assign(ODD))
  head, row, dense = text.splitlines()
  assert head.split() == ["parameter", "shape", "axis", "pattern", "groups", "recipe", "remarks"]
  assert row.split() == ["mlp/wo/kernel", "(16,", "4)", "0", "1:8", "8", "mdgf_linear"]
  assert dense == "dense    mlp/wi/kernel"


@pytest.mark.parametrize(
  "fields, phases, remark",
  [
    ({"beta": 0.01}, {"dense": 20, "finetune": 40}, "D jumps from 0.6 to 0 at step 60"),
    ({"beta": 0.01}, {"finetune": 40}, "D jumps from 0.4 to 0 at step 60"),
    ({"beta": 0.005}, {}, "D jumps from 0.5 to 0 at step 100"),
    ({}, {"dense": 20, "finetune": 40}, ""),
    ({}, {"finetune": 0}, ""),
    ({"beta": 0.5}, {"dense": 20}, ""),
  ],
)
def test_a_decay_that_does_not_arrive_is_said(fields, phases, remark, caplog):
  recipe = nms.recipe(
    "mdgf_linear", pattern="1:8", phases=nms.Phases(total=100, **phases), **fields
  )
  assignment = nms.Rules({"mlp/wo/kernel": recipe}).assign(tree({"mlp/wo/kernel": (16, 4)}))
  assert remark in str(assignment) and remark in caplog.text
  assert ("jumps" in str(assignment)) == bool(remark)
  assert assignment.places["mlp/wo/kernel"].remarks == ((remark,) if remark else ())


@pytest.mark.parametrize("policy", ["error", "skip", "pad"])
def test_every_pattern_of_a_path_must_fit(policy):
  path = ((10, "8:16", 1.0), (40, "1:4", 0.5))
  custom = nms.recipe("custom", pattern="1:4", phases=nms.Phases(total=100), path=path)
  rules = nms.Rules({"mlp/wo/kernel": custom}, indivisible=policy)
  if policy == "error":
    with pytest.raises(ValueError, match="length 24.*no multiple of 16.*8:16.*cannot be applied"):
      rules.assign(tree({"mlp/wo/kernel": (24, 4)}))
    return
  assignment = rules.assign(tree({"mlp/wo/kernel": (24, 4)}))
  if policy == "skip":
    assert "no multiple of 16" in assignment.skipped["mlp/wo/kernel"]
  else:
    assert assignment.places["mlp/wo/kernel"].pad == 8
    nms.sparsify({"mlp": {"wo": {"kernel": jnp.ones((24, 4))}}}, rules, 15)


def test_rules_are_values():
  rules = nms.Rules({"ff": LINEAR}, axes={"a/kernel": (0,)}, roles={"x": "a/.*"})
  again = pickle.loads(pickle.dumps(rules))
  assert again == rules and hash(again) == hash(rules)
  assert again.find("mlp/wo/kernel") == LINEAR
  assert rules == nms.Rules({"ff": LINEAR}, axes={"a/kernel": 0}, roles={"x": "a/.*"})
  with pytest.raises(AttributeError):
    rules.indivisible = "skip"  # type: ignore


def test_a_schedule_that_does_not_fit_is_found_before_the_run():
  with pytest.raises(ValueError, match="4 levels"):
    nms.recipe("sdgf_stepwise", pattern="1:8", phases=nms.Phases(total=3))


# --- axes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  "path, shape, axis, size",
  [
    ("mlp/wi/kernel", (16, 4), 0, 16),
    ("kernel", (16, 4), 0, 16),
    ("Conv_0/kernel", (3, 3, 16, 5), -2, 16),
    ("stem/conv1/kernel", (3, 16, 5), -2, 16),
    ("conv_init/kernel", (3, 3, 3, 16, 5), -2, 16),
    ("MultiHeadDotProductAttention_0/query/kernel", (32, 4, 8), 0, 32),
    ("MultiHeadDotProductAttention_0/out/kernel", (4, 8, 32), (0, 1), 32),
    ("a/MultiHeadDotProductAttention/out/kernel", (3, 8, 32), (0, 1), 24),
  ],
)
def test_axes_that_need_no_naming(path, shape, axis, size):
  place = nms.Rules({".*": LINEAR}).place(path, shape)
  assert (place.axis, place.axis_size) == (axis, size)
  assert place.count == np.prod(shape) // 8


def test_defaults_are_the_axes_that_flax_contracts():
  """A group is n:m among the weights that one output sums over at one place."""
  modules = {
    "Conv_0": (nn.Conv(8, (3,), use_bias=False), (1, 5, 16)),
    "Dense_0": (nn.Dense(8, use_bias=False), (1, 16)),
  }
  rules = nms.Rules({".*": nms.recipe("sr_ste", pattern="1:4", phases=nms.Phases(total=1))})
  for name, (module, shape) in modules.items():
    kernel = module.init(jax.random.key(0), jnp.zeros(shape))["params"]["kernel"]
    place = rules.place(f"{name}/kernel", kernel.shape)
    mask = np.asarray(place.mask(kernel, 0))
    inputs = np.moveaxis(mask, -2, 0).reshape(4, 4, -1)
    np.testing.assert_array_equal(inputs.sum(1), 1)
  attention = nn.MultiHeadDotProductAttention(num_heads=2, use_bias=False)
  x = jnp.zeros((1, 3, 16))
  with jax.numpy_rank_promotion("allow"):
    params = attention.init(jax.random.key(0), x)["params"]
  for name, inputs in (("query", 1), ("key", 1), ("value", 1), ("out", 2)):
    kernel = params[name]["kernel"]
    place = rules.place(f"MultiHeadDotProductAttention_0/{name}/kernel", kernel.shape)
    columns = np.asarray(place.mask(kernel, 0)).reshape(np.prod(kernel.shape[:inputs]), -1)
    np.testing.assert_array_equal(columns.reshape(4, 4, -1).sum(1), 1)


@pytest.mark.parametrize(
  "path, shape",
  [
    ("mlp/wi/kernel", (16, 2, 4)),
    ("decoder/decoder/self_attention/out/kernel", (16, 2, 16)),
    ("patches/kernel", (16, 16, 3, 64)),
    ("MultiHeadDotProductAttention_0/out/kernel", (8, 4, 8, 32)),
    ("bias", (16,)),
    ("token_embedder/embedding", (16, 16)),
  ],
)
def test_an_axis_that_cannot_be_known_must_be_named(path, shape):
  with pytest.raises(ValueError) as error:
    nms.Rules({".*": LINEAR}).place(path, shape)
  for word in (path, str(shape), "axes=", "with_logical_axes"):
    assert word in str(error.value)
  assert nms.Rules({".*": LINEAR}, axes={".*": 0}).place(path, shape).axis == 0


def test_named_axes_come_first_and_are_checked():
  rules = nms.Rules({".*": LINEAR}, axes={"a/kernel": -1, ".*/kernel": [0, 1]})
  assert rules.place("a/kernel", (3, 16)).axis == -1
  assert rules.place("b/kernel", (2, 8, 3)).axis == (0, 1)
  with pytest.raises(ValueError, match="axis=5"):
    nms.Rules({".*": LINEAR}, axes={".*": 5}).place("a/kernel", (16, 16))
  with pytest.raises(ValueError, match="ascending"):
    nms.Rules({".*": LINEAR}, axes={".*": (2, 0)}).place("a/kernel", (16, 2, 16))


def test_a_layer_that_knows_its_axis_is_not_asked():
  assert nms.Rules({".*": LINEAR}).place("x/kernel", (3, 2, 16), axis=2).axis_size == 16


@pytest.mark.parametrize(
  "wi, wo, axis",
  [
    # T5X's scalable_t5 stacks along axis 1 (param_scan_axis); other networks along 0.
    (("embed", "layers", "mlp"), ("mlp", "layers", "embed"), 0),
    (("layers", "embed", "mlp"), ("layers", "mlp", "embed"), 1),
    (("embed", "mlp", "stack"), ("mlp", "embed", "stack"), 0),
  ],
)
@pytest.mark.parametrize("kind", ["tuple", "metadata", "spec", "box"])
def test_scanned_kernels_take_their_axis_from_logical_names(wi, wo, axis, kind):
  size = {"embed": 16, "mlp": 24, "layers": 3, "stack": 3}
  leaf = {
    "tuple": lambda names: names,
    "metadata": lambda names: types.SimpleNamespace(names=names),  # as flax's AxisMetadata
    "spec": lambda names: PartitionSpec(*names),
    "box": lambda names: nn.Partitioned(jnp.zeros([size[n] for n in names]), names=names),
  }[kind]
  end = "kernel_axes" if kind == "metadata" else "kernel"
  names = {"encoder": {"encoder": {"mlp": {"wi": {end: leaf(wi)}, "wo": {end: leaf(wo)}}}}}
  params = tree(
    {
      "encoder/encoder/mlp/wi/kernel": tuple(size[n] for n in wi),
      "encoder/encoder/mlp/wo/kernel": tuple(size[n] for n in wo),
    }
  )
  rules = nms.Rules({"ff": LINEAR})
  with pytest.raises(ValueError, match="with_logical_axes"):
    rules.assign(params)
  places = rules.with_logical_axes(names).assign(params).places
  assert [p.axis for p in places.values()] == [axis, axis]
  assert [p.axis_size for p in places.values()] == [16, 24]
  by_hand = nms.Rules({"ff": LINEAR}, axes={".*/wi/kernel": 2, ".*/wo/kernel": 2})
  places = by_hand.with_logical_axes(names).place("encoder/encoder/mlp/wi/kernel", (3, 3, 8))
  assert places.axis == 2


def test_flax_writes_these_logical_names():
  class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
      kernel = partitioning.param_with_axes(
        "kernel", nn.initializers.lecun_normal(), (16, 16), axes=("embed", "mlp")
      )
      return x @ kernel, None

  scanned = partitioning.scan_with_axes(
      Layer, variable_axes={"params": 1}, split_rngs={"params": True}, length=3,
      axis_name="layers", axes_collections=("params",),
  )  # fmt: skip

  class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
      return scanned(name="mlp")(x, None)[0]

  variables = Model().init(jax.random.key(0), jnp.zeros((1, 16)))
  rules = nms.Rules({"mlp/kernel": LINEAR}).with_logical_axes(variables["params_axes"])
  place = rules.assign(variables["params"]).places["mlp/kernel"]
  assert place.shape == (16, 3, 16) and place.axis == 0


def test_stacked_kernels_of_more_axes_stay_ambiguous():
  names = {"experts": {"out": {"kernel": ("layers", "expert", "mlp", "embed")}}}
  rules = nms.Rules({"experts/out/kernel": LINEAR}).with_logical_axes(names)
  with pytest.raises(ValueError, match="axes="):
    rules.place("experts/out/kernel", (3, 2, 8, 16))


@pytest.mark.filterwarnings("ignore:step=.* is a constant:UserWarning")
@pytest.mark.parametrize(
  "at, indivisible, kv, size", [(0, "error", 12, 24), (1, "error", 12, 24), (1, "pad", 3, 8)]
)
def test_the_axis_of_a_scan_may_lie_between_the_axes_of_a_group(at, indivisible, kv, size):
  """Functions of the tree do to a stack what they do to each layer's own kernel."""
  names = ["heads", "kv", "embed"]
  names.insert(at, "layers")
  recipe = nms.recipe("idp", pattern="2:8", phases=nms.Phases(total=30))
  nest = lambda leaf: {"attention": {"out": {"kernel": leaf}}}
  own = lambda tree: tree["attention"]["out"]["kernel"]
  single = nms.Rules({"o": recipe}, {".*": (0, 1)}, indivisible)
  stacked = nms.Rules({"o": recipe}, None, indivisible).with_logical_axes(nest(tuple(names)))
  layers = normal(0, 3, 2, kv, 5)
  params = nest(jnp.moveaxis(layers, 0, at))
  place = stacked.assign(params).places["attention/out/kernel"]
  assert place.axes == (names.index("heads"), names.index("kv")) and place.axis_size == size

  @functools.partial(jax.jit, static_argnums=1)
  def run(params, rules):
    state = nms.init_state(params, rules)
    for step in (12, 24):
      state = nms.update_state(state, params, rules, step)
    return nms.sparsify(params, rules, 24, state), nms.finalize(params, rules, state)

  got, want = run(params, stacked), [run(nest(x), single) for x in layers]
  for i in range(2):
    expected = jnp.stack([own(x[i]) for x in want], at)
    np.testing.assert_array_equal(own(got[i]), expected)
  assert nms.verify(got[1], stacked).ok
  one_bad = jnp.moveaxis(own(got[1]), at, 0).at[1, ..., 3].set(1.0)
  found = nms.verify(nest(jnp.moveaxis(one_bad, 0, at)), stacked).places[0]
  first = list(found.first)
  assert first.pop(at) == 1 and first == [0, 0, 3]
  assert found.bad_groups == size // 8 and found.groups == 3 * 5 * size // 8


@pytest.mark.filterwarnings("ignore:step=.* is a constant:UserWarning")
def test_axes_with_another_between_wherever_they_lie():
  w = normal(0, 5, 4, 3, 6)
  apart = nms.Rules({"kernel": LINEAR}, axes={"kernel": (1, 3)})
  adjacent = nms.Rules({"kernel": LINEAR}, axes={"kernel": (2, 3)})
  got = nms.finalize({"kernel": w}, apart, early=True)["kernel"]
  want = nms.finalize({"kernel": w.transpose(2, 0, 1, 3)}, adjacent, early=True)["kernel"]
  np.testing.assert_array_equal(got, want.transpose(1, 2, 0, 3))
  assert nms.verify({"kernel": got}, apart).ok
  broken = nms.verify({"kernel": got.at[4, :, 2].set(1.0)}, apart).places[0]
  assert broken.first == (4, 0, 2, 0) and broken.bad_groups == 3


# --- a value --------------------------------------------------------------------------------------


def test_equal_and_hashed_by_value():
  make = lambda **kw: nms.Rules({"ff": LINEAR, "q": OTHER}, **kw)
  same = nms.Rules(
    {
      "q": nms.recipe("sr_ste", pattern="2:4", phases=PHASES),
      "ff": nms.recipe("mdgf_linear", pattern=nms.NM(1, 8), phases=PHASES),
    }
  )
  assert make() == same and hash(make()) == hash(same)
  different = [
    nms.Rules({"ff": LINEAR, "q": LINEAR}),
    nms.Rules({"ff": LINEAR}),
    make(axes={"a": 0}),
    make(indivisible="skip"),
    make(roles={"x": "y"}),
    nms.recipe("dense"),
  ]
  assert all(make() != other for other in different)
  assert make(axes={"a": [0, 1]}) == make(axes={"a": (0, 1)})
  assert "mdgf_linear" in repr(make()) or "MdgfLinear" in repr(make())


@pytest.mark.filterwarnings("ignore:step=.* is a constant:UserWarning")
def test_rules_are_static_for_jit():
  traces = []

  def step(rules, w):
    traces.append(1)
    return nms.sparsify({"mlp": {"wi": {"kernel": w}}}, rules, 0)

  f = jax.jit(step, static_argnums=0)
  f(nms.Rules({"ff": LINEAR}), jnp.ones((8, 8)))
  f(nms.Rules({"ff": nms.recipe("mdgf_linear", pattern="1:8", phases=PHASES)}), jnp.ones((8, 8)))
  assert len(traces) == 1


# --- containers -----------------------------------------------------------------------------------


def test_frozen_dict_and_boxes():
  kernel = jnp.ones((16, 4))
  rules = nms.Rules({"ff": LINEAR})
  for params in (
    flax.core.freeze({"mlp": {"wi": {"kernel": kernel}}}),
    {"mlp": {"wi": {"kernel": nn.Partitioned(kernel, names=("embed", "mlp"))}}},
    {"mlp": {"wi": {"kernel": nn.LogicallyPartitioned(kernel, names=("embed", "mlp"))}}},
  ):
    assert list(rules.assign(params).places) == ["mlp/wi/kernel"]
    out = nms.sparsify(params, rules, 90)
    assert jax.tree.structure(out) == jax.tree.structure(params)
    assert nms.verify(nms.finalize(params, rules, early=True), rules).ok


def test_nnx_state():
  class Block(nnx.Module):
    def __init__(self, rngs):
      self.value = nnx.Linear(16, 16, rngs=rngs)  # a name that boxes use, too
      self.layers = nnx.List([nnx.Linear(16, 8, rngs=rngs), nnx.Linear(8, 16, rngs=rngs)])

  state = nnx.state(Block(nnx.Rngs(0)), nnx.Param)
  paths = [path for path, _ in flatten(state)]
  assert "value/kernel" in paths and "layers/1/kernel" in paths
  rules = nms.Rules({r"layers/\d/kernel": LINEAR, "value/kernel": OTHER})
  assert sorted(rules.assign(state).places) == [
      "layers/0/kernel", "layers/1/kernel", "value/kernel",
  ]  # fmt: skip
  done = nms.finalize(state, rules, early=True)
  assert isinstance(done, nnx.State) and nms.verify(done, rules).ok
  assert not nms.verify(state, rules).ok
