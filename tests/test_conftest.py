"""What a run of the tests says at its end."""

import types

import conftest
import pytest
from _pytest.reports import CollectReport

REASON = "Skipped: kauldron is not installed"


def lines(*skipped):
  """Returns what the summary says of these skipped reports."""
  written = []
  conftest.say_skipped_engines(
    types.SimpleNamespace(stats={"skipped": list(skipped)}, write_line=written.append)
  )
  return written


def report_of_a_test(**marks):
  return types.SimpleNamespace(keywords=marks, longrepr=("test_x.py", 3, REASON))


def test_a_module_that_skips_as_a_whole_does_not_stop_the_summary():
  module = CollectReport("test_x.py", "skipped", ("test_x.py", 1, "Skipped: no T5X"), [])
  assert lines(module) == []


@pytest.mark.parametrize("n", [1, 3])
def test_the_tests_of_an_engine_that_is_absent_are_counted_with_the_reason(n):
  tests = [report_of_a_test(kauldron=1)] * n
  assert lines(*tests, report_of_a_test(slow=1)) == [
    f"{n} tests marked kauldron did not run: kauldron is not installed"
  ]


def test_nothing_skipped_says_nothing():
  assert lines() == []
