"""Reads mutated files by every reader, and says which end in anything but one line or an answer.

    python tests/fuzz.py 10000           that many files, by two processes
    python tests/fuzz.py --only 4711     one of them again, with what it printed
    python tests/fuzz.py --of packed 100000    packed files alone

Each file is a sound one with some bytes changed, cut, doubled or replaced by what breaks parsers.
The command that reads it must end within 5 seconds of processor time and with 1 GiB more memory. It
answers, or exits with 1 and one line that names the file or its folder. File number i is the same
each time, but for the names that Orbax makes up.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
import io
import json
import logging
import os
import pathlib
import random
import re
import resource
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import warnings
import zipfile
from collections.abc import Callable, Iterator

SECONDS, BYTES = 5.0, 1 << 30
HUNG = 600  # seconds without a word, after which a process is ended: its imports take long
HERE = pathlib.Path(__file__).resolve().parent

TOKENS = [
  b"", b"\0", b"\xff", b"\n", b"\r\n", b"\t", b" ", b"[", b"]", b"{", b"}", b"(", b"'", b'"', b":",
  b",", b"=", b"@", b"%", b"#", b"\\", b"-1", b"0", b"1e999", b"NaN", b"Infinity", b"null", b"true",
  b"[[" * 2000, b"{'a':" * 500, b"9" * 30, b"9" * 5000, b"-" * 3000, b"9223372036854775808", b"0x",
  b"\xf0\x9f\x92\xa9", b"\xe2\x80\xae", b"\x1b[2J", b"../../x", b"include 'x.gin'\n", b"import os",
  b"@os.system()", b"%MACRO", b"(a+)+$", b"1:99999999", b"\x80" * 20, b"\x00" * 64, b"A" * 3000,
]  # fmt: skip


def mutate(data: bytes, rng: random.Random) -> bytes:
  """Returns the bytes with one to four wounds."""
  found = bytearray(data)
  for _ in range(rng.choice((1, 1, 1, 2, 4))):
    at = rng.randrange(len(found) + 1)
    end = min(len(found), at + rng.choice((1, 1, 2, 4, 8, 64)))
    how = rng.randrange(7)
    if how == 0 and at < len(found):
      found[at] ^= 1 << rng.randrange(8)
    elif how == 1 and at < len(found):
      found[at] = rng.randrange(256)
    elif how == 2:
      del found[at:]
    elif how == 3:
      del found[at:end]
    elif how == 4:
      found[at:end] = rng.choice(TOKENS)
    elif how == 5:
      found[at:at] = rng.choice(TOKENS)
    else:
      other = rng.randrange(len(found) + 1)
      found[at:at] = found[other : other + rng.choice((1, 8, 200))]
  return bytes(found)


NUMBERS = [0, 1, 2, 3, 4, 8, 16, 31, 32, 255, 256, 257, 1 << 31, 1 << 48, (1 << 63) - 1, 10**18]


def mutate_packed(data: bytes, rng: random.Random) -> bytes:
  """Returns a safetensors file with wounds that reach behind its first check.

  Its header has another number, or wounds and the right length; or its tensors have wounds and keep
  their length.
  """
  length = int.from_bytes(data[:8], "little")
  head, tensors = data[8 : 8 + length], data[8 + length :]
  how = rng.randrange(4)
  if how == 0:
    return mutate(data, rng)
  if how == 1:
    for _ in range(rng.choice((1, 1, 2))):
      found = rng.choice(list(re.finditer(rb"[0-9]+", head)))
      number = rng.choice([*NUMBERS, int(found[0]) + 1, max(int(found[0]) - 1, 0)])
      head = head[: found.start()] + b"%d" % number + head[found.end() :]
  elif how == 2:
    head = mutate(head, rng)
  else:
    tensors = bytearray(tensors)
    for _ in range(rng.choice((1, 1, 2, 8))):
      tensors[rng.randrange(len(tensors))] = rng.choice(
        (0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256))
      )
  return struct.pack("<Q", len(head)) + head + bytes(tensors)


# --- what is read -------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Reader:
  """A sound folder, and the command that reads it.

  Attributes:
    share: how many of a hundred files are its.
    folder: holds the sound files.
    files: those that are mutated, by a pattern of names.
    call: folder -> exit code; reads it.
    wound: bytes of a file -> those of a wounded one.
  """

  share: int
  folder: pathlib.Path
  files: str
  call: Callable[[pathlib.Path], int]
  wound: Callable[[bytes, random.Random], bytes] = mutate


def packed_readers(home: pathlib.Path) -> dict[str, Reader]:
  """Makes small packed files; their reader takes every array, `verify` a few of them."""
  sys.path.insert(0, str(HERE))
  import test_packed_file as packed

  from nm_sparsity_jax import cli
  from nm_sparsity_jax.core.trees import nested

  def read(folder: pathlib.Path) -> int:
    try:
      packed.read_all(folder / "a.safetensors")
    except ValueError as e:
      print(e, file=sys.stderr)
      return 1
    return 0

  # A remark on padding is a line of its own.
  logging.getLogger("nm_sparsity_jax.training.sites").setLevel(logging.ERROR)

  def verify(folder: pathlib.Path) -> int:
    return cli.main(["verify", str(folder / "a.safetensors")])

  for name, arrays, dtype in packed.sound_files():
    file = home / name / "a.safetensors"
    packed.packed_file.write(file, nested(arrays), packed.RULES, dtype)
  kinds = {"verify": (4, "float", verify), "float": (48, "float", read), "int8": (48, "int8", read)}
  return {
    name: Reader(share, home / folder, "*", call, mutate_packed)
    for name, (share, folder, call) in kinds.items()
  }


def readers(home: pathlib.Path) -> dict[str, Reader]:
  """Makes the sound folders; returns name -> reader."""
  sys.path.insert(0, str(HERE))
  import test_hostile

  from nm_sparsity_jax import cli
  from nm_sparsity_jax.integrations import gin_files

  def command(*argv: str) -> Callable[[pathlib.Path], int]:
    return lambda folder: cli.main([word.replace("HERE", str(folder)) for word in argv])

  scored = test_hostile.a_run(home / "scored")
  sweep = home / "sweep"
  sweep.mkdir()
  (sweep / "a.gin").write_text("SPARSE_STEPS = 10\n")
  (sweep / "sweep.toml").write_text(
    "out = 'out'\ngin_files = ['HERE/a.gin']\nrecipes = ['sr_ste', 'longer']\npatterns = ['1:4']\n"
    "seeds = [0, 1]\nbaseline = 'sr_ste'\n[macros]\nSPARSE_STEPS = 10\nX = {ff = '1:4'}\n"
    "[variants.longer]\nRECIPE = 'sr_ste'\nDENSE_STEPS = 2\n"
  )
  plan = home / "plan"
  plan.mkdir()
  ours = gin_files.folder()
  (plan / "b.gin").write_text("DENSE_STEPS = 2\nRECIPE_FIELDS = {}\n")
  (plan / "a.gin").write_text(
    (ours / "gin_configs/sparsity.gin").read_text() + "include 'HERE/b.gin'\nRECIPE = 'sr_ste'\n"
    "PATTERN = '1:4'\nSPARSE_STEPS = 10\nSPARSITY_RULES = {'ff': None, 'encoder/q': '2:4'}\n"
  )
  predictions = home / "predictions"
  for task in ("rte", "stsb", "cola"):
    test_hostile.predictions(predictions / f"nm_glue_mini_{task}-predict.jsonl", *range(9))
  archive = home / "zip"
  archive.mkdir()
  with zipfile.ZipFile(archive / "a.zip", "w", zipfile.ZIP_DEFLATED) as file:
    for name in ("RTE", "CoLA", "STS-B"):
      rows = "".join(f"{i}\t{'entailment' if name == 'RTE' else '1'}\n" for i in range(50))
      file.writestr(f"{name}.tsv", f"index\tprediction\n{rows}")
  found = {
    "score": Reader(14, scored, "**/*[nl]", command("glue", "score", "HERE")),
    "toml": Reader(12, sweep, "*.toml", command("sweep", "--table", "HERE/sweep.toml")),
    "gin": Reader(12, plan, "*.gin", command("plan", "--gin_file=HERE/a.gin")),
    "predictions": Reader(
      8, predictions, "*", command("glue", "submit", "--mini", "HERE", "--out", "HERE/out.zip")
    ),
    "zip": Reader(8, archive, "*.zip", command("glue", "submit", "--validate", "HERE/a.zip")),
  }
  with contextlib.suppress(ImportError):  # the tasks need seqio
    found["tsv"] = tsv(home / "tsv")
  return found


def tsv(folder: pathlib.Path) -> Reader:
  """GLUE's own files, read by the task's source."""
  from t5x_tasks import sources

  (folder / "RTE").mkdir(parents=True)
  rows = "".join(f"{i}\ta {i}\tb {i}\tentailment\n" for i in range(20))
  (folder / "RTE/dev.tsv").write_text(f"index\tsentence1\tsentence2\tlabel\n{rows}")

  def call(here: pathlib.Path) -> int:
    try:
      sources.read_glue(here, "rte", "validation")
    except ValueError as e:
      print(e, file=sys.stderr)
      return 1
    return 0

  return Reader(6, folder, "**/*.tsv", call)


# --- one file -----------------------------------------------------------------------------------


class Late(BaseException):
  """No reader may swallow it."""


def chosen(all_of: dict[str, Reader], number: int) -> tuple[str, random.Random]:
  """Returns which reader file number `number` is for, and what draws its wounds."""
  rng = random.Random(number)
  names, shares = list(all_of), [reader.share for reader in all_of.values()]
  return rng.choices(names, shares)[0], rng


def attempt(all_of: dict[str, Reader], number: int, home: pathlib.Path) -> tuple[str, str]:
  """Reads one mutated file; returns what is wrong with how that ended, '' for nothing; and all."""
  name, rng = chosen(all_of, number)
  reader = all_of[name]
  folder = home / f"case{number}"
  shutil.copytree(reader.folder, folder)
  for file in folder.rglob("*.toml"), folder.rglob("*.gin"):
    for text in file:
      text.write_text(text.read_text().replace("HERE", str(folder)))
  wounded = rng.choice(sorted(p for p in folder.glob(reader.files) if p.is_file()))
  wounded.write_bytes(reader.wound(wounded.read_bytes(), rng))
  out, err = io.StringIO(), io.StringIO()
  code: object = None
  signal.setitimer(signal.ITIMER_PROF, SECONDS)
  try:
    with (
      contextlib.redirect_stdout(out),
      contextlib.redirect_stderr(err),
      warnings.catch_warnings(record=True),  # that weights look transposed, say, is no error
    ):
      code = reader.call(folder)
  except Late:
    code = "late"
  except BaseException as e:
    code = repr(e)[:300]
  finally:
    signal.setitimer(signal.ITIMER_PROF, 0)
    shutil.rmtree(folder, ignore_errors=True)
  said, line = out.getvalue(), err.getvalue()
  wrong = ""
  if code not in (0, 1):
    wrong = f"ended with {code}"
  elif "Traceback (most recent" in said + line:
    wrong = f"shows a traceback: {(said + line)[-300:]!r}"
  elif code == 1:
    if line.count("\n") != (not said) or len(line) > 5000:  # a report that was printed says all
      wrong = f"said {line.count(chr(10))} lines, {len(line)} characters: {line[:300]!r}"
    elif not said and str(folder) not in line and wounded.name not in line:
      wrong = f"names no file: {line[:300]!r}"
  what = f"{number} {name} {wounded.relative_to(folder)}"
  return f"{what}: {wrong}" if wrong else "", f"{what}: {code}\n{said}{line}"


def limit_memory() -> None:
  """Allows 1 GiB more than there is now."""
  lines = pathlib.Path("/proc/self/status").read_text().splitlines()
  now = next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmData"))
  resource.setrlimit(resource.RLIMIT_DATA, (now + BYTES, now + BYTES))


def work(first: int, stop: int, step: int, of: str) -> None:
  """Reads some of the files; prints where it is and what was wrong, as JSON."""
  said = os.fdopen(os.dup(1), "w")
  os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
  os.dup2(1, 2)

  def tell(**what: object) -> None:
    said.write(json.dumps(what) + "\n")
    said.flush()

  def late(*_: object) -> None:
    raise Late

  signal.signal(signal.SIGPROF, late)
  tell(ready="")
  with tempfile.TemporaryDirectory() as home:
    all_of = KINDS[of](pathlib.Path(home) / "sound")
    tell(ready="all")
    for name in all_of:  # what is imported and compiled at first counts for nobody
      number = next(i for i in range(-1, -10_000, -1) if chosen(all_of, i)[0] == name)
      signal.setitimer(signal.ITIMER_PROF, 0)
      attempt(all_of, number, pathlib.Path(home))
      tell(ready=name)
    limit_memory()
    for number in range(first, stop, step):
      tell(begin=number)
      wrong, _ = attempt(all_of, number, pathlib.Path(home))
      if wrong:
        tell(wrong=wrong)
  tell(end=True)


# --- all files ----------------------------------------------------------------------------------


KINDS = {"all": readers, "packed": packed_readers}


def run(count: int, workers: int = 2, start: int = 0, of: str = "all") -> list[str]:
  """Reads that many mutated files; returns what was wrong."""
  with concurrent.futures.ThreadPoolExecutor(workers) as pool:
    each = pool.map(lambda i: list(_worker(start + i, start + count, workers, of)), range(workers))
    return [wrong for found in each for wrong in found]


def _worker(first: int, stop: int, step: int, of: str) -> Iterator[str]:
  """Yields what was wrong; begins a new process behind a file that ended the one before."""
  while first < stop:
    argv = [
      sys.executable,
      str(HERE / "fuzz.py"),
      "--work",
      *map(str, (first, stop, step)),
      "--of",
      of,
    ]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3"}
    with subprocess.Popen(argv, stdout=subprocess.PIPE, env=environment) as child:
      at, why = first - step, "died"
      assert child.stdout is not None
      while True:
        ready, _, _ = select.select([child.stdout], [], [], HUNG)
        line = child.stdout.readline() if ready else b""
        if not line:
          why = "died" if ready else "hung"
          child.kill()
          break
        told = json.loads(line)
        if "wrong" in told:
          yield told["wrong"]
          print(told["wrong"], flush=True)
        if "end" in told:
          return
        at = told.get("begin", at)
    print(f"{at}: {why}", flush=True)
    if at < first:
      yield f"{first}: the process {why} before its first file"
      return
    yield f"{at}: the process {why} with exit code {child.returncode}"
    first = at + step


def main() -> int:
  """Reads the command line."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("count", nargs="?", type=int, default=10_000)
  parser.add_argument("--start", type=int, default=0, help="the number of the first file")
  parser.add_argument("--workers", type=int, default=2)
  parser.add_argument("--only", type=int, help="one file again, with what was said")
  parser.add_argument("--of", choices=KINDS, default="all", help="which files")
  parser.add_argument("--work", nargs=3, type=int, help=argparse.SUPPRESS)
  args = parser.parse_args()
  if args.work:
    first, stop, step = args.work
    work(first, stop, step, args.of)
    return 0
  if args.only is not None:
    signal.signal(signal.SIGPROF, lambda *_: (_ for _ in ()).throw(Late()))
    with tempfile.TemporaryDirectory() as home:
      all_of = KINDS[args.of](pathlib.Path(home) / "sound")
      wrong, everything = attempt(all_of, args.only, pathlib.Path(home))
    print(everything, wrong or "as it should be", sep="\n")
    return bool(wrong)
  begun = time.monotonic()
  wrong = run(args.count, args.workers, args.start, args.of)
  print(f"{len(wrong)} of {args.count} ended wrongly, in {time.monotonic() - begun:.0f} s")
  return bool(wrong)


if __name__ == "__main__":
  sys.exit(main())
