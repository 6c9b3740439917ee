"""Beam search through the cache equals a search without one, written out in numpy.

Greedy search is compared with those of transformers and T5X, in test_huggingface and test_t5_t5x.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nm_sparsity_jax.models.t5 import network
from nm_sparsity_jax.trainer.workloads import decoding

SIZES = dict(
  vocab_size=12, emb_dim=16, num_heads=2, head_dim=4, mlp_dim=32, num_encoder_layers=1,
  num_decoder_layers=2, mlp_activations=("gelu", "linear"), dropout_rate=0.0,
)  # fmt: skip
LENGTH, EOS = 7, 1


@pytest.fixture(scope="module", params=["layers", "scanned"])
def searched(request):
  """(network, params, inputs, jitted log probabilities).

  The last takes inputs [5, 6] and prefixes [5, length], so that one program serves all tests.
  """
  scan = request.param == "scanned"
  net = network.Transformer(network.T5Config(**SIZES, scan_layers=scan))
  rng = np.random.default_rng(3)
  inputs = rng.integers(2, 12, (5, 6)).astype(np.int32)
  inputs[1, 3:] = inputs[3, 5:] = 0
  shapes = jax.eval_shape(net.init, jax.random.key(0), inputs, inputs, inputs)["params"]
  params = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape) / 2, jnp.float32), shapes)
  # Ends must be neither rare nor at once.
  params["decoder"]["logits_dense"]["kernel"] *= 0.6

  @jax.jit
  def log_probs(inputs, prefixes):
    shifted = jnp.pad(prefixes, ((0, 0), (1, 0)))[:, :-1]
    blank = jnp.ones_like(prefixes)
    logits = net.apply({"params": params}, inputs, shifted, blank, enable_dropout=False)
    return jax.nn.log_softmax(logits)

  return net, params, inputs, log_probs


def reference(log_probs, row, beams):
  """Beam search of one row, as its definition goes: lists, no cache, every prefix from scratch."""
  penalty = lambda n: ((5 + n) / 6) ** 0.6
  live, ended = [(0.0, [])], []
  for i in range(LENGTH):
    prefixes = np.zeros((5, LENGTH), np.int32)
    for j, (_, ids) in enumerate(live):
      prefixes[j, : len(ids)] = ids
    found = np.asarray(log_probs(np.repeat(row[None], 5, 0), prefixes))[:, i]
    grown = [
      (score + found[j, t], [*ids, t]) for j, (score, ids) in enumerate(live) for t in range(12)
    ]
    grown = sorted(grown, key=lambda x: -x[0])[: 2 * beams]
    ended += [(s / penalty(i + 1), ids) for s, ids in grown if ids[-1] == EOS]
    ended = sorted(ended, key=lambda x: -x[0])[:beams]
    live = [x for x in grown if x[1][-1] != EOS][:beams]
    if len(ended) == beams and ended[-1][0] > live[0][0] / penalty(LENGTH + 1):
      break
  score, ids = (ended or live)[0]
  return score, ids + [0] * (LENGTH - len(ids)), len(ended)


@pytest.mark.parametrize("beams", [1, 3])
def test_beam_search(searched, beams):
  net, params, inputs, log_probs = searched
  run = jax.jit(lambda p, x: decoding.beam_search(net, p, x, LENGTH, beams, EOS))
  ids, scores = run(params, inputs)
  one_by_one = [reference(log_probs, row, beams) for row in inputs]
  np.testing.assert_allclose(scores, [s for s, *_ in one_by_one], rtol=1e-5)
  np.testing.assert_array_equal(ids, [x for _, x, _ in one_by_one])
