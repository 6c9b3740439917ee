"""Rules that say the same: places in one form, to compare and to show.

{'encoder/ff': '1:8', 'decoder/ff': '1:8'} -> [single] -> {'ff': '1:8'} -> [text_of] -> '1:8 FF'
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from nm_sparsity_jax.core.patterns import NM
from nm_sparsity_jax.training.roles.registry import COMPOSITES

# Where the kernels of a role stand in a T5. A place that names all of them is the role itself.
_ATTENTIONS = ("encoder/self", "decoder/self", "decoder/cross")
_STAND = {"ff": ("encoder", "decoder"), **dict.fromkeys("qkvo", _ATTENTIONS)}


def single(places: Mapping[str, NM | str]) -> dict[str, str]:
  """Returns the same places in one form, to compare: no word for several roles, wholes for parts.

  >>> single({"encoder/ff": "1:8", "decoder/ff": "1:8", "qk": "1:4"})
  {'ff': '1:8', 'q': '1:4', 'k': '1:4'}

  Args:
    places: place -> pattern; a place that is a regex is left as it is.
  """
  found: dict[str, str] = {}
  for place, pattern in places.items():
    *where, role = place.split("/")
    for part in COMPOSITES.get(role, (role,)):
      inside = [s for s in _STAND.get(part, ()) if set(where) <= set(s.split("/"))]
      found |= dict.fromkeys([f"{s}/{part}" for s in inside] or [place], str(NM.parse(pattern)))
  for role, all_of_it in _STAND.items():
    stacks = list(dict.fromkeys(s.split("/")[0] for s in all_of_it))
    for stack in sorted(stacks):
      if of_stack := [s for s in all_of_it if s.startswith(f"{stack}/")]:
        put_together(found, f"{stack}/{role}", [f"{s}/{role}" for s in of_stack])
    put_together(found, role, [f"{stack}/{role}" for stack in stacks])
  return found


def put_together(places: dict[str, str], whole: str, parts: Sequence[str]) -> bool:
  """Replaces the parts by the whole, if all have one pattern; returns whether it did."""
  patterns = {places.get(part) for part in parts}
  if len(patterns) > 1 or None in patterns:
    return False
  found = [places.pop(part) for part in parts]
  places[whole] = found[0]
  return True


def text_of(places: Mapping[str, str]) -> str:
  """Returns places and their patterns for people.

  >>> text_of({"ff": "1:8", "q": "1:4", "k": "1:4"})
  '1:8 FF, 1:4 QK'
  """
  stacks = dict.fromkeys(s.split("/")[0] for s in _ATTENTIONS)
  rest, words = dict(places), {}
  for stack in ("", *(f"{s}/" for s in (*stacks, *_ATTENTIONS))):
    for name in ("ff", *reversed(list(COMPOSITES))):
      whole = f"{stack}{name}" if stack else name.upper()
      if put_together(rest, whole, [f"{stack}{p}" for p in COMPOSITES.get(name, (name,))]):
        words[whole] = rest.pop(whole)
  return ", ".join(f"{pattern} {place}" for place, pattern in {**words, **rest}.items())
