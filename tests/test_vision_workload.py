"""The workload of images: losses, mixing, filled rows, devices, the average, the optimizer."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from nm_sparsity_jax.deploy import timm
from nm_sparsity_jax.models import resnet, swin
from nm_sparsity_jax.trainer import workloads
from nm_sparsity_jax.trainer.images import rebus
from nm_sparsity_jax.trainer.workloads import vision
from nm_sparsity_jax.training import configure

pytest.importorskip("tensorboard", reason="pip install -e '.[local]'")
pytestmark = pytest.mark.filterwarnings("ignore")  # what it imports warns on its own account

with warnings.catch_warnings(action="ignore"):
  from nm_sparsity_jax.trainer import checkpoints, optimizers, step


def resnet_of(**fields):
  sizes = dict(image_size=16, depths=(1,), widths=(8,)) | fields
  return resnet.ResNet(resnet.config("resnet_test", **sizes))


def images_of(batch_size=8, network=None, **fields):
  return vision.Images(network or resnet_of(), rebus.Rebus(batch_size), **fields)


@pytest.fixture(scope="module")
def scored():
  """A workload, parameters, state and a batch."""
  workload = images_of()
  variables = dict(workload.init(jax.random.PRNGKey(0)))
  state = {"batch_stats": variables["batch_stats"]}
  return workload, variables["params"], state, next(workload.batches(0, 0))


# --- losses -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_losses_are_their_definitions(kind, scored):
  _, params, state, batch = scored
  workload = images_of(loss=kind)
  logits = np.asarray(workload._logits(params, state, batch["image"]), np.float64)
  hot = np.eye(10)[batch["label"]]
  log = lambda x: -np.log1p(np.exp(-x))
  log_softmax = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
  by_class = hot * log(logits) + (1 - hot) * log(-logits)
  want = -(hot * log_softmax).sum() if kind == "softmax" else -by_class.mean(-1).sum()
  np.testing.assert_allclose(workload.loss(params, state, batch, None)[0], want, rtol=1e-5)


def test_sums_are_those_of_the_real_rows(scored):
  workload, params, state, batch = scored
  whole, sums, _ = workload.loss(params, state, batch, None)
  parts = [
    workload.loss(params, state, batch | {"real": np.array(real, np.int32)}, None)
    for real in ([1] * 3 + [0] * 5, [0] * 3 + [1] * 5)
  ]
  np.testing.assert_allclose(whole, sum(loss for loss, *_ in parts), rtol=1e-6)
  for name, value in sums.items():
    assert value == sum(found[name] for _, found, _ in parts)
  order = np.argsort(-np.asarray(workload._logits(params, state, batch["image"])), -1)
  right = order == batch["label"][:, None]
  got = float(sums["accuracy"]), float(sums["accuracy_top5"])
  assert got == (right[:, 0].sum(), right[:, :5].sum())
  np.testing.assert_array_equal(workload.predict(params, state, batch)["label"], order[:, 0])


def test_an_evaluation_neither_mixes_nor_smooths_and_a_step_updates_the_statistics(scored):
  plain, params, state, batch = scored
  network = resnet_of(drop_path=0.5)
  all_of_it = images_of(network=network, mixup=0.5, cutmix=1.0, label_smoothing=0.1)
  assert plain.loss(params, state, batch, None)[0] == all_of_it.loss(params, state, batch, None)[0]
  losses = [all_of_it.loss(params, state, batch, jax.random.PRNGKey(i)) for i in (1, 1, 2)]
  assert losses[0][0] == losses[1][0] != losses[2][0]
  mean = lambda state: state["batch_stats"]["bn1"]["mean"]
  assert not np.array_equal(mean(losses[0][2]), mean(state))


@pytest.mark.parametrize("mixup, cutmix", [(0.8, 0.0), (0.0, 1.0)])
def test_rows_are_mixed_with_their_partner_by_the_share_of_its_target(mixup, cutmix):
  """Mixup blends all pixels; cutmix shows the partner in one box."""
  rows = jnp.arange(8, dtype=jnp.float32).reshape(8, 1, 1, 1) * jnp.ones((8, 16, 12, 3))
  targets = jax.nn.one_hot(jnp.arange(8), 10)
  mix = jax.jit(lambda key: vision.mixed(rows, targets, key, mixup, cutmix))
  shares = []
  for image, target in (jax.device_get(mix(jax.random.PRNGKey(i))) for i in range(40)):
    shares.append(target[0, 0])
    for row, other in ((0, 1), (7, 6)):
      share = target[row, row]
      np.testing.assert_allclose(target[row, other], 1 - share, atol=1e-6)
      # Of either kind the mean over the pixels is that of the targets.
      wanted = share * row + (1 - share) * other
      np.testing.assert_allclose(image[row].mean(), wanted, rtol=1e-5, atol=1e-6)
      theirs = image[row, ..., 0] == other
      is_box = theirs.sum() == theirs.any(1).sum() * theirs.any(0).sum()
      assert is_box if cutmix else np.ptp(image[row]) == 0
  assert np.std(shares) > 0.15
  with pytest.raises(TypeError, match="cannot reshape"):  # rows that have no partner
    vision.mixed(rows[:7], targets[:7], jax.random.key(0), mixup, cutmix)


# --- devices and the average --------------------------------------------------------------------


def test_devices_change_nothing():
  """Parameters, statistics, sums and the average of two steps are those of one device.

  Batch statistics are those of the whole batch, and pairs are mixed as on one device.
  """
  key, optimizer, found = jax.random.PRNGKey(0), optax.sgd(0.1), []
  workload = images_of(16, mixup=0.8, cutmix=1.0, label_smoothing=0.1)
  rules = configure.rules({".*/conv3/kernel": "1:8"}, "mdgf_linear", sparse_steps=4)
  for devices in (1, 8):
    model = step.Model(workload, rules, devices=jax.devices()[:devices], ema_decay=0.75)
    params, collections = model.initial(key)
    state = model.begin(params, optimizer, 0, collections)
    update = model.train_step(optimizer, key)
    for i in range(2):
      state, sums = update(state, model.put(next(workload.batches(0, i))))
    found.append(jax.device_get((state.params, state.collections, state.average, sums)))
  near = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5)
  jax.tree.map(near, *found)


# --- AdamW and the learning rate ----------------------------------------------------------------


def test_kernels_alone_are_decayed_and_the_gradient_is_clipped():
  params = {"a": {"kernel": jnp.ones(2), "bias": jnp.ones(2)}, "pos_embed": jnp.ones(2)}
  with jax.numpy_dtype_promotion("standard"):  # optax mixes its counts with floats
    tx = optimizers.adamw(0.1, weight_decay=0.5, b2=0.5, clip_norm=1.0)
    zeros = jax.tree.map(jnp.zeros_like, params)
    updates, _ = tx.update(zeros, tx.init(params), params)
    _, state = tx.update(params, tx.init(params), params)
  assert updates["a"]["kernel"] == pytest.approx(-0.05)
  assert not updates["a"]["bias"].any() and not updates["pos_embed"].any()
  # The second moment shows which gradient Adam got.
  assert optax.tree_utils.tree_get(state, "nu")["a"]["bias"] == pytest.approx(0.5 / 6)


def test_a_cosine_falls_from_the_warm_up_to_the_last_step():
  with jax.numpy_dtype_promotion("standard"):
    rate = optimizers.learning_rate(0.5, "constant * linear_warmup * cosine_decay", 10, 110)
    wanted = optax.warmup_cosine_decay_schedule(0.0, 0.5, 10, 110)
    for at in (0, 1, 10, 11, 60, 109, 110, 200):
      assert float(rate(at)) == pytest.approx(max(float(wanted(at)), 1e-8), rel=1e-5, abs=1e-7)


# --- what is refused ----------------------------------------------------------------------------


def test_labels_without_a_class_are_refused_where_they_are_read():
  workload = images_of(network=resnet_of(classes=5))
  for batches in (workload.batches(0, 7), iter(workload.splits()["validation"])):
    with pytest.raises(ValueError, match="the label [5-9]"):
      next(batches)


def test_a_run_starts_from_timms_weights(tmp_path):
  """Every array of the file, batch statistics too."""
  model = step.Model(images_of(), devices=jax.devices()[:1])
  params, collections = model.initial(jax.random.PRNGKey(7))
  collections = jax.tree.map(lambda x: x + 0.25, collections)
  path = str(tmp_path / "resnet.safetensors")
  timm.write(path, {"params": params, **collections})
  got = checkpoints.load_initial(path, model, jax.random.PRNGKey(0))
  jax.tree.map(np.testing.assert_array_equal, got, (params, collections, 0))


def test_what_no_shape_reveals_of_a_network_is_noted():
  network = swin.Swin(swin.config("swinv2_test"))
  noted = workloads.describe(images_of(network=network))["network_settings"]
  assert noted["window"] == 4
