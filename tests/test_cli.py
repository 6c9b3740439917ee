"""The command line itself, and gin-path from every kind of installation."""

import argparse
import email
import importlib
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time
import zipfile

import pytest

import nm_sparsity_jax
from nm_sparsity_jax import cli
from nm_sparsity_jax.integrations.gin_files import folders

ROOT = pathlib.Path(__file__).resolve().parents[1]
# Compiling takes half a minute: tests/test_packed_native.py does it.
QUICK = os.environ | {"NM_SPARSITY_KERNELS": "0"}
DATA = ("gin_configs", "docs", "examples")  # what a wheel has inside the package
LOOSE = (
  "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE", "CITATION.cff", "constraints-t5x.txt",
  "constraints-kauldron.txt",
)  # fmt: skip
HEAVY = ("jax", "flax", "optax", "numpy", "tensorflow", "seqio", "t5x", "gin", "matplotlib")


def python(code, *path, cwd=None, flags=()):
  """Runs code in a new interpreter that sees `path` first."""
  env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}
  command = [sys.executable, *flags, "-c", code]
  return subprocess.run(command, env=env, cwd=cwd, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", ["", "glue", *cli.COMMANDS])
def test_help_is_quick_and_imports_nothing_heavy(name):
  argv = [*name.split(), "--help"]
  code = f"""
import sys
from nm_sparsity_jax import cli
try:
  cli.main({argv!r})
except SystemExit as e:
  print([m for m in {HEAVY!r} if m in sys.modules], e.code)
"""
  for _ in range(3):  # on a busy machine the first may wait
    begin = time.perf_counter()
    done = python(code, ROOT)
    if (spent := time.perf_counter() - begin) < 1:
      break
  assert done.stdout.splitlines()[-1] == "[] 0", done.stdout + done.stderr
  assert f"usage: nm-sparsity {name}".rstrip() in done.stdout
  assert spent < 1


@pytest.mark.parametrize(
  "name, kinds",
  [
    ("verify", ["a packed file", "file of timm's names", "a folder of Hugging Face's T5"]),
    ("finalize", ["but no packed file", "A folder of Hugging Face's T5 becomes another one"]),
  ],
)
def test_help_names_each_kind_that_is_taken(name, kinds, capsys):
  with pytest.raises(SystemExit):
    cli.main([name, "--help"])
  said = " ".join(capsys.readouterr().out.split())
  assert all(kind in said for kind in kinds)


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_each_command_is_a_module_that_is_there(name, capsys):
  module = importlib.import_module(f"nm_sparsity_jax.cli.{cli.COMMANDS[name][0]}")
  module.add_arguments(argparse.ArgumentParser())
  assert callable(module.run)
  with pytest.raises(SystemExit) as e:
    cli.main(["--help"])
  assert not e.value.code
  assert f"  {name}" in capsys.readouterr().out


@pytest.mark.parametrize(
  "argv",
  [["export"], ["plan", "--nope"], ["doctor", "--for", "x"], ["glue", "scores"], ["score"]],
)
def test_a_wrong_command_line_is_2(argv, capsys):
  with pytest.raises(SystemExit) as e:
    cli.main(argv)
  assert e.value.code == 2
  assert "error:" in capsys.readouterr().err


def test_no_command_is_2_and_lists_them(capsys):
  assert cli.main([]) == 2
  assert "gin-path" in capsys.readouterr().out
  assert cli.main(["glue"]) == 2
  out = capsys.readouterr().out
  assert "glue score" in out and "gin-path" not in out


def test_an_error_is_one_line_and_debug_shows_where(capsys):
  assert cli.main(["plan"]) == 1
  out, err = capsys.readouterr()
  assert not out and err.startswith("nm-sparsity plan: no --gin_file") and err.count("\n") == 1
  with pytest.raises(ValueError, match="no --gin_file"):
    cli.main(["plan", "--debug"])


def test_one_line_keeps_the_class_where_the_text_says_little():
  assert cli.one_line(ValueError("a\n  b")) == "a b"
  assert cli.one_line(KeyError("a")) == "KeyError: 'a'"
  assert cli.one_line(FileNotFoundError("no 'a'")) == "no 'a'"
  assert cli.one_line(ModuleNotFoundError("pip install a")) == "pip install a"
  assert cli.one_line(PermissionError(13, "Permission denied", "a")) == "a: Permission denied"
  assert cli.one_line(OSError(28, "No space left on device")) == "No space left on device"
  assert cli.one_line(FileNotFoundError()) == "FileNotFoundError"
  assert cli.one_line(StopIteration()) == "StopIteration"


def test_every_folder_of_gin_files_is_a_package():
  """gin looks on sys.path too, and trips over a folder that is no package (gin 0.5.0)."""
  folders = {path.parent for path in (ROOT / "gin_configs").rglob("*.gin")}
  assert folders and all((folder / "__init__.py").is_file() for folder in folders)


# --- gin-path -----------------------------------------------------------------------------------


def test_gin_path_of_this_checkout(capsys):
  assert cli.main(["gin-path"]) == 0
  folder = pathlib.Path(capsys.readouterr().out.strip())
  assert (folder / "gin_configs/runs/t5x_finetune.gin").is_file()
  assert folder == ROOT


def test_gin_path_says_what_is_wrong(monkeypatch, tmp_path, capsys):
  monkeypatch.setattr(folders.nm_sparsity_jax, "__file__", str(tmp_path / "a/__init__.py"))
  assert cli.main(["gin-path"]) == 1
  assert "no gin_configs/ in" in capsys.readouterr().err


def build(kind, folder, source):
  """Has the build backend make a kind of file of a checkout in `folder`; returns its name."""
  code = f"import setuptools.build_meta as b; print(b.build_{kind}({str(folder)!r}))"
  done = subprocess.run(
    [sys.executable, "-c", code],
    cwd=source,
    capture_output=True,
    text=True,
    env=QUICK,
    check=False,
  )
  assert not done.returncode, done.stderr[-2000:]
  return done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
  """What the build backend makes of this checkout: kind -> file; and the checkout's copy."""
  pytest.importorskip("setuptools", "77", reason="building needs setuptools >= 77")
  folder = tmp_path_factory.mktemp("build")
  source = folder / "source"
  source.mkdir()
  loose = ("setup.py", "pyproject.toml", "MANIFEST.in")
  for name in (*loose, *LOOSE):
    shutil.copy(ROOT / name, source)
  for name in ("nm_sparsity_jax", *DATA):
    shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
  files = {}
  for kind in ("wheel", "sdist", "editable"):
    name = build(kind, folder, source)
    files[kind] = folder / f"{kind}-{name}"
    (folder / name).rename(files[kind])
  return files, source


def gin_path_of(site):
  """`nm-sparsity gin-path` where `site` is a site directory, and the gin file is there."""
  code = f"""
import site, sys
site.addsitedir({str(site)!r})
from nm_sparsity_jax import cli
sys.exit(cli.main(['gin-path']))
"""
  done = python(code, cwd=site, flags=["-S"])  # not what these tests run in
  assert not done.returncode, done.stderr
  folder = pathlib.Path(done.stdout.strip())
  assert (folder / "gin_configs/runs/t5x_finetune.gin").is_file()
  assert (folder / "constraints-t5x.txt").is_file()
  assert (folder / "docs/sweep.md").is_file()
  assert (folder / "examples/sweep_mini_glue.toml").is_file()
  return folder


def install(wheel, where):
  named = wheel.with_name(wheel.name.split("-", 1)[1])
  shutil.copy(wheel, named)
  subprocess.run(
    [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", where,
     named], check=True, capture_output=True,
  )  # fmt: skip
  return where


def test_gin_path_of_a_wheel(built, tmp_path):
  site = install(built[0]["wheel"], tmp_path / "site")
  assert gin_path_of(site) == site / "nm_sparsity_jax"
  script = (site / "bin/nm-sparsity").read_text()
  assert "nm_sparsity_jax.cli" in script
  assert (site / "nm_sparsity_jax/runs/published.json").is_file()
  assert {file.name for file in (site / "nm_sparsity_jax/analysis/report").glob("page.*")} == {
    "page.py", "page.html.jinja", "page.css",
  }  # fmt: skip
  assert all((site / "nm_sparsity_jax/gin_configs" / p.relative_to(ROOT / "gin_configs")).is_file()
             for p in (ROOT / "gin_configs").rglob("*.gin"))  # fmt: skip
  assert {file.name for file in (site / "nm_sparsity_jax").glob("*.gin")} == {
    "finetune.gin", "pretrain.gin", "eval.gin", "infer.gin",
  }  # fmt: skip


def test_a_wheel_has_every_file_that_the_package_names(built, tmp_path):
  """Issue 13, point 14: help texts and errors name pages and examples; they are installed too."""
  inside = install(built[0]["wheel"], tmp_path / "site") / "nm_sparsity_jax"
  named = {
    name
    for folder in ("nm_sparsity_jax", "gin_configs", "t5x_tasks")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in (".py", ".gin", ".jinja")
    for name in re.findall(r"\b(?:docs|examples(?!/t5/))/[\w/]+\.\w+", path.read_text("utf-8"))
  }
  assert {"docs/sweep.md", "docs/t5x.md", "examples/sweep_mini_glue.toml"} <= named
  assert not [name for name in sorted(named) if not (inside / name).is_file()]
  for folder in DATA:  # and all of them, but for what makes the site
    for path in (ROOT / folder).rglob("*"):
      if path.is_file() and "__pycache__" not in path.parts and folder_of(path) != "docs/*.py":
        assert (inside / path.relative_to(ROOT)).read_bytes() == path.read_bytes(), path
  assert all((inside / name).is_file() for name in LOOSE)


def folder_of(path):
  return f"{path.relative_to(ROOT).parts[0]}/*{path.suffix}"


def test_a_package_index_shows_a_page_without_dead_links(built):
  """Issue 13, point 14: README's relative links lead nowhere on a package index."""
  with zipfile.ZipFile(built[0]["wheel"]) as wheel:
    (name,) = [n for n in wheel.namelist() if n.endswith(".dist-info/METADATA")]
    told = email.message_from_bytes(wheel.read(name))
  page = told.get_payload()
  assert isinstance(page, str) and page.startswith("# nm-sparsity-jax\n\nThe files that this page")
  assert re.findall(r"\]\((?!https://)", page) == []
  assert "`docs/core.md`" in page and "[SR-STE](https://arxiv.org" in page
  for file in re.findall(r"\((?:Picture: )?`([\w/]+\.\w+)`", page):
    assert (ROOT / file).is_file(), file
  assert told["Author"] == "nm-sparsity-jax authors" and told["License-Expression"] == "Apache-2.0"
  assert told["Project-URL"] == "Paper, https://arxiv.org/abs/2402.04744"
  assert told["Version"] == nm_sparsity_jax.__version__ == "0.1.0"
  extras = set(told.get_all("Provides-Extra") or ())
  assert extras == {
    "tasks",
    "local",
    "tracking",
    "t5x",
    "kauldron",
    "tpu",
    "vision",
    "vision-dev",
    "hf-dev",
    "docs",
    "dev",
  }
  for version in ("3.11", "3.12", "3.13"):
    assert f"Programming Language :: Python :: {version}" in told.get_all("Classifier")


def test_files_that_help_texts_name_are_found_from_anywhere(monkeypatch, tmp_path, capsys):
  """Issue 13, point 14: `sweep` on an example of the documentation, in an empty folder."""
  monkeypatch.chdir(tmp_path)
  example = "examples/sweep_mini_glue.toml"
  assert folders.find(example) == ROOT / example
  (tmp_path / "examples").mkdir()
  (tmp_path / example).write_text("out = 'mine'\n")
  assert folders.find(example) == pathlib.Path(example)  # yours comes first
  for missing in ("examples/nope.toml", "examples"):
    assert cli.main(["sweep", missing]) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "Errno" not in err
    assert f"no file '{missing}' here, in {tmp_path}, nor in {ROOT}" in err


def test_gin_path_of_an_editable_installation(built, tmp_path):
  assert gin_path_of(install(built[0]["editable"], tmp_path / "site")) == built[1]


def test_gin_path_of_an_sdist_unpacked_and_installed(built, tmp_path):
  shutil.unpack_archive(built[0]["sdist"], tmp_path, "gztar", filter="data")
  (unpacked,) = tmp_path.glob("nm_sparsity_jax-*")
  assert gin_path_of(unpacked) == unpacked
  wheel = tmp_path / build("wheel", tmp_path, unpacked)
  site = tmp_path / "site"
  wheel.rename(tmp_path / f"x-{wheel.name}")
  assert gin_path_of(install(tmp_path / f"x-{wheel.name}", site)) == site / "nm_sparsity_jax"
