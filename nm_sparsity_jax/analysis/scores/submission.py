"""GLUE's official submission: predictions become a zip of TSV files, checked row by row.

    files TASK-predict.jsonl -> [find] -> task -> files -> [make] -> tables and a report -> [write]
    a zip -> [validate] -> what is wrong with it

Nothing is written unless all is right; what may be made up for a task is asked for by `fill`.
"""

from __future__ import annotations

import collections
import dataclasses
import errno
import math
import pathlib
import re
import zipfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from nm_sparsity_jax.analysis.scores.predictions import read
from nm_sparsity_jax.runs import files as whole
from nm_sparsity_jax.runs import glue

TASKS = {name: task for name, task in glue.TASKS.items() if task.file}
_HEADER = "index\tprediction"
_MIDDLE = "2.500"  # what fills STS-B
_NAME = re.compile(r"(.+)-predict(?:_with_aux)?\.jsonl(?:-(\d{5})-of-(\d{5}))?")


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
  problems = []
  told = {pathlib.Path(file).resolve() for _, file in named}
  given = {pathlib.Path(path) for path in paths}
  for path in _listed(paths):
    if path.resolve() in told or not (found := _named(path, path in given, mini)):
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
  for config, total in totals.items():
    for shard in sorted(set(range(total)) - set(files[config])):
      problems.append(f"{TASKS[config].file}: shard {shard:05} of {total:05} is missing")
  return files, problems


def _named(path: pathlib.Path, given: bool, mini: bool) -> tuple[str, int, int] | None:
  """Returns (config, shard, number of shards) by the name of a file.

  None for a file that is no submission's; that is an error if it was given by itself.
  """
  found = _NAME.fullmatch(path.name)
  config, is_mini = (found and glue.config_of(found[1])) or ("", False)
  if not found or config not in TASKS:
    if given or config == "mnli":  # what a folder holds besides is no concern
      raise ValueError(f"{path}: its name does not say the task. Name it: named=[(TASK, FILE)]")
    return None
  if is_mini != mini:
    kind = "mini-GLUE: mini=True makes a zip to try out" if is_mini else "not of mini-GLUE"
    raise ValueError(f"{path}: is {kind}")
  return config, int(found[2] or 0), int(found[3] or 1)


def _listed(paths: Sequence[str]) -> Iterator[pathlib.Path]:
  for path in map(pathlib.Path, paths):
    if not path.exists():
      raise ValueError(f"{path}: there is no such file or folder")
    if path.is_dir():
      yield from sorted(p for p in path.rglob("*-predict*.jsonl*") if p.is_file())
    else:
      yield path


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
  rows_report, tables, problems = {}, {}, []
  for name, task in TASKS.items():
    if mini and name not in files:
      continue
    made, wrong = table(task, files.get(name, {}), name in fill, mini)
    rows_report[task.file], text = made
    if not wrong:
      tables[task.file] = text.encode()
      wrong = check(task, tables[task.file], None if mini else task.splits["test"])
    problems += [f"{task.file}: {what}" for what in wrong]
  return {"files": rows_report, "problems": problems}, tables


@dataclasses.dataclass
class _Cells:
  """The predictions of one task.

  Attributes:
    by_index: index -> cell; None where the prediction is no answer.
    invalid: (index, prediction) of those.
    clamped: how many scores lay outside 0..5.
    repeated: indices that came more than once.
  """

  by_index: dict[int, str | None]
  invalid: list[tuple[int, str]]
  clamped: int
  repeated: list[int]


def _cells(task: glue.Task, files: Mapping[int, pathlib.Path]) -> _Cells:
  """Reads all shards of one task."""
  found = _Cells({}, [], 0, [])
  times = collections.Counter()
  for index, prediction in read(files[shard] for shard in sorted(files)):
    times[index] += 1
    found.by_index[index] = made = cell(task, prediction)
    if made is None:
      found.invalid.append((index, prediction))
    elif task.regression and not 0 <= float(prediction) <= 5:
      found.clamped += 1
  found.repeated = sorted(index for index, n in times.items() if n > 1)
  return found


def table(
  task: glue.Task, files: Mapping[int, pathlib.Path], fill: bool, mini: bool
) -> tuple[tuple[dict[str, Any], str], list[str]]:
  """Returns (report on one file of the zip, its text), and what is wrong.

  Args:
    task: whose file it is.
    files: shard -> predictions.
    fill: True if the first class (2.500 for STS-B) may stand in for what is missing or no answer.
    mini: True if as many rows count as there are.
  """
  cells = _cells(task, files)
  count = _rows_of(cells) if mini else task.splits["test"]
  filled = len(cells.invalid) if cells.by_index else count
  filler = _MIDDLE if task.regression else cell(task, task.labels[0])
  lines = (f"{index}\t{cells.by_index.get(index) or filler}\n" for index in range(count))
  report = {
    "rows": count,
    "invalid": len(cells.invalid),
    "clamped": cells.clamped,
    "filled": filled if fill else 0,
    "filler": filler if fill and filled else None,
    "from": [str(files[shard]) for shard in sorted(files)],
  }
  wrong = [*_wrong_rows(cells, count), *([] if fill else _unfilled(task, cells))]
  return (report, "".join([f"{_HEADER}\n", *lines])), wrong


def _rows_of(cells: _Cells) -> int:
  """Returns how many rows predictions of unknown number make: up to the last index.

  An index far beyond the number of predictions is no row; it is left to `_wrong_rows`.
  """
  most = 10 * len(cells.by_index) + 1000
  return max((index for index in cells.by_index if index < most), default=-1) + 1


def _wrong_rows(cells: _Cells, count: int) -> Iterator[str]:
  """Says which indices come twice, lie outside, or are missing."""
  if cells.repeated:
    yield f"{_several('index', cells.repeated)} more than once"
  if beyond := sorted(index for index in cells.by_index if not 0 <= index < count):
    yield f"{_several('index', beyond)} not in 0..{count - 1}"
  missing = [index for index in range(count) if index not in cells.by_index]
  if cells.by_index and missing:
    yield f"{len(missing)} of {count} rows are missing: {_several('index', missing)}"


def _unfilled(task: glue.Task, cells: _Cells) -> Iterator[str]:
  """Says what only `fill` would put right."""
  if not cells.by_index:
    yield f"no predictions (--fill {task.name} fills it)"
  if invalid := cells.invalid:
    shown = ", ".join(f"{prediction!r} at index {index}" for index, prediction in invalid[:3])
    yield (
      f"{len(invalid)} {'is no answer' if len(invalid) == 1 else 'are no answers'}: {shown}"
      f"{', ...' if len(invalid) > 3 else ''} (--fill {task.name} fills)"
    )


def _several(noun: str, numbers: Sequence[int]) -> str:
  shown = ", ".join(map(str, numbers[:5])) + (", ..." if len(numbers) > 5 else "")
  return f"{noun} {shown}"


# --- the zip ------------------------------------------------------------------------------------


def check(task: glue.Task, data: bytes, count: int | None) -> list[str]:
  """Returns what is wrong with one file of a submission; names at most three rows.

  Args:
    task: whose file it is.
    data: the content of the file.
    count: how many rows it must have; None: any number.
  """
  try:
    text = data.decode()
  except UnicodeDecodeError as e:
    return [f"is not UTF-8 ({e.reason} at byte {e.start})"]
  problems = []
  if "\r" in text:
    problems.append("line ends are CRLF, not LF")
  lines = text.replace("\r\n", "\n").split("\n")
  if lines[-1]:
    problems.append("the last line does not end")
  else:
    lines.pop()
  if not lines or lines[0] != _HEADER:
    head = lines[0] if lines else ""
    return [*problems, f"the first line is {head!r}, not {_HEADER!r}"]
  if count is not None and len(lines) - 1 != count:
    problems.append(f"has {len(lines) - 1} rows, not {count}")
  wrong = list(_wrong_lines(task, lines[1:]))
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
  names, data = _unzipped(path)
  by_file = {task.file: task for task in TASKS.values()}
  problems = [f"{name}: is there twice" for name in dict.fromkeys(names) if names.count(name) > 1]
  problems += [
    f"{name}: does not belong there" for name in dict.fromkeys(names) if name not in by_file
  ]
  if not mini:
    problems += [f"{name}: is missing" for name in by_file if name not in data]
  elif not data:
    problems.append("is empty")
  for name, task in by_file.items():
    if name in data:
      wrong = check(task, data[name], None if mini else task.splits["test"])
      problems += [f"{name}: {what}" for what in wrong]
  return problems


_MOST_FILES, _MOST_BYTES = 100, 1 << 26  # of a zip; GLUE's own has 11 files and 20 MB


def _unzipped(path: str) -> tuple[list[str], dict[str, bytes]]:
  """Returns the names of all files in a zip, and the content of those that belong there."""
  ours = {task.file for task in TASKS.values()}
  try:
    with zipfile.ZipFile(path) as archive:
      entries = archive.infolist()
      size = sum(entry.file_size for entry in entries)
      if len(entries) > _MOST_FILES or size > _MOST_BYTES:
        raise ValueError(
          f"{path}: {len(entries):,} files of {size:,} bytes, and a submission has at most "
          f"{_MOST_FILES} of {_MOST_BYTES:,}"
        )
      # Read no more than was said: the sizes are the writer's own words.
      read = lambda entry: archive.open(entry).read(entry.file_size)
      data = {entry.filename: read(entry) for entry in entries if entry.filename in ours}
      return [entry.filename for entry in entries], data
  except ValueError as e:
    if str(path) in str(e):
      raise
    raise ValueError(f"{path}: no zip that can be read ({e})") from e
  except Exception as e:  # of its many codecs
    raise ValueError(f"{path}: no zip that can be read ({e})") from e


def check_writable(path: str) -> None:
  """Raises the error that `write` would raise, before minutes of reading."""
  target = pathlib.Path(path)
  try:
    if target.is_dir():
      raise IsADirectoryError(errno.EISDIR, "it is a folder")
    whole.probe(target.parent)
  except OSError as e:
    raise ValueError(f"{path} cannot be written: {e.strerror}") from e


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
