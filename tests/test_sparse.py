"""nms.sparse: what the pieces do by hand, to the bit, inside and around what optax has."""

import dataclasses
import functools
import re
from typing import ClassVar

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import nm_sparsity_jax as nms
from nm_sparsity_jax import opt_states, optim, recipes, stored
from nm_sparsity_jax.recipes import RECIPES

pytestmark = [
  # Gradients are made up here, so no loss has masked weights.
  pytest.mark.filterwarnings("ignore:nms.(sparse|sr_ste) updates weights:UserWarning"),
]

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
    "a/kernel": make("idp", lam=2.0**-4),
    "b/kernel": make("snip", batches=2),
    "c/kernel": make("sr_ste", lam=2.0**-4),
    "d/kernel": make("one_shot"),
  }
)


def params_of(seed=0, places=PLACES):
  w = np.random.default_rng(seed).normal(size=(5, 8, 3)).astype(np.float32)
  params = {name: {"kernel": jnp.asarray(x)} for name, x in zip(places, w, strict=False)}
  return params | {"bias": jnp.asarray(w[4, 0])}


def model_loss(params, i):
  """Of a dense model, on the batch of step i. Its gradient is elementwise: no sum to reorder."""
  scale = 0.5 + (jnp.asarray(i, jnp.float32) % 2) / 2
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


def train(tx, rules, jit=True, places=PLACES):
  """The parameters and the optimizer state at the end."""
  step, params = stepper(tx, rules, jit), params_of(places=places)
  opt = tx.init(params)
  for i in range(STEPS):
    params, opt = step(params, opt, jnp.int32(i))
  return params, opt


def by_hand(tx, rules, jit=True, places=PLACES):
  """The parameters and the masks by the pieces: `tx` has nms.sr_ste in it."""

  def step(params, opt, masks, i):
    now = nms.step_count(opt)
    grads = jax.grad(lambda p: model_loss(nms.sparsify(p, rules, now, masks), i))(params)
    updates, opt = foreign(tx.update, grads, opt, params, nm_state=masks)
    new = apply_updates(params, updates)
    now = nms.step_count(opt)
    return new, opt, nms.update_state(masks, new, rules, now, grads, grads_at=params)

  params, step = params_of(places=places), jax.jit(step) if jit else step
  run = params, tx.init(params), nms.init_state(params, rules)
  for i in range(STEPS):
    run = step(*run, jnp.int32(i))
  return run[0], run[2]


def same(a, b):
  jax.tree.map(np.testing.assert_array_equal, a, b)


def alike(a, b):
  jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), a, b)


def has_bits(name, jit):
  """False for two jitted programs that XLA of JAX 0.12 rounds differently: it fuses Adam's step
  with SR-STE's term, and where nothing is sparse the pieces have none. Op by op they are equal."""
  return not (jit and name == "dense" and jax.__version_info__ >= (0, 11))


# --- the same as the pieces -----------------------------------------------------------------------


# Eager, the two that keep most state, and dense, whose bits of jit differ on the newest JAX; the
# others, in `make test-slow`, repeat that eager mode has the bits of jit: test_every_recipe.py
# holds it of each recipe.
EAGER = {"idp", "snip", "dense"}
WAYS = [pytest.param(name, True, id=f"{name}-jit") for name in RECIPES]
WAYS += [
  pytest.param(name, False, marks=[] if name in EAGER else [pytest.mark.slow], id=f"{name}-eager")
  for name in RECIPES
]


@pytest.mark.parametrize("name, jit", WAYS)
def test_equals_the_pieces(name, jit):
  """Every recipe, through all phases: parameters and masks have the bits of the pieces."""
  rules, adam = nms.Rules({"a/kernel": make(name)}), optax.adam(3e-2)
  params, opt = train(nms.sparse(adam, rules), rules, jit, "a")
  expected, masks = by_hand(optax.chain(nms.sr_ste(rules), adam), rules, jit, "a")
  same(params, expected) if has_bits(name, jit) else alike(params, expected)
  same(opt.masks, masks)
  assert bool(opt.masks) == rules.places["a/kernel"].stateful
  assert nms.step_count(opt) == opt.count == STEPS
  done = nms.finalize(params, rules, opt)
  same(done, nms.finalize(params, rules, masks or STEPS))
  assert name == "dense" or nms.verify(done, rules).ok


def no_terms():
  """MIXED with lambda 0."""
  places = MIXED.places | {"a/kernel": make("idp", lam=0.0), "c/kernel": make("sr_ste", lam=0.0)}
  return nms.Rules(places)


# --- inside and around what optax has -------------------------------------------------------------


def grads_of(i, bad=False):
  """A gradient that depends on i alone."""
  grads = jax.tree.map(lambda w: w * 0.5, params_of(100 + i))
  return jax.tree.map(lambda g: g * jnp.nan, grads) if bad else grads


def mean(*grads):
  """As optax.MultiSteps does it, with the same roundings."""
  acc = jax.tree.map(jnp.zeros_like, grads[0])
  for n, g in enumerate(grads):
    acc = jax.tree.map(lambda g, acc, n=n: acc + (g - acc) / (n + 1), g, acc)
  return acc


@functools.cache
def feeder(tx):
  """(params, opt, grads) -> (params, opt), compiled once for each transformation."""

  @jax.jit
  def feed(params, opt, grads):
    updates, opt = foreign(tx.update, grads, opt, params)
    return apply_updates(params, updates), opt

  return feed


def fed(tx, grads):
  """The parameters and the optimizer state after some gradients."""
  params = params_of()
  opt = tx.init(params)
  for g in grads:
    params, opt = feeder(tx)(params, opt, g)
  return params, opt


def found(run):
  """The state of nms.sparse in a run."""
  return opt_states.sparse_state(run[1])


def equal_runs(one, other):
  same(one[0], other[0])
  assert found(one).count == found(other).count
  same(found(one).masks, found(other).masks)


def sgd(learning_rate=2.0**-4):
  return optax.sgd(learning_rate, momentum=0.5)  # exact products: programs may fuse as they like


PLAIN = nms.sparse(sgd(), MIXED)
TERMS = nms.Rules({"c/kernel": make("sr_ste", lam=0.5)})


def finite(tx):
  return optax.apply_if_finite(tx, 3)


ALL = jax.tree.map(lambda _: True, params_of())
AROUND = {
  "chain": lambda tx: optax.chain(optax.identity(), tx),
  "multi_steps": lambda tx: optax.MultiSteps(tx, 1),
  "finite": finite,
  "masked": lambda tx: optax.masked(tx, ALL),
  "labels": lambda tx: optax.multi_transform({"x": tx}, jax.tree.map(lambda _: "x", ALL)),
}


def injected(tx_of):
  return optax.inject_hyperparams(tx_of)(learning_rate=2.0**-4)


def wrapped(name, order):
  """nms.sparse in a wrapper that does nothing, or around it."""
  if name != "inject" and order == "inside":
    return AROUND[name](nms.sparse(sgd(), MIXED))
  if name != "inject":
    return nms.sparse(AROUND[name](sgd()), MIXED)
  if order == "inside":
    return injected(lambda learning_rate: nms.sparse(sgd(learning_rate), MIXED))
  return nms.sparse(injected(lambda learning_rate: sgd(learning_rate)), MIXED)


@pytest.mark.parametrize("order", ["inside", "around"])
@pytest.mark.parametrize("name", [*AROUND, "inject"])
def test_a_wrapper_that_does_nothing_changes_nothing(name, order):
  grads = [grads_of(i) for i in range(STEPS)]
  params, opt = fed(wrapped(name, order), grads)
  expected, state = fed(PLAIN, grads)
  equal_runs((params, opt), (expected, state))
  assert nms.step_count(opt) == STEPS
  kept = {name: np.mean(mask["kernel"]) for name, mask in state.masks["mask"].items()}
  assert kept == {"a": 0.5, "b": 0.25, "d": 0.25}  # not trivially equal
  for read in (nms.sparsify, nms.finalize):
    same(read(params, MIXED, opt), read(expected, MIXED, state))


CLIP = optax.clip_by_global_norm(0.5)


def test_the_term_is_clipped_or_not_as_the_chain_says():
  pieces, grads = nms.sr_ste(TERMS), [grads_of(i) for i in range(4)]
  ends = []
  for tx, hand in (
    (optax.chain(CLIP, nms.sparse(sgd(), TERMS)), optax.chain(CLIP, pieces, sgd())),
    (nms.sparse(optax.chain(CLIP, sgd()), TERMS), optax.chain(pieces, CLIP, sgd())),
  ):
    params, opt = fed(tx, grads)
    jax.tree.map(near, params, fed(hand, grads)[0])
    assert nms.step_count(opt) == 4
    ends.append(params["c"]["kernel"])
  assert np.abs(ends[0] - ends[1]).max() > 1e-2


near = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("wrap", ["masked", "labels"])
def test_a_part_of_the_tree(wrap):
  """The parameters of another optimizer are MaskedNode inside; the part trains as it does alone."""
  rules = nms.Rules({k: r for k, r in MIXED.places.items() if k[0] in "ac"})
  both = nms.Rules({**rules.places, "d/kernel": make("mdgf_linear")})
  names = {name: name in ("a", "c") for name in params_of()}
  if wrap == "masked":
    tx = optax.masked(nms.sparse(sgd(), both), names)
  else:
    labels = {name: "mine" if mine else "other" for name, mine in names.items()}
    transforms = {"mine": nms.sparse(sgd(), both), "other": optax.set_to_zero()}
    tx = optax.multi_transform(transforms, labels)
  params, opt = train(tx, both)
  expected, _ = train(nms.sparse(sgd(), rules), rules)
  for name in ("a", "c"):
    same(params[name], expected[name])
  assert nms.step_count(opt) == STEPS
  assert set(opt_states.sparse_state(opt).masks["mask"]) == {"a"}


# --- updates that are not applied -----------------------------------------------------------------


GUARDED = {
  "inside": finite(nms.sparse(sgd(), MIXED)),
  "around": nms.sparse(finite(sgd()), MIXED),
}


@pytest.mark.parametrize("order", GUARDED)
@given(st.lists(st.sampled_from([True, True, False]), min_size=1, max_size=8))
def test_a_rejected_update_is_as_if_it_never_came(order, good):
  tx = GUARDED[order]
  run = fed(tx, [grads_of(i, bad=not ok) for i, ok in enumerate(good)])
  if "FFFF" in "".join("TF"[not ok] for ok in good):
    return  # it gives up and accepts
  equal_runs(run, fed(PLAIN, [grads_of(i) for i, ok in enumerate(good) if ok]))


@pytest.mark.parametrize("order", GUARDED)
def test_a_guard_that_gives_up_counts_again(order):
  run = fed(GUARDED[order], [grads_of(0), *(grads_of(1, bad=True) for _ in range(5))])
  assert found(run).count == 1 + 2  # the fourth and the fifth


def test_a_guard_that_does_not_decide_alone_is_refused():
  """Another link would move the parameters, and the rejected gradient would be in snip's score."""
  decay, part = optax.add_decayed_weights(0.5), {name: name == "a" for name in params_of()}
  label = {name: "x" if name == "a" else "y" for name in params_of()}
  for tx in (
    optax.chain(finite(optax.identity()), decay, sgd()),
    optax.named_chain(("guard", finite(sgd())), ("decay", decay)),
    optax.chain(optax.chain(CLIP, finite(sgd()), decay)),
    finite(optax.chain(finite(optax.identity()), decay)),
    multi(optax.chain(finite(sgd()), decay)),
    optax.masked(finite(sgd()), part),
    optax.multi_transform({"x": finite(sgd()), "y": sgd()}, label),
  ):
    with refused("apply_if_finite that does not decide alone.*Put it around all of them"):
      nms.sparse(tx, MIXED).init(params_of())
  for tx in (
    finite(optax.chain(CLIP, decay, sgd())),
    optax.chain(CLIP, finite(finite(optax.chain(decay, sgd())))),
    injected(lambda learning_rate: finite(sgd(learning_rate))),
    multi(finite(sgd())),
  ):
    nms.sparse(tx, NO_TERMS).init(params_of())


def test_a_gradient_of_nan_that_a_link_before_it_drops_is_no_score():
  """docs/limits.md says where `zero_nans` stands."""
  rules = nms.Rules({"b/kernel": make("snip", batches=2)})
  tx = optax.chain(optax.zero_nans(), nms.sparse(sgd(), rules))
  params, opt = fed(tx, [grads_of(i, bad=i == 2) for i in range(STEPS)])
  assert jnp.isfinite(opt[-1].masks["score"]["b"]["kernel"]).all()
  nms.sparsify(params, rules, opt)


def multi(tx, **kwargs):
  return optax.MultiSteps(tx, 2, **kwargs)


SKIP = {"should_skip_update_fn": optax.skip_not_finite}
NO_TERMS = no_terms()
TWO = {
  "inside": multi(nms.sparse(sgd(), NO_TERMS)),
  "around": nms.sparse(multi(sgd()), NO_TERMS),
  "transformation": nms.sparse(multi(sgd()).gradient_transformation(), NO_TERMS),
  "chain": nms.sparse(optax.chain(multi(sgd()).gradient_transformation()), NO_TERMS),
}


@pytest.mark.parametrize("order", TWO)
def test_mini_steps_are_one_step_of_their_mean(order):
  """Also for snip; where no term is added, bit for bit in both orders."""
  grads = [grads_of(i) for i in range(13)]
  run = fed(TWO[order], grads)
  pairs = [mean(*grads[i : i + 2]) for i in range(0, 12, 2)]
  equal_runs(run, fed(nms.sparse(sgd(), NO_TERMS), pairs))
  state = found(run)
  assert state.count == state.masks["step"] == 6 and state.masks["seen"]["b"]["kernel"] == 2


def test_the_term_comes_once_a_step_in_both_orders():
  """Inside MultiSteps to the bit; around it the term is in the mean, which rounds otherwise."""
  grads = [grads_of(i) for i in range(16)]
  expected = fed(PLAIN, [mean(*grads[i : i + 2]) for i in range(0, 16, 2)])
  equal_runs(fed(multi(nms.sparse(sgd(), MIXED)), grads), expected)
  around = fed(nms.sparse(multi(sgd()), MIXED), grads)
  jax.tree.map(near, around[0], expected[0])
  same(found(around).masks["mask"], found(expected).masks["mask"])
  without = fed(TWO["inside"], grads)[0]
  for name in "ac":
    moved = np.abs(without[name]["kernel"] - expected[0][name]["kernel"]).max()
    assert moved > 1e-3
  # The sum in place of the mean: only inside.
  summed = fed(multi(nms.sparse(sgd(), MIXED), use_grad_mean=False), grads[:12])
  sums = [jax.tree.map(jnp.add, *grads[i : i + 2]) for i in range(0, 12, 2)]
  equal_runs(summed, fed(PLAIN, sums))


GUARDED_TWO = {
  "finite(multi(sparse))": finite(multi(nms.sparse(sgd(), NO_TERMS))),
  "finite(sparse(multi))": finite(nms.sparse(multi(sgd()), NO_TERMS)),
  "sparse(finite(multi))": nms.sparse(finite(multi(sgd())), NO_TERMS),
  "skip(sparse)": multi(nms.sparse(sgd(), NO_TERMS), **SKIP),
  "sparse(skip)": nms.sparse(multi(sgd(), **SKIP), NO_TERMS),
}


@pytest.mark.parametrize("order", GUARDED_TWO)
def test_a_rejected_mini_step_is_as_if_it_never_came(order):
  good = [True, False, True, True, False, False, True, True, True]
  grads = [grads_of(i, bad=not ok) for i, ok in enumerate(good)]
  kept = [g for g, ok in zip(grads, good, strict=True) if ok]
  run = fed(GUARDED_TWO[order], grads)
  expected = fed(TWO["inside"], kept)
  equal_runs(run, expected)
  assert found(run).count == 3


@pytest.mark.parametrize("order", ["multi(sparse(finite))", "sparse(multi(finite))"])
def test_a_step_that_a_guard_inside_multi_steps_rejects_counts_nothing(order):
  tx = {
    "multi(sparse(finite))": multi(nms.sparse(finite(sgd()), MIXED)),
    "sparse(multi(finite))": nms.sparse(multi(finite(sgd())), MIXED),
  }[order]
  grads = [grads_of(0), grads_of(1), grads_of(2), grads_of(3, bad=True)]
  run = fed(tx, grads)
  assert found(run).count == found(run).masks["step"] == 1
  same(run[0], fed(tx, grads[:2])[0])


# --- what the recipes are handed ------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recorder(recipes.SrSte):
  """SR-STE that keeps what it was handed: its mask is hard while it reads gradients."""

  stateful: ClassVar[bool] = True

  def first_state(self, place, w):
    del place
    return {"mask": jnp.ones_like(w, bool), "grad": jnp.zeros_like(w), "at": w, "after": w}

  def next_state(self, place, state, w, step, last, grad, grad_at):
    del place, last
    kept = state | {"grad": grad, "at": grad_at, "after": w}
    return jax.tree.map(lambda old, new: jnp.where(step > 0, new, old), dict(state), kept)

  def mask(self, w, step, axis=0, mask=None):
    del mask
    return super().mask(w, step, axis)


class Reader(Recorder):
  """One that says that it reads gradients."""

  needs_gradients: ClassVar[bool] = True


def test_a_recipe_sees_the_gradient_without_the_term_and_both_weights():
  rules = nms.Rules({"a/kernel": Recorder(pattern="2:8", phases=PHASES, lam=0.5)})
  params, step = params_of(), feeder(nms.sparse(sgd(), rules))
  opt = nms.sparse(sgd(), rules).init(params)
  plain, plain_opt = params, sgd().init(params)
  for i in range(4):
    new, opt = step(params, opt, grads_of(i))
    plain, plain_opt = feeder(sgd())(plain, plain_opt, grads_of(i))
    seen = [opt.masks[name]["a"]["kernel"] for name in ("grad", "at", "after")]
    same(seen, [x["a"]["kernel"] for x in (grads_of(i), params, new)])
    params = new
  assert (params["a"]["kernel"] != plain["a"]["kernel"]).any()  # the term is there


# --- where a state can lie ------------------------------------------------------------------------


@functools.cache
def half_way():
  """A run of six steps by README's loop, and the loop."""
  tx = nms.sparse(sgd(), MIXED)
  step, params, opt = stepper(tx, MIXED), params_of(), tx.init(params_of())
  for i in range(6):
    params, opt = step(params, opt, jnp.int32(i))
  return tx, step, params, opt


def test_all_leaves_are_arrays_of_fixed_types():
  tx, _, _, opt = half_way()
  for leaf, later in zip(*map(jax.tree.leaves, (tx.init(params_of()), opt)), strict=True):
    assert isinstance(leaf, jax.Array) and leaf.dtype == later.dtype and not later.weak_type
  assert opt.count.dtype == opt.fingerprint.dtype == jnp.int32
  assert nms.sparse(sgd(), nms.Rules({"a/kernel": make("sr_ste")})).init(params_of()).masks == {}


def test_scan_and_donation():
  tx, _, params, opt = half_way()

  def body(run, i):
    return stepper(tx, MIXED, jit=False)(*run, i), None

  def loop(run):
    return jax.lax.scan(body, run, jnp.arange(6))[0]

  start = params_of(), tx.init(params_of())
  same(jax.jit(loop, donate_argnums=0)(start), (params, opt))


def test_eight_devices():
  """The bits of one device, the parameters' shards for the masks, and no communication."""
  tx, _, params, opt = half_way()
  mesh = Mesh(np.asarray(jax.devices()), ("x",), axis_types=(AxisType.Auto,))
  shard = lambda spec: lambda x: jax.device_put(x, NamedSharding(mesh, spec))
  wide = lambda x: jnp.tile(x, (1, 8)) if jnp.ndim(x) == 2 else x
  put = lambda x: shard(PartitionSpec(None, "x") if jnp.ndim(x) == 2 else PartitionSpec())(x)
  wides = jax.tree.map(wide, (params, opt))
  sharded = jax.tree.map(put, wides)
  shardings = jax.tree.map(lambda x: x.sharding, sharded)
  step = jax.jit(stepper(tx, MIXED, jit=False), out_shardings=shardings)
  program = step.lower(*sharded, jnp.int32(6)).compile()
  assert not re.findall(r"all-reduce|all-gather|all-to-all|collective", program.as_text())
  there = program(*sharded, jnp.int32(6))
  same(jax.device_get(there), jax.device_get(stepper(tx, MIXED)(*wides, jnp.int32(6))))
  assert there[1].masks["mask"]["a"]["kernel"].sharding.spec == PartitionSpec(None, "x")


def test_checkpoints(tmp_path):
  """Orbax and flax write and read the state; what comes back goes on to the same bits."""
  ocp = pytest.importorskip("orbax.checkpoint")
  tx, step, params, opt = half_way()
  expected = step(params, opt, jnp.int32(6))
  saver = ocp.StandardCheckpointer()
  saver.save(tmp_path / "state", (params, opt))
  saver.wait_until_finished()
  blank = jax.eval_shape(lambda: (params_of(), tx.init(params_of())))
  same(step(*saver.restore(tmp_path / "state", blank), jnp.int32(6)), expected)
  # Dicts, as they come without a target.
  plain = saver.restore(tmp_path / "state")
  same(nms.sparsify(params, MIXED, plain), nms.sparsify(params, MIXED, opt))
  saver.close()
  text = flax.serialization.to_bytes((params, opt))
  same(step(*flax.serialization.from_bytes(blank, text), jnp.int32(6)), expected)
  as_dict = flax.serialization.to_state_dict(optax.chain(tx).init(params))
  assert nms.step_count(as_dict) == 0
  dense = nms.Rules({"a/kernel": make("sr_ste")})
  bare = flax.serialization.to_state_dict(nms.sparse(sgd(), dense).init(params))
  same(nms.finalize(params, dense, bare, early=True), nms.finalize(params, dense, early=True))


class Mlp(nnx.Module):
  def __init__(self, rngs):
    self.a = nnx.Linear(8, 4, rngs=rngs)
    self.b = nnx.Linear(4, 4, rngs=rngs)

  def __call__(self, x):
    return self.b(jnp.sin(self.a(x)))


def test_nnx():
  """nnx.Optimizer trains as plain dicts do; its state is read boxed, in it, and split."""
  places = {"a/kernel": make("idp", lam=0.5), "b/kernel": make("snip", "1:4")}
  rules, model = nms.Rules(places), Mlp(nnx.Rngs(0))
  tx = nms.sparse(sgd(), rules)
  optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
  x = jax.random.normal(jax.random.key(0), (16, 8))

  @nnx.jit
  def train_step(model, optimizer):
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def loss(params):
      sparse = nms.sparsify(params, rules, optimizer.opt_state)
      return foreign(lambda: jnp.mean(nnx.merge(graph, sparse, rest)(x) ** 2))

    foreign(optimizer.update, model, jax.grad(loss)(params))

  @jax.jit
  def by_dict(params, opt):
    def loss(p):
      sparse = nms.sparsify(p, rules, opt)
      hidden = jnp.sin(x @ sparse["a"]["kernel"] + sparse["a"]["bias"].reshape(1, -1))
      return jnp.mean((hidden @ sparse["b"]["kernel"] + sparse["b"]["bias"].reshape(1, -1)) ** 2)

    updates, opt = foreign(tx.update, jax.grad(loss)(params), opt, params)
    return apply_updates(params, updates), opt

  params = jax.tree.map(jnp.copy, nnx.to_pure_dict(nnx.state(model, nnx.Param)))
  opt = tx.init(params)
  for _ in range(PHASES.total):
    train_step(model, optimizer)
    params, opt = by_dict(params, opt)
  trained = nnx.state(model, nnx.Param)
  jax.tree.map(near, nnx.to_pure_dict(trained), params)
  done = nms.finalize(trained, rules, optimizer.opt_state)
  assert nms.verify(done, rules).ok and not nms.verify(trained, rules).ok
  for state in (optimizer.opt_state, optimizer, nnx.state(optimizer)):
    assert nms.step_count(state) == opt.count == PHASES.total
    same(opt_states.sparse_state(state).masks, opt.masks)
    same(nms.finalize(trained, rules, state), done)


def test_a_layer_takes_step_and_masks_from_the_state():
  rules = nms.Rules({"kernel": make("idp", lam=0.5)})
  layer, x = nms.layers.Dense(3, rules=rules), jnp.eye(8)
  variables = layer.init(jax.random.key(0), x)
  tx = nms.sparse(sgd(), rules)
  params = variables["params"]
  opt = tx.init(params)
  for i in range(4):
    params, opt = feeder(tx)(params, opt, jax.tree.map(lambda w, i=i: w * i, params))
  told = nms.layers.with_step({**variables, "params": params}, opt)
  sparse = nms.sparsify(params, rules, opt)
  same(layer.apply(told, x), x @ sparse["kernel"] + params["bias"].reshape(1, -1))
  assert np.mean(np.asarray(sparse["kernel"]) == 0) == 0.75


# --- what is refused ------------------------------------------------------------------------------


def refused(words):
  return pytest.raises(ValueError, match=f"(?s)^(?!.*\n).*{words}")


ADAM = optax.adam(1e-3)
OTHER = nms.Rules({**MIXED.places, "c/kernel": make("sr_ste", lam=0.25)})


@pytest.mark.parametrize("tx", [ADAM, optax.chain(nms.sr_ste(MIXED), ADAM), optax.sgd(1.0)])
def test_a_state_without_nms_sparse(tx):
  opt = tx.init(params_of())
  assert not optim.holds_sparse(opt)
  for read in (nms.sparsify, nms.finalize):
    with refused(r"no state of nms\.sparse: .*tx = nms\.sparse\(tx, rules\)"):
      read(params_of(), MIXED, opt)
  named = optax.named_chain(("x", tx)).init(params_of())  # a dict
  with refused(r"tx = nms\.sparse\(tx, rules\)"):
    nms.finalize(params_of(), nms.Rules({"a/kernel": make("sr_ste")}), named)


def test_a_state_of_init_state_is_no_optimizer_state():
  masks = nms.init_state(params_of(), MIXED)
  with refused(r"tx = nms\.sparse\(tx, rules\)"):
    nms.sparsify(params_of(), MIXED, masks)
  with refused("pass the optimizer state alone"):
    nms.sparsify(params_of(), MIXED, nms.sparse(ADAM, MIXED).init(params_of()), masks)


def test_parameters_called_as_a_state_is_are_parameters():
  params = {name: {"kernel": jnp.ones((8, 2))} for name in ("masks", "count", "fingerprint")}
  rules = nms.Rules({"masks/kernel": make("sr_ste"), "count/kernel": make("one_shot")})
  opt = nms.sparse(ADAM, rules).init(params)
  assert nms.step_count(opt) == nms.step_count(flax.serialization.to_state_dict(opt)) == 0
  assert set(opt_states.sparse_state(opt).masks["mask"]) == {"count"}


def test_a_state_of_several_runs():
  """Outside of vmap numpy said that a truth value is ambiguous."""
  params = jax.tree.map(lambda x: jnp.stack([x, x]), params_of())
  opt = jax.vmap(nms.sparse(ADAM, NO_TERMS).init)(params)
  for read in (nms.step_count, lambda opt: nms.finalize(params_of(), NO_TERMS, opt)):
    with refused(r"its count has shape \(2,\)\. Call this inside jax\.vmap too"):
      read(opt)


def test_two_of_them():
  ours = nms.sparse(ADAM, MIXED)
  with refused("would be added twice: use one"):
    nms.sparse(optax.chain(CLIP, ours), MIXED).init(params_of())
  two = optax.chain(ours, ours).init(params_of())
  assert optim.holds_sparse(two)
  for read in (nms.step_count, lambda s: nms.sparsify(params_of(), MIXED, s)):
    with refused("holds 2 states of nms.sparse.*around the whole optimizer"):
      read(two)
  with refused("holds nms.sr_ste beside nms.sparse"):
    nms.sparse(optax.chain(nms.sr_ste(MIXED), ADAM), MIXED).init(params_of())
  beside = optax.chain(nms.sr_ste(MIXED), ours).init(params_of())
  with refused("holds nms.sr_ste beside nms.sparse"):
    nms.sparsify(params_of(), MIXED, beside)


def test_links_after_it():
  multi_adam = multi(ADAM).gradient_transformation()
  for rules, later in ((MIXED, optax.scale(0.5)), (TERMS, multi_adam)):
    opt = optax.chain(CLIP, nms.sparse(ADAM, rules), later).init(params_of())
    with refused("has links after it.*make it the last link"):
      nms.sparsify(params_of(), rules, opt)
  named = optax.named_chain(("ours", nms.sparse(ADAM, MIXED)), ("later", optax.scale(0.5)))
  with refused("has links after it.*make it the last link"):
    nms.sparsify(params_of(), MIXED, named.init(params_of()))
  last = optax.named_chain(("clip", CLIP), ("ours", nms.sparse(ADAM, MIXED)))
  assert nms.step_count(last.init(params_of())) == 0
  # Without stored masks a later link changes nothing that nms.sparse knows.
  opt = optax.chain(nms.sparse(ADAM, TERMS), optax.scale(0.5)).init(params_of())
  assert nms.step_count(opt) == 0


@pytest.mark.parametrize("wrap", ["masked", "leaves", "labels"])
def test_places_that_it_is_not_given(wrap):
  """A term or a mask that would be missing in silence; without either a place may be left out."""
  rules = nms.Rules({k: r for k, r in MIXED.places.items() if k[0] in "cd"})
  for out, why in (("c", "sr_ste needs SR-STE's term"), ("d", "one_shot keeps a stored mask")):
    names = {name: name != out for name in params_of()}
    if wrap == "leaves":
      by_leaf = jax.tree_util.tree_map_with_path(lambda k, _, out=out: k[0].key != out, params_of())
      tx = optax.masked(nms.sparse(sgd(), rules), by_leaf)
    elif wrap == "masked":
      tx = optax.masked(nms.sparse(sgd(), rules), names)
    else:
      tx = optax.multi_transform({True: nms.sparse(sgd(), rules), False: sgd()}, names)
    with refused(f"'{out}/kernel' is left out of nms.sparse .*{why}: put nms.sparse around"):
      tx.init(params_of())
    nms.sparse(optax.masked(sgd(), names), rules).init(params_of())  # as the error says


def test_multi_steps_that_it_cannot_follow():
  with refused("use_grad_mean=False.*every mini-step"):
    nms.sparse(multi(ADAM, use_grad_mean=False), MIXED)
  with refused("use_grad_mean=False"):
    nms.sparse(multi(ADAM, use_grad_mean=False).gradient_transformation(), MIXED)
  inner = multi(ADAM).gradient_transformation()
  labels = {name: "x" if name == "a" else "y" for name in params_of()}
  with refused("around 2 optax.MultiSteps, whose steps may differ"):
    nms.sparse(optax.multi_transform({"x": inner, "y": inner}, labels), MIXED).init(params_of())
  with refused("snip needs the mean gradient"):
    nms.sparse(optax.chain(CLIP, inner), MIXED).init(params_of())
  with refused("snip needs the mean gradient"):
    nms.sparse(optax.named_chain(("a", CLIP), ("b", inner)), MIXED).init(params_of())
  nms.sparse(optax.chain(CLIP, inner), TERMS).init(params_of())
  # A recipe of a user's own needs it as well, under whatever name it keeps its sums.
  for lam, what in ((0.0, "links of a chain stand"), (0.5, "SR-STE's term stands")):
    mine = nms.Rules({"a/kernel": Reader(pattern="2:8", phases=PHASES, lam=lam)})
    tx = nms.sparse(optax.chain(CLIP, inner) if not lam else inner, mine)
    with refused(f"sr_ste needs the mean gradient of a step, but {what} before optax.MultiSteps"):
      tx.init(params_of())
  nms.sparse(inner, nms.Rules({"a/kernel": Reader(pattern="2:8", phases=PHASES, lam=0.0)})).init(
    params_of()
  )


def test_an_optax_that_does_not_say_what_multi_steps_does(monkeypatch):
  tx = multi(ADAM)
  monkeypatch.delattr(tx, "_use_grad_mean")
  with refused("cannot tell whether the MultiSteps of optax .* takes a mean or a sum"):
    nms.sparse(tx, MIXED)


def test_arguments():
  tx = nms.sparse(ADAM, MIXED)
  opt = tx.init(params_of())
  with refused(r"tx\.update\(grads, opt_state, params\)"):
    tx.update(params_of(), opt)
  with refused("give an optax optimizer and nms.Rules"):
    nms.sparse(MIXED, ADAM)
  plain = flax.serialization.to_state_dict(opt)  # as Orbax restores it without a target
  for state in (ADAM.init(params_of()), plain):
    with refused("which it did not make.*run that goes on restores its checkpoint into"):
      tx.update(params_of(), state, params_of())
  with refused("match no parameter"):
    tx.init({"other": params_of()["a"]})


@pytest.mark.filterwarnings("ignore:nms.sparsify got an optimizer state and rules:UserWarning")
@pytest.mark.parametrize("dense", [False, True])
def test_other_rules_are_found_out(dense):
  tx, step, params, opt = half_way()
  other = nms.Rules({".*/kernel": nms.recipe("dense")}) if dense else OTHER
  assert nms.step_count(opt, MIXED) == 6
  with refused("made by nms.sparse with other rules"):
    nms.step_count(opt, other)
  for read in (nms.sparsify, nms.finalize):
    with refused("made by nms.sparse with other rules"):
      read(params, other, opt)
    out = jax.jit(lambda p, s, read=read: read(p, other, s))(params, opt)
    assert all(np.isnan(x["kernel"]).any() for x in (out[name] for name in "abcd"))
    right = jax.jit(lambda p, s, read=read: read(p, MIXED, s))(params, opt)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(right))
  # A state from elsewhere, under other rules' nms.sparse: an error, or NaN from then on.
  later = nms.sparse(sgd(), other)
  with refused("made by nms.sparse with other rules"):
    later.update(params, opt, params)
  if not dense:
    _, spoiled = feeder(later)(params, opt, params)
    assert spoiled.count == -1
    _, spoiled = feeder(later)(params, spoiled, params)
    assert spoiled.count == -1


def test_equal_rules_have_one_fingerprint():
  again = nms.Rules(dict(reversed(MIXED.places.items())))
  assert again.fingerprint == MIXED.fingerprint != OTHER.fingerprint
  for more in (dict(axes={"a/kernel": 1}), dict(indivisible="skip"), dict(roles={"x": "y"})):
    assert nms.Rules(MIXED.places, **more).fingerprint != MIXED.fingerprint
  # In another process too: checkpoints hold it.
  one = nms.Rules({"ff": nms.recipe("mdgf_linear", pattern="1:8", phases=nms.Phases(total=10))})
  assert one.fingerprint == 1452790427


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Quiet(nms.Recipe):
  """A recipe of a user's own, whose repr says where it lies in memory."""

  name = "quiet"
  pattern: nms.NM
  phases: nms.Phases
  scale: float = 1.0


def test_a_fingerprint_does_not_hang_on_a_repr():
  """Before, a run with such a recipe could not go on in another process."""
  of = lambda **fields: nms.Rules({"a/kernel": Quiet(pattern="2:8", phases=PHASES, **fields)})
  assert repr(of()) != repr(of()) and of().fingerprint == of().fingerprint
  assert of(scale=2.0).fingerprint != of().fingerprint
  place = lambda rules: rules.place("a/kernel", (8, 2))
  assert stored.fingerprint(place(of())) == stored.fingerprint(place(of()))
  tx = nms.sparse(sgd(), of())
  opt = tx.init(params_of())
  assert nms.step_count(opt, of()) == 0
  for recipe in MIXED.places.values():
    assert recipe.spelled == repr(recipe)


def test_finalize_waits_for_the_end_of_every_schedule():
  longer = nms.recipe("mdgf_linear", pattern="2:8", phases=nms.Phases(total=12, finetune=4))
  rules = nms.Rules({"a/kernel": make("idp"), "b/kernel": longer})
  tx, params = nms.sparse(sgd(), rules), params_of()
  opt = tx.init(params)
  for i in range(8):
    opt = opt._replace(count=jnp.int32(i))
    with refused(rf"is at step {i}, with pattern .* D = .* at '{'ab'[i >= 6]}/kernel', where"):
      nms.finalize(params, rules, opt)
  with refused(
    r"at step 7, with pattern 2:8 and D = 0.125 at 'b/kernel'.* over at 8\. .*early=True"
  ):
    nms.finalize(params, rules, opt)
  opt = opt._replace(
    masks=opt.masks | {"renewed": jax.tree.map(jnp.ones_like, opt.masks["renewed"])}
  )
  early = nms.finalize(params, rules, opt, early=True)
  assert nms.verify(early, rules).ok
  same(nms.finalize(params, rules, opt._replace(count=jnp.int32(8))), early)
  same(jax.jit(lambda p, s: nms.finalize(p, rules, s))(params, opt), early)  # it cannot know
  same(nms.finalize(params, rules, opt.masks, early=True), early)


@pytest.mark.parametrize("how", ["vmap", "pmap", "scan"])
def test_steps_inside_a_transformation(how):
  """docs/faq.md: in all three, and outside of two of them each kernel has one more axis."""
  tx = nms.sparse(optax.sgd(0.01), MIXED)
  step = stepper(tx, MIXED, jit=False)
  params, steps = params_of(), jnp.arange(STEPS)
  if how == "scan":
    run = lambda carry, i: (step(*carry, i), None)
    (params, opt), _ = jax.lax.scan(run, (params, tx.init(params)), steps)
    finals = [nms.finalize(params, MIXED, opt)]
  else:
    over = jax.vmap if how == "vmap" else jax.pmap
    many = jax.tree.map(lambda w: jnp.stack([w, w + 1])[: 2 if how == "vmap" else 1], params)
    opt, stepped = over(tx.init)(many), over(step, in_axes=(0, 0, None))
    for i in steps:
      many, opt = stepped(many, opt, i)
    with pytest.raises(ValueError, match="does not tell which axis is contracted"):
      nms.finalize(many, MIXED, opt)
    one = lambda tree, k: jax.tree.map(lambda x: x[k], tree)
    finals = [nms.finalize(one(many, 0), MIXED, one(opt, 0))]
    if how == "vmap":
      both = jax.vmap(lambda params, opt: nms.finalize(params, MIXED, opt))(many, opt)
      finals += [one(both, 0), one(both, 1)]
  for final in finals:
    assert nms.verify(final, MIXED).ok
