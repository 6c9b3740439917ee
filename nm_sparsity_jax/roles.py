"""The one vocabulary of places: what 'ff', 'qkv' or 'decoder/cross/q' names in each family.

    'decoder/cross/qkv' -> [roles] -> a test of whole parameter paths -> rules
    parameter path      -> [roles] -> its role and its operation      -> plan, flops, report, scores

A family of models says by regexes how it names its kernels. `register` adds a family from outside;
nothing else in the package knows the names that a family gives to its parameters.
"""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence

from nm_sparsity_jax.errors import SettingError
from nm_sparsity_jax.patterns import NM

Axis = int | tuple[int, ...]


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Family:
  """How a family of models names its kernels.

  A regex must match a whole '/'-joined path. Families add up: 'ff' names what any of them calls so.

  >>> own = Family(name="own", roles={"ff": r"(.*/)?(fc1|fc2)/kernel"})
  >>> own.role("blocks_0/fc1/kernel")
  'ff'

  Attributes:
    name: of the family, such as 't5'.
    roles: role -> regex of the kernels that have it.
    narrow: word -> regex of the paths that it narrows a role to, as 'decoder' in 'decoder/ff'.
    axes: (regex, rank or None for three and more, contraction axis) of kernels whose axis needs
      no naming.
    places: role -> where its kernels stand, such as ('encoder/self', 'decoder/self'), the `place`
      of the operations in `flops`.
    op: path -> the name of its operation in the family's shape (`flops.Op.name`), or None.
  """

  name: str
  roles: Mapping[str, str] = dataclasses.field(default_factory=dict)
  narrow: Mapping[str, str] = dataclasses.field(default_factory=dict)
  axes: Sequence[tuple[str, int | None, Axis]] = ()
  places: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
  op: Callable[[str], str | None] | None = None

  def role(self, path: str) -> str | None:
    """Returns the role of a kernel, None where the family gives it none."""
    return next((r for r, regex in self.roles.items() if re.fullmatch(regex, path)), None)


# What several roles are called together.
COMPOSITES: Mapping[str, tuple[str, ...]] = {"qk": ("q", "k"), "qkv": ("q", "k", "v")}

_families: dict[str, Family] = {}


def register(family: Family) -> Family:
  """Adds a family to the vocabulary, for all rules made from then on.

  Call it where your module defines its models, so that a run that names the module knows them.

  Args:
    family: its name must be new, its roles must not be words for something else.

  Returns:
    The family.
  """
  if family.name in _families:
    raise ValueError(
      f"roles: the family {family.name!r} is registered already; give yours another name."
    )
  for role in family.roles:
    if role in COMPOSITES or role in narrowing() or role in family.narrow:
      raise ValueError(
        f"roles: the family {family.name!r} defines {role!r} twice: it is a word for "
        f"{'several roles' if role in COMPOSITES else 'paths'} already. Choose another word."
      )
  if taken := sorted(set(family.narrow) & set(regexes())):
    raise ValueError(
      f"roles: the family {family.name!r} defines {taken[0]!r} twice: it is a role already. "
      "Choose another word."
    )
  for regex in (*family.roles.values(), *family.narrow.values(), *(a for a, _, _ in family.axes)):
    compiled(regex, f"the family {family.name!r}")
  _families[family.name] = family
  return family


def families() -> Mapping[str, Family]:
  """Returns name -> family, in the order of registration."""
  return dict(_families)


def regexes(more: Mapping[str, str] | None = None) -> dict[str, str]:
  """Returns role -> regex of all families, the words for several roles last.

  >>> list(regexes())[:5]
  ['ff', 'q', 'k', 'v', 'o']

  Args:
    more: roles of one set of rules, which stand before those of families.
  """
  joined = _joined([f.roles for f in _families.values()])
  single = {**joined, **(more or {})}
  for name, parts in COMPOSITES.items():
    if known := [single[part] for part in parts if part in single]:
      joined[name] = _either(known)
  return {**joined, **(more or {})}


def narrowing() -> dict[str, str]:
  """Returns word -> regex of the paths that it narrows a role to."""
  return _joined([f.narrow for f in _families.values()])


def narrowing_text() -> str:
  """Returns the words that narrow a role, as a sentence lists them.

  >>> narrowing_text()
  'encoder/, decoder/, self/, cross/'
  """
  return ", ".join(f"{word}/" for word in narrowing())


def _joined(tables: Sequence[Mapping[str, str]]) -> dict[str, str]:
  found: dict[str, list[str]] = {}
  for table in tables:
    for word, regex in table.items():
      found.setdefault(word, []).append(regex)
  return {word: _either(those) for word, those in found.items()}


def _either(those: Sequence[str]) -> str:
  return those[0] if len(those) == 1 else "|".join(f"(?:{regex})" for regex in those)


@dataclasses.dataclass(frozen=True)
class PathTest:
  """Whether a path matches all of several regexes; equal where these are."""

  regexes: tuple[str, ...]

  def __call__(self, path: str) -> bool:
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


def path_test(key: str, more: Mapping[str, str] | None = None) -> PathTest:
  """Returns a test of whole paths for a place: a role, narrowed by words, or a regex.

  >>> test = path_test("encoder/ff")
  >>> test("encoder/layers_0/mlp/wi/kernel"), test("decoder/layers_0/mlp/wi/kernel")
  (True, False)

  Args:
    key: the place.
    more: roles of one set of rules, beside those of families.
  """
  known, words = regexes(more), narrowing()
  *narrow, role = key.split("/")
  if role in known and all(word in words for word in narrow):
    return PathTest((known[role], *(words[word] for word in narrow)))
  return PathTest((compiled(key, "a place").pattern,))


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


def axis_of(path: str, rank: int) -> Axis | None:
  """Returns the contraction axis of a stored kernel, None where path and rank do not tell it."""
  for family in _families.values():
    for regex, of_rank, axis in family.axes:
      if (of_rank or max(rank, 3)) == rank and re.fullmatch(regex, path):
        return axis
  return None


def role_of(path: str) -> str | None:
  """Returns the role of a kernel in whatever family names it, None where none does."""
  return next((r for f in _families.values() if (r := f.role(path))), None)


def op_of(path: str, among: Collection[str] | None = None) -> str | None:
  """Returns what `flops` calls the operation of a kernel, None where no family says.

  >>> op_of("decoder/layers_3/encoder_decoder_attention/key/kernel")
  'decoder/cross/k'

  Args:
    path: of the kernel.
    among: the operations of the model's shape. Two families may know one path, and each has a name
      of its own for it: the first name that is an operation counts. None takes the first name.
  """
  names = [n for f in _families.values() if f.op and (n := f.op(path))]
  return next((n for n in names if among is None or n in among), None)


# --- rules that say the same ------------------------------------------------------------------


def single(places: Mapping[str, NM | str], family: str = "t5") -> dict[str, str]:
  """Returns the same places in one form, to compare: no word for several roles, wholes for parts.

  >>> single({"encoder/ff": "1:8", "decoder/ff": "1:8", "qk": "1:4"})
  {'ff': '1:8', 'q': '1:4', 'k': '1:4'}

  Args:
    places: place -> pattern; a place that is a regex is left as it is.
    family: whose places they are.
  """
  stand = _families[family].places
  found: dict[str, str] = {}
  for place, pattern in places.items():
    *where, role = place.split("/")
    for part in COMPOSITES.get(role, (role,)):
      inside = [s for s in stand.get(part, ()) if set(where) <= set(s.split("/"))]
      found |= dict.fromkeys([f"{s}/{part}" for s in inside] or [place], str(NM.parse(pattern)))
  for role, all_of_it in stand.items():
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


def text_of(places: Mapping[str, str], family: str = "t5") -> str:
  """Returns places and their patterns for people.

  >>> text_of({"ff": "1:8", "q": "1:4", "k": "1:4"})
  '1:8 FF, 1:4 QK'
  """
  stand = _families[family].places
  stacks = dict.fromkeys(s.split("/")[0] for those in stand.values() for s in those)
  inner = dict.fromkeys(s for those in stand.values() for s in those if "/" in s)
  rest, words = dict(places), {}
  for stack in ("", *(f"{s}/" for s in (*stacks, *inner))):
    for name in ("ff", *reversed(list(COMPOSITES))):
      whole = f"{stack}{name}" if stack else name.upper()
      if put_together(rest, whole, [f"{stack}{p}" for p in COMPOSITES.get(name, (name,))]):
        words[whole] = rest.pop(whole)
  return ", ".join(f"{pattern} {place}" for place, pattern in {**words, **rest}.items())


# --- the families of this package -------------------------------------------------------------

_T5_ATTENTION = r"(.*/)?(\w*attention(_\d+)?)/"
_FLAX_ATTENTION = r"(.*/)?(\w*Attention(_\d+)?)/"
# By the names that flax gives its own classes. (T5's self_attention may be one stacked by a scan.)
_FLAX_OWN = r"(.*/)?(MultiHeadDotProductAttention|MultiHeadAttention|SelfAttention)(_\d+)?/"


def _attention_roles(prefix: str) -> dict[str, str]:
  names = {"q": "query", "k": "key", "v": "value", "o": "out"}
  return {role: f"{prefix}{name}/kernel" for role, name in names.items()}


def _t5_op(path: str) -> str | None:
  kind = T5.role(path)
  if kind is None:
    return None
  stack = "decoder" if "decoder/" in path.replace("encoder_decoder", "") else "encoder"
  if kind == "ff":
    return f"{stack}/{path.split('/')[-2]}"
  return f"{stack}/{'cross' if 'encoder_decoder_attention' in path else 'self'}/{kind}"


def _vit_op(path: str) -> str | None:
  kind = VIT.role(path)
  if kind == "ff":
    return {"Dense_0": "encoder/wi", "Dense_1": "encoder/wo"}.get(path.split("/")[-2])
  return kind and f"encoder/self/{kind}"


_T5_ATTENTIONS = ("encoder/self", "decoder/self", "decoder/cross")

# T5X's names, also stacked by a scan. Any kernel of rank 2 contracts its first axis; one of another
# rank, such as one stacked by a scan, is ambiguous: (embed, layers, mlp) and (embed, heads,
# head_dim) look alike.
T5 = register(
  Family(
    name="t5",
    roles={
      "ff": r"(.*/)?mlp/(wi|wi_\d+|wo|Dense_\d+)/kernel",
      **_attention_roles(_T5_ATTENTION),
    },
    narrow={
      "encoder": r"(.*/)?encoder/.*",
      "decoder": r"(.*/)?decoder/.*",
      "self": r"(?!.*encoder_decoder_attention/).*[aA]ttention.*",
      "cross": r"(.*/)?encoder_decoder_attention/.*",
    },
    axes=(
      (r"(.*/)?[cC]onv\w*/kernel", None, -2),  # (..., in, out): groups of inputs at one offset
      (r"(.*/)?kernel", 2, 0),
    ),
    places={"ff": ("encoder", "decoder"), **dict.fromkeys("qkvo", _T5_ATTENTIONS)},
    op=_t5_op,
  )
)

# flax's own attention and its ViT example.
VIT = register(
  Family(
    name="vit",
    roles={
      "ff": r"(.*/)?MlpBlock(_\d+)?/(wi|wi_\d+|wo|Dense_\d+)/kernel",
      **_attention_roles(_FLAX_ATTENTION),
    },
    narrow={"encoder": r"(.*/)?encoderblock_\d+/.*"},
    axes=(
      (_FLAX_OWN + r"(query|key|value)/kernel", 3, 0),
      (_FLAX_OWN + r"out/kernel", 3, (0, 1)),
    ),
    places={"ff": ("encoder",), **dict.fromkeys("qkvo", ("encoder/self",))},
    op=_vit_op,
  )
)
