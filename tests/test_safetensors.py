"""Safetensors files: the same bits there and back, and one sentence for what is none."""

import os
import pathlib

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
  rng = np.random.default_rng(draw(st.integers(0, 99)))
  raw = rng.integers(0, high, (*shape, dtype.itemsize), np.uint8)
  made = raw.reshape(-1).view(dtype).reshape(shape)
  return made.transpose(draw(st.permutations(range(made.ndim))))


@hypothesis.settings(deadline=None, max_examples=30)
@hypothesis.given(tensors=st.dictionaries(st.text(min_size=1), arrays(), max_size=5))
def test_every_bit_comes_back(tensors, tmp_path_factory):
  hypothesis.assume("__metadata__" not in tensors)
  path = tmp_path_factory.mktemp("a") / "new/a"
  safetensors_file.write(path, tensors)
  opened = Opened(path)
  assert opened.metadata == {"format": "pt"} and set(opened.tensors) == set(tensors)
  for name, x in tensors.items():
    for back in (opened.tensors[name], np.asarray(opened.tensors[name])):
      assert (back.shape, back.dtype) == (x.shape, x.dtype)
    assert np.asarray(opened.tensors[name]).tobytes() == x.tobytes()
  assert os.listdir(path.parent) == ["a"]


@pytest.mark.parametrize(
  "name, content, word",
  [
    ("a.safetensors", b"garbage, and more of it", "not a safetensors file"),
    ("a.safetensors", library.save({"a": A})[:-1], "not a safetensors file"),
    ("a.safetensors", library.save({"a": A.astype(jnp.float8_e4m3fn)}), "F8_E4M3"),
    ("a.pth", b"anything", "pickled"),
  ],
)
def test_what_is_no_safetensors_file_is_one_sentence(name, content, word, tmp_path):
  (tmp_path / name).write_bytes(content)
  with pytest.raises(ValueError, match=word) as e:
    Opened(tmp_path / name)
  assert str(tmp_path) in str(e.value) and "\n" not in str(e.value)


def test_a_failure_leaves_no_file_and_what_is_there_stays(tmp_path, monkeypatch):
  safetensors_file.write(tmp_path / "a", {"a": A})
  before = (tmp_path / "a").read_bytes()
  for path, x, word in (
    ("a", A + 1, "is there already"),
    ("a/b", A, "could not be written"),
    ("b", A.astype("datetime64[s]"), "could not be written"),
  ):
    with pytest.raises(ValueError, match=word):
      safetensors_file.write(tmp_path / path, {"a": x})

  def stopped(tensors, path, metadata):
    pathlib.Path(path).write_bytes(b"half of it")
    raise KeyboardInterrupt

  monkeypatch.setattr(library, "save_file", stopped)
  with pytest.raises(KeyboardInterrupt):
    safetensors_file.write(tmp_path / "b", {"a": A})
  assert os.listdir(tmp_path) == ["a"] and (tmp_path / "a").read_bytes() == before
