"""T5: T5X's tree held as text; cache, packing, remat and scan; sparse = `sparsify`, bit for bit."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_layers import EACH, PHASES, STEPS, assert_same_bits, with_near_ties

import nm_sparsity_jax as nms
from nm_sparsity_jax.core.trees import flatten, map_with_names
from nm_sparsity_jax.models.t5 import T5Config, Transformer, layers
from nm_sparsity_jax.training.layers import COLLECTION, STATE_COLLECTION, with_step

pytestmark = [
  # Gradients are made up here: no optimizer takes them.
  pytest.mark.filterwarnings("ignore:snip at .* scores:UserWarning"),
  pytest.mark.filterwarnings("ignore:.* adds lam=:UserWarning"),
]

SIZES = dict(vocab_size=24, emb_dim=16, num_heads=2, head_dim=8, mlp_dim=32)


def make(family="t5_1_1", depth=2, **fields):
  fields = dict(num_encoder_layers=depth, num_decoder_layers=depth) | SIZES | fields
  return Transformer(getattr(T5Config, family)("tiny", **fields))


def shifted(targets):
  return np.pad(targets, ((0, 0), (1, 0)))[:, :-1]


def a_batch(seed=0, sources=(7, 4), targets=(5, 6)):
  """Token ids of these lengths, padded with 0: (source, shifted target, target)."""
  rng = np.random.default_rng(seed)

  def rows(lengths):
    draw = [rng.integers(1, SIZES["vocab_size"], n) for n in lengths]
    return np.stack([np.pad(x, (0, max(lengths) - len(x))) for x in draw])

  source, target = rows(sources), rows(targets)
  return source, shifted(target), target


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


def loss_and_grads(model, batch=BATCH, **kwargs):
  """jitted (params, rest) -> (sum of log p(target), gradients)."""

  def loss(params, rest):
    logits = model.apply({**rest, "params": params}, *batch, **kwargs)
    assert logits.dtype == jnp.float32
    target = jax.nn.one_hot(jnp.where(batch[2] > 0, batch[2], -1), logits.shape[-1])
    return -jnp.sum(jax.nn.log_softmax(logits) * target)

  return jax.jit(jax.value_and_grad(loss))


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
  dense, variables = shapes_of(sparse.dense_twin()), dict(shapes_of(sparse))
  assert set(dense) == {"params", "params_axes"}
  assert {k: variables.pop(k) for k in dense} == dense
  assert set(variables) == {COLLECTION, STATE_COLLECTION}
  assert {x.shape for x in jax.tree.leaves(variables[COLLECTION])} == {()}
  scanned = rules.with_logical_axes(dense["params_axes"])
  state = jax.eval_shape(lambda p: nms.init_state(p, scanned), dense["params"])
  assert variables[STATE_COLLECTION] == state["mask"]


# In millions, those of the public checkpoints; wmt: e = 1024 makes vocab * e + 6 * (12 + 16) * e^2.
MILLIONS = {
  ("t5_1_1", "small"): 76.96,
  ("t5_1_1", "xxl"): 11135.33,
  ("t5_1_0", "11B"): 11307.32,
  ("wmt",): 209.09,
}


@pytest.mark.parametrize("preset", MILLIONS, ids=lambda p: "_".join(p))
def test_presets_have_the_published_number_of_parameters(preset):
  family, *size = preset
  cfg = getattr(T5Config, family)(*size)
  params = shapes_of(Transformer(cfg.replace(scan_layers=True)))["params"]
  assert sum(x.size for x in jax.tree.leaves(params)) / 1e6 == pytest.approx(
    MILLIONS[preset], rel=1e-3
  )


# --- packing and positions; test_t5_step.py decodes, test_huggingface.py and test_t5_t5x.py compare


def test_packed_examples_do_not_see_each_other():
  model = make(depth=1)
  params = {"params": parameters(model)}
  apply = jax.jit(functools.partial(model.apply, enable_dropout=False))
  (s0, _, t0), (s1, _, t1) = a_batch(1, (7,), (5,)), a_batch(2, (4,), (6,))
  join = lambda a, b: np.pad(np.concatenate([a, b], 1), ((0, 0), (0, 2)))
  source, target = join(s0, s1), join(t0, t1)
  given = join(shifted(t0), shifted(t1))
  ids = [join(np.full_like(a, 1), np.full_like(b, 2)) for a, b in [(s0, s1), (t0, t1)]]
  packed = apply(params, source, given, target, *ids)
  for (s, t), at in [((s0, t0), slice(0, 5)), ((s1, t1), slice(5, 11))]:
    np.testing.assert_allclose(packed[:, at], apply(params, s, shifted(t), t), rtol=2e-5, atol=2e-5)
  loose = apply(params, source, given, target)
  assert np.abs(loose - packed)[:, :11].max() > 0.01


def bucket_from_the_paper(x, bidirectional, buckets=32, most=128):
  """Bucket of a distance key - query, in exact integers: no logarithm to round."""
  offset = 0
  if bidirectional:
    buckets //= 2
    offset = buckets * (x > 0)
  elif x > 0:
    x = 0
  x, small = abs(x), buckets // 2
  if x < small:
    return offset + x
  # The largest b with small * (most / small) ** (b / (buckets - small)) <= x.
  span = buckets - small
  fits = [b for b in range(span) if small**span * most**b <= x**span * small**b]
  return offset + small + max(fits)


@pytest.mark.parametrize("bidirectional", [True, False])
def test_the_bias_of_a_head_is_its_row_at_the_bucket_of_key_minus_query(bidirectional):
  module = layers.RelativePositionBiases(32, 128, 3, jnp.float32)
  table = np.arange(96, dtype=np.float32).reshape(3, 32)
  bias = module.apply({"params": {"rel_embedding": table}}, 200, 200, bidirectional)
  distances = np.arange(200)[None, :] - np.arange(200)[:, None]
  rows = {x: bucket_from_the_paper(x, bidirectional) for x in range(-199, 200)}
  want = table[:, np.vectorize(rows.get)(distances)]
  np.testing.assert_array_equal(bias, want[None])


# --- remat and scan -------------------------------------------------------------------------------


def restacked(params, cfg):
  """Parameters of the plain tree in the scanned one, differentiable."""
  heads = cfg.num_heads, cfg.head_dim

  def split(path, w):
    if "attention" not in path or not path.endswith("kernel"):
      return w
    return w.reshape((*heads, -1) if "/out/" in path else (-1, *heads))

  def stack(name):
    part = dict(params[name])
    table = {"relpos_bias": part.pop("relpos_bias")}
    each = [part.pop(key) for key in sorted(part) if key.startswith("layers_")]
    each = [map_with_names(split, layer) | table for layer in each]
    return part | {name: jax.tree.map(lambda *x: jnp.stack(x, 1), *each)}

  return params | {name: stack(name) for name in ("encoder", "decoder")}


# This generator compiles faster than the usual one.
DROPOUT = dict(enable_dropout=True, rngs={"dropout": jax.random.key(7, impl="unsafe_rbg")})
NO_DROPOUT = dict(enable_dropout=False)


def test_a_scan_under_remat_changes_no_number():
  model = make(num_encoder_layers=1, remat_policy="minimal", scan_layers=True)
  plain = make(num_encoder_layers=1)
  params = parameters(plain)
  stacked, back = jax.vjp(lambda p: restacked(p, model.config), params)
  loss, grads = loss_and_grads(model, **NO_DROPOUT)(stacked, {})
  want = loss_and_grads(plain, **NO_DROPOUT)(params, {})
  np.testing.assert_allclose(loss, want[0], rtol=1e-6)
  assert_close(back(grads)[0], want[1])


@pytest.mark.parametrize("policy", ["full", "nm_masks", "minimal"])
def test_what_remat_keeps(policy):
  """Masks are computed again in the backward pass only under 'full'. Two shapes are traced."""
  rules = nms.Rules({"encoder/ff": nms.recipe("mdgf_linear", pattern="1:4", phases=PHASES)})
  model = make(depth=1, remat_policy=policy, rules=rules)
  rest = with_step({k: v for k, v in shapes_of(model).items() if k != "params"}, 9)
  run = loss_and_grads(model, **NO_DROPOUT)
  masks = str(jax.make_jaxpr(run)(shapes_of(model)["params"], rest)).count("name=nm_mask")
  assert masks == (4 if policy == "full" else 2)


# --- sparse = dense on sparsify -------------------------------------------------------------------

OWNERS = {
  "encoder/q": "one_shot",
  "encoder/v": "mdgf_linear",
  "encoder/o": "idp",
  r"encoder/.*/wi_0/kernel": "sdgf_geometric",
  r"encoder/.*/wo/kernel": "sdgf_stepwise",
  "decoder/self/k": "dense",
  "decoder/self/v": "mdgf_exponential",
  "decoder/self/o": "snip",
  "decoder/cross/k": "mdgf_identity",
  "decoder/cross/o": "sdgf_both",
  r"decoder/.*/wi_1/kernel": "custom",
  "decoder/logits_dense/kernel": "sr_ste",
}
RULES = nms.Rules({place: EACH[name] for place, name in OWNERS.items()})
# One of each kind: D between 1 and 0, a parent that is renewed, scores, a ladder of groups.
KINDS = ("mdgf_linear", "idp", "snip", "sdgf_geometric")
SOME = nms.Rules({place: EACH[name] for place, name in OWNERS.items() if name in KINDS})
SEEN = (0, 3, 4, 5, 6, 9, 11, 13, 15, 17, 18, 25)  # each phase and its edges, each level


def sparse_model(scan, rules, **fields):
  """One layer a stack, or two scanned; bfloat16, so that a mask after the cast would be another."""
  return make(depth=1 + scan, rules=rules, dtype=jnp.bfloat16, scan_layers=scan, **fields)


@functools.cache
def trajectory(scan, rules):
  """{step: (parameters, state)}, and (params, step, state, dL/dW~) -> (W~, dL/dW) of `sparsify`."""
  shapes = shapes_of(sparse_model(scan, rules))
  rules = rules.with_logical_axes(shapes["params_axes"])
  params = with_near_ties(shapes["params"], 0)
  state = nms.init_state(params, rules)

  @jax.jit
  def update(params, state, step):
    grads = jax.tree.map(lambda w: jnp.cos(w * 1000 + step.astype(jnp.float32)) / 16, params)
    params = jax.tree.map(jnp.subtract, params, grads)
    return params, nms.update_state(state, params, rules, step + 1, grads)

  @jax.jit
  def sparsify_with_vjp(params, step, state, grads):
    effective, back = jax.vjp(lambda p: nms.sparsify(p, rules, step, state), params)
    return effective, back(grads)[0]

  found = {}
  for step in STEPS:
    if step in SEEN:
      found[step] = params, state
    params, state = update(params, state, jnp.int32(step))
  assert nms.verify(nms.finalize(params, rules, 0, state, early=True), rules).ok
  return found, sparsify_with_vjp


@pytest.mark.parametrize(
  "scan, policy, rules",
  [
    pytest.param(False, "none", RULES, id="plain-every recipe"),
    pytest.param(True, "nm_masks", SOME, id="scanned-one of each kind"),
  ],
)
def test_sparse_is_dense_on_sparsified_parameters(scan, policy, rules):
  """Loss and gradients of every recipe in every phase, to the bit, with dropout."""
  sparse = sparse_model(scan, rules, remat_policy=policy)
  rest = {k: v for k, v in shapes_of(sparse).items() if k != "params"}
  run_dense = loss_and_grads(sparse.dense_twin(), **DROPOUT)
  inner = loss_and_grads(sparse, **DROPOUT)
  run_sparse = jax.jit(lambda p, step, state: inner(p, with_step(rest, step, state)))
  found, sparsify_with_vjp = trajectory(scan, rules)
  for step, (params, state) in found.items():
    at = jnp.int32(step)
    got, got_grads = run_sparse(params, at, state)
    effective, _ = sparsify_with_vjp(params, at, state, params)
    want, grads = run_dense(effective, {})
    assert np.isfinite(want)
    assert_same_bits({"loss": got}, {"loss": want}, f"step {step}")
    _, want_grads = sparsify_with_vjp(params, at, state, grads)
    assert_same_bits(got_grads, want_grads, f"step {step}")
  assert run_sparse._cache_size() == 1  # one compilation serves all steps


# --- misuse ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  "call, message",
  [
    (lambda: T5Config.t5_1_1("huge"), "'huge'.*xxl"),
    (lambda: T5Config.preset("t5_2", "small"), "'t5_2'.*t5_1_1"),
    (lambda: shapes_of(make(remat_policy="some")), "'some'.*minimal"),
    (lambda: decoded(BATCH[0]), "packed"),
  ],
)
def test_mistakes_are_named(call, message):
  with pytest.raises(ValueError, match=message):
    call()


def decoded(segments):
  """Packed examples where one token is decoded after the other."""
  ids = {"encoder_segment_ids": segments, "decoder_segment_ids": BATCH[2]}
  init = functools.partial(make(depth=1).init, enable_dropout=False, decode=True, **ids)
  jax.eval_shape(init, jax.random.key(0), *BATCH)
