"""Proof that a checkpoint's weights are n:m, and a checkpoint with exact zeros.

    path, rules -> [verify]   -> Proof: groups by place, ok
    path, out   -> [finalize] -> out/checkpoint_N with zeros, its Proof, what was removed

A checkpoint of a sparse run holds its rules; say those of any other one. One array is in memory at
a time, or the piece of it that the files hold. T5X is not needed. `finalize` writes the SHA-256 of
each array beside them, and `verify` compares these where they are.

>>> import tempfile, numpy as np
>>> from nm_sparsity_jax.runs import checkpoint, writing
>>> run = tempfile.mkdtemp()
>>> w = np.arange(1, 9, dtype=np.float32).reshape(4, 2)
>>> target = {"encoder": {"layers_0": {"mlp": {"wi": {"kernel": w}}}}}
>>> checkpoint.write(f"{run}/checkpoint_7", {"target": target})
>>> verify(run, {"ff": "2:4"}).ok
False
>>> made = finalize(run, f"{run}/final", {"ff": "2:4"})
>>> made.ok, [f"{r.path} lost {r.magnitude:.0%}" for r in made.removed]
(True, ['encoder/layers_0/mlp/wi/kernel lost 28%'])
>>> verify(f"{run}/final", {"ff": "2:4"}).ok
True
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from nm_sparsity_jax import apply, rules_text
from nm_sparsity_jax.errors import SettingError
from nm_sparsity_jax.places import Assignment, Place
from nm_sparsity_jax.recipes import Recipe
from nm_sparsity_jax.rules import Rules
from nm_sparsity_jax.runs import checkpoint, foreign, given, stacks, untold, writing
from nm_sparsity_jax.runs.checkpoint import Stored
from nm_sparsity_jax.text import printable
from nm_sparsity_jax.trees import flatten, nested

_STATE = "flax_mutables/nm_sparsity"


@dataclasses.dataclass(frozen=True)
class Proof:
  """What `verify` found in a checkpoint.

  Attributes:
    stored: the checkpoint.
    rules: the rules by which it was looked at.
    report: the findings, place by place.
    changed: the parameters that are not what was written, by their SHA-256.
  """

  stored: Stored
  rules: Rules
  report: apply.Report
  changed: tuple[str, ...] = ()

  @property
  def ok(self) -> bool:
    """Returns whether no group has too many non-zero weights, and no parameter was changed."""
    return self.report.ok and not self.changed

  def __str__(self) -> str:
    if not self.changed:
      return str(self.report)
    *lines, verdict = str(self.report).splitlines()
    said = "another SHA-256 than it was written with"
    lines += [printable(f"CHANGED  {path}: {said}") for path in self.changed]
    return "\n".join([*lines, "NOT what was written" if self.report.ok else verdict])

  def as_dict(self) -> dict[str, Any]:
    """Returns the findings as values that JSON knows; `changed` is there where anything is."""
    stored = self.stored
    found = {
      "ok": self.ok,
      "checkpoint": stored.path,
      "format": stored.format,
      "step": stored.step,
      "sparse_step": stored.sparse_step,
      "rules": stored.rules if stored.rules is not None else rules_text.describe(self.rules),
      "places": [dataclasses.asdict(place) for place in self.report.places],
      "skipped": dict(self.report.skipped),
    }
    return found | ({"changed": list(self.changed)} if self.changed else {})


@dataclasses.dataclass(frozen=True)
class Removed:
  """What one parameter lost.

  Attributes:
    path: the parameter.
    weights: share of weights that were not 0 and are now.
    magnitude: their share of the sum of |w|.
    squares: their share of the sum of w ** 2.
  """

  path: str
  weights: float
  magnitude: float
  squares: float


@dataclasses.dataclass(frozen=True)
class Finalized:
  """What `finalize` wrote.

  Attributes:
    source: the checkpoint that was read.
    proof: the proof of the checkpoint that was written, read back from the disk.
    removed: what each sparse parameter lost.
  """

  source: Stored
  proof: Proof
  removed: tuple[Removed, ...]

  @property
  def ok(self) -> bool:
    """Returns whether the written checkpoint is n:m."""
    return self.proof.ok

  @property
  def path(self) -> str:
    """Returns the folder of the written checkpoint."""
    return self.proof.stored.path

  def as_dict(self) -> dict[str, Any]:
    """Returns the findings as values that JSON knows."""
    found = self.proof.as_dict()
    lost = {r.path: dataclasses.asdict(r) for r in self.removed}
    found["places"] = [place | lost[place["path"]] for place in found["places"]]
    average = {"average": True} if self.source.average else {}
    return {"from": self.source.path, **average, **found}


def verify(
  path: str | os.PathLike | Stored, rules: given.Given = None, axes: Mapping[str, Any] | None = None
) -> Proof:
  """Proves, group by group, that a checkpoint's weights are n:m along the contracted axis.

      print(nms.runs.verify("runs/sparse/checkpoint_1000"))

  A local run and one of Kauldron store the effective weights, which are n:m when the schedule is
  over. T5X stores dense weights, on which masks act, and so is the moving average of a run that
  keeps one, which is what is looked at then: `finalize` writes the zeros.

  Args:
    path: a checkpoint of a local run, of Kauldron or of T5X; a run's folder means its newest one.
    rules: `Rules`, or place -> pattern such as {'ff': '1:8'}; None takes the checkpoint's own.
    axes: path -> contracted axis, for kernels that a scan over layers has stacked.

  Raises:
    ValueError: there are no rules, other rules than the checkpoint's, or it cannot be read.
  """
  stored = checkpoint.opened(path)
  with given.named(stored):
    rules = given.rules_for(stored, rules, axes)
    assignment = given.assign(stored, rules)
  return _prove(stored, rules, assignment)


def finalize(
  path: str | os.PathLike | Stored,
  out: str | os.PathLike,
  rules: given.Given = None,
  axes: Mapping[str, Any] | None = None,
  early: bool = False,
) -> Finalized:
  """Writes a checkpoint with the exact zeros of `nms.finalize`, reads it back and proves it.

      made = nms.runs.finalize("runs/sparse", "runs/final")

  The new checkpoint holds parameters, step and sparse state, but no optimizer. It opens in T5X,
  with the sparse model or T5X's own. Where the run kept a moving average of its parameters, that
  is what is finalized. One parameter is in memory at a time, and the work on it.

  Args:
    path: as in `verify`.
    out: a folder, which gets checkpoint_<step>; that must be new. Of a folder of Hugging Face's T5
      it is the new folder itself.
    rules: as in `verify`.
    axes: as in `verify`.
    early: finalize though the schedule is not over and removed weights may still matter.

  Raises:
    ValueError: the schedule is not over, the output is there already, or what `verify` refuses.
  """
  stored = checkpoint.opened(path)
  if stored.packed is not None:
    raise ValueError(
      f"{stored.path!r} is a packed file, and finalized already: use it as it is, or `export` it."
    )
  rules = given.rules_for(stored, rules, axes)
  assignment = given.assign(stored, rules)
  if not early:
    _refuse_early(stored, assignment)
  is_folder = stored.format == foreign.HUGGING_FACE
  made = os.fspath(out) if is_folder else os.path.join(out, f"checkpoint_{stored.step or 0}")
  checkpoint.check_new(made)
  removed: dict[str, Removed] = {}
  zeroed = _with_zeros(stored, rules, assignment, removed)
  if is_folder:
    arrays = {key: x for key, x in zeroed.items() if not isinstance(x, writing.Layers)}  # all
    foreign.write_like(stored.path, made, arrays)
  else:
    writing.write(made, zeroed, untold.noted(stored.path), given.to_note(stored, rules))
  written = checkpoint.read(made)
  proof = _prove(written, rules, given.assign(written, rules))
  return Finalized(stored, proof, tuple(removed[p] for p in assignment.places))


def _alone(place: Place, rules: Rules) -> Rules:
  """Returns rules of one parameter, which is all that a tree of one array needs."""
  path = f"(?:{re.escape(place.path)})"  # a regex, also where it reads like a role
  return type(rules)({path: place.recipe}, {path: place.axis}, rules.indivisible)


# --- proof --------------------------------------------------------------------------------------


def _prove(stored: Stored, rules: Rules, assignment: Assignment) -> Proof:
  found = {}
  sums = writing.hashes(stored.path)
  wanted = {key: (None, (x,)) for key, x in sums.whole.items()} | dict(sums.layers)
  lost = {key for key in wanted if key not in stored.leaves}
  for key in stored.leaves:
    path = key.removeprefix("target/")
    place = assignment.places.get(path) if key.startswith("target/") else None
    if place is None and key not in wanted:
      if stored.packed is not None:
        stored.array(key)  # what reads a packed file looks at every entry
      continue
    read = stored.deployed(key)  # the average where the run kept one: that is what was scored
    axis, hashes = wanted.get(key) or (_free_axis(stored, read, place), None)
    if axis is not None and not 0 <= axis < len(stored.leaves[key].shape or ()):
      axis, hashes = None, ()  # of another array
    proofs: list[apply.Verified] = []
    is_written = _look(stored, read, axis, hashes, place, rules, proofs)
    if not is_written:
      lost.add(key)
    if place is not None:
      found[path] = apply.joined(proofs, place.shape)
  changed = sorted(key.removeprefix("target/") for key in lost)
  report = apply.Report(tuple(found[p] for p in assignment.places), assignment.skipped)
  return Proof(stored, rules, report, tuple(changed))


def _look(
  stored: Stored,
  key: str,
  axis: int | None,
  hashes: Sequence[str] | None,
  place: Place | None,
  rules: Rules,
  proofs: list[apply.Verified],
) -> bool:
  """Looks at the pieces of an array along an axis; says whether they have their hashes.

  `proofs` gets what is found of each piece of a place.
  """
  fits, count = True, 0
  for start, piece in stored.pieces(key, axis, None if hashes is None else 1):
    if hashes is not None:
      fits &= count < len(hashes) and writing.sha256(piece) == hashes[count]
    count += 1
    if place is not None:
      (one,) = apply.verify(nested({place.path: piece}), _alone(place, rules)).places
      if one.first is not None and axis is not None:
        first = (*one.first[:axis], one.first[axis] + start, *one.first[axis + 1 :])
        one = dataclasses.replace(one, first=first)
      proofs.append(one)
    del piece  # or it would stay while the next one is read
  return fits and (hashes is None or count == len(hashes))


def _free_axis(stored: Stored, key: str, place: Place | None) -> int | None:
  """Returns the axis along which the files hold the smallest pieces of whole groups, or None."""
  shape = stored.leaves[key].shape
  if place is None or shape is None or key not in stored.chunks:
    return None
  part = {a: stored.length(key, a) / max(n, 1) for a, n in enumerate(shape)}
  free = [a for a in part if a not in place.groups.axes and part[a] < 1]
  return min(free, key=part.__getitem__, default=None)


# --- zeros --------------------------------------------------------------------------------------


def _refuse_early(stored: Stored, assignment: Assignment) -> None:
  """Raises while a place has steps ahead before its fine-tune phase."""
  step = stored.sparse_step
  if step is None:
    return  # of no sparse run
  if ahead := assignment.unfinished(step):
    raise SettingError(
      "early",
      "{path} is at sparse step {ahead}. Take a later checkpoint, or add {early}",
      path=stored.path,
      ahead=ahead,
      early="early=True",
    )


def _with_zeros(
  stored: Stored, rules: Rules, assignment: Assignment, removed: dict[str, Removed]
) -> dict[str, writing.Makes | writing.Layers]:
  """Returns what makes each array that is to be written; `removed` gets what a place loses."""
  makes: dict[str, writing.Makes | writing.Layers] = {
    "state/step": lambda: np.asarray(np.int32(0))  # T5X wants one
  }
  if stored.sparse_step is not None:  # as its sparse model wants to know where the run began
    start = np.int32((stored.step or 0) - stored.sparse_step)
    makes[f"{_STATE}/start"] = lambda: np.asarray(start)
  layered = {} if stored.format == foreign.HUGGING_FACE else stacks.axes_of(stored)
  for key in stored.leaves:
    if not key.startswith(("target/", "flax_mutables/")) and key != "state/step":
      continue  # the optimizer's: W, and moments of weights that are gone
    is_target = key.startswith("target/")
    place = assignment.places.get(key.removeprefix("target/")) if is_target else None
    axis = layered.get(key)
    if place is None:
      pieces = functools.partial(_copied, stored, key, axis)
    else:
      pieces = functools.partial(_finalized, stored, rules, place, removed, axis)
    leaf = stored.leaves[stored.deployed(key)]
    if axis is not None and leaf.shape is not None and leaf.dtype is not None:
      makes[key] = writing.Layers(leaf.shape, leaf.dtype, axis, pieces)
    else:
      makes[key] = functools.partial(_only, pieces)
  return makes


def _only(pieces: Callable[[], Iterator[np.ndarray]]) -> np.ndarray:
  (made,) = pieces()
  return made


def _copied(stored: Stored, key: str, axis: int | None) -> Iterator[np.ndarray]:
  """Yields an array, layer by layer along an axis."""
  for _, piece in stored.pieces(stored.deployed(key), axis):
    yield from _layers(piece, axis)
    del piece  # or it would stay while the next one is read


def _finalized(
  stored: Stored, rules: Rules, place: Place, removed: dict[str, Removed], axis: int | None
) -> Iterator[np.ndarray]:
  """Yields a parameter with its zeros, layer by layer along an axis, and notes what it lost."""
  key = stored.deployed(f"target/{place.path}")
  sums, weights = np.zeros(5), 0
  # What a recipe of somebody else deploys may depend on the whole array.
  is_by_group = type(place.recipe).final is Recipe.final
  for start, before in stored.pieces(key, axis if is_by_group else None):
    state = _state(stored, place, axis, start, before) if place.recipe.stateful else None
    tree = nested({place.path: before})
    after = apply.finalize(tree, _alone(place, rules), 0, state, early=True)  # looked at already
    (made,) = (np.asarray(leaf) for _, leaf in flatten(after))
    sums += _sums(before, made)
    weights += before.size
    del tree, before, after, state
    yield from _layers(made, axis)
    del made  # or it would stay while the next one is read
  removed[place.path] = _removed(place, weights, sums)


def _layers(piece: np.ndarray, axis: int | None) -> Iterator[np.ndarray]:
  if axis is None:
    yield piece
    return
  for i in range(piece.shape[axis]):
    yield piece[(slice(None),) * axis + (slice(i, i + 1),)]


def _state(
  stored: Stored, place: Place, axis: int | None, start: int, piece: np.ndarray
) -> dict[str, Any]:
  """Returns all that the checkpoint keeps of a place; its recipe says what is deployed of it.

  Of what is as large as the parameter it is the same piece.
  """
  state: dict[str, Any] = {"step": stored.sparse_step}
  for key, leaf in stored.leaves.items():
    kind, _, path = key.removeprefix(f"{_STATE}/").partition("/")
    if key.startswith(f"{_STATE}/") and path == place.path:
      if axis is None or leaf.shape != place.shape:
        value = stored.array(key)
      else:
        value = stored.part(key, axis, start, start + piece.shape[axis])
      state[kind] = nested({path: value})
  return state


_AT_ONCE = 1 << 20  # weights that are looked at in float64 at a time


def _sums(before: np.ndarray, after: np.ndarray) -> np.ndarray:
  """Returns weights that became 0, the sums of their |w| and of all, and the same of squares."""
  before, after = before.reshape(-1), after.reshape(-1)
  sums = np.zeros(5)
  with np.errstate(all="ignore"):  # inf and NaN: `verify` warns of them
    for start in range(0, before.size, _AT_ONCE):
      part = slice(start, start + _AT_ONCE)
      was = np.abs(before[part].astype(np.float64))
      lost = np.where(after[part] == 0, was, 0.0)
      sums += ((lost != 0).sum(), lost.sum(), was.sum(), (lost**2).sum(), (was**2).sum())
  return sums


def _removed(place: Place, size: int, sums: np.ndarray) -> Removed:
  weights, lost, was, lost_squares, squares = map(float, sums)
  share = lambda part, whole: part / whole if whole else 0.0
  return Removed(place.path, share(weights, size), share(lost, was), share(lost_squares, squares))
