"""What tests ask of Kauldron, in an environment of its own: each function returns JSON's values.

python tests/kauldron_runs.py FOLDER whole stopped ...    prints {function: value} as JSON
"""

import dataclasses
import json
import sys

import jax
import numpy as np
from kauldron import kd, konfig

import nm_sparsity_jax as nms


@dataclasses.dataclass(frozen=True)
class Halves:
  """Images of noise around 0 or around 1, by (seed, index)."""

  size: int
  seed: int

  def __len__(self):
    return self.size

  def __getitem__(self, i):
    random = np.random.default_rng((self.seed, int(i)))
    label = int(random.integers(2))
    image = random.normal(size=(8, 8, 3)).astype(np.float32) + np.float32(label)
    return {"image": image, "label": np.asarray([label], np.int32)}


def trainer_of(workdir, recipe=None, **changes):
  """The trainer of the konfig file, with another recipe or other fields."""
  import kauldron_tiny

  cfg = kauldron_tiny.get_config()
  cfg.workdir = workdir
  made = konfig.resolve(cfg)
  if recipe is not None:
    phases = nms.Phases(total=12, dense=0, finetune=4)
    rules = nms.Rules({"ff": nms.recipe(recipe, pattern="1:4", phases=phases)})
    changes = {"trainstep": dataclasses.replace(made.trainstep, rules=rules)} | changes
  return dataclasses.replace(made, **changes)


DENSE = {"trainstep": kd.train.TrainStep(), "evals": {}}


def restored(trainer, step=-1):
  """The state of a checkpoint."""
  return trainer.checkpointer.restore(trainer.init_state(skip_transforms=True), step=step)


def stepped(trainer, count):
  """The state after so many updates."""
  state, batches = trainer.init_state(), iter(trainer.train_ds)
  for _ in range(count):
    batch = kd.sharding.device_put(next(batches), trainer.sharding.batch)
    state, _ = trainer.trainstep.step(state, batch)
  return state


# --- what is asked, in this order -----------------------------------------------------------------


def whole(folder):
  """A run that is not stopped: the steps that the state at its end has seen."""
  state, _ = trainer_of(f"{folder}/whole").train()
  return [int(state.step), int(state.opt_state.count)]


def stopped(folder):
  """A run that stops behind checkpoint 8 and goes on."""
  for after in (9, None):
    trainer_of(f"{folder}/stopped", stop_after_steps=after).train()


def split(folder):
  """A run on all devices, which share the weights: whether they do."""
  everything = kd.sharding.FSDPSharding(min_size_to_shard_mb=0)
  sharding = kd.sharding.ShardingStrategy(params=everything)
  state, _ = trainer_of(f"{folder}/split", sharding=sharding).train()
  kernel = state.params["encoder"]["layers_0"]["mlp"]["dense_in"]["kernel"]
  return not kernel.sharding.is_fully_replicated


def scores(folder):
  """The loss of the test images at the start and at the end, by Kauldron's own evaluator."""
  trainer = trainer_of(f"{folder}/whole")
  evaluator = trainer.evals["eval"]
  loss = lambda state: float(evaluator.evaluate(state, 12).compute().loss_values["losses/xent"])
  return [loss(restored(trainer, step)) for step in (0, 12)]


def dense_phase(folder):
  """The most that two updates in the dense phase differ from Kauldron's own, by parameter."""
  unsaved = {"checkpointer": kd.ckpts.NoopCheckpointer()}
  dense = stepped(trainer_of(f"{folder}/own", **DENSE, **unsaved), 2).params
  state = stepped(trainer_of(f"{folder}/own", **unsaved), 2)
  mine = nms.dense_params(state.params, state.opt_state)
  apart = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), *jax.device_get((dense, mine)))
  return max(jax.tree.leaves(apart))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loaded(kd.ckpts.InitTransform):
  """The weights of another run."""

  workdir: str

  def transform(self, state):
    return state.replace(params=restored(trainer_of(self.workdir)).params)


def started(folder):
  """Of a run from the weights of another: whether its stored masks are those of these weights."""
  trainer = trainer_of(f"{folder}/b", "one_shot", init_transform=Loaded(workdir=f"{folder}/whole"))
  loaded, rules = restored(trainer_of(f"{folder}/whole")).params, trainer.trainstep.rules
  same = lambda a, b: all(jax.tree.leaves(jax.tree.map(lambda x, y: bool((x == y).all()), a, b)))
  state = stepped(trainer, 1)
  return {
    "loaded": same(trainer.init_state().params, loaded),
    "masks": same(state.opt_state.masks["mask"], nms.init_state(loaded, rules)["mask"]),
    "sparse": nms.verify(state.params, rules).ok,
  }


def example(folder):
  """What examples/kauldron_vit.py makes: its rules, and its steps."""
  import kauldron_vit

  cfg = kauldron_vit.get_config()
  cfg.workdir = folder  # as the flag of the command
  made = konfig.resolve(cfg)
  return [repr(made.trainstep.rules.places["ff"]), made.num_train_steps]


def refusals(folder):
  """What is said of each mistake."""
  trainer_of(f"{folder}/dense", **DENSE, stop_after_steps=1).train()
  mistakes = {
    "other end": lambda: trainer_of(f"{folder}/a", num_train_steps=16).train(),
    "other rules": lambda: trainer_of(f"{folder}/whole", "sr_ste").train(),
    "of a dense run": lambda: trainer_of(f"{folder}/dense").train(),
  }
  said = {}
  for name, make in mistakes.items():
    try:
      make()
    except ValueError as e:
      said[name] = str(e)
  return said


if __name__ == "__main__":
  found = {name: globals()[name](sys.argv[1]) for name in sys.argv[2:]}
  print("\n" + json.dumps(found), flush=True)
