"""The pages that people read, and the fenced blocks in them."""

import dataclasses
import re

from checkout import ROOT

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
