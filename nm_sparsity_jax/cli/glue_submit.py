"""Makes GLUE's official zip from predictions of t5x.infer or `nm-sparsity infer`.

It takes files TASK-predict.jsonl[-00000-of-00001], or folders, which it searches. Each line must
hold `idx`: gin_configs/runs/t5x_infer_glue_test.gin and local_infer.gin write it.

  nm-sparsity glue submit predictions/ --out submission.zip --fill wnli

The zip has 11 TSV files, `index<TAB>prediction`, in the order of the index, STS-B clamped to
0..5. The command checks every row before it writes. A task without predictions, or a prediction
that is not an answer, stops it, unless --fill names the task: then it writes class 0, or 2.500
for STS-B. A row that is missing or comes twice always stops it.

Exit code: 0 = written, 1 = not.
"""

from __future__ import annotations

import argparse

from nm_sparsity_jax.runs import glue


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Adds what to read, what to write, and what may be made up."""
  add, tasks = parser.add_argument, [task.name for task in glue.TASKS.values() if task.file]
  add("paths", nargs="+", metavar="FILE|DIR", help="prediction files, or folders of them")
  add("--out", required=True, metavar="ZIP", help="the zip to write; one that is there is replaced")
  add(
    "--fill", action="append", default=[], choices=[*tasks, "all"], metavar="TASK",
    help="a task (or all) to fill where it is missing or not a label; may be repeated. WNLI, which "
    "T5's mixture does not train, is customarily filled",
  )  # fmt: skip


def run(args: argparse.Namespace) -> int:
  """Reads, makes, checks and writes."""
  from nm_sparsity_jax.analysis.scores import submission  # which imports jax

  fill = submission.TASKS if "all" in args.fill else args.fill
  tables, filled, problems = submission.make(args.paths, fill)
  for name, count in filled.items():
    print(f"{name}: {len(tables[name].splitlines()) - 1:,} rows, {count:,} filled")
  if problems:
    raise ValueError("; ".join(problems) + f". {args.out} is not written")
  submission.write(args.out, tables)
  print(f"{args.out} is written.")
  return 0
