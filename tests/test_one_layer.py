"""Checkpoints of a network that scans: one layer of a kernel is in memory at a time."""

import json
import os
import subprocess
import sys

import jax
import numpy as np
import pytest
import test_huggingface as huggingface
import test_huggingface_runs as t5

import nm_sparsity_jax as nms
from nm_sparsity_jax import runs
from nm_sparsity_jax.runs import checkpoint, writing
from nm_sparsity_jax.trees import flatten
from nm_sparsity_jax.weights import packed_file

KERNEL = "target/encoder/encoder/mlp/wo/kernel"
AXES = {r".*/(query|key|value|wi.*|wo)/kernel": 0, r".*/out/kernel": (0, 2)}


@pytest.fixture(scope="module")
def start(tmp_path_factory):
  """A dense checkpoint that scans, as `convert` writes it."""
  folder = tmp_path_factory.mktemp("layers")
  huggingface.folder_of("v1_1", folder / "hf")
  return runs.convert(folder / "hf", folder / "start", scan_layers=True)


def test_what_convert_and_finalize_write_lies_in_layers(start, tmp_path):
  made = runs.finalize(start, tmp_path, t5.some_rules(), AXES)
  config = huggingface.config_of_name("v1_1", scan_layers=True)
  params = huggingface.huggingface.from_huggingface(huggingface.tensors_of("v1_1"), config)
  want = nms.finalize(params, t5.some_rules().with_axes(AXES), 0, early=True)
  for path, tree in ((start, params), (made.path, jax.device_get(want))):
    stored = checkpoint.read(path)
    assert stored.chunks[KERNEL] == (40, 1, 16) and stored.leaves[KERNEL].shape == (40, 3, 16)
    for key, x in flatten(tree):
      np.testing.assert_array_equal(stored.array(f"target/{key}"), x, err_msg=key)
    whole = stored.array(KERNEL)
    np.testing.assert_array_equal(stored.part(KERNEL, 1, 2, 3), whole[:, 2:])
    np.testing.assert_array_equal(stored.part(KERNEL, 0, 4, 9), whole[4:9])
  lost = {removed.path: removed.weights for removed in made.removed}
  assert lost["encoder/encoder/mlp/wo/kernel"] == 0.75


def test_the_proof_of_layers_is_that_of_the_whole(start):
  """Of the same arrays, which lie in one piece each."""
  stored = checkpoint.read(start)
  flat = {key: (lambda key=key: stored.array(key)) for key in stored.leaves}
  whole = f"{start}_whole"
  writing.write(whole, flat)
  assert checkpoint.read(whole).chunks[KERNEL] == (40, 3, 16)
  one, other = (runs.verify(path, {"ff": "2:4"}, AXES) for path in (start, whole))
  assert not one.ok and one.changed == other.changed == ()
  assert one.report == other.report


def test_a_layer_that_changed_is_named(start, tmp_path):
  made = runs.finalize(start, tmp_path, {"ff": "1:4"}, AXES)
  file = f"{made.path}/sha256.json"
  with open(file, encoding="utf-8") as opened:
    found = json.load(opened)
  sums = found["layers"][KERNEL]["sha256"]
  assert found["layers"][KERNEL]["axis"] == 1 and len(sums) == 3
  for wrong in (sums[:2], [*sums, sums[0]], [*sums[:2], sums[0]], []):
    found["layers"][KERNEL]["sha256"] = wrong
    with open(file, "w", encoding="utf-8") as opened:
      json.dump(found, opened)
    assert runs.verify(made.path).changed == (KERNEL[7:],)
  for wrong in ({"axis": 1, "sha256": [3]}, {"axis": "1", "sha256": sums}, 3):
    found["layers"][KERNEL] = wrong
    with open(file, "w", encoding="utf-8") as opened:
      json.dump(found, opened)
    with pytest.raises(ValueError, match="damaged"):
      runs.verify(made.path)


def test_a_stack_of_layers_is_packed_layer_by_layer(start, tmp_path):
  made = runs.finalize(start, tmp_path / "final", {"ff": "1:4"}, AXES)
  runs.pack(made.path, tmp_path / "a.safetensors")
  opened, stored = packed_file.Opened(tmp_path / "a.safetensors"), checkpoint.read(made.path)
  for i in range(3):
    got = opened.array(f"params/encoder/layers_{i}/mlp/wo/kernel")
    np.testing.assert_array_equal(got, stored.array(KERNEL)[:, i])


MEASURED = """
import sys
import numpy as np
from nm_sparsity_jax import runs
from nm_sparsity_jax.models.t5 import T5Config
from nm_sparsity_jax.weights import huggingface
from nm_sparsity_jax.weights.safetensors_file import Lazy

AXES = {r".*/(wi|wo)/kernel": 0}

def now(name):
  lines = open("/proc/self/status").read().splitlines()
  return next(int(line.split()[1]) for line in lines if line.startswith(name)) * 1024

def peak(call):
  open("/proc/self/clear_refs", "w").write("5")  # the peak begins anew
  before = now("VmRSS")
  call()
  return now("VmHWM") - before

def all_of(layers, wide, mlp):
  config = T5Config(
    vocab_size=64, emb_dim=wide, num_heads=1, head_dim=8, num_encoder_layers=layers,
    num_decoder_layers=1, mlp_dim=mlp, mlp_activations=("relu",), logits_via_embedding=True,
  )
  draw = lambda shape: np.random.default_rng(0).standard_normal(shape, np.float32)
  arrays = {
    key: Lazy(source.ours, np.dtype("float32"), lambda shape=source.ours: draw(shape))
    for key, source in huggingface.sources(config).items()
  }
  folder = f"{sys.argv[1]}/{layers}-{mlp}"
  tensors = huggingface.to_tensors(arrays, config)
  huggingface.write_folder(f"{folder}-hf", tensors, huggingface.to_json(config))
  start, final, rules = f"{folder}-start", f"{folder}-final", {"ff": "1:8"}
  steps = (
    lambda: runs.convert(f"{folder}-hf", start, scan_layers=True),
    lambda: runs.finalize(start, final, rules, AXES),
    lambda: runs.verify(final),
    lambda: runs.pack(final, f"{folder}.safetensors"),
  )
  return [peak(step) / (4 * wide * mlp) for step in steps]

all_of(2, 64, 128)  # what is imported does not count
all_of(2, 512, 4096)  # nor what is compiled
print(*all_of(12, 512, 4096))
"""


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="Linux tells of a peak")
def test_the_peak_of_memory_is_some_layers_and_no_stack(tmp_path):
  """A stack has twelve layers. A step copies a layer some times: to compress it, and its masks."""
  ran = subprocess.run(
    [sys.executable, "-c", MEASURED, str(tmp_path)], capture_output=True, text=True, check=False,
    env=os.environ | {"MALLOC_ARENA_MAX": "2"},
  )  # fmt: skip
  assert not ran.returncode, ran.stderr
  steps, most = ("convert", "finalize", "verify", "pack"), (8, 10, 4, 4)
  peaks = dict(zip(steps, map(float, ran.stdout.split()), strict=True))
  assert all(peaks[step] < limit for step, limit in zip(steps, most, strict=True)), peaks
