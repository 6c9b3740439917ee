"""--rules and --axes, and what `verify` and `finalize` say of the checkpoint that they opened."""

from __future__ import annotations

import argparse
import ast
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from nm_sparsity_jax.core.text import printable

if TYPE_CHECKING:
  from nm_sparsity_jax.runs.checkpoint import Stored
  from nm_sparsity_jax.training.rules import Rules


def add(parser: argparse.ArgumentParser) -> None:
  """Adds --rules and --axes, for a checkpoint that does not hold them."""
  parser.add_argument(
    "--rules",
    metavar="\"{'ff': '1:8'}\"",
    help="place -> pattern, as SPARSITY_RULES in gin; for a checkpoint that holds no rules",
  )
  parser.add_argument(
    "--axes",
    metavar='"{REGEX: AXIS}"',
    help="path -> contracted axis, for kernels that a scan over layers has stacked",
  )


def given(args: argparse.Namespace) -> dict[str, Mapping[str, Any] | None]:
  """Reads both flags: arguments of `runs.verify`."""
  return {"rules": _table("--rules", args.rules), "axes": _table("--axes", args.axes)}


def _table(flag: str, text: str | None) -> Mapping[str, Any] | None:
  if text is None:
    return None
  try:
    table = ast.literal_eval(text)
  except (ValueError, SyntaxError):
    table = None
  if not isinstance(table, dict) or not table:
    example = "{'ff': '1:8'}" if flag == "--rules" else "{'.*/mlp/.*/kernel': 0}"
    raise ValueError(f'{flag}={text} is not a dict; strings need quotes: {flag} "{example}"')
  return table


def head(stored: Stored, rules: Rules, asked: str) -> str:
  """Says what was looked at, and by whose rules.

  Args:
    stored: the checkpoint.
    rules: by which it was looked at.
    asked: the checkpoint or folder that was named.
  """
  from nm_sparsity_jax.training import rules_text

  newest = "" if stored.path == asked else f"the newest in {asked}, "
  step = "" if stored.step is None else f", step {stored.step:,}"
  sparse = "" if stored.sparse_step is None else f", sparse step {stored.sparse_step:,}"
  whose = "its own rules" if stored.rules is not None else "--rules"
  lines = rules_text.describe(rules).splitlines()
  if stored.rules is None and stored.known_rules == "\n".join(lines):
    whose = "the rules that it was finalized by"
  if stored.rules is None:
    lines = [f"{place}: {recipe.pattern}" for place, recipe in rules.places.items()]
  text = "\n".join([f"{stored.path} ({newest}{stored.format}{step}{sparse}), by {whose}:", *lines])
  return "\n  ".join(map(printable, text.splitlines())) + "\n"
