"""Compilation that is quick, for runs that compile for longer than they run.

The code may differ in its last bits from what a user runs. So it is for tests that compare runs of
equal programs, or that allow a tolerance. Bits of different programs (layers and `sparsify`, jit
and eager mode) are compared as they are compiled by default.
"""

import contextlib
import functools
from unittest import mock

import jax
from jax._src import compiler  # no public setting reaches every program

_MAKE = compiler.get_compile_options
OLDER_KERNELS = {"xla_cpu_use_fusion_emitters": False}


@functools.cache
def _options():
  """What this version of XLA knows of the older kernels."""
  try:
    jax.jit(lambda x: x, compiler_options=OLDER_KERNELS)(1)
  except (RuntimeError, ValueError):
    return {}
  return OLDER_KERNELS


def _with_older_kernels(*args, env_options_overrides=None, **kwargs):
  overrides = _options() | (env_options_overrides or {})
  return _MAKE(*args, env_options_overrides=overrides, **kwargs)


def environment(*flags, older_kernels=True):
  """The same as `compilation` for a process; `flags` are more of XLA's."""
  own = _options() if older_kernels else {}
  flags += tuple(f"--{name}={str(value).lower()}" for name, value in own.items())
  return {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "XLA_FLAGS": " ".join(flags)}


@contextlib.contextmanager
def compilation(older_kernels=True):
  """Leaves most optimizations out, for a block.

  Args:
    older_kernels: also has XLA make kernels in its older way, which takes half of the time and of
      the memory. A run of T5X that goes on from a checkpoint has other last bits then than one that
      was not stopped, so tests of that say no.
  """
  before = jax.config.values["jax_disable_most_optimizations"]
  jax.config.update("jax_disable_most_optimizations", True)
  make = _with_older_kernels if older_kernels else _MAKE
  try:
    with mock.patch.object(compiler, "get_compile_options", make):
      yield
  finally:
    jax.config.update("jax_disable_most_optimizations", before)
