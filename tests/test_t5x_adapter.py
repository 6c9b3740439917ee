"""In T5X: the same sparse step in training, evaluation and inference; one term, one counter."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import t5x_world
from flax.core import freeze
from t5x_world import (
  OPTIMIZERS,
  PHASES,
  Devices,
  assert_equal,
  at_step,
  batch_of,
  begin,
  initializer_of,
  make,
  mine,
  optimizers,
  recipe,
  t5x_adapter,
  trainer,
  world,  # noqa: F401  (a fixture)
)

import nm_sparsity_jax as nms
from nm_sparsity_jax.analysis import compiled
from nm_sparsity_jax.core.trees import flatten, nested
from nm_sparsity_jax.recipes import RECIPES

pytestmark = t5x_world.MARKS

# --- every recipe -------------------------------------------------------------------------------

# A kernel for each recipe in one network, hence one program.
KERNELS = [f"{x}/{k}" for x in ("encoder", "decoder/self", "decoder/cross") for k in "qkvo"]
NAMES = [name for name in RECIPES if name != "hold"]  # its weights are sparse from the start
EVERY_RECIPE = nms.Rules({k: recipe(name) for k, name in zip(KERNELS, NAMES, strict=False)})
IDP, SR_STE = (nms.Rules({"ff": recipe(name)}) for name in ("idp", "sr_ste"))


@pytest.mark.parametrize(
  "network, optimizer, rules", [("t5", "adamw", EVERY_RECIPE), ("scanned", "adafactor", IDP)]
)
def test_a_run_counts_equals_dense_at_first_and_ends_sparse(network, optimizer, rules):
  model = make(rules, network, optimizer)
  run = begin(model)
  step, effective = run._partitioned_train_step, jax.jit(model.effective)
  state = run.train_state
  for t in range(PHASES.total):
    if t in (0, PHASES.dense - 1):
      assert_equal(effective(state.params, state.flax_mutables), state.params)
    state, _ = step(state, batch_of(t))
    assert int(mine(state)["step"]) == t + 1
  rules = model.stored_rules
  final = nms.finalize(state.params, rules, *model.read(state.flax_mutables))
  # Exactly n:m is also what the model predicts with now.
  assert_equal(effective(state.params, state.flax_mutables), final)
  report = nms.verify(final, rules)
  assert report.ok and {p.density for p in report.sites} == {0.25}, str(report)


def test_the_recipe_dense_is_t5xs_own_run_bit_for_bit():
  found = []
  for model, cls in (
    (make(nms.Rules({"ff": recipe("dense")})), t5x_adapter.SparseTrainer),
    (make(), trainer.Trainer),
  ):
    run = begin(model, cls=cls)
    state = run.train_state
    for t in range(3):
      state, metrics = run._partitioned_train_step(state, batch_of(t))
    found.append((state.params, state.param_states, metrics["loss"].compute()))
  assert_equal(*found)


# --- the loss, the term, the counter ------------------------------------------------------------


@functools.partial(jax.jit, static_argnums=(0, 3))
def one_step(model, state, batch, num_microbatches=None):
  """By SGD with learning rate 1 it takes the gradient off the parameters."""
  return t5x_adapter.sparse_train_step(
    model, state, batch, jnp.float32(1), jax.random.PRNGKey(0), num_microbatches
  )[0]


LAST = "decoder/logits_dense/kernel"


def without_gradients(model):
  """The first sparse step's train state, and its weights but for the last kernel.

  That kernel is zero, so no other weight has a gradient of the loss.
  """
  state = at_step(model, begin(model).train_state, PHASES.dense)
  weights = {path: np.asarray(w) for path, w in flatten(state.params)}
  zero = np.zeros_like(weights.pop(LAST))
  return state.replace_params(freeze(nested({**weights, LAST: zero}))), weights


LAM = 0.3  # large, so that the term stands out of the rounding of the gradients


@pytest.mark.parametrize(
  "factor, num_microbatches, scale",
  [
    # T5X's loss over the mean loss per target.
    (None, None, lambda tokens: tokens),
    ("AVERAGE_PER_SEQUENCE", None, lambda tokens: 1),
    # Microbatches share a fixed factor, and each makes one of its own from its tokens.
    (40.0, 4, lambda tokens: tokens / 40),
    ("NUM_REAL_TARGET_TOKENS", 4, lambda tokens: 4),
  ],
)
def test_lambda_is_relative_to_the_mean_loss_per_target(factor, num_microbatches, scale):
  """SGD with rate 1 takes lambda * scale * W off the pruned weights of a rule, and of no other."""
  batch = batch_of(padded=factor is None)
  rules = nms.Rules({"ff": recipe("sr_ste", lam=LAM)})
  model = make(rules, optimizer="sgd", loss_normalizing_factor=factor)
  state, weights = without_gradients(model)
  moved = dict(flatten(one_step(model, state, batch, num_microbatches).params))
  tokens = batch["decoder_loss_weights"].sum()
  for path, w in weights.items():
    pruned = np.where(nms.nm_mask(jnp.abs(w), nms.NM(1, 4)), 0, w) if "/mlp/" in path else 0
    term = (w - moved[path]) / scale(tokens)
    np.testing.assert_allclose(term, LAM * pruned, atol=2e-5, err_msg=path)


@pytest.mark.parametrize(
  "network, optimizer_def, decay",
  [
    ("scanned", OPTIMIZERS["adafactor"](), 0.25),
    ("t5", optimizers.chain([optax.apply_if_finite(optax.adam(0.1), 9)]), 0),  # it skips the step
  ],
)
def test_a_decoupled_term_is_the_same_in_microbatches_and_needs_no_count_of_targets(
  network, optimizer_def, decay
):
  """To the bit: rate * lambda * W is taken off what is pruned, with a rate of 1."""
  model = make(
    nms.Rules({"ff": recipe("sr_ste", lam=0.25, decoupled=True)}),
    network,
    optimizer_def=optimizer_def,
  )
  state, weights = without_gradients(model)
  batch = batch_of() | ({} if decay else {"decoder_loss_weights": np.full((16, 8), np.nan)})
  kept = dict(flatten(jax.jit(model.effective)(state.params, state.flax_mutables)))
  want = {path: np.where(kept[path] == 0, w - decay * w, w) for path, w in weights.items()}
  for num_microbatches in (None, 4):
    moved = dict(flatten(one_step(model, state, batch, num_microbatches).params))
    moved.pop(LAST)
    assert_equal(moved, want)


def test_microbatches_change_nothing_and_snip_scores_the_plain_gradient():
  """Scores are of the whole batch and without the term."""
  rules = nms.Rules({"ff": recipe("sr_ste"), "decoder/cross/o": recipe("snip")})
  model = make(rules, optimizer="sgd", loss_normalizing_factor=100.0)
  state = at_step(model, begin(model).train_state, PHASES.dense)
  whole, parts = (one_step(model, state, batch_of(), k) for k in (None, 4))
  assert_equal(parts.params, whole.params, atol=1e-5)
  assert_equal(mine(parts)["score"], mine(whole)["score"], rtol=1e-4, atol=1e-7)
  loss = lambda p: model.loss_fn(p, batch_of(), None, state.flax_mutables)[0]
  weights, grads = (dict(flatten(x)) for x in (state.params, jax.jit(jax.grad(loss))(state.params)))
  for path, score in flatten(mine(whole)["score"]):
    np.testing.assert_allclose(score, np.abs(weights[path] * grads[path]), rtol=1e-4, atol=1e-6)


def test_the_step_counts_applied_updates():
  """Neither a count that came with the optimizer's state nor a skipped update does."""
  model = make(SR_STE, optimizer_def=optimizers.chain([optax.apply_if_finite(optax.adam(0.1), 9)]))
  state = begin(model).train_state
  old = lambda leaf: jnp.full_like(leaf, 1_000_000) if leaf.dtype == jnp.int32 else leaf
  inner = state._optimizer
  state = state.replace(_optimizer=inner.replace(state=jax.tree.map(old, inner.state)))
  nan = np.full((16, 8), np.nan, np.float32)
  seen = []
  for broken in ({}, {"decoder_loss_weights": nan}, {}):
    state = one_step(model, state, batch_of() | broken)
    seen.append(int(mine(state)["step"]))
  assert seen == [1, 1, 2]


# --- what the model sees ------------------------------------------------------------------------


@pytest.mark.parametrize("network", ["t5", "ours_scanned"])
def test_loss_scores_and_predictions_are_those_of_the_effective_weights(network):
  """Of a mask that is derived, with D between 1 and 0, and of one that is stored."""
  stored = recipe("one_shot", phases=nms.Phases(total=12))
  rules = nms.Rules({r".*/wi(_\d)?/kernel": recipe("mdgf_linear"), r".*/mlp/wo/kernel": stored})
  model, twin = make(rules, network), make(None, network)
  state = at_step(model, begin(model).train_state, 6)
  batch = batch_of()
  sparse = jax.jit(model.effective)(state.params, state.flax_mutables)
  weights = dict(flatten(state.params))
  changed = {k for k, w in flatten(sparse) if (w != weights[k]).any()}
  assert changed == set(model.stored_rules.assign(state.params).sites)

  def seen(model, params, **mutables):
    run = lambda p: {
      "loss": model.loss_fn(p, batch, None, **mutables)[0],
      "scores": model.score_batch(p, batch, **mutables),
      "predictions": model.predict_batch(p, batch, jax.random.PRNGKey(0), **mutables),
    }
    return jax.jit(run)(params)

  assert_equal(seen(model, state.params, flax_mutables=state.flax_mutables), seen(twin, sparse))


# --- refusals -----------------------------------------------------------------------------------


@functools.cache
def started():
  """(model, its first train state)."""
  model = make(SR_STE)
  return model, begin(model).train_state


def restored(change=lambda w: w, lam=2e-4):
  """Restores the first train state, changed, as T5X does."""
  state = started()[1]
  state = state.replace_params(jax.tree.map(change, state.params))
  model = make(nms.Rules({"ff": recipe("sr_ste", lam=lam)}))
  start = initializer_of(model, cls=t5x_adapter.SparseTrainStateInitializer)
  return start.global_train_state_shape.restore_state(state.state_dict())


def as_started(**steps):
  return begin(started()[0], state=started()[1], **steps)


def inside():
  tx = optimizers.chain([nms.sparse(optax.sgd(1.0), SR_STE)])
  return begin(make(SR_STE, optimizer_def=tx))


def uncounted():
  run = begin(started()[0], state=started()[1], cls=trainer.Trainer)
  run._partitioned_train_step(run.train_state, batch_of())


@pytest.mark.parametrize(
  "act, words",
  [
    (uncounted, "counts no sparse steps.*SparseTrainer"),
    (lambda: initializer_of(make(), cls=t5x_adapter.SparseTrainStateInitializer), "after T5X's"),
    (lambda: restored(lambda w: w.astype(jnp.bfloat16)), "bfloat16.*dtype = 'float32'"),
    (lambda: restored(lam=0.5), "(?s)has.*lam=0.5"),
    (lambda: as_started(pretrained_steps=7), "PRETRAINED_STEPS=7.*starts at global step 0"),
    (lambda: as_started(train_steps=11), "TRAIN_STEPS=11.*ends at 12"),
    (inside, "SparseState.*MultiSteps.*num_microbatches"),
  ],
)
def test_what_cannot_go_on_is_refused(act, words):
  with pytest.raises(ValueError, match=words):
    act()


def test_what_agrees_is_taken_and_other_rules_that_nothing_checked_give_no_number():
  as_started(train_steps=12, pretrained_steps=0)
  with pytest.warns(UserWarning, match="step_offset=7, but its moments start at step 0"):
    begin(make(SR_STE, optimizer_def=OPTIMIZERS["adafactor"](7)))
  assert_equal(restored().params, started()[1].params)
  model, state = started()
  other = make(nms.Rules({"ff": recipe("mdgf_linear")}))
  initializer_of(other)
  loss = lambda m: jax.jit(lambda s: m.eval_fn(s.params, batch_of(), s.flax_mutables)[0])(state)
  assert np.isfinite(loss(model)) and np.isnan(loss(other))


ADAM = {"target": {"w": 0}, "state": {"param_states": {"0": {"mu": {"w": 0}, "nu": {"w": 0}}}}}
SPARSE = {**ADAM, "flax_mutables": {"nm_sparsity": {"step": 0}}}
MOMENTUM = {**SPARSE, "state": {"param_states": {"0": {"mu": {"w": 0}}}}}
MORE = {**ADAM, "target": {"w": 0, "a": {"b": 0}}}
start = t5x_adapter.resume_sparse
resume = functools.partial(start, is_resuming=True)


@pytest.mark.parametrize(
  "read, checkpoint, wanted, words",
  [
    (t5x_adapter.require_sparse, ADAM, SPARSE, "is dense"),
    # T5X would drop what is too much, and begin what is too little.
    (resume, SPARSE, MOMENTUM, "another optimizer.*0/nu/w"),
    (resume, MOMENTUM, SPARSE, "another optimizer.*0/nu/w"),
    (start, ADAM, MORE, "a/b.*random"),
    (functools.partial(start, fresh="a/.*"), ADAM, MORE, None),
  ],
)
def test_structures_of_checkpoints(read, checkpoint, wanted, words):
  if words is None:
    assert read(checkpoint, wanted) is checkpoint
    return
  with pytest.raises(ValueError, match=words):
    read(checkpoint, wanted)


# --- devices ------------------------------------------------------------------------------------


def collectives(run, *arguments):
  """The number of each collective in a compiled train step."""
  program = run._partitioner.compile(run._partitioned_train_step, *arguments)
  return compiled.account(program).collectives


def test_model_parallel_changes_nothing_and_masks_add_no_communication():
  """A derived mask and a stored one, of kernels that are cut along each of their axes."""
  names = {"ff": "sr_ste", "decoder/qkv": "sr_ste", "encoder/qkv": "idp", "o": "idp"}
  rules = nms.Rules({place: recipe(name) for place, name in names.items()})
  got = {}
  for count, parts in ((1, 1), (8, 2)):
    model = make(rules, optimizer="sgd", loss_normalizing_factor=100.0)
    run = begin(model, Devices(count, parts))
    state = at_step(model, run.train_state, PHASES.dense + 3)
    weights = jax.tree.map(np.asarray, state.params)
    sparse = jax.jit(model.effective)(state.params, state.flax_mutables)
    if parts == 2:
      placed = dict(flatten(state.params))
      assert placed["encoder/layers_0/mlp/wi_0/kernel"].sharding.spec[-1] == "model"
      for path, mask in flatten(mine(state)["mask"]):
        assert mask.sharding == placed[path].sharding
      dense = begin(make(optimizer="sgd"), Devices(8, 2), cls=trainer.Trainer)
      plain = collectives(dense, dense.train_state, batch_of())
      assert sum(plain.values()) > 1 and collectives(run, state, batch_of()) == plain
      # Without a trainer, as in evaluation, the model knows how devices share its weights too.
      alone = make(rules)
      initializer_of(alone, Devices(8, 2), cls=t5x_adapter.SparseTrainStateInitializer)
      assert alone.stored_rules.shardings == model.stored_rules.shardings
    new = run._partitioned_train_step(state, batch_of())[0]
    grads = jax.tree.map(lambda a, b: a - np.asarray(b), weights, new.params)
    got[count] = jax.tree.map(np.asarray, (sparse, mine(new)["mask"])), grads
  assert_equal(*(jax.tree.map(lambda w: w != 0, got[c][0]) for c in (8, 1)))
  assert_equal(got[8][1], got[1][1], atol=1e-5)
