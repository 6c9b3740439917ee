"""Tests of bits see what a user compiles, in a file that compiles quickly too."""

import pathlib

import jax
import jax.numpy as jnp
import quick
from jax._src import compiler
from test_apply import caught_compilations


def state():
  """Whether XLA leaves optimizations out, and what else it is told."""
  told = compiler.get_compile_options(num_replicas=1, num_partitions=1)
  return jax.config.values["jax_disable_most_optimizations"], dict(told.env_option_overrides)


def test_a_block_of_usual_compiles_as_by_default():
  default = state()
  assert not default[0]
  with quick.compilation():
    assert state()[0] and set(quick._options(True)) <= set(state()[1])
    with quick.usual():
      assert state() == default
    assert state()[0]
  assert state() == default


def test_finding_out_what_is_known_costs_two_programs(monkeypatch):
  """Not one after another, each of which finds out, until the stack is full."""
  quick._options.cache_clear()
  made, make = [], quick._MAKE
  monkeypatch.setattr(
    quick, "_MAKE", lambda *args, **kwargs: made.append(0) or make(*args, **kwargs)
  )
  with quick.compilation():
    jax.jit(lambda x: x + 3)(1)
  assert len(made) == 1


def test_it_has_no_program_that_was_made_quickly():
  double = jax.jit(lambda x: x * 2)
  with quick.compilation():
    double(jnp.ones(3))
    with quick.usual():
      assert double._cache_size() == 0
      double(jnp.ones(3))
      with quick.usual():
        assert double._cache_size() == 1  # its own it keeps


def test_a_program_that_is_read_from_a_file_has_the_same_bits_and_is_counted():
  """Else a test that no call compiles anew could not fail."""
  x = jnp.linspace(0.1, 0.9, 101)
  found = []
  for _ in range(2):
    jax.clear_caches()
    program = jax.jit(lambda x: jnp.sin(x) / 3 @ x)
    with jax.log_compiles(), caught_compilations() as messages:
      value = program(x).item()
    assert sum("lambda" in text for text in messages) == 1
    found.append((value, program.lower(x).compile().memory_analysis().temp_size_in_bytes))
  assert found[0] == found[1]
  assert [*pathlib.Path(jax.config.values["jax_compilation_cache_dir"]).glob("*lambda*")]
