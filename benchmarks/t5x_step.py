"""What sparsity costs inside T5X: its train step and its decoding, sparse over dense.

    python benchmarks/t5x_step.py
    python benchmarks/t5x_step.py --only sdgf --layers 2 --metrics-every 100

T5X as found by the tests (installed, T5X_PATH, or ~/.cache/nm-sparsity/t5x), a synthetic batch of
8 x (64 + 32) tokens, T5.1.1-small's widths, float32, no dropout, FF kernels sparse.

    dense T5X       T5X's network, EncoderDecoderModel and Trainer
    dense ours      our network, SparseEncoderDecoderModel and SparseTrainer, recipe 'dense'
    RECIPE n:m      the same with that recipe, in its sparsify phase
    decode ...      predict_batch, greedy, to the full length, all from the same weights

Printed: median and middle half of the time over dense T5X (for decoding, over T5X's decoding of the
same parameters). With --metrics-every K each recipe is measured twice, in a step
that samples metrics and in one that does not, and the gate is on their mean over K steps.

compilation  processor time that the train step took to trace and compile, over dense T5X's: the
             median of --compiles turns, each right after dense T5X. The row of a sampled step has
             that of the two programs beside it.
"""

from __future__ import annotations

import pathlib
import re
import statistics
import sys
import time
import warnings

import _timing

PARSER = _timing.parser(__doc__, blocks=7)
PARSER.add_argument("--compiles", type=int, default=1, help="compilations of each train step")
PARSER.add_argument("--layers", type=int, default=8, help="layers of each stack")
PARSER.add_argument("--only", default="", help="a regex: candidates whose name matches")
PARSER.add_argument("--metrics-every", type=int, default=0, help="sample metrics; 0 = never")
ARGS = PARSER.parse_args()
_timing.pin(ARGS.core)

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "tests"))
import t5x_found

if why := t5x_found.why_not():
  sys.exit(why)

import jax
import jax.numpy as jnp
import numpy as np

import nm_sparsity_jax as nms
from nm_sparsity_jax.core.trees import map_with_names

warnings.simplefilter("ignore")  # TensorFlow, seqio and clu warn on their own account
import functools

import seqio
from absl import logging
from t5x import adafactor, decoding, models, partitioning, trainer, utils
from t5x.examples.t5 import network as t5x_network

from nm_sparsity_jax.integrations import t5x as t5x_adapter
from nm_sparsity_jax.models.t5 import network

logging.set_verbosity(logging.ERROR)  # how Adafactor factors

SIZES = dict(
  vocab_size=32128, emb_dim=512, num_heads=6, head_dim=64, mlp_dim=1024, dropout_rate=0.0,
  num_encoder_layers=ARGS.layers, num_decoder_layers=ARGS.layers, dtype="float32",
  mlp_activations=("gelu", "linear"), logits_via_embedding=False,
)  # fmt: skip
BATCH, INPUTS, TARGETS = 8, 64, 32
PHASES = nms.Phases(total=1000, dense=100, finetune=200)
OPTIMIZER = adafactor.Adafactor(
  decay_rate=0.8, logical_factor_rules=adafactor.standard_logical_factor_rules()
)
# No token ends a decode, so every candidate decodes the same number of tokens.
VOCABULARY = seqio.PassThroughVocabulary(SIZES["vocab_size"], eos_id=-1)


def cases():
  """Yields (name, recipe or None for T5X's own, sparse step to measure at)."""
  make = lambda name, pattern, **k: nms.recipe(name, pattern=pattern, phases=PHASES, **k)
  yield "dense T5X", None, 0
  yield "dense ours", make("dense", "1:8"), 300
  yield "sr_ste 2:4", make("sr_ste", "2:4"), 300
  for name in ("sr_ste", "mdgf_linear", "mdgf_exponential", "sdgf_stepwise"):
    yield f"{name} 1:8", make(name, "1:8"), 300
  yield "sdgf_geometric 1:8", make("sdgf_geometric", "1:8"), 150
  path = ((100, "4:8", 1.0), (400, "2:16", 0.5))
  yield "custom 1:8", make("custom", "1:8", path=path), 500
  for name in ("one_shot", "snip", "idp"):
    yield f"{name} 1:8", make(name, "1:8"), 500


def decode_cases():
  """Yields recipes without and with a stored mask: decoding depends on nothing else."""
  make = lambda name: nms.recipe(name, pattern="1:8", phases=PHASES)
  yield "decode dense T5X", None, 0
  yield "decode dense ours", make("dense"), 300
  yield "decode sr_ste 1:8", make("sr_ste"), 300
  yield "decode idp 1:8", make("idp"), 500


def make_model(recipe):
  """Returns T5X's own model of T5X's network, or our model of our network."""
  own = recipe is None
  module = t5x_network if own else network
  cls = models.EncoderDecoderModel if own else t5x_adapter.SparseEncoderDecoderModel
  return cls(
    module=module.Transformer(module.T5Config(**SIZES)),
    input_vocabulary=VOCABULARY,
    output_vocabulary=VOCABULARY,
    optimizer_def=OPTIMIZER,
    decode_fn=functools.partial(decoding.temperature_sample, temperature=0.0),
    **({} if own else {"rules": nms.Rules({"ff": recipe})}),
  )


def batch():
  rng = np.random.default_rng(0)
  ids = lambda length: rng.integers(1, SIZES["vocab_size"], (BATCH, length)).astype(np.int32)
  targets = ids(TARGETS)
  return {
    "encoder_input_tokens": ids(INPUTS),
    "decoder_input_tokens": np.pad(targets[:, :-1], ((0, 0), (1, 0))),
    "decoder_target_tokens": targets,
    "decoder_loss_weights": np.ones_like(targets),
  }


DATA = batch()


class Candidate:
  """A compiled step or decode of one model, and what only this one carries along."""

  def __init__(self, recipe, at, metrics_every=0):
    self.model, self.at = make_model(recipe), at
    self.partitioner = partitioning.PjitPartitioner(num_partitions=1)
    start = utils.TrainStateInitializer(
      optimizer_def=OPTIMIZER,
      init_fn=self.model.get_initial_variables,
      input_shapes={k: v.shape for k, v in DATA.items()},
      input_types={k: v.dtype for k, v in DATA.items()},
      partitioner=self.partitioner,
    )
    self.shapes, self.axes = start.global_train_state_shape, start.train_state_axes
    self.sampled = {"metrics_every": metrics_every} if metrics_every else {}

  def begin(self, params):
    """Makes our collection, with masks of these weights and the step of this candidate."""
    self.mutables = self.shapes.flax_mutables
    if self.mutables:
      state = nms.init_state(params, self.model.stored_rules)
      # Of the shapes only the start is kept, which `write` leaves as it is.
      mine = {**self.mutables[t5x_adapter.COLLECTION], "start": jnp.int32(0)}
      begun = self.mutables.copy({t5x_adapter.COLLECTION: mine})
      self.mutables = self.model.write(begun, jnp.int32(self.at), state)

  def compile_step(self, params):
    self.begin(params)
    cls = t5x_adapter.SparseTrainer if self.mutables else trainer.Trainer
    run = cls(
      model=self.model,
      train_state=None,
      partitioner=self.partitioner,
      eval_names=[],
      summary_dir=None,
      train_state_axes=self.axes,
      rng=jax.random.PRNGKey(0),
      learning_rate_fn=lambda step: jnp.float32(1e-4),
      num_microbatches=None,
      **self.sampled,
    )
    self.step = self.partitioner.compile(run._partitioned_train_step, self.shapes, DATA)

  def compile_samples(self):
    """Compiles the two programs beside the step."""
    before = self.step.before.lower(self.shapes, DATA)
    before.compile()
    self.partitioner.compile(self.step.after, self.shapes, before.out_info)

  def run_step(self, live):
    """Does one step; every candidate starts from the parameters that the one before it returned."""
    optimizer = self.shapes._optimizer.replace(target=live["params"], state=live["state"])
    state = self.shapes.replace(_optimizer=optimizer, flax_mutables=self.mutables)
    state, metrics = self.step(state, DATA)
    jax.block_until_ready((state, metrics))
    live["params"], live["state"] = state._optimizer.target, state._optimizer.state
    self.mutables = state.flax_mutables
    if self.mutables:
      mine = dict(self.mutables[t5x_adapter.COLLECTION])
      self.mutables = self.mutables.copy(
        {t5x_adapter.COLLECTION: {**mine, "step": jnp.int32(self.at)}}
      )

  def compile_decode(self, params):
    self.begin(params)
    told = {"flax_mutables": self.mutables} if self.mutables else {}
    prompt = {**DATA, "decoder_input_tokens": np.zeros_like(DATA["decoder_input_tokens"])}
    call = lambda params, batch, told: self.model.predict_batch(params, batch, **told)
    compiled = jax.jit(call).lower(params, prompt, told).compile()
    self.decode = lambda: jax.block_until_ready(compiled(params, prompt, told))


def draw(shapes):
  """Draws parameters of the size that an initialization gives, without compiling one."""
  rng = np.random.default_rng(0)

  def one(path, w):
    if path.endswith("scale"):
      return jnp.ones(w.shape, w.dtype)
    size = 1.0 if path.endswith("embedding") else w.shape[0] ** -0.5
    return jnp.asarray(rng.standard_normal(w.shape, np.float32) * size, w.dtype)

  return map_with_names(one, shapes)


def chosen(candidates):
  return [c for c in candidates if re.search(ARGS.only, c[0]) or "dense T5X" in c[0]]


def timed(what, call, *args):
  """Returns the processor time that a call takes."""
  start = time.process_time()
  call(*args)
  took = time.process_time() - start
  print(f"{what}: {took:.1f} s of the processor", file=sys.stderr, flush=True)
  return took


def compile_all():
  """Returns parameters, the candidates (plain, sampled or None) by name, and their costs.

  A cost is over dense T5X, compiled right before: a shared machine drifts from one minute to the
  next.
  """
  runs, ratios, params, k = {}, {}, None, ARGS.metrics_every
  for _ in range(ARGS.compiles):
    for name, recipe, at in chosen(cases()):
      jax.clear_caches()
      base = Candidate(None, 0)
      params = draw(base.shapes.params) if params is None else params
      dense = timed("compiled dense T5X", base.compile_step, params)
      if recipe is None:
        runs[name], ratios[name] = (base, None), [1.0]
        continue
      plain, sampled = Candidate(recipe, at // k * k if k else at, k), None
      took = timed(f"compiled {name}", plain.compile_step, params)
      ratios.setdefault(name, []).append(took / dense)
      if k:
        took = timed(f"compiled {name} sampled", plain.compile_samples)
        ratios.setdefault(f"{name} sampled", []).append(took / dense)
        sampled = Candidate(recipe, at // k * k + k - 1, k)
        sampled.begin(params)
        sampled.step = plain.step
      runs.setdefault(name, (plain, sampled))
  return params, runs, ratios


def measure_steps(rows):
  params, runs, ratios = compile_all()
  optimizer = runs["dense T5X"][0].shapes._optimizer
  zeros = lambda x: jnp.zeros(x.shape, x.dtype)
  live = {"params": params, "state": jax.tree.map(zeros, optimizer.state)}
  wanted = {name: plain for name, (plain, _) in runs.items()}
  wanted |= {f"{name} sampled": run for name, (_, run) in runs.items() if run}
  calls = {name: functools.partial(run.run_step, live) for name, run in wanted.items()}
  times = _timing.interleave(calls, ARGS.blocks, seconds=0.0)
  compiled = lambda name: statistics.median(ratios[name])
  dense, k = times["dense T5X"], ARGS.metrics_every
  for name in runs:
    mine = times[name]
    if (sampled := times.get(f"{name} sampled")) is not None:
      mine = [((k - 1) * a + b) / k for a, b in zip(mine, sampled, strict=True)]
      show(rows, f"{name} sampled", sampled, dense, compiled(f"{name} sampled"))
    show(rows, name, mine, dense, compiled(name))
  return live["params"]


def measure_decoding(rows, params):
  runs = {}
  for name, recipe, at in chosen(decode_cases()):
    runs[name] = Candidate(recipe, at)
    runs[name].compile_decode(params)
  calls = {name: run.decode for name, run in runs.items()}
  times = _timing.interleave(calls, ARGS.blocks, seconds=0.0)
  for name in runs:
    show(rows, name, times[name], times["decode dense T5X"])


def show(rows, name, times, dense, compiled=None):
  over = _timing.ratio(times, dense)
  _timing.row(name, _timing.show(over), "" if compiled is None else compiled)
  rows.append({"candidate": name, "over_dense": over, "compile_over_dense": compiled})


def main():
  rows = []
  _timing.head("candidate", "over dense T5X", "compilation")
  params = measure_steps(rows)
  jax.clear_caches()
  if len(chosen(decode_cases())) > 1:
    measure_decoding(rows, params)
  _timing.save(ARGS.json, rows)


if __name__ == "__main__":
  main()
