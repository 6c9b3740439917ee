"""Makes GLUE's official zip from predictions of t5x.infer or `nm-sparsity infer`, or checks a zip.

Takes files TASK-predict.jsonl[-00000-of-00001], or folders, searched with what lies in them. Each
line must hold `idx`: gin_configs/runs/t5x_infer_glue_test.gin and local_infer.gin write it.

  nm-sparsity glue submit predictions/ --out submission.zip --fill wnli
  nm-sparsity glue submit --validate submission.zip

The zip has 11 TSV files, `index<TAB>prediction`, in the order of the index, STS-B clamped to 0..5.
All is checked, row by row, before it is written. A task without predictions, or a prediction that
is no answer, stops it, unless --fill names the task: then class 0 stands in, for STS-B 2.500. A row
that is missing or comes twice always stops it.

Exit code: 0 = written, or valid; 1 = not.
"""

from __future__ import annotations

import argparse
import collections
import errno
import json
import math
import os
import pathlib
import re
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from nm_sparsity_jax import glue

TASKS = {name: task for name, task in glue.TASKS.items() if task.file}
_HEADER = "index\tprediction"
_MIDDLE = "2.500"  # what fills STS-B
_NAME = re.compile(r"(.+)-predict(?:_with_aux)?\.jsonl(?:-(\d{5})-of-(\d{5}))?")


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """What to read, what to write, and what may be made up."""
  add = parser.add_argument
  add("paths", nargs="*", metavar="FILE|DIR", help="prediction files, or folders of them")
  add("--out", metavar="ZIP", help="the zip to write; one that is there is replaced")
  add(
    "--task", action="append", default=[], type=_task_file, metavar="TASK=FILE",
    help="a file whose name does not tell its task, such as cola=my.jsonl; may be repeated",
  )  # fmt: skip
  add(
    "--fill", action="append", default=[], choices=[*TASKS, "all"], metavar="TASK",
    help="a task (or all) to fill where it is missing or not a label; may be repeated. WNLI, which "
    "T5's mixture does not train, is customarily filled",
  )  # fmt: skip
  add("--mini", action="store_true", help="of mini-GLUE, to try out: tasks and rows as found")
  add("--validate", metavar="ZIP", help="write nothing; check this zip row by row")
  add("--json", action="store_true", help="print the report as JSON")


def _task_file(text: str) -> tuple[str, str]:
  name, _, file = text.partition("=")
  if name not in TASKS or not file:
    raise argparse.ArgumentTypeError(f"{text!r}: write TASK=FILE, TASK of {', '.join(TASKS)}")
  return name, file


def run(args: argparse.Namespace) -> int:
  """Checks, or reads, makes, checks and writes."""
  given = bool(args.paths or args.task)
  if args.validate and (given or args.out or args.fill):
    raise ValueError("--validate checks a zip and takes no predictions, --out or --fill")
  if not args.validate and not (given and args.out):
    raise ValueError("give prediction files and --out ZIP, or --validate ZIP")
  if args.validate:
    report = {"zip": args.validate, "problems": validate(args.validate, args.mini)}
  else:
    fill = set(TASKS) if "all" in args.fill else set(args.fill)
    _check_writable(args.out)
    files, problems = find(args.paths, args.task, args.mini)
    if not files:
      wanted = "such as nm_glue_rte-predict.jsonl-00000-of-00001"
      raise ValueError(f"no prediction files, {wanted}, in {', '.join(args.paths)}")
    report, tables = make(files, fill, args.mini)
    report = {"zip": args.out, **report, "problems": problems + report["problems"]}
    if not report["problems"]:
      _write(args.out, tables)
  print(json.dumps(report, indent=2) if args.json else _text(report))
  return 1 if report["problems"] else 0


# --- predictions --------------------------------------------------------------------------------

Files = dict[str, dict[int, pathlib.Path]]  # config -> shard -> file


def find(
  paths: Sequence[str], named: Sequence[tuple[str, str]], mini: bool
) -> tuple[Files, list[str]]:
  """The files of each task, and what is wrong with them: a shard that is missing, say.

  Args:
    paths: files and folders; the name of a file tells its task and shard.
    named: (config, file) that were told.
    mini: whether mini-GLUE is meant.
  """
  files: Files = collections.defaultdict(dict)
  totals: dict[str, int] = {}
  problems = []
  told = {pathlib.Path(file).resolve() for _, file in named}
  given = {pathlib.Path(path) for path in paths}
  for path in _listed(paths):
    if path.resolve() in told:
      continue
    found = _NAME.fullmatch(path.name)
    config, is_mini = (found and glue.config_of(found[1])) or ("", False)
    if not found or config not in TASKS:
      if path in given or config == "mnli":  # what a folder holds besides is no concern
        raise ValueError(f"{path}: of which task of a submission? --task TASK=FILE tells")
      continue
    if is_mini != mini:
      kind = "mini-GLUE: --mini makes a zip to try out" if is_mini else "not of mini-GLUE"
      raise ValueError(f"{path}: is {kind}")
    shard, total = int(found[2] or 0), int(found[3] or 1)
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


_HIDDEN = ("<unk>", "-1.0")  # the targets of examples without a label


def _listed(paths: Sequence[str]) -> Iterator[pathlib.Path]:
  for path in map(pathlib.Path, paths):
    if not path.exists():
      raise ValueError(f"{path}: there is no such file or folder")
    if path.is_dir():
      yield from sorted(p for p in path.rglob("*-predict*.jsonl*") if p.is_file())
    else:
      yield path


def read(files: Iterable[pathlib.Path]) -> Iterator[tuple[int, str]]:
  """(idx, prediction) of each line, as t5x.infer writes them: {"inputs": {"idx": 3.0, ...},
  "prediction": "entailment"}."""
  for file in files:
    with file.open(encoding="utf-8") as lines:
      for number, line in enumerate(lines, 1):
        try:
          entry = json.loads(line)
          index, prediction = entry["inputs"]["idx"], entry["prediction"]
          target = entry["inputs"].get("targets_pretokenized", _HIDDEN[0])
        except (ValueError, KeyError, TypeError) as e:
          wanted = 'no {"inputs": {"idx": ...}, "prediction": ...}'
          raise ValueError(
            f"{file}, line {number}: {wanted} ({type(e).__name__}: {e}); "
            "gin_configs/runs/t5x_infer_glue_test.gin and local_infer.gin write these"
          ) from e
        if target not in _HIDDEN:
          raise ValueError(
            f"{file}, line {number}: has the label {target!r}, so it is no test set; infer on "
            "split 'test' (QNLI's validation set is just as long)"
          )
        # T5X writes whole numbers as floats.
        if isinstance(index, bool) or not isinstance(index, int | float) or index % 1:
          raise ValueError(f"{file}, line {number}: idx is {index!r}, no whole number")
        if not isinstance(prediction, str):
          raise ValueError(f"{file}, line {number}: the prediction is {prediction!r}, no text")
        yield int(index), prediction


def cell(task: glue.Task, prediction: str) -> str | None:
  """What stands in the file for a prediction; None: it is none of the task's answers.

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


def make(files: Files, fill: set[str], mini: bool) -> tuple[dict[str, Any], dict[str, bytes]]:
  """The files of the zip, by name, and a report on each; its `problems` forbid writing.

  Args:
    files: of `find`.
    fill: configs that may be filled.
    mini: whether as many rows count as there are, and a task without files is left out.
  """
  rows_report, tables, problems = {}, {}, []
  for name, task in TASKS.items():
    if mini and name not in files:
      continue
    made, wrong = _table(task, files.get(name, {}), name in fill, mini)
    rows_report[task.file], text = made
    if not wrong:
      tables[task.file] = text.encode()
      wrong = check(task, tables[task.file], None if mini else task.splits["test"])
    problems += [f"{task.file}: {what}" for what in wrong]
  return {"files": rows_report, "problems": problems}, tables


def _table(
  task: glue.Task, files: Mapping[int, pathlib.Path], fill: bool, mini: bool
) -> tuple[tuple[dict[str, Any], str], list[str]]:
  """(report on one file, its text), and what is wrong."""
  cells: dict[int, str | None] = {}
  invalid, clamped, again = [], 0, collections.Counter()
  for index, prediction in read(files[shard] for shard in sorted(files)):
    again[index] += 1
    cells[index] = found = cell(task, prediction)
    if found is None:
      invalid.append((index, prediction))
    elif task.regression and not 0 <= float(prediction) <= 5:
      clamped += 1
  count = max(cells, default=-1) + 1 if mini else task.splits["test"]
  wrong = []
  if repeated := sorted(index for index, times in again.items() if times > 1):
    wrong.append(f"{_several('index', repeated)} more than once")
  if beyond := sorted(index for index in cells if not 0 <= index < count):
    wrong.append(f"{_several('index', beyond)} not in 0..{count - 1}")
  missing = [index for index in range(count) if index not in cells]
  if cells and missing:
    wrong.append(f"{len(missing)} of {count} rows are missing: {_several('index', missing)}")
  filled = len(invalid) if cells else count
  if not fill:
    if not cells:
      wrong.append(f"no predictions (--fill {task.name} fills it)")
    if invalid:
      shown = ", ".join(f"{prediction!r} at index {index}" for index, prediction in invalid[:3])
      wrong.append(
        f"{len(invalid)} {'is' if len(invalid) == 1 else 'are'} no answer: {shown}"
        f"{', ...' if len(invalid) > 3 else ''} (--fill {task.name} fills)"
      )
  filler = _MIDDLE if task.regression else cell(task, task.labels[0])
  lines = (f"{index}\t{cells.get(index) or filler}\n" for index in range(count))
  report = {
    "rows": count,
    "invalid": len(invalid),
    "clamped": clamped,
    "filled": filled if fill else 0,
    "filler": filler if fill and filled else None,
    "from": [str(files[shard]) for shard in sorted(files)],
  }
  return (report, "".join([f"{_HEADER}\n", *lines])), wrong


def _several(noun: str, numbers: Sequence[int]) -> str:
  shown = ", ".join(map(str, numbers[:5])) + (", ..." if len(numbers) > 5 else "")
  return f"{noun} {shown}"


# --- the zip ------------------------------------------------------------------------------------


def check(task: glue.Task, data: bytes, count: int | None) -> list[str]:
  """What is wrong with one file of a submission; at most three rows are named.

  Args:
    task: whose file it is.
    data: the file.
    count: rows that it must have; None: any.
  """
  try:
    text = data.decode()
  except UnicodeDecodeError as e:
    return [f"is no UTF-8 ({e.reason} at byte {e.start})"]
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
  legal = set(task.labels if task.words else map(str, range(len(task.labels))))
  wrong = []
  for expected, line in enumerate(lines[1:]):
    index, tab, value = line.partition("\t")
    if index != str(expected) or not tab:
      wrong.append(f"line {expected + 2} is {line!r}, where index {expected} belongs")
    elif not (_is_score(value) if task.regression else value in legal):
      wrong.append(f"line {expected + 2}: {value!r} is no answer")
  return [*problems, *wrong[:3], *([f"{len(wrong)} such lines"] if len(wrong) > 3 else [])]


def _is_score(text: str) -> bool:
  return bool(re.fullmatch(r"[0-5](\.[0-9]+)?", text)) and float(text) <= 5


def validate(path: str, mini: bool = False) -> list[str]:
  """What is wrong with a zip, file by file."""
  try:
    with zipfile.ZipFile(path) as archive:
      names = archive.namelist()
      data = {name: archive.read(name) for name in names}
  except (OSError, zipfile.BadZipFile) as e:
    raise ValueError(f"{path}: no zip that can be read ({e})") from e
  by_file = {task.file: task for task in TASKS.values()}
  problems = [f"{name}: is there twice" for name in data if names.count(name) > 1]
  problems += [f"{name}: does not belong there" for name in data if name not in by_file]
  if not mini:
    problems += [f"{name}: is missing" for name in by_file if name not in data]
  elif not data:
    problems.append("is empty")
  for name, task in by_file.items():
    if name in data:
      wrong = check(task, data[name], None if mini else task.splits["test"])
      problems += [f"{name}: {what}" for what in wrong]
  return problems


def _beside(target: pathlib.Path) -> pathlib.Path:
  return target.with_name(f".{target.name}.{os.getpid()}")


def _check_writable(path: str) -> None:
  """Raises where `_write` would, before minutes of reading."""
  target = pathlib.Path(path)
  try:
    if target.is_dir():
      raise IsADirectoryError(errno.EISDIR, "it is a folder")
    _beside(target).touch()
    _beside(target).unlink()
  except OSError as e:
    raise ValueError(f"--out {path} cannot be written: {e.strerror}") from e


def _write(path: str, tables: Mapping[str, bytes]) -> None:
  """Writes beside and renames, so a zip is whole or not there. Of equal tables, equal bytes."""
  target = pathlib.Path(path)
  beside = _beside(target)
  try:
    with zipfile.ZipFile(beside, "w") as archive:
      for table, data in tables.items():
        entry = zipfile.ZipInfo(table)  # of 1980-01-01
        entry.create_system, entry.external_attr = 3, 0o644 << 16
        archive.writestr(entry, data, zipfile.ZIP_DEFLATED, 6)
    os.replace(beside, target)
  finally:
    beside.unlink(missing_ok=True)


# --- text ---------------------------------------------------------------------------------------


def _text(report: Mapping[str, Any]) -> str:
  lines = []
  if files := report.get("files"):
    rows = [["file", "rows", "invalid", "clamped", "filled"]]
    for name, r in files.items():
      with_what = f" with {r['filler']}" if r["filled"] else ""
      rows.append([name, *(f"{r[key]:,}" for key in rows[0][1:4]), f"{r['filled']:,}{with_what}"])
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    for row in rows:
      cells = [row[0].ljust(widths[0]), *map(str.rjust, row[1:4], widths[1:]), row[4]]
      lines.append("  ".join(cells))
    lines.append("")
  if problems := report["problems"]:
    lines.append(f"{len(problems)} problem{'s' * (len(problems) > 1)}")
    lines += [f"  - {problem}" for problem in problems]
    lines.append(f"{report['zip']} was not written." if files else f"{report['zip']} is not valid.")
  else:
    lines.append(f"{report['zip']} is written." if files else f"{report['zip']} is valid.")
  return "\n".join(lines)
