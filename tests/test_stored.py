"""What is known of a stored mask: for which place it was made, how often renewed, why refused."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nm_sparsity_jax as nms
from nm_sparsity_jax import apply, stored
from nm_sparsity_jax.groups import Groups
from nm_sparsity_jax.places import Place

PHASES = nms.Phases(total=20, dense=4, finetune=4)
IDP = nms.recipe("idp", pattern="2:8", phases=PHASES)  # levels from steps 4, 8 and 12 on
PARAMS = {"mlp": {"wi": {"kernel": jnp.arange(32, dtype=jnp.float32).reshape(16, 2)}}}
PATH = "mlp/wi/kernel"


def place(recipe=IDP, shape=(16, 2), axis=0, pad=0):
  return Place(PATH, recipe, Groups(shape, axis, pad), "ff")


def test_users_know_the_functions_by_three_names():
  assert nms.init_state is apply.init_state is stored.init_state
  assert nms.update_state is apply.update_state is stored.update_state


def test_a_fingerprint_differs_where_masks_differ():
  same = stored.fingerprint(place())
  assert same == stored.fingerprint(place(shape=(3, 16, 2), axis=1))  # the stack of a scan
  others = [
    place(dataclasses.replace(IDP, lam=0.5)),
    place(dataclasses.replace(IDP, pattern="1:8")),
    place(shape=(24, 2)),
    place(shape=(12, 2), pad=4),
  ]
  found = {same, *map(stored.fingerprint, others)}
  assert len(found) == 5 and all(0 <= x < 2**31 for x in found)


@pytest.mark.parametrize(
  "step, changed, why",
  [
    (7, {}, None),
    (9, {}, "out of date: it is of step 6 and was renewed 0 times instead of 1"),
    (5, {}, "out of date: it is of step 6"),
    (9, {"renewed": 1}, None),
    (7, {"made": 0}, "made for another recipe"),
  ],
)
def test_a_mask_acts_in_its_own_time_alone(step, changed, why):
  stamps = {"last": 6, "made": stored.fingerprint(place()), "renewed": 0} | changed
  stamps = stored.Stamps(**{key: jnp.int32(x) for key, x in stamps.items()})
  traced = jax.jit(lambda step: stored.in_time(place(), step, stamps))
  if why is None:
    assert stored.in_time(place(), step, stamps) == traced(step) == step
    return
  assert traced(step) == -1
  with pytest.raises(ValueError, match=f"{PATH}.*at step {step}.*{why}"):
    stored.in_time(place(), step, stamps)


def test_the_end_of_a_run_has_all_that_is_kept():
  recipe = nms.recipe("snip", pattern="2:8", phases=PHASES)
  rules = nms.Rules({"ff": recipe})
  state = stored.init_state(PARAMS, rules)
  here = rules.assign(PARAMS).places[PATH]
  with pytest.raises(ValueError, match="never taken"):
    stored.final(here, state)
  state = stored.update_state(state, PARAMS, rules, 5, grads=PARAMS, grads_at=PARAMS)
  kept = stored.final(here, state)
  assert sorted(kept) == ["made", "mask", "renewed", "score", "seen"]
  np.testing.assert_array_equal(kept["mask"], stored.stored_masks(state)[PATH])
  with pytest.raises(ValueError, match="state=None has none"):
    stored.final(here, None)
  with pytest.raises(ValueError, match="made for another recipe"):
    stored.final(place(), state)
  assert stored.final(place(nms.recipe("sr_ste", pattern="2:8", phases=PHASES)), None) == {}


def test_a_parameter_below_another():
  w = jnp.ones((8, 2))
  rules = nms.Rules({".*": nms.recipe("one_shot", pattern="1:4", phases=PHASES)}, axes={".*": 0})
  with pytest.raises(ValueError, match="'a/b' and a part of it, up to 'a', are both names of para"):
    nms.init_state({"a": w, "a/b": w}, rules)
  with pytest.raises(
    ValueError, match="2 parameters have the path 'a/b/c', by which masks are kept"
  ):
    nms.init_state({"a": {"b/c": w}, "a/b": {"c": w}}, rules)
