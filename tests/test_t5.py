"""T5: T5X's tree held as text, rules, remat. test_t5_t5x.py compares its numbers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nm_sparsity_jax as nms
from nm_sparsity_jax.core.trees import flatten
from nm_sparsity_jax.models.t5 import T5Config, Transformer
from nm_sparsity_jax.training.layers import COLLECTION, STATE_COLLECTION, with_step

PHASES = nms.Phases(total=12, dense=2, finetune=3)
EACH = {name: nms.recipe(name, pattern="1:4", phases=PHASES) for name in ("mdgf_linear", "idp")}

SIZES = dict(vocab_size=24, emb_dim=16, num_heads=2, head_dim=8, mlp_dim=32)


def make(family="t5_1_1", depth=2, **fields):
  fields = dict(num_encoder_layers=depth, num_decoder_layers=depth) | SIZES | fields
  return Transformer(getattr(T5Config, family)("tiny", **fields))


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


def parameters(model, seed=0):
  """Numbers of the size that a trained network has; drawing them is faster than `init`."""
  rng = np.random.default_rng(seed)
  draw = lambda x: jnp.asarray(rng.normal(size=x.shape) / 3, jnp.float32)
  return jax.tree.map(draw, shapes_of(model)["params"])


def assert_close(got, want, tolerance=2e-6):
  got, want = dict(flatten(got)), dict(flatten(want))
  assert list(got) == list(want)
  for path in want:
    scale = np.abs(want[path]).max()
    assert scale > 0, path  # else equality says nothing
    np.testing.assert_allclose(got[path], want[path], rtol=0, atol=tolerance * scale, err_msg=path)


# --- the tree -------------------------------------------------------------------------------------

# path, shape, logical axes; one layer, T5.1.1
PLAIN = """
decoder/decoder_norm/scale 16 embed
decoder/layers_0/encoder_decoder_attention/key/kernel 16,10 embed,joined_kv
decoder/layers_0/encoder_decoder_attention/out/kernel 10,16 joined_kv,embed
decoder/layers_0/encoder_decoder_attention/query/kernel 16,10 embed,joined_kv
decoder/layers_0/encoder_decoder_attention/value/kernel 16,10 embed,joined_kv
decoder/layers_0/mlp/wi_0/kernel 16,32 embed,mlp
decoder/layers_0/mlp/wi_1/kernel 16,32 embed,mlp
decoder/layers_0/mlp/wo/kernel 32,16 mlp,embed
decoder/layers_0/pre_cross_attention_layer_norm/scale 16 embed
decoder/layers_0/pre_mlp_layer_norm/scale 16 embed
decoder/layers_0/pre_self_attention_layer_norm/scale 16 embed
decoder/layers_0/self_attention/key/kernel 16,10 embed,joined_kv
decoder/layers_0/self_attention/out/kernel 10,16 joined_kv,embed
decoder/layers_0/self_attention/query/kernel 16,10 embed,joined_kv
decoder/layers_0/self_attention/value/kernel 16,10 embed,joined_kv
decoder/logits_dense/kernel 16,24 embed,vocab
decoder/relpos_bias/rel_embedding 2,32 heads,relpos_buckets
encoder/encoder_norm/scale 16 embed
encoder/layers_0/attention/key/kernel 16,10 embed,joined_kv
encoder/layers_0/attention/out/kernel 10,16 joined_kv,embed
encoder/layers_0/attention/query/kernel 16,10 embed,joined_kv
encoder/layers_0/attention/value/kernel 16,10 embed,joined_kv
encoder/layers_0/mlp/wi_0/kernel 16,32 embed,mlp
encoder/layers_0/mlp/wi_1/kernel 16,32 embed,mlp
encoder/layers_0/mlp/wo/kernel 32,16 mlp,embed
encoder/layers_0/pre_attention_layer_norm/scale 16 embed
encoder/layers_0/pre_mlp_layer_norm/scale 16 embed
encoder/relpos_bias/rel_embedding 2,32 heads,relpos_buckets
token_embedder/embedding 24,16 vocab,embed
"""

# T5.1.0, three layers of an encoder and two of a decoder, scanned
SCANNED = """
decoder/decoder/encoder_decoder_attention/key/kernel 16,2,2,5 embed,layers,heads,kv
decoder/decoder/encoder_decoder_attention/out/kernel 2,2,5,16 heads,layers,kv,embed
decoder/decoder/encoder_decoder_attention/query/kernel 16,2,2,5 embed,layers,heads,kv
decoder/decoder/encoder_decoder_attention/value/kernel 16,2,2,5 embed,layers,heads,kv
decoder/decoder/mlp/wi/kernel 16,2,32 embed,layers,mlp
decoder/decoder/mlp/wo/kernel 32,2,16 mlp,layers,embed
decoder/decoder/pre_cross_attention_layer_norm/scale 16,2 embed,layers
decoder/decoder/pre_mlp_layer_norm/scale 16,2 embed,layers
decoder/decoder/pre_self_attention_layer_norm/scale 16,2 embed,layers
decoder/decoder/relpos_bias/rel_embedding 2,2,32 heads,layers,relpos_buckets
decoder/decoder/self_attention/key/kernel 16,2,2,5 embed,layers,heads,kv
decoder/decoder/self_attention/out/kernel 2,2,5,16 heads,layers,kv,embed
decoder/decoder/self_attention/query/kernel 16,2,2,5 embed,layers,heads,kv
decoder/decoder/self_attention/value/kernel 16,2,2,5 embed,layers,heads,kv
decoder/decoder_norm/scale 16 embed
encoder/encoder/attention/key/kernel 16,3,2,5 embed,layers,heads,kv
encoder/encoder/attention/out/kernel 2,3,5,16 heads,layers,kv,embed
encoder/encoder/attention/query/kernel 16,3,2,5 embed,layers,heads,kv
encoder/encoder/attention/value/kernel 16,3,2,5 embed,layers,heads,kv
encoder/encoder/mlp/wi/kernel 16,3,32 embed,layers,mlp
encoder/encoder/mlp/wo/kernel 32,3,16 mlp,layers,embed
encoder/encoder/pre_attention_layer_norm/scale 16,3 embed,layers
encoder/encoder/pre_mlp_layer_norm/scale 16,3 embed,layers
encoder/encoder/relpos_bias/rel_embedding 2,3,32 heads,layers,relpos_buckets
encoder/encoder_norm/scale 16 embed
token_embedder/embedding 24,16 vocab,embed
"""


def tree_as_text(variables):
  names = jax.tree_util.tree_flatten_with_path(
    variables["params_axes"], is_leaf=lambda x: hasattr(x, "names")
  )[0]
  axes = {"/".join(k.key for k in keys)[: -len("_axes")]: x.names for keys, x in names}
  params = dict(flatten(variables["params"]))
  assert sorted(axes) == sorted(params)
  rows = [f"{p} {','.join(map(str, x.shape))} {','.join(axes[p])}" for p, x in params.items()]
  return rows


def test_the_parameter_tree_and_its_logical_axes():
  plain = make(depth=1, head_dim=5)
  assert tree_as_text(shapes_of(plain)) == PLAIN.split("\n")[1:-1]
  scanned = make("t5_1_0", num_encoder_layers=3, head_dim=5, scan_layers=True)
  assert tree_as_text(shapes_of(scanned)) == SCANNED.split("\n")[1:-1]


@pytest.mark.parametrize("fields", [dict(), dict(remat_policy="full"), dict(scan_layers=True)])
def test_rules_add_variables_and_leave_the_tree_alone(fields):
  rules = nms.Rules({"ff": EACH["mdgf_linear"], "decoder/cross/o": EACH["idp"]})
  sparse = make(rules=rules, num_decoder_layers=3, **fields)  # 2 would be the number of heads
  dense, variables = shapes_of(make(num_decoder_layers=3, **fields)), dict(shapes_of(sparse))
  assert set(dense) == {"params", "params_axes"}
  assert {k: variables.pop(k) for k in dense} == dense
  assert set(variables) == {COLLECTION, STATE_COLLECTION}
  assert {x.shape for x in jax.tree.leaves(variables[COLLECTION])} == {(), (3,)}
  scanned = rules.with_logical_axes(dense["params_axes"])
  state = jax.eval_shape(lambda p: nms.init_state(p, scanned), dense["params"])
  assert variables[STATE_COLLECTION] == state["mask"]


def test_the_translation_model_has_its_number_of_parameters():
  """e = 1024 makes vocab * e + 6 * (12 + 16) * e^2; test_huggingface.py has the sizes of T5."""
  params = shapes_of(Transformer(T5Config.wmt(scan_layers=True)))["params"]
  assert sum(x.size for x in jax.tree.leaves(params)) / 1e6 == pytest.approx(209.09, rel=1e-3)


@pytest.mark.parametrize("policy", ["full", "nm_masks", "minimal"])
def test_what_remat_keeps(policy):
  """Masks are computed again in the backward pass only under 'full'. Two shapes are traced."""
  rules = nms.Rules({"encoder/ff": EACH["mdgf_linear"]})
  model = make(depth=1, remat_policy=policy, rules=rules)
  rest = with_step({k: v for k, v in shapes_of(model).items() if k != "params"}, 9)

  def loss(params):
    return model.apply({**rest, "params": params}, *BATCH, enable_dropout=False).sum()

  masks = str(jax.make_jaxpr(jax.grad(loss))(shapes_of(model)["params"])).count("name=nm_mask")
  assert masks == (4 if policy == "full" else 2)


@pytest.mark.parametrize(
  "call, message",
  [
    (lambda: T5Config.t5_1_1("huge"), "'huge'.*xxl"),
    (lambda: shapes_of(make(remat_policy="some")), "'some'.*minimal"),
  ],
)
def test_mistakes_are_named(call, message):
  with pytest.raises(ValueError, match=message):
    call()
