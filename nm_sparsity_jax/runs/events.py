"""Scalars of TensorBoard's event files, read without any dependency.

    file -> records, their checksums compared -> Event messages -> (step, tag, value)

A file is a row of records: length, checksum of the length, data, checksum of the data. The data
are protocol buffers, of which a handful of fields matter here.

The messages that tensorboard ships import no TensorFlow. They are not used: `glue score` would then
need tensorboard to read a folder that was copied from a TPU, and records and checksums, half of
this module, would stay. A record takes 15 microseconds to read as it is.
"""

from __future__ import annotations

import pathlib
import struct
from collections.abc import Iterator


def scalars(path: pathlib.Path) -> Iterator[tuple[int, str, float]]:
  """Yields (step, tag, value) of each scalar, in the order of the file.

  Both ways to write one are read: a plain float (TF1's writer) and a float or double tensor (TF2's,
  clu's). Other summaries are passed over. A last record that was cut short, as while a run still
  writes, ends the file.

  Args:
    path: the event file.

  Raises:
    ValueError: a checksum or a message is wrong.
  """
  for number, record in enumerate(_records(path)):
    try:
      yield from _scalars_of(record)
    except (IndexError, struct.error, UnicodeDecodeError) as e:
      raise ValueError(f"{path}: record {number} is not an event of TensorBoard ({e})") from e


def _records(path: pathlib.Path) -> Iterator[bytes]:
  left, at = path.stat().st_size, 0
  with path.open("rb") as file:
    while left - at >= 12:
      head = file.read(12)
      (length,) = struct.unpack_from("<Q", head)
      _check(path, at, head[:8], head[8:])
      begin, end = at + 12, at + 12 + length
      if end + 4 > left:
        return
      data = file.read(length)
      _check(path, begin, data, file.read(4))
      yield data
      at = end + 4


def _check(path: pathlib.Path, at: int, data: bytes, checksum: bytes) -> None:
  crc = 0xFFFFFFFF
  for byte in data:
    crc = _CRC32C[(crc ^ byte) & 0xFF] ^ (crc >> 8)
  crc ^= 0xFFFFFFFF
  masked = ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
  if struct.pack("<I", masked) != checksum:
    raise ValueError(f"{path}: broken at byte {at}, the checksum does not agree")


def _table() -> list[int]:
  table = []
  for value in range(256):
    for _ in range(8):
      value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
    table.append(value)
  return table


_CRC32C = _table()


def _scalars_of(event: bytes) -> Iterator[tuple[int, str, float]]:
  step, summaries = 0, []
  for field, value in _fields(event):
    if field == 2 and isinstance(value, int):
      step = value - (value >> 63 << 64)  # int64
    elif field == 5 and isinstance(value, bytes):
      summaries.append(value)
  for summary in summaries:
    for field, entry in _fields(summary):
      if field == 1 and isinstance(entry, bytes):
        tag, found = _entry(entry)
        if found is not None:
          yield step, tag, found


def _entry(data: bytes) -> tuple[str, float | None]:
  tag, found = "", None
  for field, value in _fields(data):
    if not isinstance(value, bytes):
      continue
    if field == 1:
      tag = value.decode()
    elif field == 2:
      (found,) = struct.unpack("<f", value)
    elif field == 8:
      found = _tensor(value)
  return tag, found


def _tensor(data: bytes) -> float | None:
  """Returns the number of a float or double tensor that holds one."""
  kind, content = None, b""
  for field, value in _fields(data):
    if field == 1:
      kind = value
    elif field in (4, 5, 6) and isinstance(value, bytes):  # content, float_val, double_val
      content = value
  form = {1: "<f", 2: "<d"}.get(kind) if isinstance(kind, int) else None
  if form is None or len(content) != struct.calcsize(form):
    return None
  return struct.unpack(form, content)[0]


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
  """Yields (number, value) of a message's fields: an int for a varint, else bytes."""
  at = 0
  while at < len(data):
    key, at = _varint(data, at)
    if key & 7 == 0:
      value, at = _varint(data, at)
      yield key >> 3, value
      continue
    length = {1: 8, 5: 4}.get(key & 7)
    if key & 7 == 2:
      length, at = _varint(data, at)
    if length is None or at + length > len(data):
      raise IndexError(f"field {key >> 3} of kind {key & 7}")
    yield key >> 3, data[at : at + length]
    at += length


def _varint(data: bytes, at: int) -> tuple[int, int]:
  value = 0
  for shift in range(0, 70, 7):  # of 64 bits
    byte = data[at]
    at += 1
    value |= (byte & 0x7F) << shift
    if byte < 0x80:
      return value & 0xFFFFFFFFFFFFFFFF, at
  raise IndexError("a number of more than 64 bits")
