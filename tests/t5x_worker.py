"""Imports what T5X imports once, then forks for each command.

Reads lines of JSON, `[command, flags, stderr, environment]`, and does what `python -m t5x.COMMAND
FLAGS` does in that environment, with its standard error in a file; see `forking`.
"""

import os
import runpy
import sys

import forking


def imports():
  # All but the commands themselves, whose flags a process defines once.
  import t5x.checkpoints
  import t5x.gin_utils
  import t5x.models
  import t5x.trainer  # noqa: F401

  import nm_sparsity_jax.t5x_adapter  # noqa: F401


def run(command, flags, stderr, environment):
  """Runs one command in this process, as the interpreter's -m does; returns its exit code."""
  file = os.open(stderr, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
  os.dup2(file, 2)
  os.dup2(file, 1)
  sys.argv = [command, *flags]
  os.environ.update(environment)  # XLA reads its flags when a backend starts

  def call():
    runpy.run_module(f"t5x.{command}", run_name="__main__", alter_sys=True)

  return forking.exit_code(call)


if __name__ == "__main__":
  forking.serve(imports, run)
