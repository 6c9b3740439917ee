"""What a reader does with the study: advice, claims of the paper, what a winner weighs, README.

    verdicts, records of all studies, packed_cpu.json -> lines of Markdown

A hypothesis that is not decided gives the older tables instead, and they are called exploratory.
"""

from __future__ import annotations

import json
import math
import pathlib
import re
import statistics
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import _flips
import _recipes_report as older
import _study_report as report
import _study_tests as tests
from _recipes_rows import Run
from _study import Study

TASK, STEPS = "bigram80", "1600"
SEEDS = range(100, 108)  # of the older tables
SPEEDS = pathlib.Path(__file__).with_name("results") / "packed_cpu.json"
PATTERNS = ("1:4", "1:8", "1:16", "1:32")  # 2:4 was never run


class Old(NamedTuple):
  """A row of the older tables at a pattern, against another."""

  pattern: str
  row: str
  over: str = older.BASE


class Advice(NamedTuple):
  """What to do where a hypothesis is supported, contradicted, or not decided; and older figures."""

  supported: str
  contradicted: str
  undecided: str
  old: tuple[Old, ...]


EXPONENTIAL = "mdgf_exponential, masked"
ADVICE = {
  "H1": Advice(
    "Take a progressive recipe: it gains more than longer dense training does.",
    "Keep `sr_ste` and make its dense phase longer: no recipe gains beyond that.",
    "Run `mdgf_exponential` beside `sr_ste`, with your own budget and the same seeds.",
    (Old("1:16", EXPONENTIAL),),
  ),
  "H2": Advice(
    "Hold the learning rate constant with `sdgf_stepwise`.",
    "Leave `sdgf_stepwise`: a constant rate does not make up for what it loses.",
    "With a cosine, leave `sdgf_stepwise` with its usual 20 % of fine-tuning.",
    (Old("1:16", "sdgf_stepwise, masked"),),
  ),
  "H3": Advice(
    "Tune both: a lead over `sr_ste` survives its tuning.",
    "Tune `sr_ste` before you change the recipe: then no lead is left.",
    "Tune `sr_ste` as much as what you hold against it.",
    (Old("1:16", "sr_ste, 0 % dense"),),
  ),
  "H5": Advice(
    "Look to progressive recipes the more, the sparser the pattern is.",
    "Do not count on a larger gain where the pattern is sparser.",
    "Do not count on a larger gain where the pattern is sparser.",
    (Old("1:16", EXPONENTIAL), Old("1:32", EXPONENTIAL)),
  ),
  "H6": Advice(
    "Take a progressive recipe also where training FLOPs are what you pay.",
    "Take `sr_ste` where training FLOPs are what you pay.",
    "Count training FLOPs before you choose.",
    (),
  ),
}
# The paper's claim, and the hypothesis that is its test here; or why there is none.
CLAIMS = (
  ("Recipes that let gradients flow beat SR-STE at high sparsity.", "H1",
   "SR-STE is dense for as long"),
  ("They do so on examples that are held out: one recipe at 1:8.", "H11",
   "SR-STE is dense for as long"),
  ("They do so there: another recipe, or at 1:16.", "H12", "SR-STE is dense for as long"),
  ("They do so there: `sdgf_stepwise`.", "H13", "SR-STE is dense for as long"),
  ("High sparsity makes gradients noisier, and decay takes noise away.", "H4",
   "noise across batches at the same loss"),
  ("The gain grows with sparsity.", "H5", "over the same SR-STE"),
  ("The recipes are better at the same training FLOPs.", "H6", "those of SR-STE"),
  ("For T5 at 1:8 `sdgf_stepwise` is best; for ViT at 1:4 SR-STE is.", "",
   "it needs the paper's networks and data"),
  ("Up to 2 % are gained on images and 5 % on text.", "", "it needs the paper's networks and data"),
)  # fmt: skip
HERE = {"supported": "supported here", "contradicted": "contradicted here"}


def factor(records: tests.Records, old: Old) -> tuple[int, str]:
  """Returns how many seeds compare two older rows, and their ratio of cross-entropies in words."""
  log = lambda row, seed: math.log(
    records[Run(TASK, old.pattern, STEPS, row, seed)]["cross_entropy"]
  )
  there = [s for s in SEEDS if all(Run(TASK, old.pattern, STEPS, r, s) in records for r in old[1:])]
  d = [log(old.row, seed) - log(old.over, seed) for seed in there]
  if len(d) < 2:
    return len(d), "missing"
  ends = report.show_interval("", *_flips.interval(d))
  return len(d), f"{math.exp(statistics.fmean(d)):.3f} ({ends})"


def explored(records: tests.Records, each: tests.Verdict, olds: Sequence[Old]) -> str:
  """Says what the runs of a rejected task have, or the older tables; neither decides."""
  if each.there == each.wanted:
    best = max(each.shown, key=lambda shown: abs(shown.mean or 0.0))
    return (
      f"Exploratory, from its runs: {report.counts(each)}; the largest, {report.name_of(best)}, "
      f"{report.shown(best)}."
    )
  if not olds:
    price = lambda row: records[Run(TASK, "1:16", STEPS, row, SEEDS[0])]["flops"]
    ratio = price(EXPONENTIAL) / price(older.BASE)
    return (
      "The older tables at equal FLOPs are rejected, so they say nothing. At 1:16 "
      f"{EXPONENTIAL} costs {ratio:.2f} times the training FLOPs of {older.BASE}."
    )
  said = []
  for old in olds:
    n, words = factor(records, old)
    said.append(f"at {old.pattern} {old.row} over {old.over} {words}, {n} seeds")
  return f"Exploratory, from an older table (80 symbols, {STEPS} steps): {'; '.join(said)}."


def advice(records: tests.Records, said: Sequence[tests.Verdict]) -> list[str]:
  """Returns a line for each question, with its setting and interval."""
  lines = []
  for question in ADVICE:
    each = tests.answer(question, said)
    name = each.hypothesis.name
    does = getattr(ADVICE[question], each.word.removeprefix("not ").replace("decided", "undecided"))
    if each.word == "not decided":
      why = f"{name} is not decided: {each.why}. {explored(records, each, ADVICE[question].old)}"
    else:
      best = report.decisive(each)
      why = f"{name} is {each.word}: {report.name_of(best)}, {report.shown(best)}."
    lines.append(f"- **{does}** {why}{held_out(said) if question == 'H1' else ''}")
  return lines


def held_out(said: Sequence[tests.Verdict]) -> str:
  """Says what comes of H1 on words that are held out, hypothesis by hypothesis."""
  lines = []
  for each in said:
    cells = [shown.contrast.pair.row for shown in each.shown]
    if all(cell.task == "cmudict" for cell in cells):
      names = dict.fromkeys(f"`{cell.row.partition(',')[0]}`" for cell in cells)
      lines.append(f"{each.hypothesis.name} ({' and '.join(names)}) is {each.word}")
  return f" On words that are held out {', '.join(lines)}."


def claims(said: Sequence[tests.Verdict]) -> list[str]:
  """Returns the paper's claims with what this study says of each."""
  lines = []
  for claim, name, how in CLAIMS:
    if not name:
      lines.append([claim, "not testable here", how])
      continue
    each = tests.answer(name, said)
    word = "not testable here" if "is rejected" in each.why else HERE.get(each.word)
    word = word or ("not decided here" if each.is_open else "not yet decided")
    lines.append([claim, word, f"{each.hypothesis.name} ({how}; {where(each)}): {each.why}"])
  return older.markdown(("the claim, as asked here", "verdict", "by"), lines)


def where(each: tests.Verdict) -> str:
  """Says of which tasks and patterns the contrasts of a verdict are."""
  cells = [cell for c in each.hypothesis.contrasts for cell in c.cells]
  tasks = dict.fromkeys(report.TASKS[cell.task] for cell in cells)
  return f"{' and '.join(tasks)}, {' and '.join(patterns_of(each))}"


def patterns_of(each: tests.Verdict) -> list[str]:
  """Returns the patterns that the contrasts of a verdict compare."""
  found = {cell.pattern for c in each.hypothesis.contrasts for cell in c.cells}
  return [pattern for pattern in PATTERNS if pattern in found]


class Winner(NamedTuple):
  """The row with the least cross-entropy at a pattern, and what says so."""

  row: str
  task: str
  of: str
  records: list[Any]


def winner(
  pattern: str, records: tests.Records, said: Sequence[tests.Verdict], study: Study
) -> Winner | None:
  """Returns the best row of a pattern.

  The declared study chooses, among the rows of H1 or of what answers it, where all of its runs are
  there. Before that the older table does.
  """
  h1 = tests.answer("H1", said)
  tested = {c for c in h1.hypothesis.cells if c.pattern == pattern and c.budget == STEPS}
  if tested and h1.there == h1.wanted:
    found = {c.row: [records[r] for r in study.runs(c)] for c in tested}
    task, of = next(iter(tested)).task, "declared"
  else:
    names = {r.row for r in records if r[:3] == (TASK, pattern, STEPS) and r.seed in SEEDS}
    runs = {row: [Run(TASK, pattern, STEPS, row, s) for s in SEEDS] for row in names}
    found = {row: [records[run] for run in of if run in records] for row, of in runs.items()}
    most = max(map(len, found.values()), default=0)  # others have a part of the seeds
    found = {row: of for row, of in found.items() if len(of) == most}
    task, of = TASK, "older, exploratory"
  least = lambda row: statistics.fmean(math.log(r["cross_entropy"]) for r in found[row])
  best = min(sorted(found), key=least, default=None)
  return Winner(best, task, of, found[best]) if best else None


def packed_kib(pattern: str, task: str = TASK) -> tuple[float, float]:
  """Returns KiB of the feed-forward kernels of a network of the study: packed, and with zeros."""
  import _recipes_tasks

  import nm_sparsity_jax as nms
  from nm_sparsity_jax.core import packed
  from nm_sparsity_jax.core.groups import Groups

  net, n_m = _recipes_tasks.TASKS[task].sizes, nms.NM.parse(pattern)
  kernels = [(net.embed, net.mlp), (net.mlp, net.embed)] * net.layers
  sizes = [packed.sizes(packed.like(n_m, Groups(k, 0), "float32")) for k in kernels]
  return sum(s.total for s in sizes) / 1024, sum(s.dense for s in sizes) / 1024


def deployed(records: tests.Records, said: Sequence[tests.Verdict], study: Study) -> list[str]:
  """Returns what the winner scores, weighs and gains at 1:8 and 1:16."""
  measured = json.loads(SPEEDS.read_text("utf8"))
  speed = {
    (r["pattern"], r["rows"]): f"{r['mean']:.1f} ({r['least']:.1f})"
    for r in measured["ratios"]
    if r["backend"] == "cpu_ffi"
  }
  lines = []
  for pattern in ("1:8", "1:16"):
    if (best := winner(pattern, records, said, study)) is None:
      continue
    small, whole = packed_kib(pattern, best.task)
    lines.append([
      pattern, best.row, f"{report.TASKS[best.task]}, {best.of}, {len(best.records)} seeds",
      f"{older.mean_accuracy(best.records):.2f}",
      f"{small:.0f} of {whole:.0f} KiB", speed[pattern, 1], speed[pattern, 128],
    ])  # fmt: skip
  head = ("pattern", "least cross-entropy", "records", "accuracy, %", "packed kernels",
          "one row, times faster", "128 rows")  # fmt: skip
  widths = sorted({int(n) for shape in measured["shapes"] for n in shape.split("x")})
  return [
    *older.markdown(head, lines), "",
    *textwrap.wrap(
      f"The rows are of {STEPS} steps. Packed are their feed-forward kernels in "
      "float32, without the rest of the network. The speed is of products of "
      f"{widths[0]} to {widths[-1]} wide weights by `nm_dot` on {measured['cores']} core with "
      f"{measured['isa']}, over XLA's dense product: the mean over shapes, and in brackets the "
      "least of them. It is not of this network.",
      110,
    ),
  ]  # fmt: skip


def of_pattern(pattern: str, tables: Sequence[older.Table], rows: Mapping[str, Any]) -> str:
  """Returns README's line of a pattern: what is ahead of SR-STE in both older tables."""
  asked = [
    t for t in tables
    if t.pattern == pattern and (t.task, t.budget) in (("bigram", "400"), (TASK, STEPS))
  ]  # fmt: skip
  ahead, seeds = [], min(len(t.rows[older.BASE]) for t in asked)
  for table in asked:
    compared = older.compare(table, rows)
    ahead.append({n for n, (d, p) in compared.items() if p is not None and p < _flips.LEVEL
                  and d.mean < 0})  # fmt: skip
  both = [name for name in rows if all(name in each for each in ahead)]
  modes: dict[str, list[str]] = {}
  for name in both:
    modes.setdefault(rows[name].recipe, []).append(f"`{rows[name].mode}`")
  named = " and ".join(f"`{recipe}` with {' and '.join(m)}" for recipe, m in modes.items())
  word = "are" if len(modes) > 1 else "is"
  said = f"{named} {word} ahead" if both else "no recipe is ahead"
  return f"- **{pattern}:** {said} in both tables ({seeds} seeds)."


def readme(
  records: tests.Records, study: Study, runs: Sequence[Any], rows: Mapping[str, Any]
) -> list[str]:
  """Returns the lines of README's advice, one for each pattern that was run.

  Args:
    records: of all studies, by run.
    study: the declared one.
    runs: of the older tables.
    rows: of the older tables.
  """
  said = tests.verdicts({run: records[run] for run in study.queue if run in records}, study)
  tables, lines = older.split(records, runs, rows), []
  for pattern in PATTERNS:
    line = of_pattern(pattern, tables, rows)
    asked = [each for each in said if "H1" in (each.hypothesis.name, each.hypothesis.again)]
    if asked := [each for each in asked if pattern in patterns_of(each)]:
      ahead = beyond(tests.answer("H1", asked), pattern)
      line += f" Ahead of an `sr_ste` that is dense for as long{ahead}."
    lines.append(line)
  return lines


def replace(text: str, lines: Sequence[str]) -> str:
  """Puts each line in the place of the one that begins with the same pattern."""
  for line in lines:
    start = re.escape(line.partition(":**")[0])
    text, n = re.subn(rf"^{start}:\*\*.*$", lambda _, line=line: line, text, flags=re.MULTILINE)
    if n != 1:
      raise ValueError(f"README has {n} lines that begin with {line[:12]!r}: it needs one.")
  return text


def sections(records: tests.Records, study: Study) -> dict[str, list[str]]:
  """Returns the generated parts of the page that are of the declared study, by name."""
  mine = {run: records[run] for run in study.queue if run in records}
  said = tests.verdicts(mine, study)
  return {
    "advice": advice(records, said),
    "study": report.section(records, study),
    "claims": claims(said),
    "deployed": deployed(records, said, study),
    "study_tables": report.tables(records, study),
  }


def beyond(h1: tests.Verdict, pattern: str) -> str:
  """Says which recipes of a pattern gain beyond SR-STE that is dense for as long."""
  if h1.word == "not decided":
    return ": not decided" if h1.there == h1.wanted else ": not decided yet"
  shown = [each for each in h1.shown if each.contrast.pair.row.pattern == pattern]
  gains = [each.contrast.pair.row.row for each in shown if each.says == "holds"]
  seeds = len(shown[0].differences)
  of = f" ({report.TASKS[shown[0].contrast.pair.row.task]}, {seeds} seeds)"
  return f"{of}: {'; '.join(f'`{row}`' for row in gains) or 'no recipe'}"
