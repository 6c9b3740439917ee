"""Scores of runs: next to the published ones, and GLUE's official submission.

    table       a run's metrics -> what it scored, with the published row
    published   the rows of the paper, and which of them a run compares with
    submission  predictions -> GLUE's official zip

Score two runs in a notebook:

    from nm_sparsity_jax import scores

    report = scores.score(["runs/sr_ste", "runs/stepwise"], checkpoint="last")
    report["runs"][0]["columns"]["RTE"]["mean"]
    print(scores.render(report))

Make the zip for gluebenchmark.com:

    tables, filled, problems = scores.submission.make(["predictions/"], fill={"wnli"})
    if not problems:
      scores.submission.write("submission.zip", tables)
"""

from nm_sparsity_jax.analysis.scores import published, submission, table
from nm_sparsity_jax.analysis.scores.table import render, score

__all__ = ["published", "render", "score", "submission", "table"]
