"""Every mutation of tests/mutations.toml still applies, and (slowly) is noticed."""

import mutations
import pytest

KNOWN = mutations.read()


def test_every_mutation_applies_to_the_code_as_it_is():
  assert [mistake for mutation in KNOWN for mistake in mutation.mistakes()] == []
  assert len({m.name for m in KNOWN}) == len(KNOWN)


@pytest.mark.slow
@pytest.mark.parametrize("mutation", KNOWN, ids=lambda m: m.name)
def test_a_mutation_is_seen(mutation):
  assert mutations.survives(mutation) == ""
