"""Where the step comes from, and SR-STE's term as a link of an optax chain."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import nm_sparsity_jax as nms
from nm_sparsity_jax.training import transform

PHASES = nms.Phases(total=9, dense=1)
RULES = nms.Rules({"ff": nms.recipe("sr_ste", pattern="2:4", phases=PHASES, lam=0.25)})
IDP = nms.Rules({"ff": nms.recipe("idp", pattern="1:8", phases=PHASES, lam=1)})


def params_of(seed=0):
  w, v = np.random.default_rng(seed).normal(size=(2, 8, 5)).astype(np.float32)
  return {"mlp": {"wi": {"kernel": jnp.asarray(w)}}, "other": {"kernel": jnp.asarray(v)}}


ZEROS = jax.tree.map(jnp.zeros_like, params_of())


@pytest.fixture(autouse=True)
def as_users_compute():
  with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
    yield


def other_count():
  """A transformation whose own `count` is not the step."""
  init = lambda p: optax.ScaleByScheduleState(jnp.int32(70))
  return optax.GradientTransformation(init, lambda u, s, p=None: (u, s))


HALF = {"mlp": True, "other": False}
COUNTS = [
  # The first `count` in the chain, but those that begin anew.
  (optax.chain(other_count(), optax.adam(1e-3)), 3, 70),
  (optax.chain(optax.contrib.reduce_on_plateau(accumulation_size=2), optax.adam(1e-3)), 3, 3),
  # Ours come before another `count`, wherever they stand.
  (optax.partition({True: optax.chain(nms.sr_ste(RULES), optax.adam(1.0)), False: optax.sgd(1.0)},
                   HALF), 3, 3),
  # MultiSteps comes before these, and nms.sparse before all.
  (optax.MultiSteps(optax.chain(nms.sr_ste(RULES), optax.sgd(1.0)), 4), 11, 2),
  (optax.MultiSteps(nms.sparse(optax.chain(other_count(), optax.adam(1.0)), RULES), 4), 9, 2),
]  # fmt: skip


@pytest.mark.parametrize("tx, updates, steps", COUNTS)
def test_step_count(tx, updates, steps):
  params, tx = params_of(), optax.with_extra_args_support(tx)
  state, update = tx.init(params), jax.jit(tx.update)
  for _ in range(updates):
    _, state = update(params, state, params, value=jnp.float32(1))
  for count in (nms.step_count(state), jax.jit(nms.step_count)(state)):
    assert count.dtype == jnp.int32 and count.shape == () and count == steps


@pytest.mark.parametrize("rules", [RULES, IDP], ids=["sr_ste", "idp"])
@pytest.mark.parametrize("every", [1, 3])
def test_the_link_adds_the_term_of_the_forward_pass_once_a_step(rules, every):
  """Also through wrappers, and with the stored masks; where the network sees a zero."""
  inner = optax.chain(optax.clip(9.0), nms.sr_ste(rules), optax.sgd(1.0))
  tx, params = optax.MultiSteps(inner, every), params_of()
  masks, opt, update = nms.init_state(params, rules), tx.init(params), jax.jit(tx.update)
  for step in range(9):
    for _ in range(every):
      updates, opt = update(ZEROS, opt, params, nm_state=masks)
    term = transform.add_sr_ste(ZEROS, params, rules, step, masks)
    jax.tree.map(lambda u, t: np.testing.assert_array_equal(u, -t), updates, term)
    seen = nms.sparsify(params, rules, step, masks)
    jax.tree.map(lambda t, w: np.testing.assert_array_equal(t == 0, w != 0), term, seen)
    params = params_of(step + 1)
    masks = nms.update_state(masks, params, rules, nms.step_count(opt))


def test_what_has_no_term_only_counts_and_mistakes_are_named():
  tx = nms.sr_ste(nms.Rules({"ff": nms.recipe("mdgf_linear", pattern="2:4", phases=PHASES)}))
  updates, state = tx.update(params_of(9), tx.init(params_of()), params_of())
  jax.tree.map(np.testing.assert_array_equal, updates, params_of(9))
  assert nms.step_count(state) == 1
  idp = nms.sr_ste(IDP)
  for word, do in (
    ("mask as state", lambda: idp.update(ZEROS, idp.init(ZEROS), params_of())),
    ("match no parameter", lambda: tx.init({"other": jnp.ones((8, 8))})),
    ("count_steps", lambda: nms.step_count(optax.apply_every(2).init(params_of()))),
  ):
    with pytest.raises(ValueError, match=word):
      do()
