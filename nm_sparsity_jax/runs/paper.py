"""The paper's rows: what each trains, and the score that it was published with.

    table, row -> [setting] -> RECIPE, PATTERN, SPARSITY_RULES and phases, by gin_configs/paper/
    words      -> [search]  -> rows with their scores

published.json holds the tables.

>>> find("table12", "sdgf_stepwise ff=1:8 qkv=1:4 dense_steps=10000").settings()["SPARSITY_RULES"]
{'ff': '1:8', 'qkv': '1:4'}
>>> [row.name for row in search(["table6", "1:8"])]
['sr_ste 1:8', 'mdgf_exponential 1:8']
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib.resources
import json
from collections.abc import Iterable, Mapping
from typing import Any

SCORES = {"top1": "top-1", "overall": "overall", "accuracy": "accuracy"}


@functools.cache
def tables() -> dict[str, Any]:
  """Returns the content of published.json: table -> its rows, and `about`."""
  file = importlib.resources.files("nm_sparsity_jax.runs") / "published.json"
  return json.loads(file.read_text("utf-8"))


@dataclasses.dataclass(frozen=True)
class Row:
  """One row of a table.

  Attributes:
    table: such as 'table12', a file of gin_configs/paper/.
    published: the row of published.json.
  """

  table: str
  published: Mapping[str, Any]

  @property
  def name(self) -> str:
    """Returns what ROW is set to, such as 'sr_ste ff=1:8 qk=1:4 dense_steps=0'."""
    row, places = self.published, self.published["places"]
    patterns = [*places.values()] if len(places) == 1 else [f"{k}={v}" for k, v in places.items()]
    phases = [f"{k}={row[k]}" for k in ("dense_steps", "finetune_steps") if row.get(k) is not None]
    return " ".join([row["recipe"], *patterns, *phases])

  @property
  def score(self) -> str:
    """Returns the published score, such as 'overall 84.1'; '' where there is none."""
    row = self.published
    return "".join(f"{word} {row[kind]}" for kind, word in SCORES.items() if kind in row)

  @property
  def words(self) -> set[str]:
    """Returns what a search finds it by: table, recipe, patterns, places, network, score."""
    row = self.published
    text = f"{self.table} {self.name} {row['row']} {row.get('network', '')} {self.score}".lower()
    return {*text.split(), *text.replace("=", " ").split()}

  def settings(self) -> dict[str, Any]:
    """Returns the macros that the row sets: name -> value."""
    places = self.published["places"]
    patterns = set(places.values())
    one = len(patterns) == 1
    # A dense row names a place that every network has; a ResNet has no 'ff'.
    rules = dict.fromkeys(places) if one else dict(places) or {".*": None}
    return {
      "RECIPE": self.published["recipe"],
      "PATTERN": patterns.pop() if one else None,
      "SPARSITY_RULES": rules,
      "DENSE_STEPS": self.published.get("dense_steps") or 0,
      "FINETUNE_STEPS": self.published.get("finetune_steps"),
    }


@functools.cache
def rows() -> Mapping[str, Mapping[str, Row]]:
  """Returns table -> name -> row, of all tables that a network was trained for."""
  made = {t: [Row(t, row) for row in found] for t, found in tables().items() if t != "about"}
  return {table: {row.name: row for row in found} for table, found in made.items()}


def find(table: str, row: str) -> Row:
  """Returns a row by its name.

  Args:
    table: such as 'table12'.
    row: its name.

  Raises:
    ValueError: names the nearest rows.
  """
  known = rows()[table]
  if row not in known:
    near = difflib.get_close_matches(str(row), known, cutoff=0)
    raise ValueError(
      f"no row of {table} is called ROW={row!r}; the nearest are {near}. `nm-sparsity rows "
      f"{table}` lists all"
    )
  return known[row]


def setting(table: str, row: str, macro: str) -> Any:
  """Returns the value that a row gives a macro, for a gin file.

  Args:
    table: such as 'table12' [TABLE].
    row: its name [ROW].
    macro: such as 'RECIPE'.

  Raises:
    ValueError: names the nearest rows.
  """
  return find(table, row).settings()[macro]


def search(words: Iterable[str]) -> list[Row]:
  """Returns the rows that have every word: a table, recipe, pattern, place, network or score.

  >>> [row.name for row in search(["sdgf_stepwise", "table7"])], len(search(["table4", "qkv=1:8"]))
  ([], 3)
  """
  wanted = {word.lower() for word in words}
  return [row for table in rows().values() for row in table.values() if wanted <= row.words]
