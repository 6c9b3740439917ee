"""Axes of parameters from the program, held against tables by hand and against its derivatives."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import layouts
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import nm_sparsity_jax as nms
from nm_sparsity_jax.core import trace
from nm_sparsity_jax.core.trees import flatten

# T5X and what they import warn on their own account.
pytestmark = pytest.mark.filterwarnings("ignore")
RECIPE = nms.recipe("sr_ste", pattern="2:4", phases=nms.Phases(total=10))
NOISE = 1e-5  # of float32; what is no noise came out above 9e-4, and noise below 1e-7


@pytest.fixture(autouse=True)
def as_users_compute():
  with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
    yield


@functools.cache
def made(name):
  """(function, params, x) of a case, the number of vectors that meet a weight, and the axes."""
  make, table = layouts.CASES[name]
  *case, rows = make()
  return case, rows, layouts.wanted(table, case[1])


def rules_for(*paths, **fields):
  # In brackets, since `q` alone would be a role.
  places = {f"({re.escape(path)})": RECIPE for path in paths}
  return nms.Rules(places, indivisible="pad", **fields)


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


@pytest.mark.parametrize("name", layouts.CASES)
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
  places = rules_for(*want).for_model(function, params, x).assign(params).places
  assert {path: place.axes for path, place in places.items()} == want
  found, distinct = derivatives(function, params, x), 0
  for path, axes in want.items():
    derivative = np.asarray(found[path])
    assert not has_more_directions(derivative, axes, rows), path
    for axis, length in enumerate(derivative.shape[1:]):
      if (axis,) != axes and length > rows:
        assert has_more_directions(derivative, (axis,), rows), (path, axis)
        distinct += 1
  assert distinct >= len(want) / 2  # else the sizes of this case tell no axes apart


def in_scan(turn, *carry):
  """The last of a carry after two turns."""
  return jax.lax.scan(lambda c, _: (turn(*c), None), carry, None, length=2)[0][-1]


def in_while(turn, *carry):
  return jax.lax.while_loop(lambda c: c[-1].sum() < 9, lambda c: turn(*c), carry)[-1]


def mixed_conv(p, x, gates):
  kernel = jnp.einsum("e,ewio->wio", gates, p["e"])
  numbers = ("NWC", "WIO", "NWC")
  return jax.lax.conv_general_dilated(x[None], kernel, (1,), "SAME", dimension_numbers=numbers)


# What is done with w (4, 4), and with experts e (3, 4, 5) or kernels of a window of 3.
REFUSED = {
  "tied": (lambda p, x, d: (x @ p["w"]) @ p["w"].T, "along"),
  "unused": (lambda p, x, d: x, "no product"),
  "a scale": (lambda p, x, d: x * p["w"][:2], "mul"),
  "sort": (lambda p, x, d: x @ jnp.sort(p["w"]), "sort"),
  "times constants": (lambda p, x, d: x @ (p["w"] @ jnp.ones((4, 4))), "constant"),
  "times itself": (lambda p, x, d: x @ (p["w"] @ p["w"].T), "weights"),
  "plus weights": (lambda p, x, d: x @ p["w"] + p["v"][:2] @ p["w"], "weights"),
  "cut axis": (lambda p, x, d: x[:, :2] @ p["w"].reshape(2, 8), "part"),
  "cut rows": (lambda p, x, d: x @ p["w"][:, :3].reshape(3, 4).T, "reshape"),
  "sum of experts": (lambda p, x, d: x @ p["e"].sum(0), "reduce_sum"),
  "permuted rows": (lambda p, x, d: x @ p["w"][jnp.array([1, 0, 3, 2])], "gather"),
  # Data meets the weight before the product.
  "tied, dropconnect": (lambda p, x, d: (x @ p["w"]) @ (p["w"] * d["keep"]).T, "data.*mul"),
  "product and sum": (lambda p, x, d: (x[..., None] * p["w"]).sum(1), "data.*mul"),
  "tied embedding": (lambda p, x, d: p["w"][d["ids"]] @ p["w"].T, "data.*gather"),
  "a branch of data": (
    lambda p, x, d: (x @ p["w"]) @ jax.lax.cond(x.sum() > 0, lambda: p["w"].T, lambda: d["keep"]),
    "data.*cond"),
  "soft and hard look-up": (
    lambda p, x, d: jax.nn.one_hot(d["ids"], 4) @ p["w"] + x @ p["w"], "one-hot"),
  # Loops.
  "scan, swapped": (
    lambda p, x, d: in_scan(lambda w, v, h: (v, w, h @ w @ v.T), p["w"], p["v"], x),
    "turn to turn"),
  "while, transposed": (
    lambda p, x, d: in_while(lambda w, h: (w.T, h @ w), p["w"], x), "turn to turn"),
  "while, its condition": (
    lambda p, x, d: jax.lax.while_loop(
      lambda h: (h @ p["w"].T).sum() > 1, lambda h: h @ p["w"], x), "along"),
  "branches": (
    lambda p, x, d: x @ jax.lax.cond(x.sum() > 0, lambda: p["w"], lambda: p["w"].T), "along"),
  # A mixture of kernels is contracted along the experts first.
  "CondConv, each its own": (
    lambda p, x, d: jax.vmap(mixed_conv, (None, 0, 0))(p, jnp.stack([x, x]), d["gates"]),
    "in turn"),
  "mixture, each its own": (
    lambda p, x, d: jnp.einsum("bi,bio->bo", x, jnp.einsum("be,eio->bio", d["gates"], p["b"])),
    "in turn"),
  "mixture of results": (
    lambda p, x, d: jnp.einsum("beo,be->bo", jnp.einsum("bi,eio->beo", x, p["b"]), d["gates"]),
    "in turn"),
  "mixture in a scan": (
    lambda p, x, d: in_scan(
      lambda m, h: (m, h @ m), jnp.tensordot(d["gates"][0], p["e"][:, 0], 1), x), "in turn"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_followed_is_refused(name):
  function, word = REFUSED[name]
  shapes = {"w": (4, 4), "v": (4, 4), "e": (3, 3, 4, 4), "b": (3, 4, 4)}
  data = {"keep": jnp.ones((4, 4)), "ids": jnp.array([0, 1]), "gates": jnp.ones((2, 3))}
  params = {path: jnp.ones(shape) for path, shape in shapes.items()}
  traced = trace.trace(function, params, jnp.ones((2, 4)), data)
  assert not traced.axes and any(re.search(word, why) for why in traced.refused.values())


def test_a_query_of_many_heads_that_meets_one_key_is_no_mixture():
  def attention(p, x):
    q, k = jnp.einsum("td,dhk->thk", x, p["q"]), x @ p["k"]
    return jnp.einsum("hts,sk->thk", jnp.einsum("thk,sk->hts", q, k), k)

  params = {"q": jnp.ones((8, 3, 5)), "k": jnp.ones((8, 5))}
  assert trace.trace(attention, params, jnp.ones((2, 8))).axes == {"q": (0,), "k": (0,)}


def on_four_devices(function, *specs):
  mesh = jax.sharding.AbstractMesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
  return jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=P("d"), check_vma=False)


def all_gather(w, x):
  return x @ jax.lax.all_gather(w, "d", tiled=True)


def psum(w, x):
  return jax.lax.psum_scatter(x @ w, "d", tiled=True)


@pytest.mark.parametrize(
  "function",
  [
    lambda p, x: jax.lax.map(lambda row: row @ p["w"], x),
    lambda p, x: jax.lax.fori_loop(0, 8, lambda i, h: h + x[i] @ (p["w"] / i), jnp.zeros(4)),
    lambda p, x: jax.lax.ragged_dot(x, p["w"][None], jnp.array([8])),
    lambda p, x: on_four_devices(lambda w, x: x @ w, P(), P("d"))(p["w"], x),
    lambda p, x: on_four_devices(psum, P("d"), P(None, "d"))(p["w"], x),
    lambda p, x: on_four_devices(all_gather, P("d"), P("d"))(p["w"], x),
  ],
  ids=["turns", "turns by a counter", "ragged", "data parallel", "tensor parallel", "gathered"],
)
def test_multiply_adds_count_turns_and_devices(function):
  shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, "float32")
  found = trace.trace(function, {"w": shape(16, 4)}, shape(8, 16))
  assert found.macs == {"w": 8 * 16 * 4} and not found.others
  assert found.axes == {"w": (0,)}


@pytest.mark.parametrize(
  "name, path, axes, guess",
  [("Dense query in a scan", "layers/query/kernel", (1,), 0), 
   ("a block", "attn/out/kernel", (0, 1), 0),
   ("stacked (layers, out, in)", "w", (2,), 1)],
)  # fmt: skip
def test_what_names_leave_open_is_asked_for_and_the_program_tells(name, path, axes, guess):
  (function, params, x), *_ = made(name)
  rules = rules_for(path)
  with pytest.raises(ValueError, match="for_model"):
    rules.assign(params)
  assert rules.for_model(function, params, x).assign(params).places[path].axes == axes
  with pytest.raises(ValueError, match="leave axes= out"):
    rules_for(path, axes={re.escape(path): guess}).for_model(function, params, x)


def test_axes_by_hand_serve_where_the_program_does_not_tell():
  function, params = lambda p, x: (x * p["v"]) @ p["w"].T, {"v": jnp.ones(4), "w": jnp.ones((8, 4))}
  rules = nms.Rules({"[vw]": RECIPE}, axes={"v": 0}).for_model(function, params, jnp.ones((2, 4)))
  assert {path: p.axes for path, p in rules.assign(params).places.items()} == {"v": (0,), "w": (1,)}
  with pytest.raises(ValueError, match="'v': it meets data"):
    nms.Rules({"[vw]": RECIPE}).for_model(function, params, jnp.ones((2, 4)))


def test_the_default_axis_serves_where_it_is_right_so_that_the_text_of_rules_stays_short():
  (function, params, x), *_ = made("a block")
  rules = nms.Rules({".*/kernel": RECIPE}).for_model(function, params, x)
  assert not [key for key in rules.axes if re.fullmatch(key, "wi/kernel")]


def test_for_model_needs_inputs():
  with pytest.raises(ValueError, match="no inputs"):
    nms.Rules({"w": RECIPE}).for_model(lambda p: p["w"], {"w": jnp.ones(4)})
