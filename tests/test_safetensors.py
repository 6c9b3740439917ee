"""Safetensors files: the same bits there and back, and one sentence for what is none."""

import json
import os
import struct

import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy as library
from reference_arrays import OneAtATime

from nm_sparsity_jax.weights import safetensors_file
from nm_sparsity_jax.weights.safetensors_file import Lazy, Opened

DTYPES = ("float32", "bfloat16", "float16", "float64", "int8", "uint8", "uint16", "int64", "bool")
SHAPES = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5)
A = np.arange(6, dtype=np.float32).reshape(2, 3)


@st.composite
def arrays(draw):
  """An array of any bits, whose axes may lie in any order."""
  dtype, shape = jnp.dtype(draw(st.sampled_from(DTYPES))), draw(SHAPES)
  high = 2 if dtype == bool else 256
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


def test_one_array_is_in_memory_at_a_time(tmp_path):
  array = OneAtATime(lambda i: A + i)
  lazy = {f"a{i}": Lazy(A.shape, A.dtype, lambda i=i: array(i)) for i in range(4)}
  safetensors_file.write(tmp_path / "a", lazy)
  assert len(array.made) == 4
  np.testing.assert_array_equal(Opened(tmp_path / "a").tensors["a3"], A + 3)
  assert Opened(tmp_path / "a").metadata == {"format": "pt"}  # which torch's loaders ask for


# --- what is refused ----------------------------------------------------------------------------

ENTRY = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}


def of(header, data=bytes(16)):
  text = json.dumps(header).encode()
  return struct.pack("<Q", len(text)) + text + data


NONE = {
  "nothing": (b"", "not a safetensors file, or damaged"),
  "a text": (b"garbage, and more of it", "not a safetensors file, or damaged"),
  "a list": (of([]), "not a safetensors file, or damaged"),
  "a length beyond the file": (struct.pack("<Q", 1 << 40) + b"{}", "not a safetensors file"),
  "cut": (of({"a": ENTRY})[:-1], "not a safetensors file, or damaged"),
  "too long": (of({"a": ENTRY}) + b"a", "not a safetensors file, or damaged"),
  "another size": (of({"a": ENTRY | {"shape": [3]}}), "not a safetensors file, or damaged"),
  "an overlap": (of({"a": ENTRY, "b": ENTRY}), "not a safetensors file, or damaged"),
  "float8": (of({"a": ENTRY | {"dtype": "F8_E4M3", "shape": [16]}}), "'a' is F8_E4M3, and F64"),
  "a zip of torch": (b"PK\x03\x04" + bytes(64), "torch pickled. Opening one can run any code"),
  "a pickle": (b"\x80\x02" + bytes(64), "torch pickled"),
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


LIKE = {"a": jax.ShapeDtypeStruct((2, 3), "float32")}


@pytest.mark.parametrize(
  "given, words",
  [
    ({}, "'a' was not written"),
    ({"a": A.T}, "'a' is float32"),
    ({"a": A.astype(np.float64)}, "'a' is float64"),
  ],
)
def test_a_failure_leaves_no_file(given, words, tmp_path):
  with pytest.raises(ValueError, match=words), safetensors_file.create(tmp_path / "a", LIKE) as put:
    for name, x in given.items():
      put(name, x)
  with pytest.raises(KeyboardInterrupt), safetensors_file.create(tmp_path / "a", LIKE):
    raise KeyboardInterrupt
  assert os.listdir(tmp_path) == []


def test_what_is_there_or_cannot_be_written_is_refused(tmp_path):
  safetensors_file.write(tmp_path / "a", {"a": A})
  with pytest.raises(ValueError, match="is there already"):
    safetensors_file.write(tmp_path / "a", {})
  for path, x in ((tmp_path / "a/b", A), (tmp_path / "b", A.astype("datetime64[s]"))):
    with pytest.raises(ValueError, match="could not be written"):
      safetensors_file.write(path, {"a": x})
  assert os.listdir(tmp_path) == ["a"]
