"""The declared study: its statistics, and the pages that show the records."""

import functools
import importlib
import itertools
import re
from types import SimpleNamespace
from xml.etree import ElementTree

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkout import read_lines
from study_records import ROOT

_study = importlib.import_module("_study")
noise = importlib.import_module("_study_noise")
page = importlib.import_module("_study_page")
recipes = importlib.import_module("recipes")
train = importlib.import_module("_recipes_train")
statistic = importlib.import_module("_study_statistics")

# --- statistics -------------------------------------------------------------------------------


def test_p_and_intervals_are_of_the_whole_family():
  # Of eight flips only + + + and - - - have a t as far from 0.
  assert statistic.max_t([[1.0], [2.0], [4.0]]) == [2 / 8]
  # A contrast without any difference, as of two rows that diverge, is no effect.
  np.testing.assert_array_equal(statistic.max_t([[1.0, 0], [2.0, 0], [4.0, 0]]), [2 / 8, 1])
  d = np.random.default_rng(0).normal((1.0, 0.5, 0.0), size=(8, 3))
  t = lambda d: abs(d.mean(0)) / d.std(0, ddof=1)
  signs = itertools.product((1, -1), repeat=8)
  most = np.array([t(d * np.array(each)[:, None]).max() for each in signs])
  np.testing.assert_allclose(statistic.max_t(d), [(most >= x - 1e-9).mean() for x in t(d)])
  for members, t in ((1, 4.302653), (5, 9.924843)):  # t(0.975, 2) and t(0.995, 2)
    wanted = (2 - t / 3**0.5, 2 + t / 3**0.5)
    found = statistic.interval([1.0, 2.0, 3.0], 0.05, members)
    np.testing.assert_allclose(found, wanted, rtol=1e-6)


def test_noise():
  draws = np.random.default_rng(0).normal(1.0, 2.0, (16, 3, 50))
  spread = draws.var(0, ddof=1).sum()
  wanted = spread / (np.square(draws.mean(0)).sum() - spread / 16)
  found = noise.noise({"a": jnp.asarray(draws[:, 0]), "b": jnp.asarray(draws[:, 1:])})
  np.testing.assert_allclose(found, wanted, rtol=1e-4)


@pytest.mark.parametrize(
  "says, word",
  [("holds open open holds", "not decided"), ("holds holds fails open", "supported"),
   ("fails holds open fails", "contradicted")],
)  # fmt: skip
def test_a_row_holds_where_it_holds_over_all_of_its_controls(says, word):
  of = lambda row: SimpleNamespace(pair=SimpleNamespace(row=row))
  shown = [
    statistic.Shown(of(row), {}, 0, 0, 0, said)
    for row, said in zip("aabb", says.split(), strict=True)
  ]
  assert statistic.decided("any row", shown)[0] == word


def test_a_hypothesis_that_lacks_a_run_decides_nothing():
  study = _study.study()
  h1 = study.hypotheses["H1"]
  records = recipes.read(ROOT / "benchmarks/results/recipes_study.jsonl")
  del records[study.runs(h1.cells[0])[0]]
  found = statistic.verdict(h1, study._replace(records=records))
  assert found.word == "not run yet" and not found.shown


def test_each_record_is_of_the_settings_that_its_row_has_now():
  """Cells of tuning are named by their place in a grid, and grids have grown."""
  records = recipes.read(ROOT / "benchmarks/results/recipes_study.jsonl")
  study = _study.study()._replace(records=records)
  row_of = functools.cache(lambda name: _study.row_of(study, name))
  for run in filter(records.get, study.queue):
    settings = {k: v for k, v in records[run]["settings"].items() if k != "decay_kind"}
    assert recipes.Row(**settings) == row_of(run.row), run


def test_words_are_tuned_first_by_as_many_settings_and_on_seeds_of_their_own():
  study = _study.study()
  first = {}
  for i, run in enumerate(study.queue):
    first.setdefault(run.row, i)
  tuned = {row: cells for row, cells in study.tried.items() if row.endswith("again on words")}
  assert len(tuned) == 12
  for row, cells in tuned.items():
    assert len(cells) == (6 if all(found.sparse for found in cells.values()) else 5)
    last = max(first[cell.row] for cell in cells)
    assert last < first.get(row, len(study.queue))  # not every row is tested
  seeds = {True: set(), False: set()}
  for run in study.queue:
    seeds[", tuning" in run.row].add(run.seed)
  assert not seeds[True] & seeds[False]


def share(row, pattern, steps):
  """How much of a weight takes part, a mean over steps of n / m + D * (1 - n / m)."""
  (recipe,) = set(train.rules_of(("ff",), row, pattern, steps).places.values())
  d = np.asarray(jax.vmap(recipe.decay)(jnp.arange(steps)))
  density = np.concatenate(
    [
      np.full(each.stop - each.start, each.pattern.n / each.pattern.m if each.pattern else 1.0)
      for each in recipe.timeline()
    ]
  )
  return np.mean(density + d * (1 - density))


def test_a_control_that_is_matched_takes_part_as_much():
  study = _study.study()
  matched = [name for name, said in study.declared["hypotheses"].items() if said.get("matched")]
  contrasts = [each for name in matched for each in study.hypotheses[name].contrasts]
  pairs = {pair for each in contrasts for pair in (each.pair, each.beyond) if pair}
  at = {(row.row, over.row, row.pattern, int(row.budget)) for row, over in pairs}
  at |= {(row, over, "1:16", 540) for row, over in recipes.MATCHED.items()}
  assert len(at) > 20
  for row, over, pattern, steps in at:
    one, other = (share(study.rows[name], pattern, steps) for name in (row, over))
    assert abs(one - other) < study.declared["matched_within"], (row, over, pattern)


# --- the pages --------------------------------------------------------------------------------


def part(name, page="results_appendix"):
  """The cells of each line of a generated table."""
  text = (ROOT / f"docs/{page}.md").read_text("utf8")
  lines = text.partition(f"begin {name}: generated")[2].partition(f"<!-- end {name}")[0]
  rows = [line.strip("|").split(" | ") for line in lines.splitlines() if line.startswith("| ")]
  return [[cell.strip() for cell in row] for row in rows[2:]]


def test_the_pages_are_what_the_records_say(tmp_path):
  """`--report` changes nothing. Of pictures the texts are compared: other figures move points."""
  names = ("README.md", "docs/results.md", "docs/results_appendix.md")
  pages = {name: (ROOT / name).read_text("utf8") for name in names}
  (tmp_path / "docs").mkdir()
  for name, text in pages.items():
    (tmp_path / name).write_text(text)
  recipes.write_report(tmp_path)
  for name, text in pages.items():
    changed = (tmp_path / name).read_text("utf8")
    assert changed == text, "run python benchmarks/recipes.py --report"
  for name in ("recipes.svg", "contrasts.svg"):
    texts = lambda folder, name=name: [
      node.text for node in ElementTree.parse(folder / "docs" / name).iter() if "text" in node.tag
    ]
    assert texts(tmp_path) == texts(ROOT)


def test_the_text_says_what_was_decided():
  """What the pages say by hand of verdicts and contrasts: change both together."""
  verdicts = {name: word.strip("*") for name, _, word, *_ in part("verdicts")}
  told = {
    "supported": "H7 H8 H11 H12 H16 H19 H20 H28", "not decided": "H15",
    "contradicted": "H9 H13 H14 H17 H18 H21 H22 H23 H24 H25 H26 H27 H29 H30",
  }  # fmt: skip
  for word, names in told.items():
    assert {verdicts[name] for name in names.split()} == {word}

  # A sentence that names hypotheses has means of their contrasts, with or without the interval.
  number = r"-?\d+\.\d+"
  means = {}
  for name, _, of, _, mean, _, _, _ in part("contrasts"):
    x, low, high = map(float, re.findall(number, mean))
    behind = [(-x, -high, -low)] if of == "BLEU" else []  # points have two directions
    means.setdefault(name, []).extend([(x, low, high), *behind])
  near = lambda x, y: abs(float(x) - y) <= 0.51 * 10.0 ** -len(x.partition(".")[2])
  quoted = 0
  for file in ("results", "faq"):
    text = (ROOT / f"docs/{file}.md").read_text("utf8")
    for sentence in re.split(r"\. |\|", " ".join(text.split())):
      names = re.findall(r"\bH\d+\b", sentence)
      for found in re.findall(
        rf"({number})(?: points)?(?: \(({number}) to ({number})\))?", sentence
      ):
        said = [x for x in found if x and x not in ("0.0002", "0.02")]  # lambdas
        if names and said:
          shown = (each for name in names for each in means[name])
          assert any(all(map(near, said, each)) for each in shown), sentence
          quoted += 1
  assert quoted == 20


def test_cells_by_numpy():
  at = {}
  path = ROOT / "benchmarks/results/recipes_study.jsonl"
  for record in read_lines(path):
    key = record["task"], record["pattern"], page.label(record["row"]), str(record["steps"])
    at.setdefault(key, {})[record["seed"]] = record
  tables = {said: task for task, said in page.TASKS.items()}
  of = lambda key, name: np.array([found[name] for _, found in sorted(at[key].items())])
  geometric = lambda key, name: np.exp(np.log(of(key, name)).mean())
  for task, *cell, count, accuracy, ce, wrong, bleu, entries, flops, _ in part("cells"):
    key = tables[task], *cell
    assert accuracy == f"{100 * of(key, 'accuracy').mean():.2f}" and count == f"{len(at[key])}"
    assert ce == f"{geometric(key, 'cross_entropy'):.4f}"
    assert flops == f"{of(key, 'flops')[0] / 1e12:.2f}"
    if wrong:
      assert wrong == f"{100 * geometric(key, 'phoneme_error_rate'):.2f}"
    for said, name in ((bleu, "bleu"), (entries, "bleu_dictionary")):
      is_translated = task.startswith("translation")
      assert said == (f"{of(key, name).mean():.2f}" if is_translated else "")

  # The table of choice: the mean, its interval by Student's t with 7 degrees, and the price.
  dense = of(("cmudict", "-", "dense, tuned again on words", "1000"), "flops")[0]
  rows = {row: cells for row, *cells, _ in part("choice", "results")}
  for name in ("sr_ste", "sr_ste, decoupled", "s_ste", "mdgf_linear, straight-through"):
    for pattern, where, cell in (
      ("1:8", "tuned at 1:8", rows[name][1]), ("1:16", "tuned again on words", rows[name][2]),
    ):  # fmt: skip
      key = "cmudict", pattern, f"{name}, {where}", "1000"
      x = np.log(of(key, "phoneme_error_rate"))
      half = 2.364624 * x.std(ddof=1) / 8**0.5
      mean, *ends = 100 * np.exp(x.mean() + np.array([0, -half, half]))
      said = f"{mean:.1f} ({ends[0]:.1f} to {ends[1]:.1f})"
      assert cell == f"{said}, {of(key, 'flops')[0] / dense:.2f}"
