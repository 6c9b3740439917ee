"""The declared study: what is asked, the statistics, and the pages that show the records."""

import importlib
import itertools
import json
import re
from xml.etree import ElementTree

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from study_records import ROOT, SEEDS, STUDY, study_of

declared = importlib.import_module("_study")
noise = importlib.import_module("_study_noise")
page = importlib.import_module("_study_page")
recipes = importlib.import_module("recipes")
statistic = importlib.import_module("_study_statistics")
train = importlib.import_module("_recipes_train")
H1 = STUDY.hypotheses["H1"]
TUNING = [run for run in STUDY.queue if ", tuning " in run.row]


# --- what is declared -------------------------------------------------------------------------


def test_seeds_of_the_tests_are_fresh():
  for hypothesis in STUDY.hypotheses.values():
    assert len(set(hypothesis.seeds)) == 8
    assert all(set(STUDY.seeds[c.pair.row]) == set(hypothesis.seeds) for c in hypothesis.contrasts)
    for row, over in (gate.pair for gate in hypothesis.gates):
      assert STUDY.seeds[row] == STUDY.seeds[over]
  tests = {run.seed for run in {*STUDY.queue} - {*TUNING}}
  assert tests == set(range(600, 616)) and {run.seed for run in TUNING} == {500, 501, 502}
  assert not tests & {run.seed for run in recipes.grid("rebus")}


def test_the_queue_is_whole_and_the_page_counts_its_stages():
  first = [run for cell in H1.contrasts[0].cells for run in cell.runs(SEEDS)]
  assert [*STUDY.queue[:16]] == first and len(set(STUDY.queue)) == len(STUDY.queue)
  text, left = (ROOT / "benchmarks/STUDY.md").read_text("utf8"), set(STUDY.queue)
  for stage in [*STUDY.declared["queue"]["order"], "described"]:
    mine = set(TUNING) if stage == "tuning" else left
    if stage in STUDY.hypotheses:
      mine = {run for cell in STUDY.hypotheses[stage].cells for run in STUDY.runs(cell)}
    assert f"| {stage} | {len(mine & left)} |" in text
    left -= mine
  assert not left


def share(row, pattern, steps):
  """The mean share of a weight that trains: n / m + D (1 - n / m), and 1 while dense."""
  (recipe,) = set(train.rules_of(("ff",), row, pattern, steps).places.values())
  decay = np.asarray(jax.vmap(recipe.decay)(jnp.arange(steps)), np.float64)
  kept = np.ones(steps)
  for start, level in recipe.levels(int(pattern.split(":")[1])):
    kept[start:] = level.n / level.m
  return np.mean(kept + decay * (1 - kept))


def test_matched_rows_take_part_as_much():
  pairs = {
    (pair.row.row, pair.over.row, pair.row.pattern, int(pair.row.budget))
    for name, entry in STUDY.declared["hypotheses"].items()
    if entry.get("matched")
    for contrast in STUDY.hypotheses[name].contrasts
    for pair in (contrast.pair, contrast.beyond)
    if pair
  } | {(row, over, "1:16", 540) for row, over in recipes.MATCHED.items()}
  assert len(pairs) > 20
  for row, over, pattern, steps in pairs:
    shares = [share(STUDY.rows[name], pattern, steps) for name in (row, over)]
    assert abs(shares[0] - shares[1]) < STUDY.declared["matched_within"], (row, over)


def test_each_recipe_is_tuned_as_much_and_on_its_own_records():
  assert {len({STUDY.rows[n] for n in names}) for names in STUDY.tried.values()} == {24}
  loss = lambda run: 0.5 if run.row.endswith(" 07") else 0.7
  records = {run: {"cross_entropy": loss(run)} for run in TUNING}
  # Better on a seed of the tests, which tuning must not see.
  other = [run._replace(seed=SEEDS[0]) for run in TUNING if run.row.endswith(" 03")]
  records |= dict.fromkeys(other, {"cross_entropy": 0.1})
  row_of = lambda: declared.row_of(STUDY._replace(records=records), "sr_ste, tuned")
  assert row_of() == STUDY.rows["sr_ste, tuning 07"]
  del records[TUNING[0]]
  assert row_of() is None


@pytest.mark.parametrize("start", ["flops of 1600 sr_ste at 1:16", "1600 flops"])
def test_a_budget_of_flops_is_the_most_steps_that_it_pays(start):
  run = next(run for run in STUDY.queue if run.budget == start)
  row, task = STUDY.rows[run.row], train.TASKS[run.task]
  other, pattern = ("sr_ste, 10 % dense", "1:16") if "sr_ste" in start else ("dense", "-")
  price = train.training_flops(task, STUDY.rows[other], pattern, 1600)
  steps = recipes.steps_of(run, row)
  costs = [train.training_flops(task, row, run.pattern, steps + more) for more in (0, 1)]
  assert costs[0] <= price < costs[1]


# --- statistics -------------------------------------------------------------------------------


def test_sign_flips_by_hand():
  # Of eight flips only + + + and - - - have a t as far from 0.
  assert statistic.max_t([[1.0], [2.0], [4.0]]) == [2 / 8]
  assert statistic.max_t([[1.0], [-1.0]]) == [1.0]


def test_p_and_intervals_are_of_the_whole_family():
  shown = statistic.family(H1.contrasts, study_of("H1", spread=0.3, gain=0.7))
  d = np.array([[s.differences[seed] for seed in SEEDS] for s in shown]).T
  t = lambda d: abs(d.mean(0)) / d.std(0, ddof=1)
  signs = itertools.product((1, -1), repeat=8)
  most = np.array([t(d * np.array(each)[:, None]).max() for each in signs])
  np.testing.assert_allclose([s.p for s in shown], [(most >= x - 1e-9).mean() for x in t(d)])
  for members, t in ((1, 4.302653), (5, 9.924843)):  # t(0.975, 2) and t(0.995, 2)
    wanted = (2 - t / 3**0.5, 2 + t / 3**0.5)
    found = statistic.interval([1.0, 2.0, 3.0], 0.05, members)
    np.testing.assert_allclose(found, wanted, rtol=1e-6)


@pytest.mark.parametrize(
  "expect, p, mean, low, high, wanted",
  [
    ("less", 0.01, -0.5, -0.8, -0.2, "holds"),
    ("less", 0.20, -0.5, -1.2, 0.2, "open"),
    ("less", 0.20, 0.0, -0.04, 0.04, "fails"),  # equal is no gain
    ("less", 0.01, -0.02, -0.03, -0.01, "fails"),  # nor is a gain below the margin
    ("more", 0.01, 0.5, -0.01, 0.8, "holds"),
    ("more", 0.01, -0.5, -0.8, -0.2, "fails"),
    ("not more", 0.50, 0.0, -0.04, 0.04, "holds"),
    ("not more", 0.01, 0.5, 0.2, 0.8, "fails"),
    ("not more", 0.20, 0.0, -0.5, 0.5, "open"),
  ],
)
def test_what_a_contrast_says(expect, p, mean, low, high, wanted):
  contrast = H1.contrasts[0]._replace(expect=expect)
  assert statistic.says(contrast, mean, low, high, p, STUDY) == wanted


@pytest.mark.parametrize(
  "needs, words, wanted",
  [
    ("any", "holds fails", "supported"), ("all", "holds holds", "supported"),
    ("any", "fails fails", "contradicted"), ("all", "holds fails", "contradicted"),
    ("any", "open fails", "not decided"), ("all", "holds open", "not decided"),
  ],
)  # fmt: skip
def test_what_a_family_comes_to(needs, words, wanted):
  assert statistic.decided(needs, words.split())[0] == wanted


def test_a_verdict_pairs_by_seed_and_needs_a_task_that_ranks():
  study = study_of("H1")
  verdict = lambda records: statistic.verdict(H1, STUDY._replace(records=records))
  whole = verdict(dict(reversed(study.records.items())))
  assert whole.word == "supported" and {s.says for s in whole.shown[:6]} == {"holds"}
  np.testing.assert_allclose(whole.shown[0].mean, np.log(0.5), atol=0.05)
  assert verdict(study_of("H1", spread=0.001, gain=1.0).records).word == "contradicted"
  for budget in ("1600", "1600 flops"):  # a gate at equal steps, and one at equal FLOPs
    level = {
      run: {**r, "accuracy": 0.9} if (run.row, run.budget) == ("no_ff", budget) else r
      for run, r in study.records.items()
    }
    assert "0.0 points behind dense" in verdict(level).why and verdict(level).word == "not decided"


def test_noise():
  curve = {"noise_loss": [4.0, 3.0, 2.0, 3.0, 1.0], "noise": [1.0, 2.0, 8.0, 50.0, 90.0]}
  # It is read where the loss first falls.
  np.testing.assert_allclose(statistic.noise_at(curve, 2.5), np.log(4.0))
  assert statistic.noise_at(curve, 0.5) is None
  draws = np.random.default_rng(0).normal(1.0, 2.0, (16, 3, 50))
  spread = draws.var(0, ddof=1).sum()
  wanted = spread / (np.square(draws.mean(0)).sum() - spread / 16)
  found = noise.noise({"a": jnp.asarray(draws[:, 0]), "b": jnp.asarray(draws[:, 1:])})
  np.testing.assert_allclose(found, wanted, rtol=1e-4)


# --- the pages --------------------------------------------------------------------------------

RESULTS = (ROOT / "docs/results.md").read_text("utf8")


def part(name):
  """The cells of each line of a generated table."""
  lines = RESULTS.partition(f"begin {name}: generated")[2].partition(f"<!-- end {name}")[0]
  rows = [line.strip("|").split(" | ") for line in lines.splitlines() if line.startswith("| ")]
  return [[cell.strip() for cell in row] for row in rows[2:]]


def test_the_pages_are_what_the_records_say(tmp_path):
  """`--report` changes nothing. Text of pictures is compared: other figures move the points."""
  pages = {name: (ROOT / name).read_text("utf8") for name in ("README.md", "docs/results.md")}
  (tmp_path / "docs").mkdir()
  for name, text in pages.items():
    (tmp_path / name).write_text(text)
  recipes.write_report(tmp_path)
  for name, text in pages.items():
    changed = (tmp_path / name).read_text("utf8")
    assert changed == text, "run python benchmarks/recipes.py --report"
  texts = lambda path: [node.text for node in ElementTree.parse(path).iter() if "text" in node.tag]
  for name in ("docs/recipes.svg", "docs/study_contrasts.svg"):
    assert texts(tmp_path / name) == texts(ROOT / name)


def test_cells_contrasts_and_the_warning_by_numpy():
  at, tuning = {}, {}
  path = ROOT / "benchmarks/results/recipes_study.jsonl"
  for record in map(json.loads, path.read_text("utf8").splitlines()):
    key = record["task"], record["pattern"], page.label(record["row"]), str(record["steps"])
    at.setdefault(key, {})[record["seed"]] = record
    s = record["settings"]
    if record["seed"] < 600 and s["rate"] == 4e-3:
      key = s["recipe"], s["dense"], s["finetune"], s["lam"]
      tuning.setdefault(key, []).append(record["cross_entropy"])
  tables = {said: task for task, said in page.TASKS.items()}
  of = lambda key, name: np.array([found[name] for _, found in sorted(at[key].items())])
  for task, *cell, count, accuracy, ce, _, flops, _ in part("cells"):
    key = tables[task], *cell
    assert accuracy == f"{100 * of(key, 'accuracy').mean():.2f}" and count == f"{len(at[key])}"
    assert ce == f"{np.exp(np.log(of(key, 'cross_entropy')).mean()):.4f}"
    assert flops == f"{of(key, 'flops')[0] / 1e12:.2f}"
  words = 0
  for _, contrast, *_, mean, _, _, _ in part("contrasts"):
    if plain := re.fullmatch(r"words, (\S+): (.*) over (.*)", contrast):
      pattern, *rows = plain.groups()
      rates = [of(("cmudict", pattern, row, "1000"), "phoneme_error_rate") for row in rows]
      if len({*map(len, rates)}) == 1:  # a row may have more seeds than the contrast
        assert mean.split()[0] == f"{np.exp(np.log(rates[0] / rates[1]).mean()):.3f}"
        words += 1
  assert words > 3
  # Lambda turns the pair around: rows of tuning, found by their settings.
  for lam in (0.0, 2e-4, 2e-2):
    ratios = np.divide(tuning["mdgf_linear", 10, 50, None], tuning["sr_ste", 30, 20, lam])
    line = f"| {lam:g} | {np.exp(np.log(ratios).mean()):.3f} | {ratios.min():.3f} to "
    assert line in RESULTS


def test_rebus_keeps_what_it_promises():
  """As the library says of the task: dense 85 % or more, without feed-forward layers at most 55."""
  score = {line[0]: float(line[1].split()[0]) for line in part("rebus")}
  assert score["dense"] >= 85 and score["no_ff"] <= 55


def test_fill_replaces_between_markers_only():
  text = "a\n<!-- begin x: generated -->\nold\n<!-- end x -->\nb"
  once = page.fill(text, "x", [r"new \1"])
  assert once == "a\n<!-- begin x: generated -->\n\nnew \\1\n\n<!-- end x -->\nb"
  with pytest.raises(ValueError, match="begin y"):
    page.fill(text, "y", [])
