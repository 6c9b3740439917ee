"""What tests compare with, and what they draw: masks by sorting, arrays of another library."""

import functools
import importlib
import importlib.util
import json
import math
import pathlib
import re
import sys

import jax
import numpy as np
import pytest

from nm_sparsity_jax.core.trees import flatten


def magnitude(x):
  """|x| in float64, which holds every narrower float exactly."""
  with np.errstate(invalid="ignore"):  # a signalling NaN
    return np.abs(np.asarray(x).astype(np.float64))


def ranks(scores, m, axis=0, parent=None):
  """How many of its group of `m` come before each score; the mask of the n largest is `ranks < n`.

  It sorts by (dropped by the parent, NaN, -value, index).
  """
  with np.errstate(invalid="ignore"):
    scores = np.asarray(scores).astype(np.float64)
  axes = [a % scores.ndim for a in (axis if isinstance(axis, tuple) else (axis,))]
  order = [a for a in range(scores.ndim) if a not in axes] + axes
  shape = [scores.shape[a] for a in order]
  groups = lambda x: x.transpose(order).reshape(-1, m)
  value = groups(scores)
  dropped = np.zeros(value.shape, bool) if parent is None else ~groups(np.asarray(parent))
  nan = np.isnan(value) & ~dropped
  value = np.where(nan | dropped, 0.0, value)
  index = np.broadcast_to(np.arange(m), value.shape)
  rank = np.argsort(np.lexsort((index, -value, nan, dropped), axis=-1), axis=-1)
  return rank.reshape(shape).transpose(np.argsort(order))


def soft(w, n, m):
  """S(W) of S-STE along axis 0, by sorting."""
  groups = np.asarray(w, np.float32).reshape(-1, m, w.shape[1])
  size = np.abs(groups)
  t = np.sort(size, 1)[:, m - n - 1, None] if n < m else 0
  with np.errstate(invalid="ignore"):  # inf - inf
    return np.where(size <= t, np.float32(0), np.sign(groups) * (size - t)).reshape(w.shape)


def check_timeline(recipe, patterns, decays):
  """The timeline covers a run, says which pattern and D each step has, and when both are final."""
  segments = recipe.timeline(16)
  starts = [s.start for s in segments]
  assert starts == sorted({*starts, 0})
  assert [s.stop for s in segments] == [*starts[1:], recipe.phases.total]
  for s in segments:
    assert math.isclose(decays[s.start], s.decay_start, rel_tol=1e-5, abs_tol=0), s
    low, high = sorted((s.decay_start, s.decay_stop))
    for step in range(s.start, s.stop):
      d, pattern = decays[step], patterns[step]
      # D may leave 0 only for the segment that follows.
      assert (d > 0) == (s.decay_start > 0) and low - 1e-6 <= d <= high + 1e-6, step
      assert s.pattern == pattern, step
  settled = [not d and p == recipe.pattern for d, p in zip(decays, patterns, strict=False)]
  *_, first = [i for i in range(recipe.phases.total) if not settled[i]] or [-1]
  assert recipe.target_from(16) == first + 1


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


def assert_close(got, want, tolerance=1e-5):
  """Two trees have the same numbers, to a part of the largest of each array: one may be near 0."""
  got, want = dict(flatten(got)), dict(flatten(want))
  assert list(got) == list(want)
  for key, x in want.items():
    x, found = np.asarray(x, np.float64), np.asarray(got[key], np.float64)
    atol = tolerance * np.abs(x).max(initial=0)
    np.testing.assert_allclose(found, x, rtol=0, atol=atol, err_msg=key)


def drawn(shapes, scale=1 / 4, seed=0):
  """Numbers for a tree of shapes: normal, and around 1 for what scales and shifts.

  jax.random would compile anew for every shape.
  """
  rng = np.random.default_rng(seed)

  def draw(x):
    z = rng.normal(size=x.shape)
    return (scale * z if len(x.shape) > 1 else 1 + z / 10).astype(x.dtype)

  return jax.tree.map(draw, shapes)


def imported(*names):
  """Modules of libraries to compare with; skips the test where one of them is missing.

  CONTRIBUTING.md says what installs them: the extra torch.
  """
  needed = [*names, "torchvision"] if "timm" in names else names
  if missing := [name for name in needed if importlib.util.find_spec(name) is None]:
    pytest.skip(f"no {', '.join(missing)} here: pip install -e '.[torch]'")
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
