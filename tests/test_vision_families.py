"""The local runner on a family that other tests of runs do not train: Swin, in bfloat16."""

import json
import shutil

import numpy as np
import pytest
from checkpoint_files import assert_same, read

from nm_sparsity_jax import cli
from nm_sparsity_jax.integrations import gin_files

pytest.importorskip("clu", reason="the local runner needs clu: pip install -e '.[local]'")
pytestmark = [
  pytest.mark.filterwarnings("ignore"),  # what it imports warns on its own account
]
# Windows of 2 x 2 patches of 4 x 4.
SWIN = """from __gin__ import dynamic_registration
include 'gin_configs/models/swin.gin'
from nm_sparsity_jax.models import swin
swin.config:
  name = 'swinv2_test'
  depths = (1,)
  heads = (1,)
  window = 2
IMAGE_SIZE = 16
CLASSES = 10
"""
MACROS = dict(
  DATA="rebus", BATCH_SIZE=8, DTYPE="bfloat16", RECIPE="sr_ste", PATTERN="1:4",
  SPARSITY_RULES={"ff": None, "qk": "2:4"}, SPARSE_STEPS=4, DENSE_STEPS=1, FINETUNE_STEPS=1,
  EVAL_PERIOD=4, EVAL_STEPS=1, CHECKPOINT_PERIOD=2, STATS_PERIOD=1, METRICS_EVERY=None,
  KEEP_CHECKPOINTS=None, LEARNING_RATE=0.01, WARMUP_STEPS=1,
)  # fmt: skip


def train(folder, text=SWIN, **macros):
  """Trains a network of 16 x 16 pixels; returns the exit code."""
  (folder / "model.gin").write_text(text)
  files = ["gin_configs/runs/local_images.gin", str(folder / "model.gin"),
           "gin_configs/runs/local_images_adamw.gin"]  # fmt: skip
  words = [*(f"--gin_file={name}" for name in files),
           *(f"--gin.{name}={value!r}" for name, value in (MACROS | macros).items())]  # fmt: skip
  return cli.main(["train", f"--gin_search_paths={gin_files.folder()}", *words])


def test_a_swin_trains_in_bfloat16_resumes_and_is_proven(tmp_path, capsys):
  run, final = tmp_path / "run", tmp_path / "final"
  assert train(tmp_path, MODEL_DIR=str(run)) == 0
  whole = read(run, 4)
  assert all(x.dtype == np.float32 for k, x in whole.items() if k.startswith("target/"))
  shutil.rmtree(run / "checkpoint_4")
  assert train(tmp_path, MODEL_DIR=str(run)) == 0
  assert_same(read(run, 4), whole)

  assert cli.main(["finalize", str(run), str(final)]) == 0
  capsys.readouterr()
  assert cli.main(["verify", "--json", str(final)]) == 0
  places = {p["path"]: p["pattern"] for p in json.loads(capsys.readouterr().out)["places"]}
  kinds = {("mlp/fc" in path, pattern) for path, pattern in places.items()}
  assert len(places) == 4 and kinds == {(True, "1:4"), (False, "2:4")}

  # No shape tells the window: the finalized checkpoint does.
  flags = dict(INITIAL_CHECKPOINT_PATH=f"{final}/checkpoint_4", MODEL_DIR=f"{tmp_path}/next")
  assert train(tmp_path, SWIN.replace("window = 2", "window = 4"), **flags) == 1
  said = " ".join("".join(capsys.readouterr()).split())
  assert "window=2, and this network has window=4" in said
  assert not (tmp_path / "next").exists()
