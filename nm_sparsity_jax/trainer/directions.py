"""Which way a metric gets better, in one place: a workload says it, else its name does.

workload.less_is_better(name) -> [noted] -> evaluations.json -> [less_is_better] -> best, report
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

_LESS = re.compile(r"loss|error|perplexity|(^|_)(mse|mae|rmse)($|_)")


def by_name(metric: str) -> bool:
  """Returns whether less of a metric is better, as its name tells.

  >>> by_name("absolute_error"), by_name("eval_mse"), by_name("accuracy")
  (True, True, False)
  """
  return _LESS.search(metric) is not None


def noted(metrics: Iterable[str], less_is_better: Callable[[str], bool]) -> dict[str, Any]:
  """Returns what an entry of evaluations.json says of directions; {} where the names tell all.

  Args:
    metrics: names of metrics.
    less_is_better: what the workload says of a name.
  """
  names = sorted(set(metrics))
  less = [name for name in names if less_is_better(name)]
  return {} if less == [n for n in names if by_name(n)] else {"less_is_better": less}


def less_is_better(entry: Mapping[str, Any], metric: str) -> bool:
  """Returns whether less of a metric is better, as an entry of evaluations.json notes it.

  Args:
    entry: where it notes nothing, the name tells.
    metric: its name.
  """
  less = entry.get("less_is_better")
  return by_name(metric) if less is None else metric in less
