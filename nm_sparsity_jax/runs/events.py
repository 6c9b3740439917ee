"""Scalars of TensorBoard's event files, by tensorboard's own reader and messages."""

# tensorboard ships no types of its messages.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import pathlib
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
  # The loader above it imports TensorFlow where that is installed, which takes seconds.
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
