"""The generated task: the same bits for ever, a function of (seed, i), and worth its name."""

import hashlib
import itertools

import numpy as np

from nm_sparsity_jax.trainer.images import rebus

# Of batch 0 of seed 0 of 32 pictures, and of the first 32 of 'validation': noted on 2026-11-23.
TRAIN = "61d19744a5a64424b22a56ec3544c0ba8a271cffcef12470ed38337f69bc8883"
VALIDATION = "130e92da4663a0379cdacf7e06ffc3acdba1fbc172760529dc0a658883764327"


def digest(batch):
  parts = batch["image"].astype("<f4"), batch["label"].astype("<i4"), batch["real"].astype("<i4")
  return hashlib.sha256(b"".join(x.tobytes() for x in parts)).hexdigest()


def test_its_bits_are_those_of_the_first_day():
  task = rebus.Rebus(batch_size=32)
  assert digest(next(task.train(0, 0))) == TRAIN
  assert digest(next(iter(task.splits()["validation"]))) == VALIDATION


def test_batch_i_is_a_function_of_seed_and_i():
  task = rebus.Rebus(batch_size=8, validation=16)
  whole = list(itertools.islice(task.train(3, 0), 4))
  assert digest(next(task.train(3, 2))) == digest(whole[2])
  others = [next(task.train(4, 2)), next(task.train(2, 3)), *task.splits()["validation"]]
  assert len({digest(b) for b in (*whole, *others)}) == 4 + len(others)


def test_validation_has_2048_pictures_whatever_a_batch_holds():
  found = []
  for size in (128, 300):
    batches = list(rebus.Rebus(size).splits()["validation"])
    assert {len(b["image"]) for b in batches} == {size}
    found.append(np.concatenate([b["image"][b["real"] == 1] for b in batches]))
  assert found[0].shape == (2048, 16, 16, 3)
  np.testing.assert_array_equal(*found)


def test_two_glyphs_of_two_alphabets_stand_in_two_cells():
  image, label = rebus.pictures((5,), 64, noise=0.0)
  cells = image.reshape(64, 2, 8, 2, 8, 3).swapaxes(2, 3).reshape(64, 4, -1)
  shown = (cells != 0).any(-1)
  assert (shown.sum(1) == 2).all() and shown.any(0).all()
  power = np.sqrt((cells[shown] ** 2).mean(-1))
  assert 0.69 < power.min() < 0.75 and 1.25 < power.max() < 1.31  # dimmed
  assert label.min() == 0 and label.max() == 9
  noisy, same = rebus.pictures((5,), 64)
  np.testing.assert_array_equal(label, same)
  assert abs((noisy - image).std() - 0.4) < 0.01 and abs((noisy - image).mean()) < 0.01


def test_no_alphabet_alone_tells_the_label():
  _, table = rebus._task(0)
  for axis in (0, 1):
    best = max(np.bincount(row, minlength=10).max() for row in np.moveaxis(table, axis, 0))
    assert best <= 7  # of 20
  assert np.bincount(table.ravel(), minlength=10).max() <= 52  # of 400
