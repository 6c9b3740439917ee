"""A vocabulary of whole words: text <-> ids, with T5's special ids (0 padding, 1 end, 2 unknown).

For texts of known words, one space between two: `decode(encode(text)) == text`, so that a model can
say every target of mini-GLUE exactly. `<unk>`, T5's target of an unlabelled example, is id 2.
"""

# pyright: reportMissingImports=false, reportMissingModuleSource=false

from __future__ import annotations

from collections.abc import Iterable, Sequence

import seqio
import tensorflow as tf

from t5x_tasks import mini

_SPECIAL = ("<pad>", "</s>", "<unk>")


class WordVocabulary(seqio.Vocabulary):
  """Ids 3 and on are the words, in their order.

  >>> vocabulary = WordVocabulary(["not_entailment", "entailment"])
  >>> vocabulary.encode("entailment of"), vocabulary.decode([4, 2, 1, 0])
  ([4, 2], 'entailment <unk>')

  Args:
    words: different words, none empty and none with a space.
  """

  def __init__(self, words: Iterable[str]):
    super().__init__()
    self._words = tuple(words)
    self._ids = {word: i for i, word in enumerate(self._words, len(_SPECIAL))}

  @property
  def bos_id(self) -> int | None:
    return None

  @property
  def eos_id(self) -> int:
    return 1

  @property
  def unk_id(self) -> int:
    return 2

  @property
  def _base_vocab_size(self) -> int:
    return len(_SPECIAL) + len(self._words)

  def _encode(self, s: str) -> Sequence[int]:
    return [self._ids.get(word, self.unk_id) for word in s.split()]

  def _decode(self, ids) -> str:
    return " ".join((_SPECIAL + self._words)[i] for i in ids if i > self.eos_id)

  # Compared with every word rather than looked up: a table would be a resource, which a saved
  # position in the data cannot hold.
  def _encode_tf(self, s: tf.Tensor) -> tf.Tensor:
    same = tf.equal(tf.strings.split(s)[:, None], tf.constant(self._words)[None])
    ids = tf.argmax(same, axis=-1, output_type=tf.int32) + len(_SPECIAL)
    return tf.where(tf.reduce_any(same, axis=-1), ids, self.unk_id)

  def _decode_tf(self, ids: tf.Tensor) -> tf.Tensor:
    words = tf.gather(tf.constant(_SPECIAL + self._words), ids)
    words = tf.ragged.boolean_mask(words, ids > self.eos_id)
    return tf.strings.reduce_join(words, axis=-1, separator=" ")

  def __eq__(self, other) -> bool:
    return isinstance(other, WordVocabulary) and self._words == other._words

  def __hash__(self) -> int:
    return hash(self._words)

  def __repr__(self) -> str:
    return f"WordVocabulary({len(self._words)} words)"


def mini_words() -> WordVocabulary:
  """Returns the vocabulary of mini-GLUE."""
  return WordVocabulary(mini.WORDS)
