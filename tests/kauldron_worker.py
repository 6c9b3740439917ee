"""Imports Kauldron once, then forks for each call: importing is most of a short one.

Reads lines of JSON, `[function, arguments, environment]`, and calls that function of
`kauldron_runs` in a fork, in that environment. What it returns follows as a line of JSON: `[true,
value]`, or `[false, traceback]`.
"""

import json
import os
import sys
import traceback

REPLIES = os.dup(1)  # Kauldron prints, so its standard output goes where its errors do
os.dup2(2, 1)


def call(name, arguments, environment):
  """Calls a function in this process; the line that tells of it."""
  os.environ.update(environment)  # XLA reads its flags when a backend starts
  import kauldron_runs

  try:
    return json.dumps([True, getattr(kauldron_runs, name)(**arguments)])
  except BaseException:
    return json.dumps([False, traceback.format_exc()])


def main():
  # No backend starts here, so a fork is safe.
  import kauldron_runs  # noqa: F401
  from kauldron import kd

  for part in (kd, kd.nn, kd.train, kd.data, kd.data.py, kd.evals, kd.losses, kd.metrics, kd.ckpts):
    for name in dir(part):
      getattr(part, name)  # imports are lazy there

  for line in sys.stdin:
    pid = os.fork()
    if not pid:
      said = call(*json.loads(line))
      os.write(REPLIES, (said + "\n").encode())
      os._exit(0)
    _, status = os.waitpid(pid, 0)
    if status:
      os.write(REPLIES, json.dumps([False, f"ended with {status}"]).encode() + b"\n")


if __name__ == "__main__":
  main()
