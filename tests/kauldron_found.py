"""Where a Python with Kauldron is, for tests: this one, KAULDRON_PYTHON, or .venv-kauldron."""

import importlib.util
import os
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
_BESIDE = pathlib.Path(os.environ.get("KAULDRON_PYTHON") or ROOT / ".venv-kauldron/bin/python")
PYTHON = sys.executable if importlib.util.find_spec("kauldron") else str(_BESIDE)
REASON = "" if pathlib.Path(PYTHON).is_file() else (
  "no Python with Kauldron is here: `make kauldron` makes .venv-kauldron, or name one by "
  "KAULDRON_PYTHON"
)  # fmt: skip
