"""Prints the oldest versions that setup.py allows users, as constraints for pip.

    python tests/floors.py >floors.txt && pip install -c floors.txt -e '.[dev,local]'

What only developers install (DEV, VISION_DEV, DOCS) is left out. setup.py is read as text, so that
this runs before anything is installed.
"""

import ast
import pathlib
import re

SETUP = pathlib.Path(__file__).resolve().parents[1] / "setup.py"
_FLOOR = re.compile(r"([\w.-]+)(?:\[[\w,]+\])?>=([\w.]+)")


def floors() -> dict[str, str]:
  """Returns name -> the oldest version that setup.py allows."""
  found = {}
  for node in ast.parse(SETUP.read_text("utf-8")).body:
    if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) not in (
      "DEV",
      "VISION_DEV",
      "DOCS",
    ):
      for part in ast.walk(node.value):
        if isinstance(part, ast.Constant) and isinstance(part.value, str):
          if match := _FLOOR.match(part.value):
            found[match[1]] = match[2]
  return found


if __name__ == "__main__":
  print("\n".join(f"{name}=={version}" for name, version in floors().items()))
