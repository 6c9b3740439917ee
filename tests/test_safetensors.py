"""Safetensors files: the bytes that the library writes, and no trust in those of others."""

import doctest
import json
import os
import re
import struct

import jax.numpy as jnp
import numpy as np
import pytest

from nm_sparsity_jax.weights import safetensors_file, safetensors_header
from nm_sparsity_jax.weights.safetensors_file import Opened, Writer

RNG = np.random.default_rng(7)
KINDS = ("float32", "bfloat16", "float16", "float64", "int8", "uint8", "uint16", "int64", "bool")


def tensors():
  """One of each dtype, and what is odd: no axis, no entry, another order of axes, other letters."""
  bits = RNG.integers(0, 2, (3, 4, 8), np.uint8)
  made = {f"a.{kind}": bits[..., : jnp.dtype(kind).itemsize].copy() for kind in KINDS}
  made = {name: x.view(jnp.dtype(name[2:])) for name, x in made.items()}
  wide = RNG.standard_normal((5, 6, 7)).astype(np.float32)
  odd = {"turned": wide.transpose(2, 0, 1), "b": np.float32(3)[None][0:0], "none": np.float64(2)}
  return made | odd | {'schön "a\\b"': wide[::2], "i64": np.int64(3)[()]}


def arrays():
  return {name: np.asarray(x) for name, x in tensors().items()}


@pytest.mark.parametrize("metadata", [{"format": "pt"}, {"a": 'two\nlines, "ö"'}, {}])
def test_the_bytes_are_those_of_the_library(metadata, tmp_path):
  library = pytest.importorskip("safetensors.numpy", reason="needs safetensors: the extra dev")
  made = arrays()
  library.save_file(
    {name: np.array(x, order="C") for name, x in made.items()},
    tmp_path / "theirs.safetensors",
    metadata or None,
  )
  safetensors_file.write(tmp_path / "new/ours.safetensors", made, metadata)
  ours = (tmp_path / "new/ours.safetensors").read_bytes()
  assert ours == (tmp_path / "theirs.safetensors").read_bytes()
  assert os.listdir(tmp_path / "new") == ["ours.safetensors"]
  opened = Opened(tmp_path / "theirs.safetensors")
  assert opened.metadata == metadata
  for name, x in made.items():
    back = opened.array(name)
    assert (back.dtype, back.shape, opened.shapes[name]) == (x.dtype, x.shape, x.shape)
    assert (back.tobytes(), opened.dtypes[name]) == (x.tobytes(), x.dtype.name)


# --- what is refused ----------------------------------------------------------------------------


def file_of(tmp_path, header, data=b"", length=None):
  text = header if isinstance(header, bytes) else json.dumps(header).encode()
  path = tmp_path / "a.safetensors"
  path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
  return path


def entry(**changes):
  return {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]} | changes


TWO = {"a": entry(), "b": entry(data_offsets=[16, 32])}
BAD = {
  "not JSON": (b"not json", "'not json' stands at character 0 of its header, not '{'"),
  "a list": ([], "stands at character 0 of its header, not '{'"),
  "nothing": (b"", "stands at character 0 of its header, not '{'"),
  "two objects": (b"{}{}", "stands at character 2 of its header, not its end"),
  "not utf-8": (b'{"\xff":1}', "can't decode byte 0xff"),
  "a key twice": (
    b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]},'
    b'"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}',
    "the key 'a' stands twice in one object",
  ),
  "a dtype twice": (
    b'{"a":{"dtype":"F32","dtype":"F32","shape":[4],"data_offsets":[0,16]}}',
    "the key 'dtype' stands twice",
  ),
  "deep": (b'{"a":{"shape":' + b"[" * 100_000, r"stands at character 15 .* not a whole number"),
  "a float": ({"a": entry(shape=[2.0, 2])}, "stands at .* not a whole number"),
  "a bool": ({"a": entry(shape=[True, 16])}, "stands at .* not a whole number"),
  "a negative number": ({"a": entry(shape=[-2, -2])}, "stands at .* not a whole number"),
  "a long number": (
    b'{"a":{"dtype":"U8","shape":[' + b"1" * 5000 + b'],"data_offsets":[0,1]}}',
    "stands at .* not a whole number",
  ),
  "many axes": ({"a": entry(shape=[1] * 33)}, "has more than 32 numbers"),
  "an unknown key": ({"a": entry(code="rm")}, "'a' has the unknown key 'code'"),
  "no dtype": ({"a": {"shape": [], "data_offsets": [0, 0]}}, "'a' has not a dtype, a shape and"),
  "one offset": ({"a": entry(data_offsets=[0])}, "'a' has not a dtype, a shape and two"),
  "an unknown dtype": ({"a": entry(dtype="F4")}, "'a' has the unknown dtype 'F4'"),
  "no name": ({"": entry()}, "the name '' has not 1 to 512 characters that can be printed"),
  "a long name": ({"a" * 513: entry()}, "has not 1 to 512 characters that can be printed"),
  "a name that obeys": ({"\x1b[2J": entry()}, "has not 1 to 512 characters that can be printed"),
  "half a letter": (b'{"__metadata__":{"a":"\\ud800"}}', "surrogates not allowed"),
  "metadata that is no text": ({"__metadata__": {"a": 1}}, "'1}}' stands at .* not a text"),
  "another size": ({"a": entry(shape=[2, 3])}, r"'a' is F32 \(2, 3\), and has 16 bytes"),
  "a range backwards": ({"a": entry(data_offsets=[16, 0])}, "'a' is F32 .* and has -16 bytes"),
  "an overlap": ({"a": entry(), "b": entry(data_offsets=[8, 24])}, "'b' begins at byte 8, and sho"),
  "twice the same": ({"a": entry(), "b": entry()}, "'b' begins at byte 0, and should at 16"),
  "a gap": ({"a": entry(), "b": entry(data_offsets=[20, 36])}, "'b' begins at byte 20, and should"),
  "too many bytes": ({}, "its tensors have 0 bytes, and 16 are there"),
  "huge and empty": (
    {"a": entry(), "b": entry(shape=[0, 1 << 61], data_offsets=[16, 16])}, "'b' has the shape"
  ),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_a_header_of_another_form_is_one_sentence(what, tmp_path):
  header, words = BAD[what]
  path = file_of(tmp_path, header, bytes(16))
  with pytest.raises(ValueError, match=words) as e:
    Opened(path)
  assert str(e.value).startswith(f"{str(path)!r} is not a safetensors file, or damaged (")
  assert "\n" not in str(e.value) and len(str(e.value)) < 2000


def test_a_header_has_a_limit_of_keys(tmp_path, monkeypatch):
  monkeypatch.setattr(safetensors_header, "MOST_KEYS", 3)
  Opened(file_of(tmp_path, {key: entry(shape=[0], data_offsets=[0, 0]) for key in "abc"}))
  with pytest.raises(ValueError, match="an object has more than 3 keys"):
    Opened(file_of(tmp_path, {key: entry(shape=[0], data_offsets=[0, 0]) for key in "abcd"}))


def test_a_header_as_others_may_write_it_is_read(tmp_path):
  text = b' {\n"a" : {"data_offsets":[0 , 4],"shape":[ ],"dtype":"F\\u0033\\u0032"} \t}  '
  assert Opened(file_of(tmp_path, text, bytes(4))).array("a").shape == ()


HUGE = {"a": entry(shape=[1 << 40, 4], data_offsets=[0, 1 << 44])}
NO_LENGTH = "is not a safetensors file, since it does not begin with the length of a header: name"


@pytest.mark.parametrize(
  "header, size, said",
  [
    (TWO, 0, "is empty: copy it again, or name another file."),
    (TWO, 7, NO_LENGTH),
    (TWO, 8, "was cut: 0 of 131 bytes of its header are there: copy it again."),
    (TWO, 100, "was cut: 92 of 131 bytes of its header are there: copy it again."),
    (TWO, 155, "was cut: 16 of 32 bytes of tensors are there: copy it again."),
    (HUGE, None, "was cut: 32 of 17,592,186,044,416 bytes of tensors are there: copy it again."),
  ],
)
def test_a_file_that_is_cut_is_refused(header, size, said, tmp_path):
  path = file_of(tmp_path, header, bytes(32))
  os.truncate(path, path.stat().st_size if size is None else size)
  with pytest.raises(ValueError) as e:
    Opened(path)
  assert str(e.value).startswith(f"{str(path)!r} {said}")


def test_a_text_is_no_safetensors_file(tmp_path):
  (tmp_path / "a.safetensors").write_text("garbage, and more of it")
  with pytest.raises(ValueError, match=f"^{str(tmp_path / 'a.safetensors')!r} {NO_LENGTH}"):
    Opened(tmp_path / "a.safetensors")


@pytest.mark.parametrize(
  "length, said",
  [
    (1 << 63, "says that its header has 9,223,372,036,854,775,808"),
    ((1 << 24) + 1, "says that its header has 16,777,217"),
    (10_000, "was cut: 163 of 10,000 bytes of its header are there"),
  ],
)
def test_a_header_longer_than_the_file_is_not_read(length, said, tmp_path):
  path = file_of(tmp_path, TWO, bytes(32), length)
  if length == (1 << 24) + 1:
    os.truncate(path, 1 << 25)  # it is there, and longer than any
  with pytest.raises(ValueError, match=said):
    Opened(path)


def test_only_a_regular_file_is_opened(tmp_path):
  """A pipe without a writer would wait for ever."""
  os.mkfifo(tmp_path / "pipe.safetensors")
  for path in (tmp_path / "pipe.safetensors", tmp_path, "/dev/zero"):
    with pytest.raises(ValueError, match=r"damaged \(it is no regular file\)"):
      Opened(path)
  with pytest.raises(
    FileNotFoundError, match=re.escape(f"there is no file {str(tmp_path / 'a')!r}")
  ):
    Opened(tmp_path / "a")


def test_a_file_that_changes_while_it_is_read_is_an_error(tmp_path, monkeypatch):
  path = file_of(tmp_path, TWO, bytes(32))
  opened = Opened(path)
  os.truncate(path, path.stat().st_size - 1)
  with pytest.raises(ValueError, match="it was changed while it was read"):
    opened.array("b")
  monkeypatch.setattr(safetensors_file, "_state", lambda file: opened._state)
  with pytest.raises(ValueError, match="it became shorter while it was read"):
    opened.array("b")


def test_a_dtype_that_numpy_lacks_is_listed_and_not_read(tmp_path):
  opened = Opened(file_of(tmp_path, {"a": entry(dtype="F8_E4M3", shape=[16])}, bytes(16)))
  assert opened.dtypes == {"a": "F8_E4M3"}
  with pytest.raises(ValueError, match="a.safetensors': 'a' is F8_E4M3, which numpy does not have"):
    opened.array("a")
  opened = Opened(file_of(tmp_path, {"a": entry(dtype="BOOL", shape=[16])}, b"\x02" * 16))
  with pytest.raises(ValueError, match="'a' holds bytes that are no bool"):
    opened.array("a")


# --- what is written ----------------------------------------------------------------------------

HEADER = {"a": ("float32", (4, 2)), "b": ("int8", ())}
A, B = np.arange(8, dtype=np.float32).reshape(4, 2), np.asarray(np.int8(3))


def test_arrays_and_rows_come_in_any_order(tmp_path):
  with Writer(tmp_path / "a.safetensors", HEADER) as writer:
    writer.add("b", B)
    writer.add("a", A[3:], 3)
    writer.add("a", A[:3], 0)
  np.testing.assert_array_equal(Opened(tmp_path / "a.safetensors").array("a"), A)


@pytest.mark.parametrize(
  "adds, words",
  [
    ([("a", A, 0)], "'b' was not written"),
    ([("a", A[:3], 0), ("b", B, 0)], "'a' was not written"),
    ([("a", A.astype("float64"), 0)], r"'a' is float64 \(4, 2\), and not float32 \(4, 2\)"),
    ([("a", A.T, 0)], r"'a' is float32 \(2, 4\), and not"),
    ([("a", A[:2], 3)], r"'a' is float32 \(2, 2\), and not"),
    ([("a", A[0], 0)], r"'a' is float32 \(2,\), and not"),
    ([("a", A, 0), ("a", A, 0)], r"'a' is float32 \(4, 2\), and not"),
    ([("b", B[None], 0)], r"'b' is int8 \(1,\), and not"),
  ],
)
def test_a_file_is_there_whole_or_not_at_all(adds, words, tmp_path):
  with pytest.raises(ValueError, match=words):
    with Writer(tmp_path / "a.safetensors", HEADER) as writer:
      for add in adds:
        writer.add(*add)
  assert os.listdir(tmp_path) == []


def test_what_is_there_is_never_overwritten(tmp_path):
  (tmp_path / "a.safetensors").symlink_to("nothing")
  with pytest.raises(ValueError, match="is there already: it is never overwritten"):
    safetensors_file.write(tmp_path / "a.safetensors", {})
  with pytest.raises(ValueError, match=r"a.safetensors/b' could not be written: "):
    safetensors_file.write(tmp_path / "a.safetensors/b", {"a": A})
  with pytest.raises(ValueError, match="the name 'a.b' has not 1 to 512".replace(".", r"\\n")):
    safetensors_file.write(tmp_path / "c", {"a\nb": A})
  with pytest.raises(ValueError, match="'complex64' is not a dtype"):
    safetensors_file.write(tmp_path / "c", {"a": A.astype("complex64")})


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_one_sentence(tmp_path):
  writer = Writer(tmp_path / "a.safetensors", HEADER)
  writer._unfinished.symlink_to("/dev/full")
  with pytest.raises(ValueError, match="could not be written: No space left on device"):
    with writer:
      writer.add("a", A)
      writer.add("b", B)
  assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("module", [safetensors_file, safetensors_header])
def test_examples(module):
  assert doctest.testmod(module).failed == 0
