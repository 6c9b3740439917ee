"""Our T5 in the place of T5X's own: same tree, numbers and decodes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import t5x_world
from reference_arrays import assert_close, drawn
from t5x_world import (
  adafactor,
  decoding,
  models,
  scalable_network,
  seqio,
  t5_network,
  world,  # noqa: F401  (a fixture)
)

from nm_sparsity_jax.models.t5 import network

pytestmark = t5x_world.MARKS
SIZES = dict(
  vocab_size=24, emb_dim=16, num_heads=2, head_dim=5, mlp_dim=32,
  num_encoder_layers=1, num_decoder_layers=2,
)  # fmt: skip
GATED = dict(mlp_activations=("gelu", "linear"))
TIED = dict(mlp_activations=("relu",), logits_via_embedding=True)
# name: T5X's module, fields of both configurations
KINDS = {
  "t5_1_1": (t5_network, GATED),
  "t5_1_0 bfloat16": (
    t5_network,
    TIED | dict(dtype="bfloat16", float32_attention_logits=True, num_decoder_layers=1),
  ),
  "scalable_t5": (scalable_network, TIED | dict(scan_layers=True, remat_policy="minimal")),
}


def both(kind):
  """(T5X's module, ours)."""
  theirs, fields = KINDS[kind]
  return [m.Transformer(m.T5Config(**SIZES | fields)) for m in (theirs, network)]


def tokens(seed=0):
  """Packed rows of two examples and padding: batch, and its segment ids."""
  rng = np.random.default_rng(seed)

  def rows(length, *ends):
    ids, segments = np.zeros((2, 2, length), int)
    for i, (a, b) in enumerate(ends):
      ids[i, :b] = rng.integers(2, SIZES["vocab_size"], b)
      segments[i, :a], segments[i, a:b] = 1, 2
    return ids, segments

  source, source_ids = rows(40, (22, 37), (9, 40))  # far enough for the logarithmic buckets
  target, target_ids = rows(33, (3, 33), (20, 24))
  return (source, np.pad(target, ((0, 0), (1, 0)))[:, :-1], target), (source_ids, target_ids)


BATCH, SEGMENTS = tokens()


@pytest.mark.parametrize("kind", KINDS)
def test_same_tree_and_logical_axes_and_initial_bits(kind):
  theirs, ours = both(kind)
  run = lambda model: jax.eval_shape(model.init, jax.random.key(0), *BATCH)
  assert run(ours) == run(theirs)
  if kind == "t5_1_0 bfloat16":  # the numbers are drawn by path and shape, so one kind will do
    theirs, ours = (jax.jit(m.init)(jax.random.key(0), *BATCH) for m in (theirs, ours))
    jax.tree.map(np.testing.assert_array_equal, theirs["params"], ours["params"])


def parameters(model):
  return drawn(jax.eval_shape(model.init, jax.random.key(0), *BATCH)["params"], 1 / 3, seed=1)


@pytest.mark.parametrize("kind", KINDS)
def test_same_loss_and_gradients(kind):
  """With dropout: it is drawn from the same keys. Exactly equal here; held to 1e-6."""
  theirs, ours = both(kind)

  def run(model):
    def loss(params):
      segments = () if kind == "t5_1_1" else SEGMENTS
      logits = model.apply({"params": params}, *BATCH, *segments, rngs=rngs)
      target = jax.nn.one_hot(jnp.where(BATCH[2] > 0, BATCH[2], -1), logits.shape[-1])
      return -jnp.sum(jax.nn.log_softmax(logits) * target)

    return jax.jit(jax.value_and_grad(loss))(parameters(theirs))

  rngs = {"dropout": jax.random.key(5, impl="unsafe_rbg")}
  (got, got_grads), (want, want_grads) = run(ours), run(theirs)
  np.testing.assert_allclose(got, want, rtol=1e-6)
  assert all(map(np.any, jax.tree.leaves(want_grads)))
  assert_close(got_grads, want_grads, 1e-6)


# A scan has the same loss, as the test before shows; test_t5.py decodes with a cache and without.
def test_same_greedy_and_beam_decodes():
  vocabulary = seqio.PassThroughVocabulary(SIZES["vocab_size"], eos_id=1)
  batch = dict(encoder_input_tokens=BATCH[0], decoder_input_tokens=np.zeros((2, 12), int))
  params = parameters(both("t5_1_1")[0])
  found = []
  for module in both("t5_1_1"):
    model = models.EncoderDecoderModel(module, vocabulary, vocabulary, adafactor.Adafactor())
    predict = functools.partial(model.predict_batch_with_aux, return_all_decodes=True)
    beams = jax.jit(functools.partial(predict, num_decodes=4))(params, batch)
    model._decode_fn = functools.partial(decoding.temperature_sample, temperature=0.0)
    found.append((beams, jax.jit(model.predict_batch)(params, batch)))
  (got, got_greedy), (want, want_greedy) = found
  np.testing.assert_array_equal(got[0], want[0])
  np.testing.assert_allclose(got[1]["scores"], want[1]["scores"], rtol=1e-6)
  np.testing.assert_array_equal(got_greedy, want_greedy)
  assert want[0].shape == (2, 4, 12) and len(np.unique(want_greedy)) > 2


def test_a_configuration_has_the_fields_and_defaults_of_t5x():
  for theirs in (t5_network, scalable_network):
    # Ours is one class for both, and scans only when it is asked to.
    want = vars(theirs.T5Config(8)) | {"scan_layers": False}
    want.pop("param_scan_axis", None)  # ours stacks as theirs does by default
    assert vars(network.T5Config(8)).items() >= want.items()
