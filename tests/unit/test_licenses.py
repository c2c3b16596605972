"""The licences of what an install brings: the list is true, and the rule refuses what it should."""

import pytest

from scripts.licenses import needed_by, pins, problems, read_list


def test_the_list_is_true_and_all_of_it_may_be_used() -> None:
    listed = read_list()
    assert problems(listed) == []
    assert sorted(listed) == sorted(pins()) and len(listed) > 100


@pytest.mark.parametrize(
    ("said", "parts"),
    [
        ("GPL-3.0-only", "dev"),
        ("UNKNOWN", "dev"),
        ("MIT AND GPL-2.0-or-later", "dagster"),
        ("LGPL-3.0-only", "engine"),
        ("LGPL-3.0-only", "engine, postgres"),
        ("MIT License (but not for you)", "engine"),
    ],
)
def test_what_binds_more_is_refused(said: str, parts: str) -> None:
    found = problems(read_list() | {"a-package": (said, parts)})
    assert any("a-package" in each and "this licence is not accepted" in each for each in found)


@pytest.mark.slow
def test_what_is_needed_is_followed_through_others() -> None:
    needed = needed_by()
    assert needed["alembic"] == {"engine"} and needed["mako"] == {"engine"}, "what the engine needs is its alone"
    assert needed["pyspark"] == needed["py4j"] == {"spark", "connect"}
    assert needed["psycopg-binary"] == {"postgres"} and "dev" in needed["werkzeug"]
