"""The local runner: trains and evaluates a T5 on the devices of one host, from the package index.

    gin -> commands.train -> [train] -> batches, steps, checkpoints, evaluations -> MODEL_DIR

Rooms, each importing only those above it: `data`, `decoding`, `step`, `checkpoints`, `evaluation`,
`reports`, `train`. seqio and TensorFlow are imported inside functions.
"""
