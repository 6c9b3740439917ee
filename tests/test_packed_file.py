"""Packed files: the same bits back, and nothing taken on trust."""

import json
import os
import random
import struct
from typing import Any

import fuzz
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


def read_all(path):
  """Reads every array of a packed file."""
  opened = Opened(path)
  return {name: opened.array(name) for name in opened.leaves}


def sound_files():
  """(name, arrays, dtype) of packed files that tests/fuzz.py wounds."""
  half = dict(list(variables(ml_dtypes.bfloat16).items())[3:])
  yield "float", variables() | half, None
  yield "int8", variables(any_bits=False), "int8"


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


def test_the_header_is_as_documented(tmp_path):
  path, _ = written(tmp_path)
  file = safetensors_file.Opened(path)
  told = json.loads(file.metadata["nm_sparsity_jax"])
  assert told["version"] == 1 and rules_text.parse(told["rules"]) == RULES
  assert told["packed"]["params/apart/kernel"] == dict(
    n=2, m=16, axis=[0, 2], shape=[4, 3, 8, 2], dtype="float32", index_bits=4, pad=0
  )
  name = "params/layers_1/padded/kernel"
  for part, dtype in (("nm_values", "float32"), ("nm_indices", "uint8")):
    found = file.tensors[f"{name}.{part}"]
    assert found.shape == (6, 3) and found.dtype == dtype
  assert f"{name}.nm_scale" not in file.tensors


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_values_of_another_dtype_are_those_of_pack(dtype, tmp_path):
  arrays = variables(any_bits=False)
  path, report = written(tmp_path, arrays, dtype)
  opened = Opened(path)
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
  table = np.zeros((8, 4), np.float32)
  of_table = nms.Rules({"embed.*": recipe("1:4")}, {"embed.*": 0})
  for tree, rules, words in (
    (nested(arrays), RULES, r"'layers_0/two/kernel' is not 2:4 .* group 17, .*\(8, 3\).* Finalize"),
    (nested(variables() | {"params/a.nm_scale": table}), RULES, "'params/a.nm_scale' ends like"),
    ({"params": table}, RULES, "'params' is not a path of a tree"),
    (
      {"params": {"embed": {"embedding": table}}},
      of_table,
      r"nothing .*\('embed/embedding': a table",
    ),
  ):
    with pytest.raises(ValueError, match=words):
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


def changed(tmp_path, change, dtype=None):
  """A packed file in which `change` has changed tensors, what is told, and of kernels."""
  path, _ = written(tmp_path, variables(any_bits=False), dtype)
  file = safetensors_file.Opened(path)
  tensors = {name: np.asarray(x) for name, x in file.tensors.items()}
  told = json.loads(file.metadata["nm_sparsity_jax"])
  change(tensors, told, told["packed"])
  path.unlink()
  safetensors_file.write(path, tensors, {"nm_sparsity_jax": json.dumps(told)})
  return path


def told_of(name, **changes):
  return lambda tensors, metadata, told: told[name].update(changes)


def put(name, index, value):
  def change(tensors, metadata, told):
    tensors[name][index] = value

  return change


def metadata_of(**changes):
  return lambda tensors, metadata, told: metadata.update(changes)


HEADERS = {
  "another version": (metadata_of(version=2), "it is of version 2, and this package reads 1: upda"),
  "no rules": (lambda t, metadata, told: metadata.pop("rules"), "rules"),
  "packed that is no object": (metadata_of(packed=[1]), "damaged"),
  "a kernel that is no object": (metadata_of(packed={"a": 3}), "damaged"),
  "a key too few": (lambda t, metadata, told: told[W].pop("m"), "'m'"),
  "a key too many": (told_of(W, code="rm"), "code of .* is 'rm'"),
  "a float": (told_of(W, n=1.0), "a size that is not a whole number"),
  "a bool": (told_of(W, n=True), "a size that is not a whole number"),
  "a negative number": (told_of(W, shape=[-64, 5]), "a size that is not a whole number"),
  "n = m": (told_of(W, n=8), "is 8:8, and must be n:m with 0 < n < m <= 256"),
  "n = 0": (told_of(W, n=0), "is 0:8, and must be n:m"),
  "m = 257": (told_of(W, m=257), "is 1:257, and must be n:m"),
  "no axis": (told_of(W, axis=[]), r"has groups along \[\] of the shape"),
  "an axis beyond": (told_of(W, axis=[2]), r"has groups along \[2\] of the shape \[64, 5\]"),
  "an axis twice": (told_of(W, axis=[0, 0]), r"has groups along \[0, 0\] of the shape"),
  "another shape": (told_of(W, shape=[64, 6]), r"is float32 \(8, 5\), and must be float32 \(8, 6"),
  "a huge shape": (told_of(W, shape=[1 << 40, 1 << 20]), "and must be float32"),
  "another padding": (told_of(W, pad=8), "pad of .* is 8, and must be 0"),
  "no padding": (told_of(PAD, pad=0), "pad of .* is 0, and must be 27"),
  "another n": (told_of(W, n=2), r"is float32 \(8, 5\), and must be float32 \(16, 5\)"),
  "an unknown dtype": (told_of(W, dtype="object"), "has values of 'object'"),
  "another dtype": (told_of(W, dtype="bfloat16"), "is float32 .*, and must be bfloat16"),
  "int8 without its scale": (told_of(W, dtype="int8"), "is float32 .*, and must be int8"),
  "other bits": (told_of(W, index_bits=8), "index_bits of .* is 8, and must be 4"),
  "a part is missing": (
    lambda tensors, metadata, told: tensors.pop(f"{W}.nm_indices"), "wide/kernel.nm_indices' is mis"
  ),
  "an orphan": (
    lambda tensors, metadata, told: told.pop(W), r"kernel.nm_\w+' is a part of no packed kernel"
  ),
  "a scale too many": (
    lambda tensors, metadata, told: tensors.update({f"{W}.nm_scale": np.ones(5, np.float32)}),
    "wide/kernel.nm_scale' is a part of no packed kernel",
  ),
  "packed and dense": (
    lambda tensors, metadata, told: tensors.update({W: np.ones(5, np.float32)}),
    "is packed and not packed",
  ),
  "a name inside another": (
    lambda tensors, metadata, told: tensors.update({f"{W}/a": np.ones(5, np.float32)}),
    "wide/kernel/a' is not a path of a tree",
  ),
  "a name of a run's state": (
    lambda tensors, metadata, told: tensors.update({"nm_sparsity/rules": np.ones(5, np.float32)}),
    "'nm_sparsity/rules' is not a path of a tree",
  ),
}  # fmt: skip


@pytest.mark.parametrize("what", HEADERS)
def test_a_header_that_does_not_fit_is_one_sentence(what, tmp_path):
  change, words = HEADERS[what]
  path = changed(tmp_path, change)
  with pytest.raises(ValueError, match=words) as e:
    Opened(path)
  assert str(e.value).startswith(repr(str(path))) and "\n" not in str(e.value)
  assert len(str(e.value)) < 1000


CONTENTS = {
  "an index beyond its group": (put(f"{PAD}.nm_indices", (0, 0), 32), PAD, "an index of 32 in a g"),
  "an index twice": (put(f"{TWO}.nm_indices", (0, 0), 0b01_01), TWO, "whose indices do not ascend"),
  "indices backwards": (put(f"{TWO}.nm_indices", (0, 0), 0b01_10), TWO, "indices do not ascend"),
  "a value in the padding": (
    lambda t, metadata, told: (
      put(f"{PAD}.nm_indices", (slice(3, 6), 0), [29, 30, 31])(t, metadata, told),
      put(f"{PAD}.nm_values", (5, 0), 1)(t, metadata, told),
    ), PAD, "a value other than .0 where the last group is padded",
  ),
  "a scale of 0": (put(f"{W}.nm_scale", 0, 0), W, "a scale that is not a positive, finite num"),
  "a scale of NaN": (put(f"{W}.nm_scale", 0, np.nan), W, "a scale that is not a positive"),
  "-128": (put(f"{W}.nm_values", (0, 0), -128), W, "a value of -128, which is not used"),
}  # fmt: skip


@pytest.mark.parametrize("what", CONTENTS)
def test_a_kernel_that_pack_cannot_have_made_is_one_sentence(what, tmp_path):
  change, name, words = CONTENTS[what]
  path = changed(tmp_path, change, "int8" if "scale" in what or "128" in what else None)
  opened = Opened(path)
  for read in (opened.packed, opened.array, opened.leaf):
    with pytest.raises(ValueError, match=words) as e:
      read(name)
    short = name.removeprefix("params/")
    assert str(e.value).startswith(f"{str(path)!r} is damaged: {short!r} has a")
    assert str(e.value).endswith(": copy it again, or pack again.")
  assert isinstance(opened.leaf("params/embed/embedding"), np.ndarray)


def test_unused_bits_of_indices_are_0(tmp_path):
  def change(tensors, metadata, told):
    tensors["params/short/kernel.nm_values"] = np.ones((1, 4), np.float32)
    tensors["params/short/kernel.nm_indices"] = np.full((1, 4), 0x40, np.uint8)
    told["params/short/kernel"] = told[W] | dict(shape=[8, 4])

  with pytest.raises(ValueError, match="bits that stand for no index, and are not 0"):
    Opened(changed(tmp_path, change)).packed("params/short/kernel")


def test_wounded_files_are_read_or_refused_in_a_sentence(tmp_path):
  """As 100,000 are among the slow tests, in processes with limits."""
  path, refused = tmp_path / "b.safetensors", 0
  for name, arrays, dtype in sound_files():
    packed_file.write(tmp_path / name, nested(arrays), RULES, dtype)
    sound = (tmp_path / name).read_bytes()
    for seed in range(150):
      path.write_bytes(fuzz.mutate_packed(sound, random.Random(seed)))
      try:
        read_all(path)
      except ValueError as e:
        refused += 1
        assert str(path) in str(e) and "\n" not in str(e) and len(str(e)) < 2000
  assert refused > 200


def test_a_file_of_another_program_is_no_packed_file(tmp_path):
  safetensors_file.write(tmp_path / "a", {"a": np.zeros(2)})
  with pytest.raises(ValueError, match="is not a packed file, which `nm-sparsity pack` writes"):
    Opened(tmp_path / "a")


def test_tensors_are_read_when_they_are_asked_for(tmp_path, monkeypatch):
  path, _ = written(tmp_path)
  monkeypatch.setattr(safetensors_file.Opened, "_read", lambda *_: pytest.fail("it read a tensor"))
  assert Opened(path).leaves[W] == ((64, 5), "float32")


def test_the_tree_of_a_file_is_that_which_was_written(tmp_path):
  path, _ = written(tmp_path)
  tree = inference_tree.unpack_tree(packed_file.read(path))
  assert {name: x.shape for name, x in flatten(tree)} == {
    n: x.shape for n, x in variables().items()
  }
