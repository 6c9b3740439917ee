"""The quickstart: a sweep of one seed, its proof and its page."""

import pytest
from checkout import python
from test_sweep import here  # noqa: F401  (a fixture; it skips without gin)

from nm_sparsity_jax import cli
from nm_sparsity_jax.analysis import sweep
from nm_sparsity_jax.cli import quickstart


@pytest.mark.parametrize("hold", ["", "sr_ste-1_8-seed0"])
def test_each_command_is_shown_and_run_until_one_fails(hold, here, monkeypatch, capsys):  # noqa: F811
  if hold:  # as after SIGTERM: a sweep ends with 0 when its run has saved
    monkeypatch.setattr(sweep, "train", lambda *_: (0, "SIGTERM"))
  main, called = cli.main, []

  def noted(argv):
    called.append(argv[0])
    return main(argv) if argv[0] == "sweep" else len(called) > 4

  monkeypatch.setattr(cli, "main", noted)
  assert main(["quickstart"]) == 1
  assert called == (["sweep"] if hold else ["sweep", *["verify"] * 3, "report"])
  said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("$ ")]
  assert len(said) == len(called)


@pytest.mark.slow
@pytest.mark.parametrize("task", quickstart.FILES)
def test_all_of_it_is_proven_and_convincing(task, tmp_path, monkeypatch):
  """All are far above chance. Never ranks: it is one seed."""
  pytest.importorskip("seqio", reason="the local runner needs seqio: pip install -e '.[local]'")
  words = "-m", "nm_sparsity_jax.cli", "quickstart", "--task", task
  assert python(*words, cwd=tmp_path, timeout=None).count("\nok\n") == 3
  if task == "rebus":
    return  # benchmarks/results/recipes_rebus.jsonl has its scores
  monkeypatch.chdir(tmp_path)
  rows = sweep.table(sweep.read(quickstart.FILES[task]))["rows"]
  scores = {row["recipe"]: row["score"]["mean"] for row in rows}
  assert scores["dense"] > 93 and min(scores.values()) > 85  # the largest class has 38.3
