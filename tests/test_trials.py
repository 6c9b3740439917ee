"""Forty mistakes that `plan` names, and thirty right runs that it is silent about.

Each mistake is what somebody typed. `make test-slow` runs them: a plan takes about a second.
"""

import pytest
import test_plan
from checkpoint_files import t5x_sparse, write_orbax
from test_plan import FINETUNE, LOCAL, OURS, SETTINGS, SPARSE, TASK, TINY, has

from nm_sparsity_jax.recipes import RECIPES
from nm_sparsity_jax.training import configure

run, t5x, run_t5x = test_plan.run, test_plan.t5x, test_plan.run_t5x
closed_loops, start = test_plan.closed_loops, test_plan.start
pytestmark = pytest.mark.slow

# Of the folder that a test runs in.
FILES = {
  "broken.gin": "PATTERN = '1:4\n",
  "misspelt.gin": "DENSE_STEP = 50\n",
  "raises.gin": "import no_such_module\n",
}

T5 = "gin_configs/models/t5.gin"
# What was typed -> words of what is printed. Rules alone, with a model file:
MISTAKES = [
  (dict(PATERN="1:8"), ["PATERN", "did you mean PATTERN?"]),
  (dict(RECIPE="sr_stee"), ["sr_stee", "sr_ste"]),
  (dict(RECIPE="sr-ste"), ["sr-ste", "sr_ste"]),
  (dict(PATTERN="8:1"), ["PATTERN", "8:1"]),
  (dict(PATTERN="2 of 4"), ["PATTERN", "2 of 4"]),
  (dict(PATTERN="1:5"), ["1:5", "multiple of 5", "INDIVISIBLE"]),
  (dict(PATTERN="1:64"), ["1:64", "multiple of 64"]),
  (dict(SPARSITY_RULES={"decodr/ff": None}), ["decodr/ff", "SPARSITY_RULES"]),
  (dict(SPARSITY_RULES="ff"), ["SPARSITY_RULES='ff'", "place"]),
  (dict(SPARSITY_RULES={"*": "1:4"}), ["SPARSITY_RULES", "regular expression"]),
  (dict(SPARSITY_RULES={"ff": None, ".*/mlp/.*": "2:4"}), ["none that is left", ".*/mlp/.*"]),
  (dict(SPARSITY_AXES={".*/wii/kernel": 0}), ["axes=", "wii"]),
  (dict(SPARSITY_ROLES={"ff": "("}), ["SPARSITY_ROLES", "regular expression"]),
  (dict(DENSE_STEPS=200), ["DENSE_STEPS", "200"]),
  (dict(DENSE_STEPS=60, FINETUNE_STEPS=60), ["FINETUNE_STEPS", "60"]),
  (dict(SPARSE_STEPS=0), ["SPARSE_STEPS", "0"]),
  (dict(SPARSE_STEPS=1.5), ["SPARSE_STEPS", "1.5"]),
  (dict(SPARSE_STEPS=2**31), ["SPARSE_STEPS", "2147483648"]),
  (dict(RECIPE_FIELDS={"lamb": 1.0}), ["RECIPE_FIELDS", "lamb"]),
  (dict(BETA=0.5), ["BETA", "beta"]),
  (dict(RECIPE="mdgf_linear", GRADIENT="straight"), ["GRADIENT", "straight_through"]),
  (dict(INDIVISIBLE="skipp"), ["skipp", "skip"]),
  (dict(RECIPE="custom"), ["custom", "path"]),
  (dict(RECIPE=None), ["RECIPE"]),
  (dict(SPARSE_STEPS=None), ["SPARSE_STEPS"]),
  (dict(raw=["X.y = 1"]), ["X.y"]),
  (dict(raw=["PATTERN = 1:4"]), ["PATTERN", "quotes"]),
  (dict(files=(T5, SPARSE[1]), T5_SIZE="bas"), ["T5_SIZE='bas'", "base"]),
  (dict(files=(*SPARSE, "nope.gin")), ["nope.gin"]),
  (dict(files=(*SPARSE, "broken.gin")), ["broken.gin"]),
  (dict(files=(*SPARSE, "raises.gin")), ["no_such_module"]),
  (dict(files=(*SPARSE, "misspelt.gin")), ["DENSE_STEP", "did you mean DENSE_STEPS?"]),
]
# Of the local runner:
TINY_T5 = dict(files=LOCAL, **TASK, WARMUP_STEPS=10, raw=[f"{OURS}.vocab_size = 256"])
MISTAKES += [
  (TINY_T5 | changes, words)
  for changes, words in [
    (dict(MICROBATCHES=7), ["BATCH_SIZE=128", "7 microbatches"]),
    (dict(BATCH_SIZE=0), ["BATCH_SIZE=0"]),
    (dict(EVAL_PERIOD=0), ["EVAL_PERIOD=0"]),
    (dict(RANDOM_SEED=-1), ["RANDOM_SEED=-1"]),
    (dict(LEARNING_RATE=-1.0), ["LEARNING_RATE=-1.0"]),
    (dict(LEARNING_RATE_FACTORS="constant * linear"), ["LEARNING_RATE_FACTORS", "linear_warmup"]),
    (dict(EVAL_SPLIT="nope"), ["EVAL_SPLIT='nope'"]),
    (dict(DECODER="gredy"), ["DECODER='gredy'", "greedy"]),
    (dict(MIXTURE_OR_TASK_NAME="nope"), ["nope"]),
    (dict(MIXTURE_OR_TASK_MODULE="no_such_tasks"), ["no_such_tasks"]),
    (dict(TASK_FEATURE_LENGTHS={"inputs": 8}), ["TASK_FEATURE_LENGTHS", "targets"]),
    (dict(MODEL_DIR="model.gin/run"), ["MODEL_DIR", "model.gin"]),
    (dict(files=(LOCAL[0], LOCAL[2])), ["OPTIMIZER is not set", "local_adamw.gin"]),
    (dict(files=LOCAL[1:]), ["NETWORK is not set"]),
    (dict(raw=[f"{OURS}.vocab_size = 8"]), ["embeds 8", "VOCAB_SIZE"]),
    (dict(INITIAL_CHECKPOINT_PATH="nowhere/checkpoint_3"), ["nowhere/checkpoint_3"]),
  ]
]
# Of T5X; `start` is a dense checkpoint of step 6:
T5X_RUN = "t5x/configs/runs/finetune.gin"
OF_T5X = [
  (dict(TRAIN_STEPS_RELATIVE=5), ["TRAIN_STEPS_RELATIVE"]),
  (dict(TRAIN_STEPS=12), ["TRAIN_STEPS=12", "18"]),
  (dict(PRETRAINED_STEPS=7), ["PRETRAINED_STEPS=7", "6"]),
  (dict(raw=["utils.RestoreCheckpointConfig.dtype = 'bfloat16'"]), ["bfloat16", "float32"]),
  (dict(files=(TINY[0], T5X_RUN, TINY[1]), TRAIN_STEPS=18), ["run file", "after"]),
  (dict(raw=["train_script.train.trainer_cls = @t5x.trainer.Trainer"]), ["SparseTrainer"]),
  (dict(MODEL_DIR="start"), ["dense run"]),
  (dict(MODEL_DIR="sparse", PATTERN="2:4"), ["sr_ste 1:4", "sr_ste 2:4"]),
  (dict(raw=["t5x.examples.t5.network.T5Config.mlp_dim = 64"]), ["another shape"]),
  (dict(MIXTURE_OR_TASK_NAME="nope"), ["nope"]),
  (dict(TASK_FEATURE_LENGTHS={"inputs": 8}), ["TASK_FEATURE_LENGTHS", "targets"]),
]


@pytest.fixture
def files(tmp_path):
  for name, text in FILES.items():
    (tmp_path / name).write_text(text)


def named(report, words):
  assert has(report["errors"], *words), report["errors"]
  assert len(report["errors"]) < 4 and not has(report["errors"], "Traceback"), report["errors"]


@pytest.mark.parametrize("changes, words", MISTAKES, ids=str)
def test_a_mistake_is_named(run, files, changes, words):
  code, report = run(**SETTINGS | changes)
  assert code
  named(report, words)


@pytest.mark.t5x
@pytest.mark.parametrize("changes, words", OF_T5X, ids=str)
def test_a_mistake_in_a_run_of_t5x_is_named(run_t5x, files, start, tmp_path, changes, words):
  rules = configure.rules({"ff": None}, "sr_ste", "1:4", 12, 2, 4)
  write_orbax(tmp_path / "sparse/checkpoint_10", t5x_sparse(rules))
  code, report = run_t5x(**FINETUNE | start | changes)
  assert code
  named(report, words)


RIGHT = [
  *(dict(RECIPE=name, FINETUNE_STEPS=20) for name in RECIPES if name not in ("custom", "hold")),
  dict(RECIPE="custom", RECIPE_FIELDS={"path": ((10, "2:4", 1.0), (50, "1:4", 0.0))}),
  dict(RECIPE="hold"),
  dict(SPARSITY_RULES={"encoder/ff": "1:4", "decoder/cross/qkv": None}),
  dict(SPARSITY_RULES={"ff": None, "decoder/logits_dense/kernel": "2:4"}),
  dict(SPARSITY_ROLES={"up": ".*/mlp/wi_0/kernel"}, SPARSITY_RULES={"up": None}),
  dict(PATTERN="1:1"),
  dict(PATTERN="6:8"),
  dict(PATTERN="1:5", INDIVISIBLE="pad"),
  dict(RECIPE="mdgf_linear", GRADIENT="straight_through"),
  dict(RECIPE="sr_ste", RECIPE_FIELDS={"lam": 1e-3}, DENSE_STEPS=None, FINETUNE_STEPS=None),
  TINY_T5,
  TINY_T5 | dict(MICROBATCHES=4, LEARNING_RATE_FACTORS="constant * rsqrt_decay"),
  TINY_T5 | dict(files=(LOCAL[0], "gin_configs/runs/local_adafactor.gin", LOCAL[2])),
  TINY_T5 | dict(RECIPE="idp", NUM_PARTITIONS=2),
  dict(files=(T5, SPARSE[1]), T5_SIZE="small"),
  dict(
    files=(T5, SPARSE[1]), T5_SIZE="base",
    SCAN_LAYERS=True,
  ),
]  # fmt: skip
ADAMW = "gin_configs/runs/t5x_adamw.gin"
RIGHT_OF_T5X = [
  dict(),
  dict(RECIPE="snip"),
  dict(RECIPE="mdgf_linear", SPARSITY_RULES={"decoder/cross/qkv": None, "encoder/ff": "2:4"}),
  dict(LEARNING_RATE_FACTORS="constant", METRICS_EVERY=None),
  dict(RECIPE="dense"),
]


def silent(code, report):
  assert not code and not report["errors"] and not report["warnings"], report


@pytest.mark.parametrize("changes", RIGHT, ids=str)
def test_a_right_run_is_met_with_silence(run, changes):
  silent(*run(**SETTINGS | changes))


@pytest.mark.t5x
@pytest.mark.parametrize("changes", RIGHT_OF_T5X, ids=str)
def test_a_right_run_of_t5x_is_met_with_silence(run_t5x, start, changes):
  # The optimizer of TINY has a learning rate of its own, which is warned of.
  usual = FINETUNE | start | dict(files=(*TINY, ADAMW), WARMUP_STEPS=4)
  silent(*run_t5x(**usual | changes))


def test_the_tables_are_as_long_as_they_say():
  assert len(MISTAKES) + len(OF_T5X) >= 40 and len(RIGHT) + len(RIGHT_OF_T5X) >= 30
