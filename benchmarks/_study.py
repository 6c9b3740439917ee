"""What the study asks, read from study.toml: rows, contrasts of hypotheses, tuning, the queue.

    study.toml -> [Study] -> runs in the order of the queue;  records of tuning -> tuned rows

STUDY.md beside this file says how the parts fit together.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import pathlib
import statistics
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from _recipes_file import Row, Run

FILE = pathlib.Path(__file__).with_name("study.toml")


class Cell(NamedTuple):
  """All seeds of a row at one task, pattern and budget."""

  task: str
  pattern: str
  budget: str
  row: str

  def runs(self, seeds) -> list[Run]:
    return [Run(*self, seed) for seed in seeds]


class Pair(NamedTuple):
  """A cell and what it is compared with, seed by seed."""

  row: Cell
  over: Cell


class Contrast(NamedTuple):
  """A difference that a test asks about: of `pair`, less that of `beyond` where there is one."""

  pair: Pair
  beyond: Pair | None
  measure: str
  expect: str

  @property
  def cells(self) -> list[Cell]:
    return [cell for pair in (self.pair, self.beyond) if pair for cell in pair]


class Gate(NamedTuple):
  """Points of accuracy by which `pair.row` must be behind, or the task ranks nothing."""

  pair: Pair
  points: float


class Hypothesis(NamedTuple):
  """One family of contrasts, corrected together.

  `seeds` are those of its contrasts. A cell that an earlier hypothesis has too keeps its seeds.
  """

  name: str
  says: str
  needs: str
  contrasts: tuple[Contrast, ...]
  gates: tuple[Gate, ...]
  seeds: tuple[int, ...]

  @property
  def cells(self) -> list[Cell]:
    """Returns the cells in the order of the queue, each once."""
    asked = (cell for contrast in self.contrasts for cell in contrast.cells)
    gates = (cell for gate in self.gates for cell in gate.pair)
    return list(dict.fromkeys([*asked, *gates]))


class Study(NamedTuple):
  """All of study.toml.

  Attributes:
    declared: the file itself.
    sha256: of the file; each record has it.
    rows: name -> how it trains; those of tuning are among them, tuned ones are not.
    tried: recipe -> the names of its rows of tuning.
    hypotheses: by name.
    seeds: cell of the tests -> its seeds, in the order of the queue.
    queue: every run, the most wanted first.
    records: what runs found, as far as they are there.
  """

  declared: dict[str, Any]
  sha256: str
  rows: dict[str, Row]
  tried: dict[str, tuple[str, ...]]
  hypotheses: dict[str, Hypothesis]
  seeds: dict[Cell, tuple[int, ...]]
  queue: tuple[Run, ...]
  records: Mapping[Run, Mapping[str, Any]] = {}

  def runs(self, cell: Cell) -> list[Run]:
    """Returns the runs of a cell of the tests."""
    return cell.runs(self.seeds[cell])

  def tuning_cell(self, name: str) -> Cell:
    """Returns the cell of a row of tuning."""
    tuning = self.declared["tuning"]
    return Cell(tuning["task"], tuning["pattern"], tuning["budget"], name)


def _cell(entry: Mapping[str, Any], name: str, sparse: bool, over: str = "") -> Cell:
  """Returns a cell of an entry; `over` is the prefix of what differs for the second of a pair."""
  read = lambda key: entry.get(f"{over}{key}", entry[key])
  return Cell(read("task"), read("pattern") if sparse else "-", read("budget"), name)


def _pair(entry: Mapping[str, Any], rows: Mapping[str, Row]) -> Pair:
  sparse = lambda name: name not in rows or rows[name].sparse  # a tuned row is
  row, over = entry["row"], entry["over"]
  return Pair(_cell(entry, row, sparse(row)), _cell(entry, over, sparse(over), "over_"))


def _hypothesis(name: str, entry: Mapping[str, Any], rows: Mapping[str, Row], seeds) -> Hypothesis:
  usual = {k: v for k, v in entry.items() if k not in ("contrasts", "gates", "seeds")}
  contrasts, gates = [], []
  for own in entry["contrasts"]:
    asked = usual | own
    beyond = asked.pop("beyond", None)
    other = _pair(asked | beyond, rows) if beyond else None
    contrasts.append(Contrast(_pair(asked, rows), other, asked["measure"], asked["expect"]))
  for own in entry["gates"]:
    gates.append(Gate(_pair({"budget": "", **usual} | own, rows), own["points"]))
  seeds = tuple(entry.get("seeds", seeds))
  return Hypothesis(name, entry["says"], entry["needs"], tuple(contrasts), tuple(gates), seeds)


def _tuning(declared: Mapping[str, Any]) -> dict[str, dict[str, Row]]:
  """Returns recipe -> name -> row of each setting that is tried."""
  tried = {}
  for recipe, entry in declared["tuning"]["recipes"].items():
    found = itertools.product(*entry["grid"].values())
    settings = [entry["row"] | dict(zip(entry["grid"], values, strict=True)) for values in found]
    tried[recipe] = {f"{recipe}, tuning {i:02}": Row(**each) for i, each in enumerate(settings)}
  return tried


def _seeds(declared, hypotheses, rows) -> dict[Cell, tuple[int, ...]]:
  """Returns the seeds of each cell of the tests: of what first asks for it."""
  seeds, usual = {}, tuple(declared["test_seeds"])
  for stage in declared["queue"]["order"]:
    if stage in hypotheses:
      for cell in hypotheses[stage].cells:
        seeds.setdefault(cell, hypotheses[stage].seeds)
  for entry in declared["queue"]["described"]:
    for pattern, name in itertools.product(entry["patterns"], entry["rows"]):
      seeds.setdefault(_cell({"pattern": pattern, **entry}, name, rows[name].sparse), usual)
  return seeds


def _queue(declared, hypotheses, seeds, tried) -> Iterator[Run]:
  """Yields every run, with repeats."""
  tuning = declared["tuning"]
  for stage in declared["queue"]["order"]:
    if stage == "tuning":
      for seed in tuning["seeds"]:
        for name in itertools.chain(*tried.values()):
          yield Run(tuning["task"], tuning["pattern"], tuning["budget"], name, seed)
      continue
    for cell in hypotheses[stage].cells:
      yield from cell.runs(seeds[cell])
  for cell in seeds:
    yield from cell.runs(seeds[cell])


@functools.cache
def study(path: pathlib.Path = FILE) -> Study:
  """Reads a study."""
  text = path.read_bytes()
  declared = tomllib.loads(text.decode())
  rows = {name: Row(**fields) for name, fields in declared["rows"].items()}
  tried = _tuning(declared)
  hypotheses = {
    name: _hypothesis(name, entry, rows, declared["test_seeds"])
    for name, entry in declared["hypotheses"].items()
  }
  seeds = _seeds(declared, hypotheses, rows)
  queue = tuple(dict.fromkeys(_queue(declared, hypotheses, seeds, tried)))
  for found in tried.values():
    rows |= found
  names = {recipe: tuple(found) for recipe, found in tried.items()}
  sha256 = hashlib.sha256(text).hexdigest()
  return Study(declared, sha256, rows, names, hypotheses, seeds, queue)


def tuning_losses(made: Study, name: str) -> list[float]:
  """Returns the cross-entropies of a row of tuning, by seed."""
  runs = made.tuning_cell(name).runs(made.declared["tuning"]["seeds"])
  return [made.records[run]["cross_entropy"] for run in runs]


def tuned(made: Study, recipe: str, **settings: Any) -> str:
  """Returns the row of tuning with the least mean ln(cross-entropy), among those with settings."""
  names = [
    name
    for name in made.tried[recipe]
    if all(getattr(made.rows[name], key) == wanted for key, wanted in settings.items())
  ]
  return min(names, key=lambda name: statistics.geometric_mean(tuning_losses(made, name)))


def row_of(made: Study, name: str) -> Row | None:
  """Returns how a row trains; None for a tuned one whose tuning is not over."""
  recipe, _, word = name.rpartition(", ")
  if word != "tuned":
    return made.rows[name]
  try:
    return made.rows[tuned(made, recipe)]
  except KeyError:  # a run of tuning is not there
    return None
