"""jimm (jax-image-models), unmodified: roles and axes of its stacked blocks, in NNX' optimizer."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import nm_sparsity_jax as nms

jimm = pytest.importorskip("jimm")
pytestmark = pytest.mark.filterwarnings("ignore")

PHASES = nms.Phases(total=16, dense=2, finetune=5)
ROLES = ("ff", "qkv", "o")
X = jax.random.normal(jax.random.key(0), (8, 16, 16, 3))
ATTENTION = ("query", "key", "value")


@pytest.fixture(autouse=True)
def as_users_compute():
  mesh = jax.make_mesh((1,), ("fsdp",))  # its models name this axis
  with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"), jax.set_mesh(mesh):
    yield


def vit():
  return jimm.VisionTransformer(
    num_classes=4, img_size=16, patch_size=8, num_layers=2, num_heads=2, mlp_dim=32,
    hidden_size=16, rngs=nnx.Rngs(0),
  )  # fmt: skip


def rules_of(name):
  return nms.Rules(dict.fromkeys(ROLES, nms.recipe(name, pattern="2:8", phases=PHASES)))


def is_nm(w):
  """By numpy alone, along the last axis."""
  counts = (np.asarray(w).reshape(-1, 8) != 0).sum(-1)
  return (counts <= 2).all() and counts.mean() > 1.5


@pytest.mark.parametrize("name", ["sr_ste", "mdgf_exponential", "sdgf_stepwise", "idp"])
def test_the_line_trains_nm_weights(name):
  model = vit()
  optimizer = nnx.Optimizer(model, nms.sparse(optax.adamw(1e-2), rules_of(name)), wrt=nnx.Param)

  @nnx.jit
  def step(model, optimizer):
    loss = lambda model: jnp.mean((model(X) - X.mean((1, 2, 3))[:, None]) ** 2)
    optimizer.update(model, nnx.grad(loss)(model))

  for _ in range(PHASES.total):
    step(model, optimizer)
  layers, dim = model.encoder.layers, 16
  for i in range(2):  # (layers, in, ...) and (layers, heads, head_dim, out)
    for layer in (*(getattr(layers.attn, x) for x in ATTENTION), *layers.mlp.layers[:4:3]):
      kernel = np.asarray(layer.kernel[...])[i]
      assert is_nm(kernel.reshape(len(kernel), -1).T)
    assert is_nm(np.asarray(layers.attn.out.kernel[...])[i].reshape(dim, dim).T)
  assert np.all(np.asarray(model.classifier.kernel[...]) != 0)


def test_axes_of_the_family_are_those_of_the_program():
  rules, model = rules_of("sr_ste"), vit()
  assert len(rules.assign(nnx.state(model, nnx.Param)).places) == 6
  assert rules.for_model(lambda model, x: model(x), model, X) == rules


def test_its_pooling_head_which_no_trace_can_follow():
  """Its query is a parameter, so a product of parameters comes first."""
  model = jimm.SigLIPVisionModel(16, 2, 64, 8, rngs=nnx.Rngs(0))
  places = rules_of("sr_ste").assign(nnx.state(model, nnx.Param)).places
  head = model.encoder.map_head.attn
  for name in (*ATTENTION, "out"):
    layer, site = getattr(head, name), places[f"encoder/map_head/attn/{name}/kernel"]
    # Of an input with one feature, only that feature's slice along the axes has a gradient.
    x = jnp.zeros((1, 1, 64) if name == "out" else (1, 64)).at[..., 5].set(1.0)
    grad = nnx.grad(lambda layer, x: jnp.sum(layer(x)))(layer, x).kernel[...]
    others = {*range(grad.ndim)} - {*site.groups.axes}
    assert np.flatnonzero(np.abs(np.asarray(grad)).sum(tuple(others))).tolist() == [5], name
