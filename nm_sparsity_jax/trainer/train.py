"""The loop: from a configuration to checkpoints, curves and scores in MODEL_DIR.

batch `sparse_step` of the stream -> [train_step] -> state, sums -> looked at two steps later
    a number that is not finite -> stop, nothing saved since
    a checkpoint is due, or SIGTERM -> all looked at -> saved in the background
    an evaluation is due -> saved -> losses, metrics -> evaluations.json -> which is best

MODEL_DIR/checkpoint_N, config.gin, settings.json (what a resumed run must share),
          run.json (where it starts, its workload, what it ran with), evaluations.json, train/,
          training_eval/<task>/, inference_eval/

`evaluate` and `infer` open one checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import pathlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from nm_sparsity_jax.core import installed
from nm_sparsity_jax.runs import checkpoint_rules, files
from nm_sparsity_jax.runs import settings as run_settings
from nm_sparsity_jax.runs.signals import Signals
from nm_sparsity_jax.trainer import checkpoints, evaluation, folders, packed_files, reports, writers
from nm_sparsity_jax.trainer.run import Periods, Run, note_run
from nm_sparsity_jax.trainer.step import Model, TrainState
from nm_sparsity_jax.training import metrics

__all__ = ["FREE", "Periods", "Run", "check", "evaluate", "infer", "settings_of", "train"]

# Of `Run`, what its result does not depend on.
FREE = (
  "model_dir", "evaluation", "periods", "keep_checkpoints", "best_metric", "learning_rate",
  "tracker",
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
  folder = check(run, settings or {})
  with folders.held(folder), Signals() as stop:
    saved = checkpoints.Checkpoints(folder, run.keep_checkpoints)
    try:
      process = _Process(run, saved, stop)
      state, key = process.start()
      # Nothing is written before: a run that is refused leaves its folder as it was.
      run_settings.agree(folder, settings or {})
      files.write_atomically(folder / "config.gin", config)
      return process.go(state, key)
    finally:
      saved.abandon()


def check(run: Run, settings: Mapping[str, Any]) -> pathlib.Path:
  """Refuses a run that cannot begin or go on, before anything is written; returns its folder."""
  folder = folders.of(run.model_dir)
  run.check()
  run_settings.refuse_changed(folder, settings)
  run.model.workload.check()
  return folder


def settings_of(bound: Mapping[str, Any]) -> dict[str, Any]:
  """Selects the bound arguments of `Run` that its result depends on: all but `FREE`."""
  return {name: value for name, value in bound.items() if name not in FREE}


class _Process:
  """One process of a run.

  Attributes:
    offset: the global step of the run's step 0.
    done: steps of the run that are made.
  """

  def __init__(self, run: Run, saved: checkpoints.Checkpoints, stop: Signals):
    self.run, self.saved, self.stop = run, saved, stop
    less_is_better = run.model.workload.less_is_better
    self.history = evaluation.History(saved.folder, run.best_metric, less_is_better)
    self.evaluator: Any = None
    self.offset = self.done = 0

  def start(self) -> tuple[TrainState, jax.Array]:
    """Returns the state to start or to go on from, and the key of dropout."""
    run, model = self.run, self.run.model
    init_key, key = jax.random.split(jax.random.PRNGKey(run.random_seed))
    if found := self.saved.steps():
      state = self._resumed(found[-1])
    elif run.initial_checkpoint is None:
      params, collections = model.initial(init_key)
      state = model.begin(params, run.optimizer, 0, collections)
    else:
      path = run.initial_checkpoint
      params, collections, step = checkpoints.load_initial(path, model, init_key)
      checkpoint_rules.check_steps(model.rules, step, run.pretrained_steps)
      state = model.begin(params, run.optimizer, step, collections)
    self.done = int(state.sparse_step)
    self.offset = int(state.step) - self.done
    if run.evaluation is not None:
      asked = lambda: self.stop.name is not None
      self.evaluator = run.evaluation.evaluator(model, str(self.saved.folder), asked)
    return state, key

  def _resumed(self, step: int) -> TrainState:
    """Returns the state of a checkpoint of the run, and reads what was found up to it."""
    model, path = self.run.model, self.saved.folder / f"checkpoint_{step}"
    state, rules = self.saved.restore(step, model.state_like(self.run.optimizer), model)
    checkpoints.refuse_other_rules(rules, model.rules, str(path))
    self.history.read(until=step)
    self.saved.best = self.history.best
    return state

  def go(self, state: TrainState, key: jax.Array) -> int:
    """Does the rest of a run; returns the exit code, as `train` does."""
    run, folder = self.run, self.saved.folder
    first, last = self.offset + self.done, self.offset + run.sparse_steps
    note_run(run, folder, self.offset, first, installed.environment())
    curves = writers.Curves(folder, run.tracker)
    progress = reports.Progress(first, last, unit=run.model.workload.weight)
    progress.say(f"{folder}: from step {first:,} to {last:,}")
    if state.average:
      progress.say("  evaluations use the moving average of the parameters")
    self.watch = reports.Watch(run, self.offset, curves, progress)
    how = "failed"
    try:
      self._steps(state, key)
      self.saved.close()
      is_over = self.done == run.sparse_steps and not self._is_evaluation_due()
      how = "finished" if is_over else "stopped"
    except reports.NotFinite as e:
      raise self._not_finite(e) from e
    except Exception as e:
      if folders.is_no_room(e):
        raise ValueError(self.saved.not_written(f"curves or scores in {folder}", e)) from e
      raise
    finally:
      progress.close()
      # What failed is told by the error that is under way.
      with contextlib.suppress(Exception) if how == "failed" else contextlib.nullcontext():
        curves.close(how)
    if is_over:
      return 0
    name, signal = f"checkpoint_{self.offset + self.done}", self.stop.name
    print(f"{signal}: saved {name}; the same command continues from there", file=sys.stderr)
    return 130 if signal == "SIGINT" else 0

  def _steps(self, state: TrainState, key: jax.Array) -> None:
    """Does the remaining steps, or those until a signal; saves the last."""
    run, total, periods = self.run, self.run.sparse_steps, self.run.periods
    step = run.model.train_step(run.optimizer, key, state, run.microbatches)
    before, after = run.model.samplers(key, run.microbatches)
    if self.done and periods.evaluates(self.done, total):
      self._evaluate(state)  # a process that was killed may not have
    batches = iter(run.model.workload.batches(run.data_seed, self.done))
    while self.done < total and self.stop.name is None:
      batch = run.model.put(next(batches))
      self.done += 1
      seen = before(state, batch) if periods.samples(self.done) else None
      state, sums = step(state, batch)
      self.watch.add(self.done, sums, after(state, seen) if seen is not None else {})
      if periods.saves(self.done, total):
        self._save(state)
      if periods.evaluates(self.done, total):
        with self.watch.progress.paused():
          self._evaluate(state)
    self._save(state)

  def _save(self, state: TrainState) -> None:
    """Saves after a look at every step so far: a state that is not finite is never saved."""
    self.watch.catch_up()
    self.watch.curves.flush()
    tree = checkpoints.to_tree(state, self.run.model.rules)
    self.saved.save(self.offset + self.done, tree)

  def _is_evaluation_due(self) -> bool:
    return self.evaluator is not None and self.offset + self.done not in self.history.entries

  def _evaluate(self, state: TrainState) -> None:
    """Evaluates a saved state, unless that is done already."""
    step, model = self.offset + self.done, self.run.model
    if not self._is_evaluation_due():
      return
    try:
      found = self.evaluator.evaluate(model.variables(state), step)
    except evaluation.Stopped:  # it is saved, and evaluated when the run goes on
      return
    _tell(found, model, step, self.watch.curves, self.watch.progress.say)
    self.watch.curves.flush()
    summary = lambda s: metrics.summary(s.dense, model.rules, s.sparse_step, s.masks, per_place=())
    now = model.jit(summary)(state)
    is_sparse = now["nm/density"] <= now["nm/density_target"] * (1 + 1e-6)
    self.history.note(step, found, bool(is_sparse))
    self.saved.best = self.history.best

  def _not_finite(self, e: reports.NotFinite) -> ValueError:
    """Says what is left when a number is not finite."""
    with contextlib.suppress(ValueError):
      self.saved.wait()
    return ValueError(
      f"the {e.what} of step {e.step} is not finite. The last good step is {e.step - 1}, the "
      f"newest checkpoint {self.saved.newest()}; nothing was saved since. Lower LEARNING_RATE or "
      "lengthen WARMUP_STEPS, with another MODEL_DIR."
    )


def _tell(found: evaluation.Found, model: Model, step: int, curves: Any, say: Any) -> None:
  """Writes and prints what an evaluation found."""
  for task, scalars in found.scalars.items():
    curves.write(f"training_eval/{task}", step, scalars)
    words = [f"{name} {scalars[name]:.4f}" for name in model.workload.headline]
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
) -> int:
  """Evaluates one checkpoint, of this runner or of T5X, with the weights of its step.

  Args:
    model: workload and rules, as in training.
    evaluation: what is evaluated, and how.
    checkpoint: its folder, a run's folder for its newest one, or a packed file.
    output_dir: gets what training writes for an evaluation.
    config: the text for config.gin.
    memory: keep all kernels of a packed file packed, also where a dense product is faster.

  Returns:
    0.
  """
  folder = folders.of(output_dir, "EVAL_OUTPUT_DIR")
  with _held(folder, "EVAL_OUTPUT_DIR", model, evaluation):
    model, variables, step = _load(model, evaluation, checkpoint, memory)
    evaluator = evaluation.evaluator(model, str(folder))
    files.write_atomically(folder / "config.gin", config)
    with packed_files.explained(checkpoint):
      found = evaluator.evaluate(variables, step)
  curves = writers.Curves(folder)
  _tell(found, model, step, curves, print)
  curves.close()
  return 0


def infer(
  model: Model,
  evaluation: Any,
  checkpoint: str,
  output_dir: str,
  config: str = "",
  memory: bool = False,
) -> int:
  """Writes the predictions of one checkpoint: TASK-predict.jsonl-00000-of-00001, as t5x.infer does.

  A line is {"inputs": {"idx": 3, "inputs_pretokenized": ...}, "prediction": "entailment"}. Of a
  workload with splits of its own a file is named after the split, `idx` counts its examples, and
  "prediction" has what `Workload.predict` returns: {"output": 0.25}. A file has its name when it is
  complete.

  Args:
    model: workload and rules, as in training.
    evaluation: of which splits; for a T5, of which tasks, by which search, and the lengths.
    checkpoint: its folder, a run's folder for its newest one, or a packed file.
    output_dir: gets the files.
    config: the text for config.gin.
    memory: keep all kernels of a packed file packed, also where a dense product is faster.

  Returns:
    0.
  """
  wanted = evaluation.for_predictions(model.workload)
  folder = folders.of(output_dir, "INFER_OUTPUT_DIR")
  with _held(folder, "INFER_OUTPUT_DIR", model, wanted):
    model, variables, _ = _load(model, wanted, checkpoint, memory)
    evaluator = wanted.evaluator(model, None)
    files.write_atomically(folder / "config.gin", config)
  for name, rows in evaluator.predictions(variables):
    path, count = folder / f"{name}-predict.jsonl-00000-of-00001", 0
    whole, explained = files.whole_file(path), packed_files.explained(checkpoint)
    with explained, whole as beside, beside.open("w", encoding="utf-8") as file:
      for inputs, prediction in rows:
        file.write(json.dumps({"inputs": inputs, "prediction": prediction}) + "\n")
        count += 1
    print(f"  {name}: {count:,} predictions")
  return 0


@contextlib.contextmanager
def _held(folder: pathlib.Path, macro: str, model: Model, evaluation: Any) -> Iterator[None]:
  """Holds the folder for the findings, after all that is refused without a checkpoint."""
  folders.refuse_run(folder, macro)
  evaluation.check(model)
  with folders.held(folder, macro):
    yield


def _load(
  model: Model, evaluation: Any, checkpoint: str, memory: bool
) -> tuple[Model, dict[str, Any], int]:
  """Returns the model that runs on a checkpoint, its variables on the devices, its global step."""
  stored = checkpoints.opened(checkpoint, model)
  newest = "" if stored.path == checkpoint else f", the newest in {checkpoint}"
  step = stored.step or 0
  if stored.packed is None:
    if memory:
      raise ValueError(
        f"memory=True: {checkpoint!r} is not a packed file, and only its kernels can stay packed. "
        "Pack it by `nm-sparsity pack`, or leave this out."
      )
    variables = checkpoints.load_for_evaluation(stored, model)
    kept = ", the moving average of its parameters" if stored.average else ""
    print(f"{stored.path}{newest}: step {step:,}, sparse step {stored.sparse_step or 0:,}{kept}")
    return model, variables, step
  if stored.rules is not None and not model.rules.is_dense:
    if not checkpoint_rules.is_of(stored, model.rules):
      checkpoints.refuse_other_rules(stored.rules, model.rules, stored.path)
  held = stored.packed()
  model, variables = packed_files.load(stored.path, held, model, evaluation, memory)
  print(f"{stored.path}{newest}: {packed_files.summary(held, variables)}")
  return model, variables, step
