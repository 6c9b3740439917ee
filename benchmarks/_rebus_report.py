"""The table of rebus in docs/results.md: accuracies of finalized networks, paired by seed.

    records by run -> accuracy by row and seed -> declared pairs -> intervals, p of one family

What is asked stands below as data, and was there before the first run. `recipes.REBUS` declares
the rows, and `recipes.rebus_grid` the seeds.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import _recipes_report as report
from _flips import LEVEL, interval, max_t

BASE = report.BASE
MARGIN = 5.0  # points of accuracy: two rows whose whole interval is within them count as equal
LEAST_DENSE, MOST_NO_FF = 85.0, 55.0  # percent: what the task promises
PROGRESSIVE = ("mdgf_exponential, masked", "mdgf_linear, masked", "sdgf_stepwise, masked")
AGAINST_BASE = (*PROGRESSIVE, "one_shot")


def pairs(matched: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
  """Returns the family: (row, what it is compared with).

  Args:
    matched: row -> SR-STE with as much dense exposure.
  """
  return (*((row, BASE) for row in AGAINST_BASE), *((row, matched[row]) for row in PROGRESSIVE))


def differences(a: Mapping[int, Any], b: Mapping[int, Any]) -> dict[int, float]:
  """Returns points of accuracy of a over b, by the seeds that both have."""
  return {s: 100 * (a[s]["accuracy"] - b[s]["accuracy"]) for s in sorted(a.keys() & b.keys())}


def told(p: float, low: float, high: float) -> str:
  """Returns what a comparison shows."""
  words = []
  if p < LEVEL:
    words.append("more" if low + high > 0 else "less")
  if -MARGIN < low and high < MARGIN:
    words.append(f"equal within {MARGIN:g} points")
  return ", ".join(words) or "not told"


def compared(
  rows: Mapping[str, Mapping[int, Any]], matched: Mapping[str, str], planned: int
) -> list[list[str]]:
  """Returns a line for each pair of the family; claims nothing before all of its runs are there."""
  asked = pairs(matched)
  found = {pair: differences(rows[pair[0]], rows[pair[1]]) for pair in asked}
  found = {pair: d for pair, d in found.items() if len(d) > 1}
  p_of = dict(zip(found, max_t([*found.values()]), strict=True)) if found else {}
  is_whole = [len(d) for d in found.values()] == [planned] * len(asked)
  lines = []
  for pair in asked:
    if pair not in found:
      lines.append([*pair, *["missing"] * 4])
      continue
    d = [*found[pair].values()]
    low, high = interval(d, len(asked))
    mean = f"{statistics.fmean(d):+.1f} [{low:+.1f}, {high:+.1f}]"
    wins = f"{sum(x > 0 for x in d)} of {len(d)}"
    shown = told(p_of[pair], low, high) if is_whole else "when all runs are there"
    lines.append([*pair, mean, wins, report.show_p(p_of[pair]), shown])
  return lines


def promise(rows: Mapping[str, Mapping[int, Any]]) -> str:
  """Says whether dense and no_ff keep what the task promises."""
  said = []
  for name, limit, is_least in (("dense", LEAST_DENSE, True), ("no_ff", MOST_NO_FF, False)):
    x = [100 * r["accuracy"] for r in rows[name].values()]
    if not x:
      said.append(f"{name} is missing")
      continue
    mean = statistics.fmean(x)
    holds = mean >= limit if is_least else mean <= limit
    kept = sum(y >= limit if is_least else y <= limit for y in x)
    said.append(
      f"{name} has {mean:.1f} %, where at {'least' if is_least else 'most'} {limit:g} % "
      f"{'are promised' if holds else 'were promised: **not met**'} ({kept} of {len(x)} seeds)"
    )
  return "; ".join(said) + "."


def section(
  records: Mapping[Any, Any],
  runs: Sequence[Any],
  rows: Mapping[str, Any],
  matched: Mapping[str, str],
  exposure: Mapping[str, tuple[int, float]],
) -> list[str]:
  """Returns the section.

  Args:
    records: by run.
    runs: that are planned.
    rows: name -> how it trains.
    matched: see `pairs`.
    exposure: row -> steps that are wholly dense, and the mean share of a weight that takes part.
  """
  mine = {run: records[run] for run in runs if run in records}
  if not mine:
    return ["Missing."]
  usual = {name: {} for name in rows}
  longer = {}
  for run, record in mine.items():
    (usual[run.row] if run.budget.isdigit() else longer)[run.seed] = record
  planned = sum(run.budget.isdigit() and run.row == "dense" for run in runs)
  price = {r["flops"] for r in usual["dense"].values()}
  lines = []
  shown = [(name, name, found) for name, found in usual.items()]
  shown.append(("no_ff, for the FLOPs of dense", "no_ff", longer))
  for title, name, found in shown:
    label = [title.removesuffix(f", {rows[name].gradient}"), rows[name].mode]
    label.append(report.count(len(found), planned))
    if not found:
      lines.append([*label, *["missing"] * 6])
      continue
    x, first = [100 * r["accuracy"] for r in found.values()], next(iter(found.values()))
    low, high = interval(x)
    dense, share = exposure[name]
    lines.append([
      *label, str(first["steps"]), "all" if not rows[name].sparse else str(dense), f"{share:.2f}",
      f"{statistics.fmean(x):.1f} [{low:.1f}, {high:.1f}]", f"{report.cross_entropy(found):.3f}",
      f"{first['flops'] / max(price):.2f}" if price else "missing",
    ])  # fmt: skip
  head = (
    "recipe", "gradient", "seeds", "steps", "dense steps", "mean share", "accuracy, %",
    "cross-entropy", "training FLOPs",
  )  # fmt: skip
  hours = sum(r["seconds"] for r in mine.values()) / 3600
  out = [
    f"{len(mine)} of {len(runs)} runs, {hours:.1f} hours of one core; {report.versions(mine)}."
  ]
  if len(mine) < len(runs):
    out += ["", f"**Partial: {len(runs) - len(mine)} planned runs are missing.**"]
  out += ["", promise(usual), "", *report.markdown(head, lines), ""]
  head = ("recipe", "over", "points of accuracy", "better in seeds", "p", "told")
  return [*out, *report.markdown(head, compared(usual, matched, planned)), ""]
