"""Reads gin files and runs T5X's programs in a process of its own: JSON cases in, findings out.

    {"main": "train", "files": [...], "bindings": [...]}                   -> fields of the network
    {"main": "train", "files": [...], "bindings": [...], "call": "train"}  -> {}

One process serves many cases: importing T5X costs most.
"""

import dataclasses
import importlib
import importlib.util  # gin uses it and does not import it
import json
import pathlib
import sys
import warnings

ROOT = pathlib.Path(__file__).resolve().parents[1]


def read(files, bindings):
  """Parses as T5X's commands do: files in order, then bindings, then finalize."""
  import gin

  gin.clear_config()
  gin.parse_config_files_and_bindings(files, bindings)


def run(case):
  """One case."""
  import gin

  module = importlib.import_module(f"t5x.{case['main']}")
  sys.modules["__main__"] = module  # run files import their command as __main__
  read(case["files"], case["bindings"])
  if call := case.get("call"):
    gin.get_configurable(getattr(module, call))()
    return {}
  config = gin.query_parameter("MODEL/macro.value").scoped_configurable_fn().module.config
  return {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}


def main():
  warnings.simplefilter("ignore")
  import gin

  t5x = next(iter(importlib.util.find_spec("t5x").submodule_search_locations))  # type: ignore
  for folder in ROOT, pathlib.Path(t5x).parent:
    gin.add_config_file_search_path(str(folder))
  found = {name: run(case) for name, case in json.load(sys.stdin).items()}
  print("\n" + json.dumps(found, default=str))


if __name__ == "__main__":
  main()
