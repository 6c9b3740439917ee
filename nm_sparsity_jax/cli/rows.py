"""Lists the rows of the paper with their published scores, and searches them.

A word is a table, a recipe, a pattern, a place with its pattern, a network or a score. Rows that
have all words are shown. gin_configs/paper/TABLE.gin has the command that trains a row.

  nm-sparsity rows                          # all
  nm-sparsity rows table12 1:32
  nm-sparsity rows sr_ste ff=1:8 qkv=1:4

Exit code: 0 = found, 1 = no row has all words.
"""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Adds the words."""
  parser.add_argument("words", metavar="WORD", nargs="*", help="what a row must have")


def run(args: argparse.Namespace) -> int:
  """Searches and prints."""
  from nm_sparsity_jax.core.text import columns
  from nm_sparsity_jax.runs import paper

  words = " ".join(args.words).split()  # a name in quotes has several
  found = paper.search(words)
  if not found:
    raise ValueError(f"no row has {' and '.join(words)}; `nm-sparsity rows` lists all")
  cells = [(row.table, row.name, row.score or "no score") for row in found]
  print("\n".join(columns([("table", "ROW", "published"), *cells])))
  return 0
