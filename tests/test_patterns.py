"""The pattern n:m as a value, and what it says about bad ones."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nm_sparsity_jax.core.patterns import NM


@given(st.integers(1, 1024).flatmap(lambda m: st.tuples(st.integers(1, m), st.just(m))))
def test_text_and_value_are_the_same_thing(pair):
  n, m = pair
  pattern = NM(n, m)
  assert str(pattern) == f"{n}:{m}"
  assert NM.parse(f" {n} : {m}\n") == NM.parse(pattern) == eval(repr(pattern)) == pattern
  assert hash(NM(n, m)) == hash(pattern) and pattern.density == n / m


@pytest.mark.parametrize(
  "n, m, word",
  [
    (4, 2, "Did you mean '2:4'"), (0, 8, "1 <= n"), (1.0, 8, "are ints"), (True, 4, "are ints"),
  ],
)  # fmt: skip
def test_wrong_numbers_name_the_rule(n, m, word):
  with pytest.raises(ValueError, match=word):
    NM(n, m)


@pytest.mark.parametrize("text", ["8", "1:8:2", "-1:8", "1:0", None])
def test_parse_quotes_what_it_cannot_read(text):
  with pytest.raises(ValueError, match=f"{text!r} is not a pattern"):
    NM.parse(text)
