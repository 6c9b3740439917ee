"""What docs/results*.md and README show of the records: each part is generated between two markers.

records -> [verdicts], cells -> [pages] -> lines of Markdown -> [fill] -> a page
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import _study_statistics as statistic
import jax.numpy as jnp
from _recipes_file import RESULTS
from _study import Cell, Contrast, Pair, Study, tuned, tuning_losses
from _study_statistics import Shown, Verdict

from nm_sparsity_jax.core import packed

TASKS = {
  "bigram80": "80 symbols",
  "bigram160": "160 symbols",
  "mini_mnli": "mini MNLI",
  "cmudict": "words",
  "cmudict_1_8": "words, width 48",
  "cmudict_1_16": "words, width 36",
}
WORDS = ("cmudict", "1000")  # task and budget of the words that are held out
PATTERNS = ("1:8", "1:16")
RATES = (1e-3, 4e-3)  # of tuning
AGAIN = ", tuned again on words"
BASE = "sr_ste, 10 % dense"
LINEAR = "mdgf_linear, masked, 50 % fine-tuning"
EXPONENTIAL = "mdgf_exponential, masked"
STEPWISE = "sdgf_stepwise, masked, 50 % fine-tuning"
CONTROL = "sr_ste, 30 % dense"  # of LINEAR: dense for as long
# Row of the table of choice -> its phases in a program of T steps.
CHOICE = {
  "dense": "",
  BASE: "dense=T // 10",
  CONTROL: "dense=3 * T // 10",
  LINEAR: "dense=T // 10, finetune=T // 2",
  EXPONENTIAL: "dense=T // 10, finetune=T // 5",
  STEPWISE: "dense=T // 10, finetune=T // 2",
}
# The paper's claim, the hypotheses that ask it here, and what a reader must know of them.
CLAIMS = (
  ("Recipes that let gradients flow beat SR-STE at high sparsity.",
   ("H1", "H7", "H11", "H12", "H13"), "over an SR-STE that is dense for as long, at lambda 2e-4"),
  ("High sparsity makes gradients noisier, and decay takes noise away.", ("H4", "H10"),
   "at the same loss; SR-STE is sparse there, a recipe not yet"),
  ("The gain grows with sparsity.", ("H5", "H9"), "160 symbols at 1:16 are a floor for all rows"),
  ("The recipes are better at the same training FLOPs.", ("H6",), "asked of 80 symbols alone"),
  ("For T5 at 1:8 `sdgf_stepwise` is best; for ViT at 1:4 SR-STE is.", (),
   "needs the paper's networks and data"),
  ("Up to 2 % are gained on images and 5 % on text.", (), "needs the paper's networks and data"),
)  # fmt: skip


def table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> list[str]:
  row = lambda cells: f"| {' | '.join(cells)} |"
  return [row(head), row(["---"] * len(head)), *map(row, lines)]


def fill(page: str, name: str, lines: Sequence[str]) -> str:
  """Returns the page, with `lines` between its markers of that name."""
  begin, end = f"<!-- begin {name}: generated -->", f"<!-- end {name} -->"
  pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
  text, n = pattern.subn(lambda _: "\n".join([begin, "", *lines, "", end]), page)
  if n != 1:
    raise ValueError(f"the page has {n} parts {name!r}: it needs one {begin} and one {end}.")
  return text


def label(row: str) -> str:
  """Returns a row's name as the page has it: each progressive row is `masked`."""
  return row.replace(", masked", "")


def factor(measure: str, x: float) -> str:
  """Returns a difference as a reader takes it: in points, or a factor of the measured thing."""
  return f"{math.exp(x):.3f}" if measure.startswith("ln ") else f"{x:+.1f}"


def mean_of(shown: Shown) -> str:
  """Returns the mean of a contrast and its interval."""
  measure = shown.contrast.measure
  mean, *ends = (factor(measure, x) for x in (shown.mean, shown.low, shown.high))
  return f"{mean} ({ends[0]} to {ends[1]})"


def show_p(p: float) -> str:
  return f"{p:.3f}".removeprefix("0")


def name_of(contrast: Contrast) -> str:
  """Says which cells a contrast compares."""
  row, over = contrast.pair
  text = f"{TASKS[row.task]}, {row.pattern}: {label(row.row)} over {label(over.row)}"
  if over.pattern not in (row.pattern, "-"):
    text += f" at {over.pattern}"
  if contrast.beyond:
    other = contrast.beyond.row
    same = (row.row, over.row) == (other.row, contrast.beyond.over.row)
    pair = "" if same else f" {label(other.row)} over {label(contrast.beyond.over.row)}"
    text += f", beyond{pair}" + (f" {other.pattern}" if other.pattern != row.pattern else "")
  return text


def geometric(records: Iterable[Mapping[str, Any]], measure: str) -> float:
  return statistics.geometric_mean(record[measure] for record in records)


def word_cell(row: str, pattern: str) -> Cell:
  task, budget = WORDS
  return Cell(task, pattern if row != "dense" else "-", budget, row)


def wrong_phonemes(row: str, pattern: str, study: Study) -> tuple[float, float, float]:
  """Returns the percent of wrong phonemes of a row, and its interval of 95 %."""
  cell = word_cell(row, pattern)
  logs = [*statistic.of_seeds(cell, "ln phoneme error rate", study).values()]
  low, high = statistic.interval(logs, study.declared["level"])
  return tuple(100 * math.exp(x) for x in (statistics.fmean(logs), low, high))


def price(row: str, pattern: str, study: Study) -> float:
  """Returns the training FLOPs of a row over those of dense."""
  flops = lambda cell: study.records[study.runs(cell)[0]]["flops"]
  return flops(word_cell(row, pattern)) / flops(word_cell("dense", "-"))


def choice(study: Study) -> list[str]:
  """Returns the table of choice, on words that are held out."""
  lines = []
  for row, phases in CHOICE.items():
    cells = []
    for pattern in PATTERNS:
      mean, low, high = wrong_phonemes(row, pattern, study)
      cells += [f"{mean:.1f} ({low:.1f} to {high:.1f})"]
      cells += [f"{price(row, pattern, study):.2f}"]
    code = f'`"{row.partition(",")[0]}"`, `Phases(total=T, {phases})`' if phases else ""
    lines.append([label(row), *cells, code])
  head = ["", *(h for p in PATTERNS for h in (f"{p}: wrong phonemes, %", "FLOPs"))]
  return table([*head, "recipe and phases"], lines)


def packed_weights() -> list[str]:
  """Returns what packed float32 weights cost, by the records of benchmarks/packed.py."""
  record = json.loads((RESULTS / "packed_cpu.json").read_text())
  times = {(x["backend"], x["pattern"], x["rows"]): x["mean"] for x in record["rows"]}
  said = []
  for pattern in PATTERNS:
    size = packed.pack(jnp.zeros((1024, 1024)), pattern).nbytes / 2**22
    speed = times["cpu_ffi", pattern, 1]
    said.append(
      f"At {pattern} they have {size:.2f} of the bytes and are {speed:.1f} times as fast."
    )
  return [
    "Packed weights beside dense ones, float32, in products with one row of inputs on one core "
    f"({record['processor']}):",
    *said,
    "[performance.md](performance.md) has more.",
  ]


def explored(study: Study) -> list[str]:
  """Returns contrasts of words that no hypothesis asked."""
  pair = lambda row, over, p: Pair(word_cell(row, p), word_cell(over, p))
  contrast = lambda pair, beyond=None: Contrast(pair, beyond, "ln phoneme error rate", "less")
  low, high = PATTERNS
  families = [[contrast(pair(LINEAR, EXPONENTIAL, pattern))] for pattern in PATTERNS]
  controls = ((LINEAR, CONTROL), (EXPONENTIAL, "sr_ste, 19 % dense"))
  families += [[contrast(pair(*rows, high), pair(*rows, low)) for rows in controls]]
  found = [shown for family in families for shown in statistic.family(family, study)]
  return table(CONTRAST_HEAD, [contrast_line("", shown) for shown in found])


def lambda_lines(study: Study) -> list[str]:
  """Returns the pair of LINEAR and CONTROL at each lambda that was tried."""
  losses = lambda row, **settings: tuning_losses(study, tuned(study, row, **settings))
  linear = losses("mdgf_linear, tuned", rate=RATES[1], dense=10, finetune=50)
  lines = []
  for lam in study.declared["tunings"]["tuning"]["recipes"]["sr_ste"]["grid"]["lam"]:
    over = losses("sr_ste, tuned", rate=RATES[1], dense=30, lam=lam)
    ratios = [a / b for a, b in zip(linear, over, strict=True)]
    mean = statistics.geometric_mean(ratios)
    lines.append([f"{lam:g}", f"{mean:.3f}", f"{min(ratios):.3f} to {max(ratios):.3f}"])
  head = ("lambda of `sr_ste`", "cross-entropy of `mdgf_linear` over it", "of three seeds")
  return table(head, lines)


def tuning(study: Study) -> list[str]:
  """Returns what the rate is worth, and each recipe at its best setting, on fresh seeds."""
  h3 = statistic.verdict(study.hypotheses["H3"], study)
  over = {shown.contrast.pair.row.row: mean_of(shown) for shown in h3.shown}
  lines = []
  for recipe in study.declared["tunings"]["tuning"]["recipes"]:
    row = f"{recipe}, tuned"
    tried = [tuned(study, row, rate=rate) for rate in RATES]
    low, high = (statistics.geometric_mean(tuning_losses(study, cell)) for cell in tried)
    best = study.tried[row][tuned(study, row)]
    lam = "" if best.lam is None else f"{best.lam:g}"
    cells = [f"{low / high:.0f}", f"{best.rate:g}", lam, over.get(row, "")]
    lines.append([f"`{recipe}`", *cells])
  gain = "cross-entropy at {:g} over that at {:g}".format(*RATES)
  return table(("recipe", gain, "best rate", "best lambda", "then over `sr_ste` (H3)"), lines)


def _best_of_tuning(study: Study) -> list[list[str]]:
  """Returns row, settings tried, percent of wrong phonemes and setting of the best; best first."""
  lines = []
  for name, tried in study.tried.items():
    done = [cell for cell in tried if study.runs(cell)[0] in study.records]
    if not name.endswith(AGAIN) or not done:
      continue
    best = min(done, key=lambda cell: tuning_losses(study, cell)[0])
    row = tried[best]
    lam = "" if row.lam is None else f", lambda {row.lam:g}"
    finetune = f", {row.finetune} % fine-tuning" if row.gradient else ""
    dense = f", {row.dense} % dense" if row.sparse else ""
    lines.append([
      name.removesuffix(AGAIN), f"{len(done)} of {len(tried)}",
      f"{100 * tuning_losses(study, best)[0]:.1f}", f"rate {row.rate:g}{lam}{dense}{finetune}",
    ])  # fmt: skip
  return sorted(lines, key=lambda line: float(line[2]))


def tuned_on_words(study: Study) -> list[str]:
  """Returns the best run so far of each row that is tuned on words."""
  head = ("row at 1:16", "settings tried", "wrong phonemes of the best, %", "it has")
  return table(head, _best_of_tuning(study))


def readme_tuned(study: Study) -> list[str]:
  """Returns README's line of what tuning has found so far, of rows that are half done."""
  found = [
    f"`{row}` {wrong} % ({tried})"
    for row, tried, wrong, _ in _best_of_tuning(study)
    if 2 * int(tried.split()[0]) >= int(tried.split()[-1])
  ]
  return [f"- **1:16, the best of the settings tried so far, one seed:** {', '.join(found)}."]


def verdict_lines(verdicts: Sequence[Verdict]) -> list[str]:
  lines = ([v.hypothesis.name, v.hypothesis.says, f"**{v.word}**", v.why] for v in verdicts)
  return table(("", "hypothesis", "verdict", "contrasts"), lines)


def claims(verdicts: Sequence[Verdict]) -> list[str]:
  """Returns the paper's claims with what this study says of each."""
  of = {v.hypothesis.name: v for v in verdicts}
  lines = []
  for claim, names, how in CLAIMS:
    said = []
    for name in names:
      word = "rejected task" if "is rejected" in of[name].why else of[name].word
      said.append(f"{name}: {word}")
    lines.append([claim, ", ".join(said) or "not testable here", how])
  return table(("the claim", "here", "read it with"), lines)


CONTRAST_HEAD = ("", "contrast", "of", "expected", "mean (interval)", "less in", "p", "it")


def contrast_line(name: str, shown: Shown) -> list[str]:
  """Returns the cells of a contrast."""
  d, contrast = shown.differences.values(), shown.contrast
  cells = [name, name_of(contrast), contrast.measure.removeprefix("ln "), contrast.expect]
  less = f"{sum(x < 0 for x in d)} of {len(d)}"
  return [*cells, mean_of(shown), less, show_p(shown.p), shown.says]


def contrasts(verdicts: Sequence[Verdict]) -> list[str]:
  lines = [contrast_line(v.hypothesis.name, shown) for v in verdicts for shown in v.shown]
  return table(CONTRAST_HEAD, lines)


def cells(verdicts: Sequence[Verdict], study: Study) -> list[str]:
  """Returns a line for each cell of the hypotheses whose task ranks."""
  ranked = (v for v in verdicts if v.shown and "is rejected" not in v.why)
  asked = (c for v in ranked for c in v.hypothesis.cells)
  lines = []
  for cell in dict.fromkeys(asked):
    found = [study.records[run] for run in study.runs(cell)]
    noise = statistic.of_seeds(cell, "ln noise", study)
    wrong = "phoneme_error_rate"
    lines.append([
      TASKS[cell.task], cell.pattern, label(cell.row), str(found[0]["steps"]), str(len(found)),
      f"{100 * statistics.fmean(record['accuracy'] for record in found):.2f}",
      f"{geometric(found, 'cross_entropy'):.4f}",
      f"{100 * geometric(found, wrong):.2f}" if wrong in found[0] else "",
      f"{found[0]['flops'] / 1e12:.2f}",
      f"{math.exp(statistics.fmean(noise.values())):.1f}" if len(noise) == len(found) else "",
    ])  # fmt: skip
  head = (
    "task", "pattern", "row", "steps", "seeds", "accuracy, %", "cross-entropy", "wrong phonemes, %",
    "TFLOPs", "noise",
  )  # fmt: skip
  return table(head, lines)


def rebus(study: Study) -> list[str]:
  """Returns the table of the ViT on generated pictures, with its declared family of pairs."""
  from recipes import MATCHED, REBUS, REBUS_SEEDS

  cell = lambda row, budget="540": Cell("rebus", "1:16" if REBUS[row].sparse else "-", budget, row)
  rows = {row: cell(row) for row in REBUS}
  rows["no_ff at the FLOPs of dense"] = cell("no_ff", "540 flops")
  study = study._replace(seeds=dict.fromkeys(rows.values(), tuple(REBUS_SEEDS)))
  asked = [(row, BASE) for row in (*MATCHED, "one_shot")] + [*MATCHED.items()]
  family = [Contrast(Pair(rows[a], rows[b]), None, "points", "more") for a, b in asked]
  shown = statistic.family(family, study)
  said = {pair: f"{mean_of(s)}, p {show_p(s.p)}" for pair, s in zip(asked, shown, strict=True)}
  flops = lambda cell: study.records[study.runs(cell)[0]]["flops"]
  lines = []
  for row, each in rows.items():
    x = [*statistic.of_seeds(each, "points", study).values()]
    low, high = statistic.interval(x, study.declared["level"])
    control = MATCHED.get(row, "")
    lines.append([
      label(row), f"{statistics.fmean(x):.1f} ({low:.1f} to {high:.1f})",
      f"{flops(each) / flops(rows['dense']):.2f}",
      said.get((row, BASE), ""), said.get((row, control), ""), control,
    ])  # fmt: skip
  head = ("row", "accuracy, %", "FLOPs", f"points over `{BASE}`", "points over its control",
          "control")  # fmt: skip
  return table(head, lines)


def readme(study: Study) -> list[str]:
  """Returns README's lines: the best row of each pattern that was run on held-out words."""
  lines = []
  for pattern in PATTERNS:
    of = lambda row, pattern=pattern: wrong_phonemes(row, pattern, study)
    best = min((LINEAR, EXPONENTIAL), key=of)
    mean, low, high = of(best)
    lines.append(
      f"- **{pattern}:** `{label(best)}` has {mean:.1f} % wrong phonemes ({low:.1f} to {high:.1f}) "
      f"for {price(best, pattern, study):.2f} of the training FLOPs of dense. `sr_ste` "
      f"that is dense for as long has {of(CONTROL)[0]:.1f} %, and dense {of('dense')[0]:.1f} %."
    )
  return lines


def amount(study: Study) -> list[str]:
  """Says what the declared runs took."""
  mine = [study.records[run] for run in study.queue if run in study.records]
  hours, n = sum(record["seconds"] for record in mine) / 3600, len(study.queue)
  return [f"{len(mine)} of {n} declared runs are there: {hours:.1f} hours of one core."]


def pages(study: Study) -> dict[str, dict[str, list[str]]]:
  """Returns page -> part -> its lines."""
  verdicts = statistic.verdicts(study)
  results = {
    "choice": choice(study),
    "best": readme(study),
    "tuned": tuned_on_words(study),
    "packed": packed_weights(),
    "claims": claims(verdicts),
  }
  appendix = {
    "amount": amount(study),
    "explored": explored(study),
    "lambda": lambda_lines(study),
    "tuning": tuning(study),
    "verdicts": verdict_lines(verdicts),
    "rebus": rebus(study),
    "contrasts": contrasts(verdicts),
    "cells": cells(verdicts, study),
  }
  return {
    "docs/results.md": results,
    "docs/results_appendix.md": appendix,
    "README.md": {"words": [*readme(study), *readme_tuned(study)]},
  }
