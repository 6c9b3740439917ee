"""A run that is refused says one line, soon, and leaves its folder as it was."""

import dataclasses
import pathlib

import pytest
import test_local
from test_local import GIN, command

from nm_sparsity_jax import cli
from nm_sparsity_jax.cli import _local
from nm_sparsity_jax.runs import checkpoint
from nm_sparsity_jax.trainer import checkpoints, train

MACROS = dict(RECIPE="sr_ste", PATTERN="1:4", SPARSE_STEPS=2)


def refused(capsys, *argv):
  """The one line of a command that is refused."""
  capsys.readouterr()
  assert cli.main([*argv]) == 1
  (line,) = capsys.readouterr().err.splitlines()
  return line


def test_a_vocabulary_too_small_makes_no_folder_and_starts_no_thread(tmp_path, capsys, monkeypatch):
  def made(*_):
    raise AssertionError("Orbax was started")

  monkeypatch.setattr(checkpoints, "Checkpoints", made)
  where = dict(MODEL_DIR=str(tmp_path / "a/run"), VOCAB_SIZE=128)
  line = refused(capsys, "train", *command(*GIN, **MACROS, **where))
  assert "VOCAB_SIZE=384" in line
  assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
  "program, files, macros, word",
  [
    ("train", GIN, {"MIXTURE_OR_TASK_MODULE": "no_such.one"}, "no_such.one"),
    ("train", GIN, {"INITIAL_CHECKPOINT_PATH": "none/checkpoint_7"}, "INITIAL_CHECKPOINT_PATH"),
    ("eval", ["local_eval.gin"], {"CHECKPOINT_PATH": "none/checkpoint_7"}, "CHECKPOINT_PATH"),
  ],
)
def test_a_module_or_a_checkpoint_that_is_not_there(
  program, files, macros, word, tmp_path, capsys, monkeypatch
):
  monkeypatch.setattr(_local, "_prepare_seqio", lambda _: pytest.fail("seqio was imported"))
  where = {"EVAL_OUTPUT_DIR" if program == "eval" else "MODEL_DIR": str(tmp_path / "run")}
  line = refused(capsys, program, *command(*files, **MACROS, **macros, **where))
  assert word in line and str(pathlib.Path.cwd()) in line
  assert not list(tmp_path.iterdir())


def test_a_run_that_goes_on_needs_its_start_no_more(tmp_path, monkeypatch):
  (tmp_path / "checkpoint_1/state").mkdir(parents=True)
  (tmp_path / "checkpoint_1/state/_METADATA").touch()
  macros = {"MODEL_DIR": str(tmp_path), "INITIAL_CHECKPOINT_PATH": "/no/checkpoint_1"}
  config = type("Config", (), {"get": lambda _, name: macros.get(name)})()
  _local._refuse_missing(config)


@pytest.mark.parametrize("program", ["train", "evaluate", "infer"])
def test_a_late_refusal_leaves_what_is_in_the_folder(program, tmp_path, monkeypatch):
  """It is seen when the folder is held; config.gin there may be the user's."""
  (tmp_path / "config.gin").write_text("mine")
  start = tmp_path / "start/checkpoint_3"
  checkpoint.write(str(start), {"target": {"w": test_local.np.zeros(3, "float32")}})
  with pytest.raises(ValueError, match="another model"):
    if program == "train":
      run = test_local.run_of(tmp_path, initial_checkpoint=str(start))
      train.train(run, config="theirs")
    else:
      model = test_local.model_of(**test_local.DENSE)
      judge = getattr(train, program)
      judge(model, test_local.EVALUATION, str(start), str(tmp_path), "theirs")
  assert (tmp_path / "config.gin").read_text() == "mine"


@pytest.mark.parametrize(
  ("change", "word"),
  [({"name": "nm_test_sor"}, "did you mean nm_test_sort"), ({"split": "dev"}, "EVAL_SPLIT='dev'")],
)
def test_an_unknown_task_is_refused_before_a_checkpoint_is_read(change, word, tmp_path):
  judged = dataclasses.replace(test_local.EVALUATION, **change)
  with pytest.raises(ValueError, match=word):  # there is no checkpoint
    train.evaluate(test_local.model_of(), judged, "checkpoint_3", str(tmp_path / "a"))
  assert not list(tmp_path.iterdir())
