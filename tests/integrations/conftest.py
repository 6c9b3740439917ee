"""Trainers compute as their users let them."""

import jax
import pytest

pytest.register_assert_rewrite("conformance")  # what differs is in the message


@pytest.fixture(autouse=True)
def as_users_compute():
  """Trainers promote dtypes and ranks as jax does by default."""
  with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
    yield
