"""Runs Kauldron's main on a konfig file, on one host or as one of several.

    python -m nm_sparsity_jax.integrations.kauldron.launch --cfg=vit_b.py --cfg.workdir=gs://bucket/run

Kauldron's main never starts `jax.distributed`. This does, where you ask: `--distributed` where the
hosts know one another (a TPU slice, Slurm), with three flags more where they do not. All other
arguments are Kauldron's.
"""

# pyright: reportMissingImports=false, reportMissingModuleSource=false

from __future__ import annotations

import argparse
import runpy
import sys
from collections.abc import Sequence


def parser() -> argparse.ArgumentParser:
  """Returns the parser of what this adds to Kauldron's flags."""
  made = argparse.ArgumentParser(
    prog="python -m nm_sparsity_jax.integrations.kauldron.launch",
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
    allow_abbrev=False,
  )
  made.add_argument("--distributed", action="store_true", help="this host is one of several")
  made.add_argument("--coordinator_address", metavar="HOST:PORT", help="of process 0")
  made.add_argument("--process_count", type=int, metavar="N", help="of all hosts")
  made.add_argument("--process_index", type=int, metavar="I", help="of this one, from 0")
  return made


def main(argv: Sequence[str]) -> None:
  """Starts what was asked for, then Kauldron.

  Args:
    argv: the arguments, without the program.
  """
  args, theirs = parser().parse_known_args(argv)
  if args.distributed or args.coordinator_address:
    import jax

    # It refuses flags that lack another one.
    jax.distributed.initialize(args.coordinator_address, args.process_count, args.process_index)
  sys.argv = ["kauldron", *theirs]  # absl reads the flags there
  runpy.run_module("kauldron.main", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
  main(sys.argv[1:])
