"""examples/coreml.py: a package has the bits that were exported, and n:m without its zeros.

Nothing runs a package on Linux, so its results are not compared.
"""

# pyright: reportMissingImports=false, reportMissingModuleSource=false

import importlib.util
import pathlib
from typing import Any

import numpy as np
import pytest
import test_export
import vision_reference
from reference_arrays import imported

import nm_sparsity_jax as nms
from nm_sparsity_jax.deploy import safetensors_file

PACKAGES = ("torch", "coremltools", "transformers", "timm")
MISSING = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
pytestmark = [
  pytest.mark.filterwarnings("ignore"),
  pytest.mark.skipif(
    bool(MISSING), reason=f"docs/deploy.md, Core ML: no {', '.join(MISSING)} here"
  ),
]
EXAMPLE = pathlib.Path(__file__).parents[1] / "examples/coreml.py"
# Network -> the words that follow the two paths; how many arrays have no zeros.
WORDS = {
  "v1_1": (["--length", "12"], 21),
  "vit_test": (["--size", "16", "--timm", "vit_tiny_patch16_224"], 6),
  "resnet_test": (["--size", "32", "--timm", "resnet50"], 15),
}


@pytest.mark.parametrize("name", WORDS)
def test_a_package_keeps_the_bits_and_leaves_out_the_zeros(name, tmp_path, capsys):
  example = load_example()
  words, count = WORDS[name]
  if name == "v1_1":
    test_export.written_t5(tmp_path / "run", name)
    exported = tmp_path / "model"
    file = exported / "model.safetensors"
  else:
    test_export.written(tmp_path / "run", name)
    file = exported = tmp_path / "model.safetensors"
    words = [*words, *(f"{key}={x}" for key, x in vision_reference.TINY[name].items())]
  nms.runs.export(tmp_path / "run", exported)
  out = tmp_path / "model.mlpackage"
  example.main([str(exported), str(out), *words])
  assert f"{count} arrays are stored without zeros" in capsys.readouterr().out

  found = sparse_arrays(out)
  assert len(found) == count
  if name == "resnet_test":  # Core ML multiplies its kernels by what the norms scale by
    for x in found:
      assert ((np.moveaxis(x, 1, -1).reshape(-1, 8) != 0).sum(1) <= 2).all()  # 1:4 and 2:8
  else:
    tensors = {key: np.asarray(x) for key, x in safetensors_file.Opened(file).tensors.items()}
    wanted = [x for key, x in tensors.items() if (x == 0).mean() > 0.3 and "decoder." not in key]
    # A zero that is left out has no sign.
    assert {(x + 0).tobytes() for x in wanted} <= {x.tobytes() for x in found} and len(wanted) > 5


def load_example():
  """The example as a module."""
  imported("torch", "timm")  # torch before coremltools, which imports TensorFlow where it finds it
  spec: Any = importlib.util.spec_from_file_location("coreml", EXAMPLE)
  example = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(example)
  return example


def sparse_arrays(path):
  """The arrays that a package holds without zeros, with their zeros."""
  import coremltools
  from coremltools.converters.mil.frontend.milproto.load import load

  model = coremltools.models.MLModel(str(path), skip_model_load=True)
  spec = model.get_spec()
  operations = load(spec, spec.specificationVersion, model.weights_dir).functions["main"].operations
  sparse = [op for op in operations if op.op_type == "constexpr_sparse_to_dense"]
  return [np.asarray(op.materialized_val_inference()) for op in sparse]
