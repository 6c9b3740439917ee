"""The tables of docs/results.md, from the lines of a results file.

    records by run -> per row: logs of cross-entropy by seed -> paired with SR-STE's -> Markdown

Cross-entropies of a good and a bad run differ by orders of magnitude, and seeds share table, data
and initial weights. So what is compared is the logarithm, seed by seed.
"""

from __future__ import annotations

import collections
import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from scipy import stats

BASE = "sr_ste, 10 % dense"
CLOSE = 5.0  # points of accuracy between dense and no_ff: closer, and a table ranks nothing
LEVEL = 0.05
TITLES = {"bigram": "40 symbols", "bigram80": "80 symbols", "mini_mnli": "mini MNLI"}
WITH_ATTENTION = ("mini_mnli",)  # sparse there too, so no_ff is no lower bound


class Paired(NamedTuple):
  """A mean difference over n pairs, its 95 % interval, and the p of no difference."""

  n: int
  mean: float
  low: float
  high: float
  p: float

  def __str__(self) -> str:
    return f"{self.mean:+.3f} [{self.low:+.3f}, {self.high:+.3f}]"


def paired(a: Mapping[int, float], b: Mapping[int, float]) -> Paired | None:
  """Returns the paired t interval and test of a - b over the common keys; None below two."""
  d = [a[key] - b[key] for key in sorted(a.keys() & b.keys())]
  n = len(d)
  if n < 2:
    return None
  mean, error = statistics.fmean(d), statistics.stdev(d) / math.sqrt(n)
  if error == 0:
    return Paired(n, mean, mean, mean, 1.0 if mean == 0 else 0.0)
  half = float(stats.t.ppf(0.975, n - 1)) * error
  p = 2 * float(stats.t.sf(abs(mean / error), n - 1))
  return Paired(n, mean, mean - half, mean + half, p)


def holm(ps: Sequence[float], family: int | None = None) -> list[float]:
  """Returns Holm's step-down correction of `ps`, as members of a family of `family` tests.

  Tests that are planned but missing count as the largest of all p, so that a partial table claims
  no more than the whole one could.
  """
  family = len(ps) if family is None else family
  order = sorted(range(len(ps)), key=ps.__getitem__)
  out, worst = [0.0] * len(ps), 0.0
  for rank, i in enumerate(order):
    worst = max(worst, min(1.0, (family - rank) * ps[i]))
    out[i] = worst
  return out


class Table(NamedTuple):
  """Records of a task, pattern and budget: row -> seed -> record. `planned`: row -> seeds."""

  task: str
  pattern: str
  budget: str
  rows: dict[str, dict[int, Any]]
  planned: dict[str, int]

  @property
  def title(self) -> str:
    number, *unit = self.budget.split()
    steps = f"training FLOPs of {number} dense steps" if unit else f"{number} steps"
    return f"{TITLES[self.task]}, {self.pattern}, {steps}"

  @property
  def runs(self) -> int:
    return sum(map(len, self.rows.values()))

  @property
  def wanted(self) -> int:
    return sum(self.planned.values())


def split(records: Mapping[Any, Any], runs: Sequence[Any], rows: Mapping[str, Any]) -> list[Table]:
  """Returns one table for each task, pattern and budget; rows without a pattern are in each."""
  seeds: dict[Any, list[int]] = collections.defaultdict(list)
  for run in runs:
    seeds[run._replace(seed=0)].append(run.seed)
  tables = []
  for like in [key for key in seeds if key.row == BASE]:
    found, planned = {}, {}
    for name, row in rows.items():
      key = like._replace(pattern=like.pattern if row.sparse else "-", row=name)
      if key not in seeds and name == "dense":
        key = key._replace(budget=like.budget.split()[0])  # for dense "400 flops" are 400 steps
      wanted = [seed for seed in seeds[key] if seed in seeds[like]]
      planned[name] = len(wanted)
      kept = {seed: records.get(key._replace(seed=seed)) for seed in wanted}
      found[name] = {seed: record for seed, record in kept.items() if record}
    tables.append(Table(like.task, like.pattern, like.budget, found, planned))
  order = lambda t: (
    list(TITLES).index(t.task),
    int(t.budget.split()[0]),
    t.budget,
    int(t.pattern[2:]),
  )
  return sorted(tables, key=order)


def logs(records: Mapping[int, Any]) -> dict[int, float]:
  """Returns seed -> logarithm of the cross-entropy."""
  return {seed: math.log(r["cross_entropy"]) for seed, r in records.items()}


def cross_entropy(records: Mapping[int, Any]) -> float:
  """Returns the geometric mean over seeds."""
  return math.exp(statistics.fmean(logs(records).values()))


def count(n: int, planned: int) -> str:
  """Says how many seeds there are, and of how many where some are missing."""
  return f"{n}" if n == planned else f"{n} of {planned}"


def compare(table: Table, rows: Mapping[str, Any]) -> dict[str, tuple[Paired, float | None]]:
  """Returns row -> its difference to SR-STE, and p corrected for all recipes of the table.

  dense and no_ff are not recipes, so they are not tested.
  """
  if BASE not in table.rows:
    return {}
  base = logs(table.rows[BASE])
  found = {}
  for name, records in table.rows.items():
    if name != BASE and (difference := paired(logs(records), base)):
      found[name] = difference
  tested = [name for name in found if rows[name].sparse]
  family = sum(rows[name].sparse for name in table.planned) - 1
  corrected = dict(zip(tested, holm([found[name].p for name in tested], family), strict=True))
  return {name: (difference, corrected.get(name)) for name, difference in found.items()}


def mean_accuracy(results: Iterable[Any]) -> float:
  """Returns the mean accuracy in percent."""
  return 100 * statistics.fmean(r["accuracy"] for r in results)


def gap(table: Table) -> tuple[float | None, str]:
  """Returns points of accuracy from the lower bound to dense, None where one is missing; a name."""
  dense, without = table.rows.get("dense"), table.rows.get("no_ff")
  if table.task in WITH_ATTENTION:
    least = [100 * r["largest"] for r in dense.values()] if dense else None
    return least and mean_accuracy(dense.values()) - statistics.fmean(least), "the commonest answer"
  if not dense or not without:
    return None, "no_ff"
  return mean_accuracy(dense.values()) - mean_accuracy(without.values()), "no_ff"


def verdict(table: Table, rows: Mapping[str, Any]) -> list[str]:
  """Says what the table shows, in sentences that claim no more than its tests."""
  said = []
  if table.runs < table.wanted:
    said.append(f"**Partial: {table.runs} of {table.wanted} runs.**")
  points, bound = gap(table)
  if points is None:
    said.append("Without dense and no_ff nobody can say whether there is anything to rank.")
  elif points < CLOSE:
    said.append(
      f"**Rejected: {bound} is within {CLOSE:g} points of dense ({points:.1f}), so this table "
      "ranks nothing.**"
    )
    return said
  every = compare(table, rows)
  compared = {name: (d, p) for name, (d, p) in every.items() if rows[name].sparse}
  if not compared:
    return [*said, f"Too few seeds to compare with {BASE}."]
  better = [n for n, (d, p) in compared.items() if p is not None and p < LEVEL and d.mean < 0]
  worse = [n for n, (d, p) in compared.items() if p is not None and p < LEVEL and d.mean > 0]
  rest = [n for n in compared if n not in (*better, *worse)]
  for word, names in (("Better than", better), ("Worse than", worse)):
    said.append(f"{word} {BASE} (p < {LEVEL}): {'; '.join(names) or 'none'}.")
  said.append(f"Not told from {BASE}: {'; '.join(rest) or 'none'}.")
  if "dense" in every:
    means = {BASE: 0.0} | {name: d.mean for name, (d, _) in compared.items()}
    ahead = [name for name in table.rows if means.get(name, math.inf) < every["dense"][0].mean]
    if ahead:
      said.append(f"**Dense is no upper bound here: less cross-entropy in {'; '.join(ahead)}.**")
  return said


def markdown(head: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
  row = lambda cells: f"| {' | '.join(cells)} |"
  return [row(head), row(["---"] * len(head)), *map(row, lines)]


def results(table: Table, rows: Mapping[str, Any], dense_price: float | None) -> list[str]:
  """Returns one table. `dense_price`: training FLOPs of a dense step."""
  compared = compare(table, rows)
  started = any("start" in r for records in table.rows.values() for r in records.values())
  lines = []
  for name, planned in table.planned.items():
    records, row = table.rows[name], rows[name]
    label = [name.removesuffix(f", {row.gradient}"), row.mode]
    n = count(len(records), planned)
    if not records:
      lines.append([*label, n, *["missing"] * (6 + started)])
      continue
    first = next(iter(records.values()))
    price = "missing"
    if dense_price is not None:
      price = f"{first['flops'] / (dense_price * int(table.budget.split()[0])):.2f}"
    cells = [f"{mean_accuracy(records.values()):.2f}", f"{cross_entropy(records):.4f}"]
    if started:
      cells.insert(0, f"{mean_accuracy(r['start'] for r in records.values()):.2f}")
    if name == BASE:
      cells += ["0", ""]
    elif name not in compared:
      base = logs(table.rows.get(BASE, {}))
      one = [x - base[seed] for seed, x in logs(records).items() if seed in base]
      cells += [f"{one[0]:+.3f}, one seed", ""] if one else ["missing", "missing"]
    else:
      d, p = compared[name]
      cells += [str(d), "" if p is None else show_p(p)]
    lines.append([*label, n, *cells, str(first["steps"]), price])
  head = (
    "recipe", "gradient", "seeds", *["start, %"] * started, "accuracy, %", "cross-entropy",
    f"ln CE over {BASE}", "p", "steps", "training FLOPs",
  )  # fmt: skip
  return [f"### {table.title}", "", " ".join(verdict(table, rows)), "", *markdown(head, lines), ""]


def show_p(p: float) -> str:
  return "< .001" if p < 0.001 else f"{p:.3f}".removeprefix("0")


def figure3(table: Table) -> list[str]:
  """Returns variances over those of SR-STE, twice in a run, over all weights and over kept ones."""
  kinds = "gradient_all", "gradient_kept", "second_moment_all", "second_moment_kept"
  at = {"45 %": 9, "95 %": 19}  # of 20 samples and more
  base, lines = table.rows.get(BASE, {}), []
  for name, records in table.rows.items():
    seeds = [s for s in records if s in base]
    if name == BASE or not seeds or kinds[0] not in records[seeds[0]]["curve"]:
      continue
    cells = []
    for index in at.values():
      for kind in kinds:
        pairs = [(records[s]["curve"][kind][index], base[s]["curve"][kind][index]) for s in seeds]
        cells.append(_ratio(pairs))
    lines.append([name, str(len(seeds)), *cells])
  words = [
    f"{at_} {what}, {which}"
    for at_ in at
    for what in ("Var abs(g)", "Var v")
    for which in ("all", "kept")
  ]
  title = f"### Variances over those of {BASE}: {table.title}"
  if not lines:
    return [title, "", "Missing.", ""]
  return [title, "", *markdown(("recipe", "seeds", *words), lines), ""]


def _ratio(pairs: Sequence[tuple[float, float]]) -> str:
  if any(x <= 0 for pair in pairs for x in pair):
    return "0 in some seeds"
  return f"{math.exp(statistics.fmean(math.log(a / b) for a, b in pairs)):.2g}"


def versions(records: Mapping[Any, Any]) -> str:
  """Says which versions the runs had."""
  counts = collections.Counter(
    ", ".join(f"{k} {v}" for k, v in r["versions"].items()) for r in records.values()
  )
  return "; ".join(f"{count} runs with {text}" for text, count in counts.most_common())


def tables(records, runs, rows) -> list[str]:
  """Returns the section of a grid."""
  if not any(run in records for run in runs):
    return ["Missing."]
  mine = {run: records[run] for run in runs if run in records}
  hours = sum(r["seconds"] for r in mine.values()) / 3600
  out = [f"{len(mine)} of {len(runs)} runs, {hours:.1f} hours of one core; {versions(mine)}.", ""]
  price = {k.task: r["flops"] / r["steps"] for k, r in mine.items() if k.row == "dense"}
  missing = []
  for table in split(mine, runs, rows):
    if any(records for name, records in table.rows.items() if rows[name].sparse):
      out += results(table, rows, price.get(table.task))
    else:
      missing.append(table.title)
  return [*out, f"Missing: {'; '.join(missing)}."] if missing else out


def between(table: Table, rows: Mapping[str, Any]) -> list[str]:
  """Returns the questions within a table: the two gradient modes, and both decays against one."""
  both_of = collections.defaultdict(dict)
  for name, row in rows.items():
    if row.gradient and name.endswith(f", {row.gradient}"):
      both_of[name.removesuffix(f", {row.gradient}")][row.gradient] = name
  asked = [
    (f"{name}: straight_through over masked", both["straight_through"], both["masked"])
    for name, both in both_of.items()
    if len(both) == 2
  ]
  asked.append((
    "straight_through: sdgf_stepwise x exponential over sdgf_stepwise",
    "sdgf_stepwise x exponential, straight_through", "sdgf_stepwise, straight_through",
  ))  # fmt: skip
  found = [
    (words, logs(table.rows.get(a, {})), logs(table.rows.get(b, {}))) for words, a, b in asked
  ]
  pairs = [(words, paired(a, b), a, b) for words, a, b in found]
  if table.runs < table.wanted or any(d is None for _, d, _, _ in pairs):
    return []
  if (gap(table)[0] or 0) < CLOSE:
    return []
  lines = []
  for (words, d, a, b), p in zip(pairs, holm([d.p for _, d, _, _ in pairs]), strict=True):
    wins = f"{sum(a[seed] < b[seed] for seed in a)} of {d.n}"
    lines.append([words, str(d), wins, show_p(p)])
  head = "comparison", "ln CE", "better in seeds", "p"
  return [f"### {table.title}", "", *markdown(head, lines), ""]


def modes(records, grids, rows) -> list[str]:
  """Returns the section of comparisons within each table that is whole and not rejected."""
  of = [table for runs in grids for table in split(records, runs, rows)]
  found = [line for table in of for line in between(table, rows)]
  return found or ["Missing."]


def variances(records, runs, rows) -> list[str]:
  """Returns the section of figure 3: the paper's pattern, 1:16."""
  return [line for table in at_1_16(records, runs, rows) for line in figure3(table)]


def at_1_16(records, runs, rows) -> list[Table]:
  """Returns the tables of the paper's pattern and a number of steps that rank recipes."""
  tables = [t for t in split(records, runs, rows) if t.pattern == "1:16" and t.budget.isdigit()]
  return [t for t in tables if (points := gap(t)[0]) is None or points >= CLOSE]


def courses(records, runs, rows) -> list[str]:
  """Returns the section of losses during training."""
  return [line for table in at_1_16(records, runs, rows) for line in course(table)]


def course(table: Table) -> list[str]:
  """Returns the loss of training batches over time: the mean over seeds, one batch each."""
  at, lines = {"20 %": 4, "40 %": 8, "60 %": 12, "70 %": 14, "80 %": 16, "95 %": 19}, []
  for name, records in table.rows.items():
    curves = [r["curve"]["loss"] for r in records.values()]
    if curves:
      cells = [f"{statistics.fmean(curve[index] for curve in curves):.2f}" for index in at.values()]
      lines.append([name, str(len(curves)), *cells])
  title = f"### {table.title}"
  if not lines:
    return [title, "", "Missing.", ""]
  return [title, "", *markdown(("recipe", "seeds", *at), lines), ""]


def earlier(records, runs) -> list[str]:
  """Returns the section of other phases: each row over itself with the phases of all tables."""
  lines = []
  for like in dict.fromkeys(run._replace(seed=0) for run in runs):
    mine = [run for run in runs if run._replace(seed=0) == like]
    usual, _, change = like.row.rpartition(", ")
    now, *others = (
      {run.seed: records[key] for run in mine if (key := run._replace(row=row)) in records}
      for row in (like.row, usual, BASE)
    )
    ce = f"{cross_entropy(now):.4f}" if now else "missing"
    cells = [str(paired(logs(now), logs(other)) or "missing") for other in others]
    n = count(len(now), len(mine))
    lines.append([f"{TITLES[like.task]}, {like.pattern}", usual, n, ce, *cells])
  head = (
    "task", f"recipe, with {change}", "seeds", "cross-entropy", "ln CE over 20 % fine-tuning",
    f"ln CE over {BASE}",
  )  # fmt: skip
  return markdown(head, lines)


def digits(records, runs, rows) -> list[str]:
  """Returns the smoke test: accuracies without a comparison."""
  if not any(run in records for run in runs):
    return ["Missing."]
  lines = []
  for run in runs:
    r = records.get(run)
    cells = [f"{100 * r['accuracy']:.2f}", f"{r['cross_entropy']:.4f}"] if r else ["missing"] * 2
    lines.append([run.row, run.pattern, *cells])
  return markdown(("recipe", "pattern", "accuracy, %", "cross-entropy"), lines)


def fill(page: str, name: str, lines: Sequence[str]) -> str:
  """Returns the page, with `lines` between its markers of that name."""
  begin, end = f"<!-- begin {name}: generated -->", f"<!-- end {name} -->"
  pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
  if len(pattern.findall(page)) != 1:
    raise ValueError(f"the page must have one {begin!r} and one {end!r} after it.")
  text = "\n".join([begin, "", *lines, "", end]).replace("\n\n\n", "\n\n")
  return pattern.sub(lambda _: text, page)
