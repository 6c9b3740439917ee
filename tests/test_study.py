"""The declared study: what is asked, the tests, and one run. test_study_page.py has the page."""

import dataclasses
import importlib
import itertools
import math
import pathlib
import re
import signal
import subprocess
import sys
from xml.etree import ElementTree

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from study_records import SEEDS, STUDY, lines_of, numpy_p, records_of

import nm_sparsity_jax as nms

ROOT = pathlib.Path(__file__).parents[1]
sys.path.append(str(ROOT / "benchmarks"))
declared = importlib.import_module("_study")
flips = importlib.import_module("_flips")
noise = importlib.import_module("_study_noise")
picture = importlib.import_module("_study_picture")
recipes = importlib.import_module("recipes")
report = importlib.import_module("_study_report")
study_tests = importlib.import_module("_study_tests")
tasks = importlib.import_module("_recipes_tasks")
train = importlib.import_module("_recipes_train")


# --- what is declared -------------------------------------------------------------------------


def test_seeds_are_fresh_and_not_those_of_tuning():
  tuning = set(STUDY.declared["tuning"]["seeds"])
  others = {run.seed for name in recipes.GRIDS if name != "study" for run in recipes.grid(name)}
  tests = {seed for seeds in STUDY.seeds.values() for seed in seeds}
  assert tests == set(range(600, 616)) and not tests & (tuning | others) and not tuning & others
  for run in STUDY.queue:
    assert run.seed in (tuning if ", tuning " in run.row else tests)


def test_a_later_hypothesis_has_seeds_of_its_own_and_the_gate_of_an_earlier_one():
  h12, h13 = (STUDY.hypotheses[name] for name in ("H12", "H13"))
  assert h13.gates == h12.gates and h12.seeds == tuple(SEEDS) and not set(h13.seeds) & set(SEEDS)
  for run in (run for cell in h13.cells for run in STUDY.runs(cell)):
    is_gate = run.row in ("dense", "sr_ste, 10 % dense")
    assert run.seed in (SEEDS if is_gate else h13.seeds)
  records = records_of(names=("H12", "H13"))
  found = study_tests.verdict(h13, records, STUDY)
  assert (found.there, found.wanted, found.word) == (56, 56, "supported")
  assert [[*s.differences] for s in found.shown] == [[*h13.seeds]] * 2
  shut = {run: {**record, "accuracy": 0.9} for run, record in records.items()}
  assert "is rejected" in study_tests.verdict(h13, shut, STUDY).why


@pytest.mark.parametrize(
  ("change", "words"),
  [
    ({"test_seeds": [500, *SEEDS[1:]]}, "[500] are in tuning and in the tests"),
    ({"test_seeds": SEEDS[:7]}, "a sign-flip test needs 8 different seeds or more"),
    ({"test_seeds": [*SEEDS, 600]}, "606, 607, 600]: a sign-flip test needs"),
    ({"tuning": {**STUDY.declared["tuning"], "settings": 23}}, "each recipe gets as many"),
  ],
)
def test_a_study_that_breaks_its_rules_is_refused(change, words):
  with pytest.raises(ValueError, match=re.escape(words)):
    declared.check(STUDY._replace(declared=STUDY.declared | change))


@pytest.mark.parametrize(
  ("seeds", "words"),
  [
    ((607, *range(609, 616)), "H13 has seeds [607], which test_seeds or tuning have too"),
    ((502, *range(609, 616)), "H13 has seeds [502]"),
    (tuple(range(608, 615)), "H13.seeds = [608, 609, 610, 611, 612, 613, 614]: a sign-flip test"),
    ((*range(608, 616), 608), "each once"),
  ],
)
def test_seeds_of_the_tests_or_of_tuning_and_too_few_are_refused(seeds, words):
  h13 = STUDY.hypotheses["H13"]._replace(seeds=seeds)
  with pytest.raises(ValueError, match=re.escape(words)):
    declared.check(STUDY._replace(hypotheses=STUDY.hypotheses | {"H13": h13}))


def test_a_cell_keeps_its_seeds_and_a_gate_has_one_set():
  h12, h13 = (STUDY.hypotheses[name] for name in ("H12", "H13"))
  again = h13._replace(contrasts=h12.contrasts)
  mixed = h13.gates[0]._replace(pair=h13.gates[0].pair._replace(row=h13.contrasts[0].pair.row))
  for wrong, words in (
    (again, "a cell has one set of seeds. Give H13 those"),
    (h13._replace(gates=(mixed,)), "a gate is paired by seed"),
  ):
    with pytest.raises(ValueError, match=words):
      declared.check(STUDY._replace(hypotheses=STUDY.hypotheses | {"H13": wrong}))


def test_a_row_that_is_not_declared_is_refused():
  rows = {k: v for k, v in STUDY.rows.items() if k != "sr_ste, 19 % dense"}
  with pytest.raises(ValueError, match="H1 asks for 'sr_ste, 19 % dense'"):
    declared.check(STUDY._replace(rows=rows))


def test_the_hypotheses_and_the_queue():
  assert list(STUDY.hypotheses) == [f"H{i}" for i in range(1, 14)]
  again = {h.name: h.again for h in STUDY.hypotheses.values() if h.again}
  assert again == {"H7": "H1", "H8": "H2", "H9": "H5", "H10": "H4"}
  assert STUDY.declared["level"] == flips.LEVEL == 0.05
  first = STUDY.hypotheses["H1"].contrasts[0]
  assert STUDY.queue[:16] == tuple(run for cell in first.cells for run in cell.runs(SEEDS))
  wanted = {run for h in STUDY.hypotheses.values() for c in h.cells for run in STUDY.runs(c)}
  assert wanted <= set(STUDY.queue) and len(set(STUDY.queue)) == len(STUDY.queue)
  for name, row in STUDY.rows.items():
    assert recipes.ALL_ROWS.get(name, row) == row  # one name is one way to train


def test_the_page_of_the_study_counts_its_runs():
  page, left = (ROOT / "benchmarks" / "STUDY.md").read_text("utf8"), set(STUDY.queue)
  for stage in [*STUDY.declared["queue"]["order"], "described"]:
    mine = {run for run in left if ", tuning " in run.row} if stage == "tuning" else left
    if stage in STUDY.hypotheses:
      mine = left & {r for c in STUDY.hypotheses[stage].cells for r in STUDY.runs(c)}
    assert f"| {stage} | {len(mine)} |" in page
    left -= mine
  assert not left and len(page.splitlines()) <= 90


def test_matched_rows_take_part_as_much():
  within = STUDY.declared["matched_within"]
  share = lambda c: train.exposure(STUDY.rows[c.row], c.pattern, int(c.budget))[1]
  for name in ("H1", "H5", "H7", "H9", "H11", "H12", "H13"):
    assert STUDY.hypotheses[name].matched
    assert not report.unmatched(STUDY.hypotheses[name], share, within)
  first = STUDY.hypotheses["H1"].contrasts[0]
  wrong = first._replace(pair=first.pair._replace(over=first.pair.over._replace(row="dense")))
  found = report.unmatched(STUDY.hypotheses["H1"]._replace(contrasts=(wrong,)), share, within)
  assert found == ["mdgf_exponential, masked over dense at 1:16"]


def test_each_recipe_is_tuned_as_much_and_on_its_own_records():
  assert {len(names) for names in STUDY.tried.values()} == {24}
  tuning = [run for run in STUDY.queue if ", tuning " in run.row]
  ce = lambda run: 0.5 if run.row.endswith(" 07") else 0.7
  records = {run: {"cross_entropy": ce(run)} for run in tuning}
  # Better on the seeds of the tests, which tuning must not see.
  records |= {
    run._replace(seed=SEEDS[0]): {"cross_entropy": 0.1} for run in tuning if run.row.endswith(" 03")
  }
  assert declared.tuned(STUDY, "sr_ste", records) == "sr_ste, tuning 07"
  assert declared.row_of(STUDY, "sr_ste, tuned", records) == STUDY.rows["sr_ste, tuning 07"]
  assert STUDY.rows["sr_ste, tuning 07"].rate == 1e-3
  del records[tuning[0]]
  assert declared.row_of(STUDY, f"{tuning[0].row.split(',')[0]}, tuned", records) is None
  rates = {name: {STUDY.rows[row].rate for row in rows} for name, rows in STUDY.tried.items()}
  assert len(set(map(frozenset, rates.values()))) == 1


def test_a_budget_is_the_price_of_sr_ste():
  run = next(r for r in STUDY.queue if r.budget.startswith("flops") and "stepwise" in r.row)
  row, task = STUDY.rows[run.row], train.TASKS[run.task]
  price = train.training_flops(task, recipes.ROWS["sr_ste, 10 % dense"], run.pattern, 1600)
  steps = recipes.steps_of(run, row)
  costs = [train.training_flops(task, row, run.pattern, steps + more) for more in (0, 1)]
  assert costs[0] <= price < costs[1] and steps > 1600


# --- the tests --------------------------------------------------------------------------------


def test_pairs_are_of_the_same_seed():
  records = records_of(spread=0.0)
  shuffled = sorted(records, key=lambda run: (run.seed * 7 % 11 * len(run.row) % 13, run))
  records = {run: records[run] for run in shuffled}
  contrast = STUDY.hypotheses["H1"].contrasts[0]
  found = study_tests.differences(contrast, records, STUDY)
  assert found.keys() == set(SEEDS)
  np.testing.assert_allclose([*found.values()], math.log(0.5), rtol=1e-9)
  del records[contrast.pair.over.runs(SEEDS)[0]]
  assert study_tests.differences(contrast, records, STUDY).keys() == set(SEEDS[1:])


def test_p_is_corrected_for_the_whole_family():
  records = records_of(spread=0.3, gain=0.7)
  shown = study_tests.family(STUDY.hypotheses["H1"].contrasts, records, STUDY)
  d = np.array([[s.differences[seed] for seed in SEEDS] for s in shown]).T  # [seeds, contrasts]
  wanted = numpy_p(d)
  np.testing.assert_allclose([s.p for s in shown], wanted)
  alone = [numpy_p(d[:, [i]])[0] for i in range(d.shape[1])]
  assert max(w - a for w, a in zip(wanted, alone, strict=True)) > 0.05


def test_what_a_contrast_says():
  says = lambda *x: study_tests.says(*x, within=0.05)
  assert says("less", 0.01, -0.5, -0.8, -0.2) == "holds"
  assert says("less", 0.20, -0.5, -1.2, 0.2) == "open"
  assert says("less", 0.01, 0.5, 0.2, 0.8) == "fails"
  assert says("less", 0.20, 0.0, -0.04, 0.04) == "fails"  # equal is no gain
  assert says("less", 0.01, -0.02, -0.03, -0.01) == "fails"  # nor is a gain below the margin
  assert says("more", 0.01, 0.5, 0.2, 0.8) == "holds"
  assert says("more", 0.01, -0.5, -0.8, -0.2) == "fails"
  assert says("not more", 0.50, 0.0, -0.04, 0.04) == "holds"
  assert says("not more", 0.01, 0.5, 0.2, 0.8) == "fails"
  assert says("not more", 0.20, 0.0, -0.5, 0.5) == "open"


def test_what_a_family_comes_to():
  decided = lambda needs, *words: study_tests.decided(needs, words)[0]
  assert decided("any", "holds", "fails") == "supported" == decided("all", "holds", "holds")
  assert decided("any", "fails", "fails") == "contradicted" == decided("all", "holds", "fails")
  assert decided("any", "open", "fails") == "not decided" == decided("all", "holds", "open")


def test_a_verdict_needs_every_run():
  records = records_of()
  whole = study_tests.verdict(STUDY.hypotheses["H1"], records, STUDY)
  assert whole.word == "supported" and {s.says for s in whole.shown[:6]} == {"holds"}
  assert "**H1: supported.**" in report.headline(whole) and "Largest:" in report.headline(whole)
  assert study_tests.verdict(
    STUDY.hypotheses["H1"], records_of(spread=0.001, gain=1.0), STUDY
  ).word == "contradicted"  # fmt: skip
  some = dict(records)
  del some[STUDY.queue[0]]
  part = study_tests.verdict(STUDY.hypotheses["H1"], some, STUDY)
  assert (part.word, part.why) == ("not decided", "215 of 216 runs are there")
  assert {s.p for s in part.shown} == {None} and {s.says for s in part.shown} == {"missing"}
  text = "\n".join(report.section(some, STUDY) + report.tables(some, STUDY))
  assert "**H1: not decided.**" in text and "when all runs are there" in text
  assert "| 7 of 8 |" in text and "**H3: not decided.**" in text and "24 of 48 runs" in text


def test_a_task_that_needs_no_feed_forward_layers_decides_nothing():
  records = {run: {**r, "accuracy": 0.9} for run, r in records_of().items()}
  found = study_tests.verdict(STUDY.hypotheses["H1"], records, STUDY)
  assert found.word == "not decided"
  assert found.why == "the task is rejected: no_ff is 0.0 points behind dense"


def test_every_gate_is_asked_at_equal_flops():
  for name, hypothesis in STUDY.hypotheses.items():
    if all(cell.task == "cmudict" for cell in hypothesis.cells):
      assert {gate.pair.row.row for gate in hypothesis.gates} == {"sr_ste, 10 % dense"}
      continue  # its attention is sparse too
    flops = [gate for gate in hypothesis.gates if "flops" in gate.pair.row.budget]
    assert {gate.pair.row.row for gate in flops} == {"no_ff"}, name
    assert {gate.pair.over.budget for gate in flops} == {"1600"}, name
  records = records_of()
  for run in records:
    if run.budget == "1600 flops":
      records[run] = records[run] | {"accuracy": 0.86}
  found = study_tests.verdict(STUDY.hypotheses["H1"], records, STUDY)
  behind = "no_ff at the same training FLOPs is 4.0 points behind dense"
  assert found.why == f"the task is rejected: {behind}"
  run = next(run for run in records if run.budget == "1600 flops")
  task, dense = train.TASKS[run.task], recipes.Row("dense")
  price = train.training_flops(task, dense, "-", 1600)
  steps = recipes.steps_of(run, STUDY.rows["no_ff"])
  costs = [train.training_flops(task, STUDY.rows["no_ff"], "-", steps + i) for i in (0, 1)]
  assert costs[0] <= price < costs[1]


def test_noise_is_read_where_the_loss_first_falls():
  curve = {"noise_loss": [4.0, 3.0, 2.0, 3.0, 1.0], "noise": [1.0, 2.0, 8.0, 50.0, 90.0]}
  np.testing.assert_allclose(study_tests.noise_at(curve, 2.5), math.log(4.0))
  assert study_tests.noise_at(curve, 0.5) is None


def test_a_whole_study_is_shown_whole():
  records = records_of(names=tuple(STUDY.hypotheses))
  text = "\n".join(report.section(records, STUDY) + report.tables(records, STUDY))
  for name, hypothesis in STUDY.hypotheses.items():
    assert re.search(rf"\*\*{name}: (supported|contradicted|not decided)\.\*\*", text)
    lines = lines_of(text, name)
    assert len(lines) == len(hypothesis.contrasts) and "missing" not in str(lines)
  assert "sr_ste, tuned" in text and all(picture.pictures(records, STUDY).values())


def test_the_pictures_are_well_formed_and_say_what_is_missing():
  whole, none = (picture.pictures(records, STUDY) for records in (records_of(), {}))
  assert len(whole) == 5 and whole == picture.pictures(records_of(), STUDY)
  for name in whole:
    for drawn in (whole[name], none[name]):
      assert ElementTree.fromstring(drawn).tag.endswith("svg") and "nan" not in drawn
  assert "not told" not in none["study_told.svg"] and ">holds<" in whole["study_told.svg"]
  for name in none.keys() - {"study_told.svg"}:
    assert "no run of it is there" in none[name]
  assert none["study_told.svg"].count(">missing<") == sum(
    len(h.contrasts) for h in STUDY.hypotheses.values()
  )


# --- a run ------------------------------------------------------------------------------------


def test_what_is_scored_is_finalized(tiny_table, monkeypatch):
  zeros = lambda params, *_: jax.tree.map(jnp.zeros_like, params)
  monkeypatch.setattr(nms, "finalize", zeros)
  found = train.train("bigram", recipes.Row("dense"), "-", 4, 0)
  np.testing.assert_allclose(found["cross_entropy"], math.log(5), rtol=1e-6)


def test_a_run_that_diverges_scores_as_a_guess_does(tiny_table, tmp_path):
  row = recipes.Row("sr_ste", lam=1e-2, rate=1e38, constant=True)
  look = lambda *args: noise.Onlooker(*args, batches=4)
  found = train.train("bigram", row, "1:4", 12, 0, look)
  assert found["diverged"] and (found["accuracy"], found["density"]) == (0.2, None)
  np.testing.assert_allclose(found["cross_entropy"], math.log(5))
  assert 0 < len(found["curve"]["loss"]) < 12
  about = {"task": "bigram80", "pattern": "1:16", "budget": "1600", "row": "sr_ste, 10 % dense"}
  about |= {"seed": 600, "settings": dataclasses.asdict(row)}
  recipes.append(tmp_path / "runs.jsonl", about | found)  # no NaN is in it
  records, _ = recipes.read(tmp_path / "runs.jsonl")
  assert "1 diverged." in report.section(records, STUDY)[0]
  assert all(picture.pictures(records, STUDY).values())
  (record,) = records.values()
  assert study_tests.value(record, "ln noise", "bigram80", STUDY) is None
  assert "diverged" not in train.train("bigram", recipes.Row("dense"), "-", 4, 0)


def test_a_look_does_not_change_a_run(tiny_table):
  row = recipes.Row("sr_ste", lam=1e-2, rate=2e-3, constant=True)
  look = lambda *args: noise.Onlooker(*args, batches=4)
  one, other = (train.train("bigram", row, "1:4", 6, 0, each) for each in (None, look))
  assert one["cross_entropy"] == other["cross_entropy"]
  assert one["curve"]["loss"] == other["curve"]["loss"]
  assert len(other["curve"]["noise"]) == 6 and min(other["curve"]["noise"]) > 0
  assert other["curve"]["flips"][0] == 0 and "noise" not in one["curve"]
  (place,) = train.rules_of(("ff",), row, "1:4", 6).places.values()
  assert place.lam == 1e-2


def test_a_constant_rate_is_constant_after_its_warm_up():
  rates = [float(train.held(100, 2e-3)(step)) for step in (0, 5, 10, 50, 99)]
  np.testing.assert_allclose(rates, [0, 1e-3, 2e-3, 2e-3, 2e-3], rtol=1e-6)
  for step, (shape, constant) in itertools.product((0, 5, 50, 99), (("held", 1), ("falling", 0))):
    wanted = getattr(train, shape)(100, 1.0)(step)  # the picture has no jax
    np.testing.assert_allclose(picture.rate(step, 100, constant), wanted, atol=1e-6)


def test_noise_by_hand():
  draws = np.random.default_rng(0).normal(1.0, 2.0, (16, 3, 50))
  spread = draws.var(0, ddof=1).sum()
  wanted = spread / (np.square(draws.mean(0)).sum() - spread / 16)
  found = noise.noise({"a": jnp.asarray(draws[:, 0]), "b": jnp.asarray(draws[:, 1:])})
  np.testing.assert_allclose(found, wanted, rtol=1e-4)


WORKER = """
import fcntl, os, pathlib, signal, sys, time, types
sys.path.insert(0, {benchmarks!r})
import recipes
stub = types.ModuleType("_recipes_train")
def train(task, row, pattern, steps, seed, look):
  time.sleep({seconds})
  return dict(accuracy=0.5, cross_entropy=1.0, seconds=0.0, by=sys.argv[1])
stub.train = train
sys.modules["_recipes_train"] = stub
recipes.onlooker_of = lambda run, row: None
path, whole, done = pathlib.Path({path!r}), recipes.append, []
def append(path, record):
  done.append(record)
  if sys.argv[1] == "killed" and len(done) == 3:
    with open(path, "ab") as f:  # as the real one has it
      fcntl.flock(f, fcntl.LOCK_EX)
      f.write(b'{{"task": "bigram80", "patt')
      f.flush()
      os.kill(os.getpid(), signal.SIGKILL)
  whole(path, record)
recipes.append = append
path.with_name(sys.argv[1]).touch()
while not all(path.with_name(name).exists() for name in sys.argv[1:]):
  time.sleep(0.01)
recipes.work(recipes.grid("study")[:{runs}], path)
"""


def worker(path, runs, *names, seconds=0.0):
  """Starts a process on the first runs of the queue; it begins when all those names are there."""
  script = WORKER.format(
    benchmarks=str(ROOT / "benchmarks"), path=str(path), runs=runs, seconds=seconds
  )
  return subprocess.Popen([sys.executable, "-c", script, *names], stdout=subprocess.DEVNULL)


def test_a_killed_queue_goes_on_where_it_was(tmp_path):
  """The third run is killed by SIGKILL while half of its line is written."""
  path = tmp_path / "runs.jsonl"
  assert worker(path, 5, "killed").wait(60) == -signal.SIGKILL
  assert len(recipes.read(path)[0]) == 2 and worker(path, 5, "other").wait(60) == 0
  found, torn = recipes.read(path)
  assert list(found) == recipes.grid("study")[:5] and torn == 1
  (first, *_) = found.values()
  assert first["settings"] == dataclasses.asdict(recipes.ROWS["mdgf_exponential, masked"])


def test_two_processes_on_one_queue_lose_and_double_no_run(tmp_path):
  """One of them is killed by SIGKILL while half of its third line is written."""
  path, runs = tmp_path / "runs.jsonl", recipes.grid("study")[:12]
  names = ("killed", "other")
  both = [worker(path, 12, *order, seconds=0.05) for order in (names, names[::-1])]
  assert [each.wait(60) for each in both] == [-signal.SIGKILL, 0]
  found, torn = recipes.read(path)  # refuses a run that is there twice
  by = [record["by"] for record in found.values()]
  assert torn == 1 and by.count("killed") == 2 and len(runs) - 1 <= len(by) <= len(runs)
  assert worker(path, 12, "last").wait(60) == 0  # has what the killed one had claimed
  found, _ = recipes.read(path)
  assert sorted(found) == sorted(runs) and len(path.read_text("utf8").splitlines()) == 13
