"""Runs on images by gin files: every command, killed in every phase, one device and eight."""

import functools
import itertools
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

from nm_sparsity_jax import cli
from nm_sparsity_jax.analysis.report import reading, scored
from nm_sparsity_jax.deploy import timm
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
  from nm_sparsity_jax.trainer import checkpoints, optimizers, step

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


def test_a_checkpoint_of_other_classes_or_another_image_size_names_the_setting(trained, tmp_path):
  """A ResNet has no weight that hangs on the size of images; the positions of a ViT do."""

  def model(network):
    return step.Model(workload=vision.Images(network, rebus.Rebus(8)), devices=jax.devices()[:1])

  config = resnet.config("resnet_test", image_size=16, depths=(1,), widths=(8,), classes=5)
  path = str(trained / f"checkpoint_{STEPS}")
  with pytest.raises(
    ValueError,
    match="^state/average/target/fc/bias has shape .10,. in .* network: set CLASSES as it",
  ):
    checkpoints.load_initial(path, model(resnet.ResNet(config)), jax.random.PRNGKey(0))
  small, large = (model(vit.ViT(vit.config("vit_test", image_size=x))) for x in (16, 32))
  store = checkpoints.Checkpoints(tmp_path, None)
  state = small.begin(small.initial_params(jax.random.PRNGKey(0)), optax.sgd(0.1), 0, {})
  store.save(0, checkpoints.to_tree(state, small.given_rules))
  store.close()
  with pytest.raises(
    ValueError, match="^target/pos_embed has shape .*: set IMAGE_SIZE as it was there.$"
  ):
    checkpoints.load_initial(str(tmp_path / "checkpoint_0"), large, jax.random.PRNGKey(0))


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
    (dict(IMAGE_SIZE=32), "IMAGE_SIZE=32, but DATA='rebus' has pictures of 16: set IMAGE_SIZE=16"),
    (dict(CLASSES=5), "CLASSES=5, but the data have 10 classes: set CLASSES=10"),
    (dict(MICROBATCHES=3), "BATCH_SIZE=8 must be a multiple of 3 microbatches"),
    (dict(BATCH_SIZE=0), "BATCH_SIZE=0: give a whole number, 1 or more"),
    (dict(SPARSITY_RULES={"stem": "1:8"}), "INDIVISIBLE"),
    (dict(SPARSITY_RULES={"ff": "1:8"}), "The network has the roles stem, conv, shortcut, head."),
    (dict(LOSS="hinge"), "LOSS='hinge': choose one of softmax, sigmoid"),
  ):
    command = words(model, **MACROS | macros, MODEL_DIR=str(tmp_path / "run"))
    assert cli.main(["plan", *command]) == 1
    out = capsys.readouterr().out
    assert said in out and out.count("\n  - ") == 1, out
    assert "NETWORK" not in out and "token" not in out, out


def test_plan_needs_a_model_file_alone(model, capsys):
  files = "--gin_file=gin_configs/sparsity.gin", f"--gin_file={model}"
  macros = "--gin.RECIPE='sr_ste'", "--gin.PATTERN='1:8'", "--gin.SPARSITY_RULES={'conv': None}"
  command = f"--gin_search_paths={gin_files.folder()}", *files, *macros, "--gin.SPARSE_STEPS=9"
  assert cli.main(["plan", *command]) == 0
  out = capsys.readouterr().out
  assert "layer1_0/conv1/kernel" in out and "mean loss over examples (conv)" in out
  assert "token" not in out


def test_plan_of_a_start_from_timms_weights(model, tmp_path, capsys):
  config = resnet.config("resnet_test", image_size=16, depths=(1,), widths=(8,))
  shapes = jax.eval_shape(resnet.ResNet(config).init, jax.random.key(0), jnp.zeros((1, 16, 16, 3)))
  path = tmp_path / "model.safetensors"
  timm.write(path, jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes))
  macros = MACROS | dict(MODEL_DIR=str(tmp_path / "run"), INITIAL_CHECKPOINT_PATH=str(path))
  assert cli.main(["plan", *words(model, **macros)]) == 0
  out = capsys.readouterr().out
  assert "(timm" in out and "global steps" in out and "T5X" not in out
  assert cli.main(["plan", *words(model, **macros, CLASSES=5)]) == 1
  assert "fc.bias is (10,) there and (5,) here" in capsys.readouterr().out


def test_an_optimizer_that_is_missing_is_named(model, capsys):
  command = [w for w in words(model, **MACROS, MODEL_DIR="run") if "adamw" not in w]
  assert cli.main(["plan", *command]) == 1
  assert "of images local_images_adamw.gin" in capsys.readouterr().out


def test_a_source_of_a_module_that_no_file_imports_says_where_it_belongs(model, capsys):
  command = [w for w in words(model, **MACROS, MODEL_DIR="run") if "DATA" not in w]
  assert cli.main(["plan", *command, "--gin.DATA=@mine.Source()"]) == 1
  assert "set it in one, below its line `import" in capsys.readouterr().out


def test_report(trained, tmp_path):
  """The score is top-1: top-5 is a metric beside it, and does not count."""
  runs = reading.read([trained])
  assert scored.measures(runs[0])["validation"].metrics == ("accuracy",)
  page = tmp_path / "report.html"
  assert cli.main(["report", str(trained), "--out", str(page)]) == 0
  text = page.read_text()
  assert "Score: accuracy of validation, checkpoint: " in text and "FLOPs" in text
  assert "validation: loss" in text and "Validation loss" not in text


def sweep_file(model, folder):
  files = [
    "gin_configs/runs/local_images.gin",
    str(model),
    "gin_configs/runs/local_images_adamw.gin",
  ]
  macros = {k: v for k, v in MACROS.items() if k not in ("RECIPE", "PATTERN", "SPARSITY_RULES")}
  macros |= dict(SPARSE_STEPS=4, DENSE_STEPS=1, FINETUNE_STEPS=1, EVAL_PERIOD=4)
  lines = [f"{k} = {json.dumps(v)}" for k, v in macros.items() if v is not None]
  path = folder / "sweep.toml"
  path.write_text(
    f"out = 'runs'\ngin_files = {files}\nrecipes = ['dense', 'sr_ste']\npatterns = ['1:4']\n"
    "seeds = [0]\nbaseline = 'sr_ste'\n[macros]\n" + "\n".join(lines)
  )
  return path


def test_a_sweep_is_checked(model, tmp_path, monkeypatch):
  from nm_sparsity_jax.analysis import sweep

  monkeypatch.chdir(tmp_path)
  grid = sweep.read(sweep_file(with_conv(model, tmp_path), tmp_path))
  checked = sweep.check(grid)
  assert [run.steps for run in checked.runs.values()] == [4, 4]
  sweep.check_tasks(grid, checked)


def test_a_sweep_looks_at_its_data_before_anything_starts(model, tmp_path, monkeypatch, capsys):
  monkeypatch.chdir(tmp_path)
  path = sweep_file(with_conv(model, tmp_path), tmp_path)
  path.write_text(path.read_text().replace("BATCH_SIZE = 8", "BATCH_SIZE = 9"))
  assert cli.main(["sweep", str(path)]) == 1
  said = capsys.readouterr()
  assert "sweep.toml: macros: BATCH_SIZE=9: MIXUP and CUTMIX mix rows in pairs" in said.err
  assert not (tmp_path / "runs" / "dense-seed0").exists()


def with_conv(model, folder):
  path = folder / "conv.gin"
  path.write_text(model.read_text() + "SPARSITY_RULES = {'conv': None}\n")
  return path


@pytest.mark.slow
def test_a_sweep_trains(model, tmp_path, monkeypatch, capsys):
  monkeypatch.chdir(tmp_path)
  assert cli.main(["sweep", str(sweep_file(with_conv(model, tmp_path), tmp_path))]) == 0
  capsys.readouterr()
  assert cli.main(["sweep", "sweep.toml", "--json"]) == 0
  report = json.loads(capsys.readouterr().out)
  assert report["done"] == 2 and all(row["loss"]["mean"] > 0 for row in report["rows"])


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


def gradient_of(state):
  """The gradient of the step before."""
  return jax.device_get(optax.tree_utils.tree_get(state.opt_state, "trace"))


def parts_of(model, update, state, batch):
  """The gradient of the mean loss of each device's two rows, by the program of all devices."""
  start, where = jax.device_get(state), jax.tree.map(lambda x: x.sharding, state)
  found = []
  for rows in np.eye(4, dtype=np.int32).repeat(2, axis=1):
    again = jax.device_put(jax.tree.map(np.array, start), where)
    found.append(gradient_of(update(again, model.put(batch | {"real": rows}))[0]))
  return found


def test_eight_devices_take_the_steps_of_one():
  """Two share each kernel of feed-forward and attention, four the batch; blocks are scanned.

  Weights, batches and masks have the same bits. A gradient is a sum over the batch, which four
  devices add up in parts and one in its own order, so it differs by rounding.
  """
  network = vit.ViT(vit.config("vit_test", scan=True, patch=8))
  workload = vision.Images(network, rebus.Rebus(8))
  rules = configure.rules({"ff": "1:8"}, "mdgf_linear", sparse_steps=4)
  rate, key = 0.001, jax.random.PRNGKey(0)
  optimizer = optax.chain(optax.trace(0.0), optimizers.adamw(rate))  # it keeps the gradient
  batches = list(itertools.islice(workload.batches(0, 0), 3))
  models, found, parts = {}, {}, []
  for devices, partitions in ((1, 1), (8, 2)):
    model = models[devices] = step.Model(
      workload=workload, rules=rules, devices=jax.devices()[:devices], num_partitions=partitions,
      ema_decay=0.9,
    )  # fmt: skip
    state = model.begin(model.initial_params(key), optimizer, 0, {})
    first, update = jax.device_get(state.params), model.train_step(optimizer, key, state)
    if devices == 8:
      parts = parts_of(model, update, state, batches[0])
    told = [first, *(jax.device_get(model.put(batch)) for batch in batches)]
    sums, gradient = [], None
    for batch in batches:
      state, got = update(state, model.put(batch))
      sums.append(np.asarray(got.values))
      gradient = gradient or gradient_of(state)
    found[devices] = told, gradient, sums, state
  kernel = state.params["blocks"]["mlp"]["fc1"]["kernel"]
  assert kernel.sharding.shard_shape(kernel.shape) == (2, 32, 32)

  one, eight = found[1], found[8]
  jax.tree.map(np.testing.assert_array_equal, one[0], eight[0])
  # Devices add nothing but their parts, one after the other: the same bits.
  assert len(parts) == 4
  added = functools.reduce(lambda *trees: jax.tree.map(np.add, *trees), parts)
  jax.tree.map(lambda g, total: np.testing.assert_array_equal(4 * g, total), eight[1], added)
  # The state of eight, masked by eight and by one. D is 1, then between, and 0 at the end.
  for at in range(5):
    same = eight[3].replace(opt_state=eight[3].opt_state._replace(count=jnp.int32(at)))
    here = jax.device_put(jax.device_get(same), jax.devices()[0])
    made = [models[8].effective(same.dense, same.sparse_step, same.masks)]
    made.append(models[1].effective(here.dense, here.sparse_step, here.masks))
    jax.tree.map(np.testing.assert_array_equal, *made)
  ulp = np.finfo(np.float32).eps
  largest = max(np.abs(g).max() for g in jax.tree.leaves(one[1]))
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=16 * ulp * largest), one[1], eight[1]
  )
  np.testing.assert_allclose(one[2], eight[2], rtol=1e-4)
  # Adam divides by the size of the gradient: a weight whose gradient is rounding alone, such as a
  # bias of k, may go either way by the learning rate.
  apart = jax.tree.map(lambda a, b: np.abs(a - b).ravel(), *jax.device_get((one[3], eight[3])))
  apart = np.concatenate(jax.tree.leaves(apart.params))
  assert apart.max() <= 2 * rate * len(batches) and np.quantile(apart, 0.99) < 1e-5
