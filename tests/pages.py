"""The pages that people read, and the fenced blocks in them."""

import dataclasses
import json
import re
from unittest import mock

import pytest
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


def run_notebook(path, run, capsys):
  """Runs each cell by run(code, names): what it prints is in the notebook, but for decimals.

  Returns its names, and how many figures it shows.
  """
  plt, drawn = pytest.importorskip("matplotlib.pyplot"), []
  plt.switch_backend("agg")
  show = lambda: drawn.append(plt.gcf()) or plt.close("all")
  names = {"__name__": "__main__"}
  without_decimals = lambda text: re.sub(r"\d+\.\d+", "x", text)
  with plt.rc_context(), mock.patch.object(plt, "show", show):
    for cell in json.loads(path.read_text("utf-8"))["cells"]:
      if cell["cell_type"] == "code":
        run("".join(cell["source"]), names)
        printed = "".join(t for out in cell["outputs"] for t in out.get("text", ()))
        said = capsys.readouterr().out
        assert without_decimals(said) == without_decimals(printed), said
  return names, len(drawn)
