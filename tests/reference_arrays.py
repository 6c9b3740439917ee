"""What tests of weights share: arrays that another library made, and the library where it is."""

import functools
import importlib
import importlib.util
import json
import pathlib
import re
import sys

import numpy as np
import pytest

from nm_sparsity_jax.core.trees import flatten


class Reference:
  """What another library computed, by a module such as vision_reference.py.

  Attributes:
    arrays: name -> array.
  """

  def __init__(self, module):
    self.module = module

  @functools.cached_property
  def arrays(self):
    with np.load(self.module.FILE) as file:
      return dict(file)

  def names(self, name):
    """The names of a network's weights there, and their shapes."""
    found = json.loads(self.arrays[f"{name}/names"].tobytes())
    return {key: tuple(shape) for key, shape in found.items()}

  def tensors(self, name):
    """Hashed weights for these names."""
    return {key: self.module.values(key, shape) for key, shape in self.names(name).items()}

  def compare(self, *libraries):
    """Computes all arrays anew."""
    made = self.module.make(*libraries)
    assert set(made) == set(self.arrays)
    for key, x in made.items():
      np.testing.assert_allclose(x, self.arrays[key], rtol=1e-4, atol=1e-5, err_msg=key)


def assert_same(got, want):
  """Two trees have the same bits."""
  got, want = dict(flatten(got)), dict(flatten(want))
  assert set(got) == set(want)
  for key, x in want.items():
    assert got[key].dtype == x.dtype and got[key].shape == x.shape, key
    assert np.asarray(got[key]).tobytes() == np.asarray(x).tobytes(), key


def imported(*names):
  """Modules of libraries to compare with; skips the test where one of them is missing.

  CONTRIBUTING.md says what installs them: the extras vision-dev and hf-dev.
  """
  needed = [*names, "torchvision"] if "timm" in names else names
  if missing := [name for name in needed if importlib.util.find_spec(name) is None]:
    pytest.skip(f"no {', '.join(missing)} here: pip install -e '.[vision-dev,hf-dev]'")
  if "timm" in names and "torchvision" not in sys.modules:
    _declare(importlib.import_module("torch"))
  return [importlib.import_module(name) for name in names]


def _declare(torch):
  # timm imports torchvision, whose wheel is built against CUDA. Without CUDA its library of kernels
  # does not load, and the shapes that it then tells torch of belong to no operator. No model here
  # needs one of them, so they are declared first, by name alone.
  folder = pathlib.Path(importlib.util.find_spec("torchvision").origin).parent
  text = (folder / "_meta_registrations.py").read_text("utf-8")
  names = re.findall(r'register_(?:fake|meta)\("(?:torchvision::)?(\w+)"', text)
  for name in sorted(set(names)):
    if not hasattr(torch.ops.torchvision, name):
      torch.library.define(f"torchvision::{name}", "(Tensor x) -> Tensor")
