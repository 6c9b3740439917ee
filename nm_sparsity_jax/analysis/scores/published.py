"""Which of the paper's rows a run compares with.

    Table 12   26 rows of nine columns: dense, sr_ste, sdgf_stepwise, sdgf_geometric
    Table 7    overall alone: also snip, idp and mdgf_exponential at 1:32
    Table 2, 3, 6   top-1 of ViT-B/16 and SwinV2-B on ImageNet, of ResNet-50 on CIFAR-10

`paper` has all of them.
"""

from __future__ import annotations

from typing import Any

from nm_sparsity_jax.runs import results
from nm_sparsity_jax.runs.paper import tables
from nm_sparsity_jax.training import roles

STEPS, DENSE_STEPS = 100_000, 10_000  # of the paper's runs
# Tables of networks of images, by the data that they are of.
IMAGES = {2: "imagenet2012", 3: "imagenet2012", 6: "cifar10"}


def match(run: results.Run) -> tuple[dict[str, Any] | None, str]:
  """Returns the published row for a run, with its `table`, or None; and a remark, or ''.

  A row is the run's where recipe, pattern of each place and dense phase agree. The paper has runs
  without a dense phase and with one of 10 % of the steps: one of another length goes with the
  latter, and the remark says so, as it does where the model has another size.

  Args:
    run: what `results.read` returned.
  """
  row, remark = _match(run)
  if row and run.size not in (None, "base"):
    remark = "; ".join(filter(None, [remark, f"the published row is of T5 base, not {run.size}"]))
  return row, remark


def _match(run: results.Run) -> tuple[dict[str, Any] | None, str]:
  if run.mini:
    return None, "mini-GLUE, which is made up: no published row compares"
  if run.recipe is None or run.places is None:
    wanted = "--recipe" if run.recipe is None else "--pattern"
    return None, f"no published row: it is not known what was trained (say it by {wanted})"
  rows = [
    {"table": table, **row}
    for table in (12, 7)
    for row in tables()[f"table{table}"]
    if row["recipe"] == run.recipe and roles.single(row["places"]) == run.places
  ]
  what = f"{run.recipe} {roles.text_of(run.places)}".rstrip()
  if not rows:
    return None, f"the paper has no GLUE row for {what}"
  return _by_dense_phase(run, what, rows)


def match_images(run: results.Run) -> tuple[dict[str, Any] | None, str]:
  """Returns the published top-1 row for a run on images, with its `table`, or None; and a remark.

  A row is the run's where network, recipe and pattern of each place agree. The paper does not say
  how long the phases of its networks of images are.

  Args:
    run: what `results.settings` returned.
  """
  rows = [{"table": t, **row} for t in IMAGES for row in tables()[f"table{t}"]]
  if run.network not in {row["network"] for row in rows}:
    return None, ""
  if run.recipe is None or run.places is None:
    return None, "no published row: it is not known what was trained"
  rows = [row for row in rows if row["network"] == run.network]
  for row in rows:
    if row["recipe"] == run.recipe and roles.single(row["places"]) == run.places:
      data = IMAGES[row["table"]]
      other = run.data is not None and run.data != data
      return row, f"the published row is of {data}, this run of {run.data}" if other else ""
  what = f"{run.recipe} {roles.text_of(run.places)}".rstrip()
  return None, f"Table {rows[0]['table']} has no row for {what}"


def _by_dense_phase(
  run: results.Run, what: str, rows: list[dict[str, Any]]
) -> tuple[dict[str, Any], str] | tuple[None, str]:
  """Returns the row of the run's dense phase, among those of its recipe and patterns."""
  variants = [row for row in rows if row.get("dense_steps") is not None]
  if not variants:  # dense, or a row that does not say
    said = rows[0]["table"] == 12
    return rows[0], "" if said else f"Table 7 does not say how long {what} was dense"
  if run.dense_steps is None:
    return None, "no published row: the length of the dense phase is not known (--dense-steps)"
  row = next((r for r in variants if bool(r["dense_steps"]) == bool(run.dense_steps)), None)
  if row is None:
    has = variants[0]["row"]
    return None, f"the paper has {has} for {what}, and no row with {run.dense_steps} dense steps"
  if run.dense_steps and (run.dense_steps, run.sparse_steps) != (DENSE_STEPS, STEPS):
    length = f"{run.dense_steps} dense steps of {run.sparse_steps or 'unknown'}"
    return row, f"the published row has {DENSE_STEPS} dense steps of {STEPS}, this run {length}"
  return row, ""
