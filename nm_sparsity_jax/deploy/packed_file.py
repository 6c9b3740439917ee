"""A file of a network with packed kernels.

    variables, rules -> [write] -> F.safetensors
    F.safetensors -> [read] -> {"params", ...}: what network.apply takes, after `prepare`

It is a safetensors file. A packed kernel NAME is two or three tensors of it: NAME.nm_values,
NAME.nm_indices and, of int8, NAME.nm_scale, in the canonical layout of `packed`. Its metadata have
one entry, "nm_sparsity_jax", which is JSON:

    rules    the text of the rules
    packed   {NAME: {"n", "m", "depth"}}
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from nm_sparsity_jax.core.packed import NMPacked, check
from nm_sparsity_jax.core.packed.array import width
from nm_sparsity_jax.core.text import first_line
from nm_sparsity_jax.core.trees import flatten, nested
from nm_sparsity_jax.deploy import inference_tree, safetensors_file
from nm_sparsity_jax.training import rules_text
from nm_sparsity_jax.training.rules import Rules

ENTRY = "nm_sparsity_jax"  # of the metadata of a packed file
_PARTS = ("values", "indices", "scale")  # fields of NMPacked, and tensors NAME.nm_values, ...


def write(
  path: str | os.PathLike, variables: Mapping[str, Any], rules: Rules, dtype: str | None = None
) -> inference_tree.Report:
  """Writes a new packed file of a network: all of it, or nothing.

      print(write("F.safetensors", {"params": params}, rules))

  Args:
    path: of the file, which must not be there.
    variables: 'params', n:m and not scanned (`unstack_layers.unstacked`); and other collections.
    rules: of the tree 'params'.
    dtype: as in `inference_tree.decide`.

  Returns:
    What was packed of 'params', what was not, and why.

  Raises:
    ValueError: a kernel is not n:m, or none can be packed.
  """
  params, report = inference_tree.pack_tree(variables["params"], rules, dtype)
  if not report.packed:
    raise ValueError(f"nothing can be packed: {'; '.join(dict.fromkeys(report.dense.values()))}.")
  tensors, kernels = {}, {}
  # A kernel is a pytree of its parts; as a leaf it keeps its name.
  for name, x in flatten({**variables, "params": params}, inference_tree.is_packed):
    if inference_tree.is_packed(x):
      kernels[name] = {"n": x.n, "m": x.m, "depth": x.depth}
      parts = {f"{name}.nm_{part}": getattr(x, part) for part in _PARTS}
      tensors |= {full: part for full, part in parts.items() if part is not None}
    else:
      tensors[name] = x
  header = {"rules": rules_text.describe(rules), "packed": kernels}
  safetensors_file.write(path, tensors, {ENTRY: json.dumps(header)})
  return report


def read(path: str | os.PathLike) -> tuple[dict[str, Any], str]:
  """Returns the variables in a packed file, packed kernels and arrays, and the text of its rules.

      variables, rules = read("F.safetensors")
      params = nms.inference_tree.prepare(variables["params"], rows=1)

  Args:
    path: of the file, on a local disk.

  Raises:
    ValueError: it is not a packed file; or a shape, an index, a bit of padding or a
      scale is not as `pack` makes it.
  """
  path = os.fspath(path)
  tensors, metadata = safetensors_file.read(path)
  arrays: dict[str, Any] = {name: np.asarray(x) for name, x in tensors.items()}
  try:
    header = json.loads(metadata[ENTRY])
    for name, kernel in header["packed"].items():
      parts = {part: arrays.pop(f"{name}.nm_{part}", None) for part in _PARTS}
      arrays[name] = NMPacked(**parts, **kernel, bits=width(kernel["m"]))
      # The C++ kernels trust shapes and indices, so this is the place that looks at them.
      check(arrays[name], name.removeprefix("params/"))
    return nested(arrays), header["rules"]
  except (ValueError, KeyError, TypeError, AttributeError) as e:
    why = f"{type(e).__name__}: {first_line(e)}"
    raise ValueError(f"{path!r} is no packed file, or damaged ({why}): pack again.") from e
