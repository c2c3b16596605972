"""A room of its own on each hostile server."""

from collections.abc import Iterator
from itertools import count

import pytest

from tests import store_cases_s3
from tests.fault.hostile import PATIENT, Room, hostile

_numbers = count()


@pytest.fixture(params=[*store_cases_s3.factories(), "redis"])
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
