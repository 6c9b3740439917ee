"""The rooms of the house: imports point one way, and nothing private is shared.

Every statement is read from the source, so an import inside a function counts as well.
"""

import ast
import graphlib
import re

from checkout import ROOT

# Each room imports only rooms before it. A folder is one room.
ORDER = (
  "_version", "core", "recipes", "training", "models", "deploy", "runs", "trainer",
  "integrations", "analysis", "cli",
)  # fmt: skip


def sources():
  """(module as words, name of the file, syntax tree) of every file of the two packages."""
  for package in ("nm_sparsity_jax", "t5x_tasks"):
    for path in sorted((ROOT / package).rglob("*.py")):
      words = path.relative_to(ROOT).with_suffix("").parts
      words = words[:-1] if words[-1] == "__init__" else words
      words = words[1:] if package == "nm_sparsity_jax" else words
      yield words, str(path.relative_to(ROOT)), ast.parse(path.read_text("utf-8"))


FILES = [found for found in sources() if found[1] != "nm_sparsity_jax/__init__.py"]
MODULES = {words for words, *_ in FILES}


def imported(tree):
  """name in this file -> words below the package, of everything of ours that a file imports."""
  names = {}
  for node in ast.walk(tree):
    if isinstance(node, ast.Import | ast.ImportFrom):
      assert not getattr(node, "level", 0), "relative imports hide which room is meant"
      above = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
      for alias in node.names:
        first, *rest = f"{above}{alias.name}".split(".")
        if first in ("nm_sparsity_jax", "t5x_tasks"):
          words = rest if first == "nm_sparsity_jax" else (first, *rest)
          names[alias.asname or alias.name] = tuple(words)
  return names


IMPORTS = [
  (module, file, words) for module, file, tree in FILES for words in imported(tree).values()
]


def test_imports_point_one_way():
  assert {module[0] for module, *_ in FILES} == {*ORDER, "t5x_tasks"}, "name the room in ORDER"
  upward = [
    f"{file}: {'.'.join(words)}"
    for module, file, words in IMPORTS
    if words and words[0] in ORDER and module[0] in ORDER
    if ORDER.index(words[0]) > ORDER.index(module[0])
  ]
  assert not upward


def test_no_file_imports_itself_through_others():
  edges = {}
  for module, _, words in IMPORTS:
    while words and words not in MODULES:
      words = words[:-1]
    # A package imports its modules, and they each other, but none of them the package.
    if words and words != module:
      edges.setdefault(module, set()).add(words)
  graphlib.TopologicalSorter(edges).prepare()  # raises where there is a circle


def test_nothing_private_is_used_by_another_room():
  """A part of a room is a folder of it, or a module."""
  found = []
  for module, file, tree in FILES:
    names = imported(tree)
    reached = [
      (*names[node.value.id], node.attr)
      for node in ast.walk(tree)
      if isinstance(node, ast.Attribute)
      and isinstance(node.value, ast.Name)
      and names.get(node.value.id)
    ]
    for words in (*names.values(), *reached):
      private = [i for i, w in enumerate(words) if re.match(r"_[^_]", w) and w != "_version"]
      owner = words[: min(private[0], 2)] if private else ()
      if owner != module[: len(owner)]:
        found.append(f"{file}: {'.'.join(words)}")
  assert not found


def test_the_page_names_every_room_in_the_order_of_imports():
  page = (ROOT / "docs" / "architecture.md").read_text("utf-8")
  rooms = [room.rstrip("/") for room in re.findall(r"^\| `([\w/]+)` \|", page, re.MULTILINE)]
  assert rooms == [room for room in ORDER if room != "_version"]
