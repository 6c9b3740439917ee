"""Signals that ask a process to save and to end.

SIGTERM, SIGINT -> Signals.name, which a loop looks at between two steps
                -> Relay: a child is asked to end; the second ctrl-C kills it
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any


class Signals:
  """Notes the first SIGTERM or SIGINT within a `with` block; a second SIGINT interrupts at once.

      with Signals() as stop:
        while stop.name is None:
          step()

  Outside of the main thread, where Python allows no handlers, it notes nothing.

  Attributes:
    name: of the first signal, such as 'SIGTERM'; None before.
  """

  def __init__(self):
    self.name: str | None = None
    self._interrupts = 0
    self._before = {}

  def __enter__(self):
    if threading.current_thread() is threading.main_thread():
      for number in (signal.SIGTERM, signal.SIGINT):
        self._before[number] = signal.signal(number, self._note)
    return self

  def __exit__(self, *error):
    for number, handler in self._before.items():
      signal.signal(number, handler)

  def _note(self, number, frame) -> None:
    self._interrupts += number == signal.SIGINT
    self.name = self.name or signal.Signals(number).name
    self.act(number == signal.SIGINT and self._interrupts > 1)

  def act(self, again: bool) -> None:
    """Acts on a signal.

    Args:
      again: whether it is a SIGINT that is not the first one.
    """
    if again:
      raise KeyboardInterrupt


class Relay(Signals):
  """Asks a child to save and to end; a second SIGINT kills it.

  A run loses nothing to SIGKILL but the steps since its last checkpoint.
  """

  def __init__(self):
    super().__init__()
    self._child: Any = None

  def act(self, again: bool) -> None:
    """Passes a signal on."""
    if self._child is not None:
      self._child.kill() if again else self._child.terminate()

  @contextlib.contextmanager
  def to(self, child: Any) -> Iterator[None]:
    """Relays signals to a child, a `subprocess.Popen`; one that came before it counts."""
    self._child = child
    if self.name is not None:  # between two children
      child.terminate()
    try:
      yield
    finally:
      self._child = None
