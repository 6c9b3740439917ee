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
import dataclasses
import json
import pathlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax

from nm_sparsity_jax.core import installed
from nm_sparsity_jax.runs import checkpoint_rules, files, lock
from nm_sparsity_jax.runs import settings as run_settings
from nm_sparsity_jax.runs.signals import Signals
from nm_sparsity_jax.trainer import checkpoints, folders, packed_files, reports
from nm_sparsity_jax.trainer.evaluation import (
  History,
  Stopped,
  check_metric,
  loss_line,
  metrics_line,
)
from nm_sparsity_jax.trainer.run import Periods, Run, note_run
from nm_sparsity_jax.trainer.step import Model, TrainState
from nm_sparsity_jax.training import metrics

__all__ = ["FREE", "Periods", "Run", "evaluate", "infer", "settings_of", "train"]

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
  folder = folders.of(run.model_dir)
  run.check()
  run.model.workload.check(run.source)
  was = folders.Before.of(folder)
  folders.make(run.model_dir)
  held = lock.hold(folder, lambda _: folders.taken(folder))
  with held, folders.as_it_was(folder, was), Signals() as stop:
    saved = checkpoints.Checkpoints(folder, run.keep_checkpoints)
    try:
      run_settings.agree(folder, settings or {})
      files.write_atomically(folder / "config.gin", config)
      return go(run, saved, stop)
    except BaseException:
      saved.abandon()
      raise


def go(run: Run, saved: checkpoints.Checkpoints, stop: Signals) -> int:
  """Does the rest of a run in its folder; returns the exit code, as `train` does."""
  init_key, key = jax.random.split(jax.random.PRNGKey(run.random_seed))
  history = History(saved.folder, run.best_metric, run.model.workload.less_is_better)
  state, offset = _start(run, saved, history, init_key)
  done = int(state.sparse_step)
  first, last = offset + done, offset + run.sparse_steps
  evaluator = None
  if run.evaluation is not None:
    asked = lambda: stop.name is not None
    evaluator = run.evaluation.evaluator(run.model, str(saved.folder), asked)
    if run.best_metric is not None:
      shapes = {"params": run.model.shapes, **state.collections}
      check_metric(run.best_metric, evaluator.metric_names(shapes))
  note_run(run, saved.folder, offset, first, installed.environment())
  curves, progress = (
    reports.Curves(saved.folder, run.tracker),
    reports.Progress(first, last, unit=run.unit),
  )
  watch = reports.Watch(run, offset, curves, progress)
  process = _Process(run, saved, history, evaluator, watch, offset, stop)
  curves.open("train", first)
  try:
    progress.say(f"{saved.folder}: from step {first:,} to {last:,}")
    if state.average:
      progress.say("  evaluations use the moving average of the parameters")
    done = _steps(process, state, key)
    saved.close()
    is_over = done == run.sparse_steps and (evaluator is None or offset + done in history.entries)
    curves.close("finished" if is_over else "stopped")
  except BaseException as e:
    with contextlib.suppress(Exception):
      curves.close("failed")
    if isinstance(e, reports.NotFinite):
      raise _not_finite(saved, e) from e
    if folders.is_no_room(e):
      raise ValueError(saved.no_room(f"curves or scores in {saved.folder}", e)) from e
    raise
  finally:
    progress.close()
  if is_over:
    return 0
  print(
    f"{stop.name}: saved checkpoint_{offset + done}; the same command continues from there",
    file=sys.stderr,
  )
  return 130 if stop.name == "SIGINT" else 0


@dataclasses.dataclass(frozen=True)
class _Process:
  """What one process of a run works with."""

  run: Run
  saved: checkpoints.Checkpoints
  history: History
  evaluator: Any
  watch: reports.Watch
  offset: int  # the global step of the run's step 0
  stop: Signals


# --- start ----------------------------------------------------------------------------------------


def _start(run: Run, saved, history: History, key: jax.Array) -> tuple[TrainState, int]:
  """Returns the state to start from, and the global step of the run's step 0."""
  model, found = run.model, saved.steps()
  if found:
    state = _resume(run, saved, history, found[-1])
    return state, found[-1] - int(state.sparse_step)
  if run.initial_checkpoint is None:
    params, step = model.initial_params(key), 0
    kept = model.initial_collections(key)
  else:
    params, kept, step = checkpoints.load_initial(run.initial_checkpoint, model, key)
    if run.pretrained_steps not in (None, step):
      raise ValueError(
        f"PRETRAINED_STEPS={run.pretrained_steps}, but {run.initial_checkpoint} is of step "
        f"{step}. Set PRETRAINED_STEPS={step}, or leave it None."
      )
  return model.begin(params, run.optimizer, step, kept), step


def _resume(run: Run, saved, history: History, step: int) -> TrainState:
  """Returns the state of a checkpoint of the run, and reads what was found up to it."""
  model = run.model
  like = model.state_shapes(run.optimizer)
  tree, text = saved.restore(step, like, model)
  checkpoints.refuse_other_rules(text, model.rules, f"{saved.folder}/checkpoint_{step}")
  history.read(until=step)
  saved.best = history.best
  return checkpoints.from_tree(tree, like, model.rules)


# --- the loop -------------------------------------------------------------------------------------


def _steps(p: _Process, state: TrainState, key: jax.Array) -> int:
  """Does the remaining steps, or those until a signal; saves the last; returns its number."""
  run, total, periods = p.run, p.run.sparse_steps, p.run.periods
  done = int(state.sparse_step)
  step = run.model.train_step(run.optimizer, key, state, run.microbatches)
  before, after = run.model.samplers(key, run.microbatches)
  if done and periods.evaluates(done, total):
    _evaluate(p, state, done)  # a process that was killed may not have
  batches = run.batches(done)
  while done < total and p.stop.name is None:
    batch = run.model.put(next(batches))
    done += 1
    seen = before(state, batch) if periods.samples(done) else None
    state, sums = step(state, batch)
    p.watch.add(done, sums, after(state, seen) if seen is not None else {})
    if periods.saves(done, total):
      _save(p, state, done)
    if periods.evaluates(done, total):
      with p.watch.progress.paused():
        _evaluate(p, state, done)
  _save(p, state, done)
  return done


def _save(p: _Process, state: TrainState, done: int) -> None:
  """Saves after a look at every step so far: a state that is not finite is never saved."""
  p.watch.catch_up()
  p.watch.curves.flush()
  p.saved.save(p.offset + done, checkpoints.to_tree(state, p.run.model.rules))


def _evaluate(p: _Process, state: TrainState, done: int) -> None:
  """Evaluates a saved state, unless that is done already."""
  step, model, say = p.offset + done, p.run.model, p.watch.progress.say
  if p.evaluator is None or step in p.history.entries:
    return
  try:
    found = p.evaluator.evaluate(model.variables(state), step)
  except Stopped:  # it is saved, and evaluated when the run goes on
    return
  for task, scalars in found.scalars.items():
    room = f"training_eval/{task}"
    p.watch.curves.open(room, step - 1)
    p.watch.curves.write(room, step, scalars)
    p.watch.curves.flush(room)
    say(loss_line(task, scalars, model.workload.headline))
  for task, values in found.metrics.items():
    p.watch.curves.track(f"inference_eval/{task}", step, values)
    say(metrics_line(task, values))
  density = lambda s: metrics.density(s.dense, model.rules, s.sparse_step, s.masks)[:2]
  densities = model.jit(density)(state)
  p.history.note(step, found, bool(densities[0] <= densities[1] * (1 + 1e-6)))
  p.saved.best = p.history.best


def _not_finite(saved: checkpoints.Checkpoints, e: reports.NotFinite) -> ValueError:
  """Says what is left when a number is not finite."""
  with contextlib.suppress(ValueError):
    saved.wait()
  return ValueError(
    f"the {e.what} of step {e.step} is not finite. The last good step is {e.step - 1}, the newest "
    f"checkpoint {saved.newest()}; nothing was saved since. Lower LEARNING_RATE or lengthen "
    "WARMUP_STEPS, with another MODEL_DIR."
  )


def settings_of(bound: Mapping[str, Any]) -> dict[str, Any]:
  """Selects the bound arguments of `Run` that its result depends on: all but `FREE`."""
  return {name: value for name, value in bound.items() if name not in FREE}


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
  with _opened(
    model, evaluation, checkpoint, output_dir, config, "EVAL_OUTPUT_DIR", memory
  ) as opened:
    folder, model, variables, step = opened
    with packed_files.explained(checkpoint):
      found = evaluation.evaluator(model, str(folder)).evaluate(variables, step)
  curves = reports.Curves(folder)
  for task, scalars in found.scalars.items():
    curves.open(f"training_eval/{task}", step - 1)
    curves.write(f"training_eval/{task}", step, scalars)
    print(loss_line(task, scalars, model.workload.headline))
  curves.close()
  for task, values in found.metrics.items():
    print(metrics_line(task, values))
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
  with _opened(model, wanted, checkpoint, output_dir, config, "INFER_OUTPUT_DIR", memory) as opened:
    folder, model, variables, _ = opened
    evaluator = wanted.evaluator(model, None)
  for name, rows in evaluator.predictions(variables):
    path, count = folder / f"{name}-predict.jsonl-00000-of-00001", 0
    whole, explained = files.whole_file(path), packed_files.explained(checkpoint)
    with explained, whole as beside, beside.open("w", encoding="utf-8") as file:
      for inputs, prediction in rows:
        file.write(json.dumps({"inputs": inputs, "prediction": prediction}) + "\n")
        count += 1
    print(f"  {name}: {count:,} predictions")
  return 0


class _Opened(NamedTuple):
  """What is evaluated: the folder for the findings, the model, its variables, the global step."""

  folder: pathlib.Path
  model: Model
  variables: dict[str, Any]
  step: int


@contextlib.contextmanager
def _opened(
  model: Model,
  evaluation: Any,
  checkpoint: str,
  output_dir: str,
  config: str,
  macro: str,
  memory: bool,
) -> Iterator[_Opened]:
  """Makes the folder for the findings, and leaves it as it was where the block fails."""
  folder = folders.of(output_dir, macro)
  folders.refuse_run(folder, macro)
  evaluation.check(model)  # before anything is read or computed
  was = folders.Before.of(folder)
  folders.make(output_dir, macro)
  with folders.as_it_was(folder, was):
    stored = checkpoints.opened(checkpoint, model, newest=True)
    which = (
      stored.path if stored.path == checkpoint else f"{stored.path}, the newest in {checkpoint}"
    )
    if stored.packed is not None:
      if stored.rules is not None and not model.rules.is_dense:
        if not checkpoint_rules.is_of(stored, model.rules):
          checkpoints.refuse_other_rules(stored.rules, model.rules, stored.path)
      held = stored.packed()
      model, variables = packed_files.load(stored.path, held, model, evaluation, memory)
      step, said = stored.step or 0, f"{which}: {packed_files.told(held, variables)}"
    elif memory:
      raise ValueError(
        f"memory=True: {checkpoint!r} is not a packed file, and only its kernels can stay packed. "
        "Pack it by `nm-sparsity pack`, or leave this out."
      )
    else:
      variables, step = checkpoints.load_for_evaluation(stored, model), stored.step or 0
      kept = ", the moving average of its parameters" if stored.average else ""
      said = f"{which}: step {step:,}, sparse step {stored.sparse_step or 0:,}{kept}"
    files.write_atomically(folder / "config.gin", config)
    print(said)
    yield _Opened(folder, model, variables, step)
