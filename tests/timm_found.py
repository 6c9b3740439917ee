"""timm on torch's CPU build, where both are installed: `pip install` as CONTRIBUTING.md says.

timm imports torchvision, whose wheel is built against CUDA. Without CUDA its library of kernels
does not load, and the shapes that it then tells torch of belong to no operator. No model here needs
one of them, so they are declared first, by name alone.
"""

import importlib.util
import pathlib
import re
import sys

import pytest

REASON = "no timm here: pip install -e '.[vision-dev]' brings what compares our networks with it"


def load():
  """(torch, timm); skips the test where one of them is missing."""
  missing = [name for name in ("torch", "torchvision", "timm") if not _there(name)]
  if missing:
    pytest.skip(f"{REASON} (missing: {', '.join(missing)})")
  import torch

  if "torchvision" not in sys.modules:
    _declare(torch)
  import timm

  return torch, timm


def _there(name):
  return importlib.util.find_spec(name) is not None


def _declare(torch):
  folder = pathlib.Path(importlib.util.find_spec("torchvision").origin).parent
  text = (folder / "_meta_registrations.py").read_text("utf-8")
  names = re.findall(r'register_(?:fake|meta)\("(?:torchvision::)?(\w+)"', text)
  for name in sorted(set(names)):
    if not hasattr(torch.ops.torchvision, name):
      torch.library.define(f"torchvision::{name}", "(Tensor x) -> Tensor")
