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
from collections.abc import Mapping
from typing import Any

from nm_sparsity_jax.analysis.scores import submission
from nm_sparsity_jax.cli import _flags
from nm_sparsity_jax.core.text import columns


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Adds what to read, what to write, and what may be made up."""
  add = parser.add_argument
  add("paths", nargs="*", metavar="FILE|DIR", help="prediction files, or folders of them")
  add("--out", metavar="ZIP", help="the zip to write; one that is there is replaced")
  add(
    "--task", action="append", default=[], type=_task_file, metavar="TASK=FILE",
    help="a file whose name does not tell its task, such as cola=my.jsonl; may be repeated",
  )  # fmt: skip
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


def _task_file(text: str) -> tuple[str, str]:
  name, _, file = text.partition("=")
  if name not in submission.TASKS or not file:
    raise argparse.ArgumentTypeError(
      f"{text!r}: write TASK=FILE, TASK of {', '.join(submission.TASKS)}"
    )
  return name, file


def run(args: argparse.Namespace) -> int:
  """Checks, or reads, makes, checks and writes."""
  given = bool(args.paths or args.task)
  if args.validate and (given or args.out or args.fill):
    raise ValueError("--validate checks a zip and takes no predictions, --out or --fill")
  if not args.validate and not (given and args.out):
    raise ValueError("give prediction files and --out ZIP, or --validate ZIP")
  if args.validate:
    report = {"zip": args.validate, "problems": submission.validate(args.validate, args.mini)}
  else:
    fill = set(submission.TASKS) if "all" in args.fill else set(args.fill)
    _flags.check_file("--out", args.out)  # before minutes of reading
    found, problems = submission.find(args.paths, args.task, args.mini)
    if not found:
      wanted = "such as nm_glue_rte-predict.jsonl-00000-of-00001"
      raise ValueError(f"no prediction files, {wanted}, in {', '.join(args.paths)}")
    report, tables = submission.make(found, fill, args.mini)
    report = {"zip": args.out, **report, "problems": problems + report["problems"]}
    if not report["problems"]:
      submission.write(args.out, tables)
  print(json.dumps(report, indent=2) if args.json else _text(report))
  return 1 if report["problems"] else 0


def _text(report: Mapping[str, Any]) -> str:
  rows = [["file", "rows", "invalid", "clamped", "filled"]]
  for name, counts in report.get("files", {}).items():
    filled = f"{counts['filled']:,}" + (f" with {counts['filler']}" if counts["filled"] else "")
    rows.append([name, *(f"{counts[key]:,}" for key in rows[0][1:4]), filled])
  lines = [*columns(rows, align="<>>><"), ""] if rows[1:] else []
  problems, verb = report["problems"], "written" if rows[1:] else "valid"
  if problems:
    lines += [f"{len(problems)} problem{'s' * (len(problems) > 1)}"]
    lines += [f"  - {problem}" for problem in problems]
  lines.append(f"{report['zip']} is {'not ' * bool(problems)}{verb}.")
  return "\n".join(lines)
