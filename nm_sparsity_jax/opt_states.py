"""What an optimizer state holds: counts, and the state of `nms.sparse` wherever it lies.

    optimizer state -> [opt_states: walk, unbox] -> SparseState, step, stored masks

A state may be nested in the states of other optax transformations, boxed by `nnx.Optimizer`, or
turned into plain dicts by a serializer. Everything here reads; nothing updates.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import optax

from nm_sparsity_jax.trees import flatten


class SrSteState(NamedTuple):
  """The state of `nms.sr_ste`.

  Attributes:
    count: the updates applied so far, an int32 scalar.
  """

  count: jax.Array


class CountStepsState(NamedTuple):
  """The state of `nms.count_steps`.

  Attributes:
    count: the updates applied so far, an int32 scalar.
  """

  count: jax.Array


class SparseState(NamedTuple):
  """The state of `nms.sparse`. All leaves are arrays.

  Attributes:
    count: the updates applied so far, an int32 scalar; -1 where the rules were found to be others
      than those that made the state.
    fingerprint: `Rules.fingerprint` of the rules that made the state, an int32 scalar.
    masks: what `nms.init_state` keeps; `{}` where no recipe keeps a mask.
    inner_state: the state of the wrapped transformation.
  """

  count: Any
  fingerprint: Any
  masks: Any
  inner_state: Any


_HOW = "make the optimizer by tx = nms.sparse(tx, rules) and pass the state of that tx"


def is_step(x: Any) -> bool:
  """Returns whether x is a step, or is meant as one, and not an optimizer state."""
  return not (isinstance(x, (tuple, list, Mapping)) or _names(x) or hasattr(x, "opt_state"))


def holds_sparse(opt_state: Any) -> bool:
  """Returns whether a state of `nms.sparse` lies anywhere in `opt_state`."""
  return any(isinstance(s, SparseState) for s in walk(opt_state))


def sparse_state(opt_state: Any) -> SparseState | None:
  """Returns the one state of `nms.sparse` in `opt_state`, without its boxes; None without one.

  Raises where there are two, where `nms.sr_ste` acts beside it, and where a later link of a chain
  changes the updates that its masks and its count depend on.
  """
  nodes = list(walk(opt_state))
  found = [s for s in nodes if isinstance(s, SparseState)]
  if not found:
    return None
  if len(found) > 1:
    raise ValueError(
      f"the optimizer state holds {len(found)} states of nms.sparse, but each would count and act "
      "by itself: put one nms.sparse around the whole optimizer, nms.sparse(optax.chain(...), "
      "rules)."
    )
  refuse(opt_state, sr_ste=TWICE)
  (state,) = found
  masks = _nested(state.masks)
  _refuse_later_links(nodes, needs_last=bool(masks))
  return SparseState(unboxed(state.count), unboxed(state.fingerprint), masks, state.inner_state)


def read(opt_state: Any, fingerprint: int | None = None) -> tuple[jax.Array, dict[str, Any]]:
  """Returns the step and the stored masks of the `nms.sparse` in an optimizer state.

  Args:
    opt_state: an optimizer state that holds a state of `nms.sparse`.
    fingerprint: that of the caller's rules. Other rules than those of `nms.sparse` raise; where
      the state is traced, the step is -1, which makes the weights NaN. None compares nothing.
  """
  state = sparse_state(opt_state)
  if state is None:
    raise ValueError(f"the optimizer state holds no state of nms.sparse: {_HOW}.")
  return state.count if fingerprint is None else matched(state, fingerprint), state.masks


def count_in(opt_state: Any) -> Any:
  """Returns the count of the `nms.sparse` in an optimizer state, in its box; None without one."""
  return next((s.count for s in walk(opt_state) if isinstance(s, SparseState)), None)


def matched(state: SparseState, fingerprint: int) -> jax.Array:
  """Returns the count of `state`; where other rules made it, -1 if traced, else it raises.

  Raises where it is not traced and other rules made it.
  """
  count, same = unboxed(state.count), unboxed(state.fingerprint) == fingerprint
  if isinstance(same, jax.core.Tracer):
    return jnp.where(same, count, jnp.int32(-1))
  if not bool(same) or not (isinstance(count, jax.core.Tracer) or count >= 0):
    raise ValueError(
      "the optimizer state was made by nms.sparse with other rules than these: give nms.sparsify "
      "and nms.finalize the rules of nms.sparse(tx, rules); a state from a checkpoint may be of a "
      "run with other rules."
    )
  return count


def refuse(opt_state: Any, *, sparse: str = "", sr_ste: str = "", multi_steps: str = "") -> None:
  """Raises with the first sentence that is given for something an optimizer state holds.

  Args:
    opt_state: of arrays or of shapes.
    sparse: what to say of `nms.sparse`.
    sr_ste: what to say of `nms.sr_ste`.
    multi_steps: what to say of `optax.MultiSteps`.
  """
  nodes = list(walk(opt_state))
  kinds = (SparseState, sparse), (SrSteState, sr_ste), (optax.MultiStepsState, multi_steps)
  for kind, sentence in kinds:
    if sentence and any(isinstance(s, kind) for s in nodes):
      raise ValueError(sentence)


TWICE = (
  "the optimizer holds nms.sr_ste beside nms.sparse, so SR-STE's term would be added twice: leave "
  "nms.sr_ste out."
)


def links(node: Any) -> tuple[Any, ...]:
  """Returns the states of a chain's links in order; `()` for anything that is not a chain's state.

  `optax.chain` makes a tuple. `optax.named_chain` makes an OrderedDict.
  """
  if type(node) is tuple:
    return node
  return tuple(node.values()) if isinstance(node, OrderedDict) else ()


def _refuse_later_links(nodes: list[Any], needs_last: bool) -> None:
  """Raises where a link of a chain after `nms.sparse` changes its updates."""
  for chain in map(links, nodes):
    after = [i for i, link in enumerate(chain) if holds_sparse(link)]
    later = chain[after[0] + 1 :] if after else ()
    multi = any(isinstance(s, optax.MultiStepsState) for link in later for s in walk(link))
    if multi or (later and needs_last):
      raise ValueError(
        "nms.sparse has links after it in an optax.chain, which change the updates that it counts "
        "and takes its masks from: make it the last link, or put it around the chain, "
        "nms.sparse(optax.chain(...), rules)."
      )


def walk(node: Any) -> Iterator[Any]:
  """Yields all containers in a state, outer ones first, in order.

  A plain dict with the fields of `SparseState` counts as one: serializers make such dicts.
  """
  if hasattr(node, "opt_state") and not isinstance(node, Mapping):
    node = node.opt_state  # nnx.Optimizer, a train state
  if _was_sparse(node):
    node = SparseState(**{name: node.get(name, {}) for name in SparseState._fields})
  if names := _names(node):
    children = [getattr(node, name) for name in names]
  elif isinstance(node, Mapping):
    children = [node[k] for k in node]
  elif isinstance(node, (tuple, list)):
    children = list(node)
  else:
    return
  yield node
  for child in children:
    yield from walk(child)


def _was_sparse(node: Any) -> bool:
  """Returns whether a serializer made this dict of a `SparseState`; parameters are no counts."""
  if not isinstance(node, Mapping):
    return False
  if not {"count", "fingerprint"} <= {*node} <= {*SparseState._fields}:
    return False
  counts = [x for name in ("count", "fingerprint") for x in jax.tree.leaves(node[name])]
  is_int = lambda x: jnp.issubdtype(getattr(x, "dtype", type(x)), jnp.integer)
  return len(counts) == 2 and all(map(is_int, counts))


def named(opt_state: Any) -> list[Any]:
  """Returns all NamedTuples and dataclasses in a state, outer ones first, in order."""
  return [node for node in walk(opt_state) if _names(node)]


def _names(node: Any) -> tuple[str, ...]:
  """Returns the fields of a NamedTuple or dataclass; none for anything else."""
  if isinstance(node, type):
    return ()
  return tuple(getattr(node, "_fields", None) or getattr(node, "__dataclass_fields__", ()))


def field(state: Any, name: str) -> Any:
  """Returns a field of a named state, else None: a tuple's method `count` is not a field."""
  return getattr(state, name) if name in _names(state) else None


def unboxed(count: Any) -> jax.Array:
  """Returns a scalar as int32, out of the box that `nnx.Optimizer` keeps it in."""
  (found,) = jax.tree.leaves(count)
  if shape := jnp.shape(found):
    raise ValueError(
      f"the optimizer state is that of several runs or devices: its count has shape {shape}. Call "
      "this inside jax.vmap too, or give it the parameters and the state of one of them, "
      "jax.tree.map(lambda x: x[0], opt_state)."
    )
  return jnp.asarray(found, jnp.int32)


def _nested(masks: Any) -> dict[str, Any]:
  """Returns the stored masks as nested dicts of arrays, whatever held them."""
  found: dict[str, Any] = {}
  for path, leaf in flatten(masks):
    *parents, last = path.split("/")
    tree = found
    for word in parents:
      tree = tree.setdefault(word, {})
    tree[last] = leaf
  return found


def is_part(params: Any) -> bool:
  """Returns whether `optax.masked` or `multi_transform` has left parameters out of a tree."""
  masked = lambda x: isinstance(x, optax.MaskedNode)
  return any(map(masked, jax.tree.leaves(params, is_leaf=masked)))
