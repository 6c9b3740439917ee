"""Axes of parameters from the program, held against tables by hand and against its derivatives."""

import functools
import math
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_t5 as t5
import test_vision_models as images
from jax.sharding import PartitionSpec as P
from reference_arrays import drawn

import nm_sparsity_jax as nms
from nm_sparsity_jax.core import trace
from nm_sparsity_jax.core.trees import flatten

pytestmark = pytest.mark.usefixtures("as_users_compute")
KEY = jax.random.key(0)
RECIPE = nms.recipe("sr_ste", pattern="2:4", phases=nms.Phases(total=10))
NOISE = 1e-5  # of float32; what is no noise came out above 9e-4, and noise below 1e-7
NWC = ("NWC", "WIO", "NWC")


# --- layers and models of several libraries at tiny sizes -----------------------------------------


def layout(function, params, x, rows=None):
  """A network, output = function(params, x), and how many vectors meet a weight at most.

  The derivatives tell an axis apart where it is longer than that. So there are two tokens or four
  pixels, and all that matters is longer. x is a shape; each index of all axes but its last is a
  vector.
  """
  rows, x = rows or math.prod(x[:-1]), drawn(jax.ShapeDtypeStruct(x, "float32"), seed=1)
  return function, drawn(params), x, rows


def plain(function, x, rows=None, **shapes):
  params = {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in shapes.items()}
  return layout(function, params, x, rows)


def linen(module, *shape, rows=None):
  params = jax.eval_shape(lambda: module.init(KEY, jnp.zeros(shape)))["params"]
  return layout(lambda p, x: module.apply({"params": p}, x), params, shape, rows)


def equinox(make, call, *shape):
  """Of make(equinox, key), called as call(module, x)."""
  eqx = pytest.importorskip("equinox", reason="no Equinox here: pip install -e '.[dev]'")
  params, rest = eqx.partition(make(eqx, KEY), eqx.is_inexact_array)
  return layout(lambda p, x: call(eqx.combine(p, rest), x), params, shape)


def by_index(p, x):
  take = lambda i, h: h @ jax.lax.dynamic_index_in_dim(p["w"], i, keepdims=False)
  return jax.lax.fori_loop(0, 3, take, x)


def heads(p, x):
  q = x @ p["q"].reshape(8, 4 * 5)
  return jnp.einsum("bhd,hde->be", q.reshape(-1, 4, 5), p["o"])


def masked(p, x):
  kept = jnp.where(jnp.abs(p["w"]) > 0, p["w"], 0.0)
  return x @ (kept * 2).astype(jnp.bfloat16).astype(jnp.float32)


def one_key(p, x):
  """Of all heads, so that nothing but axes of its weight and tokens is left of a query."""
  q, k = jnp.einsum("td,dhk->thk", x, p["q"]), x @ p["k"]
  return jnp.einsum("hts,sk->thk", jnp.einsum("thk,sk->hts", q, k), k)


def ensemble_of_convolutions(p, x):
  conv = lambda w: jax.lax.conv_general_dilated(x, w, (1,), "SAME", dimension_numbers=NWC)
  return jax.vmap(conv)(p["w"])


def every(*names, axes=(0,)):
  """A table: these layers' kernels, wherever they are."""
  return {rf"(.*/)?({'|'.join(names)})/kernel": axes}


QKV = ("query", "key", "value")
ATTENTION = every(*QKV) | every("out", axes=(0, 1))
# name -> (what makes it, {regex of a path: axes its products sum over})
CASES = {
  # flax Linen
  "Conv, grouped": (
    lambda: linen(nn.Conv(16, (3,), feature_group_count=2), 1, 2, 12, rows=4), {"kernel": (1,)}),
  "ConvTranspose, transpose_kernel": (
    lambda: linen(nn.ConvTranspose(6, (3, 3), transpose_kernel=True), 1, 2, 2, 5),
    {"kernel": (3,)}),
  "attention": (lambda: linen(nn.MultiHeadDotProductAttention(4), 1, 2, 12), ATTENTION),
  "GRU": (lambda: linen(nn.RNN(nn.GRUCell(5)), 1, 3, 6), every("in", "ir", "iz", "hn", "hr", "hz")),
  # Equinox; test_nnx.py has that of NNX
  "equinox attention": (lambda: equinox(
    lambda eqx, key: eqx.nn.MultiheadAttention(4, 12, key=key), lambda m, x: m(x, x, x), 2, 12),
    {".*_proj/weight": (1,)}),
  # jax alone
  "stacked (layers, out, in)": (lambda: plain(
    lambda p, x: jax.lax.scan(lambda h, w: (h @ w.T, None), x, p["w"])[0], (2, 8), rows=6,
    w=(3, 8, 8)), {"w": (2,)}),
  "layers by index": (lambda: plain(by_index, (2, 8), rows=6, w=(3, 8, 8)), {"w": (1,)}),
  "fused qkv, split": (lambda: plain(
    lambda p, x: sum(x @ w for w in jnp.split(p["qkv"], 3, axis=1)), (2, 4), qkv=(4, 12)),
    {"qkv": (0,)}),
  "joined kernels": (lambda: plain(
    lambda p, x: x @ jnp.concatenate([p["q"], p["k"]], 1), (2, 4), q=(4, 3), k=(4, 5)),
    {"q": (0,), "k": (0,)}),
  "heads by reshape": (lambda: plain(heads, (2, 8), q=(8, 4, 5), o=(4, 5, 6)),
                       {"q": (0,), "o": (0, 1)}),
  "heads that share a key": (lambda: plain(one_key, (2, 8), q=(8, 3, 2), k=(8, 2)),
                             {"q": (0,), "k": (0,)}),
  "masked and scaled": (lambda: plain(masked, (2, 4), w=(4, 3)), {"w": (0,)}),
  "an ensemble of convolutions": (lambda: plain(
    ensemble_of_convolutions, (1, 2, 5), w=(3, 3, 5, 6)), {"w": (2,)}),
  # A product with one-hot vectors sums over nothing.
  "a look-up": (lambda: plain(
    lambda p, x: (jax.nn.one_hot(jnp.array([1, 0]), 6) @ p["table"] + x) @ p["w"], (2, 4),
    table=(6, 4), w=(4, 3)), {"w": (0,)}),
}  # fmt: skip


@functools.cache
def made(name):
  """(function, params, x) of a case, the number of vectors that meet a weight, and the axes."""
  make, table = CASES[name]
  *case, rows = make()
  paths = [path for path, _ in flatten(case[1])]
  found = {path: next((r for r in table if re.fullmatch(r, path)), None) for path in paths}
  assert set(table) == set(found.values()) - {None}, "a line of the table names no parameter"
  return case, rows, {path: table[regex] for path, regex in found.items() if regex}


def rules_for(*paths, **fields):
  # In brackets, since `q` alone would be a role.
  places = {f"({re.escape(path)})": RECIPE for path in paths}
  return nms.Rules(places, indivisible="pad", **fields)


def axes_of(rules, params):
  return {path: site.groups.axes for path, site in rules.assign(params).sites.items()}


def derivatives(function, params, x):
  """path -> derivatives of all outputs: (output, *shape)."""
  outputs = lambda p: jnp.concatenate([y.ravel() for y in jax.tree.leaves(function(p, x))])
  return dict(flatten(jax.jit(jax.jacrev(outputs))(params)))


def has_more_directions(derivative, axes, rows):
  """Whether vectors along these axes of a parameter are combinations of more than `rows`."""
  table = np.moveaxis(derivative, [axis + 1 for axis in axes], range(len(axes)))
  table = table.reshape(math.prod(table.shape[: len(axes)]), -1).astype(np.float64)
  squares = np.linalg.eigvalsh(table @ table.T)[::-1]  # of singular values, the largest first
  assert squares[0] > 0, "no output depends on it, and that says nothing"
  return len(squares) > rows and squares[rows] > NOISE**2 * squares[0]


@pytest.mark.parametrize("name", CASES)
def test_along_the_axes_of_for_model_weights_differ_by_their_inputs_alone(name):
  """A weight changes an output by its own input, times what the result of its product changes.

  So vectors of derivatives along the axes are combinations of the `rows` vectors that come in, and
  zeroing the inputs of a group zeroes the derivatives by its weights, and by no others. Along an
  axis of results, or along a part of the axes, they are combinations of more.
  """
  (function, params, x), rows, want = made(name)
  traced = trace.trace(function, params, x)
  assert traced.axes == want and {*want, *traced.refused} == traced.shapes.keys()
  assert not want.keys() & traced.refused.keys()
  assert axes_of(rules_for(*want).for_model(function, params, x), params) == want
  found, distinct = derivatives(function, params, x), 0
  for path, axes in want.items():
    derivative = np.asarray(found[path])
    assert not has_more_directions(derivative, axes, rows), path
    for axis, length in enumerate(derivative.shape[1:]):
      if (axis,) != axes and length > rows:
        assert has_more_directions(derivative, (axis,), rows), (path, axis)
        distinct += 1
  assert distinct >= len(want) / 2  # else the sizes of this case tell no axes apart


def our_t5(**fields):
  network = t5.make(**fields)
  shapes = t5.shapes_of(network)
  apply = lambda p, batch: network.apply({"params": p}, *batch, enable_dropout=False)
  return apply, shapes["params"], t5.BATCH, shapes["params_axes"]


def our_images(name):
  network = images.network(name, **images.SMALLER[name])
  variables = dict(images.shapes_of(network))
  params, rest = variables.pop("params"), jax.tree.map(lambda s: jnp.ones(s.shape), variables)
  return lambda p, x: network.apply({**rest, "params": p}, x), params, images.images(network), {}


@pytest.mark.parametrize(
  "make, fields",
  [(our_t5, {}), (our_t5, dict(scan_layers=True, remat_policy="minimal")),
   *((our_images, dict(name=name)) for name in images.FAMILIES)],
)  # fmt: skip
def test_our_networks_contract_what_names_say(make, fields):
  function, params, inputs, logical = make(**fields)
  # The network of relative positions of a Swin gets constants alone.
  rules = nms.Rules({"(?!.*cpb_mlp).*kernel": RECIPE}, indivisible="pad").with_logical_axes(logical)
  traced = trace.trace(function, params, inputs)
  named = axes_of(rules, params)
  assert len(named) > 5 and named.items() <= traced.axes.items()


# --- what is refused ------------------------------------------------------------------------------


def in_scan(turn, *carry):
  """The last of a carry after two turns."""
  return jax.lax.scan(lambda c, _: (turn(*c), None), carry, None, length=2)[0][-1]


def mixed_conv(p, x, gates):
  kernel = jnp.einsum("e,ewio->wio", gates, p["e"])
  return jax.lax.conv_general_dilated(x[None], kernel, (1,), "SAME", dimension_numbers=NWC)


# What is done with w (4, 4), and with experts e (3, 4, 5) or kernels of a window of 3.
REFUSED = {
  "tied": (lambda p, x, d: (x @ p["w"]) @ p["w"].T, "axes .* and"),
  "sort": (lambda p, x, d: x @ jnp.sort(p["w"]), "sort"),
  "times constants": (lambda p, x, d: x @ (p["w"] @ jnp.ones((4, 4))), "constant"),
  "cut axis": (lambda p, x, d: x[:, :2] @ p["w"].reshape(2, 8), "part"),
  "cut rows": (lambda p, x, d: x @ p["w"][:, :3].reshape(3, 4).T, "reshape"),
  "sum of experts": (lambda p, x, d: x @ p["e"].sum(0), "no product"),
  # Data meets the weight before the product.
  "tied embedding": (lambda p, x, d: p["w"][d["ids"]] @ p["w"].T, "data.*gather"),
  "a branch of data": (
    lambda p, x, d: (x @ p["w"]) @ jax.lax.cond(x.sum() > 0, lambda: p["w"].T, lambda: d["keep"]),
    "data.*cond"),
  # Loops.
  "scan, swapped": (
    lambda p, x, d: in_scan(lambda w, v, h: (v, w, h @ w @ v.T), p["w"], p["v"], x),
    "trip to trip"),
  "while": (
    lambda p, x, d: jax.lax.while_loop(lambda h: h.sum() > 1, lambda h: h @ p["w"], x),
    "data.*while"),
  "branches": (
    lambda p, x, d: x @ jax.lax.cond(x.sum() > 0, lambda: p["w"], lambda: p["w"].T), "axes .* and"),
  # A mixture of kernels is contracted along the experts first.
  "CondConv, each its own": (
    lambda p, x, d: jax.vmap(mixed_conv, (None, 0, 0))(p, jnp.stack([x, x]), d["gates"]),
    "in turn"),
  "mixture of results": (
    lambda p, x, d: jnp.einsum("beo,be->bo", jnp.einsum("bi,eio->beo", x, p["b"]), d["gates"]),
    "in turn"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_followed_is_refused(name):
  function, word = REFUSED[name]
  shapes = {"w": (4, 4), "v": (4, 4), "e": (3, 3, 4, 4), "b": (3, 4, 4)}
  data = {"keep": jnp.ones((4, 4)), "ids": jnp.array([0, 1]), "gates": jnp.ones((2, 3))}
  params = {path: jnp.ones(shape) for path, shape in shapes.items()}
  traced = trace.trace(function, params, jnp.ones((2, 4)), data)
  assert not traced.axes and any(re.search(word, why) for why in traced.refused.values())


# --- multiply-adds, and rules ---------------------------------------------------------------------


def on_four_devices(function, *specs):
  mesh = jax.sharding.AbstractMesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
  mapped = jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=P("d"), check_vma=False)
  return lambda p, x: mapped(p["w"], x)


gather = functools.partial(jax.lax.all_gather, axis_name="d", tiled=True)
scatter = functools.partial(jax.lax.psum_scatter, axis_name="d", tiled=True)


@pytest.mark.parametrize(
  "function",
  [
    lambda p, x: jax.lax.fori_loop(0, 8, lambda i, h: h + x[i] @ p["w"], jnp.zeros(4)),
    lambda p, x: jax.lax.ragged_dot(x, p["w"][None], jnp.array([8])),
    on_four_devices(lambda w, x: scatter(x @ w), P("d"), P(None, "d")),
    on_four_devices(lambda w, x: x @ gather(w), P("d"), P("d")),
    on_four_devices(lambda w, x: x @ scatter(w), P(), P(None, "d")),
  ],
  ids=["turns", "ragged", "tensor parallel", "gathered", "scattered"],
)
def test_multiply_adds_count_turns_and_devices(function):
  shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, "float32")
  found = trace.trace(function, {"w": shape(16, 4)}, shape(8, 16))
  assert found.macs == {"w": 8 * 16 * 4} and not found.others
  assert found.axes == {"w": (0,)}


def test_axes_by_hand_that_are_not_those_of_the_program_are_refused():
  (function, params, x), *_ = made("attention")
  path = "out/kernel"
  with pytest.raises(ValueError, match="axes= says"):
    rules_for(path, axes={re.escape(path): 0}).for_model(function, params, x)


def test_axes_by_hand_serve_where_the_program_does_not_tell():
  function, params = lambda p, x: (x * p["v"]) @ p["w"].T, {"v": jnp.ones(4), "w": jnp.ones((8, 4))}
  rules = nms.Rules({"[vw]": RECIPE}, axes={"v": 0}).for_model(function, params, jnp.ones((2, 4)))
  assert axes_of(rules, params) == {"v": (0,), "w": (1,)}
  # A default serves where it is right, so that the text of rules stays short.
  case, *_ = made("GRU")
  assert not rules_for("cell/in/kernel").for_model(*case).axes
  with pytest.raises(ValueError, match="'v': it meets data"):
    nms.Rules({"[vw]": RECIPE}).for_model(function, params, jnp.ones((2, 4)))
