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

import nm_sparsity_jax
from nm_sparsity_jax import cli
from nm_sparsity_jax.cli import environment as env
from nm_sparsity_jax.core import installed

GOOD = {
  "nm-sparsity-jax": "0.1.0", "jax": "0.10.2", "flax": "0.12.8", "seqio": "0.0.20",
  "tensorflow": "2.21.0", "tensorflow-datasets": "4.9.10", "importlib_resources": "7.1.0",
}  # fmt: skip
REQUIRES = [
  "jax>=0.10.2", "flax>=0.12.8", 'seqio>=0.0.20; extra == "t5x"',
  'tensorflow>=2.21; extra == "t5x"', 'tensorflow-datasets>=4.9.10; extra == "t5x"',
  'rich; extra == "local"',
]  # fmt: skip


ROOT = pathlib.Path(__file__).resolve().parents[1]


@pytest.fixture
def environment(monkeypatch, tmp_path):
  """Sets what is installed: distributions, and folders of modules."""

  def make(versions=None, modules=(), direct=None, of_jax=()):
    versions = GOOD if versions is None else versions

    class Fake:
      def __init__(self, name):
        self.name = name

      def read_text(self, file):
        assert file == "direct_url.json"
        return (direct or {}).get(self.name)

    def distribution(name):
      if name not in versions and name not in modules:
        raise importlib.metadata.PackageNotFoundError(name)
      return Fake(name)

    def version(name):
      if name not in versions:
        raise importlib.metadata.PackageNotFoundError(name)
      return versions[name]

    def requires(name):
      version(name)
      return of_jax if name == "jax" else REQUIRES

    kernels = types.SimpleNamespace(nm_sparsity_isa=lambda _: b"avx2")
    monkeypatch.setattr(installed, "kernels", lambda: (kernels, ""))
    folders = {"nm_sparsity_jax", *({"importlib_resources", *modules} & {*versions, *modules})}
    monkeypatch.setattr(installed.importlib.metadata, "version", version)
    monkeypatch.setattr(installed.importlib.metadata, "requires", requires)
    monkeypatch.setattr(installed.importlib.metadata, "distribution", distribution)
    monkeypatch.setattr(
      installed, "folder_of", lambda m: tmp_path / m / m if m in folders else None
    )

  for name in ("t5x", "airio", "jestimator"):
    runs = tmp_path / name / name / "configs/runs"
    runs.mkdir(parents=True)
    (runs / "finetune.gin").touch()
  make.folder = tmp_path
  return make


THREE = ("t5x", "airio", "jestimator")


def bad(purpose):
  return {f.name: f for f in env.examine(purpose) if f.status == "bad"}


def test_a_good_environment_has_nothing_to_mend(environment):
  environment(modules=THREE)
  assert not bad("core") and not bad("t5x")
  names = [f.name for f in env.examine("core")]
  assert "jax" in names and "seqio" not in names and "rich" not in names
  (rich,) = bad("local").values()
  assert rich.name == "rich" and "[local]" in rich.remedy


@pytest.mark.parametrize("lost", GOOD)
def test_each_missing_package_is_named_with_a_remedy(environment, lost):
  environment({k: v for k, v in GOOD.items() if k != lost}, modules=THREE)
  found = bad("t5x")
  assert list(found) == [lost]
  assert "pip install" in found[lost].remedy


def test_an_old_package_is_named_with_both_versions(environment):
  environment({**GOOD, "jax": "0.9.9"}, modules=THREE)
  found = bad("core")
  assert list(found) == ["jax"]
  assert "0.9.9" in found["jax"].text and ">=0.10.2" in found["jax"].text


OF_JAX = ['jaxlib<=0.10.2,>=0.10.2; extra == "tpu"', 'libtpu==0.0.42.*; extra == "tpu"', "numpy"]


@pytest.mark.parametrize(
  "have, wrong",
  [
    ({"jaxlib": "0.10.2", "libtpu": "0.0.42.1"}, []),
    ({"jaxlib": "0.10.2"}, ["libtpu"]),
    ({"jaxlib": "0.10.2", "libtpu": "0.0.41"}, ["libtpu"]),
    ({"jaxlib": "0.10.1", "libtpu": "0.0.42"}, ["jaxlib"]),
  ],
)
def test_libtpu_and_jax_that_go_together(environment, have, wrong):
  environment({**GOOD, **have}, of_jax=OF_JAX)
  found = bad("tpu")
  assert list(found) == wrong
  for finding in found.values():
    assert "jax 0.10.2 needs" in finding.text
    assert finding.remedy == "pip install 'jax[tpu]==0.10.2'"
  assert "libtpu" not in bad("core")


@pytest.mark.parametrize("name", ["t5", "tensorflow-cpu", "seqio-nightly", "tfds-nightly"])
def test_each_conflict_is_named(environment, name):
  environment({**GOOD, name: "1.0"}, modules=THREE)
  found = bad("core")
  assert list(found) == [name]
  assert f"uninstall -y {name}" in found[name].remedy


def test_tensorflow_cpu_alone_is_no_conflict(environment):
  versions = {k: v for k, v in GOOD.items() if k != "tensorflow"}
  environment({**versions, "tensorflow-cpu": "2.21"}, modules=THREE)
  assert "tensorflow-cpu" not in bad("core")


@pytest.mark.parametrize("lost", THREE)
def test_each_of_the_unpublished_three_is_asked_for(environment, lost):
  environment(modules=[name for name in THREE if name != lost])
  found = bad("t5x")
  assert list(found) == [lost] and "docs/t5x.md" in found[lost].remedy
  assert not bad("core")


def test_t5x_without_its_gin_files_is_named(environment):
  environment(modules=THREE)
  (environment.folder / "t5x/t5x/configs/runs/finetune.gin").unlink()
  assert "without its gin files" in bad("t5x")["t5x"].text


def test_the_commit_of_pip_and_of_a_checkout(environment):
  sha = "0123456789abcdef0123456789abcdef01234567"
  direct = {"t5x": json.dumps({"url": "x", "vcs_info": {"vcs": "git", "commit_id": sha}})}
  environment(modules=THREE, direct=direct)
  git = environment.folder / "airio/.git"
  (git / "refs/heads").mkdir(parents=True)
  (git / "HEAD").write_text("ref: refs/heads/main\n")
  (git / "packed-refs").write_text(f"# pack-refs\n{'f' * 40} refs/heads/main\n")
  texts = {f.name: f.text for f in env.examine("t5x")}
  assert texts["t5x"].startswith("commit 0123456; tested: cc342d4 ")
  assert texts["airio"].startswith("commit fffffff; ")
  assert texts["jestimator"].startswith("commit unknown; ")
  (git / "refs/heads/main").write_text("e" * 40 + "\n")
  assert "commit eeeeeee" in {f.name: f.text for f in env.examine("t5x")}["airio"]


def test_only_the_tested_commits_pass_without_a_warning(environment):
  urls = {
    name: json.dumps({"url": "x", "vcs_info": {"vcs": "git", "commit_id": sha}})
    for name, sha in env.UNPUBLISHED.items()
  }
  for other in ("", *THREE):
    changed = {other: urls["t5x" if other == "airio" else "airio"]} if other else {}
    environment(modules=THREE, direct={**urls, **changed})
    found = {f.name: f.status for f in env.examine("t5x")}
    assert {name: found[name] for name in THREE} == {
      name: "warn" if name == other else "ok" for name in THREE
    }
  docs = (ROOT / "docs/t5x.md").read_text()
  assert set(re.findall(r"github.com/\S+/(\w+)@([0-9a-f]{40})", docs)) == set(
    env.UNPUBLISHED.items()
  )


def test_what_t5x_was_not_tested_with_is_a_warning_for_t5x_alone(environment):
  other = {"jax": "0.11.0", "jaxlib": "0.11.0", "seqio": "0.0.20.0"}
  environment({**GOOD, **other}, modules=THREE)
  warned = lambda p: {f.name: f for f in env.examine(p) if f.status == "warn"}
  assert set(warned("t5x")) == {"jax", "jaxlib", *THREE} and not bad("t5x")
  jax = warned("t5x")["jax"]
  assert jax.text == "0.11.0; T5X was tested with 0.10.2" and "jax==0.10.2" in jax.remedy
  assert not warned("core")


def test_warnings_are_counted_and_are_no_failure(environment, capsys):
  environment({**GOOD, "jax": "0.11.0"}, modules=THREE)
  assert cli.main(["doctor", "--for", "t5x"]) == 0
  out = capsys.readouterr().out
  assert "\n!   jax " in out and out.endswith("Ready for t5x, but see 4 marked with !.\n")


def test_a_checkout_is_installed_from_where_it_lies(environment):
  environment({k: v for k, v in GOOD.items() if k not in ("jax", "seqio")}, modules=THREE)
  assert bad("t5x")["seqio"].remedy == "pip install 'nm-sparsity-jax[t5x]'"
  checkout = environment.folder / "nm_sparsity_jax"
  checkout.mkdir()
  (checkout / "setup.py").touch()
  remedy = f"pip install -c constraints-t5x.txt -e '.[t5x]' in {checkout}"
  assert bad("t5x")["seqio"].remedy == remedy
  assert bad("core")["jax"].remedy == f"pip install -e '.' in {checkout}"


def test_missing_kernels_are_a_warning_that_says_how_to_build_them(environment, monkeypatch):
  environment(modules=THREE)
  kernels = lambda: {f.name: f for f in env.examine("core")}["packed kernels"]
  assert kernels().status == "ok" and kernels().text == "avx2"
  path = str(environment.folder / installed.LIBRARY)
  monkeypatch.setattr(installed, "kernels", lambda: installed.load_kernels(path))
  monkeypatch.setattr(env.shutil, "which", lambda name: None)
  how = "in the checkout: pip install --force-reinstall --no-deps --no-cache-dir ."
  assert (kernels().status, kernels().remedy) == ("warn", f"install g++, then {how}")
  assert kernels().text.startswith("libnm_sparsity.so is not there: ")
  monkeypatch.setattr(env.shutil, "which", lambda name: "/usr/bin/g++")
  assert kernels().remedy == how
  checkout = environment.folder / "nm_sparsity_jax"
  checkout.mkdir()
  (checkout / "setup.py").touch()
  assert kernels().remedy == f"in {checkout}: pip install --no-deps -e ."


def test_the_last_line_names_what_else_is_ready(environment, capsys):
  environment(GOOD, of_jax=OF_JAX)
  assert cli.main(["doctor"]) == 0
  assert capsys.readouterr().out.endswith("\nReady for core. Ready for tasks as well.\n")
  assert cli.main(["doctor", "--for", "core"]) == 0
  assert capsys.readouterr().out.endswith("\nReady for core.\n")


def test_constraints_meet_the_floors_and_name_only_what_is_asked_for(monkeypatch):
  setup = {}
  setuptools = pytest.importorskip("setuptools")
  monkeypatch.setattr(setuptools, "setup", lambda **said: setup.update(said))
  runpy.run_path(str(ROOT / "setup.py"))
  floors = {}
  for line in [*setup["install_requires"], *setup["extras_require"]["t5x"]]:
    name, floor = re.fullmatch(r"([\w-]+)(.*)", line).groups()
    floors[name] = floor
  lines = (ROOT / "constraints-t5x.txt").read_text().splitlines()
  tested = env.tested_versions()
  assert len(tested) == sum(not line.startswith("#") for line in lines)
  assert set(floors) <= set(tested)
  assert all(installed.meets(tested[name], floor) for name, floor in floors.items())

  def needs(name):  # what an installed package asks for, extras apart
    lines = [r for r in importlib.metadata.requires(name) or [] if "extra ==" not in r]
    return {re.match(r"[\w.-]+", r)[0].lower().replace("_", "-") for r in lines}

  try:
    brought = set().union(*map(needs, floors))
  except importlib.metadata.PackageNotFoundError as e:
    pytest.skip(f"{e.name} is not here, so what it brings along is unknown")
  assert {name.lower() for name in set(tested) - set(floors)} <= brought


def test_versions_compare_as_numbers():
  assert installed.meets("0.10.2", ">=0.9") and not installed.meets("0.9", ">=0.10")
  assert installed.meets("2", ">=2.0") and installed.meets("2.1rc1", ">=2.1")
  assert installed.meets("1.0", "") and installed.meets("unknown", "")
  assert not installed.meets("3.0", ">=2,<3") and not installed.meets("unknown", ">=1")
  assert env.same_release("0.0.20.0", "0.0.20") and env.same_release("1.20rc1", "1.20")
  assert not env.same_release("1.2", "1.20") and env.same_release("unknown", "unknown")


def test_without_packaging_nothing_is_compared_and_packaging_is_asked_for(environment, monkeypatch):
  environment({**GOOD, "jax": "0.9.9"}, modules=THREE)
  monkeypatch.setitem(sys.modules, "packaging.requirements", None)
  (found,) = bad("core").values()
  assert found.name == "packaging" and "pip install" in found.remedy


def test_versions_are_those_of_what_is_there_in_the_order_of_the_names(environment):
  environment({"jax": "0.10.2", "flax": "0.12.8"})
  found = installed.versions("flax", "Python", "optax", "nm-sparsity-jax", "jax")
  assert list(found) == ["flax", "Python", "nm-sparsity-jax", "jax"]
  assert found["jax"] == "0.10.2" and found["nm-sparsity-jax"] == nm_sparsity_jax.__version__


def test_exit_codes_and_json(environment, capsys):
  environment(modules=THREE)
  assert cli.main(["doctor"]) == 0  # T5X is there, so it is looked at
  assert "Ready for t5x, but see 3 marked with !." in capsys.readouterr().out
  environment({k: v for k, v in GOOD.items() if k != "jax"})
  assert cli.main(["doctor", "--json"]) == 1
  report = json.loads(capsys.readouterr().out)
  assert not report["ok"] and report["for"] == "core"
  assert [f["name"] for f in report["findings"] if f["status"] == "bad"] == ["jax"]


def test_devices_are_listed_on_request(environment, capsys):
  environment()
  assert cli.main(["doctor", "--for", "core"]) == 0
  assert "ok  devices" not in capsys.readouterr().out
  assert cli.main(["doctor", "--for", "core", "--devices"]) == 0
  out = capsys.readouterr().out  # it was asked for, so it is no cause for a warning
  assert "\nok  devices " in out and "1 x cpu (JAX_PLATFORMS=cpu)" in out


@pytest.mark.parametrize(
  "said, libtpu, status, text, remedy",
  [
    ('[1, [["cpu", "cpu"]]]', None, "warn", "libtpu is not installed", "pip install 'jax[tpu]'"),
    ('[1, [["cpu", "cpu"]]]', "0.0.42", "warn", "no TPU, though", "another process"),
    ('[2, [["tpu", "TPU v4"], ["tpu", "TPU v4"]]]', "0.0.42", "ok", "2 x TPU v4, on 2 hosts", ""),
    ('[1, [["gpu", "H200"]]]', None, "ok", "1 x H200", ""),
  ],
)
def test_devices_are_judged(environment, monkeypatch, said, libtpu, status, text, remedy):
  environment({**GOOD, **({"libtpu": libtpu} if libtpu else {})})
  monkeypatch.delenv("JAX_PLATFORMS")
  monkeypatch.setattr(env, "_LIST_DEVICES", f"print('noise'); print({said!r})")
  found = env.devices()
  assert found.status == status and text in found.text
  assert remedy in found.remedy and bool(remedy) == bool(found.remedy)


def test_devices_that_hang_or_fail_are_told_apart(environment, monkeypatch):
  environment()
  monkeypatch.setattr(env, "_LIST_DEVICES", "import time; time.sleep(60)")
  monkeypatch.setattr(env, "_PATIENCE", 0.2)
  found = env.devices()
  assert found.status == "warn" and "--worker=all" in found.remedy
  monkeypatch.setattr(env, "_LIST_DEVICES", "raise RuntimeError('no such backend')")
  monkeypatch.setattr(env, "_PATIENCE", 60)
  found = env.devices()
  assert found.status == "bad" and found.text == "RuntimeError: no such backend"


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
