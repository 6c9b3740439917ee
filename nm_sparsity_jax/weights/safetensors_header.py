"""The header of a safetensors file, which somebody else may have written.

    text of the header, bytes behind it -> [parse] -> metadata; name -> Entry: dtype, shape, range
    metadata; name -> dtype, shape      -> [text_of] -> text of the header

A header is JSON, but of one form: an object of objects. Only that form is read here, so nothing is
nested deeper, no number is a float, and no key stands twice, where parsers differ. All ranges are
held against the file before anything is allocated.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Iterator, Mapping

MOST = 1 << 24  # bytes of a header
MOST_NAME = 512  # characters of a name
MOST_KEYS = 1 << 16  # of one object
METADATA = "__metadata__"
# Bytes of a value. numpy has no float of 8 bits: such a tensor is listed, and not read.
WIDTHS = {
  "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8,
  "U32": 4, "U16": 2, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
}  # fmt: skip
_MOST_AXES = 32
_MOST_NUMBERS = 1 << 62  # of bytes: numpy counts them in 64 bits


class Cut(ValueError):
  """A file ends before its tensors do; `str` says how many bytes are there."""


@dataclasses.dataclass(frozen=True)
class Entry:
  """One tensor: what it is, and the range of its bytes behind the header."""

  dtype: str
  shape: tuple[int, ...]
  start: int
  stop: int


def parse(text: bytes, size: int) -> tuple[dict[str, str], dict[str, Entry]]:
  """Returns (metadata, name -> entry) of a header.

  >>> parse(b'{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}', 2)
  ({}, {'a': Entry(dtype='U8', shape=(2,), start=0, stop=2)})

  Args:
    text: of the header.
    size: how many bytes lie behind it.

  Raises:
    Cut: the file ends before its tensors do.
    ValueError: it has another form, or its ranges are not those of its tensors, one after the
      other, to the end of the file.
  """
  here = Text(text.decode())
  metadata: dict[str, str] = {}
  entries: dict[str, Entry] = {}
  for name in here.keys():
    if name == METADATA:
      metadata = {key: here.string() for key in here.keys()}
    else:
      entries[name] = _entry(here, name)
  here.end()
  _check_ranges(entries, size)
  return metadata, entries


def text_of(
  tensors: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str]
) -> bytes:
  """Returns the header of tensors that lie one after the other; its length is a multiple of 8.

  >>> text_of({"a": ("U8", (2,))}, {})
  b'{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}   '

  Args:
    tensors: name -> dtype as the format calls it, and shape.
    metadata: what is told beside them.

  Raises:
    ValueError: `parse` would refuse it.
  """
  told: dict[str, object] = {METADATA: dict(metadata)} if metadata else {}
  end = 0
  for name, (dtype, shape) in tensors.items():
    _check_name(name)
    start, end = end, end + WIDTHS[dtype] * math.prod(shape)
    told[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
  text = json.dumps(told, separators=(",", ":"), ensure_ascii=False).encode()
  if len(text) + 8 > MOST or len(tensors) > MOST_KEYS:
    raise ValueError(
      f"a header of {len(tensors):,} tensors has {len(text):,} bytes: at most {MOST:,} bytes and "
      f"{MOST_KEYS:,} tensors are read."
    )
  return text + b" " * (-len(text) % 8)  # tensors begin at a multiple of 8


# --- the grammar ----------------------------------------------------------------------------------

_SPACE = re.compile(r"[ \t\r\n]*+")
_STRING = re.compile(r'"(?:[^"\\\x00-\x1f]++|\\.)*+"')
_WHOLE = re.compile(r"(?:0|[1-9][0-9]{0,18})(?![0-9.eE])")


class Text:
  """JSON of one form, read from its beginning to its end.

  >>> here = Text('{"a": [1, 2], "b": "c"}')
  >>> [here.numbers() if key == "a" else here.string() for key in here.keys()]
  [[1, 2], 'c']

  Args:
    text: the JSON.
    what: it is, for errors.
  """

  def __init__(self, text: str, what: str = "its header"):
    self.text, self.at, self.what = text, 0, what

  def keys(self) -> Iterator[str]:
    """Yields each key of an object, where its value begins; the value is read in between."""
    found: set[str] = set()
    self.need("{")
    while not self.has("}"):
      if found:
        self.need(",")
      key = self.string()
      _check_name(key)
      if key in found:
        raise ValueError(f"the key {key!r} stands twice in one object")
      if len(found) == MOST_KEYS:
        raise ValueError(f"an object has more than {MOST_KEYS:,} keys")
      found.add(key)
      self.need(":")
      yield key

  def string(self) -> str:
    """Reads a text."""
    found = json.loads(self._match(_STRING, "a text"))
    found.encode()  # half a pair of surrogates is no text
    return found

  def number(self) -> int:
    """Reads a whole number."""
    return int(self._match(_WHOLE, "a whole number"))

  def numbers(self) -> list[int]:
    """Reads a list of whole numbers."""
    self.need("[")
    found: list[int] = []
    while not self.has("]"):
      if found:
        self.need(",")
      found.append(self.number())
      if len(found) > _MOST_AXES:
        raise ValueError(f"a list has more than {_MOST_AXES} numbers")
    return found

  def has(self, sign: str) -> bool:
    """Reads a sign, if it comes next."""
    self._match(_SPACE, "")
    if not self.text.startswith(sign, self.at):
      return False
    self.at += 1
    return True

  def need(self, sign: str) -> None:
    """Reads a sign, which must come next."""
    if not self.has(sign):
      self._fail(repr(sign))

  def end(self) -> None:
    """Refuses what stands behind the object."""
    self._match(_SPACE, "")
    if self.at != len(self.text):
      self._fail("its end")

  def _match(self, regex: re.Pattern[str], what: str) -> str:
    if regex is not _SPACE:
      self._match(_SPACE, "")
    found = regex.match(self.text, self.at)
    if found is None:
      self._fail(what)
    self.at = found.end()
    return found[0]

  def _fail(self, what: str):
    found = self.text[self.at : self.at + 20]
    raise ValueError(f"{found!r} stands at character {self.at:,} of {self.what}, not {what}")


def _check_name(name: str) -> None:
  if not 0 < len(name) <= MOST_NAME or not name.isprintable():
    raise ValueError(
      f"the name {name[:40]!r} has not 1 to {MOST_NAME} characters that can be printed"
    )


def _entry(here: Text, name: str) -> Entry:
  """Reads one tensor's object."""
  dtype, lists = "", {"shape": [], "data_offsets": []}
  seen: list[str] = []
  for key in here.keys():
    seen.append(key)
    if key == "dtype":
      dtype = here.string()
    elif key in lists:
      lists[key] = here.numbers()
    else:
      raise ValueError(f"{name!r} has the unknown key {key!r}")
  shape, offsets = lists["shape"], lists["data_offsets"]
  if len(seen) != 3 or len(offsets) != 2:
    raise ValueError(f"{name!r} has not a dtype, a shape and two data_offsets")
  if dtype not in WIDTHS:
    raise ValueError(f"{name!r} has the unknown dtype {dtype[:40]!r}")
  return Entry(dtype, tuple(shape), *offsets)


def _check_ranges(entries: Mapping[str, Entry], size: int) -> None:
  """Refuses ranges that are not their tensors', overlap, leave a gap, or do not fit the file."""
  end = 0
  for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)):
    width = WIDTHS[entry.dtype]
    if width * math.prod(n for n in entry.shape if n) >= _MOST_NUMBERS:
      raise ValueError(f"{name!r} has the shape {entry.shape}")
    if entry.stop - entry.start != width * math.prod(entry.shape):
      raise ValueError(
        f"{name!r} is {entry.dtype} {entry.shape}, and has {entry.stop - entry.start:,} bytes"
      )
    if entry.start != end:
      raise ValueError(f"{name!r} begins at byte {entry.start:,}, and should at {end:,}")
    end = entry.stop
  if end > size:
    raise Cut(f"{size:,} of {end:,} bytes of tensors are there")
  if end != size:
    raise ValueError(f"its tensors have {end:,} bytes, and {size:,} are there")
