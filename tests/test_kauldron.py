"""A checkpoint of Kauldron is read without it; tests/integrations/test_gemma.py makes more."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import nm_sparsity_jax as nms
from nm_sparsity_jax import runs
from nm_sparsity_jax.core.trees import nested
from nm_sparsity_jax.runs import checkpoint
from nm_sparsity_jax.training.transform import SparseState

FF = "encoder/layers_0/mlp/dense_in/kernel"
WRAPPED = {
  "alone": lambda tx: tx,
  "accumulated": lambda tx: optax.MultiSteps(tx, 2),
  "behind a count of its own": lambda tx: optax.chain(optax.scale_by_adam(), tx),
}


@pytest.mark.parametrize("wrapped", WRAPPED)
def test_a_checkpoint_is_deployed_with_its_stored_mask_wherever_its_state_stands(wrapped, tmp_path):
  """The last weight of each group, which magnitudes would not choose."""
  ocp = pytest.importorskip("orbax.checkpoint")
  rules = nms.Rules({"ff": nms.recipe("one_shot", pattern="1:4", phases=nms.Phases(total=8))})
  weights = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)
  tx = WRAPPED[wrapped](nms.sparse(optax.sgd(0.1, momentum=0.9), rules))
  last = np.broadcast_to(np.arange(16).reshape(16, 1) % 4 == 3, (16, 4))

  def trained(state):
    masks = {"mask": nested({FF: jnp.asarray(last)}), "renewed": nested({FF: jnp.int32(1)})}
    return state._replace(count=jnp.int32(8), masks=state.masks | masks)

  is_own = lambda x: isinstance(x, SparseState)
  own = lambda x: trained(x) if is_own(x) else x
  state = jax.tree.map(own, tx.init(nested({FF: weights})), is_leaf=is_own)
  tree = {"step": jnp.int32(16), "params": nested({FF: weights}), "opt_state": state}
  with ocp.StandardCheckpointer() as writer:
    writer.save(tmp_path / "checkpoints/ckpt_16/default", tree)
  made = runs.finalize(str(tmp_path), str(tmp_path / "final"))
  assert made.stored.sparse_step == 8
  kernel = checkpoint.read(made.stored.path).array(f"target/{FF}")
  np.testing.assert_array_equal(kernel, np.where(last, weights, 0))
