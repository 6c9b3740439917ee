"""Which parameter gets which recipe, along which axis, and what is said about the rest."""

import dataclasses
import functools
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
from nm_sparsity_jax.training.rules import AmbiguousAxis

PHASES = nms.Phases(total=100, dense=10, finetune=20)
LINEAR = nms.recipe("mdgf_linear", pattern="1:8", phases=PHASES)
OTHER = nms.recipe("sr_ste", pattern="2:4", phases=PHASES)


def normal(seed, *shape):
  """By numpy: jax.random compiles anew for every shape."""
  return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


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
    ("letters", lambda: nms.Rules({"ff": LINEAR}, roles={"a/b": "x"})),
    ("two rules", lambda: nms.Rules({"qkv": LINEAR, "encoder/q": OTHER}).assign(QUERY)),
    ("two rules", lambda: nms.Rules({".*/w": LINEAR, "a/w": OTHER}).find("a/w")),
    ("'qvk'.*have q", lambda: nms.Rules({"q": LINEAR, "qvk": OTHER}).assign(QUERY)),
    (r"\{'a': 1\}", lambda: nms.Rules({"q": LINEAR}, {"a": 1}).assign(QUERY)),
    ("match no", lambda: nms.Rules({"q": LINEAR}).assign({"a": [1.0]})),
    ("axis=5", lambda: nms.Rules({"q": LINEAR}, {".*": 5}).assign(QUERY)),
    ("ascending", lambda: nms.Rules({"q": LINEAR}, {".*": (1, 0)}).assign(QUERY)),
    ("two parameters",
     lambda: nms.Rules({"a/kernel": LINEAR}).assign({"a": {"kernel": X}, "a/kernel": X})),
  ],
)  # fmt: skip
def test_mistakes_are_named(word, make):
  with pytest.raises(ValueError, match=word):
    make()


X = jax.ShapeDtypeStruct((8, 8), jnp.float32)


def test_a_dense_recipe_counts_as_a_rule_and_leaves_the_weight_alone():
  rules = nms.Rules({"ff": nms.recipe("dense"), "q": LINEAR})
  assignment = rules.assign(tree({"mlp/wi/kernel": (7, 3), "attention/query/kernel": (16, 2)}))
  assert list(assignment.places) == ["attention/query/kernel"]
  assert assignment.dense == ("mlp/wi/kernel",)


# --- an axis that m does not divide ---------------------------------------------------------------

WI, WO = "mlp/wi/kernel", "mlp/wo/kernel"


def assigned(caplog, shapes, policy="error", **fields):
  """What is assigned, and all that is said of it: equal rules and shapes are reported once."""
  recipe = nms.recipe(**{"name": "sr_ste", "pattern": "1:8", "phases": PHASES} | fields)
  with caplog.at_level(logging.WARNING, logger="nm_sparsity_jax"):
    found = nms.Rules({"ff": recipe}, indivisible=policy).assign(tree(shapes))
  return found, caplog.text


def test_what_m_does_not_divide(caplog):
  shapes = {WI: (20, 3), WO: (16, 4)}
  with pytest.raises(ValueError, match="multiple of 8"):
    assigned(caplog, shapes)
  found, said = assigned(caplog, shapes, "skip")
  assert list(found.places) == [WO] and list(found.skipped) == [WI] and not found.dense
  assert "multiple of 8" in said and "skipped" in str(found)
  found, said = assigned(caplog, shapes, "pad")
  place = found.places[WI]
  assert (place.groups.pad, place.axis_size, place.count, found.places[WO].groups.pad) == (
    4,
    24,
    9,
    0,
  )
  assert "padded by 4" in said and "padded by 4" in str(found)
  w = np.abs(normal(0, 20, 3))
  mask = np.asarray(place.mask(normal(0, 20, 3), 50))
  for start, stop in ((0, 8), (8, 16), (16, 20)):
    np.testing.assert_array_equal(mask[start:stop].argmax(0), w[start:stop].argmax(0))
    np.testing.assert_array_equal(mask[start:stop].sum(0), 1)


PATH = {"name": "custom", "path": ((10, "8:16", 1.0), (40, "1:4", 0.5)), "pattern": "1:4"}


def test_every_level_must_fit_or_is_dropped(caplog):
  with pytest.raises(ValueError, match="multiple of 16"):
    assigned(caplog, {WO: (24, 4)}, **PATH)
  found, said = assigned(caplog, {WO: (24, 4)}, "pad", **PATH)
  assert "padded by 8" in said and found.places[WO].groups.pad == 8
  shapes = {WI: (768, 4), WO: (2048, 4)}
  found, said = assigned(caplog, shapes, name="sdgf_geometric", pattern="1:32")
  assert [found.places[path].dropped for path in (WI, WO)] == [("16:512",), ()]
  assert "16:512" in said and "dropped" in str(found)


@pytest.mark.parametrize(
  "beta, dense, finetune, remark",
  [
    (0.01, 20, 40, "D jumps from 0.6 to 0 at step 60"),
    (None, 20, 40, ""),
    (0.5, 20, 0, ""),
  ],
)
def test_a_decay_that_does_not_arrive_is_said(beta, dense, finetune, remark, caplog):
  phases = nms.Phases(total=100, dense=dense, finetune=finetune)
  found, said = assigned(caplog, {WO: (16, 4)}, name="mdgf_linear", beta=beta, phases=phases)
  assert found.places[WO].remarks == ((remark,) if remark else ())
  assert remark in said and remark in str(found)


# --- axes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  "path, shape, bias, axis",
  [
    ("mlp/wi/kernel", (16, 4), None, 0),
    ("mlp/wi/kernel", (16, 4), (4,), 0),
    ("kernel", (16, 4), (4,), 0),
    ("Conv_0/kernel", (3, 3, 16, 5), (5,), -2),
    ("stem/Conv_1/kernel", (3, 16, 5), None, -2),
    ("Conv_12/kernel", (3, 3, 3, 16, 5), None, -2),
    ("conv1/kernel", (3, 3, 16, 5), None, -2),
    ("layer2_0/downsample_conv/kernel", (1, 1, 16, 5), None, -2),
    ("patch_embed/proj/kernel", (4, 4, 8, 5), None, -2),
    # In doubt: another rank, another name, a bias that is not of the outputs.
    ("mlp/wi/kernel", (16, 4), (16,), None),
    ("mlp/wi/kernel", (16, 2, 8), None, None),
    ("MultiHeadDotProductAttention_0/out/kernel", (4, 8, 32), None, None),
    ("patches/kernel", (16, 16, 8, 64), None, None),
    ("ConvTranspose_0/kernel", (3, 3, 16, 8), None, None),
    # A user's own names: a transposed convolution may have them.
    ("upconv/kernel", (3, 3, 16, 8), (8,), None),
    ("deconv/kernel", (3, 3, 16, 8), None, None),
    ("stem/conv1/kernel", (3, 3, 16, 8), None, None),
    ("Einsum_0/kernel", (16, 16), (16,), None),
    ("Conv_0/kernel", (3, 3, 3, 3, 16, 8), None, None),
    ("w", (16, 16), None, None),
    ("token_embedder/embedding", (16, 16), None, None),
  ],
)
def test_axes_that_names_and_shapes_tell(path, shape, bias, axis):
  beside = path.replace("kernel", "bias")
  params = tree({path: shape} | ({beside: bias} if bias else {}))
  rules = nms.Rules({path: LINEAR})
  if axis is None:
    with pytest.raises(AmbiguousAxis, match="axes="):
      rules.assign(params)
    assert nms.Rules({path: LINEAR}, axes={path: -1}, indivisible="pad").assign(params).places
  else:
    assert rules.assign(params).places[path].axis == axis


def test_all_axes_in_doubt_are_one_error():
  params = tree({"a": (8, 8), "b": (8, 8), "c/kernel": (8, 8)})
  with pytest.raises(AmbiguousAxis, match="'a'.*'b'") as error:
    nms.Rules({".*": LINEAR}).assign(params)
  assert error.value.found == [("a", (8, 8)), ("b", (8, 8))]


def test_the_first_axis_that_is_named_counts():
  rules = nms.Rules({".*": LINEAR}, axes={"a/kernel": -1, ".*/kernel": [0, 1]})
  places = rules.assign(tree({"a/kernel": (3, 16), "b/kernel": (2, 8, 3)})).places
  assert [place.axis for place in places.values()] == [-1, (0, 1)]
  more = rules.with_axes({"b/kernel": 1, "a/kernel": 1}).assign(
    tree({"a/kernel": (3, 16), "b/kernel": (2, 8, 3)})
  )
  assert [place.axis for place in more.places.values()] == [1, 1]
  assert rules.site("x/kernel", (3, 2, 16), axis=2).axis_size == 16  # as a layer asks


@pytest.mark.parametrize(
  "wi, wo, axis",
  [
    # T5X's scalable_t5 stacks along axis 1 (param_scan_axis); other networks along 0.
    (("embed", "layers", "mlp"), ("mlp", "layers", "embed"), 0),
    (("layers", "embed", "mlp"), ("layers", "mlp", "embed"), 1),
    (("embed", "mlp", "stack"), ("mlp", "embed", "stack"), 0),
  ],
)
@pytest.mark.parametrize("kind", ["metadata", "spec", "box"])
def test_scanned_kernels_take_their_axis_from_logical_names(wi, wo, axis, kind):
  size = {"embed": 16, "mlp": 24, "layers": 3, "stack": 3}
  shape = lambda names: tuple(size[n] for n in names)
  leaf = {
    "metadata": lambda names: types.SimpleNamespace(names=names),  # as flax's AxisMetadata
    "spec": lambda names: PartitionSpec(*names),
    "box": lambda names: nn.Partitioned(jnp.zeros(shape(names)), names=names),
  }[kind]
  end = "kernel_axes" if kind == "metadata" else "kernel"
  names = {"mlp": {"wi": {end: leaf(wi)}, "wo": {end: leaf(wo)}}}
  params, rules = tree({WI: shape(wi), WO: shape(wo)}), nms.Rules({"ff": LINEAR})
  places = rules.with_logical_axes(names).assign(params).places
  assert [(p.axis, p.axis_size) for p in places.values()] == [(axis, 16), (axis, 24)]
  by_hand = nms.Rules({"ff": LINEAR}, axes={".*": 2}, indivisible="pad").with_logical_axes(names)
  assert by_hand.assign(params).places[WI].axis == 2


def test_the_axis_of_a_scan_may_lie_between_the_axes_of_a_group():
  """Functions of the tree do to a stack what they do to each layer's own kernel."""
  recipe = nms.recipe("idp", pattern="2:8", phases=nms.Phases(total=30))
  nest = lambda leaf: {"attention": {"out": {"kernel": leaf}}}
  own = lambda tree: tree["attention"]["out"]["kernel"]
  single = nms.Rules({"o": recipe}, {".*": (0, 1)}, "pad")
  names = nest(("heads", "layers", "kv", "embed"))
  stacked = nms.Rules({"o": recipe}, indivisible="pad").with_logical_axes(names)
  layers = normal(0, 3, 2, 3, 5)
  place = stacked.assign(nest(jnp.moveaxis(layers, 0, 1))).places["attention/out/kernel"]
  assert (place.axes, place.axis_size) == ((0, 2), 8)

  @functools.partial(jax.jit, static_argnums=1)
  def run(params, rules):
    state = nms.init_state(params, rules)
    for step in (12, 24, 30):
      state = nms.update_state(state, params, rules, step)
    return nms.sparsify(params, rules, 30, state), nms.finalize(params, rules, 30, state)

  got = run(nest(jnp.moveaxis(layers, 0, 1)), stacked)
  want = [run(nest(x), single) for x in layers]
  for i in range(2):
    np.testing.assert_array_equal(own(got[i]), jnp.stack([own(x[i]) for x in want], 1))
  assert nms.verify(got[1], stacked).ok


# --- a value --------------------------------------------------------------------------------------


def test_rules_are_values():
  """Equal rules have one hash and one fingerprint, in every process; others have others."""
  make = lambda **kw: nms.Rules({"ff": LINEAR, "q": OTHER}, **kw)
  again = nms.Rules({"q": dataclasses.replace(OTHER), "ff": dataclasses.replace(LINEAR)})
  axes = make(axes={"a/kernel": (0,), "b": [0, 1]}, roles={"x": "a/.*"})
  equal = [
    (make(), again),
    (axes, pickle.loads(pickle.dumps(axes))),
    (axes, make(axes={"a/kernel": np.int64(0), "b": (0, 1)}, roles={"x": "a/.*"})),
    (make(), make().with_shardings({"a": SingleDeviceSharding(jax.devices()[0])})),
  ]
  for one, other in equal:
    assert one == other and hash(one) == hash(other) and one.fingerprint == other.fingerprint
  different = [make(), axes, make(indivisible="skip"), make(roles={"x": "y"})]
  different += [make(axes={"a": 0, "b": 1}), make(axes={"b": 1, "a": 0})]
  different += [nms.Rules({"ff": LINEAR, "q": LINEAR}), nms.Rules({"ff": LINEAR})]
  assert len({rules.fingerprint for rules in different}) == len({*different}) == len(different)
  one = nms.Rules({"ff": nms.recipe("mdgf_linear", pattern="1:8", phases=nms.Phases(total=10))})
  assert one.fingerprint == 1452790427  # checkpoints hold it
  given = {"ff": LINEAR}
  rules = nms.Rules(given)
  given["q"] = OTHER
  assert rules.places == {"ff": LINEAR}
  with pytest.raises(AttributeError):
    rules.indivisible = "skip"


def test_rules_are_static_for_jit():
  traces = []
  f = jax.jit(lambda rules, w: traces.append(1) or nms.sparsify({"kernel": w}, rules, 0),
              static_argnums=0)  # fmt: skip
  for recipe in (LINEAR, dataclasses.replace(LINEAR)):
    f(nms.Rules({"kernel": recipe}), jnp.ones((8, 8)))
  assert len(traces) == 1


# --- containers -----------------------------------------------------------------------------------


class Block(nnx.Module):
  def __init__(self, rngs):
    self.value = nnx.Linear(16, 16, rngs=rngs)  # a name that boxes use, too
    self.layers = nnx.List([nnx.Linear(16, 8, rngs=rngs), nnx.Linear(8, 16, rngs=rngs)])


def test_frozen_dicts_boxes_and_nnx_states():
  kernel, rules = normal(0, 16, 4), nms.Rules({".*kernel": LINEAR})
  for params in (
    flax.core.freeze({"mlp": {"wi": {"kernel": kernel}}}),
    {"mlp": {"wi": {"kernel": nn.Partitioned(kernel, names=("embed", "mlp"))}}},
    {"mlp": {"wi": {"kernel": nn.LogicallyPartitioned(kernel, names=("embed", "mlp"))}}},
    nnx.state(Block(nnx.Rngs(0)), nnx.Param),
  ):
    places = rules.assign(params).places
    nnx_paths = ["layers/0/kernel", "layers/1/kernel", "value/kernel"]
    assert sorted(places) == (nnx_paths if isinstance(params, nnx.State) else ["mlp/wi/kernel"])
    done = nms.finalize(nms.sparsify(params, rules, 90), rules, 90)
    assert jax.tree.structure(done) == jax.tree.structure(params)
    assert nms.verify(done, rules).ok and not nms.verify(params, rules).ok
