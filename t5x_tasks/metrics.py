"""T5's metrics, each on a scale of 0 to 100 and under its own key.

    decoded text -> [to_class | to_number] -> targets, predictions -> {"accuracy": 87.5}

Texts are compared as they are, neither stripped nor lower-cased. A text that is no label is class
-1: accuracy counts it wrong, F1 takes it for the opposite of the target, Matthews' coefficient for
a class of its own. Unlabelled examples are class -1 as well, so their metrics mean nothing.

Reference: Raffel et al., JMLR 2020, arXiv:1910.10683.
"""

# pyright: reportMissingImports=false, reportMissingModuleSource=false

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np


def to_class(text: str, labels: Sequence[str], **unused) -> int:
  """Returns the index of the label that `text` is; else -1.

  >>> [to_class(text, ("no", "yes")) for text in ("yes", "Yes", "yes ", "<unk>")]
  [1, -1, -1, -1]
  """
  return labels.index(text) if text in labels else -1


def to_number(text: str, **unused) -> float:
  """Returns what Python's `float` makes of `text`, not clipped; -1.0 if it cannot.

  >>> [to_number(text) for text in ("3.8", "7", "very", "")]
  [3.8, 7.0, -1.0, -1.0]
  """
  try:
    return float(text)
  except ValueError:
    return -1.0


def accuracy(targets, predictions) -> Mapping[str, float]:
  """Returns the percentage of equal pairs."""
  import sklearn.metrics

  return {"accuracy": 100 * sklearn.metrics.accuracy_score(targets, predictions)}


def f1(targets, predictions) -> Mapping[str, float]:
  """Returns F1 of class 1; a prediction other than 0 and 1 becomes the opposite of its target."""
  import sklearn.metrics

  targets, predictions = np.asarray(targets), np.asarray(predictions)
  valid = (predictions == 0) | (predictions == 1)
  return {"f1": 100 * sklearn.metrics.f1_score(targets, np.where(valid, predictions, 1 - targets))}


def matthews_corrcoef(targets, predictions) -> Mapping[str, float]:
  """Returns Matthews' correlation; an invalid prediction is a third class."""
  import sklearn.metrics

  return {"matthews_corrcoef": 100 * sklearn.metrics.matthews_corrcoef(targets, predictions)}


def pearson_corrcoef(targets, predictions) -> Mapping[str, float]:
  """Returns Pearson's correlation; NaN where all predictions are equal."""
  import scipy.stats

  found: Any = scipy.stats.pearsonr(targets, predictions)
  return {"pearson_corrcoef": 100 * float(found.statistic)}


def spearman_corrcoef(targets, predictions) -> Mapping[str, float]:
  """Returns Spearman's rank correlation; NaN where all predictions are equal."""
  import scipy.stats

  found: Any = scipy.stats.spearmanr(targets, predictions)
  return {"spearman_corrcoef": 100 * float(found.statistic)}


def bleu(targets, predictions) -> Mapping[str, float]:
  """Returns corpus BLEU: international tokenization, exponential smoothing, no effective order."""
  import sacrebleu

  score = sacrebleu.corpus_bleu(
    predictions, [targets], smooth_method="exp", smooth_value=0.0, force=False, lowercase=False,
    tokenize="intl", use_effective_order=False,
  )  # fmt: skip
  return {"bleu": score.score}


BY_NAME: Mapping[str, Callable] = {
  f.__name__: f for f in (accuracy, f1, matthews_corrcoef, pearson_corrcoef, spearman_corrcoef)
}
