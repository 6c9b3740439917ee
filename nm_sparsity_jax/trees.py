"""Trees of parameters by path: 'encoder/layers_0/mlp/wi/kernel'.

tree -> [(path, leaf), ...] -> tree
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax


def path_name(keys: Sequence[Any]) -> str:
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


def map_with_names(function: Callable[[str, Any], Any], tree: Any) -> Any:
  """Returns the tree with every leaf replaced by function(path, leaf)."""
  return jax.tree_util.tree_map_with_path(lambda keys, x: function(path_name(keys), x), tree)
