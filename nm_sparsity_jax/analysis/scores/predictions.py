"""Files of predictions, as t5x.infer and the local runner write them, line by line.

TASK-predict.jsonl -> [read] -> (idx, prediction) of each line
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterable, Iterator

from nm_sparsity_jax.runs import files as whole

_HIDDEN = ("<unk>", "-1.0")  # the targets of examples without a label


def read(files: Iterable[pathlib.Path]) -> Iterator[tuple[int, str]]:
  """Reads files as t5x.infer writes them; yields (idx, prediction) of each line.

  A line is {"inputs": {"idx": 3.0, ...}, "prediction": "entailment"}.
  """
  for file in files:
    with file.open(encoding="utf-8") as lines, whole.named(file):
      number = 0
      while line := lines.readline(_MOST_LINE):
        number += 1
        if len(line) == _MOST_LINE:
          raise ValueError(f"{file}, line {number}: has more than {_MOST_LINE - 1:,} characters")
        yield _prediction(f"{file}, line {number}", line)


_MOST_LINE = 1 << 20  # characters of a line, its end included


def _prediction(where: str, line: str) -> tuple[int, str]:
  """Reads one line; returns its idx and prediction."""
  try:
    entry = json.loads(line)
    index, prediction = entry["inputs"]["idx"], entry["prediction"]
    target = entry["inputs"].get("targets_pretokenized", _HIDDEN[0])
  except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
    wanted = 'no {"inputs": {"idx": ...}, "prediction": ...}'
    raise ValueError(
      f"{where}: {wanted} ({type(e).__name__}: {e}); "
      "gin_configs/runs/t5x_infer_glue_test.gin and local_infer.gin write these"
    ) from e
  if target not in _HIDDEN:
    raise ValueError(
      f"{where}: has the label {target!r}, so it is not a test set; infer on split 'test' (QNLI's "
      "validation set is just as long)"
    )
  # T5X writes whole numbers as floats.
  if isinstance(index, bool) or not isinstance(index, int | float) or index % 1:
    raise ValueError(f"{where}: idx is {index!r}, not a whole number")
  if not isinstance(prediction, str):
    raise ValueError(f"{where}: the prediction is {prediction!r}, not a text")
  return int(index), prediction
