"""Which recipe to use: rows paired by seed, as benchmarks/study.toml declares them.

    python benchmarks/recipes.py --out STUDY.jsonl                 all runs, on one core
    python benchmarks/recipes.py --out STUDY.jsonl --worker 0/2    half of them; 1/2 beside it
    python benchmarks/recipes.py --out R.jsonl --task rebus        a ViT on generated pictures
    python benchmarks/recipes.py --list
    python benchmarks/recipes.py --report       committed records -> docs/results.md, README

    queue -> what STUDY.jsonl lacks -> train -> one line of JSON each -> STUDY.jsonl -> page

A budget is a number of steps, or "1600 flops": the steps that cost what 1600 dense ones do. `dense`
and `no_ff` (no feed-forward layers) show how much there is to win.

A run depends on its line alone, one of translation also on its dense start. It has one thread, so
the same bits on any number of cores. A killed one is done again. Stop and start at will; workers
may write to one file.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import functools
import os
import pathlib
import re
import sys
import zlib
from collections.abc import Mapping
from typing import Any

import _study
import _timing
from _recipes_file import RESULTS, Row, Run, append, read

ROOT = pathlib.Path(__file__).parents[1]

# Rebus: SR-STE that is dense for as long as another row. What such a row has beyond it, it owes to
# the way to its pattern.
MATCHED = {
  "mdgf_exponential, masked": "sr_ste, 19 % dense",
  "sdgf_stepwise, masked": "sr_ste, 33 % dense",
  "mdgf_linear, masked": "sr_ste, 40 % dense",
}
REBUS = {
  name: _study.study().rows[name]
  for name in ("dense", "no_ff", "sr_ste, 10 % dense", *MATCHED, *MATCHED.values())
} | {"one_shot": Row("one_shot")}
REBUS_SEEDS = range(400, 408)


def rebus_runs() -> list[Run]:
  """Returns rows seed by seed: first those of the quickstart, then what they are held against."""
  names = tuple(REBUS)
  runs = [
    Run("rebus", "1:16" if REBUS[name].sparse else "-", "540", name, seed)
    for rows in (names[:6], names[6:9], names[9:])
    for seed in REBUS_SEEDS
    for name in rows
  ]
  return runs + [Run("rebus", "-", "540 flops", "no_ff", seed) for seed in REBUS_SEEDS]


def grid(task: str) -> list[Run]:
  """Returns all runs of a task, each once, the most wanted first."""
  return rebus_runs() if task == "rebus" else list(_study.study().queue)


def share(runs: list[Run], worker: int, workers: int) -> list[Run]:
  """Returns what one of several workers does: whole rows, each compiled once for all seeds."""
  # By the row alone, so that it stays with its worker when others join the queue.
  owner = lambda run: zlib.crc32("/".join(run[:4]).encode()) % workers
  return [run for run in runs if owner(run) == worker]


def steps_of(run: Run, row: Row) -> int:
  """Returns the length of a run: "1600", "1600 flops" or "flops of 1600 sr_ste at 1:16"."""
  if run.budget.isdigit():
    return int(run.budget)
  import _recipes_train as trained

  number, recipe, pattern = run.budget.split()[0], "dense", "-"
  if run.budget.startswith("flops of "):
    number, recipe, _, pattern = run.budget.split()[2:]
  task, steps = trained.TASKS[run.task], int(number)
  price = trained.training_flops(task, Row(recipe), pattern, steps)
  return trained.affordable(task, row, run.pattern, price, 4 * steps)


def row_of(run: Run, done: Mapping[Run, Any]) -> Row | None:
  """Returns how a run trains; None for a row of the study that waits for tuning."""
  if run.task == "rebus":
    return REBUS[run.row]
  return _study.row_of(_study.study()._replace(records=done), run.row)


def onlooker_of(run: Run, row: Row):
  """Returns what measures the noise of a sparse run of a table; None for the others."""
  if not row.sparse or "bigram" not in run.task:
    return None
  import _study_noise

  batches = _study.study().declared["microbatches"]
  return functools.partial(_study_noise.onlooker, batches=batches)


def most_wanted(runs: list[Run], done: Mapping[Run, Any]) -> tuple[Run, Row] | None:
  """Returns the first run that is not there, and how it trains; None where nothing may run."""
  for run in runs:
    # A tuned row whose tuning is not over has no settings yet.
    if run not in done and (row := row_of(run, done)):
      return run, row
  return None


def work(runs: list[Run], path: pathlib.Path) -> None:
  """Does the runs that the file lacks, the most wanted first."""
  done = read(path)
  print(f"{sum(run in done for run in runs)} of {len(runs)} runs are there.", flush=True)
  while wanted := most_wanted(runs, done):
    run, row = wanted
    result = one(run, row)
    append(path, result)
    done = read(path)  # another worker may have ended a tuning
    print(
      f"{result['utc']} {' | '.join(map(str, run))}: {100 * result['accuracy']:.2f} %, "
      f"{result['cross_entropy']:.4f}, {result['seconds']} s",
      flush=True,
    )


def one(run: Run, row: Row) -> dict[str, Any]:
  """Does a run, and returns its record."""
  steps = steps_of(run, row)
  if run.task.startswith("debian_ende"):  # imports seqio and TensorFlow
    import _recipes_translation

    result = _recipes_translation.train(run.task, row, run.pattern, steps, run.seed)
  else:
    import _recipes_train

    onlooker = onlooker_of(run, row)
    result = _recipes_train.train(run.task, row, run.pattern, steps, run.seed, onlooker)
  now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
  # When it ended and what was declared then, so that a reader can see which came first.
  made = {"utc": now, "study_sha256": _study.study().sha256}
  return run._asdict() | result | {"settings": dataclasses.asdict(row)} | made


def write_report(root: pathlib.Path) -> None:
  """Writes what is generated of README and docs/, from the committed records."""
  import _study_page
  import _study_picture

  records = {}
  for name in ("recipes_study.jsonl", "recipes_rebus.jsonl"):
    records |= read(RESULTS / name)
  study = _study.study()._replace(records=records)
  for name, parts in _study_page.pages(study).items():
    page = root / name
    text = page.read_text("utf8")
    for part, lines in parts.items():
      text = _study_page.fill(text, part, lines)
    page.write_text(text, "utf8")
  _study_picture.write(root / "docs", study)


def parse_worker(text: str) -> tuple[int, int]:
  worker, workers = (int(x) for x in text.split("/"))
  if not 0 <= worker < workers:
    raise ValueError(f"{text!r}: give I/N with 0 <= I < N, such as 0/2.")
  return worker, workers


def main(argv: list[str] | None = None) -> int:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--out", type=pathlib.Path, help="file of results, added to")
  parser.add_argument("--task", choices=("study", "rebus"), default="study")
  parser.add_argument("--worker", type=parse_worker, default=(0, 1), metavar="I/N")
  parser.add_argument(
    "--only",
    type=re.compile,
    default=re.compile(""),
    help="runs in whose task/pattern/budget/row this regex is found",
  )
  parser.add_argument("--list", action="store_true", help="show the runs and do none")
  parser.add_argument("--report", action="store_true", help="write what the pages show of records")
  args = parser.parse_args(argv)
  if args.report:
    write_report(ROOT)
    return 0
  runs = share(grid(args.task), *args.worker)
  runs = [run for run in runs if args.only.search("/".join(run[:4]))]
  if args.list:
    print("\n".join(" | ".join(map(str, run)) for run in runs))
    return 0
  if args.out is None:
    parser.error("--out: where do the results go?")
  os.environ["PJRT_NPROC"] = "1"  # one thread also where a process cannot be pinned
  _timing.pin(args.worker[0] % (os.cpu_count() or 1))
  work(runs, args.out)
  return 0


if __name__ == "__main__":
  sys.exit(main())
