"""English to German: pairs of debian_ende.py, trained by `nm-sparsity train` from a dense start.

    Row, pattern, steps, seed -> gin settings -> [train] -> [verify] -> [infer] -> BLEU -> a record

The network is that of gin_configs/models/wmt.gin, smaller. Each width has one dense start, which is
trained when a run first asks for it. A seed draws the order of the pairs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import functools
import json
import math
import pathlib
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import debian_ende
import flax.linen as nn
import jax
import jax.numpy as jnp
from _recipes_cmudict import flat
from _recipes_tasks import Task
from _recipes_train import kept, training_flops, versions

from nm_sparsity_jax import cli
from nm_sparsity_jax.analysis import run_folder
from nm_sparsity_jax.models.t5 import T5Config, Transformer
from nm_sparsity_jax.models.t5.layers import Embed
from nm_sparsity_jax.runs import folders, verify_checkpoint
from t5x_tasks import metrics

ROOT = pathlib.Path(__file__).parents[1]
# The task's prefix makes inputs longer. A packed row ends with the first of both that is full.
INPUTS, TARGETS = 96, 64
START = {"steps": 6000, "rate": 4e-3, "examples": 16}
SAMPLES = 3  # translations that a record keeps
HELP, DICTIONARY = debian_ende.TASKS.values()
# A run that diverges scores as one that guesses.
GUESS = {
  "diverged": True, "accuracy": 1 / debian_ende.PIECES,
  "cross_entropy": math.log(debian_ende.PIECES), "bleu": 0.0, "bleu_dictionary": 0.0,
}  # fmt: skip


class Translator(nn.Module):
  """The library's T5 on packed rows of inputs and targets; FLOPs are counted of it."""

  config: T5Config

  @nn.compact
  def __call__(self, rows):
    inputs, targets = rows[:, :INPUTS], rows[:, INPUTS:]
    return Transformer(self.config, name="t5")(inputs, targets, targets, enable_dropout=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Translation(Task):
  """Translates with a network of some width.

  Attributes:
    split: what it is scored on.
  """

  width: int
  heads: int
  split: str = "test"
  tests: int = 0  # all of the split
  places: tuple[str, ...] = ("ff", "qkv", "o")
  examples: int = 8
  rate: float = 2e-3
  packages: tuple[str, ...] = ("seqio", "sacrebleu", "sentencepiece")

  @functools.cached_property
  def sizes(self) -> dict[str, int]:
    """Returns what differs from Table 16."""
    return {
      "emb_dim": self.width, "num_heads": self.heads, "head_dim": self.width // self.heads,
      "mlp_dim": 4 * self.width, "num_encoder_layers": 2, "num_decoder_layers": 2,
    }  # fmt: skip

  def network(self, ff):
    if not ff:
      raise ValueError("translation has no network without feed-forward layers")
    sizes: Any = self.sizes | {"vocab_size": debian_ende.PIECES}
    return Translator(T5Config.preset("wmt", "table_16", **sizes))

  def example(self):
    return jax.ShapeDtypeStruct((1, INPUTS + TARGETS), jnp.int32)


def _flags(task: Translation, run_files: list[str], **macros: Any) -> list[str]:
  """Returns the flags of a program: its gin files, the sizes of the task, and macros."""
  files = [*run_files, "benchmarks/debian_ende.gin"]
  sizes = {f"network.T5Config.preset.{name}": size for name, size in task.sizes.items()} | {
    "VOCAB_SIZE": debian_ende.PIECES, "BATCH_SIZE": task.examples,
    "TASK_FEATURE_LENGTHS": {"inputs": INPUTS, "targets": TARGETS},
  }  # fmt: skip
  return [
    f"--gin_search_paths={ROOT}",
    "--gin_file=gin_configs/models/wmt.gin",
    *(f"--gin_file={file}" for file in files),
    *(f"--gin.{name}={value!r}" for name, value in (sizes | macros).items()),
  ]


def _quicker(call, args, kwargs, context):
  """Calls a method of the network by what XLA does quicker on a CPU; `nn.intercept_methods` asks.

  Rows of the embedding are looked up, where the library multiplies by a one-hot matrix.
  """
  if isinstance(context.module, Embed):
    if context.method_name == "__call__":
      return call(args[0], gather=True)
    if context.method_name == "attend":
      (x,) = args
      return call(x.reshape(-1, x.shape[-1])).reshape(*x.shape[:-1], -1)
  return flat(call, args, kwargs, context)


def _call(*argv: str) -> None:
  """Calls `nm-sparsity`; its errors are raised, not printed."""
  _, command, args = cli.parse(argv)
  with nn.intercept_methods(_quicker):
    command.run(args)


def _train(task: Translation, run_file: str, folder: pathlib.Path, steps: int, **macros) -> None:
  """Trains a run to its end, or to that of what a killed process left."""
  files = ["gin_configs/runs/local_adamw.gin", f"gin_configs/runs/{run_file}"]
  settings = {
    "MODEL_DIR": str(folder), "SPARSE_STEPS": steps, "WARMUP_STEPS": steps // 10,
    "EVAL_PERIOD": steps, "EVAL_SPLIT": task.split, "STATS_PERIOD": max(1, steps // 20),
    "KEEP_CHECKPOINTS": 1,
  }  # fmt: skip
  _call("train", *_flags(task, files, **settings, **macros))
  began = START["steps"] if "INITIAL_CHECKPOINT_PATH" in macros else 0
  if folders.steps(folder)[-1] < began + steps:
    raise SystemExit(f"{folder} was stopped by a signal")


@contextlib.contextmanager
def _alone(name: str) -> Iterator[None]:
  """Holds a lock: another worker would write the same files."""
  debian_ende.FOLDER.mkdir(parents=True, exist_ok=True)
  with open(debian_ende.FOLDER / f"{name}.lock", "w") as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)
    yield


def start_of(task: Translation) -> pathlib.Path:
  """Returns the folder of the dense start of a width; trains it, or waits for who does."""
  with _alone("pairs"):
    debian_ende.register()
  folder = debian_ende.FOLDER / f"start_{task.width}"
  with _alone(folder.name):
    # A run that is done, trained again, ends at once.
    _train(
      dataclasses.replace(task, split="validation", examples=START["examples"]), "local_train.gin",
      folder, START["steps"], RECIPE="dense", LEARNING_RATE=START["rate"], CHECKPOINT_PERIOD=1000,
    )  # fmt: skip
  return folder


def _scores(run) -> dict[str, float]:
  """Returns the accuracy and the cross-entropy of the last evaluation, under teacher forcing."""
  last = lambda name: [*run.curves[f"training_eval/{HELP}/{name}"].values()][-1]
  return {"accuracy": last("accuracy"), "cross_entropy": last("loss")}


def train(task_name: str, row, pattern: str, steps: int, seed: int) -> dict[str, Any]:
  """Runs one seed of one row; returns what `_recipes_train.train` does, with BLEU and samples."""
  task = TRANSLATION[task_name]
  start = start_of(task)
  began = time.process_time()
  settings: dict[str, Any] = {"RECIPE": row.recipe, "LEARNING_RATE": row.rate or task.rate}
  if row.sparse:
    fields = {"lam": row.lam, "decoupled": row.decoupled or None}
    settings |= {
      "PATTERN": pattern, "GRADIENT": row.gradient, "DENSE_STEPS": steps * row.dense // 100,
      "FINETUNE_STEPS": steps * row.finetune // 100,
      "RECIPE_FIELDS": {name: x for name, x in fields.items() if x is not None} or None,
    }  # fmt: skip
  with tempfile.TemporaryDirectory() as home:
    folder = pathlib.Path(home) / "run"
    try:
      _train(
        task, "local_finetune.gin", folder, steps, INITIAL_CHECKPOINT_PATH=str(start),
        RANDOM_SEED=seed, DATA_SEED=seed, **settings,
      )  # fmt: skip
      found = _found(task, row, folder)
    except ValueError as e:
      if "not finite" not in str(e):
        raise
      found = GUESS
  return {
    "steps": steps,
    **found,
    "flops": training_flops(task, row, pattern, steps),
    "versions": versions(task.packages),
    "seconds": round(time.process_time() - began, 1),
    "start": START | _scores(run_folder.read([start])[0]),
  }


def _found(task: Translation, row, folder: pathlib.Path) -> dict[str, Any]:
  """Returns what a trained run says and how good that is."""
  said = translations(task, folder)
  (run,) = run_folder.read([folder])
  return {
    **_scores(run),
    "bleu": bleu(said[HELP]),
    "bleu_dictionary": bleu(said[DICTIONARY]),
    "samples": said[HELP][:SAMPLES],
    "density": kept(verify_checkpoint.verify(folder).report) if row.sparse else 1.0,
    "curve": {"step": [*run.curves["train/loss"]], "loss": [*run.curves["train/loss"].values()]},
  }


def translations(task: Translation, run: pathlib.Path) -> dict[str, list[dict[str, str]]]:
  """Returns task of seqio -> its sentences, their references and what a run makes of them."""
  folder = run / "said"
  macros = {"CHECKPOINT_PATH": str(run), "INFER_OUTPUT_DIR": str(folder), "EVAL_SPLIT": task.split}
  _call("infer", *_flags(task, ["gin_configs/runs/local_infer.gin"], **macros))
  said = {}
  for name in debian_ende.TASKS.values():
    (path,) = folder.glob(f"{name}-predict.jsonl-*")
    lines = [json.loads(line) for line in path.read_text("utf8").splitlines()]
    said[name] = [
      {
        "english": line["inputs"]["inputs_pretokenized"].partition(": ")[2],
        "german": line["inputs"]["targets_pretokenized"],
        "said": line["prediction"],
      }
      for line in lines
    ]
  return said


def bleu(said: list[dict[str, str]]) -> float:
  """Returns BLEU, as the tasks nm_wmt* have it."""
  return metrics.bleu([x["german"] for x in said], [x["said"] for x in said])["bleu"]


# The wide network, and dense ones with its inference FLOPs at 1:8 and at 1:16 within 2 %, those of
# the vocabulary among them.
TRANSLATION = {
  name: Translation(width=width, heads=heads)
  for name, width, heads in (
    ("debian_ende", 128, 4),
    ("debian_ende_1_8", 69, 3),
    ("debian_ende_1_16", 64, 4),
  )
}
TRANSLATION |= {
  f"{name}_tuning": dataclasses.replace(task, split="validation")
  for name, task in TRANSLATION.items()
}
