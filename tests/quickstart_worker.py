"""Imports once, then forks a quickstart for each line that it reads: for tests that stop some.

A line is [folder to stand in, arguments, step to be terminated at or null]; `ended STATUS` answers.
"""

import gc
import json
import os
import signal
import sys


def main():
  gc.disable()  # a fifth of the time of importing
  from nm_sparsity_jax import cli
  from nm_sparsity_jax.cli import quickstart_steps
  from nm_sparsity_jax.models.t5 import T5Config
  from nm_sparsity_jax.trainer import data, reports, train  # noqa: F401 (starts no backend)

  data.import_seqio("t5x_tasks")
  import t5x_tasks

  # A fraction of the work: jax's for each layer, and of the evaluations.
  small = {"emb_dim": 16, "num_heads": 2, "head_dim": 8, "mlp_dim": 32, "num_encoder_layers": 1}
  of_size = T5Config._of_size.__func__
  T5Config._of_size = classmethod(lambda *args: of_size(*args[:3], args[3] | small))
  t5x_tasks.register_mini(rows={"train": 256, "validation": 64})
  quickstart_steps._EVALUATIONS = 2

  def run(folder, argv, stop):
    os.chdir(folder)
    said = os.open("said.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(said, 1)
    os.dup2(said, 2)
    quickstart_steps.RECIPES = ("sdgf_stepwise",)
    show = reports.Progress.show

    def show_and_stop(self, step, *rest):
      show(self, step, *rest)
      if step == stop:
        os.kill(os.getpid(), signal.SIGTERM)

    reports.Progress.show = show_and_stop
    code = cli.main(["quickstart", *argv])
    sys.stdout.flush()
    return code

  gc.freeze()  # what is imported stays, and forks share it
  gc.enable()
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
