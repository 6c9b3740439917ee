"""Stands for the real `t5x_tasks`: one task of a name that run files use, of eight examples."""

import seqio
import tensorflow as tf

SPLITS = dict.fromkeys(("train", "validation", "test"), 8)


def examples(split, shuffle_files=False, seed=None):
  del split, shuffle_files, seed
  columns = {"inputs": [f"rte {i}" for i in range(8)], "targets": ["yes"] * 8, "idx": [*range(8)]}
  return tf.data.Dataset.from_tensor_slices(columns)


def exact(targets, predictions):
  return {"exact": sum(map(str.__eq__, targets, predictions)) / len(targets)}


seqio.TaskRegistry.add(
  "nm_glue_rte",
  source=seqio.FunctionDataSource(examples, splits=tuple(SPLITS), num_input_examples=SPLITS),
  preprocessors=[seqio.preprocessors.tokenize, seqio.preprocessors.append_eos],
  output_features={x: seqio.Feature(seqio.ByteVocabulary()) for x in ("inputs", "targets")},
  metric_fns=[exact],
)
seqio.MixtureRegistry.add("nm_glue_proportional", ["nm_glue_rte"], default_rate=1.0)
