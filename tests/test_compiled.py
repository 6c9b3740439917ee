"""What a compiler says of a program: loops by their trips, kernels by what they read and write."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from nm_sparsity_jax.analysis import compiled
from nm_sparsity_jax.analysis.compiled import account

X = jnp.ones((64, 64))
PRODUCT = 2 * 64**3  # FLOPs


def compile(function, *args):
  return jax.jit(function).lower(*args).compile()


def times(n, step):
  return lambda x: lax.fori_loop(0, n, lambda _, x: step(x), x)


def product(x):
  return x @ X


@pytest.mark.parametrize(
  "function, products",
  [
    (times(3, times(5, product)), 15),
    (lambda x: product(times(4, product)(x) + times(6, product)(2 * x)), 11),
    (lambda x: lax.cond(x[0, 0] > 0, times(5, product), times(2, product), x), 5),
  ],
)
def test_a_loop_counts_by_its_trips_and_of_two_branches_the_dearer(function, products):
  found, once = account(compile(function, X)), account(compile(product, X))
  assert found.flops == pytest.approx(products * PRODUCT, rel=0.01)
  # A CPU also copies what it carries.
  assert products * once.bytes <= found.bytes <= products * 3 * once.bytes


def test_the_peak_is_what_lives_at_one_time():
  """A result and the argument that it takes the place of are one."""
  assert account(compile(lambda x: x + 1, X)).peak == 2 * X.nbytes
  in_place = jax.jit(lambda x: x + 1, donate_argnums=0).lower(X).compile()
  assert account(in_place).peak == X.nbytes


KERNEL = """HloModule made, is_scheduled=true

%body (p: (s32[], f32[8,128])) -> (s32[], f32[8,128]) {
  %p = (s32[], f32[8,128]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %w = f32[8,128]{1,0} get-tuple-element(%p), index=1
  %mask = s8[8,128]{1,0} custom-call(%w), custom_call_target="tpu_custom_call"
  ROOT %out = (s32[], f32[8,128]{1,0}) tuple(%i, %w)
}

%condition (p.1: (s32[], f32[8,128])) -> pred[] {
  %p.1 = (s32[], f32[8,128]{1,0}) parameter(0)
  %i.1 = s32[] get-tuple-element(%p.1), index=0
  %limit = s32[] constant(6)
  ROOT %more = pred[] compare(%i.1, %limit), direction=LT
}

ENTRY %main (a: (s32[], f32[8,128])) -> (s32[], f32[8,128]) {
  %a = (s32[], f32[8,128]{1,0}) parameter(0)
  ROOT %loop = (s32[], f32[8,128]{1,0}) while(%a), condition=%condition, body=%body
}
"""


def test_a_kernel_reads_its_operands_and_writes_its_result_at_each_trip():
  program = compiled._Program(KERNEL)
  without = compiled._Program(KERNEL.replace("tpu_custom_call", "another"))
  added, _ = program.cost(program.entry) - without.cost(without.entry)
  assert added == 6 * (4 + 1) * 8 * 128
