"""The local runner on the families that other tests of runs do not train: Swin, and bfloat16."""

import json
import re
import shutil

import jax
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
SWIN = """
include 'gin_configs/models/swin.gin'
from nm_sparsity_jax.models import swin
swin.config:
  name = 'swinv2_test'
  depths = (1,)
  heads = (1,)
  window = 2
"""
VIT = """
include 'gin_configs/runs/local_rebus.gin'
from nm_sparsity_jax.models import vit
vit.config:
  layers = 1
  embed = 16
"""
DATA = dict(DATA="rebus", BATCH_SIZE=8)
MACROS = dict(
  RECIPE="sr_ste", PATTERN="1:4", SPARSITY_RULES={"ff": None, "qk": "2:4"}, SPARSE_STEPS=4,
  DENSE_STEPS=1, FINETUNE_STEPS=1, EVAL_PERIOD=4, EVAL_STEPS=1, CHECKPOINT_PERIOD=2, STATS_PERIOD=1,
  METRICS_EVERY=None, KEEP_CHECKPOINTS=None, LEARNING_RATE=0.01, WARMUP_STEPS=1,
)  # fmt: skip


def of_gin(flags):
  """The files and the values of flags."""
  named = lambda flag: [w.removeprefix(flag) for w in flags if w.startswith(flag)]
  return named("--gin_file="), named("--gin.")


def words(folder, text, run="local_images", **macros):
  """The flags of a command for a network of 16 x 16 pixels."""
  model = folder / "model.gin"
  model.write_text(f"from __gin__ import dynamic_registration{text}\nIMAGE_SIZE = 16\nCLASSES = 10")
  files = [f"gin_configs/runs/{run}.gin", str(model)]
  files += ["gin_configs/runs/local_images_adamw.gin"] if run == "local_images" else []
  return [
    f"--gin_search_paths={gin_files.folder()}", *(f"--gin_file={name}" for name in files),
    *(f"--gin.{name}={value!r}" for name, value in (DATA | macros).items()),
  ]  # fmt: skip


def test_a_swin_trains_resumes_and_is_proven(tmp_path, capsys):
  run, final = tmp_path / "run", tmp_path / "final"
  command = ["train", *words(tmp_path, SWIN, MODEL_DIR=str(run), **MACROS)]
  assert cli.main(command) == 0
  whole = read(run, 4)
  told = (run / "train/metrics.jsonl").read_text()
  shutil.rmtree(run / "checkpoint_4")
  assert cli.main(command) == 0
  assert_same(read(run, 4), whole)
  assert (run / "train/metrics.jsonl").read_text() == told

  flags = dict(CHECKPOINT_PATH=str(run / "checkpoint_4"), EVAL_OUTPUT_DIR=str(tmp_path / "eval"))
  assert cli.main(["eval", *words(tmp_path, SWIN, "local_images_eval", EVAL_STEPS=1, **flags)]) == 0
  (alone,) = (tmp_path / "eval/training_eval/validation/metrics.jsonl").read_text().splitlines()
  then = (run / "training_eval/validation/metrics.jsonl").read_text().splitlines()[-1]
  assert json.loads(alone) == json.loads(then)

  assert cli.main(["finalize", str(run), str(final)]) == 0
  capsys.readouterr()
  assert cli.main(["verify", "--json", str(final)]) == 0
  places = {p["path"]: p["pattern"] for p in json.loads(capsys.readouterr().out)["places"]}
  kinds = {("mlp/fc" in path, pattern) for path, pattern in places.items()}
  assert len(places) == 4 and kinds == {(True, "1:4"), (False, "2:4")}
  assert not any("cpb" in path or "downsample" in path for path in places)

  # No shape tells the window: the folder of the run does, and then the finalized checkpoint.
  other = SWIN.replace("window = 2", "window = 4")
  told = (run / "checkpoint_4", ("eval", "plan")), (final / "checkpoint_4", ("eval", "train"))
  for made, commands in told:
    words_of = f"{made} was trained with window=2, and this network has window=4, .* to 2"
    flags = dict(CHECKPOINT_PATH=str(made), EVAL_OUTPUT_DIR=str(tmp_path / "no"))
    looked = words(tmp_path, other, "local_images_eval", EVAL_STEPS=1, **flags)
    flags = dict(INITIAL_CHECKPOINT_PATH=str(made), MODEL_DIR=str(tmp_path / "next"))
    started = words(tmp_path, other, **(MACROS | flags))
    for command in commands:
      assert cli.main([command, *(started if command == "train" else looked)]) == 1
      said = " ".join("".join(capsys.readouterr()).split())
      assert re.search(words_of, said), said
  assert not (tmp_path / "no").exists() and not (tmp_path / "next").exists()


def test_a_vit_trains_in_bfloat16(tmp_path):
  run = tmp_path / "run"
  flags = words(tmp_path, VIT, MODEL_DIR=str(run), DTYPE="bfloat16", **MACROS)
  with gin_files.Config([gin_files.folder()], *of_gin(flags)) as config:
    network = config.value("NETWORK")
  images = jax.ShapeDtypeStruct((8, 16, 16, 3), "float32")
  variables = jax.eval_shape(network.init, jax.random.key(0), images)
  program = str(jax.make_jaxpr(network.apply)(variables, images))
  products = [line for line in program.splitlines() if " dot_general" in line]
  assert products and all(":bf16[" in line.partition(" = ")[0] for line in products[:-1])

  assert cli.main(["train", *flags]) == 0
  losses = [json.loads(x)["loss"] for x in (run / "train/metrics.jsonl").read_text().splitlines()]
  assert len(losses) == 4 and all(1 < loss < 4 for loss in losses)
  saved = read(run, 4)
  assert all(x.dtype == np.float32 for k, x in saved.items() if k.startswith("target/"))
  kernel = saved["target/blocks_0/mlp/fc1/kernel"]
  assert cli.main(["finalize", str(run), str(tmp_path / "final")]) == 0
  final = read(tmp_path / "final", 4)["target/blocks_0/mlp/fc1/kernel"]
  kept = final != 0
  np.testing.assert_array_equal(final[kept], kernel[kept])
  assert (kept.reshape(-1, 4, kept.shape[-1]).sum(1) <= 1).all()
