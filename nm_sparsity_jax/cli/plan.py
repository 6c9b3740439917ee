"""Shows what a run would do, and what is wrong, before it starts.

It takes the gin files and overrides of `nm-sparsity train`, `eval` and `infer`, and those of
t5x.train, t5x.eval and t5x.infer: put `nm-sparsity plan` in place of the command and keep the
rest. It shows which kernels become sparse, the schedule, the cost, what a checkpoint gives, and the
first error of each part. A model file and gin_configs/sparsity.gin are enough, and then T5X is not
needed. It allocates nothing of the model's size. Devices and the contents of the data are not
looked at. A gin file is a program, as it is for T5X: what it imports runs. Plan only files that you
would run.

  nm-sparsity plan --gin_file=MODEL.gin \\
    --gin_file=gin_configs/runs/t5x_finetune.gin --gin.RECIPE="'sr_ste'" ...

Exit code: 0 = nothing stands in the way, 1 = there are errors.
"""

from __future__ import annotations

import argparse

from nm_sparsity_jax.cli import _flags
from nm_sparsity_jax.core.errors import quiet


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Adds T5X's flags, and what to show."""
  _flags.add_gin(parser)
  add = parser.add_argument
  add("--checkpoint", metavar="DIR", help="look at this checkpoint, not at the one that gin names")
  add("--topology", metavar="NAME", help="compile the step for TPUs such as v5e:4x4 (needs libtpu)")
  _flags.add_json(parser)


def run(args: argparse.Namespace) -> int:
  """Plans and prints."""
  where = _flags.search_paths(args)
  from nm_sparsity_jax.analysis import plan

  with quiet():
    report = plan.plan(args.gin_file, args.gin_bindings, where, args.checkpoint, args.topology)
  return _flags.answer(args, report, plan.render(report), report["ok"])
