"""benchmarks/debian_ende.py: what is a pair, and what is held out. The packages are made up."""

import importlib

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from study_records import ROOT

assert ROOT  # puts benchmarks/ where the next line looks
debian = importlib.import_module("debian_ende")
Row = importlib.import_module("_recipes_file").Row

CASES = """Choose <span class="switchinline"><span hidden="true" id="MACx" class="MAC"><span
class="emph">Preferences</span></span><span hidden="true" id="defaultx">Tools</span></span>."""


def write(path, text):
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(text, "utf8")


@pytest.fixture
def packages(tmp_path):
  """200 pages of two paragraphs, one of them the same on all, and 200 entries of two parts."""
  home = tmp_path / "usr/share"
  for i in range(200):
    for language, word in (("de", "Seite"), ("en-US", "page")):
      text = f'<h1 id="hd_id1">The {word} is {i}</h1><p id="par_id2">The {word} ends</p>'
      write(home / f"libreoffice/help/{language}/text/{i}.html", text)
  lines = (
    f"das Haus {i} {{n}} | des Hauses {i} :: the house {i} | of house {i}" for i in range(200)
  )
  write(home / "trans/de-en", "\n".join(["# License :: GPL Version 2 or later", *lines]))
  return tmp_path


def test_a_text_is_what_a_reader_sees(tmp_path):
  page = f'<p id="par_id1" class="x">{CASES}</p><p>A footer</p><h2 id="hd_id2">A&amp;B</h2>'
  assert debian.paragraphs(page) == {"par_id1": "Choose Tools.", "hd_id2": "A&B"}
  line = "die Zeit {f}; Frist [jur.] | Es ist Zeit {f} . :: the time /TM/ | It is time!"
  write(tmp_path / "de-en", line)
  assert [*debian.of_dictionary(tmp_path / "de-en")] == [
    (line, "the time", "die Zeit"), (line, "It is time!", "Es ist Zeit."),
  ]  # fmt: skip


def test_pages_and_entries_are_held_out_whole(packages):
  found = debian.split(packages)
  for source, word in (("help", "page is"), ("dictionary", "house")):
    pairs = [found[source, name] for name in debian.SPLITS]
    # An entry has two pairs of one number.
    held = [{english.split()[-1] for english, _ in part if word in english} for part in pairs]
    assert all(held) and len(set.union(*held)) == sum(map(len, held)) == 200
  # What all pages say is trained on, and nowhere else.
  everywhere = ("The page ends", "The Seite ends")
  assert [key for key, pairs in found.items() if everywhere in pairs] == [("help", "train")]


def test_without_apt_one_sentence_says_what_to_do(monkeypatch, tmp_path):
  monkeypatch.setattr(debian, "FOLDER", tmp_path)
  monkeypatch.setenv("PATH", str(tmp_path))
  pytest.importorskip("sentencepiece")
  with pytest.raises(ValueError, match="without apt, copy"):
    debian.prepare()


@pytest.fixture
def translation():
  for name in ("seqio", "sacrebleu", "sentencepiece"):
    pytest.importorskip(name)
  return importlib.import_module("_recipes_translation")


def test_what_is_quicker_changes_no_more_than_rounding_does(translation):
  network = translation.Translation(width=8, heads=2).network(ff=True)
  rows = jax.random.randint(jax.random.key(0), (2, 160), 0, debian.PIECES)
  params = network.init(jax.random.key(1), rows)["params"]
  loss = lambda params: jnp.square(network.apply({"params": params}, rows)).mean()
  plain = jax.value_and_grad(loss)(params)
  with nn.intercept_methods(translation._quicker):
    quicker = jax.value_and_grad(loss)(params)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-6), plain, quicker)


@pytest.mark.slow
def test_a_run_trains_from_one_start_proves_its_pattern_and_translates(
  packages, translation, monkeypatch
):
  monkeypatch.setattr(debian, "FOLDER", packages)
  monkeypatch.setattr(debian, "VOCABULARY", packages / "vocabulary.model")
  monkeypatch.setattr(debian, "PIECES", 60)
  monkeypatch.setitem(translation.START, "steps", 2)
  debian.write(debian.texts(debian.split(packages)))
  row = Row("sr_ste", dense=0, decoupled=True, lam=2.0)
  run = lambda seed: translation.train("debian_ende_1_16", row, "1:8", 4, seed)
  one, same, other = run(1), run(1), run(2)
  assert one["density"] == 0.125 and one["start"]["steps"] == 2
  assert one["cross_entropy"] == same["cross_entropy"] != other["cross_entropy"]
  assert one["start"] == other["start"]
  (first, *_) = one["samples"]
  files = (packages / f"help-test.{language}" for language in ("en", "de"))
  scored = zip(*(file.read_text("utf8").splitlines() for file in files), strict=True)
  assert (first["english"], first["german"]) in scored
  assert 0 <= one["bleu"] < 100 and 0 <= one["bleu_dictionary"] < 100
  dense = translation.train("debian_ende_1_16", Row("dense"), "-", 4, 1)
  assert dense["density"] == 1 and dense["start"] == one["start"]
  lost = translation.train("debian_ende_1_16", Row("dense", rate=1e30), "-", 4, 1)
  assert lost["diverged"] and lost["bleu"] == 0
