"""What sparsity costs inside T5X: its train step and its decoding, sparse over dense.

    python benchmarks/t5x_step.py
    python benchmarks/t5x_step.py --only sdgf --layers 2 --metrics-every 100

T5X as found by the tests (installed, T5X_PATH, or ~/.cache/nm-sparsity/t5x), a synthetic batch of
8 x (64 + 32) tokens, T5.1.1-small's widths, float32, no dropout, FF kernels sparse.

    dense T5X       T5X's network, EncoderDecoderModel and Trainer
    dense ours      our network, the same model made sparse, and SparseTrainer, recipe 'dense'
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

import functools
import re
import statistics
import sys
import time

import _timing

PARSER = _timing.parser(__doc__, blocks=7)
PARSER.add_argument("--compiles", type=int, default=1, help="compilations of each train step")
PARSER.add_argument("--layers", type=int, default=8, help="layers of each stack")
PARSER.add_argument("--only", default="", help="a regex: candidates whose name matches")
PARSER.add_argument("--metrics-every", type=int, default=0, help="sample metrics; 0 = never")
ARGS = PARSER.parse_args()
_timing.pin(ARGS.core)

import _t5x
import jax
import jax.numpy as jnp
import numpy as np
from t5x.examples.t5 import network as t5x_network

import nm_sparsity_jax as nms
from nm_sparsity_jax.core.trees import map_with_names
from nm_sparsity_jax.integrations.t5x import COLLECTION
from nm_sparsity_jax.integrations.t5x.ahead import Ahead
from nm_sparsity_jax.models.t5 import network

SIZES = dict(
  vocab_size=32128, emb_dim=512, num_heads=6, head_dim=64, mlp_dim=1024, dropout_rate=0.0,
  num_encoder_layers=ARGS.layers, num_decoder_layers=ARGS.layers, dtype="float32",
  mlp_activations=("gelu", "linear"), logits_via_embedding=False,
)  # fmt: skip
BATCH, INPUTS, TARGETS = 8, 64, 32
PHASES = nms.Phases(total=1000, dense=100, finetune=200)


def cases():
  """Yields (name, recipe or None for T5X's own, sparse step to measure at)."""
  make = lambda name, pattern="1:8", **k: nms.recipe(name, pattern=pattern, phases=PHASES, **k)
  yield "dense T5X", None, 0
  yield "dense ours", make("dense"), 300
  yield "sr_ste 2:4", make("sr_ste", "2:4"), 300
  for name in ("sr_ste", "mdgf_linear", "mdgf_exponential", "sdgf_stepwise"):
    yield f"{name} 1:8", make(name), 300
  yield "sdgf_geometric 1:8", make("sdgf_geometric"), 150
  path = ((100, "4:8", 1.0), (400, "2:16", 0.5))
  yield "custom 1:8", make("custom", path=path), 500
  for name in ("one_shot", "snip", "idp"):
    yield f"{name} 1:8", make(name), 500


# Without and with a stored mask: decoding depends on nothing else.
DECODED = ("dense T5X", "dense ours", "sr_ste 1:8", "idp 1:8")


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
  """The compiled programs of one model, and its collection."""

  def __init__(self, recipe, at):
    module = t5x_network if recipe is None else network
    rules = None if recipe is None else nms.Rules({"ff": recipe})
    self.model = _t5x.model(module.Transformer(module.T5Config(**SIZES)), rules)
    self.at, self.run = at, Ahead(self.model, jax.local_devices()[:1], DATA)
    self.mutables = self.run.state.flax_mutables
    self.before = self.after = None

  def begin(self, params):
    """Makes our collection, with masks of these weights and the step of this candidate."""
    if self.mutables:
      state = nms.init_state(params, self.model.stored_rules)
      # Of the shapes only the start is kept, which `write` leaves as it is.
      mine = {**self.mutables[COLLECTION], "start": jnp.int32(0)}
      begun = self.mutables.copy({COLLECTION: mine})
      self.mutables = self.model.write(begun, jnp.int32(self.at), state)

  def compile_step(self):
    self.step = self.run.train_step().compile()

  def compile_samples(self):
    """Compiles the two programs beside the step."""
    before, after = self.run.trainer.measuring
    lowered = self.run.lower(before)
    self.before = lowered.compile()
    with self.run.partitioner.mesh:
      self.after = after.lower(self.run.state, lowered.out_info).compile()

  def run_step(self, live, is_sampled):
    """Does one step; every candidate starts from the parameters that the one before it returned."""
    shapes = self.run.state
    optimizer = shapes._optimizer.replace(target=live["params"], state=live["state"])
    state = shapes.replace(_optimizer=optimizer, flax_mutables=self.mutables)
    seen = self.before(state, DATA) if is_sampled else None
    state, metrics = self.step(state, DATA)
    jax.block_until_ready((state, metrics, self.after(state, seen) if is_sampled else None))
    live["params"], live["state"] = state._optimizer.target, state._optimizer.state
    self.mutables = state.flax_mutables
    if self.mutables:  # the next step is of the same phase
      mine = {**self.mutables[COLLECTION], "step": jnp.int32(self.at)}
      self.mutables = self.mutables.copy({COLLECTION: mine})

  def compile_decode(self, params):
    mutables = {"flax_mutables": self.mutables} if self.mutables else {}
    prompt = {**DATA, "decoder_input_tokens": np.zeros_like(DATA["decoder_input_tokens"])}
    call = lambda params, batch, mutables: self.model.predict_batch(params, batch, **mutables)
    compiled = jax.jit(call).lower(params, prompt, mutables).compile()
    self.decode = lambda: jax.block_until_ready(compiled(params, prompt, mutables))


def draw(shapes):
  """Draws parameters of the size that an initialization gives, without compiling one."""
  rng = np.random.default_rng(0)

  def one(path, w):
    if path.endswith("scale"):
      return jnp.ones(w.shape, w.dtype)
    size = 1.0 if path.endswith("embedding") else w.shape[0] ** -0.5
    return jnp.asarray(rng.standard_normal(w.shape, np.float32) * size, w.dtype)

  return map_with_names(one, shapes)


def chosen():
  return [c for c in cases() if re.search(ARGS.only, c[0]) or "dense T5X" in c[0]]


def timed(what, call):
  """Returns the processor time that a call takes."""
  start = time.process_time()
  call()
  took = time.process_time() - start
  print(f"{what}: {took:.1f} s of the processor", file=sys.stderr, flush=True)
  return took


def compile_all():
  """Returns the candidates by name, and what they cost to compile over dense T5X.

  Dense T5X is compiled right before each: a shared machine drifts from one minute to the next.
  """
  runs, ratios = {}, {}
  for _ in range(ARGS.compiles):
    for name, recipe, at in chosen():
      jax.clear_caches()
      base = Candidate(None, 0)
      dense = timed("compiled dense T5X", base.compile_step)
      if recipe is None:
        runs[name], ratios[name] = base, [1.0]
        continue
      run = runs[name] = Candidate(recipe, at)
      programs = {name: run.compile_step}
      if ARGS.metrics_every:
        programs[f"{name} sampled"] = run.compile_samples
      for what, program in programs.items():
        ratios.setdefault(what, []).append(timed(f"compiled {what}", program) / dense)
  return runs, {name: statistics.median(found) for name, found in ratios.items()}


def measure_steps(rows):
  """Returns the parameters that the last step made."""
  runs, compiled = compile_all()
  shapes, k = runs["dense T5X"].run.state, ARGS.metrics_every
  zeros = lambda x: jnp.zeros(x.shape, x.dtype)
  live = {"params": draw(shapes.params), "state": jax.tree.map(zeros, shapes._optimizer.state)}
  calls = {}
  for name, run in runs.items():
    run.begin(live["params"])
    calls[name] = functools.partial(run.run_step, live, False)
    if run.before is not None:
      calls[f"{name} sampled"] = functools.partial(run.run_step, live, True)
  times = _timing.interleave(calls, ARGS.blocks, seconds=0.0)
  for name in runs:
    mine = times[name]
    if (sampled := times.get(f"{name} sampled")) is not None:
      mine = [((k - 1) * a + b) / k for a, b in zip(mine, sampled, strict=True)]
      show(rows, f"{name} sampled", sampled, times["dense T5X"], compiled[f"{name} sampled"])
    show(rows, name, mine, times["dense T5X"], compiled[name])
  return live["params"]


def measure_decoding(rows, params):
  runs = {name: Candidate(recipe, at) for name, recipe, at in chosen() if name in DECODED}
  for run in runs.values():
    run.begin(params)
    run.compile_decode(params)
  times = _timing.interleave({n: run.decode for n, run in runs.items()}, ARGS.blocks, seconds=0.0)
  for name in runs:
    show(rows, f"decode {name}", times[name], times["dense T5X"])


def show(rows, name, times, dense, compiled=None):
  over = _timing.ratio(times, dense)
  _timing.row(name, _timing.show(over), "" if compiled is None else compiled)
  rows.append({"candidate": name, "over_dense": over, "compile_over_dense": compiled})


def main():
  rows = []
  _timing.head("candidate", "over dense T5X", "compilation")
  params = measure_steps(rows)
  jax.clear_caches()
  measure_decoding(rows, params)
  _timing.save(ARGS.json, rows)


if __name__ == "__main__":
  main()
