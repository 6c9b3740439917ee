"""Keras: `fit` of a sparse model, its files, its callbacks, and the axes of its layers."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conformance import (
  RECIPES,
  ROOT,
  assert_nm,
  assert_same,
  assert_sparse,
  assert_sums_over,
  input_of,
  losses_by_hand,
  run_example,
)

keras = pytest.importorskip("keras")

import nm_sparsity_jax as nms  # noqa: E402
from nm_sparsity_jax.integrations.keras import (  # noqa: E402
  Metrics,
  OptaxOptimizer,
  params,
)

pytestmark = pytest.mark.filterwarnings("ignore")

EPOCHS, BATCH = 4, 16
X = np.random.default_rng(0).normal(size=(64, 8)).astype("float32")
Y = np.sort(X, 1)
LOSS = keras.losses.MeanSquaredError()


@pytest.fixture(autouse=True)
def own_policy():
  policy = keras.config.dtype_policy()
  yield
  keras.config.set_dtype_policy(policy)


def rules(name="mdgf_exponential", total=16, pattern="2:4"):
  phases = nms.Phases(total=total, dense=total // 4, finetune=total // 4)
  fields = {} if name == "hold" else {"phases": phases}
  recipe = nms.recipe(name, pattern=pattern, **fields)
  return nms.Rules({".*head/kernel": nms.recipe("dense"), ".*/kernel": recipe})


RECIPE = rules().places[".*/kernel"]


def sparse(name="mdgf_exponential", **how):
  return nms.sparse(optax.adamw(1e-2), rules(name, **how))


def network(dtype=None, first=None):
  """Layers dense_8, dense_9, ... where 8 is the first; else Keras counts on."""
  keras.utils.set_random_seed(0)
  names = [first and f"dense_{first + i}" for i in range(3)]
  layers = [keras.layers.Dense(8, "tanh", dtype=dtype, name=name) for name in names]
  return keras.Sequential([keras.Input((8,)), *layers, keras.layers.Dense(8, name="head")])


def forward_of(model):
  return lambda p, x: model.stateless_call([*p.values()], model.non_trainable_variables, x)


def compiled(model, tx):
  """With the variables of its optimizer, as a file finds them."""
  model.compile(OptaxOptimizer(tx), LOSS)
  model.optimizer.build(model.trainable_variables)
  return model


def fit(model, optimizer, callbacks=(), jit_compile="auto", **how):
  model.compile(optimizer, LOSS, jit_compile=jit_compile)
  return go_on(model, callbacks=[*callbacks], **how)


def go_on(model, **how):
  how = {"batch_size": BATCH, "shuffle": False, "verbose": 0, "epochs": EPOCHS} | how
  return model.fit(X, Y, **how).history


def assert_equal(a, b, atol=0):
  assert_same(a.get_weights(), b.get_weights(), atol)


def zeros(model):
  return [np.asarray(layer.kernel) == 0 for layer in model.layers[:3]]


class Killed(Exception):
  pass


class Kill(keras.callbacks.Callback):
  """Ends `fit` in the middle of an epoch, as a machine that goes away does."""

  def on_epoch_begin(self, epoch, logs=None):
    self.epoch = epoch

  def on_train_batch_end(self, batch, logs=None):
    if (self.epoch, batch) == (2, 1):
      raise Killed


@pytest.mark.parametrize("name", RECIPES)
def test_fit_is_the_loop_written_by_hand_and_ends_n_of_m(name, tmp_path):
  model, by_hand = network(), network()
  saved = keras.callbacks.ModelCheckpoint(tmp_path / "{epoch}.keras")
  history = fit(model, OptaxOptimizer(sparse(name)), [saved], validation_data=(X, Y))
  found = params(model)
  assert_sparse(found, rules(name), "2:4", places=3)
  assert np.all(model.layers[3].kernel)
  verdict = nms.verify(found, rules(name))
  assert verdict.ok and "dense" in str(verdict)

  loss = lambda p, xy: jnp.mean((forward_of(by_hand)(p, xy[0])[0] - xy[1]) ** 2)
  batches = [(X[i : i + BATCH], Y[i : i + BATCH]) for i in range(0, len(X), BATCH)] * EPOCHS
  losses = losses_by_hand(loss, params(by_hand), rules(name), optax.adamw(1e-2), batches)
  np.testing.assert_allclose(history["loss"], losses.reshape(EPOCHS, -1).mean(1), atol=1e-5)
  np.testing.assert_allclose(history["val_loss"][-1], loss(found, (X, Y)), atol=1e-5)
  again = keras.models.load_model(tmp_path / "4.keras", compile=False)
  assert_equal(model, again)  # what is saved is what is deployed


def begun(name, optimizer, first=None):
  """A model and its optimizer; `hold` keeps the zeros that a model has when `fit` begins."""
  model = network(first=first)
  if name == "hold":
    optimizer.build(model.trainable_variables)
    for layer in model.layers[:3]:
      layer.kernel.assign(layer.kernel.value * nms.nm_mask(abs(layer.kernel.value), "2:4"))
  return model, optimizer


@pytest.mark.parametrize(
  "name, dtype, accumulate",
  [
    ("sr_ste", "float32", None),
    ("idp", "float32", None),
    ("hold", "float32", None),
    ("sr_ste", "mixed_bfloat16", None),
    ("sr_ste", "mixed_float16", None),
    ("sr_ste", "float32", 2),
  ],
)
def test_a_run_that_was_killed_goes_on_to_the_same_bits(name, dtype, accumulate, tmp_path):
  keras.config.set_dtype_policy(dtype)
  total = 16 // (accumulate or 1)
  new = lambda: OptaxOptimizer(sparse(name, total=total), accumulate)
  callbacks = lambda: [Metrics(), keras.callbacks.BackupAndRestore(tmp_path)]
  whole, optimizer = begun(name, new())
  held, second = zeros(whole), network()
  assert whole.layers[0].name != second.layers[0].name
  fit(whole, optimizer)
  with pytest.raises(Killed):
    fit(*begun(name, new()), [*callbacks(), Kill()])
  assert len(fit(second, new(), callbacks())["loss"]) == 2  # two of four epochs were left
  assert_equal(whole, second)
  assert_sparse(params(second), rules(name), "2:4", places=3)
  if name == "hold":
    assert_same(zeros(second), held)
  if dtype == "mixed_float16":
    assert isinstance(second.optimizer, keras.optimizers.LossScaleOptimizer)


@pytest.mark.parametrize(
  "name, file, first",
  [
    ("idp", "run.keras", None),
    ("idp", "run.weights.h5", None),
    ("hold", "run.keras", None),
    ("hold", "run.weights.h5", None),
    # The layers change their order by name: dense_10, dense_8, dense_9 and then 10, 11, 9.
    ("idp", "run.weights.h5", 8),
  ],
)
def test_files_have_the_state_so_that_training_goes_on(name, file, first, tmp_path):
  new = lambda: begun(name, OptaxOptimizer(sparse(name)), first)
  (whole, optimizer), (half, other) = new(), new()
  held = zeros(whole)
  fit(whole, optimizer)
  fit(half, other, epochs=2)
  path = tmp_path / file
  if file.endswith(".keras"):
    half.save(path)
    second = keras.models.load_model(path, custom_objects={"tx": sparse(name)})
  else:
    half.save_weights(path)
    second = compiled(network(first=first and first + 1), sparse(name))
    second.load_weights(path)
  assert int(nms.step_count(second.optimizer.opt_state)) == 8
  dense = [nms.dense_params(params(m), m.optimizer.opt_state) for m in (half, second)]
  assert_same(*(list(tree.values()) for tree in dense))
  go_on(second, initial_epoch=2, callbacks=[Metrics()])
  assert_equal(whole, second)
  if name == "hold":
    assert_same(zeros(second), held)


def test_without_jit_and_on_several_devices_it_is_the_same():
  one, eager = network(), network()
  fit(one, OptaxOptimizer(sparse()))
  fit(eager, OptaxOptimizer(sparse()), jit_compile=False)
  assert_equal(one, eager, atol=1e-6)
  keras.distribution.set_distribution(keras.distribution.DataParallel(auto_shard_dataset=False))
  try:
    shared = network()
    fit(shared, OptaxOptimizer(sparse()))
    kernel = shared.layers[0].kernel.value
  finally:
    keras.distribution.set_distribution(None)
  assert len(kernel.sharding.device_set) == 8
  assert_nm(kernel, 0, "2:4")
  assert_equal(one, shared, atol=1e-5)


def test_gradients_accumulate_by_keras_or_by_optax():
  whole, by_keras, by_optax = network(), network(), network()
  tx = lambda: sparse(total=8)
  fit(whole, OptaxOptimizer(tx()), batch_size=2 * BATCH)
  fit(by_keras, OptaxOptimizer(tx(), gradient_accumulation_steps=2))
  fit(by_optax, OptaxOptimizer(optax.MultiSteps(tx(), 2)))
  assert_nm(by_keras.layers[0].kernel.value, 0, "2:4")
  assert_equal(whole, by_keras, atol=1e-5)
  assert_equal(whole, by_optax, atol=1e-5)


def test_callbacks_set_the_rate_that_optax_lets_them():
  adam = optax.inject_hyperparams(optax.adam)(learning_rate=1e-2)
  halve = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2)
  model = network()
  history = fit(model, OptaxOptimizer(nms.sparse(adam, rules())), [halve])
  np.testing.assert_allclose(history["learning_rate"], [1e-2 / 2**i for i in (1, 2, 3, 4)])
  plateau = keras.callbacks.ReduceLROnPlateau("loss", patience=0, min_delta=9)
  with pytest.raises(ValueError, match="inject_hyperparams"):
    fit(network(), OptaxOptimizer(sparse()), [plateau])


def test_metrics_are_in_the_logs_of_keras():
  model = network("mixed_float16")
  tx = optax.MultiSteps(sparse("sdgf_stepwise", total=8, pattern="1:4"), 2)
  optimizer = keras.optimizers.LossScaleOptimizer(OptaxOptimizer(tx), initial_scale=2.0)
  history = fit(model, optimizer, [Metrics()])
  kernels = np.concatenate([np.ravel(layer.kernel) for layer in model.layers[:3]])
  assert history["nm/density"] == [0.75, 0.25, 0.25, np.mean(kernels != 0)]
  assert history["nm/D"] == [0] * 4 and history["nm/m/.*/kernel"] == [4] * 4
  assert history["nm/n/.*/kernel"] == [3, 1, 1, 1]
  assert history["nm/flip_rate/all"][0] == 0.25 and history["nm/flip_rate/all"][1] >= 0.5


def test_each_mistake_is_one_sentence(tmp_path, monkeypatch):
  model, optimizer = network(), OptaxOptimizer(sparse())
  fit(model, optimizer, epochs=2)
  model.save(tmp_path / "run.keras")
  with pytest.raises(ValueError, match="another model"):
    fit(network(), optimizer)
  with pytest.raises(ValueError, match="another model"):
    optimizer.build(network().trainable_variables)
  with pytest.raises(ValueError, match="custom_objects"):
    keras.models.load_model(tmp_path / "run.keras")

  other = compiled(network(), sparse(total=100))
  with pytest.raises(ValueError, match="total=16"):
    other.load_weights(tmp_path / "run.keras")
  model.optimizer = None
  model.save_weights(tmp_path / "weights.weights.h5")
  with pytest.warns(UserWarning, match="pruned begins again at 0"):
    other.load_weights(tmp_path / "weights.weights.h5")

  for plain in ("adam", OptaxOptimizer(optax.adam(1e-2))):
    with pytest.raises(ValueError, match="holds 0 states of nms.sparse"):
      fit(network(), plain, [Metrics()])
  bound = keras.Sequential(
    [keras.layers.Dense(8, kernel_constraint="unit_norm"), *network().layers]
  )
  bound.build((None, 8))
  with pytest.raises(ValueError, match="'sequential.*/kernel' has a constraint"):
    fit(bound, OptaxOptimizer(sparse()))

  monkeypatch.setattr(keras.backend, "backend", lambda: "torch")
  with pytest.raises(RuntimeError, match="KERAS_BACKEND=jax"):
    OptaxOptimizer(sparse())


def test_an_equal_model_goes_on_though_for_model_wrote_other_counted_names(tmp_path):
  def einsum(equations=("abc,dc->abd", "abc,cd->abd"), pattern="2:4"):
    layers = [keras.layers.EinsumDense(e, (None, 8)) for e in equations]
    model = keras.Sequential([keras.Input((4, 8)), *layers])
    wanted = nms.Rules({".*/kernel": rules("idp", pattern=pattern).places[".*/kernel"]})
    wanted = wanted.for_model(
      forward_of(model), params(model), jax.ShapeDtypeStruct((2, 4, 8), "float32")
    )
    return compiled(model, nms.sparse(optax.adam(1e-2), wanted))

  x = np.reshape(X, (16, 4, 8))
  one, two = einsum(), einsum()
  assert one.layers[0].name != two.layers[0].name
  go = lambda model: model.fit(x, x, batch_size=4, shuffle=False, verbose=0, epochs=2)
  go(one)
  one.save_weights(tmp_path / "one.weights.h5")
  two.load_weights(tmp_path / "one.weights.h5")
  go(one), go(two)
  assert int(nms.step_count(two.optimizer.opt_state)) == 16
  assert_equal(one, two)
  for other in (einsum(("abc,cd->abd", "abc,dc->abd")), einsum(pattern="1:4")):
    with pytest.raises(ValueError, match="other rules"):
      other.load_weights(tmp_path / "one.weights.h5")


# --- which axis a layer sums over -----------------------------------------------------------------


def test_the_family_knows_the_axes_of_keras_names_and_a_trace_those_of_your_own():
  image = keras.Input((8, 8, 4))
  h = keras.layers.Conv2D(16, 3)(image)
  h = keras.layers.Conv1D(16, 3)(keras.layers.Reshape((36, 16))(h))
  h = keras.layers.MultiHeadAttention(2, 8)(h, h)
  h = keras.layers.GroupQueryAttention(8, 4, 2)(h, h)
  h = keras.layers.MultiHeadAttention(2, 8, name="my_own")(h, h)
  model = keras.Model(image, keras.layers.EinsumDense("abc,dc->abd", (None, 16))(h))
  p, x = params(model), jax.ShapeDtypeStruct((2, 8, 8, 4), "float32")
  known = nms.Rules({"qkv": RECIPE, "o": RECIPE, ".*conv.*/kernel": RECIPE})
  assert len(known.assign(p).sites) == 10
  # Only what the rules do not know is added.
  assert not known.for_model(forward_of(model), p, x).axes
  rest = nms.Rules({".*/kernel": RECIPE})
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
  p = params(model)
  known = nms.Rules({"qkv": RECIPE, "o": RECIPE, "ff": RECIPE})
  one = lambda x: jax.ShapeDtypeStruct((1, *(n or 8 for n in x.shape[1:])), x.dtype)
  traced = known.for_model(forward_of(model), p, jax.tree.map(one, model.input))
  assert len(traced.assign(p).sites) >= 6
  # Gemma's q, k and v are asked of the program: flax's attention may have their names.
  assert [*traced.axes.values()] == [1] * 3 * (name == "GemmaBackbone")


def test_the_family_knows_what_attention_sums_over():
  layer = keras.layers.MultiHeadAttention(2, 8)
  layer.build((1, 6, 16), (1, 6, 16))
  parts = {"q": layer.query_dense, "k": layer.key_dense, "v": layer.value_dense,
           "o": layer.output_dense}  # fmt: skip
  tree = {v.path: v.value for v in layer.trainable_variables}
  for role, part in parts.items():
    (site,) = nms.Rules({role: RECIPE}).assign(tree).sites.values()
    assert site.path == part.kernel.path
    call = lambda w, x, part=part: part.stateless_call([w, part.bias.value], [], x)[0]
    assert_sums_over(site, part.kernel.value, input_of(site, 1, 6), call)


# --- examples -------------------------------------------------------------------------------------


def test_the_example_ends_2_of_4_and_1_of_8(capsys):
  pytest.importorskip("sklearn")
  run_example("keras_vision.py", {"EPOCHS, BATCH = 20,": "EPOCHS, BATCH = 5,"})
  assert len((ROOT / "examples/keras_vision.py").read_text("utf-8").splitlines()) <= 100
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
  for cell in json.loads((ROOT / "examples/keras_vision.ipynb").read_text("utf-8"))["cells"]:
    if cell["cell_type"] == "code":
      exec("".join(cell["source"]), names)
      printed = "".join(t for out in cell["outputs"] for t in out.get("text", ()))
      assert without_decimals(capsys.readouterr().out) == without_decimals(printed)
  assert len(drawn) == 1
  assert names["sparse"]["val_accuracy"][-1] > names["dense"]["val_accuracy"][-1] - 0.1
