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
from collections.abc import Callable, Mapping

import seqio
import tensorflow as tf

from nm_sparsity_jax.runs import glue
from t5x_tasks import metrics, mini, registry, sources
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


def postprocessor(config: str) -> Callable:
  """Returns decoded text -> index of the label, or a number; -1 for anything else."""
  task = glue.TASKS[config]
  if task.regression:
    return metrics.to_number
  return functools.partial(metrics.to_class, labels=task.labels)


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
  for config, task in glue.TASKS.items():
    if folder:
      read = functools.partial(sources.read_glue, folder, config)
      look = functools.partial(sources.glue_file, folder, config)
      source: seqio.DataSource = sources.Rows(read, task.splits, look)
    else:
      source = seqio.TfdsDataSource(f"glue/{config}:{VERSION}", splits=tuple(task.splits))
    _add(
      f"nm_glue_{config}",
      config,
      source,
      vocabulary or seqio.SentencePieceVocabulary(VOCABULARY_FILE),
    )
  registry.add_mixture("nm_glue_proportional", _rates("nm_glue_"))
  registry.add_mixture("nm_glue_mnli_and_dev", _mnli("nm_glue_"))
  return registry.known(name)


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
  rows = mini.sizes(rows)
  for config, task in glue.TASKS.items():
    read = functools.partial(_make, config, rows=rows, seed=seed)
    source = sources.Rows(read, task.splits)
    _add(f"nm_glue_mini_{config}", config, source, vocabulary or mini_words())
  rates = _rates("nm_glue_mini_")
  # Proportional to the rows, as in T5's mixture: all training sets have the same number.
  registry.add_mixture(
    "nm_glue_mini_proportional",
    {task: rows["train"] if rate else 0 for task, rate in rates.items()},
  )
  registry.add_mixture("nm_glue_mini_mnli_and_dev", _mnli("nm_glue_mini_"))
  return registry.known(name)


def _make(config: str, split: str, rows: Mapping[str, int], seed: int) -> sources.Columns:
  return sources.columns(mini.make(config, split, rows, seed), config)


def _rates(prefix: str) -> dict[str, int]:
  return {f"{prefix}{t.name}": t.rate for t in glue.TASKS.values() if t.rate is not None}


def _mnli(prefix: str) -> dict[str, int]:
  """Returns the rates of MNLI: its training set, and 0 for both halves of its validation set."""
  return {f"{prefix}mnli": 1, f"{prefix}mnli_matched": 0, f"{prefix}mnli_mismatched": 0}


def _add(name: str, config: str, source: seqio.DataSource, vocabulary: seqio.Vocabulary) -> None:
  registry.add_task(
    name,
    source,
    vocabulary,
    functools.partial(text_format, config=config),
    postprocessor(config),
    [metrics.BY_NAME[metric] for metric in glue.TASKS[config].metrics],
  )
