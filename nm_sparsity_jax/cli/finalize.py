"""Writes a checkpoint with exact zeros: the pattern of every place, as `nms.finalize` makes it.

A local run and one of Kauldron store these weights already; of them it leaves the optimizer out.
It takes what `nm-sparsity verify` takes, and a folder for the result. The
result has the checkpoint's own name, as in T5X: OUT/checkpoint_<step>. It holds parameters, step
and sparse state, but no optimizer. Where the run kept a moving average of its parameters
(EMA_DECAY), that is what is finalized, as it is what was scored. t5x.eval and t5x.infer open it,
with the sparse model or with T5X's own, and you can fine-tune it. The command says how much
magnitude it removed, reads what it wrote, and proves it. Its notes.json holds the rules that you
gave with --rules, so that `nm-sparsity verify` needs none. T5X is not needed.

A folder of Hugging Face's T5 becomes such a checkpoint too, which `nm-sparsity export` turns into a
folder again.

While the schedule is not over, the removed weights may still matter, so the command refuses.
--early allows it.

  nm-sparsity finalize runs/sparse runs/final

Exit code: 0 = written and proven, 1 = not.
"""

from __future__ import annotations

import argparse

from nm_sparsity_jax.cli import _flags, verify


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Adds what to read and where to write."""
  _flags.add_checkpoint(parser, out="gets OUT/checkpoint_<step>, which must be new: see above")
  parser.add_argument(
    "--early", action="store_true", help="finalize although the schedule is not over"
  )


def run(args: argparse.Namespace) -> int:
  """Makes zeros, writes, proves, prints."""
  from nm_sparsity_jax import runs

  proof = runs.finalize(args.checkpoint, args.out, early=args.early, **_flags.rules(args))
  text = f"{verify.head(proof, proof.stored.path)}\n\n{proof}"
  return _flags.answer(args, proof.as_dict(), text, proof.ok)
