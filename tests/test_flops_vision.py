"""FLOPs and parameters of ViT, SwinV2 and ResNet, by hand and by what timm's networks have."""

import dataclasses

import pytest

import nm_sparsity_jax as nms
from nm_sparsity_jax import flops
from nm_sparsity_jax.flops import Cost, ResNetShape, SwinShape, T5Shape, ViTShape
from nm_sparsity_jax.models import resnet, swin, vit


def macs(cost, *words):
  return (cost.select(*words) if words else cost).flops / 2e9


def test_the_defaults_are_the_paper_s_networks_with_the_parameters_of_timm():
  with_class = ViTShape(class_token=True)
  assert ViTShape.of(vit.config("vit_b16")) == with_class
  assert SwinShape.of(swin.config("swinv2_b_w8")) == SwinShape()
  assert ResNetShape.of(resnet.config("resnet50")) == ResNetShape()
  found = [Cost(s.ops()).params for s in (with_class, SwinShape(), ResNetShape())]
  assert found == [86_567_656, 87_918_816, 25_557_032]


def test_swin():
  cost = Cost(SwinShape().ops())
  parts = {
    ("q", "k", "v"): 4.832, ("o",): 1.611, ("scores",): 0.520, ("ff",): 12.885, ("merge",): 0.403,
    ("stem",): 0.02517, ("head",): 0.001024, ("position",): 0.04884,
  }  # fmt: skip
  for words, giga in parts.items():
    assert macs(cost, *words) == pytest.approx(giga, rel=0.001), words
  assert macs(cost) == pytest.approx(20.325, rel=0.001)
  for pattern, giga in (("1:4", 21.32), ("1:8", 18.10), ("1:16", 16.49), ("1:32", 15.69)):
    sparse = flops.inference(SwinShape(), {"ff": nms.NM.parse(pattern)})
    assert sparse.flops / 1e9 == pytest.approx(giga, rel=0.001)
  both = flops.inference(SwinShape(), {"ff": nms.NM(1, 8), "qk": nms.NM(1, 8)})
  assert both.flops / 1e9 == pytest.approx(12.46, rel=0.001)


def test_a_window_is_at_most_its_stage_and_attention_looks_inside_it():
  one = SwinShape(image_size=32, patch=4, embed=8, depths=(1, 1), heads=(1, 1), window=8, classes=1)
  wider = dataclasses.replace(one, window=16)
  assert Cost(one.ops()) == Cost(wider.ops())  # 8 x 8 and 4 x 4 tokens
  small = Cost(dataclasses.replace(one, window=4).ops())
  whole = Cost(one.ops())
  assert 4 * small.select("layers_0/scores").flops == whole.select("layers_0/scores").flops
  assert small.select("layers_1") == whole.select("layers_1")
  assert small.select("qkv").flops == whole.select("qkv").flops


def test_resnet():
  cost = Cost(ResNetShape().ops())
  parts = {"stem": 0.1180, "conv": 0.938 + 1.850 + 0.822, "shortcut": 0.3597, "head": 0.002048}
  for word, giga in parts.items():
    assert macs(cost, word) == pytest.approx(giga, rel=0.001), word
  for name, giga in (("conv1", 0.938), ("conv2", 1.850), ("conv3", 0.822)):
    found = sum(op.flops for op in cost.ops if op.name.endswith(f"/{name}")) / 2e9
    assert found == pytest.approx(giga, rel=0.001)
  assert macs(cost) == pytest.approx(4.089, rel=0.001)
  assert cost.select("conv").params / 1e6 == pytest.approx(20.68, rel=0.001)
  assert cost.select("shortcut").params / 1e6 == pytest.approx(2.77, rel=0.001)
  # What is a matrix product of 64 x 64 x 64 inputs, once for each of 56 x 56 pixels.
  (second,) = [op for op in cost.ops if op.name == "layer1_1/conv2"]
  assert second.flops == 2 * 56**2 * 9 * 64 * 64 and second.axis == 64
  for pattern in ("2:8", "1:8"):
    sparse = flops.inference(ResNetShape(), {"conv": nms.NM.parse(pattern)})
    kept = nms.NM.parse(pattern).density
    saved = cost.select("conv").flops * (1 - kept)
    assert sparse.flops == pytest.approx(cost.flops - saved, rel=1e-12)


def test_images_of_odd_sizes_are_halved_upwards():
  """As by convolutions that are padded by half of their kernel."""
  odd = ResNetShape(image_size=33, depths=(1, 1), widths=(8, 8), stem=3, classes=2)
  side = {op.name: round((op.flops / 2 / op.params) ** 0.5) for op in odd.ops() if op.flops}
  assert side["conv1"] == 17 and side["layer1_0/conv3"] == 9
  assert side["layer2_0/conv1"] == 9 and side["layer2_0/conv2"] == 5
  assert side["layer2_0/downsample_conv"] == 5


def test_a_block_that_changes_nothing_has_no_shortcut():
  names = [op.name for op in ResNetShape(depths=(1, 1), widths=(64, 16)).ops()]
  assert "layer1_0/downsample_conv" in names and "layer2_0/downsample_conv" in names
  same = ResNetShape(depths=(2,), widths=(64,)).ops()
  assert [op.name for op in same if op.role == "shortcut"] == ["layer1_0/downsample_conv"]


def test_stem_and_head_are_named_as_rules_name_them():
  vit = Cost(ViTShape().ops())
  assert vit.select("embedding") == vit.select("stem") and vit.select("logits") == vit.select(
    "head"
  )
  assert flops.inference(ViTShape(), {"head": 0.5}).select("head").flops == 768 * 1000
  with pytest.raises(ValueError, match="groups of 8 do not divide its contraction axis of 3"):
    flops.inference(ViTShape(), {"stem": nms.NM(1, 8)})
  with pytest.raises(ValueError, match="'conv' names nothing in this model"):
    flops.inference(ViTShape(), {"conv": 0.5})


SMALL_T5 = T5Shape(layers=2, embed=64, mlp=128, heads=2, input_length=8, target_length=4)


@pytest.mark.parametrize(
  "shape, place",
  [(ViTShape(), "ff"), (SwinShape(), "ff"), (ResNetShape(), "conv"), (SMALL_T5, "decoder/ff")],
  ids=["vit", "swin", "resnet", "t5"],
)
@pytest.mark.parametrize(
  "recipe, gradient", [("sr_ste", None), ("mdgf_exponential", "masked"), ("sdgf_stepwise", None)]
)
def test_the_flops_of_a_schedule_in_every_family(shape, place, recipe, gradient):
  """What Figure 4b has along its axis: dense until the mask is hard, then as the recipe has it."""
  phases = nms.Phases(total=1000, dense=100, finetune=200)
  made = nms.recipe(recipe, pattern="1:8", phases=phases, gradient=gradient)
  dense = Cost(shape.ops()).select(place).flops
  spent = flops.training(shape, {place: made}, batch_size=2).select(place).flops / (2 * dense)
  weights = {
    "sr_ste": 3 * 100 + 900 * (2 / 8 + 1),  # its weight gradient is whole
    "mdgf_exponential": 3 * 800 + 200 * 3 / 8,
    # 7:8, 4:8, 2:8 for a third of the steps between each, then 1:8.
    "sdgf_stepwise": None,
  }
  if (wanted := weights[recipe]) is None:
    segments = made.timeline(axis_size=64)
    wanted = 3 * sum((s.stop - s.start) * (s.pattern.n / 8 if s.pattern else 1) for s in segments)
    assert len(segments) > 4
  assert spent == pytest.approx(wanted, rel=1e-12)
  so_far = [flops.training(shape, {place: made}, until=step).flops for step in (100, 900, 1000)]
  assert so_far[0] == 3 * 100 * Cost(shape.ops()).flops
  assert so_far == sorted(so_far) and so_far[2] == flops.training(shape, {place: made}).flops


@pytest.mark.parametrize(
  "call, words",
  [
    (lambda: SwinShape(depths=(2, 2)), ["depths=(2, 2)", "heads=(4, 8, 16, 32)", "each stage"]),
    (lambda: SwinShape(heads=()), ["heads=()", "a tuple with a size for each stage"]),
    (lambda: ResNetShape(widths=[64] * 4), ["widths=[64, 64, 64, 64]", "a tuple"]),
    (lambda: ResNetShape(widths=(64, 0, 1, 1)), ["widths=(64, 0, 1, 1)", "ints >= 1"]),
    (lambda: ViTShape(channels=0), ["channels=0", "int >= 1"]),
  ],
)
def test_mistakes_name_the_value_and_the_rule(call, words):
  with pytest.raises(ValueError) as error:
    call()
  assert all(word in str(error.value) for word in words), error.value
