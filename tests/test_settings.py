"""runs.settings: what a resumed run must share."""

import json
import math
import pathlib

import pytest

from nm_sparsity_jax.integrations import gin_files
from nm_sparsity_jax.runs import settings

ROOT = pathlib.Path(__file__).resolve().parents[1]
NAMES = {
  "model", "optimizer", "data_seed", "model_dir", "sparse_steps", "initial_checkpoint",
  "pretrained_steps", "microbatches", "random_seed",
}  # fmt: skip


def with_checkpoint(folder):
  (folder / "checkpoint_3/state").mkdir(parents=True)
  (folder / "checkpoint_3/state/_METADATA").touch()
  return folder


def config(**changes):
  """The bound arguments of a run, but for changes of macros."""
  pytest.importorskip("gin")
  pytest.importorskip("seqio", reason="the local runner needs it")
  runs = "gin_configs/runs/local"
  files = ["gin_configs/models/t5.gin", f"{runs}_adamw.gin", f"{runs}_train.gin"]
  macros = dict(
    T5_SIZE="tiny",
    MODEL_DIR="run", RECIPE="idp", PATTERN="1:4", SPARSE_STEPS=9, MIXTURE_OR_TASK_NAME="x",
    TASK_FEATURE_LENGTHS={"inputs": 8, "targets": 4},
    SPARSITY_RULES={"ff": None, "decoder/qkv": "2:4"}, DROPOUT_RATE=0.1,
  )  # fmt: skip
  bindings = [f"{name} = {value!r}" for name, value in (macros | changes).items()]
  bindings.append("t5.T5.lengths = (8,)")
  made = gin_files.Config([ROOT], [*files, "gin_configs/sparsity.gin"], bindings)
  assert not made.errors
  return {name: value for name, value in made.settings("Run").items() if name in NAMES}


def test_settings_are_nested_plain_values():
  found = config()
  assert found == json.loads(json.dumps(found))
  assert found["sparse_steps"] == 9 and found["model"]["workload"]["data"][""] == "Source"
  assert found["model"]["workload"]["lengths"] == [8]
  assert found["model"]["rules"]["places"] == {"ff": None, "decoder/qkv": "2:4"}
  assert found["optimizer"]["learning_rate"]["rate"] == 0.001


def test_values_without_a_form_in_json_keep_their_text():
  pytest.importorskip("gin")
  bindings = ["from __gin__ import dynamic_registration", "import fractions"]
  bindings.append("fractions.Fraction.numerator = {1: b'x', 2: {'': 3j}}")
  found = gin_files.Config([], [], ["\n".join(bindings)]).settings("Fraction")["numerator"]
  assert found == {
    "": "{}", "1": {"": "=", "text": "b'x'"}, "2": {"": "{}", "''": {"": "=", "text": "3j"}},
  }  # fmt: skip
  assert settings.text(found) == "{1: b'x', 2: {'': 3j}}"


def test_a_new_run_compares_values(tmp_path):
  folder = tmp_path / "run"
  folder.mkdir()
  settings.agree(folder, config())
  assert settings.changed(folder, config(PATTERN="1:8")) == ""  # no checkpoint: it may begin anew
  settings.agree(folder, config(PATTERN="1:8"))
  with_checkpoint(folder)
  now = config(PATTERN="1:8", DATA_SEED=3, SPARSITY_RULES={"ff": "1:2"})
  assert settings.changed(folder, now) == (
    "data_seed was 0, and is 3; model.rules.places.'decoder/qkv' was '2:4', and is not set; "
    "model.rules.places.'ff' was None, and is '1:2'"
  )
  del now["microbatches"]
  assert "microbatches was 1, and is not set" in settings.changed(folder, now)
  before = (folder / "settings.json").read_bytes()
  settings.agree(folder, config(PATTERN="1:8"))
  with pytest.raises(
    ValueError, match=r"model\.rules\.pattern was '1:8', and is '1:4'\. Keep the old"
  ):
    settings.agree(folder, config())
  assert (folder / "settings.json").read_bytes() == before


@pytest.mark.parametrize(
  "old, new, found",
  [
    (1, True, [("x", "1", "True")]),
    (1, 1.0, [("x", "1", "1.0")]),
    (math.nan, math.nan, []),
    ([4], 4, [("x", "(4)", "4")]),
    ([4], [5], [("x", "4", "5")]),
    ([1, 2], [1, 3], [("x", "(1, 2)", "(1, 3)")]),
    ({"a": 1, "b": 2}, {"b": 2, "a": 1}, []),
    ({"a": 1}, {"b": 1}, [("x.'a'", "1", "not set"), ("x.'b'", "not set", "1")]),
    ({"": "F", "a": 1}, {"": "G", "a": 1}, [("x", "F(a=1)", "G(a=1)")]),
    ({"": "F", "a": [{"": "G", "b": 1}]}, {"": "F", "a": [{"": "G"}]}, [("x.a.b", "1", "not set")]),
    ({"": "=", "text": "b'1'"}, {"": "=", "text": "b'2'"}, [("x", "b'1'", "b'2'")]),
    ({"": "{}", "1": 2}, {"": "{}", "1": 3}, [("x.1", "2", "3")]),
  ],
)  # fmt: skip
def test_differences_name_the_innermost(old, new, found):
  assert list(settings.differences("x", old, new)) == found


def test_a_message_names_six_and_counts_the_rest(tmp_path):
  before = {f"s{i}": i for i in range(8)}
  settings.write(tmp_path, before)
  text = settings.changed(with_checkpoint(tmp_path), dict.fromkeys(before, -1))
  assert text.count("was") == 6 and text.endswith("; and 2 more")


def test_checkpoints_of_another_program_are_refused(tmp_path):
  settings.refuse_changed(tmp_path / "none", {})
  with pytest.raises(ValueError, match="another program wrote"):
    settings.refuse_changed(with_checkpoint(tmp_path), {})
