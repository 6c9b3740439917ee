"""Runs the command line as `python -m nm_sparsity_jax.cli`."""

import sys

from nm_sparsity_jax.cli import main

if __name__ == "__main__":
  sys.exit(main())
