"""Every network of sparse layers is the dense one on `sparsify`'s parameters, bit for bit."""

import functools

import jax
import jax.numpy as jnp
import pytest
import test_t5 as t5
import test_vision_models as images
from reference_arrays import assert_same

import nm_sparsity_jax as nms
from nm_sparsity_jax.core.trees import flatten
from nm_sparsity_jax.recipes import RECIPES
from nm_sparsity_jax.training.layers import COLLECTION, STATE_COLLECTION, with_step

pytestmark = [  # gradients are made up here: no optimizer takes them
  pytest.mark.filterwarnings("ignore:(idp|sr_ste) at .* adds lam:UserWarning"),
  pytest.mark.filterwarnings("ignore:snip at .* scores:UserWarning"),
]
PHASES = nms.Phases(total=12, dense=2, finetune=3)
COMPARED = (0, 2, 3, 6, 7, 9, 12)  # of the steps: some of each phase, and each change of a level
MORE = {
  "mdgf_exponential": dict(gradient="straight_through"),
  "sdgf_stepwise": dict(decay_kind="linear"),
  "custom": dict(path=((3, "4:8", 1.0), (6, "1:4", 0.5), (8, "1:4", 0.0))),
  "snip": dict(batches=2),
}


def make_t5(scan, rules):
  """bfloat16, so that a mask after the cast would be another; with dropout."""
  policy = "nm_masks" if scan else "none"
  fields = dict(depth=1 + scan, dtype=jnp.bfloat16, scan_layers=scan, remat_policy=policy)
  network = t5.make(rules=rules, **fields)
  # This generator compiles faster than the usual one.
  dropout = {"dropout": jax.random.key(7, impl="unsafe_rbg")}
  return t5.shapes_of(network), lambda variables: (
    network.apply(variables, *t5.BATCH, rngs=dropout),
    {},
  )


def make_images(name, remat, rules):
  """As in training: by the statistics of the batch, which become new averages."""
  network = images.network(name, rules, remat=remat, drop_path=0.0, **images.SMALLER[name])
  apply = functools.partial(network.apply, train=True, mutable=["batch_stats"])
  return images.shapes_of(network), lambda variables: apply(variables, images.images(network))


NETWORKS = {
  "t5": functools.partial(make_t5, False),
  "t5, scanned under remat": functools.partial(make_t5, True),
  "vit under remat": functools.partial(make_images, "vit", True),
  "swin": functools.partial(make_images, "swin", False),
  "resnet under remat": functools.partial(make_images, "resnet", True),
}


def rules_for(params, axes):
  """Each recipe owns a kernel, and another one if there are more kernels than recipes."""
  names, found = sorted(RECIPES), {}
  for path, _ in flatten(params):
    if path.endswith("kernel"):
      name = names[len(found) % len(names)]
      found[path] = nms.recipe(name, pattern="1:4", phases=PHASES, **MORE.get(name, {}))
  rules = nms.Rules(found, indivisible="skip")  # a stem has three channels
  # Of a scan: layers see no stacked axis, and `sparsify` does.
  of_tree = rules.with_logical_axes(axes) if axes else rules
  owners = {site.recipe.name for site in of_tree.assign(params).places.values()}
  assert owners == {*names} - {"dense"}
  return rules, of_tree


def trajectory(params, rules):
  """{step: (parameters, state)}. The parameters wander, so that parent masks matter."""

  @jax.jit
  def update(params, state, step):
    grads = jax.tree.map(lambda w: jnp.cos(w * 1000 + step.astype(jnp.float32)) / 16, params)
    params = jax.tree.map(jnp.subtract, params, grads)
    return params, nms.update_state(state, params, rules, step + 1, grads)

  found, state = {}, nms.init_state(params, rules)
  for step in range(PHASES.total + 1):
    found[step] = params, state
    params, state = update(params, state, jnp.int32(step))
  return found


@pytest.mark.parametrize("name", NETWORKS)
def test_a_sparse_network_is_the_dense_one_on_sparsified_parameters(name):
  """Outputs, new state and gradients of every recipe in every phase."""
  dense_shapes, dense = NETWORKS[name](None)
  variables = images.drawn({k: x for k, x in dense_shapes.items() if k != "params_axes"})
  params = variables.pop("params")
  layer_rules, rules = rules_for(params, dense_shapes.get("params_axes"))
  shapes, sparse = NETWORKS[name](layer_rules)
  empty = {key: shapes[key] for key in (COLLECTION, STATE_COLLECTION)}

  def outputs_and_grads(apply, params, rest):
    def loss(params):
      y, new = apply({**rest, "params": params})
      return jnp.sum(jnp.sin(y)), (y, dict(new))

    return jax.value_and_grad(loss, has_aux=True)(params)

  @jax.jit
  def run_sparse(params, step, state):
    return outputs_and_grads(sparse, params, variables | with_step(empty, step, state))

  @jax.jit
  def sparsify_with_vjp(params, step, state, grads):
    effective, back = jax.vjp(lambda p: nms.sparsify(p, rules, step, state), params)
    return effective, back(grads)[0]

  run_dense = jax.jit(lambda params: outputs_and_grads(dense, params, variables))
  found = trajectory(params, rules)
  for step in COMPARED:
    (params, state), step = found[step], jnp.int32(step)
    got, got_grads = run_sparse(params, step, state)
    effective, _ = sparsify_with_vjp(params, step, state, params)
    want, grads = run_dense(effective)
    assert_same(got, want)
    assert_same(got_grads, sparsify_with_vjp(params, step, state, grads)[1])
  assert run_sparse._cache_size() == 1  # one compilation serves all steps
