"""Beam search through the cache finds the best of all texts, each scored by itself, without one.

Narrow beams are compared with T5X's search, in test_local_t5x and test_t5_t5x; greedy search also
with that of transformers, in test_huggingface. test_deployed scans the layers.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
from reference_arrays import drawn

from nm_sparsity_jax.models.t5 import network
from nm_sparsity_jax.trainer.workloads import decoding

TOKENS, LENGTH, EOS = 5, 3, 1


def test_with_a_beam_for_every_text_the_search_finds_the_best():
  net = network.Transformer(network.T5Config(
    vocab_size=TOKENS, emb_dim=16, num_heads=2, head_dim=4, mlp_dim=32, num_encoder_layers=1,
    num_decoder_layers=2, mlp_activations=("gelu", "linear"), dropout_rate=0.0,
  ))  # fmt: skip
  rng = np.random.default_rng(2)
  inputs = rng.integers(2, TOKENS, (5, 6)).astype(np.int32)
  inputs[1, 3:] = inputs[3, 5:] = 0
  shapes = jax.eval_shape(net.init, jax.random.key(0), inputs, inputs, inputs)["params"]
  params = drawn(shapes, 1 / 2, seed=2)
  params["decoder"]["logits_dense"]["kernel"] *= 2  # else most texts end at once
  run = jax.jit(lambda p, x: decoding.beam_search(net, p, x, LENGTH, 64, EOS))
  ids, scores = run(params, inputs)

  others = [token for token in range(TOKENS) if token != EOS]
  texts = [(*text, EOS) for n in range(LENGTH) for text in itertools.product(others, repeat=n)]
  lengths = np.array([len(text) for text in texts])
  filled = np.array([text + (0,) * (LENGTH - len(text)) for text in texts], np.int32)
  shifted = np.pad(filled, ((0, 0), (1, 0)))[:, :-1]

  @jax.jit
  def log_probs(row):
    rows = jnp.tile(row, (len(texts), 1))
    logits = net.apply({"params": params}, rows, shifted, filled * 0 + 1, enable_dropout=False)
    return jnp.take_along_axis(jax.nn.log_softmax(logits), filled[..., None], -1)[..., 0]

  is_said = np.arange(LENGTH) < lengths[:, None]
  for row, found, score in zip(inputs, ids, scores, strict=True):
    all_of_them = np.sum(log_probs(row), -1, where=is_said) / ((5 + lengths) / 6) ** 0.6
    np.testing.assert_allclose(score, all_of_them.max(), rtol=1e-5)
    np.testing.assert_array_equal(found, filled[all_of_them.argmax()])
  assert len(np.unique(ids, axis=0)) > 2  # it says something
