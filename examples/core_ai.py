"""A Core AI model of an n:m network, without its zeros, for Apple's systems from 27 on.

    python examples/core_ai.py 2>/dev/null

It writes a feed-forward network of each pattern, prints the bytes of its file, and runs the file in
the runtime that coreai-core brings for Linux. No Apple device ran one.
It needs torch, coreai-opt, coreai-torch and coreai-core, and was run with 2.13.0, 0.4.0, 0.4.3 and
1.0.0b3.
"""

import argparse
import asyncio
import pathlib
import tempfile

import coreai.runtime
import jax
import numpy as np
import torch
from coreai.authoring import AIModelAsset
from coreai_opt.coreai_utils import sparsify_weights
from coreai_torch import TorchConverter, get_decomp_table

import nm_sparsity_jax as nms

# The last one has its groups along the outputs, where they serve no one.
CASES = ("dense", "2:4", "1:4", "1:8", "2:4 outputs")


def network(params):
  """Returns the network in torch, whose weights are (out, in)."""

  def linear(kernel):
    layer = torch.nn.Linear(*kernel.shape, bias=False)
    layer.weight = torch.nn.Parameter(torch.from_numpy(np.array(kernel.T)))
    return layer

  up, down = (linear(params[name]["kernel"]) for name in ("up", "down"))
  return torch.nn.Sequential(up, torch.nn.ReLU(), down).eval()


def rules_of(pattern, axis=0):
  recipe = nms.recipe("sr_ste", pattern=pattern, phases=nms.Phases(total=1))
  return nms.Rules({".*/kernel": recipe}, axes={".*/kernel": axis})


def without_zeros(program, params, pattern):
  """Returns a Core AI program whose weights are stored without their zeros."""
  # coreai-opt drops weights of a group that is too full, and says nothing.
  report = nms.verify(params, rules_of(pattern))
  if bad := sum(p.bad_groups for p in report.sites):
    raise ValueError(f"{bad:,} groups are not {pattern} along the inputs: coreai-opt would prune.")
  kept = nms.NM.parse(pattern)
  return sparsify_weights(  # it counts the zeros
    program, target_sparsity=None, n_m_ratio=(kept.m - kept.n, kept.m)
  )


def convert(module, x):
  """Returns the Core AI program of a module of torch."""
  exported = torch.export.export(module, (torch.from_numpy(x),))
  converter = TorchConverter()
  converter.add_exported_program(exported.run_decompositions(get_decomp_table()))
  return converter.to_coreai()


async def run(asset, x):
  """Returns what a stored model computes."""
  async with asset.executable() as model:
    function = model.load_function("main")
    (takes,), (gives,) = function.desc.input_names, function.desc.output_names
    return (await function({takes: coreai.runtime.NDArray(x)}))[gives].numpy()


def main():
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("cases", nargs="*", default=CASES, help="such as 1:16 or '2:4 outputs'")
  up, down, inputs = jax.random.split(jax.random.key(0), 3)
  make = jax.nn.initializers.he_normal()
  start = {"up": {"kernel": make(up, (256, 1024))}, "down": {"kernel": make(down, (1024, 256))}}
  x = np.asarray(jax.random.normal(inputs, (1, 256)))
  dense_size = 0
  print("pattern           bytes  smaller  error of the output")
  for case in parser.parse_args().cases:
    pattern, _, outputs = case.partition(" ")
    params = start
    if pattern != "dense":  # the zeros that training by nms.sparse leaves, without the training
      params = nms.finalize(start, rules_of(pattern, axis=1 if outputs else 0), 1)
    program = convert(network(params), x)
    try:
      if pattern != "dense":
        program = without_zeros(program, params, pattern)
    except ValueError as error:
      print(f"{case:12} refused: {error}")
      continue
    with tempfile.TemporaryDirectory() as folder:
      path = pathlib.Path(folder, "network.aimodel")
      program.save_asset(path)
      size = sum(file.stat().st_size for file in path.rglob("*"))
      y = asyncio.run(run(AIModelAsset.load(path), x))
    dense_size = dense_size or size
    ours = jax.nn.relu(x @ params["up"]["kernel"]) @ params["down"]["kernel"]
    print(f"{case:12} {size:10,} {dense_size / size:8.2f}  {abs(y - ours).max():.0e}", flush=True)


if __name__ == "__main__":
  main()
