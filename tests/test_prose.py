"""What a test can check of prose in code: docstrings open with a verb, public ones show a call.

CONTRIBUTING.md says how to write.
"""

import ast
import inspect
import pathlib
import re

import pytest

import nm_sparsity_jax as nms

ROOT = pathlib.Path(__file__).resolve().parents[1]
FOLDERS = ("nm_sparsity_jax", "t5x_tasks", "benchmarks", "examples")
FILES = sorted(file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py"))

# Words that end in s and open a docstring that says what there is, not what the function does.
NOUNS = {"Its", "This", "Axis", "Bits", "Class", "Ids", "Keys", "Lines", "Logits", "Points", "Rows"}


def test_the_docstring_of_a_function_opens_with_a_verb():
  wrong = []
  for file in FILES:
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
      if isinstance(node, ast.FunctionDef) and (text := ast.get_docstring(node)):
        word = re.split(r"\W", text, maxsplit=1)[0]
        if not re.fullmatch(r"[A-Z][a-z]+s", word) or word in NOUNS:
          wrong.append(f"{file.name}, {node.name}: {text.splitlines()[0]}")
  assert not wrong


@pytest.mark.parametrize("name", [n for n in nms.__all__ if callable(getattr(nms, n))])
def test_what_is_public_says_its_arguments_and_shows_a_call(name):
  public = getattr(nms, name)
  text = inspect.getdoc(public) or ""
  assert not [p for p in inspect.signature(public).parameters if f"{p}: " not in text]
  assert re.search(rf"\b{name}[()]|\b{name}\.\w+\(", text), "no call is shown"
