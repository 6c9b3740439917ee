"""When what happens: the timeline of each recipe, and what T5X's loss makes of lambda."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nm_sparsity_jax.analysis.plan.findings import Findings
from nm_sparsity_jax.analysis.plan.model import Made
from nm_sparsity_jax.recipes import Dense
from nm_sparsity_jax.trainer.workloads.t5 import known_lengths
from nm_sparsity_jax.training.rules import Rules
from nm_sparsity_jax.training.sites import Assignment

_Timelines = dict[tuple, dict[str, set[int]]]  # (recipe, segments) -> rule -> lengths of its axes


def schedule(found: Findings, rules: Rules, assignment: Assignment | None) -> list[dict[str, Any]]:
  """Returns the part `schedule`: sparse steps beside global ones.

  Recipes that differ have a timeline each, and so have axes of lengths that differ in theirs.

  Args:
    found: gets a warning for a run that ends with D > 0.
    rules: of the run.
    assignment: where they are sparse; None if unknown.
  """
  timelines = _timelines(found, rules, assignment)
  _note_defaults(found, timelines)
  for (_, segments), of in timelines.items():
    if segments and segments[-1].decay_stop > 0:
      found.warnings.append(
        f"{', '.join(of)}: the run ends with D = {segments[-1].decay_stop:.3g}, so weights are "
        "n:m only after nms.finalize; set FINETUNE_STEPS to train them as n:m"
      )
  recipes = [recipe for recipe, _ in timelines]
  return [
    {
      "rules": list(of),
      "axis_sizes": sorted(set().union(*of.values())) if recipes.count(recipe) > 1 else None,
      "recipe": recipe.name,
      "pattern": None if recipe.pattern is None else str(recipe.pattern),
      "gradient": recipe.gradient_mode,
      "keeps_mask": recipe.stateful,
      "segments": [_segment(s, recipe, found.offset or 0) for s in segments],
    }
    for (recipe, segments), of in timelines.items()
  ]


def _note_defaults(found: Findings, timelines: _Timelines) -> None:
  """Notes the lengths of phases that no setting says."""
  phases = next((recipe.phases for recipe, _ in timelines if recipe.phases), None)
  if phases is None or not found.trains:
    return
  shares = {"DENSE_STEPS": (phases.dense, "tenth"), "FINETUNE_STEPS": (phases.finetune, "fifth")}
  is_unset = lambda name: found.config.is_set(name) and found.config.get(name, 0) is None
  told = [f"{n} = {steps:,}, a {share}" for n, (steps, share) in shares.items() if is_unset(n)]
  if told:
    found.notes.append(f"by default {', and '.join(told)} of SPARSE_STEPS")


def _timelines(found: Findings, rules: Rules, assignment: Assignment | None) -> _Timelines:
  timelines: _Timelines = {}
  for place in assignment.places.values() if assignment is not None else ():
    key = place.recipe, place.recipe.timeline(place.axis_size)
    timelines.setdefault(key, {}).setdefault(place.key, set()).add(place.axis_size)
  if assignment is None:
    for name, recipe in rules.places.items():
      if found.whole or not isinstance(recipe, Dense):
        timelines.setdefault((recipe, recipe.timeline()), {})[name] = set()
  return timelines


def _segment(segment: Any, recipe: Any, offset: int) -> dict[str, Any]:
  return {
    "start": segment.start,
    "stop": segment.stop,
    "t5x_start": segment.start + offset,
    "t5x_stop": segment.stop + offset,
    "pattern": None if segment.pattern is None else str(segment.pattern),
    "decay_start": float(segment.decay_start),
    "decay_stop": float(segment.decay_stop),
    "phase": _phase(segment, recipe),
  }


def _phase(segment: Any, recipe: Any) -> str:
  phases = recipe.phases
  if phases is None or segment.stop <= phases.dense:
    return "dense"
  if segment.start >= phases.finetune_start and phases.finetune:
    return "fine-tune"
  first = "dense, sparsify" if segment.start < phases.dense else "sparsify"
  if phases.finetune and segment.stop > phases.finetune_start:
    return f"{first}, fine-tune from {phases.finetune_start:,}"
  return first


def loss(found: Findings, rules: Rules, made: Made) -> dict[str, Any]:
  """Returns the part `loss`: how the loss is normalised, and what lambda is beside it.

  Args:
    found: of the run.
    rules: of the run.
    made: what its settings make.
  """
  lams = {key: recipe.lam for key, recipe in rules.places.items() if recipe.lam}
  own = getattr(made.network, "weight", None)  # of a workload
  if own or found.config.is_set("WORKLOAD"):  # its loss is the mean that lambda refers to
    return {"lambda": lams, "mean_over": own}
  return {"lambda": lams} if found.config.local else _of_t5x(found, made, lams)


def _of_t5x(found: Findings, made: Made, lams: Mapping[str, float]) -> dict[str, Any]:
  """Returns how T5X normalises the loss, and what lambda is beside it then."""
  if made.model is None:
    factor = found.config.get("LOSS_NORMALIZING_FACTOR")
  else:
    factor = getattr(made.model, "_loss_normalizing_factor", None)
  parts = found.microbatches() or 1
  tokens = (found.batch_size or 0) * known_lengths(found.lengths)["targets"] or None
  name = getattr(factor, "name", factor)
  if factor is None:
    scale, text = tokens, "a sum over target tokens"
  elif isinstance(factor, int | float):
    scale, text = (tokens and tokens / factor), f"a sum over target tokens / {factor:g}"
  elif str(name).upper().startswith("NUM"):
    summed = f", summed over {parts} microbatches" if parts > 1 else ""
    scale, text = parts, f"a mean over target tokens{summed}"
  else:
    scale, text = None, f"normalised by {name}"
  return {
    "factor": name if isinstance(name, int | float | None) else str(name),
    "meaning": text,
    "microbatches": parts,
    "target_tokens_at_most": tokens,
    "lambda": lams,
    "lambda_in_t5x_at_most": {k: lam * scale for k, lam in lams.items()} if scale else {},
  }
