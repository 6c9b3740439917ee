"""Imports once, then forks a command for each line that it reads: importing is most of a short one.

A line is JSON, [folder to stand in, arguments of nm-sparsity, file of its output, file of its
errors]. `pid N` answers when the command begins, and `ended STATUS` when it is over.
"""

import gc
import json
import os
import sys
import traceback


def run(folder, argv, out, err):
  """Runs a command as `python -m nm_sparsity_jax.cli` does there; returns its exit code."""
  from nm_sparsity_jax import cli

  os.chdir(folder)
  sys.path.insert(0, "")
  for number, name in ((1, out), (2, err)):
    os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
  try:
    return cli.main(argv)
  except SystemExit as e:
    return e.code if isinstance(e.code, int) else bool(e.code)
  except BaseException:
    traceback.print_exc()
    return 1
  finally:
    sys.stdout.flush()
    sys.stderr.flush()


def main():
  gc.disable()  # a fifth of the time of importing
  # No backend starts here, so a fork is safe.
  import gin  # noqa: F401
  import orbax.checkpoint  # noqa: F401
  import tensorstore  # noqa: F401

  from nm_sparsity_jax import cli, gin_files, plan, report, runs  # noqa: F401
  from nm_sparsity_jax.local import checkpoints, optimizers, train, writers  # noqa: F401

  gc.freeze()  # what is imported stays, and forks share it
  gc.enable()
  for line in sys.stdin:
    pid = os.fork()
    if not pid:
      os._exit(run(*json.loads(line)))
    print("pid", pid, flush=True)
    print("ended", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


if __name__ == "__main__":
  main()
