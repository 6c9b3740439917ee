"""Tunix' trainer, unmodified: one line makes its models N:M sparse, in every way that it trains."""

import importlib
import re
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conformance import (
  BLOCKS,
  RECIPES,
  assert_same,
  assert_sparse,
  assert_sums_over,
  input_of,
  kill_and_resume,
  layer_at,
  losses_by_hand,
  nnx_call,
  recipe_of,
  rules_of,
  run_example,
)

import nm_sparsity_jax as nms
from nm_sparsity_jax.core.trees import flatten
from nm_sparsity_jax.training import rules_text, transform

pytest.importorskip("tunix")
pytestmark = pytest.mark.filterwarnings("ignore")
with warnings.catch_warnings():
  warnings.simplefilter("ignore")
  import orbax.checkpoint as ocp
  import qwix
  from flax import nnx
  from tunix.models.qwen3 import model as qwen3
  from tunix.sft import hooks, peft_trainer, utils

STEPS, SYMBOLS = 12, 16
RULES = rules_of("1:4", STEPS)
SIZES = dict(num_layers=2, embed_dim=16, hidden_dim=32, num_heads=4, head_dim=4, num_kv_heads=2)
QWEN = dict(vocab_size=SYMBOLS, rope_theta=10_000, norm_eps=1e-6)
GEMMA = dict(num_embed=SYMBOLS)
GEMMA_2 = GEMMA | dict(
  final_logit_softcap=None, use_post_attn_norm=True, use_post_ffw_norm=True, sliding_window_size=4
)
# Module of Tunix, class, what its configuration needs.
FAMILIES = {
  "Llama 3": ("llama3", "Llama3", QWEN),
  "Qwen 2": ("qwen2", "Qwen2", QWEN),
  "Qwen 3": ("qwen3", "Qwen3", QWEN),
  "Qwen 3, experts": ("qwen3", "Qwen3", QWEN | dict(num_experts=4, num_experts_per_tok=2)),
  "Gemma 2": ("gemma", "Gemma", GEMMA_2),
  "Gemma, fused": ("gemma", "Gemma", GEMMA_2 | dict(num_kv_heads=4)),
  "Gemma 3": ("gemma3", "Gemma3", GEMMA | dict(sliding_window_size=4)),
  "Gemma 3, fused": ("gemma3", "Gemma3", GEMMA | dict(sliding_window_size=4, num_kv_heads=4)),
  "Gemma 4": ("gemma4", "Gemma4", GEMMA | dict(sliding_window_size=4, global_key_size=4)),
  "Gemma 4, experts": ("gemma4", "Gemma4", GEMMA | dict(
    sliding_window_size=4, global_key_size=4, enable_moe=True, num_experts=4,
    num_experts_per_tok=2, expert_dim=8, moe_dense_hidden_dim=32)),
}  # fmt: skip


def qwen(dtype=jnp.float32):
  config = qwen3.ModelConfig(**SIZES, **QWEN, dtype=dtype, param_dtype=dtype)
  model = qwen3.Qwen3(config, rngs=nnx.Rngs(0))
  for i, layer in enumerate(model.layers):  # zeros, as Tunix expects a checkpoint
    for j, part in enumerate((layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.down_proj)):
      key = jax.random.key(3 * i + j)
      part.kernel[...] = jax.random.normal(key, part.kernel.shape, dtype) / 4
  return model


def batches(how_many, seed=0):
  tokens = np.random.default_rng(seed).integers(0, SYMBOLS, (how_many, 8, 1))
  tokens = (tokens + 3 * np.arange(8)).astype("int32") % SYMBOLS
  return [peft_trainer.TrainingInput(input_tokens=x, input_mask=np.ones_like(x)) for x in tokens]


def inputs_of(batch):
  seen = batch.input_mask.astype(bool)
  return {
    "input_tokens": batch.input_tokens,
    "input_mask": batch.input_mask,
    "positions": utils.build_positions_from_mask(seen),
    "attention_mask": utils.make_causal_attn_mask(seen),
  }


def trainer_of(optimizer, model=None, folder=None, steps=STEPS, hook=None, **fields):
  config = peft_trainer.TrainingConfig(
    max_steps=steps, eval_every_n_steps=4, checkpoint_root_directory=folder and str(folder),
    checkpointing_options=ocp.CheckpointManagerOptions(save_interval_steps=2), **fields,
  )  # fmt: skip
  trainer = peft_trainer.PeftTrainer(model or qwen(), optimizer, config)
  trainer.with_training_hooks(hook)
  return trainer.with_gen_model_input_fn(inputs_of)


def sparse(name):
  return nms.sparse(optax.adamw(1e-2), RULES[name])


def params_of(trainer):
  return nnx.as_pure(nnx.state(trainer.model, nnx.Param))


# --- roles and axes -------------------------------------------------------------------------------


def family(name):
  module, of, fields = FAMILIES[name]
  module = importlib.import_module(f"tunix.models.{module}.model")
  if module.__name__.endswith("gemma.model"):
    fields = fields | dict(attention_types=(module.AttentionType.GLOBAL,) * 2)
  return getattr(module, of)(module.ModelConfig(**SIZES | fields), rngs=nnx.Rngs(0))


@pytest.mark.parametrize("name", FAMILIES)
def test_roles_find_the_kernels_of_a_family_and_the_axis_that_its_products_sum_over(name):
  model = family(name)
  graph, params, rest = nnx.split(model, nnx.Param, ...)
  rules = RULES["sr_ste"]
  sites = rules.assign(params).sites
  kernels = re.compile(r"layers/./(mlp|attn|moe)/(?!router)\w*(proj|einsum|linear)(/w|/kernel)?")
  assert sorted(sites) == sorted(p for p, _ in flatten(params) if kernels.fullmatch(p))

  # What the forward pass says: it has no axis to add.
  inputs = inputs_of(batches(1)[0])
  forward = lambda p, *x: nnx.merge(graph, p, rest)(x[0], x[1], None, x[2])[0]
  x = [inputs[name] for name in ("input_tokens", "positions", "attention_mask")]
  assert rules.for_model(forward, params, *x).axes == {}

  for path, site in sites.items():
    folder, _, last = path.rpartition("/")
    if last not in ("w", "kernel"):  # experts: the trace alone
      continue
    kernel = np.random.default_rng(1).normal(size=site.shape)  # Tunix makes some of zeros
    call = nnx_call(layer_at(model, folder), last)
    assert_sums_over(site, kernel, input_of(site, 1, 1), call)


# --- training ---------------------------------------------------------------------------------


def loss_of(model, batch):
  return peft_trainer._default_loss_fn(model, **inputs_of(batch))


@pytest.mark.parametrize(("name", "accumulate"), [*zip(RECIPES, (1, 2, 1, 2), strict=True)])
def test_one_line_trains_n_of_m_as_a_loop_by_hand(name, accumulate):
  rules = RULES[name]
  trainer = trainer_of(sparse(name), gradient_accumulation_steps=accumulate)
  seen, held_out = batches(STEPS * accumulate), batches(1, seed=1)
  trainer.train(seen, held_out)
  assert_sparse(params_of(trainer), rules, "1:4", places=14)
  assert int(nms.step_count(trainer.optimizer.opt_state)) == trainer.train_steps == STEPS
  history = lambda mode: trainer.metrics_logger.get_metric_history("", "loss", mode)
  graph, params, rest = nnx.split(qwen(), nnx.Param, ...)
  loss = lambda params, batch: loss_of(nnx.merge(graph, params, rest), batch)
  expected = losses_by_hand(loss, nnx.as_pure(params), rules, optax.adamw(1e-2), seen, accumulate)
  expected = expected.reshape(-1, accumulate).mean(1)  # Tunix logs a mean of each step
  # Some recipes choose another mask where a sum is rounded otherwise, and do so late.
  np.testing.assert_allclose(history("train"), expected, atol=1e-5, rtol=0)
  assert len(history("eval")) == 1 + STEPS // 4  # and once before the first step
  now = float(loss_of(trainer.model, held_out[0]))
  np.testing.assert_allclose(history("eval")[-1], now, rtol=1e-5)


def test_bfloat16_parameters_have_float32_weights_behind_them_and_exact_zeros(tmp_path):
  optimizer = sparse("mdgf_exponential")
  make = lambda steps: trainer_of(optimizer, qwen(jnp.bfloat16), tmp_path, steps)
  make(6).train(batches(6))
  trainer = make(STEPS)
  assert trainer.train_steps == 6
  trainer.train(batches(STEPS))
  params = params_of(trainer)
  dense = nms.dense_params(params, nnx.as_pure(trainer.optimizer.opt_state))
  assert_sparse(params, RULES["mdgf_exponential"], "1:4", places=14)
  for tree, dtype in ((params, "bfloat16"), (dense, "float32")):
    assert tree["layers"][0]["mlp"]["up_proj"]["kernel"].dtype == dtype
  whole = trainer_of(optimizer, qwen(jnp.bfloat16))
  whole.train(batches(STEPS))
  assert_same(params, params_of(whole))

  # Other rules than those of the checkpoint: Tunix compiles its step, where nothing can raise.
  trainer = trainer_of(sparse("sr_ste"), qwen(jnp.bfloat16), tmp_path, STEPS + 1)
  trainer.train(batches(STEPS + 1))
  assert np.any(np.isnan(params_of(trainer)["layers"][0]["mlp"]["up_proj"]["kernel"]))


def test_a_mesh_shards_the_dense_weights_as_their_parameters(tmp_path):
  def run(folder, steps):
    mesh = jax.sharding.Mesh(np.reshape(jax.devices()[:4], (2, 2)), ("fsdp", "tp"))
    with mesh:
      model = qwen()
      state = nnx.state(model)
      nnx.update(model, jax.device_put(state, nnx.get_named_sharding(state, mesh)))
      trainer = trainer_of(sparse("idp"), model, folder, steps)
      trainer.train(batches(steps))
    return trainer

  run(tmp_path / "resumed", 6)
  ends = [run(tmp_path / folder, STEPS) for folder in ("resumed", "whole")]
  assert_sparse(params_of(ends[0]), RULES["idp"], "1:4", places=14)
  assert_same(*map(params_of, ends))
  for trainer in ends:
    params, opt = params_of(trainer), nnx.as_pure(trainer.optimizer.opt_state)
    (state,) = transform.states(opt, transform.SparseState)
    shards, dense = dict(flatten(params)), dict(flatten(state.dense))
    assert len(dense) == 14
    for path, w in dense.items():
      assert w.sharding.is_equivalent_to(shards[path].sharding, w.ndim)
      assert w.addressable_shards[0].data.size < w.size


def test_a_given_mask_is_held_and_lora_that_tunix_trains_alone_is_refused():
  params = nnx.as_pure(nnx.state(qwen(), nnx.Param))
  given = nms.finalize(params, RULES["sr_ste"], STEPS)
  zeros = lambda params: {p: np.asarray(x) == 0 for p, x in flatten(params) if "lora" not in p}

  def pruned():
    model = qwen()
    nnx.update(model, given)
    return model

  hold = nms.Rules(dict.fromkeys(BLOCKS, nms.recipe("hold", pattern="1:4")))
  held = nms.sparse(optax.adamw(1e-2), hold)
  trainer = trainer_of(held, pruned())
  trainer.train(batches(STEPS))
  assert_same(zeros(params_of(trainer)), zeros(given))
  assert_sparse(params_of(trainer), hold, "1:4", places=14)

  # Beside LoRA, Tunix leaves the base as it is: a usual optimizer keeps its zeros.
  provider = qwix.LoraProvider(module_path=".*_proj", rank=2, alpha=2.0)
  adapted = lambda: qwix.apply_lora_to_model(pruned(), provider, **pruned().get_model_input())
  trainer = trainer_of(optax.adamw(1e-2), adapted())
  trainer.train(batches(STEPS))
  assert_same(zeros(params_of(trainer)), zeros(given))
  lora = [np.asarray(x) for p, x in flatten(params_of(trainer)) if p.endswith("lora_b")]
  assert len(lora) == 14 and all(map(np.any, lora))
  with pytest.raises(ValueError, match="LoRA") as error:
    trainer_of(held, adapted())
  assert "no base weights" in str(error.value)


def test_an_accumulation_inside_is_refused_and_a_wrong_place_names_what_there_is():
  inside = nms.sparse(optax.MultiSteps(optax.sgd(0.1), 2), RULES["sr_ste"])
  with pytest.raises(ValueError, match="MultiSteps"):
    trainer_of(inside)
  elsewhere = nms.Rules({".*/attention/.*": recipe_of("sr_ste", "1:4", STEPS)})
  with pytest.raises(ValueError, match="embedder/input_embedding"):
    trainer_of(nms.sparse(optax.sgd(0.1), elsewhere))


def test_the_example_learns_and_its_hook_logs_the_schedule(capsys, monkeypatch, tmp_path):
  logged, log = [], peft_trainer.MetricsLogger.log

  def noted(self, prefix, name, value, mode, step):
    logged.append((name, step, float(value)))
    log(self, prefix, name, value, mode, step)

  monkeypatch.setattr(peft_trainer.MetricsLogger, "log", noted)
  monkeypatch.setattr(sys, "argv", ["tunix_sft.py", str(tmp_path)])
  run_example("tunix_sft.py", {
    "STEPS, SYMBOLS, LENGTH = 200,": "STEPS, SYMBOLS, LENGTH = 80,",
    "dense=40, finetune=80": "dense=10, finetune=30",
  })  # fmt: skip
  assert capsys.readouterr().out.rstrip().endswith("\nok")
  logged = {(name, step): value for name, step, value in logged}
  assert logged["nm/D", 80] == 0 and logged["nm/D", 41] > 0 and logged["nm/density", 80] == 0.25
  assert (logged["nm/n/ff", 80], logged["nm/m/ff", 80]) == (1, 4)
  assert logged["nm/flip_rate/all", 80] > 0
  assert sorted(path.name for path in tmp_path.iterdir()) == ["dense", "sparse"]


# --- kill -9 and resume ---------------------------------------------------------------------------


class Told(hooks.TrainingHooks):
  """Prints each step, for the test below, which kills its process."""

  on_train_start = on_train_end = on_train_step_start = lambda *_: None
  on_eval_step_start = on_eval_step_end = on_train_start

  def on_train_step_end(self, train_ctx, train_step, train_loss):
    print("step", train_step, flush=True)


def main(folder):
  with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
    trainer = trainer_of(sparse("idp"), None, folder, hook=Told(), gradient_accumulation_steps=2)
    trainer.train(batches(2 * STEPS), batches(1, seed=1))


def test_killed_and_resumed_ends_with_the_bits_of_a_run_that_was_not(tmp_path):
  assert kill_and_resume(__file__, tmp_path, STEPS, kill_at=7) > 1
  ends = [checkpoint(tmp_path / folder) for folder in ("whole", "killed")]
  assert_same(*ends)
  assert_sparse(ends[0]["model_params"], RULES["idp"], "1:4", places=14)
  # Orbax wrote our state: W, the count, the masks, and the text of the rules.
  state = ends[0]["optimizer_state"]["opt_state"]["inner_opt_state"]
  assert rules_text.unpack(np.asarray(state["rules"])) == RULES["idp"].text
  assert int(state["count"]) == STEPS and len(jax.tree.leaves(state["masks"]["mask"])) == 14
  assert np.all(state["dense"]["layers"]["0"]["mlp"]["up_proj"]["kernel"])


def checkpoint(folder):
  """What Orbax wrote last, without the boxes of NNX."""
  kinds = ("model_params", "optimizer_state")
  handlers = {kind: ocp.PyTreeCheckpointHandler() for kind in kinds}
  with ocp.CheckpointManager(folder, item_handlers=handlers) as manager:
    items = manager.restore(STEPS)
  is_box = lambda x: isinstance(x, dict) and x.keys() == {"value"}
  unboxed = lambda tree: jax.tree.map(lambda x: x["value"], tree, is_leaf=is_box)
  return {kind: unboxed(items[kind]) for kind in kinds}


if __name__ == "__main__":
  main(*sys.argv[1:])
