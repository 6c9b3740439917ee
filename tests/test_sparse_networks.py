"""Every network of sparse layers is the dense one on `sparsify`'s parameters, bit for bit."""

import functools

import jax
import jax.numpy as jnp
import pytest
import test_t5 as t5
import test_vision_models as images
from reference_arrays import assert_same

import nm_sparsity_jax as nms
from nm_sparsity_jax.core import trace
from nm_sparsity_jax.core.trees import flatten
from nm_sparsity_jax.training.layers import COLLECTION, STATE_COLLECTION, with_step

# Gradients are made up here: no optimizer takes them.
pytestmark = pytest.mark.filterwarnings("ignore:.* adds lam:UserWarning")
FIELDS = {
  "sdgf_stepwise": {"decay_kind": "linear"},
  "sdgf_geometric": {"k": 2},
  "custom": {"path": ((3, "2:4", 1.0), (6, "1:4", 0.5), (8, "1:4", 0.0))},
  "snip": {"batches": 2},
}
EACH = [
  nms.recipe(name, pattern="1:4", phases=t5.PHASES, **FIELDS.get(name, {}))
  for name in nms.recipes.RECIPES
]


def make_t5(scan, rules):
  """bfloat16, so that a mask after the cast would be another; with dropout."""
  policy = "nm_masks" if scan else "none"
  fields = dict(depth=1 + scan, dtype=jnp.bfloat16, scan_layers=scan, remat_policy=policy)
  network = t5.make(rules=rules, **fields)
  # This generator compiles faster than the usual one.
  apply = functools.partial(network.apply, rngs={"dropout": jax.random.key(7, impl="unsafe_rbg")})
  return t5.shapes_of(network), lambda variables, batch: (apply(variables, *batch), {}), t5.BATCH


def make_images(name, remat, rules):
  """As in training: by the statistics of the batch, which become new averages."""
  network = images.network(name, rules, remat=remat, drop_path=0.0, **images.SMALLER[name])
  apply = functools.partial(network.apply, train=True, mutable=["batch_stats"])
  return images.shapes_of(network), apply, images.images(network)


NETWORKS = {
  "t5": functools.partial(make_t5, False),
  "t5, scanned under remat": functools.partial(make_t5, True),
  "vit under remat": functools.partial(make_images, "vit_test", True),
  "swin": functools.partial(make_images, "swinv2_test", False),
  "resnet under remat": functools.partial(make_images, "resnet_test", True),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_a_sparse_network_is_the_dense_one_on_sparsified_parameters(name):
  """Outputs, new state and gradients, by every recipe; and the program has the layers' axes."""
  dense_shapes, dense, batch = NETWORKS[name](None)
  axes = dense_shapes.get("params_axes")
  variables = images.drawn({k: x for k, x in dense_shapes.items() if k != "params_axes"})
  params = variables.pop("params")
  kernels = [path for path, _ in flatten(params) if path.endswith("kernel")]
  places = {path: EACH[i % len(EACH)] for i, path in enumerate(kernels)}
  layer_rules = nms.Rules(places, indivisible="skip")  # a stem has three channels
  # Of a scan: layers see no stacked axis, and `sparsify` does.
  rules = layer_rules.with_logical_axes(axes) if axes else layer_rules
  sites = rules.assign(params).places
  forward = lambda params, batch: dense({**variables, "params": params}, batch)
  traced = trace.trace(forward, params, batch).axes
  for path, site in sites.items():
    # The network of relative positions gets constants alone.
    assert traced.get(path) == site.groups.axes or "cpb_mlp" in path

  shapes, sparse, _ = NETWORKS[name](layer_rules)
  assert dense_shapes.items() <= shapes.items()
  masks = {path: (x.shape, x.dtype) for path, x in flatten(shapes[STATE_COLLECTION])}
  assert masks == {path: (s.shape, bool) for path, s in sites.items() if s.recipe.stateful}
  empty = {key: shapes[key] for key in (COLLECTION, STATE_COLLECTION)}

  def outputs_and_grads(apply, params, rest):
    def loss(params):
      y, new = apply({**rest, "params": params}, batch)
      return jnp.sum(jnp.sin(y)), (y, dict(new))

    return jax.value_and_grad(loss, has_aux=True)(params)

  @jax.jit
  def run_sparse(params, step, state):
    return outputs_and_grads(sparse, params, variables | with_step(empty, step, state))

  @jax.jit
  def sparsify_with_vjp(params, step, state, grads):
    effective, back = jax.vjp(lambda p: nms.sparsify(p, rules, step, state), params)
    return effective, back(grads)[0]

  @jax.jit
  def update(params, state, step):
    """Parameters wander, so that parent masks matter."""
    grads = jax.tree.map(lambda w: jnp.cos(w * 1000 + step.astype(jnp.float32)) / 16, params)
    params = jax.tree.map(jnp.subtract, params, grads)
    return params, nms.update_state(state, params, rules, step + 1, grads)

  run_dense = jax.jit(lambda params: outputs_and_grads(dense, params, variables))
  state = nms.init_state(params, rules)
  for step in map(jnp.int32, range(t5.PHASES.total + 1)):
    if step % 3 == 0:  # some of each phase
      got, got_grads = run_sparse(params, step, state)
      effective, _ = sparsify_with_vjp(params, step, state, params)
      want, grads = run_dense(effective)
      assert_same(got, want)
      assert_same(got_grads, sparsify_with_vjp(params, step, state, grads)[1])
    params, state = update(params, state, step)
  assert run_sparse._cache_size() == 1  # one compilation serves all steps
