"""ViT, Swin V2 and ResNet: structure, and that sparse layers are `sparsify` bit for bit."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nm_sparsity_jax as nms
from nm_sparsity_jax.core.trees import flatten, map_with_names
from nm_sparsity_jax.models import image_parts, resnet, swin, swin_windows, vit
from nm_sparsity_jax.recipes import RECIPES
from nm_sparsity_jax.training import layers

# The same for each family: its network, and the name of its tiny config.
FAMILIES = {
  "vit": (vit.ViT, vit, "vit_test"),
  "swin": (swin.Swin, swin, "swinv2_test"),
  "resnet": (resnet.ResNet, resnet, "resnet_test"),
}
# A part of the tiny config, for what every part of it would show.
SMALLER = {
  "vit": {},
  "swin": dict(depths=(2,), heads=(1,)),
  "resnet": dict(depths=(2, 2), widths=(16, 16)),
}
family = pytest.mark.parametrize("name", FAMILIES)


def network(name, rules=None, **changes):
  cls, module, tiny = FAMILIES[name]
  return cls(module.config(tiny, **changes), rules)


def normal(seed, *shape):
  """By numpy: jax.random compiles anew for every shape."""
  return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def images(net, n=2):
  return normal(1, n, net.config.image_size, net.config.image_size, net.config.channels)


def shapes_of(net):
  return jax.eval_shape(net.init, jax.random.key(0), images(net))


def drawn(shapes, seed=0):
  """Variables of a network, none of them 0: a new norm may hide its branch."""
  rng = np.random.default_rng(seed)

  def draw(path, x):
    value = rng.normal(size=x.shape) / np.sqrt(x.shape[-2] if x.ndim > 1 else 16)
    value = value + (path.endswith("scale") and x.ndim == 1)
    return jnp.asarray(abs(value) + 1 if path.endswith("var") else value, x.dtype)

  return map_with_names(draw, dict(shapes))


def bits(x):
  x = np.asarray(x)
  return x.view(f"u{x.dtype.itemsize}") if x.dtype != bool else x


def assert_same_bits(got, want, note=""):
  got, want = dict(flatten(got)), dict(flatten(want))
  assert list(got) == list(want)
  for path in want:
    assert got[path].dtype == want[path].dtype, path
    np.testing.assert_array_equal(bits(got[path]), bits(want[path]), err_msg=f"{note} {path}")


# --- structure --------------------------------------------------------------------------------


# Names and numbers are compared with timm's own: test_weights.py.
@pytest.mark.parametrize(
  "net, count, kernel, shape",
  [
    (vit.ViT(vit.config("vit_b16")), 86_567_656, "blocks_3/mlp/fc1", (768, 3072)),
    (
      swin.Swin(swin.config("swinv2_b_w8")), 87_918_816,
      "layers_2/downsample/reduction", (1024, 512),
    ),
    (resnet.ResNet(resnet.config("resnet50")), 25_557_032, "layer4_1/conv2", (3, 3, 512, 512)),
  ],
)  # fmt: skip
def test_networks_have_the_published_number_of_parameters(net, count, kernel, shape):
  params = dict(flatten(shapes_of(net)["params"]))
  assert sum(int(np.prod(x.shape)) for x in params.values()) == count
  assert {x.dtype.name for x in params.values()} == {"float32"}
  assert params[f"{kernel}/kernel"].shape == shape


def test_scanned_blocks_are_the_single_ones_stacked_on_axis_0():
  plain, scanned = network("vit"), network("vit", scan=True)
  variables = drawn(shapes_of(plain))
  params = dict(variables["params"])
  blocks = [params.pop(f"blocks_{i}") for i in range(plain.config.layers)]
  params["blocks"] = jax.tree.map(lambda *x: jnp.stack(x), *blocks)
  assert jax.tree.map(jnp.shape, params) == jax.tree.map(
    jnp.shape, dict(shapes_of(scanned)["params"])
  )
  want = jax.jit(plain.apply)(variables, images(plain))
  got = jax.jit(scanned.apply)({"params": params}, images(plain))
  np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_without_a_class_token_the_mean_of_all_tokens_is_normalized():
  net = network("vit", class_token=False)
  params = shapes_of(net)["params"]
  assert params["pos_embed"].shape == (1, 16, 32)
  assert "cls_token" not in params and "norm" not in params and "fc_norm" in params
  assert net.config.tokens == 16


@pytest.mark.parametrize(
  "kind, within", [("float32", 1e-3), ("bfloat16", 4e-3), ("float64", 1e-12)]
)
def test_gelu_by_erf_is_the_one_by_erfc(kind, within):
  """In bfloat16 a sum 1 + erf of its own would be 0, or off by a quarter, from -2 on."""
  with jax.enable_x64(kind == "float64"):
    x = jnp.linspace(-4, 4, 801, dtype=kind)
    wide = "float64" if kind == "float64" else "float32"
    want, got = jax.nn.gelu(x.astype(wide), approximate=False), image_parts.gelu(x)
    assert got.dtype == x.dtype
    far = jnp.abs(got.astype(want.dtype) - want)
    assert float((far / jnp.maximum(jnp.abs(want), 1e-3)).max()) < within


@family
def test_logits_are_float32_where_the_computation_is_bfloat16(name):
  exact, narrow = network(name), network(name, dtype="bfloat16")
  variables, x = drawn(shapes_of(exact)), images(exact)
  assert jax.tree.map(jnp.shape, dict(shapes_of(narrow))) == jax.tree.map(jnp.shape, variables)
  want, got = jax.jit(exact.apply)(variables, x), jax.jit(narrow.apply)(variables, x)
  assert got.dtype == want.dtype == jnp.float32
  assert got.shape == (2, 10)
  scale = float(jnp.abs(want).max())
  assert 0 < float(jnp.abs(got - want).max()) < 0.1 * scale


def mutable(variables):
  return [key for key in variables if key != "params"]


@pytest.mark.parametrize("name, scan", [(n, False) for n in FAMILIES] + [("vit", True)])
def test_drop_path_skips_branches_of_whole_examples_in_training_alone(name, scan):
  changes = {"scan": True} if scan else {}
  net, never = (network(name, drop_path=rate, **SMALLER[name], **changes) for rate in (0.9, 0.0))
  variables = drawn(shapes_of(net))
  x = jnp.broadcast_to(images(net, 1), (8, *images(net).shape[1:]))

  @functools.partial(jax.jit, static_argnums=0)
  def run(net, key):
    rngs = {"dropout": key}
    return net.apply(variables, x, train=True, rngs=rngs, mutable=mutable(variables))[0]

  one, again, other = (np.asarray(run(net, jax.random.key(seed))) for seed in (0, 0, 1))
  np.testing.assert_array_equal(one, again)
  assert (one != other).any()
  if name != "resnet":  # there the statistics of the batch mix examples
    assert 1 < len(np.unique(one[:, 0])) < 8  # equal examples, some with equal branches
  kept = run(never, jax.random.key(0))
  np.testing.assert_allclose(kept, np.broadcast_to(kept[:1], kept.shape), rtol=1e-4, atol=1e-5)


def test_a_token_without_a_direction_has_a_finite_gradient():
  x = jnp.zeros((1, 2, 4)).at[0, 1].set(1.0)
  y, back = jax.vjp(swin_windows._direction, x)
  np.testing.assert_allclose(y[0], [[0, 0, 0, 0], [0.5, 0.5, 0.5, 0.5]])
  assert jnp.isfinite(back(jnp.ones_like(y))[0]).all()


def initialized(*shape, dtype=jnp.float32):
  jax.eval_shape(network("vit").init, jax.random.key(0), jnp.ones((2, *shape), dtype))


@pytest.mark.parametrize(
  "make, words",
  [
    (lambda: vit.config("vit_c16"), "'vit_c16'.*vit_b16"),
    (lambda: vit.config("vit_b16", image_size=225), "patch must divide"),
    (lambda: vit.config("vit_b16", heads=7), "heads must divide"),
    (lambda: vit.config("vit_b16", layers=0), "layers=0"),
    (lambda: vit.config("vit_b16", drop_path=1.0), "drop_path=1.0"),
    (lambda: vit.config("vit_b16", dtype="f32"), "dtype='f32'.*bfloat16"),
    (lambda: swin.config("swinv2_b_w8", image_size=224), "window=8.*stage 1"),
    (lambda: swin.config("swinv2_b_w8", image_size=260), "multiple of 32"),
    (lambda: swin.config("swinv2_b_w8", heads=(4, 8, 16)), "each stage"),
    (lambda: swin.config("swinv2_b_w8", embed=6), "4 heads of stage 0"),
    (lambda: resnet.config("resnet50", stem=4), "odd"),
    (lambda: resnet.config("resnet50", depths=[3, 4, 0, 3]), r"depths=\(3, 4, 0, 3\)"),
    (lambda: initialized(16, 16, 1), r"\[batch, 16, 16, 3\]"),
    (lambda: initialized(16, 16, 3, dtype=jnp.uint8), "uint8"),
  ],
)
def test_a_config_or_image_that_does_not_fit_is_refused(make, words):
  with pytest.raises(ValueError, match=words):
    make()


# --- every recipe: the network is the dense one on sparsify's parameters ------------------------

PHASES = nms.Phases(total=12, dense=2, finetune=3)
COMPARED = (0, 2, 3, 6, 7, 9, 12)  # of the steps: some of each phase, and each change of a level
MORE = {
  "mdgf_exponential": dict(gradient="straight_through"),
  "sdgf_stepwise": dict(decay_kind="linear"),
  "custom": dict(path=((3, "4:8", 1.0), (6, "1:4", 0.5), (8, "1:4", 0.0))),
  "snip": dict(batches=2),
}


def make(name, pattern="1:4"):
  return nms.recipe(name, pattern=pattern, phases=PHASES, **MORE.get(name, {}))


def rules_for(name, changes):
  """Each recipe owns a kernel, and another one if there are more kernels than recipes."""
  found = {}
  # A scanned network has fewer kernels: these come first.
  names = sorted(RECIPES, key=lambda recipe: (recipe not in ("idp", "snip", "custom"), recipe))
  for path, x in flatten(shapes_of(network(name, **changes))["params"]):
    if path.endswith("kernel") and x.shape[-2] % 8 == 0:
      found[path] = make(names[len(found) % len(names)])
  assert "scan" in changes or {recipe.name for recipe in found.values()} == set(names)
  # The axis is for `sparsify`: layers know their own, and see no stacked one.
  return nms.Rules(found, axes={r".*kernel": -2})


@functools.cache
def trajectory(name, changes):
  """[step] -> (variables, state). The parameters wander, so that parent masks matter."""
  rules = rules_for(name, dict(changes))
  variables = drawn(shapes_of(network(name, **dict(changes))))
  rest = {key: x for key, x in variables.items() if key != "params"}

  @jax.jit
  def update(params, state, step):
    grads = jax.tree.map(lambda w: jnp.cos(w * 1000 + step.astype(jnp.float32)) / 16, params)
    params = jax.tree.map(jnp.subtract, params, grads)
    return params, nms.update_state(state, params, rules, step + 1, grads)

  found, params = [], variables["params"]
  state = nms.init_state(params, rules)
  for step in range(PHASES.total + 1):
    found.append((params, state))
    params, state = update(params, state, jnp.int32(step))
  return found, rest


@functools.cache
def sparsify_with_vjp(name, changes):
  """(params, step, state, dL/dW~) -> (W~, dL/dW) by `sparsify`."""
  rules = rules_for(name, dict(changes))

  @jax.jit
  def run(params, step, state, grads):
    effective, back = jax.vjp(lambda p: nms.sparsify(p, rules, step, state), params)
    return effective, back(grads)[0]

  return run


def outputs_and_grads(net, x):
  """As in training: batch statistics of the batch, and new averages."""

  def loss(params, rest):
    new = [key for key in rest if key == "batch_stats"]
    y, state = net.apply({**rest, "params": params}, x, train=True, mutable=new)
    return jnp.sum(jnp.sin(y)), (y, dict(state))

  return jax.value_and_grad(loss, has_aux=True)


# Each kind of layer once. That `plain` and `remat` take the same spares each other two programs.
COMPARED_PARTS = SMALLER | {"swin": dict(depths=(2, 1), heads=(1, 2))}
# Remat is one function of all families: here where blocks have a state, and in scans.
CASES = [("vit", "plain"), ("swin", "plain"), ("resnet", "remat"), ("vit", "remat scan")]


@pytest.mark.filterwarnings("ignore:(idp|sr_ste) at .* adds lam:UserWarning")  # no optimizer
@pytest.mark.filterwarnings("ignore:snip at .* scores:UserWarning")
@pytest.mark.parametrize("name, how", CASES)
def test_sparse_network_is_the_dense_one_on_sparsified_parameters(name, how):
  changes = {"scan": True} if "scan" in how else COMPARED_PARTS[name]
  rules, key = rules_for(name, changes), tuple(changes.items())
  remat = dict(remat="remat" in how, drop_path=0.0, **changes)
  sparse, dense = (network(name, r, **remat) for r in (rules, None))
  x, shapes = images(sparse), dict(shapes_of(sparse))
  told = {key: shapes[key] for key in (layers.COLLECTION, layers.STATE_COLLECTION)}
  found, rest = trajectory(name, key)

  @jax.jit
  def run_sparse(params, step, state):
    return outputs_and_grads(sparse, x)(params, rest | layers.with_step(told, step, state))

  run_dense = jax.jit(lambda params: outputs_and_grads(dense, x)(params, rest))
  reference = sparsify_with_vjp(name, key)
  for step in COMPARED:
    (params, state), step = found[step], jnp.int32(step)
    got, got_grads = run_sparse(params, step, state)
    effective, _ = reference(params, step, state, params)
    want, grads = run_dense(effective)
    assert_same_bits(got, want, f"step {step}")
    assert_same_bits(got_grads, reference(params, step, state, grads)[1], f"step {step}")
  assert run_sparse._cache_size() == 1  # one compilation serves all steps


# --- what the authors' fork does otherwise: docs/differences.md ---------------------------------


STEPWISE = nms.recipe("sdgf_stepwise", pattern="1:8", phases=nms.Phases(total=100, finetune=20))


@pytest.mark.parametrize("name, role", [("swin", "qk"), ("resnet", "conv")])
def test_kernels_follow_the_step_from_level_to_level_and_nothing_else_is_touched(name, role):
  params = drawn(shapes_of(network(name)))["params"]
  rules = nms.Rules({role: STEPWISE})
  sparse = rules.assign(params).places
  sparsify = jax.jit(lambda step: nms.sparsify(params, rules, step))
  for step, share in ((10, 7 / 8), (39, 4 / 8), (59, 2 / 8), (79, 1 / 8), (99, 1 / 8)):
    for path, w in flatten(sparsify(jnp.int32(step))):
      kept = np.moveaxis(np.asarray(w), -2, -1).reshape(-1, 8) != 0 if path in sparse else w != 0
      assert (kept.sum(-1) == share * 8).all() if path in sparse else kept.all(), path
