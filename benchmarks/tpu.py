"""What a TPU's compiler says of masks and of a whole train step, without a TPU.

    pip install 'jax[tpu]'
    python benchmarks/tpu.py masks
    python benchmarks/tpu.py masks --plain        what XLA makes of them without our kernel
    python benchmarks/tpu.py masks --topology v5p:2x2x1 --json benchmarks/results/tpu_masks.json
    python benchmarks/tpu.py step --size base --recipes sr_ste,idp
    python benchmarks/tpu.py step --size base --partitions 4 --scan
    python benchmarks/tpu.py step --scan --recipes idp --more --json FILE    adds a row to FILE
    python benchmarks/tpu.py step --scan --recipes dense --more --json FILE  one more turn of dense

libtpu compiles for chips that are not there. It says how many bytes a program moves, how many FLOPs
it does, how much memory it needs, and how long it took to compile. It does not say how long the
program runs. This is a compiler's account, not a measurement.

masks   the mask of a kernel cut over the devices, over one pass: the bytes of `abs(w) > constant`.
        Then its effective weights under a recipe, at a step that is traced, over a pass that reads
        the weights and writes them.
step    the train step of the local runner, T5.1.1, 512 + 64 tokens a row, bfloat16, over the dense
        step.
eval    a batch of an evaluation; of T5X with its effective weights.
decode  the greedy decoding of a batch; of T5X with its effective weights.
metrics the program of a sampled step before the update, over the dense train step.

A compile time is processor time. Others on the machine make it longer, so let dense and recipes
take turns, each in a process of its own (--more): the least of the turns counts.

`nm_sparsity_jax.analysis.compiled` counts what XLA's own analysis leaves out: the trips of a
loop after the first, and the bytes of Pallas kernels. One process at a time can hold libtpu.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import pathlib
import sys
import time

PARSER = argparse.ArgumentParser(description=__doc__.splitlines()[0])
PARSER.add_argument("what", choices=("masks", "step", "eval", "decode", "metrics"))
PARSER.add_argument("--topology", default="v5e:2x2", help="as libtpu calls it")
PARSER.add_argument("--patterns", default="1:4,2:4,1:8,4:8,1:16,1:32,4:32,1:128,16:128,64:128")
PARSER.add_argument("--size", default="small", help="of T5.1.1, for `step`")
PARSER.add_argument("--scan", action="store_true", help="scan over the layers")
PARSER.add_argument("--t5x", action="store_true", help="T5X's trainer in place of the local runner")
PARSER.add_argument("--microbatches", type=int, default=1, help="parts of the batch, for `step`")
PARSER.add_argument("--remat", default="none", help="remat policy of the network: none, minimal")
PARSER.add_argument("--partitions", type=int, default=1, help="devices that share each weight")
PARSER.add_argument("--recipes", help="names; by default one of each family for `masks`, else all")
PARSER.add_argument("--plain", action="store_true", help="XLA's way alone, for comparison")
PARSER.add_argument("--json", help="write the rows to this file")
PARSER.add_argument("--more", action="store_true", help="add rows, or turns of a row, to that file")
ARGS = PARSER.parse_args()
if ARGS.more and not ARGS.json:
  PARSER.error("--more adds to the file of --json: name it")

os.environ["JAX_PLATFORMS"] = "cpu"

import _timing
import _tpu_programs as programs
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import nm_sparsity_jax as nms
from nm_sparsity_jax.analysis import topology
from nm_sparsity_jax.analysis.compiled import account as account_of
from nm_sparsity_jax.core import installed
from nm_sparsity_jax.core.groups import Groups

EVERY = "sr_ste,mdgf_linear,mdgf_exponential,sdgf_stepwise,sdgf_geometric,one_shot,snip,idp"
FAMILIES = "sr_ste,sdgf_stepwise,sdgf_geometric"  # n known, n traced, length of groups traced
OVER = ("bytes", "flops", "memory", "peak", "seconds")  # of each row, over those of dense


@functools.cache
def devices():
  """Returns the chips of the topology, or ends with one line that says why there are none."""
  try:
    return topology.devices(ARGS.topology)
  except ValueError as e:
    sys.exit(f"error: {e}")


def names(default):
  """Returns the recipes that the command names."""
  return [*filter(None, (default if ARGS.recipes is None else ARGS.recipes).split(","))]


def account(lowered):
  """Compiles, and returns what the compiler says."""
  start = time.process_time()  # of all threads: others may use the machine too
  compiled = lowered.compile()
  return account_of(compiled)._asdict() | {"seconds": time.process_time() - start}


def save(rows):
  """Writes the rows with the compiler's version and the chips that it compiled for."""
  _timing.save(ARGS.json, rows, libtpu=installed.version("libtpu"), chips=ARGS.topology)


def masks():
  """Prints and saves the bytes of masks and of effective weights over those of one pass."""
  mesh = Mesh(np.array(devices()[:4]).reshape(2, 2), ("data", "model"))
  cuts = ((0, (None, "model")), (0, ("model", None)), (1, (None, "model")))
  rows = []
  _timing.head("what", "pattern", "dtype", "axis", "cut", "passes", "kernels", "collectives")
  for what, dtype, (axis, spec) in itertools.product(
    ("mask", *names(FAMILIES)), ("float32", "bfloat16"), cuts
  ):
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    like = (
      jax.ShapeDtypeStruct((1024, 4096), dtype, sharding=sharding),
      jax.ShapeDtypeStruct((), jnp.int32, sharding=NamedSharding(mesh, PartitionSpec())),
    )
    limit = account(jax.jit(_one_pass(what)).lower(*like))["bytes"]
    for pattern in ARGS.patterns.split(","):
      made = _made(what, nms.NM.parse(pattern), axis, sharding)
      row = account(jax.jit(made).lower(*like))
      of = {"what": what, "pattern": pattern, "dtype": dtype, "axis": axis, "cut": str(spec)}
      row |= of | {"over_one_pass": row["bytes"] / limit}
      rows.append(row)
      _timing.row(
        *of.values(), row["over_one_pass"], row["kernels"], sum(row["collectives"].values())
      )
  save(rows)


def _one_pass(what):
  """Returns the pass that counts as one: it reads each weight, and writes a bool or a weight."""
  if what == "mask":
    return lambda w, step: jnp.abs(w) > 0.5
  return lambda w, step: jnp.where(jnp.abs(w) > 0.5, w, 0)


def _made(what, pattern, axis, sharding):
  """Returns what makes the mask of a weight, or the effective weight of a recipe, at a step."""
  sharding = None if ARGS.plain else sharding
  if what == "mask":

    def mask(w, step):
      del step
      groups = Groups(w.shape, axis).sharded(sharding, pattern.m)
      return groups.magnitude_mask(w, pattern)

    return mask
  recipe = nms.recipe(what, pattern=pattern, phases=programs.PHASES)
  rules = nms.Rules({"w": recipe}, axes={"w": axis}).with_shardings({"w": sharding})
  return lambda w, step: nms.sparsify({"w": w}, rules, step)["w"]


def lowered(name):
  """Returns the program of a recipe, not compiled."""
  options = {"pattern": "1:8", "phases": programs.PHASES} if name != "dense" else {}
  family = programs.T5X if ARGS.t5x else programs.Local
  made = family(ARGS, devices(), nms.recipe(name, **options))
  # A dense run has nothing to sample: its train step is what a sampled step stands beside.
  what = "step" if (ARGS.what, name) == ("metrics", "dense") else ARGS.what
  return getattr(made, what)()


def over_dense():
  """Prints and saves what each recipe adds to the dense program."""
  wanted, rows = names(EVERY), {}
  if ARGS.more and os.path.exists(ARGS.json):
    found = json.loads(pathlib.Path(ARGS.json).read_text())["rows"]
    rows = {row["recipe"]: row for row in found}
  if "dense" not in [*rows, *wanted]:
    wanted.insert(0, "dense")
  _timing.head("recipe", *OVER, "kernels", "collectives")
  for name in wanted:
    row = account(lowered(name)) | {"recipe": name, "command": "python " + " ".join(sys.argv)}
    row["turns"] = [*rows.get(name, {}).get("turns", []), row["seconds"]]
    row["seconds"] = min(row["turns"])  # others on the machine make it longer, and none shorter
    rows[name] = row
    for x in rows.values():
      x["over_dense"] = {key: x[key] / rows["dense"][key] for key in OVER}
    save([*rows.values()])  # each: it takes minutes
    over = (f"{row['over_dense'][key]:.3f}" for key in OVER)
    _timing.row(name, *over, row["kernels"], row["collectives"])


if __name__ == "__main__":
  masks() if ARGS.what == "masks" else over_dense()
