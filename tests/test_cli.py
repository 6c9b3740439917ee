"""The command line itself, and gin-path from every kind of installation."""

import importlib
import pathlib
import re
import resource
import shutil
import sys
import zipfile

import pytest
from checkout import ROOT, python

import nm_sparsity_jax
from nm_sparsity_jax import cli

DATA = ("gin_configs", "docs", "examples")  # what a wheel has inside the package
LOOSE = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE", "CITATION.cff")
HEAVY = ("jax", "flax", "optax", "numpy", "tensorflow", "seqio", "t5x", "gin", "matplotlib")


def test_every_help_is_there_in_a_second_and_imports_nothing_heavy():
  code = f"""
import contextlib, sys
from nm_sparsity_jax import cli
for name in ["", *cli.COMMANDS]:
  with contextlib.suppress(SystemExit):
    cli.main([*name.split(), "--help"])
print([m for m in {HEAVY!r} if m in sys.modules])
"""
  # Not by the clock, which other programs on this machine may hold up.
  before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
  out = python("-c", code)
  assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before < 1
  assert out.endswith("\n[]\n")
  for name in cli.COMMANDS:
    assert f"usage: nm-sparsity {name}" in out and f"\n  {name}  " in out


@pytest.mark.parametrize(
  "argv",
  [["plan", "--gin.X"], ["glue", "scores"], ["verify", "x", "--rules={ff: 1}"]],
)
def test_a_wrong_command_line_is_2(argv, capsys):
  with pytest.raises(SystemExit) as e:
    cli.main(argv)
  assert e.value.code == 2
  assert "error:" in capsys.readouterr().err


def test_a_flag_of_gin_is_a_binding():
  args = cli.parse(
    ["plan", "--gin_file=x", "--gin.PATTERN='1:8'", "--gin_bindings=X = 1", "--gin.a/b.c=x=y"]
  )[-1]
  assert args.gin_bindings == ["PATTERN = '1:8'", "X = 1", "a/b.c = x=y"]


@pytest.mark.parametrize(
  "error, said",
  [
    (ValueError("a\n  b"), "a b"),
    (KeyError("a"), "KeyError: 'a'"),
    (PermissionError(13, "Permission denied", "a"), "[Errno 13] Permission denied: 'a'"),
  ],
)
def test_an_error_is_one_line(error, said, monkeypatch, capsys):
  def run(args):
    raise error

  monkeypatch.setattr(importlib.import_module("nm_sparsity_jax.cli.verify"), "run", run)
  assert cli.main(["verify", "x"]) == 1
  out, err = capsys.readouterr()
  assert not out and err == f"nm-sparsity verify: {said}\n"
  with pytest.raises(type(error)):
    cli.main(["verify", "x", "--debug"])


@pytest.mark.parametrize(
  "argv, lost",
  [
    (["plan", "--gin_file=x"], "gin"),
    (["train", "--gin_file=x"], "tensorboard"),
  ],
)
def test_what_is_not_installed_is_said_at_the_door(argv, lost, monkeypatch, capsys):
  monkeypatch.setitem(sys.modules, lost, None)
  assert cli.main(argv) == 1
  err = capsys.readouterr().err
  assert f"{argv[0]}: not installed: {lost}. Run pip install -e '.[local]'" in err


# --- gin-path, from every kind of installation --------------------------------------------------


@pytest.fixture(scope="module")
def built(tmp_path_factory):
  """What the build backend makes of a copy of this checkout: kind -> file."""
  pytest.importorskip("setuptools", "77", reason="building needs setuptools >= 77")
  folder = tmp_path_factory.mktemp("build")
  for name in ("setup.py", "pyproject.toml", "MANIFEST.in", *LOOSE):
    shutil.copy(ROOT / name, folder)
  for name in ("nm_sparsity_jax", *DATA):
    shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
  code = (
    "import setuptools.build_meta as b; print(b.build_wheel('out')); print(b.build_sdist('out'))"
  )
  # Compiling takes half a minute: tests/test_packed_dot.py does it.
  python("-c", code, cwd=folder, NM_SPARSITY_KERNELS="0")
  return {path.suffix: path for path in (folder / "out").iterdir()}


def gin_path_of(site):
  code = f"""
import site, sys
site.addsitedir({str(site)!r})
from nm_sparsity_jax import cli
sys.exit(cli.main(['gin-path']))
"""
  # Not what tests run in.
  folder = pathlib.Path(python("-S", "-c", code, cwd=site, PYTHONPATH="").strip())
  for name in ("gin_configs/runs/t5x_finetune.gin", "CITATION.cff", "docs/sweep.md"):
    assert (folder / name).is_file()
  return folder


def test_a_wheel_has_every_file_that_the_package_names(built, tmp_path):
  site = tmp_path / "site"
  inside = site / "nm_sparsity_jax"
  python("-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", site, built[".whl"])
  assert gin_path_of(site) == inside
  assert "nm_sparsity_jax.cli" in (site / "bin/nm-sparsity").read_text()
  assert not [name for name in LOOSE if not (inside / name).is_file()]
  for folder in (*DATA, "nm_sparsity_jax"):
    for path in (ROOT / folder).rglob("*"):
      name = path.relative_to(ROOT / "nm_sparsity_jax" if folder not in DATA else ROOT)
      if path.suffix in (".gin", ".md", ".toml", ".json", ".jinja", ".css", ".typed"):
        assert (inside / name).read_bytes() == path.read_bytes(), path


def test_a_package_index_shows_a_page_without_dead_links(built):
  with zipfile.ZipFile(built[".whl"]) as wheel:
    (name,) = [n for n in wheel.namelist() if n.endswith(".dist-info/METADATA")]
    page = wheel.read(name).decode()
  assert f"\nVersion: {nm_sparsity_jax.__version__}\n" in page
  assert "# nm-sparsity-jax" in page and not re.findall(r"\]\((?!https://)", page)


def test_gin_path_of_an_sdist(built, tmp_path):
  shutil.unpack_archive(built[".gz"], tmp_path, "gztar", filter="data")
  (unpacked,) = tmp_path.glob("nm_sparsity_jax-*")
  assert gin_path_of(unpacked) == unpacked
