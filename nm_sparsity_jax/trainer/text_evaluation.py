"""How good a T5 is, and what it says: loss, the task's metrics on decoded text, the text.

    effective params -> validation batches -> loss, token accuracy -> training_eval/<task>
                     -> greedy or beam search -> seqio.Evaluator  -> inference_eval/
                                              -> [predictions]    -> train.infer

Every task is gone through in order, once, and rows that only fill the last batch do not count.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from nm_sparsity_jax.trainer import data, evaluation
from nm_sparsity_jax.trainer.workloads import decoding
from nm_sparsity_jax.trainer.workloads.base import Batch

DECODERS = ("beam", "greedy")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluation:
  """What is evaluated of a T5, and how.

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

  def check(self, model: Any) -> None:
    """Refuses what no evaluator can be made of, before a checkpoint is read.

    Args:
      model: the runner's, of a `t5.T5`.

    Raises:
      ValueError: a task, its split, its vocabulary or the batch does not fit.
    """
    model.check_batch(self.batch_size)
    data.import_seqio(self.module)
    data.mixture_or_task(self.name, self.module)
    data.check_vocabulary(self.name, model.workload.network.config.vocab_size)
    if not self.tasks():
      raise ValueError(f"no task of {self.name} has a split {self.split!r}.")

  def tasks(self) -> list[Any]:
    """Returns the tasks that have the split."""
    import seqio

    known = seqio.get_mixture_or_task(self.name)
    return [task for task in seqio.get_subtasks(known) if self.split in task.splits]

  def evaluator(
    self, model: Any, folder: str | None, stop: Callable[[], bool] = lambda: False
  ) -> Evaluator:
    """Returns what evaluates a T5 as this says; see `Evaluator`."""
    self.check(model)
    return Evaluator(self, model, folder, stop)

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


class Evaluator(evaluation.Evaluator):
  """Evaluates one T5 again and again; the data are read once.

  Args:
    cfg: what, and how.
    model: the runner's, of a `t5.T5`.
    folder: gets inference_eval/; None = nothing is written.
    stop: asked between batches; where it is true, `evaluation.Stopped` is raised.
  """

  def __init__(
    self,
    cfg: Evaluation,
    model: Any,
    folder: str | None,
    stop: Callable[[], bool] = lambda: False,
  ):
    self._cfg, self._t5, self.tasks = cfg, model.workload, cfg.tasks()
    has_losses = cfg.loss_batches != 0 and cfg.lengths is not None
    splits = {t.name: functools.partial(self._loss_batches, t) for t in self.tasks}
    super().__init__(model, splits if has_losses else {}, stop)
    self._likelihood = model.jit(self._t5.score)
    self._decoder = functools.cache(self._compiled)  # one program for each length
    self._eos = self.tasks[0].output_features["targets"].vocabulary.eos_id or 1
    self._seqio = None
    if cfg.num_examples != 0 and any(t.metric_objs for t in self.tasks):
      self._seqio = self._judge(folder)

  def _judge(self, folder: str | None) -> Any:
    """Returns what postprocesses decoded text and calls the metrics of the tasks."""
    import seqio

    cfg = self._cfg
    predictions: Any = functools.partial(seqio.JSONLogger, write_n_results=cfg.write_results)
    return seqio.Evaluator(
      mixture_or_task_name=cfg.name,
      feature_converter=seqio.EncDecFeatureConverter(pack=False),
      eval_split=cfg.split,
      use_cached=cfg.use_cached,
      num_examples=cfg.num_examples,
      async_compute_metrics=False,
      logger_cls=() if folder is None else (seqio.TensorBoardLogger, predictions),
      log_dir=None if folder is None else os.path.join(folder, "inference_eval"),
    )

  def evaluate(self, variables: Mapping[str, Any], step: int) -> evaluation.Found:
    """Returns scalars under teacher forcing, and the tasks' metrics."""
    scalars = self.scalars(variables)
    return evaluation.Found(scalars, self.metrics(variables["params"], step))

  def _loss_batches(self, task) -> Iterator[Batch]:
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
      yield _filled(rows, self._cfg.batch_size)

  # --- decoding -----------------------------------------------------------------------------------

  def metrics(self, params: Any, step: int) -> dict[str, dict[str, float]]:
    """Returns task -> its metrics on decoded validation examples; written under the step too."""
    if self._seqio is None:
      return {}

    def decode(dataset):
      rows = list(self._decoded(params, dataset))
      return [row[:2] for row in rows], {"scores": [score for _, _, score in rows]}

    found, _ = self._seqio.evaluate(
      compute_metrics=True,
      step=step,
      predict_fn=lambda dataset: decode(dataset)[0],
      predict_with_aux_fn=decode,
      score_fn=functools.partial(self._score, params),
    )
    numbers = lambda m: {k: float(v) for k, v in m.items() if np.ndim(v) == 0}
    return {task: numbers(m) for task, m in found.result().items()}

  def predictions(
    self, variables: Mapping[str, Any]
  ) -> Iterator[tuple[str, Iterator[evaluation.Row]]]:
    """Yields each task and (fields, decoded text) of its examples, in the order of its split."""
    for task in self.tasks:
      yield task.name, self._predicted(variables["params"], task)

  def _predicted(self, params: Any, task) -> Iterator[evaluation.Row]:
    import seqio

    lengths = dict(self._cfg.lengths or {})
    examples = task.get_dataset(
      lengths, self._cfg.split, shuffle=False, seed=0, use_cached=self._cfg.use_cached, num_epochs=1
    )
    features = seqio.EncDecFeatureConverter(pack=False)(examples, task_feature_lengths=lengths)
    decoded = self._decoded(params, features.enumerate())
    decode = task.output_features["targets"].vocabulary.decode
    for example, (_, ids, _) in zip(examples.as_numpy_iterator(), decoded, strict=True):
      yield _shown(example), decode(ids)

  def _decoded(self, params, dataset) -> Iterator[tuple[int, list[int], float]]:
    """Yields (index, ids, score) of every example."""
    for indices, batch in self._rows(dataset):
      length = batch["decoder_input_tokens"].shape[1]
      found = self._decoder(length)(params, self.model.put(batch)["encoder_input_tokens"])
      yield from zip(indices, *(np.asarray(x).tolist() for x in found), strict=False)

  def _compiled(self, length: int) -> Callable:
    cfg, network = self._cfg, self._t5.network

    def run(params, inputs):
      if cfg.decoder == "greedy":
        return decoding.greedy(network, params, inputs, length, self._eos)
      return decoding.beam_search(network, params, inputs, length, cfg.num_decodes, self._eos)

    return self.model.jit(run)

  def _score(self, params, dataset) -> list[tuple[int, float]]:
    """Returns (index, log likelihood of the targets) of every example."""
    scores = lambda batch: np.asarray(self._likelihood(params, self.model.put(batch))).tolist()
    rows = self._rows(dataset)
    return [pair for indices, batch in rows for pair in zip(indices, scores(batch), strict=False)]

  def _rows(self, dataset) -> Iterator[tuple[list[int], Batch]]:
    """Yields indices of examples, and their batch; its rows may be more, since it is filled up."""
    for rows in _batched(dataset.as_numpy_iterator(), self._cfg.batch_size):
      self.check()
      indices, examples = zip(*rows, strict=True)
      yield [int(i) for i in indices], _filled(examples, self._cfg.batch_size)


def _shown(example: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the fields of an example that a file of predictions shows."""
  shown = {k: v for k, v in example.items() if k == "idx" or k.endswith("_pretokenized")}
  return {k: v.decode() if isinstance(v, bytes) else v.tolist() for k, v in shown.items()}


def _batched(rows, size: int) -> Iterator[list[Any]]:
  rows = iter(rows)
  while batch := list(itertools.islice(rows, size)):
    yield batch


def _filled(examples, size: int) -> Batch:
  """Returns a batch of `size` rows; missing ones are all zero."""
  missing = size - len(examples)
  stack = lambda *x: np.pad(np.stack(x), [(0, missing)] + [(0, 0)] * np.ndim(x[0]))
  return jax.tree.map(stack, *examples)
