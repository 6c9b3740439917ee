"""Which recipe to use: all of them on one task, paired by seed, at several patterns and budgets.

    python benchmarks/recipes.py --out RUNS.jsonl                  all runs, on one core
    python benchmarks/recipes.py --out RUNS.jsonl --worker 0/2     half of them; 1/2 elsewhere
    python benchmarks/recipes.py --out MINI.jsonl --task mini_glue from dense starts
    python benchmarks/recipes.py --out E.jsonl --task earlier      another plan of phases
    python benchmarks/recipes.py --out R.jsonl --task rebus        a ViT on generated pictures
    python benchmarks/recipes.py --out S.jsonl --task study        benchmarks/STUDY.md
    python benchmarks/recipes.py --out DIGITS.jsonl --task digits  a smoke test
    python benchmarks/recipes.py --list
    python benchmarks/recipes.py --report            committed records -> docs/results.md, pictures
    python benchmarks/recipes.py --report RUNS.jsonl [DIGITS.jsonl] [--into PAGE.md]

    grid -> what RUNS.jsonl lacks -> train -> one line of JSON each -> RUNS.jsonl -> tables

The task is a random table, y[t] = table[x[t - 1], x[t]] for 40 symbols, which takes feed-forward
layers to learn in 400 steps; in 1600 it takes 80 symbols ("bigram80"). A 2-layer transformer
(width 128, 512 in between, 12 tokens), AdamW 1e-3 with warm-up and a cosine to 0, batches of 64.
Feed-forward kernels are sparse. A budget is a number of steps, or "400 flops": the steps that cost
what 400 dense ones do. `dense` and `no_ff` (no feed-forward layers) show how much there is to win.

A run depends on its line alone: it has one thread, so the same bits on any number of cores. A
killed one is done again. Stop and start at will, with as many processes as you like on one file.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import os
import pathlib
import re
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

import _study
import _timing
from _recipes_file import append, claims, read
from _recipes_rows import Row, Run

RESULTS = pathlib.Path(__file__).with_name("results")
README = pathlib.Path(__file__).parents[1] / "README.md"
PAGE = pathlib.Path(__file__).parents[1] / "docs" / "results.md"

# A frozen mask is the same in both modes: what it prunes is never used again. SR-STE and IDP are
# defined by the straight-through gradient.
ROWS: dict[str, Row] = {
  "dense": Row("dense"),
  "no_ff": Row("dense", ff=False),
  "one_shot": Row("one_shot"),
  "snip": Row("snip"),
  "sr_ste, 0 % dense": Row("sr_ste", dense=0),
  "sr_ste, 10 % dense": Row("sr_ste"),
  "mdgf_linear, masked": Row("mdgf_linear", "masked"),
  "mdgf_linear, straight_through": Row("mdgf_linear", "straight_through"),
  "mdgf_exponential, masked": Row("mdgf_exponential", "masked"),
  "mdgf_exponential, straight_through": Row("mdgf_exponential", "straight_through"),
  "sdgf_stepwise, masked": Row("sdgf_stepwise", "masked"),
  "sdgf_stepwise, straight_through": Row("sdgf_stepwise", "straight_through"),
  "sdgf_geometric, masked": Row("sdgf_geometric", "masked"),
  "sdgf_geometric, straight_through": Row("sdgf_geometric", "straight_through"),
  "idp": Row("idp"),
  "sdgf_stepwise x exponential, masked": Row("sdgf_stepwise", "masked", decay_kind="exponential"),
  "sdgf_stepwise x exponential, straight_through": Row(
    "sdgf_stepwise", "straight_through", decay_kind="exponential"
  ),
}
DIGITS_ROWS = (
  "dense", "no_ff", "sr_ste, 10 % dense", "mdgf_exponential, masked", "sdgf_stepwise, masked",
)  # fmt: skip


# Does it help a recipe that walks to the target pattern to arrive there earlier?
EARLIER = {
  f"{name}, 50 % fine-tuning": dataclasses.replace(ROWS[name], finetune=50)
  for name in (
    "mdgf_linear, masked", "mdgf_exponential, masked", "sdgf_stepwise, masked", "idp",
  )
}  # fmt: skip
# SR-STE that is dense for as long as another row, by `_recipes_train.exposure`: what such a row has
# beyond it, it owes to the way to its pattern. Percents are the nearest ones.
MATCHED = {
  "mdgf_exponential, masked": "sr_ste, 19 % dense",
  "sdgf_stepwise, masked": "sr_ste, 33 % dense",
  "mdgf_linear, masked": "sr_ste, 40 % dense",
}
REBUS = (
  {name: ROWS[name] for name in ("dense", "no_ff", "sr_ste, 10 % dense", *MATCHED)}
  | {name: Row("sr_ste", dense=int(name.split()[1])) for name in MATCHED.values()}
  | {"one_shot": ROWS["one_shot"]}
)
ALL_ROWS = ROWS | EARLIER | REBUS


def bigram_grid() -> Iterator[Run]:
  """Yields the most wanted runs first. A stage goes seed by seed, so all rows have equally many."""
  eight, three = range(100, 108), range(100, 103)
  high, low = ("1:16", "1:32"), ("1:8", "1:4")
  stages = (
    (eight, (("bigram", "400", high),)),
    (three, (("bigram", "400", low),)),
    (eight, (("bigram80", "1600", high),)),
    (three, (("bigram80", "1600", low),)),
    # Tables that no_ff learns too, which has no pattern: as many as show it.
    (three, (("bigram", "400 flops", high), ("bigram", "1600", ("1:32",)))),
    (three[:1], (("bigram", "1600", ("1:16", "1:8", "1:4")),)),
  )
  for seeds, tables in stages:
    for seed in seeds:
      for task, budget, patterns in tables:
        for pattern in patterns:
          for name, row in ROWS.items():
            if budget == "400 flops" and name == "dense":
              continue  # that is 400 steps
            yield Run(task, pattern if row.sparse else "-", budget, name, seed)


def digits_grid() -> Iterator[Run]:
  for name in DIGITS_ROWS:
    yield Run("digits", "1:32" if ROWS[name].sparse else "-", "300", name, 100)


def mini_glue_grid() -> Iterator[Run]:
  for seed in range(200, 203):
    for pattern in ("1:8", "1:32"):
      for name, row in ROWS.items():
        yield Run("mini_mnli", pattern if row.sparse else "-", "600", name, seed)


def earlier_grid() -> Iterator[Run]:
  for task, patterns, budget, seeds in (
    ("bigram80", ("1:16",), "1600", range(100, 103)),
    ("mini_mnli", ("1:8", "1:32"), "600", range(200, 203)),
  ):
    for seed in seeds:
      for pattern in patterns:
        for name in EARLIER:
          yield Run(task, pattern, budget, name, seed)


def rebus_grid() -> Iterator[Run]:
  """Yields rows seed by seed: first those of the quickstart, then what they are held against."""
  seeds, names = range(400, 408), tuple(REBUS)
  for rows in (names[:6], names[6:9], names[9:]):
    for seed in seeds:
      for name in rows:
        yield Run("rebus", "1:16" if REBUS[name].sparse else "-", "540", name, seed)
  for seed in seeds:
    yield Run("rebus", "-", "540 flops", "no_ff", seed)


def study_grid() -> Iterator[Run]:
  yield from _study.study().queue


GRIDS = {
  "bigram": bigram_grid,
  "earlier": earlier_grid,
  "mini_glue": mini_glue_grid,
  "digits": digits_grid,
  "rebus": rebus_grid,
  "study": study_grid,
}


def grid(task: str) -> list[Run]:
  """Returns all runs of a task, each once."""
  return list(dict.fromkeys(GRIDS[task]()))


def share(runs: list[Run], worker: int, workers: int) -> list[Run]:
  """Returns what one of several workers does: whole rows, each compiled once for all seeds."""
  rows = {row: i for i, row in enumerate(dict.fromkeys(run._replace(seed=0) for run in runs))}
  return [run for run in runs if rows[run._replace(seed=0)] % workers == worker]


def steps_of(run: Run, row: Row | None = None) -> int:
  """Returns the length of a run: "1600", "400 flops" or "flops of 1600 sr_ste at 1:16"."""
  if run.budget.isdigit():
    return int(run.budget)
  import _recipes_train as trained

  task, row = trained.TASKS[run.task], row or ALL_ROWS[run.row]
  if not run.budget.startswith("flops of "):
    return trained.equal_steps(task, row, run.pattern, int(run.budget.split()[0]))
  number, recipe, _, pattern = run.budget.removeprefix("flops of ").split()
  price = trained.training_flops(task, Row(recipe), pattern, int(number))
  return trained.affordable(task, row, run.pattern, price, 4 * int(number))


def row_of(run: Run, done: Mapping[Run, Any]) -> Row | None:
  """Returns how a run trains; None for a row of the study that waits for tuning."""
  if run in _study.study().queue:
    return _study.row_of(_study.study(), run.row, done)
  return ALL_ROWS[run.row]


def onlooker_of(run: Run, row: Row):
  """Returns what measures the noise of a run of the study; None for the others."""
  if run not in _study.study().queue or not row.sparse or "bigram" not in run.task:
    return None
  import _study_noise

  batches = _study.study().declared["microbatches"]
  return functools.partial(_study_noise.Onlooker, batches=batches)


def work(runs: list[Run], path: pathlib.Path, most: int | None = None) -> None:
  """Does the runs that the file lacks and no other process is at, in order; at most so many."""
  done, torn = read(path)
  if torn:
    print(f"{path}: {torn} torn lines are left out; their runs are done again.", flush=True)
  left = [run for run in runs if run not in done]
  print(f"{len(runs) - len(left)} of {len(runs)} runs are there.", flush=True)
  if waiting := [run for run in left if row_of(run, done) is None]:
    print(f"{len(waiting)} runs wait for tuning.", flush=True)
    left = [run for run in left if run not in waiting]
  with claims(path) as mine:
    free = (run for run in left if mine.take(run))
    for i, run in enumerate(itertools.islice(free, most), 1):
      done[run] = result = one(run, done)
      append(path, result)
      print(
        f"{time.strftime('%H:%M:%S')} {i}/{len(left)} {' | '.join(map(str, run))}: "
        f"{100 * result['accuracy']:.2f} %, {result['cross_entropy']:.4f}, {result['seconds']} s",
        flush=True,
      )


def one(run: Run, done: Mapping[Run, Any]) -> dict[str, Any]:
  """Does a run, and returns its record."""
  import _recipes_train

  row = row_of(run, done)
  result = _recipes_train.train(
    run.task, row, run.pattern, steps_of(run, row), run.seed, onlooker_of(run, row)
  )
  return run._asdict() | result | {"settings": dataclasses.asdict(row)}


def results_of(paths: list[pathlib.Path]) -> dict[Run, dict[str, Any]]:
  """Returns the records of several results files, by run."""
  records: dict[Run, dict[str, Any]] = {}
  for path in paths:
    if not path.exists():
      raise ValueError(f"there are no results at {path}.")
    more, torn = read(path)
    if torn:
      print(f"{path}: {torn} torn lines are left out.", file=sys.stderr)
    if both := records.keys() & more.keys():
      raise ValueError(f"{path} repeats {len(both)} runs of the other files, such as {both.pop()}.")
    records |= more
  if odd := records.keys() - {run for name in GRIDS for run in grid(name)}:
    raise ValueError(f"{len(odd)} results are of no run of the grid, such as {min(odd)}.")
  return records


def pictures(records: dict[Run, dict[str, Any]]) -> dict[str, str]:
  """Returns name -> SVG text: the picture of the README, and those of the study."""
  import _recipes_picture
  import _recipes_report as report
  import _study_picture

  tables = report.split(records, grid("bigram"), ROWS)
  readme = _recipes_picture.svg(_recipes_picture.panels(tables))
  return {"recipes.svg": readme} | _study_picture.pictures(records, _study.study())


def sections(records: dict[Run, dict[str, Any]]) -> dict[str, list[str]]:
  """Returns the generated parts of docs/results.md, by name."""
  import _recipes_report as report
  import _study_advice

  runs = grid("bigram")
  return {
    "bigram": report.tables(records, runs, ROWS),
    "mini_glue": report.tables(records, grid("mini_glue"), ROWS),
    "modes": report.modes(records, [runs, grid("mini_glue")], ROWS),
    "courses": report.courses(records, runs, ROWS),
    "earlier": report.earlier(records, grid("earlier")),
    "variances": report.variances(records, runs, ROWS),
    "digits": report.digits(records, grid("digits"), ROWS),
    "rebus": rebus(records),
  } | _study_advice.sections(records, _study.study())


def readme(records: dict[Run, dict[str, Any]]) -> str:
  """Returns README with the lines of its advice as the records have them."""
  import _study_advice

  lines = _study_advice.readme(records, _study.study(), grid("bigram"), ROWS)
  return _study_advice.replace(README.read_text("utf8"), lines)


def rebus(records: dict[Run, dict[str, Any]]) -> list[str]:
  """Returns the section of the ViT on generated pictures."""
  import _rebus_report
  import _recipes_train

  exposure = {name: _recipes_train.exposure(row, "1:16", 540) for name, row in REBUS.items()}
  return _rebus_report.section(records, grid("rebus"), REBUS, MATCHED, exposure)


def write_report(paths: list[pathlib.Path], page: pathlib.Path | None) -> None:
  """Prints the tables; or puts them between the markers of a page, and a picture beside it.

  Without paths it reads all records that are committed, and writes docs/results.md.
  """
  import _recipes_report as report

  page = page if paths else page or PAGE
  records = results_of(paths or sorted(RESULTS.glob("recipes*.jsonl")))
  parts = sections(records)
  if page is None:
    print("\n\n".join("\n".join([f"## {name}", "", *part]) for name, part in parts.items()))
    return
  text = page.read_text("utf8")
  for name, lines in parts.items():
    text = report.fill(text, name, lines)
  page.write_text(text, "utf8")
  if page == PAGE:
    README.write_text(readme(records), "utf8")
  for name, drawn in pictures(records).items():
    page.with_name(name).write_text(drawn, "utf8")


def parse_worker(text: str) -> tuple[int, int]:
  try:
    worker, workers = (int(x) for x in text.split("/"))
  except ValueError:
    worker, workers = 0, 0
  if not 0 <= worker < workers:
    raise argparse.ArgumentTypeError(f"{text!r}: give I/N with 0 <= I < N, such as 0/2.")
  return worker, workers


def main(argv: list[str] | None = None) -> int:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--out", type=pathlib.Path, help="file of results, added to")
  parser.add_argument("--task", choices=tuple(GRIDS), default="bigram")
  parser.add_argument("--worker", type=parse_worker, default=(0, 1), metavar="I/N")
  parser.add_argument(
    "--only",
    type=re.compile,
    default=re.compile(""),
    help="runs in whose task/pattern/budget/row this regex is found",
  )
  parser.add_argument("--seeds", type=int, help="at most this many seeds of each row")
  parser.add_argument("--most", type=int, help="at most this many runs now; the rest later")
  parser.add_argument("--core", type=int, help="processor to run on; the I-th by default")
  parser.add_argument(
    "--programs", type=pathlib.Path, help="folder of compiled programs, kept for the next process"
  )
  parser.add_argument("--list", action="store_true", help="show the runs and do none")
  parser.add_argument("--report", type=pathlib.Path, nargs="*", metavar="RUNS", help="show tables")
  parser.add_argument("--into", type=pathlib.Path, metavar="PAGE", help="where --report writes")
  args = parser.parse_args(argv)
  if args.report is not None:
    write_report(args.report, args.into)
    return 0
  runs = share(grid(args.task), *args.worker)
  name = lambda run: f"{run.task}/{run.pattern}/{run.budget}/{run.row}"
  runs = [run for run in runs if args.only.search(name(run))]
  if args.seeds is not None:
    chosen = sorted({run.seed for run in runs})[: args.seeds]
    runs = [run for run in runs if run.seed in chosen]
  if args.list:
    print("\n".join(" | ".join(map(str, run)) for run in runs))
    return 0
  if args.out is None:
    parser.error("--out: where do the results go?")
  os.environ["PJRT_NPROC"] = "1"  # one thread also where a process cannot be pinned
  core = args.worker[0] % (os.cpu_count() or 1) if args.core is None else args.core
  _timing.pin(core)
  if args.programs is not None:
    import _recipes_train

    _recipes_train.keep_programs(
      args.programs / f"core-{core}"
    )  # jax writes a file in place: one for a process
  work(runs, args.out, args.most)
  return 0


if __name__ == "__main__":
  sys.exit(main())
