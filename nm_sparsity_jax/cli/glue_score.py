"""Prints what runs scored, next to the published row: of GLUE the row of the paper's Table 12.

It takes folders of runs: t5x.train's MODEL_DIR, t5x.eval's EVAL_OUTPUT_DIR, the local runner's,
or any folder with an inference_eval/ that holds TASK-metrics.jsonl or TensorBoard events. Recipe
and pattern come from the run's checkpoint or its config.gin. Each column of GLUE is a task; a pair
of metrics counts with its mean. Overall is the mean of nine columns. Tasks that are not GLUE's,
nm_glue_* or T5's glue_*_v002, have lines of their own.

  nm-sparsity glue score runs/sr_ste runs/sdgf_stepwise --checkpoint last

A value in brackets is the run's score minus the published one, which is rounded to 0.1.

Exit code: 0 = printed, 1 = a folder holds no metrics, or is broken.
"""

from __future__ import annotations

import argparse

from nm_sparsity_jax.cli import _flags


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Adds the runs, the checkpoint and the form of the output."""
  _flags.add_runs(parser)
  _flags.add_json(parser)


def run(args: argparse.Namespace) -> int:
  """Reads, scores, prints."""
  from nm_sparsity_jax.analysis import scores

  _flags.import_modules(args)
  report = scores.score(args.runs, args.checkpoint)
  return _flags.answer(args, report, scores.render(report))
