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
        the weights and writes them. Gates on axis 0: 2.5 for m up to 32 and for 1:m, 4 for the
        others; twice that on the last axis.
step    the train step of the local runner, T5.1.1, 512 + 64 tokens a row, bfloat16, over the dense
        step.
        Gates: bytes 1.015 for recipes of one level and 1.03 for others, peak memory 1.02 for
        recipes without a stored mask, compile time 1.25 and 1.6, the same collectives.
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
PARSER.add_argument("--shape", default="1024x4096", help="of a kernel, for `masks`")
PARSER.add_argument("--dtypes", default="float32,bfloat16", help="of kernels, for `masks`")
PARSER.add_argument("--size", default="small", help="of T5.1.1, for `step`")
PARSER.add_argument("--scan", action="store_true", help="scan over the layers")
PARSER.add_argument("--t5x", action="store_true", help="T5X's trainer in place of the local runner")
PARSER.add_argument("--devices", type=int, default=None, help="how many of the topology; all")
PARSER.add_argument("--batch", type=int, default=128, help="rows, for `step`")
PARSER.add_argument("--microbatches", type=int, default=1, help="parts of the batch, for `step`")
PARSER.add_argument("--remat", default="none", help="remat policy of the network: none, minimal")
PARSER.add_argument("--partitions", type=int, default=1, help="devices that share each weight")
PARSER.add_argument("--pattern", default="1:8", help="for `step`")
PARSER.add_argument("--recipes", help="names; by default one of each family for `masks`, else all")
PARSER.add_argument("--plain", action="store_true", help="XLA's way alone, for comparison")
PARSER.add_argument("--hlo", help="write the last program to this file")
PARSER.add_argument("--json", help="write the rows to this file")
PARSER.add_argument("--more", action="store_true", help="add rows, or turns of a row, to that file")
ARGS = PARSER.parse_args()
if ARGS.more and not ARGS.json:
  PARSER.error("--more adds to the file of --json: name it")
if ARGS.what == "metrics" and ARGS.t5x:
  PARSER.error("metrics are those of the local runner: leave --t5x out")

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

COMMAND = "python " + " ".join(sys.argv)
EVERY = "sr_ste,mdgf_linear,mdgf_exponential,sdgf_stepwise,sdgf_geometric,one_shot,snip,idp"
FAMILIES = "sr_ste,sdgf_stepwise,sdgf_geometric"  # n known, n traced, length of groups traced
ONE_LEVEL = ("sr_ste", "mdgf_linear", "mdgf_exponential", "one_shot", "snip")
STORED = ("one_shot", "snip", "idp")
OVER = ("bytes", "flops", "memory", "peak", "seconds")  # of each row, over those of dense


def devices():
  """Returns the chips of the topology, or ends with one line that says why there are none."""
  try:
    return topology.devices(ARGS.topology)[: ARGS.devices]
  except topology.NoTopology as e:
    sys.exit(f"error: {e}")


def _names(default):
  """Returns the recipes that the command names."""
  return [*filter(None, (default if ARGS.recipes is None else ARGS.recipes).split(","))]


def account(lowered):
  """Compiles, and returns what the compiler says."""
  start = time.process_time()  # of all threads: others may use the machine too
  compiled = lowered.compile()
  seconds = time.process_time() - start
  if ARGS.hlo:
    pathlib.Path(ARGS.hlo).write_text(compiled.as_text())
  return account_of(compiled)._asdict() | {"seconds": seconds}


def save(rows):
  """Writes the rows with the compiler's version and the chips that it compiled for."""
  _timing.save(ARGS.json, rows, COMMAND, libtpu=installed.version("libtpu"), chips=ARGS.topology)


def masks():
  """Prints and returns the bytes of masks and of effective weights over those of one pass."""
  mesh = Mesh(np.array(devices()[:4]).reshape(2, 2), ("data", "model"))
  shape = tuple(int(x) for x in ARGS.shape.split("x"))
  cuts = ((0, (None, "model")), (0, ("model", None)), (1, (None, "model")))
  rows, failed = [], []
  print(f"{'what':16} {'pattern':8} {'dtype':9} axis {'cut':8} passes kernels collectives seconds")
  for what, dtype, (axis, spec) in itertools.product(
    ("mask", *_names(FAMILIES)), ARGS.dtypes.split(","), cuts
  ):
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    like = (
      jax.ShapeDtypeStruct(shape, dtype, sharding=sharding),
      jax.ShapeDtypeStruct((), jnp.int32, sharding=NamedSharding(mesh, PartitionSpec())),
    )
    limit = account(jax.jit(_one_pass(what)).lower(*like))["bytes"]
    for text in ARGS.patterns.split(","):
      pattern = nms.NM.parse(text)
      row = account(jax.jit(_made(what, pattern, axis, sharding)).lower(*like))
      row |= {"what": what, "pattern": text, "dtype": dtype, "axis": axis, "cut": str(spec)}
      row["over_one_pass"] = row["bytes"] / limit
      rows.append(row)
      gate = (2.5 if pattern.m <= 32 or pattern.n == 1 else 4.0) * (1 + axis)
      if row["over_one_pass"] > gate or row["collectives"]:
        failed.append(f"{what} {text} {dtype} axis {axis}: {row['over_one_pass']:.2f}")
      cut = "columns" if spec[0] is None else "rows"
      print(
        f"{what:16} {text:8} {dtype:9} {axis:4} {cut:8} {row['over_one_pass']:6.2f} "
        f"{row['kernels']:7} {sum(row['collectives'].values()):11} {row['seconds']:7.1f}",
        flush=True,
      )
  return rows, failed


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
      groups = nms.groups.Groups(w.shape, axis).sharded(sharding, pattern.m)
      return groups.magnitude_mask(w, pattern)

    return mask
  recipe = nms.recipe(what, pattern=pattern, phases=programs.PHASES)
  rules = nms.Rules({"w": recipe}, axes={"w": axis}).with_shardings({"w": sharding})
  return lambda w, step: nms.sparsify({"w": w}, rules, step)["w"]


def lowered(name):
  """Returns the program of a recipe, not compiled."""
  options = {"pattern": ARGS.pattern, "phases": programs.PHASES} if name != "dense" else {}
  setting = programs.Setting(
    devices(), ARGS.size, nms.recipe(name, **options), ARGS.batch,
    ARGS.microbatches, ARGS.partitions, ARGS.scan, ARGS.remat, ARGS.plain,
  )  # fmt: skip
  family = programs.T5X if ARGS.t5x else programs.Local
  # A dense run has nothing to sample: its train step is what a sampled step stands beside.
  what = "step" if (ARGS.what, name) == ("metrics", "dense") else ARGS.what
  return getattr(family(setting), what)()


def over_dense():
  """Prints and returns what each recipe adds to the dense program."""
  wanted, rows = _names(EVERY), {}
  if ARGS.more and os.path.exists(ARGS.json):
    found = json.loads(pathlib.Path(ARGS.json).read_text())["rows"]
    rows = {row["recipe"]: row for row in found}
    if any("peak" not in row for row in found):
      sys.exit(f"error: {ARGS.json} was written without peak memory: write a new file")
  if "dense" not in [*rows, *wanted]:
    wanted.insert(0, "dense")
  print(
    f"{'recipe':18} {'bytes':>7} {'least':>7} {'flops':>7} {'peak':>7} {'compile':>8}  kernels  "
    "collectives"
  )
  for name in wanted:
    row = account(lowered(name)) | {"recipe": name, "command": COMMAND}
    row["turns"] = [*rows.get(name, {}).get("turns", []), row["seconds"]]
    row["seconds"] = min(row["turns"])  # others on the machine make it longer, and none shorter
    rows[name] = row
    for x in rows.values():
      x["over_dense"] = {key: x[key] / rows["dense"][key] for key in OVER}
      x["over_dense"]["least"] = x["least"] / rows["dense"]["bytes"]
    save([*rows.values()])  # each: it takes minutes
    over = row["over_dense"]
    print(
      f"{name:18} {over['bytes']:7.3f} {over['least']:7.3f} {over['flops']:7.3f} "
      f"{over['peak']:7.3f} {over['seconds']:8.2f} {row['kernels']:8}  {row['collectives']}",
      flush=True,
    )
  missed = [f"{name}: {what}" for name in rows for what in _missed(rows[name], rows["dense"])]
  return [*rows.values()], missed if ARGS.what == "step" else []


def _missed(row, dense):
  """Returns the gates that a train step does not meet."""
  name, over = row["recipe"], row["over_dense"]
  one = name in ONE_LEVEL
  met = {
    "bytes": over["bytes"] <= (1.015 if one else 1.03),
    "peak memory": name in STORED or over["peak"] <= 1.02,
    "compile time": over["seconds"] <= (1.25 if one else 1.6),
    "collectives": row["collectives"] == dense["collectives"],
  }
  return [what for what, kept in met.items() if not kept]


if __name__ == "__main__":
  found, missed = masks() if ARGS.what == "masks" else over_dense()
  save(found)
  print("\ngates: " + ("; ".join(missed) if missed else "all met"))
  sys.exit(bool(missed))
