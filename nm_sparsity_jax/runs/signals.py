"""Signals that ask a process to save and to end.

SIGTERM, SIGINT -> Signals.name, which a loop looks at between two steps
                -> a child, which is asked to end; ctrl-C after that kills it
"""

from __future__ import annotations

import signal
import threading
from typing import Any


class Signals:
  """Notes the first SIGTERM or SIGINT within a `with` block; a SIGINT after it interrupts at once.

      with Signals() as stop:
        while stop.name is None:
          step()

  Outside of the main thread, where Python allows no handlers, it notes nothing.

  Attributes:
    name: of the first signal, such as 'SIGTERM'; None before.
  """

  def __init__(self):
    self.name: str | None = None
    self._child: Any = None
    self._before = {}

  def __enter__(self):
    if threading.current_thread() is threading.main_thread():
      for number in (signal.SIGTERM, signal.SIGINT):
        self._before[number] = signal.signal(number, self._note)
    return self

  def __exit__(self, *error):
    for number, handler in self._before.items():
      signal.signal(number, handler)

  def relay(self, child: Any) -> None:
    """Passes signals on to a child, a `subprocess.Popen`, until the next one: it saves and ends.

    A SIGINT after the first signal kills it: a run loses nothing by that but the steps since its
    last checkpoint.
    """
    self._child = child
    if self.name is not None:  # it came between two children
      child.terminate()

  def _note(self, number, frame) -> None:
    # The first asks to save, which takes a while; who presses ctrl-C after that will not wait.
    again = number == signal.SIGINT and self.name is not None
    self.name = self.name or signal.Signals(number).name
    if self._child is not None:  # one that has ended already gets nothing
      self._child.kill() if again else self._child.terminate()
    elif again:
      raise KeyboardInterrupt
