"""The site of README.md and docs/: it builds without a warning, is whole, and fetches nothing."""

import html.parser
import os
import re
import subprocess
import sys
import urllib.parse

import browser
import pages
import pytest

import nm_sparsity_jax as nms

for name in ("mkdocs", "material", "mkdocstrings"):
  pytest.importorskip(name, reason="the site needs pip install -e '.[docs]'")

ROOT = pages.ROOT


@pytest.fixture(scope="module")
def site(tmp_path_factory):
  """The folder of the built site. Not with --quiet, which keeps warnings from being counted."""
  folder = tmp_path_factory.mktemp("site")
  done = subprocess.run(
    [sys.executable, "-m", "mkdocs", "build", "--site-dir", folder],
    cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True,
    check=False,
  )  # fmt: skip
  assert not done.returncode and "WARNING" not in done.stderr, done.stderr
  return folder


class Html(html.parser.HTMLParser):
  """One built page: anchors, links of `a`, and what a browser fetches by itself."""

  def __init__(self, file):
    super().__init__()
    self.file, self.ids, self.links, self.fetched = file, set(), [], []
    self.feed(file.read_text("utf-8"))

  def handle_starttag(self, tag, attrs):
    attrs = dict(attrs)
    self.ids |= {attrs.get("id"), attrs.get("name")} - {None}
    if tag == "a" and attrs.get("href"):
      self.links.append(attrs["href"])
    elif tag != "a":
      self.fetched += [attrs[k] for k in ("src", "href", "srcset", "data") if attrs.get(k)]


@pytest.fixture(scope="module")
def built(site):
  # 404.html is served for any address, so its links start at the root.
  return {f: Html(f) for f in site.rglob("*.html") if f.name != "404.html"}


def test_every_page_is_there(site, built):
  want = {p.relative_to(ROOT).with_suffix(".html") for p in pages.PAGES}
  want = {p.with_name("index.html") if p.name == "README.html" else p for p in want}
  assert {f.relative_to(site) for f in built} == want


def test_links_lead_somewhere_on_the_site_too(site, built):
  for page in built.values():
    for link in page.links + page.fetched:
      path, _, anchor = urllib.parse.unquote(link).partition("#")
      if link.startswith("https://"):
        continue
      there = (page.file.parent / path).resolve() if path else page.file
      assert there.is_relative_to(site), (page.file, link)
      assert there.is_file() or (there / "index.html").is_file(), (page.file, link)
      if anchor and there in built:
        assert anchor in built[there].ids or anchor == "__tabbed", (page.file, link)


def test_nothing_is_fetched_from_outside(site, built):
  fetched = [link for page in built.values() for link in page.fetched]
  assert fetched and not [f for f in fetched if "//" in f]
  for style in site.rglob("*.css"):
    assert not re.findall(r"url\(\s*[\"']?(?:https?:)?//", style.read_text("utf-8")), style


def test_every_public_name_has_an_entry(built):
  ids = set().union(*(page.ids for page in built.values()))
  home = [f"{module}.{name}" for name, module in nms._HOME.items()] + [*nms._MODULES.values()]
  want = {f"nm_sparsity_jax.{dotted}" for dotted in home}
  assert want <= ids, want - ids


# One of each kind: the first one, words, tables, drawings, names with what they take.
KINDS = "index", "docs/faq", "docs/results", "docs/vision", "docs/api/training"


@pytest.mark.skipif(browser.path() is None, reason="no Chromium here: `make browser` installs it")
@pytest.mark.parametrize("few", [True, pytest.param(False, marks=pytest.mark.slow)], ids=repr)
def test_pages_are_readable_in_a_browser(few, site, built, tmp_path):
  """On a phone, where each is loaded, and in a window that grows from there."""
  with browser.page(tmp_path / "profile") as page:
    for file in [site / f"{name}.html" for name in KINDS] if few else sorted(built):
      page.open(file, 400)
      for width in (400, 1280):
        page.resize(width)
        assert page.ask("innerWidth") == width
        assert page.ask("document.documentElement.scrollWidth") <= width, file
        assert page.ask("document.querySelector('h1').getBoundingClientRect().width") > width / 4
    assert all(r.startswith(("file:", "data:", "blob:")) for r in page.requests), page.requests
    assert not page.messages


# Tables, and code of at most 100 columns, that a reader of a common window has to scroll.
CUT = """[
  ...document.querySelectorAll('.md-typeset table:not([class])'),
  ...[...document.querySelectorAll('.md-typeset pre > code')].filter(
    c => c.textContent.split('\\n').every(line => line.length <= 100))
].filter(e => e.scrollWidth > e.clientWidth + 1).map(e => e.textContent.slice(0, 80)).join('|')"""


@pytest.mark.skipif(browser.path() is None, reason="no Chromium here: `make browser` installs it")
def test_tables_and_lines_of_100_columns_fit_into_a_window(site, tmp_path):
  with browser.page(tmp_path / "profile") as page:
    for name in ("index", "docs/core", "docs/vision", "docs/tpu", "docs/results"):
      page.open(site / f"{name}.html", 1280)
      assert page.ask(CUT) == "", name
