"""Builds what pyproject.toml cannot state: kernels, data in a wheel, its tag, the index's page."""

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

# What help texts name. A wheel carries it inside the package: `nm-sparsity gin-path` prints where.
FOLDERS = ("gin_configs", "docs", "examples")
FILES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE", "CITATION.cff")


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
    # CFLAGS come first, so the last -march wins: a user's -march=native would end up in all files.
    baseline = ["-march=x86-64"] if _X86 else []
    flags = ["-O3", "-std=c++17", "-fvisibility=hidden", "-w", *baseline]
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


setuptools.setup(
  long_description=_description(),
  long_description_content_type="text/markdown",
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
)
