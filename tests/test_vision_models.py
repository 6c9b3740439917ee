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


def test_vit_b16_has_86_567_656_parameters_under_timms_names():
  net = vit.ViT(vit.config("vit_b16"))
  params = dict(flatten(shapes_of(net)["params"]))
  assert sum(int(np.prod(x.shape)) for x in params.values()) == 86_567_656
  assert {x.dtype.name for x in params.values()} == {"float32"}
  of_block = {"norm1/scale", "norm1/bias", "norm2/scale", "norm2/bias"}
  of_block |= {f"attn/{x}/{y}" for x in ("q", "k", "v", "proj") for y in ("kernel", "bias")}
  of_block |= {f"mlp/{x}/{y}" for x in ("fc1", "fc2") for y in ("kernel", "bias")}
  want = {f"blocks_{i}/{x}" for i in range(12) for x in of_block}
  want |= {"cls_token", "pos_embed", "norm/scale", "norm/bias", "head/kernel", "head/bias"}
  want |= {"patch_embed/proj/kernel", "patch_embed/proj/bias"}
  assert set(params) == want
  assert params["blocks_3/mlp/fc1/kernel"].shape == (768, 3072)  # (in, out)
  assert params["patch_embed/proj/kernel"].shape == (16, 16, 3, 768)  # HWIO


def test_swinv2_b_w8_has_87_918_816_parameters_under_timms_names():
  net = swin.Swin(swin.config("swinv2_b_w8"))
  params = dict(flatten(shapes_of(net)["params"]))
  assert sum(int(np.prod(x.shape)) for x in params.values()) == 87_918_816
  of_block = {"attn/logit_scale", "attn/cpb_mlp_0/kernel", "attn/cpb_mlp_0/bias"}
  of_block |= {"attn/cpb_mlp_2/kernel", "attn/k/kernel"}  # and no bias of k
  of_block |= {f"attn/{x}/{y}" for x in ("q", "v", "proj") for y in ("kernel", "bias")}
  of_block |= {f"mlp/{x}/{y}" for x in ("fc1", "fc2") for y in ("kernel", "bias")}
  of_block |= {"norm1/scale", "norm1/bias", "norm2/scale", "norm2/bias"}
  depths = net.config.depths
  want = {
    f"layers_{s}/blocks_{i}/{x}" for s, n in enumerate(depths) for i in range(n) for x in of_block
  }
  of_merge = ("reduction/kernel", "norm/scale", "norm/bias")
  want |= {f"layers_{s}/downsample/{x}" for s in (1, 2, 3) for x in of_merge}
  want |= {f"patch_embed/{x}" for x in ("proj/kernel", "proj/bias", "norm/scale", "norm/bias")}
  assert set(params) == want | {"norm/scale", "norm/bias", "head/fc/kernel", "head/fc/bias"}
  assert params["layers_2/downsample/reduction/kernel"].shape == (1024, 512)


def test_resnet50_has_25_557_032_parameters_under_timms_names_and_its_averages_are_state():
  net = resnet.ResNet(resnet.config("resnet50"))
  shapes = shapes_of(net)
  params, state = (dict(flatten(shapes[key])) for key in ("params", "batch_stats"))
  assert set(shapes) == {"params", "batch_stats"}
  assert sum(int(np.prod(x.shape)) for x in params.values()) == 25_557_032
  convs, norms = {"conv1"}, {"bn1"}
  for stage, depth in enumerate(net.config.depths, 1):
    for i in range(depth):
      convs |= {f"layer{stage}_{i}/conv{j}" for j in (1, 2, 3)}
      norms |= {f"layer{stage}_{i}/bn{j}" for j in (1, 2, 3)}
    convs.add(f"layer{stage}_0/downsample_conv")
    norms.add(f"layer{stage}_0/downsample_bn")
  want = {f"{x}/kernel" for x in convs} | {f"{x}/{y}" for x in norms for y in ("scale", "bias")}
  assert set(params) == want | {"fc/kernel", "fc/bias"}
  assert set(state) == {f"{x}/{y}" for x in norms for y in ("mean", "var")}
  assert params["layer4_1/conv2/kernel"].shape == (3, 3, 512, 512)  # HWIO


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


@pytest.mark.parametrize("name", ["vit", "swin"])
def test_dropout_acts_in_training_alone(name):
  net = network(name, dropout=0.5)
  variables, x = drawn(shapes_of(net)), images(net)
  run = jax.jit(lambda key: net.apply(variables, x, train=True, rngs={"dropout": key}))
  assert (run(jax.random.key(0)) != run(jax.random.key(1))).any()
  evaluation = jax.make_jaxpr(net.apply)(variables, x)
  assert str(evaluation) == str(jax.make_jaxpr(network(name).apply)(variables, x))


def test_batch_statistics_are_averaged_by_a_tenth_of_each_batch():
  net = network("resnet")
  variables = drawn(shapes_of(net))
  x = images(net, 4)
  convolved = jax.lax.conv_general_dilated(
    x,
    variables["params"]["conv1"]["kernel"],
    (2, 2),
    ((3, 3), (3, 3)),
    dimension_numbers=("NHWC", "HWIO", "NHWC"),
  )
  apply = jax.jit(functools.partial(net.apply, mutable=["batch_stats"]), static_argnames="train")
  new = apply(variables, x, train=True)[1]["batch_stats"]["bn1"]
  old = variables["batch_stats"]["bn1"]
  values = np.asarray(convolved, np.float64).reshape(-1, 64)
  for key, of_batch in (("mean", values.mean(0)), ("var", values.var(0))):
    want = 0.9 * np.asarray(old[key], np.float64) + 0.1 * of_batch
    np.testing.assert_allclose(new[key], want, rtol=1e-5, atol=1e-6)
  # An evaluation changes nothing.
  again = apply(variables, x)[1]["batch_stats"]
  assert_same_bits(again, variables["batch_stats"])


def test_windows_shift_in_every_other_block_and_shrink_with_the_feature_map():
  cfg = swin.config("swinv2_test")
  assert (cfg.sides, cfg.widths) == ((8, 4, 2), (16, 32, 64))
  # A change of one token reaches the others of its window alone, and after a shift those of the
  # windows that lay around it.
  for shifted, rows in ((False, (4, 8)), (True, (2, 6))):
    block = swin.Block(1, shifted, cfg)
    x = normal(3, 1, 8, 8, 16)
    init = functools.partial(block.init, rate=0.0, train=False)
    variables = drawn(jax.eval_shape(init, jax.random.key(0), x))
    run = jax.jit(functools.partial(block.apply, variables, rate=0.0, train=False))
    moved = np.asarray(run(x) != run(x.at[0, 5, 5].add(1.0)))[0].any(-1)
    want = np.zeros((8, 8), bool)
    want[slice(*rows), slice(*rows)] = True
    np.testing.assert_array_equal(moved, want)


def test_a_token_without_a_direction_has_a_finite_gradient():
  x = jnp.zeros((1, 2, 4)).at[0, 1].set(1.0)
  y, back = jax.vjp(swin_windows._direction, x)
  np.testing.assert_allclose(y[0], [[0, 0, 0, 0], [0.5, 0.5, 0.5, 0.5]])
  assert jnp.isfinite(back(jnp.ones_like(y))[0]).all()


@pytest.mark.parametrize(
  "make, words",
  [
    (lambda: vit.config("vit_c16"), "'vit_c16'.*one of vit_tiny_3, vit_b16"),
    (lambda: vit.config("vit_b16", depth=3), "no field 'depth': its fields are image_size"),
    (lambda: vit.config("vit_b16", image_size=225), r"patch must divide.*=224 or 240\."),
    (lambda: vit.config("vit_b16", image_size=8), r"Take image_size=16\."),
    (lambda: vit.config("vit_b16", heads=7), r"embed=768, heads=7\): heads must divide embed"),
    (lambda: vit.config("vit_b16", layers=0), r"layers=0\): a size is a whole number from 1"),
    (lambda: vit.config("vit_b16", drop_path=1.0), r"drop_path=1.0\): it is a share"),
    (lambda: vit.config("vit_b16", dtype="f32"), "dtype='f32'.*one of float32, bfloat16"),
    (
      lambda: swin.config("swinv2_b_w8", image_size=224),
      r"window=8\): stage 1 has 28 x 28 tokens, which windows of 8 do not fill",
    ),
    (
      lambda: swin.config("swinv2_b_w8", image_size=260),
      r"65 x 65 tokens are not halved 3 times. Choose an image_size that is a multiple of 32",
    ),
    (lambda: swin.config("swinv2_b_w8", heads=(4, 8, 16)), "each stage has one of both"),
    (lambda: swin.config("swinv2_b_w8", embed=6), "the 4 heads of stage 0 must divide its 6"),
    (lambda: resnet.config("resnet50", widths=(64, 128)), "each stage has one of both"),
    (lambda: resnet.config("resnet50", stem=4), "the size of a kernel is odd"),
    (lambda: resnet.config("resnet50", depths=[3, 4, 0, 3]), r"depths=\(3, 4, 0, 3\)\): a size"),
    (
      lambda: jax.eval_shape(network("vit").init, jax.random.key(0), jnp.ones((2, 16, 16, 1))),
      r"\(2, 16, 16, 1\): the network takes \[batch, 16, 16, 3\]. Resize",
    ),
    (lambda: vit.config("vit_b16", drop_path="0.1"), r"drop_path='0.1'\): it is a share"),
    (lambda: resnet.config("resnet50", depths=3), r"depths=3\): give a number for each stage"),
    (lambda: swin.config("swinv2_b_w8", heads=4), r"heads=4\): give a number for each stage"),
    (
      lambda: jax.eval_shape(
        network("vit").init, jax.random.key(0), jnp.ones((2, 16, 16, 3), jnp.uint8)
      ),
      "images of uint8: the network takes floats about 0, such as those that .*augment.normalized",
    ),
  ],
)
def test_a_config_or_image_that_does_not_fit_is_refused_in_a_sentence(make, words):
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
CASES = [(n, how) for n in FAMILIES for how in ("plain", "remat")] + [("vit", "remat scan")]
# Remat is one function of all families: `make test` has it where blocks have a state, and in scans,
# and without it the two others.
REPEATED = {("vit", "remat"), ("swin", "remat"), ("resnet", "plain")}
CASES = [
  pytest.param(*case, marks=[pytest.mark.slow] if case in REPEATED else []) for case in CASES
]


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


@functools.cache
def sparsifier(places):
  """Rules, and `sparsify` by them: one program for all steps of a network."""
  rules = nms.Rules(dict(places))
  return rules, jax.jit(lambda params, step, state: nms.sparsify(params, rules, step, state))


def densities(name, places, step, state=None):
  """Place -> share of weights that the effective kernels keep at a step."""
  params = drawn(shapes_of(network(name)))["params"]
  rules, sparsify = sparsifier(tuple(places.items()))
  effective = dict(flatten(sparsify(params, jnp.int32(step), state)))
  found = {}
  for place, recipe in places.items():
    paths = [path for path, made in rules.assign(params).places.items() if made.recipe == recipe]
    kept = [float((np.asarray(effective[path]) != 0).mean()) for path in paths]
    assert paths and len(set(kept)) == 1
    found[place] = kept[0]
  return found, effective, dict(flatten(params))


STEPWISE = nms.recipe("sdgf_stepwise", pattern="1:8", phases=nms.Phases(total=100, finetune=20))


def test_query_and_key_of_swin_follow_the_step():
  places = {
    "ff": STEPWISE,
    "qk": nms.recipe("sdgf_stepwise", pattern="1:4", phases=STEPWISE.phases),
  }
  for step, ff, qk in (
    (10, 7 / 8, 3 / 4),
    (39, 4 / 8, 2 / 4),
    (79, 1 / 8, 1 / 4),
    (99, 1 / 8, 1 / 4),
  ):
    assert densities("swin", places, step)[0] == {"ff": ff, "qk": qk}
  decay = nms.recipe("mdgf_exponential", pattern="1:4", phases=STEPWISE.phases)
  _, effective, params = densities("swin", {"qk": decay}, 90)
  assert (np.asarray(effective["layers_0/blocks_0/attn/q/kernel"]) == 0).mean() == 0.75
  assert (np.asarray(effective["layers_0/blocks_0/attn/v/kernel"]) != 0).all()
  assert (params["layers_0/blocks_0/attn/q/kernel"] != 0).all()


@pytest.mark.parametrize("name", ["vit", "swin"])
def test_feed_forward_and_attention_keep_their_own_patterns_and_biases_stay(name):
  sr_ste = lambda pattern: nms.recipe("sr_ste", pattern=pattern, phases=nms.Phases(total=9))
  found, effective, params = densities(name, {"qkv": sr_ste("1:4"), "ff": sr_ste("1:8")}, 9)
  assert found == {"qkv": 1 / 4, "ff": 1 / 8}
  biases = [path for path in params if path.endswith("bias")]
  of_sparse = [path for path in biases if "/mlp/" in path or "/attn/" in path]
  assert len(of_sparse) > 10
  for path in biases:
    np.testing.assert_array_equal(effective[path], params[path], err_msg=path)


def test_convolutions_run_structure_decay_and_the_fine_tune_phase():
  for step, share in ((10, 7 / 8), (39, 4 / 8), (59, 2 / 8), (79, 1 / 8), (99, 1 / 8)):
    found, effective, _ = densities("resnet", {"conv": STEPWISE}, step)
    assert found == {"conv": share}
    kernel = np.asarray(effective["layer2_0/conv2/kernel"])  # 3 x 3
    groups = np.moveaxis(kernel, 2, -1).reshape(-1, 8)  # inputs at one offset, for one output
    assert ((groups != 0).sum(1) == share * 8).all()


def test_a_stem_of_3_channels_takes_no_groups_of_8():
  net = network("resnet", nms.Rules({"stem": STEPWISE}))
  for act in (lambda: shapes_of(net), lambda: densities("resnet", {"stem": STEPWISE}, 0)):
    with pytest.raises(ValueError, match="conv1/kernel.*3") as told:
      act()
    assert "8" in str(told.value)
