"""Packed files: the same bits back, and no file that the kernels cannot trust."""

import json
import os
import struct
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import test_packed

import nm_sparsity_jax as nms
from nm_sparsity_jax.core import packed
from nm_sparsity_jax.core.packed import NMPacked
from nm_sparsity_jax.core.trees import flatten, nested
from nm_sparsity_jax.deploy import inference_tree, packed_file, safetensors_file
from nm_sparsity_jax.deploy.packed_file import Opened
from nm_sparsity_jax.training import rules_text


def recipe(pattern):
  return nms.recipe("sr_ste", pattern=pattern, phases=nms.Phases(total=1))


# name -> shape, axis, pattern
KERNELS = {
  "params/layers_0/wide/kernel": ((64, 5), 0, "1:8"),
  "params/layers_0/two/kernel": ((16, 7), 0, "2:4"),
  "params/layers_1/padded/kernel": ((37, 3), 0, "3:32"),
  "params/conv/kernel": ((3, 2, 16, 4), 2, "1:4"),
  "params/joint/kernel": ((4, 8, 6), (0, 1), "1:16"),
  "params/apart/kernel": ((4, 3, 8, 2), (0, 2), "2:16"),
}
RULES = nms.Rules(
  {name.removeprefix("params/"): recipe(pattern) for name, (_, _, pattern) in KERNELS.items()},
  axes={name.removeprefix("params/"): axis for name, (_, axis, _) in KERNELS.items()},
  indivisible="pad",
)


def variables(dtype: Any = np.float32, any_bits=True):
  """Arrays by their names: kernels of any bits, or of finite numbers; and what stays dense."""
  made = {}
  for i, (name, (shape, axis, pattern)) in enumerate(KERNELS.items()):
    pattern = nms.NM.parse(pattern)
    w, groups = test_packed.weight(i, shape, axis, pattern, dtype)
    if not any_bits:
      normal = np.random.default_rng(i).standard_normal(w.shape).astype(dtype)
      w = np.where(w == 0, w, normal)
    made[name] = w
  made["params/layers_0/wide/bias"] = np.arange(5, dtype=dtype)
  made["params/embed/embedding"] = np.zeros((9, 4), dtype)
  made["batch_stats/bn/mean"] = np.arange(4, dtype=np.float32)
  return made


def written(tmp_path, arrays=None, dtype=None):
  path = tmp_path / "a.safetensors"
  report = packed_file.write(path, nested(arrays or variables()), RULES, dtype)
  return path, report


def bits_of(x):
  """The bits, where the sign of a zero does not count."""
  raw = np.ascontiguousarray(x).view(f"u{x.dtype.itemsize}").copy()
  raw[raw == 1 << (8 * x.dtype.itemsize - 1)] = 0
  return raw


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16])
def test_the_same_bits_come_back(dtype, tmp_path):
  arrays = variables(dtype)
  path, report = written(tmp_path, arrays)
  opened = Opened(path)
  assert set(opened.leaves) == set(arrays) and set(opened.kernels) == set(KERNELS)
  for name, x in arrays.items():
    back = opened.array(name)
    assert opened.leaves[name] == (x.shape, x.dtype.name) == (back.shape, back.dtype.name)
    np.testing.assert_array_equal(bits_of(back), bits_of(x), err_msg=name)
  again = nested({name: opened.array(name) for name in arrays})
  assert written(tmp_path / "again", again)[0].read_bytes() == path.read_bytes()
  size = os.path.getsize(path)
  header = struct.unpack("<Q", path.read_bytes()[:8])[0]
  assert report.total == size - 8 - header
  assert report.dense["batch_stats/bn/mean"] == "no parameter"
  assert report.dense["embed/embedding"] == "no rule makes it sparse"
  # Eight weights are one value and one nibble (a whole byte, rounded up).
  assert report.sizes["layers_0/wide/kernel"].total == 5 * (8 * np.dtype(dtype).itemsize + 4)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_values_of_another_dtype_are_those_of_pack(dtype, tmp_path):
  arrays = variables(any_bits=False)
  path, report = written(tmp_path, arrays, dtype)
  opened = Opened(path)
  assert rules_text.parse(opened.rules) == RULES
  for name, kernel in opened.kernels.items():
    want = packed.pack(arrays[name], kernel.pattern, kernel.groups, dtype)
    for a, b in zip(jax.tree.leaves(opened.packed(name)), jax.tree.leaves(want), strict=True):
      assert a.dtype == b.dtype and a.tobytes() == b.tobytes()
    np.testing.assert_array_equal(opened.array(name), kernel.with_zeros(want))
  assert opened.leaves["params/conv/kernel"][1] == ("float32" if dtype == "int8" else dtype)
  assert opened.leaves["params/layers_0/wide/bias"][1] == "float32"  # no kernel
  wide = report.sizes["layers_0/wide/kernel"]
  assert wide.total == 5 * (8 * np.dtype(dtype).itemsize + 4 + 4 * (dtype == "int8"))
  assert wide.dense == 64 * 5 * 4


def test_a_network_takes_what_is_read(tmp_path):
  path, _ = written(tmp_path, variables(any_bits=False))
  tree = packed_file.read(path)
  assert set(tree) == {"params", "batch_stats"}
  wide = tree["params"]["layers_0"]["wide"]
  assert isinstance(wide["kernel"], NMPacked)
  assert isinstance(tree["params"]["conv"]["kernel"], np.ndarray)  # a layer takes it with zeros
  x = np.ones((2, 64), np.float32)
  y = nms.layers.Dense(5).apply({"params": inference_tree.prepare(wide, 2)}, jnp.asarray(x))
  want = x @ Opened(path).array("params/layers_0/wide/kernel") + wide["bias"]
  np.testing.assert_allclose(np.asarray(y), want, rtol=1e-5, atol=1e-5)


def test_what_cannot_be_packed_leaves_no_file(tmp_path):
  arrays = variables()
  arrays["params/layers_0/two/kernel"][8:12, 3] = 1
  table = {"params": {"embed": {"embedding": np.zeros((8, 4), np.float32)}}}
  of_table = nms.Rules({"embed.*": recipe("1:4")}, {"embed.*": 0})
  for tree, rules, word in (
    (nested(arrays), RULES, r"'layers_0/two/kernel' is not 2:4"),
    (table, of_table, "nothing would be packed"),
  ):
    with pytest.raises(ValueError, match=word):
      packed_file.write(tmp_path / "a", tree, rules)
  assert os.listdir(tmp_path) == []


def test_padding_for_a_longer_level_is_not_in_the_file(tmp_path):
  """The axis is padded to 32 for its first level, and the target 1:4 needs 20."""
  path = ((0, "8:32", 0.0), (5, "1:4", 0.0))
  longer = nms.recipe("custom", pattern="1:4", phases=nms.Phases(total=9), path=path)
  rules = nms.Rules({"a/kernel": longer}, indivisible="pad")
  w = np.zeros((18, 6), np.float32)
  w[::4] = 1
  assert rules.assign({"a/kernel": w}).places["a/kernel"].groups.pad == 14
  packed_file.write(tmp_path / "a", {"params": {"a": {"kernel": w}}}, rules)
  opened = Opened(tmp_path / "a")
  np.testing.assert_array_equal(opened.array("params/a/kernel"), w)
  assert opened.packed("params/a/kernel").values.shape == (5, 6)


# --- what is refused ----------------------------------------------------------------------------

W = "params/layers_0/wide/kernel"  # 1:8, indices of 4 bits
TWO = "params/layers_0/two/kernel"  # 2:4, of 2 bits
PAD = "params/layers_1/padded/kernel"  # 3:32, of 8 bits, 27 rows of padding


def put(name, index, value):
  return lambda tensors, header: tensors[name].__setitem__(index, value)


def says(**changes):
  return lambda tensors, header: header["packed"][W].update(changes)


# What is wrong -> (how the tensors and the header change, the kernel that is read, a word).
WRONG = {
  "another version": (lambda tensors, header: header.update(version=2), W, "version"),
  "no rules": (lambda tensors, header: header.pop("rules"), W, "rules"),
  "a key too few": (lambda tensors, header: header["packed"][W].pop("m"), W, "'m'"),
  "an axis beyond": (says(axis=[2]), W, "axis"),
  "another shape": (says(shape=[64, 6]), W, "must be float32"),
  "a huge shape": (says(shape=[1 << 40, 1 << 20]), W, "must be float32"),
  "another n": (says(n=2), W, "must be float32"),
  "an unknown dtype": (says(dtype="object"), W, "object"),
  "int8 without its scale": (says(dtype="int8"), W, "must be int8"),
  "a part is missing": (lambda tensors, header: tensors.pop(f"{W}.nm_indices"), W, "missing"),
  "an index beyond its group": (put(f"{PAD}.nm_indices", (0, 0), 32), PAD, "an index of 32"),
  "an index twice": (put(f"{TWO}.nm_indices", (0, 0), 0b01_01), TWO, "do not ascend"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_pack_cannot_have_made_is_one_sentence(what, tmp_path):
  change, name, word = WRONG[what]
  path, _ = written(tmp_path, variables(any_bits=False))
  file = safetensors_file.Opened(path)
  tensors = {name: np.asarray(x) for name, x in file.tensors.items()}
  header = json.loads(file.metadata["nm_sparsity_jax"])
  change(tensors, header)
  path.unlink()
  safetensors_file.write(path, tensors, {"nm_sparsity_jax": json.dumps(header)})
  with pytest.raises(ValueError, match=word) as e:
    Opened(path).packed(name)
  assert str(path) in str(e.value) and "\n" not in str(e.value)


def test_the_header_is_read_alone_and_is_as_documented(tmp_path, monkeypatch):
  path, _ = written(tmp_path)
  monkeypatch.setattr(safetensors_file.Lazy, "__array__", lambda *_: pytest.fail("it was read"))
  assert Opened(path).leaves[W] == ((64, 5), "float32")
  header = json.loads(safetensors_file.Opened(path).metadata["nm_sparsity_jax"])
  assert header["packed"]["params/apart/kernel"] == dict(
    n=2, m=16, axis=[0, 2], shape=[4, 3, 8, 2], dtype="float32"
  )


def test_the_tree_of_a_file_is_that_which_was_written(tmp_path):
  path, _ = written(tmp_path)
  tree = inference_tree.unpack_tree(packed_file.read(path))
  shapes = {name: x.shape for name, x in variables().items()}
  assert {name: x.shape for name, x in flatten(tree)} == shapes
