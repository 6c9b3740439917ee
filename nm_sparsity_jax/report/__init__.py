"""One page of runs: sections of plain values, charts, HTML."""
