"""Writes a checkpoint with exact zeros: the pattern of every place, as `nms.finalize` makes it.

Takes what `nm-sparsity verify` takes, and a folder for the result, which gets the checkpoint's own
name, as in T5X: OUT/checkpoint_<step>. It holds parameters, step and sparse state, but no
optimizer, and opens in t5x.eval and t5x.infer, with the sparse model or with T5X's own, and as the
start of a fine-tune. Says how much magnitude it removed, reads what it wrote, and proves it. The
parameters must fit into memory. T5X is not needed.

While the schedule is not over, the weights that are removed may still matter: refused, but for
--early.

  nm-sparsity finalize runs/sparse runs/final

Exit code: 0 = written and proven, 1 = not.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from typing import TYPE_CHECKING, Any

from nm_sparsity_jax.commands import verify

if TYPE_CHECKING:
  import numpy as np

  from nm_sparsity_jax.rules import Assignment, Place, Rules
  from nm_sparsity_jax.runs.checkpoint import Stored

_STATE = "flax_mutables/nm_sparsity"


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """From where, to where."""
  parser.add_argument("checkpoint", metavar="CKPT", help="a checkpoint, or a folder of them")
  parser.add_argument("out", metavar="OUT", help="gets OUT/checkpoint_<step>, which must be new")
  verify.add_rules(parser)
  parser.add_argument("--early", action="store_true", help="though the schedule is not over")
  parser.add_argument("--json", action="store_true", help="print the findings as JSON")


def run(args: argparse.Namespace) -> int:
  """Makes zeros, writes, proves, prints."""
  os.environ["JAX_PLATFORMS"] = "cpu"  # a run may be using the accelerator
  from nm_sparsity_jax.runs import checkpoint

  stored, rules = verify.open_checkpoint(args)
  assignment = verify.assign(stored, rules)
  if not args.early:
    _refuse_early(stored, assignment)
  path = os.path.join(args.out, f"checkpoint_{stored.step or 0}")
  checkpoint.check_new(path)
  tree, removed = finalized(stored, rules, assignment)
  checkpoint.write(path, tree)
  written = checkpoint.read(path)
  report = verify.prove(written, rules)
  if args.json:
    found = verify.as_json(written, rules, report)
    lost = {r.path: dataclasses.asdict(r) for r in removed}
    found["places"] = [place | lost[place["path"]] for place in found["places"]]
    print(json.dumps({"from": stored.path, **found}, indent=2))
  else:
    print(verify.head(stored, rules, args.checkpoint))
    print(render(removed))
    print(f"\n{path}, as it was written:\n")
    print(report)
  return 0 if report.ok else 1


def _refuse_early(stored: Stored, assignment: Assignment) -> None:
  """Raises while a place has steps ahead before its fine-tune phase."""
  step = stored.sparse_step
  if step is None:
    return  # of no sparse run
  for place in assignment.places.values():
    phases = place.recipe.phases
    if phases is not None and step < phases.finetune_start:
      now = next(s for s in place.recipe.timeline(place.axis_size) if s.start <= step < s.stop)
      d = float(place.recipe.decay(step))
      raise ValueError(
        f"{stored.path} is at sparse step {step:,}, with pattern {now.pattern or 'dense'} and "
        f"D = {d:.3g} at {place.key!r}, where the schedule is over at {phases.finetune_start:,}. "
        "Take a later checkpoint, or add --early"
      )


@dataclasses.dataclass(frozen=True)
class Removed:
  """What one parameter lost.

  Attributes:
    path: the parameter.
    weights: share of weights that were not 0 and are now.
    magnitude: their share of the sum of |w|.
    squares: their share of the sum of w ** 2.
  """

  path: str
  weights: float
  magnitude: float
  squares: float


def finalized(
  stored: Stored, rules: Rules, assignment: Assignment
) -> tuple[dict[str, Any], list[Removed]]:
  """The tree to be written, and what it lost; one array at a time beside the result."""
  import numpy as np

  from nm_sparsity_jax import apply
  from nm_sparsity_jax.runs import checkpoint

  kept: dict[str, Any] = {"state/step": np.int32(0)}  # where there is none: T5X wants it
  removed = []
  for key in stored.leaves:
    if not key.startswith(("target/", "flax_mutables/")) and key != "state/step":
      continue  # the optimizer's: moments of weights that are gone
    kept[key] = stored.array(key)
    place = (
      assignment.places.get(key.removeprefix("target/")) if key.startswith("target/") else None
    )
    if place is not None:
      before = kept[key]
      tree = checkpoint.nested({place.path: before})
      state = _state(stored, place) if place.recipe.stateful else None
      after = apply.finalize(tree, verify.alone(place, rules), state)
      (kept[key],) = (np.asarray(leaf) for _, leaf in checkpoint.flat(after))
      removed.append(_removed(place, before, kept[key]))
  return checkpoint.nested(kept), removed


def _state(stored: Stored, place: Place) -> dict[str, Any]:
  """What `apply.finalize` reads of the stored mask of a place."""
  from nm_sparsity_jax.runs import checkpoint

  state: dict[str, Any] = {"step": stored.sparse_step}
  for kind in ("mask", "made", "renewed"):
    key = f"{_STATE}/{kind}/{place.path}"
    if key in stored.leaves:
      state[kind] = checkpoint.nested({place.path: stored.array(key)})
  return state


def _removed(place: Place, before: np.ndarray, after: np.ndarray) -> Removed:
  import numpy as np

  was = np.abs(before.astype(np.float64))
  lost = np.where(after == 0, was, 0.0)
  share = lambda part, whole: float(part / whole) if whole else 0.0
  with np.errstate(all="ignore"):  # inf and NaN: `verify` warns of them
    return Removed(
      place.path,
      share((lost != 0).sum(), was.size),
      share(lost.sum(), was.sum()),
      share((lost**2).sum(), (was**2).sum()),
    )


def render(removed: list[Removed]) -> str:
  """What was removed, as a table."""
  from nm_sparsity_jax.text import table

  head = "removed of", "weights", "sum of |w|", "sum of w^2"
  rows = [(r.path, f"{r.weights:.2%}", f"{r.magnitude:.2%}", f"{r.squares:.2%}") for r in removed]
  return "\n".join(table(head, rows))
