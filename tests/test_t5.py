"""T5: remat, the decoding of `start` and `step`.

test_t5_t5x.py compares its tree and numbers with those of T5X.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference_arrays import assert_close, drawn

import nm_sparsity_jax as nms
from nm_sparsity_jax.models.t5 import T5Config, Transformer, layers

SIZES = dict(vocab_size=24, emb_dim=16, num_heads=2, head_dim=8, mlp_dim=32)


def make(family="t5_1_1", depth=2, **fields):
  fields = dict(num_encoder_layers=depth, num_decoder_layers=depth) | SIZES | fields
  return Transformer(T5Config.preset(family, "tiny", **fields))


def a_batch():
  """Token ids padded with 0: (source, shifted target, target)."""
  rng = np.random.default_rng(0)
  draw = lambda *shape: rng.integers(1, SIZES["vocab_size"], shape)
  source, target = draw(2, 7), draw(2, 6)
  source[1, 4:], target[0, 5:] = 0, 0
  return source, np.pad(target, ((0, 0), (1, 0)))[:, :-1], target


BATCH = a_batch()


@functools.cache
def shapes_of(model):
  key = jax.random.key(0)
  return jax.eval_shape(functools.partial(model.init, enable_dropout=False), key, *BATCH)


def parameters(model):
  """Numbers of the size that a trained network has."""
  return drawn(shapes_of(model)["params"], 1 / 3)


def test_what_remat_keeps():
  """The backward pass computes some products again under 'minimal', and all under 'full'."""

  def products(policy):
    model = make(depth=1, remat_policy=policy)
    loss = lambda p: model.apply({"params": p}, *BATCH, enable_dropout=False).sum()
    return str(jax.make_jaxpr(jax.grad(loss))(shapes_of(model)["params"])).count("dot_general")

  assert products("none") < products("minimal") < products("full")


# --- decoding: the numbers of the whole, and no other work ----------------------------------------

LENGTH, BEAMS = 6, 2


def started(model, variables):
  """Returns what is kept, and (params, kept, tokens) -> (logits, kept)."""
  kept = ["prepared", "cache"]
  start = functools.partial(model.apply, mutable=kept, method="start")

  def step(params, kept, tokens):
    read = {**kept, "params": params}
    logits, new = model.apply(read, tokens, LENGTH, mutable=["cache"], method="step")
    return logits, kept | new

  return jax.jit(lambda v: start(v, BATCH[0], LENGTH, BEAMS)[1])(variables), step


@pytest.mark.parametrize("scan", [False, True], ids=["plain", "scanned"])
def test_a_step_is_a_row_of_the_whole(scan):
  model = make("t5_1_0" if scan else "t5_1_1", scan_layers=scan)
  variables = {"params": parameters(model)}
  inputs = np.repeat(BATCH[0], BEAMS, 0)
  kept, step = started(model, variables)
  step = jax.jit(step)
  # Each row its own; 0 is padding, which the whole masks.
  tokens = np.random.default_rng(0).integers(1, 24, (len(inputs), LENGTH)).astype(np.int32)
  shifted = np.pad(tokens, ((0, 0), (1, 0)))[:, :-1]
  dense = jax.jit(functools.partial(model.apply, enable_dropout=False))
  whole = dense(variables, inputs, shifted, tokens)
  for i in range(LENGTH):
    got, kept = step(variables["params"], kept, shifted[:, i])
    assert_close(got, whole[:, i], 4e-6)


def test_a_step_multiplies_each_weight_once_a_row():
  model = make(num_decoder_layers=3)
  params, cfg = parameters(model), model.config
  kept, step = started(model, {"params": params})
  rows, width = len(BATCH[0]) * BEAMS, cfg.num_heads * cfg.head_dim
  cost = nms.flops.forward(step, params, kept, np.zeros(rows, np.int32))
  # q, k, v, o of one attention, q and o of the other: keys and values of the input are there.
  layer = 6 * cfg.emb_dim * width + 3 * cfg.emb_dim * cfg.mlp_dim
  attention = 2 * width * (LENGTH + BATCH[0].shape[1])
  assert cost.flops == 2 * rows * (3 * (layer + attention) + cfg.emb_dim * cfg.vocab_size)


def test_a_gathered_embedding_has_the_bits_of_a_product():
  embed = layers.Embed(T5Config(24, emb_dim=16, dtype=jnp.bfloat16))
  ids = jnp.array([[0, 23, 7], [24, 1000, 5]])  # two have no row
  table = {"params": {"embedding": jax.random.normal(jax.random.key(0), (24, 16))}}
  got, want = embed.apply(table, ids, gather=True), embed.apply(table, ids)
  assert got.dtype == jnp.bfloat16
  np.testing.assert_array_equal(got, want)
  assert not np.any(got[1, :2])
