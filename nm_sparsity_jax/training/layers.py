"""Flax linen layers that mask their own kernel.

    params, step, stored masks -> rules -> recipe -> W~ -> [layer] -> loss

A layer is the plain one of T5X or flax, and one field more: `rules`. It looks itself up by the path
of its kernel and knows its own contraction axis. Where a recipe owns the kernel, the layer reads

    nm_sparsity/<path>/step           int32 scalar, updates applied so far; scans broadcast it
    nm_sparsity/<path>/state_step,    of a stateful recipe: the step, recipe and renewals of its
      state_made, state_renewed       mask, by which one that is out of date is found out
    nm_sparsity_state/<path>/kernel   bool mask (True = kept) of a stateful recipe; nested and
                                      scanned as params

which `init` creates (steps as -1, "none given") and `with_step` fills in. Everywhere else it is
the plain layer, with no variable beside its parameters.

A deployed network is the plain one, `rules=None`, and its kernels may be packed (`deployed`). Such
a kernel lies in `params` where the array would, and the layer multiplies by `packed.nm_dot`.

The recipe sees the parameter in its stored dtype, before any cast to the compute dtype, so a
network of these layers equals its dense twin (`rules=None`) on `apply.sparsify(params, ...)`, bit
for bit.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import flax
import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax.linen import partitioning
from flax.typing import Dtype, Initializer
from jax import lax

from nm_sparsity_jax.core import masks
from nm_sparsity_jax.core.packed import NMPacked, nm_dot
from nm_sparsity_jax.core.schedules import as_step
from nm_sparsity_jax.core.trees import flatten, map_with_names
from nm_sparsity_jax.training.rules import Rules
from nm_sparsity_jax.training.sites import Site
from nm_sparsity_jax.training.stored import State, check_step

COLLECTION = "nm_sparsity"  # holds steps
STATE_COLLECTION = "nm_sparsity_state"  # holds the masks of stateful recipes

Variables = TypeVar("Variables", bound=Mapping[str, Any])


class DenseGeneral(nn.Module):
  """T5X's linear layer over any axes, without a bias: y = x . W~.

  With the contracted axes of lengths (c, ...) and `features` (f, ...), the kernel is stored 2-D,
  (prod c, prod f), and read as (c, ..., f, ...). Groups of m lie along the stored axis 0, the
  contracted one.

  Parameter tree: `params/kernel`, and `params_axes/kernel_axes` with its logical axis names.

  >>> layer = DenseGeneral(features=(2, 3), kernel_axes=("embed", "joined_kv"))
  >>> variables = layer.init(jax.random.key(0), jnp.ones((5, 4)))
  >>> variables["params"]["kernel"].shape, layer.apply(variables, jnp.ones((5, 4))).shape
  ((4, 6), (5, 2, 3))

  Attributes:
    features: output features, an int or several.
    axis: input axes to contract, an int or several.
    dtype: of the computation.
    kernel_init: initializer of the stored, 2-D kernel.
    kernel_axes: logical names of its two axes.
    param_dtype: of the stored kernel.
    split: store the kernel with all its axes, (c, ..., f, ...), as T5X does where it scans over
      layers. Initial values and groups are those of the 2-D kernel. Such a kernel is never packed.
    rules: what is sparse, and how; None = the plain layer.
  """

  features: Iterable[int] | int
  axis: Iterable[int] | int = -1
  dtype: Dtype = jnp.float32
  kernel_init: Initializer = nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal")
  kernel_axes: tuple[str, ...] = ()
  param_dtype: Dtype = jnp.float32
  split: bool = False
  rules: Rules | None = None

  @nn.compact
  def __call__(self, inputs: jax.Array) -> jax.Array:
    """Contracts `axis` of `inputs`; the features come last."""
    features = as_tuple(self.features)
    inputs = jnp.asarray(inputs, self.dtype)
    axes = tuple(a if a >= 0 else inputs.ndim + a for a in as_tuple(self.axis))
    if (y := packed_product(self, inputs, features, axes)) is not None:
      return y
    contracted = tuple(inputs.shape[a] for a in axes)
    flat, own = (math.prod(contracted), math.prod(features)), tuple(range(len(axes)))
    kernel = partitioning.param_with_axes(
      "kernel",
      # Drawn flat: fan-in is that of all contracted axes.
      lambda key, shape, dtype: self.kernel_init(key, flat, dtype).reshape(shape),
      (*contracted, *features) if self.split else flat,
      self.param_dtype,
      axes=self.kernel_axes,
    )
    kernel = jnp.asarray(effective_kernel(self, kernel, axis=own if self.split else 0), self.dtype)
    kernel = kernel.reshape(*contracted, *features)
    return lax.dot_general(inputs, kernel, ((axes, own), ((), ())))


class Dense(nn.Dense):
  """`flax.linen.Dense` with a kernel that can be sparse: y = x . W~ + b.

  x (..., in), kernel (in, features), bias (features,). Groups of m lie along axis 0 of the kernel.
  Attributes and parameter tree are flax's, and `rules`; None = the plain layer.
  """

  rules: Rules | None = None

  @nn.compact
  def __call__(self, inputs: jax.Array) -> jax.Array:
    """Returns y."""
    packed = packed_kernel(self)
    if packed is None:
      # Without flax's wrapper: `capture_intermediates` and interceptors would see two calls.
      return inspect.unwrap(nn.Dense.__call__)(self, inputs)
    shape = (self.features,)
    bias = self.param("bias", self.bias_init, shape, self.param_dtype) if self.use_bias else None
    stand_in = jnp.zeros((), packed.dtype)  # flax looks at its dtype
    x, _, bias = self.promote_dtype(inputs, stand_in, bias, dtype=self.dtype)
    y: Any = packed_product(self, x, shape)  # type: ignore[arg-type]
    return y if bias is None else y + bias.reshape((1,) * (y.ndim - 1) + (-1,))

  @nn.nowrap
  def param(self, name, init_fn, *init_args, **init_kwargs):
    """Returns flax's parameter, with the kernel made effective: its readers see W~."""
    value = super().param(name, init_fn, *init_args, **init_kwargs)
    return effective_kernel(self, value, axis=0) if name == "kernel" else value


class Conv(nn.Conv):
  """`flax.linen.Conv` with a kernel that can be sparse: y = x * W~ + b.

  x (batch, ..., in), kernel (..., in / feature_group_count, features), bias (features,). Groups of
  m lie along axis -2 of the kernel: input channels at one spatial offset, for one output.
  Attributes and parameter tree are flax's, and `rules`; None = the plain layer.
  """

  rules: Rules | None = None

  @nn.nowrap
  def param(self, name, init_fn, *init_args, **init_kwargs):
    """Returns flax's parameter, with the kernel made effective: its readers see W~."""
    value = super().param(name, init_fn, *init_args, **init_kwargs)
    return effective_kernel(self, value, axis=-2) if name == "kernel" else value


def with_step(variables: Variables, step: Any, state: State | None = None) -> Variables:
  """Returns `variables` with the step, and the stored mask, of every sparse layer.

      model.apply(with_step({**variables, "params": params}, step, state), x)

  Args:
    variables: what `model.init` returned, parameters exchanged or not (they are not looked at). The
      leaves of the collection `nm_sparsity` may be shapes, as of `jax.eval_shape(model.init, ...)`.
    step: the updates applied so far, `nms.step_count(opt_state)`.
    state: what `nms.init_state` or `nms.update_state` returned; its masks become the collection
      `nm_sparsity_state`. None keeps the masks that `variables` got by an earlier call; those of
      `init` stand for nothing, and a stateful recipe refuses them.

  Returns:
    A new mapping of the same type.
  """
  step = as_step(step)
  if not jax.tree_util.tree_leaves(variables.get(COLLECTION, {})):
    raise ValueError(
      f"with_step found no sparse layer: {sorted(variables)} hold no step under {COLLECTION!r}. "
      "Pass all that model.init returned. If init made no step, no rule names a layer of this "
      "model, or the layers got no rules=."
    )

  stamps = dict(flatten({key: state[key] for key in ("made", "renewed")})) if state else {}

  def fill(path, leaf):
    layer, _, name = path.rpartition("/")
    if name == "step":
      return jnp.broadcast_to(step, leaf.shape)
    if state:
      # The stamps of all layers of a scan are one number, as the stack is one parameter.
      key = "/".join(filter(None, (name.removeprefix("state_"), layer, "kernel")))
      stamp = state["step"] if name == "state_step" else stamps.get(key, -1)
      return jnp.broadcast_to(jnp.asarray(stamp, jnp.int32), leaf.shape)
    return jnp.full(leaf.shape, -1, jnp.int32) if isinstance(leaf, jax.ShapeDtypeStruct) else leaf

  new = {COLLECTION: map_with_names(fill, variables[COLLECTION])}
  if state:
    new[STATE_COLLECTION] = state["mask"]
  return flax.core.copy(variables, new)  # type: ignore


def effective_kernel(layer: nn.Module, w: jax.Array, axis: masks.Axis) -> jax.Array:
  """Returns what a layer multiplies by: W~ of its stored kernel, in the kernel's shape and dtype.

  Use it to write a layer of your own with a field `rules` and a parameter named 'kernel':

      kernel = self.param("kernel", init, (x.shape[-1], self.features))
      y = x @ nms.layers.effective_kernel(self, kernel, axis=0)

  Args:
    layer: it has a field `rules`, and is applied within the model that the rules speak of.
    w: the stored kernel.
    axis: the axis that the layer contracts, or adjacent axes that count as one.
  """
  rules: Rules | None = layer.rules  # type: ignore
  # No variable, no trace: a network without rules compiles to the program of the plain one.
  if rules is None:
    return w
  path = _path(layer)
  site = rules.site(path, w.shape, axis)
  if not isinstance(site, Site):
    if layer.has_variable(COLLECTION, "step"):
      raise ValueError(
        f"{path!r} was sparse when it was initialized, but no rule names it now. A layer finds its "
        "rule by its path from the module that is applied: apply the whole model, or give its part "
        "rules of its own."
      )
    return w
  # `init` runs dense: it gives no step, and only the shapes of what it computes matter.
  if layer.is_initializing():
    _create_variables(layer, site, w)
    return w
  step = layer.get_variable(COLLECTION, "step", -1)
  # numpy: under jit even a known value would be traced by jax.numpy.
  if not isinstance(step, jax.core.Tracer) and np.all(np.asarray(step) < 0):
    raise ValueError(
      f"{path!r} has the recipe {site.recipe.name}, which needs the step, and collection "
      f"{COLLECTION!r} has none here. Keep all that init returned and call "
      "model.apply(nms.layers.with_step(variables, step), ...); where a scan hides it: "
      f"nn.scan(..., variable_broadcast={COLLECTION!r}, variable_axes={{{STATE_COLLECTION!r}: 0}})."
    )
  if not site.recipe.stateful:
    return site.effective(w, step)
  stamps = (layer.get_variable(COLLECTION, name, jnp.int32(-1)) for name in _STAMPS)
  mask = layer.get_variable(STATE_COLLECTION, "kernel")
  return site.effective(w, check_step(site, step, *stamps), mask)


def packed_kernel(layer: nn.Module) -> NMPacked | None:
  """Returns the kernel of a layer that is applied to packed parameters; None where it is an array.

  Use it in a layer of your own, before `self.param`, which takes arrays alone:

      if (packed := nms.layers.packed_kernel(self)) is not None:
        return nms.packed.nm_dot(x, packed)

  Args:
    layer: its kernel is `params/kernel`.
  """
  if not layer.has_variable("params", "kernel"):
    return None
  found = layer.get_variable("params", "kernel")
  return found if isinstance(found, NMPacked) else None


def packed_product(
  layer: nn.Module, inputs: jax.Array, features: Sequence[int], axes: Sequence[int] = (-1,)
) -> jax.Array | None:
  """Returns `inputs` times the packed kernel of a layer; None where the kernel is an array.

  Args:
    layer: as in `packed_kernel`.
    inputs: in the dtype of the computation.
    features: (f, ...), which come last in the result.
    axes: of `inputs` to contract, in the order of the kernel.

  Returns:
    [..., f, ...] in the dtype of `inputs`.
  """
  packed = packed_kernel(layer)
  if packed is None:
    return None
  x = jnp.moveaxis(inputs, axes, range(-len(axes), 0))
  lead, depth = x.shape[: -len(axes)], math.prod(x.shape[-len(axes) :])
  if packed.shape != (depth, math.prod(features)) or jnp.ndim(packed.values) != 2:
    raise ValueError(
      f"{_path(layer)!r}: the packed kernel is {packed.shape}, and the layer takes "
      f"{(depth, math.prod(features))}. The tree is of another network, or of one that scans: "
      "nms.inference_tree.unstacked makes the same network without a scan."
    )
  return nm_dot(x.reshape(*lead, depth), packed).reshape(*lead, *features)


def _path(layer: nn.Module) -> str:
  return "/".join((*layer.path, "kernel"))


_STAMPS = ("state_step", "state_made", "state_renewed")  # what `stored.check_step` compares


def _create_variables(layer: nn.Module, site: Site, w: jax.Array) -> None:
  """Creates the steps as -1, "none given", and the mask as `stored.init_state` starts it."""
  is_stateful = site.recipe.stateful
  if layer.is_mutable_collection(COLLECTION):
    for name in ("step", *(_STAMPS if is_stateful else ())):
      layer.variable(COLLECTION, name, lambda: jnp.int32(-1))
  if is_stateful and layer.is_mutable_collection(STATE_COLLECTION):
    first = lambda: site.recipe.first_state(site.groups, w)["mask"]
    layer.variable(STATE_COLLECTION, "kernel", first)


def as_tuple(x: Iterable[int] | int) -> tuple[int, ...]:
  """Returns one axis or several as a tuple."""
  return tuple(x) if isinstance(x, Iterable) else (x,)
