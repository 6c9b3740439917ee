"""FLOPs and parameters of traced networks: the paper's tables, counts by hand, timelines, XLA."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

import nm_sparsity_jax as nms
from nm_sparsity_jax.core import schedules
from nm_sparsity_jax.models import resnet, swin, vit
from nm_sparsity_jax.models.t5 import T5Config, Transformer
from nm_sparsity_jax.trainer.workloads import t5, vision
from nm_sparsity_jax.training import flops

NM = nms.NM


def shape(*sizes):
  return jax.ShapeDtypeStruct(sizes, "float32")


@functools.cache
def images(network):
  return vision.Images(network, None).cost()


@functools.cache
def t5_cost(config, inputs=512, targets=114):
  return t5.T5(Transformer(config), lengths={"inputs": inputs, "targets": targets}).cost()


VIT = vit.ViT(vit.config("vit_b16", class_token=False))  # the paper's tables have no class token
TINY = T5Config.t5_1_1("tiny", vocab_size=32, emb_dim=8, num_heads=2, head_dim=4, mlp_dim=16,
                       num_encoder_layers=1, num_decoder_layers=1)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Written(nms.Recipe):
  """A recipe whose timeline is written down, as (start, stop, pattern, two decay factors)."""

  name = "written"
  segments: object
  pattern: NM = NM(1, 4)
  phases: nms.Phases = nms.Phases(total=100)
  gradient: str = "masked"

  def timeline(self, axis_size=None):
    return tuple(schedules.Segment(*s, *(0.0, 0.0)[len(s) - 3 :]) for s in self.segments)


DENSE = (0, 20, None, 1.0, 1.0)


def written(*segments, gradient="masked"):
  return Written(segments=segments, gradient=gradient)


def giga(cost, wanted, **tolerance):
  """Holds the FLOPs of places against billions."""
  for places, due in wanted.items():
    assert cost.select(*places).flops / 1e9 == pytest.approx(due, **tolerance), places


# --- the paper's tables ---------------------------------------------------------------------------


def test_table_18():
  table = {  # pattern: FF, total; attention is 12.51 in every row
    "1:1": (22.19, 34.71), "2:4": (11.1, 23.61), "1:4": (5.55, 18.06), "1:8": (2.77, 15.29),
    "1:16": (1.39, 13.90), "1:32": (0.69, 13.20), "1:128": (0.17, 12.69),
  }  # fmt: skip
  for pattern, (ff, total) in table.items():
    cost = flops.inference(images(VIT), {"ff": pattern})
    giga(cost, {("attention",): 12.51, ("ff",): ff, ("attention", "ff"): total}, abs=0.011)


def test_tables_1_and_17():
  cost = images(VIT)
  giga(cost, {  # Table 17, by product; Table 1, by part
    **dict.fromkeys([("q",), ("k",), ("v",), ("o",)], 2.77), (".*->bhqn/product",): 0.70,
    (".*->bhqk/product",): 0.70, (".*/fc1/kernel",): 11.1, (".*/fc2/kernel",): 11.1,
    ("q", "k", "v", "o"): 11.1, ("scores",): 1.42, ("ff",): 22.20,
  }, abs=0.011)  # fmt: skip
  kernels = cost.select("q", "k", "v", "o")
  parts = (kernels.flops, cost.select("scores").flops, cost.select("ff").flops)
  assert [round(100 * part / sum(parts)) for part in parts] == [32, 4, 64]
  params = kernels.params / 1e6, cost.select("scores").params, cost.select("ff").params / 1e6
  assert params == (pytest.approx(28.31, abs=0.011), 0, pytest.approx(56.62, abs=0.011))


# --- networks, by hand and by what others publish -------------------------------------------------


@pytest.mark.parametrize(
  "network, params, total, parts",
  [
    (vit.ViT(vit.config("vit_b16")), 86_567_656, 35.128, {"q": 2.789, "scores": 1.430,
      "ff": 22.309, "stem": 0.2312, "head": 0.001536}),
    (swin.Swin(swin.config("swinv2_b_w8")), 87_918_816, 40.650, {"qkv": 9.664, "o": 3.221,
      "scores": 1.041, "ff": 25.770, "merge": 0.8053, "stem": 0.05033, "head": 0.002048,
      ".*/cpb_mlp.*": 0.09768}),
    (resnet.ResNet(resnet.config("resnet50")), 25_557_032, 8.178, {"stem": 0.2360, "conv": 7.221,
      "shortcut": 0.7194, "head": 0.004096, ".*/conv1/kernel": 1.876, ".*/conv2/kernel": 3.699,
      ".*/conv3/kernel": 1.644}),
  ],
  ids=["vit", "swin", "resnet"],
)  # fmt: skip
def test_networks_of_images(network, params, total, parts):
  """Parameters are timm's and torchvision's; FLOPs are counted by hand."""
  cost = images(network)
  assert cost.params == params
  giga(cost, {(".*",): total} | {(place,): part for place, part in parts.items()}, rel=1e-3)


def test_t5():
  config = T5Config.t5_1_1("small")
  cost = t5_cost(config)
  assert cost.params == 76_961_152  # as published
  d, joined, m = config.emb_dim, config.num_heads * config.head_dim, config.mlp_dim
  n, i, o, inputs = config.num_encoder_layers, 512, 114, len(config.mlp_activations)
  wanted = {
    "encoder/q": n * i * d * joined, "decoder/cross/k": n * i * d * joined,
    "encoder/ff": n * i * d * m * (inputs + 1), "decoder/ff": n * o * d * m * (inputs + 1),
    "encoder/scores": 2 * n * i * i * joined, "decoder/cross/scores": 2 * n * i * o * joined,
    "decoder/self/scores": 2 * n * o * o * joined,
  }  # fmt: skip
  for place, macs in wanted.items():
    assert cost.select(place).flops == 2 * macs, place
  products = n * d * joined * 6 * (i + o) + n * d * m * (inputs + 1) * (i + o)
  scores = 2 * n * joined * (i * i + o * o + i * o)
  # A one-hot is a look-up, in the embedding and in the positions.
  assert cost.flops == 2 * (products + scores + o * d * config.vocab_size)
  scanned = t5_cost(dataclasses.replace(config, scan_layers=True, remat_policy="minimal"))
  for place in (*wanted, "attention"):
    assert scanned.select(place).flops == cost.select(place).flops, place
  assert scanned.flops == cost.flops


def test_forward_and_backward_are_xlas():
  """XLA counts the same forward, and three of them in a step of training."""

  def attend(p, x, y):
    split = lambda z: z.reshape(z.shape[0], 2, -1)
    q, k, v = split(x @ p["q"]), split(y @ p["k"]), split(y @ p["v"])
    values = jnp.einsum("hts,shd->thd", jnp.einsum("thd,shd->hts", q, k), v)
    return values.reshape(len(x), -1) @ p["o"]

  params = {name: shape(48, 32) for name in "qkv"} | {"o": shape(32, 48)}
  x, y = shape(12, 48), shape(20, 48)
  count = lambda f, *args: jax.jit(f).lower(*args).cost_analysis()["flops"]
  cost = flops.forward(attend, params, x, y)
  assert cost.flops == count(attend, params, x, y)

  def step(p, x, y, cotangent):
    out, pullback = jax.vjp(attend, p, x, y)
    return out, pullback(cotangent)

  sums = 20 * 48  # y feeds k and v, so its two gradients are added
  assert count(step, params, x, y, x) - sums == flops.training(cost, {}, steps=1).flops


# --- densities by place ---------------------------------------------------------------------------


def test_a_pattern_scales_the_flops_and_parameters_of_its_place_alone():
  dense = t5_cost(TINY, 4, 2)
  cost = flops.inference(dense, {"ff": "1:8", "encoder/qkv": NM(1, 4), "decoder/cross/k": "1:2"})
  shares = {"ff": 1 / 8, "encoder/qkv": 1 / 4, "decoder/cross/k": 1 / 2, "decoder/cross/q": 1,
            "o": 1, "scores": 1, ".*embed.*": 1}  # fmt: skip
  for place, s in shares.items():
    found, whole = cost.select(place), dense.select(place)
    assert (found.flops, found.params) == (s * whole.flops, s * whole.params), place


@pytest.mark.parametrize("indivisible", ["pad", "skip"])
def test_rules_serve_as_they_are_and_as_they_assign(indivisible):
  """A kernel whose axis has no whole groups is padded or left dense, as its parameter is."""
  params = {
    "mlp": {"wi": {"kernel": shape(8, 6)}, "wo": {"kernel": shape(6, 8)}},
    "own": shape(8, 8),
  }

  def function(p, x):
    return x @ p["own"] @ p["mlp"]["wi"]["kernel"] @ p["mlp"]["wo"]["kernel"]

  recipe = nms.recipe("sr_ste", pattern="1:4", phases=nms.Phases(total=8, dense=2, finetune=2))
  rules = nms.Rules({"ff": recipe, "mine": recipe}, {"own": 0}, indivisible, {"mine": "own"})
  dense = flops.forward(function, params, shape(1, 8))
  assigned = rules.assign(params).places
  cost = flops.inference(dense, rules)
  assert cost == flops.inference(dense, assigned)
  assert cost.params == {"pad": (48 + 48 + 64) / 4, "skip": (48 + 64) / 4 + 48}[indivisible]
  spent = flops.training(dense, rules, 3, until=5)
  assert spent == flops.training(dense, assigned, 3, until=5)
  assert spent.flops < flops.training(dense, {}, 3, steps=8, until=5).flops


# --- training: in units of F, the dense forward FLOPs of the place --------------------------------


@pytest.mark.parametrize(
  ("recipe", "expected"),
  [
    (written(DENSE, (20, 100, NM(1, 4))), 3 * 20 + 3 * 80 / 4),
    (written(DENSE, (20, 100, NM(1, 4)), gradient="straight_through"), 2 * (20 + 80 / 4) + 100),
    # D > 0 at steps 0..69 (0 only at their stop): they cost as much as dense ones.
    (written((0, 70, NM(1, 4), 1.0, 0.0), (70, 100, NM(1, 4))), 3 * 70 + 3 * 30 / 4),
    # D rises from 0 at step 0: that step alone is sparse.
    (written((0, 50, NM(1, 4), 0.0, 1.0), (50, 100, NM(1, 4))), 3 * (1 / 4 + 49 + 50 / 4)),
    (written(DENSE, (20, 60, NM(4, 8)), (60, 100, NM(1, 8))), 3 * (20 + 40 * 5 / 8)),
  ],
)  # fmt: skip
def test_training_by_hand(recipe, expected):
  cost = flops.Cost((flops.Op(name="mlp/wi/kernel", flops=64, axis=8),))
  assert flops.training(cost, {"ff": recipe}).flops == pytest.approx(64 * expected, rel=1e-12)


@pytest.mark.parametrize("name", ["sdgf_stepwise", "mdgf_linear"])
def test_flops_until_a_step_are_sums_over_steps(name):
  """The whole run is the sum of its steps, each priced by the segment that it lies in."""
  phases = nms.Phases(total=30, dense=5, finetune=5)
  recipe = nms.recipe(name, pattern="1:8", phases=phases)
  dense = t5_cost(TINY)
  cost = [flops.training(dense, {"ff": recipe}, until=t).flops for t in range(31)]
  assert cost[0] == 0 and cost[30] == flops.training(dense, {"ff": recipe}).flops
  assert cost[5] == pytest.approx(5 * 3 * dense.flops)
  for segment in recipe.timeline(8):
    steps = range(segment.start, segment.stop)
    assert len({round(cost[t + 1] - cost[t]) for t in steps}) == 1


RECIPE = written((0, 100, NM(1, 8)))


# --- mistakes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  "call, word",
  [
    (lambda c: c.select("conv"), "names nothing"),
    (lambda c: flops.inference(c, nms.Rules({"conv": RECIPE})), "no kernel of this model"),
    (lambda c: flops.inference(c, {"qk": "1:2", "q": "1:2"}), "'q' names .* another place"),
    (lambda c: flops.inference(c, {"q": NM(1, 16)}), "axis of 8"),
    (lambda c: flops.training(c, {"ff": NM(1, 8)}), "recipe"),
    (lambda c: flops.training(c, {}), "`steps`"),
    (lambda c: flops.training(c, {"ff": RECIPE}, steps=50), "50 and 100 steps"),
  ],
)
def test_mistakes_name_the_value(call, word):
  with pytest.raises(ValueError, match=word):
    call(t5_cost(TINY, 4, 2))
