"""flax's own example scripts, patched in one place and run on synthetic data.

SCRIPTS_PATH holds checkouts, of github.com/google/flax in its folder flax; by default it is
~/.cache/nm-sparsity/scripts. Each script trains, evaluates, saves and samples as it is, and at the
end numpy counts the groups. Along which axis is proved by the layer itself: an input feature that
is 0 gives what a kernel without the slice of that feature gives.
"""

import difflib
import functools
import importlib.util
import os
import pathlib
import re
import sys
import types
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nm_sparsity_jax as nms

ml_collections = pytest.importorskip("ml_collections")
periodic_actions = pytest.importorskip("clu.periodic_actions")
tf = pytest.importorskip("tensorflow")
pytest.importorskip("tensorflow_datasets")

from flax import linen as nn  # noqa: E402
from flax import nnx  # noqa: E402

FOLDER = pathlib.Path(os.environ.get("SCRIPTS_PATH", "~/.cache/nm-sparsity/scripts")).expanduser()
FLAX = FOLDER / "flax" / "examples"
pytestmark = [
  pytest.mark.filterwarnings("ignore"),
  pytest.mark.skipif(not FLAX.is_dir(), reason=f"no checkout of google/flax in {FOLDER}/flax"),
]

STEPS = 20
PHASES = nms.Phases(total=STEPS, dense=3, finetune=6)
PATTERN = nms.NM(1, 4)


def make(name, **fields):
  return nms.recipe(name, pattern=PATTERN, phases=PHASES, **fields)


# --- a script, its patch, its last variables ------------------------------------------------------


@pytest.fixture
def load(monkeypatch):
  """load(name, patch, rules): the `train` of an example, patched. Its modules go afterwards."""
  monkeypatch.setattr(periodic_actions, "Profile", lambda *_, **__: lambda step: None)

  def load(name, patch, rules):
    path = FLAX / name / "train.py"
    monkeypatch.syspath_prepend(str(path.parent))
    source = new = path.read_text()
    for old, line in patch.items():
      assert new.count(old) == 1, old
      new = new.replace(old, line)
    changed = [x for x in difflib.ndiff(source.splitlines(), new.splitlines()) if x[:2] == "+ "]
    module = types.ModuleType("train")
    # What each program has beside its one line: an import and its rules.
    module.nms, module.rules = nms, rules
    sys.modules["train"] = module
    exec(compile(new, str(path), "exec"), module.__dict__)
    return module, len(changed)

  yield load
  for key, module in [*sys.modules.items()]:
    if key == "train" or str(getattr(module, "__file__", None) or "").startswith(str(FLAX)):
      del sys.modules[key]


def last_variables(function, *args):
  """The variables of a function when it returns: the scripts keep their parameters there."""
  found = {}

  def inside(frame, event, _):
    if event == "return":
      found.update(frame.f_locals)
    return inside

  sys.settrace(lambda frame, *_: inside if frame.f_code is function.__code__ else None)
  try:
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
      function(*args)
  finally:
    sys.settrace(None)
  return found


# --- the proof ------------------------------------------------------------------------------------


def prove(path, kernel, axes, x, call):
  """`axes` of the kernel are the last ones of the input `x`, and along them it is 1:4.

  Args:
    path: of the kernel.
    kernel: numpy array.
    axes: of the kernel.
    x: what the layer was given in a forward pass.
    call: call(kernel, x) is the layer.
  """
  kernel, x = np.array(kernel, np.float32), np.array(x, np.float32)
  axes = [a % kernel.ndim for a in axes]
  assert x.shape[-len(axes) :] == tuple(kernel.shape[a] for a in axes), path
  # The feature that says most, since an untrained bias or relu may leave others at 0.
  size = np.abs(x).reshape(-1, *x.shape[-len(axes) :]).sum(0)
  size *= np.abs(kernel).sum(tuple({*range(kernel.ndim)} - {*axes}))
  feature = np.unravel_index(size.argmax(), size.shape)
  no_feature, no_slice = x.copy(), kernel.copy()
  no_feature[(..., *feature)] = 0
  np.moveaxis(no_slice, axes, range(-len(axes), 0))[(..., *feature)] = 0
  want = np.asarray(call(kernel, no_feature))
  np.testing.assert_allclose(call(no_slice, x), want, 1e-4, 1e-5, err_msg=path)
  assert np.abs(call(kernel, x) - want).max() > 1e-3, path

  groups = np.moveaxis(kernel, axes, range(-len(axes), 0)).reshape(-1, PATTERN.m)
  assert ((groups != 0).sum(1) <= PATTERN.n).all() and (groups != 0).mean() > 0.2, path


def prove_linen(apply, params, axes):
  """Proves each kernel that a regex of `axes` names, in a module of linen."""
  seen = {}

  def note(run, args, kwargs, context):
    module = context.module
    if context.method_name == "__call__" and module.has_variable("params", "kernel"):
      seen["/".join(module.path)] = module.clone(parent=None), args[0]
    return run(*args, **kwargs)

  with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
    with nn.intercept_methods(note):
      apply(params)
    proved = []
    for path, (layer, x) in seen.items():
      found = functools.reduce(dict.__getitem__, path.split("/"), params)
      if (of := axis_of(axes, path)) is not None:
        call = lambda k, x, layer=layer, found=found: layer.apply(
          {"params": {**found, "kernel": jnp.asarray(k)}}, jnp.asarray(x)
        )
        prove(path, found["kernel"], of, x, call)
        proved.append(f"{path}/kernel")
  return sorted(proved)


def axis_of(axes, path):
  return next((axis for regex, axis in axes.items() if re.fullmatch(regex, path)), None)


def sparse_paths(rules, params):
  return sorted(rules.assign(params).places)


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


# --- the scripts ----------------------------------------------------------------------------------


def test_mnist(load, monkeypatch, tmp_path):
  """NNX: batch statistics and the streams of dropout move on beside."""
  rules = nms.Rules(
    {"conv2/kernel": make("sdgf_stepwise"), "linear.*/kernel": make("sr_ste")},
    axes={"conv2/kernel": -2},
  )
  module, changed = load(
    "mnist",
    {"optax.sgd(learning_rate, momentum)": "nms.sparse(optax.sgd(learning_rate, momentum), rules)"},
    rules,
  )
  assert changed == 1
  rng = np.random.default_rng(0)
  image = rng.random((8, 28, 28, 1), np.float32)
  data = repeated({"image": image, "label": rng.integers(0, 10, 8)})
  monkeypatch.setattr(module, "get_datasets", lambda config: (data.take(STEPS), data.take(1)))
  if not importlib.util.find_spec("orbax.export"):  # the script writes a SavedModel at last
    monkeypatch.setitem(sys.modules, "orbax.export", mock.MagicMock())
  config = ml_collections.ConfigDict(
    {"learning_rate": 0.02, "momentum": 0.9, "batch_size": 8, "num_epochs": 1}
  )
  end = last_variables(module.train_and_evaluate, config, str(tmp_path))
  model, optimizer = end["model"], end["optimizer"]
  assert nms.step_count(optimizer.opt_state) == int(optimizer.step[...]) == STEPS
  assert int(end["rngs"].default.count[...]) == 2 * STEPS
  assert np.abs(model.batch_norm2.mean[...]).max() > 0.01

  inputs = {}
  for kind in (nnx.Conv, nnx.Linear):
    call = kind.__call__
    note = lambda self, x, call=call: (inputs.update({id(self): x}), call(self, x))[1]
    monkeypatch.setattr(kind, "__call__", note)
  with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
    model(jnp.asarray(image), None)
    given = dict(inputs)
    for path, axis in (("conv2", -2), ("linear1", 0), ("linear2", 0)):
      layer = getattr(model, path)

      def call(kernel, x, layer=layer):
        layer.kernel[...] = jnp.asarray(kernel)
        return layer(jnp.asarray(x))

      prove(path, layer.kernel[...], [axis], given[id(layer)], call)
  assert len(sparse_paths(rules, nnx.state(model, nnx.Param))) == 3


def test_imagenet(load, monkeypatch, tmp_path):
  """Linen, under pmap, with a ResNet of bottleneck blocks; it saves a checkpoint."""
  block = "BottleneckResNetBlock_.*/"
  rules = nms.Rules(
    {f"{block}kernel": make("mdgf_exponential")}, axes={f"{block}conv_proj/kernel": -2}
  )
  line = "  state = TrainState.create(\n"
  patch = {line: f"  tx = nms.sparse(tx, rules)\n{line}"}
  module, changed = load("imagenet", patch, rules)
  assert changed == 1
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
  builder = mock.MagicMock()
  builder.info.splits["train"].num_examples = 8 * STEPS
  monkeypatch.setattr(module.tfds, "builder", lambda name: builder)
  config = sys.modules["train"].ml_collections.ConfigDict(
    dict(model="small", dataset="", learning_rate=1.0, warmup_epochs=0.1, momentum=0.9,
         batch_size=8, shuffle_buffer_size=1, prefetch=1, num_epochs=1.0, log_every_steps=10,
         cache=False, half_precision=False, num_train_steps=STEPS, steps_per_eval=1, profile=False)
  )  # fmt: skip
  end = last_variables(module.train_and_evaluate, config, str(tmp_path))
  state = end["state"]
  assert nms.step_count(state.opt_state) == int(state.step) == STEPS
  stats = dict_of(state.batch_stats)
  assert np.abs(stats["bn_init"]["mean"]).max() > 0.01
  params = dict_of(state.params)
  model = end["model"]

  def apply(params):
    variables = {"params": params, "batch_stats": stats}
    return model.apply(variables, jnp.asarray(image[:, 0]), train=False)

  proved = prove_linen(apply, params, {f"{block}.*": [-2]})
  assert proved == sparse_paths(rules, params) and len(proved) == 8
  # What it saved is what it has.
  saved = module.restore_checkpoint(jax.tree.map(jnp.zeros_like, state), str(tmp_path))
  jax.tree.map(np.testing.assert_array_equal, saved.params, state.params)
  jax.tree.map(np.testing.assert_array_equal, saved.opt_state, state.opt_state)


def test_wmt(load, monkeypatch, tmp_path):
  """Encoder and decoder under pmap; beam search translates with the parameters as they are."""
  rules = nms.Rules({"ff": make("sr_ste"), "decoder/self/q": make("idp"), "o": make("sr_ste")})
  patch = {
    "tx=optax.adamw(": "tx=nms.sparse(optax.adamw(",
    "weight_decay=config.weight_decay,\n      ),": (
      "weight_decay=config.weight_decay,\n      ), rules),"
    ),
  }
  module, changed = load("wmt", patch, rules)
  assert changed == 2  # one call on several lines
  train = repeated({"inputs": tokens(8, 8), "targets": tokens(8, 8, 1)})
  datasets = lambda **_: (train, train.take(1), train.take(1), Words())
  monkeypatch.setattr(sys.modules["input_pipeline"], "get_wmt_datasets", datasets)
  config = example_config(
    beam_size=2, per_device_batch_size=1, warmup_steps=2, learning_rate=0.01,
    max_target_length=8, max_eval_target_length=8, max_predict_length=8,
    use_mixed_precision=False, checkpoint_every_steps=STEPS,
  )  # fmt: skip
  end = last_variables(module.train_and_evaluate, config, str(tmp_path))
  state = jax.tree.map(lambda x: x[0], end["state"])
  assert nms.step_count(state.opt_state) == int(state.step) == STEPS
  params = dict_of(state.params)
  model = sys.modules["models"].Transformer(end["eval_config"])
  apply = lambda p: model.apply({"params": p}, jnp.asarray(tokens(8, 8)), jnp.asarray(tokens(8, 8)))
  axes = {".*/MlpBlock_0/Dense_.": [0], ".*/out": [0, 1], "decoder.*Attention_0/query": [0]}
  proved = prove_linen(apply, params, axes)
  # The encoder has one attention, the decoder two, and q of one of them is named.
  assert proved == sparse_paths(rules, params) and len(proved) == 2 + 2 + 3 + 1


def test_lm1b(load, monkeypatch, tmp_path):
  """Parameters in boxes, sharded over 8 devices, made under jit."""
  rules = nms.Rules({"ff": make("mdgf_linear"), "qkv": make("sdgf_stepwise"), "o": make("sr_ste")})
  line = "  state, state_mesh_annotations = utils.setup_initial_state(\n"
  patch = {line: f"  optimizer = nms.sparse(optimizer, rules)\n{line}"}
  module, changed = load("lm1b", patch, rules)
  assert changed == 1
  train = repeated({"inputs": tokens(8, 8)})
  datasets = lambda **_: (train, train.take(1), None, Words())
  monkeypatch.setattr(sys.modules["input_pipeline"], "get_datasets", datasets)
  config = example_config(
    num_heads=8, qkv_dim=32, per_device_batch_size=1, warmup_steps=2, learning_rate=0.01,
    max_target_length=8, max_eval_target_length=8, max_predict_length=8,
    use_bfloat16=False, checkpoint_every_steps=STEPS,
  )  # fmt: skip
  end = last_variables(module.train_and_evaluate, config, str(tmp_path))
  state = end["state"]
  assert nms.step_count(state.opt_state) == int(state.step) == STEPS
  params = dict_of(state.params)
  model = sys.modules["models"].TransformerLM(end["eval_config"])
  apply = lambda p: model.apply({"params": p}, jnp.asarray(tokens(8, 8)))
  axes = {".*/MlpBlock_0/Dense_.": [0], ".*/out": [0, 1], ".*Attention_0/(query|key|value)": [0]}
  proved = prove_linen(apply, params, axes)
  assert proved == sparse_paths(rules, params) and len(proved) == 6


def example_config(**fields):
  """The script's own default configuration, tiny."""
  path = pathlib.Path(sys.modules["train"].train_and_evaluate.__code__.co_filename)
  found = {}
  exec(compile((path.parent / "configs/default.py").read_text(), "default", "exec"), found)
  config = found["get_config"]()
  tiny = dict(num_train_steps=STEPS, num_eval_steps=1, num_predict_steps=1, vocab_size=32,
              num_layers=1, qkv_dim=16, emb_dim=16, mlp_dim=32, num_heads=2)  # fmt: skip
  config.update(tiny | fields)
  return config


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
    "weight_decay=config.weight_decay,\n        ),": (
      "weight_decay=config.weight_decay,\n        ), rules),"
    ),
  }
  module, changed = load("gemma", patch, rules)
  assert changed == 2  # one call on several lines

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
  end = last_variables(module.train_and_evaluate, config, str(tmp_path))
  model, optimizer = end["model"], end["optimizer"]
  assert nms.step_count(optimizer.opt_state) == int(optimizer.step[...]) == STEPS
  proved = []
  for path, module in nnx.iter_modules(model):
    name = "/".join(map(str, path)) + "/kernel"
    if not isinstance(module, (nnx.Linear, nnx.Einsum)):
      continue
    kernel, rngs = np.asarray(module.kernel[...]), nnx.Rngs(0)
    if isinstance(module, nnx.Einsum):  # with the script's own equation
      alone = nnx.Einsum(module.einsum_str, kernel.shape, rngs=rngs)
      operand, of = module.einsum_str.split("->")[0].split(",")
      size = dict(zip(of, kernel.shape, strict=True))
      x = rngs.normal([size.get(letter, 2) for letter in operand])
    else:
      alone = nnx.Linear(*kernel.shape, use_bias=False, rngs=rngs)
      x = rngs.normal((2, kernel.shape[0]))

    def call(kernel, x, alone=alone):
      alone.kernel[...] = jnp.asarray(kernel)
      return alone(jnp.asarray(x))

    axis = axis_of(axes, name) or 0
    prove(name, kernel, axis if isinstance(axis, tuple) else [axis], x, call)
    proved.append(name)
  assert sorted(proved) == sparse_paths(rules, nnx.state(model, nnx.Param)) and len(proved) == 12


def test_vae(load, monkeypatch, tmp_path):
  """Its train step is not compiled, so each update runs eagerly."""
  rules = nms.Rules({".*/kernel": make("mdgf_linear")})
  line = "tx=optax.adam(config.learning_rate)"
  patch = {line: "tx=nms.sparse(optax.adam(config.learning_rate), rules)"}
  module, changed = load("vae", patch, rules)
  assert changed == 1
  images = (np.random.default_rng(0).random((8, 784)) > 0.5).astype(np.float32)
  pipeline = sys.modules["input_pipeline"]
  monkeypatch.setattr(pipeline, "build_train_set", lambda *_: iter([images] * STEPS))
  monkeypatch.setattr(pipeline, "build_test_set", lambda *_: jnp.asarray(images))
  builder = mock.MagicMock()
  builder.info.splits["train"].num_examples = 8 * STEPS
  monkeypatch.setattr(module.tfds, "builder", lambda name: builder)
  config = ml_collections.ConfigDict(
    dict(learning_rate=1e-3, latents=20, batch_size=8, num_epochs=1)
  )
  end = last_variables(module.train_and_evaluate, config, str(tmp_path))
  state = end["state"]
  assert nms.step_count(state.opt_state) == int(state.step) == STEPS
  params = dict_of(state.params)
  apply = lambda p: module.models.model(20).apply({"params": p}, jnp.asarray(images), end["key"])
  proved = prove_linen(apply, params, {".*": [0]})
  assert proved == sparse_paths(rules, params) and len(proved) == 5
