"""The verdicts of the study in docs/results.md, and in its appendix the contrasts and the cells.

verdicts, records -> [section], [tables] -> Markdown; what is missing is said, and nothing fills it
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from typing import Any

import _recipes_report as report
import _study_tests as tests
from _study import Hypothesis, Study, tuned

TASKS = {
  "bigram80": "80 symbols",
  "bigram160": "160 symbols",
  "mini_mnli": "mini MNLI",
  "cmudict": "spelling to phonemes",
}


def show(measure: str, x: float) -> str:
  """Returns a difference as a reader takes it: points, or a factor of the measured thing."""
  return f"{x:+.1f} points" if measure == "points" else f"{math.exp(x):.3f}"


def show_interval(measure: str, low: float | None, high: float | None) -> str:
  if low is None or high is None:
    return "missing"
  ends = [f"{x:+.1f}" if measure == "points" else f"{math.exp(x):.3f}" for x in (low, high)]
  return f"{ends[0]} to {ends[1]}"


def name_of(each: tests.Shown) -> str:
  """Says which cells a contrast compares."""
  c = each.contrast
  row, over = c.pair
  text = f"{TASKS[row.task]}, {row.pattern}: {row.row} over {over.row}"
  if over.pattern not in (row.pattern, "-"):
    text += f" at {over.pattern}"
  if c.beyond:
    other = c.beyond.row
    text += f", beyond {other.row} over {c.beyond.over.row}"
    if other.pattern != row.pattern:
      text += f" at {other.pattern}"
  return text


def decisive(verdict: tests.Verdict) -> tests.Shown:
  """Returns the largest of the contrasts that made a verdict, of one that is decided."""
  wanted = "holds" if verdict.word == "supported" else "fails"
  found = [s for s in verdict.shown if s.says == wanted and s.mean is not None]
  return max(found, key=lambda s: abs(s.mean or 0.0))


def shown(contrast: tests.Shown) -> str:
  """Returns the mean and the interval of a contrast."""
  measure = contrast.contrast.measure
  ends = show_interval(measure, contrast.low, contrast.high)
  return f"{show(measure, contrast.mean or 0.0)} ({ends})"


def headline(verdict: tests.Verdict) -> str:
  """Returns the line of a hypothesis: its word, why, and the largest contrast that decided."""
  line = f"- **{verdict.hypothesis.name}: {verdict.word}.** {verdict.hypothesis.says}"
  line += f" {verdict.why[:1].upper()}{verdict.why[1:]}."
  if verdict.word == "not decided":
    return f"{line}{undecided(verdict)}"
  best = decisive(verdict)
  return f"{line} Largest: {name_of(best)}, {shown(best)}."


def undecided(verdict: tests.Verdict) -> str:
  """Says what the contrasts of a rejected task have, once all of its runs are there."""
  is_missing = any(each.says == "missing" for each in verdict.shown)
  if verdict.is_open or verdict.there < verdict.wanted or is_missing:
    return ""
  return f" Its contrasts decide nothing: {counts(verdict)}."


def counts(verdict: tests.Verdict) -> str:
  """Says how many contrasts of a verdict hold, fail and are open, also of a rejected task."""
  return tests.decided(verdict.hypothesis.needs, [each.says for each in verdict.shown])[1]


def contrasts(verdict: tests.Verdict) -> list[str]:
  """Returns the table of a hypothesis. Without its whole family no contrast has a p or a word."""
  lines = []
  for each in verdict.shown:
    measure, d = each.contrast.measure, [*each.differences.values()]
    cells = [name_of(each), measure.removeprefix("ln "), each.contrast.expect]
    cells.append(report.count(len(d), len(verdict.hypothesis.seeds)))
    if not d:
      lines.append([*cells, *["missing"] * 5])
      continue
    cells.append(show(measure, statistics.fmean(d)))
    cells.append(show_interval(measure, each.low, each.high))
    cells.append(f"{sum(x < 0 for x in d)} of {len(d)}")
    cells += ["", "when all runs are there"] if each.p is None else [
      report.show_p(each.p), each.says,
    ]  # fmt: skip
    lines.append(cells)
  head = (
    "contrast", "of", "expected", "seeds", "mean", "interval", "less in seeds", "p", "told",
  )  # fmt: skip
  title = f"#### {verdict.hypothesis.name}: {verdict.there} of {verdict.wanted} runs are there"
  return [title, "", *report.markdown(head, lines), ""]


def cells(records: tests.Records, study: Study) -> list[str]:
  """Returns a line for each cell that has a run."""
  lines = []
  for cell, seeds in study.seeds.items():
    found = {run.seed: records[run] for run in study.runs(cell) if run in records}
    if not found:
      continue
    first = next(iter(found.values()))
    noise = tests.of_seeds(cell, "ln noise", records, study)
    lines.append([
      TASKS[cell.task], cell.pattern, cell.row, cell.budget, report.count(len(found), len(seeds)),
      f"{report.mean_accuracy(found.values()):.2f}", f"{report.cross_entropy(found):.4f}",
      f"{math.exp(statistics.fmean(noise.values())):.1f}" if len(noise) == len(found) else "",
      str(first["steps"]), f"{first['flops'] / 1e12:.2f}", wrong_phonemes(found.values()),
    ])  # fmt: skip
  head = (
    "task", "pattern", "row", "budget", "seeds", "accuracy, %", "cross-entropy", "noise", "steps",
    "training TFLOPs", "wrong phonemes, %",
  )  # fmt: skip
  return report.markdown(head, lines) if lines else ["Missing."]


def wrong_phonemes(records: Iterable[Mapping[str, Any]]) -> str:
  """Returns the geometric mean of phoneme error rates in percent; "" of other tasks."""
  rates = [record.get("phoneme_error_rate") for record in records]
  if None in rates:
    return ""
  return f"{100 * math.exp(statistics.fmean(map(math.log, rates))):.2f}"


def tuning(records: tests.Records, study: Study) -> list[str]:
  """Says how far tuning is, and what it chose."""
  said = []
  for recipe, names in study.tried.items():
    there = sum(run in records for run in study.queue if run.row in names)
    wanted = len(names) * len(study.declared["tuning"]["seeds"])
    best = tuned(study, recipe, records)
    said.append(
      f"{recipe}: {there} of {wanted} runs"
      + (f", {best} is chosen ({study.rows[best]})" if best else "")
    )
  return [f"Tuning: {'; '.join(said)}."]


def section(records: tests.Records, study: Study) -> list[str]:
  """Returns the verdicts. `records`: by run, those of other studies among them."""
  mine = {run: records[run] for run in study.queue if run in records}
  hours = sum(r["seconds"] for r in mine.values()) / 3600
  out = [f"{len(mine)} of {len(study.queue)} runs are there, {hours:.1f} hours of one core."]
  if mine:
    lost = sum(r.get("diverged", False) for r in mine.values())
    out[0] += f" {report.versions(mine)}. {lost or 'None'} diverged."
  return [*out, "", *map(headline, tests.verdicts(mine, study))]


def tables(records: tests.Records, study: Study) -> list[str]:
  """Returns the contrasts of the families that have any, the cells, and how far tuning is."""
  mine, out = {run: records[run] for run in study.queue if run in records}, []
  for each in tests.verdicts(mine, study):
    if any(contrast.differences for contrast in each.shown):
      out += contrasts(each)
  return [*out, "#### Cells", "", *cells(mine, study), "", *tuning(mine, study)]


def unmatched(hypothesis: Hypothesis, exposure, within: float) -> list[str]:
  """Returns pairs of a hypothesis whose rows take part in training unequally.

  Args:
    hypothesis: whose pairs are looked at, where it says that they are matched.
    exposure: called with a cell, returns the mean share of a weight that takes part.
    within: how far apart the shares may be.
  """
  pairs = [p for c in hypothesis.contrasts for p in (c.pair, c.beyond) if p and hypothesis.matched]
  return [
    f"{p.row.row} over {p.over.row} at {p.row.pattern}"
    for p in dict.fromkeys(pairs)
    if abs(exposure(p.row) - exposure(p.over)) > within
  ]
