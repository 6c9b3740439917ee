"""`nm-sparsity`: the command line. Each command is a module, imported when it is chosen.

    argv -> table of commands -> module.add_arguments(parser), module.run(args) -> exit code
    an error of the library -> one line

Nothing heavy is imported before the arguments are parsed, so `--help` is quick. Exit codes: 0 =
done, or yes; 1 = failed, or no; 2 = the command line is wrong.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import pathlib
import re
import sys
import types
from collections.abc import Sequence

from nm_sparsity_jax._version import __version__
from nm_sparsity_jax.core.text import columns, printable

# name -> (module, help in one line); a name of two words is a command of a group
COMMANDS = {
  "gin-path": ("gin_path", "print the folder that holds gin_configs/, docs/ and examples/"),
  "quickstart": ("quickstart", "train, prune and score a tiny T5, in minutes on a CPU"),
  "train": ("train", "train on the devices of this machine, without T5X"),
  "eval": ("eval", "evaluate a checkpoint on the devices of this machine, without T5X"),
  "infer": ("infer", "write the predictions of a checkpoint, without T5X"),
  "rows": ("rows", "list the paper's rows with their published scores, and search them"),
  "plan": ("plan", "show what a run would do, and what is wrong, before it starts"),
  "verify": ("verify", "prove, group by group, that a checkpoint is n:m"),
  "finalize": ("finalize", "write a checkpoint with exact zeros, and prove it"),
  "export": ("export", "write a checkpoint for timm, Hugging Face or Core ML, and prove it"),
  "convert": ("convert", "make a checkpoint for T5X of a folder of Hugging Face's T5"),
  "pack": ("pack", "write a checkpoint without its zeros, and say what that saves"),
  "bench": ("bench", "measure packed weights against dense ones: per layer and end to end"),
  "report": ("report", "make one HTML page of runs: curves, schedules, scores, settings"),
  "sweep": ("sweep", "train a grid of recipes x patterns x seeds from one file, and compare them"),
  "doctor": ("doctor", "say what is missing or in conflict in this environment, and how to fix it"),
  "glue score": ("glue_score", "print what runs scored, next to the published rows"),
  "glue submit": ("glue_submit", "make GLUE's official zip of predictions"),
}


# These use the accelerator; a sweep starts `train`. The others leave it to a run that may have it.
_ON_DEVICES = {"train", "eval", "infer", "bench", "quickstart", "sweep"}


def parse(argv: Sequence[str]) -> tuple[str, types.ModuleType, argparse.Namespace]:
  """Returns the name of a command, its module and its arguments; a mistake ends the program."""
  name = next((n for n in COMMANDS if [*argv[: n.count(" ") + 1]] == n.split()), None)
  if name is None:
    parser = _parser()
    parser.parse_args(argv)  # --help, --version and mistakes end here
    parser.error("name a command: --help lists them")
  module = importlib.import_module(f"nm_sparsity_jax.cli.{COMMANDS[name][0]}")
  parser = argparse.ArgumentParser(
    prog=f"nm-sparsity {name}",
    description=module.__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
    allow_abbrev=False,
  )
  module.add_arguments(parser)
  parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
  # A sweep reads there why a run failed.
  parser.add_argument("--error-file", metavar="FILE", help=argparse.SUPPRESS)
  # argparse knows no flag with any name in it.
  words = [re.sub(r"^--gin\.(.+?)=", r"--gin_bindings=\1 = ", word) for word in argv]
  return name, module, parser.parse_args(words[name.count(" ") + 1 :])


def main(argv: Sequence[str] | None = None) -> int:
  """Runs one command and returns its exit code."""
  name, module, args = parse(sys.argv[1:] if argv is None else argv)
  if name not in _ON_DEVICES:
    os.environ["JAX_PLATFORMS"] = "cpu"
  os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # jax sets another one when it is imported
  try:
    return module.run(args)
  except BrokenPipeError:  # `| head` has seen enough
    sys.stderr.close()
    return 1
  except KeyboardInterrupt:
    return 130
  except Exception as e:
    if args.debug:
      raise
    text = one_line(e)
    print(f"nm-sparsity {name}: {text}", file=sys.stderr)
    if args.error_file:
      pathlib.Path(args.error_file).write_text(json.dumps({"error": text}))
    return 1


def one_line(error: BaseException) -> str:
  """Returns an error as one line: its text, with its class where the text alone says too little."""
  text = str(error).partition("In call to configurable")[0]  # gin's account of the calls follows
  # A name from outside must not control the terminal.
  text = printable(" ".join(text.split()))
  if isinstance(error, ValueError | RuntimeError | OSError | ImportError) and text:
    return text
  return f"{type(error).__name__}: {text}"


def _parser() -> argparse.ArgumentParser:
  """Returns the parser for words that name no command."""
  lines = columns([(f"  {name}", line) for name, (_, line) in COMMANDS.items()])
  parser = argparse.ArgumentParser(
    prog="nm-sparsity",
    usage="nm-sparsity [--version] COMMAND ...",
    description="N:M sparse training: what surrounds a run.",
    epilog="\n".join(["commands:", *lines, "\n`nm-sparsity COMMAND --help` says more."]),
    formatter_class=argparse.RawDescriptionHelpFormatter,
    allow_abbrev=False,
  )
  parser.add_argument("--version", action="version", version=f"nm-sparsity {__version__}")
  words = dict.fromkeys(name.split()[0] for name in COMMANDS)
  parser.add_argument("command", choices=words, nargs="?", help=argparse.SUPPRESS)
  return parser
