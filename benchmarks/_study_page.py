"""What docs/results*.md and README show of the records: each part is generated between two markers.

records -> [verdicts], cells -> [pages] -> lines of Markdown -> [fill] -> a page
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import _study_statistics as statistic
import jax.numpy as jnp
from _recipes_file import RESULTS, Row
from _study import Cell, Contrast, Pair, Study, row_of, tuned, tuning_losses
from _study_statistics import Shown, Verdict

from nm_sparsity_jax.core import packed

TASKS = {
  "bigram80": "80 symbols",
  "bigram160": "160 symbols",
  "mini_mnli": "mini MNLI",
  "cmudict": "words",
  "cmudict_1_8": "words, width 48",
  "cmudict_1_16": "words, width 36",
  "debian_ende": "translation",
  "debian_ende_1_8": "translation, width 69",
  "debian_ende_1_16": "translation, width 64",
}
PATTERNS = ("1:4", "1:8", "1:16", "1:32")
RATES = (1e-3, 4e-3)  # of tuning
BASE = "sr_ste, 10 % dense"
LINEAR = "mdgf_linear, masked, 50 % fine-tuning"
EXPONENTIAL = "mdgf_exponential, masked"
CONTROL = "sr_ste, 30 % dense"  # of LINEAR: dense for as long
UNTUNED = (
  "dense", BASE, CONTROL, LINEAR, EXPONENTIAL, "sdgf_stepwise, masked, 50 % fine-tuning",
)  # fmt: skip
PROGRESSIVE = "mdgf_linear, straight-through"
# The progressive recipe that a third tuning chose at 1:16, and the row of H24 that it is there.
CHOSEN = "mdgf_exponential, straight-through"
CHOSEN_ROW = "progressive, tuned straight-through on words"
# A small network has the inference FLOPs of one pattern: its task, and that pattern.
SMALL = {
  "dense of width 48": ("cmudict_1_8", "1:8"), "dense of width 36": ("cmudict_1_16", "1:16"),
  "dense of width 69": ("debian_ende_1_8", "1:8"),
  "dense of width 64": ("debian_ende_1_16", "1:16"),
}  # fmt: skip


class Subject(NamedTuple):
  """A task whose tuned rows the page compares.

  Attributes:
    task: of the wide network.
    budget: steps of a run.
    suffixes: pattern -> what a row that is tuned there is called in addition. Dense rows are tuned
      once, beside the rows of 1:16.
    rows: names without these suffixes.
  """

  task: str
  budget: str
  suffixes: Mapping[str, str]
  rows: Sequence[str]

  def cell(self, row: str, pattern: str) -> Cell:
    """Returns a row by its whole name."""
    return Cell(self.task, "-" if row.startswith("dense") else pattern, self.budget, row)

  def tuned(self, row: str, pattern: str) -> Cell:
    """Returns a row as it is tuned at a pattern."""
    task, _ = SMALL.get(row, (self.task, ""))
    at = "1:16" if row.startswith("dense") else pattern
    name = CHOSEN_ROW if (row, pattern) == (CHOSEN, "1:16") else row + self.suffixes[at]
    return self.cell(name, pattern)._replace(task=task)

  def patterns(self, row: str) -> Sequence[str]:
    """Returns the patterns that a row is compared at: one, where it is small."""
    return (SMALL[row][1],) if row in SMALL else tuple(self.suffixes)


SPARSE = ("sr_ste", "sr_ste, decoupled", PROGRESSIVE, "s_ste")
WORDS = Subject(
  "cmudict", "1000",
  {"1:4": ", tuned at 1:4", "1:8": ", tuned at 1:8", "1:16": ", tuned again on words",
   "1:32": ", tuned at 1:32"},
  ("dense", "dense of width 48", "dense of width 36", *SPARSE, CHOSEN),
)  # fmt: skip
TRANSLATION = Subject(
  "debian_ende", "1500",
  {"1:8": ", tuned on translation at 1:8", "1:16": ", tuned on translation"},
  ("dense", "dense of width 69", "dense of width 64", "sr_ste", "sr_ste, larger lambda",
   *SPARSE[1:]),
)  # fmt: skip
# The paper's claim, the hypotheses that ask it here, and what a reader must know of them.
CLAIMS = (
  ("Recipes that let gradients flow beat SR-STE at high sparsity.",
   ("H1", "H7", "H11", "H12", "H13", "H14", "H24", "H30", "H25"),
   "H14, H24, H30 and H25 (translation) over a tuned SR-STE, the others over one at lambda 2e-4"),
  ("High sparsity makes gradients noisier, and decay takes noise away.", ("H4", "H10", "H22"),
   "at the same loss; only in H22 are both sparse by then"),
  ("The gain grows with sparsity.", ("H5", "H9", "H18"),
   "160 symbols at 1:16 (H9) are a floor for all rows"),
  ("The recipes are better at the same training FLOPs.", ("H6", "H17"),
   "H17 of words, tuned at 1000 steps"),
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
  """Returns a row's name without `masked`, which the page says once of all such rows."""
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


def bare(row: str) -> str:
  """Returns a row's name without where it is tuned: at the pattern of its contrast."""
  for suffix in (*WORDS.suffixes.values(), *TRANSLATION.suffixes.values()):
    row = row.removesuffix(suffix)
  return label(row.replace(CHOSEN_ROW, CHOSEN))


def name_of(contrast: Contrast) -> str:
  """Says which cells a contrast compares."""
  row, over = contrast.pair
  names = lambda pair: f"{bare(pair.row.row)} over {bare(pair.over.row)}"
  at = "" if row.pattern == "-" else f", {row.pattern}"
  text = f"{TASKS[row.task]}{at}: {names(contrast.pair)}"
  if over.pattern not in (row.pattern, "-"):
    text += f" at {over.pattern}"
  if row.budget != over.budget:
    text += ", same training FLOPs"
  if contrast.beyond:
    text += ", beyond"
    if names(contrast.beyond) != names(contrast.pair):
      text += f" {names(contrast.beyond)}"
    if contrast.beyond.row.pattern != row.pattern:
      text += f" {contrast.beyond.row.pattern}"
  return text


def geometric(records: Iterable[Mapping[str, Any]], measure: str) -> float:
  return statistics.geometric_mean(record[measure] for record in records)


def mean_bleu(records: Sequence[Mapping[str, Any]], name: str) -> str:
  return f"{statistics.fmean(record[name] for record in records):.2f}" if name in records[0] else ""


def is_whole(cell: Cell, study: Study) -> bool:
  """Returns whether all seeds of a cell ran."""
  return cell in study.seeds and all(run in study.records for run in study.runs(cell))


def score(cell: Cell, study: Study) -> tuple[float, float, float]:
  """Returns a row's percent of wrong phonemes, or its BLEU, with its interval of 95 %."""
  is_translation = cell.task.startswith(TRANSLATION.task)
  measure = "BLEU" if is_translation else "ln phoneme error rate"
  of = [*statistic.of_seeds(cell, measure, study).values()]
  found = (statistics.fmean(of), *statistic.interval(of, study.declared["level"]))
  return found if is_translation else tuple(100 * math.exp(x) for x in found)


def price(cell: Cell, dense: Cell, study: Study) -> float:
  """Returns the training FLOPs of a row over those of the wide dense network."""
  flops, most = (study.records[study.runs(each)[0]]["flops"] for each in (cell, dense))
  return flops / most


def score_and_price(cell: Cell, dense: Cell, study: Study) -> str:
  mean, low, high = score(cell, study)
  return f"{mean:.1f} ({low:.1f} to {high:.1f}), {price(cell, dense, study):.2f}"


def program(rows: Mapping[str, Row]) -> str:
  """Returns the rates and the code of a row, in a program of T steps and the pattern P.

  Args:
    rows: pattern -> how the row trains there; they differ by rate alone.
  """
  rates = {pattern: f"{row.rate or 2e-3:g}" for pattern, row in rows.items()}
  at = ", ".join(f"{rate} at {pattern}" for pattern, rate in rates.items())
  rate = f"rate {at if len(set(rates.values())) > 1 else [*rates.values()][0]}"
  row = [*rows.values()][0]
  if not row.sparse:
    return rate
  finetune = f", finetune={row.finetune} * T // 100" if row.gradient else ""
  phases = f"nms.Phases(total=T, dense={row.dense} * T // 100{finetune})"
  options = {"gradient": row.gradient, "lam": row.lam, "decoupled": row.decoupled or None}
  fields = "".join(f", {name}={x!r}" for name, x in options.items() if x is not None)
  call = f"nms.recipe('{row.recipe}', pattern=P, phases={phases}{fields})".replace("'", '"')
  return f"{rate}, `{call}`"


def choice(study: Study, subject: Subject, rows: Sequence[str], cell_of) -> list[str]:
  """Returns rows of a subject: their scores, prices and code; "" where they lack a run.

  Args:
    study: with its records.
    subject: of the rows.
    rows: to show, the wide dense network first.
    cell_of: row, pattern -> what ran.
  """
  lines = []
  for row in rows:
    at = {pattern: cell_of(row, pattern) for pattern in subject.patterns(row)}
    at = {pattern: cell for pattern, cell in at.items() if cell in study.seeds}
    scores = {}
    for pattern, cell in at.items():
      dense = cell_of(rows[0], pattern)
      if is_whole(cell, study) and is_whole(dense, study):
        scores[pattern] = score_and_price(cell, dense, study)
    trained = {pattern: row_of(study, cell.row) for pattern, cell in at.items()}
    trained = {pattern: each for pattern, each in trained.items() if each}
    cells = [scores.get(pattern, "" if pattern in at else "–") for pattern in subject.suffixes]
    lines.append([label(row), *cells, program(trained) if trained else ""])
  return table(["", *subject.suffixes, "how"], lines)


def advice(study: Study) -> list[str]:
  """Returns the sparse row with the best score at each start and pattern, and what it costs."""
  _, times = packed_times()
  lines = []
  for start, subject, best_of in (
    ("from scratch: wrong phonemes in %, less is better", WORDS, min),
    ("from a dense network: BLEU, more is better", TRANSLATION, max),
  ):
    for pattern in ("1:8", "1:16"):
      rows = [row for row in subject.rows if pattern in subject.patterns(row)]
      cells = {row: subject.tuned(row, pattern) for row in rows}
      cells = {row: cell for row, cell in cells.items() if is_whole(cell, study)}
      sparse = (row for row in cells if not row.startswith("dense"))
      best = best_of(sparse, key=lambda row: score(cells[row], study)[0])
      small = next(row for row in cells if row in SMALL)
      said = [score_and_price(cells[row], cells["dense"], study) for row in (best, small, "dense")]
      row = row_of(study, cells[best].row)
      name = f"`{row.recipe}`{', decoupled' if row.decoupled else ''}"
      name += f", {row.gradient}" if row.gradient else ""
      name += "" if row.lam is None else f", lambda {row.lam:g}"
      lines.append([start, pattern, name, said[0], f"{times[pattern]:.1f} times", *said[1:]])
  dense = (f"{size} dense: score, FLOPs" for size in ("small", "wide"))
  head = ("training", "pattern", "best sparse recipe", "score, FLOPs", "its kernels", *dense)
  return table(head, lines)


def packed_times() -> tuple[Mapping[str, Any], Mapping[str, float]]:
  """Returns the record of benchmarks/packed.py, and pattern -> times as fast, for one row."""
  record = json.loads((RESULTS / "packed_cpu.json").read_text())
  found = (x for x in record["rows"] if (x["backend"], x["rows"]) == ("cpu_ffi", 1))
  return record, {x["pattern"]: x["mean"] for x in found}


def packed_weights() -> list[str]:
  """Returns what packed float32 weights cost, by the records of benchmarks/packed.py."""
  record, times = packed_times()
  size = lambda pattern: packed.pack(jnp.zeros((1024, 1024)), pattern).nbytes / 2**22
  lines = [
    ["bytes, of dense", *(f"{size(pattern):.2f}" for pattern in PATTERNS)],
    ["times as fast", *(f"{times[pattern]:.1f}" for pattern in PATTERNS)],
  ]
  return [
    "Packed weights, float32, in products with one row of inputs on one core "
    f"({record['processor']}; [performance.md](performance.md) has more):",
    "",
    *table(["", *PATTERNS], lines),
  ]


def explored(study: Study) -> list[str]:
  """Returns contrasts of words that no hypothesis asked."""
  pair = lambda row, over, p: Pair(WORDS.cell(row, p), WORDS.cell(over, p))
  contrast = lambda pair, beyond=None: Contrast(pair, beyond, "ln phoneme error rate", "less")
  low, high = patterns = ("1:8", "1:16")
  families = [[contrast(pair(LINEAR, EXPONENTIAL, pattern))] for pattern in patterns]
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


def tuned_rows(study: Study, subject: Subject, said: Mapping[str, Any]) -> list[str]:
  """Returns the best run of each tuned row of a subject, the best row of a pattern first.

  Args:
    study: with its records.
    subject: of the rows.
    said: the head of a column -> what it says of the best run, and of the runs of all settings.
  """
  found = []
  for name, tried in study.tried.items():
    is_mine = next(iter(tried)).task.startswith(subject.task)
    if not is_mine or row_of(study, name) is None:
      continue
    best = tuned(study, name)
    row = tried[best]
    lam = "" if row.lam is None else f", lambda {row.lam:g}"
    dense = f", {row.dense} % dense" if row.sparse else ""
    finetune = f", {row.finetune} % fine-tuning" if row.gradient else ""
    (loss,) = tuning_losses(study, best)
    of = {cell: study.records[run] for cell in tried for run in study.runs(cell)}
    scores = [say(of[best], [*of.values()]) for say in said.values()]
    constant = ", constant" if row.constant else ""
    recipe = f"{row.recipe}, " if name.startswith("progressive") else ""
    setting = f"{recipe}rate {row.rate:g}{constant}{lam}{dense}{finetune}"
    line = [label(name), best.pattern, best.budget, str(len(tried))]
    place = ("-", *PATTERNS).index(best.pattern), int(best.budget), loss
    found.append((place, [*line, *scores, setting]))
  head = ("row", "pattern", "steps", "settings tried", *said, "it has")
  return table(head, [line for _, line in sorted(found)])


def verdict_lines(verdicts: Sequence[Verdict]) -> list[str]:
  lines = (
    [v.hypothesis.name, v.hypothesis.says, f"**{v.word}**", v.hypothesis.needs, v.why]
    for v in verdicts
  )
  return table(("", "hypothesis", "verdict", "it needs", "contrasts"), lines)


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
      mean_bleu(found, "bleu"),
      mean_bleu(found, "bleu_dictionary"),
      f"{found[0]['flops'] / 1e12:.2f}",
      f"{math.exp(statistics.fmean(noise.values())):.1f}" if len(noise) == len(found) else "",
    ])  # fmt: skip
  head = (
    "task", "pattern", "row", "steps", "seeds", "accuracy, %", "cross-entropy", "wrong phonemes, %",
    "BLEU", "BLEU of entries", "TFLOPs", "noise",
  )  # fmt: skip
  return table(head, lines)


def samples(study: Study) -> list[str]:
  """Returns what each row makes of the first sentences of its test, by its first seed."""
  said = {}
  for pattern in TRANSLATION.suffixes:
    for row in TRANSLATION.rows:
      cell = TRANSLATION.tuned(row, pattern)
      if pattern in TRANSLATION.patterns(row) and is_whole(cell, study):
        name = row if row.startswith("dense") else f"{row}, {pattern}"
        said[name] = study.records[study.runs(cell)[0]].get("samples")  # none where it diverged
  said = {name: found for name, found in said.items() if found}
  first = next(iter(said.values()), ())
  lines = [("English", [x["english"] for x in first]), ("reference", [x["german"] for x in first])]
  lines += [(name, [x["said"] for x in found]) for name, found in said.items()]
  return table(["", *map(str, range(1, 1 + len(first)))], [[name, *of] for name, of in lines])


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


def amount(study: Study) -> list[str]:
  """Says what the declared runs took."""
  mine = [study.records[run] for run in study.queue if run in study.records]
  hours, n = sum(record["seconds"] for record in mine) / 3600, len(study.queue)
  return [f"{len(mine)} of {n} declared runs are there: {hours:.1f} hours of one core."]


def pages(study: Study) -> dict[str, dict[str, list[str]]]:
  """Returns page -> part -> its lines."""
  verdicts = statistic.verdicts(study)
  results = {
    "advice": (advised := advice(study)),
    "choice": choice(study, WORDS, WORDS.rows, WORDS.tuned),
    "translation": choice(study, TRANSLATION, TRANSLATION.rows, TRANSLATION.tuned),
    "packed": packed_weights(),
    "claims": claims(verdicts),
  }
  of_words = {
    "wrong phonemes of the best": lambda best, _: f"{best['phoneme_error_rate']:.1%}",
  }
  of_translation = {
    "cross-entropy of the best": lambda best, _: f"{best['cross_entropy']:.3f}",
    "its BLEU": lambda best, _: f"{best['bleu']:.1f}",
    "largest BLEU": lambda _, tried: f"{max(record['bleu'] for record in tried):.1f}",
  }
  appendix = {
    "amount": amount(study),
    "tuned": tuned_rows(study, WORDS, of_words),
    "untuned": choice(study, WORDS, UNTUNED, WORDS.cell),
    "translation tuned": tuned_rows(study, TRANSLATION, of_translation),
    "samples": samples(study),
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
    "README.md": {"advice": advised},
  }
