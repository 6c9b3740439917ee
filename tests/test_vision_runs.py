"""Runs on images by gin files: every command, killed in every phase, one device and eight."""

import json
import pathlib
import shutil
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from checkpoint_files import assert_same, read

import nm_sparsity_jax as nms
from nm_sparsity_jax import cli
from nm_sparsity_jax.analysis.report import reading, scored
from nm_sparsity_jax.integrations import gin_files
from nm_sparsity_jax.models import resnet, swin, vit
from nm_sparsity_jax.trainer.images import rebus, source
from nm_sparsity_jax.trainer.workloads import vision
from nm_sparsity_jax.training import configure, flops

pytest.importorskip("clu", reason="the local runner needs clu: pip install -e '.[local]'")
pytestmark = [
  pytest.mark.filterwarnings("ignore"),  # what it imports warns on its own account
]

with warnings.catch_warnings():
  warnings.simplefilter("ignore")
  from nm_sparsity_jax.trainer import step

ROOT = pathlib.Path(__file__).resolve().parents[1]
STEPS = 10
# All phases in ten steps, and all that is drawn or kept beside parameters.
MACROS = dict(
  RECIPE="idp", PATTERN="1:8", SPARSITY_RULES={"conv": None}, SPARSE_STEPS=STEPS,
  DENSE_STEPS=2, FINETUNE_STEPS=3, DATA="rebus", BATCH_SIZE=8, LOSS="sigmoid", MIXUP=0.5,
  CUTMIX=1.0, LABEL_SMOOTHING=0.1, DROP_PATH=0.2, CLIP_NORM=1.0, EMA_DECAY=0.5, LEARNING_RATE=0.01,
  WARMUP_STEPS=2, EVAL_PERIOD=4, EVAL_STEPS=2, CHECKPOINT_PERIOD=1, STATS_PERIOD=1,
  METRICS_EVERY=None, KEEP_CHECKPOINTS=None,
)  # fmt: skip
GIVEN = ("DATA", "BATCH_SIZE", "LOSS", "DROP_PATH")  # what an evaluation wants to be told


@pytest.fixture(scope="module")
def model(tmp_path_factory):
  """A gin file of a tiny ResNet."""
  path = tmp_path_factory.mktemp("model") / "tiny.gin"
  path.write_text(
    "from __gin__ import dynamic_registration\nfrom nm_sparsity_jax.models import resnet\n"
    "include 'gin_configs/models/resnet.gin'\nIMAGE_SIZE = 16\nCLASSES = 10\n"
    "resnet.config:\n  name = 'resnet_test'\n  depths = (1,)\n  widths = (8,)\n"
  )
  return path


def words(model, run="local_images", **macros):
  """The flags of a command."""
  files = [f"gin_configs/runs/{run}.gin", str(model)]
  files += ["gin_configs/runs/local_images_adamw.gin"] if run == "local_images" else []
  return [
    f"--gin_search_paths={gin_files.folder()}", *(f"--gin_file={name}" for name in files),
    *(f"--gin.{name}={value!r}" for name, value in macros.items()),
  ]  # fmt: skip


def asked(model, run, **macros):
  """The flags of an evaluation: its rules are the checkpoint's."""
  return words(model, f"local_images_{run}", **{k: MACROS[k] for k in GIVEN}, **macros)


@pytest.fixture(scope="module")
def trained(model, tmp_path_factory):
  folder = tmp_path_factory.mktemp("images") / "run"
  assert cli.main(["train", *words(model, **MACROS, MODEL_DIR=str(folder))]) == 0
  return folder


def test_it_trains_and_says_what_it_is(trained):
  saved = read(trained, STEPS)
  stats = [k for k in saved if k.startswith("flax_mutables/batch_stats/") and k.endswith("mean")]
  assert len(stats) == 5 and all(np.any(saved[k]) for k in stats)
  assert [k for k in saved if k.startswith("state/average/target/")]
  lines = [json.loads(x) for x in (trained / "train/metrics.jsonl").read_text().splitlines()]
  assert {"accuracy", "accuracy_top5", "grad_norm", "learning_rate"} < set(lines[-1])
  noted = json.loads((trained / "run.json").read_text())["workload"]
  assert noted["class"] == "nm_sparsity_jax.trainer.workloads.vision.Images"
  params = sum(x.size for k, x in saved.items() if k.startswith("target/"))
  assert flops.Cost(tuple(flops.Op(**op) for op in noted["ops"])).params == params
  found = json.loads((trained / "evaluations.json").read_text())
  assert [e["at_target"] for e in found] == [False, True, True]
  assert set(found[0]["metrics"]["validation"]) == {"accuracy", "accuracy_top5"}


@pytest.mark.parametrize(
  "done",
  [
    pytest.param(1, id="dense", marks=pytest.mark.slow),
    pytest.param(4, id="sparsify"),
    pytest.param(8, id="fine-tune"),
  ],
)
def test_killed_and_resumed_it_has_the_same_bits(done, model, trained, tmp_path):
  """What a kill leaves: the checkpoints so far, and a part of the next."""
  folder = tmp_path / "run"
  shutil.copytree(trained, folder)
  for later in range(done + 1, STEPS + 1):
    shutil.rmtree(folder / f"checkpoint_{later}")
  (folder / f"checkpoint_{done + 1}.orbax-checkpoint-tmp-7/state").mkdir(parents=True)
  assert cli.main(["train", *words(model, **MACROS, MODEL_DIR=str(folder))]) == 0
  assert_same(read(folder, STEPS), read(trained, STEPS))
  for file in ("train/metrics.jsonl", "training_eval/validation/metrics.jsonl", "evaluations.json"):
    assert (folder / file).read_text() == (trained / file).read_text()


def test_eval_and_infer_agree_with_the_run(model, trained, tmp_path, capsys):
  where = dict(CHECKPOINT_PATH=str(trained / f"checkpoint_{STEPS}"))
  command = asked(model, "eval", **where, EVAL_STEPS=2, EVAL_OUTPUT_DIR=str(tmp_path / "e"))
  assert cli.main(["eval", *command]) == 0
  out = capsys.readouterr().out
  assert "the moving average of its parameters" in out and "accuracy_top5" in out
  (alone,) = (tmp_path / "e/training_eval/validation/metrics.jsonl").read_text().splitlines()
  then = (trained / "training_eval/validation/metrics.jsonl").read_text().splitlines()[-1]
  assert json.loads(alone) == json.loads(then)

  assert (
    cli.main(["infer", *asked(model, "infer", **where, INFER_OUTPUT_DIR=str(tmp_path / "i"))]) == 0
  )
  lines = (tmp_path / "i/validation-predict.jsonl-00000-of-00001").read_text().splitlines()
  assert len(lines) == 2048  # a split whose last batch is full has no other rows
  said = [json.loads(line)["prediction"] for line in lines[:16]]
  labels = np.concatenate([b["label"] for b in list(rebus.Rebus(8).splits()["validation"])[:2]])
  right = np.mean([row["label"] for row in said] == labels)
  assert right == pytest.approx(json.loads(alone)["accuracy"])
  assert all(0 <= row["probability"] <= 1 for row in said)


def test_finalize_and_verify(trained, tmp_path, capsys):
  final = tmp_path / "final"
  assert cli.main(["finalize", str(trained), str(final)]) == 0
  assert "of the moving average of its parameters" in capsys.readouterr().out
  assert cli.main(["verify", str(final)]) == 0
  saved, before = read(final, STEPS), read(trained, STEPS)
  kernel = saved["target/layer1_0/conv2/kernel"]
  groups = kernel.reshape(3, 3, -1, 8, kernel.shape[-1])
  assert (np.count_nonzero(groups, axis=3) <= 1).all()  # input channels at one offset
  statistics = [key for key in before if key.startswith("flax_mutables/batch_stats/")]
  assert statistics
  for key in statistics:
    np.testing.assert_array_equal(saved[key], before[f"state/average/{key}"])


def test_plan(model, tmp_path, capsys):
  command = words(model, **MACROS, MODEL_DIR=str(tmp_path / "run"))
  assert cli.main(["plan", "--json", *command]) == 0
  report = json.loads(capsys.readouterr().out)
  kernels = [k["path"] for k in report["kernels"]["sparse"]]
  assert kernels and not any("downsample" in k or k.startswith("conv1") for k in kernels)
  once = report["cost"]["inference"]
  assert 0 < once["sparse"] < once["dense"]
  for macros, said in (
    (dict(IMAGE_SIZE=32), "set IMAGE_SIZE=16"),
    (dict(CLASSES=5), "set CLASSES=10"),
    (dict(MICROBATCHES=3), "BATCH_SIZE=8 must be a multiple of 3 microbatches"),
    (dict(SPARSITY_RULES={"stem": "1:8"}), "INDIVISIBLE"),
    (dict(SPARSITY_RULES={"ff": "1:8"}), "have stem, conv, shortcut, head"),
    (dict(LOSS="hinge"), "LOSS='hinge'"),
  ):
    command = words(model, **MACROS | macros, MODEL_DIR=str(tmp_path / "run"))
    assert cli.main(["plan", *command]) == 1
    out = capsys.readouterr().out
    assert said in out, out


def test_report_and_a_sweep_that_is_checked(model, trained, tmp_path, monkeypatch, capsys):
  """The score is top-1. Data are looked at before anything starts."""
  runs = reading.read([trained])
  assert scored.measures(runs[0])["validation"].metrics == ("accuracy",)
  assert cli.main(["report", str(trained), "--out", str(tmp_path / "report.html")]) == 0
  monkeypatch.chdir(tmp_path)
  files = [f"gin_configs/runs/local_images{name}.gin" for name in ("", "_adamw")]
  macros = {k: v for k, v in MACROS.items() if k not in ("RECIPE", "PATTERN", "SPARSITY_RULES")}
  macros |= dict(BATCH_SIZE=9)
  lines = [f"{k} = {json.dumps(v)}" for k, v in macros.items() if v is not None]
  (tmp_path / "conv.gin").write_text(model.read_text() + "SPARSITY_RULES = {'conv': None}\n")
  (tmp_path / "sweep.toml").write_text(
    f"out = 'runs'\ngin_files = {[*files, 'conv.gin']}\nrecipes = ['idp']\npatterns = ['1:8']\n"
    "seeds = [0]\nbaseline = 'idp'\ndense = false\n[macros]\n" + "\n".join(lines)
  )
  assert cli.main(["sweep", "sweep.toml"]) == 1
  assert "BATCH_SIZE=9: MIXUP and CUTMIX mix rows in pairs" in capsys.readouterr().err
  assert not (tmp_path / "runs" / "idp-1-8-seed0").exists()


# --- files and families -------------------------------------------------------------------------


FILES = {
  "models/vit": vit.config("vit_b16"),
  "models/swin": swin.config("swinv2_b_w8"),
  "models/resnet": resnet.config("resnet50"),
  "runs/local_rebus": None,
}


def test_every_model_file_makes_its_network():
  for name, wanted in FILES.items():
    files = ["gin_configs/runs/local_images.gin", f"gin_configs/{name}.gin"]
    with gin_files.Config([gin_files.folder()], files, ["DATA = 'rebus'"]) as config:
      workload = vision.Images(config.value("NETWORK"), source.Source())
    assert workload.cost().flops
    made = workload.network.config
    if wanted is not None:
      assert made == wanted
    else:
      assert (made.layers, made.embed, made.mlp, made.patch, made.tokens) == (2, 128, 512, 8, 5)


def test_eight_devices_take_the_gradient_of_one():
  """Two share each kernel of feed-forward and attention, four the batch."""
  network = vit.ViT(vit.config("vit_test", patch=8))
  workload = vision.Images(network, rebus.Rebus(8))
  rules = configure.rules({"ff": "1:8"}, "mdgf_linear", sparse_steps=4)
  optimizer, key = optax.sgd(0.1), jax.random.PRNGKey(0)
  found = {}
  for devices, partitions in ((1, 1), (8, 2)):
    model = step.Model(workload, rules, partitions, jax.devices()[:devices])
    params, collections = model.initial(key)
    state = model.begin(params, optimizer, 0, collections)
    first, update = jax.device_get(state.params), model.train_step(optimizer, key, state)
    state, sums = update(state, model.put(next(workload.batches(0, 0))))
    # D is 1, then between, and 0 at the end; one device masks the state of eight to the same bits.
    masked = [jax.device_get(model.effective(state.dense, jnp.int32(at), {})) for at in range(5)]
    found[devices] = (
      first,
      (jax.device_get(state.params), sums),
      (jax.device_get(state.dense), masked),
    )
  kernel = state.params["blocks_0"]["mlp"]["fc1"]["kernel"]
  assert kernel.sharding.shard_shape(kernel.shape) == (32, 32)
  jax.tree.map(np.testing.assert_array_equal, found[1][0], found[8][0])
  near = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
  jax.tree.map(near, found[1][1], found[8][1])
  dense, masked = found[8][2]
  for at in range(5):
    alone = nms.sparsify(dense, model.given_rules.with_logical_axes(axes_of(workload)), at)
    jax.tree.map(np.testing.assert_array_equal, alone, masked[at])


def axes_of(workload):
  return jax.eval_shape(workload.init, jax.random.PRNGKey(0))["params_axes"]
