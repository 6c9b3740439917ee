"""`nm-sparsity`: the command line. Each command is a module, imported when it is chosen.

    argv -> table of commands -> module.add_arguments(parser), module.run(args) -> exit code

Nothing heavy is imported before the arguments are parsed, so `--help` is quick. Exit codes: 0 =
done, or yes; 1 = failed, or no; 2 = the command line is wrong.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from nm_sparsity_jax._version import __version__

# name -> (module, help in one line)
COMMANDS = {
  "gin-path": ("gin_path", "print the folder that holds gin_configs/, for --gin_search_paths"),
  "train": ("train", "train on the devices of this machine, without T5X"),
  "eval": ("eval", "evaluate a checkpoint on the devices of this machine, without T5X"),
  "plan": ("plan", "say what a run would do, and what it would stumble over, before it starts"),
  "verify": ("verify", "prove, group by group, that a checkpoint is n:m"),
  "finalize": ("finalize", "write a checkpoint with exact zeros, and prove it"),
  "doctor": ("doctor", "say what is missing or in conflict in this environment, and the remedy"),
}


def main(argv: Sequence[str] | None = None) -> int:
  """Runs one command; its exit code."""
  argv = list(sys.argv[1:] if argv is None else argv)
  if not argv or argv[0] not in COMMANDS:
    _parser().parse_args(argv)  # --help and --version end here, and so do mistakes
    _parser().print_help()
    return 2
  name, *rest = argv
  module_name, help_line = COMMANDS[name]
  module = importlib.import_module(f"nm_sparsity_jax.commands.{module_name}")
  parser = argparse.ArgumentParser(
    prog=f"nm-sparsity {name}",
    description=module.__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
    allow_abbrev=False,
  )
  module.add_arguments(parser)
  parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
  args = parser.parse_args(rest)
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
    print(f"nm-sparsity {name}: {one_line(e)}", file=sys.stderr)
    return 1


def one_line(error: BaseException | str) -> str:
  """An error as one line: its text, and its class where the text alone would say too little."""
  text = " ".join(str(error).split())
  if isinstance(error, str | ValueError | RuntimeError) and text:
    return text
  return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _parser() -> argparse.ArgumentParser:
  width = max(map(len, COMMANDS))
  lines = [f"  {name.ljust(width)}  {line}" for name, (_, line) in COMMANDS.items()]
  parser = argparse.ArgumentParser(
    prog="nm-sparsity",
    usage="nm-sparsity [--version] COMMAND ...",
    description="N:M sparse training: what surrounds a run.",
    epilog="commands:\n" + "\n".join(lines) + "\n\n`nm-sparsity COMMAND --help` tells more.",
    formatter_class=argparse.RawDescriptionHelpFormatter,
    allow_abbrev=False,
  )
  parser.add_argument("--version", action="version", version=f"nm-sparsity {__version__}")
  parser.add_argument("command", choices=COMMANDS, nargs="?", help=argparse.SUPPRESS)
  return parser


if __name__ == "__main__":
  sys.exit(main())
