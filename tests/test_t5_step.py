"""The decoding step of `start` and `step`: the numbers of T5X's cache, and no work beside."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_t5 import BATCH, make, parameters

import nm_sparsity_jax as nms
from nm_sparsity_jax.models.t5 import T5Config, layers

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
def test_a_step_is_that_through_the_cache_of_t5x_and_a_row_of_the_whole(scan):
  model = make("t5_1_0" if scan else "t5_1_1", scan_layers=scan)
  variables = {"params": parameters(model)}
  inputs = np.repeat(BATCH[0], BEAMS, 0)
  kept, ours = started(model, variables)
  dense = functools.partial(model.apply, enable_dropout=False)
  encoded = jax.jit(functools.partial(dense, method="encode"))(variables, inputs)
  blank = jnp.ones((len(inputs), LENGTH), jnp.int32)
  make_cache = functools.partial(model.init, enable_dropout=False, decode=True)
  cache = jax.eval_shape(make_cache, jax.random.key(0), inputs, blank, blank)["cache"]
  cache = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), cache)

  def theirs(cache, tokens):
    arguments = {**variables, "cache": cache}, encoded, inputs, tokens[:, None], tokens[:, None]
    options = dict(decode=True, max_decode_length=LENGTH, mutable=["cache"], method="decode")
    logits, new = dense(*arguments, **options)
    return logits[:, 0], new["cache"]

  ours, theirs = jax.jit(ours), jax.jit(theirs)
  # Each row its own; 0 is padding, which the whole masks.
  tokens = np.random.default_rng(0).integers(1, 24, (len(inputs), LENGTH)).astype(np.int32)
  shifted = np.pad(tokens, ((0, 0), (1, 0)))[:, :-1]
  decode = jax.jit(functools.partial(dense, method="decode"))
  whole = decode(variables, encoded, inputs, shifted, tokens)
  for i in range(LENGTH):
    got, kept = ours(variables["params"], kept, shifted[:, i])
    want, cache = theirs(cache, shifted[:, i])
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-6 * np.abs(want).max())
    np.testing.assert_allclose(got, whole[:, i], rtol=0, atol=4e-6 * np.abs(want).max())


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


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_gathered_embedding_has_the_bits_of_a_product(dtype):
  embed = layers.Embed(T5Config(24, emb_dim=16, dtype=dtype))
  ids = jnp.array([[0, 23, 7], [24, 1000, 5]])  # two have no row
  table = {"params": {"embedding": jax.random.normal(jax.random.key(0), (24, 16))}}
  got, want = embed.apply(table, ids, gather=True), embed.apply(table, ids)
  assert got.dtype == dtype
  np.testing.assert_array_equal(got, want)
  assert not np.any(got[1, :2])
