"""A torch module as a Core ML package whose zeros are not stored, and the package read again.

module, example -> [convert] -> F.mlpackage, bytes with zeros
F.mlpackage -> Package -> names of sparse arrays; array with its zeros; bytes
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import tempfile
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np

SUFFIX = ".mlpackage"
_PACKAGES = ("torch", "coremltools")
_SPARSE = "constexpr_sparse_to_dense"
_LEAST = 1 / 16  # share of zeros from which on they are left out; a bit for each place costs 1 / 32


def require() -> None:
  """Refuses to go on without the extra.

  Raises:
    ModuleNotFoundError: torch or coremltools is not there; the message says what brings them.
  """
  for name in _PACKAGES:
    try:
      with _quiet():  # coremltools warns of what it lacks outside macOS
        importlib.import_module(name)
    except ImportError as e:
      raise ModuleNotFoundError(
        f"Core ML needs {name}: pip install 'nm-sparsity-jax[coreml]' ({e})", name=name
      ) from e


def load(module: Any, tensors: Mapping[str, np.ndarray]) -> None:
  """Fills a torch module with tensors of its names.

  Raises:
    ValueError: one is missing or has another shape.
  """
  torch: Any = importlib.import_module("torch")
  for name, parameter in module.named_parameters():
    if name not in tensors or tensors[name].shape != tuple(parameter.shape):
      found = tensors[name].shape if name in tensors else "none"
      raise ValueError(f"{name!r} should be {tuple(parameter.shape)}, and is {found}.")
    with torch.no_grad():
      parameter.copy_(torch.from_numpy(np.array(tensors[name], np.float32)))


def run(module: Any, x: np.ndarray) -> np.ndarray:
  """Returns what a torch module makes of an array."""
  torch: Any = importlib.import_module("torch")
  with torch.no_grad():
    return module(torch.from_numpy(x)).numpy()


def folded(module: Any) -> dict[str, np.ndarray]:
  """Returns what coremltools computes of parameters of a module: name -> the array it keeps."""
  torch: Any = importlib.import_module("torch")
  with torch.no_grad():
    return {name: array.numpy() for name, array in module.folded().items()}


def convert(module: Any, example: np.ndarray, given: str, made: str, out: str) -> int:
  """Traces a module and writes a package in float32, without the zeros of arrays that have many.

  Args:
    module: of torch.
    example: what it takes, of the only shape that the package will take.
    given: name of what it takes.
    made: name of what it returns.
    out: F.mlpackage, which must not be there.

  Returns:
    The bytes of the same package with its zeros.
  """
  torch: Any = importlib.import_module("torch")
  with _quiet():
    ct: Any = importlib.import_module("coremltools")
    optimize: Any = importlib.import_module("coremltools.optimize.coreml")
    with torch.no_grad():
      traced = torch.jit.trace(module, torch.from_numpy(example))
    dense = ct.convert(
      traced,
      inputs=[ct.TensorType(given, example.shape, example.dtype.type)],
      outputs=[ct.TensorType(made)],
      compute_precision=ct.precision.FLOAT32,
      minimum_deployment_target=ct.target.iOS16,  # the first that has sparse weights
    )
    found = optimize.get_weights_metadata(dense, weight_threshold=0)
    names = [name for name, w in found.items() if w.val.ndim > 1 and w.sparsity >= _LEAST]
    # At a threshold of 0 nothing but zeros goes.
    alone = optimize.OpThresholdPrunerConfig(
      threshold=0.0, minimum_sparsity_percentile=0.0, weight_threshold=0
    )
    config = optimize.OptimizationConfig(op_name_configs=dict.fromkeys(names, alone))
    sparse = optimize.prune_weights(dense, config) if names else dense
    with tempfile.TemporaryDirectory() as folder:
      whole = os.path.join(folder, f"dense{SUFFIX}")
      dense.save(whole)
      size = bytes_of(whole)
    sparse.save(out)
  return size


def bytes_of(path: str) -> int:
  """Returns the bytes of all files in a folder."""
  return sum(
    os.path.getsize(os.path.join(top, file)) for top, _, files in os.walk(path) for file in files
  )


class Package:
  """The weights of a Core ML package, as coremltools reads them.

      Package("model.mlpackage").array("blocks.0.mlp.fc1.weight")

  Attributes:
    path: of the folder.
    bytes: of it.
    sparse: names of arrays that are stored without zeros, in words of the package.
  """

  def __init__(self, path: str | os.PathLike):
    self.path = os.fspath(path)
    self.bytes = bytes_of(self.path)
    with _quiet():
      ct: Any = importlib.import_module("coremltools")
      optimize: Any = importlib.import_module("coremltools.optimize.coreml")
      model = ct.models.MLModel(self.path, skip_model_load=True)
      main = model.get_spec().mlProgram.functions["main"]
      (block,) = main.block_specializations.values()
      sparse = [op.outputs[0].name for op in block.operations if op.type == _SPARSE]
      self.sparse = tuple(sorted(name.removesuffix("_sparsified") for name in sparse))
      whole = optimize.decompress_weights(model) if sparse else model
      self._arrays = {
        name.removesuffix("_sparsified"): np.asarray(w.val)
        for name, w in optimize.get_weights_metadata(whole, weight_threshold=0).items()
      }

  def array(self, name: str) -> np.ndarray:
    """Returns an array with its zeros, by the name that it has in the torch module.

    Raises:
      KeyError: it is not there.
    """
    return self._arrays[name_of(name)]

  def holds(self, array: np.ndarray) -> bool:
    """Returns whether an array with these bits is in the package, by whatever name."""
    wanted = array.tobytes()
    return any(a.size == array.size and a.tobytes() == wanted for a in self._arrays.values())


def name_of(name: str) -> str:
  """Returns the name in a package of a parameter of a torch module.

  >>> name_of("blocks.0.mlp.fc1.weight")
  'blocks_0_mlp_fc1_weight'
  """
  return name.replace(".", "_")


@contextlib.contextmanager
def _quiet():
  """Keeps coremltools and torch from telling of versions, of progress and of what they call."""
  level = logging.root.manager.disable
  logging.disable(logging.WARNING)
  silent = open(os.devnull, "w", encoding="utf-8")
  try:
    with silent, warnings.catch_warnings(), contextlib.redirect_stderr(silent):
      warnings.simplefilter("ignore")
      yield
  finally:
    logging.disable(level)
