"""The workload of images: losses, mixing, top-1 and top-5, filled rows, and what it refuses."""

import dataclasses
import itertools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny_vision

import nm_sparsity_jax as nms
from nm_sparsity_jax.core.trees import flatten
from nm_sparsity_jax.deploy import timm
from nm_sparsity_jax.models import resnet, swin, vit
from nm_sparsity_jax.trainer import workloads
from nm_sparsity_jax.trainer.images import rebus, source
from nm_sparsity_jax.trainer.workloads import vision
from nm_sparsity_jax.training import configure

pytest.importorskip("clu", reason="the local runner needs clu: pip install -e '.[local]'")
pytestmark = pytest.mark.filterwarnings("ignore")  # what it imports warns on its own account

with warnings.catch_warnings():
  warnings.simplefilter("ignore")
  from nm_sparsity_jax.trainer import checkpoints, evaluation, step

RULES = configure.rules({"mlp/fc./kernel": "1:8"}, "sr_ste", sparse_steps=8, dense_steps=2)


def images_of(batch_size=8, network=None, **fields):
  return vision.Images(network or tiny_vision.make(), rebus.Rebus(batch_size), **fields)


def model_of(workload, devices=1, partitions=1):
  chosen = jax.devices()[:devices]
  return step.Model(workload, RULES, devices=chosen, num_partitions=partitions)


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


def test_the_best_are_those_of_a_stable_sort():
  logits = jnp.round(jax.random.normal(jax.random.PRNGKey(0), (6, 10)) * 3) + 0.0  # with ties
  order = np.argsort(-np.asarray(logits), axis=-1, kind="stable")
  np.testing.assert_array_equal(vision.best(logits), order[:, :5])
  assert vision.best(jnp.zeros((1, 3))).tolist() == [[0, 1, 2]]


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
  assert sums["examples"] == 8 and sums["accuracy"] <= sums["accuracy_top5"] <= 8
  found = workload.predict(params, state, batch)
  assert int((found["label"] == batch["label"]).sum()) == sums["accuracy"]
  assert float(found["probability"].max()) <= 1


def test_an_evaluation_neither_mixes_nor_smooths_and_a_step_updates_the_statistics(scored):
  plain, params, state, batch = scored
  network = tiny_vision.make(drop=0.5)
  all_of_it = images_of(network=network, mixup=0.5, cutmix=1.0, label_smoothing=0.1)
  assert plain.loss(params, state, batch, None)[0] == all_of_it.loss(params, state, batch, None)[0]
  losses = [all_of_it.loss(params, state, batch, jax.random.PRNGKey(i)) for i in (1, 1, 2)]
  assert losses[0][0] == losses[1][0] != losses[2][0]
  mean = lambda state: state["batch_stats"]["norm"]["mean"]
  assert not np.array_equal(mean(losses[0][2]), mean(state))


# --- mixing -------------------------------------------------------------------------------------


def mixed(mixup, cutmix, keys=60):
  images = jnp.arange(8, dtype=jnp.float32).reshape(8, 1, 1, 1) * jnp.ones((8, 16, 12, 3))
  targets = jax.nn.one_hot(jnp.arange(8), 10)
  mix = jax.jit(lambda key: vision.mixed(images, targets, key, mixup, cutmix))
  return images, [jax.device_get(mix(jax.random.PRNGKey(i))) for i in range(keys)]


def test_mixup_blends_a_row_with_its_partner_by_the_share_of_its_target():
  images, found = mixed(0.8, 0.0)
  shares = []
  for image, target in found:
    share = target[0, 0]
    for row, other in ((0, 1), (1, 0), (6, 7)):
      np.testing.assert_allclose([target[row, row], target[row, other]], [share, 1 - share])
      wanted = share * images[row] + (1 - share) * images[other]
      np.testing.assert_allclose(image[row], wanted, rtol=1e-5, atol=1e-6)
    shares.append(share)
  assert abs(np.mean(shares) - 0.5) < 0.15 and np.std(shares) > 0.2  # Beta(0.8, 0.8): 0.31


def test_cutmix_shows_the_partner_in_a_box_of_its_share():
  images, found = mixed(0.0, 1.0)
  areas = []
  for image, target in found:
    theirs = image[2] == images[3]
    area = theirs[..., 0].mean()
    np.testing.assert_allclose([target[2, 3], target[2, 2]], [area, 1 - area], atol=1e-6)
    assert (theirs | (image[2] == images[2])).all()
    rows, columns = theirs[..., 0].any(1), theirs[..., 0].any(0)
    assert theirs[..., 0].sum() == rows.sum() * columns.sum()  # one box
    areas.append(area)
  assert 0.2 < np.mean(areas) < 0.5 and max(areas) > 0.7


def test_with_both_a_coin_takes_one():
  is_cut = [bool(np.isin(image[4], [4, 5]).all()) for image, _ in mixed(0.5, 1.0)[1]]
  assert 15 < sum(is_cut) < 45


# --- axes and devices ---------------------------------------------------------------------------


def test_axes_lay_feed_forward_and_attention_over_devices_and_a_scan_is_known():
  params = {
    "blocks": {
      "attn": {"q": {"kernel": jnp.zeros((3, 8, 8)), "bias": jnp.zeros((3, 8))}},
      "mlp": {"fc1": {"kernel": jnp.zeros((3, 8, 32))}, "fc2": {"kernel": jnp.zeros((3, 32, 8))}},
    },
    "patch_embed": {"proj": {"kernel": jnp.zeros((4, 4, 3, 8))}},
  }
  axes = vision.axes_of(params, scan=True)
  found = {path: x.names for path, x in flatten(axes, lambda x: hasattr(x, "names"))}
  assert found["blocks/attn/q/kernel_axes"] == ("layers", "embed", "joined_kv")
  assert found["blocks/mlp/fc2/kernel_axes"] == ("layers", "mlp", "embed")
  assert found["patch_embed/proj/kernel_axes"] == (None,) * 4
  recipe = nms.recipe("sr_ste", pattern="1:8", phases=nms.Phases(total=4))
  rules = nms.Rules({"blocks/mlp/fc./kernel": recipe}).with_logical_axes(axes)
  assert [place.axis for place in rules.assign(params).places.values()] == [1, 1]


def test_eight_devices_take_the_step_of_one():
  """Batch statistics are those of the whole batch, and pairs are mixed as on one device."""
  key, optimizer, found = jax.random.PRNGKey(0), optax.sgd(0.1), []
  workload = images_of(16, mixup=0.8, cutmix=1.0, label_smoothing=0.1)
  for devices, partitions in ((1, 1), (8, 2)):
    model = model_of(workload, devices, partitions)
    params, collections = model.initial(key)
    shard = params["mlp"]["fc1"]["kernel"].sharding.shard_shape((32, 32))
    assert shard == (32, 32 // partitions)
    state = model.begin(params, optimizer, 0, collections)
    train = model.train_step(optimizer, key, state)
    for i in range(3):
      state, sums = train(state, model.put(next(workload.batches(0, i))))
    found.append(jax.device_get((state.params, state.collections, sums)))
  near = lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)
  jax.tree.map(near, *found)


def test_a_large_split_is_read_again_and_says_the_same(monkeypatch):
  class Counted(rebus.Rebus):
    read = 0

    def splits(self):
      self.read += 1
      return super().splits()

  found, data = [], Counted(512, validation=600)
  model = model_of(vision.Images(tiny_vision.make(), data))
  params, state = model.initial(jax.random.PRNGKey(0))
  for kept, reads in ((evaluation.KEPT, 2), (1000, 4)):
    monkeypatch.setattr(evaluation, "KEPT", kept)
    before, evaluator = data.read, evaluation.Splits().evaluator(model, None)
    found += [evaluator.evaluate({"params": params, **state}, 0).scalars for _ in range(3)]
    assert data.read - before == reads
  assert found == [found[0]] * 6


# --- what is refused ----------------------------------------------------------------------------


class Made(source.Source):
  """Images of zeros."""

  classes, size, channels, batch_size = 10, 16, 3, 4

  def __init__(self, labels=(0, 1, 2, 3), **fields):
    self.labels = labels
    vars(self).update(fields)

  def train(self, seed, start):
    images = np.zeros((len(self.labels), 16, 16, 3), np.float32)
    return itertools.repeat(source.batch_of(images, np.asarray(self.labels), len(self.labels)))

  def splits(self):
    return {"test": itertools.islice(self.train(0, 0), 1)}


@pytest.mark.parametrize(
  "fields, settings, word",
  [
    ({}, {"loss": "hinge"}, "LOSS='hinge'"),
    ({}, {"label_smoothing": 1.0}, "LABEL_SMOOTHING=1.0"),
    ({}, {"mixup": -1}, "MIXUP=-1"),
    ({"size": 32}, {}, "IMAGE_SIZE=32"),
    ({"channels": 1}, {}, "1 channels"),
    ({"classes": 100}, {}, "CLASSES=100"),
    ({"batch_size": 3}, {"mixup": 0.1}, "BATCH_SIZE=3"),
  ],
)
def test_what_does_not_fit_is_named(fields, settings, word):
  with pytest.raises(ValueError, match=word):
    vision.Images(tiny_vision.make(), Made(**fields), **settings).check()


@pytest.mark.parametrize("labels, wrong", [((0, 1, 10, 2), 10), ((0, -1, 3, 4), -1)])
def test_labels_out_of_range_are_refused_where_they_are_read(labels, wrong):
  workload = vision.Images(tiny_vision.make(), Made(labels))
  for batches in (workload.batches(0, 7), iter(workload.splits()["test"])):
    with pytest.raises(ValueError, match=f"label {wrong}"):
      next(batches)


def test_microbatches_of_an_odd_size_are_not_mixed():
  workload = images_of(12, mixup=0.5)
  model, key = model_of(workload), jax.random.PRNGKey(0)
  params, collections = model.initial(key)
  state = model.begin(params, optax.sgd(0.1), 0, collections)
  batch = model.put(next(workload.batches(0, 0)))
  with pytest.raises(ValueError, match="MICROBATCHES"):
    model.train_step(optax.sgd(0.1), key, state, 4)(state, batch)


def test_a_network_with_rules_of_its_own_is_refused():
  with pytest.raises(ValueError, match="RULES"):
    images_of(network=tiny_vision.Net(tiny_vision.Config(), rules="some"))


# --- weights of timm ----------------------------------------------------------------------------


def test_a_run_starts_from_timms_weights(tmp_path):
  """Every array of the file, batch statistics too; a file of another network is refused."""
  config = resnet.config("resnet_test", image_size=16, depths=(1,), widths=(8,))
  model = step.Model(images_of(network=resnet.ResNet(config)), devices=jax.devices()[:1])
  params, collections = model.initial(jax.random.PRNGKey(7))
  collections = jax.tree.map(lambda x: x + 0.25, collections)
  path = str(tmp_path / "resnet.safetensors")
  timm.write(path, {"params": params, **collections})
  got = checkpoints.load_initial(path, model, jax.random.PRNGKey(0))
  jax.tree.map(np.testing.assert_array_equal, got, (params, collections, 0))
  other = images_of(network=resnet.ResNet(dataclasses.replace(config, widths=(16,))))
  with pytest.raises(ValueError, match=r"resnet.safetensors"):
    checkpoints.opened(path, step.Model(other))


@pytest.mark.parametrize(
  "network, settings",
  [
    (swin.Swin(swin.config("swinv2_test")), {"window": 4}),
    (vit.ViT(vit.config("vit_test")), {"heads": 2}),
    (resnet.ResNet(resnet.config("resnet_test")), {}),
  ],
)
def test_what_no_shape_reveals_of_a_network_is_noted(network, settings):
  assert (
    workloads.describe(images_of(network=network))["network_settings"].items() >= settings.items()
  )
