"""nm-sparsity doctor, against invented environments and this one."""

import importlib.metadata
import json
import pathlib
import re
import runpy
import subprocess
import sys
import types

import pytest

from nm_sparsity_jax import cli
from nm_sparsity_jax.cli import environment as env
from nm_sparsity_jax.core import installed

ROOT = pathlib.Path(__file__).resolve().parents[1]
GOOD = {
  "nm-sparsity-jax": "0.1.0", "jax": "0.10.2", "jaxlib": "0.10.2", "libtpu": "0.0.42.1",
  "seqio": "0.0.20.0", "tensorflow": "2.21.0",
}  # fmt: skip
REQUIRES = {
  "nm-sparsity-jax": [
    "jax>=0.10.2", 'seqio>=0.0.20; extra == "t5x"', 'tensorflow>=2.21; extra == "t5x"',
    'rich; extra == "local"',
  ],
  "jax": ['jaxlib<=0.10.2,>=0.10.2; extra == "tpu"', 'libtpu==0.0.42.*; extra == "tpu"'],
}  # fmt: skip


@pytest.fixture
def environment(monkeypatch, tmp_path):
  """Makes an environment with these versions, and with T5X's three from these commits."""

  def make(changed=(), commits=env.UNPUBLISHED):
    versions = {name: v for name, v in {**GOOD, **dict(changed)}.items() if v}
    urls = {name: json.dumps({"vcs_info": {"commit_id": c}}) for name, c in commits.items()}
    distribution = lambda name: types.SimpleNamespace(read_text=lambda _: urls.get(name))
    monkeypatch.setattr(installed, "version", versions.get)
    monkeypatch.setattr(installed, "requires", lambda name: REQUIRES.get(name, []))
    monkeypatch.setattr(importlib.metadata, "distribution", distribution)
    folders = {"nm_sparsity_jax", *commits}
    monkeypatch.setattr(env, "folder_of", lambda m: tmp_path / m / m if m in folders else None)
    (tmp_path / "t5x/t5x/configs/runs").mkdir(parents=True, exist_ok=True)
    (tmp_path / "t5x/t5x/configs/runs/finetune.gin").touch()
    return tmp_path

  kernels = types.SimpleNamespace(nm_sparsity_isa=lambda _: b"avx2")
  monkeypatch.setattr(installed, "kernels", lambda: (kernels, ""))
  return make


def of_status(status, purpose):
  return {f.name: f for f in env.examine(purpose) if f.status == status}


@pytest.mark.parametrize(
  "changed, purpose, name, remedy",
  [
    pytest.param({}, "local", "rich", "[local]", id="missing"),
    pytest.param({"jax": None}, "core", "jax", "pip install", id="missing from the core"),
    pytest.param({"jax": "0.9.9"}, "core", "jax", "pip install", id="too old"),
    pytest.param({"nm-sparsity-jax": None}, "core", "nm-sparsity-jax", "pip", id="a folder"),
    pytest.param({"libtpu": None}, "tpu", "libtpu", "jax[tpu]==0.10.2", id="no libtpu"),
    pytest.param({"libtpu": "0.0.41"}, "tpu", "libtpu", "jax[tpu]==0.10.2", id="of another jax"),
    pytest.param({"t5": "1"}, "core", "t5", "uninstall -y t5", id="t5"),
    pytest.param({"tensorflow-cpu": "1"}, "core", "tensorflow-cpu", "uninstall", id="two of one"),
  ],
)
def test_what_is_wrong_is_named_with_what_mends_it(changed, purpose, name, remedy, environment):
  environment(changed)
  found = of_status("bad", purpose)
  assert list(found) == [name] and remedy in found[name].remedy


def test_a_good_environment_has_nothing_to_mend(environment, monkeypatch):
  environment()
  for purpose in ("core", "t5x", "tpu"):
    assert not of_status("bad", purpose) and not of_status("warn", purpose)
  environment({"tensorflow": None, "tensorflow-cpu": "2.21"})
  assert not of_status("bad", "core")  # alone it writes over nothing
  monkeypatch.setattr(installed, "kernels", lambda: (None, "it is not there"))
  assert "g++" in of_status("warn", "core")["packed kernels"].remedy


@pytest.mark.parametrize("name", env.UNPUBLISHED)
def test_the_unpublished_three_of_t5x(name, environment):
  folder = environment(commits={n: c for n, c in env.UNPUBLISHED.items() if n != name})
  assert list(of_status("bad", "t5x")) == [name] and not of_status("bad", "core")
  environment(commits={**env.UNPUBLISHED, name: "f" * 40})
  assert "fffffff" in of_status("warn", "t5x")[name].text
  (folder / "t5x/t5x/configs/runs/finetune.gin").unlink()
  assert "without its gin files" in of_status("bad", "t5x")["t5x"].text


def test_documentation_installs_the_commits_that_were_tested():
  found = re.findall(r"github.com/\S+/(\w+)@([0-9a-f]{40})", (ROOT / "docs/t5x.md").read_text())
  assert dict(found) == env.UNPUBLISHED


def test_a_checkout_is_installed_from_where_it_lies(environment):
  folder = environment()
  assert env.install_command("t5x") == "pip install 'nm-sparsity-jax[t5x]'"
  (folder / "nm_sparsity_jax").mkdir()
  (folder / "nm_sparsity_jax/setup.py").touch()
  assert env.install_command("local") == f"pip install -e '.[local]' in {folder}/nm_sparsity_jax"
  assert "-c constraints-t5x.txt -e '.[t5x]'" in env.install_command("t5x")


def test_what_is_printed_and_the_exit_code(environment, capsys):
  environment({"jax": "0.11.0"})  # newer than T5X was tested with
  assert cli.main(["doctor", "--for", "t5x"]) == 0
  out = capsys.readouterr().out
  assert "\n!   jax " in out and out.endswith("Ready for t5x, but see 1 marked with !.\n")
  environment({"jax": None}, commits={})
  assert cli.main(["doctor", "--json"]) == 1
  report = json.loads(capsys.readouterr().out)
  assert not report["ok"] and report["for"] == "core"
  assert [f["name"] for f in report["findings"] if f["status"] == "bad"] == ["jax"]


def test_constraints_meet_the_floors_and_name_all_that_is_asked_for(monkeypatch):
  setup = {}
  setuptools = pytest.importorskip("setuptools")
  monkeypatch.setattr(setuptools, "setup", lambda **said: setup.update(said))
  runpy.run_path(str(ROOT / "setup.py"))
  tested = env.tested_versions()
  for line in [*setup["install_requires"], *setup["extras_require"]["t5x"]]:
    name, floor = re.fullmatch(r"([\w-]+)(.*)", line).groups()
    assert installed.meets(tested[name], floor), name


def test_this_environment_imports_nothing_heavy():
  code = """
import sys
from nm_sparsity_jax import environment as env
names = [f.name for f in env.examine('t5x')]
heavy = {'jax', 'tensorflow', 'seqio', 't5x', 'airio', 'jestimator', 'tensorflow_datasets'}
print(sorted(heavy & set(sys.modules)), 't5x' in names)
"""
  done = subprocess.run(
    [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
  )
  assert done.stdout.split() == ["[]", "True"]
