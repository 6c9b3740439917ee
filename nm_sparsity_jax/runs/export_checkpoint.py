"""A checkpoint in a file or folder for other programs, written, read back and proven.

images  -> [export]  -> F.safetensors of timm's names
T5      -> [export]  -> a folder of Hugging Face's T5 -> [convert] -> OUT/checkpoint_0, for T5X
network -> [pack]    -> F.safetensors without the zeros

These files have an array for each layer: layers that a scan stacked are taken apart, and the rules
are those of the layers then.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from nm_sparsity_jax.core.files import refuse_existing
from nm_sparsity_jax.core.trees import flatten, nested
from nm_sparsity_jax.deploy import (
  huggingface,
  inference_tree,
  packed_file,
  safetensors_file,
  timm,
)
from nm_sparsity_jax.deploy.unstack_layers import apart, apart_all
from nm_sparsity_jax.runs import checkpoint, checkpoint_rules, verify_checkpoint
from nm_sparsity_jax.runs.verify_checkpoint import Proof
from nm_sparsity_jax.training.rules import Rules


def export(
  path: str | os.PathLike,
  out: str | os.PathLike,
  rules: checkpoint_rules.Given = None,
  axes: Mapping[str, Any] | None = None,
  feed_forward: str | None = None,
) -> Proof | None:
  """Writes the weights of a checkpoint in the names of another library, and proves them there.

      nms.runs.export("runs/final", "model.safetensors")  # images: timm's
      nms.runs.export("runs/final", "model")  # a T5: a folder of Hugging Face's

  Args:
    path: a checkpoint of a ViT, Swin V2, ResNet or T5 of this package, or of T5X's T5; n:m, if
      it is sparse.
    out: the file, F.safetensors, or the folder, which must not be there.
    rules: as in `verify`, for a checkpoint that holds none and is sparse.
    axes: as in `verify`.
    feed_forward: of a T5, `feed_forward_proj` of config.json, which weights do not tell; None = as
      noted by the local runner, `finalize` or `convert`. Where nothing is noted, it is 'gated-gelu'
      if the MLP has two input projections, else 'relu'.

  Returns:
    The proof of the file, read back; None for a dense checkpoint, which has nothing to prove.

  Raises:
    ValueError: it is of another network, or sparse and not n:m; or the file cannot be.
  """
  file = os.fspath(out)
  stored = checkpoint.read(path)
  shapes = {key: x.shape for key, x in flatten(checkpoint_rules.parameters(stored))}
  is_t5 = "token_embedder/embedding" in shapes
  _check_new(file, is_folder=is_t5)  # before the weights are read, which takes long
  is_sparse = stored.known_rules is not None or rules is not None
  if is_sparse:
    proof = verify_checkpoint.verify(path, rules, axes)
    if not proof.ok:
      raise ValueError(f"{stored.path} is not n:m: export what `nm-sparsity finalize` writes.")
    rules = _rules_of_layers(proof.rules, shapes)
  arrays = {key: np.asarray(x) for key, x in stored.variables().items()}
  if is_t5:
    noted = checkpoint.network_settings(stored.path)
    if feed_forward:
      noted = {"mlp_activations": huggingface.activations_of(feed_forward, "feed_forward")}
    config = dataclasses.replace(huggingface.config_of(shapes, stored.path), **noted)
    params = {key.removeprefix("params/"): x for key, x in arrays.items()}
    huggingface.write(file, params, config)
  else:
    timm.write(file, arrays)
  # Their tensors are (out, in), and the reader turns them: axis 1 there is axis 0 of the proof.
  return verify_checkpoint.verify(file, rules) if is_sparse else None


def pack(
  path: str | os.PathLike,
  out: str | os.PathLike,
  rules: checkpoint_rules.Given = None,
  axes: Mapping[str, Any] | None = None,
  dtype: str | None = None,
) -> inference_tree.Report:
  """Writes the weights of a checkpoint that are n:m without their zeros, and reads them back.

      print(nms.runs.pack("runs/final", "model.safetensors"))

  Args:
    path: a checkpoint of any network that is n:m, a folder of Hugging Face's T5, or a file of
      timm's names.
    out: the file, F.safetensors, which must not be there.
    rules: as in `verify`.
    axes: as in `verify`.
    dtype: of packed values: 'float32', 'bfloat16', 'float16' or 'int8', which rounds with one scale
      for each column. None: as stored. What is not packed keeps its dtype.

  Returns:
    Bytes of each kernel, before and after, and what was not packed, with the reason.

  Raises:
    ValueError: a kernel is not n:m, or the file is there.
  """
  file = os.fspath(out)
  _check_new(file)
  stored = checkpoint.read(path)
  stacked_rules = checkpoint_rules.rules_for(stored, rules, axes)
  variables = nested({key: np.asarray(x) for key, x in stored.variables().items()})
  params = dict(flatten(variables["params"]))
  shapes = {key: x.shape for key, x in params.items()}
  layers = apart_all(params)  # a kernel of a scan is one stack, which no layer multiplies by
  layer_rules = _rules_of_layers(stacked_rules, shapes)
  report = packed_file.write(file, {**variables, "params": nested(layers)}, layer_rules, dtype)
  packed_file.read(file)  # the reader checks every entry
  return report


def convert(path: str | os.PathLike, out: str | os.PathLike, scan_layers: bool = False) -> str:
  """Writes a folder of Hugging Face's T5 as a dense checkpoint that T5X restores.

      nms.runs.convert("t5-small", "start")  # 'start/checkpoint_0'

  All arrays are float32, as T5X's parameters are.

  Args:
    path: of the folder.
    out: a folder, which gets checkpoint_0; that must be new.
    scan_layers: stack the layers along axis 1, for a network with scan_layers=True.

  Returns:
    The path of the checkpoint.

  Raises:
    ValueError: the folder is refused by `deploy.huggingface.read`, or the output is there already.
  """
  config = dataclasses.replace(huggingface.config_in(path), scan_layers=scan_layers)
  found = huggingface.arrays_in(path, config)
  arrays = {f"target/{k}": np.asarray(x, np.float32) for k, x in found.items()}
  made, noted = os.path.join(out, "checkpoint_0"), checkpoint.network_settings(os.fspath(path))
  # T5X restores a step as well.
  checkpoint.write(made, arrays | {"state/step": np.asarray(np.int32(0))}, noted)
  return made


def _check_new(file: str, is_folder: bool = False) -> None:
  refuse_existing(file)
  if file.endswith(safetensors_file.SUFFIX) == is_folder:
    wanted = "a folder for a T5, which has config.json as well" if is_folder else "F.safetensors"
    raise ValueError(f"{file!r}: name {wanted}.")


def _rules_of_layers(rules: Rules, shapes: Mapping[str, tuple[int, ...]]) -> Rules:
  """Returns the rules of a network without a scan that mean the same.

  They are the same ones, but where a regex names a stack alone: then they name the layers. A kernel
  of a layer has two axes and contracts the first one, whatever the axis of its stack is.
  """
  shaped = {path: jax.ShapeDtypeStruct(shape, "float32") for path, shape in shapes.items()}
  layers = {path: list(apart(path, x)) for path, x in shaped.items()}
  matches = {path: hit for path in shapes if (hit := rules.match(path))}
  places, axes = rules.places, rules.axes
  # An axis of a stack counts the layers too, so it says nothing of a layer's kernel.
  if any(layers[path] != [path] for path in matches):
    assigned = rules.assign(nested(shaped)).sites
    axes = {re.escape(k): site.axis for k, site in assigned.items() if layers[k] == [k]}
  if any(rules.match(layer) != at for path, at in matches.items() for layer in layers[path]):
    places = {re.escape(x): rules.places[at] for path, at in matches.items() for x in layers[path]}
  return Rules(places, axes, rules.indivisible, rules.optional)
