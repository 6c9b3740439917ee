"""Where the benchmarks and their records are: an import of this puts their folder on the path."""

import sys

from checkout import ROOT

sys.path.append(str(ROOT / "benchmarks"))
