"""Kauldron's train step with `nms.sparse` around its optimizer, and rules in its checkpoints."""

# pyright: reportMissingImports=false, reportMissingModuleSource=false

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
from kauldron import kd
from kauldron.utils import config_util

from nm_sparsity_jax.runs import checkpoint, folders
from nm_sparsity_jax.training import rules_text, transform
from nm_sparsity_jax.training.layers import COLLECTION
from nm_sparsity_jax.training.rules import Rules


@dataclasses.dataclass(kw_only=True, eq=False, frozen=True)
class SparseTrainStep(kd.train.TrainStep):
  """Kauldron's train step with sparse weights; `rules` is all that it adds to a trainer.

      kd.train.Trainer(trainstep=kauldron_adapter.SparseTrainStep(rules=rules), ...)

  It wraps the trainer's optimizer by `nms.sparse`, so the parameters are the effective weights, and
  evaluators take them as they are. Kauldron's loop saves ckpt_N before update N + 1, so ckpt_N
  holds N updates; the state that `Trainer.train` returns has one more. Deploy the checkpoint.

  Args:
    rules: what is sparse, and how. The schedule ends at `num_train_steps` of the trainer.
    **kwargs: as of Kauldron's train step.
  """

  rules: Rules
  workdir: Any = config_util.ROOT_CFG_REF.workdir
  num_train_steps: int | None = config_util.ROOT_CFG_REF.num_train_steps

  def init(self, elem_spec: Any, *, skip_transforms: bool = False, **kwargs: Any) -> Any:
    """Returns the first train state, as Kauldron's; refuses other rules and another end."""
    if skip_transforms:  # Kauldron makes shapes for the checkpoint that it restores
      self._refuse_other_rules()
    state = super().init(elem_spec, skip_transforms=skip_transforms, **kwargs)
    if not skip_transforms and not isinstance(state.step, jax.core.Tracer):
      start = int(state.step)  # an init_transform may have set it
      ends = {start + r.phases.total for r in self.rules.places.values() if r.phases}
      if ends and self.num_train_steps not in (None, *ends):
        raise ValueError(
          f"num_train_steps={self.num_train_steps}, but the schedule ends at step {max(ends)}: set "
          "one to the other. To stop earlier set stop_after_steps."
        )
    return state

  def _refuse_other_rules(self) -> None:
    newest = folders.latest(self.workdir)
    stored, own = newest and checkpoint.read(newest).rules, rules_text.describe(self.rules)
    if newest and stored != own:
      raise ValueError(
        f"{newest} was trained with the rules\n{stored}\nbut this run has\n{own}\nGo on with the "
        "checkpoint's rules. Or take another workdir for a new run, and load the weights by "
        "init_transform=kd.ckpts.PartialKauldronLoader(...)."
      )

  @functools.partial(jax.jit, static_argnames="self", donate_argnames="state")
  def _init_optimizer(self, state: Any) -> Any:
    text = jnp.asarray(rules_text.pack(rules_text.describe(self.rules)))
    # The parameters are those of an init_transform, such as the weights of another run.
    opt_state = self._in_place(state.params).optimizer.init(state.params)
    collections = {**state.collections, COLLECTION: {"rules": text}}
    state = state.replace(opt_state=opt_state, collections=collections)
    return kd.sharding.with_sharding_constraint(state, self.sharding.state)

  def _step(self, state: Any, batch: Any) -> Any:
    new, context = super(SparseTrainStep, self._in_place(state.params))._step(state, batch)
    # The model does not know the collection, so it does not return it.
    kept = {**new.collections, COLLECTION: state.collections[COLLECTION]}
    return new.replace(collections=kept), context

  def _in_place(self, params: Any) -> SparseTrainStep:
    """Returns this step with `nms.sparse`, which knows how devices share the weights."""
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    # Kauldron names shardings for a tree of any arrays, and a tracer knows none.
    placed = kd.sharding.with_sharding_constraint(shapes, self.sharding.params)
    rules = self.rules.with_shardings(jax.tree.map(lambda x: x.sharding, placed))
    return dataclasses.replace(self, optimizer=transform.sparse(self.optimizer, rules))
