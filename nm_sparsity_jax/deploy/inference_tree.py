"""A whole parameter tree whose sparse kernels are packed: what is deployed.

    params (exact zeros) -> [unstacked] -> a tree that no scan stacks
    tree, rules -> [decide] -> which kernels are packed, and why others are not
                -> [pack_tree] -> the tree, with NMPacked in place of these kernels -> [prepare]
                               -> what network.apply({"params": ...}) reads the fastest

Decisions need shapes alone, so what writes a file and what fills a network decide alike. The
network is the dense one, without rules and without a scan.
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
from nm_sparsity_jax.core.packed import MOST, NMPacked, Sizes, like, pack, sizes, unpack
from nm_sparsity_jax.core.text import printable, table
from nm_sparsity_jax.core.trees import alike, flatten, map_with_names, path_name
from nm_sparsity_jax.deploy.unstack_layers import unstacked
from nm_sparsity_jax.models.t5 import T5Config
from nm_sparsity_jax.models.vit import ViTConfig
from nm_sparsity_jax.training.rules import Rules
from nm_sparsity_jax.training.sites import Site

__all__ = [
  "VALUES", "ZEROS", "Decision", "Report", "decide", "is_packed", "pack_tree", "prepare", "report",
  "rows_of", "unpack_tree", "unstacked",
]  # fmt: skip

VALUES = ("float32", "bfloat16", "float16", "int8")  # of a packed weight
ZEROS = "a convolution, or stacked by a scan (nms.inference_tree.unstacked)"
_FLOATS = VALUES[:3]  # what `packed.pack` takes
_PACKED = lambda x: isinstance(x, NMPacked)


@dataclasses.dataclass(frozen=True)
class Decision:
  """What becomes of each parameter of a tree.

  Attributes:
    packed: path -> Site, of the kernels that a file holds packed.
    dense: path -> why a parameter keeps its zeros.
    dtypes: path -> numpy's name of the dtype of the packed values.
  """

  packed: Mapping[str, Site]
  dense: Mapping[str, str]
  dtypes: Mapping[str, str]

  def in_network(self, path: str) -> str:
    """Says why a layer takes a kernel with its zeros though a file holds it packed; '' if packed.

    Args:
      path: of `packed`.
    """
    return "" if len(self.packed[path].shape) == 2 else ZEROS

  def of_network(self) -> Decision:
    """Returns what becomes of each parameter in a network, which takes fewer kernels packed."""
    dense = {path: why for path in self.packed if (why := self.in_network(path))}
    packed = {path: place for path, place in self.packed.items() if path not in dense}
    return Decision(packed, {**self.dense, **dense}, {p: self.dtypes[p] for p in packed})

  def like(self, path: str) -> NMPacked:
    """Returns a packed kernel, with shapes in place of arrays.

    Args:
      path: of `packed`.
    """
    place = self.packed[path]
    return like(place.pattern, place.groups, self.dtypes[path])


def decide(params: Any, rules: Rules, dtype: Any = None) -> Decision:
  """Returns which parameters of a tree are packed. It looks at shapes and dtypes alone.

  A kernel is packed where the rules give it a pattern n:m with n < m along what its layer
  contracts, and where that saves bytes. The pattern is the last one of its recipe.

      print(decide(params, rules).dense)

  Args:
    params: the finalized parameters, or their shapes, not scanned: see `unstacked`. A flat dict of
      paths will do.
    rules: the rules.
    dtype: of the values: 'float32', 'bfloat16', 'float16' or 'int8'. None: that of each kernel.
  """
  if dtype is not None and np.dtype(dtype).name not in VALUES:
    raise ValueError(f"dtype={dtype!r}: packed values are {', '.join(VALUES)}, or as they are.")
  known = {path: np.dtype(getattr(x, "dtype", np.float32)) for path, x in flatten(params)}
  assignment = rules.assign(params)
  packed: dict[str, Site] = {}
  dense: dict[str, str] = {}
  dtypes: dict[str, str] = {}
  for path, own in known.items():
    place = assignment.places.get(path)
    kind = own if dtype is None else np.dtype(dtype)
    if place is None:
      dense[path] = assignment.skipped.get(path, "no rule makes it sparse")
    elif why := _refused(place, own, kind):
      dense[path] = why
    else:
      packed[path], dtypes[path] = place, kind.name
  return Decision(packed, dense, dtypes)


def _refused(place: Site, own: np.dtype, kind: np.dtype) -> str:
  """Says why a kernel stays dense, '' where it is packed."""
  pattern = place.pattern
  if place.path.rpartition("/")[-1] != "kernel":
    return "a table or vector, and only kernels are packed"
  if len(place.shape) < 2 or (len(place.shape) == 2 and place.axes != (0,)):
    return f"its groups lie along axis {place.axis}, and its layer contracts axis 0"
  if pattern.n == pattern.m:
    return f"{pattern} keeps every weight"
  if pattern.m > MOST:
    return f"{pattern}: an index reaches through {MOST} entries at most"
  if own.name not in _FLOATS:
    return f"weights of {own} are not packed"
  found = sizes(like(pattern, place.groups, kind))
  zeros = math.prod(place.shape) * own.itemsize
  if found.total >= zeros:
    return f"{pattern} takes {found.total:,} bytes packed, and {zeros:,} with its zeros"
  return ""


# --- trees ----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Report:
  """What was packed and what was not; its `str` is a table.

  Attributes:
    sizes: path -> bytes of each packed kernel, and of the same with its zeros.
    patterns: path -> its n:m.
    weights: path -> how many weights a packed kernel has, zeros included.
    dense: path -> why a parameter keeps its zeros.
    rest: bytes of these.
  """

  sizes: Mapping[str, Sizes]
  patterns: Mapping[str, str]
  weights: Mapping[str, int]
  dense: Mapping[str, str]
  rest: int

  @property
  def total(self) -> int:
    """Returns the bytes of the whole tree."""
    return self.rest + sum(found.total for found in self.sizes.values())

  @property
  def zeros(self) -> int:
    """Returns the bytes of the whole tree with its zeros."""
    return self.rest + sum(found.dense for found in self.sizes.values())

  def __str__(self) -> str:
    facts = {path: (self.patterns[path], found) for path, found in self.sizes.items()}
    rows = [
      (name, pattern, f"{found.dense:,}", f"{found.total:,}", f"{found.ratio:.2f}x",
       f"{found.total / self.weights[paths[0]]:.4f}", len(paths))
      for name, paths, (pattern, found) in alike(facts)
    ]  # fmt: skip
    head = "packed", "pattern", "bytes with zeros", "bytes", "smaller", "a weight", "kernels"
    lines = table(head, rows) if rows else ["nothing is packed"]
    reasons: dict[str, list[str]] = {}
    for name, _, why in alike(self.dense):
      reasons.setdefault(why, []).append(name)
    lines += [f"with zeros, {why}: {', '.join(names)}" for why, names in reasons.items()]
    lines += [f"in all {self.total:,} bytes, and {self.zeros:,} with zeros"]
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
  decision = decide(params, rules, dtype).of_network()

  def one(path: str, w: Any) -> Any:
    if path not in decision.packed:
      return w
    place = decision.packed[path]
    return pack(np.asarray(w), place.pattern, place.groups, decision.dtypes[path], path)

  return map_with_names(one, params), report(decision, params)


def report(decision: Decision, params: Any) -> Report:
  """Returns what a decision means for a tree, in bytes.

  Args:
    decision: of `decide`.
    params: the tree, or its shapes.
  """
  known = dict(flatten(params))
  weights = {path: math.prod(x.shape) for path, x in known.items()}
  zeros = {path: n * np.dtype(known[path].dtype).itemsize for path, n in weights.items()}
  bytes_of = {
    path: dataclasses.replace(sizes(decision.like(path)), dense=zeros[path])
    for path in decision.packed
  }
  patterns = {path: str(place.pattern) for path, place in decision.packed.items()}
  rest = sum(zeros[path] for path in decision.dense)
  weights = {path: weights[path] for path in decision.packed}
  return Report(bytes_of, patterns, weights, decision.dense, rest)


def is_packed(tree: Any) -> bool:
  """Returns whether a tree holds a packed kernel."""
  return any(isinstance(x, NMPacked) for x in jax.tree.leaves(tree, is_leaf=_PACKED))


def unpack_tree(tree: Any) -> Any:
  """Returns the tree with the zeros of its packed kernels, in numpy arrays.

  int8 values come back as float32, rounded.

  Args:
    tree: of `pack_tree`.
  """
  return _map_packed(lambda path, x: unpack(x), tree)


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
  count = rows if callable(rows) else lambda path: rows
  ready = lambda path, x: of_one.prepare(x, count(path), backend, memory)
  return jax.tree.map(jnp.asarray, _map_packed(ready, tree))


def rows_of(
  config: Any, batch: int, inputs: int = 1, targets: int = 1, beams: int = 1
) -> Callable[[str], int]:
  """Returns path -> rows of x that a kernel gets in one call; of another network, `batch` for all.

  >>> rows = rows_of(T5Config.t5_1_1("base"), batch=2, inputs=512, beams=4)
  >>> rows("encoder/layers_0/mlp/wo/kernel"), rows("decoder/layers_0/mlp/wo/kernel")
  (1024, 8)

  Args:
    config: of the network.
    batch: examples at once.
    inputs: tokens of an input of a T5.
    targets: tokens of a target that its decoder sees at once: 1 where it decodes.
    beams: of the search.
  """

  def rows(path: str) -> int:
    if isinstance(config, ViTConfig):
      return batch * (1 if path.startswith("head/") else config.tokens)
    if not isinstance(config, T5Config):
      return batch
    if path.startswith("encoder/"):
      return batch * inputs
    reads_inputs = re.search(r"/encoder_decoder_attention/(key|value)/", path)
    return batch * beams * (inputs if reads_inputs else targets)

  return rows


def _map_packed(function: Callable[[str, NMPacked], Any], tree: Any) -> Any:
  """Returns the tree with function(path, kernel) in place of each packed kernel."""

  def one(keys, x):
    return function(path_name(keys), x) if isinstance(x, NMPacked) else x

  return jax.tree_util.tree_map_with_path(one, tree, is_leaf=_PACKED)
