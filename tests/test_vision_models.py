"""ViT, Swin V2 and ResNet: structure; test_weights.py has numbers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference_arrays import drawn

from nm_sparsity_jax.models import image_parts, resnet, swin, vit

# The tiny config of each family -> its network.
FAMILIES = {
  "vit_test": (vit.ViT, vit),
  "swinv2_test": (swin.Swin, swin),
  "resnet_test": (resnet.ResNet, resnet),
}
# A part of the tiny config, for what every part of it would show: each kind of layer once.
SMALLER = {
  "vit_test": {},
  "swinv2_test": dict(depths=(2, 1), heads=(1, 2)),
  "resnet_test": dict(depths=(2, 2), widths=(16, 16)),
}
family = pytest.mark.parametrize("name", FAMILIES)


def network(name, **changes):
  cls, module = FAMILIES[name]
  return cls(module.config(name, **changes))


def images(net, n=2):
  """By numpy: jax.random compiles anew for every shape."""
  shape = n, net.config.image_size, net.config.image_size, net.config.channels
  return jnp.asarray(np.random.default_rng(1).normal(size=shape), jnp.float32)


@functools.cache
def shapes_of(net, dtype=jnp.float32):
  return jax.eval_shape(net.init, jax.random.key(0), images(net).astype(dtype))


def test_gelu_is_computed_in_float32():
  """In bfloat16 a sum 1 + erf of its own would be 0, or off by a quarter, from -2 on."""
  x = jnp.linspace(-4, 4, 801, dtype="bfloat16")
  want, got = jax.nn.gelu(x.astype("float32"), approximate=False), image_parts.gelu(x)
  far = jnp.abs(got.astype("float32") - want)
  assert float((far / jnp.maximum(jnp.abs(want), 1e-3)).max()) < 4e-3


@family
def test_logits_are_float32_where_the_computation_is_bfloat16(name):
  exact, narrow = (network(name, dtype=x, **SMALLER[name]) for x in ("float32", "bfloat16"))
  variables, x = drawn(shapes_of(exact)), images(exact)
  want, got = jax.jit(exact.apply)(variables, x), jax.jit(narrow.apply)(variables, x)
  assert got.dtype == want.dtype == jnp.float32 and got.shape == (2, 10)
  assert 0 < float(jnp.abs(got - want).max()) < 0.1 * float(jnp.abs(want).max())


@family
def test_drop_path_skips_branches_of_whole_examples_in_training_alone(name):
  net = network(name, drop_path=0.9, **SMALLER[name])
  variables, x = drawn(shapes_of(net)), images(net, 1)
  x = jnp.broadcast_to(x, (8, *x.shape[1:]))
  mutable = [key for key in variables if key != "params"]

  @jax.jit
  def run(key):
    return net.apply(variables, x, train=True, rngs={"dropout": key}, mutable=mutable)[0]

  one, again, other = (np.asarray(run(jax.random.key(seed))) for seed in (0, 0, 1))
  np.testing.assert_array_equal(one, again)
  assert (one != other).any()
  if name != "resnet_test":  # there the statistics of the batch mix examples
    assert 1 < len(np.unique(one[:, 0])) < 8  # equal examples, some with equal branches


def test_a_token_without_a_direction_has_a_finite_gradient():
  y, back = jax.vjp(swin._direction, jnp.zeros((2, 4)))
  assert not y.any() and jnp.isfinite(back(jnp.ones_like(y))[0]).all()


def test_an_image_of_integers_is_refused():
  with pytest.raises(ValueError, match="uint8"):
    shapes_of(network("vit_test"), jnp.uint8)
