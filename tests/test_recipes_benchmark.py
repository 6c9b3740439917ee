"""benchmarks/recipes.py: its command, its results file, its tasks, and tiny runs."""

import dataclasses
import importlib
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from study_records import STUDY

from nm_sparsity_jax import cli
from nm_sparsity_jax.analysis import sweep
from nm_sparsity_jax.cli import quickstart
from nm_sparsity_jax.integrations import gin_files
from nm_sparsity_jax.trainer import optimizers
from nm_sparsity_jax.trainer.images import rebus

noise = importlib.import_module("_study_noise")
recipes = importlib.import_module("recipes")
tasks = importlib.import_module("_recipes_tasks")
train = importlib.import_module("_recipes_train")
RUN = recipes.Run("bigram", "1:4", "6", "sr_ste, 10 % dense", 1)
ROW = STUDY.rows[RUN.row]


# --- the command and its file -----------------------------------------------------------------


def test_workers_share_the_queue_by_rows_and_a_regex_takes_a_part(capsys):
  runs = recipes.grid("study")
  shares = [recipes.share(runs, i, 3) for i in range(3)]
  assert sorted(sum(shares, [])) == sorted(runs)
  rows = [{run._replace(seed=0) for run in share} for share in shares]
  assert sum(map(len, rows)) == len(set.union(*rows))  # each is compiled by one worker
  recipes.main(["--list", "--task", "rebus", "--only", "rebus/1:16/540/one_shot"])
  lines = capsys.readouterr().out.splitlines()
  assert lines == [f"rebus | 1:16 | 540 | one_shot | {seed}" for seed in range(400, 408)]


def test_results_survive_a_torn_line_and_no_run_is_there_twice(tmp_path):
  path = tmp_path / "runs.jsonl"
  one, two = ({**RUN._asdict(), "seed": seed, "accuracy": 0.5} for seed in (1, 2))
  recipes.append(path, one)
  path.write_text(path.read_text() + '{"task": "bi')  # killed while it wrote the second line
  recipes.append(path, two)
  assert recipes.read(path) == {RUN: one, RUN._replace(seed=2): two}
  with pytest.raises(ValueError, match="JSON"):
    recipes.append(path, {"cross_entropy": math.nan})
  recipes.append(path, one)
  with pytest.raises(ValueError, match="two results"):
    recipes.read(path)


# --- tiny runs --------------------------------------------------------------------------------


def test_a_run_is_done_once_and_repeats(tiny_table, tmp_path, monkeypatch, capsys):
  path, runs = tmp_path / "runs.jsonl", [RUN, RUN._replace(seed=2)]
  recipes.work(runs, path)
  one, two = recipes.read(path).values()
  assert one["density"] == 0.25 and one["steps"] == 6 and len(one["curve"]["loss"]) == 6
  assert len(one["curve"]["noise"]) == 6 and min(one["curve"]["noise"]) > 0
  assert one["cross_entropy"] != two["cross_entropy"]
  # Who looks on changes nothing, and the same line gives the same bits.
  again = train.train("bigram", ROW, "1:4", 6, 1)
  assert "noise" not in again["curve"] and again["cross_entropy"] == one["cross_entropy"]
  monkeypatch.setattr(train, "train", None)  # all is there
  recipes.work(runs, path)
  assert "2 of 2 runs are there" in capsys.readouterr().out


def test_a_run_that_diverges_scores_as_a_guess_does(tiny_table, tmp_path):
  row = recipes.Row("sr_ste", rate=1e38, constant=True)
  look = lambda *args: noise.Onlooker(*args, batches=4)
  found = train.train("bigram", row, "1:4", 12, 0, look)
  assert found["diverged"] and (found["accuracy"], found["density"]) == (0.2, None)
  np.testing.assert_allclose(found["cross_entropy"], math.log(5))
  assert 0 < len(found["curve"]["loss"]) < 12
  recipes.append(tmp_path / "runs.jsonl", found)  # no NaN is in it


def test_a_row_sets_lambda_and_rate(tiny_table):
  (recipe,) = train.rules_of(("ff",), recipes.Row("sr_ste", lam=1e-2), "1:4", 6).places.values()
  assert recipe.lam == 1e-2
  rates = [float(train.held(100, 2e-3)(step)) for step in (0, 5, 10, 99)]
  np.testing.assert_allclose(rates, [0, 1e-3, 2e-3, 2e-3], rtol=1e-6)


# --- tasks ------------------------------------------------------------------------------------


def test_no_ff_is_zeroed_ff_and_the_mask_is_causal(tiny_table):
  data = tiny_table.draw(jax.random.key(0))
  x, y = map(np.asarray, tiny_table.batch(data, 3))
  np.testing.assert_array_equal(y, np.asarray(data["table"])[x[:, :-1], x[:, 1:]])
  network = tiny_table.network(True)
  params = jax.jit(network.init)(jax.random.key(1), x)["params"]
  block = {k: v for k, v in params["block_0"].items() if k not in ("mlp", "LayerNorm_1")}
  zeroed = {**params["block_0"], "mlp": jax.tree.map(jnp.zeros_like, params["block_0"]["mlp"])}
  of = lambda x, network=network, **changed: network.apply({"params": params | changed}, x)
  without = of(x, tiny_table.network(False), block_0=block)
  np.testing.assert_allclose(of(x, block_0=zeroed), without, atol=1e-5)
  assert np.abs(of(x) - without).max() > 1e-4
  changed = of(np.where(np.arange(4) < 2, x, (x + 1) % 5))
  same = np.abs(of(x) - changed).max((0, 2))
  assert same[:2].max() < 1e-5 and same[2:].min() > 1e-4


def test_a_run_begins_at_a_dense_start(tiny_table, monkeypatch):
  monkeypatch.setitem(train.TASKS, "bigram", dataclasses.replace(tiny_table, start=3))
  train.start_of.cache_clear()
  weights, start = train.start_of("bigram", recipes.Row("dense"), 7)
  before = jax.tree.map(np.array, weights)
  one = train.train("bigram", ROW, "1:4", 3, 7)
  assert train.start_of.cache_info().misses == 1
  jax.tree.map(np.testing.assert_array_equal, weights, before)  # the next run finds it whole
  assert one["start"] == start["start"] and one["start"]["steps"] == 3


def test_rebus_is_the_task_of_the_quickstart():
  grid = sweep.read(quickstart.FILES["rebus"])
  (run,) = (run for run in grid.runs if run.recipe == "sr_ste")
  args = cli.parse(grid.command(run))[-1]
  with gin_files.Config([gin_files.folder()], args.gin_file, args.gin_bindings) as config:
    workload, rules = config.value("WORKLOAD"), config.value("RULES")
    schedule = ("LEARNING_RATE", "LEARNING_RATE_FACTORS", "WARMUP_STEPS", "SPARSE_STEPS")
    wanted = optimizers.learning_rate(*map(config.value, schedule))
  task = tasks.TASKS["rebus"]
  assert workload.network.config == task.network(True).config
  assert workload.batch_size == task.examples and run.steps == 540
  assert rules.places == train.rules_of(("ff",), ROW, "1:16", 540).places
  with jax.numpy_dtype_promotion("standard"):
    falling, wanted = (
      jax.vmap(f)(jnp.arange(540)) for f in (train.falling(540, task.rate), wanted)
    )
  np.testing.assert_allclose(falling, wanted, rtol=1e-4, atol=1e-7)


def test_a_seed_draws_the_pictures_of_training(tiny_table, monkeypatch):
  task = tasks.TASKS["rebus"]
  data, other = (task.draw(jax.random.key(seed)) for seed in (7, 8))
  image, _ = task.batch(task.fed(data, 3), 3)
  same = next(rebus.Rebus(128).train(int(data["seed"]), 3))
  np.testing.assert_array_equal(image, same["image"])
  assert not np.array_equal(image, task.fed(other, 3)["image"])
  np.testing.assert_array_equal(data["test"][0], other["test"][0])
  small = dataclasses.replace(tasks._REBUS, layers=1, embed=16, heads=1, mlp=32)
  monkeypatch.setattr(tasks, "_REBUS", small)
  found = train.train("rebus", ROW, "1:16", 3, 0)
  assert found["density"] == 1 / 16 and 0 < found["accuracy"] < 0.4
