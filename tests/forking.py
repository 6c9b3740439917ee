"""Forks for each line of JSON that comes in: importing is most of a short command."""

import gc
import json
import os
import sys
import traceback


def exit_code(call):
  """Returns the exit code of a process that makes this call alone, and prints what it would."""
  try:
    return call() or 0
  except SystemExit as e:
    return e.code if isinstance(e.code, int) else bool(e.code)
  except BaseException:
    traceback.print_exc()
    return 1
  finally:
    sys.stdout.flush()
    sys.stderr.flush()


def serve(imports, run):
  """Imports once, then answers `pid N` and `ended STATUS` to each line of standard input.

  Args:
    imports: called once. It must start no backend, so that a fork is safe.
    run: called in a process of its own with the values of the line; returns an exit code.
  """
  gc.disable()  # a fifth of the time of importing
  imports()
  gc.freeze()  # what is imported stays, and forks share it
  gc.enable()
  for line in sys.stdin:
    pid = os.fork()
    if not pid:
      os._exit(run(*json.loads(line)))
    print("pid", pid, flush=True)
    print("ended", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
