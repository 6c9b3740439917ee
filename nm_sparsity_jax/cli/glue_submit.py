"""Makes GLUE's official zip from predictions of t5x.infer or `nm-sparsity infer`, or checks a zip.

It takes files TASK-predict.jsonl[-00000-of-00001], or folders, which it searches. Each line must
hold `idx`: gin_configs/runs/t5x_infer_glue_test.gin and local_infer.gin write it.

  nm-sparsity glue submit predictions/ --out submission.zip --fill wnli
  nm-sparsity glue submit --validate submission.zip

The zip has 11 TSV files, `index<TAB>prediction`, in the order of the index, STS-B clamped to
0..5. The command checks every row before it writes. A task without predictions, or a prediction
that is not an answer, stops it, unless --fill names the task: then it writes class 0, or 2.500
for STS-B. A row that is missing or comes twice always stops it.

Exit code: 0 = written, or valid; 1 = not.
"""

from __future__ import annotations

import argparse
import json
import pathlib
from collections.abc import Mapping
from typing import Any

from nm_sparsity_jax.analysis.scores import submission
from nm_sparsity_jax.core.text import columns
from nm_sparsity_jax.runs import files


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Adds what to read, what to write, and what may be made up."""
  add = parser.add_argument
  add("paths", nargs="*", metavar="FILE|DIR", help="prediction files, or folders of them")
  add("--out", metavar="ZIP", help="the zip to write; one that is there is replaced")
  add(
    "--fill", action="append", default=[], choices=[*submission.TASKS, "all"], metavar="TASK",
    help="a task (or all) to fill where it is missing or not a label; may be repeated. WNLI, which "
    "T5's mixture does not train, is customarily filled",
  )  # fmt: skip
  add(
    "--mini", action="store_true", help="make it of mini-GLUE, to try out: tasks and rows as found"
  )
  add("--validate", metavar="ZIP", help="write nothing; check this zip row by row")
  add("--json", action="store_true", help="print the report as JSON")


def run(args: argparse.Namespace) -> int:
  """Checks, or reads, makes, checks and writes."""
  if bool(args.validate) in (bool(args.paths), bool(args.out)):
    raise ValueError("give prediction files and --out ZIP, or --validate ZIP alone")
  if args.validate:
    report = {"zip": args.validate, "problems": submission.validate(args.validate, args.mini)}
  else:
    # Before minutes of reading.
    files.check_folder("--out", pathlib.Path(args.out).parent)
    found = submission.find(args.paths, args.mini)
    if not found:
      wanted = "such as nm_glue_rte-predict.jsonl-00000-of-00001"
      raise ValueError(f"no prediction files, {wanted}, in {', '.join(args.paths)}")
    fill = submission.TASKS if "all" in args.fill else args.fill
    report, tables = submission.make(found, fill, args.mini)
    report = {"zip": args.out, **report}
    if not report["problems"]:
      submission.write(args.out, tables)
  print(json.dumps(report, indent=2) if args.json else _text(report))
  return 1 if report["problems"] else 0


def _text(report: Mapping[str, Any]) -> str:
  rows = [["file", "rows", "filled"]]
  for name, counts in report.get("files", {}).items():
    filled = f"{counts['filled']:,}" + (f" with {counts['filler']}" if counts["filled"] else "")
    rows.append([name, f"{counts['rows']:,}", filled])
  lines = [*columns(rows, align="<><"), ""] if rows[1:] else []
  problems, verb = report["problems"], "written" if rows[1:] else "valid"
  if problems:
    lines += [f"{len(problems)} problem{'s' * (len(problems) > 1)}"]
    lines += [f"  - {problem}" for problem in problems]
  if problems and rows[1:]:
    lines.append("--fill TASK fills in what is no answer, and a task without predictions.")
  lines.append(f"{report['zip']} is {'not ' * bool(problems)}{verb}.")
  return "\n".join(lines)
