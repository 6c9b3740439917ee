"""benchmarks/recipes.py: its grid, its results file, its statistics, and one tiny run."""

import importlib
import math
import pathlib
import sys

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest
import scipy.stats

import nm_sparsity_jax as nms
from nm_sparsity_jax.runs import glue

ROOT = pathlib.Path(__file__).parents[1]
sys.path.append(str(ROOT / "benchmarks"))
recipes = importlib.import_module("recipes")
report = importlib.import_module("_recipes_report")
tasks = importlib.import_module("_recipes_tasks")
train = importlib.import_module("_recipes_train")

RUN = recipes.Run("bigram", "1:16", "400", "idp", 100)


# --- the grid ---------------------------------------------------------------------------------


def test_the_grid_has_each_run_once_and_as_many_seeds_of_each_row():
  runs = recipes.grid("bigram")
  assert len(runs) == len(set(runs))
  seeds = {}
  for run in runs:
    seeds.setdefault(run._replace(seed=0), []).append(run.seed)
  wanted = {
    ("bigram", "400"): {"-": 8, "1:16": 8, "1:32": 8, "1:8": 3, "1:4": 3},
    ("bigram", "1600"): {"-": 3, "1:32": 3, "1:16": 1, "1:8": 1, "1:4": 1},
    ("bigram80", "1600"): {"-": 8, "1:16": 8, "1:32": 8, "1:8": 3, "1:4": 3},
    ("bigram", "400 flops"): {"-": 3, "1:16": 3, "1:32": 3},
  }
  for (task, budget), patterns in wanted.items():
    for pattern, n in patterns.items():
      for name, row in recipes.ROWS.items():
        if row.sparse == (pattern != "-") and (budget, name) != ("400 flops", "dense"):
          run = recipes.Run(task, pattern, budget, name, 0)
          assert seeds.pop(run) == list(range(100, 100 + n))
  assert not seeds


def test_a_stage_goes_seed_by_seed():
  first = [run for run in recipes.grid("bigram") if run.pattern in ("1:16", "1:32")]
  first = [run.seed for run in first if run.budget == "400"]
  assert first == sorted(first)


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_workers_share_the_grid_by_rows(workers):
  runs = recipes.grid("bigram")
  shares = [recipes.share(runs, i, workers) for i in range(workers)]
  assert sorted(sum(shares, [])) == sorted(runs)
  assert all(0.8 < len(share) * workers / len(runs) < 1.2 for share in shares)
  owners = {}
  for i, share in enumerate(shares):
    for run in share:
      assert owners.setdefault(run._replace(seed=0), i) == i


def test_the_grid_of_mini_glue():
  seeds = {}
  for run in recipes.grid("mini_glue"):
    assert run.task == "mini_mnli" and run.budget == "600"
    seeds.setdefault((run.row, run.pattern), []).append(run.seed)
  wanted = {(r, p) for r, row in recipes.ROWS.items() for p in ("1:8", "1:32", "-")
            if row.sparse == (p != "-")}  # fmt: skip
  assert seeds.keys() == wanted and all(s == [200, 201, 202] for s in seeds.values())


def test_the_grid_of_an_earlier_target_differs_in_the_phases_alone():
  runs = recipes.grid("earlier")
  assert len(runs) == 3 * 3 * len(recipes.EARLIER) == 36
  others = set(recipes.grid("bigram") + recipes.grid("mini_glue"))
  usual = {run._replace(row=run.row.removesuffix(", 50 % fine-tuning")) for run in runs}
  assert len(usual) == 36 and usual <= others
  for name, row in recipes.EARLIER.items():
    usual = recipes.ROWS[name.removesuffix(", 50 % fine-tuning")]
    assert row.finetune == 50 and row == recipes.Row(**vars(usual) | {"finetune": 50})
    (recipe,) = dict(train.rules_of(("ff",), row, "1:16", 1600).places).values()
    assert recipe.phases == nms.Phases(total=1600, dense=160, finetune=800)


def test_a_part_of_the_grid_by_a_regex(capsys):
  assert recipes.main(["--list", "--only", "bigram/1:8/400/", "--seeds", "2"]) == 0
  lines = capsys.readouterr().out.splitlines()
  assert len(lines) == 2 * sum(row.sparse for row in recipes.ROWS.values())
  assert all(line.startswith("bigram | 1:8 | 400 | ") for line in lines)


def test_equal_flops_are_the_most_steps_that_fit():
  task, dense = train.TASKS["bigram"], recipes.ROWS["dense"]
  price = train.training_flops(task, dense, "-", 400)
  assert train.equal_steps(task, dense, "-", 400) == 400
  for name in ("no_ff", "sr_ste, 0 % dense", "mdgf_linear, masked"):
    row = recipes.ROWS[name]
    steps = recipes.steps_of(RUN._replace(budget="400 flops", row=name))
    costs = [train.training_flops(task, row, "1:16", steps + more) for more in (0, 1)]
    assert costs[0] <= price < costs[1]
  # Attention is a third of this network (and its scores); SR-STE's weight gradient stays dense.
  ff, attention = 2 * 2 * 12 * 128 * 512, 4 * 2 * 12 * 128 * 128 + 2 * 2 * 12 * 12 * 128
  wanted = 64 * 400 * 2 * (3 * attention + (1 + 2 / 16) * ff)
  assert train.training_flops(task, recipes.ROWS["sr_ste, 0 % dense"], "1:16", 400) == wanted
  wanted = 64 * 400 * 2 * 3 * attention
  assert train.training_flops(task, recipes.ROWS["no_ff"], "-", 400) == wanted


# --- the results file -------------------------------------------------------------------------


def test_results_survive_a_torn_line(tmp_path):
  path = tmp_path / "runs.jsonl"
  assert recipes.read(path) == ({}, 0)
  one, two = (RUN._replace(seed=seed)._asdict() | {"accuracy": 0.5} for seed in (100, 101))
  recipes.append(path, one)
  recipes.append(path, two)
  whole = path.read_text()
  assert whole.count("\n") == 2 and recipes.read(path) == (
    {RUN: one, RUN._replace(seed=101): two},
    0,
  )
  for cut in (2, 40, len(whole.splitlines()[1]) - 1):  # killed while it wrote the second line
    path.write_text(whole.splitlines()[0] + "\n" + whole.splitlines()[1][:cut])
    assert recipes.read(path) == ({RUN: one}, 1)
    recipes.append(path, two)
    assert recipes.read(path) == ({RUN: one, RUN._replace(seed=101): two}, 1)


def test_a_run_is_not_there_twice(tmp_path):
  path = tmp_path / "runs.jsonl"
  recipes.append(path, RUN._asdict())
  recipes.append(path, RUN._asdict())
  with pytest.raises(ValueError, match=r"two results of Run\(.*idp.*delete one"):
    recipes.read(path)


def test_a_run_that_is_there_is_not_claimed_again(tmp_path):
  path, two = tmp_path / "runs.jsonl", RUN._replace(seed=101)
  recipes.append(path, RUN._asdict())
  with recipes.claims(path) as mine:
    assert not mine.take(RUN) and mine.take(two)


def test_no_record_is_nan(tmp_path):
  with pytest.raises(ValueError, match="JSON"):
    recipes.append(tmp_path / "runs.jsonl", {"cross_entropy": math.nan})


def test_the_worker_option(capsys):
  assert recipes.parse_worker("1/2") == (1, 2)
  for wrong in ("2/2", "-1/2", "1", "a/b"):
    with pytest.raises(SystemExit):
      recipes.main([f"--worker={wrong}", "--list"])
    assert "give I/N" in capsys.readouterr().err


# --- statistics -------------------------------------------------------------------------------


@hypothesis.given(st.lists(st.tuples(*[st.floats(-5, 5, width=16)] * 2), min_size=2, max_size=9))
def test_paired_is_scipys_t_test(pairs):
  a, b = (np.array(x, float) for x in zip(*pairs, strict=True))
  found = report.paired(dict(enumerate(a)), {**dict(enumerate(b)), 77: 1.0})
  assert found.n == len(pairs)
  hypothesis.assume(np.std(a - b) > 1e-3)
  wanted = scipy.stats.ttest_rel(a, b)
  interval = wanted.confidence_interval()
  np.testing.assert_allclose(
    found[1:], ((a - b).mean(), interval.low, interval.high, wanted.pvalue), rtol=1e-8, atol=1e-12
  )


def test_paired_by_hand():
  found = report.paired({1: 1.0, 2: 3.0, 3: 5.0, 9: 7.0}, {3: 2.0, 2: 1.0, 1: 0.0})
  half = 4.302653 / math.sqrt(3)  # t(0.975, 2) and sd 1
  np.testing.assert_allclose(found[:4], (3, 2, 2 - half, 2 + half), rtol=1e-6)
  assert report.paired({1: 1.0}, {1: 2.0}) is None
  assert report.paired({1: 1.0, 2: 2.0}, {3: 1.0, 4: 2.0}) is None
  assert report.paired({1: 2.0, 2: 2.0}, {1: 2.0, 2: 2.0}).p == 1


def test_holm_by_hand():
  np.testing.assert_allclose(report.holm([0.01, 0.04, 0.03]), [0.03, 0.06, 0.06])
  np.testing.assert_allclose(report.holm([0.01, 0.04, 0.03], family=5), [0.05, 0.12, 0.12])
  assert report.holm([0.9, 0.5]) == [1, 1] and report.holm([]) == []


# --- the tables -------------------------------------------------------------------------------


def record(accuracy, cross_entropy, steps=400):
  curve = {"gradient_all": [2.0] * 20, "gradient_kept": [1.0] * 20}
  curve |= {"loss": [cross_entropy + i for i in range(20)]}
  curve |= {"second_moment_all": [cross_entropy] * 20, "second_moment_kept": [0.0] * 20}
  return {
      "accuracy": accuracy, "cross_entropy": cross_entropy, "steps": steps, "flops": 10.0 * steps,
      "curve": curve, "versions": {"jax": "1"}, "seconds": 3600.0,
  }  # fmt: skip


def some_records(without=0.3):
  """Eight seeds at 1:16, 400 steps: MDGF-Exponential better, one_shot worse, IDP as it falls."""
  ce = {
    "dense": 0.1, "no_ff": 3.0, report.BASE: 1.0, "mdgf_exponential, masked": 0.5, "one_shot": 2.0,
    "idp": 1.0,
  }  # fmt: skip
  out = {}
  for run in recipes.grid("bigram"):
    if run.row in ce and run.budget == "400" and run.pattern in ("-", "1:16"):
      noise = 1 + (run.seed % 3) / 50 + (run.seed % 2) * (run.row == "idp") / 5 - 0.1
      accuracy = {"dense": 0.9, "no_ff": without}.get(run.row, 0.5)
      out[run] = record(accuracy, ce[run.row] * noise)
  return out


def table_of(records, pattern="1:16", budget="400"):
  tables = report.split(records, recipes.grid("bigram"), recipes.ROWS)
  return next(t for t in tables if t[:3] == ("bigram", pattern, budget))


def test_a_verdict_claims_what_is_tested():
  table = table_of(some_records())
  partial, better, worse, rest = report.verdict(table, recipes.ROWS)
  assert partial == "**Partial: 48 of 136 runs.**"
  assert better == "Better than sr_ste, 10 % dense (p < 0.05): mdgf_exponential, masked."
  assert worse == "Worse than sr_ste, 10 % dense (p < 0.05): one_shot."
  assert rest == "Not told from sr_ste, 10 % dense: idp."
  compared = report.compare(table, recipes.ROWS)
  assert compared["dense"][1] is None and compared["no_ff"][1] is None
  raw = {name: d.p for name, (d, p) in compared.items() if p is not None}
  assert compared["idp"][1] == min(1, 12 * raw["idp"]) < 1  # 14 are planned; two p are smaller


def test_a_recipe_ahead_of_dense_is_named():
  records = {
    run: r | {"cross_entropy": r["cross_entropy"] * (0.01 if run.row == "idp" else 1)}
    for run, r in some_records().items()
  }
  said = report.verdict(table_of(records), recipes.ROWS)
  assert said[-1] == "**Dense is no upper bound here: less cross-entropy in idp.**"


def test_a_task_without_a_gap_is_rejected():
  said = report.verdict(table_of(some_records(without=0.86)), recipes.ROWS)
  assert len(said) == 2 and said[1].startswith(
    "**Rejected: no_ff is within 5 points of dense (4.0)"
  )
  records = {run: r for run, r in some_records().items() if run.row != "no_ff"}
  assert "nobody can say" in report.verdict(table_of(records), recipes.ROWS)[1]


def test_where_attention_is_sparse_too_the_commonest_answer_is_the_bound():
  grid = recipes.grid("mini_glue")
  for largest, points in ((0.4, 50), (0.87, 3)):
    found = {run: record(0.9, 1.0) | {"largest": largest} for run in grid if run.row == "dense"}
    first, _ = report.split(found, grid, recipes.ROWS)
    assert first.title == "mini MNLI, 1:8, 600 steps"
    np.testing.assert_allclose(report.gap(first)[0], points)
    rejected = "Rejected: the commonest answer is within 5 points of dense (3.0)"
    assert (rejected in " ".join(report.verdict(first, recipes.ROWS))) == (points < 5)
  assert report.gap(report.split({}, grid, recipes.ROWS)[0])[0] is None
  assert report.tables({}, grid, recipes.ROWS) == ["Missing."]


def test_the_table():
  records = some_records()
  lines = report.results(table_of(records), recipes.ROWS, dense_price=20.0)
  rows = {tuple(c.strip() for c in line.split("|")[1:3]): line.split("|")[3:-1] for line in lines}
  cells = [c.strip() for c in rows["mdgf_exponential", "masked"]]
  logs = [math.log(records[run]["cross_entropy"]) for run in records if run.row.startswith("mdgf")]
  assert cells[:3] == ["8", "50.00", f"{math.exp(np.mean(logs)):.4f}"]
  assert cells[3] == "-0.693 [-0.693, -0.693]" and cells[4:] == ["< .001", "400", "0.50"]
  assert [c.strip() for c in rows["sdgf_stepwise", "masked"]] == ["0 of 8", *["missing"] * 6]
  assert rows["snip", "either"] and rows["idp", "straight_through"] and rows["dense", ""]


def test_the_table_says_where_a_row_started():
  grid = recipes.grid("mini_glue")
  found = {
    run: record(0.9, 1.0) | {"largest": 0.4, "start": {"accuracy": (run.seed - 200) / 10}}
    for run in grid
    if run.row == "dense"
  }
  first, _ = report.split(found, grid, recipes.ROWS)
  lines = report.results(first, recipes.ROWS, dense_price=20.0)
  head, dense, missing = (
    [c.strip() for c in next(line for line in lines if word in line).split("|")[1:-1]]
    for word in ("recipe", "| dense", "| idp")
  )
  assert head[3:5] == ["start, %", "accuracy, %"] and dense[3:5] == ["10.00", "90.00"]
  assert len(head) == len(dense) == len(missing)


def test_the_modes_are_compared_seed_by_seed_in_whole_tables_only():
  better = {"straight_through": 0.9, "masked": 1.0}
  records = {
    run: record(
      0.9 if run.row == "dense" else 0.5,
      better.get(recipes.ROWS[run.row].gradient, 1) * (1 + run.seed % 3 / 50),
    )
    for run in recipes.grid("bigram")
    if run.budget == "400" and run.pattern in ("-", "1:16")
  }
  worse = next(k for k in records if k.row == "mdgf_linear, straight_through")
  records[worse] = record(0.5, 1.5)
  lines = report.between(table_of(records), recipes.ROWS)
  cells = [[c.strip() for c in line.split("|")[1:-1]] for line in lines[4:-1]]
  assert [c[0].split(":")[0] for c in cells] == [
    "mdgf_linear", "mdgf_exponential", "sdgf_stepwise", "sdgf_geometric",
    "sdgf_stepwise x exponential", "straight_through",
  ]  # fmt: skip
  assert cells[1][1:] == [f"{math.log(0.9):+.3f} [-0.105, -0.105]", "8 of 8", "< .001"]
  assert cells[0][2] == "7 of 8" and cells[5][2] == "0 of 8"
  assert (
    report.between(table_of({k: r for k, r in records.items() if k != worse}), recipes.ROWS) == []
  )
  alike = {k: record(0.9, 1.0) if k.row in ("dense", "no_ff") else r for k, r in records.items()}
  assert report.between(table_of(alike), recipes.ROWS) == []


def test_equal_flops_take_dense_from_its_own_budget():
  dense = recipes.Run("bigram", "-", "400", "dense", 100)
  table = table_of({dense: record(1.0, 0.1)}, budget="400 flops")
  assert list(table.rows["dense"]) == [100] and table.planned["dense"] == 3
  assert table_of({}, pattern="1:4", budget="400").planned["no_ff"] == 3


def test_variances_are_ratios_of_both_statistics():
  lines = report.figure3(table_of(some_records()))
  mdgf = next(line for line in lines if line.startswith("| mdgf"))
  zero = "0 in some seeds"
  assert [c.strip() for c in mdgf.split("|")[3:-1]] == ["1", "1", "0.5", zero] * 2


def test_courses_are_means_of_losses_on_the_way():
  records = some_records()
  lines = report.course(table_of(records))
  idp = next(line for line in lines if line.startswith("| idp"))
  mean = np.mean([r["cross_entropy"] for run, r in records.items() if run.row == "idp"])
  wanted = [f"{mean + i:.2f}" for i in (4, 8, 12, 14, 16, 19)]
  assert [c.strip() for c in idp.split("|")[2:-1]] == ["8", *wanted]
  assert report.course(table_of({}))[-2] == "Missing."


def test_an_earlier_target_is_compared_with_the_usual_one():
  runs = recipes.grid("earlier")
  ce = {"idp, 50 % fine-tuning": 0.5, "idp": 1.0, report.BASE: 2.0}
  records = {
    run._replace(row=row): record(0.9, x * (1 + run.seed % 3 / 50))
    for run in runs
    for row, x in ce.items()
  }
  lines = report.earlier(records, runs)
  assert lines[0].startswith("| task | recipe, with 50 % fine-tuning | seeds |")
  assert lines[2].startswith("| 80 symbols, 1:16 | mdgf_linear, masked | 0 of 3 | missing |")
  idp = [c.strip() for c in lines[-1].split("|")[1:-1]]
  mean = math.exp(np.mean([math.log(0.5 * (1 + i / 50)) for i in range(3)]))
  assert idp[:4] == ["mini MNLI, 1:32", "idp", "3", f"{mean:.4f}"]
  assert idp[4:] == ["-0.693 [-0.693, -0.693]", "-1.386 [-1.386, -1.386]"]


def test_fill_replaces_between_markers_only():
  page = "a\n<!-- begin x: generated -->\nold\n<!-- end x -->\nb"
  once = report.fill(page, "x", [r"new \1"])
  assert once == "a\n<!-- begin x: generated -->\n\nnew \\1\n\n<!-- end x -->\nb"
  assert report.fill(once, "x", [r"new \1"]) == once
  with pytest.raises(ValueError, match="begin y"):
    report.fill(page, "y", [])


def test_the_page_is_what_the_results_say():
  results = sorted((ROOT / "benchmarks" / "results").glob("recipes*.jsonl"))
  page = (ROOT / "docs" / "results.md").read_text("utf8")
  text = page
  records = recipes.results_of(results)
  for name, lines in recipes.sections(records).items():
    text = report.fill(text, name, lines)
  assert text == page, "run the command at the foot of docs/results.md"
  for name, drawn in recipes.pictures(records).items():
    there = (ROOT / "docs" / name).read_text("utf8")
    assert there == drawn, "run the command at the foot of docs/results.md"


# --- one tiny run -----------------------------------------------------------------------------


def test_a_run_is_done_once_and_repeats(tiny_table, tmp_path, monkeypatch, capsys):
  path = tmp_path / "runs.jsonl"
  runs = [recipes.Run("bigram", "1:4", "12", "idp", seed) for seed in (1, 2)]
  path.write_text('{"task": "bigram", "pat')
  recipes.work(runs, path)
  found, torn = recipes.read(path)
  assert list(found) == runs and torn == 1
  one, two = found.values()
  assert one["density"] == 0.25 and one["steps"] == 12 and len(one["curve"]["loss"]) == 12
  assert one["curve"]["D"] == [1] + [0] * 11 and one["curve"]["density"][-1] == 0.25
  assert min(one["curve"]["gradient_kept"]) > 0 and min(one["curve"]["second_moment_all"][1:]) > 0
  assert one["cross_entropy"] != two["cross_entropy"]

  again = tmp_path / "again.jsonl"
  recipes.work(runs[:1], again)
  (same,) = recipes.read(again)[0].values()
  assert {**same, "seconds": 0} == {**one, "seconds": 0}
  monkeypatch.setattr(train, "train", None)  # all is there
  before = path.read_bytes()
  recipes.work(runs, path)
  assert path.read_bytes() == before and "2 of 2 runs are there" in capsys.readouterr().out


def test_no_ff_is_zeroed_ff_and_the_mask_is_causal(tiny_table):
  data = tiny_table.draw(jax.random.key(0))
  x, y = tiny_table.batch(data, 3)
  assert y.shape == (64, 3)
  x, y = np.asarray(x), np.asarray(y)
  np.testing.assert_array_equal(y, np.asarray(data["table"])[x[:, :-1], x[:, 1:]])
  network = tasks.Network(tiny_table.sizes, tiny_table.symbols, True)
  shapes = jax.eval_shape(network.init, jax.random.key(1), x)["params"]
  draw = np.random.default_rng(0).standard_normal
  params = jax.tree.map(lambda s: draw(s.shape, np.float32), shapes)
  rules = nms.Rules({"ff": nms.recipe("one_shot", pattern="1:4", phases=nms.Phases(total=1))})
  assert len(rules.assign(params).places) == 2
  zeroed = jax.tree_util.tree_map_with_path(
    lambda keys, w: w * ("mlp" not in jax.tree_util.keystr(keys)), params
  )
  apply = jax.jit(network.apply)
  without = jax.jit(tasks.Network(tiny_table.sizes, tiny_table.symbols, False).apply)
  rest = {**params, "block_0": {k: v for k, v in params["block_0"].items() if k != "mlp"}}
  del rest["block_0"]["LayerNorm_1"]
  logits = apply({"params": zeroed}, x)
  np.testing.assert_allclose(logits, without({"params": rest}, x), atol=1e-5)
  assert np.abs(logits - apply({"params": params}, x)).max() > 1e-3
  other = apply({"params": zeroed}, np.where(np.arange(4) < 2, x, (x + 1) % 5))
  np.testing.assert_allclose(logits[:, :2], other[:, :2], atol=1e-5)
  assert np.abs(logits[:, 2:] - other[:, 2:]).max() > 1e-3


@pytest.mark.filterwarnings("ignore")  # TensorFlow, on its own account
def test_mini_glue_begins_at_a_dense_start(monkeypatch):
  pytest.importorskip("tensorflow_datasets")
  pytest.importorskip("seqio")
  task = tasks.MiniGlue(config="mnli", rows=64, tests=128, start=3)
  monkeypatch.setitem(train.TASKS, "mini_mnli", task)
  row = recipes.ROWS["sr_ste, 10 % dense"]
  with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
    train.start_of.cache_clear()
    weights, start = train.start_of("mini_mnli", recipes.ROWS["dense"], 7)
    before = jax.tree.map(np.array, weights)
    one = train.train("mini_mnli", row, "1:8", 5, 7)
    assert train.start_of.cache_info().misses == 1
    jax.tree.map(np.testing.assert_array_equal, weights, before)  # the next run finds it whole
    assert one["density"] == 1 / 8 and 0.3 < one["largest"] < 0.5
    assert one["start"] == start["start"] and start["start"]["steps"] == 3
    other, _ = train.start_of("mini_mnli", recipes.ROWS["dense"], 8)
    assert not np.array_equal(*(p["t5"]["token_embedder"]["embedding"] for p in (weights, other)))
    x, y = task.draw(jax.random.key(0))["test"]
    params = jax.jit(task.network(True).init)(jax.random.key(1), x)["params"]
    logits = task.network(False).apply({"params": params}, x)
    places = train.rules_of(task.places, row, "1:8", 10).assign(params).places
    assert len(places) == 3 * 3 + 4 * 4  # of two and one layers, with attention across
    zeroed = jax.tree_util.tree_map_with_path(
      lambda keys, w: w * ("mlp" not in jax.tree_util.keystr(keys[:-2])), params
    )
    np.testing.assert_array_equal(logits, task.network(True).apply({"params": zeroed}, x))
  from t5x_tasks import mini
  from t5x_tasks.vocabulary import mini_words

  words = mini_words()
  texts = [words.decode([int(i) for i in row if i > 1]) for row in x[:3]]
  rows = mini.make("mnli", "validation_matched", {"validation": 3})
  assert texts == [f"mnli hypothesis: {r['hypothesis']} premise: {r['premise']}" for r in rows]
  labels = glue.TASKS["mnli"].labels
  assert [words.decode([int(i)]) for i in y[:3]] == [labels[r["label"]] for r in rows]


def test_digits_are_cut_into_patches():
  pytest.importorskip("sklearn")
  task = train.TASKS["digits"]
  data = task.draw(jax.random.key(0))
  x, y = data["rows"]
  assert x.shape == (1437, 16, 4) and data["test"][0].shape == (360, 16, 4) and y.max() == 9
  from sklearn.datasets import load_digits

  images = load_digits(return_X_y=True)[0].reshape(-1, 8, 8) / 16
  corners = [(r, c) for r in (0, 2, 4, 6) for c in (0, 2, 4, 6)]
  wanted = [[i[r : r + 2, c : c + 2].ravel() for r, c in corners] for i in images]
  rows = lambda x: sorted(np.float32(x).reshape(-1, 64).tolist())
  assert rows(np.concatenate([x, data["test"][0]])) == rows(wanted)
