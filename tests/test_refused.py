"""A run that is refused says one line, soon, and leaves its folder as it was."""

import dataclasses
import pathlib
import types

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


def files_of(folder, kept=()):
  """What lies in a folder; first writes these into its a/b, as a user may have."""
  for name in kept:
    (folder / "a/b").mkdir(parents=True, exist_ok=True)
    (folder / "a/b" / name).write_text("mine")
  return {p: p.is_file() and p.read_text() for p in folder.rglob("*") if "start" not in p.parts}


@pytest.mark.parametrize("kept", [(), ("mine.txt", "config.gin")])
def test_a_refusal_leaves_the_folder_as_it_was(kept, tmp_path):
  """The start is of another model, which is seen when the folder has been made."""
  start = tmp_path / "start/checkpoint_3"
  checkpoint.write(str(start), {"target": {"w": test_local.np.zeros(3, "float32")}})
  before = files_of(tmp_path, kept)
  with pytest.raises(ValueError, match="another model"):
    train.train(test_local.run_of(tmp_path / "a/b", initial_checkpoint=str(start)), config="theirs")
  assert files_of(tmp_path) == before


@pytest.mark.parametrize("program, kept", [("evaluate", ()), ("infer", ("mine.txt", "config.gin"))])
def test_an_evaluation_that_is_refused_leaves_its_folder_as_it_was(
  program, kept, tmp_path, monkeypatch
):
  stored = types.SimpleNamespace(
    path="checkpoint_3", step=3, sparse_step=3, average=False, packed=None
  )
  monkeypatch.setattr(checkpoints, "opened", lambda *_: stored)
  monkeypatch.setattr(checkpoints, "load_for_evaluation", lambda *_: {"params": {}})
  before = files_of(tmp_path, kept)

  def refuses(*_):
    raise ValueError("late")

  monkeypatch.setattr(type(test_local.EVALUATION), "evaluator", refuses)
  with pytest.raises(ValueError, match="late"):
    getattr(train, program)(
      test_local.model_of(), test_local.EVALUATION, "checkpoint_3", str(tmp_path / "a/b"), "theirs"
    )
  assert files_of(tmp_path) == before


@pytest.mark.parametrize(
  ("change", "word"),
  [({"name": "nm_test_sor"}, "did you mean nm_test_sort"), ({"split": "dev"}, "a split 'dev'")],
)
def test_an_unknown_task_is_refused_before_a_checkpoint_is_read(change, word, tmp_path):
  judged = dataclasses.replace(test_local.EVALUATION, **change)
  with pytest.raises(ValueError, match=word):  # there is no checkpoint
    train.evaluate(test_local.model_of(), judged, "checkpoint_3", str(tmp_path / "a"))
  assert not list(tmp_path.iterdir())
