"""Breaks masks, recipes and schedules in some places, one at a time; names what no test notices.

    make mutants SAMPLE=200      # a mutant takes about a minute, all 4,000 of them take days

It fails where more than a tenth of the mutants survive. A line with the comment `# no mutants: why`
is left out: only the speed depends on it, or another line would do the same. cosmic-ray edits
files, so it gets a clone of the last commit, in build/mutants.
"""

import os
import pathlib
import random
import shutil
import sqlite3
import subprocess
import sys

MODULES = (
  "nm_sparsity_jax/recipes",
  "nm_sparsity_jax/core/masks",
  "nm_sparsity_jax/core/schedules.py",
)
TESTS = ("patterns", "schedules", "recipes", "masks", "every_recipe", "apply", "masks_tpu")
SURVIVORS = "10"  # percent
CONFIG = """
[cosmic-ray]
module-path = [{modules}]
timeout = 300.0
test-command = "{python} -m pytest -x -q -p no:xdist {tests}"
distributor.name = "local"
"""


def thin(path: pathlib.Path, count: int) -> None:
  """Leaves `count` mutants, drawn by chance."""
  with sqlite3.connect(path) as db:
    # `|` stands in types for the most part, which nothing runs.
    found = db.execute(
      "select job_id, module_path, start_pos_row from mutation_specs "
      "where operator_name not like '%\\_BitOr\\_%' escape '\\' "
      "order by module_path, operator_name, occurrence"
    ).fetchall()
    lines = {module: (path.parent / module).read_text().splitlines() for _, module, _ in found}
    rows = [(job,) for job, module, row in found if "no mutants" not in lines[module][row - 1]]
    kept = random.Random(0).sample(rows, min(count, len(rows)))
    db.execute("create temporary table kept (job_id)")
    db.executemany("insert into kept values (?)", kept)
    for table in ("mutation_specs", "work_items"):
      db.execute(f"delete from {table} where job_id not in (select job_id from kept)")
  print(f"{len(kept)} of {len(rows)} mutants; {len(found) - len(rows)} left out", flush=True)


def main(count: int) -> None:
  clone = pathlib.Path("build/mutants")
  shutil.rmtree(clone, ignore_errors=True)
  subprocess.run(["git", "clone", "--quiet", ".", str(clone)], check=True)
  modules = ", ".join(f'"{name}"' for name in MODULES)
  tests = " ".join(f"tests/test_{name}.py" for name in TESTS)
  config = CONFIG.format(modules=modules, tests=tests, python=sys.executable)
  (clone / "mutants.toml").write_text(config)
  # One cache of compiled programs for all mutants.
  programs = str((clone / "programs").absolute())
  environment = os.environ | {"PYTHONPATH": ".", "JAX_COMPILATION_CACHE_DIR": programs}

  def run(command, *arguments):
    tool = pathlib.Path(sys.executable).with_name(command)
    subprocess.run([tool, *arguments], cwd=clone, env=environment, check=True)

  run("cosmic-ray", "init", "mutants.toml", "mutants.sqlite")
  thin(clone / "mutants.sqlite", count)
  # Where the tests fail without a mutant, they would seem to kill every one.
  run("cosmic-ray", "baseline", "mutants.toml")
  run("cosmic-ray", "exec", "mutants.toml", "mutants.sqlite")
  run("cr-report", "--surviving-only", "--show-diff", "mutants.sqlite")
  run("cr-rate", "--fail-over", SURVIVORS, "mutants.sqlite")


if __name__ == "__main__":
  main(int(sys.argv[1]))
