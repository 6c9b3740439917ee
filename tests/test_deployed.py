"""Whole trees with packed kernels: what is packed, and networks that run on them."""

import doctest

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nm_sparsity_jax as nms
from nm_sparsity_jax import deployed

pytestmark = pytest.mark.usefixtures("short_runs")
PHASES = nms.Phases(total=1)


def one_shot(pattern):
  return nms.recipe("sr_ste", pattern=pattern, phases=PHASES)


def shape(*axes, dtype="float32"):
  return jax.ShapeDtypeStruct(axes, jnp.dtype(dtype))


# --- what is packed -------------------------------------------------------------------------------


def test_what_is_packed_and_why_not():
  shapes = {
    "a/kernel": shape(16, 8),
    "a/bias": shape(8),
    "narrow/kernel": shape(16, 8, dtype="bfloat16"),
    "all/kernel": shape(16, 8),
    "out/kernel": shape(16, 8),
    "table/embedding": shape(16, 8),
    "conv/kernel": shape(3, 3, 16, 8),
    "off/kernel": shape(16, 8),
  }
  rules = nms.Rules(
    {
      "a/kernel|conv/kernel|table/.*|out/.*": one_shot("1:4"),
      "narrow/.*": one_shot("7:8"),
      "all/.*": one_shot("4:4"),
      "off/.*": nms.recipe("dense"),
    },
    axes={"out/kernel": 1, "table/.*": 0, "conv/kernel": 2},
  )
  with pytest.warns(UserWarning, match="keeps|outputs"):
    found = deployed.decide(shapes, rules)
  assert list(found.packed) == ["a/kernel", "conv/kernel"]
  assert found.packed["a/kernel"].groups.axes == (0,)
  assert [bool(found.in_network(path)) for path in found.packed] == [False, True]
  assert found.dense == {
    "a/bias": "no rule makes it sparse",
    "narrow/kernel": "7:8 takes 280 bytes packed, and 256 with its zeros",
    "all/kernel": "4:4 keeps every weight",
    "out/kernel": "its groups lie along axis 1, and its layer contracts axis 0",
    "table/embedding": "a table or vector, and only kernels are packed",
    "off/kernel": "no rule makes it sparse",
  }
  assert "dense  all/kernel: 4:4 keeps every weight" in str(found)
  assert deployed.decide(shapes, rules, "int8").dtypes["a/kernel"] == "int8"


def test_a_dtype_that_no_packed_weight_has_is_refused():
  rules = nms.Rules({"a/kernel": one_shot("1:4")})
  with pytest.raises(ValueError, match=r"dtype='int4': packed values are float32, bfloat16"):
    deployed.decide({"a": {"kernel": shape(16, 8)}}, rules, "int4")


def test_levels_of_structure_are_packed_by_the_last_one():
  rules = nms.Rules(
    {"a/kernel": nms.recipe("sdgf_stepwise", pattern="1:8", phases=nms.Phases(total=9))}
  )
  found = deployed.decide({"a": {"kernel": np.zeros((16, 8), np.float32)}}, rules)
  assert str(found.packed["a/kernel"].pattern) == "1:8"


def test_examples():
  assert doctest.testmod(deployed).failed == 0
