"""Kernels for a GPU: followed in plain JAX, and lowered for CUDA. None was run on a GPU."""

import dataclasses
import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from nm_sparsity_jax.packed import choice, gpu, nm_dot, pack, prepare, unpack
from nm_sparsity_jax.patterns import NM

# Depths and columns that are no multiple of a tile, of a byte of indices or of a group.
CASES = [
  ("2:4", 37, 65, 3), ("1:4", 3, 1, 1), ("1:8", 130, 19, 17), ("3:12", 50, 33, 1),
  ("1:16", 64, 64, 65), ("1:32", 70, 4, 9), ("2:200", 300, 7, 2), ("1:2", 1, 130, 5),
]  # fmt: skip


def case(pattern, depth, features, batch, values="float32", x="float32"):
  """(packed weight, x)."""
  n_m, rng = NM.parse(pattern), np.random.default_rng(depth)
  groups = -(-depth // n_m.m)
  rank = rng.random((groups, n_m.m, features)).argsort(1).argsort(1)
  w = np.where(rank < n_m.n, rng.standard_normal(rank.shape), 0).astype(np.float32)
  packed = pack(w.reshape(-1, features)[:depth], n_m, dtype=values)
  return packed, jnp.asarray(rng.standard_normal((batch, depth)).astype(np.float32)).astype(x)


def due(x, packed):
  return np.asarray(x, np.float64) @ unpack(packed).astype(np.float64)


def thinned(cases, values):
  """Every case with every type of values. `make test` has one of each, and each type has cases."""
  thin = lambda i, j: () if (i - j) % len(values) == 0 else pytest.mark.slow
  return [
    pytest.param(*case, name, marks=thin(i, j))
    for i, case in enumerate(cases)
    for j, name in enumerate(values)
  ]


TYPES = ["float32", "bfloat16", "float16", "int8"]


@pytest.mark.parametrize("way", gpu.KERNELS)
@pytest.mark.parametrize("pattern, depth, features, batch, values", thinned(CASES, TYPES))
def test_a_kernel_is_the_dense_product(way, values, pattern, depth, features, batch):
  packed, x = case(pattern, depth, features, batch, values)
  got = jax.jit(functools.partial(gpu.dot, way=way, interpret=True))(x, packed)
  assert got.shape == (batch, features) and got.dtype == jnp.float32
  np.testing.assert_allclose(got, due(x, packed), rtol=0, atol=1e-5)


@pytest.mark.parametrize("way", gpu.KERNELS)
@pytest.mark.parametrize("values", ["bfloat16", "int8"])
def test_halves_add_up_in_float32(way, values):
  packed, x = case("2:8", 200, 40, 18, values, "bfloat16")
  got = gpu.dot(x, packed, way, interpret=True)
  np.testing.assert_allclose(got, due(x, packed), rtol=0, atol=2e-5)


def test_no_index_reads_beyond_x():
  packed, x = case("3:12", 50, 33, 2)
  wild = dataclasses.replace(packed, indices=packed.indices | 0xFF)  # 15, in groups of 12
  assert not gpu.dot(x, wild, "unpack", interpret=True).any()
  # The groups end at 12, 24, ... and x at 50: the last two reach beyond it, and add nothing.
  values = packed.values.reshape(5, 3, 33).sum(1)
  met = np.asarray(x)[:, [15, 27, 39]]
  np.testing.assert_allclose(
    gpu.dot(x, wild, "gather", interpret=True), met @ values[:3], rtol=0, atol=1e-5
  )


def test_few_rows_and_many_zeros_are_gathered():
  asked = [("2:4", 1), ("1:4", 1), ("1:8", 1), ("1:8", 8), ("1:8", 9), ("1:32", 64), ("1:32", 65)]
  packed = lambda pattern: pack(np.zeros((32, 2), np.float32), NM.parse(pattern))
  assert [gpu.kernel(packed(pattern), batch) for pattern, batch in asked] == [
    "unpack", "unpack", "gather", "gather", "unpack", "gather", "unpack"
  ]  # fmt: skip


# --- for CUDA, where no GPU is --------------------------------------------------------------------

CALL = "__gpu$xla.gpu.triton"


LOWERED = [["2:4"], ["1:8"], ["3:12"], ["1:32"], ["1:128"]]


@pytest.mark.parametrize("way", gpu.KERNELS)
@pytest.mark.parametrize("pattern, values", thinned(LOWERED, ["float32", "bfloat16", "int8"]))
# JAX 0.12 says so at each lowering, and asks for which GPU it lowers.
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
def test_a_kernel_lowers_to_triton(way, values, pattern):
  packed, x = case(pattern, 260, 100, 9, values, "bfloat16")
  dot = jax.jit(functools.partial(gpu.dot, way=way))
  unstable = export.DisabledSafetyCheck.custom_call(CALL)
  h200 = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")
  with use_abstract_mesh(AbstractMesh((), (), abstract_device=h200)):
    made = export.export(dot, platforms=["cuda"], disabled_checks=[unstable])(
      x, jax.tree.map(jnp.asarray, packed)
    )
  assert CALL in made.mlir_module()


# --- who asks for it ------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 128])
def test_auto_on_a_gpu_is_dense_until_the_table_says_otherwise(batch, monkeypatch):
  packed, _ = case("1:32", 64, 8, 1)
  assert choice.best(packed, batch, dense=True, platform="gpu") == "dense"
  assert choice.best(packed, batch, dense=False, platform="gpu") == "unpack"
  known = {"gpu": {"rows": [1], "speed": {"8": [2.0]}}}
  monkeypatch.setattr(choice, "table", lambda: {"backends": known})
  assert choice.best(packed, batch, dense=True, platform="gpu") == "gpu"
  assert choice.best(packed, batch, dense=True, platform="tpu") == "dense"


@pytest.mark.parametrize("call", [nm_dot, lambda x, w, backend: prepare(w, 1, backend)])
def test_without_a_gpu_it_is_refused_in_a_sentence(call, monkeypatch):
  packed, x = case("1:8", 16, 4, 1)
  with pytest.raises(ValueError, match="'gpu' cannot be used: JAX has no GPU here, it runs on cpu"):
    call(x, packed, "gpu")
  monkeypatch.setitem(sys.modules, "jax.experimental.pallas.triton", None)
  with pytest.raises(ValueError, match=r"'gpu' cannot be used: this JAX \(.*\) has no Triton"):
    call(x, packed, "gpu")
