"""Which parameter gets which recipe, along which axis, and what is said about the rest."""

import dataclasses
import logging
import pickle
import re
import types

import flax.core
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec, SingleDeviceSharding

import nm_sparsity_jax as nms
from nm_sparsity_jax.core.trees import nested

PHASES = nms.Phases(total=100, dense=10, finetune=20)
LINEAR = nms.recipe("mdgf_linear", pattern="1:8", phases=PHASES)
OTHER = nms.recipe("sr_ste", pattern="2:4", phases=PHASES)


def tree(shapes):
  """Nested shapes of 'a/b/kernel': shape."""
  return nested({path: jax.ShapeDtypeStruct(s, jnp.float32) for path, s in shapes.items()})


# --- places -----------------------------------------------------------------------------------


def test_a_place_is_a_regex_of_the_whole_path_or_a_role():
  paths = ["a/b/kernel", "x/a/b/kernel", "a/b/kernel/x", "encoder/head_1/kernel", "a/b.c/kernel"]
  for place, named in (
    (r"a/b/kernel", paths[:1]),
    (re.escape("a/b.c/kernel"), paths[4:]),
    (r".*/b\/kernel", paths[:2]),
    (r".*/kernel", [*paths[:2], *paths[3:]]),
    ("encoder/head", paths[3:4]),
    ("middle/head", []),  # no word that narrows: a regex, not a role
  ):
    rules = nms.Rules({place: LINEAR}, roles={"head": r".*/head_\d+/kernel"})
    assert [path for path in paths if rules.find(path) is LINEAR] == named


X = jax.ShapeDtypeStruct((8, 8), jnp.float32)
QUERY = tree({"encoder/layers_0/attention/query/kernel": (16, 16)})


@pytest.mark.parametrize(
  "word, make",
  [
    ("dense", lambda: nms.Rules({})),
    ("'1:8'", lambda: nms.Rules({"ff": "1:8"})),
    ("dict", lambda: nms.Rules([("ff", LINEAR)])),
    ("'drop'", lambda: nms.Rules({"ff": LINEAR}, indivisible="drop")),
    ("regular expression", lambda: nms.Rules({"(": LINEAR})),
    ("regular expression", lambda: nms.Rules({"ff": LINEAR}, axes={"[": 0})),
    ("regular expression", lambda: nms.Rules({"ff": LINEAR}, roles={"x": "*"})),
    ("two rules", lambda: nms.Rules({"qkv": LINEAR, "encoder/q": OTHER}).assign(QUERY)),
    ("'qvk'.*have q", lambda: nms.Rules({"q": LINEAR, "qvk": OTHER}).assign(QUERY)),
    (r"\{'a': 1\}", lambda: nms.Rules({"q": LINEAR}, {"a": 1}).assign(QUERY)),
    ("match no", lambda: nms.Rules({"q": LINEAR}).assign({"a": [1.0]})),
    ("axis=5", lambda: nms.Rules({"q": LINEAR}, {".*": 5}).assign(QUERY)),
    ("not known for 'a'.*'b'", lambda: nms.Rules({".*": LINEAR}).assign({"a": X, "b": X})),
  ],
)  # fmt: skip
def test_mistakes_are_named(word, make):
  with pytest.raises(ValueError, match=word):
    make()


# --- an axis that m does not divide ---------------------------------------------------------------

WI, WO = "mlp/wi/kernel", "mlp/wo/kernel"
GEOMETRIC = nms.recipe("sdgf_geometric", pattern="1:32", phases=PHASES)
CUSTOM = nms.recipe("custom", pattern="1:4", phases=PHASES, path=((10, "8:16", 1.0),))


def fading(beta, **phases):
  return nms.recipe("mdgf_linear", pattern="1:8", phases=nms.Phases(total=100, **phases), beta=beta)


@pytest.mark.parametrize(
  "recipe, length, policy, remark",
  [
    (OTHER, 18, "error", ValueError),
    (CUSTOM, 24, "error", ValueError),  # each level must fit
    (OTHER, 18, "skip", "multiple of 4"),
    (OTHER, 18, "pad", "padded by 2"),
    (CUSTOM, 24, "pad", "padded by 8"),
    (GEOMETRIC, 768, "error", "16:512 do not divide 768: dropped"),
    (GEOMETRIC, 2048, "error", ""),
    (nms.recipe("sr_ste", pattern="3:4", phases=PHASES), 16, "error", "keeps 3 of 4"),
    (fading(0.01, dense=20, finetune=40), 16, "error", "D jumps from 0.6 to 0 at step 60"),
    (fading(0.001), 16, "error", "D jumps from 0.9 to 0 at step 100"),
    (fading(None, dense=20, finetune=40), 16, "error", ""),
    (nms.recipe("mdgf_exponential", pattern="1:8", phases=PHASES), 16, "error", ""),
  ],
)
def test_what_is_unusual_is_said_in_the_table_and_the_log(recipe, length, policy, remark, caplog):
  rules = nms.Rules({"ff": recipe}, indivisible=policy)
  if remark is ValueError:
    with pytest.raises(ValueError, match="multiple of"):
      rules.assign(tree({WI: (length, 3)}))
    return
  with caplog.at_level(logging.WARNING, logger="nm_sparsity_jax"):
    found = rules.assign(tree({WI: (length, 3)}))
  assert remark in caplog.text and remark in str(found)
  if policy == "skip":
    assert list(found.skipped) == [WI] and not found.places and not found.dense
  else:
    site = found.places[WI]
    assert "; ".join(site.remarks).endswith(remark) and bool(site.remarks) == bool(remark)
    assert site.axis_size % site.pattern.m == 0


def test_a_dense_recipe_counts_as_a_rule_and_leaves_the_weight_alone():
  rules = nms.Rules({"ff": nms.recipe("dense"), "q": LINEAR})
  assignment = rules.assign(tree({WI: (7, 3), "attention/query/kernel": (16, 2)}))
  assert list(assignment.places) == ["attention/query/kernel"] and assignment.dense == (WI,)


# --- axes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  "path, shape, bias, axis",
  [
    ("mlp/wi/kernel", (16, 4), None, 0),
    ("Conv_0/kernel", (3, 3, 16, 5), (5,), -2),
    ("stem/Conv_1/kernel", (3, 16, 5), None, -2),
    ("layer2_0/downsample_conv/kernel", (1, 1, 16, 5), None, -2),
    # In doubt: another rank, another name, a bias that is not of the outputs.
    ("mlp/wi/kernel", (16, 4), (16,), None),
    ("mlp/wi/kernel", (16, 2, 8), None, None),
    ("ConvTranspose_0/kernel", (3, 3, 16, 8), None, None),
    # A user's own name: a transposed convolution may have it.
    ("stem/conv1/kernel", (3, 3, 16, 8), None, None),
    ("Einsum_0/kernel", (16, 16), (16,), None),
    ("Conv_0/kernel", (3, 3, 3, 3, 16, 8), None, None),
    ("w", (16, 16), None, None),
  ],
)
def test_axes_that_names_and_shapes_tell(path, shape, bias, axis):
  beside = path.replace("kernel", "bias")
  params = tree({path: shape} | ({beside: bias} if bias else {}))
  rules = nms.Rules({path: LINEAR})
  if axis is None:
    with pytest.raises(ValueError, match="axes="):
      rules.assign(params)
    assert nms.Rules({path: LINEAR}, axes={path: -1}, indivisible="pad").assign(params).places
  else:
    assert rules.assign(params).places[path].axis == axis


def test_the_first_axis_that_is_named_counts():
  params = tree({"a/kernel": (3, 16), "b/kernel": (2, 8, 3)})
  rules = nms.Rules({".*": LINEAR}, axes={"a/kernel": -1, ".*/kernel": [0, 1]})
  assert [site.axis for site in rules.assign(params).places.values()] == [-1, (0, 1)]
  more = rules.with_axes({"b/kernel": 1, "a/kernel": 1}).assign(params)
  assert [site.axis for site in more.places.values()] == [1, 1]
  assert rules.site("x/kernel", (3, 2, 16), axis=2).axis_size == 16  # as a layer asks


SIZES = {"embed": 16, "mlp": 24, "heads": 2, "kv": 8, "layers": 3, "stack": 3}
LEAVES = {
  "metadata": lambda names, shape: types.SimpleNamespace(names=names),  # as flax's AxisMetadata
  "spec": lambda names, shape: PartitionSpec(*names),
  "box": lambda names, shape: nn.Partitioned(jnp.zeros(shape), names=names),
}


@pytest.mark.parametrize(
  "path, names, axes",
  [
    # T5X's scalable_t5 stacks along axis 1 (param_scan_axis); other networks along 0.
    (WI, ("embed", "layers", "mlp"), (0,)),
    (WI, ("layers", "embed", "mlp"), (1,)),
    (WO, ("mlp", "embed", "stack"), (0,)),
    ("attention/query/kernel", ("embed", "layers", "heads", "kv"), (0,)),
    ("attention/out/kernel", ("heads", "layers", "kv", "embed"), (0, 2)),
  ],
)
@pytest.mark.parametrize("kind", LEAVES)
def test_scanned_kernels_take_their_axis_from_logical_names(path, names, axes, kind):
  shape = tuple(SIZES[name] for name in names)
  leaf = LEAVES[kind](names, shape)
  logical = nested({path + "_axes" * (kind == "metadata"): leaf, "norm/scale": ("embed",)})
  rules, params = nms.Rules({".*/kernel": LINEAR}, indivisible="pad"), tree({path: shape})
  assert rules.with_logical_axes(logical).assign(params).places[path].axes == axes
  by_hand = dataclasses.replace(rules, axes={".*": 2}).with_logical_axes(logical)
  assert by_hand.assign(params).places[path].axis == 2


# --- a value --------------------------------------------------------------------------------------


def test_rules_are_values():
  """Equal rules have one hash and one fingerprint, in every process; others have others."""
  make = lambda **kw: nms.Rules({"ff": LINEAR, "q": OTHER}, **kw)
  again = nms.Rules({"q": dataclasses.replace(OTHER), "ff": dataclasses.replace(LINEAR)})
  axes = make(axes={"a/kernel": (0,), "b": [0, 1]}, roles={"x": "a/.*"})
  for one, other in (
    (make(), again),
    (axes, pickle.loads(pickle.dumps(axes))),
    (axes, make(axes={"a/kernel": np.int64(0), "b": (0, 1)}, roles={"x": "a/.*"})),
    (make(), make().with_shardings({"a": SingleDeviceSharding(jax.devices()[0])})),
  ):
    assert one == other and hash(one) == hash(other) and one.fingerprint == other.fingerprint
  different = [make(), axes, make(indivisible="skip"), make(roles={"x": "y"})]
  different += [make(axes={"a": 0, "b": 1}), make(axes={"b": 1, "a": 0}), nms.Rules({"ff": LINEAR})]
  assert len({rules.fingerprint for rules in different}) == len({*different}) == len(different)
  one = nms.Rules({"ff": nms.recipe("mdgf_linear", pattern="1:8", phases=nms.Phases(total=10))})
  assert one.fingerprint == 181010233  # checkpoints hold it


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
    {"mlp": {"wi": {"kernel": nn.LogicallyPartitioned(kernel, names=("embed", "mlp"))}}},
    nnx.state(Block(nnx.Rngs(0)), nnx.Param),
  ):
    places = rules.assign(params).places
    nnx_paths = ["layers/0/kernel", "layers/1/kernel", "value/kernel"]
    assert sorted(places) == (nnx_paths if isinstance(params, nnx.State) else [WI])
    done = nms.finalize(nms.sparsify(params, rules, 90), rules, 90)
    assert jax.tree.structure(done) == jax.tree.structure(params)
    assert nms.verify(done, rules).ok and not nms.verify(params, rules).ok
