"""Writes a checkpoint with exact zeros: the pattern of every place, as `nms.finalize` makes it.

A local run and one of Kauldron store these weights already; of them it leaves the optimizer out.
It takes what `nm-sparsity verify` takes, but no packed file, and a folder for the result. The
result has the checkpoint's own name, as in T5X: OUT/checkpoint_<step>. It holds parameters, step
and sparse state, but no optimizer. Where the run kept a moving average of its parameters
(EMA_DECAY), that is what is finalized, as it is what was scored. t5x.eval and t5x.infer open it,
with the sparse model or with T5X's own, and you can fine-tune it. The command says how much
magnitude it removed, reads what it wrote, and proves it. Its notes.json holds the rules that you
gave with --rules, so that `nm-sparsity verify` needs none. T5X is not needed.

A folder of Hugging Face's T5 becomes another one, OUT itself. It has no place for rules: `verify`,
`pack` and `export` need --rules once more.

While the schedule is not over, the removed weights may still matter, so the command refuses.
--early allows it.

  nm-sparsity finalize runs/sparse runs/final

Exit code: 0 = written and proven, 1 = not.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from nm_sparsity_jax.cli import _imports, _rules

if TYPE_CHECKING:
  from nm_sparsity_jax.runs.verify_checkpoint import Removed


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Adds what to read and where to write."""
  parser.add_argument(
    "checkpoint", metavar="CKPT", help="a checkpoint, a folder of them, or a file: see above"
  )
  parser.add_argument(
    "out", metavar="OUT", help="gets OUT/checkpoint_<step>, which must be new: see above"
  )
  _rules.add(parser)
  _imports.add(parser)
  parser.add_argument(
    "--early", action="store_true", help="finalize although the schedule is not over"
  )
  parser.add_argument("--json", action="store_true", help="print the findings as JSON")


def run(args: argparse.Namespace) -> int:
  """Makes zeros, writes, proves, prints."""
  os.environ["JAX_PLATFORMS"] = "cpu"  # a run may be using the accelerator
  from nm_sparsity_jax import runs
  from nm_sparsity_jax.runs import orbax

  _imports.load(args)
  with orbax.quiet():
    made = runs.finalize(args.checkpoint, args.out, early=args.early, **_rules.given(args))
  if args.json:
    print(json.dumps(made.as_dict(), indent=2))
  else:
    print(_rules.head(made.source, made.proof.rules, args.checkpoint))
    if made.source.average:
      print("of the moving average of its parameters, as it was scored")
    print(render(made.removed))
    print(f"\n{made.path}, as it was written:\n")
    print(made.proof)
    if made.proof.stored.known_rules is None:  # a folder of Hugging Face's has no place for them
      print("It holds no rules: give --rules to `nm-sparsity verify`, `pack` and `export` as well.")
  return 0 if made.ok else 1


def render(removed: Sequence[Removed]) -> str:
  """Says what was removed, as a table."""
  from nm_sparsity_jax.core.text import table
  from nm_sparsity_jax.core.trees import group

  head = "removed of", "weights", "sum of |w|", "sum of w^2"
  by_path = {r.path: r for r in removed}
  rows = []
  for name, paths in group(list(by_path), words=True):
    of = [by_path[path] for path in paths]
    shares = ([getattr(r, kind) for r in of] for kind in ("weights", "magnitude", "squares"))
    rows.append((name, *map(_share, shares)))
  return "\n".join(table(head, rows))


def _share(values: Sequence[float]) -> str:
  """Says the share of one parameter, or the least and the most of like ones."""
  least, most = f"{min(values):.2%}", f"{max(values):.2%}"
  return least if least == most else f"{least} .. {most}"
