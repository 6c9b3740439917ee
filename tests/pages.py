"""The pages that people read, and what is in them: fenced blocks, links, headings."""

import dataclasses
import itertools
import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGES = sorted(
  [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
  + [*ROOT.glob("docs/**/*.md"), *ROOT.glob("gin_configs/**/*.md")]
  + [*ROOT.glob("examples/**/*.md"), *ROOT.glob("benchmarks/*.md")]
)
_FENCE = re.compile(r"^( *)```([^\n]*)\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)


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
    found = list(_FENCE.finditer(text))
    assert text.count("\n```") + text.startswith("```") == 2 * len(found), f"{page}: a lost fence"
    for this, following in itertools.pairwise([*found, None]):
      follows = following and not text[this.end() : following.start()].strip() and not following[2]
      out.append(
        Block(
          str(page.relative_to(ROOT)), text[: this.start()].count("\n") + 1, this[2], this[3],
          following[3] if following and follows else None,
        )
      )  # fmt: skip
  return out


def prose(page: pathlib.Path) -> str:
  """The text without code."""
  return re.sub(r"`[^`\n]+`", "`code`", _FENCE.sub("", page.read_text("utf-8")))


def links(page: pathlib.Path) -> list[str]:
  """Targets of links and pictures, as written."""
  text = prose(page)
  targets = re.findall(r"\]\(([^)\s]+)\)", text)
  assert len(targets) == text.count("]("), f"{page}: a link that is none"
  return targets


def anchors(page: pathlib.Path) -> set[str]:
  """Anchors of the headings, as code hosts make them."""
  text = _FENCE.sub("", page.read_text("utf-8"))
  titles = [
    re.sub(r"[^\w\s-]", "", t).lower() for t in re.findall(r"^#+ (.+)$", text, re.MULTILINE)
  ]
  return {re.sub(r"\s", "-", title.strip()) for title in titles}
