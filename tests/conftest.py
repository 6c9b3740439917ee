"""Eight virtual CPU devices, strict promotion, how hard hypothesis works, and what a run costs."""

import collections
import contextlib
import ctypes
import gc
import os
import pathlib
import resource
import sys
import warnings

# Before jax is imported: it reads these once.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
  os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
).strip()
# XLA's pool has a thread per core. On two cores, two devices that wait in a reduction for their
# partners leave no thread to run them, and XLA ends the process after 40 seconds.
os.environ.setdefault("PJRT_NPROC", "32")
# Each thread of that pool would keep an arena of its own, and what a program took would stay in
# them; the workers start with these.
os.environ.setdefault("MALLOC_ARENA_MAX", "2")
os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", "131072")
# A table that somebody tuned on this machine says nothing of the one that is released.
os.environ["NM_SPARSITY_TABLE"] = os.devnull

import hypothesis
import jax
import pytest

# What tests import stays, and looking through it takes a fifth of the time of importing:
# `pytest_collection_finish` sets the collector to work.
gc.disable()

# Silent dtype and broadcasting mistakes fail. Code that is not ours relaxes this at that call:
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


# --- what a worker holds --------------------------------------------------------------------------

ROOM = 1550  # MiB, of which what is imported takes three quarters


def resident() -> float:
  """MiB of memory that this process has now; 0 where that is not told."""
  try:
    with open("/proc/self/statm") as told:
      return int(told.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
  except OSError:
    return 0.0


def give_back():
  """Frees what nothing refers to. The allocator would keep it, unless it is told."""
  gc.collect()
  with contextlib.suppress(OSError, AttributeError):  # another C library
    ctypes.CDLL(None).malloc_trim(0)


def pytest_collection_finish():
  """What is imported stays: the collector need not look through it again and again, which took a
  third of the time of tests that read gin files."""
  gc.collect()
  gc.freeze()
  gc.enable()


@pytest.fixture(autouse=True, scope="module")
def programs_of_one_file(programs_of_this_worker, exchange):
  """What a file compiled goes with it, else a worker holds the programs of all of them."""
  del programs_of_this_worker
  exchange()
  yield
  exchange()
  jax.clear_caches()
  give_back()
  gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def programs_of_this_worker(tmp_path_factory):
  """A program that another test compiled, or an earlier run of tests, is read from a file.

  Many tests train the same once more, and the single operations of eager mode come again in every
  file. tests/programs.py keeps them from run to run.

  Counts of `jit` see no difference, and what a program gives is the same to the bit. It gives the
  variables of processes that do the same, in a folder of theirs: jax writes a file in place, so one
  that is killed may leave a part of it, and one that reads it then warns.
  """
  from jax.experimental.compilation_cache import compilation_cache

  if jax.config.values["jax_compilation_cache_dir"] is not None:
    yield {}  # it has one, as in tests/mutations.py, and its processes have the same
    return
  import programs

  here, there = (tmp_path_factory.getbasetemp() / name for name in FOLDERS)
  settings = {
    "jax_compilation_cache_dir": str(here),
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
    "jax_persistent_cache_enable_xla_caches": "none",  # names of programs know no folder then
  }
  programs.take(here)
  programs.take(there)
  for name, value in settings.items():
    jax.config.update(name, value)
  compilation_cache.reset_cache()  # what was imported may have compiled without one
  settings["jax_compilation_cache_dir"] = str(there)
  yield {name.upper(): str(value) for name, value in settings.items()}
  programs.give(here)
  programs.give(there)


@pytest.fixture(scope="session")
def exchange(tmp_path_factory, programs_of_this_worker):
  """Call it between files: this worker and the other one then have each other's programs."""
  base = tmp_path_factory.getbasetemp()
  if "PYTEST_XDIST_WORKER" not in os.environ or not programs_of_this_worker:
    return lambda: None
  import programs

  return programs.Exchange(base.parent / "xla-of-all", [base / name for name in FOLDERS]).meet


FOLDERS = "xla", "xla-of-processes"  # of programs, below a worker's temporary folder


@pytest.fixture(autouse=True)
def room_for_the_next():
  """Programs that a test leaves go before the end of the file too, where they take too much."""
  yield
  for forget in (lambda: None, jax.clear_caches):
    if resident() > ROOM:
      forget()
      give_back()


@pytest.fixture(scope="module")
def short_runs(programs_of_this_worker):
  """Compiles quickly (tests/quick.py), here and in processes that tests start."""
  import quick

  with quick.compilation(), pytest.MonkeyPatch.context() as patch:
    variables = quick.environment(os.environ["XLA_FLAGS"]) | programs_of_this_worker
    for name, value in variables.items():
      patch.setenv(name, value)
    yield


@pytest.fixture
def tiny_table(monkeypatch):
  """The table of benchmarks/recipes.py, so small that it compiles in seconds; a user's modes."""
  monkeypatch.syspath_prepend(str(pathlib.Path(__file__).parents[1] / "benchmarks"))
  import _recipes_tasks
  import _recipes_train

  sizes = _recipes_tasks.Sizes(layers=1, embed=8, mlp=16, heads=1, tokens=4, classes=5)
  task = _recipes_tasks.Bigram(symbols=5, tests=32, sizes=sizes)
  monkeypatch.setitem(_recipes_train.TASKS, "bigram", task)
  with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
    yield task


@pytest.fixture
def as_users_compile():
  """Compiles as by default, in a file of `short_runs`: for a test of bits of different programs."""
  import quick

  with quick.usual():
    yield


OURS = r"(nm_sparsity_jax|t5x_tasks)\b"  # of modules


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
  """What our code calls and jax, flax or another package deprecates is an error, also in files that
  ignore the warnings of what they import."""
  del item
  for kind in (DeprecationWarning, PendingDeprecationWarning, FutureWarning):
    warnings.filterwarnings("error", category=kind, module=OURS)
  return (yield)


# The files that take longest come first, so that no worker begins one while the other has no more.
LONGEST = (
  "test_t5x_adapter", "test_local", "test_t5x_metrics", "test_t5x_thread", "test_t5_t5x",
  "test_gin", "test_docs", "test_quickstart", "test_sweep", "test_every_recipe", "test_t5",
  "test_vision_models", "test_workloads", "test_t5x_checkpoints", "test_plan", "test_vision_runs",
  "test_layers", "test_sparse", "test_masks", "test_vision_workload", "test_local_t5x",
  "test_finalize", "test_packed_runs", "test_vision_families", "test_recipes_benchmark",
  "test_local_glue", "test_plan_topology", "test_site", "test_train_sharded", "test_fuzz",
)  # fmt: skip


def pytest_collection_modifyitems(items):
  place = {name: i for i, name in enumerate(LONGEST)}
  items.sort(key=lambda item: place.get(item.path.stem, len(place)))


# --- what a run costs -----------------------------------------------------------------------------


def pytest_addoption(parser):
  parser.addoption(
    "--peak-mib", type=int, default=None, help="fail where a worker's memory passes this"
  )


SPENT = collections.Counter()  # {(file, whether it needs T5X): seconds of processor time}
PEAKS = {}  # {worker: MiB}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
  before = sum(os.times()[:4])  # this process and the children that it waited for
  result = yield
  t5x = item.get_closest_marker("t5x") is not None
  SPENT[item.path.name, t5x] += sum(os.times()[:4]) - before
  return result


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
  found = getattr(node, "workeroutput", {})  # a worker that crashed has none
  if "spent" in found:
    PEAKS[node.gateway.id] = found["peak"]
    SPENT.update({(file, t5x): seconds for file, t5x, seconds in found["spent"]})


def too_large(config):
  limit = config.option.peak_mib
  return [name for name, mib in PEAKS.items() if limit and mib > limit]


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session):
  kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  peak = round(kib / 1024 / (1024 if sys.platform == "darwin" else 1))  # bytes there
  if (output := getattr(session.config, "workeroutput", None)) is not None:
    output["peak"] = peak
    output["spent"] = [[*key, seconds] for key, seconds in SPENT.items()]
    return
  if not PEAKS and SPENT:  # no workers
    PEAKS["this process"] = peak
  if too_large(session.config):
    session.exitstatus = pytest.ExitCode.TESTS_FAILED


def say_skipped(terminalreporter):
  """Says why tests did not run: a count alone hides that T5X, say, is absent."""
  reasons = collections.Counter(
    report.longrepr[2].removeprefix("Skipped: ")
    for report in terminalreporter.stats.get("skipped", ())
    if isinstance(report.longrepr, tuple)
  )
  for reason, n in reasons.most_common():  # a module that skips as a whole counts once
    terminalreporter.write_line(f"{n} tests or modules did not run: {reason}")


def pytest_terminal_summary(terminalreporter, config):
  say_skipped(terminalreporter)
  if not PEAKS:
    return
  write = terminalreporter.write_line
  terminalreporter.section("processor time and memory")
  files = collections.Counter()
  for (file, _), seconds in SPENT.items():
    files[file] += seconds
  for file, seconds in files.most_common(20):
    write(f"{seconds:7.1f}s {file}")
  total = sum(SPENT.values())
  t5x = sum(seconds for (_, needs), seconds in SPENT.items() if needs)
  write(f"{total:7.1f}s in all: {t5x:.1f}s with T5X, {total - t5x:.1f}s without")
  write("at most " + ", ".join(f"{mib} MiB in {name}" for name, mib in sorted(PEAKS.items())))
  for name in too_large(config):
    write(f"error: {name} took {PEAKS[name]} MiB, and --peak-mib allows {config.option.peak_mib}")


@pytest.fixture(autouse=True)
def as_in_a_new_process():
  """Warnings that were given are forgotten."""
  if module := sys.modules.get("nm_sparsity_jax.errors"):
    module.forget_warnings()
