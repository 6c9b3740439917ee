"""Sources of images: folders, prepared data sets and rebus; what is drawn, and what is refused."""

import hashlib
import itertools
import multiprocessing
import shutil
import sys
import types
from unittest import mock

import numpy as np
import pytest
from reference_arrays import assert_same

from nm_sparsity_jax.trainer.images import augment, readers, rebus

Image = pytest.importorskip("PIL.Image", reason="needs Pillow: pip install -e '.[local]'")
from nm_sparsity_jax.trainer.images import rand_augment  # noqa: E402


def write(path, seed=0, mode="RGB"):
  path.parent.mkdir(parents=True, exist_ok=True)
  pixels = np.random.default_rng(seed).integers(0, 256, (20, 24, 3), np.uint8)
  Image.fromarray(pixels).convert(mode).save(path)


@pytest.fixture
def pets(tmp_path):
  """Six cats and four dogs, of which one each is for validation; one cat is grey."""
  for i in range(10):
    split = "train" if i % 5 else "validation"
    path = tmp_path / split / ("cats" if i < 6 else "dogs") / f"{i}.png"
    write(path, i, mode="L" if i == 1 else "RGB")
  (tmp_path / "train" / "cats" / "notes.txt").write_text("no image")
  return tmp_path


class Builder:
  """A prepared set of TensorFlow Datasets of eight pictures."""

  info = types.SimpleNamespace(splits={"train": 0, "test": 0})

  def as_data_source(self, split):
    pixels = np.random.default_rng(len(split)).integers(0, 256, (8, 20, 20, 3), np.uint8)
    return [{"image": image, "label": np.int64(i)} for i, image in enumerate(pixels)]


@pytest.fixture
def tfds(monkeypatch):
  """A stand-in for tensorflow_datasets; it notes what it was asked for."""
  made = mock.Mock(**{"builder.return_value": Builder()})
  monkeypatch.setitem(sys.modules, "tensorflow_datasets", made)
  return made


@pytest.fixture(params=["folder", "cifar10", "rebus"])
def make(request, pets, tfds):
  """Makes a source that augments, of batches of three."""
  data = str(pets) if request.param == "folder" else request.param
  how = dict(size=16, crop=0.1, random_erasing=0.5, rand_augment="rand-m9-mstd0.5-inc1")
  return lambda: readers.find(data, batch_size=3, **how)


def test_batch_i_is_a_function_of_seed_and_i(make):
  whole = list(itertools.islice(make().train(5, 0), 7))
  assert_same(next(make().train(5, 4)), whole[4])
  others = [next(make().train(6, 4)), next(make().train(4, 5))]
  rows = [row.tobytes() for batch in (*whole, *others) for row in batch["image"]]
  assert len(set(rows)) == len(rows)  # a picture that comes again is drawn otherwise
  if not isinstance(make(), rebus.Rebus):  # two epochs of eight, each example once
    labels = np.concatenate([b["label"] for b in whole])[:16]
    assert sorted(labels[:8].tolist()) == sorted(labels[8:].tolist())


def test_splits_are_read_in_order_and_filled_up(pets, tfds):
  data = readers.find(str(pets), size=16, batch_size=3)
  assert len(data.tables["train"]) == 8
  (batch,) = data.splits()["validation"]
  assert batch["label"].tolist() == [0, 0, 0] and batch["real"].tolist() == [1, 1, 0]
  data = readers.find("cifar10", size=16, batch_size=3, folder="/data")
  assert [*data.splits()] == ["test"]
  batches = list(data.splits()["test"])
  assert [b["real"].sum() for b in batches] == [3, 3, 2]
  assert np.concatenate([b["label"] for b in batches])[:8].tolist() == list(range(8))
  tfds.builder.assert_called_with("cifar10", data_dir="/data", file_format="array_record")


def test_a_crop_shows_a_part_and_a_flip_the_other_side():
  picture = Image.fromarray(np.indices((40, 60)).sum(0).astype(np.uint8)[..., None].repeat(3, -1))
  left, right = augment.centered(picture, 8)[4, [0, -1], 0]
  training = lambda i, *how: augment.training(picture, 8, np.random.default_rng(i), *how)
  flips = [training(i, None, 0.0)[4, 0, 0] > right / 2 + left / 2 for i in range(60)]
  assert left < right and 15 < sum(flips) < 45
  whole = int(np.ptp(np.asarray(picture)))
  seen = [np.ptp(training(i, 0.08, 0.0).astype(int)) for i in range(60)]
  assert min(seen) < whole / 2 < max(seen) <= whole
  changed = (training(0, None, 0.0) != training(0, None, 1.0)).any(-1)
  assert 0 < changed.sum() < 40  # one box of at most a third


@pytest.mark.parametrize("change", range(15))
def test_every_operation_of_rand_augment_changes_what_it_should(change):
  """The size stays; an increasing one changes more with a higher level."""
  coarse = np.random.default_rng(0).integers(30, 220, (4, 4, 3), np.uint8)
  picture = Image.fromarray(coarse.repeat(8, 0).repeat(8, 1))

  def moved(level, increasing):
    made = [rand_augment.CHANGES[change](picture, level, sign, increasing) for sign in (1, -1)]
    assert {image.size for image in made} == {(32, 32)}
    return max(np.abs(np.asarray(x).astype(int) - np.asarray(picture)).mean() for x in made)

  assert max(moved(level, False) for level in (0.0, 0.5, 1.0)) > 0
  assert moved(0.0, True) <= moved(0.5, True) + 1e-9 <= moved(1.0, True) + 2e-9


def test_rand_augment_draws_and_a_large_magnitude_is_ten():
  picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (24, 24, 3), np.uint8))
  make = lambda words, i: np.asarray(rand_augment.parse(words)(picture, np.random.default_rng(i)))
  found = [make("rand-m15-n2", i) for i in range(40)]
  np.testing.assert_array_equal(found[3], make("rand-m10", 3))
  assert 20 < sum((image != picture).any() for image in found) < 40  # half of two do nothing


@pytest.mark.slow
def test_workers_read_what_one_process_reads(pets):
  """grain's processes: each makes whole batches, which come in their order."""
  pytest.importorskip("grain", reason="needs grain: pip install -e '.[local]'")
  make = lambda workers: readers.find(str(pets), size=16, batch_size=2, crop=0.2, workers=workers)
  ahead = make(2).train(1, 3)
  for one, other in zip(itertools.islice(make(0).train(1, 3), 4), ahead, strict=False):
    assert_same(one, other)
  assert multiprocessing.active_children()
  del ahead
  assert not multiprocessing.active_children()


@pytest.mark.parametrize(
  "spoil, word",
  [
    (lambda p: write(p / "validation/birds/b.png"), "train/birds"),
    (lambda p: shutil.rmtree(p), "train/CLASS"),
    (lambda p: (p / "validation/cats/0.png").write_bytes(b"no"), "0.png .*damaged"),
  ],
)
def test_a_file_that_does_not_fit_is_named(pets, spoil, word):
  spoil(pets)
  data = readers.find(str(pets), size=16, batch_size=2)
  with pytest.raises(ValueError, match=word):
    list(data.splits()["validation"])


def test_words_that_are_not_timms_are_refused():
  with pytest.raises(ValueError, match="RAND_AUGMENT='augmix-m3'"):
    readers.find("/data/pets", size=16, rand_augment="augmix-m3")


# --- rebus --------------------------------------------------------------------------------------

# It was shown once that two glyphs stand in two cells and neither alone tells the label.
# Of batch 0 of seed 0 of 32 pictures, and of the first 32 of 'validation': noted on 2026-11-23.
TRAIN = "61d19744a5a64424b22a56ec3544c0ba8a271cffcef12470ed38337f69bc8883"
VALIDATION = "130e92da4663a0379cdacf7e06ffc3acdba1fbc172760529dc0a658883764327"


def digest(batch):
  parts = batch["image"].astype("<f4"), batch["label"].astype("<i4"), batch["real"].astype("<i4")
  return hashlib.sha256(b"".join(x.tobytes() for x in parts)).hexdigest()


def test_the_bits_of_rebus_are_those_of_the_first_day():
  task = rebus.Rebus(batch_size=32)
  assert digest(next(task.train(0, 0))) == TRAIN
  assert digest(next(iter(task.splits()["validation"]))) == VALIDATION
