"""Lists the rows of the paper with their published scores, and searches them.

A word is a table, a recipe, a pattern, a place with its pattern, a network or a score. Rows that
have all words are shown, and where there is none, the nearest. A row that the words name alone is
shown with its command.

  nm-sparsity rows                          # all
  nm-sparsity rows table12 1:32
  nm-sparsity rows sr_ste ff=1:8 qkv=1:4
  nm-sparsity rows table12 "sr_ste 1:4 dense_steps=0"

Exit code: 0 = found, 1 = no row has all words.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from nm_sparsity_jax.core.text import columns

if TYPE_CHECKING:
  from nm_sparsity_jax.runs.paper import Row


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Adds the words, and what is printed."""
  parser.add_argument("words", metavar="WORD", nargs="*", help="what a row must have")
  parser.add_argument("--json", action="store_true", help="print the rows as JSON, whole")


def run(args: argparse.Namespace) -> int:
  """Searches and prints."""
  from nm_sparsity_jax.runs import paper

  words = " ".join(args.words).split()
  found = paper.search(words)
  shown = found or paper.nearest(words, count=5)
  if not found:
    print(f"no row has {' and '.join(words)}; the nearest are", file=sys.stderr, flush=True)
  if args.json:
    plain = [{"table": row.table, "ROW": row.name, **row.published} for row in shown]
    print(json.dumps(plain, indent=2))
  else:
    cells = [(row.table, row.name, row.score or "no score") for row in shown]
    print("\n".join(columns([("table", "ROW", "published"), *cells])))
    named = found if len(found) == 1 else [r for r in found if {*r.name.split()} <= {*words}]
    if len(named) == 1:
      print("\n".join(_details(named[0])))
  return 0 if found else 1


def _details(row: Row) -> Iterator[str]:
  """Yields the scores of tasks, what is odd about the row, and the command that trains it."""
  for task, score in row.published.get("columns", {}).items():
    yield f"  {task} {' / '.join(map(str, score[:2]))}"
  if remark := row.published.get("remark"):
    yield remark
  if "network" in row.published:
    files = ["runs/local_images.gin", "runs/local_images_adamw.gin"]
    command = "nm-sparsity train"
  else:
    run = "t5x_wmt" if "accuracy" in row.published else "t5x_finetune"
    files = ["runs/t5x_adamw.gin", f"runs/{run}.gin"]
    command = "python -m t5x.train --gin_search_paths=$(nm-sparsity gin-path)"
  yield f"\n{command} --gin.MODEL_DIR=\"'...'\" \\"
  yield "  " + " ".join(f"--gin_file=gin_configs/{file}" for file in files) + " \\"
  yield f"  --gin_file=gin_configs/paper/{row.table}.gin --gin.ROW=\"'{row.name}'\""
