"""nm-sparsity bench as it is typed: products alone, what is refused, the table of this machine."""

import functools
import json

import pytest

import nm_sparsity_jax as nms
from nm_sparsity_jax import benches, cli
from nm_sparsity_jax.benches import layers, results, tuning
from nm_sparsity_jax.packed import choice, cpu

# --- products alone -------------------------------------------------------------------------------


@pytest.mark.parametrize(
  "pattern, depth, said",
  [
    ("1:512", 512, "1:512 is not packed: an index reaches through 256 entries at most"),
    ("4:4", 16, "4:4 is not packed: it keeps every weight"),
    ("1:8", 12, "1:8 is not packed: a depth of 12 is not a multiple of 8"),
    ("8:1", 16, "Did you mean '1:8'"),
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
  for argv, said in (
    ([], "bench: give one of these: a checkpoint, or --shapes"),
    (["F", "--shapes", "8,8,1"], "a checkpoint and --shapes were given: give one of these"),
    (["--shapes", "8,8,1", "--tune"], "--shapes and --tune were given: give one of these"),
    (["F", "--pattern", "1:8"], "a checkpoint has patterns of its own"),
    (["--tune", "--pattern", "1:8"], "--pattern=1:8: --tune has patterns of its own"),
    (["--shapes", "8,8,1", "--batch", "4"], "--batch=4: --shapes gives the rows itself."),
    (["--shapes", "8,8,1", "--tokens", "4"], "--tokens=4: --shapes gives the rows itself."),
    (["--tune", "--inputs", "4"], "--inputs=4: --tune has rows of its own."),
    (["--tune", "--dtype", "int8"], "--dtype=int8: --tune measures float32. Leave it out."),
    (["--tune", "--backend", "auto"], "--backend=auto: --tune measures every backend."),
    (["--tune", "--out", "bench.html"], "--out=bench.html: --tune writes a table"),
    (["--tune", "--gin_file", "a.gin"], "--gin_file=a.gin: gin is read for a checkpoint alone."),
    (["--shapes", "8,8,1", "--gin.X=1"], "--gin_bindings=X = 1: gin is read for a"),
    (["--tune", "--json"], "bench: --json: --tune writes a table, and prints where. Leave it out."),
    (["F.safetensors"], "there is no checkpoint 'F.safetensors': looked at "),
    (["--shapes", "8,8,1", "--out", f"{__file__}/a/b.html"], "--out: "),
    (["--shapes", "8,8,1", "--out", str(tmp_path)], "is a folder: name a file in it"),
    (["--shapes", "8,8,1", "--cores", "4096"], "--cores=4096: this process has"),
    (["--shapes", "8,0,1"], "features=0: give a whole number, 1 or more"),
  ):
    assert cli.main(["bench", *argv]) == 1
    assert said in capsys.readouterr().err
  with pytest.raises(SystemExit):
    cli.main(["bench", "--shapes", "8x8"])
  assert "'8x8' is not K,F,ROWS" in capsys.readouterr().err


# --- the table of this machine --------------------------------------------------------------------


@pytest.fixture
def own_table(tmp_path, monkeypatch):
  """Where this machine's table would lie."""
  monkeypatch.setenv(choice.TUNED, str(tmp_path / "new" / "table.json"))
  choice.table.cache_clear()
  yield tmp_path / "new" / "table.json"
  choice.table.cache_clear()


def test_tune_writes_the_table_that_auto_reads(own_table, monkeypatch, capsys):
  """Of two shapes the slower one counts, and `auto` goes by it at once."""
  told = {(16, 8): 5.0, (8, 16): 3.0}
  one = functools.partial(
    results.Product, "tuned", 1, "", "float32", dense_way="", packed=1.0, packed_way="",
    is_taken=True, dense_bytes=1, packed_bytes=1,
  )  # fmt: skip

  def measured(name, kernels, rows, count, turns, way):
    (depth, features) = kernels[0].shape
    slow = told[depth, features] / (1 if way == "cpu_ffi" else 10)
    return one(depth=depth, features=features, rows=rows, dense=slow * rows)

  monkeypatch.setattr(layers, "measured", measured)
  monkeypatch.setattr(cpu, "missing", lambda packed=None: "")
  monkeypatch.setattr(cpu, "isa", lambda: "avx512")
  monkeypatch.setattr(choice, "cores", lambda: 2)
  for name, value in (("SHAPES", tuple(told)), ("PATTERNS", ("1:8", "2:4")), ("ROWS", (1, 4))):
    monkeypatch.setattr(tuning, name, value)
  assert cli.main(["bench", "--tune"]) == 0
  assert capsys.readouterr().out == f"{own_table}\n"
  known = choice.table()["backends"]
  assert known["cpu_ffi avx512, several cores, tiny"] == {
    "rows": [1, 4], "speed": {"2": [3.0, 12.0], "8": [3.0, 12.0]}
  }  # fmt: skip
  name = "xla_scan, several cores"
  assert choice.row("xla_scan") == name
  assert known[f"{name}, tiny"]["speed"]["8"] == [0.3, 1.2]
  assert choice.speed(name, layers.random(16, 8, nms.NM(1, 8)), 1) == 0.3
  for name, value in (("rows", ()), ("rows", (4, 1)), ("turns", 2)):
    with pytest.raises(ValueError, match=f"{name}="):
      benches.tune(**{name: value})
