"""Point 12: mistakes that trained something else, or nothing sparse, without a word.

Each test makes one of them in a small program. The same program without it is silent, since a
warning is an error in these tests.
"""

import functools
import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import nm_sparsity_jax as nms
from nm_sparsity_jax import cli
from nm_sparsity_jax.runs import checkpoint

PHASES = nms.Phases(total=20, dense=4, finetune=4)
X = np.random.default_rng(0).normal(size=(5, 16)).astype(np.float32)


def make(name="mdgf_linear", pattern="2:8", **fields):
  return nms.recipe(name, pattern=pattern, phases=PHASES, **fields)


def rules_of(name="mdgf_linear", **fields):
  return nms.Rules({".*/kernel": make(name, **fields)})


def params_of(seed=0, shape=(16, 6)):
  w = np.random.default_rng(seed).normal(size=shape).astype(np.float32)
  return {"a": {"kernel": jnp.asarray(w)}}


def loss(params):
  return jnp.mean((X @ params["a"]["kernel"]) ** 2)


def pruned(params, rules, early=True):
  return nms.finalize(params, rules, early=early)


def moved(tx, grads, opt, params):
  """An update, by code that is not ours."""
  with jax.numpy_dtype_promotion("standard"):
    updates, opt = tx.update(grads, opt, params)
    return optax.apply_updates(params, updates), opt


def step_of(tx, rules, told):
  """An eager step; `told(opt)` is what the loss hands to nms.sparsify as the step."""

  def step(params, opt):
    grads = jax.grad(lambda p: loss(nms.sparsify(p, rules, told(opt))))(params)
    return moved(tx, grads, opt, params)

  return step


def warned_here(record):
  """One warning, at a line of this file."""
  (only,) = record
  assert only.category is UserWarning and only.filename == __file__
  return str(only.message)


# --- a program that is right ----------------------------------------------------------------------


@pytest.mark.parametrize("jit", [True, False], ids=["jit", "eager"])
def test_a_program_that_is_right_is_silent(jit):
  """Point 12: the warnings of this file are for mistakes alone."""
  rules, params = rules_of("sr_ste"), params_of()
  tx = nms.sparse(optax.adam(1e-2), rules)
  step = step_of(tx, rules, lambda opt: opt)
  step = jax.jit(step) if jit else step
  opt = tx.init(params)
  for _ in range(16):
    params, opt = step(params, opt)
  assert nms.verify(nms.finalize(params, rules, opt), rules).ok


def test_a_program_of_pieces_that_is_right_is_silent():
  """Point 12: the pieces, in their right order, give no warning either."""
  rules, params = rules_of("sr_ste"), params_of()
  tx = optax.chain(nms.sr_ste(rules), optax.adam(1e-2))
  step, opt = jax.jit(step_of(tx, rules, nms.step_count)), tx.init(params)
  for _ in range(16):
    params, opt = step(params, opt)
  assert nms.verify(nms.finalize(params, rules, nms.step_count(opt)), rules).ok


# --- the optimizer --------------------------------------------------------------------------------


def test_sr_ste_forgotten():
  """Point 12: SR-STE's recipe without its term, which a chain of pieces can lack."""
  rules, params = rules_of("sr_ste"), params_of()
  tx = optax.adam(1e-2)
  step = jax.jit(step_of(tx, rules, nms.step_count))
  with pytest.warns(UserWarning, match=r"sr_ste.*lam=0\.0002.*nms\.sparse\(tx, rules\)") as record:
    step(params, tx.init(params))
  warned_here(record)
  # No term is wanted here, and there nothing is trained.
  none = rules_of("sr_ste", lam=0.0)
  step_of(optax.adam(1e-2), none, nms.step_count)(params, tx.init(params))
  jax.jit(lambda p, i: nms.sparsify(p, rules, i))(params, jnp.int32(3))


def test_sr_ste_behind_adam():
  """Point 12: SR-STE's term behind moments, where it is added to the update."""
  rules, params = rules_of("sr_ste"), params_of()
  late = optax.chain(optax.clip(1.0), optax.adam(1e-2), nms.sr_ste(rules)).init(params)
  with pytest.raises(ValueError, match="link 3.*behind a link that keeps moments.*put it first"):
    nms.step_count(late)
  for tx in (
    optax.chain(nms.sr_ste(rules), optax.adam(1e-2)),
    optax.chain(optax.clip(1.0), optax.chain(nms.sr_ste(rules), optax.adam(1e-2))),
    optax.MultiSteps(optax.chain(nms.sr_ste(rules), optax.adam(1e-2)), 2),
  ):
    assert nms.step_count(tx.init(params)) == 0


@pytest.mark.parametrize("name", ["sparse", "sr_ste"])
def test_sparsify_forgotten(name):
  """Point 12: a loss without nms.sparsify trains dense weights."""
  rules, params = rules_of("sr_ste"), params_of()
  adam = optax.adam(1e-2)
  tx = nms.sparse(adam, rules) if name == "sparse" else optax.chain(nms.sr_ste(rules), adam)
  step = jax.jit(lambda params, opt: moved(tx, jax.grad(loss)(params), opt, params))
  with pytest.warns(UserWarning, match=rf"nms\.{name} updates.*trains dense.*sparsify") as record:
    step(params, tx.init(params))
  warned_here(record)
  dense = nms.Rules({".*": nms.recipe("dense")})
  tx = nms.sparse(adam, dense)
  tx.update(jax.grad(loss)(params), tx.init(params), params)


def test_a_warning_comes_once_for_a_line():
  """Point 12: an eager loop gives a warning once."""
  rules, params = rules_of(), params_of()
  tx = nms.sparse(optax.adam(1e-2), rules)
  opt = tx.init(params)
  with warnings.catch_warnings(record=True) as found:
    warnings.simplefilter("always")
    for _ in range(3):
      _, opt = tx.update(jax.grad(loss)(params), opt, params)
  assert len(found) == 1


def test_a_lost_optimizer_state():
  """Point 12: a fresh state on sparse weights begins the schedule once more."""
  rules, params = rules_of(), params_of()
  tx = nms.sparse(optax.adam(1e-2), rules)
  for one in (params, {"a": {"kernel": np.zeros((16, 6), np.float32)}}):
    tx.init(one)
  done = pruned(params, rules)
  jax.eval_shape(tx.init, done)
  jax.jit(tx.init)(done)
  with pytest.warns(UserWarning, match=r"'a/kernel' are 2:8 already.*at step 0.*restore") as record:
    tx.init(done)
  warned_here(record)
  # A schedule that begins with the target pattern restarts nothing.
  hard = nms.Rules({".*/kernel": nms.recipe("sr_ste", pattern="2:8", phases=nms.Phases(total=20))})
  nms.sparse(optax.adam(1e-2), hard).init(done)
  one_more = {"a": {"kernel": done["a"]["kernel"].at[:3, 0].set(1.0)}}
  tx.init(one_more)


def test_snip_without_grads_at():
  """Point 12: snip's scores at other weights than those of the gradient."""
  rules, params = rules_of("snip"), params_of()
  state = nms.init_state(params, rules)
  with pytest.warns(UserWarning, match=r"snip at '\.\*/kernel'.*grads_at=params") as record:
    nms.update_state(state, params, rules, 5, grads=params)
  warned_here(record)
  nms.update_state(state, params, rules, 5, grads=params, grads_at=params)
  others = rules_of("idp")
  nms.update_state(nms.init_state(params, others), params, others, 5)


# --- the step -------------------------------------------------------------------------------------


def held(rules, step):
  """Calls that keep `step` as a constant: of a gradient, and of an evaluation."""
  params = params_of()
  jax.jit(jax.grad(lambda p: loss(nms.sparsify(p, rules, step))))(params)


@pytest.mark.parametrize("step", [3, np.int32(3), jnp.int32(3)], ids=["int", "numpy", "jax"])
def test_a_constant_step(step):
  """Point 12: a step that the compiled program keeps for good."""
  rules = rules_of()
  with pytest.warns(UserWarning, match="step=3 is a constant.*step 16.*argument") as record:
    held(rules, step)
  warned_here(record)
  held(rules, 16)  # nothing changes any more
  jax.grad(lambda p: loss(nms.sparsify(p, rules, step)))(params_of())  # not compiled
  evaluate = jax.jit(lambda p, i: loss(nms.sparsify(p, rules, i)))
  evaluate(params_of(), 3)


def test_a_constant_optimizer_state():
  """Point 12: a state that a jitted loss finds around it is a constant too."""
  rules, params = rules_of(), params_of()
  opt = nms.sparse(optax.adam(1e-2), rules).init(params)
  with pytest.warns(UserWarning, match="step=0 is a constant of the compiled program"):
    held(rules, opt)
  jax.jit(lambda p, opt: nms.sparsify(p, rules, opt))(params, opt)


def test_a_step_of_ones_own_beside_nms_sparse():
  """Point 12: an epoch as the step, while nms.sparse counts."""
  rules, params = rules_of(), params_of()
  tx = nms.sparse(optax.adam(1e-2), rules)
  epoch = jnp.int32(1)
  with pytest.warns(UserWarning, match="An epoch or a global step would be wrong.*pass the opt"):
    step_of(tx, rules, lambda opt: epoch)(params, tx.init(params))
  step_of(tx, rules, lambda opt: nms.step_count(opt))(params, tx.init(params))


def test_a_step_that_is_off_by_one():
  """Point 12: idp's weights are NaN under jit; what comes next says why."""
  rules, params = rules_of("idp", lam=0.0), params_of()
  masks = nms.init_state(params, rules)
  for i in range(1, 9):
    masks = nms.update_state(masks, params, rules, i)
  gradient = jax.jit(jax.grad(lambda p, i, masks: loss(nms.sparsify(p, rules, i, masks))))
  lost = jax.tree.map(lambda w, g: w - 0.1 * g, params, gradient(params, 12, masks))
  assert np.isnan(lost["a"]["kernel"]).all()
  report = nms.verify(lost, rules)
  assert not report.ok and "off by one" in str(report) and "NaN" in str(report)
  with pytest.warns(UserWarning, match="every weight of 'a/kernel' is NaN.*off by one") as record:
    nms.finalize(lost, rules, masks, early=True)
  warned_here(record)
  with pytest.raises(ValueError, match="at step 12 the stored mask of idp is out of date"):
    nms.sparsify(params, rules, 12, masks)


def test_a_count_that_was_lost_under_jit():
  """Point 12: a state whose rules did not match has the count -1, and step_count says so."""
  rules, params = rules_of(), params_of()
  opt = nms.sparse(optax.adam(1e-2), rules).init(params)._replace(count=jnp.int32(-1))
  with pytest.raises(ValueError, match="lost its count.*same Rules"):
    nms.step_count(opt)


# --- other rules ----------------------------------------------------------------------------------


def test_a_second_rules_in_the_loss():
  """Point 12: under jit other rules made NaN without a word."""
  rules, params = rules_of(), params_of()
  other = rules_of(pattern="1:8")
  opt = nms.sparse(optax.adam(1e-2), rules).init(params)
  masked = jax.jit(lambda p, opt: nms.sparsify(p, other, opt))
  with pytest.warns(UserWarning, match="rules that no nms.sparse.*will be NaN.*same Rules") as rec:
    masked(params, opt)
  warned_here(rec)


class Net(nn.Module):
  rules: nms.Rules

  @nn.compact
  def __call__(self, x):
    return nms.layers.Dense(6, rules=self.rules, name="a")(x)


def layers_step(rules, of_layers, told=lambda opt: opt):
  """One step of a network of sparse layers under jit."""
  model = Net(of_layers)
  variables = model.init(jax.random.key(0), X)
  tx = nms.sparse(optax.adam(1e-2), rules)

  @jax.jit
  def step(params, opt):
    def loss(params):
      known = nms.layers.with_step({**variables, "params": params}, told(opt))
      return jnp.mean(model.apply(known, X) ** 2)

    return tx.update(jax.grad(loss)(params), opt, params)

  return step(variables["params"], tx.init(variables["params"]))


def test_layers_with_other_rules():
  """Point 12: layers and optimizer by different Rules."""
  rules, other = (nms.Rules({"a/kernel": make(pattern=p)}) for p in ("2:8", "1:8"))
  layers_step(rules, rules)
  with pytest.warns(UserWarning, match="nms.sparse updates weights by rules that no loss.*layers"):
    layers_step(other, rules)


def test_layers_with_a_constant_step():
  """Point 12: with_step inside jit, of a step that stays."""
  rules = nms.Rules({"a/kernel": make()})
  with pytest.warns(UserWarning, match="step=2 is a constant of the compiled program.*step 16"):
    layers_step(rules, rules, lambda opt: (nms.step_count(opt), 2)[1])
  layers_step(rules, rules, nms.step_count)


# --- the end --------------------------------------------------------------------------------------


def test_finalize_without_a_step():
  """Point 12: finalize cannot refuse what is too early unless it knows the step."""
  rules, params = rules_of(), params_of()
  with pytest.warns(UserWarning, match="does not know the step.*opt_state.*early=True") as record:
    nms.finalize(params, rules)
  warned_here(record)
  with pytest.warns(UserWarning, match="does not know the step"):
    nms.finalize(params, rules, nms.init_state(params, rules))
  nms.finalize(params, rules, early=True)
  nms.finalize(params, nms.Rules({".*": nms.recipe("dense")}))


@pytest.mark.parametrize("third", ["state", "step", "masks"])
def test_finalizing_too_early(third):
  """Point 12: the function refuses what the command refuses, by whatever holds the step."""
  rules, params = rules_of("one_shot" if third == "masks" else "mdgf_linear"), params_of()
  opt, masks = nms.sparse(optax.adam(1e-2), rules).init(params), nms.init_state(params, rules)

  def given(step):
    now = nms.update_state(masks, params, rules, step)
    return {"state": opt._replace(count=jnp.int32(step)), "step": step, "masks": now}[third]

  with pytest.raises(ValueError, match=r"step 9.*over at 16.*early=True"):
    nms.finalize(params, rules, given(9))
  early = nms.finalize(params, rules, given(9), early=True)
  assert nms.verify(early, rules).ok
  np.testing.assert_array_equal(
    nms.finalize(params, rules, given(16))["a"]["kernel"], early["a"]["kernel"]
  )


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_verify_of_weights_that_are_not_finite(bad):
  """Point 12: NaN weights may be n:m, and are not ok."""
  rules, done = rules_of(), pruned(params_of(), rules_of())
  kernel = done["a"]["kernel"]
  at = tuple(map(int, np.argwhere(np.asarray(kernel))[0]))
  report = nms.verify({"a": {"kernel": kernel.at[at].set(bad)}}, rules)
  assert not report.ok and report.places[0].bad_groups == 0
  assert str(report).splitlines()[-1] == "NOT FINITE: 1 weights are inf or NaN"


def test_the_command_verifies_nothing_that_is_not_finite(tmp_path, capsys):
  """Point 12: the exit code of `nm-sparsity verify` is 1 for NaN that is n:m."""
  w = np.zeros((8, 2), np.float32)
  for value, code, last in ((1.0, 0, "ok"), (np.nan, 1, "NOT FINITE: 2 weights are inf or NaN")):
    w[3] = value
    folder = tmp_path / str(value)
    checkpoint.write(str(folder / "checkpoint_7"), {"target": {"mlp": {"wi": {"kernel": w}}}})
    assert cli.main(["verify", str(folder), "--rules", "{'ff': '1:8'}"]) == code
    assert capsys.readouterr().out.splitlines()[-1] == last


def test_verify_where_no_rule_makes_anything_sparse():
  """Point 12: recipe dense has nothing to prove, which is no proof, and not an empty table."""
  report = nms.verify(params_of(), nms.Rules({".*": nms.recipe("dense")}))
  assert not report.ok and str(report) == "NOTHING TO PROVE: no rule makes anything sparse"
  skipped = nms.Rules({".*/kernel": make(pattern="1:7")}, indivisible="skip")
  assert "NOTHING TO PROVE: every rule was skipped" in str(nms.verify(params_of(), skipped))


# --- patterns and axes ----------------------------------------------------------------------------


@pytest.mark.parametrize(("pattern", "instead"), [("7:8", "1:8"), ("3:4", "1:4")])
def test_a_pattern_that_counts_what_is_removed(pattern, instead):
  """Point 12: 7:8 meant as 1:8."""
  rules = rules_of(pattern=pattern)
  with pytest.warns(UserWarning, match=f"keeps.*n is what is kept; write {instead}") as record:
    table = str(rules.assign(params_of()))
  warned_here(record)
  assert f"keeps {pattern[0]} of {pattern[-1]}" in table
  for fine in ("2:4", "1:2", "1:8"):
    rules_of("sdgf_stepwise", pattern=fine).assign(params_of())  # its levels begin at 7:8


LAYOUTS = {
  "flax kernel, axis 1": ("l/kernel", (16, 8), None, {".*kernel": 1}, 0),
  "torch weight, axis 0": ("l/weight", (16, 8), None, {".*weight": 0}, 1),
  "kernel (out, in), by its bias": ("l/kernel", (16, 8), 16, None, 1),
  "name w (out, in), by its bias": ("l/w", (16, 8), 16, {"l/w": 0}, 1),
  "convolution along its outputs": ("Conv_0/kernel", (3, 3, 8, 16), None, {".*": -1}, -2),
}
RIGHT = {
  "flax": ("l/kernel", (16, 8), 8, None),
  "square": ("l/kernel", (8, 8), 8, None),
  "torch": ("l/weight", (16, 8), 16, {".*weight": 1}),
  "a weight (in, out), by its bias": ("l/weight", (16, 8), 8, {".*weight": 0}),
  "a name of one's own": ("w1", (16, 8), None, {"w1": 0}),
  "all of a patch": ("Conv_0/kernel", (2, 2, 8, 16), None, {".*": (0, 1, 2)}),
  "a transposed convolution": ("ConvTranspose_0/kernel", (3, 3, 16, 8), None, {".*kernel": -1}),
}


def assign(path, shape, bias, axes):
  params = {path: np.ones(shape, np.float32)}
  if bias is not None:
    params[path.rpartition("/")[0] + "/bias"] = np.ones(bias, np.float32)
  return nms.Rules({path: make()}, axes=axes).assign(params)


@pytest.mark.parametrize("case", LAYOUTS)
def test_groups_along_the_outputs(case):
  """Point 12: torch-style kernels, and axes=1 on a Flax kernel."""
  *given, axis = LAYOUTS[case]
  with pytest.warns(UserWarning, match=f"seems to be that of the outputs.*: {axis}}}") as record:
    assignment = assign(*given)
  (only,) = record
  assert only.category is UserWarning
  assert "groups along the outputs?" in str(assignment)


@pytest.mark.parametrize("case", RIGHT)
def test_groups_along_the_inputs_are_silent(case):
  """Point 12: no warning where the axis is right, or may well be."""
  assert "outputs" not in str(assign(*RIGHT[case]))


# --- names ----------------------------------------------------------------------------------------


def test_a_regex_that_failed_is_not_the_advice():
  """Point 13: the error for a parameter named just `kernel` suggested '.*/kernel' again."""
  rules = nms.Rules({".*/kernel": make()})
  for params, advice in (
    ({"kernel": np.ones((16, 8))}, "such as 'kernel'"),
    ({"w1": np.ones((16, 8)), "b1": np.ones(8)}, "such as 'w1'"),
  ):
    with pytest.raises(ValueError, match=advice) as caught:
      rules.assign(params)
    assert "such as '.*/kernel'" not in str(caught.value)
  with pytest.raises(ValueError, match=r"such as '\.\*/kernel'"):
    nms.Rules({"fff": make()}).assign(params_of())


def test_the_axis_of_a_bare_name():
  """Point 13: the error for `w1` says what to write for each layout."""
  rules = nms.Rules({"w1": make()})
  with pytest.raises(ValueError, match=r"axes=\{'w1': \.\.\.\}.*0 if it is \(in, out\).*1 if it"):
    rules.assign({"w1": np.ones((16, 8))})
  functools.partial(nms.Rules({"w1": make()}, axes={"w1": 0}).assign, {"w1": np.ones((16, 8))})()


# --- sparsify in a wrong place --------------------------------------------------------------------


def outside(tx, rules, what="params"):
  """A step that takes the gradient at effective weights, and may update these too."""

  def step(params, opt):
    effective = nms.sparsify(params, rules, opt)
    grads = jax.grad(loss)(effective)
    return moved(tx, grads, opt, params if what == "params" else effective)

  return step


def test_sparsify_beside_the_loss():
  """The gradient does not go through it, so the recipe's gradient mode was lost in silence."""
  rules, params = rules_of(), params_of()
  tx = nms.sparse(optax.adam(1e-2), rules)
  with pytest.warns(UserWarning) as record:
    jax.jit(outside(tx, rules))(params, tx.init(params))
  assert warned_here(record).startswith("no gradient went through nms.sparsify")


@pytest.mark.parametrize("jit", [True, False], ids=["jit", "eager"])
def test_effective_weights_are_updated(jit):
  """Pruned weights were lost at each step, and no mask could change."""
  rules, params = rules_of(), params_of()
  tx = nms.sparse(optax.adam(1e-2), rules)
  step = outside(tx, rules, "effective")
  with pytest.warns(UserWarning) as record:
    (jax.jit(step) if jit else step)(params, tx.init(params))
  assert "updates the weights at 'a/kernel' that nms.sparsify made" in warned_here(record)


def test_sparsify_twice():
  """D acted twice."""
  rules, params = rules_of(), params_of()
  opt = nms.sparse(optax.adam(1e-2), rules).init(params)
  with pytest.warns(UserWarning) as record:
    nms.sparsify(nms.sparsify(params, rules, opt), rules, opt)
  assert "got weights at 'a/kernel' that nms.sparsify made" in warned_here(record)


def test_sparsify_and_layers():
  """Each of them masks, so D acted twice."""
  rules = nms.Rules({"d/kernel": make()})

  class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
      return nms.layers.Dense(8, rules=rules, name="d")(x)

  variables = Net().init(jax.random.key(0), X)
  opt = nms.sparse(optax.adam(1e-2), rules).init(variables["params"])
  effective = nms.sparsify(variables["params"], rules, opt)
  with pytest.warns(UserWarning) as record:
    Net().apply(nms.layers.with_step({**variables, "params": effective}, opt), X)
  assert "the layer at 'd/kernel' masks weights that nms.sparsify made" in warned_here(record)


@pytest.mark.parametrize("first", [True, False], ids=["evaluated first", "at once"])
@pytest.mark.parametrize("how", ["grad of jit", "jit of grad", "eager", "remat", "layers"])
def test_a_gradient_by_any_way_is_silent(how, first):
  """An evaluation beside the loss is no mistake, and neither is a loss that jit compiled."""
  rules, params = rules_of(), params_of()
  tx = nms.sparse(optax.adam(1e-2), rules)
  opt = tx.init(params)
  inner = lambda p, opt: loss(nms.sparsify(p, rules, opt))
  if how == "layers":
    net = nms.layers.Dense(6, rules=nms.Rules({"kernel": make()}))
    rules, params = net.rules, net.init(jax.random.key(0), X)["params"]
    tx = nms.sparse(optax.adam(1e-2), rules)
    opt = tx.init(params)
    told = lambda p, opt: nms.layers.with_step({"params": p, **net.init(jax.random.key(0), X)}, opt)
    inner = lambda p, opt: jnp.mean(net.apply({**told(p, opt), "params": p}, X) ** 2)
  inner = {"grad of jit": jax.jit, "remat": jax.checkpoint}.get(how, lambda f: f)(inner)
  grad = jax.grad(inner)
  grad = jax.jit(grad) if how == "jit of grad" else grad
  if first:
    nms.sparsify(params, rules, opt)
  for _ in range(2):
    params, opt = moved(tx, grad(params, opt), opt, params)
    nms.sparsify(params, rules, opt)


def test_an_evaluation_in_the_program_of_the_step_is_silent():
  """It calls sparsify on the weights that are updated; the loss beside it has the gradient."""
  rules, params = rules_of(), params_of()
  tx = nms.sparse(optax.adam(1e-2), rules)

  @jax.jit
  def step(params, opt):
    before = loss(nms.sparsify(params, rules, opt))
    grads = jax.grad(lambda p: loss(nms.sparsify(p, rules, opt)))(params)
    return before, moved(tx, grads, opt, params)

  step(params, tx.init(params))
