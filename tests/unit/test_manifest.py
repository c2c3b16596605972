import json
from contextlib import suppress
from dataclasses import fields, replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import xxhash
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from siltstone.changelog.upload_metrics import UploadStatistics
from siltstone.changelog.upload_options import UploadOptions
from siltstone.decoding import JSON_FREE_BYTES
from siltstone.errors import CorruptObject, NewerFormat, StateError
from siltstone.format.manifest import FORMAT, HEAD, SCHEMA, Manifest, encode_manifest
from siltstone.format.manifest_decoding import decode_manifest
from siltstone.model import Form, Handle, KeyGroupRange, Kind, StoredObject
from siltstone.run.pending import store_manifest
from siltstone.state.digest import checkpoint_digest
from tests.orphans import filesystem, new_run
from tests.stored import bare_statistics
from tests.sums import NAME, rows

PREFIX = "flights/00000001/000000000007"


KEY = [["tail", "string"]]


def _variable(name: str, kind: Kind) -> tuple[str, dict[str, object]]:
    tables = {name: {"key": KEY, "subkey": [], "value": [["n", "int64"]]}} if kind is Kind.INCREMENTAL else {}
    return name, {"kind": "ValueState" if tables else "OpaqueState", "tables": tables}


def _manifest(subtasks: int = 6, tables: int = 6, max_parallelism: int = 128) -> Manifest:
    rng = np.random.default_rng(1)
    names = [f"table{i}" for i in range(tables)]
    ranges = KeyGroupRange(0, max_parallelism).split(subtasks)
    kinds = [Kind.OPAQUE, *[Kind.INCREMENTAL] * (tables - 1)]
    return Manifest(
        stream="flights",
        checkpoint=7,
        epoch=1,
        step=9,
        max_parallelism=max_parallelism,
        operators={
            "aircraft": {"key": KEY, "variables": dict(map(_variable, names, kinds))},
            "route": {"key": KEY, "variables": {}},
        },
        handles=[
            Handle(
                "aircraft",
                name,
                kind,
                Form.DELTA if kind is Kind.INCREMENTAL else Form.BASE,
                f"{PREFIX}/aircraft.{i:05d}.{i}.segment",
                int(rng.integers(0, 2**40)),
                int(rng.integers(0, 2**40)),
                f"xxh3-128:{rng.bytes(16).hex()}",
                groups,
                int(rng.integers(0, 2**40)),
                6,
            )
            for i, groups in enumerate(ranges)
            for name, kind in zip(names, kinds, strict=True)
        ],
        objects=[
            StoredObject(f"{PREFIX}/aircraft.{i:05d}.{i}.segment", 2**40 + i, f"xxh3-128:{rng.bytes(16).hex()}")
            for i in range(subtasks)
        ],
        digests={
            "aircraft": {n: rng.integers(0, 2**64 - 1, max_parallelism, np.uint64, endpoint=True) for n in names},
            "route": {},
        },
        forms={"aircraft": Form.DELTA, "route": Form.BASE},
        d={"aircraft": 4, "route": 0},
        chains={"aircraft": {"table1": {"first": 3, "d": 4, "average": 0.1}}},
        event_time_max=datetime(2013, 1, 2, 3, 4, 5, 678901, tzinfo=UTC),
        statistics=bare_statistics("aircraft", "route", rows=2**40, parallelism=subtasks),
        versions={"aircraft": {name: [(0, 6)] for name in names}, "route": {}},
    )


def _plain(manifest: Manifest) -> dict[str, object]:
    digests = {o: {v: g.tolist() for v, g in part.items()} for o, part in manifest.digests.items()}
    plain = {field.name: getattr(manifest, field.name) for field in fields(manifest)}
    return {**plain, "digests": digests, "digest": manifest.digest}


def test_round_trip() -> None:
    manifest = _manifest()
    read = decode_manifest(pa.py_buffer(encode_manifest(manifest)))
    assert _plain(read) == _plain(manifest)
    assert read.digest == checkpoint_digest(manifest.digests)
    assert all(type(h.kind) is Kind and type(h.form) is Form for h in read.handles)
    assert all(g.dtype == np.uint64 for part in read.digests.values() for g in part.values())


def test_round_trip_of_the_least_and_the_most() -> None:
    least = Manifest("s", 1, 1, 1, 1, {}, [], [], {}, {}, statistics=bare_statistics())
    assert _plain(decode_manifest(encode_manifest(least))) == _plain(least)
    most = _manifest(subtasks=3, max_parallelism=32768)
    assert _plain(decode_manifest(encode_manifest(most))) == _plain(most)


def _without_route(part: str) -> dict[str, object]:
    return {part: {"aircraft": getattr(_manifest(1, 2), part)["aircraft"]}}


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"digests": {"aircraft": {}, "route": {}}}, "its digests lack aircraft.table0"),
        (_without_route("digests"), ""),  # digests of no variable are not stored
        (_without_route("forms"), "its digests lack route"),  # which are read by the forms
        (_without_route("operators"), "its digests have route, its definitions do not"),
        ({"versions": {"aircraft": {"table0": [(0, 6)]}, "route": {}}}, "its versions lack aircraft.table1"),
    ],
)
def test_parts_that_name_different_variables_are_not_read_and_not_committed(
    tmp_path: Path, changed: dict[str, object], said: str
) -> None:
    """Issue 32, `edit_bricks.py`: such a checkpoint was proven, and could not be restored."""
    manifest = replace(_manifest(subtasks=1, tables=2), handles=[], **changed)
    if said:
        with pytest.raises(CorruptObject, match=f"flights/7 cannot be read as a manifest: {said}"):
            decode_manifest(encode_manifest(manifest), "flights/7")
    with (
        filesystem(tmp_path) as place,
        pytest.raises(StateError, match="checkpoint 7 of flights is not committed: its"),
    ):
        store_manifest(place.warehouse, UploadOptions(), "m", manifest, UploadStatistics())
    assert not list(place.warehouse.store.list("m"))


def test_the_part_of_one_operator_is_all_that_its_tasks_need() -> None:
    manifest = _manifest()
    other = Handle(
        "route", "totals", Kind.INCREMENTAL, Form.BASE, "x", 0, 1, "xxh3-128:" + "ab" * 16, KeyGroupRange(0, 128), 1, 0
    )
    both = replace(
        manifest,
        handles=[*manifest.handles, other],
        objects=[*manifest.objects, StoredObject("x", 1, "xxh3-128:" + "ab" * 16)],
    )
    route, aircraft = both.of_operator("route"), both.of_operator("aircraft")
    assert list(route.handles) == [other] and [o.name for o in route.objects] == ["x"]
    assert route.d == {"route": 0} and route.chains == {} and list(route.digests) == ["route"]
    assert list(aircraft.handles) == list(manifest.handles) and list(aircraft.objects) == list(manifest.objects)
    assert (aircraft.step, aircraft.max_parallelism, aircraft.forms) == (9, 128, {"aircraft": Form.DELTA})


def test_any_arrow_reader_can_open_it() -> None:
    data = encode_manifest(_manifest())
    [head] = pa.ipc.open_stream(data).read_all().to_pylist()
    said = json.loads(head["about"])
    assert said["format"] == FORMAT and said["compression"] == "zstd"
    message = pa.ipc.read_message(zstandard.decompress(data[:-8][-said["row"] :]))
    [row] = pa.ipc.read_record_batch(message, SCHEMA).to_pylist()
    assert json.loads(row["about"])["stream"] == "flights"
    assert len(row["handles"]) == 36


def test_it_is_small() -> None:
    digests = 6 * 128 * 8
    assert len(encode_manifest(_manifest())) < digests + 7000


@pytest.mark.slow
def test_a_manifest_grows_with_its_handles_and_not_with_the_stream(tmp_path: Path) -> None:
    with filesystem(tmp_path) as place:
        run = new_run(place)
        for n in range(1, 33):
            run.step(rows(n))
        by_shape: dict[tuple[int, str], list[int]] = {}
        for checkpoint in place.catalog.checkpoints.list(NAME):
            manifest = decode_manifest(place.warehouse.store.read(checkpoint.manifest))
            shape = len(manifest.handles), manifest.forms["by_key"]
            by_shape.setdefault(shape, []).append(checkpoint.manifest.bytes)
    assert sum(map(len, by_shape.values())) == 32
    repeated = [sizes for sizes in by_shape.values() if len(sizes) > 4]
    # The first one of a shape may lack fields that are still zero.
    assert repeated and all(max(sizes[1:]) - min(sizes[1:]) < 250 for sizes in repeated)


def test_every_altered_or_missing_byte_is_noticed() -> None:
    good = encode_manifest(_manifest(subtasks=1, tables=1, max_parallelism=8))
    for position in range(len(good)):
        altered = bytearray(good)
        altered[position] ^= 0x20
        for bad in (bytes(altered), good[:position]):
            with pytest.raises(CorruptObject, match="flights/1 was cut or altered"):
                decode_manifest(bad, "flights/1")
        body = bytes(altered[:-8])
        with suppress(CorruptObject, NewerFormat):  # sealed by who altered it, it is refused, if at all, as others are
            decode_manifest(body + xxhash.xxh3_64_digest(body))


@given(st.binary(max_size=100))
def test_garbage_is_no_manifest(data: bytes) -> None:
    for bad in (data, data + xxhash.xxh3_64_digest(data)):
        with pytest.raises(CorruptObject):
            decode_manifest(bad)


def test_a_row_is_not_compressed_where_a_reader_might_refuse_it_as_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    zeros = {"zeros": "0" * (JSON_FREE_BYTES + (1 << 20))}
    manifest = replace(_manifest(), statistics=bare_statistics("aircraft", "route") | zeros)
    for each in (manifest, _manifest()):
        data = encode_manifest(each)
        [head] = pa.ipc.open_stream(data).read_all().to_pylist()
        assert json.loads(head["about"])["compression"] == ""
        assert _plain(decode_manifest(data)) == _plain(each)
        monkeypatch.setattr("siltstone.format.manifest.is_small", lambda batch: False)


def test_a_later_format_says_so() -> None:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, HEAD) as out:
        out.write_table(pa.table({"about": [json.dumps({"format": FORMAT + 1})]}))
    data = sink.getvalue().to_pybytes()
    with pytest.raises(NewerFormat, match=f"has format {FORMAT + 1}, which a newer Siltstone wrote: upgrade"):
        decode_manifest(data + xxhash.xxh3_64_digest(data))
