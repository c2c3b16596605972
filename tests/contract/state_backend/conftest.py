"""Each state backend, opened as often as a test likes."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from siltstone.model import KeyGroupRange
from siltstone.state.backend import Backend, SubtaskState
from siltstone.state.backends.named import BACKENDS, backend
from siltstone.state.schema import TableSchema
from tests.state_model import ALL, MAX_PARALLELISM
from tests.state_tables import LONG, Open


@pytest.fixture(params=BACKENDS)
def kind(request: pytest.FixtureRequest) -> Backend:
    return backend(request.param)


@pytest.fixture
def reopen(kind: Backend, tmp_path: Path) -> Iterator[Open]:
    opened: list[SubtaskState] = []

    def opener(schema: TableSchema = LONG, opaque: tuple[str, ...] = ("model",), groups: KeyGroupRange = ALL):
        while opened:  # a directory is used by one state at a time
            opened.pop().close()
        opened.append(kind.open(tmp_path / "state", {"t": schema}, opaque, groups, MAX_PARALLELISM))
        return opened[-1]

    yield opener
    for state in opened:
        state.close()
