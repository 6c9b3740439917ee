"""The local runner: trains and evaluates any workload on the devices of one host.

    gin -> cli.train -> [train] -> batches, steps, checkpoints, evaluations -> MODEL_DIR

Modules, each importing only those above it: `workloads`, `step`, `checkpoints`, `evaluation`,
`run`, `writers`, `reports`, `train`. seqio and TensorFlow are imported inside functions.
"""
