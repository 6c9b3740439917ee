"""Says what is missing or in conflict in this environment, and how to mend it.

Looks at installed metadata and imports neither T5X nor TensorFlow. What is needed depends on what
you do, so --for says which parts must be there:

  core    masks, rules and layers in your own training loop
  tasks   SeqIO tasks and metrics
  local   nm-sparsity train, eval, quickstart, sweep and report (docs/local.md)
  t5x     t5x.train with our gin files (docs/t5x.md)

Each finding is ok, bad (to mend), or warn: there, but not what was tested.

Exit code: 0 = nothing is bad, 1 = something is.
"""

from __future__ import annotations

import argparse
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
from typing import Any

from nm_sparsity_jax import gin_files

_NAME = "nm-sparsity-jax"
# Not in the package index, and the commits that were tested.
_UNPUBLISHED = {
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """What must be there, and how to tell."""
  parser.add_argument(
    "--for",
    dest="purpose",
    choices=("core", "tasks", "local", "t5x"),
    help="what must be there; by default t5x where T5X is found, else core",
  )
  parser.add_argument("--devices", action="store_true", help="start jax and list its devices")
  parser.add_argument("--json", action="store_true", help="print the findings as JSON")


def run(args: argparse.Namespace) -> int:
  """Prints the findings."""
  purpose = args.purpose or ("t5x" if _origin("t5x") else "core")
  findings = list(examine(purpose))
  if args.devices:
    findings.append(_devices())
  ok = all(f["status"] != "bad" for f in findings)
  if args.json:
    print(json.dumps({"ok": ok, "for": purpose, "findings": findings}, indent=2))
    return 0 if ok else 1
  width = max(len(f["name"]) for f in findings)
  for f in findings:
    mark = {"ok": "ok ", "bad": "BAD", "warn": "!  "}[f["status"]]
    print(f"{mark} {f['name'].ljust(width)}  {f['text']}")
    if f["remedy"]:
      print(f"    {' ' * width}  -> {f['remedy']}")
  bad, warned = (sum(f["status"] == kind for f in findings) for kind in ("bad", "warn"))
  but = f", but see {warned} marked with !" if warned else ""
  print(f"\n{bad} to mend for {purpose}." if bad else f"\nReady for {purpose}{but}.")
  return 0 if ok else 1


def examine(purpose: str) -> Iterator[dict[str, Any]]:
  """Findings: name, status ('ok', 'bad' or 'warn'), text, remedy."""
  yield _finding("python", "ok", f"{platform.python_version()} ({sys.executable})")
  yield _package()
  yield from _requirements(purpose)
  if purpose == "t5x":
    for name in _UNPUBLISHED:
      yield _unpublished(name)
  yield from _conflicts()
  yield _gin_files()


def _finding(name: str, status: str, text: str, remedy: str = "") -> dict[str, Any]:
  return {"name": name, "status": status, "text": text, "remedy": remedy}


def version(name: str) -> str | None:
  """The version of a distribution, None where it is not installed."""
  try:
    return importlib.metadata.version(name)
  except importlib.metadata.PackageNotFoundError:
    return None


def _origin(module: str) -> pathlib.Path | None:
  """The folder of a top-level module, without importing it."""
  try:
    spec = importlib.util.find_spec(module)
  except (ImportError, ValueError):
    return None
  if spec is None:
    return None
  if spec.origin and spec.origin not in ("built-in", "frozen"):
    return pathlib.Path(spec.origin).parent
  places = list(spec.submodule_search_locations or ())
  return pathlib.Path(places[0]) if places else None


def _package() -> dict[str, Any]:
  installed = version(_NAME)
  if installed is None:
    return _finding(
      _NAME,
      "bad",
      "runs from a folder, but is not installed",
      _install("core"),
    )
  found = importlib.metadata.distribution(_NAME)
  direct = json.loads(found.read_text("direct_url.json") or "{}")
  how = "editable, " if direct.get("dir_info", {}).get("editable") else ""
  return _finding(_NAME, "ok", f"{installed} ({how}{_origin('nm_sparsity_jax')})")


def _requirements(purpose: str) -> Iterator[dict[str, Any]]:
  """What setup.py asks for, as the installed metadata has it: floors are stated there only."""
  try:
    required = importlib.metadata.requires(_NAME) or []
  except importlib.metadata.PackageNotFoundError:
    return
  tested = tested_versions() if purpose == "t5x" else {}
  missing = []
  for line in required:
    text, _, marker = (part.strip() for part in line.partition(";"))
    extra = re.search(r"extra\s*==\s*['\"]([\w-]+)['\"]", marker)
    if extra and extra[1] != purpose:
      continue
    name = re.match(r"[\w.-]+", text)
    if name is None:
      continue
    have = version(name[0])
    wanted = text[name.end() :].strip(" ()") or "any version"
    if have is None:
      missing.append(name[0])
    elif not at_least(have, wanted):
      yield _finding(
        name[0], "bad", f"{have}, but {wanted} is needed", f"pip install '{name[0]}{wanted}'"
      )
    else:
      yield _compared(name[0], have, tested.get(name[0]))
    tested.pop(name[0], None)
  for name, expected in tested.items():  # what those bring along
    if have := version(name):
      yield _compared(name, have, expected)
  for name in missing:
    yield _finding(name, "bad", "is not installed", _install(purpose))


def tested_versions() -> dict[str, str]:
  """What T5X was tested with: constraints-t5x.txt, which lies beside the gin files."""
  try:
    text = (gin_files.folder() / "constraints-t5x.txt").read_text()
  except FileNotFoundError:
    return {}
  return dict(re.findall(r"^([\w.-]+)==(\S+)$", text, re.MULTILINE))


def _compared(name: str, have: str, tested: str | None) -> dict[str, Any]:
  if tested is None or _numbers(have) == _numbers(tested):
    return _finding(name, "ok", have)
  remedy = f"if T5X fails: pip install {name}=={tested}"
  return _finding(name, "warn", f"{have}; T5X was tested with {tested}", remedy)


def _install(purpose: str) -> str:
  """The command that installs what a purpose needs, from a checkout where this is one."""
  extra = "" if purpose == "core" else f"[{purpose}]"
  package = _origin("nm_sparsity_jax")
  if package is None or not (package.parent / "setup.py").is_file():
    return f"pip install '{_NAME}{extra}'"
  constraints = "-c constraints-t5x.txt " if purpose == "t5x" else ""
  return f"pip install {constraints}-e '.{extra}' in {package.parent}"


def at_least(have: str, wanted: str) -> bool:
  """Whether a version meets a requirement such as '>=1.2'; other kinds are not judged.

  >>> at_least("0.10.2", ">=0.9"), at_least("2.0rc1", ">=2.1")
  (True, False)
  """
  floors = re.findall(r">=\s*([\w.]+)", wanted)
  return all(_numbers(have) >= _numbers(floor) for floor in floors)


def _numbers(text: str) -> tuple[int, ...]:
  """1.20rc1 -> (1, 20); trailing zeros are dropped, so 2.0 equals 2."""
  found = re.match(r"\d+(\.\d+)*", text)
  numbers = [int(n) for n in found[0].split(".")] if found else []
  while numbers and not numbers[-1]:
    numbers.pop()
  return tuple(numbers)


def _unpublished(name: str) -> dict[str, Any]:
  folder = _origin(name)
  if folder is None:
    return _finding(
      name,
      "bad",
      "is not installed, and not on PyPI",
      "docs/t5x.md: pip install --no-deps of its source at the pinned commit",
    )
  commit = _commit(name, folder)
  text = f"commit {commit[:7]}" if commit else "commit unknown"
  if name == "t5x" and not (folder / "configs" / "runs" / "finetune.gin").is_file():
    return _finding(
      name, "bad", f"{folder}, without its gin files", "install it from its source (docs/t5x.md)"
    )
  if commit != _UNPUBLISHED[name]:
    text = f"{text}; tested: {_UNPUBLISHED[name][:7]}"
    return _finding(name, "warn", f"{text} ({folder})", "docs/t5x.md installs what was tested")
  return _finding(name, "ok", f"{text} ({folder})")


def _commit(name: str, folder: pathlib.Path) -> str | None:
  """The commit of an installation by pip from git, or of a checkout."""
  try:
    text = importlib.metadata.distribution(name).read_text("direct_url.json")
    if text and (commit := json.loads(text).get("vcs_info", {}).get("commit_id")):
      return commit
  except importlib.metadata.PackageNotFoundError:
    pass
  git = folder.parent / ".git"
  try:
    head = (git / "HEAD").read_text().strip()
    if not head.startswith("ref: "):
      return head
    ref = head.removeprefix("ref: ")
    if (git / ref).is_file():
      return (git / ref).read_text().strip()
    packed = (git / "packed-refs").read_text()
    found = re.search(rf"^([0-9a-f]{{40}}) {re.escape(ref)}$", packed, re.MULTILINE)
    return found[1] if found else None
  except OSError:
    return None


def _conflicts() -> Iterator[dict[str, Any]]:
  """Pairs that do not get along."""
  if version("tensorflow-cpu") and version("tensorflow"):
    yield _finding(
      "tensorflow-cpu",
      "bad",
      "lies over tensorflow: both write the same files, and the last one wins",
      "pip uninstall -y tensorflow-cpu tensorflow && pip install tensorflow",
    )
  if have := version("t5"):
    yield _finding(
      "t5",
      "bad",
      f"{have}: with its requirements it replaces seqio and tensorflow-datasets by nightlies",
      "pip uninstall -y t5 seqio-nightly tfds-nightly; then install seqio and "
      "tensorflow-datasets again",
    )
  for nightly, name in (("seqio-nightly", "seqio"), ("tfds-nightly", "tensorflow-datasets")):
    if version(nightly):
      yield _finding(
        nightly,
        "bad",
        f"lies over {name}" if version(name) else f"stands in for {name}",
        f"pip uninstall -y {nightly} {name} && pip install {name}",
      )
  if version("tensorflow-datasets") and _origin("importlib_resources") is None:
    yield _finding(
      "importlib_resources",
      "bad",
      "is not installed: tensorflow-datasets imports it and does not say so",
      "pip install importlib_resources",
    )


def _gin_files() -> dict[str, Any]:
  try:
    folder = gin_files.folder()
  except FileNotFoundError as e:
    return _finding("gin_configs", "bad", "are missing", str(e).partition(". ")[2])
  number = len(list((folder / "gin_configs").rglob("*.gin")))
  return _finding("gin_configs", "ok", f"{number} files; --gin_search_paths={folder}")


def _devices() -> dict[str, Any]:
  """Devices as jax finds them, in a process that may hang."""
  try:
    done = subprocess.run(
      [sys.executable, "-c", _LIST_DEVICES],
      capture_output=True,
      text=True,
      timeout=_PATIENCE,
      check=False,
    )
  except subprocess.TimeoutExpired:
    return _finding(
      "devices",
      "warn",
      f"jax did not answer in {_PATIENCE} seconds",
      "on a slice of several hosts run this on all of them at once (--worker=all); "
      "else another process holds the devices",
    )
  if done.returncode:
    error = " ".join(done.stderr.strip().splitlines()[-1:])
    return _finding("devices", "bad", error, "pip install 'jax[tpu]' on a TPU VM")
  hosts, found = json.loads(done.stdout.splitlines()[-1])
  asked = os.environ.get("JAX_PLATFORMS")
  text = f"{len(found)} x {', '.join(sorted({kind for _, kind in found}))}"
  text += f", on {hosts} hosts" if hosts > 1 else ""
  text += f" (JAX_PLATFORMS={asked})" if asked else ""
  if asked or any(platform != "cpu" for platform, _ in found):
    return _finding("devices", "ok", text)
  if version("libtpu") is None:
    return _finding(
      "devices",
      "warn",
      f"{text}: no accelerator, and libtpu is not installed",
      "on a TPU VM: pip install 'jax[tpu]'; on GPUs: pip install 'jax[cuda13]'",
    )
  return _finding(
    "devices",
    "warn",
    f"{text}: no TPU, though libtpu is installed",
    "on a TPU VM another process may hold it; JAX_PLATFORMS=tpu python -c 'import jax; "
    "jax.devices()' tells",
  )
