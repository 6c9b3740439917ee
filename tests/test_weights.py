"""timm's weights: the same logits and gradients, bit for bit there and back, every name accounted.

What timm computes lies in vision_reference.npz; where timm is installed it is asked itself.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import vision_reference as reference
from reference_arrays import Reference, assert_close, assert_same, imported
from test_vision_models import network, shapes_of

import nm_sparsity_jax as nms
from nm_sparsity_jax.deploy import timm
from nm_sparsity_jax.models import swin
from nm_sparsity_jax.runs import checkpoint

tiny = pytest.mark.parametrize("name", reference.TINY)
known = Reference(reference)
tensors_of = known.tensors
# Places of 1:4 and of 2:8.
TRANSFORMER = r".*/mlp/fc\d/kernel", r".*/attn/[qk]/kernel"
PLACES = {
  "vit_test": TRANSFORMER,
  "swinv2_test": TRANSFORMER,
  "resnet_test": (r".*/conv[13]/kernel", r".*/conv2/kernel"),
}


def variables_of(name):
  return timm.from_timm(tensors_of(name), shapes_of(network(name)))


def some_rules(name):
  places = dict(zip(PLACES[name], ("1:4", "2:8"), strict=True))
  return nms.configure.rules(places, "sr_ste", sparse_steps=1)


# --- what timm computes -------------------------------------------------------------------------


def ours(name, variables):
  """Logits, and the gradient of a weighted sum of them with respect to the images."""
  net = network(name)
  x = jnp.asarray(reference.images(name, net.config.image_size))
  weights = jnp.asarray(reference.hashed(f"weights of {name}", (2, net.config.classes)))

  @jax.jit
  def run(variables, x):
    logits, back = jax.vjp(lambda x: net.apply(variables, x), x)
    return {"logits": logits, "gradient": back(weights)[0]}

  return run(variables, x)


@tiny
def test_logits_and_input_gradients_are_timms(name):
  for what, x in ours(name, variables_of(name)).items():
    assert_close(x, known.arrays[f"{name}/{what}"])


def test_a_scale_of_cosines_beyond_its_clamp_is_clamped_as_timms():
  name, variables = "swinv2_test", variables_of("swinv2_test")
  attn = variables["params"]["layers_2"]["blocks_0"]["attn"]
  attn["logit_scale"] = attn["logit_scale"] + np.float32(reference.CLAMPED)
  logits = ours(name, variables)["logits"]
  assert_close(logits, known.arrays[f"{name}/clamped"])
  assert np.abs(logits - known.arrays[f"{name}/logits"]).max() > 1e-3


def test_batch_statistics_are_timms_but_for_the_unbiased_variance_of_torch():
  """docs/differences.md, 'Averages of batch statistics'."""
  name = "resnet_test"
  old, x = variables_of(name), jnp.asarray(reference.images(name, 32, 8))
  run = functools.partial(network(name).apply, train=True, mutable=["batch_stats"])
  logits, new = jax.jit(run)(old, x)
  assert_close(logits, known.arrays[f"{name}/train_logits"])
  before, mine = (x["batch_stats"]["layer4_0"]["bn3"] for x in (old, new))
  count, theirs = 8, f"{name}/new/layer4.0.bn3.running"  # numbers of a channel in the batch
  np.testing.assert_allclose(mine["mean"], known.arrays[f"{theirs}_mean"], 2e-5, 2e-6)
  added = (mine["var"] - 0.9 * before["var"]) * count / (count - 1)
  got = 0.9 * before["var"] + added
  np.testing.assert_allclose(got, known.arrays[f"{theirs}_var"], 2e-5, 2e-6)


def test_the_committed_reference_is_what_timm_computes():
  known.compare(*imported("torch", "timm")[1:])


# --- there and back -----------------------------------------------------------------------------


@tiny
def test_weights_come_back_bit_for_bit_and_every_name_is_accounted_for(name):
  net, tensors = network(name), tensors_of(name)
  shapes = shapes_of(net)
  variables = timm.from_timm(tensors, shapes)
  assert jax.tree.map(np.shape, variables) == jax.tree.map(lambda x: x.shape, shapes)
  assert_same(timm.to_timm(variables), tensors)
  derived = (
    {"layers.0.blocks.1.attn.k_bias": np.zeros(16, np.float32)} if name == "swinv2_test" else {}
  )
  assert_same(timm.from_timm(tensors | derived), variables)  # derived tensors are not read


def test_tensors_of_another_network_are_refused():
  with pytest.raises(ValueError, match=r"pos_embed is \(1, 17, 32\) there"):
    timm.from_timm(tensors_of("vit_test"), shapes_of(network("vit_test", image_size=32)))


def test_a_checkpoint_of_another_window_is_refused(tmp_path):
  """No shape shows the window, so the checkpoint keeps it."""
  path = str(tmp_path / "checkpoint_1")
  checkpoint.write(path, {"target/x": np.zeros(1)}, {"window": 8})
  with pytest.raises(ValueError, match="window=8, and this network has window=4"):
    checkpoint.read(path, config=swin.config("swinv2_test"))
