"""Places by name: what each family calls its kernels, and what others read of it."""

import doctest
import re
import types

import jax.numpy as jnp
import pytest

import nm_sparsity_jax as nms
from nm_sparsity_jax import flops, roles, trees
from nm_sparsity_jax.flops import costs, ops, t5, vision
from nm_sparsity_jax.plan import places


@pytest.fixture
def families():
  """The vocabulary, put back afterwards."""
  before = roles.families()
  yield roles
  roles.registry._families.clear()
  roles.registry._families.update(before)


OWN = roles.Family(
  name="own",
  roles={"ff": r"(.*/)?fc\d/kernel", "mix": r"(.*/)?mix/kernel"},
  narrow={"late": r"block_[5-9]/.*"},
  axes=((r"(.*/)?mix/kernel", 3, 1),),
  places={"ff": ("block",), "mix": ("block",)},
  op=lambda path: f"block/{path.split('/')[-2]}",
)


def test_a_family_from_outside_adds_to_the_vocabulary(families):
  recipe = nms.recipe("sr_ste", pattern="1:2", phases=nms.Phases(total=4))
  params = {
    "block_0": {"fc1": {"kernel": jnp.zeros((4, 2))}, "mix": {"kernel": jnp.zeros((3, 4, 2))}},
    "block_7": {"fc1": {"kernel": jnp.zeros((4, 2))}},
    "mlp": {"wi": {"kernel": jnp.zeros((4, 2))}},
  }
  assert list(nms.Rules({"ff": recipe}).assign(params).places) == ["mlp/wi/kernel"]
  with pytest.raises(ValueError, match="match no parameter"):
    nms.Rules({"mix": recipe}).assign(params)
  roles.register(OWN)
  assert list(nms.Rules({"ff": recipe}).assign(params).places) == [
    "block_0/fc1/kernel", "block_7/fc1/kernel", "mlp/wi/kernel",
  ]  # fmt: skip
  places = nms.Rules({"late/ff": recipe, "mix": recipe}).assign(params).places
  assert {path: place.axis for path, place in places.items()} == {
    "block_0/mix/kernel": 1,
    "block_7/fc1/kernel": 0,
  }
  assert roles.role_of("block_0/mix/kernel") == "mix"
  assert roles.op_of("block_0/mix/kernel") == "block/mix"
  assert roles.single({"mix": "1:2"}, family="own") == {"mix": "1:2"}


def test_a_word_for_several_roles_means_those_of_the_rules():
  """Before, 'qk' went on to mean T5's, though the rules said what 'q' and 'k' are."""
  recipe = nms.recipe("sr_ste", pattern="1:2", phases=nms.Phases(total=4))
  own = {"q": r"(.*/)?wq/kernel", "k": r"(.*/)?wk/kernel"}
  params = {f"w{word}": {"kernel": jnp.zeros((4, 2))} for word in "qkv"}
  found = nms.Rules({"qk": recipe}, roles=own).assign(params)
  assert list(found.places) == ["wk/kernel", "wq/kernel"] and found.dense == ("wv/kernel",)


def test_families_may_know_one_path(families):
  """T5 has a name for it too, and was registered before: the model's own operation counts."""
  op = {"mlp/wi/kernel": "mlp/in"}.get
  roles.register(roles.Family(name="mine", roles={"ff": "mlp/wi/kernel"}, op=op))
  assert roles.op_of("mlp/wi/kernel", {"mlp/in", "mlp/out"}) == "mlp/in"
  assert roles.op_of("mlp/wi/kernel", {"encoder/wi"}) == "encoder/wi"
  assert roles.op_of("mlp/wi/kernel", {"head"}) is None
  assert roles.op_of("mlp/wi/kernel") == "encoder/wi"


@pytest.mark.parametrize(
  "family, text",
  [
    (roles.Family(name="t5"), "the family 't5' is registered already"),
    (roles.Family(name="a", roles={"qk": "x"}), "'qk' twice: it is a word for several roles"),
    (roles.Family(name="a", roles={"decoder": "x"}), "'decoder' twice: it is a word for paths"),
    (roles.Family(name="a", narrow={"ff": "x"}), "'ff' twice: it is a role already"),
    (roles.Family(name="a", roles="ff"), "the family 'a' has roles='ff': give a dict from word to"),
    (roles.Family(name="a", roles={"b": None}), "the family 'a' has None for 'b': give a regex"),
    (roles.Family(name="a", roles={"b/c": "x"}), "of the family 'a' hold 'b/c', which is no word"),
    (roles.Family(name="a", roles={"b": "("}), "the family 'a' has '\\(', which is not a regular"),
  ],
)
def test_a_word_has_one_meaning(families, family, text):
  before = roles.families()
  with pytest.raises(ValueError, match=text):
    roles.register(family)
  assert roles.families() == before


def test_a_module_may_register_its_family_again(families):
  """A cell of a notebook, or importlib.reload, that changed it; another module may not."""
  for word in ("b", "c"):
    roles.register(roles.Family(name="a", roles={word: f"{word}/kernel"}))
  assert "c" in roles.regexes() and "b" not in roles.regexes()
  elsewhere = {"__name__": "elsewhere", "roles": roles}
  with pytest.raises(ValueError, match="the family 'a' is registered already"):
    exec("roles.register(roles.Family(name='a'))", elsewhere)


def test_roles_of_rules_are_words_for_kernels():
  recipe = nms.recipe("sr_ste", pattern="1:2", phases=nms.Phases(total=4))
  own = nms.Rules({"ff": recipe}, roles={"ff": "lm/kernel"})  # in place of what families call so
  assert own.find("lm/kernel") and not own.find("encoder/mlp/wi/kernel")
  for role, text in (("encoder", "'encoder' narrows a role, as in"), ("a/b", "which is no word")):
    with pytest.raises(ValueError, match=text):
      nms.Rules({"ff": recipe}, roles={role: ".*"})


@pytest.mark.parametrize(
  "path, op",
  [
    ("encoder/layers_0/mlp/wi_1/kernel", "encoder/wi_1"),
    ("decoder/layers/mlp/wo/kernel", "decoder/wo"),
    ("decoder/layers_2/self_attention/query/kernel", "decoder/self/q"),
    ("decoder/layers_2/encoder_decoder_attention/out/kernel", "decoder/cross/o"),
    ("Transformer/encoderblock_3/MlpBlock_0/Dense_1/kernel", "encoder/wo"),
    ("encoderblock_3/MultiHeadDotProductAttention_0/value/kernel", "encoder/self/v"),
    ("decoder/logits_dense/kernel", None),
  ],
)
def test_operations_of_kernels(path, op):
  assert roles.op_of(path) == op
  known = flops.T5Shape(layers=1, embed=8, mlp=8, heads=1, input_length=1, target_length=1).ops()
  known += flops.ViTShape().ops()
  assert op is None or op in {o.name for o in known}


def test_prices_of_kernels_are_those_of_places():
  recipe = nms.recipe("mdgf_linear", pattern="1:4", phases=nms.Phases(total=50, dense=10))
  shape = flops.ViTShape(layers=2, embed=32, mlp=64, heads=2, head_dim=16, tokens=4, patch=12)
  sparse = [op for op in shape.ops() if op.role == "ff"]
  halves = [
    flops.Kernel(op=op.name, params=op.params // 2, axis=op.axis, recipe=recipe)
    for op in sparse
    for _ in range(2)  # layers
  ]
  found = flops.price(shape, halves, batch_size=3)
  inference = flops.inference(shape, {"ff": recipe})
  assert found.inference_sparse == pytest.approx(inference.flops)
  assert found.kept == inference.params
  assert found.params == flops.Cost(shape.ops()).params
  assert found.sparse_params == sum(op.params for op in sparse)
  whole = flops.training(shape, {"ff": recipe}, 3).flops
  assert found.training_sparse == pytest.approx(whole) and found.steps == 50
  assert found.training_dense == flops.training(shape, {}, 3, steps=50).flops > whole
  with pytest.raises(ValueError, match="no operation 'nowhere'; it has encoder/patch_embedding"):
    flops.price(shape, [flops.Kernel(op="nowhere", params=1, axis=4, recipe=recipe)])
  for until in (
    -1,
    1.5,
    recipe.phases.total + 1,
  ):  # a step before the run would cost less than none
    with pytest.raises(ValueError, match="until=.*a step of the run, an int from 0 to"):
      flops.price(shape, halves, until=until)


def test_a_shape_from_outside_brings_its_own_words(families):
  class Own:
    def ops(self):
      kernel = dict(place="block", axis=8, prunable=True, flops=16.0, params=8)
      return (
        flops.Op(name="block/mix", role="mix", **kernel),
        flops.Op(name="block/ff", role="ff", **kernel),
      )

  cost = flops.inference(Own(), {"block/mix": 0.5})
  assert cost.flops == 24 and cost.select("mix").flops == 8 and cost.select("block").params == 12
  with pytest.raises(ValueError, match="unknown place 'other'.* one or more of .*cross/, block/"):
    flops.inference(Own(), {"other": 0.5})


def test_a_plan_names_the_words_of_a_family_from_outside(families):
  roles.register(OWN)
  recipe = nms.recipe("sr_ste", pattern="1:2", phases=nms.Phases(total=4))
  rules = nms.Rules({"mxi": recipe}, roles={"mine": "a/.*"})
  found = types.SimpleNamespace(errors=[])
  places.assign(found, rules, {"block_0": {"fc1": {"kernel": jnp.zeros((4, 2))}}})
  (said,) = found.errors
  # Families that other tests registered may stand between.
  assert re.search(r"\(ff, q, k, v, o, .*mix, qk, qkv, mine; with encoder/, .*late/", said)


def test_a_plan_tells_like_mistakes_once_by_all_their_names():
  recipe = nms.recipe("sr_ste", pattern="1:4", phases=nms.Phases(total=4))
  layers = {f"layers_{i}": {"mlp": {"wi": {"kernel": jnp.zeros((6, 8))}}} for i in range(3)}
  found = types.SimpleNamespace(errors=[])
  places.assign(found, nms.Rules({"ff": recipe}), {"encoder": layers})
  (said,) = found.errors
  name = "encoder/layers_{0..2}/mlp/wi/kernel"
  assert said.startswith(f"{name}: axis 0 has length 6") and said.endswith(f"axes={{{name}: 1}}).")


def test_kernels_of_a_network_by_what_rules_chose():
  shape = flops.T5Shape(layers=1, embed=8, mlp=16, heads=1, input_length=1, target_length=1)
  recipe = nms.recipe("sr_ste", pattern="1:4", phases=nms.Phases(total=4))
  wi, head = "encoder/layers_0/mlp/wi_0/kernel", "head/kernel"
  params = {path: jnp.zeros((8, 16)) for path in (wi, head)}
  assigned = nms.Rules({"ff": recipe}).assign(params).places
  found, lost = flops.kernels(shape, assigned, trees.sizes(params))
  assert lost == "" and found == [
    flops.Kernel(op="encoder/wi_0", params=128, axis=8, recipe=recipe)
  ]
  both = nms.Rules({"ff": recipe, head: recipe}).assign(params).places
  assert flops.kernels(shape, both, trees.sizes(params)) == (found, head)


@pytest.mark.parametrize(
  "module", [roles, roles.registry, roles.comparing, roles.matching, trees, ops, t5, vision, costs]
)
def test_doctests(module):
  found = doctest.testmod(module)
  assert found.attempted and not found.failed
