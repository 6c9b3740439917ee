"""Reads gin files in a process of its own: JSON cases in, JSON findings out.

    {"files": [...], "bindings": [...], "make": ["RULES", ...]} -> {"RULES": "ff: sr_ste 1:8, ..."}
                                                          or -> {"error": "..."}

`python gin_probe.py blocked` runs where T5X, seqio and TensorFlow cannot be imported;
`python gin_probe.py t5x` where they must be. One process serves many cases: imports cost most.
"""

import dataclasses
import gc
import importlib
import importlib.util  # gin uses it and does not import it
import json
import math
import pathlib
import sys
import warnings

HEAVY = ("t5x", "seqio", "tensorflow", "tensorflow_text", "airio", "jestimator")
ROOT = pathlib.Path(__file__).resolve().parents[1]


def read(files, bindings):
  """Parses as T5X's commands do: files in order, then bindings, then finalize."""
  import gin

  gin.clear_config()
  gin.parse_config_files_and_bindings(files, bindings)


def value(macro):
  """What %macro stands for, made."""
  import gin

  with gin.unlock_config():
    gin.parse_config(f"from __gin__ import dynamic_registration\nPROBED = %{macro}")
  found = gin.query_parameter("PROBED/gin.macro.value")
  return found.scoped_configurable_fn() if hasattr(found, "scoped_configurable_fn") else found


def summary(found, macro):
  """A text or a dict that JSON can hold."""
  from nm_sparsity_jax.training import configure
  from nm_sparsity_jax.training.rules import Rules

  if isinstance(found, Rules):
    return configure.describe(found)
  if hasattr(found, "config"):  # a network
    return {**_fields(found.config), "parameters": _parameters(found) if _small(found) else None}
  if macro == "MODEL":
    return _model(found)
  return found


def _fields(config):
  fields = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
  return {k: v if isinstance(v, int | float | str | None) else list(v) for k, v in fields.items()}


def _small(network):
  return getattr(network.config, "emb_dim", math.inf) <= 128


def _parameters(network):
  import jax

  tokens = jax.ShapeDtypeStruct((2, 8), "int32")
  make = lambda x: network.init(jax.random.PRNGKey(0), x, x, x, enable_dropout=False)
  return sum(x.size for x in jax.tree.leaves(jax.eval_shape(make, tokens)["params"]))


def _model(model):
  """What the run file made, and that a train state and a trainer of it can be made."""
  import jax
  import numpy as np
  from t5x import adafactor

  from nm_sparsity_jax.integrations import t5x as t5x_adapter
  from nm_sparsity_jax.training import configure

  optimizer = model.optimizer_def
  out = {
    "class": type(model).__name__,
    "rules": configure.describe(model.rules) if hasattr(model, "rules") else None,
    "network": _fields(model.module.config),
    "vocabulary": type(model.input_vocabulary).__name__,
    "optimizer": type(optimizer).__name__,
    "z_loss": model._z_loss,
    "label_smoothing": model._label_smoothing,
    "loss_normalizing_factor": model._loss_normalizing_factor,
  }
  out["collections"] = _collections(model, out["rules"]) if _small(model.module) else []
  train = _bound("train_script.train")
  if train is None:
    return out
  if isinstance(optimizer, adafactor.Adafactor):
    out["adafactor_offset"] = optimizer.hyper_params.step_offset
  made = train["trainer_cls"](
    model=model, train_state=None, partitioner=None, eval_names=[], summary_dir=None,
    train_state_axes=None, rng=jax.random.PRNGKey(0),
  )  # fmt: skip
  out["trainer"] = [isinstance(made, t5x_adapter.SparseTrainer), made._num_microbatches]
  out["trainer"] += [made.metrics_every]
  start = value("PRETRAINED_STEPS")
  rate = lambda j: float(np.float32(made._learning_rate_fn(start + j)))
  out["rate"] = {str(j): rate(j) for j in (0, 500, 1000, 4000)}
  if type(optimizer).__name__ == "OptaxWrapper":
    # The rate that the chain itself applies: on equal gradients Adam's update is the rate.
    tx, w = optimizer.optax_optimizer, {"w": np.ones(1, np.float32)}
    state = tx.init(w)
    for _ in range(2):
      update, state = tx.update({"w": np.ones(1, np.float32)}, state, {"w": np.zeros(1)})
    out["second_update"] = float(update["w"][0])
  data = train["train_dataset_cfg"]
  out["data"] = {k: getattr(data, k) for k in DATA}
  out["total_steps"], out["random_seed"] = train["total_steps"], train["random_seed"]
  out["infer_eval"] = train["infer_eval_dataset_cfg"] is not None
  restore, save = train["checkpoint_cfg"].restore, train["checkpoint_cfg"].save
  out["restore"] = [restore.dtype, restore.fallback_to_scratch, bool(restore.assignment_map)]
  out["save"] = [save.dtype, save.save_dataset]
  return out


COLLECTIONS = {}  # tracing a network is most of a case, and most cases have the same


def _collections(model, rules):
  """The names of the collections that a model starts with."""
  import jax

  key = type(model), repr(model.module), rules
  if key not in COLLECTIONS:
    shapes = dict.fromkeys(model.FEATURE_CONVERTER_CLS.MODEL_FEATURES, (4, 8))
    make = lambda: model.get_initial_variables(jax.random.PRNGKey(0), shapes)
    COLLECTIONS[key] = sorted(jax.eval_shape(make))
  return COLLECTIONS[key]


DATA = (
  "mixture_or_task_name", "module", "task_feature_lengths", "batch_size", "pack", "seed",
  "use_cached",
)  # fmt: skip


def _bound(selector):
  """The arguments that gin would pass to a function, made; None where nothing binds it."""
  import gin

  bound = {}
  for name in ("trainer_cls", "train_dataset_cfg", "infer_eval_dataset_cfg", "checkpoint_cfg",
               "total_steps", "random_seed"):  # fmt: skip
    try:
      found = gin.query_parameter(f"{selector}.{name}")
    except ValueError:
      return None
    bound[name] = (
      found.scoped_configurable_fn() if getattr(found, "evaluate", False)
      else getattr(found, "scoped_configurable_fn", found)
    )  # fmt: skip
  return bound


def imported(name):
  """A module. The collector need not look through what it brings, which would take a fifth more."""
  if name not in sys.modules:
    gc.disable()
    importlib.import_module(name)
    gc.freeze()
    gc.enable()
  return sys.modules[name]


def run(case):
  """One case."""
  before = sys.modules["__main__"]
  try:
    if case.get("main"):  # run files import their command as __main__
      sys.modules["__main__"] = imported(f"t5x.{case['main']}")
    read(case["files"], case.get("bindings", []))
    out = {macro: summary(value(macro), macro) for macro in case.get("make", [])}
    if case.get("config"):
      import gin

      out["config"] = gin.config_str()
    if case.get("call"):
      import gin

      module = importlib.import_module(f"t5x.{case['main']}")
      gin.get_configurable(getattr(module, case["call"]))()
    return out
  except Exception as e:
    return {"error": f"{type(e).__name__}: {e}"}
  finally:
    sys.modules["__main__"] = before


def t5x_folder():
  return next(iter(importlib.util.find_spec("t5x").submodule_search_locations))  # type: ignore


def main():
  warnings.simplefilter("ignore")
  if sys.argv[1] == "blocked":
    sys.modules.update(dict.fromkeys(HEAVY))
  import gin

  gin.add_config_file_search_path(str(ROOT))
  if sys.argv[1] == "t5x":
    gin.add_config_file_search_path(str(pathlib.Path(t5x_folder()).parent))
  cases = json.load(sys.stdin)
  print("\n" + json.dumps({name: run(case) for name, case in cases.items()}))


if __name__ == "__main__":
  main()
