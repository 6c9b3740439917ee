"""Packed files: the same bits back, and no file that the kernels cannot trust."""

import json

import jax
import numpy as np
import pytest
import test_packed

import nm_sparsity_jax as nms
from nm_sparsity_jax.core import packed
from nm_sparsity_jax.core.packed import NMPacked
from nm_sparsity_jax.core.trees import flatten, nested
from nm_sparsity_jax.deploy import packed_file, safetensors_file
from nm_sparsity_jax.training import rules_text

WIDE, TWO, PAD = (f"params/{name}/kernel" for name in ("wide", "two", "padded"))
# name -> shape, pattern: indices of 4, of 2, and of 8 bits with 27 rows of padding.
KERNELS = {WIDE: ((64, 5), "1:8"), TWO: ((16, 7), "2:4"), PAD: ((37, 3), "3:32")}


PLACES = {name.removeprefix("params/"): pattern for name, (_, pattern) in KERNELS.items()}
RULES = nms.configure.rules(PLACES, "sr_ste", sparse_steps=1, indivisible="pad")


def arrays_of(dtype=np.float32, any_bits=True):
  """Arrays by their names: kernels of any bits, or of finite numbers; and what stays dense."""
  made = {}
  for i, (name, (shape, pattern)) in enumerate(KERNELS.items()):
    if any_bits:
      made[name] = test_packed.weight(i, shape, nms.NM.parse(pattern), dtype)
    else:
      made[name] = test_packed.normal(i, shape, pattern, dtype)
  made["params/wide/bias"] = np.arange(5, dtype=dtype)
  made["batch_stats/bn/mean"] = np.arange(4, dtype=np.float32)
  return made


def written(tmp_path, arrays, dtype=None):
  path = tmp_path / "a.safetensors"
  report = packed_file.write(path, nested(arrays), RULES, dtype)
  return path, report


def leaves_of(path):
  """name -> packed kernel or array."""
  return dict(flatten(packed_file.read(path)[0], lambda x: isinstance(x, NMPacked)))


@pytest.mark.parametrize("dtype", test_packed.FLOATS)
def test_the_same_bits_come_back(dtype, tmp_path):
  arrays = arrays_of(dtype)
  path, report = written(tmp_path, arrays)
  assert rules_text.parse(packed_file.read(path)[1]) == RULES
  leaves = leaves_of(path)
  assert set(leaves) == set(arrays)
  assert {name for name, x in leaves.items() if isinstance(x, NMPacked)} == set(KERNELS)
  for name, x in arrays.items():
    back = packed.unpack(leaves[name]) if name in KERNELS else leaves[name]
    assert (back.shape, back.dtype) == (x.shape, x.dtype)
    np.testing.assert_array_equal(test_packed.bits_of(back), test_packed.bits_of(x), err_msg=name)
  held = [x.nbytes for leaf in leaves.values() for x in jax.tree.leaves(leaf)]
  assert (
    report.rest + sum(x.bytes for x in report.packed.values())
    == sum(held) - arrays["batch_stats/bn/mean"].nbytes
  )


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_values_of_another_dtype_are_those_of_pack(dtype, tmp_path):
  arrays = arrays_of(any_bits=False)
  path, _ = written(tmp_path, arrays, dtype)
  leaves = leaves_of(path)
  for name in KERNELS:
    want = packed.pack(arrays[name], leaves[name].pattern, dtype=dtype)
    jax.tree.map(np.testing.assert_array_equal, leaves[name], want)
  assert leaves["params/wide/bias"].dtype == "float32"  # no kernel


# --- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize(
  "change, word",
  [
    (lambda tensors, header: header["packed"][WIDE].update(depth=72), "do not fit 1:8"),
    (lambda tensors, header: tensors.pop(f"{WIDE}.nm_values"), "damaged"),
  ],
)
def test_what_pack_cannot_have_made_is_one_sentence(change, word, tmp_path):
  path, _ = written(tmp_path, arrays_of(any_bits=False))
  read, metadata = safetensors_file.read(path)
  tensors = {name: np.asarray(x) for name, x in read.items()}
  header = json.loads(metadata["nm_sparsity_jax"])
  assert header["packed"][PAD] == dict(n=3, m=32, depth=37)  # as documented
  change(tensors, header)
  path.unlink()
  safetensors_file.write(path, tensors, {"nm_sparsity_jax": json.dumps(header)})
  with pytest.raises(ValueError, match=word) as e:
    packed_file.read(path)
  assert str(path) in str(e.value) and "\n" not in str(e.value)
