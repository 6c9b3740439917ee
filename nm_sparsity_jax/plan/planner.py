"""What a run would do, found out without running it: gin files in, a report of plain values out.

    Config -> network, rules, T5X's model -> shapes (jax.eval_shape) -> kernels, schedule, loss,
    FLOPs, restore, errors -> dict

Nothing of the model's size is allocated. Each part notes its own errors and leaves the others be.
"""

# T5X and SeqIO are imported where a run needs them.
# pyright: reportMissingImports=false, reportMissingModuleSource=false

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nm_sparsity_jax import gin_files, roles
from nm_sparsity_jax.configure import SettingsError
from nm_sparsity_jax.plan import restore
from nm_sparsity_jax.runs import checkpoint, files, folders, settings

_LENGTHS = {"inputs": 512, "targets": 128}  # where TASK_FEATURE_LENGTHS does not tell
# Arguments of T5X's programs that say what data they read.
_DATASETS = ("train_dataset_cfg", "train_eval_dataset_cfg", "infer_eval_dataset_cfg", "dataset_cfg")


def plan(config: gin_files.Config, checkpoint: str | None = None) -> dict[str, Any]:
  """The report; see `Planner`."""
  with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # T5X warns when it is imported
    return Planner(config, checkpoint).report()


class Planner:
  """Collects one report.

  Args:
    config: what was read.
    checkpoint: instead of the one that the run would restore.
  """

  def __init__(self, config: gin_files.Config, checkpoint: str | None = None):
    self.config = config
    self.checkpoint = checkpoint
    self.errors = list(config.errors)
    self.warnings = list(config.warnings)
    self.notes: list[str] = []
    self.lengths = {**_LENGTHS, **(config.get("TASK_FEATURE_LENGTHS") or {})}
    self.batch_size = config.get("BATCH_SIZE")
    self.whole = True  # whether the rules are all that the settings ask for

  def report(self) -> dict[str, Any]:
    """Everything, as values that JSON knows."""
    network = self._try("NETWORK", self._network)
    rules = self._try("RULES", self._rules)
    model = self._try("MODEL", self._model) if rules is not None or self.whole else None
    if model is not None:
      network = getattr(model, "module", network)
      rules = getattr(model, "rules", rules)
    try:  # the longest part: one trace tells it all, if nothing is wrong
      state = self._train_state(model) if model is not None and rules is not None else None
    except Exception:  # what it is, the parts below tell
      state = None
    if model is not None and state is not None:
      rules, params, axes = model.stored_rules, state.params, None
    else:
      params, axes = self._try("shapes", lambda: self._shapes(network)) or (None, None)
    parts: dict[str, Any] = {"program": self.config.program}
    assignment = None
    if params is not None and rules is not None:
      before = len(self.errors)
      if axes:
        rules = rules.with_logical_axes(axes)
      assignment = self._assign(rules, params)
      parts["kernels"] = _kernels(assignment)
      if model is not None and state is None and len(self.errors) == before:
        state = self._try("train state", lambda: self._train_state(model))
      if state is not None and self.config.program in (None, "train"):
        self._try("optimizer", lambda: self._check_optimizer(state))
    elif params is not None and not self.config.is_set("RULES") and self.config.complete:
      self.notes.append("there are no rules: this run is dense, and knows nothing of sparsity")
    if not self.whole:
      self.notes.append("places without rules, because of the errors, are shown as dense; no costs")
    if rules is not None and rules.places:
      parts["schedule"] = self._schedule(rules, assignment)
      parts["loss"] = self._try("loss", lambda: self._loss(rules, model))
    if assignment is not None and params is not None and self.whole:
      parts["cost"] = self._try("cost", lambda: self._cost(network, assignment, params))
    self._settings(model, rules, network)
    resumed = self._try("MODEL_DIR", self._resumed)
    # The local runner opens none where it resumes.
    asks = resumed is None or not self.config.local
    initial = self._try("checkpoint", self._stored) if asks else None
    if initial is not None:
      self._restore_errors(initial)
    stored = initial if resumed is None else resumed
    if stored is not None and not self._refused(stored, rules, resumed is not None):
      parts["restore"] = self._restore(stored, state, params, resumed is not None)
    parts |= {"errors": _once(self.errors), "warnings": _once(self.warnings), "notes": self.notes}
    return {"ok": not parts["errors"], **{k: v for k, v in parts.items() if v is not None}}

  def _try(self, what: str, function: Callable[[], Any]) -> Any:
    """function(); None where it fails, and then the error is noted, once."""
    try:
      return function()
    except (gin_files.Unset, KeyError) as e:
      if isinstance(e, KeyError) and what not in ("NETWORK", "RULES", "MODEL"):
        self.errors.append(f"{what}: {type(e).__name__}: {gin_files.message(e)}")
    except Exception as e:
      self._note(e)
    return None

  def _rules(self):
    """The rules; with errors in the settings, those that can be made, for what else there is."""
    try:
      return self.config.value("RULES")
    except SettingsError as e:
      self._note(e)
      self.whole = False
      if e.rules is not None:
        self.config.put("RULES", e.rules)
      return e.rules

  def _note(self, error: Exception) -> None:
    """Adds an error, in the words of the command line."""
    if not isinstance(error, SettingsError):
      self.errors.append(gin_files.message(error))
      return
    if self.config.complete:  # else a file that could not be read may set it
      self.errors += [gin_files.ask_for(n) for n in error.missing if n not in self.config.lost]
    self.errors += error.errors

  # --- the model --------------------------------------------------------------------------------

  def _network(self):
    return self.config.value("NETWORK")

  def _model(self):
    if self.config.local:  # no model of T5X's
      return None
    if self.config.program is None:
      return self.config.value("MODEL") if self.config.is_set("MODEL") else None
    return self.config.argument("model")

  def _shapes(self, network):
    """The parameters of the dense network and their logical axes, as shapes."""
    import jax
    import jax.numpy as jnp

    if network is None:
      if self.config.complete and not self.config.errors:
        self.notes.append("no NETWORK is set, so there are no kernels to show: add a model file")
      return None
    config: Any = getattr(network, "config", None)
    if getattr(config, "rules", None) is not None:
      network = network.clone(config=dataclasses.replace(config, rules=None))
    shapes = {name: jax.ShapeDtypeStruct(s, jnp.int32) for name, s in self._inputs(network).items()}
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    init = functools.partial(network.init, enable_dropout=False)
    found = jax.eval_shape(lambda shapes: init(keys, **shapes), shapes)
    return found["params"], found.get("params_axes")

  def _inputs(self, network) -> dict[str, tuple[int, ...]]:
    """The shapes of what a network of T5X's interface cannot do without."""
    targets = (1, self.lengths["targets"])
    shapes: dict[str, tuple[int, ...]] = {
      "decoder_input_tokens": targets,
      "decoder_target_tokens": targets,
    }
    if "encoder_input_tokens" in inspect.signature(type(network).__call__).parameters:
      shapes["encoder_input_tokens"] = (1, self.lengths["inputs"])
    return shapes

  def _train_state(self, model):
    """T5X's whole state, as shapes."""
    import jax
    import jax.numpy as jnp
    from flax.core import freeze
    from t5x import train_state

    optimizer = model.optimizer_def if self.config.program in (None, "train") else None
    shapes = self._inputs(model.module)
    types = dict.fromkeys(shapes, jnp.int32)

    def make(key):
      found = freeze(model.get_initial_variables(key, shapes, types))
      if optimizer is None:
        return train_state.InferenceState.create(found)
      return train_state.FlaxOptimTrainState.create(optimizer, found)

    return jax.eval_shape(make, jax.random.PRNGKey(0))

  def _check_optimizer(self, state):
    from nm_sparsity_jax import t5x_adapter

    state.as_logical_axes()  # raises for an optax state that T5X cannot shard
    t5x_adapter.refuse_in_chain(state)

  # --- rules ------------------------------------------------------------------------------------

  def _assign(self, rules, params):
    """`rules.assign`, but with the errors of all paths, those of like layers told once."""
    from nm_sparsity_jax.places import Assignment, Place
    from nm_sparsity_jax.trees import flatten

    places, skipped, dense, used = {}, {}, [], set()
    failed: dict[str, list[str]] = {}
    for path, leaf in flatten(params):
      try:
        found = rules._match(path)
        used |= {found[0]} if found else set()
        place = rules.place(path, leaf.shape)
      except ValueError as e:
        failed.setdefault(str(e).replace(repr(path), "PATH"), []).append(path)
        dense.append(path)
        continue
      if isinstance(place, Place):
        places[path] = place
      elif place is None:
        dense.append(path)
      else:
        skipped[path] = place
    for text, paths in failed.items():
      names = ", ".join(name for name, _ in group(paths, words=True))
      self.errors.append(text.replace("PATH", names))
    if idle := [key for key in rules.places if key not in used]:
      self.errors.append(
        f"rules that match no parameter: {', '.join(map(repr, idle))}. A place is a role (ff, q, "
        "k, v, o, qk, qkv; with encoder/, decoder/, self/, cross/ before it) or a regex for a "
        "whole path"
      )
    sizes = {path: math.prod(leaf.shape) for path, leaf in flatten(params)}
    self._sizes = sizes
    return Assignment(places, skipped, tuple(dense))

  def _offset(self) -> int | None:
    given = self.config.get("PRETRAINED_STEPS")
    return given if isinstance(given, int) and not isinstance(given, bool) else None

  def _schedule(self, rules, assignment) -> list[dict[str, Any]]:
    """A timeline for each recipe and length of axis that differ in it; T5X's steps beside ours."""
    offset = self._offset() or 0
    found: dict[Any, dict[str, set[int]]] = {}  # -> rule -> lengths of its axes
    for place in assignment.places.values() if assignment is not None else ():
      key = place.recipe, place.recipe.timeline(place.axis_size)
      found.setdefault(key, {}).setdefault(place.key, set()).add(place.axis_size)
    if assignment is None:
      for name, recipe in rules.places.items():
        if self.whole or recipe.name != "dense":
          found.setdefault((recipe, recipe.timeline()), {})[name] = set()
    recipes = [recipe for recipe, _ in found]
    for (_, segments), of in found.items():
      if segments and segments[-1].decay_stop > 0:
        self.warnings.append(
          f"{', '.join(of)}: the run ends with D = {segments[-1].decay_stop:.3g}, so weights are "
          "n:m only after nms.finalize; FINETUNE_STEPS would train them as n:m"
        )
    return [
      {
        "rules": list(of),
        "axis_sizes": sorted(set().union(*of.values())) if recipes.count(recipe) > 1 else None,
        "recipe": recipe.name,
        "pattern": None if recipe.pattern is None else str(recipe.pattern),
        "gradient": recipe.gradient_mode,
        "keeps_mask": recipe.stateful,
        "segments": [
          {
            "start": s.start,
            "stop": s.stop,
            "t5x_start": s.start + offset,
            "t5x_stop": s.stop + offset,
            "pattern": None if s.pattern is None else str(s.pattern),
            "decay_start": float(s.decay_start),
            "decay_stop": float(s.decay_stop),
            "phase": _phase(s, recipe),
          }
          for s in segments
        ],
      }
      for (recipe, segments), of in found.items()
    ]

  def _loss(self, rules, model) -> dict[str, Any]:
    """T5X's normalisation of the loss, and what it makes of lambda."""
    lams = {key: recipe.lam for key, recipe in rules.places.items() if recipe.lam}
    if self.config.local:  # whose loss is that mean
      return {"lambda": lams}
    factor = getattr(model, "_loss_normalizing_factor", None) if model is not None else None
    if model is None:
      factor = self.config.get("LOSS_NORMALIZING_FACTOR")
    try:
      parts = self.config.argument("num_microbatches", "SparseTrainer") or 1
    except (KeyError, gin_files.Unset):
      parts = 1
    tokens = (self.batch_size or 0) * self.lengths["targets"] or None
    name = getattr(factor, "name", factor)
    if factor is None:
      scale, text = tokens, "a sum over target tokens"
    elif isinstance(factor, int | float):
      scale, text = (tokens and tokens / factor), f"a sum over target tokens / {factor:g}"
    elif str(name).upper().startswith("NUM"):
      scale, text = (
        parts,
        "a mean over target tokens" + (f", summed over {parts} microbatches" if parts > 1 else ""),
      )
    else:
      scale, text = None, f"normalised by {name}"
    return {
      "factor": name if isinstance(name, int | float | None) else str(name),
      "meaning": text,
      "microbatches": parts,
      "target_tokens_at_most": tokens,
      "lambda": lams,
      "lambda_in_t5x_at_most": {k: lam * scale for k, lam in lams.items()} if scale else {},
    }

  # --- cost -------------------------------------------------------------------------------------

  def _cost(self, network, assignment, params) -> dict[str, Any] | None:
    from nm_sparsity_jax import flops

    config: Any = getattr(network, "config", None)
    try:
      shape = flops.T5Shape.of(config, self.lengths["inputs"], self.lengths["targets"])
    except (AttributeError, ValueError):
      shape = None
    total = sum(self._sizes.values())
    if shape is None or flops.Cost(shape.ops()).params != total:
      self.notes.append("no FLOPs: they are known for encoder-decoders of T5's form alone")
      return None
    kernels = []
    for path, place in assignment.places.items():
      name = roles.op_of(path)
      if name not in {op.name for op in shape.ops()}:
        self.notes.append(f"no FLOPs: {path} has no counterpart in T5")
        return None
      own = self._sizes[path]
      kernels.append(flops.Kernel(op=name, params=own, axis=place.axis_size, recipe=place.recipe))
    batch = self.batch_size or 1
    found = flops.price(shape, kernels, batch)
    return {
      "input_length": self.lengths["inputs"],
      "target_length": self.lengths["targets"],
      "lengths_known": self.config.is_set("TASK_FEATURE_LENGTHS"),
      "inference": {"dense": found.inference_dense, "sparse": found.inference_sparse},
      "training": {
        "steps": found.steps,
        "batch_size": batch,
        "dense": found.training_dense,
        "sparse": found.training_sparse,
      },
      "parameters": {
        "dense": found.params,
        "kept": found.kept,
        "in_sparse_kernels": found.sparse_params,
      },
    }

  # --- settings ---------------------------------------------------------------------------------

  def _settings(self, model, rules, network) -> None:
    """What T5X, the trainer or the data would refuse, from settings alone."""
    config = self.config
    for name, regex in (("MODEL_DIR", r".+"), ("INITIAL_CHECKPOINT_PATH", r".+")):
      value = config.get(name)
      if isinstance(value, str) and not re.fullmatch(regex, value):
        self.errors.append(f"{name} is empty")
    if config.local:
      self._try("run", self._local_settings)
    elif config.program == "train":
      self._train_settings(model, rules)
    task = self._try("data", self._data)
    if task is not None:
      self._try("data", lambda: self._check_vocabulary(task, network))
      self._try("data", lambda: self._check_splits(task))

  def _local_settings(self) -> None:
    """What the local runner would refuse before its first step."""
    from nm_sparsity_jax.local import step, train

    if self.config.program != "train":
      self._argument("evaluation")
      return
    try:
      run = self.config.argument("run")  # made, so that its parts look at themselves
      run.model.check_batch(run.source.batch_size, run.microbatches)
    except step.WrongDevices:
      self.notes.append("NUM_PARTITIONS is not checked: this command sees one CPU")
    model_dir = self.config.argument("model_dir", "Run")
    folder = train.folder_of(model_dir)
    if why := files.cannot_write(folder):
      self.errors.append(f"MODEL_DIR={model_dir!r} cannot be written to: {why}")
    settings.refuse_changed(folder, train.settings_of(self.config.settings("Run")))

  def _train_settings(self, model, rules) -> None:
    config = self.config
    steps = self._argument("total_steps")
    if self._argument("relative_steps"):
      self.errors.append(
        "TRAIN_STEPS_RELATIVE is set: T5X adds it to the restored step, so each restart adds a "
        "whole run. Leave it out; the run ends at PRETRAINED_STEPS + SPARSE_STEPS"
      )
    sparse, offset = config.get("SPARSE_STEPS"), self._offset()
    if None not in (steps, sparse, offset) and steps != sparse + offset:
      self.errors.append(
        f"TRAIN_STEPS is {steps:,}, but the schedule ends at PRETRAINED_STEPS + SPARSE_STEPS = "
        f"{offset + sparse:,}: leave TRAIN_STEPS alone"
      )
    trainer = self._argument("trainer_cls")
    if model is not None and rules is not None and trainer is not None:
      from nm_sparsity_jax import t5x_adapter

      if inspect.isclass(trainer) and not issubclass(trainer, t5x_adapter.SparseTrainer):
        self.errors.append(
          f"the trainer is {trainer.__name__}: it never counts a sparse step. Set "
          "train_script.train.trainer_cls = @t5x_adapter.SparseTrainer"
        )
    save = getattr(self._argument("checkpoint_cfg"), "save", None)
    save_period = getattr(save, "period", None) or 0
    eval_period = self._argument("eval_period") or 0
    if save_period and eval_period:
      least = min(save_period, eval_period)
      if save_period % least or eval_period % least:
        self.errors.append(
          f"EVAL_PERIOD={eval_period} and utils.SaveCheckpointConfig.period={save_period}: T5X "
          "wants one to be a multiple of the other"
        )
    try:
      parts = config.argument("num_microbatches", "SparseTrainer")
    except (KeyError, gin_files.Unset):
      parts = None
    if parts and self.batch_size and self.batch_size % parts:
      self.errors.append(f"BATCH_SIZE={self.batch_size} does not split into {parts} microbatches")

  def _argument(self, name: str) -> Any:
    """An argument of the program; what fails in it is noted, once."""
    try:
      return self.config.argument(name)
    except (gin_files.Unset, KeyError):
      return None
    except Exception as e:
      self._note(e)
      return None

  def _data(self) -> Any:
    """The task or mixture, which exists and knows the features that it is asked for."""
    name = self.config.get("MIXTURE_OR_TASK_NAME")
    if self.config.program is None or name is None:
      return None
    from nm_sparsity_jax.local import data

    if module := self.config.get("MIXTURE_OR_TASK_MODULE"):
      importlib.import_module(module)
    task = data.mixture_or_task(name, module)
    lengths = self.config.get("TASK_FEATURE_LENGTHS") or {}
    if unknown := sorted(set(lengths) - set(task.output_features)):
      raise ValueError(
        f"TASK_FEATURE_LENGTHS names {', '.join(unknown)}, but {name} has the features "
        f"{', '.join(task.output_features)}"
      )
    return task

  def _check_vocabulary(self, task, network) -> None:
    """Whether the network embeds all ids. What a bucket would have to be asked is left out."""
    from nm_sparsity_jax.local import data

    rows = getattr(getattr(network, "config", None), "vocab_size", None)
    vocabularies = [feature.vocabulary for feature in task.output_features.values()]
    files = [getattr(v, "sentencepiece_model_file", "") for v in vocabularies]
    if rows is not None and not any("://" in file for file in files):
      data.check_vocabulary(task.name, rows)

  def _check_splits(self, task) -> None:
    """Whether there is something to train on and to evaluate, and the files for it."""
    import seqio

    for argument in () if self.config.local else _DATASETS:
      dataset = self._argument(argument)
      split, members = getattr(dataset, "split", None), seqio.get_subtasks(task)
      if split is None or any(_splits(member) is None for member in members):
        continue
      found = [member for member in members if split in _splits(member)]
      if not found:
        text = f"{task.name} has no split {split!r}"
        if argument == "train_dataset_cfg":
          raise ValueError(f"{text} to train on; there is {', '.join(sorted(task.splits))}")
        done = "predicted" if self.config.program == "infer" else "evaluated"
        mixtures = " or ".join(_mixtures_of(task, split))
        hint = f": choose {mixtures}" if mixtures else ""
        self.warnings.append(f"{text}, so nothing is {done}{hint}")
      if not dataset.use_cached:
        for member in found:
          getattr(member.source, "look", lambda split: None)(split)

  # --- checkpoints ------------------------------------------------------------------------------

  def _restore_settings(self) -> Any:
    if self.config.program == "train":
      return getattr(self._argument("checkpoint_cfg"), "restore", None)
    return self._argument("restore_checkpoint_cfg") if self.config.program else None

  def _stored(self) -> checkpoint.Stored | None:
    path = self.checkpoint
    if path is None and self.config.local:
      is_train = self.config.program == "train"
      path = self.config.get("INITIAL_CHECKPOINT_PATH" if is_train else "CHECKPOINT_PATH")
    elif path is None:
      path = getattr(self._restore_settings(), "path", None)
      if isinstance(path, list | tuple):
        path = path[0] if path else None
    if not path:
      return None
    return checkpoint.read(str(path))

  def _restore(self, stored, state, params, resuming) -> dict[str, Any] | None:
    """What the run takes of a checkpoint, and what T5X would refuse."""
    from nm_sparsity_jax.trees import flatten

    settings = self._restore_settings()
    dtype = getattr(settings, "dtype", None)
    fallback = True
    if state is not None and settings is not None:
      functions = tuple(settings.state_transformation_fns)
      fallback = settings.fallback_to_scratch
      if resuming:  # as t5x.train restores its own checkpoints
        functions = tuple(functools.partial(f, is_resuming=True) for f in functions)
        fallback, save = False, getattr(self._argument("checkpoint_cfg"), "save", None)
        dtype = save.dtype if save else "float32"
      model = dict(flatten(state.state_dict()))
      found = restore.restore(stored, model, dtype, functions, fallback)
    elif params is not None:  # the optimizer and the like are no concern of a fragment
      model = {f"target/{path}": leaf for path, leaf in flatten(params)}
      found = restore.restore(stored, model, dtype, fallback=fallback)
      drop = [key for key in found.drop if key.startswith("target/")]
      found = dataclasses.replace(found, drop=drop)
    else:
      return None
    self.errors += found.errors
    lost = [key for key in found.initialise if key.startswith("target/")]
    extra = [key for key in found.drop if key.startswith("target/")]
    if lost and fallback:
      names = ", ".join(name for name, _ in group(lost))
      how = "" if self.config.local else ", which would silently start from random values"
      self.errors.append(f"{stored.path} lacks parameters of this model{how}: {names}")
    if extra:
      names = ", ".join(name for name, _ in group(extra))
      self.warnings.append(f"{stored.path} has parameters that this model lacks: {names}")
    sections = {}
    for key in {*found.load, *found.initialise, *found.drop}:
      sections.setdefault(_section(key), {"load": 0, "initialise": 0, "drop": 0, "dtypes": {}})
    for key, (leaf, after) in found.load.items():
      part = sections[_section(key)]
      part["load"] += 1
      name = after if after == leaf.dtype else f"{leaf.dtype} -> {after}"
      part["dtypes"][name] = part["dtypes"].get(name, 0) + 1
    for kind in ("initialise", "drop"):
      for key in getattr(found, kind):
        sections[_section(key)][kind] += 1
    return {
      "path": stored.path,
      "format": stored.format,
      "step": stored.step,
      "sparse_step": stored.sparse_step,
      "rules": stored.rules,
      "sections": {name: sections[name] for name in _SECTIONS.values() if name in sections},
      "initialise": [name for name, _ in group(found.initialise)],
      "drop": [name for name, _ in group(found.drop)],
    }

  def _restore_errors(self, stored) -> None:
    """What settings and checkpoint say of each other."""
    if self.config.is_set("RULES") and getattr(self._restore_settings(), "dtype", 0) == "bfloat16":
      self.errors.append(
        "utils.RestoreCheckpointConfig.dtype = 'bfloat16': masks need the stored dtype, since "
        "rounding changes which weights survive. Set 'float32'"
      )
    offset = self._offset()
    if self.config.program == "train" and None not in (offset, stored.step):
      if stored.step != offset:
        self.errors.append(
          f"PRETRAINED_STEPS={offset}, but {stored.path} is of step {stored.step}: set "
          f"PRETRAINED_STEPS={stored.step}"
        )

  def _resumed(self) -> checkpoint.Stored | None:
    """The newest checkpoint in MODEL_DIR: T5X resumes it, whatever INITIAL_CHECKPOINT_PATH says."""
    folder = self._argument("model_dir") if self.config.program == "train" else None
    if self.config.local and self.config.program == "train":
      folder = self.config.get("MODEL_DIR")
    if not isinstance(folder, str) or self.checkpoint:
      return None
    try:
      newest = folders.latest(folder)
      stored = checkpoint.read(newest) if newest else None
    except Exception as e:
      self.warnings.append(f"MODEL_DIR={folder!r} could not be looked at: {gin_files.message(e)}")
      return None
    if stored is not None:
      self.notes.append(f"MODEL_DIR has checkpoints: the run would resume from {newest}")
      steps = self._argument("total_steps")
      if None not in (steps, stored.step) and stored.step >= steps:
        self.warnings.append(f"{newest} is at TRAIN_STEPS={steps:,} already: nothing would be done")
    return stored

  def _refused(self, stored, rules, resuming) -> bool:
    """Whether this checkpoint is of another run than one that these rules can go on with."""
    if (
      rules is None
      or not self.whole
      or not (resuming or self.config.program in ("evaluate", "infer"))
      or (self.config.local and resuming)  # its settings told
    ):
      return False
    from nm_sparsity_jax import configure

    # As the model has them: before the axes of scanned kernels were read.
    now = configure.describe(self.config.get("RULES", rules))
    if stored.rules is None and resuming:
      self.errors.append(
        f"{stored.path} is of a dense run, and T5X would resume that one: take an empty MODEL_DIR "
        "and name the dense checkpoint as INITIAL_CHECKPOINT_PATH"
      )
    elif stored.rules is None:
      if self.config.local and all(recipe.name == "dense" for recipe in rules.places.values()):
        return False
      how = "RECIPE = 'dense'" if self.config.local else "T5X's own model"
      self.errors.append(f"{stored.path} is dense: it has no sparse step. Evaluate it with {how}")
    elif stored.rules != now:
      self.errors.append(
        f"{stored.path} was trained with other rules ({_in_line(stored.rules)}) than these "
        f"({_in_line(now)}): take those" + (", or another MODEL_DIR" if resuming else "")
      )
    else:
      return False
    return True


def _splits(task) -> Any:
  """The splits of a task of seqio; None where TFDS would have to look for them."""
  return getattr(task.source, "_splits", None) or None


def _mixtures_of(task, split: str) -> list[str]:
  """The mixtures that train on a task and have a split which it has not."""
  import seqio

  mixtures = {
    name: seqio.get_subtasks(seqio.get_mixture_or_task(name))
    for name in seqio.MixtureRegistry.names()
  }
  has = lambda members: any(split in (_splits(member) or ()) for member in members)
  return sorted(n for n, members in mixtures.items() if task in members and has(members))


_SECTIONS = {
  "target": "parameters",
  "state/param_states": "optimizer",
  "state": "step",
  "flax_mutables/nm_sparsity": "sparse state",
  "flax_mutables": "mutables",
}


def _section(key: str) -> str:
  for prefix, name in _SECTIONS.items():
    if key == prefix or key.startswith(prefix + "/"):
      return name
  return "mutables"


def _phase(segment, recipe) -> str:
  phases = recipe.phases
  if phases is None or segment.stop <= phases.dense:
    return "dense"
  if segment.start >= phases.finetune_start and phases.finetune:
    return "fine-tune"
  first = "dense, sparsify" if segment.start < phases.dense else "sparsify"
  if phases.finetune and segment.stop > phases.finetune_start:
    return f"{first}, fine-tune from {phases.finetune_start:,}"
  return first


def _in_line(text: str) -> str:
  return text.replace("\n", "; ")


def _once(texts: Sequence[str]) -> list[str]:
  return list(dict.fromkeys(texts))


def _kernels(assignment) -> dict[str, Any]:
  """Sparse kernels, alike ones together; what is skipped, and why; what no rule names."""
  alike: dict[Any, list[str]] = {}
  for path, p in assignment.places.items():
    facts = (p.shape, p.axis, str(p.pattern), p.count, p.recipe.name, p.key, p.remarks)
    alike.setdefault(facts, []).append(path)
  sparse = [
    {
      "path": name,
      "count": len(paths),
      "paths": paths,
      "role": ",".join(sorted({r for path in paths if (r := roles.role_of(path))})) or None,
      "rule": facts[5],
      "shape": list(facts[0]),
      "axis": facts[1],
      "pattern": facts[2],
      "groups": facts[3],
      "recipe": facts[4],
      "remarks": list(facts[6]),
    }
    for facts, of in alike.items()
    for name, paths in group(of, words=True)
  ]
  why: dict[str, list[str]] = {}
  for path, reason in assignment.skipped.items():
    why.setdefault(reason, []).append(path)
  skipped = [
    {"path": name, "count": len(paths), "paths": paths, "why": reason}
    for reason, of in why.items()
    for name, paths in group(of, words=True)
  ]
  kernels = [path for path in assignment.dense if path.endswith("kernel")]
  dense = [{"path": n, "count": len(p), "paths": p} for n, p in group(kernels, words=True)]
  others = len(assignment.dense) - len(kernels)
  return {"sparse": sparse, "skipped": skipped, "dense": dense, "other_dense": others}


def group(paths: Sequence[str], words: bool = False) -> list[tuple[str, list[str]]]:
  """Paths that differ in one word only, told as one: [(name, paths)].

  Layers first: their words end in a number. With `words`, then any other word.

  >>> group(["a/layers_0/k", "a/layers_1/k", "a/layers_3/k"])[0][0]
  'a/layers_{0,1,3}/k'
  >>> group([f"a/layers_{i}/k" for i in range(12)])[0][0]
  'a/layers_{0..11}/k'
  """
  named = [(tuple(path.split("/")), [path]) for path in paths]
  numbered = re.compile(r"(.*_)(\d+)")
  depth = max((len(key) for key, _ in named), default=0)
  for position in range(depth):
    merged: dict[Any, list[tuple[str, list[str]]]] = {}
    for key, of in named:
      word = key[position] if position < len(key) else ""
      found = numbered.fullmatch(word)
      stem = found[1] if found else None
      left = (key[:position], key[position + 1 :], stem, word if stem is None else "")
      merged.setdefault(left, []).append((found[2] if found else "", of))
    named = []
    for (before, after, stem, word), members in merged.items():
      here = word
      if stem is not None:
        here = stem + _numbers([int(number) for number, _ in members])
      middle = (here,) if here else ()
      named.append(((*before, *middle, *after), [p for _, of in members for p in of]))
  for position in range(depth) if words else ():
    merged = {}
    for key, of in named:
      word = key[position] if position < len(key) else ""
      merged.setdefault((key[:position], key[position + 1 :], len(key)), []).append((word, of))
    named = []
    for (before, after, _), members in merged.items():
      here = members[0][0]
      if len(members) > 1:
        here = "{" + ",".join(sorted(word for word, _ in members)) + "}"
      middle = (here,) if here else ()
      named.append(((*before, *middle, *after), [p for _, of in members for p in of]))
  return [("/".join(key), of) for key, of in named]


def _numbers(values: Sequence[int]) -> str:
  values = sorted(values)
  if len(values) == 1:
    return str(values[0])
  if len(values) > 2 and values == list(range(values[0], values[-1] + 1)):
    return f"{{{values[0]}..{values[-1]}}}"
  return "{" + ",".join(map(str, values)) + "}"


def as_json(report: Mapping[str, Any]) -> Any:
  """The report with tuples as lists and strange values as text."""
  if isinstance(report, Mapping):
    return {str(k): as_json(v) for k, v in report.items()}
  if isinstance(report, list | tuple):
    return [as_json(v) for v in report]
  if report is None or isinstance(report, str | int | float | bool):
    return report
  return str(report)
