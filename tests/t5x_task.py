"""A SeqIO task small enough for a test, learnable in a few steps: `sort cab` -> `abc`."""

import numpy as np
import seqio
import tensorflow as tf

VOCABULARY = seqio.ByteVocabulary()


def examples(split, shuffle_files=False, seed=None):
  del shuffle_files, seed
  rng = np.random.default_rng(["train", "validation"].index(split))
  words = ["".join(rng.choice(list("abcde"), 4)) for _ in range({"train": 256}.get(split, 32))]
  columns = {"inputs": words, "targets": ["".join(sorted(word)) for word in words]}
  return tf.data.Dataset.from_tensor_slices(columns)


def letters_in_place(targets, predictions):
  hits = [[a == b for a, b in zip(t, p)] for t, p in zip(targets, predictions, strict=True)]  # noqa: B905
  return {"letters": sum(map(sum, hits)) / sum(map(len, targets))}


def same(split, shuffle_files=False, seed=None):
  return examples(split, shuffle_files, seed).map(lambda x: {**x, "targets": x["inputs"]})


def numbered(split, shuffle_files=False, seed=None):
  return examples(split, shuffle_files, seed).enumerate().map(lambda i, x: {**x, "idx": i})


_TASKS = {"nm_test_sort": examples, "tests_same": same, "tests_idx": numbered}
for _name, _examples in _TASKS.items():
  seqio.TaskRegistry.add(
    _name,
    source=seqio.FunctionDataSource(
      _examples, splits=("train", "validation"), num_input_examples={"train": 256, "validation": 32}
    ),
    preprocessors=[seqio.preprocessors.tokenize, seqio.preprocessors.append_eos],
    output_features={name: seqio.Feature(VOCABULARY) for name in ("inputs", "targets")},
    metric_fns=[letters_in_place],
  )
seqio.MixtureRegistry.add("tests_mixed", [("nm_test_sort", 2), ("tests_same", 1)])
