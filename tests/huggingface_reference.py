"""What transformers computes of tiny T5s, for tests that have no torch.

    python tests/huggingface_reference.py    writes huggingface_reference.npz; needs the extra torch

Weights and inputs are integers that are hashed, so both sides make them by themselves.
"""

import json
import pathlib

import numpy as np
from vision_reference import hashed

FILE = pathlib.Path(__file__).with_suffix(".npz")

_SIZES = dict(vocab_size=96, d_model=16, d_kv=6, num_layers=3, num_decoder_layers=2, num_heads=4)
# transformers 5.23 cannot generate where the decoder has more layers than the encoder.
# Values of config.json: T5 1.0 and T5 1.1.
TINY = {
  "v1_0": dict(_SIZES, d_ff=32, feed_forward_proj="relu", tie_word_embeddings=True),
  "v1_1": dict(_SIZES, d_ff=40, feed_forward_proj="gated-gelu", tie_word_embeddings=False),
}
COMMON = dict(model_type="t5", decoder_start_token_id=0, pad_token_id=0, eos_token_id=1)
NEW_TOKENS = 10  # of a generation, at most


def values(name, shape):
  """A tensor of Hugging Face's name: about what a trained network holds, and nothing is 0 or 1."""
  x = hashed(name, shape)
  if name.endswith("norm.weight"):
    return np.float32(1) + x / np.float32(4)
  if "relative_attention_bias" in name:
    return x * np.float32(2)
  if name == "shared.weight":
    return x
  return x * np.float32(1.5 if name == "lm_head.weight" else np.sqrt(6.75 / shape[1]))


def tokens(name, rows, length, filled):
  """Ids from 2 on, [rows, length]; row i is padded from filled[i] on."""
  ids = 2 + np.floor((hashed(name, (rows, length)) + 1) * 47).astype(np.int32)
  return np.where(np.arange(length) < np.asarray(filled)[:, None], ids, 0)


def inputs(name):
  return tokens(f"inputs of {name}", 3, 40, (40, 17, 5))


def targets(name):
  return tokens(f"targets of {name}", 3, 12, (12, 12, 12))


def shifted(ids):
  return np.pad(ids, ((0, 0), (1, 0)))[:, :-1]


def network(torch, transformers, name):
  """Their network of a name, with hashed weights, in evaluation."""
  net = transformers.T5ForConditionalGeneration(transformers.T5Config(**COMMON, **TINY[name]))
  if name == "v1_1":  # transformers 5 ties it in a new model, and not where a file has both
    net.lm_head.weight = torch.nn.Parameter(torch.zeros_like(net.lm_head.weight))
  with torch.no_grad():
    for key, x in net.named_parameters():
      x.copy_(torch.tensor(values(key, tuple(x.shape))))
  return net.eval()


def run(torch, net, name):
  """Logits of the targets, in float64, and ids of greedy generations, padded with 0."""
  x, y = inputs(name), targets(name)
  batch = dict(
    input_ids=torch.tensor(x).long(), attention_mask=torch.tensor(x > 0).long()
  )  # fmt: skip
  with torch.no_grad():
    ids = net.generate(**batch, max_new_tokens=NEW_TOKENS, do_sample=False, num_beams=1)[:, 1:]
    net = net.double()
    logits = net(**batch, decoder_input_ids=torch.tensor(shifted(y)).long()).logits
  ids = np.pad(ids.numpy(), ((0, 0), (0, NEW_TOKENS - ids.shape[1])))
  return logits.float().numpy(), ids.astype(np.int32)


def make(torch, transformers):
  """name/what -> array, of each tiny network."""
  found = {}
  for name in TINY:
    net = network(torch, transformers, name)
    shapes = {key: list(x.shape) for key, x in net.named_parameters()}
    found[f"{name}/names"] = np.frombuffer(json.dumps(shapes).encode(), np.uint8)
    found[f"{name}/logits"], found[f"{name}/ids"] = run(torch, net, name)
  return found


if __name__ == "__main__":
  from reference_arrays import imported

  np.savez_compressed(FILE, **make(*imported("torch", "transformers")))
