"""Prints the oldest versions that setup.py allows users, as constraints for pip.

    python tests/floors.py >floors.txt && pip install -c floors.txt -e '.[dev,local]'

What only developers install (DEV, VISION_DEV, DOCS) is left out. setup.py is read as text, so that
this runs before anything is installed.
"""

import pathlib
import re

SETUP = pathlib.Path(__file__).resolve().parents[1] / "setup.py"
_DEVELOPERS = re.compile(r"^(?:DEV|VISION_DEV|DOCS) = \[.*?\]$", re.DOTALL | re.MULTILINE)
_FLOOR = re.compile(r'"([\w.-]+)(?:\[[\w,]+\])?>=([\w.]+)')


def floors() -> dict[str, str]:
  """Returns name -> the oldest version that setup.py allows."""
  return dict(_FLOOR.findall(_DEVELOPERS.sub("", SETUP.read_text("utf-8"))))


if __name__ == "__main__":
  print("\n".join(f"{name}=={version}" for name, version in floors().items()))
