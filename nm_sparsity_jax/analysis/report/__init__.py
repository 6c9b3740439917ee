"""Reports of runs: sections of plain values, charts, one HTML page.

    from nm_sparsity_jax import report

    found = report.report(["runs/sr_ste", "runs/stepwise"], checkpoint="last")
    found["scores"]                                   # tables and sentences
    found.charts["train_loss"].lines[0].points        # [(step, loss), ...]
    report.write(found, "report.html")                # needs jinja2
    report.png(found, "charts")                       # needs matplotlib

What stands where:

    reading     folders of runs -> Run
    network     the cost of a run's network (its rules: `runs.rules_of`)
    sections    Run -> Section, from curves, schedule, scored, cost, settings; made of parts
    charts      lines of points -> SVG or PNG
    page        sections -> HTML
"""

from nm_sparsity_jax.analysis.report.making import Report, png, report, versions, write
from nm_sparsity_jax.analysis.report.page import page_of
from nm_sparsity_jax.analysis.report.parts import Cell, Section, Strip, Table
from nm_sparsity_jax.analysis.report.reading import Run

__all__ = [
    "Cell", "Report", "Run", "Section", "Strip", "Table", "page_of", "png", "report", "versions",
    "write",
]  # fmt: skip
