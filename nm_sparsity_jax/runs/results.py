"""What a run left behind: GLUE's metrics by task and step, and what was sparse.

    DIR/inference_eval/TASK-metrics.jsonl   seqio.JSONLogger
    DIR/inference_eval/TASK/events.*        seqio.TensorBoardLogger: float32, tags eval/METRIC
    DIR/config.gin, run.json, checkpoint_N  what was trained, and from where
        -> [read] -> Run

T5X writes the first three, in t5x.train's MODEL_DIR and in t5x.eval's EVAL_OUTPUT_DIR.
DIR/training_eval is not read: its accuracies are of tokens, given the right ones before them.
"""

from __future__ import annotations

import dataclasses
import json
import operator
import os
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nm_sparsity_jax.runs import events, files, folders, glue, trained

if TYPE_CHECKING:
  from nm_sparsity_jax.training.rules import Rules

Series = dict[int, dict[str, float]]  # step -> metric -> value


@dataclasses.dataclass
class Run:
  """A run. A fact that its folder does not hold is None.

  Attributes:
    path: as the caller gave it.
    tasks: config of GLUE -> its metrics.
    mini: whether they are of mini-GLUE.
    rules: what it trains with.
    no_rules: why these are not known; '' where they are.
    recipe: its name.
    places: place -> pattern, empty for a dense run.
    dense_steps: steps of the dense phase.
    sparse_steps: all steps of the sparse run.
    start: the global step before the first of them.
    target: the first global step whose weights certainly have the target patterns.
    size: of the T5, such as 'base'.
    network: of images, by its name in `models`, such as 'vit_b16'.
    data: the images, such as 'imagenet2012'.
    remarks: what was odd.
    name: of its row; empty: that of the folder.
    joined: the folders of the runs that it was joined of.
  """

  path: pathlib.Path
  tasks: dict[str, Series] = dataclasses.field(default_factory=dict)
  mini: bool = False
  rules: Rules | None = None
  no_rules: str = "there is no config.gin"
  recipe: str | None = None
  places: Mapping[str, str] | None = None
  dense_steps: int | None = None
  sparse_steps: int | None = None
  start: int | None = None
  target: int | None = None
  size: str | None = None
  network: str | None = None
  data: str | None = None
  remarks: list[str] = dataclasses.field(default_factory=list)
  name: str = ""
  joined: tuple[pathlib.Path, ...] = ()

  def target_from(self) -> int | None:
    """Returns `target`, which is 0 for a dense run."""
    return 0 if self.recipe == "dense" or self.places == {} else self.target

  def target_remark(self) -> str:
    """Says that `target_from` is not known; '' where it is known, or where no recipe is."""
    if not self.recipe or self.target_from() is not None:
      return ""
    return "it is not known from which step the weights have the target pattern"


def read(path: str) -> Run:
  """Reads a run's folder, or its inference_eval/.

  Raises:
    ValueError: there are no metrics of GLUE, or a file is broken.
  """
  folder = pathlib.Path(path)
  metrics = folder if folder.name == "inference_eval" else folder / "inference_eval"
  run = settings(metrics.absolute().parent)
  run.path = folder
  run.tasks, run.mini = _tasks(metrics, run.remarks)
  return run


def settings(folder: pathlib.Path) -> Run:
  """Reads a run's folder without its metrics."""
  run, text = Run(folder), trained.gin_text(folder)
  if not text:
    return run
  from nm_sparsity_jax.recipes import Dense  # imports jax

  macros = trained.parse_settings(text)
  run.size, run.data, run.network = macros.get("T5_SIZE"), macros.get("DATA"), _network(text)
  run.start = _start(folder, macros)
  try:
    run.rules, run.no_rules = trained.rules_of(folder), ""
  except ValueError as e:
    run.no_rules = str(e)
    run.remarks.append(f"its rules are not known: {e}")
    return run
  recipes = {place: x for place, x in run.rules.places.items() if not isinstance(x, Dense)}
  names = {recipe.name for recipe in recipes.values()} or {"dense"}
  run.recipe = names.pop() if len(names) == 1 else None
  run.places = {place: str(recipe.pattern) for place, recipe in recipes.items()}
  for recipe in recipes.values():
    phases = recipe.phases
    run.dense_steps, run.sparse_steps = phases.dense, phases.total
    if run.start is not None:
      # A mask that is hard from the end of the dense phase on needs no fine-tune phase.
      is_hard = recipe.target_from(axis_size=1 << 20) == phases.dense
      own = run.start + (phases.dense if is_hard else phases.finetune_start)
      run.target = max(own, run.target or own)
  return run


def _start(folder: pathlib.Path, macros: Mapping[str, Any]) -> int | None:
  start = trained.started(folder).get("start", macros.get("PRETRAINED_STEPS"))
  if isinstance(start, int):
    return start
  if "INITIAL_CHECKPOINT_PATH" in macros:  # its name may hold the step
    path = macros["INITIAL_CHECKPOINT_PATH"]
    named = folders.named_step(path) if path else 0
    if named is not None:
      return named
  # A reference: gin asked the checkpoint.
  return None if start is None else trained.start_of(str(folder))


# Of a named configuration; another field makes it a network of other sizes.
_NO_SIZES = {
  "name", "image_size", "classes", "dropout", "drop_path", "dtype", "remat", "scan", "std",
}  # fmt: skip


def _network(gin: str) -> str | None:
  """Returns the name of the network of images that a config binds; None where it changes sizes."""
  bound = r"^(?:\w+\.)*(?:vit|swin|resnet)\.config\.(\w+) = (.*)$"
  found = dict(re.findall(bound, gin, re.MULTILINE))
  name = re.fullmatch(r"'(\w+)'", found.get("name", ""))
  return name[1] if name and not set(found) - _NO_SIZES else None


def join(name: str, runs: Sequence[Run]) -> Run:
  """Returns runs that were trained alike, each on tasks of its own, as one run.

  Raises:
    ValueError: two differ in what was trained, or have metrics of the same task.
  """
  first, *others = runs
  tasks = dict(first.tasks)
  for run in others:
    for field in ("mini", "recipe", "places", "dense_steps", "sparse_steps", "target", "size"):
      if (here := getattr(first, field)) != (there := getattr(run, field)):
        raise ValueError(
          f"{name}: {first.path} has {field} {here}, and {run.path} {there}, so they are not "
          "one row. Score them apart"
        )
    if twice := sorted(tasks.keys() & run.tasks.keys()):
      raise ValueError(
        f"{name}: {run.path} has metrics of {', '.join(twice)}, and so has a run before it: leave "
        "one out"
      )
    tasks |= run.tasks
  paths = tuple(run.path for run in runs)
  parent = pathlib.Path(os.path.commonpath([path.absolute() for path in paths]))
  remarks = [f"{run.path}: {remark}" for run in runs for remark in run.remarks]
  return dataclasses.replace(
    first, path=parent, tasks=tasks, remarks=remarks, name=name, joined=paths
  )


# --- metrics ------------------------------------------------------------------------------------


def _tasks(folder: pathlib.Path, remarks: list[str]) -> tuple[dict[str, Series], bool]:
  names = {p.name.removesuffix("-metrics.jsonl") for p in folder.glob("*-metrics.jsonl")}
  names |= {p.parent.name for p in folder.glob("*/*tfevents*")}
  columns = {column.name for column in glue.COLUMNS}
  known = {name: found for name in sorted(names) if (found := glue.config_of(name))}
  known = {name: found for name, found in known.items() if found[0] in columns}
  kinds = {mini for _, mini in known.values()}
  if len(kinds) != 1 or len({config for config, _ in known.values()}) < len(known):
    raise ValueError(
      f"{folder} has metrics of {', '.join(sorted(names)) or 'no task'}: a row needs those of GLUE "
      "or of mini-GLUE, each task once, such as nm_glue_rte-metrics.jsonl"
    )
  tasks = {config: series_of(folder, name, remarks) for name, (config, _) in known.items()}
  return tasks, kinds.pop()


def series_of(folder: pathlib.Path, name: str, remarks: list[str]) -> Series:
  """Reads metrics from JSONL, and from events for the steps that it lacks."""
  series: Series = {}
  for file in sorted((folder / name).glob("*tfevents*")):
    for step, tag, value in events.scalars(file):
      if tag.startswith("eval/"):
        series.setdefault(step, {})[tag.removeprefix("eval/")] = value
  if not (file := folder / f"{name}-metrics.jsonl").is_file():
    return series
  # Of a step that was evaluated twice, the later line counts.
  return series | dict(json_lines(file, remarks))


def json_lines(file: pathlib.Path, remarks: list[str]) -> Iterator[tuple[int, dict[str, float]]]:
  """Reads lines such as {"step": 100, "loss": 0.5}; yields (step, name -> number) of each.

  Args:
    file: what seqio's JSONLogger wrote, or the local runner.
    remarks: gets a remark if the last line is only half written.

  Raises:
    ValueError: a line is no JSON object with a step.
  """
  *lines, last = files.read_text(file).split("\n")
  if last:
    try:
      json.loads(last)
      lines.append(last)
    except ValueError:  # it is being written
      remarks.append(f"{file.name}: its last line has no end yet, and was left out")
  for number, line in enumerate(lines, 1):
    if line.strip():
      with files.named(f"{file}, line {number}"):
        entry = json.loads(line)
        step = operator.index(entry.pop("step"))
        values = {k: float(v) for k, v in entry.items() if isinstance(v, int | float)}
      yield step, values
