"""Images that are read: folders and prepared data sets; what is drawn, and what is refused."""

import itertools
import multiprocessing
import pickle
import shutil
import sys
import types

import numpy as np
import pytest

from nm_sparsity_jax.trainer.images import augment, rand_augment, readers, source

Image = pytest.importorskip("PIL.Image", reason="needs Pillow: pip install -e '.[vision]'")


def write(path, seed=0, size=(24, 20), mode="RGB"):
  path.parent.mkdir(parents=True, exist_ok=True)
  pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), np.uint8)
  Image.fromarray(pixels).convert(mode).save(path)


@pytest.fixture
def pets(tmp_path):
  """Six cats and four dogs, of which one each is for validation."""
  for i in range(10):
    split = "train" if i % 5 else "validation"
    write(tmp_path / split / ("cats" if i < 6 else "dogs") / f"{i}.png", i)
  (tmp_path / "train" / "cats" / "notes.txt").write_text("no image")
  return tmp_path


def same(one, other):
  for name in one:
    np.testing.assert_array_equal(one[name], other[name])


def test_a_folder_is_classes_and_splits(pets):
  data = readers.find(str(pets), 16, batch_size=3)
  data.check()
  assert data.names == ("cats", "dogs") and data.classes == 2 and len(data.tables["train"]) == 8
  (batch,) = data.splits()["validation"]
  assert batch["image"].shape == (3, 16, 16, 3) and batch["image"].dtype == np.float32
  assert batch["label"].tolist() == [0, 0, 0] and batch["real"].tolist() == [1, 1, 0]


def test_a_folder_without_a_split_is_warned_of(pets):
  shutil.rmtree(pets / "validation")
  with pytest.warns(UserWarning, match="nothing is evaluated"):
    readers.find(str(pets), 16, batch_size=2).check()


def test_batch_i_is_a_function_of_seed_and_i(pets):
  make = lambda: readers.find(
    str(pets), 16, batch_size=3, crop=0.1, random_erasing=0.5, rand_augment="rand-m9-mstd0.5-inc1"
  )
  whole = list(itertools.islice(make().train(5, 0), 7))
  same(next(make().train(5, 4)), whole[4])
  assert not np.array_equal(next(make().train(6, 4))["image"], whole[4]["image"])
  labels = np.concatenate([b["label"] for b in whole])[:16]  # two epochs of eight, each once
  assert sorted(labels[:8].tolist()) == sorted(labels[8:].tolist()) == [0] * 4 + [1] * 4
  rows = [row.tobytes() for batch in whole for row in batch["image"]]
  assert len(set(rows)) == len(rows)  # a picture that comes again is drawn otherwise


def test_a_crop_shows_a_part_and_a_flip_the_other_side():
  picture = Image.fromarray(np.indices((40, 60)).sum(0).astype(np.uint8)[..., None].repeat(3, -1))
  left, right = augment.centered(picture, 8)[4, [0, -1], 0]
  training = lambda i, *how: augment.training(picture, 8, augment.stream(0, i), *how)
  flips = [training(i, None, 0.0)[4, 0, 0] > right / 2 + left / 2 for i in range(60)]
  assert left < right and 15 < sum(flips) < 45
  whole = int(np.ptp(np.asarray(picture)))
  seen = [np.ptp(training(i, 0.08, 0.0).astype(int)) for i in range(60)]
  assert min(seen) < whole / 2 < max(seen) <= whole
  changed = (training(0, None, 0.0) != training(0, None, 1.0)).any(-1)
  assert 0 < changed.sum() < 40  # one box of at most a third
  grey = np.full((2, 2, 3), 255 * augment.MEAN, np.float32)
  assert abs(augment.normalized(grey)).max() < 1e-6


@pytest.mark.parametrize("increasing", [False, True])
def test_every_operation_of_rand_augment_changes_what_it_should(increasing):
  """The size stays; an increasing one changes more with a higher level."""
  coarse = np.random.default_rng(0).integers(30, 220, (4, 4, 3), np.uint8)
  picture = Image.fromarray(coarse.repeat(8, 0).repeat(8, 1))
  for change in rand_augment._CHANGES:
    found = []
    for level in (0.0, 0.5, 1.0):
      images = [change(picture, level, sign, increasing) for sign in (1, -1)]
      assert {image.size for image in images} == {(32, 32)}
      moved = [np.abs(np.asarray(x).astype(int) - np.asarray(picture)).mean() for x in images]
      found.append(max(moved))
    assert max(found) > 0
    if increasing:
      assert found[0] <= found[1] + 1e-9 and found[1] <= found[2] + 1e-9


def test_rand_augment_draws_by_the_stream_and_a_large_magnitude_is_ten():
  picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (24, 24, 3), np.uint8))
  made = lambda words, i: np.asarray(rand_augment.parse(words)(picture, augment.stream(7, i)))
  found = [made("rand-m15-n2", i) for i in range(40)]
  for i, image in enumerate(found[:5]):
    np.testing.assert_array_equal(image, made("rand-m10", i))
  changed = [not np.array_equal(image, np.asarray(picture)) for image in found]
  assert 20 < sum(changed) < 40  # each of two does nothing half of the time
  assert rand_augment.parse("rand-m9-mstd0.5-inc1") == rand_augment.RandAugment(9.0, 2, 0.5, True)


@pytest.mark.slow
def test_workers_read_what_one_process_reads(pets):
  """grain's processes: each makes whole batches, which come in their order."""
  pytest.importorskip("grain", reason="needs grain: pip install -e '.[vision]'")
  make = lambda workers: readers.find(str(pets), 16, batch_size=2, crop=0.2, workers=workers)
  ahead = make(2).train(1, 3)
  for one, other in zip(itertools.islice(make(0).train(1, 3), 4), ahead, strict=False):
    same(one, other)
  assert multiprocessing.active_children()
  del ahead
  assert not multiprocessing.active_children()


@pytest.mark.parametrize(
  "make, word",
  [
    (lambda p: write(p / "train/cats/g.png", mode="L"), "g.png is grey"),
    (lambda p: (p / "train/cats/e.png").write_bytes(b""), "e.png is not an image"),
    (lambda p: (p / "train/cats/c.jpg").write_bytes(b"no"), "c.jpg is not an image"),
    (lambda p: write(p / "validation/birds/b.png"), "'birds'"),
    (lambda p: (p / "test").mkdir(), "test has no images"),
    (lambda p: (p / "train/birds").mkdir(), "birds has no images"),
    (lambda p: shutil.rmtree(p / "train"), "train/CLASS"),
  ],
)
def test_a_file_that_does_not_fit_is_named(pets, make, word):
  make(pets)
  with pytest.raises(ValueError, match=word):
    readers.find(str(pets), 16, 2).check()


def test_a_file_that_is_cut_is_named_when_it_is_read(pets):
  path = pets / "validation/cats/0.png"
  path.write_bytes(path.read_bytes()[:300])
  with pytest.raises(ValueError, match="0.png .* damaged"):
    list(readers.find(str(pets), 16, 2).splits()["validation"])


@pytest.mark.parametrize(
  "fields, word",
  [
    (dict(crop=0), "RANDOM_CROP=0"),
    (dict(random_erasing=2), "RANDOM_ERASING=2"),
    (dict(rand_augment="augmix-m3"), "RAND_AUGMENT='augmix-m3'"),
    (dict(data="rebus", size=32), "IMAGE_SIZE=32"),
    (dict(data="rebus", rand_augment="rand-m9"), "RAND_AUGMENT"),
  ],
)
def test_a_setting_that_does_not_fit_is_named(fields, word):
  with pytest.raises(ValueError, match=word):
    readers.find(**(dict(data="/data/pets", size=16) | fields))


def test_a_source_of_your_own_is_returned():
  own = source.Source()
  assert readers.find(own, 7) is own and readers.find("rebus", 16, 4).batch_size == 4


# --- TensorFlow Datasets ------------------------------------------------------------------------


class Builder:
  """A prepared set of ten pictures."""

  prepared = True
  info = types.SimpleNamespace(
    features={"label": types.SimpleNamespace(num_classes=10)}, splits={"train": 0, "test": 0}
  )

  def is_prepared(self):
    return self.prepared

  def as_data_source(self, split):
    pixels = np.random.default_rng(len(split)).integers(0, 256, (10, 20, 20, 3), np.uint8)
    return [{"image": image, "label": np.int64(i)} for i, image in enumerate(pixels)]


@pytest.fixture
def stub(monkeypatch):
  """A stand-in for tensorflow_datasets; it notes what it was asked for."""
  made = types.ModuleType("tensorflow_datasets")
  made.asked, made.made = [], Builder()
  made.builder = lambda name, **fields: made.asked.append((name, fields)) or made.made
  monkeypatch.setitem(sys.modules, "tensorflow_datasets", made)
  return made


def test_a_prepared_set_is_read_by_number(stub):
  data = readers.find("cifar10", 16, batch_size=4, folder="/data")
  data.check()
  assert data.classes == 10 and [*data.splits()] == ["test"]
  batches = list(data.splits()["test"])
  assert [b["real"].sum() for b in batches] == [4, 4, 2]
  assert np.concatenate([b["label"] for b in batches])[:10].tolist() == list(range(10))
  third = list(itertools.islice(data.train(1, 0), 3))[2]
  same(next(data.train(1, 2)), third)
  same(next(pickle.loads(pickle.dumps(data)).train(1, 2)), third)  # what a worker gets
  assert stub.asked[0] == ("cifar10", {"data_dir": "/data", "file_format": "array_record"})


def test_what_is_not_prepared_says_where_it_was_looked_for(stub, monkeypatch):
  stub.made.prepared = False
  monkeypatch.setenv("TFDS_DATA_DIR", "/prepared")
  with pytest.raises(ValueError, match="'imagenet2012' is not prepared .* '/prepared'"):
    readers.find("imagenet2012", 224).check()
