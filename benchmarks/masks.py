"""How fast masks are: ours over the elementwise pass (the limit), and peers over ours.

    python benchmarks/masks.py
    python benchmarks/masks.py --patterns 1:32,64:128 --shapes 1024x4096 --axes 0
    python benchmarks/masks.py --jaxpruner PATH     a checkout of google-research/jaxpruner

The limit reads every weight once and writes one bool: `abs(w) > constant`. qwix (pip install
qwix) takes the top_k of each group, as praxis does. Every candidate is jitted and gets the same
weights; masks are compared before they are timed.

Gates (float32, axis 0, over qwix): 20x for 2:4, 7:8, 1:4, 1:8, 1:16; 10x for 1:32, 1:128 and
16:128; 35x for 64:128. Last axis: never slower than qwix.
"""

from __future__ import annotations

import argparse
import functools
import sys

import _timing

PATTERNS = "2:4,1:4,1:8,7:8,3:8,1:16,4:16,1:32,31:32,4:32,1:64,1:128,16:128,64:128"
GATES = {
    "2:4": 20, "7:8": 20, "1:4": 20, "1:8": 20, "1:16": 20, "1:32": 10, "1:128": 10, "16:128": 10,
    "64:128": 35,
}  # fmt: skip

PARSER = argparse.ArgumentParser(description=__doc__.splitlines()[0])
PARSER.add_argument("--core", type=int, default=1, help="processor to run on")
PARSER.add_argument("--blocks", type=int, default=9, help="turns of each candidate")
PARSER.add_argument("--patterns", default=PATTERNS)
PARSER.add_argument("--shapes", default="2048x768,768x2048,3072x768,1024x4096")
PARSER.add_argument("--dtypes", default="float32,bfloat16")
PARSER.add_argument("--axes", default="0,-1")
PARSER.add_argument("--no-qwix", action="store_true", help="leave the peer out")
PARSER.add_argument("--jaxpruner", help="path of a checkout, to time it too")
PARSER.add_argument("--json", help="write the rows to this file")
PARSER.add_argument("--any-device", action="store_true", help="neither pin nor insist on the CPU")
ARGS = PARSER.parse_args()
if not ARGS.any_device:
  _timing.pin(ARGS.core)

import jax
import jax.numpy as jnp
import numpy as np

import nm_sparsity_jax as nms


def ours(w, pattern, axis):
  return nms.masks.magnitude_mask(w, pattern, axis)


def qwix(w, pattern, axis):
  from qwix._src.core import sparsity

  order = "C" if axis == 0 else "R"
  return sparsity.get_sparsity_mask(w, pattern.n, pattern.m, order=order)


def jaxpruner(w, pattern, axis):
  from jaxpruner import sparsity_types

  moved = jnp.moveaxis(w, axis, -1)
  mask = sparsity_types.NByM(pattern.n, pattern.m)
  return jnp.moveaxis(_jaxpruner_topk()(jnp.abs(moved), mask), -1, axis)


@functools.cache
def _jaxpruner_topk():
  sys.path.insert(0, ARGS.jaxpruner)
  if not hasattr(jax, "tree_map"):  # it uses names that current JAX has removed
    jax.tree_map = jax.tree.map
  from jaxpruner import mask_calculator

  return lambda scores, kind: mask_calculator.get_topk_fn(kind)(scores, sparsity=None)


def same(mask, other):
  """Returns whether two masks are equal, whichever polarity the peer has."""
  mask, other = np.asarray(mask, bool), np.asarray(other, bool)
  return bool((mask == other).all() or (mask == ~other).all())


def main():
  rows, failed = [], []
  for shape in ARGS.shapes.split(","):
    size = tuple(int(x) for x in shape.split("x"))
    for dtype in ARGS.dtypes.split(","):
      w = jax.random.normal(jax.random.key(0), size).astype(dtype)
      for axis in (int(a) for a in ARGS.axes.split(",")):
        print(f"\n{shape} {dtype} axis {axis}")
        print(f"{'pattern':8} {'limit ms':>8} {'ours ms':>8}  {'ours / limit':>18}  peers / ours")
        for text in ARGS.patterns.split(","):
          pattern = nms.NM.parse(text)
          if size[axis] % pattern.m:
            continue
          row = measure(w, pattern, axis)
          row |= {"shape": shape, "dtype": dtype, "axis": axis, "pattern": text}
          rows.append(row)
          peers = "  ".join(
            f"{name} {r[0]:.1f} [{r[1]:.1f}, {r[2]:.1f}]" for name, r in row["peers"].items()
          )
          low, high = row["over_limit"][1:]
          print(
            f"{text:8} {row['limit_ms']:8.3f} {row['ours_ms']:8.3f}  "
            f"{row['over_limit'][0]:5.1f} [{low:4.1f}, {high:4.1f}]  {peers}",
            flush=True,
          )
          gate = GATES.get(text) if (axis, dtype) == (0, "float32") else 1 if axis == -1 else None
          if gate and "qwix" in row["peers"] and row["peers"]["qwix"][0] < gate:
            failed.append(
              f"{shape} {dtype} axis {axis} {text}: {row['peers']['qwix'][0]:.1f} < {gate}"
            )
  _timing.save(ARGS.json, rows, "python " + " ".join(sys.argv))
  print("\ngates on qwix: " + ("; ".join(failed) if failed else "all met"))
  return 1 if failed else 0


def measure(w, pattern, axis):
  functions = {"limit": lambda w, *_: jnp.abs(w) > 0.5, "ours": ours}
  if not ARGS.no_qwix:
    functions["qwix"] = qwix
  if ARGS.jaxpruner:
    functions["jaxpruner"] = jaxpruner
  jitted = {
    name: jax.jit(functools.partial(f, pattern=pattern, axis=axis) if name != "limit" else f)
    for name, f in functions.items()
  }
  masks = {name: f(w) for name, f in jitted.items()}
  for name in set(masks) - {"limit", "ours", "jaxpruner"}:  # jaxpruner keeps the last of equals
    if not same(masks["ours"], masks[name]):
      raise AssertionError(f"{name} and ours disagree on {pattern} along axis {axis}")
  calls = {name: lambda f=f: jax.block_until_ready(f(w)) for name, f in jitted.items()}
  times = _timing.interleave(calls, ARGS.blocks)
  middle = lambda name: sorted(times[name])[len(times[name]) // 2] * 1e3
  return {
    "limit_ms": middle("limit"),
    "ours_ms": middle("ours"),
    "over_limit": _timing.ratio(times["ours"], times["limit"]),
    "peers": {
      n: _timing.ratio(times[n], times["ours"]) for n in times if n not in ("limit", "ours")
    },
  }


if __name__ == "__main__":
  sys.exit(main())
