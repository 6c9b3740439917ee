"""The rooms of the house: imports point one way, nothing private is shared, nothing grows too big.

Every statement is read from the source, so an import inside a function counts as well.
"""

import ast
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]

# Each room imports only rooms before it. A folder is one room.
ORDER = (
  "_version", "core", "recipes", "training", "models", "deploy", "runs", "trainer",
  "integrations", "analysis", "cli",
)  # fmt: skip
ENTRIES, FLOORS = 12, 13

# Longer or more branched than the rule, with the reason.
MAY_BE_LONG: dict[str, str] = {}
LINES, BRANCHES, SHARE = 60, 15, 0.12


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


def modules_of(tree):
  """Every module or name that a file imports, as dotted words."""
  for node in ast.walk(tree):
    if isinstance(node, ast.Import):
      yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
      assert not node.level, "relative imports hide which room is meant"
      yield from (f"{node.module}.{alias.name}" for alias in node.names)


def words_of(dotted):
  """The words below the package of a dotted name of ours, none for other packages."""
  first, *rest = dotted.split(".")
  if first == "t5x_tasks":
    return (first, *rest)
  return tuple(rest) if first == "nm_sparsity_jax" else ()


def module_of(words):
  """The module that a name of ours lies in."""
  while words and words not in MODULES:
    words = words[:-1]
  return words


def imports():
  """(module, file, words of the name) of each import of ours."""
  for module, file, tree in FILES:
    for dotted in modules_of(tree):
      if words := words_of(dotted):
        yield module, file, words


def area(words):
  """The part of a room: a folder of it, or a module."""
  return words[:2]


def folder(words):
  """The folder that a module lies in; two levels are told apart."""
  is_folder = any(len(other) > len(words) and other[: len(words)] == words for other in MODULES)
  return words[:2] if is_folder else words[:-1][:2]


def test_every_room_has_its_place():
  rooms = {module[0] for module, *_ in FILES}
  assert rooms == {*ORDER, "t5x_tasks"}, "name the new room in ORDER"
  assert len(rooms - {"t5x_tasks"}) + 1 <= ENTRIES  # __init__.py is one


def test_imports_point_one_way():
  upward = [
    f"{file}: {'.'.join(words)}"
    for module, file, words in imports()
    if words[0] in ORDER and module[0] in ORDER
    if ORDER.index(words[0]) > ORDER.index(module[0])
  ]
  assert not upward


def depths(edges):
  """How many floors each node stands above the ground; a circle is an error."""
  found: dict = {}

  def depth(node, above=()):
    assert node not in above, f"a circle: {' -> '.join('.'.join(n) for n in (*above, node))}"
    if node not in found:
      below = [depth(there, (*above, node)) for there in edges.get(node, ())]
      found[node] = 1 + max(below, default=0)
    return found[node]

  for node in edges:
    depth(node)
  return found


def graph(of):
  """{what a file belongs to: what it imports}, as `of` names both."""
  edges: dict = {}
  for module, _, words in imports():
    here, there = of(module), of(module_of(words))
    edges.setdefault(here, set())
    if there and there != here:
      edges[here].add(there)
  return edges


def test_no_file_imports_itself_through_others():
  # A package imports its modules, and they each other, but none of them the package.
  assert max(depths(graph(tuple)).values()) > 3


def test_the_house_has_few_floors():
  """A floor is a folder, with the folders inside it that it imports and that import it."""
  folders = graph(folder)
  joined = {f for f in folders if f[:1] in folders[f] and f in folders.get(f[:1], ())}
  floors = depths(graph(lambda words: folder(words)[: 1 if folder(words) in joined else 2]))
  top = max(floors, key=lambda f: floors[f])
  assert floors[top] <= FLOORS, f"{'.'.join(top)} stands on floor {floors[top]}"


# A room named by a text, though it stands below, and why: docs/architecture.md has the first.
MAY_NAME = {
  ("analysis", "cli"): "each run of a sweep is a process of its own, which a signal or crash ends",
}


def test_a_room_below_is_named_by_a_text_for_a_reason_alone():
  named = {
    (module[0], words[0])
    for module, _, tree in FILES
    for node in ast.walk(tree)
    if isinstance(node, ast.Constant) and isinstance(node.value, str)
    if re.fullmatch(r"nm_sparsity_jax(\.\w+)+", node.value)
    if (words := words_of(node.value)) and words[0] in ORDER and module[0] in ORDER
    if ORDER.index(words[0]) > ORDER.index(module[0])
  }
  assert named == set(MAY_NAME)


def owner_of(words):
  """Who may import a name: the part of a room that its first private word lies in."""
  private = [i for i, word in enumerate(words) if word.startswith("_") and word != "_version"]
  return words[: min(private[0], 2)] if private and not words[-1].startswith("__") else ()


def test_nothing_private_is_imported_by_another_room():
  private = [
    f"{file}: {'.'.join(words)}"
    for module, file, words in imports()
    if (owner := owner_of(words)) != module[: len(owner)]
  ]
  assert not private


def test_nothing_private_of_another_room_is_reached_through_its_module():
  reached = []
  for module, file, tree in FILES:
    theirs = {}
    for node in ast.walk(tree):
      if isinstance(node, ast.ImportFrom | ast.Import):
        for alias in node.names:
          dotted = f"{node.module}.{alias.name}" if isinstance(node, ast.ImportFrom) else alias.name
          if (words := words_of(dotted)) and area(words) != area(module):
            theirs[alias.asname or alias.name] = words
    for node in ast.walk(tree):
      if (
        isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id in theirs
        and node.attr.startswith("_")
        and not node.attr.startswith("__")
      ):
        reached.append(f"{file}:{node.lineno}: {node.value.id}.{node.attr}")
  assert not reached


def test_no_room_is_larger_than_its_share():
  sizes: dict[tuple, int] = {}
  for module, file, _ in FILES:
    lines = len((ROOT / file).read_text("utf-8").splitlines())
    sizes[area(module)] = sizes.get(area(module), 0) + lines
  total = sum(sizes.values())
  large = {part: f"{n} of {total} lines" for part, n in sizes.items() if n > SHARE * total}
  assert not large


# --- the page about them ------------------------------------------------------------------------

PAGE = (ROOT / "docs" / "architecture.md").read_text("utf-8")


def test_the_page_names_every_room_in_the_order_of_imports():
  rooms = [room.rstrip("/") for room in re.findall(r"^\| `([\w/]+)` \|", PAGE, re.MULTILINE)]
  assert rooms == [room for room in ORDER if room != "_version"]


def test_the_page_is_short():
  assert len(PAGE.splitlines()) <= 120
  wide = [line for line in PAGE.splitlines() if len(line) > 115 and not line.startswith("|")]
  assert not wide, "a long line is two lines"


# --- said once ----------------------------------------------------------------------------------

# A function that stands twice, and why.
MAY_BE_TWICE = {"__getattr__": "each package that imports lazily has its own"}


def source_of(node):
  """The code of a function without its docstring."""
  first, *rest = node.body
  is_doc = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
  return [ast.unparse(line) for line in (rest if is_doc else node.body)]


def test_no_function_is_written_twice():
  found: dict[str, list[str]] = {}
  for _, file, tree in FILES:
    for name, node in functions(tree):
      code = source_of(node)
      if len(code) > 1 and name not in MAY_BE_TWICE:
        found.setdefault("\n".join(code), []).append(f"{file}: {name}")
  assert [places for places in found.values() if len(places) > 1] == []


def test_no_table_is_written_twice():
  found: dict[str, list[str]] = {}
  for _, file, tree in FILES:
    for node in tree.body:
      value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
      if isinstance(value, ast.Dict) and value.keys:
        found.setdefault(ast.unparse(value), []).append(f"{file}:{node.lineno}")
  assert [places for places in found.values() if len(places) > 1] == []


def test_columns_line_up_by_one_helper():
  own = {
    "nm_sparsity_jax/core/text.py",
    "nm_sparsity_jax/analysis/plan/text.py",
  }  # the second: a fixed width
  pads = [
    f"{file}:{node.lineno}"
    for _, file, tree in FILES
    for node in ast.walk(tree)
    if isinstance(node, ast.Attribute) and node.attr in ("ljust", "rjust") and file not in own
  ]
  assert not pads, "use text.columns"


def test_no_recipe_is_told_by_its_name_outside_their_room():
  """A recipe of a user's own has another name: ask what it does, or `isinstance`."""
  told = [
    f"{file}:{node.lineno}: {ast.unparse(node)}"
    for module, file, tree in FILES
    if module[0] != "recipes"
    for node in ast.walk(tree)
    if isinstance(node, ast.Compare) and ast.unparse(node.left).endswith("recipe.name")
    if any(isinstance(found, ast.Constant) for found in ast.walk(node))
  ]
  assert not told


_BRANCH = (
  ast.If, ast.IfExp, ast.For, ast.While, ast.ExceptHandler, ast.BoolOp, ast.comprehension,
  ast.match_case,
)  # fmt: skip


def functions(tree):
  """(dotted name, node) of every function of a file."""

  def walk(node, names):
    for child in ast.iter_child_nodes(node):
      named = isinstance(child, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef)
      inside = [*names, child.name] if named else names
      if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
        yield ".".join(inside), child
      yield from walk(child, inside)

  yield from walk(tree, [])


def lines_of(node):
  """How many lines of a function are code: its docstring explains and does not count."""
  first, *_ = node.body
  doc = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
  text = (first.end_lineno - first.lineno + 1) if doc else 0
  return node.end_lineno - node.lineno + 1 - text


def branches_of(node):
  """How many ways there are to turn, those of functions inside it apart."""
  count = 0
  for child in ast.iter_child_nodes(node):
    if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
      continue
    count += isinstance(child, _BRANCH) + branches_of(child)
  return count


def test_a_function_fits_on_a_screen():
  found = {
    f"{file}:{name}": f"{lines_of(node)} lines, {branches_of(node)} branches"
    for _, file, tree in FILES
    for name, node in functions(tree)
    if lines_of(node) > LINES or branches_of(node) > BRANCHES
  }
  assert {name: size for name, size in found.items() if name not in MAY_BE_LONG} == {}
  assert set(MAY_BE_LONG) <= set(found), "no longer too long: take it off the list"


@pytest.mark.parametrize(
  "code, words",
  [
    ("import nm_sparsity_jax.trainer.step", ("trainer", "step")),
    ("def f():\n  from nm_sparsity_jax import runs", ("runs",)),
    ("from nm_sparsity_jax.runs.files import x", ("runs", "files", "x")),
    ("import t5x_tasks", ("t5x_tasks",)),
    ("import jax", ()),
  ],
)
def test_imports_are_found_wherever_they_stand(code, words):
  assert [words_of(name) for name in modules_of(ast.parse(code))] == [words]


def test_a_circle_is_found():
  with pytest.raises(AssertionError, match="circle"):
    depths({("a",): {("b",)}, ("b",): {("a",)}})
