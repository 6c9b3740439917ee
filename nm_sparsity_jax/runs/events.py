"""Scalars of TensorBoard's event files, by tensorboard's own records and messages.

The classes of tensorboard, clu and flax above these import TensorFlow, which takes seconds.
"""

# tensorboard ships no types of its messages.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import os
import pathlib
import socket
import time
from collections.abc import Iterator, Mapping


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
  from tensorboard.compat.proto import event_pb2
  from tensorboard.compat.tensorflow_stub import errors, pywrap_tensorflow
  from tensorboard.util import tensor_util

  reader = pywrap_tensorflow.PyRecordReader_New(str(path))
  while True:
    try:
      reader.GetNext()
      event = event_pb2.Event.FromString(reader.record())
    except errors.OutOfRangeError:
      return
    except Exception as e:  # DataLossError, or DecodeError of a message
      if "truncated" in str(e):
        return
      raise ValueError(f"{path} is damaged: {e}") from e
    for value in event.summary.value:
      if value.HasField("simple_value"):
        yield event.step, value.tag, value.simple_value
      elif value.tensor.dtype in (1, 2):  # DT_FLOAT, DT_DOUBLE
        array = tensor_util.make_ndarray(value.tensor)
        if array.size == 1:
          yield event.step, value.tag, array.item()


class Writer:
  """Writes scalars to a new event file in a folder.

  Args:
    folder: it exists.
  """

  def __init__(self, folder: pathlib.Path):
    from tensorboard.compat.proto import event_pb2
    from tensorboard.summary.writer import record_writer

    self._event = event_pb2.Event
    name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}"
    self._file = (folder / name).open("ab")  # one process may write here twice in a second
    self._records = record_writer.RecordWriter(self._file)
    self._write(file_version="brain.Event:2")  # TensorBoard asks for it first

  def write(self, step: int, scalars: Mapping[str, float]) -> None:
    """Adds scalars of one step."""
    values = [{"tag": tag, "simple_value": value} for tag, value in scalars.items()]
    self._write(step=step, summary={"value": values})

  def flush(self) -> None:
    """Hands what was written to the system."""
    self._file.flush()

  def close(self) -> None:
    """Closes the file."""
    self._file.close()

  def _write(self, **fields) -> None:
    event = self._event(wall_time=time.time(), **fields)
    self._records.write(event.SerializeToString())
