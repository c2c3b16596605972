"""The catalog stays within the bounds that `database.tables` states, over every database it can be in."""

import json
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest
import xxhash
from sqlalchemy import text

from siltstone.catalog.open import open_catalog
from siltstone.catalog.records import tombstones
from siltstone.catalog.records.commit_details import CommitDetails
from siltstone.catalog.records.commits import CheckpointCommit
from siltstone.catalog.records.input_log import PRUNE_AT_LEAST
from siltstone.catalog.records.source_entries import count_files, merge
from siltstone.catalog.records.steps import Step
from siltstone.catalog.records.tombstones import Tombstone
from siltstone.catalog.repository import Catalog
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.model import Form, StoredObject
from siltstone.retention.retention_rules import RetentionOptions
from siltstone.retention.truncate import truncate
from siltstone.run.step_digests import OperatorDigests, encode_digests
from siltstone.state.rows_digest import DigestedRows

NAME = "flights"
CHECKPOINT_BYTES, OBJECT_BYTES, STEP_BYTES, DELETION_BYTES = 900, 300, 250, 300
ROUND, KEPT = 250, 50
CONF = ",".join(f'"spark.sql.streaming.{word}.stateFormatVersion":"2"' for word in ("join", "aggregation", "state"))
OFFSETS = 'v1\n{"batchWatermarkMs":0,"batchTimestampMs":%d,"conf":{"spark.sql.shuffle.partitions":"200",%s}}\n%s'


def rows_of(id: int) -> DigestedRows:
    """Rows with a digest that looks like one."""
    return DigestedRows(abs(id), xxhash.xxh3_64_intdigest(f"{id}".encode()), "0123456789abcdef")


def commit_of(id: int) -> CheckpointCommit:
    """As a run of one operator writes it, a delta as a rule: a manifest and a segment, one file read."""

    def stored(file: str) -> StoredObject:
        return StoredObject(f"{NAME}/00000001/{id:012d}/{file}", 5000, f"{id * 7919:032x}")

    seconds = {phase: id * 1e-6 for phase in ("commit", "delta", "open", "persist", "process")}
    operator = {"rows_in": id, "state_rows": 10 * id, "bytes": 7 * id, "restore_bound_s": id * 1e-6, "seconds": seconds}
    latency = {"sum": id * 1e-6, "buckets": [-374 - id % 9], "counts": [1]}
    times = {
        "from": 1372896000000 + 1317 * id,
        "steps": [[id, 40 + id % 7, 310 + id % 97]],
        "checkpoints": [[id - 1, None, None, None, 0, 21, 35], [id, 40 + id % 7, 310 + id % 97, 311, None, None, None]],
    }
    uploads = {"requests": 1, "attempts": 1, "objects": 1, "bytes": 420 + id, "latency_s": latency}
    file = {"path": f"file:///data/flights/day-{id}.parquet", "timestamp": 1372896000000 + id, "batchId": id}
    file["size"] = 7919 * id
    return CheckpointCommit(
        id=id,
        manifest=stored("manifest.arrow"),
        digest=f"{id * 104729:032x}",
        rows=id,
        bytes=id,
        forms={"aircraft": Form.DELTA if id % 10 else Form.BASE},
        d={"aircraft": 9},
        statistics={
            "rows_in": id,
            "state_rows": id,
            "operators": {"aircraft": operator},
            "uploads": uploads,
            "times": times,
        },
        segments=[stored(f"{id:032x}-7.segment")],
        oldest_needed=max(1, id // 10 * 10),
        details=CommitDetails(
            [
                Step(
                    id,
                    id - 1,
                    OFFSETS % (1372896000000 + id, CONF, json.dumps({"logOffset": id})),
                    json.dumps({"0": {str(id): f"v1\n{json.dumps(file)}"}}),
                    digests=encode_digests({"aircraft": OperatorDigests(rows_of(id), {"aircraft": rows_of(-id)})}),
                )
            ]
        ),
    )


def used_bytes(catalog: Catalog) -> int:
    """What tables and indexes take, without the room of rows that are gone."""
    with catalog.transactions.engine.connect() as connection:
        if connection.dialect.name == "sqlite":
            pages, free, size = (
                connection.scalar(text(f"PRAGMA {name}")) for name in ("page_count", "freelist_count", "page_size")
            )
            return (pages - free) * size
        # How many rows of before an update still have room depends on when the server last cleaned up, by itself.
        connection.execution_options(isolation_level="AUTOCOMMIT")
        tables = "FROM pg_class WHERE relkind = 'r' AND relnamespace = current_schema()::regnamespace"
        for name in connection.scalars(text(f"SELECT relname {tables}")).all():
            connection.execute(text(f"VACUUM FULL {name}"))
        return int(connection.scalar(text(f"SELECT sum(pg_total_relation_size(oid)) {tables}")))


def file_bytes(catalog: Catalog) -> int:
    with catalog.transactions.engine.connect() as connection:
        return connection.scalar(text("PRAGMA page_count")) * connection.scalar(text("PRAGMA page_size"))


@pytest.fixture
def catalog(catalog_url: str) -> Iterator[Catalog]:
    with open_catalog(catalog_url) as opened:
        opened.streams.register(NAME, 128, {"operators": []})
        opened.runs.begin(NAME, "host:1")
        yield opened


def commit_round(catalog: Catalog, number: int) -> None:
    for id in range(number * ROUND + 1, (number + 1) * ROUND + 1):
        catalog.commits.add(NAME, 1, commit_of(id))


@pytest.mark.slow
def test_a_catalog_grows_by_what_is_stated_for_each_checkpoint_step_and_deletion(catalog: Catalog) -> None:
    store = SimpleNamespace(delete=lambda names: None, list=lambda prefix: iter(()))
    store.put = lambda name, data: StoredObject(name, len(data), "xxh3-128:" + "0" * 32)
    place = OpenWarehouse(cast(Any, SimpleNamespace(store=store)), catalog)
    before = used_bytes(catalog)
    commit_round(catalog, 0)
    grown = used_bytes(catalog) - before
    slack = 24 * 8192  # pages of tables and indexes that have just begun
    assert grown < ROUND * (CHECKPOINT_BYTES + 2 * OBJECT_BYTES + STEP_BYTES) + slack

    rules = RetentionOptions(keep_last=KEPT)
    assert truncate(place, NAME, rules).objects >= 2 * (ROUND - KEPT - 9)  # a chain has ten
    if catalog.url.startswith("postgresql"):
        return  # which gives pages back when it vacuums
    bound = before + KEPT * (CHECKPOINT_BYTES + 2 * OBJECT_BYTES) + slack
    assert used_bytes(catalog) < bound + ROUND * STEP_BYTES + 2 * ROUND * DELETION_BYTES

    largest = file_bytes(catalog)
    for number in (1, 2):
        commit_round(catalog, number)
        truncate(place, NAME, rules)
        grows_by = ROUND * (STEP_BYTES + 2 * DELETION_BYTES) + slack  # all else finds room where others have gone
        assert file_bytes(catalog) < largest + grows_by
        largest = file_bytes(catalog)
    left = catalog.input_log.list(NAME, 3 * ROUND)
    assert KEPT < len(left) < KEPT + 10 + PRUNE_AT_LEAST, (
        "as far back as a checkpoint is kept, and what is too few to prune"
    )
    position = catalog.input_log.get_position(NAME, 3 * ROUND)
    assert position.beginning is not None
    assert count_files(merge([position.beginning.sources, *(step.sources for step in position.entries)])) == 3 * ROUND


def test_records_of_deleted_checkpoints_make_room_and_those_of_orphans_stay(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    def doomed(what: str, count: int, reason: str = "deleted") -> list[Tombstone]:
        return [Tombstone(f"{NAME}/00000001/{i:012d}/{what}.segment", 10, reason) for i in range(count)]

    monkeypatch.setattr(tombstones, "RECORDS_MAX", 5)
    orphans = doomed("lost", 3, "an orphan")
    catalog.tombstones.record_orphans(NAME, "sweep", [each.name for each in orphans], lambda _: orphans)
    for what in ("first", "second", "third"):
        catalog.tombstones.record_deletion(NAME, 1, "truncate", doomed(what, 4))
    names = [record.name.rpartition("/")[2].partition(".")[0] for record in catalog.tombstones.list(NAME)]
    assert names == ["lost"] * 3 + ["second"] * 4 + ["third"] * 4
    # However many go at once, what is being deleted right now is written down.
    catalog.tombstones.record_deletion(NAME, 1, "truncate", doomed("many", 9))
    names = [record.name.rpartition("/")[2].partition(".")[0] for record in catalog.tombstones.list(NAME)]
    assert names == ["lost"] * 3 + ["many"] * 9


def test_materializations_of_long_ago_are_forgotten_with_their_checkpoints(catalog_url: str) -> None:
    time = datetime(2013, 7, 4, tzinfo=UTC)
    with open_catalog(catalog_url, now=lambda: time) as catalog:
        catalog.streams.register(NAME, 128, {"operators": []})
        catalog.runs.begin(NAME, "host:1")
        for id in range(1, 6):
            catalog.commits.add(NAME, 1, replace(commit_of(id), oldest_needed=id))
            for what in ("failed", "done"):
                name = f"{what}{id}"
                catalog.leases.take(NAME, [id], id=name, who="host:2", lasts=timedelta(minutes=1))
                catalog.materializations.begin(NAME, "aircraft", id, id=name, who="host:2")
                if what == "failed":
                    catalog.materializations.fail(NAME, name, "a test")
                else:
                    stored = StoredObject(
                        f"{NAME}/00000001/{id:012d}/aircraft.{name}.materialized.arrow", 1, "xxh3-128:" + "0" * 32
                    )
                    catalog.materializations.complete(NAME, name, stored, [], (), (), rows_=1, bytes_=1, seconds=1.0)
                catalog.leases.release(name)
            time += timedelta(days=40)
        catalog.deletions.mark(NAME, 1, [1, 2, 3])
        catalog.deletions.forget(NAME, 1, [1, 2, 3], [stored.name for stored in catalog.objects.list(NAME, [1, 2, 3])])
        ids = [f"{what}{id}" for id in range(1, 6) for what in ("failed", "done")]
        assert sorted(m.id for m in catalog.materializations.list(NAME)) == sorted(ids)
        catalog.materializations.begin(NAME, "aircraft", 5, id="next", who="host:2")
        # 1, 2 and 3 are gone, 200 to 120 days old.
        assert sorted(m.id for m in catalog.materializations.list(NAME)) == sorted([*ids[6:], "next"])
        catalog.materializations.fail(NAME, "next", "a test")
        catalog.deletions.mark(NAME, 1, [4])
        catalog.deletions.forget(NAME, 1, [4], [stored.name for stored in catalog.objects.list(NAME, [4])])
        catalog.materializations.begin(NAME, "aircraft", 5, id="more", who="host:2")
        # 4 is 80 days old.
        assert sorted(m.id for m in catalog.materializations.list(NAME)) == sorted([*ids[6:], "next", "more"])
