"""How good a T5 is, and what it says: loss, the task's metrics on decoded text, the text.

    effective params -> validation batches -> loss, token accuracy -> training_eval/<task>
                     -> greedy or beam search -> seqio.Evaluator  -> inference_eval/
                                              -> [predictions]    -> train.infer

Rows that only fill the last batch do not count.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from nm_sparsity_jax.core.errors import choose
from nm_sparsity_jax.deploy import inference_tree
from nm_sparsity_jax.trainer import data, evaluation
from nm_sparsity_jax.trainer.workloads import decoding
from nm_sparsity_jax.trainer.workloads.base import Batch, filled


@dataclasses.dataclass(eq=False, kw_only=True)
class Evaluation(evaluation.Splits):
  """Evaluates a T5 on the task of its data, or on each task of its mixture.

  Attributes:
    model: the runner's, of a `t5.T5`.
    folder: gets inference_eval/; None = nothing is written.
    batches: of teacher forcing for each task; None = all, 0 = no teacher forcing.
    split: of the tasks; a task without it is left out.
    batch_size: rows at once.
    name: of another task or mixture than that of the data; None = that one.
    num_decodes: beams; 1 is T5X's search with one beam.
    decoder: 'beam', or 'greedy', which is quicker.
    num_examples: examples to decode of each task; None = all, 0 = no decoding.
  """

  batch_size: int
  name: str | None = None
  split: str = "validation"  # type: ignore[assignment]
  num_decodes: int = 1
  decoder: str = "beam"
  num_examples: int | None = None

  def __post_init__(self):
    searches: dict[str, Callable] = {
      "beam": functools.partial(decoding.beam_search, beams=self.num_decodes),
      "greedy": decoding.greedy,
    }
    search = choose(searches, "DECODER", self.decoder)
    self.model.check_batch(self.batch_size)
    self._source = self.model.workload.data
    self._name: str = self.name or self._source.name
    seqio = data.import_seqio(self._source.module)
    for name in {self._source.name, self._name}:  # what is trained on, and what is evaluated
      rows = self.model.workload.network_config.vocab_size
      data.check_task(name, self._source.lengths, rows)
    known = seqio.get_subtasks(seqio.get_mixture_or_task(self._name))
    self._tasks = [task for task in known if self.split in task.splits]
    if not self._tasks:
      raise ValueError(f"EVAL_SPLIT={self.split!r}: no task of {self._name} has that split.")
    network = self.model.workload.network
    eos = self._tasks[0].output_features["targets"].vocabulary.eos_id or 1
    search = functools.partial(search, network, eos_id=eos)
    # The search loops to a static length, so there is a program for each.
    self._search = self.model.jit(search, static_argnums=2)
    self._dataset = functools.cache(self._read)  # its graph is half a second's work

  def splits(self) -> Mapping[str, Iterator[Batch]]:
    """Returns task -> batches for teacher forcing."""
    if self.batches == 0 or self._source.lengths is None:
      return {}
    return {task.name: self._loss_batches(task) for task in self._tasks}

  def rows(self) -> Callable[[str], int]:
    """Returns path -> rows that the kernel sees at once."""
    workload = self.model.workload
    inputs = workload.lengths["inputs"]
    return inference_tree.rows_of(
      workload.network_config, self.batch_size, inputs, self.num_decodes
    )

  @functools.cached_property
  def _seqio(self) -> Any:
    """Returns seqio's evaluator; it reads the whole split when it is made."""
    import seqio

    folder = self.folder
    return seqio.Evaluator(
      mixture_or_task_name=self._name,
      feature_converter=seqio.EncDecFeatureConverter(pack=False),
      eval_split=self.split,
      use_cached=self._source.use_cached,
      num_examples=self.num_examples,
      async_compute_metrics=False,  # a checkpoint is compared by them before the next step
      logger_cls=() if folder is None else (seqio.TensorBoardLogger, seqio.JSONLogger),
      log_dir=None if folder is None else os.path.join(folder, "inference_eval"),
    )

  def evaluate(self, variables: Mapping[str, Any], step: int) -> evaluation.Found:
    """Returns scalars under teacher forcing, and the tasks' metrics, written under the step too."""
    scalars = self.scalars(variables)
    if self.num_examples == 0 or not any(t.metric_objs for t in self._tasks):
      return evaluation.Found(scalars, {})

    def decode(dataset):
      rows = list(self._decoded(variables["params"], dataset))
      return [row[:2] for row in rows], {"scores": [score for _, _, score in rows]}

    found, _ = self._seqio.evaluate(
      compute_metrics=True,
      step=step,
      predict_fn=lambda dataset: decode(dataset)[0],
      predict_with_aux_fn=decode,  # for metrics that also take the scores of a prediction
    )
    # A metric may also be a histogram or a text, which no curve takes.
    numbers = lambda m: {k: float(v) for k, v in m.items() if np.ndim(v) == 0}
    return evaluation.Found(scalars, {task: numbers(m) for task, m in found.result().items()})

  def predictions(
    self, variables: Mapping[str, Any]
  ) -> Iterator[tuple[str, Iterator[evaluation.Row]]]:
    """Yields each task and (fields, decoded text) of its examples, in the order of its split."""
    for task in self._tasks:
      yield task.name, self._predicted(variables["params"], task)

  def _read(self, task) -> tuple[Any, Any]:
    """Returns the examples of a task, and the features that the network takes."""
    import seqio

    lengths, cached = dict(self._source.lengths or {}), self._source.use_cached
    # The seed is that of what chance the preprocessors use, so that evaluations agree.
    examples = task.get_dataset(
      lengths, self.split, shuffle=False, seed=0, use_cached=cached, num_epochs=1
    )
    convert = seqio.EncDecFeatureConverter(pack=False)
    return examples, convert(examples, task_feature_lengths=lengths)

  def _loss_batches(self, task) -> Iterator[Batch]:
    for batch in self._dataset(task)[1].batch(self.batch_size).as_numpy_iterator():
      yield filled(batch, self.batch_size)

  def _predicted(self, params: Any, task) -> Iterator[evaluation.Row]:
    examples, features = self._dataset(task)
    decoded = self._decoded(params, features.enumerate())
    decode = task.output_features["targets"].vocabulary.decode
    # The features lack the texts that a file of predictions shows.
    for example, (_, ids, _) in zip(examples.as_numpy_iterator(), decoded, strict=True):
      shown = {k: x for k, x in example.items() if k == "idx" or k.endswith("_pretokenized")}
      plain = lambda x: x.decode() if isinstance(x, bytes) else x.tolist()
      yield {k: plain(x) for k, x in shown.items()}, decode(ids)

  def _decoded(self, params, dataset) -> Iterator[tuple[int, list[int], float]]:
    """Yields (index, ids, score) of every example."""
    for indices, examples in dataset.batch(self.batch_size).as_numpy_iterator():
      batch = filled(examples, self.batch_size)
      # seqio derives lengths from the examples where it decodes for metrics.
      length = batch["decoder_input_tokens"].shape[1]
      found = self._search(params, self.model.put(batch)["encoder_input_tokens"], length)
      # The batch is filled up to its size, so it has more rows than there are indices.
      yield from zip(indices.tolist(), *(np.asarray(x).tolist() for x in found), strict=False)
