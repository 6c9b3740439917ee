"""The tasks against hand-made examples: T5's strings, labels, metrics; rows of every source."""

import importlib
import json
import math
import pathlib
import socket
import sys
import time
import types
import warnings

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import tasks_found
from test_imports import HEAVY, after

pytestmark = pytest.mark.filterwarnings("ignore")  # TensorFlow, seqio, TFDS, on their own account

if reason := tasks_found.why_not():
  pytest.skip(reason, allow_module_level=True)

with warnings.catch_warnings():
  warnings.simplefilter("ignore")
  import seqio
  import tensorflow as tf
  import tensorflow_datasets as tfds

  import t5x_tasks
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


def texts(name, split):
  return [
    (x["inputs_pretokenized"], x["targets_pretokenized"], x["idx"]) for x in read(name, split)
  ]


# --- registration ---------------------------------------------------------------------------------


def test_the_table_alone_needs_nothing():
  roots, loaded, looked_for = after("import nm_sparsity_jax.runs.glue")
  assert not roots & {"jax", "numpy", *HEAVY} and not looked_for
  assert [m for m in loaded if "glue" in m] == ["nm_sparsity_jax.runs.glue"]


def test_the_import_registers_all_reads_nothing_and_may_be_repeated(monkeypatch):
  names = {f"nm_glue_{c}" for c in CONFIGS} | {f"nm_glue_mini_{c}" for c in CONFIGS}
  names |= {f"nm_glue_{m}{x}" for m in ("", "mini_") for x in ("proportional", "mnli_and_dev")}
  names |= {"nm_wmt17_ende", "nm_wmt14_ende"}
  registered = lambda: {
    n for n in [*seqio.TaskRegistry.names(), *seqio.MixtureRegistry.names()] if n[:3] == "nm_"
  }
  for name in names:
    seqio.TaskRegistry.remove(name)
    seqio.MixtureRegistry.remove(name)
  monkeypatch.setattr(socket, "socket", None)
  for module in [m for m in sys.modules if m.partition(".")[0] == "t5x_tasks"]:
    monkeypatch.delitem(sys.modules, module)
  before = set(sys.modules)
  for again in range(2):
    importlib.reload(importlib.import_module("t5x_tasks"))
    assert registered() - {"nm_test_sort"} == names, again
  assert all(m.startswith("t5x_tasks") for m in set(sys.modules) - before)


def test_what_tests_register_anew_is_put_back():
  rows = lambda: seqio.get_mixture_or_task("nm_glue_mini_wnli").num_input_examples("validation")
  before = rows()
  t5x_tasks.register_mini(rows={"validation": 12})
  assert rows() == 12 != before
  tasks_found.register_again()
  assert rows() == before


def test_the_mixtures_are_t5s():
  rates = {
    "cola": 8551, "sst2": 67349, "mrpc": 3668, "qqp": 363849, "stsb": 5749, "mnli": 392702,
    "qnli": 104743, "rte": 2490, "mnli_matched": 0, "mnli_mismatched": 0, "ax": 0,
  }  # fmt: skip
  mixture = seqio.get_mixture_or_task("nm_glue_proportional")
  assert mixture.rate_per_task_name == {f"nm_glue_{c}": r for c, r in rates.items()}
  mini = seqio.get_mixture_or_task("nm_glue_mini_proportional")
  assert mini.rate_per_task_name == {f"nm_glue_mini_{c}": 4096 * bool(r) for c, r in rates.items()}
  for prefix in ("nm_glue_", "nm_glue_mini_"):
    mixture = seqio.get_mixture_or_task(f"{prefix}mnli_and_dev")
    assert mixture.rate_per_task_name == {
      f"{prefix}mnli": 1, f"{prefix}mnli_matched": 0, f"{prefix}mnli_mismatched": 0,
    }  # fmt: skip


def test_vocabulary_name_and_unknown_name():
  assert t5x_tasks.register_glue(vocabulary=BYTES, name="nm_glue_rte") == "nm_glue_rte"
  assert t5x_tasks.register_mini(vocabulary=BYTES) == "nm_glue_mini_proportional"
  assert t5x_tasks.register_wmt(vocabulary=BYTES) == "nm_wmt17_ende"
  for name in ("nm_glue_proportional", "nm_glue_mini_ax", "nm_wmt14_ende"):
    features = seqio.get_mixture_or_task(name).output_features
    assert set(features) == {"inputs", "targets"}
    assert all(f.vocabulary == BYTES and f.add_eos for f in features.values())
  assert seqio.get_mixture_or_task("nm_glue_proportional").tasks[0].output_features["inputs"]
  with pytest.raises(ValueError, match="no task or mixture 'nm_glue_rtee'.*nm_glue_rte"):
    t5x_tasks.register_glue(name="nm_glue_rtee")
  t5x_tasks.register_glue()
  default = seqio.get_mixture_or_task("nm_glue_rte").output_features["targets"].vocabulary
  assert default.sentencepiece_model_file == (
    "gs://t5-data/vocabs/cc_all.32000.100extra/sentencepiece.model"
  )


# --- T5's text format -----------------------------------------------------------------------------

# config: fields, label, input, target. By hand, from T5's description.
EXAMPLES = {
  "cola": [
    ({"sentence": "Bill sings."}, 1, "cola sentence: Bill sings.", "acceptable"),
    ({"sentence": " a  b "}, 0, "cola sentence:  a  b ", "unacceptable"),
    ({"sentence": ""}, -1, "cola sentence: ", "<unk>"),
  ],
  "sst2": [
    ({"sentence": "so good "}, 1, "sst2 sentence: so good ", "positive"),
    ({"sentence": "so bad "}, 0, "sst2 sentence: so bad ", "negative"),
  ],
  "mrpc": [
    ({"sentence2": "B", "sentence1": "A"}, 1, "mrpc sentence1: A sentence2: B", "equivalent"),
    ({"sentence2": "B", "sentence1": "A"}, 0, "mrpc sentence1: A sentence2: B", "not_equivalent"),
    ({"sentence2": "B", "sentence1": "A"}, -1, "mrpc sentence1: A sentence2: B", "<unk>"),
  ],
  "qqp": [
    ({"question1": "A?", "question2": "ß?"}, 1, "qqp question1: A? question2: ß?", "duplicate"),
    ({"question1": "A?", "question2": "B?"}, 0, "qqp question1: A? question2: B?", "not_duplicate"),
  ],
  "stsb": [
    ({"sentence1": "A", "sentence2": "B"}, label, "stsb sentence1: A sentence2: B", target)
    for label, target in (
      (0.0, "0.0"), (0.1, "0.0"), (0.3, "0.4"), (0.5, "0.4"), (1.25, "1.2"), (1.5, "1.6"),
      (2.5, "2.4"), (3.5, "3.6"), (3.8, "3.8"), (4.75, "4.8"), (5.0, "5.0"), (-1.0, "-1.0"),
    )
  ],
  "qnli": [
    ({"question": "Q?", "sentence": "S"}, 0, "qnli question: Q? sentence: S", "entailment"),
    ({"question": "Q?", "sentence": "S"}, 1, "qnli question: Q? sentence: S", "not_entailment"),
  ],
  "rte": [
    ({"sentence1": "A", "sentence2": "B"}, 0, "rte sentence1: A sentence2: B", "entailment"),
    ({"sentence1": "A", "sentence2": "B"}, 1, "rte sentence1: A sentence2: B", "not_entailment"),
  ],
  "wnli": [
    ({"sentence1": "A", "sentence2": "B"}, 0, "wnli sentence1: A sentence2: B", "not_entailment"),
    ({"sentence1": "A", "sentence2": "B"}, 1, "wnli sentence1: A sentence2: B", "entailment"),
  ],
  **{
    config: [
      ({"premise": "P", "hypothesis": "H"}, label, "mnli hypothesis: H premise: P", target)
      for label, target in (
        (0, "entailment"), (1, "neutral"), (2, "contradiction"), (-1, "<unk>"),
      )
    ]
    for config in ("mnli", "mnli_matched", "mnli_mismatched", "ax")
  },
}  # fmt: skip


@pytest.mark.parametrize("config", CONFIGS)
def test_t5s_strings_and_labels_in_both_directions(config):
  rows = [
    {**fields, "label": label, "idx": 7 + i}
    for i, (fields, label, *_) in enumerate(EXAMPLES[config])
  ]
  data = tf.data.Dataset.from_tensor_slices(sources.columns(rows, config))
  found = list(glue.text_format(data, config).as_numpy_iterator())
  want = [(i, t, 7 + n) for n, (_, _, i, t) in enumerate(EXAMPLES[config])]
  assert [(x["inputs"].decode(), x["targets"].decode(), x["idx"]) for x in found] == want
  assert all(set(x) == {"inputs", "targets", "idx"} for x in found)
  # And back. A rounded score differs from its label.
  task = seqio.get_mixture_or_task(f"nm_glue_{config}")
  for fields, label, _, target in EXAMPLES[config]:
    back = task.postprocess_fn(target, example=fields, is_target=True)
    assert back == (float(target) if config == "stsb" else label)
    if config != "stsb":
      for odd in ("", target.upper(), f" {target}", f"{target} ", target[:-1], "0"):
        assert task.postprocess_fn(odd, example=fields, is_target=False) == -1


def test_a_score_is_read_as_python_reads_it():
  score = seqio.get_mixture_or_task("nm_glue_stsb").postprocess_fn
  assert [score(x) for x in ("3.8", "5.2", "-2", " 3 ", "1e1")] == [3.8, 5.2, -2, 3, 10]
  assert [score(x) for x in ("", "3,8", "three", "3.8 3.8")] == [-1, -1, -1, -1]


def test_a_label_out_of_range_stops_the_run():
  data = tf.data.Dataset.from_tensors({"sentence": "x", "label": np.int64(2), "idx": 0})
  with pytest.raises(tf.errors.InvalidArgumentError):
    list(glue.text_format(data, "cola"))


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
  for config in ("mnli", "mnli_matched", "mnli_mismatched"):
    assert scores(config, nli, said) == {"accuracy": 50.0}
  for config in ("qnli", "rte", "wnli"):
    targets = ["entailment", "not_entailment", "entailment", "entailment"]
    assert scores(config, targets, [targets[0], targets[1], "not", ""]) == {"accuracy": 50.0}
  assert scores("sst2", ["positive", "negative"], ["positive", "Negative"]) == {"accuracy": 50.0}
  assert scores("ax", ["<unk>"], ["neutral"]) == {}


def test_bleu_by_hand():
  assert metrics.bleu(["a b c d e"], ["a b c d e"])["bleu"] == pytest.approx(100)
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
M = "mnli hypothesis: {} premise: {}".format
READ = {
  ("cola", "train"): [
    ('cola sentence: A "b', "acceptable", 0), ("cola sentence: C d.", "unacceptable", 1),
  ],
  ("cola", "validation"): [("cola sentence: dev", "unacceptable", 0)],
  ("cola", "test"): [("cola sentence: test", "<unk>", 0)],
  ("sst2", "train"): [
    ("sst2 sentence: bad ", "negative", 0), ("sst2 sentence: good ", "positive", 1),
  ],
  ("sst2", "validation"): [("sst2 sentence: good ", "positive", 0)],
  ("sst2", "test"): [("sst2 sentence: a", "<unk>", 0), ("sst2 sentence: b", "<unk>", 1)],
  ("mrpc", "train"): [
    ("mrpc sentence1: A sentence2: B", "equivalent", 0),
    ("mrpc sentence1: E sentence2: F", "equivalent", 2),
  ],
  ("mrpc", "validation"): [("mrpc sentence1: C sentence2: D", "not_equivalent", 1)],
  ("mrpc", "test"): [("mrpc sentence1: G sentence2: H", "<unk>", 0)],
  ("qqp", "train"): [
    ("qqp question1: A? question2: B?", "not_duplicate", 0),
    ("qqp question1: E\u2028? question2: F?", "duplicate", 3),
  ],
  ("qqp", "validation"): [("qqp question1: A? question2: B?", "duplicate", 0)],
  ("qqp", "test"): [("qqp question1: A? question2: B?", "<unk>", 0)],
  ("stsb", "train"): [
    ("stsb sentence1: A sentence2: B", "2.4", 0), ("stsb sentence1: C sentence2: D", "0.0", 1),
  ],
  ("stsb", "validation"): [("stsb sentence1: A sentence2: B", "5.0", 0)],
  ("stsb", "test"): [("stsb sentence1: A sentence2: B", "-1.0", 0)],
  ("mnli", "train"): [(M("H", "P"), "contradiction", 0)],
  ("mnli", "validation_matched"): [(M("Hm", "Pm"), "neutral", 0)],
  ("mnli", "validation_mismatched"): [(M("Hx", "Px"), "entailment", 0)],
  ("mnli", "test_matched"): [(M("Htm", "Ptm"), "<unk>", 0)],
  ("mnli", "test_mismatched"): [(M("Htx", "Ptx"), "<unk>", 0)],
  ("mnli_matched", "validation"): [(M("Hm", "Pm"), "neutral", 0)],
  ("mnli_matched", "test"): [(M("Htm", "Ptm"), "<unk>", 0)],
  ("mnli_mismatched", "validation"): [(M("Hx", "Px"), "entailment", 0)],
  ("mnli_mismatched", "test"): [(M("Htx", "Ptx"), "<unk>", 0)],
  ("qnli", "train"): [("qnli question: Q? sentence: S", "entailment", 0)],
  ("qnli", "validation"): [("qnli question: Q? sentence: S", "not_entailment", 0)],
  ("qnli", "test"): [("qnli question: Q? sentence: S", "<unk>", 0)],
  ("rte", "train"): [("rte sentence1: A sentence2: B", "not_entailment", 0)],
  ("rte", "validation"): [("rte sentence1: A sentence2: B", "entailment", 0)],
  ("rte", "test"): [("rte sentence1: A sentence2: B", "<unk>", 0)],
  ("wnli", "train"): [("wnli sentence1: A sentence2: B", "entailment", 0)],
  ("wnli", "validation"): [("wnli sentence1: A sentence2: B", "not_entailment", 0)],
  ("wnli", "test"): [("wnli sentence1: A sentence2: B", "<unk>", 0)],
  ("ax", "test"): [(M("H", "P"), "<unk>", 0)],
}  # fmt: skip


def write(folder, files):
  for name, lines in files.items():
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def test_the_tsv_folder_gives_t5s_examples(tmp_path, monkeypatch):
  write(tmp_path, FILES)
  monkeypatch.setenv("GLUE_DATA_DIR", str(tmp_path))
  t5x_tasks.register_glue(vocabulary=BYTES)
  splits = {(c, s) for c in CONFIGS for s in seqio.get_mixture_or_task(f"nm_glue_{c}").splits}
  assert splits == set(READ)
  for (config, split), want in READ.items():
    assert texts(f"nm_glue_{config}", split) == want, (config, split)
  dtypes = {k: v.dtype for k, v in sources.read_glue(tmp_path, "cola", "train").items()}
  assert (dtypes["idx"], dtypes["label"]) == (np.int32, np.int64)  # as in TFDS
  assert sources.read_glue(tmp_path, "stsb", "train")["label"].dtype == np.float32
  mixed = seqio.get_mixture_or_task("nm_glue_proportional").get_dataset(
    {"inputs": 64, "targets": 16}, "validation", shuffle=False, num_epochs=1,
    passthrough_features=["idx"],
  )  # fmt: skip
  assert set(next(mixed.as_numpy_iterator())) == {"inputs", "targets", "idx"}


def test_mrpc_as_the_download_script_splits_it(tmp_path):
  head = MSR.removeprefix("\ufeff")
  test = "index\t#1 ID\t#2 ID\t#1 String\t#2 String"
  files = {"train": [head, "1\t1\t2\tA\tB"], "dev": [head, "0\t3\t4\tC\tD"]}
  files |= {"test": [test, "0\t5\t6\tE\tF"]}
  write(tmp_path, {f"MRPC/{name}.tsv": lines for name, lines in files.items()})
  labels = {s: sources.read_glue(tmp_path, "mrpc", s) for s in ("train", "validation", "test")}
  assert [c["label"].tolist() for c in labels.values()] == [[1], [0], [-1]]


CELL = st.text(st.sampled_from("ab\"' \u2028\x85\x0bé"), max_size=4)
LABEL = st.sampled_from(["0", "1", "not_duplicate", "duplicate", ""])
LINE = st.one_of(
  st.tuples(CELL, CELL, LABEL).map("\t".join),
  st.lists(CELL, max_size=5).filter(lambda cells: len(cells) < 3).map("\t".join),
  st.tuples(CELL, CELL, LABEL, CELL).map("\t".join),
)


@hypothesis.settings(max_examples=40)
@hypothesis.given(st.lists(LINE, max_size=6), st.sampled_from(["\n", "\r\n"]))
def test_rows_are_those_of_tfds(tmp_path_factory, lines, end):
  """TFDS' own builder on the same file."""
  path = tmp_path_factory.mktemp("glue") / "QQP/train.tsv"
  path.parent.mkdir()
  text = end.join(["question1\tquestion2\tis_duplicate", *lines]) + end
  path.write_text(text, encoding="utf-8", newline="")
  from tensorflow_datasets.text.glue import Glue

  (config,) = [c for c in Glue.BUILDER_CONFIGS if c.name == "qqp"]
  rows = Glue._generate_examples(types.SimpleNamespace(builder_config=config), path, "train")
  names = config.label_classes
  want = [
    (r["question1"], r["question2"], r["idx"],
     names.index(r["label"]) if r["label"] in names else r["label"])
    for _, r in rows
  ]  # fmt: skip
  try:
    found = sources.read_glue(path.parents[1], "qqp", "train")
  except ValueError as e:
    assert "no row" in str(e)
    assert not want
  else:
    found = zip(*(found[k] for k in ("question1", "question2", "idx", "label")), strict=True)
    assert [tuple(x) for x in found] == want


def test_mrpcs_rows_are_those_of_tfds(tmp_path):
  from tensorflow_datasets.text.glue import Glue

  write(tmp_path, FILES)
  home = tmp_path / "MRPC"
  files = {
    "train": home / "msr_paraphrase_train.txt", "test": home / "msr_paraphrase_test.txt",
    "dev_ids": home / "dev_ids.tsv",
  }  # fmt: skip
  for split, theirs in (("train", "train"), ("validation", "dev"), ("test", "test")):
    want = list(Glue._generate_example_mrpc_files(None, files, theirs))
    found = sources.read_glue(tmp_path, "mrpc", split)
    rows = [dict(zip(found, row, strict=True)) for row in zip(*found.values(), strict=True)]
    assert rows == want


def changed(file, *lines):
  return {**FILES, file: list(lines)}


BAD = {
  "no folder": ({}, "rte", "no file .*RTE/train.tsv.*GLUE_DATA_DIR.*CoLA, SST-2, MRPC"),
  "no file": ({"RTE/dev.tsv": FILES["RTE/dev.tsv"]}, "rte", "no file .*RTE/train.tsv"),
  "column": (
    changed("RTE/train.tsv", "index\tsentence1\tsentence2", "0\tA\tB"), "rte",
    r"RTE/train.tsv, line 1: no column 'label', which rte needs; the header is \['index'",
  ),
  "commas": (changed("RTE/train.tsv", "index,sentence1,sentence2,label"), "rte", "with tabs"),
  "label": (
    changed("RTE/train.tsv", PAIR, "0\tA\tB\tentailment", "1\tA\tB\tEntailment"), "rte",
    "RTE/train.tsv, line 3: the label 'Entailment' of rte is not one of entailment, "
    "not_entailment, or 0 to 1. Fix or delete the row",
  ),
  "index": (changed("WNLI/train.tsv", PAIR, "0\tA\tB\t2"), "wnli", "line 2: the label '2' of wnli"),
  "hidden": (changed("WNLI/train.tsv", PAIR, "0\tA\tB\t-1"), "wnli", "line 2: the label '-1'"),
  "score": (
    changed("STS-B/train.tsv", FILES["STS-B/train.tsv"][0], "0\tg\tA\tB\t5.1"), "stsb",
    "line 2: the label '5.1' of stsb is not a number from 0 to 5",
  ),
  "no number": (
    changed("STS-B/train.tsv", FILES["STS-B/train.tsv"][0], "0\tg\tA\tB\tnan"), "stsb", "'nan'",
  ),
  "no score": (
    changed("STS-B/train.tsv", *FILES["STS-B/train.tsv"], "2\tg\tA\tB\t"), "stsb",
    "line 4: the label '' of stsb is not a number from 0 to 5",
  ),
  "empty": (changed("CoLA/train.tsv"), "cola", "CoLA/train.tsv has no row for the split train"),
  "header only": (changed("SST-2/train.tsv", "sentence\tlabel"), "sst2", "SST-2/train.tsv has no"),
  "no ids": (
    {k: v for k, v in FILES.items() if "dev_ids" not in k}, "mrpc", "no file .*dev_ids.tsv",
  ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_what_is_wrong_with_a_folder_is_said_before_training(tmp_path, case):
  files, config, message = BAD[case]
  write(tmp_path, files)
  t5x_tasks.register_glue(vocabulary=BYTES, data_dir=str(tmp_path))  # registering reads nothing
  task = seqio.get_mixture_or_task(f"nm_glue_{config}")
  with pytest.raises(ValueError, match=message):
    task.get_dataset({"inputs": 8, "targets": 8}, "train")


def test_other_text_than_utf_8(tmp_path):
  write(tmp_path, FILES)
  (tmp_path / "RTE/train.tsv").write_bytes(f"{PAIR}\n0\tA\tB\t".encode() + b"\xff\n")
  with pytest.raises(ValueError, match="RTE/train.tsv is not tab-separated text in UTF-8"):
    sources.read_glue(tmp_path, "rte", "train")


def test_left_out_rows_are_reported(tmp_path, caplog):
  write(tmp_path, FILES)
  sources.read_glue(tmp_path, "qqp", "train")
  assert "QQP/train.tsv: left out 2 rows without all columns" in caplog.text
  assert "lines [3, 4]" in caplog.text


def test_another_number_of_rows_than_glues_is_reported(tmp_path, caplog):
  write(tmp_path, changed("WNLI/dev.tsv", PAIR, *["0\tA\tB\t1"] * 70))
  sources.read_glue(tmp_path, "wnli", "validation")
  assert "WNLI/dev.tsv: has 70 rows for the split validation, and GLUE's wnli has 71" in caplog.text
  caplog.clear()
  write(tmp_path, changed("WNLI/dev.tsv", PAIR, *["0\tA\tB\t1"] * 71))
  sources.read_glue(tmp_path, "wnli", "validation")
  assert not caplog.text


def test_four_hundred_thousand_rows_take_seconds(tmp_path):
  row = "0\t1\t2\tWhat is the best way to learn it?\tHow does one learn it best of all?\t1"
  write(tmp_path, changed("QQP/train.tsv", FILES["QQP/train.tsv"][0], *[row] * 400_000))
  start = time.process_time()
  assert len(sources.read_glue(tmp_path, "qqp", "train")["idx"]) == 400_000
  assert time.process_time() - start < 20


# --- the other sources ----------------------------------------------------------------------------


def test_tfds_is_the_default_with_a_pinned_version():
  for config in CONFIGS:
    task = seqio.get_mixture_or_task(f"nm_glue_{config}")
    assert isinstance(task.source, seqio.TfdsDataSource)
    assert task.source.tfds_dataset.name == f"glue/{config}:2.0.0"
    assert {(config, split) for split in task.splits} == {k for k in READ if k[0] == config}
  t17, t14 = "wmt17_translate/de-en:1.0.0", "wmt14_translate/de-en:1.0.0"
  want = {
    "nm_wmt17_ende": {"train": (t17, "train"), "validation": (t14, "test")},
    "nm_wmt14_ende": {
      "train": (t14, "train"), "validation": (t14, "validation"), "test": (t14, "test"),
    },
  }  # fmt: skip
  for name, splits in want.items():
    there = seqio.get_mixture_or_task(name).source.tfds_dataset.tfds_splits
    assert {split: (t.dataset, t.split) for split, t in there.items()} == splits
  # TFDS knows these.
  from tensorflow_datasets.text.glue import Glue
  from tensorflow_datasets.translate import wmt14, wmt17

  assert {c.name: str(c.version) for c in Glue.BUILDER_CONFIGS} == dict.fromkeys(CONFIGS, "2.0.0")
  for builder in (wmt14.Wmt14Translate, wmt17.Wmt17Translate):
    (version,) = [c.version for c in builder.BUILDER_CONFIGS if c.name == "de-en"]
    assert version == "1.0.0"


def test_a_tfds_store_gives_the_same_examples(tmp_path):
  features = tfds.features.FeaturesDict({
    "sentence1": tfds.features.Text(), "sentence2": tfds.features.Text(), "idx": np.int32,
    "label": tfds.features.ClassLabel(names=["entailment", "not_entailment"]),
  })  # fmt: skip
  row = lambda i, label: (i, {"sentence1": f"a{i}", "sentence2": "b", "label": label, "idx": i})
  tfds.dataset_builders.store_as_tfds_dataset(
    name="glue", config="rte", version="2.0.0", features=features, data_dir=str(tmp_path),
    split_datasets={
      "train": [row(0, 1), row(1, 0)], "validation": [row(0, 0)], "test": [row(4, -1)],
    },
  )  # fmt: skip
  t5x_tasks.register_glue(vocabulary=BYTES)
  seqio.set_tfds_data_dir_override(str(tmp_path))
  try:
    assert sorted(texts("nm_glue_rte", "train")) == [
      ("rte sentence1: a0 sentence2: b", "not_entailment", 0),
      ("rte sentence1: a1 sentence2: b", "entailment", 1),
    ]
    assert texts("nm_glue_rte", "test") == [("rte sentence1: a4 sentence2: b", "<unk>", 4)]
  finally:
    seqio.set_tfds_data_dir_override(None)


def test_two_text_files(tmp_path, monkeypatch):
  write(tmp_path, {
    "train-wmt17.en": ["one", "two", "", "four"], "train-wmt17.de": ["eins", "zwei", "drei", ""],
    "train-wmt14.en": ["fourteen"], "train-wmt14.de": ["vierzehn"],
    "newstest2013.en": ["a"], "newstest2013.de": ["b"], "newstest2014.en": ["c"],
  })  # fmt: skip
  (tmp_path / "newstest2014.de").write_text("d\u2028e", encoding="utf-8")  # no line feed at the end
  monkeypatch.setenv("WMT_DATA_DIR", str(tmp_path))
  t5x_tasks.register_wmt(vocabulary=BYTES)
  found = lambda name, split: [
    (x["inputs_pretokenized"].split(": ")[1], x["targets_pretokenized"]) for x in read(name, split)
  ]
  assert found("nm_wmt17_ende", "train") == [("one", "eins"), ("two", "zwei")]
  assert found("nm_wmt17_ende", "validation") == [("c", "d\u2028e")]
  assert found("nm_wmt14_ende", "train") == [("fourteen", "vierzehn")]
  assert found("nm_wmt14_ende", "validation") == [("a", "b")]
  assert found("nm_wmt14_ende", "test") == [("c", "d\u2028e")]
  assert seqio.get_mixture_or_task("nm_wmt17_ende").num_input_examples("train") == 4
  (x,) = read("nm_wmt14_ende", "test", sequence_length={"inputs": 4, "targets": 9})
  assert x["inputs"] == [*BYTES.encode("tra"), 1] and x["targets"] == [*BYTES.encode("d\u2028e"), 1]


def test_text_files_are_shuffled(tmp_path):
  lines = [str(i) for i in range(50)]
  write(tmp_path, {f"train-wmt17.{language}": lines for language in wmt.LANGUAGES})
  t5x_tasks.register_wmt(vocabulary=BYTES, data_dir=str(tmp_path))
  source = seqio.get_mixture_or_task("nm_wmt17_ende").source
  raw = lambda **kwargs: list(source.get_dataset("train", **kwargs).as_numpy_iterator())
  assert all(pair["en"] == pair["de"] for pair in raw(shuffle=True))
  order = lambda **kwargs: [pair["en"].decode() for pair in raw(**kwargs)]
  assert order(shuffle=False) == lines != order(shuffle=True, seed=1)
  assert sorted(order(shuffle=True, seed=1), key=int) == lines
  assert order(shuffle=True, seed=1) == order(shuffle=True, seed=1) != order(shuffle=True, seed=2)


@pytest.mark.parametrize("files, message", [
  ({}, "no file .*train-wmt17.en.*WMT_DATA_DIR.*train-wmt17.en and train-wmt17.de"),
  ({"train-wmt17.en": ["a"]}, "no file .*train-wmt17.de"),
  ({"train-wmt17.en": ["a", "b"], "train-wmt17.de": ["a"]}, "en has 2 lines and .*de has 1 lines"),
])  # fmt: skip
def test_what_is_wrong_with_text_files(tmp_path, files, message):
  write(tmp_path, files)
  t5x_tasks.register_wmt(vocabulary=BYTES, data_dir=str(tmp_path))
  with pytest.raises(ValueError, match=message):
    seqio.get_mixture_or_task("nm_wmt17_ende").get_dataset({"inputs": 8, "targets": 8}, "train")


def test_empty_text_files(tmp_path):
  for language in wmt.LANGUAGES:
    (tmp_path / f"newstest2014.{language}").touch()
  t5x_tasks.register_wmt(vocabulary=BYTES, data_dir=str(tmp_path))
  with pytest.raises(ValueError, match="has 0 lines"):
    seqio.get_mixture_or_task("nm_wmt17_ende").get_dataset(None, "validation")


def test_shards_are_disjoint_without_a_seed_too(tmp_path):
  """Three processes that know nothing of each other read each row once."""
  t5x_tasks.register_mini(rows={"train": 50})
  lines = [str(i) for i in range(50)]
  write(tmp_path, {f"train-wmt17.{language}": lines for language in wmt.LANGUAGES})
  t5x_tasks.register_wmt(vocabulary=BYTES, data_dir=str(tmp_path))
  number = {
    "nm_glue_mini_rte": lambda x: int(x["idx"]),
    "nm_wmt17_ende": lambda x: int(x["targets_pretokenized"]),
  }
  for name, of in number.items():
    shards = [
      [of(x) for x in read(name, "train", shuffle=True, shard_info=seqio.ShardInfo(i, 3))]
      for i in range(3)
    ]
    assert sorted(sum(shards, [])) == list(range(50)), name
    assert {len(shard) for shard in shards} == {16, 17} and sorted(shards[0]) != shards[0]


def test_mini_is_shuffled_by_its_seed_and_sharded_by_example():
  t5x_tasks.register_mini(rows={"train": 50, "validation": 5}, seed=3)
  task = seqio.get_mixture_or_task("nm_glue_mini_rte")
  assert [task.num_input_examples(s) for s in ("train", "validation", "test")] == [50, 5, 256]
  order = lambda **kwargs: [x["idx"] for x in read("nm_glue_mini_rte", "train", **kwargs)]
  one = order(shuffle=True, seed=1)
  assert one == order(shuffle=True, seed=1) != order(shuffle=True, seed=2)
  assert sorted(one) == order() == list(range(50))
  assert sorted(order(shuffle=True)) == order()
  half = order(shard_info=seqio.ShardInfo(1, 2))
  assert half == list(range(1, 50, 2))
  # Before seqio's own buffer.
  raw = lambda **kwargs: [
    int(x["idx"]) for x in task.source.get_dataset("train", **kwargs).as_numpy_iterator()
  ]
  assert raw(shuffle=False) == order() != raw(shuffle=True, seed=1) == raw(shuffle=True, seed=1)
  assert raw(shuffle=True, seed=1) != raw(shuffle=True, seed=2)
  for bad in ({"train": 0}, {"trian": 5}, {"train": 2.5}):
    with pytest.raises(ValueError, match="rows"):
      t5x_tasks.register_mini(rows=bad)


# --- evaluation and caching -----------------------------------------------------------------------


def evaluate(name, split, answer):
  """seqio's own evaluation; `answer` turns an example into the predicted ids."""
  evaluator = seqio.Evaluator(
    name, seqio.EncDecFeatureConverter(pack=False), eval_split=split,
    sequence_length={"inputs": 32, "targets": 4},
  )  # fmt: skip

  def predict(data):
    return [
      (int(i), answer(x["decoder_target_tokens"].tolist())) for i, x in data.as_numpy_iterator()
    ]

  found, _ = evaluator.evaluate(compute_metrics=True, predict_fn=predict)
  return {task: dict(values) for task, values in found.result().items()}


def test_seqios_evaluation_of_the_mixture():
  t5x_tasks.register_mini(rows={"validation": 12})
  found = evaluate("nm_glue_mini_proportional", "validation", answer=lambda ids: ids)
  want = {
    "cola": ["matthews_corrcoef"], "sst2": ["accuracy"], "mrpc": ["f1", "accuracy"],
    "qqp": ["f1", "accuracy"], "stsb": ["pearson_corrcoef", "spearman_corrcoef"],
    "mnli_matched": ["accuracy"], "mnli_mismatched": ["accuracy"], "qnli": ["accuracy"],
    "rte": ["accuracy"],
  }  # fmt: skip
  want = {f"nm_glue_mini_{c}": dict.fromkeys(keys, 100.0) for c, keys in want.items()}
  assert {task: pytest.approx(values) for task, values in found.items()} == want
  nothing = evaluate("nm_glue_mini_rte", "validation", answer=lambda ids: [2, 1])
  assert nothing == {"nm_glue_mini_rte": {"accuracy": 0.0}}


def test_a_cached_task(tmp_path):
  """What seqio_cache_tasks leaves, written by hand since that needs Apache Beam."""
  from seqio import utils

  t5x_tasks.register_mini(rows={"validation": 8})
  name = "nm_glue_mini_stsb"
  task = seqio.get_mixture_or_task(name)
  plain = task.source.get_dataset("validation", shuffle=False)
  rows = list(task.preprocess_precache(plain).as_numpy_iterator())
  folder = pathlib.Path(tmp_path, utils.get_task_dir_from_name(name))
  folder.mkdir()
  spec = {
    k: {"shape": [None] * np.ndim(v), "dtype": "string" if isinstance(v, bytes) else v.dtype.name}
    for k, v in rows[0].items()
  }
  with tf.io.TFRecordWriter(str(folder / "validation.tfrecord-00000-of-00001")) as file:
    for row in rows:
      row["idx"] += 100  # this is the cache speaking
      file.write(utils.dict_to_tfexample(row).SerializeToString())
  info = {"num_shards": 1, "features": spec, "seqio_version": seqio.__version__}
  pathlib.Path(utils.get_cached_info_path(str(folder), "validation")).write_text(json.dumps(info))
  stats = {"examples": len(rows)}
  pathlib.Path(utils.get_cached_stats_path(str(folder), "validation")).write_text(json.dumps(stats))
  (folder / "COMPLETED").touch()
  seqio.add_global_cache_dirs([str(tmp_path)])
  lengths = {"sequence_length": {"inputs": 9, "targets": 2}}
  cached = read(name, "validation", use_cached=True, **lengths)
  assert [x["idx"] for x in cached] == list(range(100, 108)) and cached[0]["inputs"][-1] == 1
  assert [{**x, "idx": x["idx"] - 100} for x in cached] == read(name, "validation", **lengths)
