"""Which of the paper's rows a run compares with; `runs.paper` has all of them.

Table 12   26 rows of nine columns: dense, sr_ste, sdgf_stepwise, sdgf_geometric
Table 7    overall alone: also snip, idp and mdgf_exponential at 1:32
Table 2, 3, 6   top-1 of ViT-B/16 and SwinV2-B on ImageNet, of ResNet-50 on CIFAR-10
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nm_sparsity_jax.core.patterns import NM
from nm_sparsity_jax.runs import results
from nm_sparsity_jax.runs.paper import tables
from nm_sparsity_jax.training import roles

STEPS, DENSE_STEPS = 100_000, 10_000  # of the paper's runs
# Tables of networks of images, by the data that they are of.
IMAGES = {2: "imagenet2012", 3: "imagenet2012", 6: "cifar10"}
# Where the kernels of a role stand in a T5.
_ATTENTIONS = ("encoder/self", "decoder/self", "decoder/cross")
_STAND = {"ff": ("encoder", "decoder"), **dict.fromkeys("qkvo", _ATTENTIONS)}


def match(run: results.Run) -> tuple[dict[str, Any] | None, str]:
  """Returns the published row for a run, with its `table`, or None; and a remark, or ''.

  A row is the run's where network, recipe, pattern of each place and dense phase agree. On GLUE the
  paper has runs without a dense phase and with one of 10 % of the steps: a run of another length
  goes with the latter, and the remark says so. Of images it does not say how long phases are.

  Args:
    run: what `results.read` or `results.settings` returned.
  """
  if run.mini:
    return None, "mini-GLUE, which is made up: no published row compares"
  if run.recipe is None or run.places is None:
    return None, "no published row: no config.gin says what was trained"
  what = " ".join(filter(None, [run.network, run.recipe, text_of(run.places)]))
  rows = [
    {"table": number, **row}
    for number in (IMAGES if run.network else (12, 7))
    for row in tables()[f"table{number}"]
    if (row.get("network"), row["recipe"]) == (run.network, run.recipe)
    and parts_of(row["places"]) == parts_of(run.places)
  ]
  if not rows:
    return None, f"the paper has no row for {what}"
  row, remark = rows[0], ""
  if any(each.get("dense_steps") is not None for each in rows):
    row, remark = _by_dense_phase(run, what, rows)
  remarks = [remark]
  if row and run.size not in (None, "base"):
    remarks.append(f"the published row is of T5 base, not {run.size}")
  if row and run.network and run.data not in (None, IMAGES[row["table"]]):
    remarks.append(f"the published row is of {IMAGES[row['table']]}, this run of {run.data}")
  return row, "; ".join(filter(None, remarks))


def _by_dense_phase(
  run: results.Run, what: str, rows: Sequence[dict[str, Any]]
) -> tuple[dict[str, Any] | None, str]:
  """Returns the row of the run's dense phase, among those of its recipe and patterns."""
  if run.dense_steps is None:
    return None, "no published row: the length of the dense phase is not known"
  for row in rows:
    if row.get("dense_steps") is not None and bool(row["dense_steps"]) == bool(run.dense_steps):
      if not run.dense_steps or (run.dense_steps, run.sparse_steps) == (DENSE_STEPS, STEPS):
        return row, ""
      length = f"{run.dense_steps} dense steps of {run.sparse_steps or 'unknown'}"
      return row, f"the published row has {DENSE_STEPS} dense steps of {STEPS}, this run {length}"
  return None, f"the paper has no row for {what} with {run.dense_steps} dense steps"


def parts_of(places: Mapping[str, Any]) -> dict[str, str]:
  """Returns places, each taken apart, so that rules that say the same are equal.

  >>> parts_of({"encoder/ff": "1:8", "decoder/ff": "1:8"}) == parts_of({"ff": "1:8"})
  True
  >>> parts_of({"decoder/cross/qk": "1:4"})
  {'decoder/cross/q': '1:4', 'decoder/cross/k': '1:4'}

  Args:
    places: place -> pattern; a place that is a regex is left as it is.
  """
  found: dict[str, str] = {}
  for place, pattern in places.items():
    *where, role = place.split("/")
    for part in roles.COMPOSITES.get(role, (role,)):
      inside = [s for s in _STAND.get(part, ()) if {*where} <= {*s.split("/")}]
      found |= dict.fromkeys([f"{s}/{part}" for s in inside] or [place], str(NM.parse(pattern)))
  return found


def text_of(places: Mapping[str, Any]) -> str:
  """Returns places and their patterns for people.

  >>> text_of({"ff": "1:8", "qk": "1:4"})
  '1:8 ff, 1:4 qk'
  """
  return ", ".join(f"{pattern} {place}" for place, pattern in places.items())
