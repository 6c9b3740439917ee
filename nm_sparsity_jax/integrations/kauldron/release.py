"""The release of Kauldron that this package was run with."""

from nm_sparsity_jax.core import installed

VERSION = "1.4.2"


def require() -> None:
  """Raises where Kauldron is missing, or is another release than the one that was run.

  It asks the metadata of the installation: importing Kauldron takes ten seconds and more.
  """
  if (found := installed.version("kauldron")) != VERSION:
    raise ImportError(
      f"Kauldron {VERSION} is needed, whose train step this package extends, and {found} is "
      "installed: pip install -c constraints-kauldron.txt -e '.[kauldron]'",
      name="kauldron",
    )
