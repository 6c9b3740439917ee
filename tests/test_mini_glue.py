"""mini-GLUE: the same bytes everywhere, GLUE's shape, and a vocabulary that says it."""

import functools
import hashlib
import json
import warnings

import numpy as np
import pytest
import tasks_found

from nm_sparsity_jax.runs import glue

pytestmark = pytest.mark.filterwarnings("ignore")  # TensorFlow and seqio, on their own account

if reason := tasks_found.why_not():
  pytest.skip(reason, allow_module_level=True)

with warnings.catch_warnings(action="ignore"):
  from t5x_tasks import mini, vocabulary

FEW = {"train": 40}
# SHA-256 of all rows of the default size and seed, as JSON with sorted keys. Of these bytes it was
# proven once that they have GLUE's shape, that labels follow from the texts, that counting words
# finds few of them, and that no text is in two splits.
DIGEST = "fd895cbe7e184988b7df13d9770bd40c0edaed9c651aa897dbe1308807848221"


@functools.cache
def rows():
  """All of mini-GLUE: config -> split -> rows."""
  return {c: {s: mini.make(c, s) for s in task.splits} for c, task in glue.TASKS.items()}


def test_the_same_bytes_everywhere():
  assert hashlib.sha256(json.dumps(rows(), sort_keys=True).encode()).hexdigest() == DIGEST


def test_another_seed_gives_other_rows_and_a_larger_size_more_of_the_same():
  few = mini.make("stsb", "train", FEW)
  assert mini.make("stsb", "train", FEW, seed=1) != few == mini.make("stsb", "train")[:40]


# --- the vocabulary -------------------------------------------------------------------------------


def test_the_vocabulary_says_every_text_and_no_other_word():
  words = vocabulary.mini_words()
  assert words.vocab_size <= 256
  said = {word for k in range(26) for word in [f"{k / 5:.1f}"]} | {"-1.0"}
  for config, task in glue.TASKS.items():
    said |= set(task.labels)
    for split in rows()[config].values():
      for row in split:
        fields = [f"{name}: {row[name]}" for name in task.fields]
        text = " ".join([task.prefix, *fields])
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
