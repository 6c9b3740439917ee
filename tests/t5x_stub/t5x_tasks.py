"""Stands for the real `t5x_tasks`: tasks of the names that run files use, of 32 examples."""

import seqio
import tensorflow as tf

SPLITS = {"train": 32, "validation": 8, "test": 8}
BYTES = seqio.ByteVocabulary()


def examples(split, shuffle_files=False, seed=None):
  del shuffle_files, seed
  ids = list(range(SPLITS[split]))
  columns = {"inputs": [f"rte {i}" for i in ids], "targets": ["yes"] * len(ids), "idx": ids}
  return tf.data.Dataset.from_tensor_slices(columns)


def exact(targets, predictions):
  return {"exact": sum(map(str.__eq__, targets, predictions)) / len(targets)}


for name in ("nm_glue_rte", "nm_wmt17_ende"):
  seqio.TaskRegistry.add(
    name,
    source=seqio.FunctionDataSource(examples, splits=tuple(SPLITS), num_input_examples=SPLITS),
    preprocessors=[seqio.preprocessors.tokenize, seqio.preprocessors.append_eos],
    output_features={x: seqio.Feature(BYTES) for x in ("inputs", "targets")},
    metric_fns=[exact],
  )
seqio.MixtureRegistry.add("nm_glue_proportional", ["nm_glue_rte"], default_rate=1.0)
