"""A Core ML package without zeros, of the encoder of a T5 or of a network of images.

    nm-sparsity export runs/t5 model
    python examples/coreml.py model encoder.mlpackage --length 256

    nm-sparsity export runs/vit model.safetensors
    python examples/coreml.py model.safetensors vit.mlpackage --timm vit_base_patch16_224 \
      num_classes=10

It needs torch, coremltools, and transformers for a T5 or timm for images. It was run with torch
2.13.0, coremltools 9.0, transformers 5.24.0, timm 1.0.31 and numpy 2.4.6.

A package takes one example, in float32: `ids` [1, length] with 0 for padding, or `images`
[1, 3, size, size], normalized. It returns `encoded` or `logits`.
"""

import argparse
import ast
import pathlib

import coremltools as ct
import coremltools.optimize.coreml as optimize
import torch

LEAST = 1 / 16  # share of zeros from which on they are left out; a bit for each place costs 1 / 32


class Encoder(torch.nn.Module):
  """The encoder of an exported T5: ids [1, length] -> [1, length, d_model]."""

  def __init__(self, folder):
    import transformers

    super().__init__()
    self.net = transformers.T5EncoderModel.from_pretrained(folder, attn_implementation="eager")

  def forward(self, ids):
    # What is added to the scores. coremltools cannot convert how transformers makes it.
    mask = (ids == 0)[:, None, None, :].float() * torch.finfo(torch.float32).min
    return self.net(input_ids=ids, attention_mask=mask).last_hidden_state


def image_network(file, name, options):
  """Returns a network of timm with exported weights: images [1, 3, h, w] -> logits [1, classes]."""
  import timm

  return timm.create_model(name, checkpoint_path=str(file), **options)


def convert(module, example, takes, returns):
  """Converts a module to a package in float32, with its zeros."""
  program = torch.export.export(module.eval(), (example,)).run_decompositions({})
  for node in list(program.graph.nodes):
    if node.target is torch.ops.aten.alias.default:  # coremltools does not know it: it is x -> x
      node.replace_all_uses_with(node.args[0])
      program.graph.erase_node(node)
  return ct.convert(
    program,
    inputs=[ct.TensorType(takes, example.shape, example.numpy().dtype.type)],
    outputs=[ct.TensorType(returns)],
    compute_precision=ct.precision.FLOAT32,
    minimum_deployment_target=ct.target.iOS16,  # the first that has sparse weights
  )


def without_zeros(package):
  """Returns the package that keeps of arrays with many zeros the values, and a bit a place."""
  # At a threshold of 0 nothing but zeros goes.
  zeros = optimize.OpThresholdPrunerConfig(
    threshold=0.0, minimum_sparsity_percentile=LEAST, weight_threshold=0
  )
  return optimize.prune_weights(package, optimize.OptimizationConfig(global_config=zeros))


def sparse_arrays(package):
  """Returns the names of the arrays that a package holds without zeros."""
  (block,) = package.get_spec().mlProgram.functions["main"].block_specializations.values()
  return [op.outputs[0].name for op in block.operations if op.type == "constexpr_sparse_to_dense"]


def option(text):
  """Splits NAME=VALUE; a value that is not a literal is a string."""
  name, _, value = text.partition("=")
  try:
    return name, ast.literal_eval(value)
  except (SyntaxError, ValueError):
    return name, value


def main(argv=None):
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("exported", type=pathlib.Path, help="a folder of a T5, or F.safetensors")
  parser.add_argument("out", type=pathlib.Path, help="F.mlpackage")
  parser.add_argument("--length", type=int, default=128, help="ids that a T5 takes")
  parser.add_argument("--size", type=int, default=224, help="height and width of images")
  parser.add_argument(
    "--timm", nargs="+", metavar=("NAME", "KEY=VALUE"), help="arguments of timm.create_model"
  )
  args = parser.parse_args(argv)
  if args.out.exists():
    parser.error(f"{args.out} is there already")
  if args.timm:
    module = image_network(args.exported, args.timm[0], dict(map(option, args.timm[1:])))
    images = torch.zeros(1, 3, args.size, args.size)
    package = convert(module, images, "images", "logits")
  else:
    ids = torch.ones(1, args.length, dtype=torch.int32)
    package = convert(Encoder(args.exported), ids, "ids", "encoded")
  sparse = without_zeros(package)
  sparse.save(str(args.out))
  count = len(sparse_arrays(sparse))
  print(f"{args.out}: {size_of(args.out):,} bytes; {count} arrays are stored without zeros")


def size_of(folder):
  return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


if __name__ == "__main__":
  main()
