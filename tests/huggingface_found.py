"""transformers and torch, where they are installed: `pip install -e '.[hf-dev]'` brings both."""

# pyright: reportMissingImports=false

import importlib.util

import pytest

REASON = "no transformers here: pip install -e '.[hf-dev]' brings what compares our T5 with it"


def load():
  """(torch, transformers); skips the test where one of them is missing."""
  missing = [x for x in ("torch", "transformers") if importlib.util.find_spec(x) is None]
  if missing:
    pytest.skip(f"{REASON} (missing: {', '.join(missing)})")
  import torch
  import transformers

  transformers.utils.logging.disable_progress_bar()
  return torch, transformers
