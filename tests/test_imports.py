"""What an import pulls in: nothing for the package itself, jax and its like for the core."""

import ast
import json
import pathlib
import textwrap

import pytest
from checkout import python

import nm_sparsity_jax

HEAVY = (
  "tensorflow", "tensorflow_text", "tensorflow_datasets", "seqio", "t5", "t5x", "airio",
  "jestimator",
)  # fmt: skip


def after(code):
  """Runs code in a new interpreter: modules that it loaded, heavy ones that it looked for."""
  program = """
      import sys
      looked_for = []
      class Spy:
        def find_spec(self, name, path=None, target=None):
          if name.split(".")[0] in HEAVY:
            looked_for.append(name)
      sys.meta_path.insert(0, Spy())
      before = set(sys.modules)
      CODE
      import json
      print(json.dumps([sorted(set(sys.modules) - before), looked_for]))
  """
  program = textwrap.dedent(program).replace("HEAVY", repr(HEAVY)).replace("CODE", code)
  loaded, looked_for = json.loads(python("-W", "error", "-c", program).splitlines()[-1])
  return {name.split(".")[0] for name in loaded}, loaded, looked_for


def test_the_package_alone_imports_no_jax():
  roots, loaded, _ = after("import nm_sparsity_jax; nm_sparsity_jax.__version__")
  for name in ("jax", "jaxlib", "flax", "optax", "numpy", "orbax", *HEAVY):
    assert name not in roots
  # A handful of the standard library, and ours: this takes milliseconds.
  assert [m for m in loaded if m.startswith("nm_sparsity_jax.")] == ["nm_sparsity_jax._version"]
  assert len(loaded) < 60


CORE = "import nm_sparsity_jax as nms; [getattr(nms, name) for name in nms.__all__]"
DOCTOR = "from nm_sparsity_jax.cli import doctor; doctor.examine('t5x')"
PLAN = """
import nm_sparsity_jax as nms
files = ["gin_configs/models/mini.gin", "gin_configs/sparsity.gin"]
assert nms.plan.plan(files, ["RECIPE='idp'", "PATTERN='2:4'", "SPARSE_STEPS=9"])["ok"]
"""


@pytest.mark.parametrize("code", [CORE, DOCTOR, PLAN], ids=["core", "doctor", "plan"])
def test_nothing_heavy_is_imported(code):
  """Nor tried by the core, installed or not: every module and every name."""
  roots, loaded, looked_for = after(code)
  assert not roots & {*HEAVY} and ("jax" in roots) == (code != DOCTOR)
  if code == CORE:
    assert not looked_for
    assert "jax.experimental.pallas" not in loaded  # which programs of a TPU alone need


def test_type_checkers_see_the_same_names():
  source = pathlib.Path(nm_sparsity_jax.__file__).read_text()
  (block,) = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.If)][:1]
  found = {a.asname or a.name: f"{n.module}.{a.name}" for n in block.body for a in n.names}
  home = {name: f"nm_sparsity_jax.{dotted}" for name, dotted in nm_sparsity_jax._HOME.items()}
  assert found == home
  assert set(nm_sparsity_jax.__all__) == {"__version__", *home}
