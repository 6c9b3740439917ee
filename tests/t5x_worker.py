"""Imports what T5X imports once, then forks for each command: importing is most of a short one.

Reads lines of JSON, `[command, flags, stderr, environment]`, and does what `python -m t5x.COMMAND
FLAGS` does in that environment, with its standard error in a file. `ended STATUS` follows each.
"""

import gc
import json
import os
import runpy
import sys
import traceback


def run(command, flags, stderr, environment):
  """Runs one command in this process, as the interpreter's -m does; returns its exit code."""
  file = os.open(stderr, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
  os.dup2(file, 2)
  os.dup2(file, 1)
  sys.argv = [command, *flags]
  os.environ.update(environment)  # XLA reads its flags when a backend starts
  try:
    runpy.run_module(f"t5x.{command}", run_name="__main__", alter_sys=True)
  except SystemExit as e:
    return e.code if isinstance(e.code, int) else bool(e.code)
  except BaseException:
    traceback.print_exc()
    return 1
  finally:
    sys.stdout.flush()
    sys.stderr.flush()
  return 0


def main():
  gc.disable()  # a fifth of the time of importing
  # All but the commands themselves, whose flags a process defines once. No backend starts here,
  # so a fork is safe.
  import t5x.checkpoints
  import t5x.gin_utils
  import t5x.models
  import t5x.trainer  # noqa: F401

  import nm_sparsity_jax.t5x_adapter  # noqa: F401

  gc.freeze()  # what is imported stays, and forks share it
  gc.enable()
  for line in sys.stdin:
    pid = os.fork()
    if not pid:
      os._exit(run(*json.loads(line)))
    _, status = os.waitpid(pid, 0)
    print("ended", os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
  main()
