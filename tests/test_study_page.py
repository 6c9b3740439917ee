"""The page of the declared study and README's advice, against the committed records."""

import importlib
import json
import random
import re

import numpy as np
import pytest
from study_records import ROOT, SEEDS, STUDY, lines_of, records_of

advice = importlib.import_module("_study_advice")
recipes = importlib.import_module("recipes")
report = importlib.import_module("_study_report")
study_tests = importlib.import_module("_study_tests")

# --- the page against the records, in numpy alone -----------------------------------------------


def test_ten_random_cells_of_the_page_by_numpy():
  path = ROOT / "benchmarks" / "results" / "recipes_study.jsonl"
  cells = {}
  for record in map(json.loads, path.read_text("utf8").splitlines()):
    key = tuple(record[name] for name in ("task", "pattern", "row", "budget"))
    cells.setdefault(key, []).append(record)
  page = (ROOT / "docs" / "results.md").read_text("utf8")
  tables = {v: k for k, v in report.TASKS.items()}
  asked = []
  for line in lines_of(page, "Cells"):
    task, pattern, row, budget, count, accuracy, ce, _, steps, flops, *wrong = line
    found = cells.pop((tables[task], pattern, row, budget))
    column = lambda name, found=found: np.array([record[name] for record in found])
    assert count.split()[0] == str(len(found))
    asked += [
      (accuracy, f"{100 * column('accuracy').mean():.2f}"),
      (ce, f"{np.exp(np.log(column('cross_entropy')).mean()):.4f}"),
      (steps, f"{column('steps')[0]}"),
      (flops, f"{column('flops')[0] / 1e12:.2f}"),
    ]
    if task == report.TASKS["cmudict"]:
      rates = np.log(column("phoneme_error_rate"))
      asked.append((wrong[0], f"{100 * np.exp(rates.mean()):.2f}"))
  assert not {key for key in cells if ", tuning " not in key[2]}  # every record is on the page
  asked += contrasts_of(page, path)
  for said, wanted in random.Random(0).sample(asked, min(10, len(asked))):
    assert said == wanted


def test_what_is_told_stands_before_the_tables_and_is_short():
  page = (ROOT / "docs" / "results.md").read_text("utf8")
  told, _, tables = page.partition("\n## Appendix")
  assert len(told.splitlines()) <= 250
  begins = lambda text, *names: all(f"<!-- begin {name}: generated -->" in text for name in names)
  assert begins(told, "advice", "study", "claims", "deployed")
  assert begins(tables, "study_tables", "bigram", "mini_glue")
  assert told.index("begin advice") < told.index("begin study") < told.index("begin claims")


def committed():
  """The records of all studies that are committed, without those of the declared one."""
  paths = sorted((ROOT / "benchmarks" / "results").glob("recipes*.jsonl"))
  return recipes.results_of([path for path in paths if path.name != "recipes_study.jsonl"])


def test_advice_is_five_lines_with_a_setting_and_an_interval():
  older, everything = committed(), records_of(names=tuple(STUDY.hypotheses))
  for more in ({}, everything):
    parts = advice.sections(older | more, STUDY)
    lines = [line for line in parts["advice"] if line]
    assert len(lines) == 5
    assert all(re.search(r"\(\S+ to \S+\)|rejected|stays|is rejected", line) for line in lines)
    assert ("Exploratory" in parts["advice"][0]) == (not more)
  does, why = lines[0].split("** ")
  assert does == "- **Take a progressive recipe: it gains more than longer dense training does."
  assert why.startswith("H1 is supported: 80 symbols, 1:16: ")
  assert "held out H11 (`mdgf_linear`) is contradicted, H12 (" in why  # none gains at 1:8 there
  assert why.endswith("H13 (`sdgf_stepwise`) is supported.")
  no_gain = advice.sections(older | records_of(spread=0.001, gain=1.0), STUDY)
  assert no_gain["advice"][0].startswith("- **Keep `sr_ste` and make its dense phase longer")
  assert (
    "| contradicted here | H1 (SR-STE is dense for as long; 80 symbols, 1:16 and 1:32): of 12"
  ) in "".join(no_gain["claims"])


def test_older_figures_of_the_advice_by_numpy():
  path, at = ROOT / "benchmarks" / "results" / "recipes.jsonl", {}
  for r in map(json.loads, path.read_text("utf8").splitlines()):
    if (r["task"], r["pattern"], r["budget"]) == ("bigram80", "1:16", "1600"):
      at[r["row"], r["seed"]] = np.log(r["cross_entropy"])
  d = np.array(
    [at["mdgf_exponential, masked", s] - at["sr_ste, 10 % dense", s] for s in range(100, 108)]
  )
  half = 2.364624 * d.std(ddof=1) / 8**0.5  # t(0.975, 7)
  mean, low, high = (f"{np.exp(x):.3f}" for x in (d.mean(), d.mean() - half, d.mean() + half))
  said = advice.factor(committed(), advice.Old("1:16", "mdgf_exponential, masked"))
  assert said == (8, f"{mean} ({low} to {high})")


def test_a_claim_of_the_paper_has_a_verdict_only_where_its_test_is_decided():
  words = lambda more: [
    line.split(" | ")[1] for line in advice.sections(committed() | more, STUDY)["claims"][2:]
  ]
  assert words({}) == ["not yet decided"] * 7 + ["not testable here"] * 2
  whole = words(records_of(names=tuple(STUDY.hypotheses)))
  assert whole[0] == "supported here"
  rejected = {run: {**r, "accuracy": 0.9} for run, r in records_of().items()}
  assert words(rejected)[0] == "not testable here"


def again(seed=0, spread=0.02, gain=0.5):
  """Records in which the task of H1 is rejected; H7, which asks it again, is whole and ranks."""
  first = {run: {**r, "accuracy": 0.9} for run, r in records_of().items()}
  return first | records_of(seed, spread, gain, names=("H7",))


def test_a_rejected_hypothesis_is_answered_by_the_one_that_asks_it_again():
  claim = lambda records: advice.sections(committed() | records, STUDY)["claims"][2]
  of = "(SR-STE is dense for as long; 160 symbols, 1:8 and 1:16): of 6 contrasts"
  assert f"| supported here | H7 {of} 3 hold" in claim(again())
  assert f"| not decided here | H7 {of} 0 hold" in claim(again(1, spread=2.0, gain=1.0))
  by_h1 = {run: r for run, r in again().items() if run.task == "bigram80"}
  assert "| not testable here | H1 (" in claim(by_h1)
  said = study_tests.verdicts(again(), STUDY)
  best = advice.winner("1:16", again(), said, STUDY)
  assert (best.task, best.of) == ("bigram160", "declared")
  (line,) = [line for line in report.section(again(), STUDY) if "**H1:" in line]
  assert "points behind dense. Its contrasts decide nothing: of 12 contrasts 6 hold, " in line


def test_readme_says_what_gains_beyond_more_dense_steps():
  lines = lambda records: dict(
    line.removeprefix("- **").split(":** ")
    for line in advice.readme(committed() | records, STUDY, recipes.grid("bigram"), recipes.ROWS)
  )
  tail = lambda records, pattern: (
    lines(records)[pattern].partition("(3 seeds). ")[2]
    or lines(records)[pattern].partition("(8 seeds). ")[2]
  )
  rows = [c.pair.row.row for c in STUDY.hypotheses["H7"].contrasts[3:]]
  named = "; ".join(f"`{row}`" for row in rows)
  gains = f"Ahead of an `sr_ste` that is dense for as long (160 symbols, 8 seeds): {named}"
  assert tail(again(), "1:16") == f"{gains}."
  assert (
    tail(again(), "1:8")
    == "Ahead of an `sr_ste` that is dense for as long (160 symbols, 8 seeds): no recipe."
  )
  assert tail(again(), "1:32") == "Ahead of an `sr_ste` that is dense for as long: not decided."
  assert tail(
    {}, "1:32"
  ) == "Ahead of an `sr_ste` that is dense for as long: not decided yet." and not tail({}, "1:4")


def test_the_winner_is_of_the_declared_study_once_it_is_whole():
  older, whole = committed(), records_of()
  said = lambda records: study_tests.verdicts(
    {run: records[run] for run in STUDY.queue if run in records}, STUDY
  )
  best = advice.winner("1:16", older, said(older), STUDY)
  assert (best.row, best.task, best.of, len(best.records)) == (
    "mdgf_exponential, masked", "bigram80", "older, exploratory", 8,
  )  # fmt: skip
  best = STUDY.hypotheses["H1"].contrasts[1].pair.row
  records = older | whole | {run: {**whole[run], "cross_entropy": 1e-9} for run in best.runs(SEEDS)}
  assert advice.winner("1:16", records, said(records), STUDY)[:3] == (
    best.row, "bigram80", "declared",
  )  # fmt: skip
  small, dense = advice.packed_kib("1:8")
  assert (small, dense) == (1024 * (32 + 4) / (8 * 32), 1024)  # an index of 3 bits takes 4


def test_readme_has_a_line_for_each_pattern_and_none_that_was_not_run():
  lines = (ROOT / "README.md").read_text("utf8").splitlines()
  said = [line for line in lines if re.match(r"- \*\*\d+:\d+:\*\*", line)]
  assert [line.split("**")[1] for line in said] == ["1:4:", "1:8:", "1:16:", "1:32:"]
  text = "\n".join(lines) + "\n"
  records = recipes.results_of(sorted((ROOT / "benchmarks" / "results").glob("recipes*.jsonl")))
  assert recipes.readme(records) == text, "run the command at the foot of docs/results.md"
  with pytest.raises(ValueError, match="README has 0 lines"):
    advice.replace(text, ["- **2:4:** take it"])


def contrasts_of(page, path):
  """(said, wanted) of the means of contrasts, paired by seed in numpy."""
  at = {}
  for record in map(json.loads, path.read_text("utf8").splitlines()):
    key = tuple(record[name] for name in ("task", "pattern", "row", "seed", "budget"))
    at[key] = record
  tables = {v: k for k, v in report.TASKS.items()}
  for name in ("H1", "H7", "H11", "H12", "H13"):
    seeds, budget = STUDY.hypotheses[name].seeds, "1600" if name in ("H1", "H7") else "1000"
    for line in lines_of(page, f"{name}:"):
      task, pattern, row, over = re.fullmatch(r"(.*), (\S+): (.*) over (.*)", line[0]).groups()
      measured = line[1].replace(" ", "_").replace("-", "_")
      of = lambda row, seed, task=task, pattern=pattern, budget=budget: at.get(
        (tables[task], pattern, row, seed, budget)
      )
      both = [(of(row, seed), of(over, seed)) for seed in seeds]
      d = np.log([[x[measured] for x in pair] for pair in both if None not in pair])
      if len(d):
        yield line[4], f"{np.exp((d[:, 0] - d[:, 1]).mean()):.3f}"
