"""Which parameter gets which recipe, along which axis, and what is said about the rest."""

import dataclasses
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
from jax.sharding import PartitionSpec

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


def chosen(place, paths):
  rules = nms.Rules({place: LINEAR})
  return {path for path in paths if rules.find(path) is LINEAR}


# --- places -----------------------------------------------------------------------------------


def test_a_regex_must_match_the_whole_path():
  paths = ["a/b/kernel", "x/a/b/kernel", "a/b/kernel/x", "a/ff/kernel"]
  assert chosen(r"a/b/kernel", paths) == {"a/b/kernel"}
  assert chosen(r".*/kernel", paths) == {*paths} - {"a/b/kernel/x"}
  assert not chosen("middle/ff", paths)  # no word that narrows: a regex, not a role


def test_users_extend_the_roles():
  rules = nms.Rules({"encoder/head": LINEAR}, roles={"head": r".*/head_\d+/kernel"})
  assert rules.find("encoder/head_1/kernel") is LINEAR
  for path in ("decoder/head_1/kernel", "encoder/head_1/kernel/x", "encoder/head/kernel"):
    assert rules.find(path) is None


QUERY = "encoder/layers_0/attention/query/kernel"


@pytest.mark.parametrize(
  "word, make",
  [
    ("dense", lambda: nms.Rules({})),
    ("'1:8'", lambda: nms.Rules({"ff": "1:8"})),
    ("None", lambda: nms.Rules({"ff": None})),
    ("MdgfLinear", lambda: nms.Rules({"ff": type(LINEAR)})),
    ("dict", lambda: nms.Rules([("ff", LINEAR)])),
    ("axes=0", lambda: nms.Rules({"ff": LINEAR}, axes=0)),
    ("roles='x'", lambda: nms.Rules({"ff": LINEAR}, roles="x")),
    ("'drop'", lambda: nms.Rules({"ff": LINEAR}, indivisible="drop")),
    ("regular expression", lambda: nms.Rules({"(": LINEAR})),
    ("regular expression", lambda: nms.Rules({"ff": LINEAR}, axes={"[": 0})),
    ("regular expression", lambda: nms.Rules({"ff": LINEAR}, roles={"x": "*"})),
    ("narrows", lambda: nms.Rules({"ff": LINEAR}, roles={"encoder": "x"})),
    ("no word", lambda: nms.Rules({"ff": LINEAR}, roles={"a/b": "x"})),
    ("'qkv' and 'encoder/q'",
     lambda: nms.Rules({"qkv": LINEAR, "encoder/q": OTHER}).assign(tree({QUERY: (16, 16)}))),
    ("two rules", lambda: nms.Rules({"qkv": LINEAR, "encoder/q": OTHER}).find(QUERY)),
    ("'qvk'", lambda: nms.Rules({"q": LINEAR, "qvk": OTHER}).assign(tree({QUERY: (16, 16)}))),
    (r"roles q\.", lambda: nms.Rules({"ff": LINEAR}).assign(tree({QUERY: (16, 16)}))),
    (r"\{'a': 1\}", lambda: nms.Rules({"q": LINEAR}, {"a": 1}).assign(tree({QUERY: (16, 16)}))),
    ("no parameters", lambda: nms.Rules({"q": LINEAR}).assign({"a": [1.0]})),
    ("axis=5", lambda: nms.Rules({"q": LINEAR}, {".*": 5}).assign(tree({QUERY: (16, 16)}))),
    ("ascending",
     lambda: nms.Rules({"q": LINEAR}, {".*": (2, 0)}).assign(tree({QUERY: (16, 2, 16)}))),
  ],
)  # fmt: skip
def test_mistakes_are_named(word, make):
  with pytest.raises(ValueError, match=word):
    make()


def test_examine_returns_every_mistake_and_what_can_be_assigned(caplog):
  wide, narrow, out = "encoder/l_0/mlp/wi/kernel", "encoder/l_1/mlp/wi/kernel", "l_0/mlp/wo/kernel"
  params = tree({wide: (8, 4), narrow: (4, 8), out: (8, 8), "norm/scale": (8,)})
  rules = nms.Rules({"ff": LINEAR, "encoder/ff": OTHER, "qkv": OTHER, out: OTHER})
  found = rules.examine(params)
  assert set(found.failed) == {wide, narrow, out} and found.idle == tuple(rules.places)
  assert set(found.assignment.dense) == {*found.failed, "norm/scale"} and not caplog.messages
  rules = nms.Rules({"ff": LINEAR})
  found = rules.examine(params)
  assert list(found.failed) == [narrow] and set(found.assignment.places) == {wide, out}
  with pytest.raises(ValueError) as error:
    rules.assign(params)
  assert str(error.value) == str(found.failed[narrow]) and not found.idle
  del params["encoder"]["l_1"]
  assert rules.examine(params).assignment == rules.assign(params)


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
  assert (place.pad, place.axis_size, place.count, found.places[WO].pad) == (4, 24, 9, 0)
  assert "padded by 4" in said and "padded by 4" in str(found)
  w = np.abs(normal(0, 20, 3))
  mask = np.asarray(place.mask(normal(0, 20, 3), 50))
  for start, stop in ((0, 8), (8, 16), (16, 20)):
    np.testing.assert_array_equal(mask[start:stop].argmax(0), w[start:stop].argmax(0))
    np.testing.assert_array_equal(mask[start:stop].sum(0), 1)


def test_pad_on_joint_axes_keeps_zeros_of_the_weight_before_its_own():
  rules = nms.Rules({"o": OTHER}, axes={".*": (0, 1)}, indivisible="pad")
  w = jnp.zeros((3, 2, 5), jnp.bfloat16)
  place = rules.assign({"attention": {"out": {"kernel": w}}}).places["attention/out/kernel"]
  assert (place.pad, place.axis_size) == (2, 8) and place.effective(w, 50).dtype == w.dtype
  mask = np.asarray(place.mask(w, 50)).reshape(6, 5)
  np.testing.assert_array_equal(mask[:, 0], [True, True, False, False, True, True])


PATH = {"name": "custom", "path": ((10, "8:16", 1.0), (40, "1:4", 0.5)), "pattern": "1:4"}


@pytest.mark.parametrize("policy, word", [("error", "16"), ("skip", "16"), ("pad", "padded by 8")])
def test_every_pattern_of_a_path_must_fit(policy, word, caplog):
  if policy == "error":
    with pytest.raises(ValueError, match=f"multiple of {word}"):
      assigned(caplog, {WO: (24, 4)}, policy, **PATH)
  else:
    found, said = assigned(caplog, {WO: (24, 4)}, policy, **PATH)
    assert word in said and word in str(found)


def test_geometric_levels_that_do_not_fit_are_dropped(caplog):
  shapes = {WI: (768, 4), WO: (2048, 4)}
  found, said = assigned(caplog, shapes, name="sdgf_geometric", pattern="1:32")
  assert [found.places[path].dropped for path in (WI, WO)] == [("16:512",), ()]
  assert "16:512" in said and "dropped" in str(found) and "wo" not in said


@pytest.mark.parametrize(
  "beta, dense, finetune, remark",
  [
    (0.01, 20, 40, "D jumps from 0.6 to 0 at step 60"),
    (0.005, 0, 0, "D jumps from 0.5 to 0 at step 100"),
    (None, 20, 40, ""),
    (None, 0, 0, ""),
    (0.5, 20, 0, ""),
  ],
)
def test_a_decay_that_does_not_arrive_is_said(beta, dense, finetune, remark, caplog):
  phases = nms.Phases(total=100, dense=dense, finetune=finetune)
  found, said = assigned(caplog, {WO: (16, 4)}, name="mdgf_linear", beta=beta, phases=phases)
  assert found.places[WO].remarks == ((remark,) if remark else ())
  assert remark in said and remark in str(found)


def test_the_printed_assignment_names_everything():
  head, row, dense = str(nms.Rules({WO: LINEAR}).assign(tree({WI: (20, 3), WO: (16, 4)}))).split(
    "\n"
  )
  assert head.split() == ["parameter", "shape", "axis", "pattern", "groups", "recipe", "remarks"]
  assert row.split() == [WO, "(16,", "4)", "0", "1:8", "8", "mdgf_linear"]
  assert dense == f"dense    {WI}"


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


def test_the_axis_is_the_one_that_flax_contracts():
  """A group is n:m among the weights that one output sums over at one place."""
  rules = nms.Rules({".*kernel": nms.recipe("sr_ste", pattern="1:4", phases=nms.Phases(total=1))})
  for name, module, shape in (
    ("Conv_0", nn.Conv(8, (3,), use_bias=False), (1, 5, 16)),
    ("Dense_0", nn.Dense(8), (1, 16)),
  ):
    params = {name: module.init(jax.random.key(0), jnp.zeros(shape))["params"]}
    effective = np.asarray(nms.sparsify(params, rules, 0)[name]["kernel"])
    groups = np.moveaxis(effective != 0, -2, 0).reshape(4, 4, -1)
    np.testing.assert_array_equal(groups.sum(1), 1)


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
  assert rules.place("x/kernel", (3, 2, 16), axis=2).axis_size == 16  # as a layer asks


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
  shape = lambda names: tuple(size[n] for n in names)
  leaf = {
    "tuple": lambda names: names,
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

  def run(params, rules):
    state = nms.init_state(params, rules)
    for step in (12, 24, 30):
      state = nms.update_state(state, params, rules, step)
    return nms.sparsify(params, rules, 30, state), nms.finalize(params, rules, 30, state)

  run = jax.jit(run, static_argnums=1)
  got, want = run(params, stacked), [run(nest(x), single) for x in layers]
  for i in range(2):
    np.testing.assert_array_equal(own(got[i]), jnp.stack([own(x[i]) for x in want], at))
  assert nms.verify(got[1], stacked).ok
  one_bad = jnp.moveaxis(own(got[1]), at, 0).at[1, ..., 3].set(1.0)
  found = nms.verify(nest(jnp.moveaxis(one_bad, 0, at)), stacked).places[0]
  first = list(found.first)
  assert first.pop(at) == 1 and first == [0, 0, 3]
  assert found.bad_groups == size // 8 and found.groups == 3 * 5 * size // 8


# --- a value --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Quiet(nms.Recipe):
  """A recipe of a user's own, whose repr says where it lies in memory."""

  name = "quiet"
  pattern: nms.NM
  phases: nms.Phases
  scale: float = 1.0


def test_rules_are_values():
  """Equal rules have one hash and one fingerprint, in every process; others have others."""
  make = lambda **kw: nms.Rules({"ff": LINEAR, "q": OTHER}, **kw)
  again = nms.Rules({"q": dataclasses.replace(OTHER), "ff": dataclasses.replace(LINEAR)})
  axes = make(axes={"a/kernel": (0,), "b": [0, 1]}, roles={"x": "a/.*"})
  equal = [
    (make(), again),
    (axes, pickle.loads(pickle.dumps(axes))),
    (axes, make(axes={"a/kernel": np.int64(0), "b": (0, 1)}, roles={"x": "a/.*"})),
  ]
  for one, other in equal:
    assert one == other and hash(one) == hash(other) and one.fingerprint == other.fingerprint
  quiet = lambda **fields: nms.Rules({"ff": Quiet(pattern="2:8", phases=PHASES, **fields)})
  different = [make(), axes, make(indivisible="skip"), make(roles={"x": "y"})]
  different += [nms.Rules({"ff": LINEAR, "q": LINEAR}), nms.Rules({"ff": LINEAR})]
  different += [quiet(), quiet(scale=2.0)]
  assert len({rules.fingerprint for rules in different}) == len(different)
  assert len({*different}) == len(different) and quiet().fingerprint == quiet().fingerprint
  one = nms.Rules({"ff": nms.recipe("mdgf_linear", pattern="1:8", phases=nms.Phases(total=10))})
  assert one.fingerprint == 1452790427  # checkpoints hold it
  given = {"ff": LINEAR}
  rules = nms.Rules(given)
  given["q"] = rules.places["v"] = OTHER
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
