"""GLUE's official submission: predictions become a zip of TSV files, checked row by row.

    files TASK-predict.jsonl -> [find] -> task -> files -> [make] -> tables and a report -> [write]
    a zip -> [validate] -> what is wrong with it

One check, `check`, looks at tables before they are written and at those of a zip. No library knows
these files: the formats are those that GLUE's server takes.
"""

from __future__ import annotations

import json
import math
import pathlib
import re
import zipfile
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from nm_sparsity_jax.runs import files, glue

TASKS = {name: task for name, task in glue.TASKS.items() if task.file}
_HEADER = "index\tprediction"
_NAME = re.compile(r"(.+)-predict(?:_with_aux)?\.jsonl(?:-(\d{5})-of-(\d{5}))?")
_HIDDEN = ("<unk>", "-1.0")  # the targets of examples without a label

Shards = dict[str, dict[int, pathlib.Path]]  # config -> shard -> file


def find(paths: Sequence[str], mini: bool = False) -> Shards:
  """Finds the files of each task by their names, in files and folders.

  Args:
    paths: files and folders.
    mini: True for mini-GLUE.

  Raises:
    ValueError: a path does not exist, a shard is missing, or two files are of one task.
  """
  found: Shards = {}
  totals: dict[str, set[int]] = {}
  for path in _listed(paths):
    name = _NAME.fullmatch(path.name)
    config, is_mini = (name and glue.config_of(name[1])) or ("", False)
    if name is None or config not in TASKS:
      if str(path) in paths or config == "mnli":  # which of its two test sets is not known
        raise ValueError(f"{path}: its name says no task, as nm_glue_rte-predict.jsonl does")
      continue  # what a folder holds besides is no concern
    if is_mini != mini:
      kind = "of mini-GLUE: --mini makes a zip to try out" if is_mini else "not of mini-GLUE"
      raise ValueError(f"{path}: is {kind}")
    shards, shard = found.setdefault(config, {}), int(name[2] or 0)
    totals.setdefault(config, set()).add(int(name[3] or 1))
    if shard in shards or len(totals[config]) > 1:
      before = next(iter(shards.values()))
      raise ValueError(f"{path} and {before} are both predictions of {config}; keep one of them")
    shards[shard] = path
  for config, (total,) in totals.items():
    if lost := {*range(total)} - {*found[config]}:
      raise ValueError(f"{config}: shard {min(lost):05} of {total:05} is missing")
  return found


def _listed(paths: Sequence[str]) -> Iterator[pathlib.Path]:
  for path in map(pathlib.Path, paths):
    if not path.exists():
      raise ValueError(f"{path}: there is no such file or folder")
    if path.is_dir():
      yield from sorted(p for p in path.rglob("*-predict*.jsonl*") if p.is_file())
    else:
      yield path


def read(shards: Mapping[int, pathlib.Path]) -> Iterator[tuple[int, str]]:
  """Reads files as t5x.infer writes them; yields (idx, prediction) of each line.

  A line is {"inputs": {"idx": 3.0, ...}, "prediction": "entailment"}.

  Args:
    shards: shard -> file.

  Raises:
    ValueError: a line is another, or of an example with a label.
  """
  for _, file in sorted(shards.items()):
    with file.open(encoding="utf-8") as lines, files.named(file):
      for number, line in enumerate(lines, 1):
        try:
          entry = json.loads(line)
          inputs, prediction = entry["inputs"], entry["prediction"]
          index = int(inputs["idx"])  # T5X writes whole numbers as floats
          if index != inputs["idx"] or not isinstance(prediction, str):
            raise ValueError(f"idx is {inputs['idx']!r} and the prediction {prediction!r}")
        except (ValueError, LookupError, TypeError, OverflowError, RecursionError) as e:
          raise ValueError(
            f'{file}, line {number}: no {{"inputs": {{"idx": ...}}, "prediction": ...}} ({e}); '
            "gin_configs/runs/t5x_infer_glue_test.gin and local_infer.gin write these"
          ) from e
        target = inputs.get("targets_pretokenized", _HIDDEN[0])
        if target not in _HIDDEN:  # QNLI's validation set is just as long as its test set
          raise ValueError(
            f"{file}, line {number}: has the label {target!r}, so it is not a test set; infer on "
            "split 'test'"
          )
        yield index, prediction


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


def make(
  found: Shards, fill: Collection[str] = (), mini: bool = False
) -> tuple[dict[str, Any], dict[str, bytes]]:
  """Makes the files of the zip.

      found = submission.find(["predictions/"])
      report, tables = submission.make(found, fill={"wnli"})
      if not report["problems"]:
        submission.write("submission.zip", tables)

  Args:
    found: what `find` returned.
    fill: configs that may be filled where a prediction is missing or is no answer.
    mini: True for mini-GLUE: as many rows as there are, and only the tasks with files.

  Returns:
    (report, tables): the report holds `files`, name -> counts of rows, and `problems`. Do not write
    the tables while there are problems. Tables are name -> content.
  """
  counts, tables, problems = {}, {}, []
  for name, task in TASKS.items():
    if mini and name not in found:
      continue
    rows, fills = sorted(read(found.get(name, {}))), name in fill
    size = len(rows) if mini else task.splits["test"]
    if fills and not rows:
      rows = [(index, "") for index in range(size)]
    filler = "2.500" if task.regression else cell(task, task.labels[0])
    filled = fills * sum(cell(task, text) is None for _, text in rows)
    # Without `fill`, what is no answer stands in the table as it is, and `check` finds it.
    lines = [f"{i}\t{cell(task, text) or (filler if fills else text)}" for i, text in rows]
    tables[task.file] = "\n".join([_HEADER, *lines, ""]).encode()
    counts[task.file] = {"rows": len(rows), "filled": filled, "filler": filler if filled else None}
    wrong = check(task, tables[task.file], size) if rows else ["no predictions"]
    problems += [f"{task.file}: {what}" for what in wrong]
  return {"files": counts, "problems": problems}, tables


# --- the zip --------------------------------------------------------------------------------------


def check(task: glue.Task, data: bytes, count: int | None) -> list[str]:
  """Returns what is wrong with one file of a submission; names at most three rows.

  Args:
    task: whose file it is.
    data: the content of the file.
    count: how many rows it must have; None: any number.
  """
  try:
    head, *lines, last = data.decode().split("\n")
  except ValueError:
    return ["is not UTF-8 with lines that end"]
  problems = ["the last line does not end"] if last else []
  if head != _HEADER:
    problems.append(f"the first line is {head!r}, not {_HEADER!r}")
  if count is not None and len(lines) != count:
    problems.append(f"has {len(lines)} rows, not {count}")
  wrong = list(_wrong_lines(task, lines))
  return [*problems, *wrong[:3], *([f"{len(wrong)} such lines"] if len(wrong) > 3 else [])]


def _wrong_lines(task: glue.Task, lines: Sequence[str]) -> Iterator[str]:
  """Says which rows have another index than is their turn, or no answer."""
  legal = set(task.labels if task.words else map(str, range(len(task.labels))))
  is_score = lambda text: re.fullmatch(r"[0-4](\.[0-9]+)?|5(\.0+)?", text, re.ASCII)
  for expected, line in enumerate(lines):
    index, tab, value = line.partition("\t")
    if index != str(expected) or not tab:
      yield f"line {expected + 2} is {line!r}, where index {expected} belongs"
    elif not (is_score(value) if task.regression else value in legal):
      yield f"line {expected + 2}: {value!r} is no answer"


def validate(path: str, mini: bool = False) -> list[str]:
  """Returns what is wrong with a zip, file by file; an empty list if it is valid.

  Args:
    path: the zip.
    mini: True for mini-GLUE: any of the files, with any number of rows.

  Raises:
    ValueError: it is not a zip that can be read.
  """
  try:
    with zipfile.ZipFile(path) as archive:
      names = archive.namelist()
      data = {task.file: archive.read(task.file) for task in TASKS.values() if task.file in names}
  except (OSError, zipfile.BadZipFile, NotImplementedError, RuntimeError, zlib.error) as e:
    raise ValueError(f"{path}: no zip that can be read ({e})") from e
  wanted = [*data] if mini and data else [task.file for task in TASKS.values()]
  problems = [] if sorted(names) == sorted(wanted) else [
    f"holds {', '.join(sorted(names))}; these belong there, each once: {', '.join(wanted)}"
  ]  # fmt: skip
  for task in TASKS.values():
    if task.file in data:
      wrong = check(task, data[task.file], None if mini else task.splits["test"])
      problems += [f"{task.file}: {what}" for what in wrong]
  return problems


def write(path: str, tables: Mapping[str, bytes]) -> None:
  """Writes the zip, whole or not at all. Equal tables make equal bytes.

  Args:
    path: the zip; one that is there is replaced.
    tables: what `make` returned.
  """
  with files.whole_file(path) as unfinished, zipfile.ZipFile(unfinished, "w") as archive:
    for table, data in tables.items():
      entry = zipfile.ZipInfo(table)  # of 1980-01-01
      entry.create_system, entry.external_attr = 3, 0o644 << 16
      archive.writestr(entry, data, zipfile.ZIP_DEFLATED, 6)
