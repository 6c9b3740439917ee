"""The local runner: trains and evaluates any workload on the devices of one host.

    gin -> commands.train -> [train] -> batches, steps, checkpoints, evaluations -> MODEL_DIR

Rooms, each importing only those above it: `averages`, `step`, `checkpoints`, `evaluation`, `run`,
`reports`, `folders`, `train`. seqio and TensorFlow are imported inside functions.
"""
