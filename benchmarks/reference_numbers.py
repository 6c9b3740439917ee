"""The numbers that a change of form must not change, as arrays in reference_numbers.npz.

    python benchmarks/reference_numbers.py --write
    python benchmarks/reference_numbers.py --check
    python benchmarks/reference_numbers.py --check --only local/

It takes about eight minutes. `--check` computes all numbers again and prints for each name: equal,
or the largest difference and where it is. It accepts the differences that ACCEPTED lists.

    local/RECIPE/dense/...      parameters that the optimizer has after 20 steps of `train`
    local/RECIPE/finalized/...  what `finalize` makes of that checkpoint
    t5x/RECIPE/...              the same of T5X's trainer, 20 steps after 20 dense ones
    masks/...                   masks of the sizes, dtypes and axes of tests/test_masks.py, as bits
    flops/...                   the paper's Tables 1, 17 and 18
    logits/...                  predictions of a tiny T5 and a tiny ViT, finalized

Of an embedding of 384 tokens only the rows of some letters are kept, so that the file stays small.
Bits depend on the machine and on versions: the file says with which it was made.
"""

import argparse
import contextlib
import functools
import importlib.metadata
import io
import logging
import os
import pathlib
import re
import sys
import tempfile
import warnings

# jax and TensorFlow read these once. One device, and one thread for a sum.
os.environ |= dict(JAX_PLATFORMS="cpu", TF_CPP_MIN_LOG_LEVEL="3")
os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"
ROOT = pathlib.Path(__file__).resolve().parents[1]
TESTS, FILE = ROOT / "tests", ROOT / "benchmarks/reference_numbers.npz"
sys.path[:0] = [str(ROOT), str(TESTS)]

import _timing
import jax
import numpy as np
import orbax.checkpoint as ocp
import t5x_found

import nm_sparsity_jax as nms
from nm_sparsity_jax import cli
from nm_sparsity_jax.training import flops

# A regular expression of names -> (reason, largest difference).
ACCEPTED = {
  "local/(?!dense/).*": ("the optimizer steps W, so XLA compiles and rounds another program", 3e-7),
}
RECIPES = (
  "dense", "one_shot", "sr_ste", "mdgf_linear", "mdgf_exponential", "sdgf_stepwise",
  "sdgf_geometric", "custom", "snip", "idp",
)  # fmt: skip
FIELDS = {  # what a recipe needs, or what makes it do more
  "custom": {"path": ((5, "2:4", 1.0), (9, "1:4", 0.5))},
  "sdgf_geometric": {"k": 4},
  "snip": {"batches": 2},
  "sr_ste": {"lam": 0.01},
}
STEPS = 20
LETTERS = range(96, 108)  # of 384 tokens: the tasks have the letters a to e


def macros(recipe):
  """Settings of a run of 20 steps: dense, then sparser, then fine-tuned."""
  settings = dict(
    BATCH_SIZE=16, LEARNING_RATE=0.02, WARMUP_STEPS=4, DROPOUT_RATE=0.1, METRICS_EVERY=None,
    RECIPE=recipe, SPARSE_STEPS=STEPS, RECIPE_FIELDS=FIELDS.get(recipe),
  )  # fmt: skip
  if recipe != "dense":
    settings |= dict(PATTERN="1:4", DENSE_STEPS=5, FINETUNE_STEPS=5)
    settings["SPARSITY_RULES"] = {"ff": None, "decoder/cross/o": None}
  return settings


def command(*words):
  """Runs `nm-sparsity WORDS`; raises what it prints where it fails."""
  said = io.StringIO()
  with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
    code = cli.main([str(word) for word in words])
  if code:
    raise RuntimeError(f"nm-sparsity {words[0]}: {said.getvalue()}")


def train_local(folder, recipe):
  files = "gin_configs/runs/local_train.gin", "gin_configs/runs/local_adamw.gin"
  settings = macros(recipe) | dict(MODEL_DIR=str(folder), EVAL_PERIOD=STEPS, STATS_PERIOD=STEPS)
  command(
    "train", f"--gin_search_paths={ROOT}",
    *(f"--gin_file={file}" for file in (*files, TESTS / "local_tiny.gin")),
    *(f"--gin.{name}={value!r}" for name, value in settings.items()),
  )  # fmt: skip


def train_t5x(folder, recipe):
  """Trains in this process, as `python -m t5x.train` does."""
  import gin
  import t5x.train
  from t5x import gin_utils

  settings = macros(recipe) | dict(MODEL_DIR=str(folder), EVAL_STEPS=2, EVAL_PERIOD=STEPS)
  if recipe != "dense":
    start = folder.parent / f"dense/checkpoint_{STEPS}"
    settings |= dict(INITIAL_CHECKPOINT_PATH=str(start), PRETRAINED_STEPS=STEPS)
  kind = "pretrain" if recipe == "dense" else "finetune"
  files = [f"gin_configs/runs/t5x_{kind}.gin", str(TESTS / "t5x_tiny.gin")]
  checkout = pathlib.Path(t5x.train.__file__).parents[1]
  bindings = [f"{name} = {value!r}" for name, value in settings.items()]
  script, sys.modules["__main__"] = sys.modules["__main__"], t5x.train  # gin's names need it
  try:
    with t5x_found.closed_loops(), contextlib.redirect_stdout(io.StringIO()):
      gin.clear_config()
      gin_utils.parse_gin_flags([str(ROOT), str(TESTS), str(checkout)], files, bindings)
      gin.get_configurable(t5x.train.train)()
  finally:
    gin.clear_config()
    sys.modules["__main__"] = script


def flat(tree):
  """Returns path -> numpy array."""
  name = lambda keys: "/".join(str(getattr(key, "key", key)) for key in keys)
  leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
  return {name(keys): np.asarray(leaf) for keys, leaf in leaves}


def restored(checkpoint):
  """Returns what a checkpoint stores."""
  reader, path = ocp.PyTreeCheckpointer(), checkpoint / "state"
  shapes = reader.metadata(path).item_metadata.tree
  as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), shapes)
  return reader.restore(path, restore_args=as_numpy)


def parameters(checkpoint):
  """Yields the parameters that a checkpoint stores; of an embedding, some letters."""
  for name, x in flat(restored(checkpoint)["target"]).items():
    yield name, x.take(LETTERS, x.shape.index(384)) if 384 in x.shape else x


def dense_parameters(checkpoint):
  """Yields the dense parameters: of a run in place those of sparse kernels are the optimizer's."""
  dense = flat(restored(checkpoint)["state"].get("nm_sparsity", {}).get("dense", {}))
  for name, x in parameters(checkpoint):
    yield name, dense.get(name, x)


def of_runs(trainer, folder):
  train = {"local": train_local, "t5x": train_t5x}[trainer]
  for recipe in RECIPES:
    run, final = folder / recipe, folder / f"{recipe}-finalized"
    train(run, recipe)
    checkpoint = f"checkpoint_{STEPS * (1 + (trainer == 't5x' and recipe != 'dense'))}"
    for name, x in dense_parameters(run / checkpoint):
      yield f"{trainer}/{recipe}/dense/{name}", x
    if recipe != "dense":
      command("finalize", run, final)
      for name, x in parameters(final / checkpoint):
        yield f"{trainer}/{recipe}/finalized/{name}", x


def of_masks():
  """Masks of scores with ties, zeros, infinities, NaN and subnormals, with and without a parent."""
  for i, m in enumerate((*range(1, 18), 31, 32, 33, 40, 48, 64, 127, 128, 255, 256, 257, 512)):
    d = next((d for d in range(2, m) if m % d == 0), 1)
    shape, axis = (
      ((2 * m,), 0), ((2 * m, 3), 0), ((3, m), -1), ((2, m, 3), -2), ((2, 2 * m, 1, 2), 1),
      ((d, 2 * m // d, 2), (0, 1)), ((2, 3, 2 * m // d, d), (-2, -1)),
    )[i % 7]  # fmt: skip
    dtype = jax.numpy.dtype(("float32", "bfloat16", "float16")[i % 3])
    rng = np.random.default_rng(m)
    special = [0, -0.0, 1, -1, 0.5, 1 + 2**-7, np.inf, -np.inf, np.nan, -np.nan, 2**-133, 2**-24]
    few = np.concatenate([special, rng.normal(size=4)])
    scores = rng.choice(few, size=(3, *shape))
    scores[2] = rng.normal(size=shape)
    parent = rng.random(scores.shape) < 0.5
    axis = tuple(a + (a >= 0) for a in axis) if isinstance(axis, tuple) else axis + (axis >= 0)

    def masks(x, parent, n, axis=axis, m=m):
      for k in sorted({1, max(1, m // 2), max(1, m - 1), m}):
        yield nms.nm_mask(x, nms.NM(k, m), axis)
        yield nms.masks.magnitude_mask(x, nms.NM(k, m), axis)
      yield nms.masks.magnitude_mask(x, nms.NM(1, m), axis, n=n)
      yield nms.masks.magnitude_mask(x, nms.NM(1, m), axis, n=n, parent=parent)

    found = jax.jit(lambda *args, masks=masks: list(masks(*args)))
    found = found(scores.astype(dtype), parent, np.int32(max(1, m // 3)))
    yield f"masks/{m} {dtype} {shape} {axis}", np.packbits(np.stack(found))


def of_flops():
  from nm_sparsity_jax.models import vit
  from nm_sparsity_jax.trainer.workloads.vision import Images

  price = lambda cost, *words: cost.select(*words).flops
  dense = Images(vit.ViT(vit.config("vit_b16", class_token=False)), None).cost()
  parts = {role: role for role in "qkvo"} | {"wi": ".*/fc1/kernel", "wo": ".*/fc2/kernel"}
  parts |= {"self/scores": ".*->bhqn/product", "self/values": ".*->bhqk/product"}
  for part, place in parts.items():
    yield f"flops/table 17/{part}", np.float64(price(dense, place))
  for part in (("q", "k", "v", "o"), ("scores",), ("ff",)):
    found = dense.select(*part)
    yield f"flops/table 1/{' '.join(part)}", np.array([found.flops, found.params], np.float64)
  for pattern in ("1:1", "2:4", "1:4", "1:8", "1:16", "1:32", "1:128"):
    cost = flops.inference(dense, {"ff": pattern})
    found = price(cost, "attention"), price(cost, "ff"), price(cost, "attention", "ff")
    yield f"flops/table 18/{pattern}", np.array(found, np.float64)


def of_networks():
  """Returns logits of networks: weights are drawn by path, then finalized."""
  from nm_sparsity_jax.models import vit
  from nm_sparsity_jax.models.t5 import T5Config, Transformer

  rng = np.random.default_rng(0)
  source, target = rng.integers(1, 24, (2, 4, 6))
  tokens = source, np.pad(target, ((0, 0), (1, 0)))[:, :-1], target
  images = (rng.normal(size=(4, 16, 16, 3)).astype(np.float32),)
  sizes = dict(vocab_size=24, emb_dim=16, num_heads=2, head_dim=8, mlp_dim=32)
  for name, network, batch, more in (
    ("t5", Transformer(T5Config.t5_1_1("tiny", **sizes)), tokens, {"enable_dropout": False}),
    ("vit", vit.ViT(vit.config("vit_test")), images, {}),
  ):
    init = functools.partial(network.init, **more)
    params = jax.eval_shape(init, jax.random.key(0), *batch)["params"]
    leaves, tree = jax.tree.flatten(params)  # in the order of their names
    rng = np.random.default_rng(1)
    draw = lambda x, rng=rng: (rng.normal(size=x.shape) / 3).astype(np.float32)
    params = jax.tree.unflatten(tree, [draw(x) for x in leaves])
    rules = nms.configure.rules({"ff": "1:4", "q": "2:4"}, recipe="sr_ste", sparse_steps=100)
    params = nms.finalize(params, rules, 100)
    logits = network.apply({"params": params}, *batch, **more)
    yield f"logits/{name}", np.asarray(logits)


def computed(only):
  """Yields (name, array) of all whose name begins so."""
  with tempfile.TemporaryDirectory() as folder:
    folder = pathlib.Path(folder).resolve()
    os.chdir(folder)
    jax.config.update("jax_compilation_cache_dir", str(folder / "xla"))
    groups = {
      "local": lambda: of_runs("local", folder / "local"),
      "t5x": lambda: of_runs("t5x", folder / "t5x"),
      "masks": of_masks, "flops": of_flops, "logits": of_networks,
    }  # fmt: skip
    for group, compute in groups.items():
      if group.startswith(only.partition("/")[0]):
        print(group, file=sys.stderr, flush=True)
        yield from ((name, x) for name, x in compute() if name.startswith(only))
    os.chdir(ROOT)


def difference(was, now):
  """Returns how two arrays differ: a sentence and the largest difference; "" where they do not."""
  if was is None or now is None:
    return "is new" if was is None else "is gone", np.inf
  if was.dtype != now.dtype or was.shape != now.shape:
    return f"{was.dtype}{was.shape} became {now.dtype}{now.shape}", np.inf
  if was.tobytes() == now.tobytes():
    return "equal", 0.0
  apart = np.abs(was.astype(np.float64) - now.astype(np.float64))
  at = tuple(map(int, np.unravel_index(np.argmax(apart), was.shape)))  # a NaN comes first
  said = f"{np.count_nonzero(apart)} of {apart.size} differ, at most by {apart[at]:.3g} at {at}"
  return said, apart[at]


def compare(noted, found):
  """Prints a line for each name; returns how many differ more than ACCEPTED allows."""
  bad = 0
  for name in sorted({*noted, *found}):
    said, size = difference(noted.get(name), found.get(name))
    reasons = [r for words, (r, most) in ACCEPTED.items() if re.fullmatch(words, name)]
    limits = [most for words, (_, most) in ACCEPTED.items() if re.fullmatch(words, name)]
    bad += not size <= max(limits, default=0.0)  # NaN is bad
    print(f"{name}: {said}" + (f" (accepted: {reasons[0]})" if reasons and size else ""))
  return bad


def machine():
  """Returns what bits depend on, other than the code."""
  names = "jax", "jaxlib", "flax", "optax", "numpy", "tensorflow", "seqio"
  return [
    *(f"{name} {importlib.metadata.version(name)}" for name in names),
    _timing.machine()["processor"],
  ]


def main():
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  what = parser.add_mutually_exclusive_group(required=True)
  what.add_argument("--write", action="store_true", help="note the numbers of now")
  what.add_argument("--check", action="store_true", help="compare them with what is noted")
  parser.add_argument("--only", default="", help="names that begin so")
  args = parser.parse_args()
  if reason := t5x_found.why_not():
    sys.exit(reason)
  warnings.simplefilter("ignore")
  logging.disable()  # T5X and TensorFlow say much
  found = dict(computed("" if args.write else args.only))
  if args.write:
    np.savez_compressed(FILE, machine=machine(), **found)
    print(f"{len(found)} arrays, {FILE.stat().st_size:,} bytes")
    return 0
  with np.load(FILE) as file:
    noted = {name: file[name] for name in file if name.startswith(args.only) or name == "machine"}
  if (was := noted.pop("machine").tolist()) != machine():
    print(f"noted with {', '.join(was)}; here {', '.join(machine())}")
  bad = compare(noted, found)
  print(f"{bad} of {len(found)} differ" if bad else f"all {len(found)} are equal or accepted")
  return 1 if bad else 0


if __name__ == "__main__":
  sys.exit(main())
