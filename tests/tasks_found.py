"""Whether the tasks can be imported here, for tests."""

import importlib.util

NEEDED = ("seqio", "tensorflow", "tensorflow_datasets", "sklearn", "scipy", "sacrebleu")


def why_not() -> str:
  """Why `t5x_tasks` cannot be imported here; empty where it can."""
  missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
  return f"t5x_tasks needs {', '.join(missing)}: pip install -e '.[tasks]'" if missing else ""
