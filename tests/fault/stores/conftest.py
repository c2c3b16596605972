"""A room of its own on each hostile server."""

from collections.abc import Iterator
from itertools import count

import pytest

from tests import store_cases_s3
from tests.examples import usually
from tests.fault.hostile import PATIENT, Room, hostile

_numbers = count()
S3 = [*store_cases_s3.factories()]
"""the last is a server for production, where this machine can have it"""


@pytest.fixture(params=usually([*S3, "redis"], S3[-1], "redis"))
def room(request: pytest.FixtureRequest) -> Iterator[Room]:
    at = hostile(request.param)
    at.proxy.clear()
    room = Room(at, f"room{next(_numbers)}")
    store = room.open(PATIENT)
    store.put("warm/up", b"")  # connections, scripts and what is asked of a server once
    store.delete(["warm/up"])
    at.proxy.clear()
    yield room
    at.proxy.clear()
