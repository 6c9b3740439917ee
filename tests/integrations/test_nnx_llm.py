"""The example of NNX runs as a user would run it, and ends as it says; so does its notebook."""

import json
import pathlib
import re

import jax
import pytest

ROOT = pathlib.Path(__file__).parents[2]


def test_nnx_llm_learns_and_ends_1_of_4_and_its_notebook_is_the_same_program(monkeypatch, capsys):
  plt = pytest.importorskip("matplotlib.pyplot")
  plt.switch_backend("agg")
  drawn = []
  monkeypatch.setattr(plt, "show", lambda: drawn.append(plt.gca().lines) or plt.close("all"))
  cells = json.loads((ROOT / "examples/nnx_llm.ipynb").read_text("utf-8"))["cells"]
  *program, plot = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
  script = (ROOT / "examples/nnx_llm.py").read_text("utf-8").partition('"""\n\n')[2]
  assert "\n".join(program).split() == script.split()

  short = script.replace("STEPS, LENGTH, WIDTH = 400, 64, 64", "STEPS, LENGTH, WIDTH = 60, 32, 32")
  names = {}
  with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
    exec(compile(short, "nnx_llm", "exec"), names)
    exec(compile(plot, "nnx_llm", "exec"), names)
  said = capsys.readouterr().out
  assert said.rstrip().endswith("\nok") and "blocks/{0,1}/attn/out/kernel" in said
  for name in ("dense", "1:4"):
    losses = names["losses"][name]
    assert len(losses) == 60 and losses[-1] < losses[0] * 0.8
    assert float(re.search(rf"^{name}: loss (\S+),", said, re.MULTILINE)[1]) < losses[0]
  assert len(drawn[0]) == 2
