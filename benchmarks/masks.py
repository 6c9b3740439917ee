"""How fast masks are: ours over the elementwise pass (the limit), and qwix over ours.

    python benchmarks/masks.py
    python benchmarks/masks.py --patterns 1:32,64:128 --shapes 1024x4096 --axes 0

The limit reads every weight once and writes one bool: `abs(w) > constant`. qwix (pip install
qwix) takes the top_k of each group, as praxis does. Every candidate is jitted and gets the same
weights; masks are compared before they are timed.
"""

from __future__ import annotations

import statistics

import _timing

PATTERNS = "2:4,1:4,1:8,7:8,3:8,1:16,4:16,1:32,31:32,4:32,1:64,1:128,16:128,64:128"


def arguments(argv=None):
  parser = _timing.parser(__doc__)
  parser.add_argument("--patterns", default=PATTERNS)
  parser.add_argument("--shapes", default="2048x768,768x2048,3072x768,1024x4096")
  parser.add_argument("--dtypes", default="float32,bfloat16")
  parser.add_argument("--axes", default="0,-1")
  return parser.parse_args(argv)


def measured(w, pattern, axis, blocks):
  """Returns times of the limit, of ours and of qwix, as a row."""
  import jax
  import jax.numpy as jnp
  import numpy as np
  from qwix._src.core import sparsity

  import nm_sparsity_jax as nms

  order = "C" if axis == 0 else "R"
  jitted = {
    "limit": jax.jit(lambda w: jnp.abs(w) > 0.5),
    "ours": jax.jit(lambda w: nms.masks.magnitude_mask(w, pattern, axis)),
    "qwix": jax.jit(lambda w: sparsity.get_sparsity_mask(w, pattern.n, pattern.m, order=order)),
  }
  ours, theirs = (np.asarray(jitted[name](w), bool) for name in ("ours", "qwix"))
  # Some versions of qwix mark what is pruned.
  same = (ours == theirs).all() or (ours == ~theirs).all()
  assert same, f"qwix and ours disagree on {pattern} along axis {axis}"
  calls = {name: lambda f=f: jax.block_until_ready(f(w)) for name, f in jitted.items()}
  times = _timing.interleave(calls, blocks)
  return {
    "limit_ms": statistics.median(times["limit"]) * 1e3,
    "ours_ms": statistics.median(times["ours"]) * 1e3,
    "over_limit": _timing.ratio(times["ours"], times["limit"]),
    "peers": {"qwix": _timing.ratio(times["qwix"], times["ours"])},
  }


def main():
  args = arguments()
  _timing.pin(args.core)
  import jax

  import nm_sparsity_jax as nms

  rows = []
  _timing.head("shape", "dtype", "axis", "pattern", "limit, ms", "ours, ms", "over limit", "qwix")
  for shape in args.shapes.split(","):
    size = tuple(int(x) for x in shape.split("x"))
    for dtype in args.dtypes.split(","):
      w = jax.random.normal(jax.random.key(0), size).astype(dtype)
      for axis in map(int, args.axes.split(",")):
        for pattern in map(nms.NM.parse, args.patterns.split(",")):
          if size[axis] % pattern.m:
            continue
          of = {"shape": shape, "dtype": dtype, "axis": axis, "pattern": str(pattern)}
          row = measured(w, pattern, axis, args.blocks)
          rows.append(row | of)
          ratios = _timing.show(row["over_limit"]), _timing.show(row["peers"]["qwix"])
          _timing.row(*of.values(), row["limit_ms"], row["ours_ms"], *ratios)
  _timing.save(args.json, rows)


if __name__ == "__main__":
  main()
