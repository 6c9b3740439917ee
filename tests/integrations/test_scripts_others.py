"""Scripts of Equinox, haiku and optax with the one line, on synthetic data.

Each is read where it lies: in checkouts `equinox`, `dm-haiku` and `optax` in the folder that
SCRIPTS_PATH names. Where a checkout is missing, its test skips.
"""

import __future__

import json
import re
import sys
import types
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance import BLOCKS, SCRIPTS, assert_nm, assert_sparse, recipe_of, replaced

import nm_sparsity_jax as nms

pytestmark = pytest.mark.filterwarnings("ignore")
STEPS = 24
RECIPE = recipe_of("mdgf_linear", "1:4", STEPS)
RULES = nms.Rules(dict.fromkeys(BLOCKS, RECIPE))


def read(path):
  """The text of a script, or the code of a notebook."""
  file = SCRIPTS / path
  if not file.exists():
    pytest.skip(f"no {file}: check out {path.split('/')[0]}, or set SCRIPTS_PATH")
  if file.suffix != ".ipynb":
    return file.read_text()
  cells = json.loads(file.read_text())["cells"]
  code = "\n".join("".join(c["source"]) + "\n" for c in cells if c["cell_type"] == "code")
  return re.sub(r"(?m)^%.*$", "", code)


def run(monkeypatch, text, line, sizes, fakes=()):
  """Runs a script as a module of its own; returns its variables.

  Args:
    text: the script.
    line: {what stands there: what a user of nms writes in its place}.
    sizes: the same for what makes it small: no line of the diff.
    fakes: modules in place of those that it imports.
  """
  text = replaced(text, line | sizes)
  module = types.ModuleType("script")
  # Classes look for their module there.
  for name, found in (dict(fakes) | {"script": module}).items():
    monkeypatch.setitem(sys.modules, name, found)
  module.__dict__.update(nms=nms, RECIPE=RECIPE, RULES=RULES)
  # As Python 3.14 reads annotations: Equinox' notebook has some that older ones cannot compute.
  exec(compile(text, "script", "exec", __future__.annotations.compiler_flag), module.__dict__)
  return module


# --- Equinox: its BERT ----------------------------------------------------------------------------

SST2 = {
  name: np.random.default_rng(i).integers(low, high, shape)
  for i, (name, low, high, shape) in enumerate(
    [("input_ids", 1, 60, (STEPS * 8, 12)), ("token_type_ids", 0, 2, (STEPS * 8, 12)),
     ("label", 0, 2, STEPS * 8)])
}  # fmt: skip


class Sentences:
  """What the script asks of Hugging Face's data sets."""

  num_rows = STEPS * 8
  map = lambda self, function, batched: self
  set_format = lambda self, **_: None
  __getitem__ = lambda self, split: self

  def iter(self, batch_size, drop_last_batch=False):
    for i in range(0, self.num_rows, batch_size):
      yield {name: jnp.asarray(x[i : i + batch_size]) for name, x in SST2.items()}


def test_bert_of_equinox(monkeypatch):
  eqx = pytest.importorskip("equinox")
  pytest.importorskip("einops")
  tqdm = pytest.importorskip("tqdm")
  text = read("equinox/docs/examples/bert.ipynb")
  fakes = {
    "datasets": mock.Mock(load_dataset=lambda name: Sentences()),
    "transformers": mock.Mock(),
    "tqdm.notebook": tqdm,
  }
  monkeypatch.setattr(tqdm, "notebook", tqdm, raising=False)
  # What newer versions of jax lack, for arrays alone.
  stack = lambda x: jnp.stack([x] * jax.device_count()) if eqx.is_array(x) else x
  replicated = lambda tree, devices: jax.tree.map(stack, tree)
  monkeypatch.setattr(jax, "device_put_replicated", replicated, raising=False)
  rules = r"""nms.Rules({"qkv": RECIPE, "o": RECIPE, ".*ff_block/(mlp|output)/weight": RECIPE})"""
  module = run(
    monkeypatch,
    text,
    {"opt_state = tx.init(": f"tx = nms.sparse(tx, {rules})\nopt_state = tx.init("},
    {
      # Also for dense weights, optax 0.2.8 needs the same leaves in gradients and moments.
      "(classifier_chkpt)": "(eqx.filter(classifier_chkpt, eqx.is_inexact_array))",
      "epochs = 3": "epochs = 1",
      "batch_size = 32": "batch_size = 8",
      '"vocab_size": 30522': '"vocab_size": 64',
      '"hidden_size": 128': '"hidden_size": 32',
      '"intermediate_size": 512': '"intermediate_size": 64',
      'eqx.tree_deserialise_leaves("bert_checkpoint.eqx", classifier)': "classifier",
    },
    fakes,
  )
  layers = module.model.encoder.layers
  assert len(layers) == 2 and len(module.outputs) == Sentences.num_rows
  for layer in layers:
    a, ff = layer.attention_block.attention, layer.ff_block
    for linear in a.query_proj, a.key_proj, a.value_proj, a.output_proj, ff.mlp, ff.output:
      (devices, *shape) = linear.weight.shape
      assert shape == [linear.out_features, linear.in_features]
      assert devices == jax.device_count()
      assert_nm(linear.weight[0], 1, "1:4")
      assert np.array_equal(linear.weight[0], linear.weight[-1])
  assert np.all(module.model.encoder.pooler.weight != 0)


# --- haiku: its transformer -----------------------------------------------------------------------


def test_transformer_of_haiku(monkeypatch, tmp_path):
  pytest.importorskip("haiku")
  flags = pytest.importorskip("absl.flags")
  text = read("dm-haiku/examples/transformer/train.py")
  for name in [name for name in sys.modules if name.split(".")[0] == "examples"]:
    monkeypatch.delitem(sys.modules, name)
  monkeypatch.syspath_prepend(str(SCRIPTS / "dm-haiku"))
  with mock.patch.object(flags, "FLAGS", flags.FlagValues()) as found:
    define = flags.DEFINE_string
    mine = lambda *args, **kwargs: define(*args, **kwargs, flag_values=found)
    monkeypatch.setattr(flags, "DEFINE_string", mine)
    module = run(
      monkeypatch,
      text,
      {
        "optimiser().init(": "nms.sparse(optimiser(), RULES).init(",
        "optimiser().update(gradients, state.opt_state)":
          "nms.sparse(optimiser(), RULES).update(gradients, state.opt_state, state.params)",
      },
      {
        "MAX_STEPS = 10**6": f"MAX_STEPS = {STEPS}",
        "NUM_LAYERS = 6": "NUM_LAYERS = 2",
        "MODEL_SIZE = 128": "MODEL_SIZE = 32",
        "KEY_SIZE = 32": "KEY_SIZE = 8",
        "SEQUENCE_LENGTH = 64": "SEQUENCE_LENGTH = 8",
      },
    )  # fmt: skip
    (tmp_path / "text").write_text("to be or not to be, that is the question. " * 60)
    found(["train", f"--dataset_path={tmp_path / 'text'}"])
    states = []
    update = module.update
    module.update = lambda *args: states.append(update(*args)) or states[-1]
    module.main(None)
  params, metrics = states[-1][0].params, states[-1][1]
  assert len(states) == STEPS and np.isfinite(metrics["loss"])
  assert_sparse(params, RULES, "1:4", places=2 * (4 + 2))
  assert np.all(params["language_model/linear"]["w"] != 0)


# --- optax: nanoLM --------------------------------------------------------------------------------


class Shakespeare:
  """What the script asks of TensorFlow's data sets."""

  text = b"to be or not to be, that is the question. " * 20
  concatenate = lambda self, other: self
  as_numpy_iterator = lambda self: iter([{"text": self.text}])
  __getitem__ = lambda self, split: self


def test_nanolm_of_optax(monkeypatch):
  text = read("optax/examples/nanolm.ipynb")
  fakes = {
    "matplotlib": mock.MagicMock(),
    "tensorflow_datasets": mock.Mock(load=lambda name: Shakespeare()),
  }
  places = """{"qkv": RECIPE, "o": RECIPE, r"params/Dense_[0-3]/kernel": RECIPE}"""
  forward = "lambda p, x: model.apply(p, x, training=False)"
  rules = f"nms.Rules({places}).for_model({forward}, var_params, train_data[None, :8])"
  module = run(
    monkeypatch,
    text,
    {"optax.adamw(learning_rate=LEARNING_RATE)":
       f"nms.sparse(optax.adamw(learning_rate=LEARNING_RATE), {rules})"},
    {
      "BATCH_SIZE = 128": "BATCH_SIZE = 4",
      "N_ITERATIONS = 50_000": f"N_ITERATIONS = {STEPS}",
      "N_FREQ_EVAL = 2_000": "N_FREQ_EVAL = 8",
      "BLOCK_SIZE = 64": "BLOCK_SIZE = 8",
      "NUM_LAYERS = 6": "NUM_LAYERS = 2",
      "EMBED_SIZE = 256": "EMBED_SIZE = 32",
      "NUM_HEADS = 8 ": "NUM_HEADS = 4 ",
      "HEAD_SIZE = 32": "HEAD_SIZE = 8",
      "var_params, 1000)": "var_params, 8)",
    },
    fakes,
  )  # fmt: skip
  params = module.var_params["params"]
  assert len(module.all_train_losses) == STEPS
  for i in range(2):
    layer = params[f"MultiHeadDotProductAttention_{i}"]
    for name in ("query", "key", "value"):  # (embed, heads, head_dim)
      assert layer[name]["bias"].shape == layer[name]["kernel"].shape[1:]
      assert_nm(layer[name]["kernel"], 0, "1:4")
    assert_nm(layer["out"]["kernel"], (0, 1), "1:4")  # (heads, head_dim, embed)
  for i in range(4):
    assert_nm(params[f"Dense_{i}"]["kernel"], 0, "1:4")
  assert np.all(params["Dense_4"]["kernel"] != 0)
