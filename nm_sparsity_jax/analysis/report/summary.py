"""The section that comes first: what each sparse run kept of a dense one.

Runs with a task in common -> Row -> the dense run nearest in length -> a sentence, a table of bars
"""

from __future__ import annotations

import collections
import dataclasses
import json
import math
from collections.abc import Iterator, Mapping, Sequence

from nm_sparsity_jax.analysis.page import Cell, Part, Table
from nm_sparsity_jax.analysis.report import scored
from nm_sparsity_jax.analysis.report.reading import Run
from nm_sparsity_jax.analysis.report.scored import Measure
from nm_sparsity_jax.core.text import listed, score_digits
from nm_sparsity_jax.runs import files

_MOST_CLASSES = 20  # a task with more answers than these has no classes
_MOST_PREDICTIONS = 32 << 20  # bytes: a larger file of predictions is not read for its classes


@dataclasses.dataclass(frozen=True)
class Row:
  """Says how good a run is.

  Attributes:
    number: of the run, which is its colour.
    name: of the run.
    score: the mean of the common tasks at the step that counts.
    lowest: the worst mean of several evaluations, of a sparse run those at sparse steps; None
      where there is only one.
    weights: the share of the weights that the patterns leave, such as '12.5 %'; '' if dense.
    updates: how many the weights have had, those before the sparse run too.
  """

  number: int
  name: str
  score: float
  lowest: float | None
  weights: str
  updates: int


def summary(runs: Sequence[Run], checkpoint: str | int, seeds: int = 1) -> Iterator[Part]:
  """Yields what the sparse runs lost in a sentence, a table with bars, and what to know of them.

  Args:
    runs: all runs of the page.
    checkpoint: of the scores: 'best', 'last' or a step.
    seeds: how many runs each of them is the mean of, at most.
  """
  common = scored.common([run for run in runs if scored.measures(run)])
  if any(measure.less for measure in common.values()):  # no share of an error is kept
    common = {}
  found = [_row(i, run, common, checkpoint) for i, run in enumerate(runs)] if common else []
  rows = [row for row in found if row is not None]
  if not rows:
    yield "No metric of which more is better is common to runs whose rules are known."
    return
  against = references(rows)
  yield from lost(rows, against)
  chance = _largest_class(runs, common)
  yield _table(rows, against, " and ".join(common), chance)
  scores = [_told(name, measure) for name, measure in common.items()]
  yield (
    f"Score: {'the mean of ' * (len(common) > 1)}{listed(scores)}, checkpoint: "
    f"{scored.of_target(checkpoint)}. Weights: what the patterns leave of the sparse kernels. "
    f"Lowest: the worst evaluation, of a sparse run since it is sparse.{_classes(chance)}"
  )
  yield from _cautions(rows, against, seeds)


def _told(name: str, measure: Measure) -> str:
  """Returns what a score is: a column of GLUE has a name of its own, a task has metrics."""
  return f"{listed(measure.metrics)} of {name}" if name == measure.task else name


def _row(number: int, run: Run, common: Mapping[str, Measure], checkpoint: str | int) -> Row | None:
  """Returns the row of a run; None where its score or its rules are not known."""
  sparse = run.sparse
  if sparse is None or any(name not in scored.measures(run) for name in common):
    return None
  score = scored.mean_score(run, common, checkpoint)
  if not math.isfinite(score):
    return None
  first = min((s.start for r in sparse.values() for s in r.timeline() if s.pattern), default=0)
  means = [m for step, m in scored.means(run, common) if step - run.offset >= first]
  left = [recipe.pattern.density for recipe in sparse.values()]
  ends = dict.fromkeys(f"{100 * f(left):.4g}" for f in (min, max)) if left else ()
  return Row(
    number,
    run.name,
    score,
    min(means) if len(means) > 1 else None,
    f"{' to '.join(ends)} %" if ends else "",
    run.last_step or 0,
  )


def references(rows: Sequence[Row]) -> Mapping[int, Row]:
  """Returns, for each sparse run, the dense one whose number of updates is nearest to its own."""
  dense = [row for row in rows if not row.weights]
  if not dense:
    return {}
  nearest = lambda row: min(dense, key=lambda other: abs(other.updates - row.updates))
  return {row.number: nearest(row) for row in rows if row.weights}


def lost(rows: Sequence[Row], against: Mapping[int, Row]) -> Iterator[str]:
  """Yields a sentence for the sparse runs of one share of the weights and one dense run.

  Args:
    rows: of all runs.
    against: what `references` returned for them.
  """
  alike: dict[tuple[str, str, float], list[Row]] = collections.defaultdict(list)
  for row in rows:
    if dense := against.get(row.number):
      alike[row.weights, dense.name, dense.score].append(row)
  digits = score_digits([row.score for row in rows])
  for (weights, name, score), those in alike.items():
    points = [f"{row.name} {_changed(row.score - score, digits)}" for row in those]
    lead = f"With {weights} of the weights, {listed(points)} of the "
    yield f"{lead}{score:.{digits}f} points of {name}."
  if not against and any(row.weights for row in rows):
    yield "No run here is dense, so nothing tells what the sparse ones lost."


def _changed(points: float, digits: int) -> str:
  return f"{'gains' if points > 0 else 'loses'} {abs(points):.{digits}f}"


def _table(
  rows: Sequence[Row], against: Mapping[int, Row], quality: str, chance: float | None
) -> Table:
  """Returns a row for each run; bars begin at 0, and the longest is the best run's."""
  top, digits = max(row.score for row in rows), score_digits([row.score for row in rows])
  head = ["run", quality, "kept", "weights", "lowest", "updates"]

  def cells(row: Row) -> Iterator[str | Cell]:
    yield Cell(row.name, run=row.number)
    yield Cell(f"{row.score:.{digits}f}", bar=row.score / top if top > 0 else 0.0, run=row.number)
    dense = against.get(row.number)
    if dense is not None and dense.score > 0:
      yield f"{100 * row.score / dense.score:.1f} % of {dense.name}"
    else:
      yield ""
    yield row.weights or "all"
    yield "" if row.lowest is None else f"{row.lowest:.{digits}f}"
    yield f"{row.updates:,}"

  last: list[Sequence[str | Cell]] = []
  if chance is not None:
    chance = chance if digits == 1 else chance / 100  # of a metric from 0 to 1
    last = [
      ["largest class", Cell(f"{chance:.{digits}f}", bar=chance / max(top, chance)), *[""] * 4]
    ]
  return Table(head, [*map(list, map(cells, rows)), *last], words=True)


def _cautions(rows: Sequence[Row], against: Mapping[int, Row], seeds: int) -> Iterator[str]:
  """Yields what a reader must know before believing the table."""
  for row in rows:
    if (dense := against.get(row.number)) and dense.updates != row.updates:
      yield (
        f"{row.name} has had {row.updates:,} updates, {dense.name} {dense.updates:,}: compare it "
        "with a dense run of its own length."
      )
  if seeds > 1:
    yield "A row is the mean over the seeds that are done. The intervals above say how sure it is."
  elif against:
    yield "A run of each recipe shows that it works, not which is best: that takes several seeds."


def _largest_class(runs: Sequence[Run], common: Mapping[str, Measure]) -> float | None:
  """Returns the accuracy, in per cent, of always answering with the largest class.

  None where a metric is not accuracy, or no run has whole predictions of classes.
  """
  found = []
  for measure in common.values():
    shares = (_share(run, measure) for run in runs)
    found.append(next((share for share in shares if share is not None), None))
  known = [share for share in found if share is not None]
  return 100 * math.fsum(known) / len(known) if len(known) == len(found) else None


def _classes(chance: float | None) -> str:
  return "" if chance is None else " Largest class: the score of always answering with it."


def _share(run: Run, measure: Measure) -> float | None:
  """Returns the share of the most frequent target of a task, from its newest predictions."""
  room = run.path / "inference_eval"
  written = sorted(room.glob(f"{measure.task}-[0-9]*.jsonl"))
  if measure.metrics != ("accuracy",) or not written:
    return None
  if written[-1].stat().st_size > _MOST_PREDICTIONS:
    return None
  try:
    lines = map(json.loads, files.read_text(written[-1]).splitlines())
    counts = collections.Counter(str(line["target"]) for line in lines)
  except (ValueError, KeyError, TypeError):  # half written, or of another program
    return None
  most = max(counts.values(), default=0)
  return most / counts.total() if 1 < len(counts) <= _MOST_CLASSES else None
