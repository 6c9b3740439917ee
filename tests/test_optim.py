"""Where the step comes from, and SR-STE's term: what is added, to which weights, how often."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import nm_sparsity_jax as nms

PHASES = nms.Phases(total=12, dense=2, finetune=2)
RULES = nms.Rules({"ff": nms.recipe("sr_ste", pattern="2:4", phases=PHASES, lam=0.25)})


def params_of(seed=0, shape=(8, 5), dtype=jnp.float32):
  w, v = np.random.default_rng(seed).normal(size=(2, *shape)).astype(np.float32)
  w, v = (jnp.asarray(x, dtype) for x in (w, v))
  return {"mlp": {"wi": {"kernel": w}}, "other": {"kernel": v}}


def kernel(tree):
  return np.asarray(tree["mlp"]["wi"]["kernel"])


ZEROS = jax.tree.map(jnp.zeros_like, params_of())


def relaxed(tx):
  """tx, at whose calls promotion is relaxed: not our code."""

  def update(*args, **kwargs):
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
      return tx.update(*args, **kwargs)

  return optax.GradientTransformationExtraArgs(tx.init, update)


def term(w, lam=0.25, n=2, m=4, parent=None):
  """lambda * (1 - mask) * W, by numpy."""
  size = np.abs(w) if parent is None else np.where(parent, np.abs(w), -1)
  groups = size.reshape(-1, m, w.shape[1])
  rank = np.argsort(np.argsort(-groups, axis=1, kind="stable"), axis=1, kind="stable")
  return np.where((rank >= n).reshape(w.shape), np.float32(lam) * w, np.float32(0))


# --- step_count -----------------------------------------------------------------------------------


def other_count():
  """A transformation whose own `count` is not the step."""
  init = lambda p: optax.ScaleByScheduleState(jnp.int32(70))
  return optax.GradientTransformation(init, lambda u, s, p=None: (u, s))


def four(tx):
  return optax.MultiSteps(tx, 4).gradient_transformation()


HALF = {"mlp": True, "other": False}
COUNTS = [
  # The first `count` in the chain.
  (optax.adam(1e-3), 3, 3),
  (optax.chain(other_count(), optax.adam(1e-3)), 3, 70),
  (optax.masked(optax.adam(1e-3), HALF), 3, 3),
  # But those that begin anew.
  (optax.chain(optax.apply_every(2), optax.adam(1e-3)), 3, 3),
  (optax.chain(optax.contrib.reduce_on_plateau(accumulation_size=2), optax.adam(1e-3)), 3, 3),
  # Ours come before another `count`, wherever they stand.
  (optax.chain(other_count(), nms.count_steps()), 3, 3),
  (optax.partition({True: optax.chain(nms.sr_ste(RULES), optax.adam(1.0)), False: optax.sgd(1.0)},
                   HALF), 3, 3),
  # MultiSteps comes before these, and nms.sparse before all.
  (optax.MultiSteps(optax.chain(nms.sr_ste(RULES), optax.sgd(1.0)), 4), 11, 2),
  (optax.MultiSteps(nms.sparse(optax.chain(other_count(), optax.adam(1.0)), RULES), 4), 9, 2),
  (nms.sparse(optax.chain(optax.clip(1.0), four(optax.adam(1.0))), RULES), 9, 9),
]  # fmt: skip


@pytest.mark.parametrize("tx, updates, steps", COUNTS)
def test_step_count(tx, updates, steps):
  params = params_of()
  state, update = tx.init(params), jax.jit(relaxed(tx).update)
  for _ in range(updates):
    _, state = update(params, state, params, value=jnp.float32(1))
  for count in (nms.step_count(state), jax.jit(nms.step_count)(state)):
    assert count.dtype == jnp.int32 and count.shape == () and count == steps


def test_no_count_at_all_names_the_way_out():
  with pytest.raises(ValueError, match="count_steps"):
    nms.step_count(optax.chain(optax.clip(1.0), optax.apply_every(2)).init(params_of()))


# --- the term -------------------------------------------------------------------------------------

OPTIMIZERS = {
  "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=4),
  "clipped": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2)),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_term_is_exact_under_any_optimizer(name):
  """The optimizer alone on g + lambda * (1 - mask) * W, bit for bit, from the dense phase's end."""
  ours = relaxed(optax.chain(nms.sr_ste(RULES), OPTIMIZERS[name]()))
  alone = relaxed(OPTIMIZERS[name]())
  params = params_of()
  state, expected_state = ours.init(params), alone.init(params)
  for step in range(14):  # also past the end of the run
    g, w = params_of(100 + step), kernel(params)
    updates, state = ours.update(g, state, params)
    added = term(w) if step >= PHASES.dense else np.zeros_like(w)
    full = {"mlp": {"wi": {"kernel": jnp.asarray(kernel(g) + added)}}, "other": g["other"]}
    expected, expected_state = alone.update(full, expected_state, params)
    jax.tree.map(np.testing.assert_array_equal, updates, expected)
    params = optax.apply_updates(params, updates)


def test_once_per_optimizer_step_under_multi_steps():
  """Four mini-steps of one gradient move the weights as one step does."""
  inner = optax.chain(nms.sr_ste(RULES), optax.sgd(0.5))
  multi, params = relaxed(optax.MultiSteps(inner, 4)), params_of()
  update, other = jax.jit(multi.update), params
  state, other_state = multi.init(params), inner.init(other)
  for step in range(5):
    for _ in range(4):
      updates, state = update(params_of(50 + step), state, params)
      params = optax.apply_updates(params, updates)
    updates, other_state = inner.update(params_of(50 + step), other_state, other)
    other = optax.apply_updates(other, updates)
    jax.tree.map(np.testing.assert_array_equal, params, other)


@pytest.mark.parametrize("name", ["mdgf_linear", "one_shot"])
def test_identity_without_an_sr_ste_rule_but_it_counts(name):
  tx = nms.sr_ste(nms.Rules({"ff": nms.recipe(name, pattern="2:4", phases=PHASES)}))
  updates, state = tx.update(params_of(9), tx.init(params_of()), params_of())
  jax.tree.map(np.testing.assert_array_equal, updates, params_of(9))
  assert nms.step_count(state) == 1


IDP = nms.Rules(
  {"ff": nms.recipe("idp", pattern="1:8", phases=nms.Phases(total=9, dense=1), lam=1)}
)


def test_the_mask_is_the_one_of_the_forward_pass():
  """At every count a weight is pulled towards zero if and only if the network sees it as zero."""
  params, tx = params_of(), nms.sr_ste(IDP)
  masks, opt = nms.init_state(params, IDP), tx.init(params)
  update = jax.jit(lambda s, p, t: nms.update_state(s, p, IDP, t))
  ours = jax.jit(lambda s, p, m: tx.update(ZEROS, s, p, nm_state=m))
  seen = jax.jit(lambda p, t, m: nms.sparsify(p, IDP, t, m))
  densities = []
  for step in range(9):
    forward = kernel(seen(params, nms.step_count(opt), masks)) != 0
    updates, opt = ours(opt, params, masks)
    np.testing.assert_array_equal(kernel(updates) == 0, forward, err_msg=str(step))
    densities.append(forward.mean())
    params = params_of(step + 1)
    masks = update(masks, params, nms.step_count(opt))
  assert densities == [1, 7 / 8, 7 / 8, 1 / 2, 1 / 2, 1 / 4, 1 / 4, 1 / 8, 1 / 8]


@pytest.mark.parametrize("wrap", [lambda tx: optax.chain(optax.clip(9.0), tx),
                                  lambda tx: optax.MultiSteps(tx, 1)])  # fmt: skip
def test_stored_masks_reach_sr_ste_through_wrappers(wrap):
  params = params_of()
  tx = relaxed(wrap(optax.chain(nms.sr_ste(IDP), optax.sgd(1.0))))
  parent = np.arange(40).reshape(8, 5) % 3 != 0
  masks = nms.init_state(params, IDP) | {"step": jnp.int32(1)}
  masks["mask"]["mlp"]["wi"]["kernel"] = jnp.asarray(parent)
  state = optax.tree.set(tx.init(params), count=jnp.int32(1))
  updates, _ = jax.jit(tx.update)(ZEROS, state, params, nm_state=masks)
  # Step 1 keeps 7 of 8; where the parent keeps fewer, the first others fill up.
  np.testing.assert_array_equal(kernel(updates), -term(kernel(params), 1, 7, 8, parent))


def test_mistakes_are_named():
  params, tx, idp = params_of(), nms.sr_ste(RULES), nms.sr_ste(IDP)
  state, masks = tx.init(params), nms.init_state(params, IDP)
  late = state._replace(count=jnp.int32(8))
  for word, do in (
    ("parameters", lambda: tx.update(params, state)),
    ("mask as state", lambda: idp.update(ZEROS, state, params)),
    ("out of date", lambda: idp.update(ZEROS, late, params, nm_state=masks)),
    ("match no parameter", lambda: tx.init({"other": params["other"]})),
    (
      "hides",
      lambda: optax.masked(tx, jax.tree.map(lambda w: w is params["other"], params)).init(params),
    ),
  ):
    with pytest.raises(ValueError, match=word):
      do()
