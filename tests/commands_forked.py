"""Commands of `nm-sparsity`, each in a process of its own that need not import first."""

import contextlib
import itertools
import json
import os
import pathlib
import subprocess
import sys

WORKER = pathlib.Path(__file__).with_name("commands_worker.py")


class Commands:
  """Types commands, one after the other.

  Args:
    worker: the process that forks them.
    room: a folder for what they say.
  """

  def __init__(self, worker, room):
    self._worker, self._room, self._number = worker, room, itertools.count()

  def begin(self, folder, *argv):
    """Starts a command in a folder; returns its process id. `end` must follow."""
    number = next(self._number)
    self._said = [self._room / f"{number}.{kind}" for kind in ("out", "err")]
    words = [str(folder), [str(word) for word in argv], *map(str, self._said)]
    self._worker.stdin.write(json.dumps(words) + "\n")
    self._worker.stdin.flush()
    return int(self._told("pid"))

  def runs(self, pid):
    """Whether the command is still at work."""
    with contextlib.suppress(ProcessLookupError):
      os.kill(pid, 0)
      return True
    return False

  def end(self):
    """Waits for the command: its exit code (-9 where SIGKILL ended it), output and errors."""
    code = int(self._told("ended"))
    return code, *(path.read_text() if path.exists() else "" for path in self._said)

  def __call__(self, folder, *argv):
    """What a command says in a folder: its exit code, output and errors."""
    self.begin(folder, *argv)
    return self.end()

  def _told(self, word):
    line = self._worker.stdout.readline().split()
    assert line and line[0] == word, f"the worker ended: {self._worker.poll()}"
    return line[1]


@contextlib.contextmanager
def commands(room, environment):
  """Commands that run with these variables, for a block.

  Args:
    room: a folder for what they say.
    environment: of all of them.
  """
  words, pipe = [sys.executable, str(WORKER)], subprocess.PIPE
  with subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True, env=environment) as worker:
    yield Commands(worker, room)
    worker.stdin.close()
    worker.wait(60)
