"""English to German from packages of Debian: sentence pairs, a vocabulary, a seqio task.

    python benchmarks/debian_ende.py     fetches 11 MB; once on a machine
    debian_ende.register()               a task beside nm_wmt17_ende; a gin file can call it

    packages -> help pages, dictionary -> pairs -> [split] -> SPLIT.en, SPLIT.de -> vocabulary, task

The help of LibreOffice (MPL-2.0) has the same ids of paragraphs in both languages. The dictionary
of TU Chemnitz (GPL-2+) has an entry a line. Whole pages are held out, since sentences of one page
are alike, and whole entries. English that training has word for word is in no
other split.
"""

from __future__ import annotations

import hashlib
import html
import pathlib
import re
import subprocess
import tempfile
from collections.abc import Iterator

NAME = "nm_debian_ende"
PACKAGES = "trans-de-en libreoffice-help-de libreoffice-help-en-us"
SPLITS = ("train", "validation", "test", "dictionary")  # the second and third: of the help
SHA256 = "baf3c17b2ecb5147853ed8a1cbca569a26e2039a8fcf3e15f516d4480372e198"  # of all files of pairs
FOLDER = pathlib.Path.home() / ".cache/nm-sparsity/debian_ende"
VOCABULARY = FOLDER / "vocabulary.model"
PIECES = 2048  # of the vocabulary; 4096 would be half of the work of a small network

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


def split(folder: pathlib.Path) -> dict[str, list[tuple[str, str]]]:
  """Returns split -> its pairs, in the order of their hashes."""
  order = lambda texts: hashlib.sha256("\t".join(texts).encode()).digest()
  found = {name: set() for name in SPLITS}
  for held, triples in (
    (SPLITS[1:3], of_help(folder / "usr/share/libreoffice/help")),
    (SPLITS[3:], of_dictionary(folder / "usr/share/trans/de-en")),
  ):
    for document, *pair in triples:
      if all(3 <= len(text.split()) <= 50 for text in pair) and pair[0] != pair[1]:
        bucket = order([document])[0] % 16  # a sixteenth of the documents for each
        found[held[bucket] if bucket < len(held) else "train"].add(tuple(pair))
  known = {english for english, _ in found["train"]}
  for name in SPLITS[1:]:
    found[name] = {pair for pair in found[name] if pair[0] not in known}
  return {name: sorted(pairs, key=order) for name, pairs in found.items()}


def prepare() -> None:
  """Fetches the packages, and writes what `write` does."""
  with tempfile.TemporaryDirectory() as home:
    fetch = f"apt-get download {PACKAGES} && for f in *.deb; do dpkg-deb -x $f .; done"
    try:
      subprocess.run(fetch, shell=True, cwd=home, check=True)
    except subprocess.CalledProcessError as e:
      raise ValueError(
        f"the pairs come from Debian 12's packages, and their download failed: {e}. Run apt-get "
        f"update first; without apt, copy {FOLDER} from a machine that has it."
      ) from e
    pairs = split(pathlib.Path(home))
  files = texts(pairs)
  digest = hashlib.sha256(b"".join(files.values())).hexdigest()
  if digest != SHA256:
    raise ValueError(
      f"the pairs have the SHA-256 {digest}, not {SHA256}, so scores would not compare: take "
      "Debian 12's packages."
    )
  write(files)


def texts(pairs: dict[str, list[tuple[str, str]]]) -> dict[str, bytes]:
  """Returns the name of each file -> what is in it, a sentence a line."""
  return {
    f"{name}.{language}": "".join(f"{pair[i]}\n" for pair in found).encode()
    for name, found in pairs.items()
    for i, language in enumerate(("en", "de"))
  }


def write(files: dict[str, bytes]) -> None:
  """Writes the files of pairs and the vocabulary, a sentencepiece model of both languages."""
  import sentencepiece

  FOLDER.mkdir(parents=True, exist_ok=True)
  for name, data in files.items():
    (FOLDER / name).write_bytes(data)
  lines = (files["train.en"] + files["train.de"]).decode().splitlines()
  sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=iter(lines),
    model_prefix=str(VOCABULARY.with_suffix("")), vocab_size=PIECES, model_type="bpe",
    num_threads=1, character_coverage=1.0, pad_id=0, eos_id=1, unk_id=2, bos_id=-1, minloglevel=2,
    normalization_rule_name="identity",
  )  # fmt: skip


def register() -> str:
  """Registers nm_debian_ende, with the text format and BLEU of WMT, and returns its name."""
  import seqio

  from t5x_tasks import metrics, sources, wmt
  from t5x_tasks.glue import add_task

  if not VOCABULARY.exists():
    prepare()
  vocabulary = seqio.SentencePieceVocabulary(str(VOCABULARY))
  source = sources.Parallel(FOLDER, {name: name for name in SPLITS}, wmt.LANGUAGES)
  add_task(NAME, source, vocabulary, wmt.text_format, None, [metrics.bleu])
  return NAME


if __name__ == "__main__":
  prepare()
