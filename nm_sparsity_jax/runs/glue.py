"""GLUE in one table: what `t5x_tasks` reads, what `nm-sparsity glue` scores and submits.

    TASKS[name]   fields, labels, splits, metrics, rate in the mixture, file of a submission
    COLUMNS       the nine tasks of a score, in the paper's order (Table 12)
    config_of     the name of a seqio task -> the config of GLUE that it reads

Nothing heavy is imported here. Sizes are those of TensorFlow Datasets' GLUE 2.0.0; rates are T5's
(https://arxiv.org/abs/1910.10683), the sizes of the training sets, where QQP has three rows more.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
  """One config of GLUE.

  Attributes:
    name: TFDS' name of it; our seqio task is `nm_glue_<name>`.
    fields: the text fields in alphabetical order, which is T5's order.
    labels: the label words by index; empty for a regression (stsb).
    splits: rows by split.
    metrics: keys of T5's metrics, each on a scale of 0 to 100, in the order of Table 12.
    rate: rate in `nm_glue_proportional`; 0 for a member that is only evaluated; None: no member.
    prefix: the first word of the input.
    file: the file of a submission; empty: it has none of its own.
    words: whether that file names labels by word; else by index (or number).
  """

  name: str
  fields: tuple[str, ...]
  labels: tuple[str, ...] = ()
  splits: Mapping[str, int]
  metrics: tuple[str, ...] = ("accuracy",)
  rate: int | None = 0
  prefix: str = ""
  file: str = ""
  words: bool = False

  @property
  def title(self) -> str:
    """Returns what a table calls it, such as 'MNLI-m'."""
    return self.file.removesuffix(".tsv")

  @property
  def regression(self) -> bool:
    """Returns whether the label is a number."""
    return not self.labels


def _three(train: int, validation: int, test: int) -> Mapping[str, int]:
  return {"train": train, "validation": validation, "test": test}


_NLI = ("entailment", "neutral", "contradiction")
_PAIR = ("sentence1", "sentence2")
_PREMISE = ("hypothesis", "premise")

_TASKS = (
  Task(
    name="cola", fields=("sentence",), labels=("unacceptable", "acceptable"),
    splits=_three(8551, 1043, 1063), metrics=("matthews_corrcoef",), rate=8551, file="CoLA.tsv",
  ),
  Task(
    name="sst2", fields=("sentence",), labels=("negative", "positive"),
    splits=_three(67349, 872, 1821), rate=67349, file="SST-2.tsv",
  ),
  Task(
    name="mrpc", fields=_PAIR, labels=("not_equivalent", "equivalent"),
    splits=_three(3668, 408, 1725), metrics=("f1", "accuracy"), rate=3668, file="MRPC.tsv",
  ),
  Task(
    name="qqp", fields=("question1", "question2"), labels=("not_duplicate", "duplicate"),
    # Table 12 prints the pair the other way round than MRPC's.
    splits=_three(363846, 40430, 390965), metrics=("accuracy", "f1"), rate=363849, file="QQP.tsv",
  ),
  Task(
    name="stsb", fields=_PAIR, splits=_three(5749, 1500, 1379),
    metrics=("pearson_corrcoef", "spearman_corrcoef"), rate=5749, file="STS-B.tsv",
  ),
  Task(
    name="mnli", fields=_PREMISE, labels=_NLI, rate=392702,
    splits={
      "train": 392702, "validation_matched": 9815, "validation_mismatched": 9832,
      "test_matched": 9796, "test_mismatched": 9847,
    },
  ),
  Task(
    name="mnli_matched", fields=_PREMISE, labels=_NLI, prefix="mnli",
    splits={"validation": 9815, "test": 9796}, file="MNLI-m.tsv", words=True,
  ),
  Task(
    name="mnli_mismatched", fields=_PREMISE, labels=_NLI, prefix="mnli",
    splits={"validation": 9832, "test": 9847}, file="MNLI-mm.tsv", words=True,
  ),
  Task(
    name="qnli", fields=("question", "sentence"), labels=("entailment", "not_entailment"),
    splits=_three(104743, 5463, 5463), rate=104743, file="QNLI.tsv", words=True,
  ),
  Task(
    name="rte", fields=_PAIR, labels=("entailment", "not_entailment"),
    splits=_three(2490, 277, 3000), rate=2490, file="RTE.tsv", words=True,
  ),
  # The other way round than RTE and QNLI.
  Task(
    name="wnli", fields=_PAIR, labels=("not_entailment", "entailment"),
    splits=_three(635, 71, 146), rate=None, file="WNLI.tsv",
  ),
  Task(
    name="ax", fields=_PREMISE, labels=_NLI, splits={"test": 1104}, metrics=(),
    prefix="mnli", file="AX.tsv", words=True,
  ),
)  # fmt: skip

TASKS: Mapping[str, Task] = {
  task.name: dataclasses.replace(task, prefix=task.prefix or task.name) for task in _TASKS
}
# WNLI is not in the mixture, and the diagnostic set AX has no labels.
COLUMNS = tuple(
  sorted((t for t in _TASKS if t.file and t.metrics and t.rate is not None), key=lambda t: t.title)
)


_SEQIO_NAME = re.compile(r"nm_glue_(?P<ours>\w+)|glue_(?P<t5>\w+?)_v\d+")


def config_of(seqio_task: str) -> str | None:
  """Returns the config of GLUE that a seqio task reads, else None; mini-GLUE is none.

  >>> config_of("nm_glue_rte"), config_of("glue_rte_v002"), config_of("nm_glue_mini_rte")
  ('rte', 'rte', None)
  """
  found = _SEQIO_NAME.fullmatch(seqio_task)
  config = found and (found["ours"] or found["t5"])
  return config if config in TASKS else None
