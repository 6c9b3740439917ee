"""Shows the doctests of docstrings as code; Markdown would take `>>>` for quotations."""

import re

import griffe

_DOCTEST = re.compile(r"^>>> .*(?:\n.+)*", re.MULTILINE)


class Doctests(griffe.Extension):
  """Puts a fence around each doctest of a docstring: from `>>>` to the next blank line."""

  def on_instance(self, *, obj, **kwargs):
    """Called by griffe for each module, class, function and attribute."""
    del kwargs
    if obj.docstring:
      fence = lambda found: f"```pycon\n{found[0]}\n```"
      obj.docstring.value = _DOCTEST.sub(fence, obj.docstring.value)
