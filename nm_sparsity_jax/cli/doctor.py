"""Says what is missing or in conflict in this environment, and how to fix it.

It looks at installed metadata and imports neither T5X nor TensorFlow. What you need depends on
what you do, so --for says which parts must be there:

  core    masks, rules and layers in your own training loop
  tasks   SeqIO tasks and metrics
  local   nm-sparsity quickstart, train, eval, plan, sweep and report (docs/local.md)
  t5x     t5x.train with our gin files (docs/t5x.md)
  tpu     a TPU's compiler that fits the installed jax (docs/tpu.md)

Each finding is ok, bad (to fix), or warn: not what was tested, or slower than it could be.

Exit code: 0 = nothing is bad, 1 = something is.
"""

from __future__ import annotations

import argparse
import dataclasses
import json

from nm_sparsity_jax.cli import environment
from nm_sparsity_jax.core.text import columns

_MARKS = {"ok": "ok ", "bad": "BAD", "warn": "!  "}


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Adds what must be there, and how to print it."""
  parser.add_argument(
    "--for", dest="purpose", choices=environment.PURPOSES,
    help="what must be there; by default t5x where T5X is found, else core",
  )  # fmt: skip
  parser.add_argument("--json", action="store_true", help="print the findings as JSON")


def run(args: argparse.Namespace) -> int:
  """Prints the findings."""
  purpose = args.purpose or ("t5x" if environment.folder_of("t5x") else "core")
  findings = list(environment.examine(purpose))
  bad, warned = (sum(f.status == kind for f in findings) for kind in ("bad", "warn"))
  if args.json:
    found = [dataclasses.asdict(finding) for finding in findings]
    print(json.dumps({"ok": not bad, "for": purpose, "findings": found}, indent=2))
    return 1 if bad else 0
  rows = []
  for f in findings:
    rows.append((f"{_MARKS[f.status]} {f.name}", f.text))
    rows += [("", f"-> {f.remedy}")] * bool(f.remedy)
  print("\n".join(columns(rows)))
  but = f", but see {warned} marked with !" if warned else ""
  print(f"\n{bad} to fix for {purpose}." if bad else f"\nReady for {purpose}{but}.")
  if not args.purpose:
    others = ", ".join(name for name in environment.PURPOSES if name != purpose)
    print(f"--for {others} looks at what else you may need.")
  return 1 if bad else 0
