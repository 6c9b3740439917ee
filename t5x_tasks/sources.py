"""Where rows come from: files on this machine, or memory. TFDS is seqio's own source.

    GLUE's TSV folder -> [read_glue] -> columns -> [Rows]  -> tf.data
    two text files                            -> [Parallel] -> tf.data

Files are looked at when a dataset is asked for, which in T5X is before training starts. What is
wrong with them is a ValueError that names the file, the row and the fix.

The rules for rows are those of TensorFlow Datasets (TFDS), so that both routes give the same rows
with the same `idx`: the zero-based number of the row in its file, header and blank lines not
counted, `idx` columns not read. A quote is a plain character. A row with too few columns, or with
an empty class label, is left out, and its number with it.

A shard is taken of the rows as they lie, and then shuffled. Were it taken of shuffled rows, the
processes of a run without a seed would each have an order of their own, and so have rows in common.
"""

# pyright: reportMissingImports=false, reportMissingModuleSource=false

from __future__ import annotations

import csv
import functools
import math
import os
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import seqio
import tensorflow as tf
from absl import logging

from nm_sparsity_jax.runs import glue

Columns = Mapping[str, np.ndarray]


class Rows(seqio.DataSource):
  """Rows held in memory, read a split at a time and shuffled as a whole.

  Args:
    read: split -> columns of equal length.
    splits: the splits that there are.
    look: split -> raises where `read` would find no file; reads nothing itself.
  """

  def __init__(
    self,
    read: Callable[[str], Columns],
    splits: Iterable[str],
    look: Callable[[str], Any] = lambda split: None,
  ):
    super().__init__(splits=tuple(splits))
    self._columns = functools.cache(read)
    self.look = look

  @property
  def supports_arbitrary_sharding(self) -> bool:
    return True

  def get_dataset(self, split, shuffle=True, seed=None, shard_info=None, **unused):
    """Returns a shard of the rows of a split, in the order of `idx` unless they are shuffled."""
    rows = np.arange(self.num_input_examples(split))
    if shard_info is not None:
      rows = rows[shard_info.index :: shard_info.num_shards]
    if shuffle:
      rows = np.random.default_rng(None if seed is None else int(seed)).permutation(rows)
    columns: Any = {name: column[rows] for name, column in self._columns(split).items()}
    return tf.data.Dataset.from_tensor_slices(columns)

  def num_input_examples(self, split: str) -> int:
    return len(next(iter(self._columns(split).values())))

  def list_shards(self, split: str) -> Sequence[str]:
    return [split]


def columns(rows: Sequence[Mapping[str, Any]], config: str) -> Columns:
  """Returns rows of GLUE as columns, with the dtypes of TFDS."""
  task = glue.TASKS[config]
  label = np.float32 if task.regression else np.int64
  dtypes = {**dict.fromkeys(task.fields, object), "label": label, "idx": np.int32}
  return {name: np.array([row[name] for row in rows], dtypes[name]) for name in dtypes}


# --- GLUE's TSV folder ----------------------------------------------------------------------------

_FOLDERS = {
  "cola": "CoLA", "sst2": "SST-2", "mrpc": "MRPC", "qqp": "QQP", "stsb": "STS-B", "mnli": "MNLI",
  "mnli_matched": "MNLI", "mnli_mismatched": "MNLI", "qnli": "QNLI", "rte": "RTE", "wnli": "WNLI",
  "ax": "diagnostic",
}  # fmt: skip
_LABEL_COLUMNS = {
  "mrpc": "Quality", "qqp": "is_duplicate", "stsb": "score", "mnli": "gold_label",
  "mnli_matched": "gold_label", "mnli_mismatched": "gold_label",
}  # fmt: skip
_NLI_COLUMNS = {"premise": "sentence1", "hypothesis": "sentence2"}
_TEXT_COLUMNS = {
  "mrpc": {"sentence1": "#1 String", "sentence2": "#2 String"},
  "mnli": _NLI_COLUMNS,
  "mnli_matched": _NLI_COLUMNS,
  "mnli_mismatched": _NLI_COLUMNS,
  "ax": _NLI_COLUMNS,
}
_MRPC_TRAIN, _MRPC_TEST = "msr_paraphrase_train.txt", "msr_paraphrase_test.txt"
_MRPC_DEV_IDS = "dev_ids.tsv"


def glue_file(folder: str | os.PathLike, config: str, split: str) -> pathlib.Path:
  """Returns the file that holds a split.

  MRPC's own three files come before train.tsv, dev.tsv and test.tsv, since TFDS numbers its rows by
  them.
  """
  home = pathlib.Path(folder) / _FOLDERS[config]
  name = split.replace("validation", "dev")
  if config.startswith("mnli_"):
    name += config.removeprefix("mnli")
  if config == "ax":
    name = "diagnostic"
  path = home / f"{name}.tsv"
  if config == "mrpc" and (home / _MRPC_TRAIN).is_file():
    path = home / (_MRPC_TEST if split == "test" else _MRPC_TRAIN)
  if not path.is_file():
    raise ValueError(
      f"no file {path}, for the split {split} of GLUE's {config}. GLUE_DATA_DIR (or data_dir) must "
      f"be the folder that holds {', '.join(dict.fromkeys(_FOLDERS.values()))}, as GLUE's download "
      "script makes it; without it the data come from TFDS."
    )
  return path


def read_glue(folder: str | os.PathLike, config: str, split: str) -> Columns:
  """Reads one split of GLUE from its official TSV files."""
  path, task = glue_file(folder, config, split), glue.TASKS[config]
  try:
    rows = _rows(path, task, split)
  except (UnicodeDecodeError, csv.Error) as e:
    raise ValueError(f"{path} is not tab-separated text in UTF-8: {e}. Download it again.") from e
  if len(rows) != (official := task.splits[split]):
    logging.warning(
      "%s: has %d rows for the split %s, and GLUE's %s has %d. If that is not meant, download it "
      "again: scores of another set do not compare.", path, len(rows), split, config, official,
    )  # fmt: skip
  return columns(rows, config)


def _rows(path: pathlib.Path, task: glue.Task, split: str) -> list[dict[str, Any]]:
  config, is_test = task.name, split.startswith("test")
  names = {field: _TEXT_COLUMNS.get(config, {}).get(field, field) for field in task.fields}
  label = _LABEL_COLUMNS.get(config, "label")
  # CoLA's files have no header. Its column with the author's star is not read.
  header = ("source", "label", "star", "sentence") if config == "cola" and not is_test else None
  is_here = _mrpc_part(path, split) if path.name == _MRPC_TRAIN else lambda row: True

  rows, left_out = [], []
  with path.open(encoding="utf-8-sig") as file:
    lines = csv.DictReader(file, header, delimiter="\t", quoting=csv.QUOTE_NONE)
    there = lines.fieldnames or ()
    needed = [*names.values(), *([] if is_test else [label])]
    if missing := [name for name in needed if name not in there]:
      raise ValueError(
        f"{path}, line 1: no column {missing}, which {config} needs; the header is {there}. Is it "
        "GLUE's own file, with tabs between columns?"
      )
    # GLUE hides the labels of a test set; MRPC's own file and the diagnostic set differ in that.
    has_label = label in there and not (config == "mrpc" and is_test)
    needed = [*names.values(), *([label] if has_label else [])]
    for idx, row in enumerate(lines):
      if None in map(row.get, needed) or (has_label and task.labels and not row[label]):
        left_out.append(lines.line_num)
      elif is_here(row):
        index = _label(row[label], task, path, lines.line_num) if has_label else -1
        rows.append({**{f: row[name] for f, name in names.items()}, "label": index, "idx": idx})
  if left_out:
    logging.warning(
      "%s: left out %d rows without all columns, as TFDS does; lines %s%s",
      path, len(left_out), left_out[:5], " ..." if len(left_out) > 5 else "",
    )  # fmt: skip
  return rows


def _label(text: str, task: glue.Task, path: pathlib.Path, line: int) -> int | float:
  """Returns a score, or the index of a label that stands there by word or by index."""
  top = 5 if task.regression else len(task.labels) - 1
  try:
    if task.regression:
      label = float(text)
    else:
      label = task.labels.index(text) if text in task.labels else int(text)
  except ValueError:
    label = math.nan
  if not 0 <= label <= top:
    words = ", ".join([*task.labels, f"0 to {top}"])
    raise ValueError(
      f"{path}, line {line}: the label {text[:80]!r} of {task.name} is not one of {words}. Fix or "
      "delete the row."
    )
  return label


def _mrpc_part(path: pathlib.Path, split: str) -> Callable[[Mapping[str, str]], bool]:
  """Returns whether a row of MRPC's own training file belongs to this split."""
  ids = path.with_name(_MRPC_DEV_IDS)
  if not ids.is_file():
    raise ValueError(
      f"no file {ids}, which says what rows of {path.name} are for validation. GLUE's download "
      f"script fetches it. Or remove {path.name}: train.tsv and dev.tsv are read then."
    )
  held_out = {tuple(line.split()) for line in ids.read_text("utf-8-sig").splitlines()}
  return lambda row: ((row["#1 ID"], row["#2 ID"]) in held_out) == (split == "validation")


# --- two text files -------------------------------------------------------------------------------

_SHUFFLED = 100_000  # lines; seqio's own buffer of 1000 would leave a corpus nearly in its order


class Parallel(seqio.DataSource):
  """Two plain text files, line by line translations of each other: STEM.en and STEM.de.

  Streamed, since a training set has millions of lines. A pair with an empty side is left out, as
  TFDS does. Training from files in the order of their corpora shuffles badly: shuffle them once.

  Args:
    folder: where the files are.
    stems: split -> STEM.
    languages: the endings, which name the features.
  """

  def __init__(self, folder: str | os.PathLike, stems: Mapping[str, str], languages: Sequence[str]):
    super().__init__(splits=tuple(stems))
    self._folder, self._stems, self._languages = pathlib.Path(folder), dict(stems), languages
    self._lines = functools.cache(self._count)

  @property
  def supports_arbitrary_sharding(self) -> bool:
    return True

  def look(self, split: str) -> list[pathlib.Path]:
    """Returns the files of a split; refuses a missing one."""
    stem = self._stems[split]
    paths = [self._folder / f"{stem}.{language}" for language in self._languages]
    for path in paths:
      if not path.is_file():
        raise ValueError(
          f"no file {path}, for the split {split}. WMT_DATA_DIR (or data_dir) must be a folder "
          f"with {' and '.join(p.name for p in paths)}; without it the data come from TFDS."
        )
    return paths

  def _count(self, split: str) -> int:
    """Counts the lines of each file, or says what is wrong with them."""
    paths = self.look(split)
    first, second = counts = [_lines(path) for path in paths]
    if first != second or not first:
      said = " and ".join(f"{p} has {n} lines" for p, n in zip(paths, counts, strict=True))
      raise ValueError(f"{said}: give two files with a line for each sentence, the same number.")
    return first

  def get_dataset(self, split, shuffle=True, seed=None, shard_info=None, **unused):
    """Returns a shard of the pairs, in the order of the files unless they are shuffled."""
    self._lines(split)
    both = tuple(tf.data.TextLineDataset(str(path)) for path in self.look(split))
    data = tf.data.Dataset.zip(dict(zip(self._languages, both, strict=True)))
    if shard_info is not None:
      data = data.shard(shard_info.num_shards, shard_info.index)
    full: Any = lambda pair: tf.reduce_all([pair[x] != "" for x in self._languages])
    data = data.filter(full)
    return data.shuffle(_SHUFFLED, seed=seed) if shuffle else data

  def num_input_examples(self, split: str) -> int:
    """Returns the lines of each file, including those with an empty side."""
    return self._lines(split)

  def list_shards(self, split: str) -> Sequence[str]:
    return [split]


def _lines(path: pathlib.Path) -> int:
  """Counts lines as `tf.data.TextLineDataset` does: the last may lack its line feed."""
  count, last = 0, b"\n"
  with path.open("rb") as file:
    while block := file.read(1 << 24):
      count += block.count(b"\n")
      last = block[-1:]
  return count + (last != b"\n")
