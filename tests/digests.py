"""Notes what the code does, so that a change of its form can be shown to change nothing else.

    python tests/digests.py --write           notes it in tests/digests.json
    python tests/digests.py --check           does it again and prints each difference by name
    python tests/digests.py --check --only t5x/
    python tests/digests.py --accept "why" --only "made up/report"

The last line notes what differs as it is now, beside what is noted, with the reason: a check then
takes either, and prints the reason.

The file was noted at 28740b2, before the code was rearranged. A check takes about seven minutes of
processor time.

It trains tiny models with every recipe, by the local runner and by T5X, and notes SHA-256 digests
of all that their checkpoints hold. It types the commands of the documentation, and wrong ones, and
notes what they print. Bits depend on the machine: the file says on which one it was written.

Of the package it imports the command line alone; all else goes through gin files and flags. Not
noted: what differs from run to run or from machine to machine (`doctor`, `make quickstart`, the
times of day), config.gin (it names modules), metrics (they are programs of their own now), the
speed of runs on HTML pages, and runs on several devices.
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


def do(names):
  """Yields (name, what was found, whether it could be done at all)."""
  for name in names:
    begun = time.monotonic()
    try:
      found, done = json.loads(json.dumps(JOBS[name]())), True
    except Exception as e:
      found, done = same_everywhere(f"could not be done: {type(e).__name__}: {e}"), False
    print(f"{time.monotonic() - begun:6.1f} s  {name}", file=sys.stderr, flush=True)
    yield name, found, done


def keep(noted):
  """Writes the file, in the order of the jobs; then what none of them does any more."""
  for part in ("found", "changed"):
    names = [*JOBS, *(name for name in noted[part] if name not in JOBS)]
    noted[part] = {name: noted[part][name] for name in names if name in noted[part]}
  FILE.write_text(json.dumps(noted, indent=1, ensure_ascii=False) + "\n", "utf-8")


def main():
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  what = parser.add_mutually_exclusive_group(required=True)
  what.add_argument("--write", action="store_true", help="note it")
  what.add_argument("--check", action="store_true", help="compare with what is noted")
  what.add_argument("--accept", metavar="WHY", help="note what differs beside it, and why")
  parser.add_argument("--only", default="", metavar="REGEX", help="names to do")
  args = parser.parse_args()
  noted = json.loads(FILE.read_text("utf-8")) if FILE.exists() else {"machine": {}, "found": {}}
  noted.setdefault("changed", {})
  here, was = machine(), noted["machine"]
  for name in here if was and was != here else ():
    if here[name] != was.get(name):
      print(f"another {name}: noted with {was.get(name)}, here {here[name]}")
  prepare()
  wanted = [name for name in JOBS if re.search(args.only, name)]
  gone = [n for n in noted["found"] if re.search(args.only, n) and n not in JOBS]
  failed, differ, start = [], [], time.monotonic()
  for name in gone:
    why = noted["changed"].get(name, {}).get("why")
    if args.accept:
      noted["changed"][name] = {"why": args.accept, "found": None}
      keep(noted)
    elif why is not None:
      print(f"{name} is not done any more, as it should: {why}")
    else:
      differ.append(f"{name} is noted, but nothing does it now")
      print(differ[-1], flush=True)
  for name, now, done in do(wanted):
    before, changed = noted["found"].get(name), noted["changed"].get(name, {})
    if args.write and done:
      noted["found"][name] = now
      noted["changed"].pop(name, None)
      noted["machine"] = here
      keep(noted)  # each: it takes long
    elif args.write:
      failed.append(name)
      print(f"{name} {now}")
    elif now == before:
      continue
    elif args.accept and done:
      noted["changed"][name] = {"why": args.accept, "found": now}
      keep(noted)
    elif now == changed.get("found"):
      print(f"{name} differs from what was, as it should: {changed['why']}")
    else:
      lines = differences(before, now)
      differ.append("\n".join([f"\n{name} differs:", *(f"  {line}" for line in lines)]))
      print(differ[-1], flush=True)
  shutil.rmtree(work())
  print(f"{len(wanted)} in {time.monotonic() - start:.0f} s")
  if args.check:
    print(f"{len(differ)} differ" if differ else "nothing else differs")
  return 1 if differ or failed else 0


if __name__ == "__main__":
  sys.exit(main())
