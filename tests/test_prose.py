"""What a test can check of prose in code: public docstrings say their arguments and show a call.

CONTRIBUTING.md says how to write.
"""

import inspect
import re

import pytest

import nm_sparsity_jax as nms


@pytest.mark.parametrize("name", [n for n in nms.__all__ if callable(getattr(nms, n))])
def test_what_is_public_says_its_arguments_and_shows_a_call(name):
  public = getattr(nms, name)
  text = inspect.getdoc(public) or ""
  assert not [p for p in inspect.signature(public).parameters if f"{p}: " not in text]
  assert re.search(rf"\b{name}[()]|\b{name}\.\w+\(", text), "no call is shown"
