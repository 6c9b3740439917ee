"""T5X's encoder-decoder model of a network, with Adafactor and greedy decoding, for benchmarks."""

from __future__ import annotations

import functools
import pathlib
import sys
import warnings
from typing import Any

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "tests"))
import t5x_found

if why := t5x_found.why_not():
  sys.exit(f"error: {why}")

warnings.simplefilter("ignore")  # TensorFlow, seqio and clu warn on their own account
import seqio
from absl import logging
from t5x import adafactor, decoding, models

import nm_sparsity_jax as nms
from nm_sparsity_jax.integrations import t5x as t5x_adapter

logging.set_verbosity(logging.ERROR)  # how Adafactor factors


def model(network: Any, rules: nms.Rules | None) -> Any:
  """Returns T5X's model of a network, sparse by these rules; None = as T5X has it."""
  # No token ends a decode, so all models decode the same number of tokens.
  vocabulary = seqio.PassThroughVocabulary(network.config.vocab_size, eos_id=-1)
  made = models.EncoderDecoderModel(
    module=network,
    input_vocabulary=vocabulary,
    output_vocabulary=vocabulary,
    optimizer_def=adafactor.Adafactor(
      decay_rate=0.8, logical_factor_rules=adafactor.standard_logical_factor_rules()
    ),
    decode_fn=functools.partial(decoding.temperature_sample, temperature=0.0),
  )
  return made if rules is None else t5x_adapter.sparse(made, rules)
