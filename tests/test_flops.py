"""FLOPs and parameters of traced networks: the paper's tables, counts by hand, timelines, XLA."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

import nm_sparsity_jax as nms
from nm_sparsity_jax.models import resnet, swin, vit
from nm_sparsity_jax.models.t5 import T5Config, Transformer
from nm_sparsity_jax.trainer.workloads import t5, vision
from nm_sparsity_jax.training import flops

RECIPE = nms.recipe("sr_ste", pattern="1:4", phases=nms.Phases(total=100))


def shape(*sizes):
  return jax.ShapeDtypeStruct(sizes, "float32")


@functools.cache
def images(network):
  return vision.Images(network, None).cost()


def t5_cost(config):
  return t5.T5(Transformer(config), lengths={"inputs": 512, "targets": 114}).cost()


VIT = vit.ViT(vit.config("vit_b16", class_token=False))  # the paper's tables have no class token


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
  # So they are 32, 4 and 64 % of their sum, as Table 1 has it.
  params = [cost.select(*places).params for places in (("q", "k", "v", "o"), ("ff",), ("scores",))]
  assert params == [pytest.approx(28.31e6, abs=11e3), pytest.approx(56.62e6, abs=11e3), 0]


# --- networks, by hand and by what others publish -------------------------------------------------


@pytest.mark.parametrize(
  "network, params, total, parts",
  [
    (vit.ViT(vit.config("vit_b16")), 86_567_656, 35.128, {"ff": 22.309, "scores": 1.430}),
    (swin.Swin(swin.config("swinv2_b_w8")), 87_918_816, 40.650, {"qkv": 9.664, "scores": 1.041}),
    (resnet.ResNet(resnet.config("resnet50")), 25_557_032, 8.178, {"conv": 7.221, "stem": 0.236}),
  ],
  ids=["vit", "swin", "resnet"],
)  # fmt: skip
def test_networks_of_images(network, params, total, parts):
  """Parameters are timm's and torchvision's; FLOPs are counted by hand."""
  cost = images(network)
  assert cost.params == params
  giga(cost, {(".*",): total} | {(place,): part for place, part in parts.items()}, rel=1e-3)


def test_t5():
  config = T5Config.preset("t5_1_1", "small")
  cost = t5_cost(config)
  d, joined, m = config.emb_dim, config.num_heads * config.head_dim, config.mlp_dim
  n, i, o, inputs = config.num_encoder_layers, 512, 114, len(config.mlp_activations)
  products = n * d * joined * 6 * (i + o) + n * d * m * (inputs + 1) * (i + o)
  scores = 2 * n * joined * (i * i + o * o + i * o)
  # A one-hot is a look-up, in the embedding and in the positions.
  assert cost.flops == 2 * (products + scores + o * d * config.vocab_size)
  scanned = t5_cost(dataclasses.replace(config, scan_layers=True, remat_policy="minimal"))
  assert scanned.flops == cost.flops
  for place, macs in (
    ("decoder/cross/k", n * i * d * joined),
    ("encoder/ff", n * i * d * m * (inputs + 1)),
    ("decoder/cross/scores", 2 * n * i * o * joined),
  ):
    assert scanned.select(place).flops == cost.select(place).flops == 2 * macs, place


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


# --- rules and training ---------------------------------------------------------------------------


@pytest.mark.parametrize("indivisible, kept", [("pad", 12 + 12), ("skip", 12 + 48)])
def test_rules_serve_as_they_are(indivisible, kept):
  """A kernel whose axis has no whole groups is padded or left dense, as its parameter is."""
  params = {"wi": {"kernel": shape(8, 6)}, "wo": {"kernel": shape(6, 8)}}
  function = lambda p, x: x @ p["wi"]["kernel"] @ p["wo"]["kernel"]
  dense = flops.forward(function, params, shape(1, 8))
  rules = nms.Rules({".*/kernel": RECIPE}, indivisible=indivisible)
  cost = flops.inference(dense, rules)
  assert (cost.params, cost.flops) == (kept, 2 * kept)


PATH = ((5, "4:8", 0.0), (12, "2:8", 0.5), (20, "2:8", 0.0))  # D rises from 0, and falls


@pytest.mark.parametrize(
  "name, fields",
  [("sr_ste", {}), ("mdgf_linear", {}), ("mdgf_exponential", {"gradient": "straight_through"}),
   ("sdgf_stepwise", {"decay_kind": "linear"}), ("custom", {"path": PATH})],
)  # fmt: skip
def test_training_is_the_sum_of_its_steps(name, fields):
  """A step costs the forward, the input gradient, and the weight gradient, by mode."""
  phases = nms.Phases(total=30, dense=5, finetune=5)
  recipe = nms.recipe(name, pattern="1:8", phases=phases, **fields)
  cost, spent = flops.Cost((flops.Op(name="mlp/wi/kernel", flops=64, axis=8),)), 0
  for step in range(30):
    held = [pattern.density for start, pattern in recipe.levels(8) if start <= step]
    s = held[-1] if held and recipe.decay(step) == 0 else 1
    spent += 64 * (2 * s + (s if recipe.gradient_mode == "masked" else 1))
    until = flops.training(cost, {"ff": recipe}, until=step + 1).flops
    assert until == pytest.approx(spent, rel=1e-12), step
  assert flops.training(cost, {"ff": recipe}).flops == until


@pytest.mark.parametrize(
  "call, word",
  [
    (lambda c: c.select("conv"), "names nothing"),
    (lambda c: flops.inference(c, {"q": "1:7"}), "multiple of 7"),
    (lambda c: flops.training(c, {}), "`steps`"),
    (lambda c: flops.training(c, {"ff": RECIPE}, steps=50), "50 and 100 steps"),
  ],
)
def test_mistakes_name_the_value(call, word):
  with pytest.raises(ValueError, match=word):
    call(images(VIT))
