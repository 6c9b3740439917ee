"""mini-GLUE: every config of GLUE in a closed language of some hundred words, made from a seed.

    seed, config, split, row number -> SHA-256 -> draws -> one row (the fields, label, idx)

A row depends on these four alone: the same bytes on every platform, and the first rows of a larger
split are the smaller one. A text belongs to one split, whatever the seed, so that nothing is gained
by learning the training set by heart. A row has GLUE's fields, label sets and splits, labels are
hidden (-1) in test, and each config keeps the nature of its task. What decides is order, position
or a relation of words, so counting words does not solve cola, mnli, rte and their like:

    cola     a verb agrees with the head of its subject, not with the noun beside it; word order
    sst2     a negation turns an adjective around; after `but` comes what counts
    mrpc     a paraphrase: synonyms, passive, adverb moved; not one: roles swapped, verb, person
    qqp      the same for questions, and `why` is `for what reason`
    stsb     shared content of two sentences in steps of 0.2; a synonym counts half
    mnli     who has what: kinds of things, and `no`; mismatched: in longer sentences
    qnli     whether one of two facts answers the question
    rte      whether one of two facts entails the third
    wnli     whom `he` or `she` stands for
    ax       more of mnli, without labels

Nothing is imported but the table of tasks.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from nm_sparsity_jax.runs import glue

T = TypeVar("T")

# Rows by split; validation and test hold for their matched and mismatched halves too.
ROWS: Mapping[str, int] = {"train": 4096, "validation": 512, "test": 256}
_PARTS = ("validation", "test", *["train"] * 6)  # eighths of all texts

_WOMEN = ("anna", "dora", "emma")
_MEN = ("ben", "carl", "otto")
_PEOPLE = _WOMEN + _MEN
_KINDS = {
  "animals": ("cats", "dogs", "horses"),
  "plants": ("oaks", "roses", "tulips"),
  "vehicles": ("bikes", "buses", "cars"),
}
_THINGS = (*_KINDS, *(thing for things in _KINDS.values() for thing in things))
# Of one, of several.
_NOUNS = (("cat", "cats"), ("dog", "dogs"), ("horse", "horses"))
_OBJECTS = (("bike", "bikes"), ("bus", "buses"), ("car", "cars"))
_SEE = (("sees", "see"), ("likes", "like"), ("chases", "chase"))
_BESIDE = ("near", "behind", "with")
# Base, third person and participle, of two verbs that mean the same.
_VERBS = (
  (("help", "helps", "helped"), ("assist", "assists", "assisted")),
  (("call", "calls", "called"), ("phone", "phones", "phoned")),
  (("follow", "follows", "followed"), ("trail", "trails", "trailed")),
)
_ACTS = (*_SEE, *((helps, help_) for verb in _VERBS for help_, helps, _ in verb))
_ASKING = (("why", "for what reason"), ("when", "at what time"), ("where", "in what place"))
_WHAT = ("film", "plot", "cast", "music")
_GOOD = ("good", "great", "funny", "lovely")
_BAD = ("bad", "awful", "dull", "boring")
_MOOD = ("tired", "busy", "late", "hungry")
_SIZE = ("big", "small", "old", "young")
_PET = (("cat", "kitten"), ("dog", "hound"), ("horse", "pony"))
_RIDE = (("car", "auto"), ("bus", "coach"), ("bike", "cycle"))
_TIME = ("today", "again", "now", "daily")


class _Draw:
  """Draws of one row: two bytes of SHA-256 each, as many as are asked for."""

  def __init__(self, *key: Any):
    self._key = "/".join(map(str, key)).encode()
    self._bytes, self._block = b"", 0

  def below(self, n: int) -> int:
    """Draws from 0 ... n - 1; n is small, so equally likely within n / 65536."""
    if not self._bytes:
      self._bytes = hashlib.sha256(self._key + b"/%d" % self._block).digest()
      self._block += 1
    first, self._bytes = self._bytes[:2], self._bytes[2:]
    return int.from_bytes(first, "big") % n

  def one(self, choices: Sequence[T]) -> T:
    return choices[self.below(len(choices))]

  def some(self, choices: Sequence[T], n: int) -> list[T]:
    """Draws `n` different ones."""
    left = list(choices)
    return [left.pop(self.below(len(left))) for _ in range(n)]

  def other(self, choices: Sequence[T], than: T) -> T:
    return self.one([c for c in choices if c != than])


# --- the configs: draws -> the fields and the label's index ---------------------------------------


def _cola(d: _Draw) -> tuple[dict[str, str], int]:
  """Draws a sentence; a wrong one mostly has a verb of the wrong number, else two words swapped."""
  (head, beside), verb, number = d.some(_NOUNS, 2), d.one(_ACTS), d.below(2)
  words = ["the", head[number]]
  if d.below(2):
    words += [d.one(_BESIDE), "the", d.one(beside)]
  at = len(words)
  words.append(verb[number])
  words += [d.one(_PEOPLE)] if d.below(2) else ["the", d.one(d.one(_OBJECTS))]
  if d.below(2):
    words.append(d.one(_TIME))
  label = d.below(2)
  if not label:
    if d.below(4):
      words[at] = verb[1 - number]
    else:
      i = d.below(len(words) - 1)
      words[i], words[i + 1] = words[i + 1], words[i]
  return {"sentence": " ".join(words)}, label


def _sst2(d: _Draw) -> tuple[dict[str, str], int]:
  label = d.below(2)

  def clause(what, good):
    turned = d.below(2)
    words = ["the", what, "was", *d.one(((), ("really",), ("so",)))]
    return [*words, *(["not"] * turned), d.one((_BAD, _GOOD)[good ^ turned])]

  first, second = d.some(_WHAT, 2)
  words = clause(second, label)
  if d.below(2):
    words = [*clause(first, 1 - label), "but", *words]
  return {"sentence": " ".join(words)}, label


def _told(d: _Draw, verb, who: str, whom: str, when: str) -> str:
  """Returns one way to say that `who` helps `whom`."""
  _, helps, helped = d.one(verb)
  words = [whom, "is", helped, "by", who] if d.below(2) else [who, helps, whom]
  return " ".join([when, *words] if d.below(2) else [*words, when])


def _mrpc(d: _Draw) -> tuple[dict[str, str], int]:
  (who, whom, third), verb, when = d.some(_PEOPLE, 3), d.one(_VERBS), d.one(_TIME)
  first, label = _told(d, verb, who, whom, when), d.below(2)
  if not label:
    match d.below(3):
      case 0:
        verb = d.other(_VERBS, verb)
      case 1:
        who, whom = d.one(((third, whom), (who, third)))
      case _:
        who, whom = whom, who
  return {"sentence1": first, "sentence2": _told(d, verb, who, whom, when)}, label


def _asked(d: _Draw, asking, verb, who: str, whom: str) -> str:
  help_, _, helped = d.one(verb)
  words = ["is", whom, helped, "by", who] if d.below(2) else ["does", who, help_, whom]
  return " ".join([d.one(asking), *words])


def _qqp(d: _Draw) -> tuple[dict[str, str], int]:
  (who, whom), verb, asking = d.some(_PEOPLE, 2), d.one(_VERBS), d.one(_ASKING)
  first, label = _asked(d, asking, verb, who, whom), d.below(2)
  if not label:
    match d.below(3):
      case 0:
        verb = d.other(_VERBS, verb)
      case 1:
        asking = d.other(_ASKING, asking)
      case _:
        who, whom = whom, who
  return {"question1": first, "question2": _asked(d, asking, verb, who, whom)}, label


def _stsb(d: _Draw) -> tuple[dict[str, str], float]:
  """Draws slots that weigh, in fifths: pet 8, verb 6, ride 6, size 3, time 2; of 25."""
  slots = [(_PET, 8), ([[v[1] for v in pair] for pair in _VERBS], 6), (_RIDE, 6)]
  slots += [([(x,) for x in words], weight) for words, weight in ((_SIZE, 3), (_TIME, 2))]
  changed = d.some(range(5), d.below(6))
  one, two, fifths = [], [], 0
  for i, (meanings, weight) in enumerate(slots):
    meaning = d.one(meanings)
    word = d.one(meaning)
    one.append(word)
    if i not in changed:
      fifths += weight
    elif len(meaning) > 1 and d.below(2):
      fifths += weight // 2
      word = d.other(meaning, word)
    else:
      word = d.one(d.other(meanings, meaning))
    two.append(word)
  frame = lambda pet, verb, ride, size, time: f"the {size} {pet} {verb} the {ride} {time}"
  return {"sentence1": frame(*one), "sentence2": frame(*two)}, fifths / 5


def _thing(d: _Draw) -> str:
  kind = d.one(tuple(_KINDS))
  return d.one((kind, *_KINDS[kind], *_KINDS[kind]))


def _near(d: _Draw, thing: str) -> str:
  """Draws mostly a kind of the thing, or one of its kind, so that the direction counts."""
  related = [x for x in _THINGS if x != thing and (_is(x, thing) or _is(thing, x))]
  return d.one((thing, d.one(_THINGS), *[d.one(related)] * 4))


def _is(thing: str, kind: str) -> bool:
  return thing == kind or thing in _KINDS.get(kind, ())


def _mnli(d: _Draw) -> tuple[dict[str, str], int]:
  """Draws until the label fits: entailment, neutral and contradiction are equally likely."""
  label = d.below(3)
  while True:
    (who, other), thing = d.some(_PEOPLE, 2), _thing(d)
    claimed, about = _near(d, thing), who if d.below(8) else other
    owns, claims = d.below(2), d.below(2)
    if label == (_judge(owns, thing, claims, claimed) if about == who else 1):
      break
  say = lambda who, owns, thing: f"{who} has {'' if owns else 'no '}{thing}"
  return {"premise": say(who, owns, thing), "hypothesis": say(about, claims, claimed)}, label


def _mismatched(d: _Draw) -> tuple[dict[str, str], int]:
  """Draws the same in a frame that training never shows: a word of time at the end."""
  when = d.one(_TIME)
  fields, label = _mnli(d)
  return {field: f"{text} {when}" for field, text in fields.items()}, label


def _judge(has: int, thing: str, says: int, claimed: str) -> int:
  """Returns what `[no] thing` says of `[no] claimed`: 0 entailment, 1 neutral, 2 contradiction."""
  if _is(thing, claimed) if has else _is(claimed, thing):
    return 0 if has == says else 2
  return 1


def _qnli(d: _Draw) -> tuple[dict[str, str], int]:
  (a, b, c, e, absent), (v, w) = d.some(_PEOPLE, 5), d.some(_VERBS, 2)
  label = d.below(2)
  helps, whom = v[0][1], b
  if label:
    helps, whom = d.one(((w[0][1], b), (v[0][1], a), (v[0][1], absent)))
  facts = [f"{a} {v[0][1]} {b}", f"{c} {w[0][1]} {e}"]
  sentence = " and ".join(facts[::-1] if d.below(2) else facts)
  return {"question": f"who {helps} {whom}", "sentence": sentence}, label


def _rte(d: _Draw) -> tuple[dict[str, str], int]:
  (a, b), (kind, other) = d.some(_PEOPLE, 2), d.some(tuple(_KINDS), 2)
  thing, label = d.one(_KINDS[kind]), d.below(2)
  who, claimed = a, d.one((thing, kind, kind))
  if label:
    match d.below(4):
      case 0:
        who = b
      case 1:
        claimed = d.one((other, *_KINDS[other]))
      case 2:
        claimed = d.other(_KINDS[kind], thing)
      case _:
        thing, claimed = kind, d.one(_KINDS[kind])
  facts = [f"{a} owns {thing}", f"{b} owns {d.one(_KINDS[other])}"]
  premise = " and ".join(facts[::-1] if d.below(2) else facts)
  return {"sentence1": premise, "sentence2": f"{who} owns {claimed}"}, label


def _wnli(d: _Draw) -> tuple[dict[str, str], int]:
  pair = [(d.one(_WOMEN), "she"), (d.one(_MEN), "he")]
  (who, _), (whom, _) = d.some(pair, 2)
  (meant, pronoun), (unmeant, _) = d.some(pair, 2)
  mood, helps, label = d.one(_MOOD), d.one(d.one(_VERBS))[1], d.below(2)
  text = f"{who} {helps} {whom} because {pronoun} is {mood}"
  return {"sentence1": text, "sentence2": f"{meant if label else unmeant} is {mood}"}, label


_MAKE: Mapping[str, Callable[[_Draw], tuple[dict[str, str], Any]]] = {
  "cola": _cola,
  "sst2": _sst2,
  "mrpc": _mrpc,
  "qqp": _qqp,
  "stsb": _stsb,
  "mnli": _mnli,
  "mismatched": _mismatched,
  "qnli": _qnli,
  "rte": _rte,
  "wnli": _wnli,
}


def sizes(rows: Mapping[str, int] | None) -> Mapping[str, int]:
  """Returns `ROWS`, with some of the numbers replaced."""
  out = {**ROWS, **(rows or {})}
  if set(out) != set(ROWS) or any(type(n) is not int or n < 1 for n in out.values()):
    raise ValueError(
      f"rows={rows!r}: give the rows of {', '.join(ROWS)}, some or all, as whole numbers from 1 "
      "on. Those of validation hold for validation_matched too."
    )
  return out


def make(
  config: str, split: str, rows: Mapping[str, int] | None = None, seed: int = 0
) -> list[dict[str, Any]]:
  """Returns the rows of one split, in the order of `idx`.

  >>> make("rte", "validation", {"validation": 1})[0]["sentence2"]
  'ben owns tulips'

  Args:
    config: a name in `glue.TASKS`.
    split: one of its splits.
    rows: how many, by split; see `sizes`.
    seed: any whole number.
  """
  task = glue.TASKS[config]
  if config.startswith("mnli_"):  # they hold the halves of mnli
    config, split = "mnli", f"{split}_{config.removeprefix('mnli_')}"
  name = {"ax": "mnli"}.get(config, "mismatched" if split.endswith("mismatched") else config)
  part, out = split.partition("_")[0], []
  for idx in range(sizes(rows)[part]):
    for attempt in itertools.count():
      fields, label = _MAKE[name](_Draw(seed, config, split, idx, attempt))
      if _part(fields) == part:
        break
    if split.startswith("test"):
      label = -1.0 if task.regression else -1
    out.append({**fields, "label": label, "idx": idx})
  return out


def _part(fields: Mapping[str, str]) -> str:
  """Returns the split that a text belongs to."""
  return _PARTS[hashlib.sha256("\n".join(fields.values()).encode()).digest()[0] % len(_PARTS)]


def _words() -> tuple[str, ...]:
  """Returns all words, sorted: of the sentences, of T5's text format, and the targets."""
  lexicon = [_PEOPLE, _THINGS, *_NOUNS, *_SEE, _BESIDE, *sum(_VERBS, ()), _WHAT, _GOOD, _BAD, _MOOD]
  lexicon += [_SIZE, *_PET, *_RIDE, _TIME, *(x.split() for pair in _ASKING for x in pair)]
  lexicon += ["the was really so not but is by does and owns has no who because he she".split()]
  for task in glue.TASKS.values():
    lexicon += [task.labels, [task.prefix], [f"{field}:" for field in task.fields]]
  lexicon += [["-1.0"], [f"{k / 5:.1f}" for k in range(26)]]
  return tuple(sorted({word for words in lexicon for word in words}))


WORDS = _words()
