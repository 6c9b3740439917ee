"""What tests of weights share: arrays that another library made."""

import functools
import json

import numpy as np


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
    told = json.loads(self.arrays[f"{name}/names"].tobytes())
    return {key: tuple(shape) for key, shape in told.items()}

  def tensors(self, name):
    """Hashed weights for these names."""
    return {key: self.module.values(key, shape) for key, shape in self.names(name).items()}
