"""The loop: from a configuration to checkpoints, curves and scores in MODEL_DIR.

batch `sparse_step` of the stream -> [train_step] -> state, sums -> read one step later
    a number that is not finite -> stop, nothing saved since
    a checkpoint is due, or SIGTERM -> all read -> saved in the background
    an evaluation is due -> saved -> losses, metrics -> evaluations.json -> which is best

MODEL_DIR/checkpoint_N, config.gin, settings.json (what a resumed run must share),
          run.json (where it starts, its workload, what it ran with), evaluations.json, train/,
          training_eval/<task>/, inference_eval/
"""

from __future__ import annotations

import contextlib
import datetime
import json
import pathlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from nm_sparsity_jax.core.files import whole
from nm_sparsity_jax.deploy import inference_tree
from nm_sparsity_jax.runs import checkpoint_rules, files, lock, orbax
from nm_sparsity_jax.runs import folders as run_folders
from nm_sparsity_jax.runs.signals import Signals
from nm_sparsity_jax.trainer import checkpoints, reports, writers
from nm_sparsity_jax.trainer.evaluation import Found, best_step, entry
from nm_sparsity_jax.trainer.run import SETTINGS, Run, note_run, refuse_changed
from nm_sparsity_jax.trainer.step import NORMS, Model, TrainState

# Of `Run`, what its result does not depend on.
NOT_IN_RESULT = (
  "model_dir", "evaluation", "eval_period", "checkpoint_period", "stats_period", "metrics_every",
  "keep_checkpoints", "best_metric", "learning_rate", "tracker",
)  # fmt: skip


def train(run: Run, settings: Mapping[str, Any] | None = None, config: str = "") -> int:
  """Trains a run, or resumes it; returns the exit code.

  Args:
    run: what.
    settings: what the result depends on, as nested values; a resumed run must have the same.
    config: the text for config.gin.

  Returns:
    0, also after SIGTERM, when a checkpoint has been saved; 130 after an interrupt.
  """
  settings = settings or {}
  folder = check(run, settings)
  # Of two processes each would remove what the other writes.
  with lock.hold(folder), orbax.quiet(), Signals() as stop:
    with checkpoints.Checkpoints(folder, run.keep_checkpoints) as saved:
      process = _Process(run, saved, stop)
      state, key = process.start()
      # Nothing is written before: a run that is refused leaves what is in its folder.
      files.write_json(folder / SETTINGS, settings)
      files.write_atomically(folder / "config.gin", config)
      return process.run_to_end(state, key)


def check(run: Run, settings: Mapping[str, Any]) -> pathlib.Path:
  """Refuses a run that cannot begin or go on, before anything is written; returns its folder."""
  folder = files.refuse_unwritable("MODEL_DIR", run.model_dir)
  # What is refused cheaply is refused before data are read, Orbax starts or a folder is made.
  run.check()
  refuse_changed(folder, settings)
  run.check_data()
  return folder


def settings_of(bound: Mapping[str, Any]) -> dict[str, Any]:
  """Selects the bound arguments of `Run` that its result depends on: all but `NOT_IN_RESULT`."""
  return {name: value for name, value in bound.items() if name not in NOT_IN_RESULT}


class _Process:
  """One process of a run.

  Attributes:
    offset: the global step of the run's step 0.
    done: steps of the run that are made.
    entries: of evaluations.json, by global step.
  """

  def __init__(self, run: Run, saved: checkpoints.Checkpoints, stop: Signals):
    self.run, self.saved, self.stop = run, saved, stop
    self.entries: dict[int, dict[str, Any]] = {}
    self.evaluator: Any = None
    # `done` is the sparse step, `offset + done` the global step.
    self.offset = self.done = 0
    self.curves: writers.Curves  # open while `run_to_end` runs
    self.pending: tuple[int, Any, Any] | None = None  # the newest step, not read yet
    self.sums: dict[str, float] = {}  # since the last report
    self.summed = 0  # steps
    self.since: float | None = None  # when the last report was; the first one's steps compile

  def start(self) -> tuple[TrainState, jax.Array]:
    """Returns the state to begin with and the key of dropout, and notes where the run stands."""
    run, model = self.run, self.run.model
    # Both come from the seed alone, so a resumed run has the same dropout.
    init_key, key = jax.random.split(jax.random.PRNGKey(run.random_seed))
    if found := run_folders.steps(self.saved.folder):
      state = self.saved.restore(found[-1], model.state_like(run.optimizer), model)
      # What is later is of a checkpoint that was never completed.
      noted = run_folders.evaluations(self.saved.folder)
      self.entries = {at: scores for at, scores in noted.items() if at <= found[-1]}
      self.saved.best = best_step(self.entries.values(), run.best_metric)
    else:
      if run.initial_checkpoint is None:
        (params, collections), step = model.initial(init_key), 0
      else:
        path = run.initial_checkpoint
        params, collections, step = checkpoints.load_initial(path, model, init_key)
        checkpoint_rules.check_steps(model.rules, step, run.pretrained_steps)
      state = model.begin(params, run.optimizer, step, collections)
    # Read from the device once; from here on the loop counts.
    self.done = int(state.sparse_step)
    self.offset = int(state.step) - self.done
    if run.evaluation is not None:
      self.evaluator = run.evaluation(model, str(self.saved.folder))
    return state, key

  def run_to_end(self, state: TrainState, key: jax.Array) -> int:
    """Does the rest of a run; returns the exit code, as `train` does."""
    run, folder = self.run, self.saved.folder
    first, last = self.offset + self.done, self.offset + run.sparse_steps
    note_run(run, folder, self.offset, first)
    reports.say(f"{folder}: from step {first:,} to {last:,}")
    with contextlib.closing(writers.Curves(folder, run.tracker)) as self.curves:
      self._steps(state, key)
      self.saved.wait()
      self.saved.remove_old()
    if self.done == run.sparse_steps:
      return 0
    name, signal = f"checkpoint_{self.offset + self.done}", self.stop.name
    reports.say(f"{signal}: saved {name}; the same command continues from there")
    return 130 if signal == "SIGINT" else 0

  def _steps(self, state: TrainState, key: jax.Array) -> None:
    """Does the remaining steps, or those until a signal; saves the last."""
    run, total = self.run, self.run.sparse_steps
    step = run.model.train_step(run.optimizer, key, run.microbatches, run.learning_rate)
    before, after = run.model.samplers(key, run.microbatches)
    is_evaluated = lambda: self.done == total or _is_time(run.eval_period, self.done)
    if self.done and is_evaluated():
      self._evaluate(state)  # a process that was killed may not have
    batches = iter(run.model.workload.batches(run.data_seed, self.done))
    while self.done < total and self.stop.name is None:
      batch = run.model.put(next(batches))
      self.done += 1
      # Before the step, which donates the state.
      seen = before(state, batch) if _is_time(run.metrics_every, self.done) else None
      state, sums = step(state, batch)
      sampled = {} if seen is None else after(state, seen)
      self._read_pending()
      self.pending = self.done, sums, sampled
      if is_evaluated() or _is_time(run.checkpoint_period, self.done):
        self._save(state)
      if is_evaluated():
        begin = time.monotonic()
        self._evaluate(state)
        if self.since is not None:  # the throughput is that of steps alone
          self.since += time.monotonic() - begin
    self._save(state)  # the last step, or that before a signal, unless it is saved already

  def _read_pending(self) -> None:
    """Reads the pending step. Another one is under way, so the devices never wait for this."""
    if self.pending is None:
      return
    done, sums, sampled = self.pending
    self.pending = None
    sums, written = jax.device_get((sums, dict(sampled)))
    at = self.offset + done
    if wrong := [name for name, x in sums.items() if not np.isfinite(x)]:
      with contextlib.suppress(ValueError):  # the error of an earlier save
        self.saved.wait()
      raise ValueError(
        f"{', '.join(wrong)} of step {at}: not finite. The last good step is {at - 1}, the newest "
        f"checkpoint {run_folders.latest(self.saved.folder) or 'none'}; nothing was saved since. "
        "Lower LEARNING_RATE or lengthen WARMUP_STEPS, with another MODEL_DIR."
      )
    self.summed += 1
    self.sums = {name: self.sums.get(name, 0.0) + float(x) for name, x in sums.items()}
    if done == self.run.sparse_steps or _is_time(self.run.stats_period, done):
      written |= self._report(done)
    if written:
      self.curves.write("train", at, written)

  def _report(self, done: int) -> dict[str, float]:
    """Returns what is written of the steps since the last report; prints a line.

    The line has the throughput since the last one and the time that is left.
    """
    run, now = self.run, time.monotonic()
    norms = {name: self.sums[name] / self.summed for name in NORMS}
    own = {name: x for name, x in self.sums.items() if name not in NORMS}
    means = {**run.model.workload.scalars(own), **norms}
    if run.learning_rate is not None:
      # Of the update that made this step: optax counts from 0.
      means["learning_rate"] = float(run.learning_rate(done - 1))
    last = self.offset + run.sparse_steps
    words = [f"step {self.offset + done:,}/{last:,}", f"loss {means['loss']:.4f}"]
    words.append(reports.sparsity(run.model.rules, run.model.shapes, done))
    if self.since is not None:
      passed, unit = now - self.since, run.model.workload.weight
      left = round(passed / self.summed * (run.sparse_steps - done))
      words.append(f"{self.sums[unit] / passed:,.0f} {unit}/s")
      words.append(f"{datetime.timedelta(seconds=left)} left")
    reports.say("  ".join(words))
    self.since, self.summed, self.sums = now, 0, {}
    return means

  def _save(self, state: TrainState) -> None:
    """Saves once every step so far is read: a state that is not finite is never saved."""
    self._read_pending()
    self.curves.flush()
    self.saved.save(self.offset + self.done, checkpoints.to_tree(state))

  def _evaluate(self, state: TrainState) -> None:
    """Evaluates a saved state, unless that is done already."""
    step, run = self.offset + self.done, self.run
    if self.evaluator is None or step in self.entries:
      return
    found = self.evaluator.evaluate(run.model.variables(state), step)
    _write_evaluation(found, step, self.curves, reports.say)
    self.curves.flush()
    sites = run.model.rules.assign(run.model.shapes).sites.values()
    at_target = all(self.done >= site.recipe.target_from(site.axis_size) for site in sites)
    self.entries[step] = entry(step, found, at_target, run.model.workload)
    files.write_json(self.saved.folder / "evaluations.json", list(self.entries.values()))
    self.saved.best = best_step(self.entries.values(), run.best_metric)


def _is_time(period: int | None, done: int) -> bool:
  return bool(period) and done % period == 0


def _write_evaluation(found: Found, step: int, curves: writers.Curves, say: Callable) -> None:
  """Writes and prints what an evaluation found."""
  for task, scalars in found.scalars.items():
    curves.write(f"training_eval/{task}", step, scalars)
    words = [f"{name} {scalars[name]:.4f}" for name in ("loss", "accuracy") if name in scalars]
    say(f"  {task}: {', '.join(words)}")
  for task, values in found.metrics.items():
    curves.write(f"inference_eval/{task}", step, values)
    say(f"  {task}: {', '.join(f'{name} {value:.4g}' for name, value in values.items())}")


# --- one checkpoint -------------------------------------------------------------------------------


def evaluate(
  model: Model,
  evaluation: Any,
  checkpoint: str,
  output_dir: str,
  config: str = "",
  memory: bool = False,
) -> None:
  """Evaluates one checkpoint, of this runner or of T5X, with the weights of its step.

  Args:
    model: workload and rules, as in training.
    evaluation: the class that evaluates, as `Run.evaluation`.
    checkpoint: its folder, a run's folder for its newest one, or a packed file.
    output_dir: gets what training writes for an evaluation.
    config: the text for config.gin.
    memory: keep all kernels of a packed file packed, also where a dense product is faster.
  """
  opened = _opened(model, evaluation, checkpoint, output_dir, config, memory)
  with opened as (evaluator, variables, step):
    found = evaluator.evaluate(variables, step)
    with contextlib.closing(writers.Curves(pathlib.Path(evaluator.folder))) as curves:
      _write_evaluation(found, step, curves, print)
      curves.flush()  # `close` raises no error of a full disk


def infer(
  model: Model,
  evaluation: Any,
  checkpoint: str,
  output_dir: str,
  config: str = "",
  memory: bool = False,
) -> None:
  """Writes the predictions of one checkpoint: TASK-predict.jsonl-00000-of-00001, as t5x.infer does.

  A line is {"inputs": {"idx": 3, "inputs_pretokenized": ...}, "prediction": "entailment"}. Of a
  workload with splits of its own a file is named after the split, `idx` counts its examples, and
  "prediction" has what `Workload.predict` returns: {"output": 0.25}. A file has its name when it is
  complete.

  Args:
    model: workload and rules, as in training.
    evaluation: the class that predicts, as `Run.evaluation`.
    checkpoint: its folder, a run's folder for its newest one, or a packed file.
    output_dir: gets the files.
    config: the text for config.gin.
    memory: keep all kernels of a packed file packed, also where a dense product is faster.
  """
  opened = _opened(model, evaluation, checkpoint, output_dir, config, memory)
  with opened as (evaluator, variables, _):
    for name, rows in evaluator.predictions(variables):
      count, path = 0, f"{evaluator.folder}/{name}-predict.jsonl-00000-of-00001"
      with whole(path, replace=True) as unfinished, unfinished.open("w", encoding="utf-8") as file:
        for count, (inputs, prediction) in enumerate(rows, 1):  # noqa: B007
          line = {"inputs": inputs, "prediction": prediction}
          # JSON has no NaN: what reads the file would fail on it, far from here.
          file.write(json.dumps(line, allow_nan=False) + "\n")
      print(f"  {name}: {count:,} predictions")


@contextlib.contextmanager
def _opened(
  model: Model, evaluation: Any, checkpoint: str, output_dir: str, config: str, memory: bool
) -> Iterator[tuple[Any, dict[str, Any], int]]:
  """Yields an evaluator, the variables of a checkpoint, and its global step; holds the folder.

  The arguments are those of `evaluate`.
  """
  folder = files.refuse_unwritable("EVAL_OUTPUT_DIR or INFER_OUTPUT_DIR", output_dir)
  # Its curves and config.gin would be written over. A new run has no checkpoint yet.
  if (folder / "run.json").exists() or run_folders.latest(folder) is not None:
    raise ValueError(f"{str(folder)!r} holds a run: take another folder.")
  evaluator = evaluation(model, str(folder))  # first: it refuses a wrong split before any reading
  stored = checkpoints.opened(checkpoint, model)
  if stored.packed is None:
    variables = checkpoints.load_for_evaluation(stored, model)
    about = f"step {stored.step or 0:,}, sparse step {stored.sparse_step or 0:,}"
  else:
    model, about = checkpoints.packed_model(stored, model), "packed"
    # An evaluator runs the network of its model, and that of a packed file has no scan.
    evaluator = evaluation(model, str(folder))
    # Whether a packed product is faster depends on the rows that a layer sees at once.
    params = inference_tree.prepare(stored.packed["params"], evaluator.rows(), memory=memory)
    variables = jax.device_put({**stored.packed, "params": params}, model.replicated)
  print(f"{stored.path}: {about}")
  # Two processes would write into one unfinished file, and a mix of both would get its name.
  with lock.hold(folder):
    files.write_atomically(folder / "config.gin", config)
    yield evaluator, variables, stored.step or 0
