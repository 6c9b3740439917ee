"""The tasks against hand-made examples: T5's strings, labels, metrics; rows of every source."""

import functools
import importlib
import socket
import sys
import types
import warnings

import pytest
import tasks_found

pytestmark = pytest.mark.filterwarnings("ignore")  # TensorFlow, seqio, TFDS, on their own account

if reason := tasks_found.why_not():
  pytest.skip(reason, allow_module_level=True)

with warnings.catch_warnings(action="ignore"):
  import seqio
  import tensorflow as tf

  import t5x_tasks
  from nm_sparsity_jax.runs import glue as glue_table
  from t5x_tasks import glue, metrics, sources

CONFIGS = [*glue_table.TASKS]
BYTES = seqio.ByteVocabulary()


@pytest.fixture(autouse=True)
def as_imported():
  """Tests register tasks anew; this puts back what the import registered."""
  yield
  tasks_found.register_again()


# --- registration ---------------------------------------------------------------------------------


def test_the_import_registers_t5s_mixtures_reads_nothing_and_may_be_repeated(monkeypatch):
  for module in [m for m in sys.modules if m.partition(".")[0] == "t5x_tasks"]:
    monkeypatch.delitem(sys.modules, module)
  for name in (f"nm_glue_{x}{c}" for x in ("", "mini_") for c in CONFIGS):
    seqio.TaskRegistry.remove(name)
  monkeypatch.setattr(socket, "socket", None)
  for _ in range(2):
    importlib.reload(importlib.import_module("t5x_tasks"))
  rates = {
    "cola": 8551, "sst2": 67349, "mrpc": 3668, "qqp": 363849, "stsb": 5749, "mnli": 392702,
    "qnli": 104743, "rte": 2490, "mnli_matched": 0, "mnli_mismatched": 0, "ax": 0,
  }  # fmt: skip
  dev = {"mnli": 1, "mnli_matched": 0, "mnli_mismatched": 0}
  mini = {config: 4096 * bool(rate) for config, rate in rates.items()}
  for prefix, proportional in (("nm_glue_", rates), ("nm_glue_mini_", mini)):
    for name, want in (("proportional", proportional), ("mnli_and_dev", dev)):
      found = seqio.get_mixture_or_task(f"{prefix}{name}").rate_per_task_name
      assert found == {f"{prefix}{config}": rate for config, rate in want.items()}


def test_every_task_takes_another_vocabulary():
  assert t5x_tasks.register_glue(vocabulary=BYTES, name="nm_glue_rte") == "nm_glue_rte"
  t5x_tasks.register_mini(vocabulary=BYTES)
  t5x_tasks.register_wmt(vocabulary=BYTES)
  for name in ("nm_glue_proportional", "nm_glue_mini_ax", "nm_wmt14_ende"):
    features = seqio.get_mixture_or_task(name).output_features
    assert all(f.vocabulary == BYTES and f.add_eos for f in features.values())
  assert seqio.get_mixture_or_task("nm_glue_rte").supports_caching


# --- T5's text format -----------------------------------------------------------------------------

# config: fields, input; label -> target. By hand, from T5's description.
AB = ({"sentence2": "B", "sentence1": "A"}, "{} sentence1: A sentence2: B")
NLI = (
  {"premise": "P", "hypothesis": "H"}, "mnli hypothesis: H premise: P",
  {0: "entailment", 1: "neutral", 2: "contradiction", -1: "<unk>"},
)  # fmt: skip
ENTAILS = {0: "entailment", 1: "not_entailment"}
EXAMPLES = {
  "cola": (
    {"sentence": " a  b "}, "cola sentence:  a  b ",
    {1: "acceptable", 0: "unacceptable", -1: "<unk>"},
  ),
  "sst2": ({"sentence": "so good "}, "sst2 sentence: so good ", {1: "positive", 0: "negative"}),
  "mrpc": (*AB, {1: "equivalent", 0: "not_equivalent", -1: "<unk>"}),
  "qqp": (
    {"question1": "A?", "question2": "ß?"}, "qqp question1: A? question2: ß?",
    {1: "duplicate", 0: "not_duplicate"},
  ),
  "stsb": (*AB, {
    0.0: "0.0", 0.1: "0.0", 0.3: "0.4", 0.5: "0.4", 1.25: "1.2", 1.5: "1.6", 2.5: "2.4",
    3.5: "3.6", 3.8: "3.8", 4.75: "4.8", 5.0: "5.0", -1.0: "-1.0",
  }),
  "qnli": ({"question": "Q?", "sentence": "S"}, "qnli question: Q? sentence: S", ENTAILS),
  "rte": (*AB, ENTAILS),
  "wnli": (*AB, {0: "not_entailment", 1: "entailment"}),
  "mnli": NLI, "mnli_matched": NLI, "mnli_mismatched": NLI, "ax": NLI,
}  # fmt: skip


@pytest.mark.parametrize("config", CONFIGS)
def test_t5s_strings_and_labels_in_both_directions(config):
  fields, text, targets = EXAMPLES[config]
  rows = [{**fields, "label": label, "idx": 7 + i} for i, label in enumerate(targets)]
  data = tf.data.Dataset.from_tensor_slices(sources.columns(rows, config))
  found = list(glue.text_format(data, config).as_numpy_iterator())
  want = [(text.format(config), target, 7 + i) for i, target in enumerate(targets.values())]
  assert [(x["inputs"].decode(), x["targets"].decode(), x["idx"]) for x in found] == want
  # And back. A rounded score differs from its label.
  task = seqio.get_mixture_or_task(f"nm_glue_{config}")
  for label, target in targets.items():
    back = task.postprocess_fn(target, example=fields, is_target=True)
    assert back == (float(target) if config == "stsb" else label)
    if config != "stsb":
      for odd in ("", target.upper(), f" {target}", target[:-1], "0"):
        assert task.postprocess_fn(odd, example=fields, is_target=False) == -1


# --- metrics --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  "config, pairs, want",
  [
    # An invalid prediction is a third class: n = 5, right 3, targets (2, 3), predictions (2, 2, 1),
    # so (3 * 5 - (2 * 2 + 3 * 2)) / sqrt((25 - 9) * (25 - 13)).
    (
      "cola",
      "acceptable/acceptable acceptable/acceptable unacceptable/unacceptable "
      "unacceptable/Acceptable acceptable/unacceptable",
      {"matthews_corrcoef": 100 * 5 / 192**0.5},
    ),
    # It misses a positive, and is a false alarm for a negative: 2 hits, 1 miss, 1 false alarm.
    (
      "mrpc",
      "equivalent/equivalent equivalent/x not_equivalent/y not_equivalent/not_equivalent "
      "equivalent/equivalent",
      {"f1": 100 * 4 / 6, "accuracy": 60.0},
    ),
    # Unclipped 7.5, and -1.0 for no number: deviations (2.53, -0.07, -2.47) and (0.5, -4.5, 4).
    (
      "stsb",
      "5.0/4.0 2.4/abc 0.0/7.5",
      {"pearson_corrcoef": -830 / (12.506667 * 36.5) ** 0.5, "spearman_corrcoef": -50.0},
    ),
  ],
)
def test_metrics_of_decoded_texts(config, pairs, want):
  """T5's, on a scale of 0 to 100."""
  task = seqio.get_mixture_or_task(f"nm_glue_{config}")
  texts = zip(*(pair.split("/") for pair in pairs.split()), strict=True)
  read = [[task.postprocess_fn(x, example={}, is_target=True) for x in column] for column in texts]
  found = functools.reduce(dict.__or__, (dict(f(*read)) for f in task.metric_fns), {})
  assert found == pytest.approx(want)


def test_bleu_is_of_the_corpus_in_international_tokens():
  bleu = lambda target, said: metrics.bleu(target, said)["bleu"]
  # Letters keep their case.
  found = bleu(["a b c d", "e f g h"], ["a b c d", "E f g h"])
  assert found == pytest.approx(100 * (7 / 8 * 5 / 6 * 3 / 4 * 1 / 2) ** 0.25)
  assert bleu(["„a“, b c"], ["„ a “ , b c"]) == pytest.approx(100)


# --- GLUE's TSV folder ----------------------------------------------------------------------------

# Split by split, a file's name and its lines; | is a tab.
FILES = """
CoLA/train.tsv
gj04|1||A "b
gj04|0|*|C d.
CoLA/dev.tsv
gj04|0|*|dev
CoLA/test.tsv
index|sentence
0|test
SST-2/train.tsv
sentence|label
bad |0

good |1
SST-2/dev.tsv
sentence|label
good |1
SST-2/test.tsv
index|sentence
9|a
8|b
MRPC/msr_paraphrase_train.txt
\ufeffQuality|#1 ID|#2 ID|#1 String|#2 String
1|11|12|A|B
0|21|22|C|D
1|31|32|E|F
MRPC/msr_paraphrase_test.txt
\ufeffQuality|#1 ID|#2 ID|#1 String|#2 String
1|41|42|G|H
MRPC/dev_ids.tsv
21|22
QQP/train.tsv
id|qid1|qid2|question1|question2|is_duplicate
0|1|2|A?|B?|0
3|4|5|short
6|7|8|C?|D?|
9|1|2|E\u2028?|F?|1
QQP/dev.tsv
id|qid1|qid2|question1|question2|is_duplicate
0|1|2|A?|B?|1
QQP/test.tsv
id|question1|question2
0|A?|B?
STS-B/train.tsv
index|genre|sentence1|sentence2|score
0|g|A|B|2.500
1|g|C|D|0
STS-B/dev.tsv
index|genre|sentence1|sentence2|score
0|g|A|B|5.000
STS-B/test.tsv
index|genre|sentence1|sentence2
0|g|A|B
MNLI/train.tsv
index|promptID|genre|sentence1|sentence2|label1|gold_label
0|1|g|P|H|neutral|contradiction
MNLI/dev_matched.tsv
index|promptID|genre|sentence1|sentence2|label1|gold_label
0|1|g|Pm|Hm|neutral|neutral
MNLI/dev_mismatched.tsv
index|promptID|genre|sentence1|sentence2|label1|gold_label
0|1|g|Px|Hx|neutral|entailment
MNLI/test_matched.tsv
index|promptID|genre|sentence1|sentence2
0|1|g|Ptm|Htm
MNLI/test_mismatched.tsv
index|promptID|genre|sentence1|sentence2
0|1|g|Ptx|Htx
QNLI/train.tsv
index|question|sentence|label
0|Q?|S|entailment
QNLI/dev.tsv
index|question|sentence|label
0|Q?|S|not_entailment
QNLI/test.tsv
index|question|sentence
0|Q?|S
RTE/train.tsv
index|sentence1|sentence2|label
0|A|B|not_entailment
RTE/dev.tsv
index|sentence1|sentence2|label
0|A|B|entailment
RTE/test.tsv
index|sentence1|sentence2
0|A|B
WNLI/train.tsv
index|sentence1|sentence2|label
0|A|B|1
WNLI/dev.tsv
index|sentence1|sentence2|label
0|A|B|0
WNLI/test.tsv
index|sentence1|sentence2
0|A|B
diagnostic/diagnostic.tsv
index|sentence1|sentence2
0|P|H
"""


def write(folder, text):
  """Writes the files of a text such as `FILES`."""
  for line in text.strip().split("\n"):
    if "/" in line:
      path = folder / line
      path.parent.mkdir(parents=True, exist_ok=True)
      path.write_bytes(b"")
    else:
      line = line.replace("|", "\t") + "\n"
      with path.open("a", encoding="utf-8") as file:
        file.write(line)


def rows_of_tfds(folder, name):
  """split -> rows, by TFDS' own builder on the same files."""
  from tensorflow_datasets.text.glue import Glue

  (config,) = [c for c in Glue.BUILDER_CONFIGS if c.name == name]
  mrpc = {"dev_ids": "dev_ids.tsv"} | {x: f"msr_paraphrase_{x}.txt" for x in ("train", "test")}
  builder = types.SimpleNamespace(builder_config=config)
  builder._generate_example_mrpc_files = functools.partial(
    Glue._generate_example_mrpc_files, builder
  )
  downloads = types.SimpleNamespace(
    download=lambda what: (
      {x: folder / "MRPC" / mrpc[x] for x in what}
      if isinstance(what, dict)
      else folder / "diagnostic/diagnostic.tsv"
    ),
    download_and_extract=lambda url: folder,
  )
  found = {}
  for split in Glue._split_generators(builder, downloads):
    rows = [row for _, row in Glue._generate_examples(builder, **split.gen_kwargs)]
    names = config.label_classes or []
    index = lambda label, names=names: names.index(label) if label in names else label
    found[str(split.name)] = [{**row, "label": index(row["label"])} for row in rows]
  return found


def rows_of_ours(folder, config, split):
  columns = sources.read_glue(folder, config, split)
  return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


@pytest.mark.parametrize("config", CONFIGS)
def test_the_tsv_folder_gives_the_rows_of_tfds(config, tmp_path):
  write(tmp_path, FILES)
  want = rows_of_tfds(tmp_path, config)
  assert want.keys() == glue_table.TASKS[config].splits.keys()
  for split, rows in want.items():
    assert rows and rows_of_ours(tmp_path, config, split) == rows, split


def test_mrpc_as_the_download_script_splits_it(tmp_path):
  write(
    tmp_path,
    """
MRPC/train.tsv
Quality|#1 ID|#2 ID|#1 String|#2 String
1|1|2|A|B
MRPC/dev.tsv
Quality|#1 ID|#2 ID|#1 String|#2 String
0|3|4|C|D
MRPC/test.tsv
index|#1 ID|#2 ID|#1 String|#2 String
0|5|6|E|F
""",
  )
  labels = {s: sources.read_glue(tmp_path, "mrpc", s) for s in ("train", "validation", "test")}
  assert [c["label"].tolist() for c in labels.values()] == [[1], [0], [-1]]


HEAD = "index|sentence1|sentence2|label\n"


@pytest.mark.parametrize(
  "config, file, message",
  [
    ("wnli", "RTE/train.tsv", "WNLI/train.tsv.*GLUE_DATA_DIR"),
    ("rte", f"RTE/train.tsv\n{HEAD}0|A|B|entailment\n1|A|B|Entailment", "line 3.*'Ent"),
  ],
)
def test_what_is_wrong_with_a_folder_is_said_before_training(
  tmp_path, monkeypatch, config, file, message
):
  write(tmp_path, file)
  monkeypatch.setenv("GLUE_DATA_DIR", str(tmp_path))
  t5x_tasks.register_glue(vocabulary=BYTES)  # registering reads nothing
  with pytest.raises(ValueError, match=message):
    seqio.get_mixture_or_task(f"nm_glue_{config}").get_dataset({"inputs": 8, "targets": 8}, "train")


# --- the other sources ----------------------------------------------------------------------------


TWO = """
wmt/train-wmt17.en
one
two

four
wmt/train-wmt17.de
eins
zwei
drei

wmt/newstest2014.en
c
wmt/newstest2014.de
d\u2028e
"""


def test_two_text_files(tmp_path):
  """A pair with an empty side is left out."""
  write(tmp_path, TWO)
  t5x_tasks.register_wmt(vocabulary=BYTES, data_dir=str(tmp_path / "wmt"))

  def read(name, split, lengths=None):
    data = seqio.get_mixture_or_task(name).get_dataset(lengths, split, shuffle=False)
    return [*data.as_numpy_iterator()]

  for name, split, want in (
    ("nm_wmt17_ende", "train", [("one", "eins"), ("two", "zwei")]),
    ("nm_wmt17_ende", "validation", [("c", "d\u2028e")]),
    ("nm_wmt14_ende", "test", [("c", "d\u2028e")]),
  ):
    rows = read(name, split)
    texts = [[x[f"{k}_pretokenized"].decode() for k in ("inputs", "targets")] for x in rows]
    assert texts == [[f"translate English to German: {en}", de] for en, de in want]
  (x,) = read("nm_wmt14_ende", "test", {"inputs": 4, "targets": 9})
  assert x["inputs"].tolist() == [*BYTES.encode("tra"), 1]  # trimmed, then ended


def test_sources_are_shuffled_by_their_seed_and_shards_are_disjoint():
  t5x_tasks.register_mini(rows={"train": 50}, seed=3)
  source = seqio.get_mixture_or_task("nm_glue_mini_rte").source

  def numbers(**kwargs):
    return [int(x["idx"]) for x in source.get_dataset("train", **kwargs).as_numpy_iterator()]

  assert numbers(shuffle=False) == list(range(50)) == sorted(numbers(shuffle=True))
  assert numbers(seed=1) == numbers(seed=1) != numbers(seed=2)
  # Three processes that know nothing of each other read each row once, without a seed too.
  shards = [numbers(shuffle=True, shard_info=seqio.ShardInfo(i, 3)) for i in range(3)]
  assert sorted(sum(shards, [])) == list(range(50))
  assert {len(shard) for shard in shards} == {16, 17} and sorted(shards[0]) != shards[0]
