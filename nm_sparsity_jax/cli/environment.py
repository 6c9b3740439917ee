"""What is missing or in conflict in this environment, and how to mend it.

    from nm_sparsity_jax import environment
    for finding in environment.examine("local"):
      print(finding.status, finding.name, finding.text, finding.remedy)

metadata of what is installed -> requirements of a purpose, T5X's sources, conflicts, gin files
                              -> Findings
jax in a process of its own   -> a Finding on its devices

Imports neither T5X nor TensorFlow.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import platform
import re
import shutil
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
  return "t5x" if installed.folder_of("t5x") else "core"


def ready_for(beside: str) -> list[str]:
  """Returns the other purposes of which nothing is missing.

  Args:
    beside: the purpose that was looked at.
  """
  others = [purpose for purpose in PURPOSES if purpose not in ("core", beside)]
  return [p for p in others if all(finding.status != "bad" for finding in examine(p))]


def examine(purpose: str) -> Iterator[Finding]:
  """Yields what it finds of Python, packages, conflicts and gin files.

  Args:
    purpose: what must be there, one of `PURPOSES`.
  """
  yield Finding("python", "ok", f"{platform.python_version()} ({sys.executable})")
  yield _package()
  yield from _requirements(purpose)
  if purpose == "t5x":
    for name in UNPUBLISHED:
      yield _unpublished(name)
  if purpose == "tpu":
    yield from _of_tpu()
  yield from _conflicts()
  yield _kernels()
  yield _gin_files()


# --- packages -----------------------------------------------------------------------------------


def _package() -> Finding:
  """Says how this package is installed."""
  have = installed.version(installed.NAME)
  if have is None:
    return Finding(
      installed.NAME, "bad", "runs from a folder, but is not installed", _install("core")
    )
  is_editable = installed.origin(installed.NAME).get("dir_info", {}).get("editable")
  how = "editable, " if is_editable else ""
  return Finding(installed.NAME, "ok", f"{have} ({how}{installed.folder_of('nm_sparsity_jax')})")


def _requirements(purpose: str) -> Iterator[Finding]:
  """Compares with what setup.py asks for, as the metadata has it: floors are stated there only."""
  try:
    from packaging.requirements import Requirement
  except ImportError:  # without it there is no comparing
    yield Finding("packaging", "bad", "is not installed", _install(purpose))
    return
  required = [Requirement(line) for line in installed.requires(installed.NAME)]
  if not required:
    return
  tested = tested_versions() if purpose == "t5x" else {}
  missing = []
  for wanted in required:
    if wanted.marker and not wanted.marker.evaluate({"extra": purpose}):
      continue
    have = installed.version(wanted.name)
    if have is None:
      missing.append(wanted.name)
    elif not installed.meets(have, str(wanted.specifier)):
      floor = f"{wanted.name}{wanted.specifier}"
      text = f"{have}, but {wanted.specifier} is needed"
      yield Finding(wanted.name, "bad", text, f"pip install '{floor}'")
    else:
      yield _compared(wanted.name, have, tested.get(wanted.name))
    tested.pop(wanted.name, None)
  for name, expected in tested.items():  # what those bring along
    if have := installed.version(name):
      yield _compared(name, have, expected)
  for name in missing:
    yield Finding(name, "bad", "is not installed", _install(purpose))


def _of_tpu() -> Iterator[Finding]:
  """Compares jaxlib and libtpu with what the installed jax was released with."""
  jax = installed.version("jax")
  for name, wanted in installed.required_for("jax", "tpu").items():
    have = installed.version(name)
    if name not in ("jaxlib", "libtpu"):
      continue
    if have is not None and installed.meets(have, wanted):
      yield Finding(name, "ok", have)
    else:
      text = f"{have or 'is not installed'}; jax {jax} needs {wanted}"
      yield Finding(name, "bad", text, f"pip install 'jax[tpu]=={jax}'")


def same_release(one: str, other: str) -> bool:
  """Returns whether two versions are of one release: 2.0 and 2.0.0, or 1.20rc1 and 1.20."""
  from packaging.version import InvalidVersion, Version

  try:
    return Version(Version(one).base_version) == Version(Version(other).base_version)
  except InvalidVersion:
    return one == other


def tested_versions() -> dict[str, str]:
  """Reads what T5X was tested with: constraints-t5x.txt, which lies beside the gin files."""
  from nm_sparsity_jax.integrations import gin_files  # imports gin

  try:
    text = (gin_files.folder() / "constraints-t5x.txt").read_text()
  except FileNotFoundError:
    return {}
  return dict(re.findall(r"^([\w.-]+)==(\S+)$", text, re.MULTILINE))


def _compared(name: str, have: str, tested: str | None) -> Finding:
  """Warns where a version is another one than T5X was tested with."""
  if tested is None or same_release(have, tested):
    return Finding(name, "ok", have)
  remedy = f"if T5X fails: pip install {name}=={tested}"
  return Finding(name, "warn", f"{have}; T5X was tested with {tested}", remedy)


def _install(purpose: str) -> str:
  """Returns the command that installs what a purpose needs, from a checkout where this is one."""
  extra = "" if purpose == "core" else f"[{purpose}]"
  if (checkout := _checkout()) is None:
    return f"pip install '{installed.NAME}{extra}'"
  constraints = "-c constraints-t5x.txt " if purpose == "t5x" else ""
  return f"pip install {constraints}-e '.{extra}' in {checkout}"


def _checkout() -> pathlib.Path | None:
  """Returns the checkout that this package runs from; None where it was installed from one."""
  package = installed.folder_of("nm_sparsity_jax")
  if package is None or not (package.parent / "setup.py").is_file():
    return None
  return package.parent


def _unpublished(name: str) -> Finding:
  """Compares a package that is not on PyPI with the commit that was tested."""
  folder = installed.folder_of(name)
  if folder is None:
    return Finding(
      name,
      "bad",
      "is not installed, and not on PyPI",
      "docs/t5x.md: pip install --no-deps of its source at the pinned commit",
    )
  commit = installed.commit_of(name)
  text = f"commit {commit[:7]}" if commit else "commit unknown"
  if name == "t5x" and not (folder / "configs" / "runs" / "finetune.gin").is_file():
    return Finding(
      name, "bad", f"{folder}, without its gin files", "install it from its source (docs/t5x.md)"
    )
  if commit != UNPUBLISHED[name]:
    text = f"{text}; tested: {UNPUBLISHED[name][:7]}"
    return Finding(name, "warn", f"{text} ({folder})", "docs/t5x.md installs what was tested")
  return Finding(name, "ok", f"{text} ({folder})")


def _conflicts() -> Iterator[Finding]:
  """Yields pairs that do not get along."""
  if installed.version("tensorflow-cpu") and installed.version("tensorflow"):
    yield Finding(
      "tensorflow-cpu",
      "bad",
      "lies over tensorflow: both write the same files, and the last one wins",
      "pip uninstall -y tensorflow-cpu tensorflow && pip install tensorflow",
    )
  if have := installed.version("t5"):
    yield Finding(
      "t5",
      "bad",
      f"{have}: with its requirements it replaces seqio and tensorflow-datasets by nightlies",
      "pip uninstall -y t5 seqio-nightly tfds-nightly; then install seqio and "
      "tensorflow-datasets again",
    )
  for nightly, name in (("seqio-nightly", "seqio"), ("tfds-nightly", "tensorflow-datasets")):
    if installed.version(nightly):
      yield Finding(
        nightly,
        "bad",
        f"lies over {name}" if installed.version(name) else f"stands in for {name}",
        f"pip uninstall -y {nightly} {name} && pip install {name}",
      )
  tfds = installed.version("tensorflow-datasets")
  if tfds and installed.folder_of("importlib_resources") is None:
    yield Finding(
      "importlib_resources",
      "bad",
      "is not installed: tensorflow-datasets imports it without declaring it",
      "pip install importlib_resources",
    )


def _kernels() -> Finding:
  """Says which kernels of packed weights this machine runs: without them XLA multiplies."""
  library, why = installed.kernels()
  if library is not None:
    return Finding("packed kernels", "ok", library.nm_sparsity_isa(0).decode())
  checkout = _checkout()
  where = "the checkout" if checkout is None else checkout
  how = "--force-reinstall --no-deps --no-cache-dir ." if checkout is None else "--no-deps -e ."
  compiler = "" if shutil.which("g++") else "install g++, then "
  remedy = f"{compiler}in {where}: pip install {how}"
  return Finding("packed kernels", "warn", why, remedy)


def _gin_files() -> Finding:
  """Counts the gin files of this package."""
  from nm_sparsity_jax.integrations import gin_files  # imports gin

  try:
    folder = gin_files.folder()
  except FileNotFoundError as e:
    return Finding("gin_configs", "bad", "are missing", str(e).partition(". ")[2])
  number = len(list((folder / "gin_configs").rglob("*.gin")))
  return Finding("gin_configs", "ok", f"{number} files; --gin_search_paths={folder}")


# --- devices ------------------------------------------------------------------------------------


def devices() -> Finding:
  """Starts jax in a process that may hang, and judges the devices that it finds."""
  try:
    done = subprocess.run(
      [sys.executable, "-c", _LIST_DEVICES],
      capture_output=True,
      text=True,
      timeout=_PATIENCE,
      check=False,
    )
  except subprocess.TimeoutExpired:
    return Finding(
      "devices",
      "warn",
      f"jax did not answer in {_PATIENCE} seconds",
      "on a slice of several hosts run this on all of them at once (--worker=all); "
      "else another process holds the devices",
    )
  if done.returncode:
    error = " ".join(done.stderr.strip().splitlines()[-1:])
    return Finding("devices", "bad", error, "pip install 'jax[tpu]' on a TPU VM")
  hosts, found = json.loads(done.stdout.splitlines()[-1])
  asked = os.environ.get("JAX_PLATFORMS")
  text = f"{len(found)} x {', '.join(sorted({kind for _, kind in found}))}"
  text += f", on {hosts} hosts" if hosts > 1 else ""
  text += f" (JAX_PLATFORMS={asked})" if asked else ""
  if asked or any(platform != "cpu" for platform, _ in found):
    return Finding("devices", "ok", text)
  if installed.version("libtpu") is None:
    return Finding(
      "devices",
      "warn",
      f"{text}: no accelerator, and libtpu is not installed",
      "on a TPU VM: pip install 'jax[tpu]'; on GPUs: pip install 'jax[cuda13]'",
    )
  return Finding(
    "devices",
    "warn",
    f"{text}: no TPU, though libtpu is installed",
    "on a TPU VM another process may hold it; JAX_PLATFORMS=tpu python -c 'import jax; "
    "jax.devices()' shows it",
  )
