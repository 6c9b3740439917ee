"""nm-sparsity doctor, against invented environments."""

import re
import types

import pytest
from checkout import ROOT

from nm_sparsity_jax import cli
from nm_sparsity_jax.cli import doctor
from nm_sparsity_jax.core import installed

GOOD = {
  "nm-sparsity-jax": "0.1.0", "jax": "0.10.2", "jaxlib": "0.10.2", "libtpu": "0.0.42.1",
  "seqio": "0.0.20.0", "tensorflow": "2.21.0", "rich": "14",
}  # fmt: skip
REQUIRES = {
  "nm-sparsity-jax": [
    "jax>=0.10.2", 'seqio>=0.0.20; extra == "t5x"', 'tensorflow>=2.21; extra == "t5x"',
    'rich; extra == "local"', 'nm-sparsity-jax[local]; extra == "t5x"',
  ],
  "jax": ['jaxlib<=0.10.2,>=0.10.2; extra == "tpu"', 'libtpu==0.0.42.*; extra == "tpu"'],
}  # fmt: skip


@pytest.fixture
def environment(monkeypatch, tmp_path):
  """Makes an environment with these versions, and with these of T5X's three."""

  def make(changed=(), three=doctor.UNPUBLISHED):
    versions = {name: v for name, v in {**GOOD, **dict(changed)}.items() if v}
    monkeypatch.setattr(installed, "version", versions.get)
    monkeypatch.setattr(installed, "requires", lambda name: REQUIRES.get(name, []))
    folders = {"nm_sparsity_jax", *three}
    monkeypatch.setattr(doctor, "folder_of", lambda m: tmp_path / m / m if m in folders else None)

  kernels = types.SimpleNamespace(nm_sparsity_isa=lambda _: b"avx2")
  monkeypatch.setattr(installed, "kernels", lambda: (kernels, ""))
  return make


def remedies(purpose):
  """What is to mend: name -> how."""
  return {f.name: f.remedy for f in doctor.examine(purpose) if f.status != "ok"}


@pytest.mark.parametrize(
  "changed, purpose, name, remedy",
  [
    pytest.param({"rich": None}, "local", "rich", "[local]", id="missing"),
    pytest.param({"rich": None}, "t5x", "rich", "[t5x]", id="missing, asked for by t5x's local"),
    pytest.param({"jax": "0.9.9"}, "core", "jax", "pip install", id="too old"),
    pytest.param({"libtpu": "0.0.41"}, "tpu", "libtpu", "jax[tpu]==0.10.2", id="of another jax"),
    pytest.param({"t5": "1"}, "core", "t5", "uninstall -y t5", id="t5"),
  ],
)
def test_what_is_wrong_is_named_with_what_mends_it(changed, purpose, name, remedy, environment):
  environment(changed)
  found = remedies(purpose)
  assert list(found) == [name] and remedy in found[name]


def test_a_good_environment_has_nothing_to_mend(environment, monkeypatch):
  environment()
  assert not any(map(remedies, ("core", "t5x", "tpu")))
  environment((), ("t5x", "jestimator"))
  assert {*remedies("t5x")} == {"airio"}
  monkeypatch.setattr(installed, "kernels", lambda: (None, "it is not there"))
  assert "g++" in remedies("core")["packed kernels"]


def test_documentation_installs_all_that_is_not_on_pypi():
  page = (ROOT / "docs/t5x.md").read_text()
  assert {*re.findall(r"github.com/\S+/(\w+)@[0-9a-f]{40}", page)} == {*doctor.UNPUBLISHED}


def test_what_is_printed_and_the_exit_code(environment, capsys):
  environment()
  assert cli.main(["doctor", "--for", "t5x"]) == 0
  assert capsys.readouterr().out.endswith("Ready for t5x.\n")
  environment({"jax": None}, three=())
  assert cli.main(["doctor"]) == 1
  said = capsys.readouterr().out
  assert re.search(r"^BAD +jax +is not installed$", said, re.MULTILINE)
  assert "jax: pip install 'nm-sparsity-jax'" in said
