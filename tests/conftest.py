"""Eight virtual CPU devices, strict promotion, how hard hypothesis works, one compilation cache."""

import atexit
import ctypes
import gc
import json
import math
import mmap
import os
import pathlib
import shutil
import sys
import tempfile
import warnings
from importlib import metadata

# Before jax and keras are imported: they read these once.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["KERAS_BACKEND"] = "jax"
# Most tests compile for longer than they run, so XLA leaves its optimizations out, here and in the
# processes that tests start. AS_USERS=1 compiles as by default; `make test-slow` does.
if not os.environ.get("AS_USERS"):
  os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
  flags = ["--xla_cpu_parallel_codegen_split_count=1"]
  if metadata.version("jaxlib") < "0.12":  # which ends the process at a flag that it does not know
    flags.append("--xla_cpu_use_fusion_emitters=false")
  os.environ["XLA_FLAGS"] = " ".join((os.environ.get("XLA_FLAGS", ""), *flags))
# XLA's pool has a thread per core. On two cores, two devices that wait in a reduction for their
# partners leave no thread to run them, and XLA ends the process after 40 seconds.
os.environ.setdefault("PJRT_NPROC", "32")
# Each thread of that pool would keep an arena of its own; the workers start with these.
os.environ.setdefault("MALLOC_ARENA_MAX", "2")
os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", "131072")
# All workers and the processes that tests start share JAX's cache of compiled programs. Set
# JAX_COMPILATION_CACHE_DIR to keep it for the next run.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
  os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="nm-sparsity-xla-")
  atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES"] = "none"  # their folder is part of a key

import hypothesis
import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)
# Silent dtype and broadcasting mistakes fail. Code that is not ours relaxes this at that call, or
# for a whole test by the fixture `as_users_compute`:
#   with jax.numpy_dtype_promotion("standard"): ...
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# More: HYPOTHESIS_MAX_EXAMPLES=1000 make test. In CI the same examples come every time.
hypothesis.settings.register_profile(
  "nm",
  deadline=None,  # the first example of a shape compiles
  derandomize="CI" in os.environ,
  max_examples=int(os.environ.get("HYPOTHESIS_MAX_EXAMPLES", "12")),
)
hypothesis.settings.load_profile("nm")


@pytest.fixture(autouse=True)
def the_same_place():
  """The working folder and `sys.path`, to which commands add it: gin looks in both."""
  path, folder = list(sys.path), os.getcwd()
  yield
  sys.path[:] = path
  os.chdir(folder)


@pytest.fixture
def command(capsys):
  """Runs a command: (exit code, JSON or, where that fails, the message)."""
  from nm_sparsity_jax import cli

  def call(*argv):
    capsys.readouterr()
    code = cli.main([*map(str, argv), "--json"])
    out, err = capsys.readouterr()
    return code, json.loads(out) if out else err

  return call


@pytest.fixture
def as_users_compute():
  with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
    yield


# The files that take longest begin, so that no worker ends with one while others wait.
LONGEST = (
  "test_t5x_thread", "test_local", "test_workloads", "test_t5x_adapter", "test_docs", "test_sparse",
  "test_export", "test_masks", "test_every_recipe", "test_vision_workload",
)  # fmt: skip


def pytest_collection_modifyitems(items):
  rank = {name: i for i, name in enumerate(LONGEST)}
  items.sort(key=lambda item: rank.get(item.path.stem, len(rank)))


def pytest_collection_finish():
  """What is imported stays: the collector need not look through it again and again."""
  gc.collect()
  gc.freeze()


def drop_programs():
  """What was compiled goes, and its memory back to the system: glibc alone would keep it."""
  jax.clear_caches()
  gc.collect()
  ctypes.CDLL(None).malloc_trim(0)


def resident():
  """Returns the bytes of memory that this process holds; outside of Linux, infinity."""
  statm = pathlib.Path("/proc/self/statm")
  return int(statm.read_text().split()[1]) * mmap.PAGESIZE if statm.exists() else math.inf


@pytest.fixture(autouse=True, scope="module")
def programs_of_files():
  """What files compiled goes once a worker is large. Each time it takes a third of a second."""
  yield
  if resident() > 1.4 * 2**30:  # no file adds more than 0.6 GiB
    drop_programs()


@pytest.fixture(autouse=True)
def programs_of_one_test(request):
  """Each test of T5X makes models of its own, so that no other test runs their programs."""
  yield
  if request.node.get_closest_marker("t5x"):
    drop_programs()


OURS = r"(nm_sparsity_jax|t5x_tasks)\b"  # of modules


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
  """What our code calls and jax, flax or another package deprecates is an error, also in files that
  ignore the warnings of what they import."""
  del item
  for kind in (DeprecationWarning, PendingDeprecationWarning, FutureWarning):
    warnings.filterwarnings("error", category=kind, module=OURS)
  return (yield)
