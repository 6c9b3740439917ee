"""Which of the paper's rows a run compares with; `runs.paper` has all of them.

Table 12   26 rows of nine columns: dense, sr_ste, sdgf_stepwise, sdgf_geometric
Table 7    overall alone: also snip, idp and mdgf_exponential at 1:32
Table 2, 3, 6   top-1 of ViT-B/16 and SwinV2-B on ImageNet, of ResNet-50 on CIFAR-10
"""

from __future__ import annotations

import re
from typing import Any

from nm_sparsity_jax.analysis.run_folder import Run
from nm_sparsity_jax.runs import paper, trained

STEPS, DENSE_STEPS = 100_000, 10_000  # of the paper's runs
# Tables of networks of images, by the data that they are of.
IMAGES = {2: "imagenet2012", 3: "imagenet2012", 6: "cifar10"}


def match(run: Run) -> tuple[dict[str, Any] | None, list[str]]:
  """Returns the published row for a run, with its `table`, or None; and remarks.

  A row is the run's where network, recipe and the pattern of each place agree. On GLUE the paper
  has runs without a dense phase and with one of 10 % of the steps: a run of another length goes
  with the latter. Of images the paper does not say how long phases are.
  """
  if run.recipe is None or run.sparse is None:
    return None, [f"no published row: {run.no_rules or 'several recipes'}"]
  network = image_network(run.gin)
  places = {place: str(recipe.pattern) for place, recipe in run.sparse.items()}
  phases = next((recipe.phases for recipe in run.sparse.values()), None)
  dense = phases.dense if phases else 0
  data = run.settings.get("DATA")
  of_data = [number for number, name in IMAGES.items() if data in (None, name)]
  rows = [
    {"table": number, **row}
    for number in (of_data if network else (12, 7))
    for row in paper.tables()[f"table{number}"]
    if (row.get("network"), row["recipe"]) == (network, run.recipe)
    and row["places"] == places
    and (row.get("dense_steps") is None or bool(row["dense_steps"]) == bool(dense))
  ]
  if not rows:
    what = f"{network or 'a T5'}, {run.recipe}, {places}"
    return None, [f"the paper has no row for {what} with {dense} dense steps"]
  row = rows[0]
  remarks = [f"published: Table {row['table']}, {row['row']}"]
  if phases and row.get("dense_steps") and (dense, phases.total) != (DENSE_STEPS, STEPS):
    remarks.append(
      f"the published row has {DENSE_STEPS} dense steps of {STEPS}, this run {dense} of "
      f"{phases.total}"
    )
  if (size := run.settings.get("T5_SIZE")) not in (None, "base"):
    remarks.append(f"the published row is of T5 base, not {size}")
  return row, remarks


# Of a named configuration; another field makes it a network of other sizes.
_NO_SIZES = {"name", "image_size", "classes", "dropout", "drop_path", "dtype", "std"}


def image_network(gin: str) -> str | None:
  """Returns the name of the network of images that a config binds; None where it changes sizes."""
  found = trained.bound(gin, "vit.config|swin.config|resnet.config")
  name = re.fullmatch(r"'(\w+)'", found.get("name", ""))
  return name[1] if name and not set(found) - _NO_SIZES else None
