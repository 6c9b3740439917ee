"""A whole parameter tree: effective parameters, exact zeros, proof.

params, rules, step, state -> [sparsify] -> dense model;  at the end [finalize] -> [verify]

For loops that keep W themselves. After `nms.sparse` only `verify` is needed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from nm_sparsity_jax.core import masks
from nm_sparsity_jax.core.schedules import as_step
from nm_sparsity_jax.core.text import columns, printable
from nm_sparsity_jax.core.trees import alike, flatten, map_with_names
from nm_sparsity_jax.training.rules import Rules
from nm_sparsity_jax.training.stored import State, current, kept


def sparsify(params: Any, rules: Rules, step: jax.Array | int, state: State | None = None) -> Any:
  """Returns the effective parameters W~ of the dense parameters W, for a dense model.

      loss = lambda w: model_loss(nms.sparsify(w, rules, step))

  Differentiable, in the gradient mode of each recipe. Same structure, shapes and dtypes; what no
  rule names is passed through. Do not call it on effective weights: D would act twice. So the
  parameters of an optimizer of `nms.sparse`, which are W~ already, need no such call.

  Args:
    params: the dense parameters.
    rules: the rules.
    step: the number of updates applied, such as `nms.step_count(opt_state)`.
    state: what `init_state` made and `update_state` refreshed, for the recipes that keep a mask.

  Raises:
    ValueError: a stored mask should have been renewed by `step` and was not, as where
      `update_state` was forgotten. Where the step is traced, the weights become NaN instead.
  """
  sites = rules.assign(params).sites
  step = as_step(step)

  def apply(path, w):
    site = sites.get(path)
    if site is None:
      return w
    return site.effective(w, *current(site, step, state))

  return map_with_names(apply, params)


def finalize(
  params: Any,
  rules: Rules,
  step: jax.Array | int,
  state: State | None = None,
  early: bool = False,
) -> Any:
  """Returns trained dense parameters with exact zeros: the target pattern of every site, D = 0.

      params = nms.finalize(params, rules, step)

  Survivors keep their bits, but for s_ste, which scales them. The parameters of an optimizer of
  `nms.sparse` need no such call.

  Args:
    params: the trained parameters.
    rules: the rules.
    step: the number of updates applied. A step at which the schedule of a site is not over is an
      error; where the step is traced, the weights become NaN.
    state: the stored masks, for the recipes that keep one.
    early: finalize although a schedule is not over. snip must have its mask by then.
  """
  assignment = rules.assign(params)
  step = as_step(step)
  # Under jit the step has no value yet: NaN, below, is what an early call gets there.
  is_known = not isinstance(step, jax.core.Tracer)
  if is_known and (where := assignment.unfinished(int(step), early)):
    advice = "" if early else ", or call nms.finalize(..., early=True) once snip has its masks"
    raise ValueError(f"the run is at step {where}. Train on{advice}.")

  def apply(path, w):
    site = assignment.sites.get(path)
    if site is None:
      return w
    at, _mask = current(site, step, state)  # `at` is NO_STEP where the mask is wrong
    done = site.recipe.final(w, site.groups, kept(site, state))
    # What is traced cannot raise, but NaN is seen.
    wrong = at < site.final_from(early)
    return jnp.where(wrong, jnp.full_like(done, jnp.nan), done)

  return map_with_names(apply, params)


@dataclasses.dataclass(frozen=True)
class Verified:
  """One parameter's proof.

  `first` is the index of the first weight of the first bad group. `not_finite` counts inf and NaN:
  they are no zeros, so a weight that has them may be n:m, but nobody can use it.
  """

  path: str
  shape: tuple[int, ...]
  axis: masks.Axis
  pattern: str
  groups: int
  bad_groups: int
  density: float
  first: tuple[int, ...] | None
  not_finite: int

  @property
  def warning(self) -> str:
    """Returns in words what is wrong beside the pattern; empty where nothing is."""
    if self.not_finite:
      return (
        f"{self.not_finite} inf or NaN. Training diverged, or step, mask or rules are wrong. "
        "Under jit that makes NaN; without jit it is an error that says which"
      )
    return "" if self.density else "every weight is zero: its data may be lost"


@dataclasses.dataclass(frozen=True)
class Report:
  """What `verify` found; `str` is a table that ends in the verdict, `ok`.

  It is ok when a parameter must be n:m, each such parameter is, and none has inf or NaN.

  Attributes:
    sites: the parameters that must be n:m.
    skipped: path -> why a rule left it dense ('skip' policy); not part of the verdict.
  """

  sites: tuple[Verified, ...]
  skipped: Mapping[str, str]

  @property
  def ok(self) -> bool:
    return self.verdict == "ok"

  @property
  def verdict(self) -> str:
    """Returns `ok`, or what is wrong."""
    if not self.sites:
      return "NOTHING TO PROVE: no rule makes anything sparse"
    if any(p.bad_groups for p in self.sites):
      return "NOT n:m"
    if lost := sum(p.not_finite for p in self.sites):
      return f"NOT FINITE: {lost} weights are inf or NaN"
    return "ok"

  def __str__(self) -> str:
    head = "parameter", "pattern", "axis", "groups", "bad", "density", "first bad group at"
    # Like layers are one row, so what a row does not show is made equal.
    shown = {
      p.path: dataclasses.replace(p, path="", density=round(p.density, 4), not_finite=0)
      for p in self.sites
    }
    rows = []
    for name, paths, p in alike(shown):
      groups, bad = p.groups * len(paths), p.bad_groups * len(paths)  # of all these layers
      rows.append((name, p.pattern, p.axis, groups, bad, f"{p.density:.4f}", p.first or ""))
    lines = columns([head, *rows]) if rows else []
    lines += [f"skipped  {name}: {why}" for name, _, why in alike(self.skipped)]
    lines += [f"warning  {p.path}: {p.warning}" for p in self.sites if p.warning]
    return "\n".join([*map(printable, lines), self.verdict])


def verify(params: Any, rules: Rules) -> Report:
  """Counts the groups of each sparse parameter that have more than n weights that are not zero.

      print(nms.verify(params, rules))   # a table, and the verdict

  -0.0 is zero; 1e-40 is not.

  Args:
    params: the weights to be deployed: the parameters of a loop with `nms.sparse`, or what
      `finalize` returned.
    rules: the rules.

  Returns:
    A `Report`; `report.ok` is the verdict as a bool.
  """
  arrays = dict(flatten(params))
  assignment, found = rules.assign(params), []
  for path, site in assignment.sites.items():
    w, pattern = np.asarray(arrays[path]), site.pattern
    used = w != 0  # on the host, since a backend may flush subnormals
    # numpy's isfinite knows no integers of four bits; float32 holds all of one byte.
    finite = np.isfinite(w.astype(np.float32) if w.dtype.itemsize == 1 else w)
    counts = site.groups.split(used, pattern).sum(-1)
    bad = counts > pattern.n
    one = Verified(
      path=path,
      shape=site.shape,
      axis=site.axis,
      pattern=str(pattern),
      groups=counts.size,
      bad_groups=int(bad.sum()),
      density=float(used.sum() / max(w.size, 1)),
      first=site.groups.start(int(np.argmax(bad)), pattern) if bad.any() else None,
      not_finite=int((~finite).sum()),
    )
    found.append(one)
  return Report(tuple(found), assignment.skipped)
