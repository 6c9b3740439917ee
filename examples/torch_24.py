"""Torch's 2:4 storage of n:m weights: what fits it, and what it loses without a word.

    python examples/torch_24.py

It stores a weight of each pattern, reads it back, and compares the bits. It needs torch, and was
run with 2.13.0. Torch's 2:4 kernels run on CUDA alone; no GPU ran this.
"""

import argparse

import jax
import numpy as np
import torch
from torch.sparse import _semi_structured_conversions as conversions

import nm_sparsity_jax as nms

CASES = ("2:4", "1:4", "1:8", "2:8", "4:8", "3:8", "2:4 float32")
FITS = (torch.bfloat16, torch.float16, torch.int8)


def rules_of(pattern):
  return nms.Rules({".*": nms.recipe("sr_ste", pattern=pattern, phases=nms.Phases(total=1))})


def torch_weights(params, dtype):
  """Returns our kernels {name: (in, out)} as torch's weights (out, in)."""
  return {k: torch.from_numpy(np.array(w.T, np.float32)).to(dtype) for k, w in params.items()}


def check(params, dtype):
  """Refuses what torch's 2:4 storage does not hold."""
  if dtype not in FITS:
    raise ValueError(f"of {dtype} torch keeps 1 weight of 2: take one of {FITS}.")
  # Torch looks at groups of 4, whatever was trained: 1:8 is 2:4 too, and 4:8 is not.
  report = nms.verify(params, rules_of("2:4"))
  if bad := [f"{p.bad_groups:,} groups of {p.path!r}" for p in report.sites if p.bad_groups]:
    raise ValueError(
      f"torch keeps 2 weights of 4, and {' and '.join(bad)} have more: train a pattern with at "
      "most 2 in any 4, such as 2:4, 2:8 or 1:8."
    )


def stored(weights):
  """Returns (values, indices) of each weight, without a check.

  Torch's own Python makes them. On a GPU your module takes them from torch as a weight:

      layer.weight = torch.nn.Parameter(torch.sparse.to_sparse_semi_structured(weight.cuda()))
  """
  return {k: conversions.sparse_semi_structured_from_dense_cutlass(w) for k, w in weights.items()}


def main():
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("cases", nargs="*", default=CASES, help="such as 1:16 or '2:4 float16'")
  start = {"kernel": jax.random.normal(jax.random.key(0), (1024, 512))}
  for case in parser.parse_args().cases:
    pattern, _, dtype = case.partition(" ")
    dtype = getattr(torch, dtype or "bfloat16")
    # The zeros that training by nms.sparse leaves, without the training.
    params = nms.finalize(start, rules_of(pattern), 1)
    weights = torch_weights(params, dtype)
    storage, weight = stored(weights)["kernel"], weights["kernel"]
    back = conversions.sparse_semi_structured_to_dense_cutlass(*storage)
    lost = ((back != weight).sum() / (weight != 0).sum()).item()
    try:
      check(params, dtype)
    except ValueError as error:
      print(f"{case}: {lost:.0%} lost. Refused: {error}")
      continue
    smaller = weight.nbytes / sum(x.nbytes for x in storage)
    print(f"{case}: {lost:.0%} lost, {smaller:.2f} times smaller")


if __name__ == "__main__":
  main()
