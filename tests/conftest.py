"""Eight virtual CPU devices, strict promotion, and how hard hypothesis works."""

import os
import sys

# Before jax is imported: it reads these once.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
  os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
).strip()
# XLA's pool has a thread per core. On two cores, two devices that wait in a reduction for their
# partners leave no thread to run them, and XLA ends the process after 40 seconds.
os.environ.setdefault("PJRT_NPROC", "32")

import hypothesis
import jax
import pytest

# Silent dtype and broadcasting mistakes fail. Code that is not ours relaxes this at that call:
#   with jax.numpy_dtype_promotion("standard"): ...
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# More: HYPOTHESIS_MAX_EXAMPLES=1000 make test. In CI the same examples come every time.
hypothesis.settings.register_profile(
  "nm",
  deadline=None,  # the first example of a shape compiles
  derandomize="CI" in os.environ,
  max_examples=int(os.environ.get("HYPOTHESIS_MAX_EXAMPLES", "12")),
)
hypothesis.settings.load_profile("nm")


@pytest.fixture(autouse=True)
def the_same_place():
  """The working folder and `sys.path`, to which commands add it: gin looks in both."""
  path, folder = list(sys.path), os.getcwd()
  yield
  sys.path[:] = path
  os.chdir(folder)
