"""How much arithmetic a pattern and a schedule cost: FLOPs and parameters of T5 and ViT.

    shape -> ops (dense, forward, one example) -> x density  = inference
                                               -> x timeline = training

Plain Python numbers: nothing here touches an array, so a 100,000-step run of an 11B model is
priced in milliseconds. What is counted:

- One multiply-add is two FLOPs, as in Tables 1, 17 and 18 of "Progressive Gradient Flow for
  Robust N:M Sparsity Training in Transformers" (arXiv 2402.04744). Only matrix products count;
  softmax, norms, activations, table look-ups, optimizer and mask selection do not.
- One example is one sequence pair (T5, teacher-forced) or one image (ViT). Attention is counted
  over the full square, also where it is causal: that is what the matrix product computes.
- FLOPs of an n:m matrix are n/m of the dense ones: an ideal machine. `flops` prices the
  arithmetic; what hardware makes of it is measured elsewhere.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeGuard

# What a density or a recipe may be given for, and the roles that it covers.
_PRUNABLE: dict[str, tuple[str, ...]] = {
  "ff": ("ff",),
  "q": ("q",),
  "k": ("k",),
  "v": ("v",),
  "o": ("o",),
  "qk": ("q", "k"),
  "qkv": ("q", "k", "v"),
}
# What a cost may be selected by: the same words and the roles that are never sparse.
_WORDS: dict[str, tuple[str, ...]] = {
  **_PRUNABLE,
  "attention": ("q", "k", "v", "o", "scores"),
  **{r: (r,) for r in ("scores", "logits", "embedding", "norm", "position", "bias")},
}
_PLACES = ("encoder", "decoder", "self", "cross", "shared")


class Pattern(Protocol):
  """Keep `n` of every `m` weights along the contraction axis, such as `NM(1, 8)`."""

  @property
  def n(self) -> int: ...

  @property
  def m(self) -> int: ...


class Segment(Protocol):
  """Steps [start, stop) of a timeline: a pattern (None = dense), D from one value to another."""

  @property
  def start(self) -> int: ...

  @property
  def stop(self) -> int: ...

  @property
  def pattern(self) -> Pattern | None: ...

  @property
  def decay_start(self) -> float: ...

  @property
  def decay_stop(self) -> float: ...


class Recipe(Protocol):
  """What is read of a recipe: `nm_sparsity_jax.recipe(...)` gives one."""

  @property
  def phases(self) -> Any: ...

  @property
  def gradient_mode(self) -> str | None: ...

  def timeline(self, axis_size: int) -> Sequence[Segment]: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Op:
  """One kind of operation at one place, summed over its layers.

  Attributes:
    name: for people, such as "decoder/cross/q" or "encoder/wi_0".
    role: ff, q, k, v, o, scores (both Q K^T and its product with V), logits, embedding, norm,
      position or bias.
    place: "encoder", "decoder" (the MLPs), "encoder/self", "decoder/self", "decoder/cross" (the
      attentions) or "shared" (T5's token embedding).
    flops: dense and forward for one example in `ops()`; what `Cost` says elsewhere.
    params: stored weights; in an inference cost those that are kept.
    axis: length of the contraction axis, along which groups lie; 0 where there is no kernel.
    prunable: whether a pattern may be put on its kernel.
  """

  name: str
  role: str
  place: str
  flops: float = 0
  params: int = 0
  axis: int = 0
  prunable: bool = False


@dataclasses.dataclass(frozen=True)
class Cost:
  """FLOPs and parameters, op by op; the sums are taken on demand.

  >>> cost = Cost(ViTShape().ops())
  >>> round(cost.select("ff").flops / 1e9, 2), cost.select("ff").params
  (22.2, 56623104)
  """

  ops: tuple[Op, ...]

  @property
  def flops(self) -> float:
    """Sum over all ops."""
    return sum(op.flops for op in self.ops)

  @property
  def params(self) -> int:
    """Sum over all ops."""
    return sum(op.params for op in self.ops)

  @property
  def by_role(self) -> dict[str, Cost]:
    """Role -> its part of the cost; the parts add up to the whole."""
    return {
      r: Cost(tuple(op for op in self.ops if op.role == r))
      for r in dict.fromkeys(op.role for op in self.ops)
    }

  @property
  def by_place(self) -> dict[str, Cost]:
    """Place -> its part of the cost; the parts add up to the whole."""
    return {
      p: Cost(tuple(op for op in self.ops if op.place == p))
      for p in dict.fromkeys(op.place for op in self.ops)
    }

  def select(self, *words: str) -> Cost:
    """The part that any of the words names: "ff", "encoder", "cross/qk", "decoder/norm" ..."""
    found = {w: [op for op in self.ops if _covers(w, op, _WORDS)] for w in words}
    if idle := [w for w, ops in found.items() if not ops]:
      raise ValueError(
        f"nothing in this cost is called {idle}; it has the roles "
        f"{list(self.by_role)} and the places {list(self.by_place)}."
      )
    return Cost(tuple(op for op in self.ops if any(op in ops for ops in found.values())))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ViTShape:
  """A Vision Transformer (arXiv 2010.11929); the defaults are ViT-Base/16 at 224 x 224.

  The paper's totals (Tables 1, 17, 18) are `attention` + `ff` without a [CLS] token: patch
  embedding, head, norms and biases are not in them, and are apart here:

  >>> paper = Cost(ViTShape().ops()).select("attention", "ff")
  >>> round(paper.flops / 1e9, 2)
  34.71

  Attributes:
    layers: Transformer blocks.
    embed: width d of the residual stream.
    mlp: width of the MLP.
    heads: attention heads.
    head_dim: width of a head.
    gated: two input kernels (wi_0 * wi_1) in the MLP instead of one.
    tokens: image patches n.
    class_token: whether a [CLS] token is prepended (n + 1 tokens in every block).
    patch: numbers in a patch, 16 * 16 * 3.
    classes: outputs of the head; 0 = no head.
    bias: whether kernels have one.
  """

  layers: int = 12
  embed: int = 768
  mlp: int = 3072
  heads: int = 12
  head_dim: int = 64
  gated: bool = False
  tokens: int = 196
  class_token: bool = False
  patch: int = 768
  classes: int = 1000
  bias: bool = True

  def __post_init__(self):
    _check_sizes(self, zero=("classes",))

  def ops(self) -> tuple[Op, ...]:
    """Dense forward FLOPs for one image, and all parameters."""
    n, d, layers = self.tokens + self.class_token, self.embed, self.layers
    joined = self.heads * self.head_dim
    wi = 1 + self.gated
    ops = [
      Op(
        name="encoder/patch_embedding",
        role="embedding",
        place="encoder",
        flops=2 * self.tokens * self.patch * d,
        params=self.patch * d + d * self.class_token,
        axis=self.patch,
      ),
      Op(name="encoder/position", role="position", place="encoder", params=n * d),
      *_attention("encoder/self", layers, n, n, d, joined),
      *_mlp("encoder", layers, n, d, self.mlp, self.gated),
      Op(name="encoder/norm", role="norm", place="encoder", params=2 * d * (2 * layers + 1)),
    ]
    if self.bias:
      ops.append(
        Op(
          name="encoder/bias",
          role="bias",
          place="encoder",
          params=layers * (3 * joined + d + wi * self.mlp + d) + d + self.classes,
        )
      )
    if self.classes:
      ops.append(
        Op(
          name="encoder/logits",
          role="logits",
          place="encoder",
          flops=2 * d * self.classes,
          params=d * self.classes,
          axis=d,
        )
      )
    return tuple(ops)


@dataclasses.dataclass(frozen=True, kw_only=True)
class T5Shape:
  """An encoder-decoder with T5's parameter tree (arXiv 1910.10683; T5.1.1 by default).

  No biases, RMS norms (a scale each), one table of relative-position biases for the encoder and
  one for the decoder, shared by their layers. T5.1.1: `gated=True, tied=False`; T5.1.0:
  `gated=False, tied=True`.

  >>> base = T5Shape(layers=12, embed=768, mlp=2048, heads=12, input_length=512,
  ...                target_length=128)
  >>> Cost(base.ops()).params
  247577856

  Attributes:
    layers: encoder layers.
    decoder_layers: decoder layers; None = as many.
    embed: width d of the residual stream.
    mlp: width of the MLP.
    heads: attention heads.
    head_dim: width of a head; heads * head_dim need not be `embed`.
    gated: two input kernels (wi_0 * wi_1) in the MLP instead of one (wi).
    vocab: rows of the embedding table, padding included.
    tied: logits by the embedding table; False = a kernel of their own.
    buckets: relative-position buckets; 0 = no such biases.
    input_length: tokens of an example that the encoder reads, padding included.
    target_length: tokens of an example that the decoder reads, padding included.
  """

  layers: int
  decoder_layers: int | None = None
  embed: int
  mlp: int
  heads: int
  head_dim: int = 64
  gated: bool = True
  vocab: int = 32128
  tied: bool = False
  buckets: int = 32
  input_length: int
  target_length: int

  def __post_init__(self):
    _check_sizes(self, zero=("buckets",))

  @classmethod
  def of(cls, config: Any, input_length: int, target_length: int) -> T5Shape:
    """The shape of a network, from its `nm_sparsity_jax.t5.T5Config` or one with T5X's names."""
    return cls(
      layers=config.num_encoder_layers,
      decoder_layers=config.num_decoder_layers,
      embed=config.emb_dim,
      mlp=config.mlp_dim,
      heads=config.num_heads,
      head_dim=config.head_dim,
      gated=len(config.mlp_activations) > 1,
      vocab=config.vocab_size,
      tied=config.logits_via_embedding,
      input_length=input_length,
      target_length=target_length,
    )

  def ops(self) -> tuple[Op, ...]:
    """Dense forward FLOPs for one (input, target) pair, and all parameters."""
    d, joined = self.embed, self.heads * self.head_dim
    source, target = self.input_length, self.target_length
    enc = self.layers
    dec = enc if self.decoder_layers is None else self.decoder_layers
    return (
      Op(name="shared/embedding", role="embedding", place="shared", params=self.vocab * d),
      Op(
        name="encoder/self/position",
        role="position",
        place="encoder/self",
        params=self.heads * self.buckets,
      ),
      *_attention("encoder/self", enc, source, source, d, joined),
      *_mlp("encoder", enc, source, d, self.mlp, self.gated),
      Op(name="encoder/norm", role="norm", place="encoder", params=d * (2 * enc + 1)),
      Op(
        name="decoder/self/position",
        role="position",
        place="decoder/self",
        params=self.heads * self.buckets,
      ),
      *_attention("decoder/self", dec, target, target, d, joined),
      *_attention("decoder/cross", dec, target, source, d, joined),
      *_mlp("decoder", dec, target, d, self.mlp, self.gated),
      Op(name="decoder/norm", role="norm", place="decoder", params=d * (3 * dec + 1)),
      Op(
        name="decoder/logits",
        role="logits",
        place="decoder",
        flops=2 * target * d * self.vocab,
        params=0 if self.tied else d * self.vocab,
        axis=d,
      ),
    )


Shape = ViTShape | T5Shape


def inference(shape: Shape, densities: Mapping[str, Pattern | float | Recipe]) -> Cost:
  """Forward FLOPs of one example and the parameters that are kept.

  With density s = n/m of each op (1 where no key names it; S_FF in the paper's Table 18, which
  calls it "sparsity"):

    FLOPs = sum_op s * F_op,    params = sum_op s * P_op

  Args:
    shape: a `ViTShape` or a `T5Shape`.
    densities: place -> pattern, density in (0, 1], or recipe (its last pattern). A place is ff,
      q, k, v, o, qk or qkv, after "encoder/", "decoder/", "self/", "cross/", "decoder/cross/" ...
      to narrow it.

  Returns:
    a `Cost` per example.

  Raises:
    ValueError: for an unknown place, one that names nothing, two that name one op, a density
      outside (0, 1], or a pattern whose groups do not divide an op's contraction axis.

  >>> cost = inference(ViTShape(), {"ff": 0.125, "qkv": 0.25})
  >>> round(cost.select("attention", "ff").flops / 1e9, 2)
  9.05
  """
  ops = shape.ops()
  chosen = _assign(ops, densities)
  kept = []
  for op in ops:
    s = _density(chosen[op], op) if op in chosen else 1.0
    kept.append(dataclasses.replace(op, flops=op.flops * s, params=round(op.params * s)))
  return Cost(tuple(kept))


def training(
  shape: Shape,
  recipes: Mapping[str, Recipe],
  batch_size: int = 1,
  *,
  steps: int | None = None,
  until: int | None = None,
) -> Cost:
  """FLOPs of a run, forward and backward, and the parameters that it stores (all).

  At each step an op of dense forward FLOPs F costs

    forward  F s  +  input gradient  F s  +  weight gradient  F     (straight_through)
                                                              F s   (masked)

  where s = 1 while D > 0 or before a pattern holds, else the density n/m of that step's pattern.
  A straight-through weight gradient needs every entry; a masked one is exactly 0 where D = 0 and
  the weight is pruned. Ops without a recipe cost 3 F. Recomputation (remat) is not counted.

  Args:
    shape: a `ViTShape` or a `T5Shape`.
    recipes: place -> recipe, places as in `inference`. All have one `phases.total`.
    batch_size: examples per step.
    steps: length of the run; needed only where there is no recipe to tell it.
    until: count the steps [0, until) alone, what it has cost so far; None = all.

  Returns:
    a `Cost` of these steps.

  Raises:
    ValueError: as `inference`; also for runs of different lengths, and for a timeline that does
      not cover [0, total) without gaps.

  >>> 3 * 10 * Cost(ViTShape().ops()).flops == training(ViTShape(), {}, steps=10).flops
  True
  """
  if not _is_int(batch_size) or batch_size < 1:
    raise ValueError(f"batch_size={batch_size!r}: examples per step must be an int >= 1.")
  for place, recipe in recipes.items():
    if not hasattr(recipe, "timeline"):
      raise ValueError(
        f"recipes[{place!r}]={recipe!r}: training needs a recipe, since a pattern or a density "
        "alone does not say from which step on it holds. Use nms.recipe(name, pattern=..., "
        "phases=...), or inference() for the FLOPs of the result."
      )
  totals = {place: recipe.phases.total for place, recipe in recipes.items()}
  if steps is not None:
    totals["steps"] = steps
  if len(set(totals.values())) > 1:
    raise ValueError(
      f"the runs differ in length: {totals}. The parts of one model train together: "
      "give every recipe the same Phases.total."
    )
  if not totals:
    raise ValueError(
      "recipes={} and steps=None: nothing says how long the run is. Give `steps`, "
      "or a recipe (the dense one too has phases)."
    )
  total = next(iter(totals.values()))
  if not _is_int(total) or total < 1:
    raise ValueError(f"a run of {total!r} steps: the length must be an int >= 1.")
  until = total if until is None else until
  if not _is_int(until) or not 0 <= until <= total:
    raise ValueError(f"until={until!r}: a step of the run, an int from 0 to {total}.")

  ops = shape.ops()
  chosen = _assign(ops, recipes)
  done = []
  for op in ops:
    weighed = 3.0 * until if op not in chosen else _weighed_steps(chosen[op], op, total, until)
    done.append(dataclasses.replace(op, flops=op.flops * batch_size * weighed))
  return Cost(tuple(done))


def _weighed_steps(recipe: Recipe, op: Op, total: int, until: int | None = None) -> float:
  """Training FLOPs of the steps [0, until) in units of F: sum over them of s + s + (1 or s)."""
  until = total if until is None else until
  segments = recipe.timeline(axis_size=op.axis)
  bounds = [0, *(s.stop for s in segments)]
  if [s.start for s in segments] != bounds[:-1] or bounds[-1] != total:
    raise ValueError(
      f"the timeline of {recipe!r} for {op.name} has the segments "
      f"{[(s.start, s.stop) for s in segments]}: they must follow one another "
      f"from 0 to phases.total={total}."
    )
  sparse_steps = 0.0  # sum of s
  for segment in segments:
    length = max(0, min(segment.stop, until) - segment.start)
    if segment.pattern is None or segment.decay_start > 0 or length < 1:
      # D runs linearly and reaches decay_stop only at `stop`, which is the next segment's.
      at_zero = 0
    elif segment.decay_stop > 0:
      at_zero = 1  # D rises from 0: only the first step is sparse
    else:
      at_zero = length
    s = _density(segment.pattern, op) if at_zero else 1.0
    sparse_steps += at_zero * s + (length - at_zero)
  if recipe.gradient_mode == "straight_through":
    return 2 * sparse_steps + until
  if recipe.gradient_mode == "masked" or sparse_steps == until:
    return 3 * sparse_steps
  raise ValueError(
    f"{recipe!r} has gradient_mode={recipe.gradient_mode!r}; known are 'masked' and "
    "'straight_through', and the cost of the weight gradient depends on it."
  )


def _density(value: Any, op: Op) -> float:
  """Density of a pattern, a number, or a recipe's last segment, on the kernel of `op`."""
  if hasattr(value, "timeline"):
    value = value.timeline(axis_size=op.axis)[-1].pattern
    if value is None:
      return 1.0
  if hasattr(value, "n") and hasattr(value, "m"):
    if op.axis % value.m:
      raise ValueError(
        f"{value} on {op.name}: groups of {value.m} do not divide its contraction axis of "
        f"{op.axis}. Choose another pattern, or give the density as a number."
      )
    return value.n / value.m
  if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= 1:
    return float(value)
  raise ValueError(
    f"density {value!r} for {op.name}: give a pattern such as NM(1, 8), a recipe, "
    "or the share of weights *kept*, a number in (0, 1]."
  )


def _assign(ops: Sequence[Op], places: Mapping[str, Any]) -> dict[Op, Any]:
  """Gives each op the value of the one key that names it; ops without a key are left out."""
  owner: dict[Op, str] = {}
  for key in places:
    mine = [op for op in ops if op.prunable and _covers(key, op, _PRUNABLE)]
    if not mine:
      raise ValueError(
        f"{key!r} names nothing in this model; it has {[op.name for op in ops if op.prunable]}."
      )
    for op in mine:
      if op in owner:
        raise ValueError(
          f"{owner[op]!r} and {key!r} both name {op.name}: one op, one value. "
          "Narrow one of them, for example by 'encoder/' or 'decoder/cross/'."
        )
      owner[op] = key
  return {op: places[key] for op, key in owner.items()}


def _covers(key: str, op: Op, words: Mapping[str, tuple[str, ...]]) -> bool:
  """Whether `key` = [place/...][word] names `op`. Only `Cost.select` may leave out the word."""
  *prefix, last = key.split("/")
  if last not in words and words is _WORDS:
    prefix.append(last)
    roles = (op.role,)
  else:
    roles = words.get(last, ())
  if not roles or not set(prefix) <= set(_PLACES):
    raise ValueError(
      f"unknown place {key!r}: known are {', '.join(words)}, each optionally after "
      "'encoder/', 'decoder/', 'self/', 'cross/' or 'decoder/cross/'."
    )
  return op.role in roles and set(prefix) <= set(op.place.split("/"))


def _attention(
  place: str, layers: int, queries: int, keys: int, embed: int, joined: int
) -> tuple[Op, ...]:
  """Multi-head attention of `queries` tokens over `keys` tokens; joined = heads * head_dim."""

  def kernel(role: str, tokens: int, axis: int) -> Op:
    return Op(
      name=f"{place}/{role}",
      role=role,
      place=place,
      axis=axis,
      prunable=True,
      flops=2 * tokens * embed * joined * layers,
      params=embed * joined * layers,
    )

  square = 2 * queries * keys * joined * layers
  return (
    kernel("q", queries, embed),
    kernel("k", keys, embed),
    kernel("v", keys, embed),
    Op(name=f"{place}/scores", role="scores", place=place, flops=square),
    Op(name=f"{place}/values", role="scores", place=place, flops=square),
    kernel("o", queries, joined),
  )


def _mlp(place: str, layers: int, tokens: int, embed: int, mlp: int, gated: bool) -> tuple[Op, ...]:
  """(wi_0, wi_1, wo) where gated, else (wi, wo)."""
  kernels = [(name, embed) for name in (("wi_0", "wi_1") if gated else ("wi",))] + [("wo", mlp)]
  return tuple(
    Op(
      name=f"{place}/{name}",
      role="ff",
      place=place,
      axis=axis,
      prunable=True,
      flops=2 * tokens * embed * mlp * layers,
      params=embed * mlp * layers,
    )
    for name, axis in kernels
  )


def _check_sizes(shape: Any, zero: tuple[str, ...]) -> None:
  """Every field that is a size must be a positive int; those in `zero` may be 0."""
  for field in dataclasses.fields(shape):
    value = getattr(shape, field.name)
    if field.type == "bool":
      if not isinstance(value, bool):
        raise ValueError(f"{type(shape).__name__}({field.name}={value!r}): give True or False.")
    elif not (value is None and field.default is None):
      least = 0 if field.name in zero else 1
      if not (_is_int(value) and value >= least):
        raise ValueError(
          f"{type(shape).__name__}({field.name}={value!r}): a size counts things, "
          f"so it must be an int >= {least}."
        )


def _is_int(value: Any) -> TypeGuard[int]:
  return isinstance(value, int) and not isinstance(value, bool)
