"""mini-GLUE: the same bytes everywhere, GLUE's shape, labels that its own rules give, learnable."""

import doctest
import hashlib
import json
import re
import warnings

import numpy as np
import pytest
import tasks_found

from nm_sparsity_jax.runs import glue

pytestmark = pytest.mark.filterwarnings("ignore")  # TensorFlow and seqio, on their own account

if reason := tasks_found.why_not():
  pytest.skip(reason, allow_module_level=True)

with warnings.catch_warnings():
  warnings.simplefilter("ignore")
  from t5x_tasks import metrics, mini, vocabulary

FEW = {"train": 40, "validation": 30, "test": 20}
# SHA-256 of all rows of the default size and seed, as JSON with sorted keys.
DIGEST = "fd895cbe7e184988b7df13d9770bd40c0edaed9c651aa897dbe1308807848221"


def test_the_same_bytes_everywhere():
  rows = {c: {s: mini.make(c, s) for s in task.splits} for c, task in glue.TASKS.items()}
  assert hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest() == DIGEST


def test_another_seed_gives_other_rows_and_a_larger_size_more_of_the_same():
  for config in ("cola", "stsb", "mnli"):
    few = mini.make(config, "train", FEW)
    assert mini.make(config, "train", FEW, seed=1) != few == mini.make(config, "train")[:40]


def test_it_has_the_shape_of_glue():
  for config, task in glue.TASKS.items():
    for split in task.splits:
      rows = mini.make(config, split, FEW)
      assert [row["idx"] for row in rows] == list(range(FEW[split.split("_")[0]]))
      assert all(set(row) == {*task.fields, "label", "idx"} for row in rows)
      labels = {row["label"] for row in rows}
      if split.startswith("test"):
        assert labels == {-1}
      elif task.regression:
        assert labels <= {k / 5 for k in range(26)} and len(labels) > 8
      else:
        assert labels == set(range(len(task.labels)))
  halves = [mini.make("mnli", f"validation_{half}", FEW) for half in ("matched", "mismatched")]
  assert halves[0] == mini.make("mnli_matched", "validation", FEW)
  assert halves[1] == mini.make("mnli_mismatched", "validation", FEW) != halves[0]
  assert mini.make("ax", "test", FEW) != mini.make("mnli_matched", "test", FEW)


def test_no_text_is_in_two_splits_whatever_the_seed():
  for config, task in glue.TASKS.items():
    seen: dict[str, str] = {}
    for split in task.splits:
      for seed in (0, 1):
        for row in mini.make(config, split, mini.ROWS | {"train": 1000}, seed):
          text = " / ".join(row[field] for field in task.fields)
          part = split.partition("_")[0]
          assert seen.setdefault(text, part) == part, (config, text)


# --- labels, by rules of the test's own -----------------------------------------------------------

KIND = {
  thing: kind
  for kind, things in {
    "animals": "cats dogs horses", "plants": "oaks roses tulips", "vehicles": "bikes buses cars",
  }.items()
  for thing in things.split()
}  # fmt: skip
SAME = """
help assist|call phone|follow trail|cat kitten|dog hound|horse pony|car auto|bus coach|bike cycle
"""
MEANS = {word: pair.split()[0] for pair in SAME.split("|") for word in pair.split()}


def stem(verb):
  return MEANS[re.sub("(ed|s)$", "", verb) if verb != "phoned" else "phone"]


def below(thing, kind):
  return thing == kind or KIND.get(thing) == kind


def event(text):
  """(asking or time, verb, who, whom) of `today anna is helped by ben` and its like."""
  text = text.replace("for what reason", "why").replace("at what time", "when")
  text = text.replace("in what place", "where").replace("does ", "")
  words = [w for w in text.split() if w not in ("is", "by")]
  when = next(w for w in words if w in "why when where today again now daily".split())
  people = [w for w in words if w in "anna dora emma ben carl otto".split()]
  (verb,) = [w for w in words if w not in (when, *people)]
  return (when, stem(verb), *(people[::-1] if " is " in f" {text} " else people))


def expected(config, row):
  one, two = [row[field] for field in glue.TASKS[config].fields + ("idx",)][:2]
  if config == "cola":
    animal, verb = "(?:cat|dog|horse)s?", "(?:see|like|chase|help|assist|call|phone|follow|trail)s?"
    whom = "(?:anna|dora|emma|ben|carl|otto|the (?:bike|bikes|bus|buses|car|cars))"
    beside, when = f"(?: (?:near|behind|with) the {animal})?", "(?: (?:today|again|now|daily))?"
    found = re.fullmatch(f"the ({animal}){beside} ({verb}) {whom}{when}", one)
    return int(bool(found) and found[1].endswith("s") != found[2].endswith("s"))
  if config == "sst2":
    last = one.split(" but ")[-1].split()
    return int((last[-1] in "good great funny lovely".split()) != ("not" in last))
  if config in ("mrpc", "qqp"):
    return int(event(one) == event(two))
  if config == "stsb":
    a, b = [[MEANS.get(w, w) for w in x.split()] for x in (one, two)]
    a[3], b[3] = stem(a[3]), stem(b[3])
    weight = [0, 3, 8, 6, 0, 6, 2]
    same = [w * (x == y) for w, x, y in zip(weight, a, b, strict=True)]
    words = zip(weight, same, one.split(), two.split(), strict=True)
    return sum(s // (1 if x == y else 2) for _, s, x, y in words) / 5
  if config.startswith("mnli"):
    (who, has, thing), (about, claims, claimed) = (
      (x[0], "no" not in x, x[2 + ("no" in x)]) for x in (two.split(), one.split())
    )  # the fields are hypothesis, premise
    follows = below(thing, claimed) if has else below(claimed, thing)
    return 1 if who != about or not follows else 0 if has == claims else 2
  if config == "qnli":
    return int(one.removeprefix("who ") not in [x.split(" ", 1)[1] for x in two.split(" and ")])
  if config == "rte":
    facts = [x.split(" owns ") for x in one.split(" and ")]
    who, claimed = two.split(" owns ")
    return int(not any(a == who and below(thing, claimed) for a, thing in facts))
  assert config == "wnli"
  women = "anna dora emma".split()
  return int((two.split()[0] in women) == ("because she" in one))


def test_labels_follow_from_the_text():
  for config, task in glue.TASKS.items():
    for split in task.splits:
      if not split.startswith("test"):
        for row in mini.make(config, split, {"train": 300, "validation": 300}):
          assert row["label"] == expected(config, row), (config, row)


# --- not by counting words ------------------------------------------------------------------------


def texts(config, rows):
  task = glue.TASKS[config]
  return [
    " ".join([task.prefix, *(w for f in task.fields for w in (f"{f}:", row[f]))]) for row in rows
  ]


def bag(config, split):
  rows = mini.make(config, split)
  ids = {word: i for i, word in enumerate(mini.WORDS)}
  x = np.zeros((len(rows), len(ids)))
  for i, text in enumerate(texts(config, rows)):
    for word in text.split():
      x[i, ids[word]] += 1
  return x, np.array([row["label"] for row in rows])


def test_counting_words_is_not_enough():
  import sklearn.ensemble
  import sklearn.linear_model

  for config, split in (
    ("cola", "validation"),
    ("mnli", "validation_matched"),
    ("rte", "validation"),
  ):
    (x, y), (xv, yv) = bag(config, "train"), bag(config, split)
    for model in (
      sklearn.linear_model.LogisticRegression(max_iter=500),
      sklearn.ensemble.RandomForestClassifier(30, random_state=0),
    ):
      assert model.fit(x, y).score(xv, yv) < 0.85, (config, model)


# --- the vocabulary -------------------------------------------------------------------------------


def test_the_vocabulary_says_every_text_and_no_other_word():
  words = vocabulary.mini_words()
  assert (words.pad_id, words.eos_id, words.unk_id) == (0, 1, 2) and words.vocab_size <= 256
  said = {word for k in range(26) for word in [f"{k / 5:.1f}"]} | {"-1.0"}
  for config, task in glue.TASKS.items():
    said |= set(task.labels)
    for split in task.splits:
      for text in texts(config, mini.make(config, split)):
        ids = words.encode(text)
        assert words.unk_id not in ids and words.decode(ids) == text and len(ids) < 24
        said |= set(text.split())
  assert said == set(mini.WORDS)
  for word in (*mini.WORDS, "<unk>"):
    assert words.decode([*words.encode(word), 1, 5, 0]) == word


def test_the_vocabulary_in_tensorflow():
  words = vocabulary.mini_words()
  for text in ("rte sentence1: anna owns dogs", "nosuchword not_entailment", "3.8", ""):
    ids = words.encode(text)
    assert words.encode_tf(text).numpy().tolist() == ids
    assert words.decode_tf(words.encode_tf(text)).numpy().decode() == words.decode(ids)
  batch = np.array([[5, 6, 1, 7], [0, 2, 300, 0]])
  assert [x.decode() for x in words.decode_tf(batch).numpy()] == [
    " ".join(mini.WORDS[2:4]), "<unk> <unk>",
  ]  # fmt: skip
  assert words == vocabulary.mini_words() != vocabulary.WordVocabulary(["a"])
  assert hash(words) == hash(vocabulary.mini_words())
  for bad in (["a", "a"], ["a b"], [""]):
    with pytest.raises(ValueError, match="different words"):
      vocabulary.WordVocabulary(bad)


def test_the_examples_in_the_docstrings():
  for module in (mini, vocabulary, metrics):
    found = doctest.testmod(module)
    assert found.attempted and not found.failed
