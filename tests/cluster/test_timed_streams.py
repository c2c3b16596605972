"""A stream with timers whose driver, tasks and machines are killed (`tests.fault.timed_kills`)."""

import os

import pytest
from sqlalchemy import URL

from tests.cluster.cluster import find_obstacle
from tests.fault.kills import arguments
from tests.fault.timed_kills import kill_on_cluster


@pytest.mark.thorough
def test_timers_fire_once_whatever_is_killed(postgres: URL) -> None:
    """On a cluster of its own: the session of the other tests has all cores of theirs."""
    if obstacle := find_obstacle():
        (pytest.fail if os.environ.get("CI") else pytest.skip)(obstacle)
    kill_on_cluster(arguments(None).parse_args(["--kills", "2", "--pieces", "4", "--seed", "3"]), postgres)
