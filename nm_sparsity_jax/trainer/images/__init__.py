"""Where images come from: `rebus` is generated; `folder` and `tfds` are read.

    source.train(seed, start) -> batch `start`, `start + 1`, ... of (seed, number)
    source.splits()           -> name -> finite batches

A batch holds 'image' (float32 [batch, size, size, channels]), 'label' and 'real' (int32 [batch]).
Heavy packages are imported when images are read.
"""

from nm_sparsity_jax.trainer.images.source import Source

__all__ = ["Source"]
