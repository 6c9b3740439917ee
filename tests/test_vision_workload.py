"""The workload of images: losses, mixing, top-1 and top-5, filled rows, and what it refuses."""

import dataclasses
import itertools
import json
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny_vision

import nm_sparsity_jax as nms
from nm_sparsity_jax.core.trees import flatten
from nm_sparsity_jax.deploy import safetensors_file, timm
from nm_sparsity_jax.models import resnet, swin, vit
from nm_sparsity_jax.runs import network_settings
from nm_sparsity_jax.trainer.images import rebus, source
from nm_sparsity_jax.trainer.workloads import vision
from nm_sparsity_jax.training import configure

pytest.importorskip("clu", reason="the local runner needs clu: pip install -e '.[local]'")
pytestmark = [
  pytest.mark.filterwarnings("ignore"),  # what it imports warns on its own account
]

with warnings.catch_warnings():
  warnings.simplefilter("ignore")
  from nm_sparsity_jax.trainer import checkpoints, evaluation, step


def images_of(batch_size=8, **fields):
  """A workload, by fields of itself and of the tiny network."""
  own = {k: fields.pop(k) for k in ("loss", "label_smoothing", "mixup", "cutmix") if k in fields}
  network = tiny_vision.make(**fields)
  return vision.Images(network, rebus.Rebus(batch_size), **own)


def model_of(workload, devices=1, partitions=1, **rules):
  rules = dict(recipe="sr_ste", pattern="1:8", sparse_steps=8, dense_steps=2) | rules
  return step.Model(
    workload=workload, rules=configure.rules({"mlp/fc./kernel": None}, **rules),
    devices=jax.devices()[:devices], num_partitions=partitions,
  )  # fmt: skip


LOGITS = jax.random.normal(jax.random.PRNGKey(0), (6, 10)) * 3
LABELS = jnp.arange(6)


# --- losses -------------------------------------------------------------------------------------


def test_losses_are_optax_and_timms():
  for smoothing in (0.0, 0.1):
    targets = vision.smoothed(LABELS, 10, smoothing)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
      # timm: off = smoothing / classes, on = 1 - smoothing + off; this is optax's too.
      wanted = optax.smooth_labels(jax.nn.one_hot(LABELS, 10), smoothing)
      softmax = optax.softmax_cross_entropy(LOGITS, wanted)
      sigmoid = optax.sigmoid_binary_cross_entropy(LOGITS, wanted).mean(-1)
    np.testing.assert_allclose(targets, wanted, rtol=1e-6)
    np.testing.assert_allclose(vision.cross_entropy(LOGITS, targets), softmax, rtol=1e-5)
    np.testing.assert_allclose(vision.binary(LOGITS, targets), sigmoid, rtol=1e-5)


def test_the_rank_is_that_of_a_stable_sort():
  logits = jnp.round(LOGITS)  # with ties
  for shift in range(10):
    labels = (LABELS + shift) % 10
    order = np.argsort(-np.asarray(logits), axis=-1, kind="stable")
    wanted = [list(row).index(label) for row, label in zip(order, np.asarray(labels), strict=True)]
    assert vision.rank(logits, labels).tolist() == wanted
  assert vision.rank(jnp.full((1, 10), jnp.nan), jnp.array([3])).tolist() == [9]
  assert vision.rank(jnp.zeros((2, 10)), jnp.array([0, 6])).tolist() == [0, 6]


def test_sums_are_those_of_the_real_rows():
  workload, key = images_of(), jax.random.PRNGKey(0)
  variables = dict(workload.init(key))
  params, state = variables["params"], {"batch_stats": variables["batch_stats"]}
  batch = next(workload.batches(0, 0))
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


def test_an_evaluation_neither_mixes_nor_smooths_and_a_step_updates_the_statistics():
  plain, all_of_it = images_of(), images_of(mixup=0.5, cutmix=1.0, label_smoothing=0.1, drop=0.5)
  key = jax.random.PRNGKey(0)
  variables = dict(plain.init(key))
  params, state = variables["params"], {"batch_stats": variables["batch_stats"]}
  batch = next(plain.batches(0, 0))
  assert plain.loss(params, state, batch, None)[0] == all_of_it.loss(params, state, batch, None)[0]
  losses = [all_of_it.loss(params, state, batch, jax.random.PRNGKey(i)) for i in (1, 1, 2)]
  assert losses[0][0] == losses[1][0] != losses[2][0]
  mean = lambda found: found[2]["batch_stats"]["norm"]["mean"]
  assert not np.array_equal(mean(losses[0]), state["batch_stats"]["norm"]["mean"])
  np.testing.assert_array_equal(mean(losses[0]), mean(losses[1]))


# --- mixing -------------------------------------------------------------------------------------


def mixed(mixup, cutmix, keys=60):
  images = jnp.arange(8, dtype=jnp.float32).reshape(8, 1, 1, 1) * jnp.ones((8, 16, 12, 3))
  targets = vision.smoothed(jnp.arange(8), 10, 0.0)
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
  images, found = mixed(0.5, 1.0)
  is_cut = [bool(np.isin(image[4], [4, 5]).all()) for image, _ in found]
  assert 15 < sum(is_cut) < 45
  assert not np.isin(np.asarray(images[4]), [5]).any()


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
  is_names = lambda x: hasattr(x, "names")
  found = {path: x.names for path, x in flatten(axes, is_names)}
  assert found["blocks/attn/q/kernel_axes"] == ("layers", "embed", "joined_kv")
  assert found["blocks/mlp/fc2/kernel_axes"] == ("layers", "mlp", "embed")
  assert found["patch_embed/proj/kernel_axes"] == (None,) * 4
  rules = nms.Rules({"blocks/mlp/fc./kernel": nms.recipe("sr_ste", pattern="1:8",
                     phases=nms.Phases(total=4))})  # fmt: skip
  rules = rules.with_logical_axes(axes)
  assert {path: place.axis for path, place in rules.assign(params).places.items()} == {
    "blocks/mlp/fc1/kernel": 1, "blocks/mlp/fc2/kernel": 1
  }  # fmt: skip


def test_two_devices_share_a_kernel():
  model = model_of(images_of(), devices=4, partitions=2)
  params = model.initial_params(jax.random.PRNGKey(0))
  shard = params["mlp"]["fc1"]["kernel"].sharding.shard_shape((32, 32))
  assert shard == (32, 16) and model.rules.places


def test_eight_devices_take_the_step_of_one():
  """Batch statistics are those of the whole batch, and pairs are mixed as on one device."""
  key, optimizer, found = jax.random.PRNGKey(0), optax.sgd(0.1), {}
  workload = images_of(16, mixup=0.8, cutmix=1.0, label_smoothing=0.1)
  for devices in (1, 8):
    model = model_of(workload, devices)
    state = model.begin(model.initial_params(key), optimizer, 0, model.initial_collections(key))
    train = model.train_step(optimizer, key, state)
    for i in range(3):
      state, sums = train(state, model.put(next(workload.batches(0, i))))
    found[devices] = jax.device_get((state.params, state.collections, sums.values))
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6), found[1], found[8]
  )


# --- splits -------------------------------------------------------------------------------------


class Counted(rebus.Rebus):
  """Counts how often the split is read."""

  read = 0

  def splits(self):
    self.read += 1
    return super().splits()


def test_a_large_split_is_read_again_and_says_the_same(monkeypatch):
  from nm_sparsity_jax.trainer.workloads import base

  found, data = {}, Counted(512, validation=600)
  workload = vision.Images(tiny_vision.make(), data)
  model, key = model_of(workload), jax.random.PRNGKey(0)
  variables = {"params": model.initial_params(key), **model.initial_collections(key)}
  for kept in (base.KEPT, 1000):
    monkeypatch.setattr(base, "KEPT", kept)
    evaluator = evaluation.Splits().evaluator(model, None)
    before = data.read
    assert evaluator.metric_names(variables) == {"accuracy", "accuracy_top5"}
    found[kept] = [evaluator.evaluate(variables, 0).scalars for _ in range(3)]
    assert data.read - before == (2 if kept > 1000 else 4)
  assert [found[1000][0]] * 3 == found[1000] == found[max(found)]


# --- what is refused ----------------------------------------------------------------------------


class Made(source.Source):
  """Images of zeros."""

  classes, size, channels, batch_size = 10, 16, 3, 4

  def __init__(self, labels=(0, 1, 2, 3), **fields):
    self.labels = labels
    vars(self).update(fields)

  def train(self, seed, start):
    size = len(self.labels)
    images = np.zeros((size, 16, 16, 3), np.float32)
    return itertools.repeat(source.batch_of(images, np.asarray(self.labels), size))

  def splits(self):
    return {"test": itertools.islice(self.train(0, 0), 1)}


@pytest.mark.parametrize(
  "fields, settings, said",
  [
    ({}, {"loss": "hinge"}, "^LOSS='hinge': choose one of softmax, sigmoid.$"),
    ({}, {"label_smoothing": 1.0}, "^LABEL_SMOOTHING=1.0: give a number from 0 on and below 1.$"),
    ({}, {"mixup": -1}, "^MIXUP=-1: give a number from 0 on.$"),
    ({}, {"cutmix": "x"}, "^CUTMIX='x': give a number from 0 on.$"),
    ({"size": 32}, {}, "^IMAGE_SIZE=32, but the network takes images of 16: set IMAGE_SIZE"),
    ({"channels": 1}, {}, "^DATA has images of 1 channels, and the network takes 3: set"),
    ({"classes": 100}, {}, "^CLASSES=10, but the data have 100 classes: set CLASSES=100.$"),
    (
      {"batch_size": 3},
      {"mixup": 0.1},
      "^BATCH_SIZE=3: MIXUP and CUTMIX mix rows in pairs, so a batch, and each of its MICROBATCHES",
    ),
  ],
)
def test_what_does_not_fit_is_one_sentence(fields, settings, said):
  with pytest.raises(ValueError, match=said):
    vision.Images(tiny_vision.make(), Made(**fields), **settings).check()


def test_labels_out_of_range_are_refused_where_they_are_read():
  for labels, wrong in (((0, 1, 10, 2), 10), ((0, -1, 3, 4), -1)):
    workload = vision.Images(tiny_vision.make(), Made(labels))
    said = f"^CLASSES=10, but an image of training batch 7 has the label {wrong}: labels go from 0 "
    with pytest.raises(ValueError, match=said):
      next(workload.batches(0, 7))
    with pytest.raises(ValueError, match=f"an image of 'test' has the label {wrong}"):
      list(workload.splits()["test"])


def test_microbatches_of_an_odd_size_are_not_mixed():
  workload = images_of(12, mixup=0.5)
  model, key = model_of(workload), jax.random.PRNGKey(0)
  state = model.begin(model.initial_params(key), optax.sgd(0.1), 0, model.initial_collections(key))
  batch = model.put(next(workload.batches(0, 0)))
  with pytest.raises(ValueError, match="^BATCH_SIZE=3: MIXUP and CUTMIX .* each of its MICROBATC"):
    model.train_step(optax.sgd(0.1), key, state, 4)(state, batch)
  model.train_step(optax.sgd(0.1), key, state, 3)(state, batch)


def test_a_network_with_rules_of_its_own_is_refused():
  network = tiny_vision.Net(tiny_vision.Config(), rules="some")
  with pytest.raises(ValueError, match="^the network has rules of its own: give the rules to the"):
    vision.Images(network, rebus.Rebus())


# --- weights of timm ----------------------------------------------------------------------------


def test_a_run_starts_from_timms_weights(tmp_path):
  """Every array of the file, batch statistics too; a file of another network is refused."""
  network = resnet.ResNet(resnet.config("resnet_test", image_size=16, depths=(1,), widths=(8,)))
  workload = vision.Images(network, rebus.Rebus(8))
  model = step.Model(workload=workload, rules=configure.rules({"conv": "1:8"}, "sr_ste",
                     sparse_steps=8), devices=jax.devices()[:1])  # fmt: skip
  variables = dict(jax.jit(workload.init)(jax.random.PRNGKey(7)))
  variables.pop("params_axes")
  stats = jax.tree.map(lambda x: x + 0.25, variables["batch_stats"])
  path = str(tmp_path / "resnet.safetensors")
  timm.write(path, variables | {"batch_stats": stats})
  params, kept, number = checkpoints.load_initial(path, model, jax.random.PRNGKey(0))
  assert number == 0
  jax.tree.map(np.testing.assert_array_equal, params, variables["params"])
  jax.tree.map(np.testing.assert_array_equal, kept, {"batch_stats": stats})
  state = model.begin(params, optax.sgd(0.1), 0, kept)
  assert int(state.step) == 0

  other = vision.Images(resnet.ResNet(resnet.config("resnet_test", image_size=16)), rebus.Rebus(8))
  with pytest.raises(ValueError, match="resnet.safetensors' is of a"):
    checkpoints.opened(path, step.Model(workload=other))
  (tmp_path / "model.bin").write_bytes(b"\x80\x02")
  with pytest.raises(ValueError, match="model.bin' is a file that torch pickled"):
    checkpoints.load_initial(str(tmp_path / "model.bin"), model, jax.random.PRNGKey(0))


def test_a_run_is_not_started_from_weights_of_another_window(tmp_path):
  """Shapes do not tell of it; a table beside the weights does, where a file has one."""
  workload = vision.Images(swin.Swin(swin.config("swinv2_test")), rebus.Rebus(8))
  model = step.Model(workload=workload)
  tensors = timm.to_timm({"params": jax.tree.map(lambda x: np.zeros(x.shape), model.shapes)})
  tensors = {name: x.astype(np.float32) for name, x in tensors.items()}
  table = {"layers.0.blocks.0.attn.relative_coords_table": np.zeros((1, 15, 15, 2), np.float32)}
  for name, more in (("one", {}), ("other", table)):
    safetensors_file.write(tmp_path / f"{name}.safetensors", tensors | more)
  assert checkpoints.opened(str(tmp_path / "one.safetensors"), model).format == "timm"
  with pytest.raises(ValueError, match="is of 8, and the network has 4"):
    checkpoints.opened(str(tmp_path / "other.safetensors"), model)


@pytest.mark.parametrize(
  "network, setting, value",
  [
    (swin.Swin(swin.config("swinv2_test")), "window", 4),
    (vit.ViT(vit.config("vit_test")), "heads", 2),
  ],
)
def test_what_no_shape_tells_is_noted_and_held_against_a_network(network, setting, value, tmp_path):
  noted = vision.Images(network, rebus.Rebus(8)).network_settings()
  assert noted == {setting: value}
  (tmp_path / "run.json").write_text(
    json.dumps({"start": 0, "workload": {"network_settings": noted}})
  )
  network_settings.check(str(tmp_path / "checkpoint_1"), network.config)
  other = dataclasses.replace(network.config, **{setting: 1})
  words = (
    f"checkpoint_1 was trained with {setting}={value}, and this network has {setting}=1, .* to "
  )
  with pytest.raises(ValueError, match=f"{words}{value}"):
    network_settings.check(str(tmp_path / "checkpoint_1"), other)
  network_settings.check(str(tmp_path / "elsewhere/checkpoint_1"), other)  # has no note
