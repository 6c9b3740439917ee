"""The examples in docstrings of the package are true."""

import doctest
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkout import ROOT

import nm_sparsity_jax as nms

FILES = [file.relative_to(ROOT) for file in sorted((ROOT / "nm_sparsity_jax").rglob("*.py"))]
MODULES = [".".join(file.with_suffix("").parts) for file in FILES if ">>> " in file.read_text()]
NAMES = {"jax": jax, "jnp": jnp, "np": np, "nms": nms, "NM": nms.NM}
NAMES |= {"Phases": nms.Phases, "pack": nms.packed.pack}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MODULES)
def test_examples(name, as_users_compute):
  try:
    module = importlib.import_module(name)
  except ImportError as e:
    pytest.skip(str(e))
  found = doctest.testmod(module, extraglobs=NAMES, optionflags=doctest.ELLIPSIS)
  assert not found.failed
