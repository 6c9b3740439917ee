"""Imports once, then forks a quickstart for each line that it reads: for tests that stop some.

A line is [folder to stand in, arguments, step to be terminated at or null]; `ended STATUS` answers.
"""

import functools
import json
import os
import signal
import sys


def main():
  from nm_sparsity_jax import cli, quickstart
  from nm_sparsity_jax.local import data, reports, train  # noqa: F401 (starts no backend)
  from nm_sparsity_jax.models.t5 import config

  data.import_seqio("t5x_tasks")
  import t5x_tasks

  # A fraction of the work: seqio's for each task, jax's for each layer.
  config._T5_1_1["tiny"] = (16, 2, 1, 8, 32)
  t5x_tasks.register_mini(rows={"train": 256, "validation": 64})
  mixture = data.mixture

  @functools.wraps(mixture)
  def one_task(rates, **kwargs):
    return mixture({"nm_glue_mini_sst2": rates["nm_glue_mini_sst2"]}, **kwargs)

  data.mixture = one_task

  def run(folder, argv, stop):
    os.chdir(folder)
    said = os.open("said.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(said, 1)
    os.dup2(said, 2)
    quickstart.RECIPES = ("sdgf_stepwise",)
    show = reports.Progress.show

    def show_and_stop(self, step, *rest):
      show(self, step, *rest)
      if step == stop:
        os.kill(os.getpid(), signal.SIGTERM)

    reports.Progress.show = show_and_stop
    code = cli.main(["quickstart", *argv])
    sys.stdout.flush()
    return code

  for line in sys.stdin:
    pid = os.fork()
    if not pid:
      try:
        code = run(*json.loads(line))
      except BaseException as e:
        print(repr(e), file=sys.stderr)
        code = 99
      os._exit(code)
    print("ended", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


if __name__ == "__main__":
  main()
