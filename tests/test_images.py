"""Images that are read: folders and prepared data sets; what is drawn, and what is refused."""

import itertools
import multiprocessing
import pathlib
import pickle
import shutil
import sys
import types

import numpy as np
import pytest

from nm_sparsity_jax.trainer.images import augment, find, folder, indexed, rand_augment, tfds

Image = pytest.importorskip("PIL.Image", reason="needs Pillow: pip install -e '.[vision]'")


def write(path, seed=0, size=(24, 20), mode="RGB"):
  path.parent.mkdir(parents=True, exist_ok=True)
  pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), np.uint8)
  Image.fromarray(pixels).convert(mode).save(path)
  return pixels


@pytest.fixture
def pets(tmp_path):
  """Six cats and four dogs, of which one each is for validation."""
  for i in range(10):
    split = "train" if i % 5 else "validation"
    name = "cats" if i < 6 else "dogs"
    write(tmp_path / split / name / f"{i}.png", i)
  (tmp_path / "train" / "cats" / "notes.txt").write_text("no image")
  return tmp_path


def same(one, other):
  for name in one:
    np.testing.assert_array_equal(one[name], other[name])


def test_a_folder_is_classes_and_splits(pets):
  data = find.source(str(pets), 16, batch_size=2)
  data.check()
  assert isinstance(data, folder.Folder) and data.names == ("cats", "dogs") and data.classes == 2
  (batch,) = data.splits()["validation"]
  assert batch["image"].shape == (2, 16, 16, 3) and batch["image"].dtype == np.float32
  assert batch["label"].tolist() == [0, 0] and batch["real"].tolist() == [1, 1]
  assert len(data.tables["train"]) == 8


def test_a_folder_without_a_split_is_warned_of(pets):
  shutil.rmtree(pets / "validation")
  with pytest.warns(UserWarning, match="no folder beside 'train', so nothing is evaluated: put im"):
    find.source(str(pets), 16, batch_size=2).check()


def test_batch_i_is_a_function_of_seed_and_i(pets):
  make = lambda: find.source(
    str(pets), 16, batch_size=3, crop=0.1, random_erasing=0.5, rand_augment="rand-m9-mstd0.5-inc1"
  )
  whole = list(itertools.islice(make().train(5, 0), 7))
  same(next(make().train(5, 4)), whole[4])
  other = next(make().train(6, 4))
  assert not np.array_equal(other["image"], whole[4]["image"])
  labels = np.concatenate([b["label"] for b in whole])[:16]  # two epochs of eight, each once
  assert sorted(labels[:8].tolist()) == sorted(labels[8:].tolist()) == [0] * 4 + [1] * 4


def test_a_picture_that_comes_again_is_drawn_otherwise(tmp_path):
  write(tmp_path / "train/one/0.png")
  (tmp_path / "validation/one").mkdir(parents=True)
  write(tmp_path / "validation/one/1.png")
  batches = find.source(str(tmp_path), 16, batch_size=2, crop=0.1).train(0, 0)
  rows = [row for batch in itertools.islice(batches, 3) for row in batch["image"]]
  assert len({row.tobytes() for row in rows}) == 6


def test_a_crop_shows_a_part_and_a_flip_the_other_side():
  picture = Image.fromarray(np.indices((40, 60)).sum(0).astype(np.uint8)[..., None].repeat(3, -1))
  left, right = augment.centered(picture, 8)[4, [0, -1], 0]
  assert left < right
  flips = [
    augment.training(picture, 8, augment.stream(0, i), None, 0.0)[4, 0, 0] > right / 2 + left / 2
    for i in range(60)
  ]
  assert 15 < sum(flips) < 45
  whole = int(np.ptp(np.asarray(picture)))
  seen = [
    np.ptp(augment.training(picture, 8, augment.stream(1, i), 0.08, 0.0).astype(int))
    for i in range(60)
  ]
  assert min(seen) < whole / 2 < max(seen) <= whole
  plain = augment.training(picture, 8, augment.stream(2, 0), None, 0.0)
  erased = augment.training(picture, 8, augment.stream(2, 0), None, 1.0)
  changed = (plain != erased).any(-1)
  assert 0 < changed.sum() < 40  # one box of at most a third
  grey = np.full((2, 2, 3), 255 * augment.MEAN, np.float32)
  assert abs(augment.normalized(grey)).max() < 1e-6


@pytest.mark.parametrize("change", rand_augment._CHANGES)
@pytest.mark.parametrize("increasing", [False, True])
def test_every_operation_of_rand_augment_changes_what_it_should(change, increasing):
  """With the level 0 to 10: the size stays; an increasing one changes more with a higher level."""
  coarse = np.random.default_rng(0).integers(30, 220, (4, 4, 3), np.uint8)
  picture = Image.fromarray(coarse.repeat(8, 0).repeat(8, 1))
  moved = lambda level, sign: np.abs(
    np.asarray(change(picture, level, sign, increasing)).astype(int) - np.asarray(picture)
  ).mean()
  by_level = [max(moved(level, 1), moved(level, -1)) for level in (0.0, 0.5, 1.0)]
  assert change(picture, 0.7, 1, increasing).size == (32, 32) and max(by_level) > 0
  if increasing:
    assert by_level[0] <= by_level[1] + 1e-9 and by_level[1] <= by_level[2] + 1e-9


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
  make = lambda workers: find.source(str(pets), 16, batch_size=2, crop=0.2, workers=workers)
  alone = itertools.islice(make(0).train(1, 3), 4)
  ahead = make(2).train(1, 3)
  for one, other in zip(alone, ahead, strict=False):
    same(one, other)
  assert multiprocessing.active_children()
  del ahead
  assert not multiprocessing.active_children()


def test_what_makes_batches_is_closed_when_the_reader_is_done():
  class Batches(list):
    closed = False

    def close(self):
      self.closed = True

  made = Batches([1, 2, 3])
  read = indexed.ended(made)
  assert next(read) == 1 and not made.closed
  del read
  assert made.closed


def test_what_a_worker_gets_is_small(pets, stub):
  for data in (find.source(str(pets), 16), find.source("cifar10", 16)):
    data.check()
    again = pickle.loads(pickle.dumps(data))
    same(next(again.train(0, 1)), next(data.train(0, 1)))


@pytest.mark.parametrize(
  "make, said",
  [
    (lambda p: write(p / "train/cats/g.png", mode="L"), r"^DATA: .*g.png is grey \(mode L\), and "),
    (lambda p: (p / "train/cats/e.png").write_bytes(b""), "^DATA: .*e.png is empty. Take it out.$"),
    (lambda p: (p / "train/cats/c.jpg").write_bytes(b"no"), "^DATA: .*c.jpg is not an image"),
    (lambda p: write(p / "validation/birds/b.png"), "'validation' has the class 'birds', and 'tra"),
    (lambda p: (p / "test").mkdir(), "'test' has no images: a file ends in .jpg"),
    (lambda p: (p / "train/birds").mkdir(), "'train/birds' has no images: a file ends in .jpg"),
  ],
)  # fmt: skip
def test_a_file_that_does_not_fit_is_named(pets, make, said):
  make(pets)
  with pytest.raises(ValueError, match=said):
    find.source(str(pets), 16, 2).check()


def test_a_file_that_is_cut_is_named_when_it_is_read(pets):
  path = pets / "validation/cats/0.png"
  path.write_bytes(path.read_bytes()[:300])
  with pytest.raises(ValueError, match=f"^DATA: {path} cannot be read .*: it is damaged. Take it"):
    list(find.source(str(pets), 16, 2).splits()["validation"])


@pytest.mark.parametrize(
  "fields, said",
  [
    (dict(crop=0), "^RANDOM_CROP=0: give a share above 0, at most 1, or None.$"),
    (dict(random_erasing=2), "^RANDOM_ERASING=2: give a probability.$"),
    (
      dict(rand_augment="auto-m9"),
      "^RAND_AUGMENT='auto-m9': give timm's words, such as 'rand-m15-n2' ",
    ),
    (dict(workers=-1), "^DATA_WORKERS=-1: give a whole number, 0 or more.$"),
    (dict(size=0), "^IMAGE_SIZE=0: give a whole number"),
    (
      dict(data="/nowhere/at/all"),
      "^DATA='/nowhere/at/all' has no folder 'train': put images into",
    ),
  ],
)
def test_a_wrong_setting_is_one_sentence(pets, fields, said):
  with pytest.raises(ValueError, match=said):
    find.source(**dict(data=str(pets), size=16, batch_size=2) | fields).check()


# --- TensorFlow Datasets ------------------------------------------------------------------------


class Builder:
  """A prepared set of ten pictures."""

  def __init__(self, prepared=True):
    self.prepared = prepared
    label = types.SimpleNamespace(num_classes=10)
    self.info = types.SimpleNamespace(features={"label": label}, splits={"train": 0, "test": 0})

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
  made.core = types.SimpleNamespace(DatasetNotFoundError=type("Missing", (Exception,), {}))

  def builder(name, **fields):
    made.asked.append((name, fields))
    if name == "cifra10":
      raise made.core.DatasetNotFoundError(name)
    return made.made

  made.builder = builder
  monkeypatch.setitem(sys.modules, "tensorflow_datasets", made)
  monkeypatch.delenv("TFDS_DATA_DIR", raising=False)
  return made


def test_a_prepared_set_is_read_by_number(stub):
  data = find.source("cifar10", 16, batch_size=4, folder="/data")
  data.check()
  assert isinstance(data, tfds.Tfds) and data.classes == 10 and [*data.splits()] == ["test"]
  batches = list(data.splits()["test"])
  assert [b["real"].sum() for b in batches] == [4, 4, 2]
  assert np.concatenate([b["label"] for b in batches])[:10].tolist() == list(range(10))
  same(next(data.train(1, 2)), list(itertools.islice(data.train(1, 0), 3))[2])
  assert stub.asked[0] == ("cifar10", {"data_dir": "/data", "file_format": "array_record"})


def test_what_is_not_prepared_says_where_it_was_looked_for(stub, monkeypatch):
  stub.made.prepared = False
  monkeypatch.setenv("TFDS_DATA_DIR", "/prepared")
  with pytest.raises(
    ValueError, match="^DATA='imagenet2012' is not prepared as array records in '/p"
  ):
    find.source("imagenet2012", 224).check()
  monkeypatch.delenv("TFDS_DATA_DIR")
  home = str(pathlib.Path("~/tensorflow_datasets").expanduser())
  with pytest.raises(ValueError, match=f"in {home!r}: set DATA_DIR or TFDS_DATA_DIR to"):
    find.source("imagenet2012", 224).classes  # noqa: B018
  with pytest.raises(ValueError, match="^DATA='cifra10': choose 'rebus', a data set of TensorFlow"):
    find.source("cifra10", 224).check()
