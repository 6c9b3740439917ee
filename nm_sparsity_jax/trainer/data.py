"""Names for gin files: T5's vocabulary and training data, which `workloads.text` reads."""

from typing import Any

from nm_sparsity_jax.trainer.workloads.text import (
  Source,
  check_vocabulary,
  import_seqio,
  mixture,
  mixture_or_task,
)

__all__ = ["Source", "check_vocabulary", "import_seqio", "mixture", "mixture_or_task", "vocabulary"]


def vocabulary(file: str) -> Any:
  """Returns a vocabulary of seqio, which is imported only here.

  Args:
    file: a SentencePiece model, 'bytes', or 'mini' for mini-GLUE's words [VOCABULARY_FILE].
  """
  import seqio  # type: ignore[import-not-found]

  if file == "mini":
    from t5x_tasks.vocabulary import mini_words

    return mini_words()
  return seqio.ByteVocabulary() if file == "bytes" else seqio.SentencePieceVocabulary(file)
