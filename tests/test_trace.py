"""Axes of parameters from the program, held against tables by hand."""

import functools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
import test_t5 as t5
import test_vision_models as images
from jax.sharding import PartitionSpec as P

import nm_sparsity_jax as nms
from nm_sparsity_jax.core import trace
from nm_sparsity_jax.core.trees import flatten

KEY = jax.random.key(0)
RECIPE = nms.recipe("sr_ste", pattern="2:4", phases=nms.Phases(total=10))


@pytest.fixture(autouse=True)
def as_users_compute():
  with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
    yield


# --- layers and models of several libraries at tiny sizes -----------------------------------------


def shape(*sizes):
  return jax.ShapeDtypeStruct(sizes, "float32")


def plain(function, x, **shapes):
  return function, {name: shape(*sizes) for name, sizes in shapes.items()}, shape(*x)


def linen(module, *sizes):
  params = jax.eval_shape(lambda: module.init(KEY, jnp.zeros(sizes)))["params"]
  return lambda p, x: module.apply({"params": p}, x), params, shape(*sizes)


def equinox(make, call, *sizes):
  """Of make(equinox, key), called as call(module, x)."""
  eqx = pytest.importorskip("equinox", reason="no Equinox here: pip install -e '.[dev]'")
  params, rest = eqx.partition(make(eqx, KEY), eqx.is_inexact_array)
  return lambda p, x: call(eqx.combine(p, rest), x), params, shape(*sizes)


def by_index(p, x):
  take = lambda i, h: h @ jax.lax.dynamic_index_in_dim(p["w"], i, keepdims=False)
  return jax.lax.fori_loop(0, 3, take, x)


def masked(p, x):
  kept = jnp.where(jnp.abs(p["w"]) > 0, p["w"], 0.0)
  return x @ (kept * 2).astype(jnp.bfloat16).astype(jnp.float32)


def every(*names, axes=(0,)):
  """A table: these layers' kernels, wherever they are."""
  return {rf"(.*/)?({'|'.join(names)})/kernel": axes}


QKV = ("query", "key", "value")
ATTENTION = every(*QKV) | every("out", axes=(0, 1))
# name -> (what makes it, {regex of a path: axes its products sum over})
CASES = {
  # flax Linen
  "Conv, grouped": (
    lambda: linen(nn.Conv(16, (3,), feature_group_count=2), 1, 2, 12), {"kernel": (1,)}),
  "ConvTranspose, transpose_kernel": (
    lambda: linen(nn.ConvTranspose(6, (3, 3), transpose_kernel=True), 1, 2, 2, 5),
    {"kernel": (3,)}),
  "attention": (lambda: linen(nn.MultiHeadDotProductAttention(4), 1, 2, 12), ATTENTION),
  # Equinox
  "equinox attention": (lambda: equinox(
    lambda eqx, key: eqx.nn.MultiheadAttention(4, 12, key=key), lambda m, x: m(x, x, x), 2, 12),
    {".*_proj/weight": (1,)}),
  # jax alone
  "layers by index": (lambda: plain(by_index, (2, 8), w=(3, 8, 8)), {"w": (1,)}),
  "fused qkv, split": (lambda: plain(
    lambda p, x: sum(x @ w for w in jnp.split(p["qkv"], 3, axis=1)), (2, 4), qkv=(4, 12)),
    {"qkv": (0,)}),
  "joined kernels": (lambda: plain(
    lambda p, x: x @ jnp.concatenate([p["q"], p["k"]], 1), (2, 4), q=(4, 3), k=(4, 5)),
    {"q": (0,), "k": (0,)}),
  "masked and scaled": (lambda: plain(masked, (2, 4), w=(4, 3)), {"w": (0,)}),
  # A product with one-hot vectors sums over nothing.
  "a look-up": (lambda: plain(
    lambda p, x: (jax.nn.one_hot(jnp.array([1, 0]), 6) @ p["table"] + x) @ p["w"], (2, 4),
    table=(6, 4), w=(4, 3)), {"w": (0,)}),
}  # fmt: skip


@functools.cache
def made(name):
  """(function, params, x) of a case, and the axes of its parameters."""
  make, table = CASES[name]
  case = make()
  paths = [path for path, _ in flatten(case[1])]
  found = {path: next((r for r in table if re.fullmatch(r, path)), None) for path in paths}
  assert set(table) == set(found.values()) - {None}, "a line of the table names no parameter"
  return case, {path: table[regex] for path, regex in found.items() if regex}


def rules_for(*paths, **fields):
  # In brackets, since `q` alone would be a role.
  places = {f"({re.escape(path)})": RECIPE for path in paths}
  return nms.Rules(places, indivisible="pad", **fields)


def axes_of(rules, params):
  return {path: place.groups.axes for path, place in rules.assign(params).places.items()}


@pytest.mark.parametrize("name", CASES)
def test_axes_of_a_program_are_those_that_its_products_sum_over(name):
  (function, params, x), want = made(name)
  traced = trace.trace(function, params, x)
  assert traced.axes == want and {*want, *traced.refused} == traced.shapes.keys()
  assert not want.keys() & traced.refused.keys()
  assert axes_of(rules_for(*want).for_model(function, params, x), params) == want


@pytest.mark.parametrize("fields", [{}, dict(scan_layers=True, remat_policy="minimal")])
def test_our_t5_contracts_what_names_say(fields):
  network = t5.make(**fields)
  variables = t5.shapes_of(network)
  params, logical = variables["params"], variables["params_axes"]
  apply = lambda p, batch: network.apply({"params": p}, *batch, enable_dropout=False)
  rules = nms.Rules({".*kernel": RECIPE}, indivisible="pad").with_logical_axes(logical)
  traced = trace.trace(apply, params, t5.BATCH)
  named = axes_of(rules, params)
  assert len(named) > 5 and named.items() <= traced.axes.items()


@pytest.mark.parametrize("name", images.FAMILIES)
def test_our_networks_of_images_contract_what_names_say(name):
  network = images.network(name, **images.SMALLER[name])
  variables = images.shapes_of(network)
  # The network of relative positions of a Swin gets constants alone.
  rules = nms.Rules({"(?!.*cpb_mlp).*kernel": RECIPE}, indivisible="pad")
  traced = trace.trace(network.apply, variables, images.images(network))
  named = {f"params/{path}": axes for path, axes in axes_of(rules, variables["params"]).items()}
  assert len(named) > 5 and named.items() <= traced.axes.items()


# --- what is refused ------------------------------------------------------------------------------


def in_scan(turn, *carry):
  """The last of a carry after two turns."""
  return jax.lax.scan(lambda c, _: (turn(*c), None), carry, None, length=2)[0][-1]


# What is done with w (4, 4), and with experts e and b.
REFUSED = {
  "tied": (lambda p, x, d: (x @ p["w"]) @ p["w"].T, "along"),
  "sort": (lambda p, x, d: x @ jnp.sort(p["w"]), "sort"),
  "cut axis": (lambda p, x, d: x[:, :2] @ p["w"].reshape(2, 8), "part"),
  "sum of experts": (lambda p, x, d: x @ p["e"].sum(0), "no product"),
  # Data meets the weight before the product.
  "tied embedding": (lambda p, x, d: p["w"][d["ids"]] @ p["w"].T, "data.*gather"),
  # Loops.
  "scan, swapped": (
    lambda p, x, d: in_scan(lambda w, v, h: (v, w, h @ w @ v.T), p["w"], p["v"], x),
    "turn to turn"),
  "while, its condition": (
    lambda p, x, d: jax.lax.while_loop(
      lambda h: (h @ p["w"].T).sum() > 1, lambda h: h @ p["w"], x), "along"),
  "branches": (
    lambda p, x, d: x @ jax.lax.cond(x.sum() > 0, lambda: p["w"], lambda: p["w"].T), "along"),
  "mixture of results": (
    lambda p, x, d: jnp.einsum("beo,be->bo", jnp.einsum("bi,eio->beo", x, p["b"]), d["gates"]),
    "in turn"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_followed_is_refused(name):
  function, word = REFUSED[name]
  shapes = {"w": (4, 4), "v": (4, 4), "e": (3, 3, 4, 4), "b": (3, 4, 4)}
  data = {"ids": jnp.array([0, 1]), "gates": jnp.ones((2, 3))}
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
  ],
  ids=["turns", "ragged", "tensor parallel", "gathered"],
)
def test_multiply_adds_count_turns_and_devices(function):
  found = trace.trace(function, {"w": shape(16, 4)}, shape(8, 16))
  assert found.macs == {"w": 8 * 16 * 4} and not found.others
  assert found.axes == {"w": (0,)}


def test_what_names_leave_open_is_asked_for_and_the_program_tells():
  (function, params, x), _ = made("attention")
  path = "out/kernel"
  with pytest.raises(ValueError, match="for_model"):
    rules_for(path).assign(params)
  with pytest.raises(ValueError, match="axes= says"):
    rules_for(path, axes={re.escape(path): 0}).for_model(function, params, x)


def test_axes_by_hand_serve_where_the_program_does_not_tell():
  function, params = lambda p, x: (x * p["v"]) @ p["w"].T, {"v": jnp.ones(4), "w": jnp.ones((8, 4))}
  rules = nms.Rules({"[vw]": RECIPE}, axes={"v": 0}).for_model(function, params, jnp.ones((2, 4)))
  assert axes_of(rules, params) == {"v": (0,), "w": (1,)}
  with pytest.raises(ValueError, match="'v': it meets data"):
    nms.Rules({"[vw]": RECIPE}).for_model(function, params, jnp.ones((2, 4)))
