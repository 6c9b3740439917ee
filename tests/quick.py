"""Compilation that is quick, for runs that compile for longer than they run.

The code may differ in its last bits from what a user runs. So it is for tests that compare runs of
equal programs, or that allow a tolerance. Bits of different programs (layers and `sparsify`, jit
and eager mode) are compared as they are compiled by default (`usual`).
"""

import contextlib
import functools
from unittest import mock

import jax
from jax._src import compiler  # no public setting reaches every program

_MAKE = compiler.get_compile_options
OLDER_KERNELS = {"xla_cpu_use_fusion_emitters": False}
# A program in one part, where XLA cuts it into as many as its pool has threads: a fifth less work.
ONE_PART = {"xla_cpu_parallel_codegen_split_count": 1}


@functools.cache
def _options(older_kernels):
  """What this version of XLA knows of the options."""
  known = {}
  for name, value in (ONE_PART | (OLDER_KERNELS if older_kernels else {})).items():
    with contextlib.suppress(RuntimeError, ValueError):
      jax.jit(lambda x: x, compiler_options={name: value})(1)
      known[name] = value
  return known


# Whether programs are there that were compiled quickly.
_made = False


def _maker(older_kernels):
  known = _options(older_kernels)  # now, since finding out compiles

  def make(*args, env_options_overrides=None, **kwargs):
    global _made
    _made = True
    overrides = known | (env_options_overrides or {})
    return _MAKE(*args, env_options_overrides=overrides, **kwargs)

  return make


def environment(*flags, older_kernels=True):
  """The same as `compilation` for a process; `flags` are more of XLA's."""
  own = _options(older_kernels)
  flags += tuple(f"--{name}={str(value).lower()}" for name, value in own.items())
  return {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "XLA_FLAGS": " ".join(flags)}


# A process of a test in a file of `short_runs` that compiles as a user's does.
AS_USERS = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "0", "XLA_FLAGS": ""}


@contextlib.contextmanager
def compilation(older_kernels=True):
  """Leaves most optimizations out, for a block.

  Args:
    older_kernels: also has XLA make kernels in its older way, which takes half of the time and of
      the memory. A run of T5X that goes on from a checkpoint has other last bits then than one that
      was not stopped, so tests of that say no.
  """
  with _compiling(_maker(older_kernels), few_optimizations=True):
    yield


@contextlib.contextmanager
def usual():
  """Compiles as a user does, for a block within `compilation`; no program made quickly is left."""
  global _made
  if _made:
    jax.clear_caches()
    _made = False
  with _compiling(_MAKE, few_optimizations=False):
    yield


@contextlib.contextmanager
def _compiling(make, few_optimizations):
  """Compiles by options that `make` makes, for a block."""
  before = jax.config.values["jax_disable_most_optimizations"]
  jax.config.update("jax_disable_most_optimizations", few_optimizations)
  try:
    with mock.patch.object(compiler, "get_compile_options", make):
      yield
  finally:
    jax.config.update("jax_disable_most_optimizations", before)
