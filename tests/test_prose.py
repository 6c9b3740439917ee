"""What a test can hold of the prose in code: docstrings open with a verb, public ones show a call.

CONTRIBUTING.md says how to write. What no test can judge, a reader must.
"""

import ast
import inspect
import pathlib
import re

import pytest

import nm_sparsity_jax as nms

ROOT = pathlib.Path(__file__).resolve().parents[1]
FOLDERS = ("nm_sparsity_jax", "t5x_tasks", "benchmarks", "examples")

# Words that end in s and open a docstring that says what there is, not what the function does.
NOUNS = {"Its", "This", "Axis", "Bits", "Class", "Ids", "Keys", "Lines", "Logits", "Points", "Rows"}

# Phrases that make a reader read a sentence twice.
TWICE = ("is none of", "which is none", "is no whole", "is no plain", "and is told", "of no run")

PUBLIC = [name for name in nms.__all__ if callable(getattr(nms, name))]


def docstrings():
  """Yields (place, whether it is of a function, docstring)."""
  for folder in FOLDERS:
    for file in sorted((ROOT / folder).rglob("*.py")):
      for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module) and ast.get_docstring(
          node
        ):
          name = getattr(node, "name", "the module")
          place = f"{file.relative_to(ROOT)}, {name}"
          yield place, isinstance(node, ast.FunctionDef), ast.get_docstring(node)


def test_the_docstring_of_a_function_opens_with_a_verb():
  """Issue 13, point 18: "Returns", "Masks", "Refuses"; 226 of 924 opened with something else."""
  wrong = []
  for place, of_function, text in docstrings():
    word = re.split(r"\W", text, maxsplit=1)[0]
    if of_function and (not re.fullmatch(r"[A-Z][a-z]+s", word) or word in NOUNS):
      wrong.append(f"{place}: {text.splitlines()[0]}")
  assert not wrong, "\n".join(wrong)


def test_no_message_has_to_be_read_twice():
  """Issue 13, point 18: inverted sentences come back by habit."""
  wrong = []
  for file in sorted((ROOT / "nm_sparsity_jax").rglob("*.py")):
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
      if isinstance(node, ast.Constant) and isinstance(node.value, str):
        wrong += [f"{file.name}: {phrase}" for phrase in TWICE if phrase in node.value]
        wrong += [f"{file.name}: {m}" for m in re.findall(r"\bis no \w+ (?:of|that)\b", node.value)]
  assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", PUBLIC)
def test_what_is_public_says_its_arguments_and_shows_a_call(name):
  """Issue 13, point 18: each name of `__all__` that can be called."""
  public = getattr(nms, name)
  text = inspect.getdoc(public) or ""
  parameters = [p.name for p in inspect.signature(public).parameters.values()]
  assert not [p for p in parameters if f"{p}: " not in text], "an argument is not said"
  assert re.search(rf"\b{name}[()]|\b{name}\.\w+\(", text), "no call is shown"
