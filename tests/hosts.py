"""Processes that find one another, as the hosts of a cluster do."""

import os
import socket
import subprocess


def run(folder, commands, **environment):
  """Runs commands at the same time, to the end; the log of the first.

  Args:
    folder: of their logs.
    commands: address of process 0 -> a command for each process.
    **environment: what their environment has besides.
  """
  with socket.socket() as free:
    free.bind(("localhost", 0))
    made = commands(f"localhost:{free.getsockname()[1]}")
  logs = [folder / f"log{i}.txt" for i in range(len(made))]

  def start(log, command):
    with log.open("w") as out:
      env = {**os.environ, **environment}
      return subprocess.Popen(command, env=env, stdout=out, stderr=out)

  started = [start(log, command) for log, command in zip(logs, made, strict=True)]
  try:
    for log, process in zip(logs, started, strict=True):
      code = process.wait(timeout=600)  # one whose partner died waits for it
      assert not code, log.read_text()[-3000:]
  finally:
    for process in started:
      process.kill()
      process.wait()
  return logs[0].read_text()
