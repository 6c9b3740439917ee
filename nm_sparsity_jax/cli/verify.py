"""Proves, group by group, that a checkpoint's weights are n:m along the axis that is contracted.

It takes a checkpoint of `nm-sparsity train`, of T5X or of Kauldron, a packed file, a .safetensors
file of timm's names, or a folder of Hugging Face's T5. A run's folder stands for its newest
checkpoint. A checkpoint of a sparse run, one that `nm-sparsity finalize` wrote, and a packed file
hold their rules. For all else give --rules. One array is in memory at a time; a packed
file is read whole. T5X is not needed.

A local run and one of Kauldron store the weights that are deployed: n:m once the schedule is over.
T5X stores dense weights, on which masks act, and a moving average (EMA_DECAY), which is looked at
where a run keeps one, is dense too: `nm-sparsity finalize` writes the zeros.

  nm-sparsity verify runs/sparse/checkpoint_1100000
  nm-sparsity verify model.safetensors --rules "{'ff': '1:8', 'qkv': '1:4'}"

Exit code: 0 = all of it is n:m and finite; 1 = it is not (inf and NaN are named), no rule makes
anything sparse, or the checkpoint cannot be read.
"""

from __future__ import annotations

import argparse
from typing import Any

from nm_sparsity_jax.cli import _flags
from nm_sparsity_jax.core.text import printable

add_arguments = _flags.add_checkpoint


def run(args: argparse.Namespace) -> int:
  """Prints what was found."""
  from nm_sparsity_jax import runs

  proof = runs.verify(args.checkpoint, **_flags.rules(args))
  text = f"{head(proof, args.checkpoint)}\n\n{proof}"
  if not proof.ok:
    if proof.stored.in_place and not proof.stored.average:
      text += "\nThe weights of this run are n:m when its schedule is over."
    elif proof.stored.sparse_step is not None and not proof.rules.is_dense:
      text += "\nMasks act on dense weights, or their average: `nm-sparsity finalize` makes zeros."
  return _flags.answer(args, proof.as_dict(), text, proof.ok)


def head(proof: Any, asked: str) -> str:
  """Says what was looked at, and by which rules.

  Args:
    proof: what `runs.verify` returned.
    asked: the checkpoint or folder that was named.
  """
  from nm_sparsity_jax.training import rules_text

  stored, rules = proof.stored, proof.rules
  facts = [f"the newest in {asked}"] * (stored.path != asked) + [stored.format]
  for name, step in (("step", stored.step), ("sparse step", stored.sparse_step)):
    if step is not None:
      facts.append(f"{name} {step:,}")
  text = rules_text.describe(rules)
  is_own = stored.known_rules == text
  # Recipe and phases of a pattern that somebody gave are made up.
  lines = text.splitlines() if is_own else [f"{k}: {r.pattern}" for k, r in rules.places.items()]
  by = "its own rules" if is_own else "--rules"
  return "\n  ".join(map(printable, [f"{stored.path} ({', '.join(facts)}), by {by}:", *lines]))
