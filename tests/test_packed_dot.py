"""Products of packed weights: backends and instruction sets against the dense one; the choice."""

import functools
import json
import math
import os
import re
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from checkout import ROOT, python
from reference_arrays import assert_close
from test_packed import normal

from nm_sparsity_jax.core import installed
from nm_sparsity_jax.core.packed import (
  NMPacked,
  array,
  choice,
  cpu,
  nm_dot,
  pack,
  prepare,
  unpack,
  xla,
)
from nm_sparsity_jax.core.patterns import NM

NATIVE = ROOT / "nm_sparsity_jax/core/packed/native"
there = pytest.mark.skipif(bool(cpu.missing()), reason=f"no kernels: {cpu.missing()}")
compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not on the path")
backends = pytest.mark.parametrize(
  "backend", ["xla_scan", "unpack", pytest.param("cpu_ffi", marks=there)]
)
BFLOAT16 = ml_dtypes.bfloat16


def made(depth, features, pattern, values="float32", seed=1):
  return pack(normal(seed, (depth, features), pattern), pattern, dtype=values)


def inputs(*shape, dtype=np.float32):
  return jnp.asarray(np.random.default_rng(2).standard_normal(shape).astype(dtype))


def exact(x, packed):
  return np.asarray(x, np.float64) @ unpack(packed).astype(np.float64)


@backends
@pytest.mark.parametrize(
  "pattern, values, depth, features, lead",
  [("2:4", "float32", 37, 5, (3,)), ("1:8", "bfloat16", 40, 19, (2, 9)),
   ("3:12", "int8", 50, 33, (1,)), ("2:200", "float16", 300, 7, ()),
   ("2:4", "float32", 8, 4, (0,)), ("2:4", "float32", 0, 4, (3,))],
)  # fmt: skip
def test_a_product_and_its_gradient_are_the_dense_ones(
  backend, pattern, values, depth, features, lead
):
  """Sums are float32 whatever the values are."""
  if backend == "cpu_ffi" and values == "float16":
    pytest.skip("the kernels take no float16")
  packed, x = made(depth, features, pattern, values), inputs(*lead, depth)
  y = jax.jit(functools.partial(nm_dot, backend=backend))(x, packed)
  assert y.shape == (*lead, features) and y.dtype == x.dtype
  assert_close(y, exact(x, packed), 2e-6)
  ready = prepare(packed, batch=max(1, math.prod(lead)), backend=backend)
  assert_close(nm_dot(x, ready, backend), y)
  dense = jnp.asarray(unpack(packed).astype(np.float32))
  if packed.scale is None:
    assert np.asarray(xla.dense(packed)).tobytes() == unpack(packed).tobytes()
  loss = lambda x, dot: jnp.sum(jnp.sin(dot(x).astype(jnp.float32)))
  gradient = jax.jit(jax.grad(lambda x: loss(x, lambda x: nm_dot(x, packed, backend))))
  assert_close(gradient(x), jax.grad(lambda x: loss(x, lambda x: x @ dense))(x))
  half = inputs(*lead, depth, dtype=BFLOAT16)
  assert_close(nm_dot(half, packed, backend), exact(half, packed), 1e-2)
  assert gradient(half).dtype == BFLOAT16


@backends
def test_vmap(backend):
  weights = [made(24, 5, "2:4", "int8", seed) for seed in (1, 2, 3)]
  x = inputs(3, 2, 24)
  one = functools.partial(nm_dot, backend=backend)
  stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *weights)
  want = np.stack([exact(a, w) for a, w in zip(x, weights, strict=True)])
  assert_close(jax.vmap(one)(x, stacked), want)


def test_what_does_not_fit_is_refused():
  w = made(8, 4, "2:4", "float16")
  with pytest.raises(ValueError, match="do not fit"):
    nm_dot(jnp.zeros((2, 9)), w)
  with pytest.raises(ValueError, match="'cpu_ffi' cannot be used"):
    prepare(w, 4, "cpu_ffi")


# --- the choice -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
  "name, file",
  [("avx2", "avx2"), ("avx512, medium", "medium"), ("avx512, several cores", "two"),
   ("avx512, several cores, wide groups", "wide_two")],
)  # fmt: skip
def test_the_table_has_the_slowest_shape_of_what_was_measured(name, file):
  known = choice.table()["backends"][f"cpu_ffi {name}"]
  measured = (ROOT / f"benchmarks/results/packed_cpu_{file}.json").read_text()
  rows = [row for row in json.loads(measured)["rows"] if row["backend"] == "cpu_ffi"]
  assert len(rows) == len(known["rows"]) * len(known["speed"])
  for row in rows:
    pattern = NM.parse(row["pattern"])
    ratios = known["speed"][f"{pattern.m // pattern.n}"]
    assert ratios[known["rows"].index(row["rows"])] == row["least"], row


@pytest.fixture
def table(monkeypatch):
  """One backend, faster than dense at m / n = 8 from 16 rows on; more so in large weights."""
  known = {
    "xla_scan, tiny": {"rows": [1, 16], "speed": {"2": [0.5, 0.6], "8": [0.9, 3.0]}},
    "xla_scan": {"rows": [1], "speed": {"2": [4.0]}},
    "xla_scan, wide groups": {"rows": [1], "speed": {"2": [2.0]}},
    "xla_scan, several cores": {"rows": [1], "speed": {"2": [0.7]}},
  }
  monkeypatch.setattr(choice, "table", lambda: {"backends": known})
  monkeypatch.setattr(cpu, "missing", lambda packed=None: "it is not there")
  monkeypatch.setattr(installed, "cores", lambda: 1)


@pytest.mark.parametrize(
  "shape, pattern, batch, ratio",
  [
    # Between two points the slower one counts, and beyond the last one that one.
    ((16, 2), "1:8", 9, 0.9), ((16, 2), "1:16", 999, 3.0), ((16, 2), "3:4", 1, 0.0),
    ((4096, 1024), "2:4", 1, 4.0), ((4096, 1024), "16:32", 1, 2.0),
  ],
)  # fmt: skip
def test_the_choice_is_what_was_measured_as_no_slower_than_dense(
  table, shape, pattern, batch, ratio, monkeypatch
):
  w = array.like(NM.parse(pattern), shape, "float32")
  assert choice.speed("xla_scan", w, batch) == ratio
  assert choice.best(w, batch, dense=True) == ("xla_scan" if ratio >= 1 else "dense")
  assert choice.best(w, batch, dense=False) == ("xla_scan" if ratio else "unpack")
  monkeypatch.setattr(installed, "cores", lambda: 2)
  assert choice.speed("xla_scan", w, batch) == (0.7 if shape[0] > 16 else 0.0)
  monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
  assert choice.best(w, batch, dense=True) == "dense"


def test_what_is_slower_than_dense_is_unpacked_once(table):
  """And in float32: XLA's product of bfloat16, or its conversion at each call, took ten times."""
  w = made(16, 2, "2:4", "bfloat16")
  ready = prepare(w, batch=1)
  assert not isinstance(ready, NMPacked) and ready.dtype == np.float32
  np.testing.assert_array_equal(ready, unpack(w).astype(np.float32))
  text = jax.jit(nm_dot).lower(jnp.zeros((4, 16), jnp.bfloat16), ready).as_text()
  assert "dot_general" in text and "16x2xf32>) -> tensor<16x2xbf16>" not in text
  assert isinstance(prepare(w, batch=1, memory=True), NMPacked)


# --- the C++ kernels ------------------------------------------------------------------------------


@there
@pytest.mark.parametrize("isa", [name for name in cpu.ISAS if name != "best"])
@pytest.mark.parametrize(
  "pattern, values, depth, features, batch",
  [("1:8", "bfloat16", 64, 80, 16), ("3:16", "int8", 50, 33, 40), ("5:256", "float32", 9, 5, 2),
   # Large enough for several threads; `check.cc` sees that they are asked.
   ("2:4", "float32", 1030, 3001, 3), ("1:128", "int8", 1030, 3001, 200)],
)  # fmt: skip
def test_each_instruction_set_gives_the_dense_product(isa, pattern, values, depth, features, batch):
  """Its bits do not depend on threads."""
  if not cpu.isa(isa):
    pytest.skip(f"this machine has no {isa}")
  packed, x = made(depth, features, pattern, values), inputs(batch, depth)
  one, two, all_of_them = (np.asarray(cpu.dot(x, packed, isa, threads=n)) for n in (1, 2, 0))
  assert_close(one, exact(x, packed))
  assert one.tobytes() == two.tobytes() == all_of_them.tobytes()


MANY = """
import concurrent.futures, jax, jax.numpy as jnp, numpy as np
from nm_sparsity_jax.core.packed import cpu, pack
from nm_sparsity_jax.core.patterns import NM
w = np.zeros((256, 4, 2048), np.float32)
w[:, 1] = np.random.default_rng(0).standard_normal((256, 2048))
w = pack(w.reshape(1024, 2048), NM(1, 4))  # large enough for two threads
x = jnp.ones((8, 1024))
f = jax.jit(lambda x: sum(cpu.dot(x * i, w) for i in range(8)))
due = np.asarray(f(x))
with concurrent.futures.ThreadPoolExecutor(64) as pool:
  for y in pool.map(lambda _: np.asarray(f(x)), range(64)):
    assert (y == due).all()
print("done")
"""


def done(*command, **options):
  """A process that has ended, and what it said."""
  return subprocess.run(
    list(map(str, command)), capture_output=True, text=True, check=False, **options
  )


@there
def test_64_calls_at_once_in_a_pool_of_two_threads():
  """A kernel runs on a thread of the pool, so it must not wait for another to become free."""
  assert python("-c", MANY, PJRT_NPROC="2", timeout=120) == "done\n"


@there
@pytest.mark.parametrize(
  "change, word",
  [
    ({"bits": 3}, "n, m and bits do not fit"),
    ({"n": 2}, "the shapes do not fit each other"),
    ({"values": np.ones((4, 6), np.float16)}, "float32, bfloat16 or int8"),
  ],
)
def test_a_call_whose_numbers_do_not_fit_is_refused(change, word):
  """XLA would hand over any buffers: the handler itself looks at their sizes."""
  arrays = {"x": np.ones((2, 16), np.float32), "values": np.ones((4, 6), np.float32),
            "indices": np.zeros((1, 6), np.uint8), "scale": np.zeros(0, np.float32)}  # fmt: skip
  numbers = {"n": 1, "m": 4, "bits": 2, "isa": 0, "threads": 1}
  arrays, numbers = ({k: change.get(k, v) for k, v in x.items()} for x in (arrays, numbers))
  call = jax.ffi.ffi_call("nm_sparsity_dot", jax.ShapeDtypeStruct((2, 6), jnp.float32))
  with pytest.raises(Exception, match=f"nm_sparsity_dot: .*{word}"):
    static = {name: np.int64(value) for name, value in numbers.items()}
    jax.block_until_ready(call(*arrays.values(), **static))


# --- the library ----------------------------------------------------------------------------------


def test_a_library_that_does_not_fit_is_one_sentence(tmp_path):
  assert "No such file" in installed.kernels(str(tmp_path))[1]
  installed.kernels.cache_clear()
  (tmp_path / installed.LIBRARY).write_bytes(b"no library")
  assert "cannot be loaded" in installed.kernels(str(tmp_path))[1]
  # The number that a sound one must have is that of its source.
  assert f"#define NM_VERSION {installed.KERNELS_VERSION}\n" in (NATIVE / "job.h").read_text()


def build(tmp_path, **env):
  """Copies what a build needs and builds there; returns (library, what was said)."""
  for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
    shutil.copy(ROOT / name, tmp_path)
  package = tmp_path / "nm_sparsity_jax"
  shutil.copytree(NATIVE, package / "core/packed/native")
  shutil.copy(ROOT / "nm_sparsity_jax/_version.py", package)
  command = (sys.executable, "-W", "ignore", "setup.py", "-q", "build_ext", "--inplace")
  built = done(*command, cwd=tmp_path, env=os.environ | env)
  assert not built.returncode, built.stderr
  return package / "core/packed" / installed.LIBRARY, built.stdout + built.stderr


def test_a_build_without_a_compiler_does_not_fail(tmp_path):
  none = str(tmp_path / "no-compiler")
  library, said = build(tmp_path, CC=none, CXX=none)
  assert not library.exists() and "libnm_sparsity.so is not built" in said


@compiler
@pytest.mark.slow
def test_a_build_makes_a_library_that_fits(tmp_path):
  native = {f"{kind}FLAGS": "-march=x86-64-v4" for kind in ("C", "CXX", "CPP")}
  library, said = build(tmp_path, **native if os.uname().machine == "x86_64" else {})
  assert installed.kernels(str(library.parent))[1] == "", said
  # One file's AVX-512 must not be what another one calls: nothing but its table is shared.
  for core in tmp_path.rglob("core_*.o"):
    shown = done("nm", "-C", "--extern-only", "--defined-only", core).stdout
    shared = [line.split()[-1] for line in shown.splitlines()]
    assert shared == [f"nm::{core.stem.removeprefix('core_')}"]
  # Elsewhere a wheel would die of what the flags of its builder allow.
  code = {o.stem: done("objdump", "-d", o).stdout for o in tmp_path.rglob("*.o")}
  wide = {name for name, text in code.items() if re.search("%[yz]mm", text)}
  assert wide <= {"core_avx2", "core_avx512"}


@compiler
@pytest.mark.slow
@pytest.mark.parametrize("kind, seeds", [("address,undefined", 20), ("thread", 8)])
def test_sanitizers_find_nothing(tmp_path, kind, seeds):
  """Every pattern, value and instruction set; odd shapes, batch 0, wild indices, odd addresses;
  helpers that come at once, never, and when the buffers of their product are gone."""
  flags = ["-O1", "-g", "-std=c++17", "-w", f"-fsanitize={kind}"]
  flags += ["-fno-sanitize-recover=undefined"] * ("undefined" in kind)
  avx2 = ["-mavx2", "-mfma"]
  avx512 = [*avx2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq"]
  units = {"core_portable.cc": [], "run.cc": [], "check.cc": []}
  if os.uname().machine == "x86_64":
    units |= {"core_avx2.cc": avx2, "core_avx512.cc": avx512, "run.cc": ["-DNM_X86"]}
  objects = [tmp_path / f"{name}.o" for name in units]
  for (name, own), out in zip(units.items(), objects, strict=True):
    subprocess.run(["g++", *flags, *own, "-c", NATIVE / name, "-o", out], check=True)
  program = tmp_path / "check"
  subprocess.run(["g++", *flags, *objects, "-o", program, "-lpthread"], check=True)
  for seed in range(1, seeds + 1):
    found = done(program, seed)
    assert not found.returncode and "products" in found.stdout, found.stdout + found.stderr[-2000:]
