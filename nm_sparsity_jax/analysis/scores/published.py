"""Which of the paper's rows a run compares with; `runs.paper` has all of them.

Table 12   26 rows of nine columns: dense, sr_ste, sdgf_stepwise, sdgf_geometric
Table 7    overall alone: also snip, idp and mdgf_exponential at 1:32
Table 2, 3, 6   top-1 of ViT-B/16 and SwinV2-B on ImageNet, of ResNet-50 on CIFAR-10
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from nm_sparsity_jax.analysis.run_folder import Run
from nm_sparsity_jax.core.patterns import NM
from nm_sparsity_jax.runs import paper
from nm_sparsity_jax.training import roles

STEPS, DENSE_STEPS = 100_000, 10_000  # of the paper's runs
# Tables of networks of images, by the data that they are of.
IMAGES = {2: "imagenet2012", 3: "imagenet2012", 6: "cifar10"}
# Where the kernels of a role stand in a T5.
_ATTENTIONS = ("encoder/self", "decoder/self", "decoder/cross")
_STAND = {"ff": ("encoder", "decoder"), **dict.fromkeys("qkvo", _ATTENTIONS)}


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
  rows = [
    {"table": number, **row}
    for number in (IMAGES if network else (12, 7))
    for row in paper.tables()[f"table{number}"]
    if (row.get("network"), row["recipe"]) == (network, run.recipe)
    and parts_of(row["places"]) == parts_of(places)
    and (row.get("dense_steps") is None or bool(row["dense_steps"]) == bool(dense))
  ]
  if not rows:
    what = " ".join(filter(None, [network, run.recipe, text_of(places)]))
    return None, [f"the paper has no row for {what} with {dense} dense steps"]
  row = rows[0]
  remarks = [f"published: Table {row['table']}, {row['row']}"]
  if phases and row.get("dense_steps") and (dense, phases.total) != (DENSE_STEPS, STEPS):
    remarks.append(
      f"the published row has {DENSE_STEPS} dense steps of {STEPS}, this run {dense} of "
      f"{phases.total}"
    )
  size, data = run.settings.get("T5_SIZE"), run.settings.get("DATA")
  if size not in (None, "base"):
    remarks.append(f"the published row is of T5 base, not {size}")
  if network and data not in (None, IMAGES[row["table"]]):
    remarks.append(f"the published row is of {IMAGES[row['table']]}, this run of {data}")
  return row, remarks


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


# Of a named configuration; another field makes it a network of other sizes.
_NO_SIZES = {
  "name", "image_size", "classes", "dropout", "drop_path", "dtype", "remat", "scan", "std",
}  # fmt: skip


def image_network(gin: str) -> str | None:
  """Returns the name of the network of images that a config binds; None where it changes sizes."""
  bound = r"^(?:\w+\.)*(?:vit|swin|resnet)\.config\.(\w+) = (.*)$"
  found = dict(re.findall(bound, gin, re.MULTILINE))
  name = re.fullmatch(r"'(\w+)'", found.get("name", ""))
  return name[1] if name and not set(found) - _NO_SIZES else None
