"""Regexes against whole paths; one that a file brought has a limit of time."""

from __future__ import annotations

import dataclasses
import re
import time

from nm_sparsity_jax.errors import SettingError


@dataclasses.dataclass(frozen=True)
class PathTest:
  """Whether a path matches all of several regexes; equal where these are.

  Attributes:
    regexes: a path must match all of them.
    key: the place that they are made of, for people.
    fused: a path that matches all of these holds q, k and v side by side, and the key names a part.
  """

  regexes: tuple[str, ...]
  key: str = ""
  fused: tuple[str, ...] = ()

  def __call__(self, path: str) -> bool:
    if self.fused and all(matches(regex, path) for regex in self.fused):
      raise SettingError(
        "places",
        "{path} holds q, k and v side by side, so the place {key} cannot name a part of it: split "
        "it into three kernels, or name all of it by 'qkv'.",
        path=repr(path),
        key=repr(self.key),
      )
    return all(matches(regex, path) for regex in self.regexes)


# Seconds that a regex of a file took so far; in the table are those that a file brought.
_strangers: dict[str, float] = {}
_MOST_SECONDS = 2.0  # for all paths that one of them is held against


def distrust(*regexes: str) -> None:
  """Notes regexes that a file brought: from now on they are matched within a limit of time.

  Whoever writes a regex into settings of their own waits for it; a checkpoint, or a run that
  somebody sent, may hold one that takes for ever. Roles and families are not touched.

  Args:
    *regexes: texts of regexes, or of roles.
  """
  for regex in regexes:
    if re.search(r"[*+{?|]", regex):  # without these it matches in one pass
      _strangers.setdefault(regex, 0.0)


def matches(regex: str, path: str) -> bool:
  """Returns whether a regex matches a whole path.

  >>> matches(r".*/mlp/.*", "encoder/mlp/wi")
  True

  Raises:
    ValueError: the regex came from a file, and takes longer than it may.
  """
  spent = _strangers.get(regex)
  if spent is None:
    return re.fullmatch(regex, path) is not None
  import regex as bounded

  begun = time.monotonic()
  try:
    return bounded.fullmatch(regex, path, timeout=max(_MOST_SECONDS - spent, 0.001)) is not None
  except TimeoutError:
    raise ValueError(
      f"the regex {regex[:200]!r} takes more than {_MOST_SECONDS:g} seconds on {path[:200]!r} and "
      "the paths before it. It came from a file: name the places yourself."
    ) from None
  finally:
    _strangers[regex] = spent + time.monotonic() - begun


def compiled(regex: str, where: str) -> re.Pattern[str]:
  """Compiles a regex, or says where the wrong one stands."""
  try:
    return re.compile(regex)
  except re.error as e:
    raise SettingError(
      where,
      f"{{{where} has}} {{regex!r}}, which is not a regular expression: {{why}}.",
      regex=regex,
      why=e,
      **{f"{where} has": f"Rules: {where} has"},
    ) from e
