"""The C++ kernels: every instruction set against the dense product, threads, builds, sanitizers."""

import os
import pathlib
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_packed_dot import inputs, weight

from nm_sparsity_jax.core import installed
from nm_sparsity_jax.core.packed import cpu, pack, unpack
from nm_sparsity_jax.core.patterns import NM

ROOT = pathlib.Path(__file__).resolve().parents[1]
NATIVE = ROOT / "nm_sparsity_jax/core/packed/native"
there = pytest.mark.skipif(bool(cpu.missing()), reason=f"no kernels: {cpu.missing()}")
compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not on the path")


def made(seed, depth, features, pattern, values):
  pattern = NM.parse(pattern)
  return pack(weight(seed, depth, features, pattern), pattern, dtype=values)


@there
@pytest.mark.parametrize("isa", [name for name in cpu.ISAS if name != "best"])
@pytest.mark.parametrize(
  "pattern, values, depth, features, batch",
  [("2:4", "float32", 37, 67, 3), ("1:8", "bfloat16", 64, 80, 16), ("3:16", "int8", 50, 33, 40),
   ("1:8", "float32", 96, 80, 150), ("1:32", "float32", 70, 48, 150), ("1:32", "int8", 96, 16, 1),
   ("1:128", "bfloat16", 300, 300, 70), ("5:256", "float32", 9, 5, 2)],
)  # fmt: skip
def test_each_instruction_set_gives_the_dense_product(isa, pattern, values, depth, features, batch):
  if not cpu.isa(isa):
    pytest.skip(f"this machine has no {isa}")
  packed, x = made(1, depth, features, pattern, values), inputs(2, batch, depth)
  due = np.asarray(x, np.float64) @ unpack(packed).astype(np.float64)
  got = np.asarray(cpu.dot(x, packed, isa))
  np.testing.assert_allclose(got, due, rtol=0, atol=1e-5 * max(1, np.abs(due).max()))


@there
@pytest.mark.parametrize("isa", ["avx2", "avx512"])
@pytest.mark.parametrize(
  "pattern, values, batch",
  [("2:4", "float32", 3), ("1:128", "int8", 200), ("2:64", "bfloat16", 70)],
)
def test_bits_do_not_depend_on_threads(pattern, values, batch, isa):
  """The product is large enough for several threads; `check.cc` sees that they are asked."""
  if not cpu.isa(isa):
    pytest.skip(f"this machine has no {isa}")
  packed, x = made(3, 1030, 3001, pattern, values), inputs(4, batch, 1030)
  one = np.asarray(cpu.dot(x, packed, isa, threads=1))
  for threads in (2, 0):
    assert np.asarray(cpu.dot(x, packed, isa, threads=threads)).tobytes() == one.tobytes()


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


@there
def test_64_calls_at_once_in_a_pool_of_two_threads():
  """A kernel runs on a thread of the pool, so it must not wait for another to become free."""
  env = os.environ | {"PJRT_NPROC": "2"}
  done = subprocess.run(
    [sys.executable, "-c", MANY], capture_output=True, text=True, env=env, timeout=120, check=False
  )
  assert done.stdout == "done\n", done.stderr[-2000:]


@there
@pytest.mark.parametrize(
  "changed, said",
  [
    ({"bits": 3}, "n, m and bits do not fit"),
    ({"n": 2}, "the shapes do not fit each other"),
    ({"isa": 9}, "lacks that instruction set"),
    ({"scale": np.ones(3, np.float32)}, "int8 has a scale"),
    ({"values": np.ones((4, 6), np.float16)}, "float32, bfloat16 or int8"),
  ],
)
def test_a_call_whose_numbers_do_not_fit_is_refused(changed, said):
  """XLA would hand over any buffers: the handler itself looks at their sizes."""
  arrays = {"x": np.ones((2, 16), np.float32), "values": np.ones((4, 6), np.float32),
            "indices": np.zeros((1, 6), np.uint8), "scale": np.zeros(0, np.float32)}  # fmt: skip
  numbers = {"n": 1, "m": 4, "bits": 2, "isa": 0, "threads": 1}
  arrays |= {k: v for k, v in changed.items() if k in arrays}
  numbers |= {k: v for k, v in changed.items() if k in numbers}
  call = jax.ffi.ffi_call("nm_sparsity_dot", jax.ShapeDtypeStruct((2, 6), jnp.float32))
  with pytest.raises(Exception, match=f"nm_sparsity_dot: .*{said}"):
    static = {name: np.int64(value) for name, value in numbers.items()}
    jax.block_until_ready(call(*arrays.values(), **static))


# --- the library ----------------------------------------------------------------------------------


def test_a_library_that_does_not_fit_is_one_sentence(tmp_path):
  assert "is not there" in installed.kernels(str(tmp_path))[1]
  installed.kernels.cache_clear()
  (tmp_path / installed.LIBRARY).write_bytes(b"no library")
  assert "cannot be loaded" in installed.kernels(str(tmp_path))[1]


def test_the_numbers_in_python_and_in_c_agree():
  told = (NATIVE / "job.h").read_text()
  assert f"#define NM_VERSION {installed.KERNELS_VERSION}\n" in told


def build(tmp_path, **env):
  """Copies what a build needs and builds there; returns (library, what was said)."""
  for name in ("setup.py", "README.md"):
    shutil.copy(ROOT / name, tmp_path)
  package = tmp_path / "nm_sparsity_jax"
  shutil.copytree(NATIVE, package / "core/packed/native")
  shutil.copy(ROOT / "nm_sparsity_jax/_version.py", package)
  done = subprocess.run(
    [sys.executable, "-W", "ignore", "setup.py", "-q", "build_ext", "--inplace"],
    cwd=tmp_path, env=os.environ | env, capture_output=True, text=True, check=False,
  )  # fmt: skip
  assert not done.returncode, done.stderr
  return package / "core/packed" / installed.LIBRARY, done.stdout + done.stderr


def test_a_build_without_a_compiler_does_not_fail(tmp_path):
  none = str(tmp_path / "no-compiler")
  library, said = build(tmp_path, CC=none, CXX=none)
  assert not library.exists() and "libnm_sparsity.so is not built" in said


@compiler
@pytest.mark.slow
def test_a_build_makes_a_library_that_fits(tmp_path):
  library, said = build(tmp_path)
  assert installed.kernels(str(library.parent))[1] == "", said
  # One file's AVX-512 must not be what another one calls: nothing but its table is shared.
  for core in tmp_path.rglob("core_*.o"):
    shown = subprocess.run(
      ["nm", "-C", "--extern-only", "--defined-only", core],
      capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert [line.split()[-1] for line in shown.stdout.splitlines()] == [
      f"nm::{core.stem.removeprefix('core_')}"
    ]


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
  objects = []
  for name, own in units.items():
    objects.append(str(tmp_path / f"{name}.o"))
    subprocess.run(["g++", *flags, *own, "-c", NATIVE / name, "-o", objects[-1]], check=True)
  program = tmp_path / "check"
  subprocess.run(["g++", *flags, *objects, "-o", program, "-lpthread"], check=True)
  for seed in range(1, seeds + 1):
    done = subprocess.run([program, str(seed)], capture_output=True, text=True, check=False)
    assert not done.returncode and "products" in done.stdout, done.stdout + done.stderr[-2000:]
