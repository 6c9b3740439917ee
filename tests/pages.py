"""The pages that people read, and what is in them: fenced blocks, links, headings."""

import dataclasses
import json
import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parents[1]
NOTEBOOK = ROOT / "examples/quickstart.ipynb"
PAGES = sorted(
  [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
  + [*ROOT.glob("docs/**/*.md"), *ROOT.glob("gin_configs/**/*.md")]
  + [*ROOT.glob("examples/**/*.md"), *ROOT.glob("benchmarks/*.md")]
)
_FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Block:
  """A fenced block; `output` is the block without a language that follows it, if one does."""

  page: str
  line: int
  language: str
  code: str
  output: str | None

  def __str__(self):
    return f"{self.page}:{self.line}"


def blocks() -> list[Block]:
  """All fenced blocks, in order."""
  out = []
  for page in PAGES:
    text = page.read_text("utf-8")
    assert text.count("```") == 2 * len(_FENCE.findall(text)), f"{page}: a fence does not close"
    for found in _FENCE.finditer(text):
      line = text[: found.start()].count("\n") + 1
      output = re.match(r"\s*```\n(.*?)^```$", text[found.end() :], re.DOTALL | re.MULTILINE)
      out.append(Block(str(page.relative_to(ROOT)), line, found[1], found[2], output and output[1]))
  return out


def _text(page: pathlib.Path) -> str:
  text = page.read_text("utf-8")
  if page.suffix == ".ipynb":
    cells = json.loads(text)["cells"]
    return "".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")
  return _FENCE.sub("", text)


def links(page: pathlib.Path) -> list[str]:
  """Targets of links and pictures, as written."""
  text = re.sub(r"`[^`\n]+`", "", _text(page))
  targets = re.findall(r"\]\(([^)\s]+)\)", text)
  assert len(targets) == text.count("]("), f"{page}: a broken link"
  return targets


def anchors(page: pathlib.Path) -> set[str]:
  """Anchors of the headings, as code hosts make them."""
  titles = re.findall(r"^#+ (.+)$", _text(page), re.MULTILINE)
  return {re.sub(r"[^\w\s-]", "", title).strip().lower().replace(" ", "-") for title in titles}
