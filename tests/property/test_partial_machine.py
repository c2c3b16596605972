"""A slice of the histories of `partial_machine`, which does many hundred."""

import pytest

from tests.examples import is_thorough
from tests.property.partial_machine import perform


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10 if is_thorough() else 1))
def test_no_history_breaks_a_promise(seed: int) -> None:
    assert perform(seed, 10).total() > 0
