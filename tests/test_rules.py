"""Which parameter gets which recipe, along which axis, and what is said about the rest."""

import dataclasses
import pickle
import re

import flax.core
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import SingleDeviceSharding

import nm_sparsity_jax as nms
from nm_sparsity_jax.core.trees import nested
from nm_sparsity_jax.training import rules_text

PHASES = nms.Phases(total=100, dense=10, finetune=20)
LINEAR = nms.recipe("mdgf_linear", pattern="1:8", phases=PHASES)
OTHER = nms.recipe("sr_ste", pattern="2:4", phases=PHASES)


def tree(shapes):
  """Nested shapes of 'a/b/kernel': shape."""
  return nested({path: jax.ShapeDtypeStruct(s, jnp.float32) for path, s in shapes.items()})


# --- places -----------------------------------------------------------------------------------


def test_a_place_is_a_regex_of_the_whole_path():
  paths = ["a/b/kernel", "x/a/b/kernel", "a/b/kernel/x", "encoder/head_1/kernel"]
  for place, named in (
    (r".*/b\/kernel", paths[:2]),
    (r".*/kernel", [*paths[:2], *paths[3:]]),
    ("middle/ff", []),  # no word that narrows: a regex, not a role
  ):
    rules = nms.Rules({place: LINEAR})
    assert [path for path in paths if rules.match(path)] == named


def test_the_first_place_that_names_a_parameter_owns_it():
  params = tree({"a/kernel": (8, 8), "head/kernel": (8, 8)})
  rules = nms.Rules({"head/kernel": nms.recipe("dense"), ".*/kernel": LINEAR})
  assert list(rules.assign(params).sites) == ["a/kernel"]
  maybe = nms.Rules({"b/kernel": OTHER, **rules.places}, {"b/kernel": 1}, optional=["b/kernel"])
  assert list(maybe.assign(params).sites) == ["a/kernel"]
  either = nms.Rules({"a/kernel|b/kernel": LINEAR}, optional=["a/kernel|b/kernel"])
  assert list(either.assign(params).sites) == ["a/kernel"]
  assert rules_text.parse(rules_text.describe(maybe)) == maybe != rules
  # A leaf that is no array, as in an equinox model.
  assert list(rules.assign({**params, "act": jax.nn.relu, "bias": None}).sites) == ["a/kernel"]


X = jax.ShapeDtypeStruct((8, 8), jnp.float32)
QUERY = tree({"encoder/layers_0/attention/query/kernel": (16, 16)})
WO = tree({"wo/kernel": (8, 8)})
TWICE = nms.Rules({"qkv": LINEAR, "encoder/q": OTHER})  # the first one has them all


@pytest.mark.parametrize(
  "word, make",
  [
    ("regular expression", lambda: nms.Rules({"ff": LINEAR}, axes={"[": 0})),
    ("none that is left.*'encoder/q'", lambda: TWICE.assign(QUERY)),
    ("no parameter.*'q'.* begin wo/", lambda: nms.Rules({"q": LINEAR}, optional=["k"]).assign(WO)),
    ("'qvk'.*have q", lambda: nms.Rules({"q": LINEAR, "qvk": OTHER}).assign(QUERY)),
    (
      "'wi' of 'wi|wo/kernel'".replace("|", r"\|"),
      lambda: nms.Rules({"wi|wo/kernel": LINEAR}).assign(WO),
    ),
    ("multiple of", lambda: nms.Rules({"ff": CUSTOM}).assign(tree({WI: (24, 3)}))),  # each level
    ("'attention'", lambda: nms.Rules({"attention": LINEAR}).assign(QUERY)),
    # '.*' takes biases and scales along.
    ("'b'.*whole path", lambda: nms.Rules({".*": LINEAR}, {".*": 0}).assign(tree({"b": (8,)}))),
    ("not known for 'a'.*'b'", lambda: nms.Rules({".*": LINEAR}).assign({"a": X, "b": X})),
  ],
)
def test_mistakes_are_named(word, make):
  with pytest.raises(ValueError, match=word):
    make()


# --- an axis that m does not divide ---------------------------------------------------------------

WI = "mlp/wi/kernel"
GEOMETRIC = nms.recipe("sdgf_geometric", pattern="1:32", phases=PHASES)
CUSTOM = nms.recipe("custom", pattern="1:4", phases=PHASES, path=((10, "8:16", 1.0),))


@pytest.mark.parametrize(
  "recipe, length, policy, remark",
  [
    (OTHER, 18, "skip", "multiple of 4"),
    (CUSTOM, 24, "pad", "padded by 8"),
    (GEOMETRIC, 768, "error", "16:512 do not divide 768: dropped"),
    (LINEAR, 16, "error", ""),
  ],
)
def test_what_is_unusual_is_said_in_the_table_and_the_log(recipe, length, policy, remark, caplog):
  rules, params = nms.Rules({"ff": recipe}, indivisible=policy), tree({WI: (length, 3)})
  found = rules.assign(params)
  assert remark in caplog.text and remark in str(found) and bool(caplog.text) == bool(remark)
  assert (list(found.skipped), list(found.sites)) == (
    ([WI], []) if policy == "skip" else ([], [WI])
  )


# --- axes -----------------------------------------------------------------------------------------


NORM = {"norm/scale": (512,)}
WI_SCALE = {"decoder/layers_0/mlp/wi/scale": (4, 512)}
Q_SCALE = {"decoder/layers_0/self_attention/query/scale": (4, 512)}


@pytest.mark.parametrize(
  "path, shape, beside, axis",
  [
    ("mlp/wi/kernel", (16, 4), None, 0),
    ("Conv_0/kernel", (3, 3, 16, 5), (5,), -2),
    # In doubt: another rank, another name, a bias that is not of the outputs.
    ("mlp/wi/kernel", (16, 4), (16,), None),
    ("mlp/wi/kernel", (16, 2, 8), None, None),
    # A user's own name: a transposed convolution may have it.
    ("stem/conv1/kernel", (3, 3, 16, 8), None, None),
    # Equinox and haiku: the bias tells, where it can.
    ("up/weight", (16, 4), (16,), 1),
    ("up/weight", (4, 16), (16,), 0),
    ("w", (8, 4), (4,), 0),
    ("up/weight", (16, 16), (16,), None),
    ("up/weight", (16, 4), None, None),
    ("up/w", (16, 16), (16,), None),
    # Families that are sure: stacked, too.
    ("attention/query_proj/weight", (16, 16), None, 1),
    ("layers/mlp/layers/0/weight", (3, 16, 16), (3, 16), 2),
    ("net/multi_head_attention_1/linear/w", (16, 16), None, 0),
    ("__layer_stack_no_per_layer/linear_1/w", (3, 16, 16), (3, 16), 1),
    ("res_net18/~/initial_conv/w", (7, 7, 3, 16), (16,), 2),
    ("encoder/map_head/attn/query/kernel", (16, 2, 8), (2, 8), 0),
    # Others under a family's names: an attention of flax in a block of keras-hub's Gemma, scans
    # along axis 0 and 1, (out, in), a transposed convolution, a T5 for each of four seeds.
    ("decoder_block_0/attention/query/kernel", (512, 8, 64), (8, 64), 0),
    ("layers/attn/out/kernel", (8, 12, 64, 512), NORM, None),
    ("transformer_layers/attention/query/kernel", (12, 512, 512), (12, 512), None),
    ("decoder/MultiHeadDotProductAttention_0/query/kernel", (12, 512, 512), NORM, None),
    ("stages/0/attn/out/kernel", (8, 512, 512), NORM, None),
    ("linear_1/w", (64, 32), (64,), 1),
    ("query_proj/weight", (32, 64), (64,), 0),
    ("block_group_0/~/block_0/~/conv_1/w", (4, 4, 64, 128), (64,), None),
    ("mlp/layers/0/weight", (64, 32, 4), (64, 1), None),
    ("conv1d/kernel", (3, 64, 12, 64), NORM, None),
    ("decoder/layers_0/mlp/wi/kernel", (4, 512, 2048), WI_SCALE, None),
    ("decoder/layers_0/self_attention/query/kernel", (4, 512, 384), Q_SCALE, None),
    ("attn/query/kernel", (3, 16, 4, 4), (3, 4, 4), None),
    # Stacks of equal lengths, and of a path that T5X alone scans.
    ("decoder/layers/mlp/wi_0/kernel", (8, 8, 8), None, None),
    ("decoder/decoder/self_attention/out/kernel", (32, 2, 32), None, None),
  ],
)
def test_axes_that_names_and_shapes_tell(path, shape, beside, axis):
  """Beside a kernel lies its bias, or what else the dict names."""
  if not isinstance(beside, dict):
    bias = re.sub("(kernel|weight)$", "bias", re.sub("w$", "b", path))
    beside = {bias: beside} if beside else {}
  params = tree({path: shape} | beside)
  rules = nms.Rules({path: LINEAR}, indivisible="pad")
  if axis is None:
    with pytest.raises(ValueError, match="axes="):
      rules.assign(params)
    rules, axis = rules.with_axes({path: -1}), -1
  assert rules.assign(params).sites[path].axis == axis


def test_an_axis_that_a_bias_contradicts_is_said_once(caplog):
  # The wrong ones; a right one; one of which the bias tells nothing.
  shapes = {"up_0": (16, 8), "up_1": (16, 8), "by": (8, 16), "square": (16, 16)}
  params = tree({f"{name}/weight": shape for name, shape in shapes.items()}
                | {f"{name}/bias": (16,) for name in shapes})  # fmt: skip
  rules = nms.Rules({".*/weight": LINEAR}, axes={".*/weight": 0})
  found = rules.assign(params)
  rules.with_shardings(params).assign(params)
  rules.with_axes({"up_0/weight": 0, "up_1/weight": 0}).assign(params)  # each by its name
  (said,) = [record.getMessage() for record in caplog.records]
  assert said.startswith("up_{0,1}/weight: is axis 0 summed over?")
  assert str(found).count("summed over?") == 1


def test_the_first_axis_that_is_named_counts():
  params = tree({"a/kernel": (3, 16), "b/kernel": (2, 8, 3), "mlp/wi/kernel": (7, 3)})
  places = {"[ab]/kernel": LINEAR, "ff": nms.recipe("dense")}  # which counts as a rule
  rules = nms.Rules(places, axes={"a/kernel": -1, ".*/kernel": [0, 1]})
  found = rules.assign(params)
  assert [site.axis for site in found.sites.values()] == [-1, (0, 1)]
  more = rules.with_axes({"b/kernel": 1, "a/kernel": 1}).assign(params)
  assert [site.axis for site in more.sites.values()] == [1, 1] and found.dense == (WI,)


def test_logical_names_tell_the_axis_of_a_stacked_kernel():
  """test_trace.py has those of T5; here are boxes, and axes by hand come first."""
  box = nn.Partitioned(jnp.zeros((2, 3, 8, 16)), names=("heads", "layers", "kv", "embed"))
  rules, params = nms.Rules({".*": LINEAR}), {"attention": {"out": {"kernel": box}}}
  for axes, axis in (({}, (0, 2)), ({".*": 3}, 3)):
    found = dataclasses.replace(rules, axes=axes).with_logical_axes(params).assign(params)
    assert [site.axis for site in found.sites.values()] == [axis]


# --- a value --------------------------------------------------------------------------------------


def test_rules_are_values():
  """Equal rules have one hash and one text, in every process; others have others."""
  make = lambda **kw: nms.Rules({"ff": LINEAR, "q": OTHER}, **kw)
  axes = make(axes={"a/kernel": (0,), "b": [0, 1]})
  sharding = SingleDeviceSharding(jax.devices()[0])
  for one, other in (
    (make(), make().with_shardings([sharding])),
    (make(axes={"b": (0, 1)}), make(axes={"b": np.array([0, 1])})),
    (make(optional=["q", "ff"]), make(optional=("ff", "q"))),
    (axes, pickle.loads(pickle.dumps(make(axes={"a/kernel": np.int64(0), "b": (0, 1)})))),
  ):
    assert one == other and hash(one) == hash(other)
  # The order of places and axes counts.
  different = [make(), axes, make(indivisible="skip"), make(axes={"b": (0, 1), "a/kernel": 0})]
  different += [nms.Rules({"q": OTHER, "ff": LINEAR}), make(optional=["q"])]
  assert len({rules.text for rules in different}) == len({*different}) == len(different)


# --- containers -----------------------------------------------------------------------------------


class Block(nnx.Module):
  def __init__(self, rngs):
    self.value = nnx.Linear(16, 16, rngs=rngs)  # a name that boxes use, too
    self.layers = nnx.List([nnx.Linear(16, 8, rngs=rngs), nnx.Linear(8, 16, rngs=rngs)])


def test_frozen_dicts_boxes_and_nnx_states():
  kernel = jnp.asarray(np.random.default_rng(0).normal(size=(16, 4)), jnp.float32)
  rules = nms.Rules({".*kernel": LINEAR})
  for params in (
    flax.core.freeze({"mlp": {"wi": {"kernel": kernel}}}),
    {"mlp": {"wi": {"kernel": nn.Partitioned(kernel, names=("embed", "mlp"))}}},
    nnx.state(Block(nnx.Rngs(0)), nnx.Param),
  ):
    sites = rules.assign(params).sites
    nnx_paths = ["layers/0/kernel", "layers/1/kernel", "value/kernel"]
    assert sorted(sites) == (nnx_paths if isinstance(params, nnx.State) else [WI])
    done = nms.finalize(nms.sparsify(params, rules, 90), rules, 90)
    assert jax.tree.structure(done) == jax.tree.structure(params)
    assert nms.verify(done, rules).ok and not nms.verify(params, rules).ok
