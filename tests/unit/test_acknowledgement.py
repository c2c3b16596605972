from datetime import UTC, datetime, timedelta, timezone

import numpy as np
import pytest

from siltstone.changelog.acknowledgement import Acknowledgement
from siltstone.errors import CorruptObject, SiltstoneError, StateError, UnknownStream
from siltstone.model import Form, Handle, KeyGroupRange, Kind, StoredObject

GROUPS = KeyGroupRange(64, 128)
TABLES = ("model", "recent", "recent.bounds", "routes", "totals", "words")


def _full() -> Acknowledgement:
    rng = np.random.default_rng(1)
    name = "flights/00000001/000000000007/aircraft.00001.3.segment"
    return Acknowledgement(
        operator="aircraft",
        subtask=1,
        key_groups=GROUPS,
        handles=[
            Handle("aircraft", t, kind, Form.DELTA, name, 8, 2**40, "xxh3-128:" + "ab" * 16, GROUPS, 5, 6)
            for t, kind in zip(TABLES, [Kind.OPAQUE, *[Kind.INCREMENTAL] * 5], strict=True)
        ],
        objects=[StoredObject(name, 2**40, "xxh3-128:" + "cd" * 16), StoredObject("x", 5, "")],
        digests={t: rng.integers(0, 2**64 - 1, 64, np.uint64, endpoint=True) for t in TABLES},
        inline=[b"", bytes(range(256))],
        uploads={"requests": 3, "seconds": [1.5, None]},
        rows_in=12,
        prepared=(b"", b"position"),
        event_time_max=datetime(2013, 1, 2, 3, 4, 5, 678901, tzinfo=timezone(timedelta(hours=1))),
        seconds={"open": 0.25, "process": 1e-7},
        table_rows={"totals": 2**40},
        tracked_bytes={"totals": 77},
    )


def _plain(acknowledgement: Acknowledgement) -> dict[str, object]:
    fields = dict(vars(acknowledgement))
    return {**fields, "digests": {t: d.tolist() for t, d in acknowledgement.digests.items()}}


def test_round_trip() -> None:
    full = _full()
    read = Acknowledgement.from_bytes(full.to_bytes())
    assert _plain(read) == _plain(full)
    assert read.stored_bytes == 6 * 2**40
    assert all(d.dtype == np.uint64 for d in read.digests.values())
    assert read.event_time_max == datetime(2013, 1, 2, 2, 4, 5, 678901, tzinfo=UTC)
    assert all(type(h.kind) is Kind and type(h.form) is Form for h in read.handles)
    read.raise_failure()


def test_one_without_a_checkpoint_is_small() -> None:
    data = Acknowledgement("o", 0, GROUPS, rows_in=3).to_bytes()
    assert len(data) < 340
    assert Acknowledgement.from_bytes(data).event_time_max is None


def test_six_tables_take_few_bytes() -> None:
    assert len(_full().to_bytes()) < 7500


@pytest.mark.parametrize(
    "error",
    [
        CorruptObject("object x is missing"),
        StateError("no", advice="begin"),
        UnknownStream("no 'é'"),
        SiltstoneError("?"),
    ],
)
def test_a_failure_is_raised_again_as_what_it_was(error: SiltstoneError) -> None:
    read = Acknowledgement.from_bytes(Acknowledgement.failure("o", 1, error).to_bytes())
    assert (read.operator, read.subtask) == ("o", 1)
    with pytest.raises(type(error)) as caught:
        read.raise_failure()
    assert type(caught.value) is type(error) and str(caught.value) == str(error)
    assert caught.value.full_text == error.full_text


@pytest.mark.parametrize(
    "data", [b"", b"[]", b"{}", b"\xff", b'{"error":null,"event_time_max":null,"key_groups":{"start":1}}']
)
def test_anything_else_is_refused(data: bytes) -> None:
    with pytest.raises(StateError, match="cannot be read as an acknowledgement"):
        Acknowledgement.from_bytes(data)


def test_an_unknown_error_or_field_runs_nothing() -> None:
    text = Acknowledgement.failure("o", 1, StateError("x")).to_bytes()
    with pytest.raises(StateError, match="x") as caught:
        Acknowledgement.from_bytes(text.replace(b"StateError", b"SystemExit")).raise_failure()
    assert type(caught.value) is StateError
    with pytest.raises(StateError, match="cannot be read"):
        Acknowledgement.from_bytes(text.replace(b"rows_in", b"rows_on"))
