"""Whether the tasks can be imported here, and as they are then, for tests."""

import importlib.util

NEEDED = ("seqio", "tensorflow", "tensorflow_datasets", "sklearn", "scipy", "sacrebleu")


def why_not() -> str:
  """Why `t5x_tasks` cannot be imported here; empty where it can."""
  missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
  return f"t5x_tasks needs {', '.join(missing)}: pip install -e '.[local]'" if missing else ""


def register_again() -> None:
  """After a test that has registered tasks anew: as `import t5x_tasks` does it, for the next."""
  import t5x_tasks

  t5x_tasks.register_glue()
  t5x_tasks.register_mini()
  t5x_tasks.register_wmt()
