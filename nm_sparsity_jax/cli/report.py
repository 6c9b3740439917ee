"""Makes one self-contained HTML page of runs: their curves, schedules, scores and settings.

It takes folders of runs, t5x.train's MODEL_DIR or the local runner's. It reads what TensorBoard
would read in train/, training_eval/ and inference_eval/, and config.gin. Up to nine runs share
each chart. The page fetches nothing and runs no script; a part that has no data says so.

  nm-sparsity report runs/sr_ste runs/mdgf --out report.html

Exit code: 0 = written, 1 = a folder is not a run's, has no metrics, or is broken.
"""

from __future__ import annotations

import argparse

from nm_sparsity_jax.cli import _flags


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Adds the runs, the checkpoint, and where to write."""
  _flags.add_runs(parser)
  parser.add_argument(
    "--out", default="report.html", metavar="FILE", help="the page (default: report.html)"
  )


def run(args: argparse.Namespace) -> int:
  """Reads, draws, writes."""
  from nm_sparsity_jax.analysis import report

  _flags.require("jinja2", "matplotlib")
  _flags.import_modules(args)
  print(report.write(report.report(args.runs, args.checkpoint), args.out))
  return 0
