"""Lays the site out as the repository is, so that every relative link holds in both.

    README.md, docs/, gin_configs/README.md, ... -> pages under the same paths
    what a page links to beside them (code, pictures, a licence) -> copied under the same path

MkDocs knows one folder of pages; README.md and others live outside it, and are not kept twice.
"""

import pathlib
import re

from mkdocs.structure.files import File

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGES = (
  "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "gin_configs/README.md",
  "examples/own_workload/README.md", "benchmarks/STUDY.md",
)  # fmt: skip
STYLE = "docs/site.css"
_LINK = re.compile(r"\]\(([^)#\s:]+)[^)\s]*\)")


def on_files(files, *, config):
  """Moves the pages of docs/ below docs/, and adds the others and what they link to."""
  for file in [f for f in files if f.src_dir == config.docs_dir]:
    files.remove(file)
  pages = {*PAGES, *(str(p.relative_to(ROOT)) for p in (ROOT / "docs").rglob("*.md"))}
  linked = {
    (ROOT / page).parent.joinpath(target).resolve()
    for page in pages
    for target in _LINK.findall((ROOT / page).read_text("utf-8"))
  }
  others = {str(p.relative_to(ROOT)) for p in linked if p.is_file() and p.is_relative_to(ROOT)}
  for name in sorted({*pages, *others, STYLE}):
    files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
  return files
