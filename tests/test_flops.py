"""FLOPs and parameters against the paper's tables, hand-written parameter trees, and XLA."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import pytest

from nm_sparsity_jax import flops
from nm_sparsity_jax.flops import Cost, T5Shape, ViTShape

GIGA = 1e9


@dataclasses.dataclass(frozen=True)
class NM:
  n: int
  m: int

  @property
  def density(self):
    return self.n / self.m


@dataclasses.dataclass(frozen=True)
class Segment:
  start: int
  stop: int
  pattern: NM | None
  decay_start: float = 0.0
  decay_stop: float = 0.0


@dataclasses.dataclass(frozen=True)
class Phases:
  total: int


@dataclasses.dataclass(frozen=True)
class FakeRecipe:
  """A recipe whose timeline is written down; `segments` may depend on the axis size."""

  segments: object
  gradient_mode: str | None = "masked"
  total: int = 100

  @property
  def phases(self):
    return Phases(self.total)

  def timeline(self, axis_size):
    return self.segments(axis_size) if callable(self.segments) else self.segments


def hard(pattern, gradient="masked", dense=0, total=100):
  """Dense steps, then a binary mask."""
  head = (Segment(0, dense, None, 1.0, 1.0),) if dense else ()
  return FakeRecipe((*head, Segment(dense, total, pattern)), gradient, total)


def paper(cost):
  return cost.select("attention", "ff").flops / GIGA


TINY = T5Shape(
  layers=1, embed=8, mlp=16, heads=2, head_dim=4, vocab=32, input_length=4, target_length=2
)
SMALL = T5Shape(layers=8, embed=512, mlp=1024, heads=6, input_length=512, target_length=114)
BASE = T5Shape(layers=12, embed=768, mlp=2048, heads=12, input_length=512, target_length=114)


# The paper's tables.

TABLE_18 = [  # pattern, FF, total; attention is 12.51 in every row
  (NM(1, 1), 22.19, 34.71),
  (NM(2, 4), 11.1, 23.61),
  (NM(1, 4), 5.55, 18.06),
  (NM(1, 8), 2.77, 15.29),
  (NM(1, 16), 1.39, 13.90),
  (NM(1, 32), 0.69, 13.20),
  (NM(1, 128), 0.17, 12.69),
]


@pytest.mark.parametrize(("pattern", "ff", "total"), TABLE_18, ids=lambda v: str(v))
def test_table_18(pattern, ff, total):
  cost = flops.inference(ViTShape(), {"ff": pattern})
  assert cost.select("attention").flops / GIGA == pytest.approx(12.51, abs=0.011)
  assert cost.select("ff").flops / GIGA == pytest.approx(ff, abs=0.011)
  assert paper(cost) == pytest.approx(total, abs=0.011)


def test_table_17():
  cost = Cost(ViTShape().ops())
  for role in "qkvo":
    assert cost.select(role).flops / GIGA == pytest.approx(2.77, abs=0.011)
  by_name = {op.name: op.flops / GIGA for op in cost.ops}
  assert by_name["encoder/self/scores"] == pytest.approx(0.70, abs=0.011)
  assert by_name["encoder/self/values"] == pytest.approx(0.70, abs=0.011)
  assert by_name["encoder/wi"] == pytest.approx(11.1, abs=0.011)
  assert by_name["encoder/wo"] == pytest.approx(11.1, abs=0.011)


def test_table_1():
  cost = Cost(ViTShape().ops())
  kernels = cost.select("q", "k", "v", "o")
  total_flops = cost.select("attention", "ff").flops
  total_params = kernels.params + cost.select("ff").params
  for part, giga, share in (("scores", 1.42, 4), ("ff", 22.20, 64)):
    assert cost.select(part).flops / GIGA == pytest.approx(giga, abs=0.011)
    assert round(100 * cost.select(part).flops / total_flops) == share
  assert kernels.flops / GIGA == pytest.approx(11.1, abs=0.011)
  assert round(100 * kernels.flops / total_flops) == 32
  assert cost.select("scores").params == 0
  assert kernels.params / 1e6 == pytest.approx(28.31, abs=0.011)
  assert cost.select("ff").params / 1e6 == pytest.approx(56.62, abs=0.011)
  assert kernels.params / total_params == pytest.approx(0.333, abs=0.001)


def test_claim_c4_in_true_numbers():
  # "1:16 against 2:4: 60 % fewer FLOPs, 30 % fewer parameters" (PAPER.md, I3).
  def both(pattern):
    cost = flops.inference(ViTShape(), {"ff": pattern}).select("attention", "ff")
    return cost.flops, cost.params

  dense, half, sixteenth = both(1.0), both(NM(2, 4)), both(NM(1, 16))
  assert 1 - sixteenth[0] / half[0] == pytest.approx(0.41, abs=0.005)
  assert 1 - sixteenth[0] / dense[0] == pytest.approx(0.60, abs=0.005)
  assert 1 - sixteenth[1] / half[1] == pytest.approx(0.437, abs=0.001)
  assert 1 - sixteenth[1] / dense[1] == pytest.approx(0.625, abs=0.001)


def test_a_class_token_adds_one_token_everywhere():
  cost = Cost(ViTShape(class_token=True).ops())
  assert cost.select("q").flops / GIGA == pytest.approx(2.789, abs=0.0006)
  assert cost.select("scores").flops / 2 / GIGA == pytest.approx(0.715, abs=0.0006)
  assert cost.select("ff").flops / 2 / GIGA == pytest.approx(11.155, abs=0.0006)


# Parameters, against published counts and trees written by hand.


def test_vit_parameters():
  # timm and torchvision: vit_base_patch16_224 has 86,567,656 parameters.
  assert Cost(ViTShape(class_token=True).ops()).params == 86_567_656
  assert Cost(ViTShape().ops()).params == 86_567_656 - 2 * 768
  # ViT-L/16: 304,326,632.
  large = ViTShape(layers=24, embed=1024, mlp=4096, heads=16, class_token=True)
  assert Cost(large.ops()).params == 304_326_632


def t5_tree(*, layers, d, ff, heads, gated, tied, vocab=32128, head_dim=64):
  """T5X's parameter tree, path -> shape."""
  joined = heads * head_dim
  tree = {"token_embedder/embedding": (vocab, d)}
  for stack in ("encoder", "decoder"):
    tree[f"{stack}/relpos_bias/rel_embedding"] = (heads, 32)
    tree[f"{stack}/{stack}_norm/scale"] = (d,)
    for i in range(layers):
      layer = f"{stack}/layers_{i}"
      if stack == "encoder":
        attentions, norms = ["attention"], ["pre_attention_layer_norm", "pre_mlp_layer_norm"]
      else:
        attentions = ["self_attention", "encoder_decoder_attention"]
        norms = [
          "pre_self_attention_layer_norm",
          "pre_cross_attention_layer_norm",
          "pre_mlp_layer_norm",
        ]
      for norm in norms:
        tree[f"{layer}/{norm}/scale"] = (d,)
      for attention in attentions:
        for name in ("query", "key", "value"):
          tree[f"{layer}/{attention}/{name}/kernel"] = (d, joined)
        tree[f"{layer}/{attention}/out/kernel"] = (joined, d)
      for name in ("wi_0", "wi_1") if gated else ("wi",):
        tree[f"{layer}/mlp/{name}/kernel"] = (d, ff)
      tree[f"{layer}/mlp/wo/kernel"] = (ff, d)
  if not tied:
    tree["decoder/logits_dense/kernel"] = (d, vocab)
  return tree


@pytest.mark.parametrize(
  ("published", "layers", "d", "ff", "heads", "gated", "tied"),
  [
    (76_961_152, 8, 512, 1024, 6, True, False),  # T5.1.1 small
    (247_577_856, 12, 768, 2048, 12, True, False),  # T5.1.1 base
    (60_506_624, 6, 512, 2048, 8, False, True),  # T5.1.0 small
    (222_903_552, 12, 768, 3072, 12, False, True),  # T5.1.0 base
  ],
)
def test_t5_parameters(published, layers, d, ff, heads, gated, tied):
  tree = t5_tree(layers=layers, d=d, ff=ff, heads=heads, gated=gated, tied=tied)
  shape = T5Shape(
    layers=layers,
    embed=d,
    mlp=ff,
    heads=heads,
    gated=gated,
    tied=tied,
    input_length=512,
    target_length=114,
  )
  cost = Cost(shape.ops())
  assert cost.params == published == sum(math.prod(s) for s in tree.values())

  def tree_sum(*parts):
    return sum(math.prod(s) for p, s in tree.items() if all(x in p for x in parts))

  assert cost.select("decoder/cross").params == tree_sum("encoder_decoder_attention", "kernel")
  assert cost.select("encoder/ff").params == tree_sum("encoder/", "/mlp/")
  assert cost.select("encoder").params == tree_sum("encoder/")  # the shared table is apart
  assert cost.select("norm").params == tree_sum("scale")
  assert cost.select("position").params == tree_sum("rel_embedding")
  assert cost.select("logits").params == tree_sum("logits_dense")


def test_ungated_untied_and_uneven_stacks_change_what_they_should():
  ungated = Cost(dataclasses.replace(BASE, gated=False).ops())
  assert 3 * ungated.select("ff").flops == 2 * Cost(BASE.ops()).select("ff").flops
  tied = Cost(dataclasses.replace(BASE, tied=True).ops()).select("logits")
  assert tied.params == 0 and tied.flops == Cost(BASE.ops()).select("logits").flops
  shallow = Cost(dataclasses.replace(BASE, decoder_layers=3).ops())
  assert 4 * shallow.select("cross").flops == Cost(BASE.ops()).select("cross").flops
  assert shallow.select("encoder").flops == Cost(BASE.ops()).select("encoder").flops


# FLOPs, against XLA's own count. The functions hold matrix products and nothing else.


def project(x, w):
  return jnp.einsum("td,df->tf", x, w)


def attend(x, y, q, k, v, o, heads):
  """Multi-head attention of x over y without softmax, which is not counted."""

  def split(z):
    return z.reshape(z.shape[0], heads, -1)

  scores = jnp.einsum("thd,shd->hts", split(project(x, q)), split(project(y, k)))
  values = jnp.einsum("hts,shd->thd", scores, split(project(y, v)))
  return project(values.reshape(x.shape[0], -1), o)


def xla_flops(f, *shapes):
  args = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]
  return jax.jit(f).lower(*args).cost_analysis()["flops"]


def one_layer(name):
  shape = T5Shape(
    layers=1, embed=48, mlp=80, heads=2, head_dim=16, vocab=56, input_length=20, target_length=12
  )
  ops = Cost(shape.ops()).select(*name.split("+"))
  return ops.flops


QKVO = ((48, 32), (48, 32), (48, 32), (32, 48))


@pytest.mark.parametrize(
  ("name", "f", "shapes"),
  [
    ("encoder/q", project, [(20, 48), (48, 32)]),
    ("decoder/cross/q", project, [(12, 48), (48, 32)]),
    ("decoder/cross/k", project, [(20, 48), (48, 32)]),
    ("decoder/self/o", project, [(12, 32), (32, 48)]),
    ("logits", project, [(12, 48), (48, 56)]),
    (
      "encoder/ff",
      lambda x, a, b, c: (project(x, a), project(project(x, b), c)),
      [(20, 48), (48, 80), (48, 80), (80, 48)],
    ),
    (
      "decoder/ff",
      lambda x, a, b, c: (project(x, a), project(project(x, b), c)),
      [(12, 48), (48, 80), (48, 80), (80, 48)],
    ),
    ("encoder/attention", lambda x, *w: attend(x, x, *w, heads=2), [(20, 48), *QKVO]),
    ("decoder/self/attention", lambda x, *w: attend(x, x, *w, heads=2), [(12, 48), *QKVO]),
    (
      "decoder/cross/attention",
      lambda x, y, *w: attend(x, y, *w, heads=2),
      [(12, 48), (20, 48), *QKVO],
    ),
  ],
)
def test_forward_flops_are_xlas(name, f, shapes):
  assert one_layer(name) == xla_flops(f, *shapes)


def test_a_dense_training_step_costs_three_forwards_by_xlas_count():
  def step(x, y, w, cotangent):
    out, pullback = jax.vjp(lambda x, y, w: attend(x, y, *w, heads=2), x, y, w)
    return out, pullback(cotangent)

  f32 = jnp.float32
  x, y = jax.ShapeDtypeStruct((12, 48), f32), jax.ShapeDtypeStruct((20, 48), f32)
  w = tuple(jax.ShapeDtypeStruct(s, f32) for s in QKVO)
  counted = jax.jit(step).lower(x, y, w, x).cost_analysis()["flops"]
  sums = 20 * 48  # y feeds k and v, so its two gradients are added
  assert counted - sums == 3 * one_layer("decoder/cross/attention")


# Densities by place.


def test_a_density_scales_the_flops_and_parameters_of_its_place_alone():
  dense = flops.inference(BASE, {})
  cost = flops.inference(BASE, {"ff": NM(1, 8), "encoder/qkv": NM(1, 4), "decoder/cross/k": 0.5})
  for word, s in (
    ("ff", 1 / 8),
    ("encoder/qkv", 1 / 4),
    ("decoder/cross/k", 1 / 2),
    ("decoder/cross/q", 1),
    ("decoder/cross/v", 1),
    ("decoder/self", 1),
    ("o", 1),
    ("scores", 1),
    ("logits", 1),
    ("embedding", 1),
    ("norm", 1),
    ("position", 1),
  ):
    assert cost.select(word).flops == s * dense.select(word).flops, word
    assert cost.select(word).params == s * dense.select(word).params, word


@pytest.mark.parametrize(
  ("place", "names"),
  [
    (
      "qk",
      [
        "encoder/self/q",
        "encoder/self/k",
        "decoder/self/q",
        "decoder/self/k",
        "decoder/cross/q",
        "decoder/cross/k",
      ],
    ),
    ("cross/qkv", ["decoder/cross/q", "decoder/cross/k", "decoder/cross/v"]),
    ("self/o", ["encoder/self/o", "decoder/self/o"]),
    ("decoder/v", ["decoder/self/v", "decoder/cross/v"]),
    ("decoder/ff", ["decoder/wi_0", "decoder/wi_1", "decoder/wo"]),
  ],
)
def test_places(place, names):
  dense, cost = TINY.ops(), flops.inference(TINY, {place: 0.5}).ops
  assert [a.name for a, b in zip(cost, dense, strict=True) if a != b] == names


def test_the_parts_add_up():
  cost = flops.inference(BASE, {"ff": NM(1, 8)})
  for parts in (cost.by_role, cost.by_place):
    assert sum(c.flops for c in parts.values()) == cost.flops
    assert sum(c.params for c in parts.values()) == cost.params
  assert cost.select("ff", "encoder/ff") == cost.select("ff")
  assert set(cost.by_role) == {
    "ff",
    "q",
    "k",
    "v",
    "o",
    "scores",
    "logits",
    "embedding",
    "norm",
    "position",
  }


def test_inference_takes_the_last_pattern_of_a_recipe():
  recipe = hard(NM(1, 8), dense=10)
  assert flops.inference(BASE, {"ff": recipe}) == flops.inference(BASE, {"ff": NM(1, 8)})
  dense = FakeRecipe((Segment(0, 100, None, 1.0, 1.0),), None)
  assert flops.inference(BASE, {"ff": dense}) == flops.inference(BASE, {})


def test_parameters_are_counted_in_whole_weights():
  shape = ViTShape(embed=12, mlp=24, heads=3, head_dim=4, layers=1)
  assert flops.inference(shape, {"ff": NM(5, 12)}).select("ff").params == 2 * 12 * 24 * 5 // 12


# Training. Expected values are in units of F, the dense forward FLOPs of the place.


def per_forward(shape, place, recipe, **kwargs):
  trained = flops.training(shape, {place: recipe}, **kwargs).select(place).flops
  return trained / Cost(shape.ops()).select(place).flops


@pytest.mark.parametrize(
  ("what", "recipe", "expected"),
  [
    ("dense", FakeRecipe((Segment(0, 100, None, 1.0, 1.0),), None), 3 * 100),
    ("masked 1:4", hard(NM(1, 4)), 3 * 100 / 4),
    ("straight-through 1:4", hard(NM(1, 4), "straight_through"), 2 * 100 / 4 + 100),
    ("masked, dense phase", hard(NM(1, 4), dense=20), 3 * 20 + 3 * 80 / 4),
    (
      "straight-through, dense phase",
      hard(NM(1, 4), "straight_through", dense=20),
      2 * (20 + 80 / 4) + 100,
    ),
    # D > 0 at steps 20..69 (0 only at their stop): they cost as much as dense ones.
    (
      "mask decay to 0",
      FakeRecipe(
        (
          Segment(0, 20, None, 1.0, 1.0),
          Segment(20, 70, NM(1, 4), 1.0, 0.0),
          Segment(70, 100, NM(1, 4)),
        )
      ),
      3 * 70 + 3 * 30 / 4,
    ),
    (
      "mask decay that jumps to 0",
      FakeRecipe((Segment(0, 70, NM(1, 4), 1.0, 0.1), Segment(70, 100, NM(1, 4)))),
      3 * 70 + 3 * 30 / 4,
    ),
    (
      "mask decay, straight-through",
      FakeRecipe(
        (Segment(0, 70, NM(1, 4), 1.0, 0.0), Segment(70, 100, NM(1, 4))), "straight_through"
      ),
      2 * (70 + 30 / 4) + 100,
    ),
    # D rises from 0 at step 0: that step alone is sparse.
    (
      "D rises from 0",
      FakeRecipe((Segment(0, 50, NM(1, 4), 0.0, 1.0), Segment(50, 100, NM(1, 4)))),
      3 * (1 / 4 + 49 + 50 / 4),
    ),
    (
      "structure decay 1:8",
      FakeRecipe(
        (
          Segment(0, 20, None, 1.0, 1.0),
          Segment(20, 40, NM(7, 8)),
          Segment(40, 60, NM(4, 8)),
          Segment(60, 80, NM(2, 8)),
          Segment(80, 100, NM(1, 8)),
        )
      ),
      3 * (20 + 20 * 14 / 8),
    ),
    (
      "empty segment",
      FakeRecipe(
        (Segment(0, 0, NM(1, 8)), Segment(0, 0, NM(1, 8), 0.0, 1.0), Segment(0, 100, NM(1, 4)))
      ),
      3 * 100 / 4,
    ),
  ],
)
def test_training_by_hand(what, recipe, expected):
  del what
  for shape, place in ((BASE, "ff"), (BASE, "decoder/cross/qk"), (ViTShape(), "o")):
    assert per_forward(shape, place, recipe) == pytest.approx(expected, rel=1e-12)


def test_training_leaves_ops_without_a_recipe_at_three_forwards_a_step():
  cost = flops.training(BASE, {"ff": hard(NM(1, 8)), "qkv": hard(NM(1, 4), "straight_through")})
  dense = Cost(BASE.ops())
  for word in ("o", "scores", "logits"):
    assert cost.select(word).flops == 300 * dense.select(word).flops
  assert cost.select("ff").flops == 300 / 8 * dense.select("ff").flops
  assert cost.select("qkv").flops == 150 * dense.select("qkv").flops
  assert cost.params == dense.params  # training stores every weight


def test_training_is_proportional_to_the_batch_and_needs_no_recipe_when_steps_are_given():
  recipes = {"ff": hard(NM(1, 8), dense=10)}
  assert flops.training(SMALL, recipes, 128).flops == 128 * flops.training(SMALL, recipes).flops
  dense = flops.training(SMALL, {}, 4, steps=100)
  assert dense.flops == 3 * 4 * 100 * Cost(SMALL.ops()).flops
  assert flops.training(SMALL, recipes, steps=100) == flops.training(SMALL, recipes)


def test_levels_are_those_of_each_ops_contraction_axis():
  # T5.1.1 small: embed 512, mlp 1024, heads * head_dim = 384.
  seen = []

  def segments(axis_size):
    seen.append(axis_size)
    return (
      Segment(0, 50, NM(2, 512) if axis_size % 512 == 0 else None),
      Segment(50, 100, NM(1, 4)),
    )

  recipe = FakeRecipe(segments)
  cost = flops.training(SMALL, {"ff": recipe, "q": recipe, "o": recipe})
  assert set(seen) == {512, 1024, 384}
  dense = Cost(SMALL.ops())
  for place, first in (("ff", 2 / 512), ("q", 2 / 512), ("o", 1)):
    expected = 3 * (50 * first + 50 / 4) * dense.select(place).flops
    assert cost.select(place).flops == pytest.approx(expected, rel=1e-12)
  axes = {op.name: op.axis for op in SMALL.ops() if op.prunable}
  assert axes["encoder/wi_0"] == 512 and axes["encoder/wo"] == 1024
  assert axes["decoder/cross/k"] == 512 and axes["decoder/cross/o"] == 384


# Mistakes.


@pytest.mark.parametrize(
  ("call", "words"),
  [
    (lambda: ViTShape(layers=0), ["layers=0", "int >= 1"]),
    (lambda: ViTShape(embed=768.0), ["embed=768.0", "int >= 1"]),
    (lambda: ViTShape(gated=1), ["gated=1", "True or False"]),
    (lambda: dataclasses.replace(TINY, target_length=-1), ["target_length=-1"]),
    (lambda: dataclasses.replace(TINY, buckets=-1), ["buckets=-1", "int >= 0"]),
    (lambda: flops.inference(TINY, {"mlp": 0.5}), ["'mlp'", "ff, q, k"]),
    (lambda: flops.inference(TINY, {"encoder": 0.5}), ["'encoder'", "ff, q, k"]),
    (lambda: flops.inference(TINY, {"logits": 0.5}), ["'logits'", "ff, q, k"]),
    (lambda: flops.inference(TINY, {"left/ff": 0.5}), ["'left/ff'", "encoder/"]),
    (lambda: flops.inference(TINY, {"encoder/cross/q": 0.5}), ["'encoder/cross/q'", "nothing"]),
    (lambda: flops.inference(ViTShape(), {"decoder/ff": 0.5}), ["'decoder/ff'", "encoder/wi"]),
    (lambda: flops.inference(TINY, {"qk": 0.5, "q": 0.5}), ["'qk'", "'q'", "encoder/self/q"]),
    (lambda: flops.inference(TINY, {"ff": 0.0}), ["0.0", "(0, 1]"]),
    (lambda: flops.inference(TINY, {"ff": 87.5}), ["87.5", "kept"]),
    (lambda: flops.inference(TINY, {"ff": math.nan}), ["nan", "(0, 1]"]),
    (lambda: flops.inference(TINY, {"ff": True}), ["True", "(0, 1]"]),
    (lambda: flops.inference(TINY, {"ff": "1:8"}), ["'1:8'", "NM(1, 8)"]),
    (lambda: flops.inference(TINY, {"q": NM(1, 16)}), ["16", "encoder/self/q", "axis of 8"]),
    (lambda: flops.training(TINY, {"ff": NM(1, 8)}), ["NM(n=1, m=8)", "recipe"]),
    (lambda: flops.training(TINY, {}), ["steps=None"]),
    (lambda: flops.training(TINY, {}, steps=0), ["0 steps"]),
    (lambda: flops.training(TINY, {}, 0, steps=1), ["batch_size=0"]),
    (
      lambda: flops.training(TINY, {"ff": hard(NM(1, 8)), "q": hard(NM(1, 8), total=50)}),
      ["'ff': 100", "'q': 50", "Phases.total"],
    ),
    (lambda: flops.training(TINY, {"ff": hard(NM(1, 8))}, steps=50), ["'steps': 50"]),
    (lambda: flops.training(TINY, {"ff": hard(NM(1, 8), "ste")}), ["'ste'", "straight_through"]),
    (
      lambda: flops.training(TINY, {"ff": FakeRecipe((Segment(0, 99, NM(1, 8)),))}),
      ["(0, 99)", "total=100"],
    ),
    (
      lambda: flops.training(
        TINY, {"ff": FakeRecipe((Segment(0, 40, NM(1, 8)), Segment(50, 100, NM(1, 8))))}
      ),
      ["(50, 100)"],
    ),
    (lambda: Cost(ViTShape().ops()).select("decoder"), ["'decoder'", "encoder/self"]),
  ],
)
def test_mistakes_name_the_value_and_the_fix(call, words):
  with pytest.raises(ValueError) as error:
    call()
  for word in words:
    assert word in str(error.value)
