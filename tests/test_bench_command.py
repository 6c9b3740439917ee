"""nm-sparsity bench as it is typed: products alone, what is refused, the table of this machine."""

import json

import pytest

from nm_sparsity_jax import cli
from nm_sparsity_jax.core.packed import cpu

# --- products alone -------------------------------------------------------------------------------


@pytest.mark.parametrize(
  "pattern, depth, said",
  [
    ("1:512", 512, "256 entries"),
    ("4:4", 16, "every weight"),
    ("1:8", 12, "multiple of 8"),
    ("8:1", 16, "8:1"),
  ],
)
def test_a_pattern_that_the_kernels_lack_is_one_sentence(pattern, depth, said, capsys):
  assert cli.main(["bench", "--shapes", f"{depth},8,1", "--pattern", pattern]) == 1
  told = capsys.readouterr().err
  assert said in told and told.count("\n") == 1


def test_without_a_compiler_it_says_so_and_scans(monkeypatch, capsys):
  monkeypatch.setattr(cpu, "missing", lambda packed=None: "g++ is not there")
  assert cli.main(["bench", "--shapes", "16,8,1", "16,8,20", "--turns", "3", "--json"]) == 0
  told = json.loads(capsys.readouterr().out)
  assert {p["packed_way"] for p in told["products"]} == {"xla_scan"}
  # Nothing runs end to end here.
  assert "2 of these `auto` would multiply densely, since " in told["notes"][1]
  assert "xla_scan multiplies instead: g++ is not there." in told["notes"][0]
  assert cli.main(["bench", "--shapes", "16,8,1", "--backend", "cpu_ffi", "--turns", "3"]) == 1
  assert "backend 'cpu_ffi' cannot be used: g++ is not there." in capsys.readouterr().err


def test_what_is_typed_wrong_is_one_line(tmp_path, capsys):
  for argv, word in (
    ([], "--shapes"),
    (["F", "--shapes", "8,8,1"], "--shapes"),
    (["F", "--pattern", "1:8"], "patterns of its own"),
    (["--shapes", "8,8,1", "--batch", "4"], "--batch"),
    (["--shapes", "8,8,1", "--gin.X=1"], "--gin_bindings"),
    (["F.safetensors"], "F.safetensors"),
    (["--shapes", "8,8,1", "--out", f"{__file__}/a/b.html"], "--out"),
    (["--shapes", "8,8,1", "--out", str(tmp_path)], "--out"),
    (["--shapes", "8,8,1", "--cores", "4096"], "--cores=4096"),
    (["--shapes", "8,0,1"], "features=0"),
  ):
    assert cli.main(["bench", *argv]) == 1
    err = capsys.readouterr().err
    assert word in err and err.count("\n") == 1
  with pytest.raises(SystemExit):
    cli.main(["bench", "--shapes", "8x8"])
