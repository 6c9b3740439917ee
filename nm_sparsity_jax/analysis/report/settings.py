"""Sections of what ran: overview, settings and seeds, environment."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from nm_sparsity_jax.analysis.report import charts, parts
from nm_sparsity_jax.analysis.report.parts import Cell, Table
from nm_sparsity_jax.analysis.report.reading import Run


def overview(runs: Sequence[Run]) -> Iterator[Table | str]:
  """Yields a table with a row for each run: recipe, steps, last loss, density, FLOPs."""
  rows = []
  for i, run in enumerate(runs):
    step = run.last_step or 0
    rules, why = parts.tried(getattr, run, "rules")
    what = "; ".join(f"{p}: {_what(r)}" for p, r in rules.places.items()) if rules else why
    loss = list(run.loss.values())
    density = list(run.train.get("nm/density", {}).values())
    cost = parts.tried(run.flops, step - run.offset)[0]
    rows.append(
      [
        Cell(run.name, run=i),
        what,
        _steps(run),
        _value(loss[-1] if loss else None),
        _value(density[-1] if density else None),
        f"{charts.number(cost[0])} ({cost[0] / cost[1]:.1%})" if cost and cost[1] else "–",
      ]
    )
  head = ["run", "recipe", "steps", "last loss", "density now", "training FLOPs (of dense)"]
  yield Table(head, rows, words=True)
  yield from parts.told(
    (run.name, f"start at a checkpoint of step {run.offset:,}, and inherit the steps before it")
    for run in runs
    if run.offset
  )


def _steps(run: Run) -> str:
  """Returns the steps that a run did itself, of how many, and those that it inherited."""
  steps, done = run.settings.sparse_steps, (run.last_step or 0) - run.offset
  own = f"{done:,} of {steps:,}" if steps is not None else f"{done:,}"
  return f"{own}, after {run.offset:,} inherited" if run.offset else own


def _value(value: float | None) -> str:
  return "–" if value is None else f"{value:.4g}"


def _what(recipe: Any) -> str:
  if not any(segment.pattern for segment in recipe.timeline()):
    return recipe.name
  words = [f"{recipe.name} {recipe.pattern}"]
  for name in ("dense", "finetune"):
    if steps := getattr(recipe.phases, name):
      words.append(f"{name} {steps:,}")
  return ", ".join(words)


def settings(runs: Sequence[Run]) -> Iterator[Table | str]:
  """Yields a table of all macros: seeds first, then what differs between the runs."""
  names = sorted({name for run in runs for name in run.macros})
  if not names:
    yield "No run has a config.gin."
    return
  differ = [n for n in names if len({run.macros.get(n) for run in runs}) > 1]
  first = [n for n in names if n.endswith("SEED")]
  ordered = [*first, *(n for n in differ if n not in first)]
  rest = [n for n in names if n not in ordered]

  def row(name: str) -> list[str | Cell]:
    return [name, *(Cell(run.macros.get(name, "–"), strong=name in differ) for run in runs)]

  yield Table(["macro", *parts.heads(runs)], [row(n) for n in [*ordered, *rest]], words=True)
  if differ:
    yield "Seeds stand first, then what differs between the runs, in bold."
  yield from parts.lacking(runs, lambda run: run.gin, "no config.gin")


def environment(runs: Sequence[Run]) -> Iterator[Table | str]:
  """Yields a table of what each run ran with, and names the runs that went on elsewhere."""
  known = {run.name: run.processes[-1]["environment"] for run in runs if run.processes}
  if not known:
    yield "No run noted what it ran with: the local runner does, in run.json; T5X does not."
    return

  def row(name: str) -> list[str | Cell]:
    values = [known.get(run.name, {}).get(name, "–") for run in runs]
    return [name, *(Cell(value, strong=len(set(values)) > 1) for value in values)]

  names = dict.fromkeys(name for found in known.values() for name in found)
  yield Table(["", *parts.heads(runs)], [row(name) for name in names], words=True)
  at = lambda run: ", ".join(f"{p['from']:,}" for p in run.processes[1:])
  yield from parts.told(
    (run.name, f"went on at step {at(run)} in another environment; the last one is shown")
    for run in runs
    if len(run.processes) > 1
  )
  yield from parts.lacking(runs, lambda run: run.processes, "no note of what it ran with")
