"""WMT English to German for seqio: sentence pairs -> T5's text format -> ids; BLEU.

{en, de} -> "translate English to German: ...", the German sentence -> ids -> BLEU

nm_wmt17_ende   train: WMT17's; validation: newstest2014, WMT14's test set (the paper's C.1.4)
nm_wmt14_ende   train: WMT14's; validation: newstest2013; test: newstest2014
"""

# pyright: reportMissingImports=false, reportMissingModuleSource=false

from __future__ import annotations

import os
from collections.abc import Mapping

import seqio
import tensorflow as tf

from t5x_tasks import metrics, sources
from t5x_tasks.glue import add_task

LANGUAGES = ("en", "de")

_WMT14, _WMT17 = "wmt14_translate/de-en:1.0.0", "wmt17_translate/de-en:1.0.0"
# Task -> split -> (TFDS' dataset, its split, the stem of text files).
SPLITS: Mapping[str, Mapping[str, tuple[str, str, str]]] = {
  "nm_wmt17_ende": {
    "train": (_WMT17, "train", "train-wmt17"),
    "validation": (_WMT14, "test", "newstest2014"),
  },
  "nm_wmt14_ende": {
    "train": (_WMT14, "train", "train-wmt14"),
    "validation": (_WMT14, "validation", "newstest2013"),
    "test": (_WMT14, "test", "newstest2014"),
  },
}


def text_format(data: tf.data.Dataset) -> tf.data.Dataset:
  """Returns sentence pairs as T5 reads them."""

  def one(pair: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
    inputs = tf.strings.join(["translate English to German: ", pair["en"]])
    return {"inputs": inputs, "targets": pair["de"]}

  return data.map(one, num_parallel_calls=tf.data.AUTOTUNE)


def register_wmt(
  vocabulary: seqio.Vocabulary | None = None,
  data_dir: str | None = None,
  name: str = "nm_wmt17_ende",
) -> str:
  """Registers the translation tasks, in place of those that there are.

  Args:
    vocabulary: of inputs and targets; None: T5's, from its public bucket, read when first used.
    data_dir: a folder with STEM.en and STEM.de for each stem in `SPLITS` that is used; None: the
      environment's WMT_DATA_DIR, without it TFDS.
    name: what to return, so that a gin macro for the name of the task can call this function.
  """
  folder = data_dir or os.environ.get("WMT_DATA_DIR")
  for task, splits in SPLITS.items():
    if folder:
      stems = {split: stem for split, (_, _, stem) in splits.items()}
      source: seqio.DataSource = sources.Parallel(folder, stems, LANGUAGES)
    else:
      there = {
        split: seqio.TfdsSplit(dataset=dataset, split=its)
        for split, (dataset, its, _) in splits.items()
      }
      source = seqio.TfdsDataSource(splits=there)
    add_task(task, source, vocabulary, text_format, None, [metrics.bleu])
  return name
