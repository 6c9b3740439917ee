"""What rounding packed weights costs a trained network: scores of a quickstart's sparse runs.

    nm-sparsity quickstart
    nm-sparsity quickstart --task rebus
    python benchmarks/rounding.py quickstart rebus --json benchmarks/results/rounding.json

Each sparse run is finalized and packed as it is, in bfloat16 and in int8, and `nm-sparsity eval`
scores the finalized checkpoint and the three files on the whole validation set.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import os
import pathlib
import re
import tempfile

import _timing

CONFIGS = "gin_configs"
FILES = {
  "mini-glue": ("models/mini_small.gin", "runs/local_eval.gin", "runs/local_mini.gin"),
  "rebus": ("runs/local_images_eval.gin", "runs/local_rebus.gin"),
}
VALUES = ("float32", "bfloat16", "int8")


def arguments():
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("folders", nargs="+", help="of quickstarts")
  parser.add_argument("--runs", nargs="+", default=["*"], help="recipes (default: all sparse ones)")
  parser.add_argument("--json", help="write the figures to this file")
  return parser.parse_args()


def said(*argv):
  """Returns what a command prints; it must succeed."""
  from nm_sparsity_jax import cli

  with contextlib.redirect_stdout(io.StringIO()) as out:
    code = cli.main([str(word) for word in argv])
  assert not code, f"nm-sparsity {' '.join(map(str, argv))}"
  return out.getvalue()


def scores(task, checkpoint, folder):
  """Returns name -> score of a checkpoint or a packed file: its loss, and its accuracy."""
  macros = {"CHECKPOINT_PATH": str(checkpoint), "EVAL_OUTPUT_DIR": str(folder)}
  files = [f"--gin_file={CONFIGS}/{name}" for name in FILES[task]]
  text = said("eval", *files, *(f"--gin.{name}={value!r}" for name, value in macros.items()))
  found = re.findall(r"\b(loss|accuracy) ([\d.]+)", text)
  # mini-GLUE's teacher-forced accuracy counts tokens; the one of decoded text stands last.
  return {name: float(value) for name, value in found}


def rows_of(folder, recipe):
  """Returns a row for each run of a recipe in a quickstart's folder, and each kind of values."""
  task = "mini-glue" if (folder / "start-seed0").is_dir() else "rebus"
  paths = sorted(folder.glob(f"{recipe}-1_*-seed0"))
  assert paths, f"{folder} has no sparse run {recipe}: is it the folder of a quickstart?"
  for path in paths:
    name = path.name.partition("-")[0]
    with tempfile.TemporaryDirectory() as room:
      room = pathlib.Path(room)
      said("finalize", path, room / "final")
      (final,) = (room / "final").glob("checkpoint_*")
      exact = scores(task, final, room / "exact")
      yield {"task": task, "run": name, "values": "finalized", "bytes": None, **exact}
      for values in VALUES:
        file = room / f"{values}.safetensors"
        packed = json.loads(said("pack", room / "final", file, "--dtype", values, "--json"))
        size = sum(kernel["bytes"] for kernel in packed["packed"].values())
        of = {"task": task, "run": name, "values": values, "bytes": size}
        yield of | scores(task, file, room / values)


def main():
  args = arguments()
  os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
  rows = []
  for folder, recipe in itertools.product(map(pathlib.Path, args.folders), args.runs):
    for row in rows_of(folder, recipe):
      rows.append(row)
      _timing.row(*row.values())
  _timing.save(args.json, rows)


if __name__ == "__main__":
  main()
