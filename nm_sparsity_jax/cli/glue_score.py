"""Makes a run's row of the paper's Table 12 from seqio's metrics, beside the published row.

It takes folders of runs: t5x.train's MODEL_DIR, t5x.eval's EVAL_OUTPUT_DIR, or any folder that
holds an inference_eval/ with TASK-metrics.jsonl or TensorBoard events of nm_glue_*,
nm_glue_mini_* or T5's glue_*_v002. It reads the recipe and the pattern from the run's config.gin.
Each column is a task; a pair counts with its mean. Overall is the mean of nine columns, and '-'
if one is missing.

  nm-sparsity glue score runs/sr_ste runs/sdgf_stepwise --checkpoint last

Runs of one task each, trained alike, are one row by --join NAME DIR...:

  nm-sparsity glue score --join sr_ste runs/sr_ste_* --join stepwise runs/stepwise_*

With several rows '*' (bold in Markdown and LaTeX) marks the best of each column. A delta is the
run's value minus the published one, which is rounded to 0.1.

Exit code: 0 = each run has a row, 1 = a run has no row.
"""

from __future__ import annotations

import argparse

from nm_sparsity_jax.analysis import scores
from nm_sparsity_jax.cli import _flags
from nm_sparsity_jax.runs import results

_FORMS = {
  "json": "the report as JSON",
  "markdown": "a Markdown table",
  "latex": "a LaTeX tabular",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Adds the runs, the checkpoint and the form of the output."""
  add = parser.add_argument
  add("runs", nargs="*", metavar="DIR", help="folder of a run")
  add(
    "--join", nargs="+", action="append", default=[], metavar=("NAME", "DIR"),
    help="one row, of this name, of runs that were trained alike on tasks of their own; may be "
    "repeated",
  )  # fmt: skip
  add(
    "--checkpoint", type=_flags.checkpoint, default="best", metavar="best|last|STEP",
    help="the step of each task: the one with the best mean of its metrics (the default; the "
    "earliest of equals), its last one, or this one (T5X counts from pre-training on)",
  )  # fmt: skip
  _flags.add_import(parser)
  form = parser.add_mutually_exclusive_group()
  for name, what in _FORMS.items():
    form.add_argument(
      f"--{name}", dest="form", action="store_const", const=name, default="text",
      help=f"print {what}",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
  """Reads, scores, prints."""
  if not args.runs and not args.join:
    raise ValueError("give the folder of a run, or several, or --join NAME DIR...")
  for name, *paths in args.join:
    if not paths:
      raise ValueError(f"--join {name}: a name for the row comes first, then the folders of runs")
  _flags.import_modules(args)
  joined = [results.join(name, [*map(results.read, paths)]) for name, *paths in args.join]
  print(scores.render(scores.score([*args.runs, *joined], args.checkpoint), args.form))
  return 0
