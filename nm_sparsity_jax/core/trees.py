"""Trees of parameters by path: 'encoder/layers_0/mlp/wi/kernel'.

tree -> [(path, leaf), ...] -> tree
paths that are alike -> [group] -> 'encoder/layers_{0..11}/mlp/wi_{0,1}/kernel'
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import jax
from flax import traverse_util


@functools.cache
def path_name(keys: tuple[Any, ...]) -> str:
  """Returns 'a/b/0/kernel' for a jax key path, without a trailing `.value` (of flax boxes)."""
  if keys and getattr(keys[-1], "name", None) in ("value", "raw_value"):
    keys = keys[:-1]
  return jax.tree_util.keystr(keys, simple=True, separator="/")


def flatten(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> list[tuple[str, Any]]:
  """Returns (path, leaf) for each leaf, in jax's order; `is_leaf` is that of `jax.tree.leaves`."""
  leaves, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf)
  return [(path_name(keys), x) for keys, x in leaves]


def nested(leaves: Mapping[str, Any]) -> dict[str, Any]:
  """Returns a tree of dicts of the leaves at 'a/b/c'; for dicts it undoes `flatten`.

  >>> nested({"mlp/wi/kernel": 1, "mlp/wo/kernel": 2})
  {'mlp': {'wi': {'kernel': 1}, 'wo': {'kernel': 2}}}
  """
  return traverse_util.unflatten_dict(dict(leaves), sep="/")


def map_with_names(
  function: Callable[[str, Any], Any], tree: Any, is_leaf: Callable[[Any], bool] | None = None
) -> Any:
  """Returns the tree with every leaf replaced by function(path, leaf)."""
  named = lambda keys, x: function(path_name(keys), x)
  return jax.tree_util.tree_map_with_path(named, tree, is_leaf=is_leaf)


def group(paths: Sequence[str]) -> list[tuple[str, list[str]]]:
  """Merges paths that differ in one word only.

  Layers come first: their words end in a number.

  >>> group(["a/layers_0/k", "a/layers_1/k", "a/layers_3/k"])[0][0]
  'a/layers_{0,1,3}/k'
  >>> group([f"a/layers_{i}/{x}" for i in range(12) for x in "qk"])[0][0]
  'a/layers_{0..11}/{k,q}'
  >>> group([f"blocks.{i}.fc1.weight" for i in range(12)])[0][0]
  'blocks.{0..11}.fc1.weight'

  Args:
    paths: '/'-joined paths, or PyTorch's, which '.' joins.

  Returns:
    [(name, its paths)].
  """
  mark = "/" if any("/" in path for path in paths) else "."
  named = {tuple(path.split(mark)): [path] for path in paths}
  for varying in r"(.*_|)(\d+)", r"()(.*)":
    for position in range(max(map(len, named), default=0)):
      named = _merged(named, position, varying)
  return [(mark.join(name), of) for name, of in named.items()]


def _merged(named: Mapping, position: int, varying: str) -> dict[tuple[str, ...], list[str]]:
  """Joins names, as words, that are equal but for the varying end of the word at a position."""
  members: dict[tuple, dict[str, list[str]]] = {}  # what is equal -> end -> paths
  for name, paths in named.items():
    found = re.fullmatch(varying, name[position]) if position < len(name) else None
    stem, end = found.groups() if found else (None, "")
    key = (name[:position], stem, name[position + 1 :]) if found else (name, stem, ())
    members.setdefault(key, {})[end] = paths
  out = {}
  for (before, stem, after), ends in members.items():
    word = () if stem is None else (stem + _joined([*ends]),)
    out[*before, *word, *after] = [path for paths in ends.values() for path in paths]
  return out


def alike(facts: Mapping[str, Hashable]) -> Iterator[tuple[str, list[str], Any]]:
  """Yields (name, paths, fact): the paths of like layers that share a fact, as `group` merges them.

  Args:
    facts: path -> what must be equal in one row.
  """
  by_fact: dict[Hashable, list[str]] = {}
  for path, fact in facts.items():
    by_fact.setdefault(fact, []).append(path)
  for fact, of in by_fact.items():
    for name, paths in group(of):
      yield name, paths, fact


def _joined(ends: Sequence[str]) -> str:
  # '{0..11}', '{0,1,3}' or '{wi,wo}'; a single end as it is.
  if len(ends) == 1:
    return ends[0]
  are_numbers = all(end.isdigit() for end in ends)
  ends = sorted(ends, key=int if are_numbers else None)
  if are_numbers and len(ends) > 2 and int(ends[-1]) - int(ends[0]) == len(ends) - 1:
    return f"{{{ends[0]}..{ends[-1]}}}"
  return f"{{{','.join(ends)}}}"
