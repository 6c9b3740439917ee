"""Compilation that is quick, for runs that compile for longer than they run.

No optimizations, and of XLA's two ways to make kernels on a CPU the older one, which takes half of
the processor time and of the memory. The code may differ in its last bits from what a user runs. So
it is for tests that compare runs of equal programs, or that allow a tolerance. Bits of different
programs (layers and `sparsify`, jit and eager mode) are compared as they are compiled by default.
"""

import contextlib
import functools
from unittest import mock

import jax

OLDER_KERNELS = {"xla_cpu_use_fusion_emitters": False}


@functools.cache
def options():
  """What this version of XLA knows of it."""
  try:
    jax.jit(lambda x: x, compiler_options=OLDER_KERNELS)(1)
  except (RuntimeError, ValueError):
    return {}
  return OLDER_KERNELS


def environment(*flags):
  """The same for a process; `flags` are more of XLA's."""
  own = (f"--{name}={str(value).lower()}" for name, value in options().items())
  return {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "XLA_FLAGS": " ".join([*flags, *own])}


@contextlib.contextmanager
def compilation():
  """The same in this process, for a block."""
  from jax._src import compiler  # no public setting reaches every program

  make = compiler.get_compile_options

  def quick(*args, env_options_overrides=None, **kwargs):
    overrides = options() | (env_options_overrides or {})
    return make(*args, env_options_overrides=overrides, **kwargs)

  before = jax.config.values["jax_disable_most_optimizations"]
  jax.config.update("jax_disable_most_optimizations", True)
  try:
    with mock.patch.object(compiler, "get_compile_options", quick):
      yield
  finally:
    jax.config.update("jax_disable_most_optimizations", before)
