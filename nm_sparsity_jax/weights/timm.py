"""timm's names for the trees of `models.vit`, `models.swin` and `models.resnet`, there and back.

    {"params", "batch_stats"} <-> [to_timm, from_timm] <-> timm's name -> numpy array
                                                       <-> [read, write] <-> F.safetensors
    F.safetensors -> [hold] -> our key -> shape, dtype -> array, when it is asked for

Nothing is computed, so weights come back bit for bit. Kernels are (in, out) and HWIO here, and
(out, in) and (out, in, h, w) there: groups of m lie along axis 0 and -2 here, and along 1 there.
q, k and v are one tensor there. Blocks that a scan stacked are single ones there.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nm_sparsity_jax.trees import flatten, nested
from nm_sparsity_jax.weights import safetensors_file
from nm_sparsity_jax.weights.timm_names import Source, family_of, keys_of, sources

# What timm may store beside parameters, and what it follows from. None of it is read; of these,
# `to_timm` writes `num_batches_tracked`, as 0.
DERIVED = {
  "relative_coords_table": "the window",
  "relative_position_index": "the window",
  "attn_mask": "the window and the image size",
  "k_bias": "nothing: it is 0",
  "num_batches_tracked": "the steps of a run: it counts them, and no sum depends on it",
}
_HEADS = tuple(f"{head}.{x}" for head in ("head", "head.fc", "fc") for x in ("bias", "weight"))

Shapes = Mapping[str, tuple[int, ...]]


# --- trees ------------------------------------------------------------------------------------


def to_timm(variables: Mapping[str, Any]) -> dict[str, np.ndarray]:
  """Returns timm's state dict of a network's variables: name -> array, zeros of pruning included.

      model.load_state_dict({k: torch.tensor(x) for k, x in to_timm(variables).items()})

  Args:
    variables: 'params', and 'batch_stats' of a ResNet; other collections hold no weights.

  Raises:
    ValueError: they are not of a ViT, Swin V2 or ResNet of this package.
  """
  arrays = {key: np.asarray(x) for key, x in _flat(variables).items()}
  table = _table(arrays)
  found: dict[str, dict[int, np.ndarray]] = {}
  for key, x in arrays.items():
    for name, first, rows in _given(table, key, x):
      found.setdefault(name, {})[first] = rows
  whole = lambda parts: np.concatenate([parts[i] for i in sorted(parts)])
  made = {n: whole(parts) if len(parts) > 1 else parts[0] for n, parts in found.items()}
  return made | dict.fromkeys(_counted(made), np.zeros((), np.int64))


def _table(arrays: Mapping[str, Any]) -> dict[str, Source]:
  """Returns single key -> where its array lies, of a whole network; arrays may be shapes."""
  flat = _single(arrays)
  what = f"the tree of {len(flat)} arrays"
  table = sources(flat)
  names = {source.name for source in table.values()}
  if strange := set(flat) ^ set(keys_of(names, what)):
    raise ValueError(
      f"{what} is not of a {family_of(names, what)} of this package: of {sorted(strange)[0]!r} it "
      "has one too many or too few. Give all that init returned."
    )
  return table


def _given(
  table: Mapping[str, Source], key: str, array: np.ndarray
) -> Iterator[tuple[str, int, np.ndarray]]:
  """Yields timm's names, the row that comes first there, and rows, which are views of our array."""
  for i, part in enumerate(_parts(key, array.shape)):
    source = table[part]
    rows = source.give(array[i] if key.startswith(_STACK) else array)
    yield source.name, source.part * len(rows), rows


def _counted(names: Iterable[str]) -> list[str]:
  """Returns the names of counters that stand beside averages of a batch norm."""
  ends = "running_var", "num_batches_tracked"
  return [name.replace(*ends) for name in names if name.endswith(ends[0])]


def from_timm(
  tensors: Mapping[str, Any], like: Mapping[str, Any] | None = None, config: Any = None
) -> dict[str, Any]:
  """Returns variables, of numpy arrays, of timm's state dict.

      variables = from_timm(tensors, jax.eval_shape(network.init, key, images), network.config)

  Args:
    tensors: timm's name -> array.
    like: the network's variables, or their shapes; None = whatever network the names are of.
    config: of the network; a Swin V2 of another window or image size is then refused, where the
      tensors tell. Its parameters do not.

  Returns:
    'params', and 'batch_stats' of a ResNet; with `like`, stacked and in dtypes as there.

  Raises:
    ValueError: a name is unknown or missing, or a tensor is of another size, classes or image size.
  """
  arrays = {name: np.asarray(x) for name, x in tensors.items()}
  told = {name: (x.shape, str(x.dtype)) for name, x in arrays.items()}
  return _variables(_held(told, arrays.__getitem__, "the state dict", like, config), like)


def _layout(
  shapes: Shapes, what: str, like: Mapping[str, Any] | None = None, config: Any = None
) -> dict[str, Source]:
  """Returns our key -> where its array lies, where names and shapes are those of such a network."""
  wanted = None if like is None else _single(_flat(like))
  keys = keys_of(shapes, what) if wanted is None else tuple(wanted)
  table = sources(keys)
  names = {source.name for source in table.values()}
  if wanted is not None and (own := family_of(names, "the network")) != (
    theirs := family_of(shapes, what)
  ):
    raise ValueError(f"{what} is of a {theirs}, and the network is a {own}.")
  _check_names(names, shapes, what, is_ours=wanted is not None)
  for key, source in table.items():
    shape = shapes[source.name]
    if source.kernel and len(shape) not in (2, 4) or source.parts > 1 and shape[0] % source.parts:
      raise ValueError(f"{what}: {source.name!r} has shape {shape}, which no such network has.")
    if wanted is not None:
      _check_shape(source, shape, tuple(wanted[key].shape), what)
  if config is not None:
    _check_window(shapes, config, what)
  return table


def _check_names(names: Collection[str], found: Collection[str], what: str, is_ours: bool) -> None:
  """Refuses names that are missing, and those that are neither wanted nor derived."""
  whose = "that the network takes" if is_ours else "of such a network"
  if missing := sorted(set(names) - set(found)):
    raise ValueError(
      f"{what} lacks {len(missing)} of the {len(names)} names {whose}, such as {missing[0]!r}: it "
      "is of another network, or of another size."
    )
  modules = {name.rpartition(".")[0] for name in names}
  modules |= {module.rpartition(".")[0] for module in modules}
  is_derived = lambda name: (
    name.rpartition(".")[2] in DERIVED and name.rpartition(".")[0] in modules
  )
  if strange := sorted(name for name in set(found) - set(names) if not is_derived(name)):
    raise ValueError(
      f"{what} has {len(strange)} name{'s' * (len(strange) > 1)} beside those {whose}, such as "
      f"{strange[0]!r}: it is of another network, or of another size."
    )


def _check_shape(
  source: Source, shape: tuple[int, ...], ours: tuple[int, ...], what: str
) -> None:  # fmt: skip
  if source.shape(shape) == ours:
    return
  if source.name in _HEADS and source.shape(shape)[:-1] == ours[:-1]:
    raise ValueError(
      f"{what} has {shape[0]} classes, and the network {ours[-1]}: give the network {shape[0]} "
      "(CLASSES). Images of fewer classes may train it."
    )
  if source.name == "pos_embed" and shape[-1] == ours[-1]:
    raise ValueError(
      f"{what} is of images of another size: it has positions of {shape[1]} tokens, and the "
      f"network of {ours[1]}. Set image_size, patch and class_token of its config."
    )
  raise ValueError(
    f"{what} is of another size: {source.name!r} has shape {shape}, which is {source.shape(shape)} "
    f"here, and the network's is {ours}."
  )


def _check_window(shapes: Shapes, config: Any, what: str) -> None:
  """Refuses another window or image size, where derived tensors tell of one."""
  window = getattr(config, "window", None)
  if window is None:
    return
  for name, shape in shapes.items():
    stage = re.match(r"layers\.(\d+)\.blocks\.\d+\.(?:attn\.)?(\w+)$", name)
    if stage is None or len(shape) < 3 or stage[2] not in ("relative_coords_table", "attn_mask"):
      continue
    side = config.sides[int(stage[1])]
    mine = min(window, side)
    if stage[2] == "relative_coords_table" and shape[1] != 2 * mine - 1:
      raise ValueError(
        f"{what} is of windows of {(shape[1] + 1) // 2}, and the network's are of {mine} (stage "
        f"{stage[1]}): set window of its config."
      )
    if stage[2] == "attn_mask" and shape[0] != (side // mine) ** 2:
      raise ValueError(
        f"{what} is of images of another size: stage {stage[1]} has {shape[0]} windows, and "
        f"{(side // mine) ** 2} in the network. Set image_size of its config."
      )


def _flat(variables: Mapping[str, Any]) -> dict[str, Any]:
  """Returns 'params/...' and 'batch_stats/...' -> leaf."""
  kept = {key: variables[key] for key in ("params", "batch_stats") if key in variables}
  return dict(flatten(kept))


_STACK = "params/blocks/"


def _single(flat: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the leaves with a stack of blocks taken apart; leaves may be shapes."""
  found: dict[str, Any] = {}
  for key, x in flat.items():
    if not key.startswith(_STACK):
      found[key] = x
      continue
    for i in range(x.shape[0]):
      part = x[i] if isinstance(x, np.ndarray) else jax.ShapeDtypeStruct(x.shape[1:], x.dtype)
      found[f"params/blocks_{i}/{key.removeprefix(_STACK)}"] = part
  return found


def _parts(key: str, shape: tuple[int, ...]) -> list[str]:
  """Returns the keys of the single arrays that a key of the network holds, one for each block."""
  if not key.startswith(_STACK):
    return [key]
  path = key.removeprefix(_STACK)
  return [f"params/blocks_{i}/{path}" for i in range(shape[0])]


# --- what is held -----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Held:
  """The arrays of a network that tensors of timm's names hold.

  Attributes:
    leaves: our key, such as 'params/head/kernel' -> shape, dtype as stored.
    array: key -> its values, in our layout, read now.
  """

  leaves: Mapping[str, tuple[tuple[int, ...], str]]
  array: Callable[[str], np.ndarray]


def _held(
  told: Mapping[str, tuple[tuple[int, ...], str]],
  tensor: Callable[[str], np.ndarray],
  what: str,
  like: Mapping[str, Any] | None,
  config: Any,
) -> Held:
  """Holds tensors against a network, and returns its arrays; only biases of k are read.

  Args:
    told: timm's name -> shape, dtype.
    tensor: timm's name -> its values.
    what: says in an error what was looked at, such as the path of a file.
    like: as in `from_timm`.
    config: as in `from_timm`.
  """
  table = _layout({name: shape for name, (shape, _) in told.items()}, what, like, config)
  wanted = None if like is None else _flat(like)
  parts_of = lambda key: _parts(key, () if wanted is None else tuple(wanted[key].shape))
  leaves: dict[str, tuple[tuple[int, ...], str]] = {}
  for key in table if wanted is None else wanted:
    parts = [table[part] for part in parts_of(key)]
    for part in parts:
      _check_dtype(key, told[part.name][1], wanted and wanted[key].dtype, what)
    shape, dtype = told[parts[0].name]
    stack = (len(parts),) if key.startswith(_STACK) else ()
    leaves[key] = (*stack, *parts[0].shape(shape)), dtype
  for name in told:
    if name.endswith(".k_bias") and np.any(tensor(name)):
      raise ValueError(f"{what}: {name!r} is not 0, and k has no bias in this network.")

  def array(key: str) -> np.ndarray:
    found = [table[part].take(tensor(table[part].name)) for part in parts_of(key)]
    return np.stack(found) if key.startswith(_STACK) else np.array(found[0], order="C")

  return Held(leaves, array)


def _check_dtype(key: str, dtype: str, wanted: Any, what: str) -> None:
  """Refuses what is not floating, and what the network's dtype cannot hold."""
  try:
    found = jnp.dtype(dtype)
  except TypeError:  # one of the file's that numpy does not have
    found = None
  if found is None or not jnp.issubdtype(found, jnp.floating):
    raise ValueError(f"{what}: {key!r} is {dtype}, and weights are floating.")
  if wanted is not None and found.itemsize > np.dtype(wanted).itemsize:
    raise ValueError(f"{what}: {key!r} is {dtype}, and the network takes {wanted}.")


def _variables(held: Held, like: Mapping[str, Any] | None) -> dict[str, Any]:
  """Returns a nested tree of all arrays, in dtypes as in `like`."""
  wanted = {} if like is None else _flat(like)
  made = {key: held.array(key) for key in held.leaves}
  return nested({k: x.astype(wanted[k].dtype) if k in wanted else x for k, x in made.items()})


# --- files ------------------------------------------------------------------------------------


def read(
  path: str | os.PathLike, like: Mapping[str, Any] | None = None, config: Any = None
) -> dict[str, Any]:
  """Returns the variables in a safetensors file of timm's names.

      variables = read("model.safetensors", jax.eval_shape(network.init, key, images))

  Args:
    path: of the file.
    like: as in `from_timm`.
    config: as in `from_timm`.

  Raises:
    ValueError: it is pickled, damaged, or what `from_timm` refuses.
  """
  return _variables(hold(path, like, config), like)


def hold(
  path: str | os.PathLike, like: Mapping[str, Any] | None = None, config: Any = None
) -> Held:
  """Reads the header of a safetensors file of timm's names; arrays are read when you ask for them.

      hold("model.safetensors").array("params/head/kernel")

  Args:
    path: of the file.
    like: as in `from_timm`.
    config: as in `from_timm`.

  Raises:
    ValueError: as in `read`.
  """
  opened = safetensors_file.Opened(path)
  told = {name: (shape, opened.dtypes[name]) for name, shape in opened.shapes.items()}
  return _held(told, opened.array, repr(opened.path), like, config)


def write(path: str | os.PathLike, variables: Mapping[str, Any]) -> None:
  """Writes a new safetensors file of timm's names.

      write("model.safetensors", variables)

  Args:
    path: of the file, which must not be there.
    variables: as in `to_timm`.
  """
  arrays = {key: np.asarray(x) for key, x in _flat(variables).items()}
  leaves = {key: (x.shape, str(x.dtype)) for key, x in arrays.items()}
  write_each(path, leaves, arrays.__getitem__)


def write_each(
  path: str | os.PathLike,
  leaves: Mapping[str, tuple[tuple[int, ...], str]],
  array: Callable[[str], np.ndarray],
  seen: Callable[[str, int, np.ndarray], Any] = lambda name, first, rows: None,
) -> None:
  """Writes a new file, with one array of ours in memory at a time.

  Args:
    path: as in `write`.
    leaves: key such as 'params/head/kernel' -> shape, numpy's name of the dtype.
    array: key -> our array; each is asked for once.
    seen: is told timm's name, the row that comes first, and rows of that tensor.
  """
  # Arrays of the right shapes that take no memory.
  shapes = {
    key: np.broadcast_to(np.zeros((), safetensors_file.dtype_of(dtype)), shape)
    for key, (shape, dtype) in leaves.items()
  }
  table = _table(shapes)
  header: dict[str, tuple[str, tuple[int, ...]]] = {}
  for key, x in shapes.items():
    for name, first, rows in _given(table, key, x):
      length = max(header[name][1][0] if name in header else 0, first + len(rows))
      header[name] = str(x.dtype), (length, *rows.shape[1:])
  counted = _counted(header)
  header |= dict.fromkeys(counted, ("int64", ()))
  with safetensors_file.Writer(path, safetensors_file.in_order(header)) as writer:
    for key in leaves:
      for name, first, rows in _given(table, key, array(key)):
        seen(name, first, rows)
        writer.add(name, rows, first)
      del rows  # or it would keep this array while the next one is read
    for name in counted:
      writer.add(name, np.zeros((), np.int64))
