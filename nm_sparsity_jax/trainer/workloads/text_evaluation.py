"""How good a T5 is, and what it says: loss, the task's metrics on decoded text, the text.

    effective params -> validation batches -> loss, token accuracy -> training_eval/<task>
                     -> greedy or beam search -> seqio.Evaluator  -> inference_eval/
                                              -> [predictions]    -> local.train.infer

Every task is gone through in order, once, and rows that only fill the last batch do not count.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from nm_sparsity_jax.trainer.workloads import base, decoding, predictions, text

DECODERS = ("beam", "greedy")
_FEW = 8  # examples of each task that tell the names of its metrics


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluation:
  """What is evaluated, and how.

  Attributes:
    name: of the task or mixture; each of its tasks is evaluated.
    batch_size: rows at once.
    module: imported first, to register the name.
    split: of the tasks; a task without it is left out.
    lengths: feature -> tokens, of teacher forcing and of predictions; decoding for metrics takes
      what the examples need.
    num_decodes: beams; 1 is T5X's search with one beam.
    decoder: 'beam', or 'greedy', which is quicker.
    loss_batches: batches of teacher forcing for each task; None = all, 0 = no teacher forcing.
    num_examples: examples to decode of each task; None = all, 0 = no decoding.
    write_results: predictions to write for each task and step; None = all.
    use_cached: read SeqIO's offline cache.
  """

  name: str
  batch_size: int
  lengths: Mapping[str, int] | None = None
  module: str | None = None
  split: str = "validation"
  num_decodes: int = 1
  decoder: str = "beam"
  loss_batches: int | None = None
  num_examples: int | None = None
  write_results: int | None = None
  use_cached: bool = False

  def __post_init__(self):
    if self.decoder not in DECODERS:
      raise ValueError(f"DECODER={self.decoder!r}: choose one of {', '.join(DECODERS)}.")
    if self.num_decodes < 1 or (self.decoder == "greedy" and self.num_decodes > 1):
      raise ValueError(
        f"NUM_DECODES={self.num_decodes} with DECODER={self.decoder!r}: a beam search takes 1 or "
        "more, greedy search is 1."
      )

  @property
  def has_metrics(self) -> bool:
    """Returns whether there are metrics of decoded text."""
    return self.num_examples != 0

  def check(self, devices: base.Devices) -> None:
    """Refuses what no evaluator can be made of, before a checkpoint is read.

    Args:
      devices: the runner's model, of a `t5.T5`.

    Raises:
      ValueError: a task, its split, its vocabulary or the batch does not fit.
    """
    self.found(devices)

  def found(self, devices: base.Devices) -> tuple[Any, list[Any]]:
    """Returns the task or mixture, and those of its tasks that have the split.

    Args:
      devices: as in `check`.

    Raises:
      ValueError: as in `check`.
    """
    devices.check_batch(self.batch_size)
    seqio = text.import_seqio(self.module)
    known = text.mixture_or_task(self.name, self.module)
    network: Any = devices.workload
    text.check_vocabulary(self.name, network.network.config.vocab_size)
    tasks = [t for t in seqio.get_subtasks(known) if self.split in t.splits]
    if not tasks:
      raise ValueError(f"no task of {self.name} has a split {self.split!r}.")
    return known, tasks

  def evaluator(
    self, devices: base.Devices, folder: str | None, stop: Callable[[], bool] = lambda: False
  ) -> Evaluator:
    """Returns what evaluates a T5 as this says; see `Evaluator`."""
    return Evaluator(self, devices, folder, stop)

  def for_predictions(self, workload: Any) -> Evaluation:
    """Returns the same evaluation without metrics, for predictions alone.

    Args:
      workload: not asked: any T5 decodes.

    Raises:
      ValueError: the lengths are not given.
    """
    del workload
    if not self.lengths:
      raise ValueError(
        f"TASK_FEATURE_LENGTHS={self.lengths!r}: predictions need a length, and a test set has "
        "no targets to tell it. Give {'inputs': ..., 'targets': ...}."
      )
    return dataclasses.replace(self, num_examples=0)


class Evaluator(base.Evaluator):
  """Evaluates one T5 again and again; the data are read once.

  Args:
    evaluation: what, and how.
    devices: the runner's model, of a `t5.T5`.
    folder: gets inference_eval/; None = nothing is written.
    stop: asked between batches; where it is true, `base.Stopped` is raised.
  """

  def __init__(
    self,
    evaluation: Evaluation,
    devices: base.Devices,
    folder: str | None,
    stop: Callable[[], bool] = lambda: False,
  ):
    self._cfg = evaluation
    known, self.tasks = evaluation.found(devices)
    self._t5: Any = devices.workload
    has_losses = evaluation.loss_batches != 0 and evaluation.lengths is not None
    splits = {t.name: functools.partial(self._loss_batches, t) for t in self.tasks}
    super().__init__(devices, splits if has_losses else {}, stop)
    self._likelihood = devices.jit(self._t5.score)
    self._seqio = None
    self._decoders: dict[tuple[int, int], Callable] = {}
    self._eos = known.output_features["targets"].vocabulary.eos_id or 1
    if evaluation.num_examples != 0 and any(t.metric_objs for t in self.tasks):
      seqio = text.import_seqio(evaluation.module)
      loggers: tuple[Any, ...] = ()
      if folder is not None:
        loggers = (seqio.TensorBoardLogger, _json_logger(seqio, evaluation.write_results))
      self._seqio = self._judge(
        evaluation.num_examples,
        logger_cls=loggers,
        log_dir=None if folder is None else os.path.join(folder, "inference_eval"),
      )

  def _judge(self, num_examples: int | None, **where: Any):
    """Returns what postprocesses decoded text of the first examples and calls the metrics."""
    import seqio

    return seqio.Evaluator(
      mixture_or_task_name=self._cfg.name,
      feature_converter=seqio.EncDecFeatureConverter(pack=False),
      eval_split=self._cfg.split,
      use_cached=self._cfg.use_cached,
      num_examples=num_examples,
      async_compute_metrics=False,
      **where,
    )

  def evaluate(self, variables: Mapping[str, Any], step: int) -> base.Found:
    """Returns scalars under teacher forcing, and the tasks' metrics."""
    scalars = self.scalars(variables)
    return base.Found(scalars, self.metrics(variables["params"], step))

  def _loss_batches(self, task) -> Iterator[base.Batch]:
    import seqio

    dataset = seqio.get_dataset(
      task,
      task_feature_lengths=dict(self._cfg.lengths or {}),
      feature_converter=seqio.EncDecFeatureConverter(pack=False),
      dataset_split=self._cfg.split,
      use_cached=self._cfg.use_cached,
      seed=0,
      verbose=False,
    )
    batches = _batched(dataset.as_numpy_iterator(), self._cfg.batch_size)
    for rows in itertools.islice(batches, self._cfg.loss_batches):
      yield _filled(rows, self._cfg.batch_size)[0]

  # --- decoding -----------------------------------------------------------------------------------

  def metrics(self, effective: Any, step: int) -> dict[str, dict[str, float]]:
    """Returns task -> its metrics on decoded validation examples; written under the step too."""
    if self._seqio is None:
      return {}
    decode = lambda dataset: self._decode(effective, dataset)
    return _metrics(self._seqio, step, decode, lambda dataset: self._score(effective, dataset))

  def metric_names(self, variables: Mapping[str, Any]) -> Collection[str] | None:
    """Returns what the metrics of a few examples are called if a model says the targets.

    A metric function tells its names by what it returns. None where one of them fails.
    """
    del variables
    if self._seqio is None:
      return frozenset()
    few = min(_FEW, self._cfg.num_examples or _FEW)
    try:
      with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # so few examples may lack a class
        found = _metrics(self._judge(few), 0, _targets, _scores)
    except Exception:
      return None
    return {name for metrics in found.values() for name in metrics}

  def predictions(
    self, variables: Mapping[str, Any]
  ) -> Iterator[tuple[str, Iterator[predictions.Row]]]:
    """Yields each task and (fields, decoded text) of its examples, in the order of its split."""
    for task in self.tasks:
      yield task.name, self._said(variables["params"], task)

  def _said(self, effective: Any, task) -> Iterator[predictions.Row]:
    import seqio

    lengths = dict(self._cfg.lengths or {})
    examples = task.get_dataset(
      lengths, self._cfg.split, shuffle=False, seed=0, use_cached=self._cfg.use_cached, num_epochs=1
    )
    features = seqio.EncDecFeatureConverter(pack=False)(examples, task_feature_lengths=lengths)
    decoded = self._decoded(effective, features.enumerate())
    decode = task.output_features["targets"].vocabulary.decode
    for example, (_, ids, _) in zip(examples.as_numpy_iterator(), decoded, strict=True):
      yield _shown(example), decode(ids)

  def _decode(self, effective, dataset):
    """Returns ((index, ids) of every example, {'scores': one of each})."""
    rows = list(self._decoded(effective, dataset))
    return [row[:2] for row in rows], {"scores": [score for _, _, score in rows]}

  def _decoded(self, effective, dataset) -> Iterator[tuple[int, list[int], float]]:
    """Yields (index, ids, score) of every example."""
    for indices, batch, real in self._rows(dataset):
      run = self._decoder(batch["decoder_input_tokens"].shape[1])
      found = run(effective, self.devices.put(batch)["encoder_input_tokens"])
      yield from zip(indices, *(np.asarray(x)[:real].tolist() for x in found), strict=True)

  def _decoder(self, length: int) -> Callable:
    cfg, network = self._cfg, self._t5.network
    if (length, cfg.num_decodes) not in self._decoders:

      def run(params, inputs):
        if cfg.decoder == "greedy":
          return decoding.greedy(network, params, inputs, length, self._eos)
        return decoding.beam_search(network, params, inputs, length, cfg.num_decodes, self._eos)

      self._decoders[length, cfg.num_decodes] = self.devices.jit(run)
    return self._decoders[length, cfg.num_decodes]

  def _score(self, effective, dataset):
    """Returns (index, log likelihood of the targets) of every example."""
    run = self._likelihood
    return [
      (index, float(score))
      for indices, batch, real in self._rows(dataset)
      for index, score in zip(
        indices, np.asarray(run(effective, self.devices.put(batch)))[:real], strict=True
      )
    ]

  def _rows(self, dataset) -> Iterator[tuple[list[int], base.Batch, int]]:
    """Yields (indices, a whole batch, how many of its rows are examples)."""
    for rows in _batched(dataset.as_numpy_iterator(), self._cfg.batch_size):
      self.check()
      indices, examples = zip(*rows, strict=True)
      yield [int(i) for i in indices], *_filled(examples, self._cfg.batch_size)


def _shown(example: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the fields of an example that a file of predictions shows."""
  shown = {k: v for k, v in example.items() if k == "idx" or k.endswith("_pretokenized")}
  return {k: v.decode() if isinstance(v, bytes) else v.tolist() for k, v in shown.items()}


def _batched(rows, size: int) -> Iterator[list[Any]]:
  rows = iter(rows)
  while batch := list(itertools.islice(rows, size)):
    yield batch


def _filled(examples, size: int) -> tuple[base.Batch, int]:
  """Returns a batch of `size` rows, missing ones all zero, and how many examples there are."""
  missing = size - len(examples)
  stack = lambda *x: np.pad(np.stack(x), [(0, missing)] + [(0, 0)] * np.ndim(x[0]))
  return jax.tree.map(stack, *examples), len(examples)


def _metrics(judge: Any, step: int, decode: Callable, score: Callable) -> dict[str, dict]:
  """Returns task -> its metrics that are numbers.

  Args:
    judge: seqio's evaluator.
    step: under which they are logged.
    decode: enumerated dataset -> what `Evaluator._decode` returns.
    score: enumerated dataset -> what `Evaluator._score` returns.
  """
  found, _ = judge.evaluate(
    compute_metrics=True,
    step=step,
    predict_fn=lambda dataset: decode(dataset)[0],
    predict_with_aux_fn=decode,
    score_fn=score,
  )
  numbers = lambda m: {k: float(v) for k, v in m.items() if np.ndim(v) == 0}
  return {task: numbers(m) for task, m in found.result().items()}


def _targets(dataset: Any) -> tuple[list[tuple[int, list[int]]], dict[str, list[float]]]:
  """Returns what `Evaluator._decode` would of a model that says the targets."""
  rows = [(int(i), x["decoder_target_tokens"].tolist()) for i, x in dataset.as_numpy_iterator()]
  return rows, {"scores": [0.0] * len(rows)}


def _scores(dataset: Any) -> list[tuple[int, float]]:
  """Returns what `Evaluator._score` would, all zero."""
  return [(index, 0.0) for index, _ in _targets(dataset)[0]]


def _json_logger(seqio, write_results: int | None):
  return lambda output_dir: seqio.JSONLogger(output_dir, write_n_results=write_results)
