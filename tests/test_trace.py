"""Axes of parameters from the program, held against tables by hand and against its derivatives."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import layouts
import numpy as np
import pytest

import nm_sparsity_jax as nms
from nm_sparsity_jax.core import trace
from nm_sparsity_jax.core.trees import flatten
from nm_sparsity_jax.training.rules import AmbiguousAxis

# T5X, Haiku and what they import warn on their own account.
pytestmark = pytest.mark.filterwarnings("ignore")
RECIPE = nms.recipe("sr_ste", pattern="2:4", phases=nms.Phases(total=10))
NOISE = 1e-5  # of float32; what is no noise came out above 9e-4, and noise below 1e-7


@pytest.fixture(autouse=True)
def as_users_compute():
  with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
    yield


@functools.cache
def made(name):
  """(function, params, x) of a case, the number of vectors that meet a weight, and the axes."""
  make, table = layouts.CASES[name]
  *case, rows = make()
  return case, rows, layouts.wanted(table, case[1])


def rules_for(*paths, **fields):
  # In brackets, since `q` alone would be a role.
  places = {f"({re.escape(path)})": RECIPE for path in paths}
  return nms.Rules(places, indivisible="pad", **fields)


def derivatives(function, params, x):
  """path -> derivatives of all outputs: (output, *shape)."""
  outputs = lambda p: jnp.concatenate([y.ravel() for y in jax.tree.leaves(function(p, x))])
  return dict(flatten(jax.jit(jax.jacrev(outputs))(params)))


def has_more_directions(derivative, axes, rows):
  """Whether vectors along these axes of a parameter are combinations of more than `rows`."""
  table = np.moveaxis(derivative, [axis + 1 for axis in axes], range(len(axes)))
  table = table.reshape(math.prod(table.shape[: len(axes)]), -1).astype(np.float64)
  squares = np.linalg.eigvalsh(table @ table.T)[::-1]  # of singular values, the largest first
  assert squares[0] > 0, "no output depends on it, and that says nothing"
  return len(squares) > rows and squares[rows] > NOISE**2 * squares[0]


@pytest.mark.parametrize(
  "name", [pytest.param(n, marks=layouts.MARKS.get(n, ())) for n in layouts.CASES]
)
def test_along_the_axes_of_for_model_weights_differ_by_their_inputs_alone(name):
  """A weight changes an output by its own input, times what the result of its product changes.

  So vectors of derivatives along the axes are combinations of the `rows` vectors that come in, and
  zeroing the inputs of a group zeroes the derivatives by its weights, and by no others. Along an
  axis of results, or along a part of the axes, they are combinations of more.
  """
  (function, params, x), rows, want = made(name)
  known, refused = trace.axes(function, params, x)
  assert known == want and not known.keys() & refused.keys()
  places = rules_for(*want).for_model(function, params, x).assign(params).places
  assert {path: place.axes for path, place in places.items()} == want
  found, told = derivatives(function, params, x), 0
  for path, axes in want.items():
    derivative = np.asarray(found[path])
    assert not has_more_directions(derivative, axes, rows), path
    for axis, length in enumerate(derivative.shape[1:]):
      if (axis,) != axes and length > rows:
        assert has_more_directions(derivative, (axis,), rows), (path, axis)
        told += 1
  assert told >= len(want) / 2  # else the sizes of this case tell nothing apart


FIVE = [
  ("Dense query in a scan", "layers/query/kernel", (1,), 0),
  ("ConvTranspose, transpose_kernel", "ConvTranspose_0/kernel", (3,), 2),
  ("stacked (layers, out, in)", "w", (2,), 1),
]


@pytest.mark.parametrize("name, path, axes, guess", FIVE, ids=[name for name, *_ in FIVE])
def test_what_names_leave_open_is_asked_for_and_the_program_tells(name, path, axes, guess):
  (function, params, x), *_ = made(name)
  rules = rules_for(path)
  with pytest.raises(AmbiguousAxis, match="for_model"):
    rules.assign(params)
  assert rules.for_model(function, params, x).assign(params).places[path].axes == axes
  with pytest.raises(ValueError, match="leave axes= out"):
    rules_for(path, axes={re.escape(path): guess}).for_model(function, params, x)


@pytest.mark.parametrize(
  "case, word",
  [
    ((lambda p, x: (x @ p["w"]) @ p["w"].T, {"w": jnp.ones((4, 4))}), "along"),
    ((lambda p, x: x * p["w"], {"w": jnp.ones(4)}), "no product"),
    ((lambda p, x: x @ jnp.sort(p["w"]), {"w": jnp.ones((4, 4))}), "sort"),
    ((lambda p, x: x @ (p["w"] @ jnp.ones((4, 4))), {"w": jnp.ones((4, 4))}), "constants"),
    ((lambda p, x: x @ (p["w"] @ p["w"].T), {"w": jnp.ones((4, 4))}), "weights"),
    ((lambda p, x: x[:, :2] @ p["w"].reshape(2, 8), {"w": jnp.ones((4, 4))}), "part"),
    ((lambda p, x: x[:, :2] @ p["w"].reshape(3, 2, 2)[0], {"w": jnp.ones((4, 3))}), "reshape"),
  ],
)
def test_what_cannot_be_followed_is_refused(case, word):
  function, params = case
  known, refused = trace.axes(function, params, jnp.ones((2, 4)))
  assert known == {} and word in refused["w"]


def test_a_tied_embedding_is_refused():
  ids, tied = jnp.zeros((2,), jnp.int32), layouts.Tied()
  params = tied.init(jax.random.key(0), ids)["params"]
  known, refused = trace.axes(lambda p, ids: tied.apply({"params": p}, ids), params, ids)
  assert known == {} and "along" in refused["embed/embedding"]


def test_multiply_adds_count_batch_and_turns():
  (function, params, _), *_ = made("Dense query in a scan")
  found = trace.trace(function, params, jax.ShapeDtypeStruct((5, 8), "float32"))
  assert found.macs == {"layers/query/kernel": 2 * 5 * 8 * 8} and not found.others


def test_for_model_names_the_axes_that_names_leave_open():
  (function, params, x), _, want = made("a block")
  rules = nms.Rules({".*/kernel": RECIPE})
  with pytest.raises(AmbiguousAxis, match="for_model") as asked:
    rules.assign(params)
  assert all(name in str(asked.value) for name in ("query", "key", "value", "out"))
  known = rules.for_model(function, params, x)
  assert {path: p.axes for path, p in known.assign(params).places.items()} == want
  # The default serves where it is right, so that the text of the rules stays short.
  assert not [key for key in known.axes if re.fullmatch(key, "wi/kernel")]


@pytest.mark.parametrize(
  "function, inputs, word",
  [
    (lambda p, x: x * p["w"], (jnp.ones(4),), "no product"),
    (lambda p: jnp.ones(4) @ p["w"], (), "no inputs"),
  ],
)
def test_for_model_refuses_a_program_that_tells_nothing(function, inputs, word):
  with pytest.raises(ValueError, match=word):
    nms.Rules({"w": RECIPE}).for_model(function, {"w": jnp.ones(4)}, *inputs)
