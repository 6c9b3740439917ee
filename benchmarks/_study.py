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
from collections.abc import Mapping
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

  `seeds` are those of its cells that no earlier stage of the queue has.
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
    tried: tuned row -> its cells of tuning -> how each trains.
    hypotheses: by name.
    seeds: cell -> its seeds, in the order of the queue.
    queue: every run, the most wanted first.
    records: what runs found, as far as they are there.
  """

  declared: dict[str, Any]
  sha256: str
  rows: dict[str, Row]
  tried: dict[str, dict[Cell, Row]]
  hypotheses: dict[str, Hypothesis]
  seeds: dict[Cell, tuple[int, ...]]
  queue: tuple[Run, ...]
  records: Mapping[Run, Mapping[str, Any]] = {}

  def runs(self, cell: Cell) -> list[Run]:
    """Returns the runs of a cell."""
    return cell.runs(self.seeds[cell])


def _cell(entry: Mapping[str, Any], name: str, sparse: bool, over: str = "") -> Cell:
  """Returns a cell of an entry; `over` is the prefix of what differs for the second of a pair."""
  read = lambda key: entry.get(f"{over}{key}", entry[key])
  return Cell(read("task"), read("pattern") if sparse else "-", read("budget"), name)


def _pair(entry: Mapping[str, Any], rows: Mapping[str, Row]) -> Pair:
  row, over = entry["row"], entry["over"]
  return Pair(_cell(entry, row, rows[row].sparse), _cell(entry, over, rows[over].sparse, "over_"))


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


def _tuning(stage: str, entry: Mapping[str, Any]) -> dict[str, dict[Cell, Row]]:
  """Returns each tuned row of a stage -> the cells of its settings -> how they train."""
  tried = {}
  for recipe, own in entry["recipes"].items():
    found = tried[f"{recipe}, {stage.replace('tuning', 'tuned')}"] = {}
    for i, values in enumerate(itertools.product(*own["grid"].values())):
      row = Row(**own["row"], **dict(zip(own["grid"], values, strict=True)))
      found[_cell(entry | own, f"{recipe}, {stage} {i:02}", row.sparse)] = row
  return tried


def _seeds(declared, hypotheses, tunings, rows) -> dict[Cell, tuple[int, ...]]:
  """Returns the seeds of each cell: of what first asks for it."""
  seeds, usual = {}, tuple(declared["test_seeds"])
  for stage in declared["queue"]["order"]:
    if stage in hypotheses:
      cells, own = hypotheses[stage].cells, hypotheses[stage].seeds
    else:
      cells = itertools.chain(*tunings[stage].values())
      own = tuple(declared["tunings"][stage]["seeds"])
    for cell in cells:
      seeds.setdefault(cell, own)
  for entry in declared["queue"]["described"]:
    for pattern, name in itertools.product(entry["patterns"], entry["rows"]):
      seeds.setdefault(_cell({"pattern": pattern, **entry}, name, rows[name].sparse), usual)
  return seeds


@functools.cache
def study(path: pathlib.Path = FILE) -> Study:
  """Reads a study."""
  text = path.read_bytes()
  declared = tomllib.loads(text.decode())
  rows = {name: Row(**fields) for name, fields in declared["rows"].items()}
  tunings = {stage: _tuning(stage, entry) for stage, entry in declared["tunings"].items()}
  tried = {name: found for each in tunings.values() for name, found in each.items()}
  # Whether a tuned row is sparse, each of its settings says.
  kinds = rows | {name: next(iter(found.values())) for name, found in tried.items()}
  hypotheses = {
    name: _hypothesis(name, entry, kinds, declared["test_seeds"])
    for name, entry in declared["hypotheses"].items()
  }
  seeds = _seeds(declared, hypotheses, tunings, kinds)
  queue = tuple(run for cell, own in seeds.items() for run in cell.runs(own))
  rows |= {cell.row: row for found in tried.values() for cell, row in found.items()}
  sha256 = hashlib.sha256(text).hexdigest()
  return Study(declared, sha256, rows, tried, hypotheses, seeds, queue)


def tuning_losses(made: Study, cell: Cell) -> list[float]:
  """Returns what a cell of tuning is judged by, seed by seed: wrong phonemes, or cross-entropy."""
  records = [made.records[run] for run in made.runs(cell)]
  return [record.get("phoneme_error_rate", record["cross_entropy"]) for record in records]


def tuned(made: Study, name: str, **settings: Any) -> Cell:
  """Returns the cell of tuning with the least mean ln(loss), among those with settings."""
  cells = [
    cell
    for cell, row in made.tried[name].items()
    if all(getattr(row, key) == wanted for key, wanted in settings.items())
  ]
  return min(cells, key=lambda cell: statistics.geometric_mean(tuning_losses(made, cell)))


def row_of(made: Study, name: str) -> Row | None:
  """Returns how a row trains; None for a tuned one whose tuning is not over."""
  if name not in made.tried:
    return made.rows[name]
  try:
    return made.tried[name][tuned(made, name)]
  except KeyError:  # a run of tuning is not there
    return None
