"""The pattern n:m as a value, and what it says about bad ones."""

import dataclasses
import doctest

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nm_sparsity_jax.core import patterns
from nm_sparsity_jax.core.patterns import NM


@given(st.integers(1, 1024).flatmap(lambda m: st.tuples(st.integers(1, m), st.just(m))))
def test_text_and_value_are_the_same_thing(pair):
  n, m = pair
  pattern = NM(n, m)
  assert str(pattern) == f"{n}:{m}"
  assert NM.parse(str(pattern)) == pattern
  assert NM.parse(pattern) is pattern
  assert eval(repr(pattern)) == pattern
  assert pattern.density == n / m


def test_parse_allows_spaces():
  assert NM.parse(" 16 : 128\n") == NM(16, 128)


def test_is_a_frozen_hashable_value():
  assert {NM(1, 8): "a"}[NM(1, 8)] == "a"
  assert NM(1, 8) != NM(2, 8)
  with pytest.raises(dataclasses.FrozenInstanceError):
    NM(1, 8).n = 2


@pytest.mark.parametrize("n, m", [(4, 2), (9, 8), (2, 1)])
def test_more_kept_than_there_are_names_the_rule_and_the_swap(n, m):
  with pytest.raises(ValueError) as error:
    NM(n, m)
  for words in (f"NM({n}, {m})", "kept", "1 <= n <= m must hold", f"Did you mean NM({m}, {n})?"):
    assert words in str(error.value)


@pytest.mark.parametrize("n, m", [(0, 8), (-1, 8), (0, 0), (1, 0), (1, -8), (-4, -2)])
def test_fewer_than_one_names_the_rule_and_suggests_no_nonsense(n, m):
  with pytest.raises(ValueError) as error:
    NM(n, m)
  assert f"NM({n}, {m})" in str(error.value)
  assert "1 <= n <= m must hold" in str(error.value)
  assert "Did you mean" not in str(error.value)


@pytest.mark.parametrize(
  "n, m, name, kind",
  [
    (1.0, 8, "n", "float"),
    (1, 8.0, "m", "float"),
    (True, 4, "n", "bool"),
    (1, True, "m", "bool"),
    ("1", 8, "n", "str"),
    (None, 8, "n", "NoneType"),
    (np.float32(1), 8, "n", "float32"),
  ],
)
def test_what_is_no_int_is_named_with_its_type(n, m, name, kind):
  with pytest.raises(ValueError) as error:
    NM(n, m)
  assert f"NM(n={n!r}, m={m!r}): {name} must be an int, got {kind}." in str(error.value)
  assert "Write NM(1, 8), or NM.parse('1:8')" in str(error.value)


@pytest.mark.parametrize("text", ["1:0", "0:8", "8:1"])
def test_parse_checks_the_numbers_it_read(text):
  with pytest.raises(ValueError) as error:
    NM.parse(text)
  assert str(error.value).startswith(f"{text!r}: ")
  assert "1 <= n <= m must hold" in str(error.value)
  assert ("Did you mean '1:8'?" in str(error.value)) == (text == "8:1")


@pytest.mark.parametrize(
  "text", ["1;8", "8", "", ":", "1:", "1:8:2", "-1:8", "1.0:8", "a:b", 8, None]
)
def test_parse_quotes_what_it_cannot_read_and_shows_how(text):
  with pytest.raises(ValueError) as error:
    NM.parse(text)
  assert f"{text!r} is not a pattern" in str(error.value)
  assert "kept:group" in str(error.value)
  assert "'1:8' (keep 1 of every 8)" in str(error.value)


def test_doctests():
  failed, tried = doctest.testmod(patterns)
  assert tried and not failed
