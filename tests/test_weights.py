"""timm's weights: the same logits and gradients, bit for bit there and back, every name accounted.

What timm computes lies in vision_reference.npz; where timm is installed it is asked itself.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import vision_reference as reference
from reference_arrays import Reference, assert_same, imported

import nm_sparsity_jax as nms
from nm_sparsity_jax.core.trees import flatten
from nm_sparsity_jax.deploy import safetensors_file, timm
from nm_sparsity_jax.models import resnet, swin, vit

CLASSES = {"vit": (vit, vit.ViT), "swin": (swin, swin.Swin), "resn": (resnet, resnet.ResNet)}
tiny = pytest.mark.parametrize("name", reference.TINY)


def network(name, **changes):
  module, cls = CLASSES[name[:4].rstrip("_")]
  return cls(module.config(name, **changes))


@functools.cache
def shapes_of(net):
  cfg = net.config
  x = jax.ShapeDtypeStruct((1, cfg.image_size, cfg.image_size, cfg.channels), jnp.float32)
  return dict(jax.eval_shape(net.init, jax.random.key(0), x))


known = Reference(reference)
names_of, tensors_of = known.names, known.tensors


def variables_of(name):
  return timm.from_timm(tensors_of(name), shapes_of(network(name)))


def assert_close(got, want, what):
  """Relative to the largest: a single number may be near 0."""
  error = np.abs(np.asarray(got, np.float64) - want).max() / np.abs(want).max()
  assert error < 1e-5, f"{what}: {error:.1e}"


# --- what timm computes -------------------------------------------------------------------------


def ours(net, name, variables, count=2):
  """Logits, and the gradient of a weighted sum of them with respect to the images."""
  x = jnp.asarray(reference.images(name, net.config.image_size, count))
  weights = jnp.asarray(reference.hashed(f"weights of {name}", (count, net.config.classes)))

  @jax.jit
  def run(variables, x):
    def loss(x):
      logits = net.apply(variables, x)
      return jnp.sum(logits * weights), logits

    return jax.grad(loss, has_aux=True)(x)

  gradient, logits = run(variables, x)
  return {"logits": logits, "gradient": gradient}


@tiny
def test_logits_and_input_gradients_are_timms(name):
  for what, x in ours(network(name), name, variables_of(name)).items():
    assert_close(x, known.arrays[f"{name}/{what}"], what)


def test_a_scale_of_cosines_beyond_its_clamp_is_clamped_as_timms():
  name, variables = "swinv2_test", variables_of("swinv2_test")
  attn = variables["params"]["layers_2"]["blocks_0"]["attn"]
  attn["logit_scale"] = attn["logit_scale"] + np.float32(reference.CLAMPED)
  assert attn["logit_scale"].min() > 4.7
  logits = ours(network(name), name, variables)["logits"]
  assert_close(logits, known.arrays[f"{name}/clamped"], "logits")
  assert np.abs(logits - known.arrays[f"{name}/logits"]).max() > 1e-3


def test_batch_statistics_are_timms_but_for_the_unbiased_variance_of_torch():
  """docs/differences.md, 'Averages of batch statistics'."""
  name = "resnet_test"
  net, old = network(name), variables_of(name)
  x = jnp.asarray(reference.images(name, 32, 8))
  run = jax.jit(functools.partial(net.apply, train=True, mutable=["batch_stats"]))
  logits, new = run(old, x)
  assert_close(logits, known.arrays[f"{name}/train_logits"], "logits in training")
  before = dict(flatten(old["batch_stats"]))
  # Pixels of a side that a norm sees; the first norm of a stage stands before its stride.
  sides = {"bn1": 16, "layer1": 8, "layer2": 4, "layer3": 2, "layer4": 1}
  strided = {"layer2_0/bn1": 8, "layer3_0/bn1": 4, "layer4_0/bn1": 2}
  for path, mine in flatten(jax.device_get(new["batch_stats"])):
    norm, _, leaf = path.rpartition("/")
    count = 8 * strided.get(norm, sides[path.split("/")[0].split("_")[0]]) ** 2
    if leaf == "var":  # what the batch added to the average is n / (n - 1) times as much
      mine = 0.9 * before[path] + (mine - 0.9 * before[path]) * count / (count - 1)
    theirs = known.arrays[f"{name}/new/{timm.name_of(f'batch_stats/{path}').name}"]
    np.testing.assert_allclose(mine, theirs, rtol=2e-5, atol=2e-6, err_msg=path)


def test_the_committed_reference_is_what_timm_computes():
  known.compare(*imported("torch", "timm")[1:])


@tiny
def test_timm_loads_a_finalized_network_strictly_and_computes_the_same(name):
  torch, library = imported("torch", "timm")
  net, variables = network(name), variables_of(name)
  params = nms.finalize(variables["params"], some_rules(name), 0, early=True)
  variables = {**variables, "params": params}
  theirs = reference.network(library, name)
  state = {key: torch.tensor(x) for key, x in timm.to_timm(variables).items()}  # float32
  theirs.load_state_dict(state, strict=True)
  want = reference.run(theirs, name, net.config.image_size)
  for (what, got), x in zip(ours(net, name, variables).items(), want, strict=True):
    assert_close(got, x, what)


@pytest.mark.slow
@pytest.mark.parametrize("name", reference.FULL)
def test_full_size_networks_are_timms(name):
  _, library = imported("torch", "timm")
  net, theirs = network(name), reference.network(library, name)
  state = {key: reference.values(key, tuple(x.shape)) for key, x in theirs.state_dict().items()}
  variables = timm.from_timm(state, shapes_of(net))
  assert_same(timm.to_timm(variables), state)
  want = reference.run(theirs, name, net.config.image_size, 1)
  got = ours(net, name, variables, 1)
  assert_close(got["logits"], want[0], "logits")
  if name == "resnet50":
    # Of ten million relus some are so near 0 that rounding turns them on or off: timm's own
    # gradient in float32 is off by 2.4e-3 for that. So half of the pixels tell there.
    off = np.abs(np.asarray(got["gradient"], np.float64) - want[1]) / np.abs(want[1]).max()
    assert np.median(off) < 1e-6
  else:
    assert_close(got["gradient"], want[1], "gradient")


# --- there and back -----------------------------------------------------------------------------


@tiny
def test_weights_come_back_bit_for_bit_and_every_name_is_accounted_for(name, tmp_path):
  net, tensors = network(name), tensors_of(name)
  shapes = shapes_of(net)
  variables = timm.from_timm(tensors, shapes)
  assert jax.tree.map(np.shape, variables) == jax.tree.map(lambda x: x.shape, shapes)
  assert_same(timm.to_timm(variables), tensors)
  timm.write(tmp_path / "new/model.safetensors", variables)
  assert_same(timm.read(tmp_path / "new/model.safetensors", shapes, net.config), variables)
  assert_same(timm.from_timm(tensors), variables_of(name))  # the names tell the network


def test_q_k_and_v_are_thirds_of_one_tensor_in_this_order():
  tensors, attn = tensors_of("vit_test"), variables_of("vit_test")["params"]["blocks_1"]["attn"]
  for i, which in enumerate("qkv"):
    rows = slice(32 * i, 32 * (i + 1))
    kernel, bias = (tensors[f"blocks.1.attn.qkv.{leaf}"][rows] for leaf in ("weight", "bias"))
    np.testing.assert_array_equal(attn[which]["kernel"], kernel.T)
    np.testing.assert_array_equal(attn[which]["bias"], bias)
  attn = variables_of("swinv2_test")["params"]["layers_1"]["blocks_0"]["attn"]
  want = tensors_of("swinv2_test")["layers.1.blocks.0.attn.v_bias"]
  np.testing.assert_array_equal(attn["v"]["bias"], want)
  assert "bias" not in attn["k"]


def test_a_file_of_half_the_width_is_read_into_float32(tmp_path):
  tensors = {key: x.astype(jnp.bfloat16) for key, x in tensors_of("vit_test").items()}
  safetensors_file.write(tmp_path / "half.safetensors", tensors)
  found = timm.read(tmp_path / "half.safetensors", shapes_of(network("vit_test")))
  assert {x.dtype.name for x in jax.tree.leaves(found)} == {"float32"}
  kernel = found["params"]["head"]["kernel"]
  np.testing.assert_array_equal(kernel, tensors["head.weight"].astype(np.float32).T)


# --- zeros ------------------------------------------------------------------------------------

PLACES = {
  "vit_test": (r"blocks_\d+/mlp/fc\d/kernel", r"blocks_\d+/attn/[qk]/kernel"),
  "swinv2_test": (
    r"layers_\d/blocks_\d+/mlp/fc\d/kernel",
    r"layers_\d/blocks_\d+/attn/[qk]/kernel",
  ),
  "resnet_test": (r"layer\d_\d/conv[13]/kernel", r"layer\d_\d/conv2/kernel"),
}


def some_rules(name):
  first, second = PLACES[name]
  make = lambda pattern: nms.recipe("sr_ste", pattern=pattern, phases=nms.Phases(total=1))
  return nms.Rules({first: make("1:4"), second: make("2:8")})


@tiny
def test_zeros_stand_in_groups_along_axis_1_of_timms_tensors(name):
  """By hand, as a reader in torch would look; `export` looks by `verify`: test_export.py."""
  variables, rules = variables_of(name), some_rules(name)
  final = jax.device_get(nms.finalize(variables["params"], rules, 0, early=True))
  tensors, dense = timm.to_timm({**variables, "params": final}), tensors_of(name)
  places = rules.assign(final).places
  assert len(places) > 5
  for path, place in places.items():
    there = timm.name_of(f"params/{path}")
    x, w = (there.rows(found[there.name]) for found in (tensors, dense))
    groups = np.moveaxis(x, 1, -1).reshape(-1, place.pattern.m)
    np.testing.assert_array_equal((groups != 0).sum(-1), place.pattern.n, err_msg=path)
    mask = place.recipe.mask(jnp.asarray(w), jnp.int32(1), 1, None)
    np.testing.assert_array_equal(x, np.where(mask, w, 0), err_msg=path)


# --- what is refused ----------------------------------------------------------------------------


def test_derived_tensors_are_not_read():
  attn = "layers.0.blocks.1.attn"
  more = {f"{attn}.relative_coords_table": np.zeros((1, 7, 7, 2), np.float32),
          f"{attn}.k_bias": np.zeros(16, np.float32),
          f"{attn}.relative_position_index": np.zeros((16, 16), np.int64),
          "layers.0.blocks.1.attn_mask": np.zeros((4, 16, 16), np.float32)}  # fmt: skip
  net = network("swinv2_test")
  found = timm.from_timm(tensors_of("swinv2_test") | more, shapes_of(net), net.config)
  assert_same(found, variables_of("swinv2_test"))


WIDER = {"layers.0.blocks.0.attn.relative_coords_table": np.zeros((1, 15, 15, 2), np.float32)}


@pytest.mark.parametrize(
  "name, changed, changes, word",
  [
    ("vit_test", dict(cls_tokens=np.zeros(1)), {}, "1 unknown .cls_tokens"),
    ("vit_test", {}, dict(classes=7), r"\(10,\) there and \(7,\) here"),
    ("vit_test", {}, dict(image_size=32), r"pos_embed is \(1, 17, 32\) there"),
    ("vit_test", {}, dict(layers=3), "12 of 44 missing"),
    ("resnet_test", {}, dict(depths=(1, 1, 1, 1)), "unknown"),
    ("swinv2_test", WIDER, {}, "a window of 8"),
  ],
)
def test_what_does_not_fit_is_refused_in_a_sentence(name, changed, changes, word):
  net = network(name, **changes)
  with pytest.raises(ValueError, match=word):
    timm.from_timm(tensors_of(name) | changed, shapes_of(net), net.config)


def test_another_family_is_refused_in_both_directions():
  with pytest.raises(ValueError, match="not of timm's ViT"):
    timm.from_timm({"head.weight": np.zeros((3, 4), np.float32)})
  with pytest.raises(ValueError, match="not of timm's ViT"):
    timm.to_timm({"params": {"head": {"kernel": np.zeros((3, 4), np.float32)}}})
