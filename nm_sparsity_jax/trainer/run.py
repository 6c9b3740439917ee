"""What a run is, and what it refuses before its first step."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax

from nm_sparsity_jax.core import errors, installed
from nm_sparsity_jax.core.trees import flatten
from nm_sparsity_jax.runs import files, folders
from nm_sparsity_jax.trainer import workloads, writers
from nm_sparsity_jax.trainer.step import Model
from nm_sparsity_jax.training import rules_text, transform

SETTINGS = "settings.json"  # what a resumed run must share with its beginning


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
  """What a run is. Periods count steps of this run, and None is never.

  All but samples happen at the last step too.

  Attributes:
    model: workload, rules and devices.
    optimizer: of optax, without `nms.sparse`, `nms.sr_ste` and `optax.MultiSteps`: the step does
      what they do.
    model_dir: folder of the run.
    sparse_steps: all its steps.
    initial_checkpoint: its parameters, and no more, are started from; None = random ones.
    pretrained_steps: the step of that checkpoint, to be checked; None = any.
    microbatches: parts of a batch, one after the other: less memory, the same gradient.
    random_seed: of parameters and dropout.
    data_seed: of the workload's batches.
    evaluation: the class that evaluates, `evaluation.Splits` or T5's `text_evaluation.Evaluation`,
      to be made for the model and the folder; None = nothing is evaluated.
    eval_period: a checkpoint is saved, and evaluated [EVAL_PERIOD].
    checkpoint_period: a checkpoint is saved; None = where there is an evaluation
      [CHECKPOINT_PERIOD].
    stats_period: means over these steps are written, and a line is printed [STATS_PERIOD].
    metrics_every: density, flips and variances are sampled; None = never [METRICS_EVERY].
    keep_checkpoints: how many of the newest stay, with the best; None = all.
    best_metric: by which a checkpoint is best: a metric of the tasks, its mean over tasks, better
      in the direction that the workload says; None = the validation loss, smaller is better. Only
      checkpoints of the target pattern count.
    learning_rate: step -> its value, to be reported; it also scales a decoupled term of
      SR-STE.
    tracker: gets the curves too, as (room, step, name -> value); None = nobody.
  """

  model: Model
  optimizer: optax.GradientTransformation
  model_dir: str
  sparse_steps: int
  initial_checkpoint: str | None = None
  pretrained_steps: int | None = None
  microbatches: int = 1
  random_seed: int = 0
  data_seed: int = 0
  evaluation: Callable[..., Any] | None = None
  eval_period: int | None = 1000
  checkpoint_period: int | None = None
  stats_period: int | None = 50
  metrics_every: int | None = 100
  keep_checkpoints: int | None = 3
  best_metric: str | None = None
  learning_rate: Callable[[Any], Any] | None = None  # which traces: an optax.Schedule
  tracker: writers.Tracker | None = None

  def __post_init__(self):
    periods = "eval_period", "checkpoint_period", "stats_period", "metrics_every"
    for name in ("sparse_steps", *periods, "keep_checkpoints"):
      steps = getattr(self, name)
      # None of a period is "never", and of `keep_checkpoints` "all".
      is_optional = name != "sparse_steps"
      if not (isinstance(steps, int) and steps >= 1 or steps is None and is_optional):
        raise ValueError(f"{name.upper()}={steps!r}: give a whole number, 1 or more.")
    errors.check_seed("RANDOM_SEED", self.random_seed)
    errors.check_seed("DATA_SEED", self.data_seed)

  def check(self) -> None:
    """Raises ValueError where settings do not fit each other; reads no data."""
    self.model.check_batch(self.model.workload.batch_size, self.microbatches)
    rules_text.describe(self.model.rules)  # every checkpoint keeps this text
    if self.learning_rate is None and any(r.decoupled for r in self.model.rules.places.values()):
      raise ValueError("sr_ste(decoupled=True) decays by a learning rate: give it to Run, too.")
    # By shapes: the state of an optimizer may be twice the model.
    opt_state = jax.eval_shape(self.optimizer.init, self.model.shapes)
    ours = transform.SparseState, transform.SrSteState
    if found := transform.states(opt_state, *ours, *transform.SKIPPING):
      raise ValueError(
        f"the optimizer holds a {type(found[0]).__name__}, but the runner wraps it by nms.sparse "
        "itself, which adds SR-STE's term and counts every update: give a bare optimizer of optax, "
        "and MICROBATCHES in place of optax.MultiSteps."
      )

  def check_data(self) -> None:
    """Raises ValueError where the data are not there or do not fit the model."""
    if self.evaluation is not None:
      self.evaluation(self.model)  # it checks itself when it is made


def refuse_changed(folder: pathlib.Path, settings: Mapping[str, Any]) -> None:
  """Refuses to continue a run with other settings, or a run of another program.

  A run without a checkpoint may begin anew, with any settings.

  Args:
    folder: the run's; it may be missing.
    settings: name -> nested value, which JSON can hold. `{"": "Model", "batch_size": 8}` stands for
      Model(batch_size=8).

  Raises:
    ValueError: names what differs, such as "random_seed was 0, and is 3".
  """
  if not folders.steps(folder):  # nothing would be continued
    return
  before = files.read_json(folder / SETTINGS, None)
  if before is None:
    raise ValueError(
      f"{folder} holds checkpoints that another program wrote. Take an empty MODEL_DIR and name "
      "one of them as INITIAL_CHECKPOINT_PATH."
    )
  leaves = lambda tree: flatten(tree, lambda x: x is None or x in ({}, []))  # jax has no such leaf
  old, new = ({k.rstrip("/"): repr(x) for k, x in leaves(tree)} for tree in (before, settings))
  said = [
    f"{name} was {old.get(name, 'not set')}, and is {new.get(name, 'not set')}"
    for name in sorted(old | new)
    if old.get(name) != new.get(name)
  ]
  if said:
    raise ValueError(
      f"the run in {folder} was started with other settings: {'; '.join(said)}. Keep the old ones, "
      "or take another MODEL_DIR."
    )


def note_run(run: Run, folder: pathlib.Path, start: int, step: int) -> None:
  """Writes run.json: where a run starts, its workload, and what each process ran with.

  Args:
    run: the run.
    folder: of the run.
    start: the global step before its first one.
    step: the global step that this process goes on from.
  """
  path = folder / "run.json"
  before = files.read_json(path, {"processes": []})["processes"]
  environment = installed.environment()  # what the bits depend on, apart from the settings
  # A process from the same step on did nothing that was saved.
  kept = [p for p in before if p["from"] < step]
  if not kept or kept[-1]["environment"] != environment:
    kept.append({"from": step, "environment": environment})
  found = {"start": start, "workload": workloads.describe(run.model.workload), "processes": kept}
  files.write_json(path, found)
