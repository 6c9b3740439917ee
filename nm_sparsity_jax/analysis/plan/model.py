"""What the settings make: network or workload, rules, T5X's model and its state, as shapes.

    NETWORK or WORKLOAD, RULES, MODEL -> Made -> [jax.eval_shape] -> parameters, axes, T5X's state

Nothing of the model's size is allocated.
"""

# pyright: reportMissingImports=false, reportMissingModuleSource=false

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Mapping
from typing import Any

from nm_sparsity_jax.analysis.plan.findings import Findings
from nm_sparsity_jax.integrations import gin_files
from nm_sparsity_jax.trainer import workloads
from nm_sparsity_jax.trainer.workloads.t5 import known_lengths
from nm_sparsity_jax.training import flops
from nm_sparsity_jax.training.rules import Rules


@dataclasses.dataclass(frozen=True)
class Made:
  """What the settings of a run make; None where they make nothing, or it failed.

  Attributes:
    network: a flax module of T5X's interface, or the workload of a family of your own.
    rules: what is sparse; the axes of scanned kernels are known.
    model: T5X's model.
    state: T5X's train state, as shapes.
    params: the parameters, as shapes.
  """

  network: Any = None
  rules: Rules | None = None
  model: Any = None
  state: Any = None
  params: Any = None


def make(found: Findings) -> Made:
  """Makes what can be made, and notes what cannot."""
  what = "WORKLOAD" if found.config.is_set("WORKLOAD") else "NETWORK"
  network = found.attempt(what, network_of, found.config)
  rules = found.attempt("RULES", _rules, found)
  model = None
  if rules is not None or found.whole:
    model = found.attempt("MODEL", _t5x_model, found)
  network = getattr(model, "module", network)
  rules = getattr(model, "rules", rules)
  if model is not None and rules is not None:
    # The longest part: one trace tells all, if nothing is wrong. If it fails, the parts below say
    # what is wrong.
    with contextlib.suppress(Exception):
      state = train_state(model, found.lengths, found.trains)
      return Made(network, model.stored_rules, model, state, state.params)
  params, axes = found.attempt("shapes", _shapes, found, network) or (None, None)
  if params is not None and rules is not None and axes:
    rules = rules.with_logical_axes(axes)
  return Made(network, rules, model, None, params)


def network_of(config: gin_files.Config) -> Any:
  """Returns what a run trains: the workload that WORKLOAD names, else a network.

  It refuses a workload that lacks a method, and a network that is none. T5X's own model files have
  no NETWORK: there it is what MODEL is made of, which can be made before all that the optimizer
  needs is set.

  Args:
    config: the settings of the run.
  """
  if config.is_set("WORKLOAD"):
    return config.value("WORKLOAD")
  has_none = not config.is_set("NETWORK")
  network = config.argument_of("MODEL", "module") if has_none else config.value("NETWORK")
  if network is not None and not hasattr(network, "init"):
    raise ValueError(
      f"NETWORK={network!r} is not a flax module: name a model file, or bind it to a module, "
      "such as @network.Transformer()"
    )
  own = getattr(network, "config", None)
  if network is not None and hasattr(own, "image_size"):  # no run file names its workload
    from nm_sparsity_jax.trainer.workloads import vision

    return vision.Images(network, None)
  return network


def _rules(found: Findings) -> Rules | None:
  """Returns the rules; None where the settings are wrong, which is noted."""
  try:
    return found.config.value("RULES")
  except ValueError as e:
    found.whole = False
    asked, _, says_more = str(e).partition(" is not set")
    # A value that could not be read, or a file, may set it: that is said already.
    if not says_more or (found.config.complete and asked not in found.config.lost):
      found.note(e)
    return None


def _t5x_model(found: Findings) -> Any:
  config = found.config
  if config.local or config.program is None and not config.is_set("MODEL"):
    return None
  model = config.value("MODEL") if config.program is None else config.argument("model")
  if config.is_set("RULES") and not hasattr(model, "stored_rules"):
    if not any("MODEL" in error for error in found.errors):
      found.errors.append(
        f"MODEL is T5X's {type(model).__name__}, which takes no RULES: bind it to "
        "@t5x_adapter.SparseEncoderDecoderModel() or SparseDecoderOnlyModel(), or name the model "
        "file before the run file"
      )
    return None
  return model


def _shapes(found: Findings, network: Any) -> tuple[Any, Any] | None:
  if network is not None:
    return shapes(network, found.lengths)
  named = found.config.is_set("WORKLOAD") or found.config.is_set("NETWORK")  # then it failed
  if found.config.complete and not found.config.errors and not named:
    found.notes.append("no NETWORK is set, so there are no kernels to show: add a model file")
  return None


def shapes(network: Any, lengths: Mapping[str, int] | None = None) -> tuple[Any, Any]:
  """Returns the parameters of the dense network and their logical axes, as shapes.

  Args:
    network: a flax module of T5X's interface, or a workload.
    lengths: tokens of an example, by feature.

  Returns:
    The parameters; their logical axes, None where the network names none.
  """
  import jax

  if isinstance(network, workloads.Workload):
    found = jax.eval_shape(network.init, jax.random.PRNGKey(0))
    return found["params"], found.get("params_axes")
  network = _dense(network)
  keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
  init = functools.partial(network.init, enable_dropout=False)
  found = jax.eval_shape(lambda arrays: init(keys, **arrays), _arrays(network, lengths))
  return found["params"], found.get("params_axes")


def _dense(network: Any) -> Any:
  """Returns a network without rules of its own."""
  config: Any = getattr(network, "config", None)
  if getattr(config, "rules", None) is None:
    return network
  return network.clone(config=dataclasses.replace(config, rules=None))


def _arrays(network: Any, lengths: Mapping[str, int] | None) -> dict[str, Any]:
  """Returns the inputs that a network of T5X's interface requires, as shapes."""
  import jax

  wanted = inputs(network, lengths)
  return {name: jax.ShapeDtypeStruct(shape, "int32") for name, shape in wanted.items()}


def inputs(network: Any, lengths: Mapping[str, int] | None) -> dict[str, tuple[int, ...]]:
  """Returns the shapes of the inputs that a network of T5X's interface requires."""
  known = known_lengths(lengths)
  targets = (1, known["targets"])
  found: dict[str, tuple[int, ...]] = {
    "decoder_input_tokens": targets,
    "decoder_target_tokens": targets,
  }
  if "encoder_input_tokens" in inspect.signature(type(network).__call__).parameters:
    found["encoder_input_tokens"] = (1, known["inputs"])
  return found


def train_state(model: Any, lengths: Mapping[str, int] | None, trains: bool = True) -> Any:
  """Returns T5X's whole state, as shapes.

  Args:
    model: T5X's model.
    lengths: tokens of an example, by feature.
    trains: False leaves the optimizer out.
  """
  import jax
  import jax.numpy as jnp
  from flax.core import freeze
  from t5x import train_state as states

  optimizer = model.optimizer_def if trains else None
  wanted = inputs(model.module, lengths)
  types = dict.fromkeys(wanted, jnp.int32)

  def make(key):
    variables = freeze(model.get_initial_variables(key, wanted, types))
    if optimizer is None:
      return states.InferenceState.create(variables)
    return states.FlaxOptimTrainState.create(optimizer, variables)

  return jax.eval_shape(make, jax.random.PRNGKey(0))


def cost_of(network: Any, params: Any, lengths: Mapping[str, int] | None) -> flops.Cost:
  """Returns the dense forward FLOPs of one example of a network.

  Args:
    network: a flax module of T5X's interface, or a workload.
    params: its parameters, as shapes.
    lengths: tokens of an example, by feature; None = the settings do not say them.
  """
  if isinstance(network, workloads.Workload):
    return network.cost()
  module = _dense(network)
  apply = lambda params, arrays: module.apply({"params": params}, **arrays, enable_dropout=False)
  return flops.forward(apply, params, _arrays(module, lengths))
