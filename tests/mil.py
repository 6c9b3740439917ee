"""Runs the program of a Core ML package in numpy, in float64: Core ML itself runs on no Linux.

    F.mlpackage, what it takes -> [run] -> what it returns

coremltools reads the program. Each op is written here by coremltools' description of it. An op that
the packages of this project do not have is refused, and so is an input of an op that is not read.
"""

import importlib
import math
from typing import Any

import numpy as np


def run(path, x):
  """Returns what the program of a package makes of its only input."""
  coremltools: Any = importlib.import_module("coremltools")  # checkers of types do not have it
  load: Any = importlib.import_module("coremltools.converters.mil.frontend.milproto.load")
  model = coremltools.models.MLModel(str(path), skip_model_load=True)
  spec = model.get_spec()
  program = load.load(spec, spec.specificationVersion, model.weights_dir)
  (function,) = program.functions.values()
  (name,) = function.inputs
  values = {name: _wide(x)}
  for op in function.operations:
    if op.op_type == "const":
      value = _wide(op.outputs[0].val)
    elif op.op_type == "constexpr_sparse_to_dense":
      value = _wide(op.materialized_val_inference())
    else:
      given = {key: _value(var, values) for key, var in op.inputs.items() if var is not None}
      value = OPS[op.op_type](**given)
    several = len(op.outputs) > 1
    for out, made in zip(op.outputs, value if several else [value], strict=True):
      values[out.name] = made
  return values[function.outputs[0].name]


def _wide(x):
  is_float = isinstance(x, np.ndarray | np.generic) and x.dtype == np.float32
  return x.astype(np.float64) if is_float else x


def _value(var, values):
  return [values[v.name] for v in var] if isinstance(var, list | tuple) else values[var.name]


def _conv(x, weight, bias, strides, pad_type, pad, dilations, groups):
  """Patches that do not overlap, alone."""
  side = weight.shape[2:]
  assert tuple(strides) == side and pad_type == "valid" and not any(pad)
  assert groups == 1 and set(dilations) == {1}
  batch, channels, height, width = x.shape
  h, w = side
  parts = x.reshape(batch, channels, height // h, h, width // w, w)
  return np.einsum("bcyhxw,ochw->boyx", parts, weight) + bias[:, None, None]


def _pad(x, pad, mode, constant_val):
  assert mode == "constant"
  widths = np.reshape(pad, (-1, 2))
  widths = [(0, 0)] * (x.ndim - len(widths)) + [tuple(map(int, w)) for w in widths]
  return np.pad(x, widths, constant_values=constant_val)


def _layer_norm(x, axes, gamma, beta, epsilon):
  axes = tuple(axes)
  centred = x - x.mean(axes, keepdims=True)
  return centred / np.sqrt((centred**2).mean(axes, keepdims=True) + epsilon) * gamma + beta


def _matmul(x, y, transpose_x=False, transpose_y=False):
  turn = lambda z, needed: np.swapaxes(z, -1, -2) if needed else z
  return turn(x, transpose_x) @ turn(y, transpose_y)


def _softmax(x, axis):
  e = np.exp(x - x.max(axis, keepdims=True))
  return e / e.sum(axis, keepdims=True)


def _gelu(x, mode="EXACT"):
  if mode == "TANH_APPROXIMATION":
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
  assert mode == "EXACT"
  return 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def _split(x, split_sizes, axis):
  return np.split(x, np.cumsum(split_sizes)[:-1], axis)


def _slice(x, begin, end, end_mask=None, squeeze_mask=None):
  mask = lambda m: [False] * x.ndim if m is None else m
  at = []
  for b, e, whole, alone in zip(begin, end, mask(end_mask), mask(squeeze_mask), strict=True):
    at.append(int(b) if alone else slice(int(b), None if whole else int(e)))
  return x[tuple(at)]


def _gather(x, indices, axis, batch_dims=0, validate_indices=False):
  assert not batch_dims and not validate_indices
  return np.take(x, indices, axis)


OPS = {
  "add": lambda x, y: x + y,
  "cast": lambda x, dtype: x.astype({"fp32": np.float64, "int32": np.int32}[dtype]),
  "conv": _conv,
  "equal": lambda x, y: x == y,
  "expand_dims": lambda x, axes: np.expand_dims(x, tuple(map(int, axes))),
  "gather": _gather,
  "gelu": _gelu,
  "layer_norm": _layer_norm,
  "linear": lambda x, weight, bias: x @ weight.T + bias,
  "matmul": _matmul,
  "mul": lambda x, y: x * y,
  "pad": _pad,
  "reduce_mean": lambda x, axes, keep_dims: x.mean(tuple(axes), keepdims=bool(keep_dims)),
  "relu": lambda x: np.maximum(x, 0),
  "reshape": lambda x, shape: x.reshape(shape),
  "rsqrt": lambda x, epsilon: 1 / np.sqrt(x + epsilon),
  "slice_by_index": _slice,
  "softmax": _softmax,
  "split": _split,
  "transpose": lambda x, perm: x.transpose(perm),
}
