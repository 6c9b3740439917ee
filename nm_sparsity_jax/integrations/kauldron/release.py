"""The release of Kauldron that this package was run with.

installed version -> [require] -> nothing, or what to install
"""

from nm_sparsity_jax.core import installed

VERSION = "1.4.2"
_INSTALL = "pip install -c constraints-kauldron.txt -e '.[kauldron]'"


def require() -> None:
  """Raises where Kauldron is missing, or is another release than the one that was run.

  It asks the metadata of the installation: importing Kauldron takes ten seconds and more.
  """
  found = installed.version("kauldron")
  if found is None:
    raise ModuleNotFoundError(f"Kauldron is not installed: {_INSTALL}", name="kauldron")
  if found != VERSION:
    raise ImportError(
      f"Kauldron {found} is installed, and the train step overrides parts of {VERSION}: {_INSTALL}",
      name="kauldron",
    )
