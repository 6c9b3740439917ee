"""The train step: Kauldron's loss of the effective weights, and `nms.sparse` around its optimizer.

batch, state -> [sparsify] -> loss -> gradients -> [nms.sparse] -> state: step + 1, count + 1, masks
"""

# pyright: reportMissingImports=false, reportMissingModuleSource=false

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import optax
from kauldron import kd
from kauldron.utils import config_util

from nm_sparsity_jax import apply, transform
from nm_sparsity_jax.kauldron_adapter import checks
from nm_sparsity_jax.layers import COLLECTION
from nm_sparsity_jax.rules import Rules


@dataclasses.dataclass(kw_only=True, eq=False, frozen=True)
class SparseTrainStep(kd.train.TrainStep):
  """Kauldron's train step with sparse weights; `rules` is all that it adds to a trainer.

      kd.train.Trainer(trainstep=kauldron_adapter.SparseTrainStep(rules=rules), ...)

  It wraps the trainer's optimizer by `nms.sparse`. The stored parameters stay dense while masks act
  on them. Kauldron's loop saves ckpt_N before update N + 1, so ckpt_N holds N updates; the state
  that `Trainer.train` returns has one more. Deploy the checkpoint.

  Args:
    rules: what is sparse, and how. The schedule ends at `num_train_steps` of the trainer.
    **kwargs: as of Kauldron's train step.
  """

  rules: Rules
  workdir: Any = config_util.ROOT_CFG_REF.workdir
  num_train_steps: int | None = config_util.ROOT_CFG_REF.num_train_steps

  def update_from_root_cfg(self, root_cfg: Any) -> SparseTrainStep:
    """Returns the step of a trainer; refuses a trainer that would go wrong without a word."""
    checks.refuse_silent_mistakes(root_cfg, self.rules)
    return super().update_from_root_cfg(root_cfg)

  def init(self, elem_spec: Any, *, skip_transforms: bool = False, **kwargs: Any) -> Any:
    """Returns the first train state, as Kauldron's; refuses checkpoints of other rules."""
    if skip_transforms:  # a checkpoint will be restored
      checks.refuse_other_rules(self.workdir, self.rules)
    state = super().init(elem_spec, skip_transforms=skip_transforms, **kwargs)
    if not skip_transforms and not isinstance(state.step, jax.core.Tracer):
      checks.refuse_other_end(self.rules, int(state.step), self.num_train_steps)
    return state

  @functools.cached_property
  def sparse_optimizer(self) -> optax.GradientTransformationExtraArgs:
    """Returns the trainer's optimizer within `nms.sparse`."""
    return transform.sparse(self.optimizer, self.rules)

  @functools.partial(jax.jit, static_argnames="self", donate_argnames="state")
  def _init_optimizer(self, state: Any) -> Any:
    kept = {COLLECTION: jax.tree.map(jnp.asarray, checks.kept_text(self.rules))}
    state = state.replace(
      opt_state=self.sparse_optimizer.init(state.params),
      collections={**state.collections, **kept},
    )
    return kd.sharding.with_sharding_constraint(state, self.sharding.state)

  def _step(self, state: Any, batch: Any) -> Any:
    before = kd.train.Context.from_state_and_batch(state=state, batch=batch)
    rules = self._with_shardings(state.params)

    def loss(params):
      return kd.train.forward_with_loss(
        before.replace(params=apply.sparsify(params, rules, state.opt_state)),
        model=self.model,
        losses=self.aux.losses,
        rngs=self.rng_streams.train_rngs(state.step),
        is_training=True,
      )

    grads, context = jax.grad(loss, has_aux=True, allow_int=True)(state.params)
    updates, opt_state = self.sparse_optimizer.update(grads, state.opt_state, state.params)
    kept = {name: x for name, x in state.collections.items() if name == COLLECTION}
    new = state.replace(
      step=state.step + 1,
      params=optax.apply_updates(state.params, updates),
      opt_state=opt_state,
      collections={**context.collections, **kept},
    )
    context = context.replace(
      params=state.params, grads=grads, updates=updates, opt_state=state.opt_state
    )
    return new, self.aux.update_context(context)

  def _with_shardings(self, params: Any) -> Rules:
    """Returns the rules with what the trainer says of how devices share each parameter."""
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    placed = kd.sharding.with_sharding_constraint(shapes, self.sharding.params)
    return self.rules.with_shardings(jax.tree.map(lambda x: x.sharding, placed))
