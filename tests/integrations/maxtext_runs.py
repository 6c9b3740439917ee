"""What test_maxtext.py asks of MaxText, in a process of its own: MaxText sets jax's options.

JAX_NUM_CPU_DEVICES=4 python tests/integrations/maxtext_runs.py FOLDER   pickles it into FOLDER/all
"""

import json
import os
import pickle
import signal
import sys
import traceback

import jax
import maxtext
import numpy as np
from conformance import losses_by_hand, recipe_of, rules_of
from flax import nnx
from flax.core.spmd import logical_axis_rules
from maxtext.optimizers import optimizers
from maxtext.trainers.pre_train import train
from maxtext.utils import maxtext_utils, model_creation_utils

import nm_sparsity_jax as nms
from nm_sparsity_jax.core.trees import flatten

STEPS, KILLED = 12, 8
SMALL = [
  "hardware=cpu", "skip_jax_distributed_system=true", "dataset_type=synthetic", "vocab_size=64",
  "max_target_length=16", "per_device_batch_size=2", "attention=dot_product", "base_emb_dim=32",
  "base_num_decoder_layers=2", "base_mlp_dim=64", "base_num_query_heads=4", "base_num_kv_heads=2",
  "head_dim=8", f"steps={STEPS}", "learning_rate=3e-3", "log_config=false", "dtype=float32",
  "enable_tensorboard=false", "enable_checkpointing=false", "gradient_clipping_threshold=0",
  "ici_fsdp_parallelism=2", "ici_tensor_parallelism=2", "decoder_block=llama2",
]  # fmt: skip
SAVED = ["enable_checkpointing=true", "checkpoint_period=3", "async_checkpointing=false"]
# From the second step on every step counts as a spike.
SPIKES = ["skip_step_on_spikes=true", "skip_step_interval=4", "skip_step_scaling_factor=-9.0"]
MAKE, SKIP = optimizers.get_optimizer, optimizers.skip_step_on_spikes
ITERATION = train.training_loop_iteration

ALL = {"ff": "sr_ste", "q": "mdgf_exponential", "k": "sdgf_stepwise", "v": "idp", "o": "sr_ste"}
ONE = rules_of("1:8", STEPS)["mdgf_exponential"]


def mixed(steps):
  return nms.Rules({place: recipe_of(name, "1:8", steps) for place, name in ALL.items()})


MIXED = mixed(STEPS)


def config_of(*arguments):
  base = os.path.join(os.path.dirname(maxtext.__file__), "configs", "base.yml")
  folder = f"base_output_directory={os.path.abspath('runs')}"
  return train.initialize(["", base, "run_name=run", folder, *SMALL, *arguments])


def arrays(tree, function):
  return {path: function(x) for path, x in flatten(tree) if isinstance(x, jax.Array)}


def place(x):
  return tuple(x.sharding.spec), x.sharding.is_fully_replicated


def run(name, rules, *arguments, kill=False, inside=False, first=None):
  """Trains in MaxText's loop, as its command does, and returns what that leaves."""
  optimizers.get_optimizer, optimizers.skip_step_on_spikes = MAKE, SKIP
  if inside:
    optimizers.skip_step_on_spikes = lambda tx, **k: SKIP(nms.sparse(tx, rules), **k)
  elif rules is not None:  # the two lines of the README
    make = optimizers.get_optimizer
    optimizers.get_optimizer = lambda *args, **kwargs: nms.sparse(make(*args, **kwargs), rules)
  steps, losses = [], []

  def iteration(devices, variables, fixed):
    if first is not None and not steps:
      copied = jax.tree.map(lambda x: x.copy(), devices["state"]["model"])  # a step donates it
      first.update(graph=nnx.graphdef(devices["model"]), state=copied, mesh=devices["mesh"])
      first.update(batch=next(variables["data_iterator"]))
    steps.append(variables["step"])
    if kill and len(steps) == KILLED:
      os.kill(os.getpid(), signal.SIGKILL)
    metrics = ITERATION(devices, variables, fixed)
    losses.append(float(metrics["scalar"]["learning/loss"]))
    return metrics

  train.training_loop_iteration = iteration
  config, recorder = config_of(f"run_name={name}", f"metrics_file={name}.json", *arguments)
  state = train.train_loop(config, recorder)
  params = nnx.to_pure_dict(nnx.filter_state(state["model"], nnx.Param))
  opt = nnx.to_pure_dict(state["optimizer"])["opt_state"]
  with open(f"{name}.json") as file:
    metrics = [json.loads(line) for line in file]
  return {
    "params": arrays(params, np.asarray), "opt": arrays(opt, np.asarray), "steps": steps,
    "placed": arrays(params, place), "opt placed": arrays(opt, place),
    "losses": losses, "evaluated": [x["eval/avg_loss"] for x in metrics if "eval/avg_loss" in x],
  }  # fmt: skip


def by_hand(rules, first, *arguments):
  """The losses of a loop over MaxText's model."""
  config, _ = config_of(*arguments)
  schedule = maxtext_utils.create_learning_rate_schedule(config)
  graph, w, rest = nnx.split(nnx.merge(first["graph"], first["state"]), nnx.Param, ...)

  def loss(w, batch):
    seen = nnx.merge(graph, w, rest, copy=True)
    return train.loss_fn(seen, config, dict(batch), None, None)[0]

  with jax.set_mesh(first["mesh"]), logical_axis_rules(config.logical_axis_rules):
    return losses_by_hand(loss, w, rules, MAKE(config, schedule), [first["batch"]] * STEPS)


def axes(*arguments):
  """path -> the axes by the family, and those that a trace of MaxText's forward pass finds."""
  config, _ = config_of(*arguments)
  create, model = model_creation_utils.create_nnx_abstract_model(config)
  graph, params, rest = nnx.split(model, nnx.Param, ...)
  mesh = maxtext_utils.get_mesh_from_config(config)
  tokens = jax.ShapeDtypeStruct((8, config.max_target_length), "int32")

  def forward(params, rest, tokens):
    model = nnx.merge(graph, params, rest)
    return model(tokens, tokens, decoder_segment_ids=tokens, enable_dropout=False)

  with jax.set_mesh(mesh), logical_axis_rules(config.logical_axis_rules):
    every = nms.Rules({".*decoder/layers.*/kernel": ONE.places["ff"]})
    traced = every.for_model(forward, params, rest, tokens).assign(params).sites
  named = ONE.assign(params).sites
  return [{p: site.groups.axes for p, site in found.items()} for found in (named, traced)]


def everything():
  first = {}
  yield "whole", lambda: run("whole", MIXED, "eval_interval=4", "eval_steps=2", first=first)
  yield "by hand", lambda: by_hand(MIXED, first)
  yield "resumed", lambda: run("killed", MIXED, *SAVED)
  yield "dense", lambda: run("dense", None)
  yield "dense resumed", lambda: run("dense_killed", None, *SAVED)
  half = "per_device_batch_size=1", "gradient_accumulation_steps=2"
  yield "accumulated", lambda: run("accumulated", MIXED, *half)
  short = "dtype=bfloat16", "weight_dtype=bfloat16", "scan_layers=false"
  yield "bf16", lambda: run("bf16", MIXED, *short)
  qwix = "use_qwix_quantization=true"
  yield "int8", lambda: run("int8", ONE, "quantization=int8", qwix)
  yield "fp8", lambda: run("fp8", ONE, "quantization=fp8_full", qwix)
  yield "spikes", lambda: run("spikes", ONE, *SPIKES)
  yield "spikes inside", lambda: run("inside", ONE, *SPIKES, inside=True)
  wrong = nms.Rules({"mlp": ONE.places["ff"]})
  yield "a wrong word", lambda: run("wrong", wrong)
  # After "resumed", whose last checkpoint it takes.
  yield "a longer schedule", lambda: run("killed", mixed(STEPS + 3), *SAVED, f"steps={STEPS + 3}")
  for block in ("llama2", "default", "gemma", "gemma2", "mistral", "qwen3"):
    for how in ("", "scan_layers=false", "param_scan_axis=0"):
      words = [f"decoder_block={block}", *filter(None, [how])]
      yield f"axes {' '.join(words)}", lambda words=words: axes(*words)


def main(folder):
  os.makedirs(folder, exist_ok=True)
  os.chdir(folder)
  found = {}
  # A killed run in a child each: MaxText takes long to import, and jax has no backend yet.
  for name, rules in (("killed", MIXED), ("dense_killed", None)):
    if not (child := os.fork()):
      run(name, rules, *SAVED, kill=True)
    found[name] = os.waitpid(child, 0)[1]
  for name, make in everything():
    try:
      found[name] = make()
    except (Exception, SystemExit):
      found[name] = traceback.format_exc()
  with open("all", "wb") as file:
    pickle.dump(found, file)


if __name__ == "__main__":
  main(*sys.argv[1:])
