"""Prints the oldest versions that pyproject.toml allows users, as constraints for pip.

    python tests/floors.py >floors.txt && pip install -c floors.txt -e '.[dev,local]'

What only developers install is left out.
"""

import pathlib
import re
import tomllib

PROJECT = tomllib.loads(
  (pathlib.Path(__file__).resolve().parents[1] / "pyproject.toml").read_text("utf-8")
)["project"]
EXTRAS = PROJECT["optional-dependencies"]
_FLOOR = re.compile(r"([\w.-]+)(?:\[[\w,]+\])?>=([\w.]+)")


def floors() -> dict[str, str]:
  """Returns name -> the oldest version that pyproject.toml allows."""
  users = [PROJECT["dependencies"], *(EXTRAS[extra] for extra in EXTRAS.keys() - {"dev", "torch"})]
  return dict(_FLOOR.findall("\n".join(line for part in users for line in part)))


if __name__ == "__main__":
  print("\n".join(f"{name}=={version}" for name, version in sorted(floors().items())))
