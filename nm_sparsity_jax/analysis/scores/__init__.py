"""Scores of GLUE: rows beside the published ones, and the official submission.

    table       a run's metrics -> its row of the paper's Table 12, beside the published row
    published   the rows of the paper, and which of them a run compares with
    submission  predictions -> GLUE's official zip, and the check of one

Score two runs in a notebook:

    from nm_sparsity_jax import scores

    report = scores.score(["runs/sr_ste", "runs/stepwise"], checkpoint="last")
    report["runs"][0]["columns"]["RTE"]["mean"]
    print(scores.render(report, "markdown"))

Make the zip for gluebenchmark.com:

    report, tables = scores.submission.make(scores.submission.find(["predictions/"]), fill={"wnli"})
    if not report["problems"]:
      scores.submission.write("submission.zip", tables)
"""

from nm_sparsity_jax.analysis.scores import published, submission, table
from nm_sparsity_jax.analysis.scores.table import choose, render, score

__all__ = ["choose", "published", "render", "score", "submission", "table"]
