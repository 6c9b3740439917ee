"""What tests ask of Kauldron, in a process of its own: each returns what JSON knows."""

import dataclasses

import flax.linen as nn
import jax
import numpy as np
import optax
from kauldron import kd, konfig, kontext

import nm_sparsity_jax as nms
from nm_sparsity_jax.integrations.kauldron import launch


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


def in_memory():
  """All examples at once, for a pipeline that cannot resume."""
  examples = [Halves(64, 0)[i] for i in range(64)]
  return {key: np.stack([e[key] for e in examples]) for key in examples[0]}


def rules_of(recipe="idp", pattern="1:4", place="ff", total=12, **phases):
  """Rules of one place."""
  steps = nms.Phases(total=total, **({"dense": 2, "finetune": 4} | phases))
  return nms.Rules({place: nms.recipe(recipe, pattern=pattern, phases=steps)})


def trainer_of(workdir, rules=None, **changes):
  """The trainer of the konfig file, with other rules or fields."""
  import kauldron_tiny

  cfg = kauldron_tiny.get_config()
  cfg.workdir = workdir
  made = konfig.resolve(cfg)
  if rules is not None:
    changes = {"trainstep": dataclasses.replace(made.trainstep, rules=rules)} | changes
  return dataclasses.replace(made, **changes)


def trained(workdir, stop=None, split=False):
  """Trains; the steps that the state at the end has seen, and how its weights lie."""
  changes = {}
  if split:
    everything = kd.sharding.FSDPSharding(min_size_to_shard_mb=0)
    changes["sharding"] = kd.sharding.ShardingStrategy(params=everything)
  trainer = trainer_of(workdir, stop_after_steps=stop, **changes)
  state, _ = trainer.train()
  kernel = state.params["encoder"]["layers_0"]["mlp"]["dense_in"]["kernel"]
  return {
    "step": int(state.step),
    "count": int(state.opt_state.count),
    "devices": jax.device_count(),
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


def launched(arguments):
  """Runs the launcher as a user does."""
  try:
    return launch.main(arguments)
  except SystemExit as e:  # absl's app.run
    return e.code or 0


def restored(trainer, step=-1):
  """The state of a checkpoint."""
  return trainer.checkpointer.restore(trainer.init_state(skip_transforms=True), step=step)


def scores(workdir):
  """The loss of the test images at the start and at the end, by Kauldron's own evaluator."""
  trainer = trainer_of(workdir)
  evaluator = trainer.evals["eval"]
  loss = lambda state: float(evaluator.evaluate(state, 12).compute().loss_values["losses/xent"])
  return [loss(restored(trainer, step)) for step in (0, 12)]


def of_kauldron_itself(workdir):
  """The most that one update in the dense phase differs from Kauldron's own, by parameter."""
  found = []
  for dense in (True, False):
    changes = {"trainstep": kd.train.TrainStep(), "evals": {}} if dense else {}
    trainer = trainer_of(workdir, checkpointer=kd.ckpts.NoopCheckpointer(), **changes)
    state, batches = trainer.init_state(), iter(trainer.train_ds)
    for _ in range(2):
      batch = kd.sharding.device_put(next(batches), trainer.sharding.batch)
      state, _ = trainer.trainstep.step(state, batch)
    w = state.params if dense else nms.dense_params(state.params, state.opt_state)
    found.append(jax.device_get(w))
  apart = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), *found)
  return max(jax.tree.leaves(apart))


def refusals(workdir, used, dense):
  """What is said of each mistake."""
  rules, other = rules_of(), rules_of("sr_ste")
  memory = kd.data.InMemoryPipeline(loader=in_memory, batch_size=16, seed=0)
  twice = nms.sparse(optax.adamw(1e-2), rules)
  unsaved = kd.ckpts.Checkpointer(save_interval_steps=5)
  trainer_of(dense, trainstep=kd.train.TrainStep(), evals={}, stop_after_steps=1).train()
  mistakes = {
    "in memory": lambda: trainer_of(workdir, train_ds=memory),
    "no end": lambda: trainer_of(workdir, checkpointer=unsaved),
    "other end": lambda: trainer_of(workdir, num_train_steps=16).train(),
    "other rules": lambda: trainer_of(used, other).train(),
    "of a dense run": lambda: trainer_of(dense).train(),
    "fused kernel": lambda: trainer_of(workdir, rules_of(place="qk"), model=Fused()).init_state(),
    "twice": lambda: trainer_of(workdir, optimizer=twice).init_state(),
  }
  return {name: said_of(make) for name, make in mistakes.items()}


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
  state, loaded = trainer.init_state(), restored(trainer_of(used)).params
  begins = same(state.params, loaded)
  batch = kd.sharding.device_put(next(iter(trainer.train_ds)), trainer.sharding.batch)
  state, _ = trainer.trainstep.step(state, batch)
  masks = nms.init_state(loaded, rules)["mask"]
  return {
    "loaded": begins,
    "masks": same(state.opt_state.masks["mask"], masks),
    "sparse": nms.verify(state.params, rules).ok,
    "count": int(state.opt_state.count),
  }


def same(a, b):
  """Whether two trees are equal."""
  return all(jax.tree.leaves(jax.tree.map(lambda x, y: bool((x == y).all()), a, b)))


def said_of(make):
  """The error of a call."""
  try:
    make()
  except ValueError as e:
    return str(e)
  return "nothing"


class Fused(nn.Module):
  """A network with one kernel for q, k and v."""

  image: kontext.Key = "batch.image"

  @nn.compact
  def __call__(self, image):
    """Logits."""
    x = image.reshape(len(image), -1)
    x = nn.Dense(96, name="qkv")(x)
    return {"logits": nn.Dense(2, name="head")(x)}
