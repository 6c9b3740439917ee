"""Trains a grid of recipes x patterns x seeds from one small file, and makes a table and a report.

Each run is one `nm-sparsity train` in a folder of its own. You can stop or kill it: the same
command continues, even days later, and tries a failed run again. It checks all settings before
anything starts. docs/sweep.md describes the file.

  nm-sparsity sweep examples/sweep_mini_glue.toml             # here, or where gin-path prints
  nm-sparsity sweep examples/sweep_mini_glue.toml --table     # of what is done, starts nothing

Exit code: 0 = done, or stopped by SIGTERM and saved; 1 = a setting is wrong or a run failed; 130
= interrupted and saved.
"""

from __future__ import annotations

import argparse
import os
import sys

from nm_sparsity_jax.cli import _flags
from nm_sparsity_jax.core.errors import quiet


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Adds the file, and what is shown."""
  add = parser.add_argument
  add("file", metavar="FILE", help="a TOML file: out, gin_files, recipes, patterns, seeds, macros")
  add("--table", action="store_true", help="print the table of what is done, and start nothing")
  _flags.add_json(parser)
  _flags.add_import(parser)


def run(args: argparse.Namespace) -> int:
  """Checks, trains, prints, reports."""
  environment = dict(os.environ)  # of the runs, which use the devices that there are
  os.environ["JAX_PLATFORMS"] = "cpu"
  from nm_sparsity_jax.analysis import sweep

  _flags.require("gin", "tensorboard", "jinja2", "matplotlib")
  _flags.import_modules(args)
  with quiet():
    grid = sweep.read(args.file, args.imports, data=not args.table)
  failed, stopped = (0, None) if args.table else sweep.train(grid, environment)
  found = sweep.table(grid)
  if not args.table and stopped is None and (written := sweep.page(found)):
    print(written, file=sys.stderr)
  _flags.answer(args, found, sweep.text(found))
  return 130 if stopped == "SIGINT" else int(failed > 0 and stopped is None)
