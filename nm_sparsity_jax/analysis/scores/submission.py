"""GLUE's official submission: predictions become a zip of TSV files, checked row by row.

    files TASK-predict.jsonl -> [find] -> task -> files -> [make] -> tables and a report -> [write]
    a zip -> [validate] -> what is wrong with it

Nothing is written unless all is right; what may be made up for a task is asked for by `fill`.
No library knows these files: the formats are those that GLUE's server takes.
"""

from __future__ import annotations

import collections
import json
import math
import pathlib
import re
import zipfile
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from nm_sparsity_jax.runs import files as whole
from nm_sparsity_jax.runs import glue

TASKS = {name: task for name, task in glue.TASKS.items() if task.file}
_HEADER = "index\tprediction"
_MIDDLE = "2.500"  # what fills STS-B
_NAME = re.compile(r"(.+)-predict(?:_with_aux)?\.jsonl(?:-(\d{5})-of-(\d{5}))?")
_HIDDEN = ("<unk>", "-1.0")  # the targets of examples without a label


Files = dict[str, dict[int, pathlib.Path]]  # config -> shard -> file


def find(
  paths: Sequence[str], named: Sequence[tuple[str, str]] = (), mini: bool = False
) -> tuple[Files, list[str]]:
  """Finds the files of each task, and says what is wrong with them, such as a missing shard.

  Args:
    paths: files and folders. The name of a file tells its task and shard.
    named: (config, file) for files whose names do not tell.
    mini: True for mini-GLUE.

  Raises:
    ValueError: a path does not exist, its task is not known, or two files are of one task.
  """
  files: Files = collections.defaultdict(dict)
  totals: dict[str, int] = {}
  for path in _listed(paths):
    if str(path) in [file for _, file in named] or not (found := _named(path, paths, mini)):
      continue
    config, shard, total = found
    if shard in files[config] or totals.setdefault(config, total) != total:
      before = next(iter(files[config].values()))
      raise ValueError(f"{path} and {before} are both predictions of {config}; keep one of them")
    files[config][shard] = path
  for config, file in named:
    if config in totals:
      raise ValueError(f"{file} and {files[config][0]} are both predictions of {config}")
    files[config][len(files[config])] = pathlib.Path(file)
  problems = [
    f"{TASKS[config].file}: shard {shard:05} of {total:05} is missing"
    for config, total in totals.items()
    for shard in range(total)
    if shard not in files[config]
  ]
  return files, problems


def _listed(paths: Sequence[str]) -> Iterator[pathlib.Path]:
  for path in map(pathlib.Path, paths):
    if not path.exists():
      raise ValueError(f"{path}: there is no such file or folder")
    if path.is_dir():
      yield from sorted(p for p in path.rglob("*-predict*.jsonl*") if p.is_file())
    else:
      yield path


def _named(path: pathlib.Path, paths: Sequence[str], mini: bool) -> tuple[str, int, int] | None:
  """Returns (config, shard, number of shards) by the name of a file.

  None for a file that is no submission's; that is an error if it was given by itself.
  """
  found = _NAME.fullmatch(path.name)
  config, is_mini = (found and glue.config_of(found[1])) or ("", False)
  if not found or config not in TASKS:
    if str(path) in paths or config == "mnli":  # what a folder holds besides is no concern
      raise ValueError(f"{path}: its name does not say the task. Name it: --task TASK=FILE")
    return None
  if is_mini != mini:
    kind = "mini-GLUE: --mini makes a zip to try out" if is_mini else "not of mini-GLUE"
    raise ValueError(f"{path}: is {kind}")
  return config, int(found[2] or 0), int(found[3] or 1)


def read(files: Mapping[int, pathlib.Path]) -> Iterator[tuple[int, str]]:
  """Reads files as t5x.infer writes them; yields (idx, prediction) of each line.

  A line is {"inputs": {"idx": 3.0, ...}, "prediction": "entailment"}.

  Args:
    files: shard -> file.
  """
  for _, file in sorted(files.items()):
    with file.open(encoding="utf-8") as lines, whole.named(file):
      for number, line in enumerate(lines, 1):
        yield _prediction(f"{file}, line {number}", line)


def _prediction(where: str, line: str) -> tuple[int, str]:
  try:
    entry = json.loads(line)
    index, prediction = entry["inputs"]["idx"], entry["prediction"]
    target = entry["inputs"].get("targets_pretokenized", _HIDDEN[0])
  except (ValueError, KeyError, TypeError, AttributeError) as e:
    raise ValueError(
      f'{where}: no {{"inputs": {{"idx": ...}}, "prediction": ...}} ({e}); '
      "gin_configs/runs/t5x_infer_glue_test.gin and local_infer.gin write these"
    ) from e
  if target not in _HIDDEN:
    raise ValueError(
      f"{where}: has the label {target!r}, so it is not a test set; infer on split 'test' (QNLI's "
      "validation set is just as long)"
    )
  # T5X writes whole numbers as floats.
  if not isinstance(index, int | float) or index % 1 or not isinstance(prediction, str):
    raise ValueError(f"{where}: idx is {index!r} and the prediction {prediction!r}")
  return int(index), prediction


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
  files: Files, fill: Collection[str] = (), mini: bool = False
) -> tuple[dict[str, Any], dict[str, bytes]]:
  """Makes the files of the zip.

      files, problems = submission.find(["predictions/"])
      report, tables = submission.make(files, fill={"wnli"})
      if not problems + report["problems"]:
        submission.write("submission.zip", tables)

  Args:
    files: what `find` returned.
    fill: configs that may be filled where a prediction is missing or is no answer.
    mini: True for mini-GLUE: as many rows as there are, and only the tasks with files.

  Returns:
    (report, tables): the report holds `files`, name -> counts of rows, and `problems`. Do not write
    the tables while there are problems. Tables are name -> content.
  """
  rows, tables, problems = {}, {}, []
  for name, task in TASKS.items():
    if mini and name not in files:
      continue
    rows[task.file], table, wrong = _table(task, files.get(name, {}), name in fill, mini)
    tables[task.file] = table
    wrong = wrong or check(task, table, None if mini else task.splits["test"])
    problems += [f"{task.file}: {what}" for what in wrong]
  return {"files": rows, "problems": problems}, tables


def _table(
  task: glue.Task, files: Mapping[int, pathlib.Path], fill: bool, mini: bool
) -> tuple[dict[str, Any], bytes, list[str]]:
  """Returns the report on one file of the zip, its content, and what is wrong with it."""
  predictions = list(read(files))
  cells = {index: cell(task, prediction) for index, prediction in predictions}
  invalid = [(index, text) for index, text in predictions if cell(task, text) is None]
  count = max(cells, default=-1) + 1 if mini else task.splits["test"]
  filler = _MIDDLE if task.regression else cell(task, task.labels[0])
  wrong = list(_wrong_rows([index for index, _ in predictions], count))
  wrong += [] if fill else _unfilled(task, predictions, invalid)
  filled = (len(invalid) if cells else count) if fill else 0
  is_beyond = lambda text: task.regression and not 0 <= float(text) <= 5
  report = {
    "rows": count,
    "invalid": len(invalid),
    "clamped": sum(cells[i] is not None and is_beyond(text) for i, text in predictions),
    "filled": filled,
    "filler": filler if filled else None,
    "from": [str(files[shard]) for shard in sorted(files)],
  }
  lines = [_HEADER, *(f"{index}\t{cells.get(index) or filler}" for index in range(count)), ""]
  return report, "\n".join(lines).encode(), wrong


def _unfilled(
  task: glue.Task, predictions: Sequence[tuple[int, str]], invalid: Sequence[tuple[int, str]]
) -> Iterator[str]:
  """Says what only `fill` would put right."""
  if not predictions:
    yield f"no predictions (--fill {task.name} fills it)"
  if invalid:
    shown = _several([f"{text!r} at index {index}" for index, text in invalid], 3)
    yield f"{len(invalid)} no answer: {shown} (--fill {task.name} fills)"


def _wrong_rows(indices: Sequence[int], count: int) -> Iterator[str]:
  """Says which indices come twice, lie outside, or are missing."""
  times = collections.Counter(indices)
  if repeated := sorted(index for index, n in times.items() if n > 1):
    yield f"index {_several(repeated)} more than once"
  if beyond := sorted(index for index in times if not 0 <= index < count):
    yield f"index {_several(beyond)} not in 0..{count - 1}"
  missing = [index for index in range(count) if index not in times]
  if indices and missing:
    yield f"{len(missing)} of {count} rows are missing: index {_several(missing)}"


def _several(things: Sequence[Any], most: int = 5) -> str:
  return ", ".join(map(str, things[:most])) + (", ..." if len(things) > most else "")


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
  if "\r" in head:
    return ["line ends are CRLF, not LF"]
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
  for expected, line in enumerate(lines):
    index, tab, value = line.partition("\t")
    if index != str(expected) or not tab:
      yield f"line {expected + 2} is {line!r}, where index {expected} belongs"
    elif not (_is_score(value) if task.regression else value in legal):
      yield f"line {expected + 2}: {value!r} is no answer"


def _is_score(text: str) -> bool:
  return bool(re.fullmatch(r"[0-5](\.[0-9]+)?", text)) and float(text) <= 5


def validate(path: str, mini: bool = False) -> list[str]:
  """Returns what is wrong with a zip, file by file; an empty list if it is valid.

  Args:
    path: the zip.
    mini: True for mini-GLUE: any of the files, with any number of rows.

  Raises:
    ValueError: it is not a zip that can be read.
  """
  by_file = {task.file: task for task in TASKS.values()}
  try:
    with zipfile.ZipFile(path) as archive:
      names = archive.namelist()
      data = {name: archive.read(name) for name in names if name in by_file}
  except (OSError, zipfile.BadZipFile, NotImplementedError, RuntimeError, zlib.error) as e:
    raise ValueError(f"{path}: no zip that can be read ({e})") from e
  twice = {name: "is there twice" for name in names if names.count(name) > 1}
  odd = {name: "does not belong there" for name in names if name not in by_file}
  problems = [f"{name}: {what}" for name, what in (*twice.items(), *odd.items())]
  if not mini:
    problems += [f"{name}: is missing" for name in by_file if name not in data]
  elif not data:
    problems.append("is empty")
  for name, task in by_file.items():
    if name in data:
      wrong = check(task, data[name], None if mini else task.splits["test"])
      problems += [f"{name}: {what}" for what in wrong]
  return problems


def write(path: str, tables: Mapping[str, bytes]) -> None:
  """Writes the zip, whole or not at all. Equal tables make equal bytes.

  Args:
    path: the zip; one that is there is replaced.
    tables: what `make` returned.
  """
  with whole.whole_file(path) as unfinished, zipfile.ZipFile(unfinished, "w") as archive:
    for table, data in tables.items():
      entry = zipfile.ZipInfo(table)  # of 1980-01-01
      entry.create_system, entry.external_attr = 3, 0o644 << 16
      archive.writestr(entry, data, zipfile.ZIP_DEFLATED, 6)
