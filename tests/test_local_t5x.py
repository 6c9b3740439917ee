"""Either engine opens the other's checkpoints, and says the same of them."""

import functools
import pathlib

import jax
import jax.numpy as jnp
import optax
import pytest
import t5x_world
from checkout import read_lines
from t5x_world import (
  Devices,
  assert_equal,
  at_step,
  first_state,
  make,
  seqio,
  t5x_eval,
  utils,
  world,  # noqa: F401  (a fixture)
)
from test_local import EVALUATION, IDP, model_of, run_of, train
from test_t5x_checkpoints import STEP, dense_state, write

from nm_sparsity_jax.trainer import checkpoints
from nm_sparsity_jax.training import configure

pytestmark = t5x_world.MARKS


def scores_in(folder):
  (path,) = (folder / "inference_eval").glob("nm_test_sort-metrics.jsonl")
  return read_lines(path)


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
  folder = tmp_path_factory.mktemp("run")
  periods = dict(eval_period=13, stats_period=24, metrics_every=None)
  run = run_of(folder, optimizer=optax.adamw(0.02), **periods)
  with jax.numpy_dtype_promotion("strict"):
    assert train.train(run) == 0
  return str(folder / "checkpoint_13")


def evaluated_by_t5x(model, path, folder):
  """Evaluates a checkpoint as t5x.eval does."""
  (folder / "inference_eval").mkdir(parents=True)
  t5x_eval.evaluate(
    model=model,
    dataset_cfg=utils.DatasetConfig(
      mixture_or_task_name="nm_test_sort", task_feature_lengths=None, split="validation",
      batch_size=32, shuffle=False, seed=42, pack=False,
    ),
    restore_checkpoint_cfg=utils.RestoreCheckpointConfig(
      path=path, mode="specific", dtype="float32"
    ),
    partitioner=Devices(),
    output_dir=str(folder),
    inference_evaluator_cls=functools.partial(seqio.Evaluator, logger_cls=[seqio.JSONLogger]),
    summarize_config_fn=lambda **kwargs: None,
  )  # fmt: skip


def test_t5x_evaluates_a_local_checkpoint_as_a_dense_one(ran, tmp_path):
  """Half of the way, its weights are those of the pattern then: T5X's dense model takes them."""
  assert pathlib.Path(ran, "dataset").is_dir()  # T5X asks for it where its own run starts from this
  beams = 3  # of one beam, test_t5_t5x.py and test_huggingface.py have the greedy texts
  evaluation = functools.partial(EVALUATION, num_decodes=beams)
  train.evaluate(model_of(), evaluation, ran, str(tmp_path / "a"))
  model = make(None, "ours")
  model.predict_batch_with_aux = functools.partial(model.predict_batch_with_aux, num_decodes=beams)
  evaluated_by_t5x(model, ran, tmp_path / "t5x")
  (got,), (want,) = scores_in(tmp_path / "a"), scores_in(tmp_path / "t5x")
  assert got == want and got["step"] == 13
  # Not only the score: every prediction.
  name = "inference_eval/nm_test_sort-000013.jsonl"
  predictions = lambda folder: [x["prediction"] for x in read_lines(folder / name)]
  assert predictions(tmp_path / "a") == predictions(tmp_path / "t5x")
  assert len(set(predictions(tmp_path / "a"))) > 3


def test_a_run_starts_from_t5x(tmp_path):
  model, state = dense_state("t5")
  path = write("orbax", model, state, tmp_path / "dense")
  local = model_of()
  params, kept, number = checkpoints.load_initial(str(path), local, jax.random.PRNGKey(0))
  assert number == STEP and kept == {}
  assert_equal(params, state.params)
  dense = model_of(recipe="dense", pattern=None)
  got = checkpoints.load_for_evaluation(checkpoints.opened(str(path), dense), dense)
  assert_equal(got["params"], state.params)
  with pytest.raises(ValueError, match="is dense"):
    checkpoints.load_for_evaluation(checkpoints.opened(str(path), local), local)


def test_a_sparse_checkpoint_of_t5x_is_evaluated(tmp_path):
  model = make(configure.rules({"ff": None}, **IDP), "ours")
  state = at_step(model, first_state(model), 5)
  path = str(write("orbax", model, state.replace_step(jnp.int32(1005)), tmp_path / "sparse"))
  local = model_of()
  got = checkpoints.load_for_evaluation(checkpoints.opened(path, local), local)
  assert_equal(got["params"], model.effective(state.params, state.flax_mutables))
  other = model_of(pattern="1:4")
  with pytest.raises(ValueError, match=r"the rules \[ff: idp 1:8.*has \[ff: idp 1:4"):
    checkpoints.load_for_evaluation(checkpoints.opened(path, local), other)
