"""Proves, group by group, that a checkpoint's weights are n:m along the axis that is contracted.

Takes a checkpoint of T5X, in its own format or Orbax, or a run's folder: then its newest one. A
checkpoint of a sparse run holds its rules; for any other say them by --rules. One array is in
memory at a time. T5X is not needed.

What a run stores are dense weights, for masks act on the fly: `nm-sparsity finalize` writes zeros.

  nm-sparsity verify runs/sparse/checkpoint_1100000
  nm-sparsity verify exported/checkpoint_0 --rules "{'ff': '1:8', 'qkv': '1:4'}"

Exit code: 0 = all of it is n:m, 1 = it is not, or could not be read.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import json
import os
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
  from nm_sparsity_jax.apply import Report
  from nm_sparsity_jax.rules import Place, Rules
  from nm_sparsity_jax.runs.checkpoint import Stored


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """The checkpoint, and its rules where it does not hold them."""
  parser.add_argument("checkpoint", metavar="CKPT", help="a checkpoint, or a folder of them")
  add_rules(parser)
  parser.add_argument("--json", action="store_true", help="print the findings as JSON")


def add_rules(parser: argparse.ArgumentParser) -> None:
  """What the checkpoint may not hold."""
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


def run(args: argparse.Namespace) -> int:
  """Prints what was found."""
  os.environ["JAX_PLATFORMS"] = "cpu"  # a run may be using the accelerator
  stored, rules = open_checkpoint(args)
  report = prove(stored, rules)
  if args.json:
    print(json.dumps(as_json(stored, rules, report), indent=2))
  else:
    print(head(stored, rules, args.checkpoint))
    print(report)
    if not report.ok and stored.sparse_step is not None:
      print(
        "A run's weights stay dense while masks act on them: `nm-sparsity finalize` makes zeros."
      )
  return 0 if report.ok else 1


def open_checkpoint(args: argparse.Namespace) -> tuple[Stored, Rules]:
  """The checkpoint that is meant, and its rules."""
  from nm_sparsity_jax.runs import checkpoint

  stored = checkpoint.read(checkpoint.find(args.checkpoint))
  return stored, _rules(stored, _table("--rules", args.rules), _table("--axes", args.axes))


def _table(flag: str, text: str | None) -> Mapping[str, Any] | None:
  if text is None:
    return None
  try:
    table = ast.literal_eval(text)
  except (ValueError, SyntaxError):
    table = None
  if not isinstance(table, dict) or not table:
    example = "{'ff': '1:8'}" if flag == "--rules" else "{'.*/mlp/.*/kernel': 0}"
    raise ValueError(f'{flag}={text} is no dict; strings need quotes: {flag} "{example}"')
  return table


def _rules(
  stored: Stored, patterns: Mapping[str, Any] | None, axes: Mapping[str, Any] | None
) -> Rules:
  """The checkpoint's own rules, or `patterns`; where there are both, they must agree."""
  from nm_sparsity_jax import configure

  given = None
  if patterns is not None:
    try:  # any recipe will do: without a run there is only the pattern, taken by magnitude
      given = configure.rules(patterns, "sr_ste", sparse_steps=1, axes=axes)
    except configure.SettingsError as e:
      raise ValueError(str(e).replace("SPARSITY_RULES", "--rules")) from e
  if stored.rules is None:
    if given is not None:
      return given
    raise ValueError(
      f"{stored.path} holds no rules, as it is of no sparse run: say what should be n:m, "
      "--rules \"{'ff': '1:8'}\""
    )
  own = configure.parse(stored.rules)
  pairs = lambda rules: {place: str(r.pattern) for place, r in rules.places.items() if r.pattern}
  if given is not None and pairs(own) != pairs(given):
    raise ValueError(
      f"{stored.path} was trained with other rules, {pairs(own)}, than --rules says, "
      f"{pairs(given)}: leave --rules out"
    )
  return own.with_axes(axes or {})


def prove(stored: Stored, rules: Rules) -> Report:
  """`verify` of all places, one array at a time."""
  from nm_sparsity_jax import apply
  from nm_sparsity_jax.runs import checkpoint

  found = []
  assignment = assign(stored, rules)
  for path, place in assignment.places.items():
    tree = checkpoint.nested({path: stored.array(f"target/{path}")})
    found += apply.verify(tree, alone(place, rules)).places
  return apply.Report(tuple(found), assignment.skipped)


def assign(stored: Stored, rules: Rules):
  """The rules on the parameters of a checkpoint, by shapes alone."""
  import jax
  import jax.numpy as jnp

  from nm_sparsity_jax.runs import checkpoint

  shapes = {}
  for key, leaf in stored.leaves.items():
    if key.startswith("target/"):
      if leaf.shape is None:
        raise ValueError(f"{stored.path!r} is damaged: {key} has no shape")
      shapes[key.removeprefix("target/")] = jax.ShapeDtypeStruct(leaf.shape, jnp.float32)
  if not shapes:
    raise ValueError(f"{stored.path} has no parameters: no arrays under 'target'")
  try:
    assignment = rules.assign(checkpoint.nested(shapes))
  except ValueError as e:
    text, is_stacked, _ = str(e).partition(" Name the axis that")
    hint = " Name it: --axes \"{'.*/mlp/.*/kernel': 0}\"" if is_stacked else ""
    raise ValueError(text + hint) from e
  if not assignment.places:
    raise ValueError(f"the rules leave all of {stored.path} dense: there is nothing to prove")
  return assignment


def alone(place: Place, rules: Rules) -> Rules:
  """Rules of one parameter."""
  path = f"(?:{re.escape(place.path)})"  # a regex, also where it reads like a role
  return type(rules)({path: place.recipe}, {path: place.axis}, rules.indivisible)


def head(stored: Stored, rules: Rules, asked: str) -> str:
  """What was looked at."""
  from nm_sparsity_jax import configure

  newest = "" if stored.path == asked else f"the newest in {asked}, "
  step = "" if stored.step is None else f", step {stored.step:,}"
  sparse = "" if stored.sparse_step is None else f", sparse step {stored.sparse_step:,}"
  whose = "its own rules" if stored.rules is not None else "--rules"
  lines = configure.describe(rules).splitlines()
  if stored.rules is None:
    lines = [f"{place}: {recipe.pattern}" for place, recipe in rules.places.items()]
  text = "\n".join([f"{stored.path} ({newest}{stored.format}{step}{sparse}), by {whose}:", *lines])
  return text.replace("\n", "\n  ") + "\n"


def as_json(stored: Stored, rules: Rules, report: Report) -> dict[str, Any]:
  """The same for programs."""
  from nm_sparsity_jax import configure

  return {
    "ok": report.ok,
    "checkpoint": stored.path,
    "format": stored.format,
    "step": stored.step,
    "sparse_step": stored.sparse_step,
    "rules": stored.rules if stored.rules is not None else configure.describe(rules),
    "places": [dataclasses.asdict(place) for place in report.places],
    "skipped": dict(report.skipped),
  }
