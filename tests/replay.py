"""Data that is read once for many short runs.

SeqIO takes longer to set up a pipeline of TensorFlow than such a run to train. So the first of a
source gives its batches, and later ones give copies of them. What is kept goes by every field of
the source and by the task itself: a task that is registered anew is read anew.

That a stream is a function of its source and of the position, which this relies on, is for tests
that read it `anew`.
"""

import contextlib
import copy
import functools
import itertools
from unittest import mock


class _Kept:
  """What was read, by what it was read from."""

  def __init__(self):
    self.values, self.alive = {}, []

  def get(self, kind, described, name, module, make):
    """Returns what `make` made at the first call for equal arguments and the same tasks."""
    import seqio

    from nm_sparsity_jax.workloads import text

    text.import_seqio(module)
    known = text.mixture_or_task(name, module)
    tasks = [known, *seqio.get_subtasks(known)]
    key = kind, described, *map(id, tasks)
    if key not in self.values:
      self.values[key] = make()
      self.alive.append(tasks)  # an id is another task's once the task is gone
    return self.values[key]


def _copied(batch):
  return {name: values.copy() for name, values in batch.items()}


class _Stream:
  """The batches of an endless stream, by position.

  Args:
    read: returns an iterator from a position on. None is kept: one that has waited for long takes
      as long to be deleted.
  """

  def __init__(self, read):
    self.read, self.seen = read, []

  def fill(self, number):
    while len(self.seen) <= number:
      have = len(self.seen)
      self.seen += itertools.islice(self.read(have), have or _FIRST)

  def start_at(self, start):
    for number in itertools.count(start):
      self.fill(number)
      yield _copied(self.seen[number])


# Batches that are read at first: most runs are shorter, and to set a pipeline up once more takes
# longer than to read these.
_FIRST = 128


@contextlib.contextmanager
def kept():
  """Reads training batches and validation examples once, for a block."""
  from nm_sparsity_jax.workloads import text, text_evaluation

  found, source, evaluator = _Kept(), text.Source, text_evaluation.Evaluator
  read, read_losses, judge_of = source.batches, evaluator._loss_batches, evaluator._judge

  def batches(self, start=0):
    if _anew:
      return read(self, start)
    stream = lambda: _Stream(functools.partial(read, self))
    have = found.get("batches", repr(self), self.name, self.module, stream)
    have.fill(start)  # mistakes are raised now, not at the first batch
    return have.start_at(start)

  def loss_batches(self, task):
    cfg, make = self._cfg, lambda: list(read_losses(self, task))
    return map(_copied, found.get(("losses", task.name), repr(cfg), cfg.name, cfg.module, make))

  def judge(self, num_examples, logger_cls=(), log_dir=None):
    cfg, make = self._cfg, lambda: judge_of(self, num_examples)
    made = copy.copy(found.get(("judge", num_examples), repr(cfg), cfg.name, cfg.module, make))
    made._loggers = tuple(one(output_dir=log_dir) for one in logger_cls)
    return made

  with (
    mock.patch.object(source, "batches", batches),
    mock.patch.object(evaluator, "_loss_batches", loss_batches),
    mock.patch.object(evaluator, "_judge", judge),
  ):
    yield


_anew = False


@contextlib.contextmanager
def anew():
  """Reads training batches as a user does, for a block within `kept`."""
  global _anew
  before, _anew = _anew, True
  try:
    yield
  finally:
    _anew = before
