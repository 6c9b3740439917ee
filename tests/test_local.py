"""The local runner: what it learns, and that nothing that ends a process changes the result."""

import dataclasses
import functools
import gc
import itertools
import json
import os
import pathlib
import resource
import shutil
import signal
import time
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from checkpoint_files import assert_same, read

import nm_sparsity_jax as nms
from nm_sparsity_jax import cli
from nm_sparsity_jax.cli import _local
from nm_sparsity_jax.core.trees import flatten
from nm_sparsity_jax.models.t5 import network
from nm_sparsity_jax.runs import files, folders
from nm_sparsity_jax.training import configure

pytest.importorskip("seqio", reason="the local runner needs seqio: pip install -e '.[local]'")
# seqio, TensorFlow, clu and Orbax warn on their own account.
pytestmark = pytest.mark.filterwarnings("ignore")

with warnings.catch_warnings():
  warnings.simplefilter("ignore")
  import t5x_task  # registers the task

  from nm_sparsity_jax.trainer import checkpoints, data, evaluation, reports, step, train
  from nm_sparsity_jax.trainer.workloads import t5, text_evaluation

LENGTHS = {"inputs": 8, "targets": 8}
SIZES = dict(
  vocab_size=384, emb_dim=16, num_heads=2, num_encoder_layers=1, num_decoder_layers=1, head_dim=8,
  mlp_dim=32,
)  # fmt: skip
# 8 dense steps, 3 levels until 20, then the target.
IDP = dict(recipe="idp", pattern="1:8", sparse_steps=24, dense_steps=8, finetune_steps=4)


@pytest.fixture(autouse=True, scope="module")
def no_model_stays():
  yield
  MODELS.clear()
  gc.collect()  # what Orbax never awaited warns here, not in another file's tests


class Model(step.Model):
  """A model that makes its programs once, where each run would make them anew.

  What a new process makes anew, test_workloads.py and test_quickstart.py resume with.
  """

  def __init__(self, *args, **kwargs):
    super().__init__(*args, **kwargs)
    self.made = {}

  def once(self, make, rng, *key):
    key = make.__name__, np.asarray(rng).tobytes(), *key
    if key not in self.made:
      self.made[key] = make()
    return self.made[key]

  def initial_params(self, seed_key):
    def params():
      return super(Model, self).initial_params(seed_key)

    return jax.tree.map(jnp.copy, self.once(params, seed_key))  # a run donates them

  def eval_step(self):
    return self.once(super().eval_step, 0)

  def train_step(self, optimizer, rng, like, microbatches=1):
    def train_step():
      return super(Model, self).train_step(optimizer, rng, like, microbatches)

    return self.once(train_step, rng, optimizer, microbatches)

  def samplers(self, rng, microbatches=1):
    def samplers():
      return super(Model, self).samplers(rng, microbatches)

    return self.once(samplers, rng, microbatches)


MODELS = {}
ADAMW = optax.adamw(0.01)


def model_of(devices=1, partitions=1, dropout=0.0, dtype="float32", **rules):
  key = repr((devices, partitions, dropout, dtype, sorted(rules.items())))
  if key not in MODELS:
    config = network.T5Config.t5_1_1("tiny", **SIZES, dropout_rate=dropout, dtype=dtype)
    rules = configure.rules({"ff": None}, **(IDP | rules))
    MODELS[key] = Model(
      network.Transformer(config), rules, num_partitions=partitions, devices=jax.devices()[:devices]
    )
  return MODELS[key]


def source_of(**fields):
  fields = dict(name="nm_test_sort", lengths=LENGTHS, batch_size=16) | fields
  return data.Source(**fields)


EVALUATION = evaluation.Evaluation(name="nm_test_sort", batch_size=32, lengths=LENGTHS)


def run_of(folder, model=None, **fields):
  model = model or model_of()
  fields = dict(
    optimizer=ADAMW, source=source_of(), sparse_steps=24,
    keep_checkpoints=None,
    periods=train.Periods(evaluate=100, checkpoint=6, report=1, metrics=None),
  ) | fields  # fmt: skip
  return train.Run(model=model, model_dir=str(folder), **fields)


def at_step(number, do):
  """A learning rate, which is asked for at every report, that does something at one step."""

  def rate(done):
    if done == number:
      do()
    return 0.0

  return rate


def lines(folder, room="train"):
  return [json.loads(x) for x in (folder / room / "metrics.jsonl").read_text().splitlines()]


# --- the thread --------------------------------------------------------------------------------


def test_learns_dense_then_sparse_from_that_checkpoint(tmp_path, capfd):
  dense, sparse = tmp_path / "dense", tmp_path / "sparse"
  common = dict(source=source_of(pack=True))
  steps = train.Periods(evaluate=60, report=20, metrics=None)
  rules = dict(recipe="dense", pattern=None, sparse_steps=120, dense_steps=0, finetune_steps=0)
  model = model_of(**rules)
  assert train.train(run_of(dense, model, sparse_steps=120, periods=steps, **common)) == 0
  assert folders.steps(dense) == [60, 120]
  first, last = lines(dense)[0], lines(dense)[-1]
  assert last["step"] == 120 and last["loss"] < 0.3 < 2 < first["loss"]

  rules = dict(recipe="sr_ste", pattern="1:4", sparse_steps=60, dense_steps=30, finetune_steps=0)
  model = model_of(**rules)
  start = dict(initial_checkpoint=str(dense / "checkpoint_120"), pretrained_steps=120)
  steps = train.Periods(evaluate=20, report=20, metrics=20)
  common |= dict(start, evaluation=EVALUATION, keep_checkpoints=1)
  run = run_of(sparse, model, sparse_steps=60, periods=steps, **common)
  assert train.train(run) == 0
  # The step goes on; a checkpoint of the dense phase is never the best.
  found = {e["step"]: e for e in json.loads((sparse / "evaluations.json").read_text())}
  assert [e["at_target"] for e in found.values()] == [False, True, True]
  best = min((160, 180), key=lambda s: found[s]["loss"]["nm_test_sort"])
  assert set(folders.steps(sparse)) == {best, 180}
  assert lines(sparse)[1]["loss"] < 0.5  # started from the dense weights
  sampled = [x for x in lines(sparse) if "nm/density" in x]
  assert [x["step"] for x in sampled] == [140, 160, 180]
  assert [x["nm/density"] for x in sampled] == [1, 0.25, 0.25]
  by_layer = {k: v for k, v in sampled[-1].items() if k.startswith("nm/density/")}
  assert len(by_layer) == 6 and set(by_layer.values()) == {0.25}
  assert {"nm/D", "nm/n/ff", "nm/m/ff", "nm/flip_rate/all", "nm/second_moment_var/all"} < set(
    sampled[0]
  )

  # What seqio and T5X would have written.
  (scores,) = (sparse / "inference_eval").glob("nm_test_sort-metrics.jsonl")
  scores = [json.loads(x) for x in scores.read_text().splitlines()]
  assert [x["step"] for x in scores] == [140, 160, 180]
  assert scores[-1]["letters"] == found[180]["metrics"]["nm_test_sort"]["letters"] > 0.2
  assert (sparse / "inference_eval/nm_test_sort-000180.jsonl").is_file()
  assert list((sparse / "training_eval/nm_test_sort").glob("events.*"))
  assert lines(sparse, "training_eval/nm_test_sort")[-1]["accuracy"] > 0.2

  # The files prove n:m.
  saved = read(sparse, 180)
  params = {k.removeprefix("target/"): v for k, v in saved.items() if k.startswith("target/")}
  report = nms.verify(nest(params), model.rules)
  assert report.ok and {p.density for p in report.places} == {0.25}
  assert int(saved["state/step"]) == 180
  assert int(saved["state/nm_sparsity/step"]) == 60
  assert configure.unpack(saved["state/nm_sparsity/rules"]).startswith("ff: sr_ste 1:4")

  # A plain line now and then, and `eval` says the same of the same checkpoint.
  out = capfd.readouterr().err
  assert "step 160/180  loss" in out and "1:4  density 0.25" in out and "left" in out
  assert train.evaluate(model, EVALUATION, str(sparse / "checkpoint_180"), str(tmp_path / "e")) == 0
  (alone,) = (tmp_path / "e/inference_eval").glob("*-metrics.jsonl")
  assert json.loads(alone.read_text()) == scores[-1]
  assert lines(tmp_path / "e", "training_eval/nm_test_sort")[0] == lines(
    sparse, "training_eval/nm_test_sort"
  )[-1]  # fmt: skip

  # What `infer` writes is what was judged there, example by example.
  checkpoint, folder = str(sparse / "checkpoint_180"), tmp_path / "i"
  assert train.infer(model, EVALUATION, checkpoint, str(folder), "# it") == 0
  assert (folder / "config.gin").read_text() == "# it"
  (file,) = folder.glob("*jsonl*")
  assert file.name == "nm_test_sort-predict.jsonl-00000-of-00001"
  found = [json.loads(x) for x in file.read_text().splitlines()]
  fields, said = zip(*((x["inputs"], x["prediction"]) for x in found), strict=True)
  assert all(set(x) == {"inputs_pretokenized", "targets_pretokenized"} for x in fields)
  assert [x["targets_pretokenized"] for x in fields] == [
    "".join(sorted(x["inputs_pretokenized"])) for x in fields
  ]
  letters = t5x_task.letters_in_place([x["targets_pretokenized"] for x in fields], said)
  assert letters == {"letters": scores[-1]["letters"]} and len(found) == 32
  with pytest.raises(ValueError, match="TASK_FEATURE_LENGTHS=None: predictions need a length"):
    train.infer(model, dataclasses.replace(EVALUATION, lengths=None), checkpoint, str(folder))

  other = model_of(**(rules | dict(pattern="1:2")))
  with pytest.raises(ValueError, match=r"rules \[ff: sr_ste 1:4.*run has \[ff: sr_ste 1:2"):
    train.evaluate(other, EVALUATION, str(sparse / "checkpoint_180"), str(tmp_path / "e"))


def nest(flat):
  from flax import traverse_util

  return traverse_util.unflatten_dict(flat, sep="/")


# --- resume ------------------------------------------------------------------------------------

HARD = dict(source=source_of(pack=True), microbatches=2)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
  """An uninterrupted run: idp, packed data, dropout, microbatches."""
  folder = tmp_path_factory.mktemp("whole")
  assert train.train(run_of(folder, model_of(dropout=0.1), **HARD)) == 0
  return folder, read(folder, 24)


def test_resumed_is_uninterrupted_bit_for_bit(whole, tmp_path):
  """Stopped at the end of the dense phase, where a level begins, and within one."""
  model = model_of(dropout=0.1)
  starts = [start for start, _ in model.rules.places["ff"].levels(32)]
  assert starts == [8, 11, 14, 17]
  for number, how, code in [
    (8, signal.SIGTERM, 0),
    (11, signal.SIGINT, 130),
    (16, signal.SIGTERM, 0),
  ]:
    stop = at_step(number - 1, lambda how=how: os.kill(os.getpid(), how))
    assert train.train(run_of(tmp_path, model, learning_rate=stop, **HARD)) == code
    # Some steps were under way.
    assert number <= folders.steps(tmp_path)[-1] <= number + 3
  assert train.train(run_of(tmp_path, model, learning_rate=at_step(0, None), **HARD)) == 0
  assert_same(read(tmp_path, 24), whole[1])
  without = lambda rows: [{k: v for k, v in x.items() if k != "learning_rate"} for x in rows]
  assert without(lines(tmp_path)) == without(lines(whole[0]))
  # It is complete: nothing happens.
  before = sorted(tmp_path.rglob("*"))
  assert train.train(run_of(tmp_path, model, **HARD)) == 0
  assert sorted(p for p in tmp_path.rglob("*") if "events" not in p.name) == [
    p for p in before if "events" not in p.name
  ]


@pytest.mark.parametrize(
  "devices, partitions, name, rules",
  [
    (4, 2, "tests_mixed", dict(recipe="snip", fields={"batches": 3})),
    # D is 1, then between, then 0; nothing is stored but W.
    (1, 1, "nm_test_sort", dict(recipe="mdgf_linear")),
  ],
  ids=["sharded masks", "D between 0 and 1"],
)  # fmt: skip
def test_a_mixture_resumes_on_any_devices(devices, partitions, name, rules, tmp_path, capfd):
  """A frozen mask that lies on several devices comes back whole; so does the order of tasks."""
  model = model_of(devices, partitions, **rules)
  run = lambda folder, **more: run_of(tmp_path / folder, model, source=source_of(name=name), **more)
  assert train.train(run("whole")) == 0
  stop = at_step(12, lambda: os.kill(os.getpid(), signal.SIGTERM))
  assert train.train(run("part", learning_rate=stop)) == 0
  assert 12 < folders.steps(tmp_path / "part")[-1] < 24
  assert train.train(run("part")) == 0
  saved = read(tmp_path / "whole", 24)
  assert_same(read(tmp_path / "part", 24), saved)
  masks = [k for k in saved if "/mask/" in k and k.endswith("wo/kernel")]
  assert len(masks) == (2 if rules["recipe"] == "snip" else 0)
  capfd.readouterr()
  assert cli.main(["finalize", str(tmp_path / "part"), str(tmp_path / "final")]) == 0
  assert cli.main(["verify", str(tmp_path / "final")]) == 0
  assert "1:8" in capfd.readouterr().out


def test_one_process_at_a_time(tmp_path):
  """A second one would remove the checkpoint that the first is writing."""
  found = []

  def another():
    with pytest.raises(ValueError, match="another process trains there. Wait until it ends"):
      train.train(run_of(tmp_path))
    found.append(True)

  run = run_of(tmp_path, learning_rate=at_step(6, another))
  assert train.train(run) == 0 and found and folders.steps(tmp_path) == [6, 12, 18, 24]


def test_what_a_run_ran_with_is_noted(whole, tmp_path, monkeypatch):
  (first,) = json.loads((whole[0] / "run.json").read_text())["processes"]
  assert first["from"] == 0 and first["environment"]["jax"] == jax.__version__
  assert first["environment"]["devices"].startswith("8 x ")
  monkeypatch.delenv("XLA_FLAGS", raising=False)
  for number, cores, want in [(5, "0", [("0", 0)]), (9, "0", [("0", 0)]), (None, "01", None)]:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: set(cores), raising=False)
    stop = number and at_step(number, lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert train.train(run_of(tmp_path, learning_rate=stop)) == 0
    noted = json.loads((tmp_path / "run.json").read_text())
    found = [(p["environment"]["cores"], p["from"]) for p in noted["processes"]]
    if want:
      assert found == [("1", 0)]
    else:
      assert [cores for cores, _ in found] == ["1", "2"] and 9 < found[1][1] < 24
  assert noted["start"] == 0


def test_stopped_in_an_evaluation(tmp_path, capsys, monkeypatch):
  """It says so, at the last step too, and the same command evaluates what is saved."""
  steps = train.Periods(evaluate=12, report=12, metrics=None)
  run = lambda name: run_of(tmp_path / name, periods=steps, evaluation=EVALUATION)
  noted = lambda name: files.read_json(tmp_path / name / "evaluations.json", [])
  assert train.train(run("whole")) == 0 and [e["step"] for e in noted("whole")] == [12, 24]
  assert capsys.readouterr().err.count("the same command continues from there") == 0

  original = text_evaluation.Evaluator.metrics
  for at, how, code, so_far in [
    (12, signal.SIGTERM, 0, []),
    (24, signal.SIGINT, 130, [12]),
  ]:

    def metrics(self, effective, step, at=at, how=how):
      if step == at:
        os.kill(os.getpid(), how)
      return original(self, effective, step)

    monkeypatch.setattr(text_evaluation.Evaluator, "metrics", metrics)
    assert train.train(run("part")) == code
    said = f"{how.name}: saved checkpoint_{at}; the same command continues from there"
    assert said in capsys.readouterr().err
    assert [e["step"] for e in noted("part")] == so_far
    assert not folders.is_done(tmp_path / "part", 24)
  monkeypatch.undo()
  assert train.train(run("part")) == 0
  assert noted("part") == noted("whole") and folders.is_done(tmp_path / "part", 24)
  assert_same(read(tmp_path / "part", 24), read(tmp_path / "whole", 24))


def test_the_best_stays_when_the_run_goes_on(tmp_path):
  model = model_of(recipe="one_shot", dense_steps=1, finetune_steps=0)
  steps = train.Periods(evaluate=8, checkpoint=4, report=1, metrics=None)
  losses = dataclasses.replace(EVALUATION, num_examples=0)  # they alone say what is best
  fields = dict(periods=steps, evaluation=losses, keep_checkpoints=1)
  for number, best in (10, {8}), (13, {8}), (None, None):
    stop = number and at_step(number - 1, lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert train.train(run_of(tmp_path, model, learning_rate=stop, **fields)) == 0
    found = folders.steps(tmp_path)
    assert best is None or set(found[:-1]) == best
  evaluated = folders.evaluations(tmp_path)
  losses = {at: e["loss"]["nm_test_sort"] for at, e in evaluated.items()}
  assert set(losses) == {8, 16, 24} and set(found) == {min(losses, key=losses.get), 24}


def test_a_kill_while_one_is_removed_leaves_no_half_checkpoint(tmp_path, monkeypatch):
  def half(path):
    for file in sorted(path.rglob("*"))[::2]:
      if file.is_file() and file.name != "_METADATA":
        file.unlink()
    raise KeyboardInterrupt

  steps = train.Periods(evaluate=100, checkpoint=6, report=1, metrics=None)
  run = run_of(tmp_path, periods=steps, keep_checkpoints=1)
  monkeypatch.setattr(checkpoints, "_remove", half)
  with pytest.raises(KeyboardInterrupt):
    train.train(run)
  monkeypatch.undo()
  (tmp_path / "checkpoint_1.removed").write_text("a user's")
  (tmp_path / "checkpoint_old.removed").mkdir()
  assert any("removed" in p.name for p in tmp_path.iterdir())
  for number in folders.steps(tmp_path):
    read(tmp_path, number)
  assert train.train(run) == 0
  assert folders.steps(tmp_path) == [24]
  left = {p.name for p in tmp_path.iterdir() if "removed" in p.name}
  assert left == {"checkpoint_1.removed", "checkpoint_old.removed"}


def test_what_is_saved_in_the_background_is_that_step(whole, tmp_path):
  """Though later steps were given its buffers."""
  folder, _ = whole
  stop = at_step(5, lambda: os.kill(os.getpid(), signal.SIGTERM))
  train.train(run_of(tmp_path, model_of(dropout=0.1), learning_rate=stop, **HARD))
  assert_same(read(tmp_path, 6), read(folder, 6))
  assert (read(folder, 6)["target/encoder/encoder_norm/scale"] != 1).any()


# --- what goes wrong ---------------------------------------------------------------------------


def test_a_number_that_is_not_finite_stops_the_run(tmp_path):
  rate = lambda count: jnp.where(count == 9, jnp.nan, 0.01)
  run = run_of(tmp_path, optimizer=optax.adamw(rate))
  with pytest.raises(ValueError, match="update of step 10 is not finite. The last good step is 9, "
                     "the newest checkpoint checkpoint_6"):  # fmt: skip
    train.train(run)
  assert folders.steps(tmp_path) == [6]
  assert lines(tmp_path)[-1]["step"] == 9


def test_a_full_disk_loses_nothing(whole, tmp_path):
  def fill():
    while folders.steps(tmp_path) != [6]:
      time.sleep(0.01)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))

  limits = resource.getrlimit(resource.RLIMIT_FSIZE)
  model = model_of(dropout=0.1)
  try:
    with pytest.raises(ValueError, match=r"checkpoint_12 could not be written \(.*newest complete "
                       "checkpoint is checkpoint_6"):  # fmt: skip
      train.train(run_of(tmp_path, model, learning_rate=at_step(8, fill), **HARD))
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
  assert folders.steps(tmp_path) == [6]
  assert train.train(run_of(tmp_path, model, **HARD)) == 0
  assert_same(read(tmp_path, 24), whole[1])
  assert not [p for p in tmp_path.iterdir() if "tmp" in p.name]


def test_curves_that_cannot_be_written_are_named(whole, tmp_path):
  """A limit that they meet before a checkpoint does."""
  limits = resource.getrlimit(resource.RLIMIT_FSIZE)

  def fill():
    while folders.steps(tmp_path) != [6]:
      time.sleep(0.01)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300, limits[1]))

  try:
    with pytest.raises(ValueError, match=r"curves or scores in .* could not be written \(.*"
                       "newest complete checkpoint is checkpoint_6; with room"):  # fmt: skip
      model = model_of(dropout=0.1)
      train.train(run_of(tmp_path, model, learning_rate=at_step(8, fill), **HARD))
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
  assert train.train(run_of(tmp_path, model_of(dropout=0.1), **HARD)) == 0
  assert_same(read(tmp_path, 24), whole[1])
  assert [x["step"] for x in lines(tmp_path)] == list(range(1, 25))


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_truncated_checkpoint_is_named(every, whole, tmp_path):
  """Whichever of its files is cut in half, nothing that is wrong is returned."""
  model = model_of(dropout=0.1)
  like = model.state_shapes(optax.adamw(0.01))
  shutil.copytree(whole[0] / "checkpoint_18", tmp_path / "checkpoint_18")
  files = [p for p in (whole[0] / "checkpoint_24").rglob("*") if p.is_file() and p.stat().st_size]
  assert len(files) > 5
  # What the other two ways of reading meet: arrays, and what says where they are.
  met = {max(files, key=lambda p: p.stat().st_size), *(p for p in files if "_METADATA" in p.name)}
  others = (
    lambda path: checkpoints.load_initial(path, model, jax.random.PRNGKey(0))[0],
    lambda path: checkpoints.load_for_evaluation(checkpoints.opened(path, model), model)["params"],
  )
  found = 0
  for file in files:
    shutil.copytree(whole[0] / "checkpoint_24", tmp_path / "checkpoint_24", dirs_exist_ok=True)
    cut = tmp_path / file.relative_to(whole[0])
    cut.write_bytes(cut.read_bytes()[: cut.stat().st_size // 2])
    store = checkpoints.Checkpoints(tmp_path, None)
    try:
      tree, _ = store.restore(24, like, model)
    except ValueError as e:
      found += 1
      assert "checkpoint_24 cannot be read: it is damaged" in str(e)
      assert "continues from checkpoint_18" in str(e) and "\n" not in str(e)
    else:  # a file that nothing depends on
      assert_same(jax.device_get(dict(flatten(tree))), whole[1])
    store.close()
    # As the start of another run, and for an evaluation.
    for load in others if every or file in met else ():
      try:
        params = load(str(tmp_path / "checkpoint_24"))
      except ValueError as e:
        assert "checkpoint_24" in str(e) and "damaged" in str(e) and len(str(e)) < 600, e
      else:
        got = {f"target/{k}": x for k, x in flatten(jax.device_get(params))}
        assert_same(got, {k: x for k, x in whole[1].items() if k.startswith("target/")})
    gc.collect()  # what Orbax began and never awaited warns here, where warnings are expected
  assert found >= 3


GIN = ["local_train.gin", "local_adamw.gin"]


def command(*names, **macros):
  root = pathlib.Path(__file__).resolve().parents[1]
  files = [f"gin_configs/runs/{name}" for name in names] + ["tests/local_tiny.gin"]
  return [
    f"--gin_search_paths={root}", *(f"--gin_file={name}" for name in files),
    *(f"--gin.{name}={value!r}" for name, value in macros.items()),
  ]  # fmt: skip


def test_other_settings_are_refused_by_name(tmp_path, capsys, monkeypatch):
  def go(run, saved, stop):  # settings are compared before; this leaves a checkpoint, as a run does
    (saved.folder / "checkpoint_1/state").mkdir(parents=True, exist_ok=True)
    (saved.folder / "checkpoint_1/state/_METADATA").touch()
    return 0

  monkeypatch.setattr(train, "go", go)
  macros = dict(MODEL_DIR=str(tmp_path / "run"), RECIPE="sr_ste", PATTERN="1:4", SPARSE_STEPS=9)
  assert cli.main(["train", *command(*GIN, **macros)]) == 0
  assert "sr_ste" in (tmp_path / "run/config.gin").read_text()
  before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
  for change, words in [
    (dict(PATTERN="1:2"), (".pattern was '1:4', and is '1:2'.",)),
    (dict(RECIPE="idp"), (".recipe was 'sr_ste', and is 'idp'.",)),
    (dict(LEARNING_RATE=0.5), ("rate was 0.001, and is 0.5.",)),
    (dict(DATA_SEED=3), ("source.seed was 0, and is 3.",)),
    (dict(RANDOM_SEED=3), (": random_seed was 0, and is 3.",)),
    (dict(DTYPE="bfloat16"), ("dtype was 'float32', and is 'bfloat16'.",)),
  ]:
    capsys.readouterr()
    assert cli.main(["train", *command(*GIN, **(macros | change))]) == 1
    error = capsys.readouterr().err
    assert "was started with other settings" in error and all(w in error for w in words), error
    assert len(error.splitlines()) == 1
    cli.main(["plan", "--json", *command(*GIN, **(macros | change))])
    errors = json.loads(capsys.readouterr().out)["errors"]
    assert any(all(w in text for w in ("other settings", *words)) for text in errors), errors
  assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before
  # Periods may change; what the result depends on may not.
  assert cli.main(["train", *command(*GIN, **macros, STATS_PERIOD=7, EVAL_PERIOD=3)]) == 0


@pytest.mark.parametrize("run, optimizer", [("train", "adamw"), ("finetune", "adafactor")])
def test_every_run_file_makes_a_run(run, optimizer, tmp_path, monkeypatch):
  made = []
  monkeypatch.setattr(train, "go", lambda run, *_: made.append(run) or 0)
  # The checkpoint is nowhere; tests/test_refused.py has what looks.
  monkeypatch.setattr(_local, "_refuse_missing", lambda _: None)
  macros = dict(
    MODEL_DIR=str(tmp_path), RECIPE="sr_ste", PATTERN="1:4", SPARSE_STEPS=9, DROPOUT_RATE=0.2,
    INITIAL_CHECKPOINT_PATH="c", MICROBATCHES=2, EVAL_PERIOD=7, NUM_DECODES=3, PACK=True,
  )  # fmt: skip
  names = f"local_{run}.gin", f"local_{optimizer}.gin"
  assert cli.main(["train", *command(*names, **macros)]) == 0
  (run,) = made
  assert (
    run.model.workload.network.config.dropout_rate == 0.2
    and run.source.pack
    and run.source.seed == 0
  )
  assert (run.microbatches, run.sparse_steps, run.initial_checkpoint) == (2, 9, "c")
  assert run.periods.evaluate == 7 and run.evaluation.num_decodes == 3
  assert configure.describe(run.model.given_rules) == "ff: sr_ste 1:4, total=9"
  assert hasattr(run.optimizer, "update")
  state = run.optimizer.init({"w": jnp.ones((256, 256))})
  assert any("v_row" in str(k) for k, _ in jax.tree.flatten_with_path(state)[0]) == (
    optimizer == "adafactor"
  )


def test_eval_without_its_checkpoint_is_one_line(tmp_path, capsys):
  macros = dict(RECIPE="sr_ste", PATTERN="1:4", SPARSE_STEPS=9, EVAL_OUTPUT_DIR=str(tmp_path))
  assert cli.main(["eval", *command("local_eval.gin", **macros)]) == 1
  assert "CHECKPOINT_PATH is not set" in capsys.readouterr().err
  assert cli.main(["eval", *command("local_eval.gin", **macros, CHECKPOINT_PATH="/no/ck")]) == 1
  assert "there is no checkpoint '/no/ck'" in capsys.readouterr().err
  assert cli.main(["train", *command("local_eval.gin", **macros, CHECKPOINT_PATH="/no/ck")]) == 1
  assert "no run file of this command: gin_configs/runs/local_train.gin" in capsys.readouterr().err


def test_checkpoints_of_another_program_are_refused(tmp_path):
  (tmp_path / "checkpoint_5/state").mkdir(parents=True)
  (tmp_path / "checkpoint_5/state/_METADATA").touch()
  with pytest.raises(ValueError, match="another program wrote. Take an empty MODEL_DIR"):
    train.train(run_of(tmp_path))


@pytest.mark.parametrize(
  "change, words",
  [
    (dict(MODEL_DIR="/dev/null/run"), "MODEL_DIR='/dev/null/run' cannot be written to: Not a"),
    (dict(MIXTURE_OR_TASK_NAME="nm_test_sor"), "did you mean nm_test_sort?"),
    (dict(BATCH_SIZE=15), "BATCH_SIZE=15 must be a multiple of 1 microbatches times 8 devices"),
    (dict(NUM_PARTITIONS=3), "NUM_PARTITIONS=3 does not divide the 8 local devices"),
    (dict(VOCAB_SIZE=128), "'inputs' has 259 ids, but the network embeds 128. Set VOCAB_SIZE=384"),
    (dict(DECODER="beams"), "DECODER='beams': choose one of beam, greedy"),
    (dict(LEARNING_RATE_FACTORS="constant * cosine"), "'cosine' is not one of constant"),
    (dict(SPARSE_STEPS=None, RECIPE="dense"), "SPARSE_STEPS=None"),
    (dict(INITIAL_CHECKPOINT_PATH="/no/checkpoint_1"), "no checkpoint '/no/checkpoint_1'"),
    (dict(SPARSE_STEP=9), "SPARSE_STEP is set, but nothing reads it; did you mean SPARSE_STEPS?"),
    (dict(MODEL_DIR=None), "MODEL_DIR=None: name a folder, such as 'run'"),
    (dict(MODEL_DIR=""), "MODEL_DIR='': name a folder, such as 'run'"),
    (dict(BATCH_SIZE="16"), "BATCH_SIZE='16': give a whole number, 1 or more"),
    (dict(BATCH_SIZE=0), "BATCH_SIZE=0: give a whole number, 1 or more"),
    (dict(RANDOM_SEED=None), "RANDOM_SEED=None: give a whole number, such as 0"),
    (dict(RANDOM_SEED=-1), "RANDOM_SEED=-1: give a whole number from 0 to"),
    (dict(RANDOM_SEED=1 << 40), "RANDOM_SEED=1099511627776: give a whole number from 0 to"),
    (dict(DATA_SEED=-3), "DATA_SEED=-3: give a whole number from 0 to"),
    (dict(DATA_SEED=None), "DATA_SEED=None: give a whole number, such as 0"),
    (dict(LEARNING_RATE=-0.1), "LEARNING_RATE=-0.1: give a number above 0"),
    (dict(LEARNING_RATE="high"), "LEARNING_RATE='high': give a number above 0"),
    (dict(WARMUP_STEPS=None), "WARMUP_STEPS=None: give a whole number of steps"),
    (dict(EVAL_PERIOD=0), "EVAL_PERIOD=0: give a whole number of steps, 1 or more"),
    (
      dict(METRICS_EVERY=0.5),
      "METRICS_EVERY=0.5: give a whole number of steps, 1 or more, or None",
    ),
    (dict(PATTERN="1:5"), "or Rules(..., indivisible='skip') (gin: INDIVISIBLE) to leave it dense"),
  ],
  ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_mistakes_are_one_line(change, words, tmp_path, capsys):
  macros = dict(MODEL_DIR=str(tmp_path), RECIPE="sr_ste", PATTERN="1:4", SPARSE_STEPS=2) | change
  assert cli.main(["train", *command(*GIN, **macros)]) == 1
  error = capsys.readouterr().err
  assert words in error and len(error.splitlines()) == 1, error
  # `plan` says the same before; how many devices there will be it cannot know.
  cli.main(["plan", "--json", *command(*GIN, **macros)])
  report = json.loads(capsys.readouterr().out)
  if "NUM_PARTITIONS" in change:
    assert report["ok"] and "NUM_PARTITIONS is not checked" in " ".join(report["notes"])
  else:
    assert not report["ok"] and any(words in text for text in report["errors"]), report["errors"]


# --- the step ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
  "optimizer, name",
  [
    (optax.adamw(0.01), "second_moment_var"),
    (optax.adafactor(0.01, min_dim_size_to_factor=8), "second_moment_var_factored"),
    (optax.sgd(0.01), None),
  ],
  ids=["adamw", "adafactor", "sgd"],
)
def test_the_second_moment_is_sampled_where_there_is_one(optimizer, name):
  model = model_of(**SR_STE)
  batch = jax.tree.map(jnp.asarray, next(source_of().batches()))
  before, after = model.samplers(jax.random.PRNGKey(0))
  params = model.initial_params(jax.random.PRNGKey(0))
  state = model.begin(params, optimizer, 0)
  found = {k.split("/")[1] for k in after(state, before(state, batch)) if "moment" in k}
  assert found == ({name} if name else set())


def stepped(model, microbatches=1, steps=3):
  """Parameters and losses after some steps of sr_ste on the first batches."""
  optimizer, key = optax.sgd(0.1), jax.random.PRNGKey(1)
  state = model.begin(model.initial_params(jax.random.PRNGKey(0)), optimizer, 0)
  step_of = model.train_step(optimizer, key, state, microbatches)
  batches, losses = source_of().batches(), []
  for _ in range(steps):
    state, sums = step_of(state, model.put(next(batches)))
    assert sums.names == ("loss", "z_loss", "correct", "tokens", "grad_norm", "update_norm")
    losses.append(np.asarray(sums.values[:4]))
  return jax.device_get(state.params), losses


SR_STE = dict(recipe="sr_ste", pattern="1:4", dense_steps=0, fields={"lam": 0.5})


@pytest.fixture(scope="module")
def one_device():
  return stepped(model_of(**SR_STE))


@pytest.mark.parametrize("devices, partitions, microbatches", [(1, 1, 4), (8, 2, 2)])
def test_microbatches_and_devices_change_nothing(devices, partitions, microbatches, one_device):
  params, losses = one_device
  model = model_of(devices, partitions, **SR_STE)
  got, got_losses = stepped(model, microbatches)
  np.testing.assert_allclose(got_losses, losses, rtol=1e-5)
  jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), got, params)
  if partitions == 2:
    specs = dict(flatten(model.shardings(model.shapes)))
    assert specs["encoder/layers_0/mlp/wo/kernel"].spec == jax.P("model", None)


@pytest.mark.filterwarnings("ignore:step=.* is a constant:UserWarning")
@pytest.mark.filterwarnings("ignore:sr_ste at .* adds lam:UserWarning")
def test_the_step_is_what_the_parts_say(one_device):
  """Loss and z-loss written out, without the runner's step; the first pass sees dense weights."""
  model = model_of(**SR_STE)
  rules, batch = model.rules, next(source_of().batches())
  params = model.initial_params(jax.random.PRNGKey(0))
  net = model.workload.network

  def loss(params):
    tokens = [batch[k] for k in ("encoder_input_tokens", "decoder_input_tokens")]
    targets = batch["decoder_target_tokens"]
    logits = net.apply({"params": params}, *tokens, targets, enable_dropout=False)
    log_z = jax.nn.logsumexp(logits, -1)
    losses = log_z - jnp.sum(logits * jax.nn.one_hot(targets, 384), -1) + 1e-4 * log_z**2
    return jnp.sum(jnp.where(targets > 0, losses, 0.0)) / np.float32(np.sum(targets > 0))

  value, grads = jax.jit(jax.value_and_grad(loss))(params)
  want = jax.tree.map(lambda w, g: w - 0.1 * g, params, grads)
  want = nms.sparsify(want, rules, 1)
  got, losses = stepped(model, steps=1)
  np.testing.assert_allclose(losses[0][0] / losses[0][3], value, rtol=1e-5)
  jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), got, want)


def test_label_smoothing_is_its_definition():
  rng = np.random.default_rng(0)
  family = t5.T5(model_of().workload.network, z_loss=0.0, label_smoothing=0.2)
  logits = rng.normal(size=(2, 8, 384)).astype(np.float32)
  targets = rng.integers(1, 384, (2, 8))
  family.logits = lambda *_: jnp.asarray(logits)
  batch = dict(decoder_target_tokens=targets, decoder_loss_weights=np.ones((2, 8), int))
  got = family.loss(None, {}, batch, None)[0]
  soft = np.full((2, 8, 384), 0.2 / 383)
  np.put_along_axis(soft, targets[..., None], 0.8, -1)
  log_probs = np.asarray(jax.nn.log_softmax(logits))
  want = np.sum(soft * (np.log(soft) - log_probs))
  np.testing.assert_allclose(got, want, rtol=1e-5)


def test_bfloat16_computes_and_float32_stays():
  batch, found = next(source_of().batches()), {}
  for dtype in ("float32", "bfloat16"):
    model = model_of(dtype=dtype, **SR_STE)
    optimizer = optax.adamw(0.1)
    state = model.begin(model.initial_params(jax.random.PRNGKey(0)), optimizer, 0)
    found[dtype] = model.eval_step()({"params": state.params}, model.put(batch)).values[0]
  assert {x.dtype for x in jax.tree.leaves((state.params, state.opt_state.inner_state[0].nu))} == {
    np.dtype("float32")
  }
  assert 0 < abs(found["bfloat16"] - found["float32"]) < 0.02 * found["float32"]


# --- data and reports --------------------------------------------------------------------------


@pytest.mark.parametrize(
  "name, pack",
  [
    pytest.param("nm_test_sort", False, marks=pytest.mark.slow),  # what the other two are
    ("nm_test_sort", True),
    ("tests_mixed", False),
  ],
)
def test_the_stream_is_a_function_of_seed_and_position(name, pack):
  def take(n, start=0, **fields):
    return list(itertools.islice(source_of(name=name, pack=pack, **fields).batches(start), n))

  whole = take(20)  # more than an epoch
  same = lambda a, b: all((x == y).all() for x, y in zip(a.values(), b.values(), strict=True))
  for start in (1, 18):
    assert same(take(1, start)[0], whole[start])
  assert not same(whole[0], whole[16]) and not same(take(1, seed=1)[0], whole[0])
  assert ("encoder_segment_ids" in whole[0]) == pack
  shapes = {name: x.shape for name, x in whole[0].items()}
  assert source_of(name=name, pack=pack).shapes() == shapes


def test_lines_beyond_the_step_that_is_gone_on_from_are_dropped(tmp_path):
  file = tmp_path / "metrics.jsonl"
  file.write_text('{"step": 5, "a": 1}\n{"step": 10, "a": 2}\n{"step": 15, "a": 3}\n{"step": 2')
  writer = reports.writer(tmp_path, 10)
  writer.write_scalars(11, {"a": np.float32(4)})
  writer.close()
  assert [json.loads(x)["a"] for x in file.read_text().splitlines()] == [1, 2, 4]


def test_a_kill_while_lines_are_dropped_loses_none(tmp_path, monkeypatch):
  file = tmp_path / "metrics.jsonl"
  file.write_text(before := '{"step": 5, "a": 1}\n{"step": 10, "a": 2}\n')

  def killed(*_):
    raise KeyboardInterrupt

  monkeypatch.setattr(os, "replace", killed)
  with pytest.raises(KeyboardInterrupt):
    reports.writer(tmp_path, 5)
  assert file.read_text() == before


def test_the_best_is_at_the_target_pattern_and_the_first_of_equals():
  rows = [
    dict(step=s, at_target=t, loss={"a": x, "b": x}, metrics={"a": {"f1": y}, "b": {"em": 1.0}})
    for s, t, x, y in [(1, False, 0.1, 9.0), (2, True, 0.5, 1.0), (3, True, 0.5, 3.0)]
  ]
  assert evaluation.best_step(rows, None) == 2 and evaluation.best_step(rows, "f1") == 3
  assert evaluation.best_step(rows[:1], None) is None and evaluation.best_step([], "f1") is None
  with pytest.raises(ValueError, match="BEST_METRIC='bleu' is not a metric of the tasks: em, f1"):
    evaluation.best_step(rows, "bleu")
  # Less of an error is better: by its name, unless the workload notes otherwise.
  errors = [r | {"metrics": {"a": {"error": x}}} for r, x in zip(rows[1:], (0.2, 0.3), strict=True)]
  assert evaluation.best_step(errors, "error") == 2
  assert evaluation.best_step([r | {"less_is_better": []} for r in errors], "error") == 3
  # A correlation of equal predictions is NaN, early on; a loss may be.
  worse = [dict(rows[1], metrics={"a": {"f1": np.nan}}), rows[2] | {"step": 4}]
  assert evaluation.best_step(worse, "f1") == 4 and evaluation.best_step(worse[:1], "f1") is None
  assert evaluation.best_step([dict(rows[1], loss={"a": np.nan}), rows[2]], None) == 3


def test_a_best_metric_that_no_task_has_is_refused_before_the_first_step(
  tmp_path, capsys, monkeypatch
):
  """It was refused at the first evaluation, which may be hours after the start."""
  monkeypatch.setattr(train, "_steps", lambda *_: pytest.fail("a step was made"))
  folder = tmp_path / "run"
  with pytest.raises(ValueError, match="'leters' is not a metric of the tasks: letters"):
    train.train(run_of(folder, best_metric="leters", evaluation=EVALUATION))
  assert not folder.exists()
  macros = dict(RECIPE="sr_ste", PATTERN="1:4", SPARSE_STEPS=2, MODEL_DIR=str(folder))
  planned = command(*GIN, **macros, BEST_METRIC="letters")
  assert cli.main(["plan", "--json", *planned]) == 0
  notes = json.loads(capsys.readouterr().out)["notes"]
  assert any("BEST_METRIC='letters' is not checked here" in note for note in notes)


def test_the_names_of_metrics_are_known_before_an_evaluation(monkeypatch):
  judged = dataclasses.replace(EVALUATION, name="tests_mixed", num_examples=3)
  assert judged.evaluator(model_of(), None).metric_names({}) == {"letters"}
  evaluation.check_metric("letters", {"letters"})

  def fails(*_):
    raise ZeroDivisionError

  monkeypatch.setattr(text_evaluation, "_metrics", fails)
  names = judged.evaluator(model_of(), None).metric_names({})
  assert names is None
  evaluation.check_metric("letters", names)  # the first evaluation will tell


def test_what_could_never_work_is_refused_at_once(tmp_path):
  for name, macro in (("evaluate", "EVAL_PERIOD"), ("report", "STATS_PERIOD")):
    with pytest.raises(
      ValueError, match=rf"{macro}=None: give a whole number of steps, 1 or more\."
    ):
      train.Periods(**{name: None})
  with pytest.raises(ValueError, match=r"METRICS_EVERY=0.5: .* steps, 1 or more, or None\."):
    train.Periods(metrics=0.5)
  nothing = dataclasses.replace(EVALUATION, num_examples=0)
  for judged in (None, nothing):
    with pytest.raises(ValueError, match="BEST_METRIC='f1', but nothing is decoded"):
      run_of(tmp_path, best_metric="f1", evaluation=judged)


def test_a_terminal_gets_one_live_line(monkeypatch):
  monkeypatch.setenv("COLUMNS", "200")
  import io

  class Terminal(io.StringIO):
    def isatty(self):
      return True

  kinds = [("ff", "2:8", 0.5, 100), ("qkv", "1:4", 0.0, 100)]
  for stream, count in ((Terminal(), None), (io.StringIO(), 3)):
    progress = reports.Progress(100, 200, stream)
    progress.say("hello")
    for number in (101, 102):
      progress.count(64)
      progress.show(number, 1.5, kinds)
    progress.close()
    text = stream.getvalue()
    assert "step 102/200  loss 1.5000  D 0.25  ff 2:8, qkv 1:4  density 0.625" in text
    assert "tokens/s" in text and "left" in text and "hello" in text
    assert count is None or len(text.splitlines()) == count
    assert ("\x1b[" in text) == (count is None)
