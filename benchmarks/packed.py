"""Products of packed weights against the best dense product, in one process on pinned cores.

    python benchmarks/packed.py                          # one core, float32
    python benchmarks/packed.py --values int8 --rows 1 16 --patterns 1:4 1:8 --cores 2
    python benchmarks/packed.py --peers --record peers.json     # where OpenVINO or PyTorch is

Dense is the best of XLA's x @ W and x @ W^T and numpy's (OpenBLAS). All are timed in turns, over
several weights at few rows, so that weights come from memory as those of a model do. With several
cores each product waits for the one before, as layers do: XLA would hand independent ones to all of
them. A ratio is that of median times: their geometric mean over the shapes, and the smallest in
brackets.
"""

import argparse
import json
import os

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--cores", type=int, default=1)
parser.add_argument("--first-core", type=int, default=0)
parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 128, 1024])
parser.add_argument("--patterns", nargs="+", default="2:4 1:4 1:8 1:16 1:32 1:64 1:128".split())
parser.add_argument("--shapes", nargs="+", default="768x3072 3072x768 1024x4096 4096x1024".split())
parser.add_argument("--backends", nargs="+", default=["cpu_ffi", "xla_scan"])
parser.add_argument("--values", default="float32")
parser.add_argument("--isa", default="best", help="best, portable, avx2 or avx512, of cpu_ffi")
parser.add_argument("--turns", type=int, default=11)
parser.add_argument("--json", action="store_true", help="print the rows of table.json")
parser.add_argument("--record", help="a file for the ratios, the command and the versions")
parser.add_argument("--peers", action="store_true", help="dense products of OpenVINO and PyTorch")
ARGS = parser.parse_args()

os.sched_setaffinity(0, set(range(ARGS.first_core, ARGS.first_core + ARGS.cores)))
for variable in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "PJRT_NPROC"):
  os.environ[variable] = str(ARGS.cores)
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.pop("OPENBLAS_CORETYPE", None)  # it may hold OpenBLAS to less than the processor has

import functools
import importlib
import importlib.metadata
import importlib.util
import platform
import shlex
import statistics
import sys
import time

import _timing
import jax.numpy as jnp
import numpy as np

from nm_sparsity_jax.analysis.bench import layers
from nm_sparsity_jax.core import packed
from nm_sparsity_jax.core.packed import cpu
from nm_sparsity_jax.core.patterns import NM


def product(backend):
  if backend == "cpu_ffi":
    return functools.partial(cpu.dot, isa=ARGS.isa)
  return functools.partial(packed.nm_dot, backend=backend)


def of_openvino(x, weights):
  """Returns a call of OpenVINO's dense product in float32, on each weight in turn."""
  openvino = importlib.import_module("openvino")
  opset13 = importlib.import_module("openvino.opset13")
  requests = []
  for w in weights:
    node = opset13.parameter(x.shape, np.float32)
    product = opset13.matmul(node, opset13.constant(np.ascontiguousarray(w.T)), False, True)
    options = {"INFERENCE_NUM_THREADS": ARGS.cores, "INFERENCE_PRECISION_HINT": "f32"}
    options |= {"ENABLE_CPU_PINNING": False, "ENABLE_HYPER_THREADING": False}
    model = openvino.Core().compile_model(openvino.Model([product], [node]), "CPU", options)
    requests.append(model.create_infer_request())
  return lambda: [request.infer([x], share_outputs=True) for request in requests]


def of_torch(x, weights):
  """Returns a call of PyTorch's dense int8 product, which rounds x at each call."""
  torch = importlib.import_module("torch")
  torch.set_num_threads(ARGS.cores)
  layers = []
  for w in weights:
    layer = torch.nn.Linear(*w.shape, bias=False)
    layer.weight.data = torch.from_numpy(np.ascontiguousarray(w.T))
    layers.append(
      torch.ao.quantization.quantize_dynamic(torch.nn.Sequential(layer), {torch.nn.Linear})
    )
  xt = torch.from_numpy(x)

  def call():
    with torch.inference_mode():
      return [layer(xt) for layer in layers]

  return call


PEERS = {"openvino": ("OpenVINO float32", of_openvino), "torch": ("PyTorch int8", of_torch)}


def peers_of(x, weights):
  """Returns ("dense", name) -> a call, for each peer that is installed and takes the weights."""
  found = {}
  for module, (name, make) in PEERS.items():
    if ARGS.peers and importlib.util.find_spec(module):
      found["dense", name] = make(x, weights)
      found["dense", name]()
  return found


def copies(rows):
  return 4 if rows <= 16 else 1


def candidates(x, patterns, shape, number):
  """Returns name -> a call that multiplies x by `number` weights."""
  rng = np.random.default_rng(0)
  dense = [rng.standard_normal(shape, np.float32) for _ in range(number)]
  found = {
    "dense x@W": layers.repeated(lambda x, w: x @ w, x, dense),
    "dense x@W.T": layers.repeated(
      lambda x, w: x @ w.T, x, [np.ascontiguousarray(w.T) for w in dense]
    ),
    "dense numpy": lambda: [x @ w for w in dense],
    **peers_of(x, dense),
  }
  for pattern in patterns:
    one = layers.random(*shape, NM.parse(pattern), ARGS.values)
    for backend in ARGS.backends:
      ready = packed.prepare(one, len(x), backend)
      found[pattern, backend] = layers.repeated(product(backend), x, [ready] * number)
      got = np.asarray(product(backend)(jnp.asarray(x), ready))
      wanted = x @ packed.unpack(one).astype(np.float32)
      assert np.abs(got - wanted).max() <= 1e-4 * np.abs(wanted).max(), (pattern, backend)
  return found


def once(call):
  """Returns the time of one call.

  With several cores it is the median of 60 ms of calls. Threads of OpenBLAS spin for a while after
  a product, and would keep a core from the next candidate. Threads that wake up may share a core
  for some milliseconds, until the system moves one.
  """
  several = ARGS.cores > 1
  if several:
    time.sleep(0.2)
  begin = time.perf_counter()
  call()  # warm: caches of the last candidate are gone
  while several and time.perf_counter() < begin + 0.06:
    call()
  found = []
  while not found or (several and time.perf_counter() < begin + 0.12):
    start = time.perf_counter()
    call()
    found.append(time.perf_counter() - start)
  return float(np.median(found))


def timed(calls):
  turns = [{name: once(call) for name, call in calls.items()} for _ in range(ARGS.turns)]
  return {name: float(np.median([turn[name] for turn in turns])) for name in calls}


def record(ratios):
  """Writes what was measured, and what measured it."""
  words = [word for word in sys.argv[1:] if word not in ("--record", ARGS.record)]
  packages = ["jax", "jaxlib", "numpy", *(p for p in PEERS if ARGS.peers)]
  installed = [name for name in packages if importlib.util.find_spec(name)]
  made = {
    "command": shlex.join(["python", "benchmarks/packed.py", *words]),
    "versions": {name: importlib.metadata.version(name) for name in installed},
    "python": platform.python_version(),
    "processor": _timing.machine()["processor"],
    "cores": ARGS.cores,
    "values": ARGS.values,
    "isa": cpu.isa(ARGS.isa),
    "shapes": ARGS.shapes,
    "ratios": [
      {"backend": b, "pattern": p, "rows": r}
      | {"mean": round(statistics.geometric_mean(x), 2), "least": round(min(x), 2)}
      for (b, p, r), x in ratios.items()
    ],
  }
  with open(ARGS.record, "w", encoding="utf-8") as file:
    file.write(json.dumps(made, indent=1) + "\n")


def measured():
  """Returns (backend, pattern, rows) -> how many times faster than the best dense, by shape."""
  ratios = {}
  for rows in ARGS.rows:
    for text in ARGS.shapes:
      shape = tuple(map(int, text.split("x")))
      x = np.random.default_rng(1).standard_normal((rows, shape[0]), np.float32)
      times = timed(candidates(x, ARGS.patterns, shape, copies(rows)))
      which = min((n for n in times if isinstance(n, str)), key=times.__getitem__)
      for name, spent in times.items():
        if not isinstance(name, str):
          ratios.setdefault((name[1], name[0], rows), []).append(times[which] / spent)
      best = times[which] * 1e6 / copies(rows)
      print(f"# {text}, {rows} rows: dense {best:.0f} us ({which})", flush=True)
  return ratios


def main():
  ratios = measured()
  if ARGS.record:
    record(ratios)
  show = lambda x: f"{statistics.geometric_mean(x):.2f} ({min(x):.2f})"
  _timing.head("kernel, pattern", *(f"{rows} rows" for rows in ARGS.rows))
  for backend, pattern in dict.fromkeys(key[:2] for key in ratios):
    cells = (show(ratios[backend, pattern, rows]) for rows in ARGS.rows)
    _timing.row(backend if pattern == "dense" else f"{backend}, {pattern}", *cells)
  if ARGS.json:
    n_over_m = lambda pattern: f"{NM.parse(pattern).m / NM.parse(pattern).n:g}"
    for backend in ARGS.backends:
      name = f"cpu_ffi {cpu.isa(ARGS.isa)}" if backend == "cpu_ffi" else backend
      worst = {
        n_over_m(p): [round(min(ratios[backend, p, rows]), 2) for rows in ARGS.rows]
        for p in ARGS.patterns
      }
      several = ", several cores" if ARGS.cores > 1 else ""
      print(json.dumps({name + several: {"rows": ARGS.rows, "speed": worst}}))


if __name__ == "__main__":
  main()
