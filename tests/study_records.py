"""Where the benchmarks and their records are: an import of this puts their folder on the path."""

import pathlib
import sys

ROOT = pathlib.Path(__file__).parents[1]
sys.path.append(str(ROOT / "benchmarks"))
