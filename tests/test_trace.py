"""Axes of parameters from the program, held against tables by hand and against its derivatives."""

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import nm_sparsity_jax as nms
from nm_sparsity_jax import trace
from nm_sparsity_jax.trees import flatten

KEY = jax.random.key(0)


@pytest.fixture(autouse=True)
def as_users_compute():
  with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
    yield


def linen(module, *shape, method=None):
  """(function, params, x) of a flax module on x of a shape."""
  x = jax.random.normal(KEY, shape)
  variables = module.init(KEY, x)
  rest = {name: v for name, v in variables.items() if name != "params"}
  apply = lambda p, x: module.apply({"params": p, **rest}, x, method=method)
  return apply, variables["params"], x


def of_nnx(module, *shape):
  graph, params, rest = nnx.split(module, nnx.Param, ...)
  apply = lambda p, x: nnx.merge(graph, p, rest)(x)
  return apply, params, jax.random.normal(KEY, shape)


def plain(function, x, **shapes):
  keys = jax.random.split(KEY, len(shapes))
  params = {n: jax.random.normal(k, s) for k, (n, s) in zip(keys, shapes.items(), strict=True)}
  return function, params, jax.random.normal(KEY, x)


class Scanned(nn.Module):
  """Two layers that a scan stacks, along an axis of the kernels."""

  axis: int = 0
  remat: bool = False

  @nn.compact
  def __call__(self, x):
    class Layer(nn.Module):
      @nn.compact
      def __call__(self, x, _):
        return nn.Dense(8, name="query", use_bias=False)(x), None

    layer = nn.remat(Layer) if self.remat else Layer
    scan = nn.scan(
      layer, variable_axes={"params": self.axis}, split_rngs={"params": True}, length=2
    )
    return scan(name="layers")(x, None)[0]


class Block(nn.Module):
  @nn.compact
  def __call__(self, x):
    x = x + nn.MultiHeadDotProductAttention(2, name="attn")(nn.LayerNorm(name="norm")(x))
    return x + nn.Dense(8, name="wo")(nn.gelu(nn.Dense(16, name="wi")(x)))


class Tied(nn.Module):
  @nn.compact
  def __call__(self, ids):
    embed = nn.Embed(6, 4, name="embed")
    return embed.attend(embed(ids))


def ensemble():
  dense = nn.vmap(nn.Dense, in_axes=None, out_axes=0, axis_size=3, variable_axes={"params": 0},
                  split_rngs={"params": True})  # fmt: skip
  return linen(dense(8, use_bias=False), 2, 4)


def stacked(p, x):
  return jax.lax.scan(lambda h, w: (h @ w.T, None), x, p["w"])[0]


def by_index(p, x):
  take = lambda i, h: h @ jax.lax.dynamic_index_in_dim(p["w"], i, keepdims=False)
  return jax.lax.fori_loop(0, 3, take, x)


def heads(p, x):
  q = x @ p["q"].reshape(8, 2 * 4)
  return jnp.einsum("bhd,hde->be", q.reshape(-1, 2, 4), p["o"])


def masked(p, x):
  kept = jnp.where(jnp.abs(p["w"]) > 0.1, p["w"], 0.0)
  return x @ (kept * 2).astype(jnp.bfloat16).astype(jnp.float32)


ATTENTION = {f"{n}/kernel": (0,) for n in ("query", "key", "value")} | {"out/kernel": (0, 1)}
DENSE = {"kernel": (0,)}

# name -> (function, params, x), the axes of the parameters that have any.
CASES = {
  "Dense": (linen(nn.Dense(8), 2, 4), DENSE),
  "DenseGeneral of two axes": (linen(nn.DenseGeneral(5, axis=(-2, -1)), 2, 3, 4),
                               {"kernel": (0, 1)}),
  "DenseGeneral to two axes": (linen(nn.DenseGeneral((3, 5)), 2, 4), DENSE),
  "Conv": (linen(nn.Conv(6, (3, 3)), 1, 5, 5, 4), {"kernel": (2,)}),
  "Conv, grouped": (linen(nn.Conv(6, (3,), feature_group_count=2), 1, 5, 4), {"kernel": (1,)}),
  "Conv, strided": (linen(nn.Conv(6, (2, 2), (2, 2)), 1, 4, 4, 3), {"kernel": (2,)}),
  "ConvTranspose": (linen(nn.ConvTranspose(6, (3, 3)), 1, 4, 4, 3), {"kernel": (2,)}),
  "ConvTranspose, transpose_kernel": (
    linen(nn.ConvTranspose(6, (3, 3), transpose_kernel=True), 1, 4, 4, 3), {"kernel": (3,)}),
  "attention": (linen(nn.MultiHeadDotProductAttention(2), 1, 3, 8), ATTENTION),
  "a block": (linen(Block(), 1, 3, 8), {f"attn/{k}": v for k, v in ATTENTION.items()}
              | {"wi/kernel": (0,), "wo/kernel": (0,)}),
  "Einsum": (linen(nn.Einsum((8, 4), "bi,oi->bo", use_bias=False), 2, 4), {"kernel": (1,)}),
  "Dense query in a scan": (linen(Scanned(), 2, 8), {"layers/query/kernel": (1,)}),
  "a scan along axis 1": (linen(Scanned(axis=1), 2, 8), {"layers/query/kernel": (0,)}),
  "a scan with remat": (linen(Scanned(remat=True), 2, 8), {"layers/query/kernel": (1,)}),
  "an ensemble": (ensemble(), {"kernel": (1,)}),
  "GRU": (linen(nn.RNN(nn.GRUCell(4)), 1, 3, 5), {
    f"cell/{n}/kernel": (0,) for n in ("in", "ir", "iz", "hn", "hr", "hz")}),
  "nnx Linear": (of_nnx(nnx.Linear(4, 8, rngs=nnx.Rngs(0)), 2, 4), DENSE),
  "nnx Conv": (of_nnx(nnx.Conv(4, 6, (3, 3), rngs=nnx.Rngs(0)), 1, 5, 5, 4), {"kernel": (2,)}),
  "nnx LinearGeneral": (of_nnx(nnx.LinearGeneral((3, 4), 5, axis=(-2, -1), rngs=nnx.Rngs(0)),
                               2, 3, 4), {"kernel": (0, 1)}),
  "nnx Einsum": (of_nnx(nnx.Einsum("bi,oi->bo", (8, 4), rngs=nnx.Rngs(0)), 2, 4),
                 {"kernel": (1,)}),
  "nnx attention": (of_nnx(nnx.MultiHeadAttention(2, 8, decode=False, rngs=nnx.Rngs(0)), 1, 3, 8),
                    ATTENTION),
  "torch's layout": (plain(lambda p, x: x @ p["w"].T, (2, 4), w=(8, 4)), {"w": (1,)}),
  "stacked (layers, out, in)": (plain(stacked, (2, 8), w=(3, 8, 8)), {"w": (2,)}),
  "layers by index": (plain(by_index, (2, 8), w=(3, 8, 8)), {"w": (1,)}),
  "fused qkv, split": (plain(
    lambda p, x: sum(x @ w for w in jnp.split(p["qkv"], 3, axis=1)), (2, 4), qkv=(4, 12)),
    {"qkv": (0,)}),
  "joined kernels": (plain(
    lambda p, x: x @ jnp.concatenate([p["q"], p["k"]], 1), (2, 4), q=(4, 3), k=(4, 5)),
    {"q": (0,), "k": (0,)}),
  "heads by reshape": (plain(heads, (2, 8), q=(8, 2, 4), o=(2, 4, 5)), {"q": (0,), "o": (0, 1)}),
  "masked and scaled": (plain(masked, (2, 4), w=(4, 3)), {"w": (0,)}),
  "standardized": (plain(
    lambda p, x: x @ ((p["w"] - p["w"].mean(0)) / p["w"].std(0)), (2, 4), w=(4, 3)), {"w": (0,)}),
  "cond": (plain(
    lambda p, x: jax.lax.cond(x.sum() > 0, lambda w: x @ w, lambda w: -(x @ w), p["w"]), (2, 4),
    w=(4, 3)), {"w": (0,)}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_axes_are_those_of_the_program(name):
  (function, params, x), want = CASES[name]
  known, _ = trace.axes(function, params, x)
  assert {path: known.get(path) for path in want} == want
  # Beside these it contracts no kernel.
  assert not [path for path in known if path not in want and path.endswith("kernel")]


def reached(path, shape, function, params, x):
  """Which outputs each weight reaches: (output, *shape) of bool, by derivatives."""
  leaves, tree = jax.tree.flatten(params)
  paths = [p for p, _ in flatten(params)]
  i = paths.index(path)
  of = lambda w: function(jax.tree.unflatten(tree, [*leaves[:i], w, *leaves[i + 1 :]]), x)
  return np.asarray(jax.jacobian(of)(leaves[i])).reshape(-1, *shape) != 0


ONE_PRODUCT = (
  "Dense", "DenseGeneral of two axes", "DenseGeneral to two axes", "Conv", "ConvTranspose",
  "ConvTranspose, transpose_kernel", "Einsum", "an ensemble", "nnx Linear", "nnx Conv",
  "nnx LinearGeneral", "nnx Einsum", "torch's layout", "fused qkv, split", "masked and scaled",
)  # fmt: skip


@pytest.mark.parametrize("name", ONE_PRODUCT)
def test_weights_of_one_group_meet_in_the_same_outputs(name):
  """Along the axes all weights reach the same outputs; along any other axis they do not."""
  (function, params, x), want = CASES[name]
  for path, axes in want.items():
    shape = dict(flatten(params))[path].shape
    jacobian = reached(path, shape, function, params, x)
    for axis in range(len(shape)):
      moved = np.moveaxis(jacobian, axis + 1, 0)
      is_shared = all((moved[0] == other).all() for other in moved[1:])
      windows = "Conv" in name and axis < len(shape) - 2
      assert windows or is_shared == (axis in axes or shape[axis] == 1), (axis, axes)


@pytest.mark.parametrize(
  "case, word",
  [
    ((lambda p, x: (x @ p["w"]) @ p["w"].T, {"w": jnp.ones((4, 4))}), "along"),
    ((lambda p, x: x * p["w"], {"w": jnp.ones(4)}), "no product"),
    ((lambda p, x: x @ jnp.sort(p["w"]), {"w": jnp.ones((4, 4))}), "sort"),
    ((lambda p, x: x @ (p["w"] @ p["w"].T), {"w": jnp.ones((4, 4))}), "weights"),
    ((lambda p, x: x[:, :2] @ p["w"].reshape(2, 8), {"w": jnp.ones((4, 4))}), "part"),
    ((lambda p, x: x[:, :2] @ p["w"].reshape(3, 2, 2)[0], {"w": jnp.ones((4, 3))}), "reshape"),
  ],
)
def test_what_cannot_be_followed_is_refused(case, word):
  function, params = case
  known, refused = trace.axes(function, params, jnp.ones((2, 4)))
  assert known == {} and word in refused["w"]


def test_a_tied_embedding_is_refused():
  variables = Tied().init(KEY, jnp.zeros((2,), jnp.int32))
  known, refused = trace.axes(
    lambda p, ids: Tied().apply({"params": p}, ids), variables["params"], jnp.zeros((2,), jnp.int32)
  )
  assert known == {} and "along" in refused["embed/embedding"]


def test_multiply_adds_count_batch_and_turns():
  (function, params, x), _ = CASES["Dense query in a scan"]
  found = trace.trace(function, params, jax.ShapeDtypeStruct((5, 8), "float32"))
  assert found.macs == {"layers/query/kernel": 2 * 5 * 8 * 8} and not found.others


RECIPE = nms.recipe("sr_ste", pattern="2:4", phases=nms.Phases(total=10))


def test_for_model_names_the_axes_that_names_leave_open():
  (function, params, x), want = CASES["a block"]
  rules = nms.Rules({".*/kernel": RECIPE})
  with pytest.raises(nms.rules.AmbiguousAxis, match="for_model") as asked:
    rules.assign(params)
  assert all(name in str(asked.value) for name in ("query", "key", "value", "out"))
  known = rules.for_model(function, params, x)
  assert {path: p.axes for path, p in known.assign(params).places.items()} == want
  # The default serves where it is right, so that the text of the rules stays short.
  assert not [key for key in known.axes if re.fullmatch(key, "wi/kernel")]


@pytest.mark.parametrize("axes, word", [({"w": 0}, "axes"), (None, "")])
def test_for_model_refuses_an_axis_that_the_program_does_not_have(axes, word):
  (function, params, x), _ = CASES["torch's layout"]
  rules = nms.Rules({"w": RECIPE}, axes=axes)
  if not word:
    assert rules.for_model(function, params, x).assign(params).places["w"].axes == (1,)
    return
  with pytest.raises(ValueError, match=word):
    rules.for_model(function, params, x)


def test_for_model_refuses_what_is_in_no_product():
  with pytest.raises(ValueError, match="no product"):
    nms.Rules({"w": RECIPE}).for_model(lambda p, x: x * p["w"], {"w": jnp.ones(4)}, jnp.ones(4))
