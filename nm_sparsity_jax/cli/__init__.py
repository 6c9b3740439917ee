"""`nm-sparsity`: the command line. Each command is a module, imported when it is chosen.

    argv -> table of commands -> module.add_arguments(parser), module.run(args) -> exit code
    an error of the library -> one line

Nothing heavy is imported before the arguments are parsed, so `--help` is quick. Exit codes: 0 =
done, or yes; 1 = failed, or no; 2 = the command line is wrong.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import sys
import types
from collections.abc import Sequence

from nm_sparsity_jax._version import __version__
from nm_sparsity_jax.core.text import columns

# name -> help in one line. A name of two words is a command of a group. The module has an
# underscore for each space or hyphen of the name.
COMMANDS = {
  "gin-path": "print the folder that holds gin_configs/, docs/ and examples/",
  "quickstart": "train, prune and score a tiny T5, in minutes on a CPU",
  "train": "train on the devices of this machine, without T5X",
  "eval": "evaluate a checkpoint on the devices of this machine, without T5X",
  "infer": "write the predictions of a checkpoint, without T5X",
  "rows": "list the paper's rows with their published scores, and search them",
  "plan": "show what a run would do, and what is wrong, before it starts",
  "verify": "prove, group by group, that a checkpoint is n:m",
  "finalize": "write a checkpoint with exact zeros, and prove it",
  "export": "write a checkpoint for timm or Hugging Face, and prove it",
  "convert": "make a checkpoint for T5X of a folder of Hugging Face's T5",
  "pack": "write a checkpoint without its zeros, and say what that saves",
  "bench": "measure packed weights against dense ones: per layer and end to end",
  "report": "make one HTML page of runs: curves, schedules, scores, settings",
  "sweep": "train a grid of recipes x patterns x seeds from one file, and compare them",
  "doctor": "say what is missing or in conflict in this environment, and how to fix it",
  "glue score": "print what runs scored, next to the published rows",
  "glue submit": "make GLUE's official zip of predictions",
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
  module = importlib.import_module(f"nm_sparsity_jax.cli.{re.sub('[ -]', '_', name)}")
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
    from nm_sparsity_jax.integrations import gin_files
    from nm_sparsity_jax.runs import files

    text = gin_files.message(e)
    print(f"nm-sparsity {name}: {text}", file=sys.stderr)
    if args.error_file:
      files.write_json(args.error_file, {"error": text})
    return 1


def _parser() -> argparse.ArgumentParser:
  """Returns the parser for words that name no command."""
  lines = columns([(f"  {name}", line) for name, line in COMMANDS.items()])
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
