"""Safetensors files: the same bits there and back, and one sentence for what is none."""

import os
import pathlib

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy as library

from nm_sparsity_jax.deploy import safetensors_file

DTYPES = ("float32", "bfloat16", "int8", "bool")
A = np.arange(6, dtype=np.float32).reshape(2, 3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_bit_comes_back_of_arrays_in_any_order(dtype, tmp_path):
  raw = np.random.default_rng(0).integers(0, 2 if dtype == "bool" else 256, 24 * 8, np.uint8)
  x = raw.view(jnp.dtype(dtype))[:24].reshape(2, 3, 4)
  tensors = {
    "a": x,
    "turned": x.transpose(2, 0, 1),
    "cut": x[:, ::2],
    "empty": x[:0],
    "0": x[0, 0, 0],
  }
  safetensors_file.write(tmp_path / "new/a", tensors)
  read, metadata = safetensors_file.read(tmp_path / "new/a")
  assert metadata == {"format": "pt"} and set(read) == set(tensors)
  for name, x in tensors.items():
    found = read[name]
    assert (found.shape, found.dtype) == (x.shape, x.dtype)
    assert np.asarray(found).tobytes() == x.tobytes()
  assert os.listdir(tmp_path / "new") == ["a"]


@pytest.mark.parametrize(
  "name, content, word",
  [
    ("a.safetensors", library.save({"a": A})[:-1], "not a safetensors file"),
    ("a.safetensors", library.save({"a": A.astype(jnp.float8_e4m3fn)}), "F8_E4M3"),
    ("a.pth", b"anything", "pickled"),
  ],
)
def test_what_is_no_safetensors_file_is_one_sentence(name, content, word, tmp_path):
  (tmp_path / name).write_bytes(content)
  with pytest.raises(ValueError, match=word) as e:
    safetensors_file.read(tmp_path / name)
  assert str(tmp_path) in str(e.value) and "\n" not in str(e.value)


def test_a_failure_leaves_no_file_and_what_is_there_stays(tmp_path, monkeypatch):
  safetensors_file.write(tmp_path / "a", {"a": A})
  before = (tmp_path / "a").read_bytes()
  with pytest.raises(ValueError, match="is there already"):
    safetensors_file.write(tmp_path / "a", {"a": A + 1})

  def stopped(tensors, path, metadata):
    pathlib.Path(path).write_bytes(b"half of it")
    raise KeyboardInterrupt

  monkeypatch.setattr(library, "save_file", stopped)
  with pytest.raises(KeyboardInterrupt):
    safetensors_file.write(tmp_path / "b", {"a": A})
  assert os.listdir(tmp_path) == ["a"] and (tmp_path / "a").read_bytes() == before
