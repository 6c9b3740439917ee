"""The mask of a weight as one operation, which each platform carries out in its own way.

    w, n, [parent] -> nm_mask -> on a TPU `tpu.mask`, one pass; elsewhere `groupwise`

The way is chosen when the program is lowered, so one program serves CPU, GPU and TPU. A Pallas
kernel cannot be partitioned by XLA. So it serves one device, and whole shards inside `shard_map`;
`groupwise` serves the rest.
"""

from __future__ import annotations

import functools
import warnings

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from nm_sparsity_jax.core.masks import selection
from nm_sparsity_jax.core.masks.keys import ABSENT, magnitude_keys
from nm_sparsity_jax.core.masks.selection import KeepSpec


# One program for each shape: the passes one by one would each write the whole weight.
@functools.partial(jax.jit, inline=True, static_argnums=(1, 2))
def mask(
  w: jax.Array,
  kept: KeepSpec,
  axes: tuple[int, ...],
  n: jax.Array | int | None,
  parent: jax.Array | None,
) -> jax.Array:
  """Returns the magnitude mask of a weight; no gradient flows through it.

  Args:
    w: float array [..., K, ...].
    kept: what is known of the pattern.
    axes: the axes of the groups, adjacent and ascending.
    n: how many to keep, where `kept` does not know it.
    parent: bool, shape of `w`, or None.

  Returns:
    bool, shape of `w`, True = kept.
  """
  # A primitive takes no None: n is 0 where `kept` knows it, and no parent is left out.
  n = jnp.asarray(0 if n is None else n, jnp.int32)
  parents = () if parent is None else (parent,)
  operands = _alike(lax.stop_gradient(w), n, *parents)
  return _mask.bind(*operands, kept=kept, axes=axes)


def _alike(*arrays: jax.Array) -> list[jax.Array]:
  # In a `shard_map` a weight may be the same on all devices while n or the parent differ. The
  # mask then differs too, so all operands must count as varying.
  varying = [jax.typeof(x).manual_axis_type.varying for x in arrays]
  over = frozenset().union(*varying)
  lacking = [tuple(sorted(over - axes)) for axes in varying]
  return [
    lax.pcast(x, axes, to="varying") if axes else x for x, axes in zip(arrays, lacking, strict=True)
  ]


def groupwise(w, n, parent=None, *, kept: KeepSpec, axes: tuple[int, ...]):
  """Returns the mask by elementwise passes and reductions within a group, for any dtype."""
  if kept.last is not None:
    return lax.cond(
      n == kept.last,
      lambda: groupwise(w, n, parent, kept=KeepSpec(kept.m, kept.last), axes=axes),
      lambda: groupwise(w, n, parent, kept=KeepSpec(kept.m), axes=axes),
    )
  keys = magnitude_keys(w.reshape(selection.in_groups(w.shape, axes, kept.m)))
  if parent is not None:
    keys = jnp.where(parent.reshape(keys.shape), keys, keys.dtype.type(ABSENT))
  return selection.select(keys, kept.n or n, axes[0] + 1).reshape(w.shape)


_mask = Primitive("nm_mask")
_mask.def_impl(groupwise)  # under `jax.disable_jit`: else `mask` is compiled


@_mask.def_abstract_eval
def _shape(w, *_, kept, axes):
  del kept, axes
  return w.update(dtype=jnp.dtype(bool), weak_type=False)


def _batched(args, dims, *, kept, axes):
  """Moves the axis of a vmap to the front; a vmap over n itself goes group by group."""
  if dims[1] is not None:
    return jax.vmap(functools.partial(groupwise, kept=kept, axes=axes), in_axes=dims)(*args), 0
  size = next(x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None)

  def to_front(x, d):
    return jnp.broadcast_to(x, (size, *x.shape)) if d is None else jnp.moveaxis(x, d, 0)

  w, *parents = (to_front(args[i], dims[i]) for i in range(len(args)) if i != 1)
  return _mask.bind(w, args[1], *parents, kept=kept, axes=tuple(a + 1 for a in axes)), 0


batching.primitive_batchers[_mask] = _batched

_lower_groupwise = mlir.lower_fun(groupwise, multiple_results=False)


def _lower_on_tpu(ctx, *args, kept, axes):
  from nm_sparsity_jax.core.masks import tpu  # Pallas is half of what the core would import

  serves = tpu.serves(ctx.avals_in[0], kept, axes)
  whole = _is_whole(ctx.module_context.axis_context)
  if serves and not whole:
    # One text at one line, so that Python shows it once a process.
    warnings.warn(
      "several TPUs share weights in a way that the rules do not know, so their masks move 4 to 10 "
      "times the bytes of the one-pass kernel: before nms.sparse, rules = rules.with_shardings("
      "jax.tree.map(lambda x: x.sharding, params)). (A sharding that cuts a group stays as it is.)",
      stacklevel=1,
    )
  kernel = mlir.lower_fun(tpu.mask, multiple_results=False)
  lower = kernel if serves and whole else _lower_groupwise
  return lower(ctx, *args, kept=kept, axes=axes)


def _is_whole(context) -> bool:
  # XLA partitions nothing on one device, or where all axes of the mesh are manual.
  manual = getattr(context, "manual_axes", None)
  if manual is not None:
    return set(manual) == set(context.mesh.axis_names)
  return getattr(context, "num_devices", None) == 1


mlir.register_lowering(_mask, _lower_groupwise)
mlir.register_lowering(_mask, _lower_on_tpu, platform="tpu")
