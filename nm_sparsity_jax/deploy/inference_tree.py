"""A whole parameter tree with packed kernels: what is deployed.

    params (exact zeros) -> [unstacked] -> a tree that no scan stacks
                         -> [pack_tree] -> the tree, where sparse kernels are NMPacked
                         -> [prepare]   -> what network.apply({"params": ...}) reads the fastest

The network is the dense one, without rules and without a scan.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nm_sparsity_jax.core import packed as of_one
from nm_sparsity_jax.core.packed import MOST, NMPacked, like, pack, unpack
from nm_sparsity_jax.core.text import columns, printable
from nm_sparsity_jax.core.trees import alike, flatten, map_with_names
from nm_sparsity_jax.deploy.unstack_layers import unstacked as unstacked  # also named here
from nm_sparsity_jax.models.swin import SwinConfig
from nm_sparsity_jax.models.t5 import T5Config
from nm_sparsity_jax.models.vit import ViTConfig
from nm_sparsity_jax.training.rules import Rules
from nm_sparsity_jax.training.sites import Site


def decide(params: Any, rules: Rules, dtype: Any = None) -> tuple[dict[str, NMPacked], dict]:
  """Returns which parameters of a tree are packed. It looks at shapes and dtypes alone.

  A kernel (in, out) is packed where the rules give it a pattern along its axis 0, and where that
  saves bytes. The pattern is the last one of its recipe.

      packed, dense = decide(params, rules)

  Args:
    params: the finalized parameters, or their shapes, not scanned: see `unstacked`. A flat dict of
      paths will do.
    rules: the rules.
    dtype: of the values: 'float32', 'bfloat16', 'float16' or 'int8'. None: that of each kernel.

  Returns:
    path -> the packed kernel, of shapes and not of arrays; path -> why another one keeps its
    zeros.
  """
  assignment = rules.assign(params)
  packed: dict[str, NMPacked] = {}
  dense: dict[str, str] = {}
  for path, x in flatten(params):
    site = assignment.sites.get(path)
    if site is None:
      dense[path] = assignment.skipped.get(path, "no rule makes it sparse")
    elif why := _refused(site, x.dtype, dtype or x.dtype):
      dense[path] = why
    else:
      packed[path] = like(site.pattern, site.shape, dtype or x.dtype)
  return packed, dense


def _refused(site: Site, dtype: Any, kind: Any) -> str:
  """Says why a kernel stays dense, '' where it is packed."""
  # Of our layers only those of such a kernel multiply by `nm_dot`.
  if not site.path.endswith("kernel") or len(site.shape) != 2 or site.groups.axes != (0,):
    return "layers take packed only kernels (in, out), with groups along axis 0"
  if site.pattern.m > MOST:
    return f"{site.pattern}: an index reaches through {MOST} entries at most"
  # An index takes room too, so a dense pattern such as 7:8 would grow.
  found = like(site.pattern, site.shape, kind).nbytes
  zeros = math.prod(site.shape) * np.dtype(dtype).itemsize
  if found >= zeros:
    return f"{site.pattern} takes {found:,} bytes packed, and {zeros:,} with its zeros"
  return ""


def is_packed(x: Any) -> bool:
  """Returns whether something is a packed kernel, which is a leaf of our trees."""
  return isinstance(x, NMPacked)


# --- trees ----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Kernel:
  """A packed kernel in a `Report`.

  Attributes:
    pattern: n:m.
    bytes: of it.
    bytes_with_zeros: of the same kernel before.
  """

  pattern: str
  bytes: int
  bytes_with_zeros: int


@dataclasses.dataclass(frozen=True)
class Report:
  """What was packed and what was not; its `str` is a table.

  Attributes:
    packed: path -> Kernel.
    dense: path -> why a parameter keeps its zeros.
    rest: bytes of these.
  """

  packed: Mapping[str, Kernel]
  dense: Mapping[str, str]
  rest: int

  def __str__(self) -> str:
    rows = [
      (name, x.pattern, f"{x.bytes_with_zeros:,}", f"{x.bytes:,}",
       f"{x.bytes_with_zeros / x.bytes:.2f}x", len(paths))
      for name, paths, x in alike(self.packed)
    ]  # fmt: skip
    head = "packed", "pattern", "bytes with zeros", "bytes", "smaller", "kernels"
    lines = columns([head, *rows]) if rows else ["nothing is packed"]
    reasons: dict[str, list[str]] = {}
    for name, _, why in alike(self.dense):
      reasons.setdefault(why, []).append(name)
    lines += [f"with zeros, {why}: {', '.join(names)}" for why, names in reasons.items()]
    total = self.rest + sum(kernel.bytes for kernel in self.packed.values())
    zeros = self.rest + sum(kernel.bytes_with_zeros for kernel in self.packed.values())
    lines += [f"in all {total:,} bytes, and {zeros:,} with zeros"]
    return "\n".join(map(printable, lines))


def pack_tree(params: Any, rules: Rules, dtype: Any = None) -> tuple[Any, Report]:
  """Returns the tree with packed kernels, and what was packed and what was not.

      tree, report = pack_tree(params, rules)
      logits = network.apply({"params": tree}, x)   # the dense network, without rules

  Args:
    params: the trained parameters, n:m and not scanned: see `unstacked`.
    rules: the rules.
    dtype: as in `decide`; int8 rounds, with one scale for each column.

  Raises:
    ValueError: a kernel is not n:m, or a value does not fit `dtype`.
  """
  likes, dense = decide(params, rules, dtype)
  arrays = dict(flatten(params))
  packed = {path: pack(arrays[path], x.pattern, dtype, path) for path, x in likes.items()}
  kernels = {
    path: Kernel(str(x.pattern), x.nbytes, arrays[path].nbytes) for path, x in packed.items()
  }
  rest = sum(arrays[path].nbytes for path in dense)
  return map_with_names(lambda path, w: packed.get(path, w), params), Report(kernels, dense, rest)


def unpack_tree(tree: Any) -> Any:
  """Returns the tree with the zeros of its packed kernels, in numpy arrays.

  int8 values come back as float32, rounded.

  Args:
    tree: of `pack_tree`.
  """
  return jax.tree.map(lambda x: unpack(x) if is_packed(x) else x, tree, is_leaf=is_packed)


def prepare(
  tree: Any, rows: int | Callable[[str], int], backend: str = "auto", memory: bool = False
) -> Any:
  """Returns the tree on the device, each packed kernel as the fastest product reads it.

      params = prepare(tree, rows_of(network.config, batch=1, inputs=512))

  Call it once, outside jit, and drop the other tree. Where a dense product is faster for so many
  rows, the kernel gets its zeros back.

  Args:
    tree: of `pack_tree`.
    rows: of x in one call of a layer; or path -> rows, as `rows_of` returns.
    backend: as in `packed.nm_dot`.
    memory: keep kernels packed also where a dense product is faster.

  Raises:
    ValueError: rows are no whole number from 1 on, or the backend is unknown or not there.
  """

  def ready(path: str, x: Any) -> Any:
    if not is_packed(x):
      return jnp.asarray(x)
    # Each kernel by itself: one network may hold some packed and some with zeros.
    count = rows(path) if callable(rows) else rows
    return of_one.prepare(x, count, backend, memory)

  return map_with_names(ready, tree, is_packed)


def rows_of(config: Any, batch: int, inputs: int = 1, beams: int = 1) -> Callable[[str], int]:
  """Returns path -> rows of x that a kernel gets in one call; of another network, `batch` for all.

  >>> rows = rows_of(T5Config.preset("t5_1_1", "base"), batch=2, inputs=512, beams=4)
  >>> rows("encoder/layers_0/mlp/wo/kernel"), rows("decoder/layers_0/mlp/wo/kernel")
  (1024, 8)
  >>> rows_of(SwinConfig(), batch=1)("layers_1/blocks_0/mlp/fc1/kernel")
  1024

  Args:
    config: of the network.
    batch: examples at once.
    inputs: tokens of an input of a T5, which decodes one token at a time.
    beams: of the search.
  """

  def rows(path: str) -> int:
    if isinstance(config, ViTConfig):
      return batch * (1 if path.startswith("head/") else config.tokens)
    if isinstance(config, SwinConfig) and (stage := re.match(r"layers_(\d+)/", path)):
      return batch * config.sides[int(stage[1])] ** 2
    if not isinstance(config, T5Config):
      return batch
    if path.startswith("encoder/"):
      return batch * inputs
    # Keys and values of the input are computed once a sequence, all else for each token.
    reads_inputs = re.search(r"/encoder_decoder_attention/(key|value)/", path)
    return batch * beams * (inputs if reads_inputs else 1)

  return rows
