"""What a commit adds to the catalog besides objects is in its manifest, so that a lost catalog can be rebuilt."""

import json
from dataclasses import replace
from datetime import UTC
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from siltstone.catalog.database.packing import pack
from siltstone.catalog.records.commit_details import (
    CommitDetails,
    PreviousCheckpoint,
    decode_details,
    encode_details,
    pack_parts,
    unpack_parts,
)
from siltstone.catalog.records.edits import Edit
from siltstone.catalog.records.outbox import Output
from siltstone.catalog.records.steps import Step, StepKind
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.errors import CorruptObject, StateError
from siltstone.format.manifests import read_manifest
from siltstone.model import MAX_ID, SinkFile, StoredObject
from siltstone.run.pending import commit_of
from tests.outbox_run import NAME, SINK, Heard, Outboxed, batch
from tests.spark_offsets import OFFSETS

STORED = StoredObject("s/00000001/000000000001/manifest.arrow", 7, "sha-256:" + "0" * 64)
CHECKSUM = "xxh3-128:" + "0" * 32
FILE = SinkFile("_sinks/s/op/00000001/000000000001/op.0-a.rows.parquet", 7, STORED.checksum, statistics='{"a": 1}')
TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=40)


def _definition(options: dict[str, str], kind: object = "ValueState", tables: object = None) -> dict[str, Any]:
    shape = {"key": [["k", "int64"]], "subkey": [], "value": [["n", "int64"]]}
    variables = {"totals": {"kind": kind, "tables": {"totals": shape} if tables is None else tables}}
    return {"operators": {"op": {"key": shape["key"], "variables": variables}}, "options": options}


STEPS = st.builds(
    Step,
    st.integers(1, MAX_ID),
    st.integers(-1, MAX_ID),
    TEXT | st.sampled_from([OFFSETS, 'x"conf":y\nz\nw', '"conf":', '"conf":a"conf":b\n\n']),
    TEXT,
    digests=TEXT,
    clock=TEXT,
) | st.builds(
    lambda number, kind, digests, clock: replace(Step.without_rows(number, kind), digests=digests, clock=clock),
    st.integers(1, MAX_ID),
    st.sampled_from([StepKind.EMPTY, StepKind.CHANGE]),
    TEXT,
    TEXT,
)
NUMBERS = st.integers(0, 2**63 - 1)
DETAILS = st.builds(
    CommitDetails,
    steps=st.lists(STEPS, max_size=5, unique_by=lambda step: step.step).map(
        lambda steps: tuple(sorted(steps, key=lambda step: step.step))
    ),
    edit=st.none() | st.builds(Edit, st.just("op"), st.just("table"), NUMBERS, NUMBERS, TEXT, st.none() | TEXT, TEXT),
    parallelism=st.none() | st.integers(1, 99),
    definition=st.none() | st.builds(_definition, st.dictionaries(TEXT, TEXT, max_size=3)),
    dropped=st.lists(TEXT, max_size=3).map(tuple),
    outputs=st.lists(
        st.builds(Output, TEXT, st.binary(), NUMBERS, st.sampled_from([(), (STORED,), (FILE, FILE)])), max_size=3
    ).map(tuple),
    repeats=st.booleans(),
    previous=st.none() | st.builds(PreviousCheckpoint, st.just(STORED), st.datetimes(timezones=st.just(UTC))),
    outstanding=st.none() | st.lists(st.tuples(st.integers(1, MAX_ID), TEXT), max_size=3).map(tuple),
)


@given(DETAILS)
def test_details_come_back(details: CommitDetails) -> None:
    assert decode_details(encode_details(details), "m") == details


def test_a_step_costs_little_however_many_options_spark_repeats() -> None:
    steps = [Step(n, n - 1, OFFSETS.replace("1700000000000", f"{1700000000000 + 7919 * n}")) for n in range(1, 1001)]
    stored_bytes = sum(map(len, encode_details(CommitDetails(steps))))
    assert len(OFFSETS) > 1000 and stored_bytes < 25 * len(steps)
    assert decode_details(encode_details(CommitDetails(steps)), "m").steps == tuple(steps)


def test_long_text_is_packed_in_parts_that_are_read_again() -> None:
    text = json.dumps([{"path": f"file:///in/{n}.parquet"} for n in range(150_000)])
    parts = pack_parts(text)
    assert len(parts) == 2 and unpack_parts(parts) == text


@pytest.mark.parametrize(
    "parts",
    [
        [],
        [b""],
        [pack("[]")],
        [pack('{"steps": []}')],
        [pack("[" * 99)],
    ],
)
def test_damaged_details_are_refused(parts: list[bytes]) -> None:
    with pytest.raises(StateError):
        decode_details(parts, "m")


def test_parts_that_unpack_to_more_than_their_length_pays_for_are_refused() -> None:
    with pytest.raises(ValueError, match="unpacks to more than"):
        unpack_parts([pack("a" * (7 << 20))] * 40)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("parallelism", 0),
        ("parallelism", True),
        ("repeats", 1),
        ("definition", []),
        ("definition", {"operators": 7, "options": {}}),
        ("definition", {"operators": {}}),
        ("definition", {"operators": {}, "options": {"path": 7}}),
        ("definition", {"operators": {}, "options": {}, "secret": [7]}),
        ("definition", _definition({}, kind=7)),
        ("definition", _definition({}, tables=[])),
        ("dropped", [1]),
        ("outputs", [["o", "!", 1, []]]),
        ("outputs", [["o", "", 1, [["../x", 1, CHECKSUM]]]]),
        ("outputs", [["o", "", 1, [["x", 1, "sha-1:00"]]]]),
        ("outputs", [["o", "", 1, [[FILE.name, 1, CHECKSUM]]]]),
        ("outputs", [["o", "", 1, [["x", 1, CHECKSUM, "{}"]]]]),
        ("outputs", [["o", "", 1, [[FILE.name, 1, CHECKSUM, "[]"]]]]),
        ("outputs", [["o", "", 1, [[FILE.name, 1, CHECKSUM, "not JSON"]]]]),
        ("outputs", [["o", "", 1, [[FILE.name, 1, CHECKSUM, "{}"], ["x", 1, CHECKSUM]]]]),
        ("previous", [["x", -1, CHECKSUM], "2020-01-01"]),
        ("previous", [["x", 1, CHECKSUM], "yesterday"]),
        ("outstanding", [[0, "o"]]),
        ("steps", [[1, 0, "", 1, "", "{}", "", ""]]),
        ("steps", [[1, -3, "", 0, "", "{}", "", ""]]),
        ("steps", [[MAX_ID + 1, 1, "", 0, "", "{}", "", ""]]),
        ("steps", [[1, 2**63 - 1, "", 0, "", "{}", "", ""]]),
        ("steps", [[0, 1, "", 0, "", "{}", "", ""]]),
        ("steps", [[1, 1, "\ud800", 0, "", "{}", "", ""]]),
        ("steps", [[1, 1, "", 0, "\0", "{}", "", ""]]),
        ("steps", [[1, 1, "", 0, "", "{}", "", "\0"]]),
        ("steps", [[1, 1, "", 0, "", "{}", "", 7]]),
        ("steps", [[1, "batch", "", 0, "", "{}", "", ""]]),
        ("steps", [[1, "empty", "read", 0, "", "{}", "", ""]]),
        ("steps", [[1, 1, "", 0, "", "{}", ""]]),
        ("steps", [[1, 1, "", 0, "", "{}", "", ""], [1, 2, "", 0, "", "{}", "", ""]]),
        ("edit", {"operator": "../x"}),
    ],
)
def test_hostile_details_are_refused(field: str, value: object) -> None:
    values = json.loads(unpack_parts(encode_details(CommitDetails(steps=[Step(1, 0, "v1")]))))
    decode_details(pack_parts(json.dumps(values)), "m")
    with pytest.raises(CorruptObject, match=r"m cannot be read|without statistics"):
        decode_details(pack_parts(json.dumps(values | {field: value})), "m")


def test_each_manifest_names_the_one_before_and_holds_what_its_commit_recorded(
    place: OpenWarehouse, heard: Heard
) -> None:
    run = Outboxed(place, heard)
    for n in (1, 2):
        run.step(batch(n, 3))
    run.region.close("done")
    Outboxed(place, heard).step(batch(3, 3))
    records = place.catalog.checkpoints.list(NAME)
    found = []
    for record in records:
        manifest = read_manifest(place.warehouse.store, record.manifest)
        found.append(decode_details(manifest.commit, record.manifest.name))
        commit = commit_of(manifest, record.manifest, found[-1])
        assert (commit.digest, commit.rows, commit.bytes) == (record.digest, record.rows, record.bytes)
    assert [step for each in found for step in each.steps] == [
        Step(s.step, s.batch_id, s.offsets, s.sources, s.kind, s.digests, s.clock)
        for s in place.catalog.input_log.list(NAME, 3)
    ]
    expected = [None, *(PreviousCheckpoint(each.manifest, each.committed_at) for each in records[:2])]
    assert [each.previous for each in found] == expected
    assert [[o.name for o in each.outputs] for each in found] == [[SINK]] * 3
    assert [each.outstanding for each in found] == [(), (), ()]
    assert found[0].definition and found[1].definition is None and found[2].definition is None
