"""Zero and finite: every bit pattern of every dtype, against what its format says."""

import numpy as np
import pytest

import nm_sparsity_jax as nms

# name -> bits, patterns of zero, what is not finite: written down from the formats, not computed.
SIGNED = lambda width: {0, 1 << (width - 1)}
FORMATS = {
  "float4_e2m1fn": (4, SIGNED(4), set()),
  "float8_e3m4": (8, SIGNED(8), {s | x for s in (0, 0x80) for x in range(0x70, 0x80)}),
  "float8_e5m2": (8, SIGNED(8), {s | x for s in (0, 0x80) for x in range(0x7C, 0x80)}),
  "float8_e4m3fn": (8, SIGNED(8), {0x7F, 0xFF}),
  "float8_e4m3fnuz": (8, {0}, {0x80}),
  "float8_e8m0fnu": (8, set(), {0xFF}),
  **{f"{sign}int{width}": (width, {0}, set()) for sign in ("", "u") for width in (2, 4, 8)},
}


@pytest.mark.parametrize("name", FORMATS)
def test_verify_knows_each_pattern(name):
  """NaN in float8_e8m0fnu is not a zero, and -0.0 in float4_e2m1fn is one."""
  width, zeros, not_finite = FORMATS[name]
  values = np.arange(256, dtype=np.uint8).view(np.dtype(name))
  pattern = np.arange(256) % (1 << width)  # without the high bits of a short one
  is_used = np.array([p not in zeros for p in pattern])
  twice = {"a": {"kernel": np.stack([values, values])}}  # each column is one group: x, x
  rules = nms.configure.rules({".*": "1:2"}, "sr_ste", sparse_steps=1)
  (found,) = nms.verify(twice, rules).sites
  assert (found.bad_groups, found.density) == (is_used.sum(), is_used.mean())
  assert found.not_finite == 2 * sum(p in not_finite for p in pattern)
