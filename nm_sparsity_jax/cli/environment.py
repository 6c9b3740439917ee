"""What is missing or in conflict in this environment, and how to mend it.

    from nm_sparsity_jax import environment
    for finding in environment.examine("local"):
      print(finding.status, finding.name, finding.text, finding.remedy)

It reads metadata of what is installed, and imports neither jax, T5X nor TensorFlow.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import json
import pathlib
import platform
import re
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
# Packages that write the same files as others: package -> those others.
_CONFLICTS = {
  "tensorflow-cpu": ("tensorflow",),
  "t5": ("seqio", "tensorflow-datasets"),
  "seqio-nightly": ("seqio",),
  "tfds-nightly": ("tensorflow-datasets",),
}


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
  have = installed.version(installed.NAME)
  if have is None:
    text = "runs from a folder, but is not installed"
    yield Finding(installed.NAME, "bad", text, install_command("core"))
  else:
    yield Finding(installed.NAME, "ok", f"{have} ({folder_of('nm_sparsity_jax')})")
  yield from _required(installed.NAME, purpose, install_command(purpose))
  if purpose == "t5x":
    yield from map(_unpublished, UNPUBLISHED)
    for name, tested in tested_versions().items():
      have = installed.version(name)
      if have and not installed.meets(have, f"=={tested}"):
        text, remedy = f"{have}; T5X was tested with {tested}", f"pip install {name}=={tested}"
        yield Finding(name, "warn", text, f"if T5X fails: {remedy}")
  if purpose == "tpu":  # jax says which jaxlib and libtpu it was released with
    yield from _required("jax", "tpu", f"pip install 'jax[tpu]=={installed.version('jax')}'")
  for name, others in _CONFLICTS.items():
    # Without tensorflow itself, tensorflow-cpu writes over nothing.
    if installed.version(name) and (name != "tensorflow-cpu" or installed.version("tensorflow")):
      both, words = f"pip uninstall -y {name} {' '.join(others)}", " and ".join(others)
      text = f"writes the same files as {words}, and the last one wins"
      yield Finding(name, "bad", text, f"{both}; then pip install {' '.join(others)}")
  library, why = installed.kernels()
  if library is None:
    remedy = f"where g++ is, install this package again: {install_command('core')}"
    yield Finding("packed kernels", "warn", why, remedy)  # XLA multiplies, more slowly
  else:
    yield Finding("packed kernels", "ok", library.nm_sparsity_isa(0).decode())
  try:
    yield Finding("gin_configs", "ok", f"--gin_search_paths={_gin_folder()}")
  except FileNotFoundError as e:
    yield Finding("gin_configs", "bad", "are missing", str(e).partition(". ")[2])


def _required(distribution: str, extra: str, remedy: str) -> Iterator[Finding]:
  # Floors are stated in setup.py only, which is where the metadata have them from.
  from packaging.requirements import Requirement

  for found in map(Requirement, installed.requires(distribution)):
    if found.marker is None or found.marker.evaluate({"extra": extra}):
      have, wanted = installed.version(found.name), str(found.specifier)
      if have and installed.meets(have, wanted):
        yield Finding(found.name, "ok", have)
      else:
        text = f"{have}, but {wanted} is needed" if have else "is not installed"
        yield Finding(found.name, "bad", text, remedy)


def tested_versions() -> dict[str, str]:
  """Returns what T5X was tested with, of constraints-t5x.txt."""
  text = (_gin_folder() / "constraints-t5x.txt").read_text()
  return dict(re.findall(r"^([\w.-]+)==(\S+)$", text, re.MULTILINE))


def folder_of(module: str) -> pathlib.Path | None:
  """Returns the folder of a package without importing it, None where there is none.

  Args:
    module: such as 't5x'.
  """
  spec = importlib.util.find_spec(module)
  folders = spec.submodule_search_locations if spec else None
  return pathlib.Path(folders[0]) if folders else None


def _unpublished(name: str) -> Finding:
  folder, docs = folder_of(name), "install it from its source: docs/t5x.md"
  if folder is None:
    return Finding(name, "bad", "is not installed, and not on PyPI", docs)
  if name == "t5x" and not (folder / "configs" / "runs" / "finetune.gin").is_file():
    return Finding(name, "bad", f"{folder}, without its gin files", docs)
  # pip's note on where a distribution comes from (PEP 610); none where a folder is on the path.
  try:
    note = importlib.metadata.distribution(name).read_text("direct_url.json")
  except importlib.metadata.PackageNotFoundError:
    note = None
  commit = json.loads(note or "{}").get("vcs_info", {}).get("commit_id", "unknown")
  if commit == UNPUBLISHED[name]:
    return Finding(name, "ok", f"commit {commit[:7]} ({folder})")
  return Finding(name, "warn", f"commit {commit[:7]}; tested: {UNPUBLISHED[name][:7]}", docs)


def _gin_folder() -> pathlib.Path:
  from nm_sparsity_jax.integrations import gin_files  # imports gin

  return gin_files.folder()
