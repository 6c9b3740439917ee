"""English to German from packages of Debian: sentence pairs, a vocabulary, two seqio tasks.

    python benchmarks/debian_ende.py     fetches 11 MB; once on a machine
    debian_ende.register()               tasks beside nm_wmt17_ende; debian_ende.gin calls it

    packages -> pages, entries -> pairs -> [split] -> SOURCE-SPLIT.{en,de} -> vocabulary, tasks

The help of LibreOffice (MPL-2.0) has the same ids of paragraphs in both languages. The dictionary
of TU Chemnitz (GPL-2+) has an entry a line. Whole pages are held out, since sentences of one page
are alike, and whole entries. English that training has word for word is in no other split.
"""

from __future__ import annotations

import hashlib
import html
import itertools
import pathlib
import re
import subprocess
import tempfile
from collections.abc import Iterator

TASKS = {"help": "nm_debian_help", "dictionary": "nm_debian_dictionary"}  # of each source
PACKAGES = "trans-de-en libreoffice-help-de libreoffice-help-en-us"
VERSIONS = "trans-de-en 1.9-6 and libreoffice-help 4:7.4.7-1+deb12u14 of Debian 12"
SPLITS = ("train", "validation", "test")
SHA256 = "a9ec899a4a667e215b1ed5acc3d93895c47696dec830d03a41950a8dfc644f9a"  # of all files of pairs
# Other pairs have another folder, and so do the networks that were trained on them.
FOLDER = pathlib.Path.home() / f".cache/nm-sparsity/debian_ende_{SHA256[:8]}"
VOCABULARY = FOLDER / "vocabulary.model"
LONGEST = 20  # words of a sentence; a small network learns little of longer ones
HELD_OUT = 1500  # pairs of a split at most; the dictionary's 3700 took most of a decoding's time
PIECES = 2048  # of the vocabulary; logits of 4096 would cost a small network as much as its layers

# A text that differs by system or module has one hidden span a case; the usual one has no class.
_CASE = re.compile(
  r'(?s)<span hidden="true"[^>]*class=[^>]*>'
  "(?:(?!</?span).|<span[^>]*>(?:(?!</?span).)*</span>)*</span>"
)
_PARAGRAPH = re.compile(r'(?s)<(p|h\d) id="((?:par|hd)_id\w+)"[^>]*>(.*?)</\1>')
# Remarks in brackets, synonyms after the first, and the space that they leave before a mark.
_REMARK = re.compile(
  r"\s*(?:\{[^}]*\}|\[[^]]*\]|\([^)]*\)|<[^>]*>|/[A-Z]\w*/|;.*|(?=[.,!?](?:\s|$)))"
)


def paragraphs(page: str) -> dict[str, str]:
  """Returns id -> text of a page of the help."""
  text = lambda inner: " ".join(html.unescape(re.sub(r"<[^>]*>", "", inner)).split())
  return {name: text(inner) for _, name, inner in _PARAGRAPH.findall(_CASE.sub("", page))}


def of_help(folder: pathlib.Path) -> Iterator[tuple[str, str, str]]:
  """Yields page, English and German of each paragraph that both have."""
  for path in sorted((folder / "de").rglob("*.html")):
    name = str(path.relative_to(folder / "de"))
    pages = (path, folder / "en-US" / name)
    german, english = (paragraphs(page.read_text("utf8")) for page in pages)
    yield from ((name, english[key], german[key]) for key in english.keys() & german.keys())


def of_dictionary(path: pathlib.Path) -> Iterator[tuple[str, str, str]]:
  """Yields entry, English and German of each part of an entry."""
  for line in path.read_text("utf8").splitlines():
    first, _, second = (side.split("|") for side in line.partition(" :: "))
    if len(first) == len(second):
      for parts in zip(first, second, strict=True):
        german, english = (" ".join(_REMARK.sub("", part).split()) for part in parts)
        yield line, english, german


Pairs = dict[tuple[str, str], list[tuple[str, str]]]  # (source, split) -> English, German


def split(folder: pathlib.Path) -> Pairs:
  """Returns the pairs of each source and split, in the order of their hashes."""
  order = lambda texts: hashlib.sha256("\t".join(texts).encode()).digest()
  found = {(source, name): set() for source in TASKS for name in SPLITS}
  for source, triples in (
    ("help", of_help(folder / "usr/share/libreoffice/help")),
    ("dictionary", of_dictionary(folder / "usr/share/trans/de-en")),
  ):
    for document, *pair in triples:
      if all(3 <= len(text.split()) <= LONGEST for text in pair) and pair[0] != pair[1]:
        bucket = order([document])[0] % 16  # a sixteenth of the documents for each
        held = {0: "validation", 1: "test"}.get(bucket, "train")
        found[source, held].add(tuple(pair))
  known = {english for source in TASKS for english, _ in found[source, "train"]}
  ordered = {key: sorted(pairs, key=order) for key, pairs in found.items()}
  for (source, name), pairs in ordered.items():
    if name != "train":
      ordered[source, name] = [pair for pair in pairs if pair[0] not in known][:HELD_OUT]
  return ordered


def prepare() -> None:
  """Fetches the packages, and writes what `write` does."""
  with tempfile.TemporaryDirectory() as home:
    fetch = f"apt-get download {PACKAGES} && for f in *.deb; do dpkg-deb -x $f .; done"
    try:
      subprocess.run(fetch, shell=True, cwd=home, check=True)
    except subprocess.CalledProcessError as e:
      raise ValueError(
        f"the pairs come from {VERSIONS}, and their download failed: {e}. Run apt-get "
        f"update first; without apt, copy {FOLDER} from a machine that has it."
      ) from e
    pairs = split(pathlib.Path(home))
  files = texts(pairs)
  digest = hashlib.sha256(b"".join(files.values())).hexdigest()
  if digest != SHA256:
    raise ValueError(
      f"the pairs have the SHA-256 {digest}, not {SHA256}, so scores would not compare: take "
      f"{VERSIONS}."
    )
  write(files)


def texts(pairs: Pairs) -> dict[str, bytes]:
  """Returns the name of each file -> what is in it, a sentence a line."""
  return {
    f"{source}-{name}.{language}": "".join(f"{pair[i]}\n" for pair in found).encode()
    for (source, name), found in pairs.items()
    for i, language in enumerate(("en", "de"))
  }


def write(files: dict[str, bytes]) -> None:
  """Writes the files of pairs and the vocabulary, a sentencepiece model of both languages."""
  import sentencepiece

  FOLDER.mkdir(parents=True, exist_ok=True)
  for name, data in files.items():
    (FOLDER / name).write_bytes(data)
  read = [data.decode().splitlines() for name, data in files.items() if "-train." in name]
  sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=itertools.chain(*read),
    model_prefix=str(VOCABULARY.with_suffix("")), vocab_size=PIECES, model_type="bpe",
    num_threads=1, character_coverage=1.0, pad_id=0, eos_id=1, unk_id=2, bos_id=-1, minloglevel=2,
    normalization_rule_name="identity",
  )  # fmt: skip


def register() -> dict[str, int]:
  """Registers the tasks of both sources, with the text format and BLEU of WMT; returns their rates.

  Three of four pairs are of the help: its sentences are what a network is scored on.
  """
  import seqio

  from t5x_tasks import metrics, sources, wmt
  from t5x_tasks.glue import add_task

  if not VOCABULARY.exists():
    prepare()
  vocabulary = seqio.SentencePieceVocabulary(str(VOCABULARY))
  for origin, task in TASKS.items():
    stems = {name: f"{origin}-{name}" for name in SPLITS}
    source = sources.Parallel(FOLDER, stems, wmt.LANGUAGES)
    add_task(task, source, vocabulary, wmt.text_format, None, [metrics.bleu])
  return {TASKS["help"]: 3, TASKS["dictionary"]: 1}


if __name__ == "__main__":
  prepare()
