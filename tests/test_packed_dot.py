"""Products of packed weights: every backend against the dense one, gradients, the choice."""

import doctest
import functools
import json
import math
import pathlib

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from nm_sparsity_jax.core.groups import Groups
from nm_sparsity_jax.core.packed import (  # fmt: skip
  BACKENDS,
  NMPacked,
  array,
  choice,
  cpu,
  dot,
  nm_dot,
  pack,
  prepare,
  unpack,
  xla,
)
from nm_sparsity_jax.core.patterns import NM

RESULTS = pathlib.Path(__file__).parents[1] / "benchmarks/results"

REAL = [
  pytest.param(
    name,
    marks=pytest.mark.skipif(
      name == "cpu_ffi" and bool(cpu.missing()), reason=cpu.missing() or "-"
    ),
  )
  for name in BACKENDS
  if name != "auto"
]
BFLOAT16 = ml_dtypes.bfloat16


def weight(seed, depth, features, pattern):
  """A random n:m weight of float32."""
  rng = np.random.default_rng(seed)
  groups = -(-depth // pattern.m)
  rank = rng.random((groups, pattern.m, features)).argsort(1).argsort(1)
  w = np.where(rank < pattern.n, rng.standard_normal(rank.shape), 0).astype(np.float32)
  return w.reshape(groups * pattern.m, features)[:depth]


def inputs(seed, *shape, dtype=np.float32):
  return jnp.asarray(np.random.default_rng(seed).standard_normal(shape).astype(dtype))


def close(got, due, tolerance=2e-6):
  got, due = np.asarray(got, np.float64), np.asarray(due, np.float64)
  np.testing.assert_allclose(got, due, rtol=0, atol=tolerance * max(np.abs(due).max(initial=0), 1))


@pytest.mark.parametrize("backend", REAL)
@pytest.mark.parametrize(
  "pattern, depth, features, lead",
  [("2:4", 37, 5, (3,)), ("1:8", 40, 19, (2, 9)), ("3:12", 50, 33, (1,)), ("1:32", 70, 4, (130,)),
   ("2:200", 300, 7, ()), ("2:4", 8, 4, (0,)), ("2:4", 0, 4, (3,))],
)  # fmt: skip
def test_a_product_is_the_dense_one(backend, pattern, depth, features, lead):
  w, x = weight(1, depth, features, NM.parse(pattern)), inputs(2, *lead, depth)
  packed = pack(w, NM.parse(pattern))
  y = jax.jit(functools.partial(nm_dot, backend=backend))(x, packed)
  assert y.shape == (*lead, features) and y.dtype == x.dtype
  close(y, np.asarray(x, np.float64) @ w.astype(np.float64))
  ready = prepare(packed, batch=max(1, math.prod(lead)), backend=backend)
  close(nm_dot(x, ready, backend), y)


@pytest.mark.parametrize("backend", REAL)
@pytest.mark.parametrize("values", ["bfloat16", "float16", "int8"])
def test_other_values_add_up_in_float32(backend, values):
  if backend == "cpu_ffi" and values == "float16":
    pytest.skip("the kernels take no float16")
  packed = pack(weight(3, 64, 24, NM(2, 8)), NM(2, 8), dtype=values)
  exact = unpack(packed).astype(np.float64)
  for dtype, tolerance in ((np.float32, 2e-6), (BFLOAT16, 1e-2)):
    x = inputs(4, 5, 64, dtype=dtype)
    y = nm_dot(x, packed, backend)
    assert y.dtype == x.dtype
    close(y, np.asarray(x, np.float64) @ exact, tolerance)


@pytest.mark.parametrize("backend", REAL)
@pytest.mark.parametrize("values", ["float32", "int8"])
def test_the_gradient_of_x_is_the_dense_one(backend, values):
  packed = pack(weight(6, 30, 12, NM(1, 4)), NM(1, 4), dtype=values)
  x, dense = inputs(7, 2, 3, 30), jnp.asarray(unpack(packed))
  loss = lambda x, dot: jnp.sum(jnp.sin(dot(x)))
  got = jax.jit(jax.grad(lambda x: loss(x, lambda x: nm_dot(x, packed, backend))))(x)
  close(got, jax.grad(lambda x: loss(x, lambda x: x @ dense))(x), 1e-5)
  half = inputs(8, 2, 30, dtype=BFLOAT16)
  assert jax.grad(lambda x: jnp.sum(nm_dot(x, packed, backend)))(half).dtype == half.dtype


def test_a_packed_weight_has_no_gradient():
  packed, x = pack(weight(9, 16, 4, NM(1, 4)), NM(1, 4)), inputs(10, 2, 16)
  with pytest.raises(TypeError, match="uint8"):
    jax.grad(lambda p: nm_dot(x, p).sum())(packed)
  # With other weights that learn it is a constant.
  learn = lambda bias: (nm_dot(x, packed) + bias[None]).sum()
  assert jax.grad(learn)(jnp.ones(4)).tolist() == [2.0] * 4


@pytest.mark.parametrize("backend", REAL)
def test_vmap_over_x_and_over_weights(backend):
  weights = [pack(weight(seed, 24, 5, NM(2, 4)), NM(2, 4), dtype="int8") for seed in (1, 2, 3)]
  x = inputs(11, 3, 2, 24)
  one = functools.partial(nm_dot, backend=backend)
  close(jax.vmap(one, (0, None))(x, weights[0]), nm_dot(x, weights[0], backend))
  stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *weights)
  due = np.stack([np.asarray(a) @ unpack(w) for a, w in zip(x, weights, strict=True)])
  close(jax.vmap(one)(x, stacked), due)
  close(jax.vmap(one, (None, 0))(x[0], stacked), np.stack([x[0] @ unpack(w) for w in weights]))


@pytest.mark.parametrize("pattern", ["2:4", "3:16", "2:17"])
def test_the_weight_that_xla_makes_has_the_same_bits(pattern):
  packed = pack(weight(1, 34, 3, NM.parse(pattern)), pattern)
  assert np.asarray(xla.dense(packed)).tobytes() == unpack(packed).tobytes()


@pytest.mark.parametrize(
  "call, said",
  [
    (lambda w: nm_dot(jnp.zeros((2, 9)), w), "do not fit"),
    (lambda w: nm_dot(jnp.zeros((2, 8)), w, "cuda"), "'cuda' is unknown"),
    (lambda w: prepare(w, 4, "cuda"), "'cuda' is unknown"),
    (lambda w: prepare(w, 4, "cpu_ffi"), "'cpu_ffi' cannot be used"),
  ],
)
def test_what_does_not_fit_is_refused(call, said):
  with pytest.raises(ValueError, match=said):
    call(pack(weight(1, 8, 4, NM(2, 4)), NM(2, 4), dtype="float16"))


# --- the choice -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
  "name, file",
  [("avx2", "avx2"), ("avx512, medium", "medium"), ("avx512, several cores", "two"),
   ("avx512, several cores, wide groups", "wide_two")],
)  # fmt: skip
def test_the_table_has_the_slowest_shape_of_what_was_measured(name, file):
  known = choice.table()["backends"][f"cpu_ffi {name}"]
  found = json.loads((RESULTS / f"packed_cpu_{file}.json").read_text())["rows"]
  rows = [row for row in found if row["backend"] == "cpu_ffi"]
  assert len(rows) == len(known["rows"]) * len(known["speed"])
  for row in rows:
    pattern = NM.parse(row["pattern"])
    ratios = known["speed"][f"{pattern.m // pattern.n}"]
    assert ratios[known["rows"].index(row["rows"])] == row["least"], row


@pytest.mark.parametrize(
  "shape, pattern, batch, cores, way",
  [((1024, 4096), "2:4", 1, 1, "cpu_ffi"), ((64, 64), "2:4", 1, 1, "dense"),
   ((1024, 4096), "16:32", 1024, 1, "dense"), ((1024, 4096), "2:4", 1, 2, "cpu_ffi")],
)  # fmt: skip
def test_auto_takes_what_was_measured_as_no_slower_than_dense(
  shape, pattern, batch, cores, way, monkeypatch
):
  monkeypatch.setattr(cpu, "missing", lambda packed=None: "")
  monkeypatch.setattr(cpu, "isa", lambda: "avx512")
  monkeypatch.setattr(choice, "cores", lambda: cores)
  w = array.like(NM.parse(pattern), Groups(shape, 0), "float32")
  assert choice.best(w, batch, dense=True, platform="cpu") == way
  assert choice.best(w, batch, dense=False, platform="cpu") != "unpack"


@pytest.fixture
def table(monkeypatch):
  """One backend, faster than dense at m / n = 8 from 16 rows on."""
  known = {"rows": [1, 16], "speed": {"2": [0.5, 0.6], "8": [0.9, 3.0]}}
  monkeypatch.setattr(choice, "table", lambda: {"backends": {"xla_scan": known}})
  monkeypatch.setattr(cpu, "missing", lambda packed=None: "it is not there")


@pytest.mark.parametrize(
  "pattern, batch, ratio",
  [("1:8", 16, 3.0), ("1:8", 1, 0.9), ("1:8", 9, 0.9), ("1:8", 999, 3.0), ("1:16", 16, 3.0),
   ("3:4", 1, 0.0)],
)  # fmt: skip
def test_between_two_points_the_slower_one_counts(table, pattern, batch, ratio):
  w = pack(np.zeros((16, 2), np.float32), NM.parse(pattern))
  assert choice.speed("xla_scan", w, batch) == ratio
  best = choice.best(w, batch, dense=True, platform="cpu")
  assert best == ("xla_scan" if ratio >= 1 else "dense")


@pytest.mark.parametrize("dtype, kind", [("bfloat16", jnp.float32), ("int8", jnp.bfloat16)])
def test_what_is_slower_than_dense_is_unpacked_once(table, dtype, kind):
  """And in float32: XLA's product of bfloat16, or its conversion at each call, took ten times."""
  w = pack(weight(1, 16, 2, NM(2, 4)), NM(2, 4), dtype=dtype)
  ready = prepare(w, batch=1)
  assert not isinstance(ready, NMPacked) and ready.dtype == np.float32
  np.testing.assert_array_equal(ready, unpack(w).astype(np.float32))
  text = jax.jit(nm_dot).lower(jnp.zeros((4, 16), kind), ready).as_text()
  assert "dot_general" in text and "16x2xf32>) -> tensor<16x2xbf16>" not in text
  assert isinstance(prepare(w, batch=1, memory=True), NMPacked)
  assert choice.best(w, 1, dense=True, platform="tpu") == "dense"
  assert choice.best(w, 1, dense=False, platform="tpu") == "unpack"


@pytest.mark.parametrize("module", [dot, choice])
def test_docstrings(module):
  names = {"np": np, "jnp": jnp, "NM": NM, "pack": array.pack}
  result = doctest.testmod(module, extraglobs=names)
  assert result.attempted and not result.failed
