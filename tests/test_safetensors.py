"""Safetensors files: the same bits there and back, and one sentence for what is none."""

import json
import os
import pathlib
import struct

import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy as library

from nm_sparsity_jax.deploy import safetensors_file
from nm_sparsity_jax.deploy.safetensors_file import Opened

DTYPES = ("float32", "bfloat16", "float16", "float64", "int8", "uint8", "uint16", "int64", "bool")
SHAPES = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5)
A = np.arange(6, dtype=np.float32).reshape(2, 3)


@st.composite
def arrays(draw):
  """An array of any bits, whose axes may lie in any order."""
  dtype, shape = jnp.dtype(draw(st.sampled_from(DTYPES))), draw(SHAPES)
  high = 2 if dtype.name == "bool" else 256
  raw = np.random.default_rng(draw(st.integers(0, 99))).integers(
    0, high, (*shape, dtype.itemsize), np.uint8
  )
  made = raw.reshape(-1).view(dtype).reshape(shape)
  return made.transpose(draw(st.permutations(range(made.ndim))))


@hypothesis.settings(deadline=None, max_examples=50)
@hypothesis.given(
  tensors=st.dictionaries(st.text(min_size=1), arrays(), max_size=5),
  metadata=st.dictionaries(st.text(min_size=1), st.text(), max_size=1),
)
def test_every_bit_comes_back_and_the_file_is_that_of_the_library(
  tensors, metadata, tmp_path_factory
):
  hypothesis.assume("__metadata__" not in tensors)
  folder = tmp_path_factory.mktemp("a")
  safetensors_file.write(folder / "new/a", tensors, metadata)
  opened = Opened(folder / "new/a")
  assert opened.metadata == metadata and set(opened.tensors) == set(tensors)
  for name, x in tensors.items():
    lazy = opened.tensors[name]
    for back in (lazy, np.asarray(lazy)):
      assert (back.shape, back.dtype) == (x.shape, x.dtype)
    assert np.asarray(lazy).tobytes() == x.tobytes()
  whole = {name: np.array(x, order="C") for name, x in tensors.items()}
  assert library.save(whole, metadata or None) == (folder / "new/a").read_bytes()
  assert os.listdir(folder / "new") == ["a"]


# --- what is refused ----------------------------------------------------------------------------

ENTRY = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}


def of(header, data=bytes(16)):
  text = json.dumps(header).encode()
  return struct.pack("<Q", len(text)) + text + data


NONE = {
  "nothing": (b"", "damaged"),
  "a text": (b"garbage, and more of it", "damaged"),
  "a list": (of([]), "damaged"),
  "a length beyond the file": (struct.pack("<Q", 1 << 40) + b"{}", "damaged"),
  "cut": (of({"a": ENTRY})[:-1], "damaged"),
  "too long": (of({"a": ENTRY}) + b"a", "damaged"),
  "another size": (of({"a": ENTRY | {"shape": [3]}}), "damaged"),
  "an overlap": (of({"a": ENTRY, "b": ENTRY}), "damaged"),
  "float8": (of({"a": ENTRY | {"dtype": "F8_E4M3", "shape": [16]}}), "F8_E4M3"),
  "a zip of torch": (b"PK\x03\x04" + bytes(64), "pickled"),
  "a pickle": (b"\x80\x02" + bytes(64), "pickled"),
}


@pytest.mark.parametrize("what", NONE)
def test_what_is_no_safetensors_file_is_one_sentence(what, tmp_path):
  content, words = NONE[what]
  (tmp_path / "a.safetensors").write_bytes(content)
  with pytest.raises(ValueError, match=words) as e:
    Opened(tmp_path / "a.safetensors")
  assert str(tmp_path) in str(e.value) and "\n" not in str(e.value)


def test_a_header_may_have_the_length_that_a_pickle_begins_with(tmp_path):
  """640 is 80 02 in the first bytes."""
  padding = "a" * (640 - len(json.dumps({"a": ENTRY, "__metadata__": {"a": ""}})))
  (tmp_path / "a").write_bytes(of({"a": ENTRY, "__metadata__": {"a": padding}}))
  assert (tmp_path / "a").read_bytes()[:2] == b"\x80\x02"
  assert list(Opened(tmp_path / "a").tensors) == ["a"]


def test_only_a_file_is_opened(tmp_path):
  """A pipe without a writer would wait for ever."""
  os.mkfifo(tmp_path / "pipe.safetensors")
  for path in (tmp_path / "pipe.safetensors", tmp_path):
    with pytest.raises(ValueError, match="is not a file"):
      Opened(path)
  with pytest.raises(FileNotFoundError, match="there is no file"):
    Opened(tmp_path / "a")
  (tmp_path / "a.pth").write_bytes(b"anything")
  with pytest.raises(ValueError, match="torch pickled"):
    Opened(tmp_path / "a.pth")


def test_a_file_that_becomes_shorter_is_an_error(tmp_path):
  safetensors_file.write(tmp_path / "a", {"a": A})
  opened = Opened(tmp_path / "a")
  os.truncate(tmp_path / "a", 100)
  with pytest.raises(ValueError, match="'a' cannot be read"):
    np.asarray(opened.tensors["a"])


def test_a_failure_leaves_no_file_and_what_is_there_stays(tmp_path, monkeypatch):
  safetensors_file.write(tmp_path / "a", {"a": A})
  before = (tmp_path / "a").read_bytes()
  for path, x, words in (
    ("a", A + 1, "is there already"),
    ("a/b", A, "could not be written"),
    ("b", A.astype("datetime64[s]"), "could not be written"),
  ):
    with pytest.raises(ValueError, match=words):
      safetensors_file.write(tmp_path / path, {"a": x})

  def stopped(tensors, path, metadata):
    pathlib.Path(path).write_bytes(b"half of it")
    raise KeyboardInterrupt

  monkeypatch.setattr(library, "save_file", stopped)
  with pytest.raises(KeyboardInterrupt):
    safetensors_file.write(tmp_path / "b", {"a": A})
  assert os.listdir(tmp_path) == ["a"] and (tmp_path / "a").read_bytes() == before


def test_torchs_loaders_find_what_they_ask_for(tmp_path):
  safetensors_file.write(tmp_path / "a", {"a": A})
  assert Opened(tmp_path / "a").metadata == {"format": "pt"}
