"""GLUE's official submission: predictions become a zip of TSV files, checked row by row.

    files TASK-predict.jsonl -> [make] -> tables, and what is wrong with them -> [write]

No library knows these files: the formats are those that GLUE's server takes.
"""

from __future__ import annotations

import json
import math
import pathlib
import re
import zipfile
from collections.abc import Collection, Iterator, Mapping, Sequence

from nm_sparsity_jax.core.files import whole
from nm_sparsity_jax.runs import files, glue

TASKS = {name: task for name, task in glue.TASKS.items() if task.file}
_NAME = re.compile(r"(.+)-predict(?:_with_aux)?\.jsonl(?:-\d{5}-of-\d{5})?")
_HIDDEN = ("<unk>", "-1.0")  # the targets of examples without a label


def make(
  paths: Sequence[str | pathlib.Path], fill: Collection[str] = ()
) -> tuple[dict[str, bytes], dict[str, int], list[str]]:
  """Makes the files of the zip.

      tables, filled, problems = submission.make(["predictions/"], fill={"wnli"})
      if not problems:
        submission.write("submission.zip", tables)

  Args:
    paths: files TASK-predict.jsonl[-00000-of-00001], and folders, which are searched.
    fill: configs that may be filled where a prediction is missing or is no answer: by class 0, or
      by 2.500 for a score.

  Returns:
    (tables, filled, problems): name of a file -> its content, and -> how many rows were filled. Do
    not write the tables while there are problems.
  """
  found = _find(paths)
  tables, filled, problems = {}, {}, []
  for name, task in TASKS.items():
    size = task.splits["test"]
    said = sorted(row for file in found.get(name, ()) for row in read(file))
    if not said and name in fill:
      said = [(index, "") for index in range(size)]
    filler = "2.500" if task.regression else cell(task, task.labels[0])
    cells = [cell(task, text) for _, text in said]
    missing = [text for (_, text), answer in zip(said, cells, strict=True) if answer is None]
    filled[task.file] = len(missing)
    if missing and name not in fill:
      problems.append(f"{task.file}: {len(missing)} predictions are no answer, as {missing[0]!r}")
    if [index for index, _ in said] != list(range(size)):
      problems.append(
        f"{task.file}: {len(said)} predictions, of which not each has its own index 0..{size - 1}"
      )
    # A filler that `fill` does not allow is among the problems, so it is never written.
    lines = [f"{i}\t{answer or filler}\n" for i, answer in enumerate(cells)]
    tables[task.file] = "".join(["index\tprediction\n", *lines]).encode()
  return tables, filled, problems


def _find(paths: Sequence[str | pathlib.Path]) -> dict[str, list[pathlib.Path]]:
  """Returns config -> its files, by their names."""
  found: dict[str, list[pathlib.Path]] = {}
  for path in map(pathlib.Path, paths):
    for file in path.rglob("*.jsonl*") if path.is_dir() else [path]:
      # What else a folder holds is no concern; files of other tasks gather at "".
      if name := _NAME.fullmatch(file.name):
        found.setdefault(glue.config_of(name[1]) or "", []).append(file)
  missing = [path for path in paths if not pathlib.Path(path).exists()]
  if missing or not found.keys() & TASKS.keys():
    wanted = "such as nm_glue_rte-predict.jsonl-00000-of-00001"
    where = ", ".join(map(str, missing or paths))
    raise ValueError(f"no prediction files of GLUE, {wanted}, in {where}")
  return found


def read(file: pathlib.Path) -> Iterator[tuple[int, str]]:
  """Reads a file as t5x.infer writes it; yields (idx, prediction) of each line.

  A line is {"inputs": {"idx": 3.0, ...}, "prediction": "entailment"}.

  Raises:
    ValueError: a line is another, or of an example with a label.
  """
  with files.named(file), file.open(encoding="utf-8") as lines:
    for number, line in enumerate(lines, 1):
      with files.named(f"{file}, line {number}"):
        entry = json.loads(line)
        inputs = entry["inputs"]
        target = inputs.get("targets_pretokenized", _HIDDEN[0])
        if target not in _HIDDEN:  # QNLI's validation set is just as long as its test set
          raise ValueError(f"has the label {target!r}, so it is not a test set; infer on 'test'")
        row = int(inputs["idx"]), str(entry["prediction"])  # T5X writes whole numbers as floats
      yield row


def cell(task: glue.Task, prediction: str) -> str | None:
  """Returns what the file says for a prediction; None if the task has no such answer.

  Matching is exact, as in T5's metrics.

  >>> [cell(TASKS[name], "entailment") for name in ("rte", "wnli", "cola")]
  ['entailment', '1', None]
  >>> [cell(TASKS["stsb"], text) for text in ("3.2", "5.2", "-1.0", "nan", "abc")]
  ['3.200', '5.000', '0.000', None, None]
  """
  if not task.regression:
    if prediction not in task.labels:
      return None
    return prediction if task.words else str(task.labels.index(prediction))
  try:
    value = float(prediction)
  except ValueError:
    return None
  # In this order: of equals the first is taken, so -0.0 becomes 0.0.
  return f"{min(5.0, max(0.0, value)):.3f}" if math.isfinite(value) else None


def write(path: str | pathlib.Path, tables: Mapping[str, bytes]) -> None:
  """Writes the zip, whole or not at all. Equal tables make equal bytes.

  Args:
    path: the zip; one that is there is replaced.
    tables: what `make` returned.
  """
  with whole(path, replace=True) as unfinished, zipfile.ZipFile(unfinished, "w") as archive:
    for table, data in tables.items():
      archive.writestr(zipfile.ZipInfo(table), data, zipfile.ZIP_DEFLATED)  # of 1980-01-01
