"""TPUs that are not there: their chips, for which libtpu compiles.

"v5e:2x2" -> [devices] -> shardings -> jax.jit(f).lower(...).compile() -> compiled.account
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from nm_sparsity_jax.core.text import first_line

# libtpu asks the machine for these unless they are set, and waits for an answer.
_MACHINE = {
  "TPU_SKIP_MDS_QUERY": "1",
  "TPU_ACCELERATOR_TYPE": "v5litepod-4",
  "TPU_WORKER_HOSTNAMES": "localhost",
}


def devices(name: str) -> Sequence[Any]:
  """Returns the chips of a topology, which need not exist, for shardings and meshes.

      devices = topology.devices("v5e:2x2")
      mesh = jax.sharding.Mesh(np.reshape(devices, (2, 2)), ("data", "model"))

  Args:
    name: a topology as libtpu calls it, such as 'v5e:4x4'.

  Raises:
    ValueError: libtpu is missing, does not know the name, fits another JAX, or is held by another
      process.
  """
  from jax.experimental import topologies

  for variable, value in _MACHINE.items():
    os.environ.setdefault(variable, value)
  try:
    return topologies.get_topology_desc(name, platform="tpu").devices
  except Exception as e:  # libtpu raises its own kinds
    raise ValueError(
      f"topology {name!r}: libtpu refuses it ({first_line(e)}). It knows v5e:2x2, v5p:2x2x1, "
      "v4:2x2x1, v6e:2x2 and larger ones, and nm-sparsity doctor --for tpu says whether it fits "
      "this JAX. Where no other process holds libtpu, delete /tmp/libtpu_lockfile."
    ) from e
