"""The tasks against hand-made examples: T5's strings, labels, metrics; rows of every source."""

import functools
import importlib
import math
import socket
import sys
import types
import warnings

import pytest
import tasks_found

pytestmark = pytest.mark.filterwarnings("ignore")  # TensorFlow, seqio, TFDS, on their own account

if reason := tasks_found.why_not():
  pytest.skip(reason, allow_module_level=True)

with warnings.catch_warnings():
  warnings.simplefilter("ignore")
  import seqio
  import tensorflow as tf

  import t5x_tasks
  from nm_sparsity_jax.runs import glue as glue_table
  from t5x_tasks import glue, metrics, sources, wmt

CONFIGS = [
  "cola", "sst2", "mrpc", "qqp", "stsb", "mnli", "mnli_matched", "mnli_mismatched", "qnli", "rte",
  "wnli", "ax",
]  # fmt: skip
BYTES = seqio.ByteVocabulary()


@pytest.fixture(autouse=True)
def as_imported():
  """Tests register tasks anew; this puts back what the import registered."""
  yield
  tasks_found.register_again()


def read(name, split, **kwargs):
  """The examples of a task as dicts of Python values."""
  task = seqio.get_mixture_or_task(name)
  kwargs = {"sequence_length": None, "shuffle": False} | kwargs
  data = task.get_dataset(split=split, **kwargs)
  plain = lambda v: v.decode() if isinstance(v, bytes) else v.tolist()
  return [{k: plain(v) for k, v in x.items()} for x in data.as_numpy_iterator()]


# --- registration ---------------------------------------------------------------------------------


def test_the_import_registers_all_reads_nothing_and_may_be_repeated(monkeypatch):
  names = {f"nm_glue_{x}{c}" for x in ("", "mini_") for c in CONFIGS}
  names |= {f"nm_glue_{x}{m}" for m in ("proportional", "mnli_and_dev") for x in ("", "mini_")}
  names |= {"nm_wmt17_ende", "nm_wmt14_ende"}
  for name in names:
    seqio.TaskRegistry.remove(name)
    seqio.MixtureRegistry.remove(name)
  monkeypatch.setattr(socket, "socket", None)
  for module in [m for m in sys.modules if m.partition(".")[0] == "t5x_tasks"]:
    monkeypatch.delitem(sys.modules, module)
  for _ in range(2):
    importlib.reload(importlib.import_module("t5x_tasks"))
    assert names <= {*seqio.TaskRegistry.names(), *seqio.MixtureRegistry.names()}


def test_the_mixtures_are_t5s():
  rates = {
    "cola": 8551, "sst2": 67349, "mrpc": 3668, "qqp": 363849, "stsb": 5749, "mnli": 392702,
    "qnli": 104743, "rte": 2490, "mnli_matched": 0, "mnli_mismatched": 0, "ax": 0,
  }  # fmt: skip
  dev = {"mnli": 1, "mnli_matched": 0, "mnli_mismatched": 0}
  mini = {config: 4096 * bool(rate) for config, rate in rates.items()}
  for name, prefix, want in (
    ("proportional", "nm_glue_", rates), ("proportional", "nm_glue_mini_", mini),
    ("mnli_and_dev", "nm_glue_", dev), ("mnli_and_dev", "nm_glue_mini_", dev),
  ):  # fmt: skip
    mixture = seqio.get_mixture_or_task(f"{prefix}{name}")
    assert mixture.rate_per_task_name == {f"{prefix}{c}": rate for c, rate in want.items()}


def test_vocabulary_name_and_unknown_name():
  assert t5x_tasks.register_glue(vocabulary=BYTES, name="nm_glue_rte") == "nm_glue_rte"
  assert t5x_tasks.register_mini(vocabulary=BYTES) == "nm_glue_mini_proportional"
  assert t5x_tasks.register_wmt(vocabulary=BYTES) == "nm_wmt17_ende"
  for name in ("nm_glue_proportional", "nm_glue_mini_ax", "nm_wmt14_ende"):
    features = seqio.get_mixture_or_task(name).output_features
    assert all(f.vocabulary == BYTES and f.add_eos for f in features.values())
  assert seqio.get_mixture_or_task("nm_glue_rte").supports_caching
  with pytest.raises(ValueError, match="no task or mixture 'nm_glue_rtee'.*nm_glue_rte"):
    t5x_tasks.register_glue(name="nm_glue_rtee")


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


def test_translation_strings():
  data = tf.data.Dataset.from_tensors({"en": "The  sea.", "de": "Das Meer."})
  (found,) = wmt.text_format(data).as_numpy_iterator()
  assert found == {"inputs": b"translate English to German: The  sea.", "targets": b"Das Meer."}


# --- metrics --------------------------------------------------------------------------------------


def scores(config, targets, predictions):
  """Through the task: decoded texts in, every metric under its key out."""
  task = seqio.get_mixture_or_task(f"nm_glue_{config}")
  targets = [task.postprocess_fn(x, example={}, is_target=True) for x in targets]
  predictions = [task.postprocess_fn(x, example={}, is_target=False) for x in predictions]
  out = {}
  for metric in task.metric_fns:
    out |= metric(targets, predictions)
  return out


def test_metrics_by_hand():
  yes, no = "acceptable", "unacceptable"
  # The third class: n = 5, right 3, targets (2, 3), predictions (2, 2, 1):
  # (3 * 5 - (2 * 2 + 3 * 2)) / sqrt((25 - 9) * (25 - 13)).
  found = scores("cola", [yes, yes, no, no, yes], [yes, yes, no, "Acceptable", no])
  assert found == pytest.approx({"matthews_corrcoef": 100 * 5 / math.sqrt(16 * 12)})
  assert scores("cola", [yes, no], [yes, yes]) == {"matthews_corrcoef": 0.0}

  for config, yes, no in (
    ("mrpc", "equivalent", "not_equivalent"),
    ("qqp", "duplicate", "not_duplicate"),
  ):
    # Invalid: a miss for a positive, a false alarm for a negative. 2 hits, 1 miss, 1 false alarm.
    found = scores(config, [yes, yes, no, no, yes], [yes, "x", "y", no, yes])
    assert found == pytest.approx({"f1": 100 * 4 / 6, "accuracy": 60.0})

  # Unclipped 7.5 and -1.0: deviations (2.53, -0.07, -2.47) and (0.5, -4.5, 4); ranks 321 and 213.
  found = scores("stsb", ["5.0", "2.4", "0.0"], ["4.0", "abc", "7.5"])
  covariance, variances = -8.3, (6.4177778 + 0.0044444 + 6.0844444) * 36.5
  assert found == pytest.approx(
    {"pearson_corrcoef": 100 * covariance / math.sqrt(variances), "spearman_corrcoef": -50.0}
  )

  nli = ["entailment", "neutral", "contradiction", "neutral"]
  said = ["entailment", "contradiction", "contradiction", "Neutral"]
  assert scores("mnli_matched", nli, said) == {"accuracy": 50.0}
  assert scores("ax", ["<unk>"], ["neutral"]) == {}


def test_bleu_by_hand():
  # 5/6, 3/5, 1/4 and no 4-gram of 3: smoothed to 1 / (2 * 3).
  found = metrics.bleu(["the cat sat on the mat"], ["the cat is on the mat"])
  assert found["bleu"] == pytest.approx(100 * (5 / 6 * 3 / 5 * 1 / 4 * 1 / 6) ** 0.25)
  # International tokens: „ ja “ sagt er, against „ ja “ , sagt er; one word short.
  found = metrics.bleu(["„ja“, sagt er"], ["„ja“ sagt er"])
  assert found["bleu"] == pytest.approx(100 * (3 / 4 * 1 / 3 * 1 / 4) ** 0.25 * math.exp(-0.2))
  assert metrics.bleu(["ja"], ["ja"])["bleu"] == 0  # no effective order
  # Of the corpus, not the mean of sentences; letters keep their case.
  two = metrics.bleu(["a b c d", "e f g h"], ["a b c d", "E f g h"])["bleu"]
  assert two == pytest.approx(100 * (7 / 8 * 5 / 6 * 3 / 4 * 1 / 2) ** 0.25)


# --- GLUE's TSV folder ----------------------------------------------------------------------------

NLI_HEAD = "index\tpromptID\tgenre\tsentence1\tsentence2\tlabel1\tgold_label"
NLI_TEST = "index\tpromptID\tgenre\tsentence1\tsentence2"
PAIR, PAIR_TEST = "index\tsentence1\tsentence2\tlabel", "index\tsentence1\tsentence2"
MSR = "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String"
FILES = {
  "CoLA/train.tsv": ["gj04\t1\t\tA \"b", "gj04\t0\t*\tC d."],
  "CoLA/dev.tsv": ["gj04\t0\t*\tdev"],
  "CoLA/test.tsv": ["index\tsentence", "0\ttest"],
  "SST-2/train.tsv": ["sentence\tlabel", "bad \t0", "", "good \t1"],
  "SST-2/dev.tsv": ["sentence\tlabel", "good \t1"],
  "SST-2/test.tsv": ["index\tsentence", "9\ta", "8\tb"],
  "MRPC/msr_paraphrase_train.txt": [MSR, "1\t11\t12\tA\tB", "0\t21\t22\tC\tD", "1\t31\t32\tE\tF"],
  "MRPC/msr_paraphrase_test.txt": [MSR, "1\t41\t42\tG\tH"],
  "MRPC/dev_ids.tsv": ["21\t22"],
  "QQP/train.tsv": [
    "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate", "0\t1\t2\tA?\tB?\t0", "3\t4\t5\tshort",
    "6\t7\t8\tC?\tD?\t", "9\t1\t2\tE\u2028?\tF?\t1",
  ],
  "QQP/dev.tsv": ["id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate", "0\t1\t2\tA?\tB?\t1"],
  "QQP/test.tsv": ["id\tquestion1\tquestion2", "0\tA?\tB?"],
  "STS-B/train.tsv": [
    "index\tgenre\tsentence1\tsentence2\tscore", "0\tg\tA\tB\t2.500", "1\tg\tC\tD\t0",
  ],
  "STS-B/dev.tsv": ["index\tgenre\tsentence1\tsentence2\tscore", "0\tg\tA\tB\t5.000"],
  "STS-B/test.tsv": ["index\tgenre\tsentence1\tsentence2", "0\tg\tA\tB"],
  "MNLI/train.tsv": [NLI_HEAD, "0\t1\tg\tP\tH\tneutral\tcontradiction"],
  "MNLI/dev_matched.tsv": [NLI_HEAD, "0\t1\tg\tPm\tHm\tneutral\tneutral"],
  "MNLI/dev_mismatched.tsv": [NLI_HEAD, "0\t1\tg\tPx\tHx\tneutral\tentailment"],
  "MNLI/test_matched.tsv": [NLI_TEST, "0\t1\tg\tPtm\tHtm"],
  "MNLI/test_mismatched.tsv": [NLI_TEST, "0\t1\tg\tPtx\tHtx"],
  "QNLI/train.tsv": ["index\tquestion\tsentence\tlabel", "0\tQ?\tS\tentailment"],
  "QNLI/dev.tsv": ["index\tquestion\tsentence\tlabel", "0\tQ?\tS\tnot_entailment"],
  "QNLI/test.tsv": ["index\tquestion\tsentence", "0\tQ?\tS"],
  "RTE/train.tsv": [PAIR, "0\tA\tB\tnot_entailment"],
  "RTE/dev.tsv": [PAIR, "0\tA\tB\tentailment"],
  "RTE/test.tsv": [PAIR_TEST, "0\tA\tB"],
  "WNLI/train.tsv": [PAIR, "0\tA\tB\t1"],
  "WNLI/dev.tsv": [PAIR, "0\tA\tB\t0"],
  "WNLI/test.tsv": [PAIR_TEST, "0\tA\tB"],
  "diagnostic/diagnostic.tsv": [PAIR_TEST, "0\tP\tH"],
}  # fmt: skip


def write(folder, files):
  for name, lines in files.items():
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8", errors="surrogateescape")


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
  head = MSR.removeprefix("\ufeff")
  test = "index\t#1 ID\t#2 ID\t#1 String\t#2 String"
  files = {"train": [head, "1\t1\t2\tA\tB"], "dev": [head, "0\t3\t4\tC\tD"]}
  files |= {"test": [test, "0\t5\t6\tE\tF"]}
  write(tmp_path, {f"MRPC/{name}.tsv": lines for name, lines in files.items()})
  labels = {s: sources.read_glue(tmp_path, "mrpc", s) for s in ("train", "validation", "test")}
  assert [c["label"].tolist() for c in labels.values()] == [[1], [0], [-1]]


STSB = FILES["STS-B/train.tsv"][0]
# What is wrong: the file, its lines (None: it is not there), the config, words of the error.
BAD = [
  ("RTE/train.tsv", None, "rte", "RTE/train.tsv.*GLUE_DATA_DIR"),
  ("RTE/train.tsv", [PAIR_TEST, "0\tA\tB"], "rte", "line 1: .*'label'"),
  ("RTE/train.tsv", [PAIR, "0\tA\tB\tentailment", "1\tA\tB\tEntailment"], "rte", "line 3.*'Ent"),
  ("WNLI/train.tsv", [PAIR, "0\tA\tB\t-1"], "wnli", "line 2: .*'-1'"),
  ("STS-B/train.tsv", [STSB, "0\tg\tA\tB\t5.1"], "stsb", "'5.1'"),
  ("SST-2/train.tsv", ["sentence\tlabel"], "sst2", "no row"),
  ("MRPC/dev_ids.tsv", None, "mrpc", "dev_ids.tsv"),
  ("RTE/train.tsv", [PAIR, "0\tA\tB\t\udcff"], "rte", "UTF-8"),
]


@pytest.mark.parametrize("file, lines, config, message", BAD)
def test_what_is_wrong_with_a_folder_is_said_before_training(
  tmp_path, monkeypatch, file, lines, config, message
):
  write(tmp_path, {name: text for name, text in (FILES | {file: lines}).items() if text})
  monkeypatch.setenv("GLUE_DATA_DIR", str(tmp_path))
  t5x_tasks.register_glue(vocabulary=BYTES)  # registering reads nothing
  task = seqio.get_mixture_or_task(f"nm_glue_{config}")
  with pytest.raises(ValueError, match=message):
    task.get_dataset({"inputs": 8, "targets": 8}, "train")


def test_rows_that_are_left_out_or_missing_are_reported(tmp_path, caplog):
  write(tmp_path, FILES)
  sources.read_glue(tmp_path, "qqp", "train")
  assert "left out 2 rows" in caplog.text and "lines [3, 4]" in caplog.text
  for rows in (70, 71):
    caplog.clear()
    write(tmp_path, {"WNLI/dev.tsv": [PAIR, *["0\tA\tB\t1"] * rows]})
    sources.read_glue(tmp_path, "wnli", "validation")
    assert ("has 70 rows" in caplog.text) == (rows == 70)


# --- the other sources ----------------------------------------------------------------------------


def test_tfds_is_the_default_with_a_version_that_it_has():
  from tensorflow_datasets.text.glue import Glue
  from tensorflow_datasets.translate import wmt14, wmt17

  assert {c.name: str(c.version) for c in Glue.BUILDER_CONFIGS} == dict.fromkeys(CONFIGS, "2.0.0")
  source = seqio.get_mixture_or_task("nm_glue_rte").source
  assert source.tfds_dataset.name == "glue/rte:2.0.0"
  for builder in (wmt14.Wmt14Translate, wmt17.Wmt17Translate):
    (version,) = [c.version for c in builder.BUILDER_CONFIGS if c.name == "de-en"]
    assert version == "1.0.0"
  there = seqio.get_mixture_or_task("nm_wmt17_ende").source.tfds_dataset.tfds_splits
  assert {split: (t.dataset, t.split) for split, t in there.items()} == {
    "train": ("wmt17_translate/de-en:1.0.0", "train"),
    "validation": ("wmt14_translate/de-en:1.0.0", "test"),
  }


def test_two_text_files(tmp_path, monkeypatch):
  write(tmp_path, {
    "train-wmt17.en": ["one", "two", "", "four"], "train-wmt17.de": ["eins", "zwei", "drei", ""],
    "newstest2014.en": ["c"],
  })  # fmt: skip
  (tmp_path / "newstest2014.de").write_text("d\u2028e", encoding="utf-8")  # no line feed at the end
  monkeypatch.setenv("WMT_DATA_DIR", str(tmp_path))
  t5x_tasks.register_wmt(vocabulary=BYTES)
  found = lambda name, split: [
    (x["inputs_pretokenized"].split(": ")[1], x["targets_pretokenized"]) for x in read(name, split)
  ]
  assert found("nm_wmt17_ende", "train") == [("one", "eins"), ("two", "zwei")]
  assert (
    found("nm_wmt17_ende", "validation") == found("nm_wmt14_ende", "test") == [("c", "d\u2028e")]
  )
  assert seqio.get_mixture_or_task("nm_wmt17_ende").num_input_examples("train") == 4
  (x,) = read("nm_wmt14_ende", "test", sequence_length={"inputs": 4, "targets": 9})
  assert x["inputs"] == [*BYTES.encode("tra"), 1] and x["targets"] == [*BYTES.encode("d\u2028e"), 1]


@pytest.mark.parametrize("files, message", [
  ({}, "no file .*train-wmt17.en.*WMT_DATA_DIR"),
  ({"train-wmt17.en": ["a", "b"], "train-wmt17.de": ["a"]}, "en has 2 lines and .*de has 1 lines"),
])  # fmt: skip
def test_what_is_wrong_with_text_files(tmp_path, files, message):
  write(tmp_path, files)
  t5x_tasks.register_wmt(vocabulary=BYTES, data_dir=str(tmp_path))
  with pytest.raises(ValueError, match=message):
    seqio.get_mixture_or_task("nm_wmt17_ende").get_dataset({"inputs": 8, "targets": 8}, "train")


@pytest.fixture
def fifty(tmp_path):
  """Tasks of fifty examples each -> the number of an example of its source."""
  lines = [str(i) for i in range(50)]
  write(tmp_path, {f"train-wmt17.{language}": lines for language in wmt.LANGUAGES})
  t5x_tasks.register_wmt(vocabulary=BYTES, data_dir=str(tmp_path))
  t5x_tasks.register_mini(rows={"train": 50}, seed=3)

  def numbers(name, **kwargs):
    source = seqio.get_mixture_or_task(name).source
    examples = source.get_dataset("train", **kwargs).as_numpy_iterator()
    return [int(x["en" if "wmt" in name else "idx"]) for x in examples]

  return numbers


@pytest.mark.parametrize("name", ["nm_wmt17_ende", "nm_glue_mini_rte"])
def test_sources_are_shuffled_by_their_seed_and_shards_are_disjoint(fifty, name):
  assert fifty(name, shuffle=False) == list(range(50)) == sorted(fifty(name, shuffle=True))
  assert fifty(name, seed=1) == fifty(name, seed=1) != fifty(name, seed=2)
  # Three processes that know nothing of each other read each row once, without a seed too.
  shards = [fifty(name, shuffle=True, shard_info=seqio.ShardInfo(i, 3)) for i in range(3)]
  assert sorted(sum(shards, [])) == list(range(50))
  assert {len(shard) for shard in shards} == {16, 17} and sorted(shards[0]) != shards[0]


@pytest.mark.parametrize("rows", [{"train": 0}, {"trian": 5}])
def test_wrong_numbers_of_rows(rows):
  with pytest.raises(ValueError, match="rows"):
    t5x_tasks.register_mini(rows=rows)
