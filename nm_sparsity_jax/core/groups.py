"""Where the groups of one weight lie: axis, padding and order, as one value.

    shape, axis, pad -> [Groups] -> masks of the weight, or its groups as rows on the host

Masks, recipes and verification all ask the same value, so they agree on what a group is.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from nm_sparsity_jax.core import masks
from nm_sparsity_jax.core.patterns import NM

_PLATFORM = "tpu"  # of which `masks.tpu` has a kernel


@dataclasses.dataclass(frozen=True)
class Groups:
  """The groups of one weight: m consecutive entries along an axis.

  >>> groups = Groups((6, 5), axis=0, pad=2)
  >>> groups.size, groups.count(NM(1, 4))
  (8, 10)

  Attributes:
    shape: shape of the weight.
    axis: the axis of the groups, or ascending axes that count as one. Another axis may lie between
      them, as a scan puts it: (heads, layers, kv, embed) with axis (0, 2).
    pad: entries that complete the last group. They count as zeros after the end of the axis.
    sharding: how devices share the weight, where that is known and each holds whole groups.
  """

  shape: tuple[int, ...]
  axis: masks.Axis
  pad: int = 0
  sharding: NamedSharding | None = dataclasses.field(default=None, compare=False, repr=False)

  @functools.cached_property
  def axes(self) -> tuple[int, ...]:
    """Returns `axis` as a tuple of ascending, non-negative ints."""
    return masks.check_axis(self.shape, self.axis, gaps=True)

  @functools.cached_property
  def length(self) -> int:
    """Returns the length of the grouped axis without padding."""
    return math.prod(self.shape[a] for a in self.axes)

  @property
  def size(self) -> int:
    """Returns the length of the grouped axis, padding included."""
    return self.length + self.pad

  @functools.cached_property
  def order(self) -> tuple[int, ...]:
    """Returns the transposition that makes the grouped axes adjacent: axes between them go first.

    It is the identity unless an axis lies between them.
    """
    between = [a for a in range(self.axes[0], self.axes[-1]) if a not in self.axes]
    return (*between, *[a for a in range(len(self.shape)) if a not in between])

  def count(self, pattern: NM) -> int:
    """Returns how many groups of `pattern` the weight has."""
    rest = math.prod(self.shape) // max(self.length, 1)
    return self.size // pattern.m * rest

  def apply(
    self,
    function: Callable[..., jax.Array],
    *arrays: jax.Array,
    scalar: jax.Array | int | None = None,
  ) -> jax.Array:
    """Calls function(*arrays, axis=axis) where the axes are adjacent and all groups are whole.

    Args:
      function: takes arrays, and `axis` as `masks.nm_mask` does; returns an array of their shape.
        It sees padding as zeros.
      *arrays: arrays of the weight's shape.
      scalar: what `function` takes before the arrays, such as a step; None = nothing. A device
        cannot look outside of its shard for a traced one.

    Returns:
      What `function` returns, in the weight's own order and without padding.
    """
    if self._by_shard():
      assert self.sharding is not None
      spec, mesh = self.sharding.spec, self.sharding.mesh
      whole = dataclasses.replace(self, shape=self.sharding.shard_shape(self.shape), sharding=None)
      if not isinstance(scalar, jax.Array):
        call = functools.partial(whole.apply, function, scalar=scalar)
        return jax.shard_map(call, mesh=mesh, in_specs=spec, out_specs=spec)(*arrays)
      call = lambda scalar, *arrays: whole.apply(function, *arrays, scalar=scalar)
      specs = (PartitionSpec(), *[spec] * len(arrays))
      return jax.shard_map(call, mesh=mesh, in_specs=specs, out_specs=spec)(scalar, *arrays)
    # Masks and kernels know adjacent axes alone; the transposition puts the others first.
    if self.order != tuple(range(len(self.shape))):
      arrays = tuple(x.transpose(self.order) for x in arrays)
      out = self._transposed().apply(function, *arrays, scalar=scalar)
      return out.transpose(sorted(range(out.ndim), key=self.order.__getitem__))
    if scalar is not None:
      function = functools.partial(function, scalar)
    if not self.pad:
      return function(*arrays, axis=self.axis)
    first, merged = self.axes[0], self._merged()
    widths = [(0, self.pad * (a == first), 0) for a in range(len(merged))]
    full = [jax.lax.pad(x.reshape(merged), x.dtype.type(0), widths) for x in arrays]
    out = function(*full, axis=first)
    return jax.lax.slice_in_dim(out, 0, self.length, axis=first).reshape(self.shape)

  def magnitude_mask(
    self,
    w: jax.Array,
    pattern: NM,
    n: jax.Array | int | None = None,
    parent: jax.Array | None = None,
  ) -> jax.Array:
    """Marks the n largest |w| of each group; see `masks.magnitude_mask`."""

    def take(n, w, *parent, axis):
      return masks.magnitude_mask(w, pattern, axis, n=n, parent=parent[0] if parent else None)

    n = pattern.n if n is None else n
    return self.apply(take, w, *(() if parent is None else (parent,)), scalar=n)

  def split(self, x: np.ndarray, pattern: NM) -> np.ndarray:
    """Returns a host array cut into groups, which become its last axis; padding is zeros.

    The groups are numbered in the order of the other axes: `split(x, pattern).reshape(-1, m)` has
    one group a row, and `start` says where in the weight a row begins.

    >>> Groups((4, 2), axis=0).split(np.arange(8).reshape(4, 2), NM(1, 2)).reshape(-1, 2).tolist()
    [[0, 2], [1, 3], [4, 6], [5, 7]]
    """
    here = self._transposed()
    first, merged = here.axes[0], here._merged()
    widths = [(0, self.pad * (a == first)) for a in range(len(merged))]
    x = x.transpose(self.order).reshape(merged)
    if self.pad:  # or it would be a copy
      x = np.pad(x, widths)
    whole = self.size // pattern.m
    cut = x.reshape(*x.shape[:first], whole, pattern.m, *x.shape[first + 1 :])
    return np.moveaxis(cut, first + 1, -1)

  def start(self, group: int, pattern: NM) -> tuple[int, ...]:
    """Returns the index in the weight of the first entry of a group, numbered as by `split`.

    >>> Groups((4, 2), axis=0).start(3, NM(1, 2))
    (2, 1)
    """
    numbers = self.split(np.arange(math.prod(self.shape)).reshape(self.shape), pattern)
    first = numbers.reshape(-1, pattern.m)[group, 0]
    return tuple(map(int, np.unravel_index(first, self.shape)))

  def sharded(self, sharding: NamedSharding | None, m: int) -> Groups:
    """Returns the same groups with `sharding`, unless it cuts a group of m or there is padding.

    >>> mesh = jax.make_mesh((1,), ("x",))
    >>> spec = jax.sharding.PartitionSpec(None, "x")
    >>> tuple(Groups((6, 4), axis=0).sharded(NamedSharding(mesh, spec), 3).sharding.spec)
    (None, 'x')
    """
    # With padding a shard's last group would not end where the shard does.
    if sharding is None or self.pad:
      return self
    local = sharding.shard_shape(self.shape)
    cut = [a for a in self.axes if local[a] != self.shape[a]]
    whole = math.prod(local[a] for a in self.axes) % m == 0
    # Of joint axes the first may be cut: a device then has a row of consecutive groups.
    fits = whole and cut in ([], [self.axes[0]])
    return dataclasses.replace(self, sharding=sharding) if fits else self

  def _by_shard(self) -> bool:
    # XLA cannot cut a TPU's kernel over devices. Elsewhere it cuts what the masks are made of.
    mesh = None if self.sharding is None else self.sharding.mesh
    if not isinstance(mesh, Mesh) or mesh.size == 1:  # an abstract mesh has no devices
      return False
    if jax.sharding.get_abstract_mesh().manual_axes:  # in a shard_map of the user's own
      return False
    return mesh.devices.flat[0].platform == _PLATFORM

  def _transposed(self) -> Groups:
    """Returns the same groups after `order`."""
    shape = tuple(self.shape[a] for a in self.order)
    axes = tuple(self.order.index(a) for a in self.axes)
    return dataclasses.replace(self, shape=shape, axis=axes)

  def _merged(self) -> tuple[int, ...]:
    """Returns the shape without padding, with the grouped axes, which are adjacent, as one axis."""
    axes = self.axes
    return (*self.shape[: axes[0]], self.length, *self.shape[axes[-1] + 1 :])
