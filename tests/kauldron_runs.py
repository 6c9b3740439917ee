"""What tests ask of Kauldron, in a process of its own: each returns what JSON knows."""

import dataclasses

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


def rules_of(recipe, dense=2):
  steps = nms.Phases(total=12, dense=dense, finetune=4)
  return nms.Rules({"ff": nms.recipe(recipe, pattern="1:4", phases=steps)})


def trainer_of(workdir, rules=None, **changes):
  """The trainer of the konfig file, with other rules or fields."""
  import kauldron_tiny

  cfg = kauldron_tiny.get_config()
  cfg.workdir = workdir
  made = konfig.resolve(cfg)
  if rules is not None:
    changes = {"trainstep": dataclasses.replace(made.trainstep, rules=rules)} | changes
  return dataclasses.replace(made, **changes)


DENSE = {"trainstep": kd.train.TrainStep(), "evals": {}}


def trained(workdir, stop=None, split=False):
  """Trains; the steps that the state at the end has seen, and how its weights lie."""
  changes = {}
  if split:
    everything = kd.sharding.FSDPSharding(min_size_to_shard_mb=0)
    changes["sharding"] = kd.sharding.ShardingStrategy(params=everything)
  state, _ = trainer_of(workdir, stop_after_steps=stop, **changes).train()
  kernel = state.params["encoder"]["layers_0"]["mlp"]["dense_in"]["kernel"]
  return {
    "step": int(state.step),
    "count": int(state.opt_state.count),
    "split": not kernel.sharding.is_fully_replicated,
  }


def resolved(text):
  """What a konfig file of a page makes: its train step's rules, and its steps."""
  names = {}
  exec(compile(text, "a block", "exec"), names)
  cfg = names["get_config"]()
  cfg.workdir = "/tmp"  # as the flag of the command
  made = konfig.resolve(cfg)
  return [repr(made.trainstep.rules.places["ff"]), made.num_train_steps]


def restored(trainer, step=-1):
  """The state of a checkpoint."""
  return trainer.checkpointer.restore(trainer.init_state(skip_transforms=True), step=step)


def scores(workdir):
  """The loss of the test images at the start and at the end, by Kauldron's own evaluator."""
  trainer = trainer_of(workdir)
  evaluator = trainer.evals["eval"]
  loss = lambda state: float(evaluator.evaluate(state, 12).compute().loss_values["losses/xent"])
  return [loss(restored(trainer, step)) for step in (0, 12)]


def stepped(trainer, count):
  """The state after so many updates."""
  state, batches = trainer.init_state(), iter(trainer.train_ds)
  for _ in range(count):
    batch = kd.sharding.device_put(next(batches), trainer.sharding.batch)
    state, _ = trainer.trainstep.step(state, batch)
  return state


def of_kauldron_itself(workdir):
  """The most that one update in the dense phase differs from Kauldron's own, by parameter."""
  unsaved = {"checkpointer": kd.ckpts.NoopCheckpointer()}
  dense = stepped(trainer_of(workdir, **DENSE, **unsaved), 2).params
  state = stepped(trainer_of(workdir, **unsaved), 2)
  mine = nms.dense_params(state.params, state.opt_state)
  apart = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), *jax.device_get((dense, mine)))
  return max(jax.tree.leaves(apart))


def refusals(workdir, used, dense):
  """What is said of each mistake."""
  trainer_of(dense, **DENSE, stop_after_steps=1).train()
  mistakes = {
    "other end": lambda: trainer_of(workdir, num_train_steps=16).train(),
    "other rules": lambda: trainer_of(used, rules_of("sr_ste")).train(),
    "of a dense run": lambda: trainer_of(dense).train(),
  }
  said = {}
  for name, make in mistakes.items():
    try:
      make()
    except ValueError as e:
      said[name] = str(e)
  return said


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loaded(kd.ckpts.InitTransform):
  """The weights of another run."""

  workdir: str

  def transform(self, state):
    return state.replace(params=restored(trainer_of(self.workdir)).params)


def started(workdir, used):
  """Of a run from the weights of another: whether its stored masks are those of these weights."""
  rules = rules_of("one_shot", dense=0)
  trainer = trainer_of(workdir, rules, init_transform=Loaded(workdir=used))
  loaded = restored(trainer_of(used)).params
  same = lambda a, b: all(jax.tree.leaves(jax.tree.map(lambda x, y: bool((x == y).all()), a, b)))
  state = stepped(trainer, 1)
  return {
    "loaded": same(trainer.init_state().params, loaded),
    "masks": same(state.opt_state.masks["mask"], nms.init_state(loaded, rules)["mask"]),
    "sparse": nms.verify(state.params, rules).ok,
  }
