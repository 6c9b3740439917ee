"""nms.sparse: what the pieces do by hand, to the bit, inside and around what optax has."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import nm_sparsity_jax as nms
from nm_sparsity_jax.recipes import RECIPES

PHASES = nms.Phases(total=9, dense=2, finetune=3)
STEPS = 10
PLACES = ("a", "b", "c", "d")


def make(name, pattern="2:8", **fields):
  if name == "custom":
    fields = {"path": ((2, "4:8", 1.0), (4, "2:8", 0.5))} | fields
  if name == "sdgf_geometric":
    pattern, fields = "1:4", {"k": 2}
  return nms.recipe(name, pattern=pattern, phases=PHASES, **fields)


# A recipe of each kind at once: what is true of them together is true of each.
MIXED = nms.Rules(
  {
    "a/kernel": make("idp", lam=0.05),
    "b/kernel": make("snip", batches=2),
    "c/kernel": make("sr_ste", lam=0.05),
    "d/kernel": make("one_shot"),
  }
)


def params_of(seed=0):
  w = np.random.default_rng(seed).normal(size=(5, 8, 3)).astype(np.float32)
  params = {name: {"kernel": jnp.asarray(x)} for name, x in zip(PLACES, w, strict=False)}
  return params | {"bias": jnp.asarray(w[4, 0])}


def model_loss(params, i):
  """Of a dense model, on the batch of step i. Its gradient is elementwise: no sum to reorder."""
  scale = 1 + (jnp.asarray(i, jnp.float32) % 4) / 4
  return sum(jnp.sum(jnp.sin(scale * w)) for w in jax.tree.leaves(params))


def apply_updates(params, updates):
  with jax.numpy_dtype_promotion("standard"):
    return optax.apply_updates(params, updates)


def foreign(update, *args, **kwargs):
  """A call of code that is not ours, which relaxes promotion."""
  with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
    return update(*args, **kwargs)


def stepper(tx, rules, jit=True):
  """(params, opt, i) -> (params, opt): the loop of the README."""

  def step(params, opt, i):
    grads = jax.grad(lambda p: model_loss(nms.sparsify(p, rules, opt), i))(params)
    updates, opt = foreign(tx.update, grads, opt, params)
    return apply_updates(params, updates), opt

  return jax.jit(step) if jit else step


def train(tx, rules, steps=STEPS, jit=True, batch=lambda i: i):
  """The parameters and the optimizer state after some steps."""
  step, params = stepper(tx, rules, jit), params_of()
  opt = tx.init(params)
  for i in range(steps):
    params, opt = step(params, opt, jnp.int32(batch(i)))
  return params, opt


def by_hand(tx, rules, steps=STEPS, jit=True):
  """The parameters and the masks by the pieces: `tx` has nms.sr_ste in it."""

  def step(params, opt, masks, i):
    now = nms.step_count(opt)
    grads = jax.grad(lambda p: model_loss(nms.sparsify(p, rules, now, masks), i))(params)
    updates, opt = foreign(tx.update, grads, opt, params, nm_state=masks)
    new = apply_updates(params, updates)
    now = nms.step_count(opt)
    return new, opt, nms.update_state(masks, new, rules, now, grads, grads_at=params)

  params, step = params_of(), jax.jit(step) if jit else step
  run = params, tx.init(params), nms.init_state(params, rules)
  for i in range(steps):
    run = step(*run, jnp.int32(i))
  return run[0], run[2]


def same(a, b):
  jax.tree.map(np.testing.assert_array_equal, a, b)


# --- the same as the pieces -----------------------------------------------------------------------


@pytest.mark.parametrize("jit", [True, False], ids=["jit", "eager"])
@pytest.mark.parametrize("name", RECIPES)
def test_equals_the_pieces(name, jit):
  """Every recipe, through all phases: parameters and masks have the bits of the pieces."""
  rules = nms.Rules({"[ac]/kernel": make(name)})
  adam = optax.adam(3e-2)
  params, opt = train(nms.sparse(adam, rules), rules, jit=jit)
  expected, masks = by_hand(optax.chain(nms.sr_ste(rules), adam), rules, jit=jit)
  same(params, expected)
  same(opt.masks, masks)
  assert bool(opt.masks) == rules.places["[ac]/kernel"].stateful
  assert nms.step_count(opt) == opt.count == STEPS
  done = nms.finalize(params, rules, opt)
  same(done, nms.finalize(params, rules, masks))
  assert name == "dense" or nms.verify(done, rules).ok


def test_the_mixture_moves():
  """What the tests below compare is not trivially equal: masks and terms are at work."""
  params, opt = train(nms.sparse(optax.adam(3e-2), MIXED), MIXED)
  for name in ("a", "b", "d"):
    mask = opt.masks["mask"][name]["kernel"]
    assert mask.mean() == (0.5 if name == "a" else 0.25)
  plain, _ = train(nms.sparse(optax.adam(3e-2), no_terms()), no_terms())
  for name in ("a", "c"):
    assert (params[name]["kernel"] != plain[name]["kernel"]).any()


def no_terms():
  """MIXED with lambda 0."""
  places = MIXED.places | {"a/kernel": make("idp", lam=0.0), "c/kernel": make("sr_ste", lam=0.0)}
  return nms.Rules(places)
