"""How much a test tries of what it could: hypothesis's examples, and cases that are gone through one by one.

A test says its number for `make test-thorough`; each profile takes its share.
"""

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import pytest
from hypothesis import settings

T = TypeVar("T")
FULL = 100
"""hypothesis's own number of examples, and that of the profile `thorough`"""
USUAL = 30
"""of the profile of `make test`, which runs often"""


def register_profiles() -> None:
    """Make the profiles `siltstone` (of `make test`) and `thorough` known, and use the first."""
    # Two shared cores make single examples slow now and then; a deadline would only measure the neighbours.
    for name, count in (("siltstone", USUAL), ("thorough", FULL)):
        settings.register_profile(name, deadline=None, print_blob=True, max_examples=count)
    settings.load_profile("siltstone")


def examples(count: int) -> int:
    """The profile's share of `count`, but 5 at least: all of it where it is `thorough`."""
    return max(min(count, 5), count * settings.default.max_examples // FULL)


def few_examples(count: int) -> int:
    """Half of `examples`, but 5 at least, for laws whose examples take tenths of a second each."""
    return count if is_thorough() else max(min(count, 5), examples(count) // 2)


def is_thorough() -> bool:
    """Whether this is `make test-thorough`."""
    return settings.default.max_examples >= FULL


def some(cases: Sequence[T]) -> Sequence[T]:
    """All cases, where the profile is `thorough`, else the first, the last, and each third before the last."""
    return cases if is_thorough() else [*cases[:1], *cases[-1:0:-3][::-1]]


def long_form(*values: Any) -> Any:
    """A case of a parametrized test that only `make test-thorough` tries: shorter cases prove the same."""
    return pytest.param(*values, marks=pytest.mark.thorough)


def usually(cases: Iterable[Any], *usual: Any) -> list[Any]:
    """The cases of a parametrized test, of which `make test` tries these alone, and `make test-thorough` each.

    Args:
        cases: values, or tuples of several values.
    """
    given = list(cases)
    assert set(usual) <= set(given), "each is a case"
    tuples = [case if isinstance(case, tuple) else (case,) for case in given]
    return [pytest.param(*of) if case in usual else long_form(*of) for case, of in zip(given, tuples, strict=True)]


def stride() -> int:
    """Which cases to take of those that are gone through one by one: each, where the profile is `thorough`, else each
    seventh."""
    return 1 if is_thorough() else 7
