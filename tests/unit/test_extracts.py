"""Extracts: what the catalog knows of a stream and no manifest says, as objects in the store."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from siltstone.catalog.extract_coding import decode_extract, decode_steps_part, encode_extract, seal, text_of
from siltstone.catalog.extract_writer import read_newest_extract, write_extract
from siltstone.catalog.records.steps import BEFORE_FIRST, Step
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.errors import CorruptObject, NewerFormat, SiltstoneError, Unreachable
from siltstone.store.filesystem import FilesystemStore
from siltstone.store.paths import extract_number, extract_prefix, steps_part_number
from tests.catalog_cases import commit_of
from tests.region_run import clock_of

STREAM = "flights"


@pytest.fixture
def flights(tmp_path: Path) -> Iterator[OpenWarehouse]:
    """A stream with 60 checkpoints of one step each, under epoch 1."""
    with OpenWarehouse.open_writable(str(tmp_path / "w")) as place:
        place.catalog.streams.register(STREAM, 128, {})
        place.catalog.runs.begin(STREAM, "a test")
        place.catalog.input_log.record_beginning(STREAM, 1, Step(0, BEFORE_FIRST, "v1\n{}\n7"))
        write_extract(place, STREAM)
        for id in range(1, 61):
            commit = commit_of(id, steps=[Step(id, id - 1, f"v1\n{{}}\n{id}", clock=clock_of(id))])
            place.catalog.commits.add(STREAM, 1, commit)
        yield place


def _names(place: OpenWarehouse) -> list[str]:
    return [name for name, _ in place.warehouse.store.list(extract_prefix(STREAM))]


def _steps_in_parts(place: OpenWarehouse) -> dict[int, str]:
    """Step -> its offsets, of the steps in the parts."""
    extract = read_newest_extract(place.warehouse.store, STREAM)
    assert extract is not None
    found = {}
    for part in extract.parts:
        steps = decode_steps_part(place.warehouse.store.read(part.stored).to_pybytes(), part.stored.name)
        assert len(steps) == part.steps
        found |= {step.checkpoint: step.offsets for step in steps}
        assert [step.clock for step in steps] == [clock_of(step.step) for step in steps]
    return found


def test_steps_of_deleted_checkpoints_are_kept_in_few_parts(flights: OpenWarehouse) -> None:
    for id in range(2, 60):
        flights.catalog.deletions.mark(STREAM, 1, [id])
        extract = write_extract(flights, STREAM)
        assert len(extract.parts) <= 6, "each is at least half as large as all later ones"
        assert _steps_in_parts(flights) == {n: f"v1\n{{}}\n{n}" for n in range(2, id + 1)}
        assert len(_names(flights)) <= 2 * len(extract.parts) + 5, "older ones are deleted"
    assert [(each.first, each.last, each.marked) for each in extract.retained] == [
        (1, 1, False),
        (2, 59, True),
        (60, 60, False),
    ]


def test_a_rollback_writes_the_parts_anew(flights: OpenWarehouse) -> None:
    flights.catalog.deletions.mark(STREAM, 1, [50])
    write_extract(flights, STREAM)
    epoch = flights.catalog.runs.begin(STREAM, "a test")
    flights.catalog.rollbacks.roll_back(STREAM, epoch, 49, "a test", "a test")
    extract = write_extract(flights, STREAM)
    assert not extract.parts and [step.checkpoint for step in extract.logged] == list(range(50, 61))
    found = read_newest_extract(flights.warehouse.store, STREAM)
    assert found is not None and [step.clock for step in found.logged] == [clock_of(n) for n in range(50, 61)]
    for id, offset in ((50, "other"), (51, "51")):
        steps = [Step(id, id - 1, f"v1\n{{}}\n{offset}", clock=clock_of(id))]
        flights.catalog.commits.add(STREAM, epoch, commit_of(id, tag="b", steps=steps))
    flights.catalog.deletions.mark(STREAM, epoch, [50])
    assert not write_extract(flights, STREAM).logged
    assert _steps_in_parts(flights) == {50: "v1\n{}\nother"}


def test_what_a_killed_writer_left_goes_with_the_next(flights: OpenWarehouse, monkeypatch: pytest.MonkeyPatch) -> None:
    flights.catalog.deletions.mark(STREAM, 1, [7])
    before = read_newest_extract(flights.warehouse.store, STREAM)

    def away(*_: object) -> None:
        raise Unreachable("killed")

    put, left = FilesystemStore.put, [1]

    def killed(self: FilesystemStore, name: str, data: bytes) -> object:
        if extract_number(name) and left:
            left.pop()
            raise Unreachable("killed")
        return put(self, name, data)

    with monkeypatch.context() as patch, pytest.raises(Unreachable):
        patch.setattr(FilesystemStore, "put", killed)
        write_extract(flights, STREAM)
    assert read_newest_extract(flights.warehouse.store, STREAM) == before
    with monkeypatch.context() as patch, pytest.raises(Unreachable):
        patch.setattr(FilesystemStore, "delete", away)
        write_extract(flights, STREAM)
    assert _steps_in_parts(flights) == {7: "v1\n{}\n7"} and len(list(filter(extract_number, _names(flights)))) == 2
    for _ in range(2):
        newest = write_extract(flights, STREAM)
    [part] = newest.parts
    assert list(filter(extract_number, _names(flights))) == [max(filter(extract_number, _names(flights)))]
    assert list(filter(steps_part_number, _names(flights))) == [part.stored.name]


def test_of_two_writers_the_one_that_saw_more_counts(flights: OpenWarehouse) -> None:
    store = flights.warehouse.store
    late = flights.catalog.extracts.take(STREAM)
    newest = write_extract(flights, STREAM)
    store.put(f"{extract_prefix(STREAM)}00000001-{late.extract.number:012d}", encode_extract(late.extract))
    found = read_newest_extract(store, STREAM)
    assert found is not None and found.number == newest.number > late.extract.number


def test_an_extract_that_is_altered_is_refused_and_written_anew(flights: OpenWarehouse) -> None:
    flights.catalog.deletions.mark(STREAM, 1, [7])
    write_extract(flights, STREAM)
    before = _steps_in_parts(flights)
    name = max(filter(extract_number, _names(flights)))
    path = Path(flights.warehouse.local.objects) / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.unlink()
    path.write_bytes(data)
    with pytest.raises(CorruptObject, match=name):
        read_newest_extract(flights.warehouse.store, STREAM)
    write_extract(flights, STREAM)
    assert _steps_in_parts(flights) == before == {7: "v1\n{}\n7"}


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"format": 2}, NewerFormat),
        ({"format": 0}, CorruptObject),
        ({"stream": "../x"}, CorruptObject),
        ({"stream": "other"}, CorruptObject),
        ({"epoch": -1}, CorruptObject),
        ({"number": True}, CorruptObject),
        ({"rows": {}}, CorruptObject),
        ({"retained": [[2, 1, "flights", 1, False, "2020-01-01"]]}, CorruptObject),
        ({"retained": [[1, 2, "../x", 1, False, "2020-01-01"]]}, CorruptObject),
        ({"retained": [[n, n + 1, "a", 1, False, "2020-01-01"] for n in (1, 2)]}, CorruptObject),
        ({"parts": [[["/etc/passwd", 1, "xxh3-128:" + "0" * 32], 1, [[1, 1]]]]}, CorruptObject),
        ({"beginning": ["x", 1, "not a checksum"]}, CorruptObject),
        ({"logged": {"options": [], "steps": [], "checkpoints": [1]}}, CorruptObject),
    ],
)
def test_hostile_extracts_are_refused(flights: OpenWarehouse, change: object, error: type[SiltstoneError]) -> None:
    extract = write_extract(flights, STREAM)
    values = json.loads(text_of(encode_extract(extract)))
    assert decode_extract(seal(json.dumps(values)), "x") == decode_extract(encode_extract(extract), "x")
    with pytest.raises(error):
        decode_extract(seal(json.dumps(values | change)), "x")


@pytest.mark.parametrize(
    ("column", "value"),
    [("max_parallelism", "1"), ("created_at", 7), ("definition", "{}"), ("unknown", 1), ("name", 1)],
)
def test_a_row_with_other_types_is_refused(flights: OpenWarehouse, column: str, value: object) -> None:
    values = json.loads(text_of(encode_extract(write_extract(flights, STREAM))))
    values["rows"]["stream"][0][column] = value
    with pytest.raises(CorruptObject):
        decode_extract(seal(json.dumps(values)), "x")
