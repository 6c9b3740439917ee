"""Imports seqio once, then forks a run for each `STEPS FOLDER` that it reads: for tests that kill.

A run prints `step N` at each step; `ended STATUS` comes after it.
"""

import gc
import os
import sys


def main(cache):
  gc.disable()  # a fifth of the time of importing
  import jax
  import test_local as t  # starts no backend, so a fork is safe

  jax.config.update("jax_compilation_cache_dir", cache)
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
  jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

  def run(steps, folder):
    # SeqIO sets packing up for each process for longer than a short run trains.
    source = t.source_of(pack=steps > 100, batch_size=8)
    rules = dict(recipe="one_shot", sparse_steps=steps, dense_steps=steps // 4)
    model = t.model_of(dropout=0.1, source=source, **rules)
    periods = t.train.Periods(evaluate=1000, checkpoint=3, report=1, metrics=None)
    tell = lambda done: print("step", done, flush=True) or 0.0  # asked for at every report
    return t.train.train(
      t.run_of(folder, model, sparse_steps=steps, periods=periods, learning_rate=tell,
               keep_checkpoints=2)
    )  # fmt: skip

  gc.freeze()  # what is imported stays, and forks share it
  gc.enable()
  for line in sys.stdin:
    pid = os.fork()
    if not pid:
      steps, folder = line.strip().split(" ", 1)
      os._exit(run(int(steps), folder))
    print("ended", os.waitpid(pid, 0)[1], flush=True)


if __name__ == "__main__":
  main(sys.argv[1])
