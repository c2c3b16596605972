"""How many examples hypothesis tries: a test says its number for `make test`, and the profile takes its share."""

from hypothesis import settings

FULL = 100
"""hypothesis's own number, which the profile of `make test` leaves as it is"""


def examples(count: int) -> int:
    """`count` in `make test`; a fifth of it, but 5 at least, under the profile `fast`."""
    return max(min(count, 5), count * settings.default.max_examples // FULL)
