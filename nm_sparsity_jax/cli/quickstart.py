"""From nothing to sparse, scored checkpoints in minutes: a tiny T5 or a small ViT, on this machine.

A sweep of one seed: a dense start; from its checkpoint a dense run, and SR-STE, MDGF-Exponential
and SDGF-Stepwise at 1:8 of the feed-forward and attention kernels, all of one length. Then verify
and report. Each step is a command, which is printed as you would type it. Downloads nothing.

--task rebus trains a ViT on generated images instead: dense, and the same recipes at 1:16 of the
feed-forward kernels, each from scratch.

Stopped, the same command goes on where it was. All that is trained stands in one file,
examples/quickstart.toml or examples/rebus.toml.

  nm-sparsity quickstart
  nm-sparsity quickstart --task rebus

Exit code: 0 = done, 1 = failed or stopped, 130 = interrupted.
"""

from __future__ import annotations

import argparse
import shlex

from nm_sparsity_jax import cli

FILES = {"mini-glue": "examples/quickstart.toml", "rebus": "examples/rebus.toml"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Adds what to train."""
  parser.add_argument(
    "--task", choices=list(FILES), default="mini-glue",
    help="text, or generated images (default: %(default)s)",
  )  # fmt: skip


def run(args: argparse.Namespace) -> int:
  """Types the commands, and runs each as the command line does."""
  file = FILES[args.task]
  if code := _call("sweep", file):
    return code
  from nm_sparsity_jax.analysis import sweep

  grid = sweep.read(file)
  # A sweep that SIGTERM stopped ends with 0, when its run has saved.
  if not all(run.is_done() for run in grid.runs):
    return 1
  folders = [str(run.folder) for run in grid.runs]
  verified = [["verify", str(run.folder)] for run in grid.runs if run.pattern]
  page = ["report", *folders, "--checkpoint", "last", "--out", f"{grid.out}/curves.html"]
  return next((code for argv in [*verified, page] if (code := _call(*argv))), 0)


def _call(*argv: str) -> int:
  print(f"\n$ nm-sparsity {shlex.join(argv)}", flush=True)
  return cli.main(argv)
