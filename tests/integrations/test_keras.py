"""Keras: `fit` of a sparse model, its files, its callbacks, and the axes of its layers."""

import functools
import json
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

keras = pytest.importorskip("keras")

import nm_sparsity_jax as nms  # noqa: E402
from nm_sparsity_jax.integrations import keras as nm_keras  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")

EPOCHS, BATCH = 4, 16
X = np.random.default_rng(0).normal(size=(64, 8)).astype("float32")
Y = np.sort(X, 1)
NAMES = ("sr_ste", "mdgf_exponential", "sdgf_stepwise", "idp")
LOSS = keras.losses.MeanSquaredError()


@pytest.fixture(autouse=True)
def as_a_user():
  policy = keras.config.dtype_policy()
  with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
    yield
  keras.config.set_dtype_policy(policy)


def rules(name="mdgf_exponential", total=16, pattern="2:4"):
  phases = nms.Phases(total=total, dense=total // 4, finetune=total // 4)
  recipe = nms.recipe(name, pattern=pattern, phases=phases)
  return nms.Rules({".*head/kernel": nms.recipe("dense"), ".*/kernel": recipe})


def sparse(name="mdgf_exponential", **how):
  return nms.sparse(optax.adamw(1e-2), rules(name, **how))


def network(dtype=None):
  """Of Keras' own names, which count on: dense_7, dense_8, ..."""
  keras.utils.set_random_seed(0)
  layers = [keras.layers.Dense(8, "tanh", dtype=dtype) for _ in range(3)]
  return keras.Sequential([keras.Input((8,)), *layers, keras.layers.Dense(8, name="head")])


def fit(model, optimizer, callbacks=(), epochs=EPOCHS, compiled=(), **how):
  model.compile(optimizer, LOSS, **dict(compiled))
  how = {"batch_size": BATCH, "shuffle": False, "verbose": 0} | how
  return model.fit(X, Y, epochs=epochs, callbacks=[*callbacks], **how).history


def check_n_of_m(kernel, n, m, axis=0):
  """By numpy alone."""
  groups = np.moveaxis(np.asarray(kernel, np.float32), axis, 0).reshape(
    -1, m, kernel.size // len(kernel)
  )
  kept = np.count_nonzero(groups, axis=1)
  assert kept.max() == n and kept.mean() > 0.9 * n


def check_equal(a, b, **close):
  for x, y in zip(a.get_weights(), b.get_weights(), strict=True):
    np.testing.assert_allclose(x, y, **{"rtol": 0, "atol": 0} | close)


class Killed(Exception):
  pass


class Kill(keras.callbacks.Callback):
  """Ends `fit` in the middle of an epoch, as a machine that goes away does."""

  def on_epoch_begin(self, epoch, logs=None):
    self.epoch = epoch

  def on_train_batch_end(self, batch, logs=None):
    if (self.epoch, batch) == (2, 1):
      raise Killed


@pytest.mark.parametrize("name", NAMES)
def test_fit_is_the_loop_written_by_hand_and_ends_n_of_m(name, tmp_path):
  model, by_hand = network(), network()
  saved = keras.callbacks.ModelCheckpoint(tmp_path / "{epoch}.keras")
  history = fit(model, nm_keras.OptaxOptimizer(sparse(name)), [saved], validation_data=(X, Y))
  for layer in model.layers[:3]:
    check_n_of_m(layer.kernel.value, 2, 4)
  assert np.all(model.layers[3].kernel)
  verdict = nms.verify(nm_keras.params(model), rules(name))
  assert verdict.ok and "dense" in str(verdict)

  tx, p = sparse(name), nm_keras.params(by_hand)
  forward = lambda p, x: by_hand.stateless_call([*p.values()], [], x)[0]
  x, y = jnp.asarray(X), jnp.asarray(Y)
  loss = lambda p, at: jnp.mean((forward(p, x[at]) - y[at]) ** 2)
  opt, losses = tx.init(p), []

  @jax.jit
  def step(p, opt, at):
    value, grads = jax.value_and_grad(loss)(p, at)
    updates, opt = tx.update(grads, opt, p)
    return optax.apply_updates(p, updates), opt, value

  for _ in range(EPOCHS):
    for batch in np.arange(64).reshape(-1, BATCH):
      p, opt, value = step(p, opt, batch)
      losses.append(value)
  np.testing.assert_allclose(
    history["loss"], np.mean(np.reshape(losses, (EPOCHS, -1)), 1), atol=1e-5
  )
  np.testing.assert_allclose(history["val_loss"][-1], loss(p, np.arange(64)), atol=1e-5)
  again = keras.models.load_model(tmp_path / "4.keras", compile=False)
  check_equal(model, again)  # what is saved is what is deployed


HOW = {
  "float32": {},
  "idp": {"name": "idp"},
  "bfloat16": {"dtype": "mixed_bfloat16"},
  "float16": {"dtype": "mixed_float16"},
  "accumulated": {"steps": 2},
}


@pytest.mark.parametrize("how", HOW.values(), ids=HOW)
def test_a_run_that_was_killed_goes_on_to_the_same_bits(how, tmp_path):
  keras.config.set_dtype_policy(how.get("dtype", "float32"))
  total = 16 // how.get("steps", 1)
  new = lambda: nm_keras.OptaxOptimizer(
    sparse(how.get("name", "sr_ste"), total=total), how.get("steps")
  )
  whole, first, second = network(), network(), network()
  assert whole.layers[0].name != second.layers[0].name
  fit(whole, new(), epochs=EPOCHS)
  backup = lambda: keras.callbacks.BackupAndRestore(tmp_path)
  with pytest.raises(Killed):
    fit(first, new(), [backup(), Kill()])
  assert len(fit(second, new(), [backup()])["loss"]) == 2  # two of four epochs were left
  check_equal(whole, second)
  for layer in second.layers[:3]:
    check_n_of_m(layer.kernel.value, 2, 4)
  if how.get("dtype") == "mixed_float16":
    assert isinstance(second.optimizer, keras.optimizers.LossScaleOptimizer)


@pytest.mark.parametrize("file", ["run.keras", "run.weights.h5"])
def test_files_have_the_state_so_that_training_goes_on(file, tmp_path):
  whole, first = network(), network()
  fit(whole, nm_keras.OptaxOptimizer(sparse("idp")))
  fit(first, nm_keras.OptaxOptimizer(sparse("idp")), epochs=2)
  path = tmp_path / file
  if file.endswith(".keras"):
    first.save(path)
    second = keras.models.load_model(path, custom_objects={"tx": sparse("idp")})
  else:
    first.save_weights(path)
    second = network()
    second.compile(nm_keras.OptaxOptimizer(sparse("idp")), LOSS)
    second.optimizer.build(second.trainable_variables)
    second.load_weights(path)
  assert int(nms.step_count(second.optimizer.opt_state)) == 8
  dense = [nms.dense_params(nm_keras.params(m), m.optimizer.opt_state) for m in (first, second)]
  jax.tree.map(np.testing.assert_array_equal, *map(jax.tree.leaves, dense))
  second.fit(X, Y, batch_size=BATCH, shuffle=False, verbose=0, initial_epoch=2, epochs=EPOCHS)
  check_equal(whole, second)


@pytest.mark.parametrize("how", ["load_model", "load_weights", "backup"])
def test_hold_goes_on_from_a_file_though_a_model_begins_with_weights_that_are_not_pruned(
  how, tmp_path
):
  hold = nms.Rules({".*dense.*/kernel": nms.recipe("hold", pattern="2:4")})
  new = lambda: nm_keras.OptaxOptimizer(nms.sparse(optax.adamw(1e-2), hold))

  def pruned(model):
    for layer in model.layers[:3]:
      layer.kernel.assign(layer.kernel.value * nms.nm_mask(abs(layer.kernel.value), "2:4"))
    return model

  whole, first, optimizer = network(), pruned(network()), new()
  optimizer.build(whole.trainable_variables)
  pruned(whole)
  zeros = [np.asarray(layer.kernel) == 0 for layer in whole.layers[:3]]
  fit(whole, optimizer, [nm_keras.Metrics()])
  backup = keras.callbacks.BackupAndRestore(tmp_path / "backup")
  with pytest.raises(Killed):
    fit(first, new(), [backup, Kill()])
  second = network()
  go_on = functools.partial(fit, second, new(), [nm_keras.Metrics(), backup])
  if how != "backup":
    first = pruned(network())
    fit(first, new(), epochs=2)
    first.save(tmp_path / "run.keras")
    first.save_weights(tmp_path / "run.weights.h5")
    if how == "load_model":
      second = keras.models.load_model(tmp_path / "run.keras", custom_objects={"tx": new().tx})
    else:
      second.compile(new(), LOSS)
      second.optimizer.build(second.trainable_variables)
      second.load_weights(tmp_path / "run.weights.h5")
    go_on = functools.partial(
      second.fit, X, Y, batch_size=BATCH, shuffle=False, verbose=0, initial_epoch=2, epochs=EPOCHS,
      callbacks=[nm_keras.Metrics()],
    )  # fmt: skip
  go_on()
  check_equal(whole, second)
  for layer, zero in zip(second.layers, zeros, strict=False):
    np.testing.assert_array_equal(np.asarray(layer.kernel) == 0, zero)


def test_layers_change_their_order_by_name_and_the_state_does_not(tmp_path):
  def model(names):
    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.Input((8,)), *(keras.layers.Dense(8, name=n) for n in names)])

  tx = lambda: nms.sparse(
    optax.adam(1e-2), nms.Rules({".*/kernel": rules("idp").places[".*/kernel"]})
  )
  one, two = model(["dense_9", "dense_10"]), model(["dense_10", "dense_11"])
  fit(one, nm_keras.OptaxOptimizer(tx()), epochs=2)
  one.save_weights(tmp_path / "one.weights.h5")
  two.compile(nm_keras.OptaxOptimizer(tx()), LOSS)
  two.optimizer.build(two.trainable_variables)
  two.load_weights(tmp_path / "one.weights.h5")
  w = [nms.dense_params(nm_keras.params(m), m.optimizer.opt_state) for m in (one, two)]
  for a, b in zip(*(tree.values() for tree in w), strict=True):
    np.testing.assert_array_equal(a, b)


def test_without_jit_and_on_several_devices_it_is_the_same():
  one, eager, shared = network(), network(), None
  fit(one, nm_keras.OptaxOptimizer(sparse()))
  fit(eager, nm_keras.OptaxOptimizer(sparse()), compiled={"jit_compile": False})
  check_equal(one, eager, atol=1e-6)
  keras.distribution.set_distribution(keras.distribution.DataParallel(auto_shard_dataset=False))
  try:
    shared = network()
    fit(shared, nm_keras.OptaxOptimizer(sparse()))
    kernel = shared.layers[0].kernel.value
  finally:
    keras.distribution.set_distribution(None)
  assert len(kernel.sharding.device_set) == 8
  check_n_of_m(kernel, 2, 4)
  check_equal(one, shared, atol=1e-5)


def test_gradients_accumulate_by_keras_or_by_optax():
  whole, by_keras, by_optax = network(), network(), network()
  tx = lambda: sparse(total=8)
  fit(whole, nm_keras.OptaxOptimizer(tx()), batch_size=2 * BATCH)
  fit(by_keras, nm_keras.OptaxOptimizer(tx(), gradient_accumulation_steps=2))
  fit(by_optax, nm_keras.OptaxOptimizer(optax.MultiSteps(tx(), 2)))
  check_n_of_m(by_keras.layers[0].kernel.value, 2, 4)
  check_equal(whole, by_keras, atol=1e-5)
  check_equal(whole, by_optax, atol=1e-5)


def test_callbacks_set_the_rate_that_optax_lets_them():
  adam = optax.inject_hyperparams(optax.adam)(learning_rate=1e-2)
  halve = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2)
  model = network()
  history = fit(model, nm_keras.OptaxOptimizer(nms.sparse(adam, rules())), [halve])
  np.testing.assert_allclose(history["learning_rate"], [1e-2 / 2**i for i in (1, 2, 3, 4)])
  plateau = keras.callbacks.ReduceLROnPlateau("loss", patience=0, min_delta=9)
  with pytest.raises(ValueError, match="inject_hyperparams"):
    fit(network(), nm_keras.OptaxOptimizer(sparse()), [plateau])


def test_metrics_are_in_the_logs_of_keras():
  model = network("mixed_float16")
  tx = optax.MultiSteps(sparse("sdgf_stepwise", total=8, pattern="1:4"), 2)
  optimizer = keras.optimizers.LossScaleOptimizer(nm_keras.OptaxOptimizer(tx), initial_scale=2.0)
  history = fit(model, optimizer, [nm_keras.Metrics()])
  kernels = np.concatenate([np.ravel(layer.kernel) for layer in model.layers[:3]])
  assert history["nm/density"] == [0.75, 0.25, 0.25, np.mean(kernels != 0)]
  assert history["nm/D"] == [0] * 4 and history["nm/m/.*/kernel"] == [4] * 4
  assert history["nm/n/.*/kernel"] == [3, 1, 1, 1]
  assert history["nm/flip_rate/all"][0] == 0.25 and history["nm/flip_rate/all"][1] >= 0.5


def test_each_mistake_is_one_sentence(tmp_path, monkeypatch):
  model, optimizer = network(), nm_keras.OptaxOptimizer(sparse())
  fit(model, optimizer, epochs=2)
  model.save(tmp_path / "run.keras")
  with pytest.raises(ValueError, match="another model"):
    fit(network(), optimizer)
  with pytest.raises(ValueError, match="another model"):
    optimizer.build(network().trainable_variables)
  with pytest.raises(ValueError, match="custom_objects"):
    keras.models.load_model(tmp_path / "run.keras")

  other = network()
  other.compile(nm_keras.OptaxOptimizer(sparse(total=100)), LOSS)
  other.optimizer.build(other.trainable_variables)
  with pytest.raises(ValueError, match="total=16"):
    other.load_weights(tmp_path / "run.keras")
  model.optimizer = None
  model.save_weights(tmp_path / "weights.weights.h5")
  with pytest.warns(UserWarning, match="pruned begins again at 0"):
    other.load_weights(tmp_path / "weights.weights.h5")

  for plain in ("adam", nm_keras.OptaxOptimizer(optax.adam(1e-2))):
    with pytest.raises(ValueError, match=r"Metrics\(\) found 0 states"):
      fit(network(), plain, [nm_keras.Metrics()])
  bound = keras.Sequential(
    [keras.layers.Dense(8, kernel_constraint="unit_norm"), *network().layers]
  )
  bound.build((None, 8))
  with pytest.raises(ValueError, match="'sequential.*/kernel' has a constraint"):
    fit(bound, nm_keras.OptaxOptimizer(sparse()))

  monkeypatch.setattr(keras.backend, "backend", lambda: "torch")
  with pytest.raises(RuntimeError, match="KERAS_BACKEND=jax"):
    nm_keras.OptaxOptimizer(sparse())


def test_an_equal_model_goes_on_though_for_model_wrote_other_counted_names(tmp_path):
  def compiled(equations=("abc,dc->abd", "abc,cd->abd"), pattern="2:4"):
    layers = [keras.layers.EinsumDense(e, (None, 8)) for e in equations]
    model = keras.Sequential([keras.Input((4, 8)), *layers])
    wanted = nms.Rules({".*/kernel": rules("idp", pattern=pattern).places[".*/kernel"]})
    wanted = wanted.for_model(
      forward_of(model), nm_keras.params(model), jax.ShapeDtypeStruct((2, 4, 8), "float32")
    )
    model.compile(nm_keras.OptaxOptimizer(nms.sparse(optax.adam(1e-2), wanted)), LOSS)
    model.optimizer.build(model.trainable_variables)
    return model

  x = np.reshape(X, (16, 4, 8))
  one, two = compiled(), compiled()
  assert one.layers[0].name != two.layers[0].name
  go = lambda model: model.fit(x, x, batch_size=4, shuffle=False, verbose=0, epochs=2)
  go(one)
  one.save_weights(tmp_path / "one.weights.h5")
  two.load_weights(tmp_path / "one.weights.h5")
  go(one), go(two)
  assert int(nms.step_count(two.optimizer.opt_state)) == 16
  check_equal(one, two)
  for other in (compiled(("abc,cd->abd", "abc,dc->abd")), compiled(pattern="1:4")):
    with pytest.raises(ValueError, match="other rules"):
      other.load_weights(tmp_path / "one.weights.h5")


# --- which axis a layer sums over -----------------------------------------------------------------


def forward_of(model):
  return lambda p, x: model.stateless_call([*p.values()], model.non_trainable_variables, x)


def test_the_family_knows_the_axes_of_keras_names_and_a_trace_those_of_your_own():
  image = keras.Input((8, 8, 4))
  h = keras.layers.Conv2D(16, 3)(image)
  h = keras.layers.Conv1D(16, 3)(keras.layers.Reshape((36, 16))(h))
  h = keras.layers.MultiHeadAttention(2, 8)(h, h)
  h = keras.layers.GroupQueryAttention(8, 4, 2)(h, h)
  h = keras.layers.MultiHeadAttention(2, 8, name="my_own")(h, h)
  model = keras.Model(image, keras.layers.EinsumDense("abc,dc->abd", (None, 16))(h))
  p, x = nm_keras.params(model), jax.ShapeDtypeStruct((2, 8, 8, 4), "float32")
  recipe = rules().places[".*/kernel"]
  known = nms.Rules({"qkv": recipe, "o": recipe, ".*conv.*/kernel": recipe})
  assert len(known.assign(p).places) == 10
  # Only what the rules do not know is added.
  assert not known.for_model(forward_of(model), p, x).axes
  rest = nms.Rules({".*/kernel": recipe})
  with pytest.raises(ValueError, match="einsum_dense"):
    rest.assign(p)
  axes = rest.for_model(forward_of(model), p, x).axes
  assert sorted(axes.values(), key=str) == [(0, 1), 0, 0, 0, 1] and "my_own" in str(axes)


HUB = {
  "GPT2Backbone": {"num_heads": 2, "max_sequence_length": 8},
  "LlamaBackbone": {"num_query_heads": 4, "num_key_value_heads": 2},
  "GemmaBackbone": {"num_query_heads": 4, "num_key_value_heads": 2, "head_dim": 4},
  "ViTBackbone": {"num_heads": 2, "mlp_dim": 32, "image_shape": (8, 8, 3), "patch_size": 4},
}


@pytest.mark.parametrize("name", HUB)
def test_the_family_knows_the_axes_of_keras_hub(name):
  how = {"num_layers": 1, "hidden_dim": 16, **HUB[name]}
  if name != "ViTBackbone":
    how |= {"vocabulary_size": 32, "intermediate_dim": 32}
  model = getattr(pytest.importorskip("keras_hub").models, name)(**how)
  p, recipe = nm_keras.params(model), rules().places[".*/kernel"]
  known = nms.Rules({"qkv": recipe, "o": recipe, "ff": recipe})
  one = lambda x: jax.ShapeDtypeStruct((1, *(n or 8 for n in x.shape[1:])), x.dtype)
  traced = known.for_model(forward_of(model), p, jax.tree.map(one, model.input))
  assert len(traced.assign(p).places) >= 6
  # Gemma's q, k and v are asked of the program: flax's attention may have their names.
  assert [*traced.axes.values()] == [1] * 3 * (name == "GemmaBackbone")


@pytest.mark.parametrize("role, axis", [("q", 0), ("k", 0), ("v", 0), ("o", (0, 1))])
def test_a_group_without_inputs_changes_nothing_of_attention(role, axis):
  """A weight matters exactly where its input is not 0: so the groups lie along the inputs."""
  layer = keras.layers.MultiHeadAttention(2, 8)
  x = np.random.default_rng(0).normal(size=(1, 6, 16)).astype("float32")
  layer.build(x.shape, x.shape)
  word = {"q": "query", "k": "key", "v": "value", "o": "attention_output"}[role]
  part = {"q": layer.query_dense, "k": layer.key_dense, "v": layer.value_dense,
          "o": layer.output_dense}[role]  # fmt: skip
  recipe = rules().places[".*/kernel"]
  tree = {v.path: v.value for v in layer.trainable_variables}
  (site,) = nms.Rules({role: recipe}).assign(tree).places.values()
  assert word in site.path and site.axis == axis
  inputs = np.random.default_rng(1).normal(size=(1, 6, 16)).astype("float32")
  inputs[..., 4:8] = 0  # one group of four
  inputs = inputs.reshape(1, 6, 2, 8) if role == "o" else inputs
  before, kernel = np.asarray(part(inputs)), np.array(part.kernel)
  flat = kernel.reshape(16, -1)
  flat[4:8] += 7
  part.kernel.assign(flat.reshape(kernel.shape))
  np.testing.assert_array_equal(part(inputs), before)
  flat[8] += 7
  part.kernel.assign(flat.reshape(kernel.shape))
  assert np.all(np.asarray(part(inputs)) != before)


# --- examples -------------------------------------------------------------------------------------

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"


def test_the_example_ends_2_of_4_and_1_of_8(capsys):
  pytest.importorskip("sklearn")
  code = (EXAMPLES / "keras_vision.py").read_text("utf-8")
  assert len(code.splitlines()) <= 100 and "EPOCHS, BATCH = 20," in code
  names = {"__name__": "an example"}
  exec(code.replace("EPOCHS, BATCH = 20,", "EPOCHS, BATCH = 5,"), names)
  names["main"]()
  out = capsys.readouterr().out
  assert out.count("\nok") == 2 and out.count("attention/{key,query,value}/kernel") == 2
  assert min(map(float, re.findall(r"digits (\S+)", out))) > 0.5  # one that knows nothing: 0.1


def test_the_notebook_runs_and_its_outputs_are_true(monkeypatch, capsys):
  pytest.importorskip("sklearn")
  plt, drawn = pytest.importorskip("matplotlib.pyplot"), []
  plt.switch_backend("agg")
  monkeypatch.setattr(plt, "show", lambda: drawn.append(plt.gcf()) or plt.close("all"))
  names = {"__name__": "__main__"}
  without_decimals = lambda text: re.sub(r"\d+\.\d+", "x", text)
  for cell in json.loads((EXAMPLES / "keras_vision.ipynb").read_text("utf-8"))["cells"]:
    if cell["cell_type"] == "code":
      exec("".join(cell["source"]), names)
      printed = "".join(t for out in cell["outputs"] for t in out.get("text", ()))
      assert without_decimals(capsys.readouterr().out) == without_decimals(printed)
  assert len(drawn) == 1
  assert names["sparse"]["val_accuracy"][-1] > names["dense"]["val_accuracy"][-1] - 0.1
