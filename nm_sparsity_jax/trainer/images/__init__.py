"""Where images come from: `rebus` generates them, `readers` reads folders and TensorFlow Datasets.

    source.train(seed, start) -> batch `start`, `start + 1`, ... of (seed, number)
    source.splits()           -> name -> finite batches

A batch holds 'image' (float32 [batch, size, size, channels]), 'label' and 'real' (int32 [batch]).
"""

from nm_sparsity_jax.trainer.images.source import Source

__all__ = ["Source"]
