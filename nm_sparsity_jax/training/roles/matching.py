"""Regexes against whole paths of parameters."""

from __future__ import annotations

import dataclasses
import functools
import re


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
      raise ValueError(
        f"{path!r} holds q, k and v side by side, so the place {self.key!r} cannot name a part of "
        "it: split it into three kernels, or name all of it by 'qkv'."
      )
    return all(matches(regex, path) for regex in self.regexes)


# Python's `re` keeps 512 patterns and compiles the others anew at every call.
_compile = functools.cache(re.compile)


def matches(regex: str, path: str) -> bool:
  """Returns whether a regex matches a whole path.

  >>> matches(r".*/mlp/.*", "encoder/mlp/wi")
  True
  """
  return _compile(regex).fullmatch(path) is not None


def compiled(regex: str, where: str) -> re.Pattern[str]:
  """Compiles a regex, or says where the wrong one stands."""
  try:
    return _compile(regex)
  except re.error as e:
    raise ValueError(
      f"Rules: {where} has {regex!r}, which is not a regular expression: {e}."
    ) from e


class Table:
  """Regex -> value, asked by whole paths: all values whose regex matches.

  Most regexes of a long table are the path of one parameter. These are found by equality, so that
  thousands of rules on thousands of parameters are quick.

  >>> Table([(r"layer_1/kernel", 1), (r".*/kernel", 2)]).find("layer_1/kernel")
  [1, 2]
  """

  def __init__(self, rows):
    self._paths: dict[str, list] = {}
    self._tests: list = []
    for i, (test, value) in enumerate(rows):
      regexes = (test,) if isinstance(test, str) else test.regexes
      is_path = len(regexes) == 1 and _PATH.fullmatch(regexes[0])
      if is_path:
        self._paths.setdefault(re.sub(r"\\(\W)", r"\1", regexes[0]), []).append((i, value))
      elif len(regexes) == 1 and not getattr(test, "fused", ()):
        self._tests.append((_compile(regexes[0]).fullmatch, i, value))
      else:
        self._tests.append((test, i, value))

  def find(self, path: str) -> list:
    """Returns the values whose regex matches `path`, in the order of the table."""
    hits = [(i, value) for test, i, value in self._tests if test(path)]
    hits += self._paths.get(path, ())
    return [value for _, value in sorted(hits, key=lambda hit: hit[0])]


_PATH = re.compile(r"(?:[\w/ -]|\\\W)*")  # no character of it has a meaning in a regex
