"""What is missing or in conflict in this environment, and how to mend it.

    from nm_sparsity_jax import environment
    for finding in environment.examine("local"):
      print(finding.status, finding.name, finding.text, finding.remedy)

metadata of what is installed -> requirements of a purpose, T5X's sources, conflicts, gin files
                              -> Findings
jax in a process of its own   -> a Finding on its devices

Imports neither T5X nor TensorFlow.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import platform
import re
import subprocess
import sys
from collections.abc import Iterator

from nm_sparsity_jax.core import installed

# What somebody does, and so needs.
PURPOSES = ("core", "tasks", "local", "t5x", "tpu")
# Not in the package index, and the commits that were tested.
UNPUBLISHED = {
  "t5x": "cc342d419ec3e3e9c4bf1df33c82330cafdc1e16",
  "airio": "69897df7d9a427b947a9f7bb4164c7782b43e601",
  "jestimator": "326824a477feef6d92e6f44175000907a72899ca",
}
# package -> (what is wrong where it is installed, what mends that)
_CONFLICTS = {
  "tensorflow-cpu": (
    "writes the same files as tensorflow, and the last one wins",
    "pip uninstall -y tensorflow-cpu tensorflow && pip install tensorflow",
  ),
  "t5": (
    "replaces seqio and tensorflow-datasets by nightlies",
    "pip uninstall -y t5 seqio-nightly tfds-nightly; then install seqio and tensorflow-datasets "
    "again",
  ),
  "seqio-nightly": (
    "stands in for seqio",
    "pip uninstall -y seqio-nightly seqio && pip install seqio",
  ),
  "tfds-nightly": (
    "stands in for tensorflow-datasets",
    "pip uninstall -y tfds-nightly tensorflow-datasets && pip install tensorflow-datasets",
  ),
}
# Asked in a process of its own: on one host of several, jax waits for the others.
_LIST_DEVICES = """
import json, jax
print(json.dumps([jax.process_count(), [(d.platform, d.device_kind) for d in jax.devices()]]))
"""
_PATIENCE = 120  # seconds; a TPU takes some tens


@dataclasses.dataclass(frozen=True)
class Finding:
  """One thing that was looked at.

  Attributes:
    name: of a package, or of what else it is about.
    status: 'ok'; 'bad', which must be mended; or 'warn': not what was tested, or slower.
    text: what was found.
    remedy: what mends it, '' where nothing needs it.
  """

  name: str
  status: str
  text: str
  remedy: str = ""


def default_purpose() -> str:
  """Returns 't5x' where T5X is found, else 'core'."""
  return "t5x" if folder_of("t5x") else "core"


def is_ready_for(purpose: str) -> bool:
  """Returns whether nothing that a purpose needs is missing.

  Args:
    purpose: one of `PURPOSES`.
  """
  return all(finding.status != "bad" for finding in examine(purpose))


def install_command(purpose: str) -> str:
  """Returns the command that installs what a purpose needs, from a checkout where this is one.

  Args:
    purpose: one of `PURPOSES`.
  """
  extra = "" if purpose == "core" else f"[{purpose}]"
  package = folder_of("nm_sparsity_jax")
  if package is None or not (package.parent / "setup.py").is_file():
    return f"pip install '{installed.NAME}{extra}'"
  constraints = "-c constraints-t5x.txt " if purpose == "t5x" else ""
  return f"pip install {constraints}-e '.{extra}' in {package.parent}"


def examine(purpose: str) -> Iterator[Finding]:
  """Yields what it finds of Python, packages, conflicts, kernels and gin files.

  Args:
    purpose: what must be there, one of `PURPOSES`.
  """
  yield Finding("python", "ok", f"{platform.python_version()} ({sys.executable})")
  yield _package()
  yield from _requirements(purpose)
  if purpose == "t5x":
    yield from map(_unpublished, UNPUBLISHED)
  if purpose == "tpu":
    yield from _tpu()
  for name, (what, remedy) in _CONFLICTS.items():
    # Without tensorflow itself, tensorflow-cpu writes over nothing.
    if installed.version(name) and (name != "tensorflow-cpu" or installed.version("tensorflow")):
      yield Finding(name, "bad", what, remedy)
  yield _kernels()
  yield _gin_files()


def _package() -> Finding:
  have = installed.version(installed.NAME)
  if have is None:
    text = "runs from a folder, but is not installed"
    return Finding(installed.NAME, "bad", text, install_command("core"))
  is_editable = _origin(installed.NAME).get("dir_info", {}).get("editable")
  how = "editable, " if is_editable else ""
  return Finding(installed.NAME, "ok", f"{have} ({how}{folder_of('nm_sparsity_jax')})")


def _requirements(purpose: str) -> Iterator[Finding]:
  # The metadata has what setup.py asks for: floors are stated there only.
  from packaging.requirements import Requirement

  required = [Requirement(line) for line in installed.requires(installed.NAME)]
  wanted = {
    r.name: str(r.specifier)
    for r in required
    if r.marker is None or r.marker.evaluate({"extra": purpose})
  }
  tested = tested_versions() if purpose == "t5x" else {}
  for name in wanted | tested:
    have, floor = installed.version(name), wanted.get(name, "")
    if have is None and name in wanted:
      yield Finding(name, "bad", "is not installed", install_command(purpose))
    elif have and not installed.meets(have, floor):
      yield Finding(name, "bad", f"{have}, but {floor} is needed", f"pip install '{name}{floor}'")
    elif have and not installed.meets(have, f"=={tested[name]}" if name in tested else ""):
      text = f"{have}; T5X was tested with {tested[name]}"
      yield Finding(name, "warn", text, f"if T5X fails: pip install {name}=={tested[name]}")
    elif have:
      yield Finding(name, "ok", have)


def tested_versions() -> dict[str, str]:
  """Reads what T5X was tested with: constraints-t5x.txt, which lies beside the gin files."""
  from nm_sparsity_jax.integrations import gin_files  # imports gin

  text = (gin_files.folder() / "constraints-t5x.txt").read_text()
  return dict(re.findall(r"^([\w.-]+)==(\S+)$", text, re.MULTILINE))


def _tpu() -> Iterator[Finding]:
  # jax says which jaxlib and libtpu it was released with.
  jax, needed = installed.version("jax"), installed.required_for("jax", "tpu")
  for name in ("jaxlib", "libtpu"):
    have, wanted = installed.version(name), needed.get(name, "")
    if have is not None and installed.meets(have, wanted):
      yield Finding(name, "ok", have)
    else:
      text = f"{have or 'is not installed'}; jax {jax} needs {wanted}"
      yield Finding(name, "bad", text, f"pip install 'jax[tpu]=={jax}'")


def folder_of(module: str) -> pathlib.Path | None:
  """Returns the folder of a package without importing it, None where there is none.

  Args:
    module: such as 't5x'.
  """
  spec = importlib.util.find_spec(module)
  folders = spec.submodule_search_locations if spec else None
  return pathlib.Path(folders[0]) if folders else None


def _origin(name: str) -> dict:
  # pip's note on where a distribution comes from (PEP 610).
  try:
    text = importlib.metadata.distribution(name).read_text("direct_url.json")
  except importlib.metadata.PackageNotFoundError:
    return {}
  return json.loads(text or "{}")


def _unpublished(name: str) -> Finding:
  folder, docs = folder_of(name), "install it from its source: docs/t5x.md"
  if folder is None:
    return Finding(name, "bad", "is not installed, and not on PyPI", docs)
  if name == "t5x" and not (folder / "configs" / "runs" / "finetune.gin").is_file():
    return Finding(name, "bad", f"{folder}, without its gin files", docs)
  commit, tested = _origin(name).get("vcs_info", {}).get("commit_id", "unknown"), UNPUBLISHED[name]
  if commit == tested:
    return Finding(name, "ok", f"commit {commit[:7]} ({folder})")
  return Finding(name, "warn", f"commit {commit[:7]}; tested: {tested[:7]} ({folder})", docs)


def _kernels() -> Finding:
  # Without the kernels of packed weights XLA multiplies, more slowly.
  library, why = installed.kernels()
  if library is None:
    remedy = f"where g++ is, install this package again: {install_command('core')}"
    return Finding("packed kernels", "warn", why, remedy)
  return Finding("packed kernels", "ok", library.nm_sparsity_isa(0).decode())


def _gin_files() -> Finding:
  from nm_sparsity_jax.integrations import gin_files  # imports gin

  try:
    folder = gin_files.folder()
  except FileNotFoundError as e:
    return Finding("gin_configs", "bad", "are missing", str(e).partition(". ")[2])
  number = len(list((folder / "gin_configs").rglob("*.gin")))
  return Finding("gin_configs", "ok", f"{number} files; --gin_search_paths={folder}")


def devices() -> Finding:
  """Starts jax in a process that may hang, and judges the devices that it finds."""
  command = [sys.executable, "-c", _LIST_DEVICES]
  remedy = "pip install 'jax[tpu]' on a TPU VM, 'jax[cuda13]' for GPUs; end what holds the devices"
  try:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE, check=False)
  except subprocess.TimeoutExpired:
    text = f"jax did not answer in {_PATIENCE} seconds"
    return Finding("devices", "warn", text, "of several hosts, run this on all at once")
  if done.returncode:
    return Finding("devices", "bad", done.stderr.strip().rpartition("\n")[2], remedy)
  hosts, found = json.loads(done.stdout.splitlines()[-1])
  text = f"{len(found)} x {', '.join(sorted({kind for _, kind in found}))}"
  text += f", on {hosts} hosts" if hosts > 1 else ""
  if asked := os.environ.get("JAX_PLATFORMS"):
    return Finding("devices", "ok", f"{text} (JAX_PLATFORMS={asked})")
  if all(platform == "cpu" for platform, _ in found):
    return Finding("devices", "warn", f"{text}: no accelerator", remedy)
  return Finding("devices", "ok", text)
