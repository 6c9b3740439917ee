"""The loop: from a configuration to checkpoints, curves and scores in MODEL_DIR.

batch `sparse_step` of the stream -> [train_step] -> state, sums -> looked at two steps later
    a number that is not finite -> stop, nothing saved since
    a checkpoint is due, or SIGTERM -> all looked at -> saved in the background
    an evaluation is due -> saved -> losses, metrics -> evaluations.json -> which is best

MODEL_DIR/checkpoint_N, config.gin, settings.json (what a resumed run must share),
          run.json (where it starts, what it ran with), evaluations.json, train/,
          training_eval/<task>/, inference_eval/

`evaluate` and `infer` open one checkpoint.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import errno
import importlib.metadata
import json
import os
import pathlib
import platform
import sys
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import optax

from nm_sparsity_jax import metrics, optim
from nm_sparsity_jax.local import checkpoints, data, reports
from nm_sparsity_jax.local.evaluation import Evaluation, Evaluator, Stopped
from nm_sparsity_jax.local.step import Model, Summed, TrainState, patterns_at
from nm_sparsity_jax.runs import files, folders, lock
from nm_sparsity_jax.runs import settings as run_settings
from nm_sparsity_jax.runs.signals import Signals

_AHEAD = 2  # steps that are given to the devices before the result of one is looked at


@dataclasses.dataclass(frozen=True, kw_only=True)
class Periods:
  """When things happen, in steps of this run; all of them happen at its end too.

  Attributes:
    evaluate: a checkpoint is saved, and evaluated.
    checkpoint: a checkpoint is saved; None = where there is an evaluation.
    report: means over these steps are written, and a line where there is no terminal.
    metrics: density, flips and variances are sampled; None = never.
  """

  evaluate: int = 1000
  checkpoint: int | None = None
  report: int = 50
  metrics: int | None = 100

  def __post_init__(self):
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      may_be_none = field.name in ("checkpoint", "metrics")
      if not (isinstance(value, int) and value >= 1 or value is None and may_be_none):
        also = ", or None" if may_be_none else ""
        raise ValueError(f"a period of {value!r} steps ({field.name}): give 1 or more{also}.")

  def saves(self, step: int, total: int) -> bool:
    return self.evaluates(step, total) or bool(self.checkpoint and step % self.checkpoint == 0)

  def evaluates(self, step: int, total: int) -> bool:
    return step == total or step % self.evaluate == 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
  """What a run is.

  Attributes:
    model: network, rules and loss.
    optimizer: of optax, without `nms.sr_ste` and `optax.MultiSteps`: the step does what they do.
    source: training data.
    model_dir: folder of the run.
    sparse_steps: all its steps.
    initial_checkpoint: its parameters, and no more, are started from; None = random ones.
    pretrained_steps: the step of that checkpoint, to be checked; None = any.
    microbatches: parts of a batch, one after the other: less memory, the same gradient.
    random_seed: of parameters and dropout.
    evaluation: None = no evaluation.
    periods: when things happen.
    keep_checkpoints: how many of the newest stay, beside the best; None = all.
    best_metric: by which a checkpoint is best: a metric of the tasks, larger is better, its mean
      over tasks; None = the validation loss, smaller is better. Only checkpoints of the target
      pattern count.
    learning_rate: step -> its value, to be reported.
  """

  model: Model
  optimizer: optax.GradientTransformation
  source: data.Source
  model_dir: str
  sparse_steps: int
  initial_checkpoint: str | None = None
  pretrained_steps: int | None = None
  microbatches: int = 1
  random_seed: int = 0
  evaluation: Evaluation | None = None
  periods: Periods = dataclasses.field(default_factory=Periods)
  keep_checkpoints: int | None = 3
  best_metric: str | None = None
  learning_rate: Callable[[int], Any] | None = None

  def __post_init__(self):
    if not isinstance(self.sparse_steps, int) or self.sparse_steps < 1:
      raise ValueError(f"SPARSE_STEPS={self.sparse_steps!r}: all steps of the run, 1 or more.")
    decodes = self.evaluation is not None and self.evaluation.num_examples != 0
    if self.best_metric is not None and not decodes:
      raise ValueError(
        f"BEST_METRIC={self.best_metric!r}, but nothing is decoded to have a metric of: set "
        "EVALUATOR_NUM_EXAMPLES, or leave BEST_METRIC None for the validation loss."
      )


# Of `Run`, what its result does not depend on.
FREE = (
  "model_dir", "evaluation", "periods", "keep_checkpoints", "best_metric", "learning_rate",
)  # fmt: skip


def train(run: Run, settings: Mapping[str, Any] | None = None, config: str = "") -> int:
  """Trains a run, or goes on with it; the exit code.

  Args:
    run: what.
    settings: what the result depends on, name -> nested value (`runs.settings`); a resumed run must
      have the same.
    config: the text for config.gin.

  Returns:
    0, also after SIGTERM, when a checkpoint has been saved; 130 after an interrupt.
  """
  folder = _make(run.model_dir)
  with lock.hold(folder, lambda _: _taken(folder)), Signals() as stop:
    process = _Process(run, folder, stop)
    run_settings.agree(folder, settings or {})
    files.write_atomically(folder / "config.gin", config)
    return process.go()


class _Process:
  """One process's part of a run."""

  def __init__(self, run: Run, folder: pathlib.Path, stop: Signals):
    self.run, self.folder, self.stop = run, folder, stop
    self.model, self.total, self.periods = run.model, run.sparse_steps, run.periods
    self.model.check_batch(run.source.batch_size, run.microbatches)
    _refuse_in_chain(jax.eval_shape(run.optimizer.init, self.model.shapes))
    self.checkpoints = checkpoints.Checkpoints(folder, run.keep_checkpoints)
    self.evaluations: dict[int, dict[str, Any]] = {}  # by global step
    # (step of this run, sums, samples) that have not been looked at, and sums since the last report
    self.pending: collections.deque = collections.deque()
    self.sums: list[np.ndarray] = []

  def go(self) -> int:
    run, model = self.run, self.model
    data.import_seqio(run.source.module)
    data.check_vocabulary(run.source.name, model.network.config.vocab_size)
    init_key, dropout_key = jax.random.split(jax.random.PRNGKey(run.random_seed))
    state, self.offset = self._start(init_key)
    done = int(state.sparse_step)
    first, last = self.offset + done, self.offset + self.total
    self.evaluator = None
    if run.evaluation is not None:
      asked = lambda: self.stop.name is not None
      self.evaluator = Evaluator(run.evaluation, model, str(self.folder), asked)
    _note_run(self.folder, self.offset, first)
    self.writers = {"train": reports.writer(self.folder / "train", first)}
    self.progress = reports.Progress(first, last)
    try:
      self.progress.say(f"{self.folder}: from step {first:,} to {last:,}")
      state, done = self._steps(state, done, dropout_key)
      self.checkpoints.close()
      self._close_writers()
    except BaseException as e:
      with contextlib.suppress(Exception):
        self._close_writers()
      if _is_no_room(e):
        raise ValueError(self.checkpoints.no_room(f"curves or scores in {self.folder}", e)) from e
      raise
    finally:
      self.progress.close()
    at = self.offset + done
    if done == self.total and (self.evaluator is None or at in self.evaluations):
      return 0
    print(f"{self.stop.name}: saved checkpoint_{at}; the same command goes on from there",
          file=sys.stderr)  # fmt: skip
    return 130 if self.stop.name == "SIGINT" else 0

  def _close_writers(self) -> None:
    for writer in self.writers.values():
      writer.close()

  # --- start --------------------------------------------------------------------------------------

  def _start(self, key) -> tuple[TrainState, int]:
    """The state to go on with, and the global step of the run's step 0."""
    run, model, found = self.run, self.model, self.checkpoints.steps()
    if found:
      return self._resume(found[-1])
    step = 0
    if run.initial_checkpoint is None:
      params = model.initial_params(key)
    else:
      shardings = model.shardings(model.shapes)
      params, step = checkpoints.load_params(run.initial_checkpoint, model.shapes, shardings)
      if run.pretrained_steps not in (None, step):
        raise ValueError(
          f"PRETRAINED_STEPS={run.pretrained_steps}, but {run.initial_checkpoint} is of step "
          f"{step}. Set PRETRAINED_STEPS={step}, or leave it None."
        )
    return model.begin(params, run.optimizer, step), step

  def _resume(self, step: int) -> tuple[TrainState, int]:
    model = self.model
    like = model.state_shapes(self.run.optimizer)
    tree, text = self.checkpoints.restore(step, like, model)
    checkpoints.refuse_other_rules(text, model.given_rules, f"{self.folder}/checkpoint_{step}")
    state = checkpoints.from_tree(tree, like)
    kept = folders.evaluations(self.folder)
    self.evaluations = {at: e for at, e in kept.items() if at <= step}
    if len(self.evaluations) < len(kept):  # of a checkpoint that was never complete
      self._note_evaluations()
    self._choose_best()
    return state, step - int(state.sparse_step)

  # --- loop ---------------------------------------------------------------------------------------

  def _steps(self, state: TrainState, done: int, key) -> tuple[TrainState, int]:
    """All steps that are left, or those until a signal; the last state is saved."""
    run, total, periods = self.run, self.total, self.periods
    step = self.model.train_step(run.optimizer, key, state, run.microbatches, periods.metrics)
    if done and periods.evaluates(done, total):
      self._evaluate(state, done)  # a process that was killed may not have
    batches = run.source.batches(start=done)
    while done < total and self.stop.name is None:
      state, sums, sampled = step(state, self.model.put(next(batches)))
      done += 1
      self.pending.append((done, sums, sampled))
      if len(self.pending) > _AHEAD:
        self._look()
      if periods.saves(done, total):
        self._save(state, done)
      if periods.evaluates(done, total):
        with self.progress.paused():
          self._evaluate(state, done)
    self._save(state, done)
    return state, done

  def _look(self) -> None:
    """At the oldest result that has not been looked at: finite? then into the means."""
    done, sums, sampled = self.pending.popleft()
    values = np.asarray(sums)
    if not np.isfinite(values).all():
      self._refuse(done, "loss" if not np.isfinite(values[0]) else "gradient or update")
    self.sums.append(values)
    self.progress.count(values[3])
    written: dict[str, float] = {}
    if self.periods.metrics and done % self.periods.metrics == 0:
      written |= {name: float(x) for name, x in jax.device_get(sampled).items()}
    if done % self.periods.report == 0 or done == self.total:
      written |= self._means(done)
      kinds = patterns_at(self.model.rules, self.model.shapes, done)
      self.progress.show(self.offset + done, written["loss"], kinds)
    if written:
      self.writers["train"].write_scalars(self.offset + done, written)

  def _refuse(self, done: int, what: str) -> None:
    with contextlib.suppress(ValueError):
      self.checkpoints.wait()
    raise ValueError(
      f"the {what} of step {self.offset + done} is not finite. The last good step is "
      f"{self.offset + done - 1}, the newest checkpoint {self.checkpoints.newest()}; nothing was "
      "saved since. Lower LEARNING_RATE or lengthen WARMUP_STEPS, with another MODEL_DIR."
    )

  def _means(self, done: int) -> dict[str, float]:
    """Over the steps since the last ones."""
    sums: Any = np.sum(self.sums, 0, dtype=np.float64).tolist()
    scalars = Summed(*sums[:4]).scalars()
    scalars["grad_norm"], scalars["update_norm"] = (x / len(self.sums) for x in sums[4:])
    if self.run.learning_rate is not None:
      scalars["learning_rate"] = float(self.run.learning_rate(done - 1))
    self.sums = []
    return scalars

  def _save(self, state: TrainState, done: int) -> None:
    """After a look at every step that led to it: what is not finite is never saved."""
    while self.pending:
      self._look()
    for writer in self.writers.values():
      writer.flush()
    tree = checkpoints.to_tree(state, self.model.given_rules)
    self.checkpoints.save(self.offset + done, tree)

  # --- evaluation ---------------------------------------------------------------------------------

  def _evaluate(self, state: TrainState, done: int) -> None:
    """Evaluates a saved state, unless that has been done."""
    step = self.offset + done
    if self.evaluator is None or step in self.evaluations:
      return
    effective = self.model.effective(state)
    try:
      losses = self.evaluator.losses(effective)
      found = self.evaluator.metrics(effective, step)
    except Stopped:  # it is saved, and evaluated when the run goes on
      return
    for task, sums in losses.items():
      room = f"training_eval/{task}"
      if room not in self.writers:
        self.writers[room] = reports.writer(self.folder / room, step - 1)
      self.writers[room].write_scalars(step, sums.scalars())
      self.writers[room].flush()
      self.progress.say(loss_line(task, sums))
    for task, values in found.items():
      self.progress.say(metrics_line(task, values))
    rules = self.model.rules
    density = lambda s: metrics.density(s.params, rules, s.sparse_step, s.masks)[:2]
    densities = self.model.jit(density)(state)
    self.evaluations[step] = {
      "step": step,
      "at_target": bool(densities[0] <= densities[1] * (1 + 1e-6)),
      "loss": {task: sums.scalars()["loss"] for task, sums in losses.items()},
      "metrics": found,
    }
    self._note_evaluations()
    self._choose_best()

  def _note_evaluations(self) -> None:
    text = json.dumps(list(self.evaluations.values()), indent=1)
    files.write_atomically(self.folder / "evaluations.json", text + "\n")

  def _choose_best(self) -> None:
    self.checkpoints.best = best_step(self.evaluations.values(), self.run.best_metric)


def best_step(evaluations, metric: str | None) -> int | None:
  """The step of the best evaluation at the target pattern, the earliest of equals; None if none.

  One that is no number (a correlation of equal predictions is none) is never the best.
  """
  scores: dict[int, float] = {}
  for e in evaluations:
    if metric is None:
      values = [-loss for loss in e["loss"].values()]
    else:
      values = [found[metric] for found in e["metrics"].values() if metric in found]
      if not values:
        have = ", ".join(sorted({name for found in e["metrics"].values() for name in found}))
        raise ValueError(f"BEST_METRIC={metric!r} is none of the tasks' metrics: {have}.")
    if values and e["at_target"] and np.isfinite(mean := float(np.mean(values))):
      scores[e["step"]] = mean
  return max(scores, key=lambda step: (scores[step], -step)) if scores else None


def folder_of(model_dir: str) -> pathlib.Path:
  """The folder of a run, whether it is there or not."""
  if "://" in model_dir:
    raise ValueError(f"MODEL_DIR={model_dir!r}: the local runner writes to a local disk.")
  return pathlib.Path(model_dir).expanduser().absolute()


def _make(model_dir: str) -> pathlib.Path:
  """The folder of the run, made and found writable."""
  folder = folder_of(model_dir)
  try:
    folder.mkdir(parents=True, exist_ok=True)
    files.probe(folder)
  except OSError as e:
    raise ValueError(f"MODEL_DIR={model_dir!r} cannot be written to: {e.strerror or e}.") from e
  return folder


def _taken(folder: pathlib.Path) -> str:
  """Says that another process writes to a folder."""
  return (
    f"{folder}: another process trains there. Wait until it ends, or end it (SIGTERM saves "
    "first); the same command goes on from there."
  )


def _note_run(folder: pathlib.Path, start: int, step: int) -> None:
  """run.json: the global step before the first of the run, and what each process ran with."""
  path = folder / "run.json"
  before = files.read_json(path, {"processes": []})["processes"]
  kept, now = [p for p in before if p["from"] < step], _environment()
  if not kept or kept[-1]["environment"] != now:
    kept.append({"from": step, "environment": now})
  text = json.dumps({"start": start, "processes": kept}, indent=1)
  files.write_atomically(path, text + "\n")


_PACKAGES = (
  "nm-sparsity-jax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "seqio", "tensorflow",
  "numpy",
)  # fmt: skip


def _environment() -> dict[str, str]:
  """What the bits of a run depend on, beside its settings."""
  kinds = collections.Counter(d.device_kind for d in jax.local_devices())
  cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
  found = {
    "devices": ", ".join(f"{n} x {kind}" for kind, n in kinds.items()),
    "cores": str(cores),
    "platform": platform.platform(),
    "Python": platform.python_version(),
  }
  for name in _PACKAGES:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
      found[name] = importlib.metadata.version(name)
  return found | {k: os.environ[k] for k in ("XLA_FLAGS", "PJRT_NPROC") if os.environ.get(k)}


def _is_no_room(error: BaseException) -> bool:
  """Whether a disk, a quota or a limit of file sizes is full, as Python or TensorFlow say it."""
  import tensorflow as tf

  if isinstance(error, OSError):
    return error.errno in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)
  return isinstance(error, tf.errors.ResourceExhaustedError | tf.errors.OutOfRangeError)


def settings_of(bound: Mapping[str, Any]) -> dict[str, Any]:
  """Selects the bound arguments of `Run` that its result depends on: all but `FREE`."""
  return {name: value for name, value in bound.items() if name not in FREE}


def _refuse_in_chain(opt_state) -> None:
  """Refuses what the step does itself."""
  ours = lambda x: isinstance(x, optim.SrSteState | optax.MultiStepsState)
  for leaf in jax.tree.leaves(opt_state, is_leaf=ours):
    if isinstance(leaf, optim.SrSteState):
      raise ValueError("the optimizer holds nms.sr_ste, but the runner adds SR-STE's term itself.")
    if isinstance(leaf, optax.MultiStepsState):
      raise ValueError("the optimizer is optax.MultiSteps: set MICROBATCHES instead.")


def evaluate(
  model: Model,
  evaluation: Evaluation,
  checkpoint: str,
  output_dir: str,
  config: str = "",
) -> int:
  """Evaluates one checkpoint, of this runner or of T5X, with the weights of its step.

  Args:
    model: network and rules, as in training.
    evaluation: what is evaluated, and how.
    checkpoint: its folder, checkpoint_N.
    output_dir: gets what training writes for an evaluation.
    config: the text for config.gin.
  """
  folder, state = _open(model, evaluation, checkpoint, output_dir, config)
  step, effective = int(state.step), model.effective(state)
  evaluator = Evaluator(evaluation, model, str(folder))
  for task, sums in evaluator.losses(effective).items():
    with contextlib.closing(reports.writer(folder / f"training_eval/{task}", step - 1)) as writer:
      writer.write_scalars(step, sums.scalars())
    print(loss_line(task, sums))
  for task, values in evaluator.metrics(effective, step).items():
    print(metrics_line(task, values))
  return 0


def infer(
  model: Model,
  evaluation: Evaluation,
  checkpoint: str,
  output_dir: str,
  config: str = "",
) -> int:
  """Writes what one checkpoint predicts: TASK-predict.jsonl-00000-of-00001, as t5x.infer does.

  A line is {"inputs": {"idx": 3, "inputs_pretokenized": ...}, "prediction": "entailment"}. A file
  has its name when it is complete.

  Args:
    model: network and rules, as in training.
    evaluation: of which tasks and split, by which search; its lengths, which are needed.
    checkpoint: its folder, checkpoint_N.
    output_dir: gets the files.
    config: the text for config.gin.
  """
  if not evaluation.lengths:
    raise ValueError(
      f"TASK_FEATURE_LENGTHS={evaluation.lengths!r}: predictions are as long as it says, for the "
      "targets of a test set tell nothing. Give {'inputs': ..., 'targets': ...}."
    )
  folder, state = _open(model, evaluation, checkpoint, output_dir, config)
  effective = model.effective(state)
  evaluator = Evaluator(dataclasses.replace(evaluation, num_examples=0), model, None)
  for task in evaluator.tasks:
    path, count = folder / f"{task.name}-predict.jsonl-00000-of-00001", 0
    with files.whole_file(path) as beside, beside.open("w", encoding="utf-8") as file:
      for example, text in evaluator.predictions(effective, task):
        file.write(_prediction_line(example, text))
        count += 1
    print(f"  {task.name}: {count:,} predictions")
  return 0


def _prediction_line(example: Mapping[str, Any], text: str) -> str:
  shown = {k: v for k, v in example.items() if k == "idx" or k.endswith("_pretokenized")}
  inputs = {k: v.decode() if isinstance(v, bytes) else v.tolist() for k, v in shown.items()}
  return json.dumps({"inputs": inputs, "prediction": text}) + "\n"


def _open(model, evaluation, checkpoint, output_dir, config) -> tuple[pathlib.Path, TrainState]:
  """The folder for what is found, and the state of a checkpoint."""
  folder = _make(output_dir)
  data.import_seqio(evaluation.module)
  state = checkpoints.load_for_evaluation(checkpoint, model)
  files.write_atomically(folder / "config.gin", config)
  print(f"{checkpoint}: step {int(state.step):,}, sparse step {int(state.sparse_step):,}")
  return folder, state


def loss_line(task: str, sums: Summed) -> str:
  """For people."""
  values = sums.scalars()
  return f"  {task}: loss {values['loss']:.4f}, accuracy {values['accuracy']:.4f}"


def metrics_line(task: str, values: Mapping[str, float]) -> str:
  """For people."""
  return f"  {task}: " + ", ".join(f"{name} {value:.4g}" for name, value in values.items())
