"""nm-sparsity bench as it is typed: products alone, and what is refused."""

import json

import pytest

from nm_sparsity_jax import cli
from nm_sparsity_jax.core.packed import cpu


def test_without_a_compiler_it_says_so_and_scans(monkeypatch, capsys):
  monkeypatch.setattr(cpu, "missing", lambda packed=None: "g++ is not there")
  assert cli.main(["bench", "--shapes", "16,8,1", "--turns", "3", "--json"]) == 0
  found = json.loads(capsys.readouterr().out)
  assert {p["packed_way"] for p in found["products"]} == {"xla_scan"}
  assert "g++ is not there" in found["notes"][0]
  assert cli.main(["bench", "--shapes", "16,8,1", "--backend", "cpu_ffi", "--turns", "3"]) == 1
  assert "g++ is not there" in capsys.readouterr().err


@pytest.mark.parametrize(
  "argv, word",
  [
    ([], "--shapes"),
    (["F", "--shapes", "8,8,1"], "--shapes"),
    (["F", "--pattern", "1:8"], "--pattern"),
    (["--shapes", "8,8,1", "--batch", "4"], "--batch"),
    (["--shapes", "8,8,1", "--gin.X=1"], "--gin_bindings"),
    (["F.safetensors"], "F.safetensors"),
    (["--shapes", "8,8,1", "--out", f"{__file__}/a/b.html"], "--out"),
    (["--shapes", "8,8,1", "--cores", "4096"], "--cores=4096"),
    (["--shapes", "8,0,1"], "features=0"),
    (["--shapes", "512,8,1", "--pattern", "1:512"], "256 entries"),
    (["--shapes", "16,8,1", "--pattern", "4:4"], "every weight"),
    (["--shapes", "12,8,1", "--pattern", "1:8"], "multiple of 8"),
    (["--shapes", "16,8,1", "--pattern", "8:1"], "8:1"),
  ],
)
def test_what_is_typed_wrong_is_one_line(argv, word, capsys):
  assert cli.main(["bench", *argv]) == 1
  err = capsys.readouterr().err
  assert word in err and err.count("\n") == 1


def test_a_shape_is_three_numbers():
  with pytest.raises(SystemExit):
    cli.main(["bench", "--shapes", "8x8"])
