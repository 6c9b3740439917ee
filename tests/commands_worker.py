"""Imports once, then forks a command for each line that it reads.

A line is JSON, [folder to stand in, arguments of nm-sparsity, file of its output, file of its
errors]; see `forking`.
"""

import os
import sys

import forking


def imports():
  import gin  # noqa: F401
  import orbax.checkpoint  # noqa: F401
  import tensorstore  # noqa: F401

  from nm_sparsity_jax import cli, gin_files, plan, report, runs  # noqa: F401
  from nm_sparsity_jax.local import checkpoints, optimizers, train, writers  # noqa: F401


def run(folder, argv, out, err):
  """Runs a command as `python -m nm_sparsity_jax.cli` does there; returns its exit code."""
  from nm_sparsity_jax import cli

  os.chdir(folder)
  sys.path.insert(0, "")
  for number, name in ((1, out), (2, err)):
    os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
  return forking.exit_code(lambda: cli.main(argv))


if __name__ == "__main__":
  forking.serve(imports, run)
