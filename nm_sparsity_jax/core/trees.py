"""Trees of parameters by path: 'encoder/layers_0/mlp/wi/kernel'.

tree -> [(path, leaf), ...] -> tree
paths that are alike -> [group] -> 'encoder/layers_{0..11}/mlp/wi_{0,1}/kernel'
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax

_Fact = TypeVar("_Fact", bound=Hashable)


@functools.cache
def path_name(keys: tuple[Any, ...]) -> str:
  """Returns 'a/b/0/kernel' for a jax key path, without a trailing `.value` (of flax boxes)."""
  if keys and getattr(keys[-1], "name", None) in ("value", "raw_value"):
    keys = keys[:-1]
  words = []
  for k in keys:
    for field in ("key", "name", "idx"):
      if hasattr(k, field):
        words.append(str(getattr(k, field)))
        break
  return "/".join(words)


def flatten(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> list[tuple[str, Any]]:
  """Returns (path, leaf) for each leaf, in jax's order; `is_leaf` is that of `jax.tree.leaves`."""
  leaves, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf)
  return [(path_name(keys), x) for keys, x in leaves]


def nested(leaves: Mapping[str, Any]) -> dict[str, Any]:
  """Returns a tree of dicts of the leaves at 'a/b/c'; for dicts it undoes `flatten`.

  >>> nested({"mlp/wi/kernel": 1, "mlp/wo/kernel": 2})
  {'mlp': {'wi': {'kernel': 1}, 'wo': {'kernel': 2}}}
  """
  tree: dict[str, Any] = {}
  for path, leaf in leaves.items():
    *folders, last = path.split("/")
    node = tree
    for word in folders:
      node = node.setdefault(word, {})
    node[last] = leaf
  return tree


def map_with_names(function: Callable[[str, Any], Any], tree: Any) -> Any:
  """Returns the tree with every leaf replaced by function(path, leaf)."""
  return jax.tree_util.tree_map_with_path(lambda keys, x: function(path_name(keys), x), tree)


def sizes(tree: Any) -> dict[str, int]:
  """Returns path -> number of entries of each leaf, which may be a shape.

  >>> sizes({"wi": {"kernel": jax.ShapeDtypeStruct((4, 8), "float32")}})
  {'wi/kernel': 32}
  """
  return {path: math.prod(leaf.shape) for path, leaf in flatten(tree)}


_Named = list[tuple[tuple[str, ...], list[str]]]  # (words of a name, its paths)


def group(paths: Sequence[str], words: bool = False) -> list[tuple[str, list[str]]]:
  """Merges paths that differ in one word only.

  Layers come first: their words end in a number.

  >>> group(["a/layers_0/k", "a/layers_1/k", "a/layers_3/k"])[0][0]
  'a/layers_{0,1,3}/k'
  >>> group([f"a/layers_{i}/k" for i in range(12)])[0][0]
  'a/layers_{0..11}/k'
  >>> group([f"blocks.{i}.fc1.weight" for i in range(12)])[0][0]
  'blocks.{0..11}.fc1.weight'

  Args:
    paths: '/'-joined paths, or PyTorch's, which '.' joins.
    words: also merges paths that differ in a word without a number.

  Returns:
    [(name, its paths)].
  """
  dotted = any("." in path for path in paths) and not any("/" in path for path in paths)
  mark, number = (".", r"()(\d+)") if dotted else ("/", r"(.*_)(\d+)")
  named: _Named = [(tuple(path.split(mark)), [path]) for path in paths]
  depth = max((len(key) for key, _ in named), default=0)
  for position in range(depth):
    named = _merge_numbers(named, position, number)
  for position in range(depth) if words else ():
    named = _merge_words(named, position)
  return [(mark.join(key), of) for key, of in named]


def alike(facts: Mapping[str, _Fact]) -> Iterator[tuple[str, list[str], _Fact]]:
  """Yields (name, paths, fact): the paths of like layers that share a fact, as `group` merges them.

  Args:
    facts: path -> what must be equal in one row.
  """
  by_fact: dict[_Fact, list[str]] = {}
  for path, fact in facts.items():
    by_fact.setdefault(fact, []).append(path)
  for fact, of in by_fact.items():
    for name, paths in group(of, words=True):
      yield name, paths, fact


def _merge_numbers(named: _Named, position: int, number: str) -> _Named:
  merged: dict[tuple, list[tuple[str, list[str]]]] = {}
  for key, of in named:
    word = key[position] if position < len(key) else ""
    found = re.fullmatch(number, word)
    stem = found[1] if found else None
    left = (key[:position], key[position + 1 :], stem, word if stem is None else "")
    merged.setdefault(left, []).append((found[2] if found else "", of))
  named = []
  for (before, after, stem, word), members in merged.items():
    here = word if stem is None else stem + _numbers([int(number) for number, _ in members])
    middle = (here,) if here else ()
    named.append(((*before, *middle, *after), [p for _, of in members for p in of]))
  return named


def _merge_words(named: _Named, position: int) -> _Named:
  merged: dict[tuple, list[tuple[str, list[str]]]] = {}
  for key, of in named:
    word = key[position] if position < len(key) else ""
    merged.setdefault((key[:position], key[position + 1 :], len(key)), []).append((word, of))
  named = []
  for (before, after, _), members in merged.items():
    here = members[0][0]
    if len(members) > 1:
      here = "{" + ",".join(sorted(word for word, _ in members)) + "}"
    middle = (here,) if here else ()
    named.append(((*before, *middle, *after), [p for _, of in members for p in of]))
  return named


def _numbers(values: Sequence[int]) -> str:
  values = sorted(values)
  if len(values) == 1:
    return str(values[0])
  if len(values) > 2 and values == list(range(values[0], values[-1] + 1)):
    return f"{{{values[0]}..{values[-1]}}}"
  return "{" + ",".join(map(str, values)) + "}"
