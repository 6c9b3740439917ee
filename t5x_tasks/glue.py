"""GLUE for seqio: rows -> T5's text format -> ids; decoded text -> T5's metrics.

    {sentence1, sentence2, label, idx}
      -> "mrpc sentence1: ... sentence2: ...", "equivalent", idx     [text_format]
      -> ids, the end appended                                       seqio
      -> label or -1 -> f1, accuracy                                 [metrics]

`nm_sparsity_jax.runs.glue.TASKS` says what each config is. `idx` passes through, and so do the
texts, as `inputs_pretokenized` and `targets_pretokenized`.

Reference: Raffel et al., JMLR 2020, arXiv:1910.10683, appendix D.
"""

# pyright: reportMissingImports=false, reportMissingModuleSource=false

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import seqio
import tensorflow as tf

from nm_sparsity_jax.runs import glue
from t5x_tasks import metrics, mini, sources
from t5x_tasks.vocabulary import mini_words

VERSION = "2.0.0"  # of TFDS' GLUE
VOCABULARY_FILE = "gs://t5-data/vocabs/cc_all.32000.100extra/sentencepiece.model"


def text_format(data: tf.data.Dataset, config: str) -> tf.data.Dataset:
  """Returns rows of GLUE as T5 reads them: a prefix, then each field's name and text.

  Fields are in alphabetical order, so MNLI's hypothesis comes first. The target of an unlabelled
  example (-1) is `<unk>`. STS-B's is its score, rounded to the nearest 0.2 (half to even), `-1.0`
  where there is none.
  """
  task = glue.TASKS[config]

  def one(row: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
    words = [task.prefix]
    for field in task.fields:
      words += [f"{field}:", row[field]]
    if task.regression:
      targets = tf.strings.as_string(tf.round(row["label"] * 5) / 5, precision=1)
    else:
      targets = tf.gather(["<unk>", *task.labels], row["label"] + 1)
    inputs = tf.strings.join(words, separator=" ")
    return {"inputs": inputs, "targets": targets, "idx": row["idx"]}

  return data.map(one, num_parallel_calls=tf.data.AUTOTUNE)


def add_task(
  name: str,
  source: Any,
  vocabulary: seqio.Vocabulary | None,
  text_format: Callable,
  postprocess: Callable | None,
  metric_fns: Sequence[Callable],
) -> None:
  """Registers a text-to-text task: tokenized, cached from there on if asked for, then trimmed."""
  vocabulary = vocabulary or seqio.SentencePieceVocabulary(VOCABULARY_FILE)
  features = ("inputs", "targets")
  seqio.TaskRegistry.remove(name)
  seqio.TaskRegistry.add(
    name,
    source=source,
    preprocessors=[
      text_format,
      seqio.preprocessors.tokenize,
      seqio.CacheDatasetPlaceholder(),
      seqio.preprocessors.append_eos_after_trim,
    ],
    output_features={x: seqio.Feature(vocabulary, add_eos=True) for x in features},
    postprocess_fn=postprocess,
    metric_fns=metric_fns,
  )


def _register(
  prefix: str,
  source_of: Callable[[glue.Task], seqio.DataSource],
  vocabulary: seqio.Vocabulary | None,
  rate_of: Callable[[glue.Task], int | None],
) -> None:
  """Registers a task for each config, and T5's two mixtures of them."""
  for config, task in glue.TASKS.items():
    to_class = functools.partial(metrics.to_class, labels=task.labels)
    add_task(
      f"{prefix}{config}",
      source_of(task),
      vocabulary,
      functools.partial(text_format, config=config),
      metrics.to_number if task.regression else to_class,
      [metrics.BY_NAME[metric] for metric in task.metrics],
    )
  rates = {t.name: rate_of(t) for t in glue.TASKS.values() if t.rate is not None}
  mixtures = {
    "proportional": rates,
    "mnli_and_dev": {"mnli": 1, "mnli_matched": 0, "mnli_mismatched": 0},
  }
  for name, members in mixtures.items():
    seqio.MixtureRegistry.remove(f"{prefix}{name}")
    rated = [(f"{prefix}{config}", float(rate)) for config, rate in members.items()]
    seqio.MixtureRegistry.add(f"{prefix}{name}", rated)


def register_glue(
  vocabulary: seqio.Vocabulary | None = None,
  data_dir: str | None = None,
  name: str = "nm_glue_proportional",
) -> str:
  """Registers `nm_glue_*` and its mixtures, in place of those that there are.

  Args:
    vocabulary: of inputs and targets; None: T5's, from its public bucket, read when first used.
    data_dir: GLUE's TSV folder; None: the environment's GLUE_DATA_DIR, without it TFDS.
    name: what to return, so that a gin macro for the name of the task can call this function.
  """
  folder = data_dir or os.environ.get("GLUE_DATA_DIR")

  def source(task: glue.Task) -> seqio.DataSource:
    if not folder:
      return seqio.TfdsDataSource(f"glue/{task.name}:{VERSION}", splits=tuple(task.splits))
    read = functools.partial(sources.read_glue, folder, task.name)
    look = functools.partial(sources.glue_file, folder, task.name)
    return sources.Rows(read, task.splits, look)

  _register("nm_glue_", source, vocabulary, lambda task: task.rate)
  return name


def register_mini(
  vocabulary: seqio.Vocabulary | None = None,
  rows: Mapping[str, int] | None = None,
  seed: int = 0,
  name: str = "nm_glue_mini_proportional",
) -> str:
  """Registers `nm_glue_mini_*` and its mixtures, in place of those that there are.

  Args:
    vocabulary: of inputs and targets; None: mini-GLUE's own words.
    rows: rows of each split, such as {'train': 1000}; splits left out, and None: as in `mini.ROWS`.
    seed: another one gives other rows.
    name: what to return, so that a gin macro for the name of the task can call this function.
  """
  size = mini.sizes(rows)

  def source(task: glue.Task) -> seqio.DataSource:
    make = lambda split: sources.columns(mini.make(task.name, split, size, seed), task.name)
    return sources.Rows(make, task.splits)

  # Proportional to the rows, as in T5's mixture: all training sets have the same number.
  rate = lambda task: size["train"] if task.rate else 0
  _register("nm_glue_mini_", source, vocabulary or mini_words(), rate)
  return name
