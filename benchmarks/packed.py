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
parser.add_argument("--busy", action="store_true", help="time of the processor, not of the clock")
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
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

from nm_sparsity_jax.core import packed
from nm_sparsity_jax.core.packed import cpu
from nm_sparsity_jax.core.patterns import NM


def sparse(rng, depth, features, pattern):
  """Returns a random n:m weight, packed."""
  groups = depth // pattern.m
  at = np.argsort(rng.random((groups, pattern.m, features), np.float32), axis=1)[:, : pattern.n]
  w = np.zeros((groups, pattern.m, features), np.float32)
  values = rng.standard_normal((groups, pattern.n, features), np.float32)
  np.put_along_axis(w, at, values, 1)
  return packed.pack(w.reshape(depth, features), pattern, dtype=ARGS.values)


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
    told = {"INFERENCE_NUM_THREADS": ARGS.cores, "INFERENCE_PRECISION_HINT": "f32"}
    told |= {"ENABLE_CPU_PINNING": False, "ENABLE_HYPER_THREADING": False}
    model = openvino.Core().compile_model(openvino.Model([product], [node]), "CPU", told)
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
  depth, features = shape
  dense = [rng.standard_normal(shape, np.float32) for _ in range(number)]
  xj = jnp.asarray(x)
  found = {}

  def jitted(name, function, weights):
    def chained(x, weights):
      found = []
      for w in weights:
        found.append(function(x, w))
        if ARGS.cores > 1:  # x is changed where it lies, since the caller gives it up
          x = x.at[0, 0].set(0 * found[-1][0, 0])
      return x, found

    call = jax.jit(chained, donate_argnums=0)
    weights = jax.tree.map(jnp.asarray, weights)
    held = [jnp.array(x, copy=True)]

    def run():
      held[0], products = call(held[0], weights)
      jax.block_until_ready(products)

    run()
    found[name] = run

  jitted("dense x@W", lambda x, w: x @ w, dense)
  jitted("dense x@W.T", lambda x, w: x @ w.T, [np.ascontiguousarray(w.T) for w in dense])
  found["dense numpy"] = lambda: [x @ w for w in dense]
  found |= peers_of(x, dense)
  for pattern in patterns:
    one = sparse(rng, depth, features, NM.parse(pattern))
    for backend in ARGS.backends:
      ready = packed.prepare(one, len(x), backend)
      weights = [jax.tree.map(lambda a: jnp.array(a, copy=True), ready) for _ in range(number)]
      jitted((pattern, backend), product(backend), weights)
      got = np.asarray(product(backend)(xj, jax.tree.map(jnp.asarray, ready)))
      due = x @ packed.unpack(one).astype(np.float32)
      assert np.abs(got - due).max() <= 1e-4 * np.abs(due).max(), (pattern, backend)
  return found


def once(call, clock):
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
    start = clock()
    call()
    found.append(clock() - start)
  return float(np.median(found))


def timed(calls):
  clock = time.process_time if ARGS.busy else time.perf_counter
  turns = [{name: once(call, clock) for name, call in calls.items()} for _ in range(ARGS.turns)]
  return {name: float(np.median([turn[name] for turn in turns])) for name in calls}


def processor():
  """Returns name, family and model, since one name is of many processors."""
  with open("/proc/cpuinfo", encoding="utf8") as file:
    told = dict(line.split(":", 1) for line in file.read().partition("\n\n")[0].splitlines())
  told = {key.strip(): value.strip() for key, value in told.items()}
  family, model = (told.get(key, "?") for key in ("cpu family", "model"))
  return f"{told.get('model name', platform.machine())}, family {family}, model {model}"


def record(mean, ratios):
  """Writes what was measured, and what measured it."""
  words = [word for word in sys.argv[1:] if word not in ("--record", ARGS.record)]
  packages = ["jax", "jaxlib", "numpy"] + [p for p in PEERS if ARGS.peers]
  rows = [
    {"backend": b, "pattern": p, "rows": r, "mean": round(mean[b, p, r], 2)}
    | {"least": round(min(ratios[b, p, r]), 2)}
    for b, p, r in mean
  ]
  told = {
    "command": shlex.join(["python", "benchmarks/packed.py", *words]),
    "versions": {
      name: importlib.metadata.version(name) for name in packages if importlib.util.find_spec(name)
    },
    "python": platform.python_version(),
    "processor": processor(),
    "cores": ARGS.cores,
    "values": ARGS.values,
    "isa": cpu.isa(ARGS.isa),
    "shapes": ARGS.shapes,
    "ratios": rows,
  }
  with open(ARGS.record, "w", encoding="utf-8") as file:
    file.write(json.dumps(told, indent=1) + "\n")


def main():
  ratios = {}
  for rows in ARGS.rows:
    for text in ARGS.shapes:
      shape = tuple(map(int, text.split("x")))
      x = np.random.default_rng(1).standard_normal((rows, shape[0]), np.float32)
      times = timed(candidates(x, ARGS.patterns, shape, copies(rows)))
      best = min(t for name, t in times.items() if isinstance(name, str))
      for name, spent in times.items():
        if not isinstance(name, str):
          ratios.setdefault((name[1], name[0], rows), []).append(best / spent)
      which = min((n for n in times if isinstance(n, str)), key=times.__getitem__)
      print(
        f"# {text}, {rows} rows: dense {best * 1e6 / copies(rows):.0f} us ({which})", flush=True
      )
  mean = {key: float(np.exp(np.mean(np.log(found)))) for key, found in ratios.items()}
  if ARGS.record:
    record(mean, ratios)
  for name, pattern, rows in mean:
    if pattern == "dense":
      print(f"# {name}, {rows} rows: {mean[name, pattern, rows]:.2f} of the best dense")
  for backend in ARGS.backends:
    name = f"cpu_ffi {cpu.isa(ARGS.isa)}" if backend == "cpu_ffi" else backend
    print(f"\n{name}, {ARGS.values}, {ARGS.cores} cores: times the best dense; rows {ARGS.rows}")
    for pattern in ARGS.patterns:
      cells = [
        f"{mean[backend, pattern, rows]:6.2f} ({min(ratios[backend, pattern, rows]):.2f})"
        for rows in ARGS.rows
      ]
      print(f"{pattern:>6}", *cells, flush=True)
    if ARGS.json:
      n_over_m = lambda pattern: f"{NM.parse(pattern).m / NM.parse(pattern).n:g}"
      worst = {
        n_over_m(p): [round(min(ratios[backend, p, rows]), 2) for rows in ARGS.rows]
        for p in ARGS.patterns
      }
      several = ", several cores" if ARGS.cores > 1 else ""
      print(json.dumps({name + several: {"rows": ARGS.rows, "speed": worst}}))


if __name__ == "__main__":
  main()
