#!/usr/bin/env bash
# A 1:8 sparse decoder by MaxText, unmodified: two lines wrap the optimizer that it makes.
#
#     pip install 'maxtext[tpu]==0.2.5' nm-sparsity-jax    # Python 3.12; the extra serves a CPU, too
#     bash examples/maxtext.sh [FOLDER]
#
# It trains a small decoder on synthetic data on a CPU, kills the run, resumes it, evaluates it in
# MaxText's own loop, and proves the last checkpoint to be 1:8. That takes some minutes.
set -euo pipefail
folder=$(realpath -m "${1:-maxtext_run}")
mkdir -p "$folder"
export JAX_PLATFORMS=cpu TF_CPP_MIN_LOG_LEVEL=2

cat > "$folder/sparse.py" <<'END'
"""MaxText's training program, with sparse weights."""

from absl import app
from maxtext.optimizers import optimizers
from maxtext.trainers.pre_train import train

import nm_sparsity_jax as nms

phases = nms.Phases(total=60, dense=10, finetune=20)  # in steps; total is MaxText's `steps`
recipe = nms.recipe("mdgf_exponential", pattern="1:8", phases=phases)
rules = nms.Rules({"ff": recipe, "qkv": recipe, "o": recipe})

make = optimizers.get_optimizer
optimizers.get_optimizer = lambda *args, **kwargs: nms.sparse(make(*args, **kwargs), rules)

if __name__ == "__main__":
  app.run(train.main)
END
# Several TPUs: masks take one pass where the rules know how devices share the weights. In the last
# line above: `lambda config, schedule, model, mesh: nms.sparse(make(config, schedule, model, mesh),
# rules.with_shardings(jax.tree.map(lambda x: x.sharding, nnx.state(model, nnx.Param))))`.
# skip_step_on_spikes: a skipped step counts for the schedule, as for MaxText's `steps`.

train() {  # the arguments are those of `python -m maxtext.trainers.pre_train.train`
  exec python "$folder/sparse.py" run_name=small base_output_directory="$folder" hardware=cpu \
    dataset_type=synthetic vocab_size=64 max_target_length=16 per_device_batch_size=4 \
    decoder_block=llama2 attention=dot_product base_num_decoder_layers=2 base_emb_dim=32 \
    base_mlp_dim=64 base_num_query_heads=4 base_num_kv_heads=2 head_dim=8 \
    steps=60 learning_rate=3e-3 eval_interval=20 eval_steps=2 checkpoint_period=10 \
    async_checkpointing=false enable_tensorboard=false log_config=false \
    skip_jax_distributed_system=true > "$folder/$1" 2>&1
}

# A run that is killed once it has two checkpoints.
train killed.log &  # `exec` makes this the id of Python itself
until [ -d "$folder/small/checkpoints/20" ]; do
  kill -0 $! || { cat "$folder/killed.log"; exit 1; }  # it ended by itself
  sleep 1
done
kill -9 $!
wait $! || echo "killed"

# The same command resumes it.
(train resumed.log) || { cat "$folder/resumed.log"; exit 1; }
grep -oE "restoring from this run.*|(completed step: [0-9]*9,|Completed eval after).*" \
  "$folder/resumed.log"

# The proof, from the checkpoint alone: the optimizer's state has the text of its rules.
cd "$folder"
python - <<'END' 2> /dev/null
import os

import orbax.checkpoint as ocp

import nm_sparsity_jax as nms
from nm_sparsity_jax.training import rules_text

saved = ocp.PyTreeCheckpointer().restore(os.path.abspath("small/checkpoints/59/items"))
rules = rules_text.parse(rules_text.unpack(saved["opt_state"]["rules"]))
print(nms.verify(saved["params"]["params"], rules))
END
