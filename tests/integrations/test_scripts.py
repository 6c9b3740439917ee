"""flax's own example scripts, patched in one place and run on synthetic data.

SCRIPTS_PATH holds checkouts, of github.com/google/flax in its folder flax; by default it is
~/.cache/nm-sparsity/scripts. Each script trains, evaluates, saves and samples as it is, and at the
end numpy counts the groups. Along which axes is proved by the layers themselves.
"""

import difflib
import functools
import importlib.util
import sys
import types
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance import (
  SCRIPTS,
  assert_same,
  assert_sparse,
  assert_sums_over,
  input_of,
  layer_at,
  nnx_call,
  recipe_of,
  replaced,
)

import nm_sparsity_jax as nms
from nm_sparsity_jax.core.trees import flatten

ml_collections = pytest.importorskip("ml_collections")
periodic_actions = pytest.importorskip("clu.periodic_actions")
tf = pytest.importorskip("tensorflow")
pytest.importorskip("tensorflow_datasets")

from flax import linen as nn  # noqa: E402
from flax import nnx  # noqa: E402

FLAX = SCRIPTS / "flax" / "examples"
pytestmark = [
  pytest.mark.filterwarnings("ignore"),
  pytest.mark.skipif(not FLAX.is_dir(), reason=f"no checkout of google/flax in {SCRIPTS}/flax"),
]

STEPS = 20


def make(name):
  return recipe_of(name, "1:4", STEPS)


# --- a script, its patch, its last variables ------------------------------------------------------


@pytest.fixture
def load(monkeypatch):
  """load(name, patch, rules): the `train` of an example, patched. Its modules go afterwards."""
  monkeypatch.setattr(periodic_actions, "Profile", lambda *_, **__: lambda step: None)

  def load(name, patch, rules):
    path = FLAX / name / "train.py"
    monkeypatch.syspath_prepend(str(path.parent))
    source = path.read_text()
    new = replaced(source, patch)
    diff = [*difflib.ndiff(source.splitlines(), new.splitlines())]
    assert sum(line.startswith("+ ") for line in diff) == len(patch)  # a call may have several
    module = types.ModuleType("train")
    # What each program has beside its one line: an import and its rules.
    module.nms, module.rules = nms, rules
    sys.modules["train"] = module
    exec(compile(new, str(path), "exec"), module.__dict__)
    return module

  yield load
  for key, module in [*sys.modules.items()]:
    if key == "train" or str(getattr(module, "__file__", None) or "").startswith(str(FLAX)):
      del sys.modules[key]


def trained(module, config, folder):
  """The variables of a script when it returns, after as many updates as it has steps."""
  function = module.train_and_evaluate
  found = {}

  def inside(frame, event, _):
    if event == "return":
      found.update(frame.f_locals)
    return inside

  sys.settrace(lambda frame, *_: inside if frame.f_code is function.__code__ else None)
  try:
    function(config, str(folder))
  finally:
    sys.settrace(None)
  state = found["state"] if "state" in found else found["optimizer"]
  assert np.all(nms.step_count(state.opt_state) == STEPS)
  assert np.all(jnp.asarray(state.step) == STEPS)
  return found


# --- the proof ------------------------------------------------------------------------------------


def prove(rules, params, places, layer_of):
  """The weights that rules name are 1:4 along the axes that their layers sum over.

  Args:
    rules: of the run.
    params: at its end.
    places: so many weights are named.
    layer_of: layer_of(path, site) is an input of that layer, and call(kernel, x).
  """
  assert_sparse(params, rules, "1:4", places)
  weights = dict(flatten(params))
  for path, site in rules.assign(params).sites.items():
    x, call = layer_of(path.removesuffix("/kernel"), site)
    assert_sums_over(site, weights[path], x, call)


def linen_layers(apply, params):
  """The layers with a kernel, and what a forward pass gives them."""
  seen = {}

  def note(run, args, kwargs, context):
    module = context.module
    if context.method_name == "__call__" and module.has_variable("params", "kernel"):
      path = "/".join(module.path)
      own = functools.reduce(dict.__getitem__, module.path, params)
      layer = module.clone(parent=None)
      call = lambda kernel, x: layer.apply({"params": {**own, "kernel": jnp.asarray(kernel)}}, x)
      seen[path] = args[0], call
    return run(*args, **kwargs)

  with nn.intercept_methods(note):
    apply(params)
  return lambda path, site: seen[path]


def dict_of(params):
  return jax.tree.map(np.asarray, jax.device_get(params))


def tokens(batch, length, seed=0):
  made = np.random.default_rng(seed).integers(3, 32, (batch, length)).astype(np.int32)
  made[:, -2:] = 2, 0  # the end, and padding
  return made


class Words:
  """In place of a trained sentencepiece model."""

  def vocab_size(self):
    return 32

  pad_id, eos_id, bos_id = (lambda self, i=i: i for i in (0, 2, 1))

  def tokenize(self, text):
    return tf.constant([5, 6, 7, 2])

  def detokenize(self, ids):
    return tf.constant(" ".join(map(str, ids)))

  def EncodeAsIds(self, text):
    return [5, 6, 7]

  def DecodeIds(self, ids):
    return " ".join(map(str, ids))


def repeated(batch):
  data = tf.data.Dataset.from_tensor_slices(batch)
  return data.repeat().batch(len(next(iter(batch.values()))))


def count_examples(module, monkeypatch):
  """As many as fill batches of 8 for all steps."""
  builder = mock.MagicMock()
  builder.info.splits["train"].num_examples = 8 * STEPS
  monkeypatch.setattr(module.tfds, "builder", lambda name: builder)


# --- the scripts ----------------------------------------------------------------------------------


def test_mnist(load, monkeypatch, tmp_path):
  """NNX: batch statistics and the streams of dropout move on beside."""
  rules = nms.Rules(
    {"conv2/kernel": make("sdgf_stepwise"), "linear.*/kernel": make("sr_ste")},
    axes={"conv2/kernel": -2},
  )
  line = "optax.sgd(learning_rate, momentum)"
  module = load("mnist", {line: f"nms.sparse({line}, rules)"}, rules)
  rng = np.random.default_rng(0)
  image = rng.random((8, 28, 28, 1), np.float32)
  data = repeated({"image": image, "label": rng.integers(0, 10, 8)})
  monkeypatch.setattr(module, "get_datasets", lambda config: (data.take(STEPS), data.take(1)))
  if not importlib.util.find_spec("orbax.export"):  # the script writes a SavedModel at last
    monkeypatch.setitem(sys.modules, "orbax.export", mock.MagicMock())
  config = ml_collections.ConfigDict(
    {"learning_rate": 0.02, "momentum": 0.9, "batch_size": 8, "num_epochs": 1}
  )
  end = trained(module, config, tmp_path)
  model = end["model"]
  assert int(end["rngs"].default.count[...]) == 2 * STEPS
  assert np.abs(model.batch_norm2.mean[...]).max() > 0.01

  layer_of = lambda path, site: (input_of(site, 1, 8, 8), nnx_call(getattr(model, path)))
  prove(rules, nnx.as_pure(nnx.state(model, nnx.Param)), 3, layer_of)


def test_imagenet(load, monkeypatch, tmp_path):
  """Linen, under pmap, with a ResNet of bottleneck blocks; it saves a checkpoint."""
  block = "BottleneckResNetBlock_.*/"
  rules = nms.Rules(
    {f"{block}kernel": make("mdgf_exponential")}, axes={f"{block}conv_proj/kernel": -2}
  )
  line = "  state = TrainState.create(\n"
  patch = {line: f"  tx = nms.sparse(tx, rules)\n{line}"}
  module = load("imagenet", patch, rules)
  models = sys.modules["models"]
  small = dict(stage_sizes=[1, 1], block_cls=models.BottleneckResNetBlock, num_filters=8)
  monkeypatch.setattr(models, "small", functools.partial(models.ResNet, **small), raising=False)
  rng = np.random.default_rng(0)
  image = rng.random((8, 1, 16, 16, 3), np.float32)
  batch = {"image": image, "label": rng.integers(0, 1000, (8, 1))}

  def batches(*args, **kwargs):
    while True:
      yield batch

  monkeypatch.setattr(module, "create_input_iter", batches)
  count_examples(module, monkeypatch)
  config = ml_collections.ConfigDict(
    dict(model="small", dataset="", learning_rate=1.0, warmup_epochs=0.1, momentum=0.9,
         batch_size=8, shuffle_buffer_size=1, prefetch=1, num_epochs=1.0, log_every_steps=10,
         cache=False, half_precision=False, num_train_steps=STEPS, steps_per_eval=1, profile=False)
  )  # fmt: skip
  end = trained(module, config, tmp_path)
  state = end["state"]
  stats = dict_of(state.batch_stats)
  assert np.abs(stats["bn_init"]["mean"]).max() > 0.01
  params = dict_of(state.params)
  model = end["model"]

  def apply(params):
    variables = {"params": params, "batch_stats": stats}
    return model.apply(variables, jnp.asarray(image[:, 0]), train=False)

  prove(rules, params, 8, linen_layers(apply, params))
  # What it saved is what it has.
  saved = module.restore_checkpoint(jax.tree.map(jnp.zeros_like, state), str(tmp_path))
  assert_same((saved.params, saved.opt_state), (state.params, state.opt_state))


TRANSFORMERS = {
  # Encoder and decoder under pmap; beam search translates with the parameters as they are. The
  # encoder has one attention, the decoder two, and q of one of them is named.
  "wmt": dict(
    recipes={"ff": "sr_ste", "decoder/self/q": "idp", "o": "sr_ste"},
    patch={
      "tx=optax.adamw(": "tx=nms.sparse(optax.adamw(",
      "weight_decay=config.weight_decay,\n      ),":
        "weight_decay=config.weight_decay,\n      ), rules),",
    },
    datasets="get_wmt_datasets",
    inputs={"inputs": tokens(8, 8), "targets": tokens(8, 8, 1)},
    fields=dict(beam_size=2, use_mixed_precision=False),
    model="Transformer",
    places=2 + 2 + 3 + 1,
  ),
  # Parameters in boxes, sharded over 8 devices, made under jit.
  "lm1b": dict(
    recipes={"ff": "mdgf_linear", "qkv": "sdgf_stepwise", "o": "sr_ste"},
    patch={
      "  state, state_mesh_annotations = utils.setup_initial_state(\n":
        "  optimizer = nms.sparse(optimizer, rules)\n"
        "  state, state_mesh_annotations = utils.setup_initial_state(\n"
    },
    datasets="get_datasets",
    inputs={"inputs": tokens(8, 8)},
    fields=dict(num_heads=8, qkv_dim=32, use_bfloat16=False),
    model="TransformerLM",
    places=6,
  ),
}  # fmt: skip


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_transformers(name, load, monkeypatch, tmp_path):
  case = types.SimpleNamespace(**TRANSFORMERS[name])
  rules = nms.Rules({place: make(recipe) for place, recipe in case.recipes.items()})
  module = load(name, case.patch, rules)
  train = repeated(case.inputs)
  datasets = lambda **_: (train, train.take(1), train.take(1), Words())
  monkeypatch.setattr(sys.modules["input_pipeline"], case.datasets, datasets)
  # The script's own default configuration, tiny.
  default = {}
  exec((FLAX / name / "configs/default.py").read_text(), default)
  config = default["get_config"]()
  tiny = dict(
    num_train_steps=STEPS, num_eval_steps=1, num_predict_steps=1, vocab_size=32, num_layers=1,
    qkv_dim=16, emb_dim=16, mlp_dim=32, num_heads=2, per_device_batch_size=1, warmup_steps=2,
    learning_rate=0.01, max_target_length=8, max_eval_target_length=8, max_predict_length=8,
    checkpoint_every_steps=STEPS,
  )  # fmt: skip
  config.update(tiny | case.fields)
  end = trained(module, config, tmp_path)
  params = dict_of(end["state"].params)
  if name == "wmt":  # it ends with a copy for each device
    params = jax.tree.map(lambda x: x[0], params)
  model = getattr(sys.modules["models"], case.model)(end["eval_config"])
  apply = lambda p: model.apply({"params": p}, *map(jnp.asarray, case.inputs.values()))
  prove(rules, params, case.places, linen_layers(apply, params))


def test_gemma(load, monkeypatch, tmp_path):
  """NNX under an explicit mesh of 8 devices, with einsums whose kernels are (heads, in, out)."""
  block = r"layers/\d+/"
  axes = {
    f"{block}attn/q_einsum/kernel": 1,
    f"{block}attn/kv_einsum/kernel": 2,
    f"{block}attn/attn_vec_einsum/kernel": (0, 1),
  }
  places = {f"{block}mlp/.*/kernel": make("sr_ste"), f"{block}attn/.*/kernel": make("idp")}
  rules = nms.Rules(places, axes=axes)
  patch = {
    "tx=optax.adamw(": "tx=nms.sparse(optax.adamw(",
    "weight_decay=config.weight_decay,\n        ),":
      "weight_decay=config.weight_decay,\n        ), rules),",
  }  # fmt: skip
  module = load("gemma", patch, rules)

  def datasets(config, vocab_path, data_sharding):
    ids = tokens(8, 8)
    batch = {
      "inputs": ids, "targets": np.roll(ids, -1, 1), "inputs_segmentation": np.ones_like(ids),
      "inputs_position": np.arange(8, dtype=np.int32) + 0 * ids,
    }  # fmt: skip
    batch = {key: jax.device_put(x, data_sharding) for key, x in batch.items()}
    return [batch] * STEPS, [batch], Words()

  monkeypatch.setattr(sys.modules["input_pipeline"], "get_datasets", datasets)
  monkeypatch.setattr(module.tokenizer, "load_sentencepiece_processor", lambda path: Words())
  # Its sampler mixes sharded and whole masks, which jax 0.12 refuses.
  sampler = lambda **_: lambda *_, **__: types.SimpleNamespace(text=["a"])
  monkeypatch.setattr(module.sampler_lib, "Sampler", sampler)
  tiny = dict(num_layers=2, embed_dim=16, hidden_dim=32, num_heads=4, head_dim=8, num_kv_heads=2,
              use_post_attn_norm=False, use_post_ffw_norm=False, attention_types=(1, 1),
              final_logit_softcap=None)  # fmt: skip
  configs = importlib.import_module("configs.tiny")
  config = configs.get_config().replace(
    transformer_params=tiny, num_train_steps=STEPS, num_eval_steps=1, num_predict_steps=2,
    vocab_size=32, per_device_batch_size=1, max_target_length=8, max_eval_target_length=8,
    learning_rate=0.01, warmup_steps=2, use_bfloat16=False, checkpoint_every_steps=100,
    fsdp_parallelism=4, tensor_parallelism=2, prompts=("a",) * 4,
  )  # fmt: skip
  model = trained(module, config, tmp_path)["model"]

  def layer_of(path, site):  # without the mesh
    module, rngs = layer_at(model, path), nnx.Rngs(0)
    if isinstance(module, nnx.Einsum):  # with the script's own equation
      alone = nnx.Einsum(module.einsum_str, site.shape, rngs=rngs)
    else:
      alone = nnx.Linear(*site.shape, use_bias=False, rngs=rngs)
    return input_of(site, 2, 2), nnx_call(alone)

  prove(rules, nnx.as_pure(nnx.state(model, nnx.Param)), 12, layer_of)


def test_vae(load, monkeypatch, tmp_path):
  """Its train step is not compiled, so each update runs eagerly."""
  rules = nms.Rules({".*/kernel": make("mdgf_linear")})
  line = "tx=optax.adam(config.learning_rate)"
  patch = {line: "tx=nms.sparse(optax.adam(config.learning_rate), rules)"}
  module = load("vae", patch, rules)
  images = (np.random.default_rng(0).random((8, 784)) > 0.5).astype(np.float32)
  pipeline = sys.modules["input_pipeline"]
  monkeypatch.setattr(pipeline, "build_train_set", lambda *_: iter([images] * STEPS))
  monkeypatch.setattr(pipeline, "build_test_set", lambda *_: jnp.asarray(images))
  count_examples(module, monkeypatch)
  config = ml_collections.ConfigDict(
    dict(learning_rate=1e-3, latents=20, batch_size=8, num_epochs=1)
  )
  end = trained(module, config, tmp_path)
  params = dict_of(end["state"].params)
  apply = lambda p: module.models.model(20).apply({"params": p}, jnp.asarray(images), end["key"])
  prove(rules, params, 5, linen_layers(apply, params))
