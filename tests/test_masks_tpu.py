"""The kernel for TPUs: the same bits in interpret mode, and where a program for a TPU holds it."""

import json
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from checkout import python
from jax import export
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import nm_sparsity_jax as nms
from nm_sparsity_jax.core import groups
from nm_sparsity_jax.core.masks import magnitude_mask, tpu
from nm_sparsity_jax.core.masks.selection import KeepSpec

AWKWARD = np.array([0, -0.0, 1e-40, -1e-40, 1, -1, 2, np.inf, -np.inf, np.nan], np.float32)
KERNEL = "tpu_custom_call"


def weights(shape):
  """Numbers and awkward values, half and half, so ties are common."""
  rng = np.random.default_rng(0)
  awkward = rng.random(shape) < 0.5
  values = np.where(awkward, rng.choice(AWKWARD, size=shape), rng.normal(size=shape))
  return jnp.asarray(values, jnp.float32)


SHAPES = {
  "last axis in blocks": ((40, 1280), (1,)),
  "blocks that the rows do not fill": ((1056, 136), (0,)),
  "stacked": ((3, 64, 10), (1,)),
  "layers behind the groups": ((64, 3, 10), (0,)),
  "joint axes": ((2, 8, 8, 5), (1, 2)),
  "one column": ((64, 1), (0,)),
}


@pytest.mark.parametrize("i, name", list(enumerate(SHAPES)))
def test_any_shape_and_axis_as_it_lies_on_a_tpu(i, name):
  """tests/test_masks.py has small ones."""
  pattern = ("1:8", "2:8", "3:16")[i % 3]
  shape, axes = SHAPES[name]
  w, pattern = weights(shape), nms.NM.parse(pattern)
  kept = KeepSpec(pattern.m, pattern.n)
  got = jax.jit(lambda w: tpu.mask(w, jnp.int32(0), kept=kept, axes=axes, interpret=True))(w)
  np.testing.assert_array_equal(got, magnitude_mask(w, pattern, axes))


def for_tpu(function, *shapes):
  """The program that `function` becomes on a TPU; no TPU is needed to write it."""
  return export.export(jax.jit(function), platforms=["tpu"])(*shapes).mlir_module()


PHASES = nms.Phases(total=100, dense=10, finetune=20)
WEIGHT = jax.ShapeDtypeStruct((64, 256), jnp.float32)


@pytest.mark.parametrize("name", ["sdgf_stepwise", "sdgf_geometric"])
def test_a_program_for_a_tpu_holds_the_kernel(name):
  """One for all levels of one length, and one for each level of another length."""
  options = {"k": 4} if name == "sdgf_geometric" else {}
  recipe = nms.recipe(name, pattern="2:8", phases=PHASES, **options)
  text = for_tpu(recipe.effective, WEIGHT, jax.ShapeDtypeStruct((), jnp.int32))
  assert text.count(KERNEL) == (3 if name == "sdgf_geometric" else 1)


@pytest.mark.parametrize(
  "pattern, shape, dtype, is_there",
  [
    ("3:16", (64, 256), "float32", True), ("1:2048", (8192, 8), "bfloat16", True),
    ("1:8192", (8192, 8), "float32", False), ("1:8", (64, 8), "float16", False),
    ("2:75", (7500, 256), "float32", False),  # fills no tiles of 32 rows
  ],
)  # fmt: skip
def test_what_fits_no_block_goes_the_other_way(pattern, shape, dtype, is_there):
  mask = lambda w, n: magnitude_mask(w, pattern, n=n)
  like = jax.ShapeDtypeStruct(shape, dtype), jax.ShapeDtypeStruct((), jnp.int32)
  with jax.enable_x64(True):  # numbers of 64 bits in other code change nothing
    assert (KERNEL in for_tpu(mask, *like)) == is_there


def over(*axes):
  mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
  return NamedSharding(mesh, PartitionSpec(*axes))


@pytest.mark.parametrize("known", [True, False])
def test_several_tpus_without_shardings_are_one_warning(known, monkeypatch):
  """Of all masks of a train step together; the line that it names brings the kernel back.

  XLA cannot partition a kernel, so a program that it partitions itself goes the other way; within
  `shard_map` each device has whole shards.
  """
  monkeypatch.setattr(groups, "_PLATFORM", "cpu")  # of the mesh, which has no TPUs here
  names = "a", "b"
  params = {x: jax.ShapeDtypeStruct((64, 256), "float32", sharding=over(None, "x")) for x in names}
  rules = nms.Rules({".*": nms.recipe("sr_ste", pattern="2:8", phases=PHASES)}, axes={".*": 0})
  if known:
    rules = rules.with_shardings(jax.tree.map(lambda x: x.sharding, params))
  tx = nms.sparse(optax.sgd(0.1), rules)
  whole = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=over())
  opt = jax.tree.map(whole, jax.eval_shape(tx.init, params))  # `init` under jit sees no shardings
  with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("default")
    text = for_tpu(tx.update, params, opt, params)
  assert ["with_shardings" in str(warning.message) for warning in seen] == [True] * (not known)
  assert (KERNEL in text) == known
  # Neither other platforms nor one device: a warning is an error (pyproject.toml).
  export.export(jax.jit(tx.update), platforms=["cpu", "cuda"])(params, opt, params)
  for_tpu(lambda w: magnitude_mask(w, "2:8"), WEIGHT)


COMPILE = """
import jax, jax.numpy as jnp
from jax.sharding import SingleDeviceSharding
import nm_sparsity_jax as nms
from nm_sparsity_jax.analysis import topology

at = SingleDeviceSharding(topology.devices("v5e:2x2")[0])
w = jax.ShapeDtypeStruct((1024, 4096), jnp.float32, sharding=at)
step = jax.ShapeDtypeStruct((), jnp.int32, sharding=at)
x = jax.ShapeDtypeStruct((512, 1024), jnp.bfloat16, sharding=at)
recipe = nms.recipe("sr_ste", pattern="2:8", phases=nms.Phases(total=100, dense=10, finetune=20))

def loss(w, x, step):
  return jnp.sum(jnp.square(x @ recipe.effective(w, step).astype(x.dtype)).astype(jnp.float32))

program = jax.jit(jax.grad(loss)).lower(w, x, step).compile()
odd = jax.ShapeDtypeStruct((4800, 256), jnp.float32, sharding=at)
jax.jit(lambda w: nms.masks.magnitude_mask(w, "2:75", 0)).lower(odd).compile()
at = SingleDeviceSharding(topology.devices("v4:2x2x1")[0])  # it compares no bytes
for pattern, axis in (("2:4", 0), ("4:8", 1), ("8:8", 0)):
  old = jax.ShapeDtypeStruct((256, 256), jnp.float32, sharding=at)
  jax.jit(lambda w: nms.masks.magnitude_mask(w, pattern, axis)).lower(old).compile()
print(program.as_text().count("tpu_custom_call"))
"""


# A whole step: two layers by a scan, weights cut over two of four chips, Adafactor, SR-STE's term.
STEP = """
import json
import jax, jax.numpy as jnp, numpy as np, optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
import nm_sparsity_jax as nms
from nm_sparsity_jax.analysis import compiled, topology

mesh = Mesh(np.array(topology.devices("v5e:2x2")).reshape(2, 2), ("data", "model"))
cut = lambda *axes: NamedSharding(mesh, P(*axes))
shapes = {"wi": (2, 256, 512), "wo": (2, 512, 256)}
where = {"wi": cut(None, None, "model"), "wo": cut(None, "model", None)}
shape = lambda x, at=cut(): jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at)
params = {k: jax.ShapeDtypeStruct(shapes[k], jnp.float32, sharding=where[k]) for k in shapes}
x = jax.ShapeDtypeStruct((64, 256), jnp.bfloat16, sharding=cut("data"))

def compile(name):
  phases = nms.Phases(total=100, dense=10, finetune=20)
  options = {} if name == "dense" else {"pattern": "1:8", "phases": phases}
  recipe = nms.recipe(name, **options)
  rules = nms.Rules(dict.fromkeys(shapes, recipe), axes=dict.fromkeys(shapes, 1))
  rules = rules.with_shardings(where)
  tx = nms.sparse(optax.adafactor(1e-3), rules)

  def loss(params, opt, x):
    layer = lambda x, w: (jax.nn.relu(x @ w["wi"].astype(x.dtype)) @ w["wo"].astype(x.dtype), None)
    return jnp.sum(jax.lax.scan(layer, x, nms.sparsify(params, rules, opt))[0].astype(jnp.float32))

  def step(params, opt, x):
    updates, opt = tx.update(jax.grad(loss)(params, opt, x), opt, params)
    return optax.apply_updates(params, updates), opt

  opt = jax.tree.map(shape, jax.eval_shape(tx.init, params))
  found = compiled.account(jax.jit(step).lower(params, opt, x).compile())
  return {"kernels": found.kernels, "collectives": found.collectives}

print(json.dumps({name: compile(name) for name in ("dense", "sdgf_geometric", "idp")}))
"""


def by_libtpu(program):
  """What a program prints, in a process of its own: libtpu locks a file while a process lives."""
  pytest.importorskip("libtpu", reason="libtpu is not installed: pip install 'jax[tpu]'")
  try:
    return json.loads(python("-c", program, timeout=300, JAX_DISABLE_MOST_OPTIMIZATIONS="0"))
  except AssertionError as error:
    if "another process holds libtpu" in str(error):
      pytest.skip("another process holds libtpu")
    raise


def test_a_tpu_compiler_takes_it():
  assert by_libtpu(COMPILE) == 1  # one mask for the forward pass and the backward pass


def test_a_tpu_compiler_takes_a_train_step():
  """With the kernel for each weight, and no other communication than a dense step has."""
  found = by_libtpu(STEP)
  dense = found.pop("dense")
  assert not dense["kernels"] and dense["collectives"]
  for name, sparse in found.items():
    assert sparse["kernels"] >= 2, name
    assert sparse["collectives"] == dense["collectives"], name
