"""The decoding step of `start` and `step`: the numbers of T5X's cache, and no work beside."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from test_t5 import BATCH, EACH, make, parameters, shapes_of

import nm_sparsity_jax as nms
from nm_sparsity_jax.models.t5 import layers
from nm_sparsity_jax.training.layers import with_step

LENGTH, BEAMS = 6, 2
# Keys of the input are computed by `start`, all else by `step`.
RULES = nms.Rules({"ff": EACH["mdgf_linear"], "cross/k": EACH["mdgf_linear"]})


def started(model, variables, inputs=BATCH[0], beams=BEAMS):
  """Returns what is kept, and (kept, tokens, i) -> (logits, kept)."""
  kept = ["prepared", "decoded"]
  first = jax.jit(lambda v: model.apply(v, inputs, LENGTH, beams, mutable=kept, method="start")[1])

  def step(kept, tokens, i):
    logits, new = model.apply({**variables, **kept}, tokens, i, mutable=["decoded"], method="step")
    return logits, kept | new

  return first(variables), step


@pytest.mark.parametrize("scan", [False, True], ids=["plain", "scanned"])
def test_a_step_is_that_through_the_cache_of_t5x_and_a_row_of_the_whole(scan):
  """Of sparse layers; of dense ones: test_local_decoding.py."""
  model = make("t5_1_0" if scan else "t5_1_1", scan_layers=scan, rules=RULES)
  variables = {**shapes_of(model), "params": parameters(model)}
  del variables["params_axes"]
  variables = with_step(variables, 9)
  inputs = np.repeat(BATCH[0], BEAMS, 0)
  kept, ours = started(model, variables)
  encode = functools.partial(model.apply, enable_dropout=False, method="encode")
  encoded = jax.jit(encode)(variables, inputs)
  blank = jnp.ones((len(inputs), LENGTH), jnp.int32)
  make_cache = functools.partial(model.init, enable_dropout=False, decode=True)
  cache = jax.eval_shape(make_cache, jax.random.key(0), inputs, blank, blank)["cache"]
  cache = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), cache)

  def theirs(cache, tokens):
    arguments = encoded, inputs, tokens[:, None], tokens[:, None]
    options = dict(enable_dropout=False, decode=True, max_decode_length=LENGTH)
    logits, new = model.apply(
      {**variables, "cache": cache}, *arguments, **options, mutable=["cache"], method="decode"
    )
    return logits[:, 0], new["cache"]

  ours, theirs = jax.jit(ours), jax.jit(theirs)
  # Each row its own; 0 is padding, which the whole masks.
  tokens = np.random.default_rng(0).integers(1, 24, (len(inputs), LENGTH)).astype(np.int32)
  given = np.pad(tokens, ((0, 0), (1, 0)))[:, :-1]
  decode = functools.partial(model.apply, enable_dropout=False, method="decode")
  whole = jax.jit(decode)(variables, encoded, inputs, given, tokens)
  for i in range(LENGTH):
    got, kept = ours(kept, given[:, i], jnp.int32(i))
    want, cache = theirs(cache, given[:, i])
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-6 * np.abs(want).max())
    np.testing.assert_allclose(got, whole[:, i], rtol=0, atol=4e-6 * np.abs(want).max())


def equations(jaxpr):
  """Yields name, shapes of the operands, shape of the result and settings of each equation."""
  for eqn in jaxpr.eqns:
    for inner in jaxprs_in_params(eqn.params):
      yield from equations(inner)
    shapes = [x.aval.shape for x in eqn.invars]
    yield eqn.primitive.name, shapes, eqn.outvars[0].aval.shape, eqn.params


def products(program):
  """Returns the multiplications of every product in a program."""
  count = 0
  for name, shapes, out, params in program:
    if name == "dot_general":
      depth = [shapes[0][axis] for axis in params["dimension_numbers"][0][0]]
      count += int(np.prod(depth) * np.prod(out))
  return count


def test_a_step_multiplies_each_weight_once_a_row():
  model = make(num_decoder_layers=3)
  params, cfg = {"params": parameters(model)}, model.config
  kept, step = started(model, params)
  rows, width = len(BATCH[0]) * BEAMS, cfg.num_heads * cfg.head_dim
  made = jax.make_jaxpr(step)(kept, jnp.zeros(rows, jnp.int32), jnp.int32(0))
  program = list(equations(made.jaxpr))
  # q, k, v, o of one attention, q and o of the other: keys and values of the input are there.
  layer = 6 * cfg.emb_dim * width + 3 * cfg.emb_dim * cfg.mlp_dim
  attention = 2 * width * (LENGTH + BATCH[0].shape[1])
  want = rows * (3 * (layer + attention) + cfg.emb_dim * cfg.vocab_size)
  assert products(program) == want
  whole = {(rows, 2, 8, LENGTH), (rows, 2, 8, BATCH[0].shape[1])}
  assert {x.shape for x in jax.tree.leaves(kept) if x.size > rows * 2 * 8} == whole
  # A token writes its place, and what is kept is multiplied as it lies.
  found = [name for name, shapes, *_ in program if whole & {*shapes}]
  assert sorted(found) == sorted(["dynamic_update_slice"] * 6 + ["dot_general"] * 12)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_gathered_embedding_has_the_bits_of_a_product(dtype):
  embed = layers.Embed(24, 16, dtype=dtype, one_hot=True)
  ids = jnp.array([[0, 23, 7], [24, 1000, 5]])  # two have no row
  table = {"params": {"embedding": jax.random.normal(jax.random.key(0), (24, 16))}}
  got, want = embed.apply(table, ids, gather=True), embed.apply(table, ids)
  assert got.dtype == dtype
  np.testing.assert_array_equal(got, want)
  assert not np.any(got[1, :2])
