"""Notes what the code does, so that a change of its form can be shown to change nothing else.

    python tests/digests.py --write           notes it in tests/digests.json
    python tests/digests.py --check           does it again and prints each difference by name
    python tests/digests.py --check --only t5x/

It trains tiny models with every recipe, by the local runner and by T5X, and notes SHA-256 digests
of all that their checkpoints hold. It types the commands of the documentation, and wrong ones, and
notes what they print. Bits depend on the machine: the file says on which one it was written.

Of the package it imports the command line alone; all else goes through gin files and flags. Not
noted: what differs from run to run or from machine to machine (`doctor`, `make quickstart`, the
times of day), config.gin (it names modules), and runs on several devices.
"""

import argparse
import difflib
import importlib.metadata
import json
import logging
import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys
import time
import warnings

import digests_typed  # noqa: F401  (adds command lines)
from digests_runs import HERE, JOBS, same_everywhere, sha, t5x_home, work

FILE = HERE / "digests.json"


def machine():
  """What bits depend on beside the code."""
  names = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "tensorflow", "seqio")
  found = {"python": platform.python_version()}
  found |= {name: importlib.metadata.version(name) for name in names}
  git = ["git", "-C", str(t5x_home()), "rev-parse", "HEAD"]
  found["t5x"] = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
  cpu = pathlib.Path("/proc/cpuinfo")
  text = cpu.read_text() if cpu.exists() else platform.processor()
  lines = dict(re.findall(r"^(model name|flags)\s*: (.*)", text, re.MULTILINE))
  found["cpu"] = lines.get("model name", "")
  found["cpu flags"] = sha(" ".join(sorted(lines.get("flags", "").split())))
  return found | {"cores": os.cpu_count()}


def differences(was, now):
  """Lines that say how a value differs."""
  lines = lambda value: json.dumps(value, indent=1, ensure_ascii=False).splitlines()
  return [x for x in difflib.unified_diff(lines(was), lines(now), n=0, lineterm="")][2:]


def prepare():
  """What holds for all: where the script stands, no warnings, and logs as a user sees them."""
  import jax

  os.environ.pop("PYTHONPATH", None)
  os.chdir(work())
  warnings.simplefilter("ignore")
  logging.basicConfig(handlers=[logging.NullHandler()])  # absl and TensorFlow say things once
  logging.getLogger("nm_sparsity_jax").addHandler(logging.lastResort)
  jax.config.update("jax_compilation_cache_dir", str(work() / "xla"))
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
  jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def main():
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  what = parser.add_mutually_exclusive_group(required=True)
  what.add_argument("--write", action="store_true", help="note it")
  what.add_argument("--check", action="store_true", help="compare with what is noted")
  parser.add_argument("--only", default="", metavar="REGEX", help="names to do")
  args = parser.parse_args()
  noted = json.loads(FILE.read_text("utf-8")) if FILE.exists() else {"machine": {}, "found": {}}
  here, was = machine(), noted["machine"]
  for name in here if was and was != here else ():
    if here[name] != was.get(name):
      print(f"another {name}: noted with {was.get(name)}, here {here[name]}")
  prepare()
  found, failed, start = {}, [], time.monotonic()
  for name in filter(re.compile(args.only).search, JOBS):
    begun = time.monotonic()
    try:
      found[name] = json.loads(json.dumps(JOBS[name]()))
    except Exception as e:
      found[name] = same_everywhere(f"could not be done: {type(e).__name__}: {e}")
      failed.append(name)
    print(f"{time.monotonic() - begun:6.1f} s  {name}", file=sys.stderr, flush=True)
  shutil.rmtree(work())
  print(f"{len(found)} in {time.monotonic() - start:.0f} s")
  if args.write:
    for name in failed:
      print(f"{name} {found.pop(name)}")
    found = noted["found"] | found  # of --only, the others stay
    found = {name: found[name] for name in JOBS if name in found}
    text = json.dumps({"machine": here, "found": found}, indent=1, ensure_ascii=False)
    FILE.write_text(text + "\n", "utf-8")
    return 1 if failed else 0
  names = [n for n in noted["found"] if re.search(args.only, n)]
  differ = [n for n in {**dict.fromkeys(names), **found} if noted["found"].get(n) != found.get(n)]
  for name in differ:
    lines = differences(noted["found"].get(name), found.get(name))
    print("\n".join([f"\n{name} differs:", *(f"  {line}" for line in lines)]))
  print(f"{len(differ)} differ" if differ else "nothing differs")
  return 1 if differ else 0


if __name__ == "__main__":
  sys.exit(main())
