"""How much memory a process takes at most, with weights of one kind: each kind in its own process.

The weights are random. They are made and prepared one kernel at a time, as a packed file is read,
so no process ever holds a network that it does not run.
"""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys

import numpy as np

DENSE = "dense"
PLACES = ("ff", "q", "k", "v", "o")


def rules_of(pattern):
  """Returns the rules of feed-forward and attention kernels."""
  import nm_sparsity_jax as nms

  return nms.configure.rules(dict.fromkeys(PLACES, pattern), recipe="sr_ste", sparse_steps=1)


def tree(shapes, kind, rows=None, values=None):
  """Returns random parameters on the device: dense, or n:m ones prepared for the fastest product.

  Args:
    shapes: of the parameters of a network that does not scan.
    kind: 'dense' or n:m.
    rows: path -> rows of x, as `inference_tree.rows_of` returns; None: kernels stay as
      `inference_tree.pack_tree` makes them.
    values: dtype of packed values; None: float32.
  """
  import jax.numpy as jnp

  from nm_sparsity_jax.analysis.bench import layers
  from nm_sparsity_jax.core import packed
  from nm_sparsity_jax.core.patterns import NM
  from nm_sparsity_jax.core.trees import map_with_names
  from nm_sparsity_jax.deploy import inference_tree

  rng = np.random.default_rng(0)
  chosen = () if kind == DENSE else inference_tree.decide(shapes, rules_of(kind))[0]

  def one(path, x):
    if path in chosen:
      kernel = layers.random(x.shape[0], x.shape[1], NM.parse(kind), values)
      return packed.prepare(kernel, rows(path)) if rows else kernel
    return jnp.asarray(rng.standard_normal(x.shape, np.float32) / 32)

  return map_with_names(one, shapes)


def report():
  """Prints the most that this process has held so far, in bytes: what `most` reads.

  It asks Linux for the peak of this program: `ru_maxrss` begins with that of the parent.
  """
  status = pathlib.Path("/proc/self/status").read_text("utf-8")
  (kilobytes,) = re.findall(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE)
  print(int(kilobytes) * 1024)


def most(*argv):
  """Returns the bytes that a program held at most, which it prints last; see `report`.

  Args:
    *argv: the program and its arguments.
  """
  done = subprocess.run([sys.executable, *argv], capture_output=True, text=True, check=True)
  return int(done.stdout.split()[-1])
