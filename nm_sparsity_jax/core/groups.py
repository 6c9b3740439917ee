"""Where the groups of one weight lie: axis, padding and order, as one value.

    shape, axis, pad -> [Groups] -> masks of the weight, or its groups as rows on the host

Masks, recipes and verification all ask the same value, so they agree on what a group is.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
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
    """Returns the transposition that puts the grouped axes last."""
    return (*(a for a in range(len(self.shape)) if a not in self.axes), *self.axes)

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
      *arrays: arrays of the weight's shape, or scalars.
      scalar: what `function` takes before the arrays, such as a step; None = nothing. A device
        cannot look outside of its shard for a traced one.

    Returns:
      What `function` returns, in the weight's own order and without padding.
    """
    traced = (scalar,) if isinstance(scalar, jax.Array) else ()

    def call(groups, *args):
      at = args[0] if traced else scalar
      return groups.apply(function, *args[len(traced) :], scalar=at)

    cut = self._by_shard()
    if cut is not None:
      whole = dataclasses.replace(self, shape=cut.shard_shape(self.shape), sharding=None)
      at = lambda x: cut.spec if x.ndim else PartitionSpec()
      specs = (*map(at, traced), *map(at, arrays))
      inside: Any = functools.partial(call, whole)
      inside = jax.shard_map(inside, mesh=cut.mesh, in_specs=specs, out_specs=cut.spec)
      return inside(*traced, *arrays)
    sharding = jax.typeof(arrays[0]).sharding
    if sharding.mesh.explicit_axes:
      # Under explicit sharding a reshape must say how its output lies, and groups are reshapes.
      inside = jax.sharding.auto_axes(functools.partial(call, self), out_sharding=sharding)
      return inside(*traced, *arrays)
    if scalar is not None:
      function = functools.partial(function, scalar)
    is_adjacent = self.axes[-1] - self.axes[0] == len(self.axes) - 1
    if is_adjacent and not self.pad:
      return function(*arrays, axis=self.axis)
    # Masks and kernels know adjacent axes and whole groups alone.
    rows = (self._rows(x, jnp.pad) if x.ndim else x for x in arrays)
    out = function(*rows, axis=-1)[..., : self.length]
    return out.reshape([self.shape[a] for a in self.order]).transpose(np.argsort(self.order))

  def magnitude_mask(
    self,
    w: jax.Array,
    pattern: NM,
    n: jax.Array | int | None = None,
    parent: jax.Array | None = None,
  ) -> jax.Array:
    """Marks the n largest |w| of each group; see `masks.magnitude_mask`."""

    def take(n, w, parent=None, *, axis):
      return masks.magnitude_mask(w, pattern, axis, n=n, parent=parent)

    parents = () if parent is None else (parent,)
    return self.apply(take, w, *parents, scalar=pattern.n if n is None else n)

  def split(self, x: np.ndarray, pattern: NM) -> np.ndarray:
    """Returns a host array cut into groups, as its last two axes; padding is zeros.

    The other axes come first, in their order: `split(x, pattern).reshape(-1, m)` has one group a
    row, and `start` says where in the weight a row begins.

    >>> Groups((4, 2), axis=0).split(np.arange(8).reshape(4, 2), NM(1, 2)).tolist()
    [[[0, 2], [4, 6]], [[1, 3], [5, 7]]]
    """
    rows = self._rows(x, np.pad)
    return rows.reshape(*rows.shape[:-1], self.size // pattern.m, pattern.m)

  def start(self, group: int, pattern: NM) -> tuple[int, ...]:
    """Returns the index in the weight of the first entry of a group, numbered as by `split`.

    >>> Groups((4, 2), axis=0).start(2, NM(1, 2))
    (0, 1)
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

  def _by_shard(self) -> NamedSharding | None:
    """Returns the sharding where each device masks its own shard; None where XLA cuts the masks."""
    # XLA cannot cut a TPU's kernel over devices. Elsewhere it cuts what the masks are made of.
    mesh = None if self.sharding is None else self.sharding.mesh
    if not isinstance(mesh, Mesh) or mesh.size == 1:  # an abstract mesh has no devices
      return None
    if jax.sharding.get_abstract_mesh().manual_axes:  # in a shard_map of the user's own
      return None
    return self.sharding if mesh.devices.flat[0].platform == _PLATFORM else None

  def _rows(self, x: Any, pad: Callable[..., Any]) -> Any:
    """Returns an array with the grouped axes, padded, as its last axis."""
    others = [self.shape[a] for a in self.order[: -len(self.axes)]]
    rows = x.transpose(self.order).reshape(*others, self.length)
    return pad(rows, [*[(0, 0)] * len(others), (0, self.pad)]) if self.pad else rows
