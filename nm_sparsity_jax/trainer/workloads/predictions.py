"""What a workload says of each example: rows for a file of predictions.

effective params, batch -> [Workload.predict, compiled] -> arrays, one entry a row
                        -> [rows] -> ({"idx": 3}, {"output": 0.25}) of each example
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# What identifies an example, and what is said of it: values that JSON has.
Row = tuple[Mapping[str, Any], Any]


def of_batch(workload: Any, variables: Mapping[str, Any], batch: Any) -> dict[str, jax.Array]:
  """Returns what `Workload.predict` says of a batch; it is traced.

      step = jax.jit(functools.partial(of_batch, workload))

  Args:
    workload: a `Workload` with `predict`.
    variables: effective 'params', and the state.
    batch: of a split.

  Raises:
    ValueError: what it returns is not a mapping of arrays with an entry a row.
  """
  state = {name: x for name, x in variables.items() if name != "params"}
  found, said = workload.predict(variables["params"], state, batch), _name(workload)
  if not isinstance(found, Mapping) or not found:
    raise ValueError(
      f"{said} returned {found!r:.60}: give a mapping, name -> an array with an entry a row."
    )
  rows = _rows(batch)
  arrays = {name: jnp.asarray(x) for name, x in found.items()}
  for name, x in arrays.items():
    if x.shape[:1] != (rows,):
      raise ValueError(
        f"{said} returned {name!r} of shape {x.shape} for a batch of {rows} rows: its first axis "
        f"must have {rows} entries, one a row."
      )
    if not any(jnp.issubdtype(x.dtype, kind) for kind in (jnp.bool_, jnp.integer, jnp.floating)):
      raise ValueError(
        f"{said} returned {name!r} of dtype {x.dtype}: a file of predictions holds real numbers "
        "and booleans."
      )
  return arrays


def rows(
  workload: Any, split: str, predicted: Iterable[tuple[Mapping[str, Any], Mapping[str, Any]]]
) -> Iterator[Row]:
  """Yields the row of each example of a split; rows that only fill a batch are left out.

  Args:
    workload: whose predictions they are.
    split: its name.
    predicted: each batch, and what `of_batch` returned of it, on the host.

  Raises:
    ValueError: a number is not finite, a batch lacks `Workload.real`, or there is no example.
  """
  count = 0
  for batch, found in predicted:
    arrays = {name: _plain(np.asarray(x)) for name, x in found.items()}
    for row in np.flatnonzero(_real(workload, split, batch)):
      for name, x in arrays.items():
        if not np.all(np.isfinite(x[row])):
          raise ValueError(
            f"{_name(workload)} returned a {name!r} that is not finite for example {count} of "
            f"{split!r}: JSON has no such number. Look at the checkpoint, or return finite numbers."
          )
      yield {"idx": count}, {name: x[row].tolist() for name, x in arrays.items()}
      count += 1
  if not count:
    raise ValueError(f"the split {split!r} has no examples: there is nothing to predict.")


def _real(workload: Any, split: str, batch: Mapping[str, Any]) -> np.ndarray:
  """Returns which rows of a batch are examples, bool [rows]."""
  if workload.real is None:
    return np.ones(_rows(batch), bool)
  if workload.real not in batch:
    raise ValueError(
      f"{type(workload).__name__}.real is {workload.real!r}, but a batch of {split!r} has no such "
      f"array; it has {', '.join(sorted(batch))}."
    )
  real = np.asarray(batch[workload.real])
  if real.shape != (_rows(batch),):
    raise ValueError(
      f"{type(workload).__name__}.real: {workload.real!r} of {split!r} has the shape {real.shape}, "
      f"and must have one entry for each of {_rows(batch)} rows."
    )
  return real.astype(bool)


def _rows(batch: Mapping[str, Any]) -> int:
  return len(next(iter(batch.values())))


def _plain(x: np.ndarray) -> np.ndarray:
  """Returns an array of a dtype whose values Python has: those of ml_dtypes are widened."""
  if jnp.issubdtype(x.dtype, jnp.floating):
    return x.astype(np.float64)
  return x if x.dtype.kind in "biu" else x.astype(np.int64)


def _name(workload: Any) -> str:
  return f"{type(workload).__name__}.predict"
