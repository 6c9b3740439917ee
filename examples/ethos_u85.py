"""An int8 network for Arm's Ethos-U85: what n:m gains there, as Arm's compiler Vela estimates.

    python examples/ethos_u85.py 2>/dev/null

It trains a small network dense and n:m, writes int8 TFLite files, counts their weights, and
compiles them for 1 row of input and for 196. No silicon ran: cycles are the compiler's estimate.
It needs tensorflow and ethos-u-vela, and was run with 2.21.0 and 5.2.0.
"""

import argparse
import csv
import pathlib
import subprocess
import sys
import tempfile

import jax
import numpy as np
import optax
import tensorflow as tf

import nm_sparsity_jax as nms

SIZES = (512, 2048, 512, 16)  # the last product, the head, stays dense
# The last one has its groups along the outputs, where they serve no one.
CASES = ("dense", "2:4", "1:4", "1:8", "4:8", "2:4 outputs")


def data(key, rows):
  """Makes noisy copies of 64 fixed vectors; four of them are a class."""
  centres = jax.random.normal(jax.random.key(0), (64, SIZES[0]))
  pick, noise = jax.random.split(key)
  label = jax.random.randint(pick, (rows,), 0, 64)
  return centres[label] + 2 * jax.random.normal(noise, (rows, SIZES[0])), label % SIZES[-1]


def loss(params, x, y):
  for w in params[:-1]:
    x = jax.nn.relu(x @ w)
  return optax.softmax_cross_entropy_with_integer_labels(x @ params[-1], y).mean()


def trained(pattern, axis):
  """Returns the weights (in, out) of a network that was trained dense, or n:m along an axis."""
  make = jax.nn.initializers.he_normal()
  params = [make(jax.random.key(i), SIZES[i : i + 2]) for i in range(3)]
  tx = optax.adamw(1e-3)
  if pattern != "dense":
    phases = nms.Phases(total=60, dense=15, finetune=15)
    recipe = nms.recipe("mdgf_exponential", pattern=pattern, phases=phases)
    tx = nms.sparse(tx, nms.Rules({"[01]": recipe}, axes={"[01]": axis}))
  opt = tx.init(params)

  @jax.jit
  def train_step(params, opt, key):
    updates, opt = tx.update(jax.grad(loss)(params, *data(key, 128)), opt, params)
    return optax.apply_updates(params, updates), opt

  for key in jax.random.split(jax.random.key(2), 60):
    params, opt = train_step(params, opt, key)
  return [np.asarray(w) for w in params]


def tflite(weights, samples):
  """Returns the network as an int8 TFLite file, for as many rows as there are samples."""

  @tf.function(input_signature=[tf.TensorSpec(samples.shape)])
  def network(x):
    for w in weights[:-1]:
      x = tf.nn.relu(tf.matmul(x, w))
    return tf.matmul(x, weights[-1])

  made = network.get_concrete_function()
  converter = tf.lite.TFLiteConverter.from_concrete_functions([made], network)
  converter.optimizations = [tf.lite.Optimize.DEFAULT]
  converter.representative_dataset = lambda: [[samples]]
  converter.target_spec.supported_ops = [tf.lite.OpsSet.TFLITE_BUILTINS_INT8]
  return converter.convert()


def look(file, x, y, m):
  """Returns the most non-zeros in m input channels of the hidden layers, and the accuracy."""
  net = tf.lite.Interpreter(model_content=file)
  net.allocate_tensors()
  net.set_tensor(net.get_input_details()[0]["index"], x)
  net.invoke()
  right = net.get_tensor(net.get_output_details()[0]["index"]).argmax(-1) == y
  hidden = {(SIZES[1], SIZES[0]), (SIZES[2], SIZES[1])}  # TFLite stores (out, in)
  found = [t for t in net.get_tensor_details() if tuple(t["shape"]) in hidden]
  assert [t["dtype"] for t in found] == [np.int8, np.int8]
  groups = [net.get_tensor(t["index"]).reshape(-1, m) for t in found]
  return max(np.count_nonzero(g, axis=1).max() for g in groups), right.mean()


def cycles(file):
  """Returns the cycles that Vela expects: of the arithmetic alone, and in all."""
  with tempfile.TemporaryDirectory() as folder:
    pathlib.Path(folder, "net.tflite").write_bytes(file)
    vela = [sys.executable, "-m", "ethosu.vela", "net.tflite", "--output-dir", "."]
    vela += ["--accelerator-config", "ethos-u85-256"]
    subprocess.run(vela, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    (summary,) = pathlib.Path(folder).glob("*_summary_*.csv")
    (row,) = csv.DictReader(summary.read_text().splitlines())
  return int(row["cycles_npu"]), int(row["cycles_total"])


parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument("cases", nargs="*", default=CASES, help="such as 1:16 or '2:4 outputs'")
x, y = map(np.asarray, data(jax.random.key(3), 196))
cases = parser.parse_args().cases
print("cycles, by Vela  int8 in a  int8      1 row     1 row    196 rows   196 rows")
print("pattern          group      accuracy  products  in all   products     in all")
for case in cases:
  pattern, _, outputs = case.partition(" ")
  weights = trained(pattern, axis=1 if outputs else 0)
  files = [tflite(weights, x[:1]), tflite(weights, x)]
  m = 4 if pattern == "dense" else nms.NM.parse(pattern).m
  most, right = look(files[1], x, y, m)
  counts = "".join(f"{n:13,}" for file in files for n in cycles(file))
  print(f"{case:16} {most} of {m}     {right:.2f} {counts}", flush=True)
