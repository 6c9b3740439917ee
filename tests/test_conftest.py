"""What a run of the tests says at its end, and when it fails of memory."""

import collections
import pathlib
import re
import types

import conftest
import pytest
from _pytest.reports import CollectReport

REASON = "Skipped: kauldron is not installed"


class Reporter:
  """Keeps what pytest's reporter would print."""

  def __init__(self, *skipped):
    self.stats = {"skipped": list(skipped)}
    self.lines = []
    self.write_line = self.section = self.lines.append


def lines(*skipped):
  """Returns what the summary says of these skipped reports."""
  reporter = Reporter(*skipped)
  conftest.say_skipped(reporter)
  return reporter.lines


def report_of_a_test(reason=REASON):
  return types.SimpleNamespace(longrepr=("test_x.py", 3, reason))


def test_a_module_that_skips_as_a_whole_says_why():
  module = CollectReport("test_x.py", "skipped", ("test_x.py", 1, "Skipped: no T5X"), [])
  assert lines(module) == ["1 tests or modules did not run: no T5X"]


@pytest.mark.parametrize("n", [2, 3])
def test_skipped_tests_are_counted_by_their_reason_the_most_frequent_first(n):
  other = report_of_a_test("Skipped: no browser")
  odd = types.SimpleNamespace(longrepr="text")
  assert lines(other, odd, *[report_of_a_test()] * n) == [
    f"{n} tests or modules did not run: kauldron is not installed",
    "1 tests or modules did not run: no browser",
  ]


def test_nothing_skipped_says_nothing():
  assert lines() == []


@pytest.fixture
def workers(monkeypatch):
  """Two workers' memory, and the time of 25 files, of which one needs T5X."""
  monkeypatch.setattr(conftest, "PEAKS", {"gw0": 900, "gw1": 2100})
  spent = {(f"test_{i}.py", i == 3): float(i) for i in range(1, 26)}
  monkeypatch.setattr(conftest, "SPENT", collections.Counter(spent))


def config(limit):
  return types.SimpleNamespace(option=types.SimpleNamespace(peak_mib=limit))


def test_the_summary_names_twenty_files_the_total_and_the_memory(workers):
  reporter = Reporter()
  conftest.pytest_terminal_summary(reporter, config(2048))
  files = [line for line in reporter.lines if line.endswith(".py")]
  assert [float(line.split("s ")[0]) for line in files] == list(range(25, 5, -1))
  assert "  325.0s in all: 3.0s with T5X, 322.0s without" in reporter.lines
  assert "at most 900 MiB in gw0, 2100 MiB in gw1" in reporter.lines
  assert reporter.lines[-1] == "error: gw1 took 2100 MiB, and --peak-mib allows 2048"


@pytest.mark.parametrize(("limit", "status"), [(2048, 1), (2100, 0), (None, 0)])
def test_a_worker_above_the_limit_of_memory_fails_the_run(workers, limit, status):
  session = types.SimpleNamespace(config=config(limit), exitstatus=0)
  conftest.pytest_sessionfinish(session)
  assert session.exitstatus == status


def test_make_test_has_the_limit_and_names_the_slowest_tests():
  makefile = (pathlib.Path(__file__).parents[1] / "Makefile").read_text()
  assert re.search(r"^PEAK_MIB +\?= 2048$", makefile, re.MULTILINE)
  (line,) = re.findall(r'^\t.*-m "not slow".*$', makefile, re.MULTILINE)
  assert "--durations=20 --peak-mib $(PEAK_MIB)" in line
