"""Kauldron and Gemma, unmodified: trains, is scored, resumes, is proven; roles; what is refused."""

# ruff: noqa: E402
import dataclasses
import re
import runpy
import shutil
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conformance import (
  RECIPES,
  ROOT,
  assert_same,
  assert_sparse,
  losses_by_hand,
  recipe_of,
)

pytest.importorskip("kauldron")
pytest.importorskip("gemma")
PATHS = [str(ROOT), *(str(ROOT / name) for name in ("tests/integrations", "examples"))]
sys.path += PATHS

import gemma_kauldron
import gemma_konfig
import hosts
import kauldron_vit
from gemma import gm
from gemma.gm.nn.gemma3n import _config as config3n
from gemma.gm.nn.gemma3n import _modules as modules3n
from gemma.gm.nn.gemma3n import _transformer as gemma3n
from gemma.gm.nn.gemma4 import _config as config4
from gemma.gm.nn.gemma4 import _modules as modules4
from gemma.gm.nn.gemma4 import _transformer as gemma4
from kauldron import kd, konfig

import nm_sparsity_jax as nms
from nm_sparsity_jax import runs
from nm_sparsity_jax.core import trace, trees
from nm_sparsity_jax.runs import checkpoint, events
from nm_sparsity_jax.training import roles

pytestmark = pytest.mark.filterwarnings("ignore")

STEPS = 12  # of gemma_konfig


def trainer_of(workdir, **changes):
  """The trainer of the konfig file, with other fields."""
  cfg = gemma_konfig.get_config()
  cfg.workdir = str(workdir)
  return dataclasses.replace(konfig.resolve(cfg), **changes)


def rules_of(name):
  return gemma_kauldron.rules_for(gemma_kauldron.model(), recipe_of(name, "1:4", STEPS))


def sparse(recipe, tx=None):
  """Fields of a trainer with other rules."""
  rules = rules_of(recipe)
  return {
    "optimizer": nms.sparse(tx or optax.adamw(1e-2), rules),
    "train_metrics": {"sparsity": gemma_kauldron.nms_kauldron.Sparsity(rules=rules)},
    "checkpointer": kd.ckpts.NoopCheckpointer(),
    "evals": {},
  }


def restored(trainer, step=-1):
  """The state of a checkpoint."""
  return trainer.checkpointer.restore(trainer.init_state(skip_transforms=True), step=step)


def stepped(trainer, count):
  """Yields the state before each of so many updates, what it returns, and the state after."""
  state, batches = trainer.init_state(), iter(trainer.train_ds)
  for _ in range(count):
    batch = kd.sharding.device_put(next(batches), trainer.sharding.batch)
    before = jax.tree.map(jnp.copy, state)  # the step donates it
    state, aux = trainer.trainstep.step(
      state, batch, return_losses=True, return_metrics=True, return_summaries=True
    )
    yield before, aux.compute(), state


def arrays(folder, step):
  """Every array of a checkpoint, the optimizer's too, by Orbax alone."""
  import orbax.checkpoint as ocp

  path, reader = folder / f"checkpoints/ckpt_{step}/default", ocp.PyTreeCheckpointer()
  as_numpy = lambda leaf: ocp.RestoreArgs(restore_type=np.ndarray)
  args = jax.tree.map(as_numpy, reader.metadata(path).item_metadata.tree)
  return reader.restore(path, restore_args=args)


def assert_one_of_four(params):
  assert_sparse(params, rules_of("idp"), "1:4", places=8)


# --- runs -----------------------------------------------------------------------------------------


ONE_DEVICE = {"PYTHONPATH": ":".join(PATHS), "JAX_NUM_CPU_DEVICES": "1"}


def command_of(folder, host=""):
  """The command of users, for a run into a folder; docs/kauldron.md has that of several hosts."""
  command = [sys.executable, "-m", "kauldron.main"]
  if host:
    (code,) = re.findall(r'python -c "([^"]*)"', (ROOT / "docs/kauldron.md").read_text())
    command = [sys.executable, "-c", code.replace("initialize()", f"initialize({host})")]
  return [*command, f"--cfg={gemma_konfig.__file__}", f"--cfg.workdir={folder}"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
  """The folder of a run by the command, on one device."""
  folder = tmp_path_factory.mktemp("runs")
  hosts.run(folder, lambda _: [command_of(folder / "whole")], **ONE_DEVICE)
  return folder / "whole"


def test_the_checkpoint_of_step_n_holds_n_updates_and_is_proven(whole, tmp_path):
  """The loop makes one update more, after the last checkpoint."""
  paths = {step: str(whole / f"checkpoints/ckpt_{step}") for step in (0, 4, 8, 12)}
  assert {str(path) for path in (whole / "checkpoints").iterdir()} == {*paths.values()}
  for step, path in paths.items():
    stored = checkpoint.read(path)
    assert (stored.step, stored.sparse_step) == (step, step)
  assert_one_of_four(arrays(whole, 12)["params"])
  assert runs.verify(str(whole)).ok and not runs.verify(paths[4]).ok
  made = runs.finalize(str(whole), str(tmp_path / "final"))
  assert made.ok and not any(made.removed.values())
  with pytest.raises(ValueError, match="sparse step 4"):
    runs.finalize(paths[4], str(tmp_path / "early"))


def test_it_goes_on_to_the_same_bits_with_stored_masks(tmp_path):
  for name, stops in (("one", (None,)), ("two", (9, None))):
    for after in stops:
      trainer_of(tmp_path / name, stop_after_steps=after).train()
  found = arrays(tmp_path / "two", STEPS)
  assert_same(found, arrays(tmp_path / "one", STEPS))
  assert jax.tree.leaves(found["opt_state"]["masks"]["mask"])


def test_eight_devices_that_share_the_weights_train_as_one_and_masks_keep_their_bits(
  whole, tmp_path
):
  everything = kd.sharding.FSDPSharding(min_size_to_shard_mb=0)
  trainer = trainer_of(tmp_path, sharding=kd.sharding.ShardingStrategy(params=everything))
  state, _ = trainer.train()
  assert not state.params["layer_0"]["mlp"]["linear"].sharding.is_fully_replicated
  found = arrays(tmp_path, STEPS)
  assert jax.tree.leaves(found["opt_state"]["masks"]["mask"])
  assert_same(found, arrays(whole, STEPS), atol=1e-4)


@pytest.mark.parametrize("recipe", RECIPES)
def test_each_recipe_ends_n_m_and_the_metric_tells_what_its_updates_do(recipe, tmp_path):
  trainer, rules = trainer_of(tmp_path, **sparse(recipe)), rules_of(recipe)

  def masks_of(state):
    dense, own = nms.dense_params(state.params, state.opt_state), state.opt_state
    return nms.metrics.masks_of(dense, rules, own.count, own.masks)

  flips = []
  for i, (before, aux, state) in enumerate(stepped(trainer, 12)):
    said = {key.removeprefix("metrics/sparsity/"): x for key, x in aux.metric_values.items()}
    target = {"density": 1, "D": 1, "n/decoder/ff": 1, "m/decoder/ff": 1} if i < 2 else {}
    if i >= 8:
      target = {"density": 0.25, "D": 0, "n/decoder/ff": 1, "m/decoder/ff": 4}
    assert {key: said[key] for key in target} == target
    flips.append(nms.metrics.flip_rate(masks_of(before), masks_of(state)))
    for name, x in zip(("all", "kept"), flips[-1], strict=True):
      np.testing.assert_allclose(said[f"flip_rate/{name}"], x, atol=1e-3)
  assert any(x.all > 0 for x in flips)
  assert_one_of_four(state.params)
  assert nms.verify(state.params, rules).ok


def test_the_loss_is_that_of_a_loop_that_masks_in_its_loss(tmp_path):
  rules, trainer = rules_of("sr_ste"), trainer_of(tmp_path, **sparse("sr_ste", optax.adamw(1e-3)))
  model = gemma_kauldron.model()

  def loss(params, batch):
    logits = model.apply({"params": params}, batch["tokens"]).logits
    xent = optax.softmax_cross_entropy_with_integer_labels
    return xent(logits, batch["target"][..., 0]).mean()

  batches = [batch for _, batch in zip(range(STEPS), trainer.train_ds, strict=False)]
  params = trainer.init_state().params
  expected = losses_by_hand(loss, params, rules, optax.adamw(1e-3), batches)
  losses = [aux.loss_values["losses/xent"] for _, aux, _ in stepped(trainer, STEPS)]
  np.testing.assert_allclose(losses, expected, rtol=0, atol=1e-5)


def test_gradients_accumulate_in_bf16_and_the_checkpoint_knows_its_rules(tmp_path):
  changes = sparse("one_shot") | {"model": gemma_kauldron.model(jnp.bfloat16)}
  changes["optimizer"] = optax.chain(optax.MultiSteps(changes["optimizer"], 2))
  checkpointer = kd.ckpts.Checkpointer(save_interval_steps=8)
  changes |= {"checkpointer": checkpointer, "num_train_steps": 24}
  trainer_of(tmp_path, **changes).train()
  found = checkpoint.read(str(tmp_path))
  assert (found.step, found.sparse_step) == (24, 12)
  assert found.leaves["target/layer_0/mlp/linear"].dtype == jnp.bfloat16
  assert_one_of_four(arrays(tmp_path, 24)["params"])
  assert runs.verify(str(tmp_path)).ok


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loaded(kd.ckpts.InitTransform):
  """The weights of another run."""

  workdir: str

  def transform(self, state):
    return state.replace(params=restored(trainer_of(self.workdir)).params)


def test_stored_masks_are_those_of_loaded_weights_and_the_dense_phase_is_kauldrons(whole, tmp_path):
  phases = nms.Phases(total=12, dense=0, finetune=4)
  rules = nms.Rules({"o": nms.recipe("one_shot", pattern="1:4", phases=phases)})
  changes = sparse("one_shot") | {"optimizer": nms.sparse(optax.sgd(0.1), rules)}
  trainer = trainer_of(tmp_path, **changes, init_transform=Loaded(workdir=str(whole)))
  loaded = restored(trainer_of(whole)).params
  assert_same(trainer.init_state().params, loaded)
  ((_, _, state),) = stepped(dataclasses.replace(trainer, train_metrics={}), 1)
  assert_same(state.opt_state.masks["mask"], nms.init_state(loaded, rules)["mask"])
  assert nms.verify(state.params, rules).ok
  # Two updates in the dense phase are Kauldron's own.
  own = {"checkpointer": kd.ckpts.NoopCheckpointer(), "train_metrics": {}, "evals": {}}
  *_, (_, _, ours) = stepped(trainer_of(tmp_path, **own), 2)
  own["optimizer"] = optax.sgd(0.5, momentum=0.9)
  *_, (_, _, dense) = stepped(trainer_of(tmp_path, **own), 2)
  assert_same(nms.dense_params(ours.params, ours.opt_state), dense.params, atol=1e-6)


def test_the_example_learns(tmp_path, capsys, monkeypatch):
  monkeypatch.setattr(sys, "argv", ["gemma_kauldron.py", str(tmp_path)])
  runpy.run_path(gemma_kauldron.__file__, run_name="__main__")
  assert capsys.readouterr().out.endswith("\nok\n")
  (file,) = (tmp_path / "test").iterdir()
  loss = [x for _, tag, x in events.scalars(file) if tag == "losses/xent"]
  assert len(loss) == 3 and loss[-1] < 0.1 < 4 < loss[0]  # log(64) = 4.2
  assert_one_of_four(arrays(tmp_path, 200)["params"])


def test_the_example_of_images_is_read(tmp_path):
  cfg = kauldron_vit.get_config()
  cfg.workdir = str(tmp_path)
  made = konfig.resolve(cfg)
  rules = made.train_metrics["sparsity"].rules
  assert made.num_train_steps == rules.places["ff"].phases.total == 90_000


def test_other_rules_end_the_run_at_the_first_metric_and_before_a_checkpoint(whole, tmp_path):
  shutil.copytree(whole, tmp_path / "run")
  changes = sparse("idp", optax.sgd(0.5, momentum=0.9)) | {"num_train_steps": 16}
  changes["checkpointer"] = kd.ckpts.Checkpointer(save_interval_steps=4, max_to_keep=None)
  with pytest.raises(ValueError, match="other rules"):
    trainer_of(tmp_path / "run", **changes).train()
  assert checkpoint.read(str(tmp_path / "run")).step == 12


@pytest.mark.slow
def test_two_processes_train_and_resume_and_one_finds_the_same(whole, tmp_path):
  """As two hosts do, by the command of the page."""

  def launch(name, *flags):
    return lambda address: [
      [*command_of(tmp_path / name, f"{address!r}, 2, {i}"), *flags] for i in range(2)
    ]

  for name, *flags in (("two",), ("cut", "--cfg.stop_after_steps=5"), ("cut",)):
    hosts.run(tmp_path, launch(name, *flags), **ONE_DEVICE)
  one, two, cut = (arrays(folder, 12) for folder in (whole, tmp_path / "two", tmp_path / "cut"))
  assert_same(cut, two)
  assert int(two["opt_state"]["count"]) == STEPS
  shapes = lambda tree: jax.tree.map(np.shape, tree)
  assert shapes(two["params"]) == shapes(one["params"])
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(two["params"]))


# --- roles ----------------------------------------------------------------------------------------

SMALL = {
  "num_embed": 64, "embed_dim": 32, "hidden_dim": 64, "num_heads": 4, "num_kv_heads": 2,
  "head_dim": 8, "final_logit_softcap": None, "use_post_attn_norm": True, "use_post_ffw_norm": True,
}  # fmt: skip
NEW = {"global_rope_proportion": 1.0, "local_rope_proportion": 1.0}
EXPERTS = {
  "enable_moe": True, "num_experts": 4, "expert_dim": 16, "top_k_experts": 2,
  "moe_dense_hidden_dim": 32,
}  # fmt: skip


def gemma(transformer, config, modules, **fields):
  types = (modules.AttentionType.GLOBAL,) * 2
  return transformer(tokens="batch.tokens", config=config(attention_types=types, **SMALL | fields))


MODELS = {
  "2 and 3": (gm.nn.Transformer, gm.nn.config.TransformerConfig, gm.nn, {}),
  "2 and 3, turned, q, k and v in one": (
    gm.nn.Transformer, gm.nn.config.TransformerConfig, gm.nn,
    {"transpose_gating_einsum": True, "num_kv_heads": 4}),
  "3n": (gemma3n.Gemma3nTransformer, config3n.TransformerConfig, modules3n,
         {"use_altup": True, "use_laurel": True, "per_layer_input_dim": 4}),
  "4": (gemma4.Transformer, config4.TransformerConfig, modules4, NEW),
  "4, one kernel for keys and values": (
    gemma4.Transformer, config4.TransformerConfig, modules4,
    NEW | {"k_eq_v_global": True, "num_global_kv_heads": 2, "global_key_size": 8}),
  "4 with experts": (gemma4.Transformer, config4.TransformerConfig, modules4, NEW | EXPERTS),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_roles_name_all_kernels_of_blocks_and_layouts_are_those_of_the_program(name):
  *classes, fields = MODELS[name]
  model = gemma(*classes, **fields)
  tokens = jax.ShapeDtypeStruct((1, 8), "int32")
  params = jax.eval_shape(model.init, jax.random.key(0), tokens)["params"]
  axes = trace.trace(lambda p, x: model.apply({"params": p}, x).logits, params, tokens).axes
  is_kernel = r"layer_./(attn/\w+_einsum/w|mlp2?/(gating_einsum|linear)(/w)?)"
  kernels = {p for p, _ in trees.flatten(params) if re.fullmatch(is_kernel, p)}
  assert {p for p, _ in trees.flatten(params) if roles.role_of(p)} == kernels
  assert len(kernels) >= 8
  recipe = recipe_of("sr_ste", "1:4", STEPS)
  for path in kernels:
    try:
      site = nms.Rules({path: recipe}).assign(params).sites[path]
    except ValueError:  # the family is not sure
      assert path.endswith("gating_einsum")
    else:
      assert site.groups.axes == axes[path]
  # One line tells the rest.
  rules = gemma_kauldron.rules_for(model, recipe)
  sites = rules.assign(params).sites
  assert sites.keys() == {p for p in kernels if not p.endswith("attn_vec_einsum/w")}
  assert all(site.groups.axes == axes[path] for path, site in sites.items())


def test_without_that_line_one_sentence_names_it():
  params = trainer_of("unused").init_state().params
  rules = nms.Rules({"ff": recipe_of("sr_ste", "1:4", STEPS)})
  with pytest.raises(ValueError, match="gating_einsum.*for_model"):
    rules.assign(params)
