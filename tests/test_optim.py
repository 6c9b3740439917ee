"""Where the step comes from, and SR-STE's term: what is added, to which weights, how often."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import nm_sparsity_jax as nms
from nm_sparsity_jax import optim

# Gradients are made up here, so no loss has masked weights.
pytestmark = pytest.mark.filterwarnings("ignore:nms.(sparse|sr_ste) updates weights:UserWarning")

PHASES = nms.Phases(total=12, dense=2, finetune=2)
LAM = 2e-4
RULES = nms.Rules({"ff": nms.recipe("sr_ste", pattern="2:4", phases=PHASES)})


def params_of(seed=0, shape=(8, 5)):
  w, v = np.random.default_rng(seed).normal(size=(2, *shape)).astype(np.float32)
  return {"mlp": {"wi": {"kernel": jnp.asarray(w)}}, "other": {"kernel": jnp.asarray(v)}}


def kernel(tree):
  return np.asarray(tree["mlp"]["wi"]["kernel"])


def foreign(tx):
  """tx, at whose calls promotion is relaxed: not our code."""

  def update(*args, **kwargs):
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
      return tx.update(*args, **kwargs)

  return optax.GradientTransformationExtraArgs(tx.init, update)


def term(w, lam=LAM, n=2, m=4, parent=None):
  """lambda * (1 - mask) * W, by numpy."""
  size = np.abs(w) if parent is None else np.where(parent, np.abs(w), -1)
  groups = size.reshape(-1, m, w.shape[1])
  rank = np.argsort(np.argsort(-groups, axis=1, kind="stable"), axis=1, kind="stable")
  pruned = (rank >= n).reshape(w.shape)
  return np.where(pruned, np.float32(lam) * w, np.float32(0))


def run(tx, steps, params=None):
  """The state after `steps` updates."""
  params = params_of() if params is None else params
  update, state, ones = jax.jit(foreign(tx).update), tx.init(params), params_of()
  for _ in range(steps):
    _, state = update(ones, state, params)
  return state


# --- step_count -----------------------------------------------------------------------------------


def skip_two():
  """A transformation whose own `count` is not the step."""
  init = lambda p: optax.ScaleByScheduleState(jnp.int32(70))
  return optax.GradientTransformation(init, lambda u, s, p=None: (u, s))


@pytest.mark.parametrize(
    "make, updates, steps",
    [
        (lambda: optax.adam(1e-3), 3, 3),
        (lambda: optax.sgd(optax.linear_schedule(1e-3, 0, 9)), 3, 3),
        (lambda: optax.lion(1e-3), 3, 3),
        (lambda: optax.adafactor(1e-3), 3, 3),
        (lambda: optax.inject_hyperparams(optax.adamw)(1e-3), 3, 3),
        (lambda: optax.inject_hyperparams(optax.sgd)(1e-3), 3, 3),
        (lambda: nms.count_steps(), 3, 3),
        (lambda: nms.sr_ste(RULES), 3, 3),
        (lambda: optax.chain(nms.count_steps(), optax.sgd(1e-3)), 3, 3),
        (lambda: optax.chain(optax.clip(1.0), optax.chain(optax.adam(1e-3))), 3, 3),
        # Ours come before another `count`, wherever they stand.
        (lambda: optax.chain(skip_two(), nms.count_steps()), 3, 3),
        (lambda: optax.chain(skip_two(), optax.chain(nms.sr_ste(RULES), optax.adam(1.0))), 3, 3),
        (lambda: optax.chain(optax.chain(nms.count_steps()), skip_two()), 3, 3),
        # Without ours the first one in the chain counts.
        (lambda: optax.chain(skip_two(), optax.adam(1e-3)), 3, 70),
        (lambda: optax.chain(optax.adam(1e-3), skip_two()), 3, 3),
        # MultiSteps comes before all.
        (lambda: optax.MultiSteps(optax.adam(1e-3), 4), 9, 2),
        (lambda: optax.MultiSteps(optax.sgd(1e-3), 4), 9, 2),
        (lambda: optax.MultiSteps(optax.chain(nms.sr_ste(RULES), optax.sgd(1.0)), 4), 11, 2),
        (lambda: optax.MultiSteps(optax.chain(skip_two(), nms.count_steps()), 4), 8, 2),
        (lambda: optax.chain(nms.count_steps(), optax.MultiSteps(optax.adam(1.0), 4)
                             .gradient_transformation()), 9, 2),
        (lambda: optax.chain(skip_two(), optax.MultiSteps(optax.adam(1.0), 4)
                             .gradient_transformation()), 9, 2),
        # Under masks and labels.
        (lambda: optax.masked(optax.adam(1e-3), {"mlp": True, "other": False}), 3, 3),
        (lambda: optax.partition({"a": optax.chain(nms.sr_ste(RULES), optax.adam(1.0)),
                                  "b": optax.sgd(1.0)}, {"mlp": "a", "other": "b"}), 3, 3),
        (lambda: optax.apply_if_finite(optax.adam(1e-3), 5), 3, 3),
    ],
)  # fmt: skip
def test_step_count(make, updates, steps):
  count = nms.step_count(run(make(), updates))
  assert count.dtype == jnp.int32 and count.shape == ()
  assert count == steps


def test_step_count_starts_at_zero_and_may_be_traced():
  tx = optax.chain(nms.sr_ste(RULES), optax.sgd(1.0))
  state = tx.init(params_of())
  assert nms.step_count(state) == 0
  assert jax.jit(nms.step_count)(state) == 0
  assert jax.eval_shape(nms.step_count, state).dtype == jnp.int32


@pytest.mark.parametrize("tx", [optax.sgd(1e-3), optax.chain(optax.clip(1.0), optax.sgd(1e-3))])
def test_no_count_at_all_names_the_way_out(tx):
  with pytest.raises(ValueError, match=r"nms\.count_steps\(\)"):
    nms.step_count(tx.init(params_of()))


def test_sr_ste_outside_multi_steps_is_an_error():
  inner = optax.MultiSteps(optax.adam(1e-3), 4).gradient_transformation()
  state = optax.chain(nms.sr_ste(RULES), inner).init(params_of())
  with pytest.raises(ValueError, match=r"outside optax.MultiSteps.*MultiSteps\(optax.chain\("):
    nms.step_count(state)


def test_step_count_of_an_nnx_optimizer():
  model = nnx.Linear(8, 4, rngs=nnx.Rngs(0))
  rules = nms.Rules({"kernel": nms.recipe("idp", pattern="2:8", phases=nms.Phases(total=9))})
  w = jnp.array(model.kernel[...])
  state = nms.init_state(nnx.state(model, nnx.Param), rules)
  for tx in (
    optax.chain(nms.sr_ste(rules), optax.sgd(1.0)),
    optax.adamw(1e-3),
    optax.MultiSteps(optax.chain(nms.sr_ste(rules), optax.sgd(1.0)), 1),
  ):
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    assert nms.step_count(optimizer.opt_state) == 0
    if isinstance(tx, optax.MultiSteps):
      continue
    zeros = jax.tree.map(jnp.zeros_like, nnx.state(model, nnx.Param))
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
      optimizer.update(model, zeros, nm_state=state)
    assert nms.step_count(optimizer.opt_state) == 1
  # The first update was SR-STE's term alone, of 7:8.
  nnx.update(model, {"kernel": w})
  optimizer = nnx.Optimizer(model, optax.chain(nms.sr_ste(rules), optax.sgd(1.0)), wrt=nnx.Param)
  optimizer.update(model, zeros, nm_state=state)
  expected = np.asarray(w) - term(np.asarray(w), n=7, m=8)
  np.testing.assert_array_equal(np.asarray(model.kernel[...]), expected)


# --- the term -------------------------------------------------------------------------------------

OPTIMIZERS = {
  "sgd": lambda: optax.sgd(0.1, momentum=0.9),
  "adamw": lambda: optax.adamw(1e-2, weight_decay=0.1),
  "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=4),
  "lion": lambda: optax.lion(1e-3),
  "clipped": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2)),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_term_is_exact_under_any_optimizer(name):
  """tx with sr_ste on g = the optimizer alone on g + lambda * (1 - mask) * W, bit for bit."""
  ours = foreign(optax.chain(nms.sr_ste(RULES), OPTIMIZERS[name]()))
  alone = foreign(OPTIMIZERS[name]())
  params = params_of()
  state, expected_state = ours.init(params), alone.init(params)
  differed = False
  for step in range(14):  # also past the end of the run
    g = params_of(100 + step)
    updates, state = ours.update(g, state, params)
    w = kernel(params)
    added = term(w) if step >= PHASES.dense else np.zeros_like(w)
    by_hand = {"mlp": {"wi": {"kernel": jnp.asarray(kernel(g) + added)}}, "other": g["other"]}
    expected, expected_state = alone.update(by_hand, expected_state, params)
    jax.tree.map(np.testing.assert_array_equal, updates, expected)
    differed |= bool(added.any())
    params = optax.apply_updates(params, updates)
  assert differed and nms.step_count(state) == 14


@pytest.mark.parametrize("lam", [0.5, 1e-3])
def test_lambda_is_the_recipes_own(lam):
  rules = nms.Rules({"ff": nms.recipe("sr_ste", pattern="1:8", phases=PHASES, lam=lam)})
  params, tx = params_of(), nms.sr_ste(rules)
  state = tx.init(params)._replace(count=jnp.int32(5))
  updates, state = tx.update(jax.tree.map(jnp.zeros_like, params), state, params)
  np.testing.assert_array_equal(kernel(updates), term(kernel(params), lam, 1, 8))
  np.testing.assert_array_equal(np.asarray(updates["other"]["kernel"]), 0)
  assert state.count == 6


def test_no_term_in_the_dense_phase_and_every_step_after():
  params, tx = params_of(), nms.sr_ste(RULES)
  state, zeros = tx.init(params), jax.tree.map(jnp.zeros_like, params)
  for step in range(14):
    updates, state = tx.update(zeros, state, params)
    expected = term(kernel(params)) if step >= 2 else np.zeros((8, 5))
    np.testing.assert_array_equal(kernel(updates), expected, err_msg=str(step))


def test_the_term_keeps_the_dtype_of_the_gradient():
  params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params_of())
  tx = nms.sr_ste(RULES)
  state = tx.init(params)._replace(count=jnp.int32(5))
  for dtype in (jnp.bfloat16, jnp.float32):
    zeros = jax.tree.map(lambda x, d=dtype: jnp.zeros_like(x, d), params)
    updates, _ = tx.update(zeros, state, params)
    assert updates["mlp"]["wi"]["kernel"].dtype == dtype
    expected = jnp.asarray(term(kernel(params).astype(np.float32))).astype(dtype)
    np.testing.assert_array_equal(kernel(updates), np.asarray(expected))


@pytest.mark.parametrize("k", [1, 4])
def test_once_per_optimizer_step_under_multi_steps(k):
  """Four mini-steps of one gradient move the weights as one step does."""
  inner = lambda: optax.chain(nms.sr_ste(RULES), optax.sgd(0.5))
  multi, single = optax.MultiSteps(inner(), k), inner()
  multi_update, single_update = jax.jit(foreign(multi).update), jax.jit(single.update)
  params = other = params_of()
  state, other_state = multi.init(params), single.init(other)
  for step in range(5):
    g = params_of(50 + step)
    for mini in range(k):
      assert nms.step_count(state) == step
      updates, state = multi_update(g, state, params)
      if mini < k - 1:
        assert not kernel(updates).any()
      params = optax.apply_updates(params, updates)
    updates, other_state = single_update(g, other_state, other)
    other = optax.apply_updates(other, updates)
    jax.tree.map(np.testing.assert_array_equal, params, other)
  without = optax.sgd(0.5)
  plain, _ = without.update(g, without.init(params), params)
  assert (kernel(plain) != kernel(updates)).any()


def test_the_mask_is_the_one_of_the_forward_pass():
  """At every count a weight is pulled towards zero if and only if the network sees it as zero."""
  recipe = nms.recipe("idp", pattern="1:8", phases=nms.Phases(total=9, dense=1))
  rules, tx = nms.Rules({"ff": recipe}), nms.sr_ste(nms.Rules({"ff": recipe}))
  params = params_of()
  zeros = jax.tree.map(jnp.zeros_like, params)
  masks, opt = nms.init_state(params, rules), tx.init(params)
  update = jax.jit(lambda s, p, t: nms.update_state(s, p, rules, t))
  ours = jax.jit(lambda g, s, p, m: tx.update(g, s, p, nm_state=m))
  seen = jax.jit(lambda p, t, m: nms.sparsify(p, rules, t, m))
  densities = []
  for step in range(9):
    assert nms.step_count(opt) == step
    forward = kernel(seen(params, nms.step_count(opt), masks)) != 0
    updates, opt = ours(zeros, opt, params, masks)
    np.testing.assert_array_equal(kernel(updates) == 0, forward, err_msg=str(step))
    densities.append(forward.mean())
    params = params_of(step + 1)
    masks = update(masks, params, nms.step_count(opt))
  assert densities == [1, 7 / 8, 7 / 8, 1 / 2, 1 / 2, 1 / 4, 1 / 4, 1 / 8, 1 / 8]


@pytest.mark.parametrize("name", ["mdgf_linear", "sdgf_stepwise", "one_shot", "snip", "dense"])
def test_identity_without_an_sr_ste_rule_but_it_counts(name):
  rules = nms.Rules({"ff": nms.recipe(name, pattern="2:4", phases=PHASES)})
  params, tx = params_of(), nms.sr_ste(rules)
  state, g = tx.init(params), params_of(9)
  for step in range(4):
    updates, state = tx.update(g, state, params)
    jax.tree.map(np.testing.assert_array_equal, updates, g)
    assert nms.step_count(state) == step + 1


@pytest.mark.parametrize("wrap", ["chain", "multi", "masked", "multi_transform", "jit"])
def test_stored_masks_reach_sr_ste_through_wrappers(wrap):
  recipe = nms.recipe("idp", pattern="2:8", phases=nms.Phases(total=8), lam=0.25)
  rules, params = nms.Rules({"ff": recipe}), params_of()
  chain = optax.chain(nms.sr_ste(rules), optax.sgd(1.0))
  tx = {
    "chain": optax.chain(optax.clip(1.0), chain),
    "multi": optax.MultiSteps(chain, 1),
    "masked": optax.masked(chain, {"mlp": True, "other": False}),
    "multi_transform": optax.multi_transform(
      {"a": chain, "b": optax.sgd(1.0)}, {"mlp": "a", "other": "b"}
    ),
    "jit": chain,
  }[wrap]
  update = jax.jit(tx.update) if wrap == "jit" else tx.update
  parent = np.arange(40).reshape(8, 5) % 3 != 0
  state = nms.init_state(params, rules)
  state["mask"]["mlp"]["wi"]["kernel"] = jnp.asarray(parent)
  zeros = jax.tree.map(jnp.zeros_like, params)
  with jax.numpy_dtype_promotion("standard"):
    updates, _ = update(zeros, tx.init(params), params, nm_state=state)
  # Step 0 keeps 7 of 8; where the parent keeps fewer, the first others fill up.
  expected = -term(kernel(params), 0.25, 7, 8, parent)
  np.testing.assert_array_equal(kernel(updates), expected)
  with pytest.raises(ValueError, match="idp.*nm_state=state"):
    tx.update(zeros, tx.init(params), params)


def test_partial_trees():
  """Each part of the tree has its own sr_ste; rules that match elsewhere are no error there."""
  both = nms.Rules(
    {
      "ff": nms.recipe("sr_ste", pattern="2:4", phases=nms.Phases(total=9)),
      "other/kernel": nms.recipe("sr_ste", pattern="1:4", phases=nms.Phases(total=9), lam=0.5),
    }
  )
  params = params_of()
  zeros = jax.tree.map(jnp.zeros_like, params)
  make = lambda: optax.chain(nms.sr_ste(both), optax.sgd(1.0))
  tx = optax.multi_transform({"a": make(), "b": make()}, {"mlp": "a", "other": "b"})
  updates, state = tx.update(zeros, tx.init(params), params)
  np.testing.assert_array_equal(kernel(updates), -term(kernel(params)))
  other = np.asarray(params["other"]["kernel"])
  np.testing.assert_array_equal(np.asarray(updates["other"]["kernel"]), -term(other, 0.5, 1, 4))
  assert nms.step_count(state) == 1
  tx = optax.masked(nms.sr_ste(both), {"mlp": True, "other": False})
  updates, _ = tx.update(zeros, tx.init(params), params)
  np.testing.assert_array_equal(kernel(updates), term(kernel(params)))
  assert not np.asarray(updates["other"]["kernel"]).any()


def test_a_rule_for_nothing_is_an_error_in_a_whole_tree():
  rules = nms.Rules({**RULES.places, "qvk": nms.recipe("dense")})
  with pytest.raises(ValueError, match="match no parameter.*'qvk'"):
    nms.sr_ste(rules).init(params_of())
  optax.masked(nms.sr_ste(rules), {"mlp": True, "other": False}).init(params_of())


def test_counts_that_begin_anew_are_no_step():
  params, zeros = params_of(), jax.tree.map(jnp.zeros_like, params_of())
  for cyclic in (optax.apply_every(2), optax.contrib.reduce_on_plateau(accumulation_size=2)):
    state = optax.chain(optax.sgd(1e-3), cyclic).init(params)
    with pytest.raises(ValueError, match="count_steps"):
      nms.step_count(state)
    tx = optax.chain(cyclic, optax.adam(1e-3))
    state = tx.init(params)
    for _ in range(3):
      with jax.numpy_dtype_promotion("standard"):
        _, state = tx.update(zeros, state, params, value=jnp.float32(1))
    assert nms.step_count(state) == 3


def test_a_stored_mask_that_is_out_of_date_is_refused_here_too():
  rules = nms.Rules(
    {
      "ff": nms.recipe("idp", pattern="2:8", phases=nms.Phases(total=40)),
      "other/kernel": nms.recipe("dense"),
    }
  )
  params = params_of()
  tx, state = nms.sr_ste(rules), nms.init_state(params, rules)
  with pytest.raises(ValueError, match="idp is out of date"):
    tx.update(params, optim.SrSteState(jnp.int32(30)), params, nm_state=state)


def test_sr_ste_needs_the_parameters():
  tx = nms.sr_ste(RULES)
  with pytest.raises(ValueError, match=r"tx\.update\(grads, opt_state, params\)"):
    tx.update(params_of(), tx.init(params_of()))


def test_sr_ste_checks_the_rules_before_the_first_step():
  with pytest.raises(ValueError, match="multiple of 4"):
    nms.sr_ste(RULES).init(params_of(shape=(6, 5)))


@pytest.mark.parametrize("name", ["sr_ste", "idp"])
def test_a_loop_trains_and_ends_sparse(name):
  random = np.random.default_rng(0)
  truth = random.normal(size=(32, 8)).astype(np.float32)
  mask = np.asarray(nms.nm_mask(jnp.abs(jnp.asarray(truth)), "1:4"))
  x = jnp.asarray(random.normal(size=(128, 32)).astype(np.float32))
  y = x @ jnp.asarray(np.where(mask, truth, 0))
  recipe = nms.recipe(name, pattern="1:4", phases=nms.Phases(total=300, dense=60, finetune=100))
  rules = nms.Rules({"ff": recipe})
  tx = foreign(optax.chain(nms.sr_ste(rules), optax.adamw(3e-2, weight_decay=0.0)))

  def loss(params, step, state):
    sparse = nms.sparsify(params, rules, step, state)
    return jnp.mean((x @ sparse["mlp"]["wi"]["kernel"] - y) ** 2)

  def body(carry, _):
    params, opt, state = carry
    value, g = jax.value_and_grad(loss)(params, nms.step_count(opt), state)
    updates, opt = tx.update(g, opt, params, nm_state=state)
    params = optax.apply_updates(params, updates)
    state = nms.update_state(state, params, rules, nms.step_count(opt))
    return (params, opt, state), value

  params = {"mlp": {"wi": {"kernel": jnp.zeros((32, 8))}}}
  start = params, tx.init(params), nms.init_state(params, rules)
  (params, opt, state), losses = jax.jit(lambda c: jax.lax.scan(body, c, length=300))(start)
  assert nms.step_count(opt) == 300
  done = nms.finalize(params, rules, state or nms.step_count(opt))
  assert nms.verify(done, rules).ok and not nms.verify(params, rules).ok
  # Loose, because the masks that training finds differ: twice the lambda ends at 0.014 of it.
  assert losses[-1] < 0.1 * losses[0]
  final = jnp.mean((x @ done["mlp"]["wi"]["kernel"] - y) ** 2)
  assert final < 0.1 * losses[0]
