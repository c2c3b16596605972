"""The driver's time of day, beside the catalog's."""

from datetime import UTC, datetime, timedelta

import pytest

from siltstone.errors import UsageError
from siltstone.run.stream_clock import SKEW_MAX, check_time_of_day
from siltstone.times import to_us

NOW = datetime(2026, 3, 1, tzinfo=UTC)


@pytest.mark.parametrize("off", [timedelta(0), SKEW_MAX, -SKEW_MAX])
def test_a_clock_that_is_about_right_is_taken(off: timedelta) -> None:
    check_time_of_day("s", to_us(NOW + off), NOW)


@pytest.mark.parametrize(("off", "way"), [(timedelta(minutes=6), "ahead of"), (timedelta(minutes=-7), "behind")])
def test_a_clock_that_would_fire_timers_at_the_wrong_time_is_refused(off: timedelta, way: str) -> None:
    with pytest.raises(UsageError, match=f"clock of this machine is .* {way} that of the catalog, and stream s has"):
        check_time_of_day("s", to_us(NOW + off), NOW)
