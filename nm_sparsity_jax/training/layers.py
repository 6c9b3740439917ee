"""Flax linen layers that mask their own kernel.

    params, step, stored masks -> rules -> recipe -> W~ -> [layer] -> loss

A layer is the plain one of T5X or flax, and one field more: `rules`. It looks itself up by the path
of its kernel and knows its own contraction axis. Where a recipe owns the kernel, the layer reads

    nm_sparsity/<path>/step           int32 scalar, updates applied so far; scans broadcast it
    nm_sparsity/<path>/state          int32[3], of a stateful recipe: the step, recipe and renewals
                                      of its mask, by which one that is out of date is found out
    nm_sparsity/<path>/scale          float32 scalar, in place of a mask where the recipe is s_ste
    nm_sparsity_state/<path>/kernel   bool mask (True = kept) of a stateful recipe; nested and
                                      scanned as params

which `init` creates (steps as NO_STEP) and `with_step` fills in. Everywhere else it is
the plain layer, with no variable beside its parameters.

A deployed network is the plain one, `rules=None`, and its kernels may be packed (`deployed`). Such
a kernel lies in `params` where the array would, and the layer multiplies by `packed.nm_dot`.

The recipe sees the parameter in its stored dtype, before any cast to the compute dtype, so a
network of these layers equals its dense twin (`rules=None`) on `apply.sparsify(params, ...)`, bit
for bit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import flax
import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax.linen import dtypes, partitioning
from flax.typing import Dtype, Initializer
from jax import lax

from nm_sparsity_jax.core import masks
from nm_sparsity_jax.core.packed import NMPacked, nm_dot
from nm_sparsity_jax.core.schedules import NO_STEP, as_step
from nm_sparsity_jax.core.trees import flatten, map_with_names
from nm_sparsity_jax.training.rules import Rules
from nm_sparsity_jax.training.sites import Site
from nm_sparsity_jax.training.stored import State, check_step

COLLECTION = "nm_sparsity"  # holds steps
STATE_COLLECTION = "nm_sparsity_state"  # holds the masks of stateful recipes


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

  features: Sequence[int] | int
  axis: Sequence[int] | int = -1
  dtype: Dtype = jnp.float32
  kernel_init: Initializer = nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal")
  kernel_axes: tuple[str, ...] = ()
  param_dtype: Dtype = jnp.float32
  split: bool = False
  rules: Rules | None = None

  @nn.compact
  def __call__(self, inputs: jax.Array) -> jax.Array:
    """Contracts `axis` of `inputs`; the features come last."""
    features = np.atleast_1d(self.features).tolist()
    inputs = jnp.asarray(inputs, self.dtype)
    axes = tuple(a % inputs.ndim for a in np.atleast_1d(self.axis).tolist())
    if (packed := packed_kernel(self)) is not None:
      x = jnp.moveaxis(inputs, axes, range(-len(axes), 0))
      lead = x.shape[: -len(axes)]
      return nm_dot(x.reshape(*lead, -1), packed).reshape(*lead, *features)
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


def _promote_dtype(x, kernel, *rest, dtype):
  if not isinstance(kernel, NMPacked):
    return dtypes.promote_dtype(x, kernel, *rest, dtype=dtype)
  # flax makes an array of what it promotes, and looks at its dtype.
  x, _, *rest = dtypes.promote_dtype(x, jnp.zeros((), kernel.dtype), *rest, dtype=dtype)
  return x, kernel, *rest


def _dot_general(x, kernel, *args, **kwargs):
  packed = isinstance(kernel, NMPacked)
  return nm_dot(x, kernel) if packed else lax.dot_general(x, kernel, *args, **kwargs)


class _Masked:
  """A layer of flax that reads its kernel as W~, by the axis that it contracts."""

  _contracted = 0

  def param(self, name, init_fn, *init_args, **init_kwargs):
    """Returns flax's parameter, with the kernel made effective, or as it is packed."""
    if name == "kernel" and (packed := packed_kernel(self)) is not None:  # type: ignore
      return packed
    value = super().param(name, init_fn, *init_args, **init_kwargs)  # type: ignore
    return effective_kernel(self, value, self._contracted) if name == "kernel" else value


class Dense(_Masked, nn.Dense):
  """`flax.linen.Dense` with a kernel that can be sparse: y = x . W~ + b.

  x (..., in), kernel (in, features), bias (features,). Groups of m lie along axis 0 of the kernel.
  Attributes and parameter tree are flax's, and `rules`; None = the plain layer.
  """

  dot_general: Any = _dot_general
  promote_dtype: Any = _promote_dtype
  rules: Rules | None = None


class Conv(_Masked, nn.Conv):
  """`flax.linen.Conv` with a kernel that can be sparse: y = x * W~ + b.

  x (batch, ..., in), kernel (..., in / feature_group_count, features), bias (features,). Groups of
  m lie along axis -2 of the kernel: input channels at one spatial offset, for one output.
  Attributes and parameter tree are flax's, and `rules`; None = the plain layer.
  """

  rules: Rules | None = None
  _contracted = -2


def with_step(
  variables: Mapping[str, Any], step: Any, state: State | None = None, rules: Rules | None = None
) -> Any:
  """Returns `variables` with the step, and the stored mask, of every sparse layer.

      model.apply(with_step({**variables, "params": params}, step, state), x)

  Args:
    variables: what `model.init` returned, parameters exchanged or not (they are not looked at). It
      has the collection `nm_sparsity` where a rule names a layer of the model. The leaves of the
      collection `nm_sparsity` may be shapes, as of `jax.eval_shape(model.init, ...)`.
    step: the updates applied so far, `nms.step_count(opt_state)`.
    state: what `nms.init_state` or `nms.update_state` returned; its masks become the collection
      `nm_sparsity_state`. None keeps the masks that `variables` got by an earlier call; those of
      `init` stand for nothing, and a stateful recipe refuses them.
    rules: those of the layers. A kernel that they name and whose layer is a plain one, which would
      train dense, is then an error.

  Returns:
    A new mapping of the same type.
  """
  step = as_step(step)
  if rules is not None:
    _check_layers(variables, rules)
  # Stamps and scale of all layers of a scan are one, as the stack is one parameter.
  stored = dict(flatten(state or {}))

  def fill(path, leaf):
    layer, _, name = path.rpartition("/")
    kernel = f"{layer}/kernel".lstrip("/")
    if name == "step":
      value = step
    elif not state:
      value = NO_STEP if isinstance(leaf, jax.ShapeDtypeStruct) else leaf
    elif name == "scale":
      value = stored.get(f"scale/{kernel}", NO_STEP)
    else:
      stamps = [stored.get(f"{key}/{kernel}", NO_STEP) for key in ("made", "renewed")]
      value = jnp.stack([state["step"], *stamps])
    return jnp.broadcast_to(value, leaf.shape)

  # Rules that are all dense make no layer sparse, and so no collection.
  layers = variables.get(COLLECTION, {}) if rules else variables[COLLECTION]
  new = {COLLECTION: map_with_names(fill, layers)}
  if state and "mask" in state:
    new[STATE_COLLECTION] = state["mask"]
  return flax.core.copy(variables, new)  # type: ignore


def _check_layers(variables: Mapping[str, Any], rules: Rules) -> None:
  """Refuses a plain layer whose kernel the rules name: it would train dense and be pruned last."""
  masked = {path.rpartition("/")[0] for path, _ in flatten(variables.get(COLLECTION, {}))}
  named = [path for path, _ in flatten(variables["params"]) if rules.sparse_recipe(path)]
  plain = [path for path in named if path.rpartition("/")[0] not in masked]
  if plain and rules.indivisible != "skip":  # which leaves some of them dense on purpose
    raise ValueError(
      f"the rules name {', '.join(plain)}, whose layers mask nothing and would train dense: build "
      "them from nms.layers, or name them 'dense' first."
    )


def effective_kernel(layer: Any, w: jax.Array, axis: masks.Axis) -> jax.Array:
  """Returns what a layer multiplies by: W~ of its stored kernel, in the kernel's shape and dtype.

  Use it to write a layer of your own with a field `rules` and a parameter named 'kernel':

      kernel = self.param("kernel", init, (x.shape[-1], self.features))
      y = x @ nms.layers.effective_kernel(self, kernel, axis=0)

  Args:
    layer: it has a field `rules`, and is applied within the model that the rules speak of.
    w: the stored kernel.
    axis: the axis that the layer contracts, or adjacent axes that count as one.
  """
  rules: Rules | None = layer.rules
  # No variable, no trace: a network without rules compiles to the program of the plain one.
  if rules is None:
    return w
  path = "/".join((*layer.path, "kernel"))
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
  step = layer.get_variable(COLLECTION, "step", NO_STEP)
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
  last, made, renewed = layer.get_variable(COLLECTION, "state", [NO_STEP] * 3)
  home = (COLLECTION, "scale") if site.recipe.keeps == "scale" else (STATE_COLLECTION, "kernel")
  at = check_step(site, step, last, made, renewed)
  return site.effective(w, at, layer.get_variable(*home))


def packed_kernel(layer: nn.Module) -> NMPacked | None:
  """Returns the kernel of a layer that is applied to packed parameters; None where it is an array.

  Use it in a layer of your own, before `self.param`, which takes arrays alone:

      if (packed := nms.layers.packed_kernel(self)) is not None:
        return nms.packed.nm_dot(x, packed)

  Args:
    layer: its kernel is `params/kernel`.
  """
  found = layer.get_variable("params", "kernel")
  return found if isinstance(found, NMPacked) else None


def _create_variables(layer: nn.Module, site: Site, w: jax.Array) -> None:
  """Creates step, stamps and scale as NO_STEP, and the mask as `stored.init_state` starts it."""
  is_stateful, has_scale = site.recipe.stateful, site.recipe.keeps == "scale"
  if layer.is_mutable_collection(COLLECTION):
    layer.variable(COLLECTION, "step", lambda: NO_STEP)
    if is_stateful:
      layer.variable(COLLECTION, "state", lambda: jnp.full(3, NO_STEP))
    if has_scale:
      layer.variable(COLLECTION, "scale", lambda: jnp.float32(NO_STEP))
  if is_stateful and not has_scale and layer.is_mutable_collection(STATE_COLLECTION):
    first = lambda: site.recipe.first_state(site.groups, w)["mask"]
    layer.variable(STATE_COLLECTION, "kernel", first)
