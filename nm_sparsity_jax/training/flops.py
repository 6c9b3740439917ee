"""How much arithmetic a pattern and a schedule cost: FLOPs and parameters of any network.

    function, params, inputs -> [forward] -> dense cost, operation by operation
                                             x density  -> inference
                                             x timeline -> training

Shapes serve as parameters and inputs: the program is traced, and nothing is computed. What counts:

- One multiply-add is two FLOPs, as in Tables 1, 17 and 18 of "Progressive Gradient Flow for
  Robust N:M Sparsity Training in Transformers" (arXiv 2402.04744). Only matrix products and
  convolutions count. Softmax, norms, activations, pooling, table look-ups, optimizer and mask
  selection do not.
- Attention counts over the full square, also where it is causal: that is what the product computes.
- FLOPs of an n:m matrix are n/m of the dense ones: an ideal machine. `flops` prices the
  arithmetic; what hardware makes of it is measured elsewhere.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nm_sparsity_jax.core import trace
from nm_sparsity_jax.core.patterns import NM
from nm_sparsity_jax.core.schedules import Phases
from nm_sparsity_jax.recipes import OneShot, Recipe
from nm_sparsity_jax.training import roles
from nm_sparsity_jax.training.rules import Rules
from nm_sparsity_jax.training.sites import Site

# What is sparse: `Rules`; or a place, as rules name it, and what is applied to its kernels.
Sparse = Rules | Mapping[str, NM | str | Recipe]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Op:
  """One parameter with all its products, or one product of data with data.

  Attributes:
    name: the path of the parameter; of a product without a parameter the names of the scopes around
      it, as jax has them, and 'product'.
    flops: dense and forward in `forward()`; what `Cost` says elsewhere.
    params: stored weights; in an inference cost those that are kept.
    axis: length of the axes that the products sum over, along which groups lie; 0 where there is
      none, or more than one choice.
  """

  name: str
  flops: float = 0
  params: int = 0
  axis: int = 0


@dataclasses.dataclass(frozen=True)
class Cost:
  """FLOPs and parameters, operation by operation; the sums are taken on demand.

  >>> kernel = Op(name="mlp/wi/kernel", flops=64, params=32, axis=8)
  >>> cost = Cost((kernel, Op(name="norm", params=4)))
  >>> cost.flops, cost.params, cost.select("ff").params
  (64, 36, 32)
  """

  ops: tuple[Op, ...]

  @property
  def flops(self) -> float:
    """Returns the sum over all operations."""
    return sum(op.flops for op in self.ops)

  @property
  def params(self) -> int:
    """Returns the sum over all operations."""
    return sum(op.params for op in self.ops)

  def select(self, *places: str) -> Cost:
    """Returns the part that any place names.

    Args:
      *places: as in `Rules`: a role, narrowed as in 'decoder/cross/qk', or a regex of whole names.
        'scores' names the products without a parameter, Q K^T and its product with V in attention;
        'attention' names these and q, k, v and o.
    """
    known, scores = roles.regexes(), rf"(.*/)?{_PRODUCT}"
    whole = "|".join(f"(?:{regex})" for regex in (known["qkv"], known["o"], scores))
    own = {"scores": scores, "attention": whole}  # not of rules: they name parameters alone
    named = {op for place in places for op in _named(place, self.ops, own)}
    return Cost(tuple(op for op in self.ops if op in named))


def forward(function: Callable[..., Any], params: Any, *inputs: Any) -> Cost:
  """Returns the cost of a forward pass, for the examples that the inputs hold; give it one.

      cost = flops.forward(lambda p, x: model.apply({"params": p}, x), params, x)

  >>> import jax
  >>> params = {"mlp": {"wi": {"kernel": jax.ShapeDtypeStruct((8, 4), "float32")}}}
  >>> x = jax.ShapeDtypeStruct((1, 8), "float32")
  >>> forward(lambda p, x: x @ p["mlp"]["wi"]["kernel"], params, x).ops
  (Op(name='mlp/wi/kernel', flops=64, params=32, axis=8),)

  Args:
    function: called as function(params, *inputs).
    params: arrays or shapes, in any nesting that jax knows.
    *inputs: arrays, shapes, and values that are no arrays.
  """
  traced = trace.trace(function, params, *inputs)
  kernels = (
    Op(
      name=path,
      flops=2 * traced.macs.get(path, 0),
      params=math.prod(shape),
      axis=math.prod(shape[a] for a in traced.axes[path]) if path in traced.axes else 0,
    )
    for path, shape in traced.shapes.items()
  )
  others = (Op(name=f"{scope}/{_PRODUCT}", flops=2 * macs) for scope, macs in traced.others)
  return Cost((*kernels, *others))


_PRODUCT = "product"


def inference(dense: Cost, sparse: Rules | Mapping[str, NM | str]) -> Cost:
  """Returns the forward FLOPs of what is sparse, and the parameters that are kept.

  With density s = n/m of each operation (1 where nothing names it; S_FF in the paper's Table 18,
  which calls it "sparsity"):

    FLOPs = sum_op s * F_op,    params = sum_op s * P_op

  Args:
    dense: of one example, by `forward`.
    sparse: `Rules`; or place -> pattern.

  Raises:
    ValueError: for a place that names nothing, two that name one operation, or a pattern whose
      groups do not divide an operation's axis.

  >>> cost = Cost((Op(name="mlp/wi/kernel", flops=64, params=32, axis=8),))
  >>> inference(cost, {"ff": "1:8"}).flops
  8.0
  """
  recipes: Sparse = sparse
  if not isinstance(sparse, Rules):
    # A pattern is the recipe that has it from the first step on.
    phases = Phases(total=1)
    recipes = {place: OneShot(pattern=NM.parse(p), phases=phases) for place, p in sparse.items()}
  sites, kept = _sites(dense.ops, recipes), []
  for op in dense.ops:
    s = sites[op].pattern.density if op in sites else 1.0
    kept.append(dataclasses.replace(op, flops=op.flops * s, params=round(op.params * s)))
  return Cost(tuple(kept))


def training(
  dense: Cost,
  sparse: Sparse,
  batch_size: int = 1,
  *,
  steps: int | None = None,
  until: int | None = None,
) -> Cost:
  """Returns the FLOPs of a run, forward and backward, and the parameters that it stores (all).

  At each step an operation of dense forward FLOPs F costs

    forward  F s  +  input gradient  F s  +  weight gradient  F     (straight_through)
                                                              F s   (masked)

  where s = 1 while D > 0 or before a pattern holds, else the density n/m of that step's pattern.
  A straight-through weight gradient needs every entry; a masked one is exactly 0 where D = 0 and
  the weight is pruned. Operations without a recipe cost 3 F. Recomputation (remat) is not counted.

  Args:
    dense: of one example, by `forward`.
    sparse: `Rules`; or place -> recipe. All have one `phases.total`.
    batch_size: examples per step.
    steps: length of the run; needed only where there is no recipe to tell it.
    until: count the steps [0, until) alone, what it has cost so far; None = all.

  Raises:
    ValueError: as `inference`; also for runs of different lengths.

  >>> cost = Cost((Op(name="mlp/wi/kernel", flops=64, params=32, axis=8),))
  >>> training(cost, {}, steps=10).flops == 3 * 10 * 64
  True
  """
  sites = _sites(dense.ops, sparse)
  recipes: Any = sparse.places if isinstance(sparse, Rules) else sparse
  totals = {recipe.phases.total for recipe in recipes.values() if recipe.phases}
  totals |= set() if steps is None else {steps}
  if len(totals) != 1:
    raise ValueError(
      f"the run would have {' and '.join(map(str, sorted(totals))) or 'no number of'} steps: "
      "give every recipe the same Phases.total, or `steps` where there is no recipe."
    )
  (total,) = totals
  end = total if until is None else min(until, total)
  done = []
  for op in dense.ops:
    weight = _weighed_steps(sites[op], end) if op in sites else 3.0 * end
    done.append(dataclasses.replace(op, flops=op.flops * batch_size * weight))
  return Cost(tuple(done))


def _weighed_steps(site: Site, until: int) -> float:
  """Returns the training FLOPs of steps [0, until) in units of F: the sum of s + s + (1 or s)."""
  # A segment is priced by its first step and its end, so a run of a million steps costs nothing.
  sparse_steps = 0.0  # sum of s
  for segment in site.recipe.timeline(site.axis_size):
    length = max(0, min(segment.stop, until) - segment.start)
    # A D that begins above 0 is 0 at `stop` alone, which is the next segment's first step. Where D
    # rises from 0, the segment is one step.
    density = segment.pattern.density if segment.pattern and not segment.decay_start else 1.0
    sparse_steps += length * density
  # A straight-through weight gradient is a whole product: it needs every entry.
  is_masked = site.recipe.gradient_mode == "masked"
  return 2 * sparse_steps + (sparse_steps if is_masked else until)


def _sites(ops: Sequence[Op], sparse: Rules | Mapping[str, Any]) -> dict[Op, Site]:
  """Returns the site of each operation that is sparse."""
  if not sparse:
    return {}
  rules = sparse if isinstance(sparse, Rules) else Rules(sparse)
  for place in rules.places:
    _named(place, ops)
  # Along its axis alone, an operation is padded or skipped as the parameter would be.
  sites = {op: rules.site(op.name, (op.axis,), 0) for op in ops if op.axis}
  return {op: site for op, site in sites.items() if isinstance(site, Site)}


def _named(place: str, ops: Sequence[Op], own: Mapping[str, str] | None = None) -> list[Op]:
  """Returns the operations that a place names; raises where there are none."""
  regex = roles.matcher(place, own)
  # A whole path may hold characters that mean something in a regex.
  found = [op for op in ops if op.name == place or regex.fullmatch(op.name)]
  if not found:
    kernels = [op.name for op in ops if op.axis]
    raise ValueError(
      f"{place!r} names nothing in this model; it has {', '.join(kernels[:8])}. A place is a role "
      f"({', '.join(roles.regexes())}), narrowed as in encoder/ff, or a regex for a whole path."
    )
  return found
