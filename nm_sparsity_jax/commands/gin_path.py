"""Prints the folder that holds gin_configs/.

  python -m t5x.train --gin_search_paths=$(nm-sparsity gin-path) \\
    --gin_file=gin_configs/runs/t5x_finetune.gin ...
"""

from __future__ import annotations

import argparse
import pathlib

import nm_sparsity_jax


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """None."""
  del parser


def run(args: argparse.Namespace) -> int:
  """Prints the folder."""
  del args
  print(find())
  return 0


def find() -> pathlib.Path:
  """The folder that holds gin_configs/.

  A wheel carries them inside the package. A checkout, an editable installation and an unpacked
  sdist have them beside it, since an editable installation maps no data into the package.
  """
  package = pathlib.Path(nm_sparsity_jax.__file__).resolve().parent
  for folder in (package, package.parent):
    if (folder / "gin_configs" / "sparsity.gin").is_file():
      return folder
  raise FileNotFoundError(
    f"no gin_configs/ in {package}, nor beside it. Install the package again: pip install "
    "--force-reinstall --no-deps nm-sparsity-jax, or -e . in a whole checkout"
  )
