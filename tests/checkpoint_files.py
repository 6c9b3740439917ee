"""What the files of a checkpoint hold, read by Orbax alone, and whether two hold the same."""

import pathlib

import jax
import numpy as np

from nm_sparsity_jax.core.trees import flatten


def load(checkpoint):
  """Returns the nested arrays of a checkpoint's folder."""
  import orbax.checkpoint as ocp

  reader, path = ocp.PyTreeCheckpointer(), pathlib.Path(checkpoint) / "state"
  shapes = reader.metadata(path).item_metadata.tree
  as_numpy = lambda leaf: ocp.RestoreArgs(restore_type=np.ndarray)
  return reader.restore(path, restore_args=jax.tree.map(as_numpy, shapes))


def read(folder, number):
  """Returns path -> array of one checkpoint of a run."""
  return dict(flatten(load(pathlib.Path(folder) / f"checkpoint_{number}")))


def assert_same(got, want):
  """Compares keys, values and dtypes."""
  assert got.keys() == want.keys()
  for key in want:
    np.testing.assert_array_equal(got[key], want[key], err_msg=key)
    assert got[key].dtype == want[key].dtype
