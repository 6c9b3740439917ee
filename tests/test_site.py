"""The site of README.md and docs/: it builds without a warning, is whole, and fetches nothing.

MkDocs checks links and anchors: a dead one is a warning, and warnings are errors (mkdocs.yml).
"""

import os
import re
import subprocess
import sys

import pages
import pytest
from checkout import ROOT

import nm_sparsity_jax as nms

for name in ("mkdocs", "material", "mkdocstrings"):
  pytest.importorskip(name, reason="the site needs pip install -e '.[dev]'")


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


def test_every_page_is_there(site):
  want = {p.relative_to(ROOT).with_suffix(".html") for p in pages.PAGES}
  want = {p.with_name("index.html") if p.name == "README.html" else p for p in want}
  assert {f.relative_to(site) for f in site.rglob("*.html") if f.name != "404.html"} == want


def test_nothing_is_fetched_from_outside(site):
  for file in site.rglob("*.html"):
    tags = re.findall(r"<(?!a\b)\w+[^>]*\b(?:src|href|data)=\"(.*?)\"", file.read_text("utf-8"))
    assert tags and not [t for t in tags if "//" in t], file
  for style in site.rglob("*.css"):
    assert not re.findall(r"url\(\s*[\"']?(?:https?:)?//", style.read_text("utf-8")), style


def test_every_public_name_has_an_entry(site):
  text = "".join(f.read_text("utf-8") for f in site.glob("docs/api/*.html"))
  ids = set(re.findall(r'id="([\w.]+)"', text))
  assert {f"nm_sparsity_jax.{dotted}" for dotted in nms._HOME.values()} <= ids
