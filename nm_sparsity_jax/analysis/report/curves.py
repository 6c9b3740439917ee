"""Sections of curves: loss, metrics by task, mask flips, variance."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from nm_sparsity_jax.analysis.report import parts
from nm_sparsity_jax.analysis.report.charts import Chart
from nm_sparsity_jax.analysis.report.reading import LOSS, Points, Run


def loss(runs: Sequence[Run]) -> Iterator[Chart | str]:
  """Yields losses, accuracies, learning rate and speed by step.

  Runs of a model family whose losses are not per token have charts of all that they wrote.
  """
  accuracy = lambda run: run.train.get("accuracy", {}) if run.counts_tokens else {}

  def validation(task: str) -> Chart | None:
    of = lambda run: run.evals.get(task, {}).get(LOSS, {})
    return parts.chart(runs, f"eval_loss_{task}", f"Validation loss per target token, {task}", of)

  charts = [
    parts.tagged(runs, "train_loss", "Training loss per target token", LOSS),
    parts.chart(runs, "train_accuracy", "Training accuracy of tokens", accuracy),
    *_of_other_families(runs),
    parts.tagged(runs, "learning_rate", "Learning rate", "learning_rate"),
    parts.tagged(runs, "steps_per_second", "Steps per second", "timing/steps_per_second"),
    *map(validation, sorted({task for run in runs for task in run.evals})),
  ]
  yield from parts.some(charts, "No run has curves of training (train/, training_eval/).")


def _of_other_families(runs: Sequence[Run]) -> Iterator[Chart | None]:
  """Yields a chart of each tag of training and evaluations, of runs without losses per token."""
  others = [run for run in runs if not run.counts_tokens]
  drawn = ("nm/", "timing/", "learning_rate")  # in charts of their own
  tags = {tag for run in others for tag in run.train if not tag.startswith(drawn)}
  for tag in sorted(tags):
    of = lambda run, tag=tag: {} if run.counts_tokens else run.train.get(tag, {})
    yield parts.chart(runs, f"train_{tag}", f"Training {tag}", of)
  judged = lambda run, task: {m for values in run.tasks.get(task, {}).values() for m in values}
  pairs = {
    (task, tag)
    for run in others
    for task, found in run.evals.items()
    for tag in found.keys() - judged(run, task)  # those are metrics by task
  }
  for task, tag in sorted(pairs):
    of = lambda run, task=task, tag=tag: (
      {} if run.counts_tokens else run.evals.get(task, {}).get(tag, {})
    )
    yield parts.chart(runs, f"eval_{tag}_{task}", f"{task}: {tag}", of)


def metrics(runs: Sequence[Run]) -> Iterator[Chart | str]:
  """Yields a chart of each metric of each task."""
  names = {
    (task, metric)
    for run in runs
    for task, series in run.tasks.items()
    for values in series.values()
    for metric in values
  }

  def chart(task: str, metric: str) -> Chart | None:
    def of(run: Run) -> Points:
      series = run.tasks.get(task, {})
      return {step: values[metric] for step, values in series.items() if metric in values}

    return parts.chart(runs, f"{task}_{metric}", f"{task}: {metric}", of)

  charts = [chart(*name) for name in sorted(names)]
  yield from parts.some(charts, "No run has metrics of decoded predictions (inference_eval/).")


def flips(runs: Sequence[Run]) -> Iterator[Chart | str]:
  """Yields how many positions of the masks change in a step."""
  charts = [
    parts.tagged(runs, "flips_all", "Mask flips per step, of all positions", "nm/flip_rate/all"),
    parts.tagged(runs, "flips_kept", "Kept weights lost per step, of kept", "nm/flip_rate/kept"),
  ]
  yield from parts.some(charts, "No run has samples of its masks (METRICS_EVERY).")
  if any(charts):
    yield "From the mask before an update to the one after it, at sampled steps."


def variance(runs: Sequence[Run]) -> Iterator[Chart | str]:
  """Yields the variance of gradients and second moments, over all weights and over kept ones."""
  kinds = {
    # By what was measured: Adafactor keeps a small parameter's second moment whole, as Adam does.
    "second_moment_var": "Variance of the second moment",
    "second_moment_var_factored": "Variance of Adafactor's factored second moment",
    "grad_abs_var": "Variance of the gradient's absolute value",
  }
  shares = {"all": "all weights", "kept": "kept weights"}
  charts = [
    parts.tagged(runs, f"{kind}_{share}", f"{title}, {of}", f"nm/{kind}/{share}", log=True)
    for kind, title in kinds.items()
    for share, of in shares.items()
  ]
  yield from parts.some(charts, "No run has samples of variances (METRICS_EVERY).")
  if any(charts):
    yield (
      "Over the sparse kernels. The paper's Figure 3 shows that of all weights; in masked mode a "
      "pruned weight's gradient carries the factor D, so it falls with D whatever the noise."
    )
