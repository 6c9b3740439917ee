"""jimm (jax-image-models), unmodified: roles and axes of its stacked blocks, in NNX' optimizer."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conformance import (
  RECIPES,
  assert_sparse,
  assert_sums_over,
  input_of,
  layer_at,
  nnx_call,
  rules_of,
)
from flax import nnx

import nm_sparsity_jax as nms

jimm = pytest.importorskip("jimm")
pytestmark = pytest.mark.filterwarnings("ignore")

STEPS = 16
RULES = rules_of("2:8", STEPS)
X = jax.random.normal(jax.random.key(0), (8, 16, 16, 3))


@pytest.fixture(autouse=True)
def mesh():
  with jax.set_mesh(jax.make_mesh((1,), ("fsdp",))):  # its models name this axis
    yield


def vit():
  return jimm.VisionTransformer(
    num_classes=4, img_size=16, patch_size=8, num_layers=2, num_heads=2, mlp_dim=32,
    hidden_size=16, rngs=nnx.Rngs(0),
  )  # fmt: skip


@pytest.mark.parametrize("name", RECIPES)
def test_the_line_trains_nm_weights(name):
  model, rules = vit(), RULES[name]
  optimizer = nnx.Optimizer(model, nms.sparse(optax.adamw(1e-2), rules), wrt=nnx.Param)

  @nnx.jit
  def step(model, optimizer):
    loss = lambda model: jnp.mean((model(X) - X.mean((1, 2, 3))[:, None]) ** 2)
    optimizer.update(model, nnx.grad(loss)(model))

  for _ in range(STEPS):
    step(model, optimizer)
  # Its kernels are (layers, in, ...) and (layers, heads, head_dim, out).
  assert_sparse(nnx.as_pure(nnx.state(model, nnx.Param)), rules, "2:8", places=6)
  assert np.all(np.asarray(model.classifier.kernel[...]) != 0)


def test_axes_of_the_family_are_those_of_the_program():
  rules, model = RULES["sr_ste"], vit()
  assert len(rules.assign(nnx.state(model, nnx.Param)).sites) == 6
  assert rules.for_model(lambda model, x: model(x), model, X) == rules


def test_its_pooling_head_which_no_trace_can_follow():
  """Its query is a parameter, so a product of parameters comes first."""
  model = jimm.SigLIPVisionModel(16, 2, 64, 8, rngs=nnx.Rngs(0))
  sites = RULES["sr_ste"].assign(nnx.state(model, nnx.Param)).sites
  head = {path: site for path, site in sites.items() if "map_head/attn" in path}
  assert len(head) == 4
  for path, site in head.items():
    layer = layer_at(model, path.removesuffix("/kernel"))
    assert_sums_over(site, layer.kernel[...], input_of(site, 1), nnx_call(layer))
