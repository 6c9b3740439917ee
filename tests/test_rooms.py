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
  "_version", "installed", "directions", "text", "errors", "patterns", "fields", "trees", "dtypes",
  "masks", "schedules", "groups", "packed", "gradients", "recipes", "roles", "places", "trace",
  "rules", "rules_text", "stored", "apply", "transform", "optim", "layers", "metrics", "flops",
  "compiled", "topology", "glue", "paper", "t5x_tasks", "configure", "models", "t5",
  "unscanned", "deployed", "weights", "images", "workloads",
  "gin_files", "runs", "local", "t5x_adapter", "kauldron_adapter", "plan", "scores", "report",
  "benches", "sweep", "environment",
  "quickstart", "commands", "cli",
)  # fmt: skip

# Longer or more branched than the rule, with the reason.
MAY_BE_LONG: dict[str, str] = {}
LINES, BRANCHES, SHARE = 60, 15, 0.12


def sources():
  """(room, name of the file, syntax tree) of every file of the two packages."""
  for package in ("nm_sparsity_jax", "t5x_tasks"):
    for path in sorted((ROOT / package).rglob("*.py")):
      inside = path.relative_to(ROOT / package)
      room = package if package == "t5x_tasks" else inside.parts[0].removesuffix(".py")
      yield room, str(path.relative_to(ROOT)), ast.parse(path.read_text("utf-8"))


FILES = [found for found in sources() if found[1] != "nm_sparsity_jax/__init__.py"]


def modules_of(tree):
  """Every module or name that a file imports, as dotted words."""
  for node in ast.walk(tree):
    if isinstance(node, ast.Import):
      yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
      assert not node.level, "relative imports hide which room is meant"
      yield from (f"{node.module}.{alias.name}" for alias in node.names)


def room_of(dotted):
  """The room that a dotted name of ours lies in, None for other packages."""
  first, *rest = dotted.split(".")
  if first == "t5x_tasks":
    return first
  return rest[0] if first == "nm_sparsity_jax" and rest else None


def imports():
  """(room, file, dotted name, its room) of each import of ours from another room."""
  for room, file, tree in FILES:
    for dotted in modules_of(tree):
      there = room_of(dotted)
      if there is not None and there != room:
        yield room, file, dotted, there


def test_every_room_has_its_place():
  rooms = {room for room, *_ in FILES if room != "py"}
  assert sorted(rooms) == sorted(set(ORDER) & rooms), "name the new room in ORDER"


def test_imports_point_one_way():
  upward = [
    f"{file}: {room} imports {dotted}"
    for room, file, dotted, there in imports()
    if there in ORDER and ORDER.index(there) > ORDER.index(room)
  ]
  assert not upward


# A room named by a text, though it stands below, and why: docs/architecture.md has the first.
MAY_NAME = {
  ("sweep", "cli"): "each run of a sweep is a process of its own, which a signal or a crash ends",
  ("gin_files", "local"): "gin calls the programs of a run file by their package",
}


def test_a_room_below_is_named_by_a_text_for_a_reason_alone():
  named = {
    (room, there)
    for room, _, tree in FILES
    for node in ast.walk(tree)
    if isinstance(node, ast.Constant) and isinstance(node.value, str)
    if re.fullmatch(r"nm_sparsity_jax(\.\w+)+", node.value)
    if (there := room_of(node.value)) in ORDER and ORDER.index(there) > ORDER.index(room)
  }
  assert named == set(MAY_NAME)


def test_nothing_private_is_imported_by_another_room():
  private = [
    f"{file}: {dotted}"
    for _, file, dotted, _ in imports()
    if any(w.startswith("_") and w != "_version" for w in dotted.split("."))
    and not dotted.endswith("__version__")
  ]
  assert not private


def test_nothing_private_of_another_room_is_reached_through_its_module():
  reached = []
  for room, file, tree in FILES:
    modules = {}
    for node in ast.walk(tree):
      if isinstance(node, ast.ImportFrom):
        for alias in node.names:
          there = room_of(f"{node.module}.{alias.name}")
          if there is not None and there != room:
            modules[alias.asname or alias.name] = there
      if isinstance(node, ast.Import):
        for alias in node.names:
          there = room_of(alias.name)
          if alias.asname and there is not None and there != room:
            modules[alias.asname] = there
    for node in ast.walk(tree):
      if (
        isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id in modules
        and node.attr.startswith("_")
        and not node.attr.startswith("__")
      ):
        reached.append(f"{file}:{node.lineno}: {node.value.id}.{node.attr}")
  assert not reached


def test_no_room_is_larger_than_its_share():
  sizes: dict[str, int] = {}
  for room, file, _ in FILES:
    sizes[room] = sizes.get(room, 0) + len((ROOT / file).read_text("utf-8").splitlines())
  total = sum(sizes.values())
  large = {room: f"{n} of {total} lines" for room, n in sizes.items() if n > SHARE * total}
  assert not large


# --- the page about them ------------------------------------------------------------------------

PAGE = (ROOT / "docs" / "architecture.md").read_text("utf-8")
NO_IDEA = {"_version", "t5"}  # a number, and the old name of a room


def test_the_page_names_every_room_in_the_order_of_imports():
  told = []
  for cell in re.findall(r"^\| (`.*?`) \|", PAGE, re.MULTILINE):
    told += [word.rstrip("/") for word in re.findall(r"`([\w/]+)`", cell)]
  rooms = [room for room in told if room in ORDER]
  assert sorted(rooms) == sorted(set(ORDER) - NO_IDEA), "name the new room on the page"
  known = {room for room, *_ in FILES}
  upward = [
    f"{room} stands above {there}"
    for room, _, _, there in imports()
    if {room, there} <= {*rooms} & known and rooms.index(there) > rooms.index(room)
  ]
  assert not upward


def test_the_page_is_short():
  assert len(PAGE.splitlines()) <= 200
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
  own = {"nm_sparsity_jax/text.py", "nm_sparsity_jax/plan/text.py"}  # the second: a fixed width
  pads = [
    f"{file}:{node.lineno}"
    for _, file, tree in FILES
    for node in ast.walk(tree)
    if isinstance(node, ast.Attribute) and node.attr in ("ljust", "rjust") and file not in own
  ]
  assert not pads, "use text.columns"


# Remarks are plain values, which a command and a notebook both print.
MAY_NAME_FLAGS = {"nm_sparsity_jax/scores/published.py", "nm_sparsity_jax/scores/submission.py"}


def flags_of_commands():
  """The flags that commands put in place of the names in errors of the library."""
  for room, _, tree in FILES:
    for node in tree.body if room == "commands" else ():
      if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "FLAGS":
        yield from re.findall(r"--[a-z-]+", ast.unparse(node))


def test_no_library_room_tells_a_notebook_of_a_flag():
  flags = {*flags_of_commands(), "--plot", "--png"}
  assert {"--rules", "--early", "--join", "--task"} < flags
  told = [
    f"{file}:{node.lineno}: {node.value}"
    for room, file, tree in FILES
    if room not in ("commands", "cli", "quickstart") and file not in MAY_NAME_FLAGS
    for node in ast.walk(tree)
    if isinstance(node, ast.Constant) and isinstance(node.value, str)
    if flags & {*re.findall(r"--[a-z-]+", node.value)} and "\n" not in node.value
  ]
  assert not told


def test_no_recipe_is_told_by_its_name_outside_their_room():
  """A recipe of a user's own has another name: ask what it does, or `isinstance`."""
  told = [
    f"{file}:{node.lineno}: {ast.unparse(node)}"
    for room, file, tree in FILES
    if room != "recipes"
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
  "code, dotted",
  [
    ("import nm_sparsity_jax.local.step", "local"),
    ("def f():\n  from nm_sparsity_jax import plan", "plan"),
    ("from nm_sparsity_jax.runs.files import x", "runs"),
    ("import t5x_tasks", "t5x_tasks"),
    ("import jax", None),
  ],
)
def test_imports_are_found_wherever_they_stand(code, dotted):
  assert [room_of(name) for name in modules_of(ast.parse(code))] == [dotted]
