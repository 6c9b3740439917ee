"""Which kernels become sparse: rules on the shapes of all parameters, every mistake collected."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nm_sparsity_jax.analysis.plan.findings import Findings
from nm_sparsity_jax.core.trees import alike, flatten, group
from nm_sparsity_jax.training import roles
from nm_sparsity_jax.training.rules import Rules
from nm_sparsity_jax.training.sites import Assignment


def assign(found: Findings, rules: Rules, params: Any) -> Assignment:
  """Assigns places to parameters; notes a mistake, and then all of them count as dense."""
  try:
    return rules.assign(params)
  except ValueError as e:
    found.errors.append(str(e))
    return Assignment({}, {}, tuple(path for path, _ in flatten(params)))


def names(paths: Sequence[str], words: bool = False) -> str:
  """Returns paths as one line, with paths that are alike as one."""
  return ", ".join(name for name, _ in group(paths, words))


def kernels(assignment: Assignment) -> dict[str, Any]:
  """Returns the part `kernels`: what is sparse, what is skipped and why, what no rule names."""
  skipped = [{**_entry(name, of), "why": why} for name, of, why in alike(assignment.skipped)]
  dense = [path for path in assignment.dense if path.endswith("kernel")]
  others = len(assignment.dense) - len(dense)
  sparse = _sparse(assignment)
  return {
    "sparse": sparse,
    "skipped": skipped,
    "dense": [_entry(*named) for named in group(dense, words=True)],
    "other_dense": others,
  }


def _sparse(assignment: Assignment) -> list[dict[str, Any]]:
  """Returns the sparse kernels; those that are alike share an entry."""
  facts = {
    path: (p.key, p.shape, p.axis, str(p.pattern), p.count, p.recipe.name, p.remarks)
    for path, p in assignment.places.items()
  }
  return [
    {
      **_entry(name, of),
      "role": _role(of),
      "rule": rule,
      "shape": list(shape),
      "axis": axis,
      "pattern": pattern,
      "groups": groups,
      "recipe": recipe,
      "remarks": list(remarks),
    }
    for name, of, (rule, shape, axis, pattern, groups, recipe, remarks) in alike(facts)
  ]


def _role(paths: Sequence[str]) -> str | None:
  found = {role for path in paths if (role := roles.role_of(path))}
  return ",".join(sorted(found)) or None


def _entry(name: str, paths: Sequence[str]) -> dict[str, Any]:
  return {"path": name, "count": len(paths), "paths": paths}
