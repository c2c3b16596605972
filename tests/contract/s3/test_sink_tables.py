"""The Delta sink in a bucket: written by boto3 and delta-rs with the same settings, read by any engine."""

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.errors import Unreachable, UsageError
from siltstone.sinks.delta import SinkTable
from siltstone.sinks.maintenance import TableMaintenance, optimize_sinks
from siltstone.store.open import open_store
from siltstone.store.table_place import table_place
from tests.delta_run import TableRun, rows_in, sink_table, table_files
from tests.outbox_run import NAME, SINK, batch, inputs, outstanding
from tests.s3_place import SERVERS, FreshBucket
from tests.widened_output import check_widened, widened

pytestmark = pytest.mark.server


@pytest.fixture
def warehouse(place: FreshBucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[OpenWarehouse]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with OpenWarehouse.open_writable(place.url("ware/house"), f"sqlite:///{tmp_path}/catalog.db") as opened:
        yield opened


def test_rows_are_in_the_table_once_and_small_files_are_merged(
    warehouse: OpenWarehouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = TableRun(warehouse)
    run.step(batch(1))
    TableRun(warehouse, delivers=False).step(batch(2))
    [output] = warehouse.catalog.outbox.list(NAME, outstanding=True)
    real, frozen = DeltaTable.transaction_version, []

    def freeze(self: DeltaTable, application: str) -> int | None:
        found = real(self, application)
        if not frozen:
            frozen.append(found)
            sink_table(warehouse).deliver(output)
        return found

    with monkeypatch.context() as patch:  # an older writer, frozen between its look at the log and its commit
        patch.setattr(DeltaTable, "transaction_version", freeze)
        sink_table(warehouse).deliver(output)
    later = TableRun(warehouse)
    assert later.given == [2] and outstanding(warehouse) == [] and rows_in(warehouse) == inputs([1, 2])
    later.step(batch(3))
    later.region.close("done")
    assert optimize_sinks(warehouse, NAME).tables == [TableMaintenance(SINK, merged=3, written=1)]
    assert rows_in(warehouse) == inputs([1, 2, 3]) and len(table_files(warehouse)) == 4


def test_wider_columns_are_in_the_whole_table(warehouse: OpenWarehouse) -> None:
    for n in (1, 2, 3):
        widened(warehouse, large=n == 3).step(batch(n))
    check_widened(warehouse, [1, 2, 3])


def test_a_reader_of_delta_tables_needs_nothing_of_siltstone(place: FreshBucket, warehouse: OpenWarehouse) -> None:
    TableRun(warehouse).step(batch(1))
    options = {"aws_endpoint_url": place.server.endpoint, "aws_allow_http": "true", "aws_region": "us-east-1"}
    url = f"s3://{place.bucket}/ware/house/_sinks/{NAME}/{SINK}"
    table = DeltaTable(url, storage_options=options)  # credentials of the environment
    assert sorted(pa.table(table.to_pyarrow_table()).column("n").to_pylist()) == inputs([1])


def test_the_options_are_those_of_the_store(place: FreshBucket, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(place.url("p", "region=eu-north-1", "sse=aws:kms", "kms_key=k", "timeout_s=7"))
    found = table_place(store, "_sinks/a/b/")
    assert found.url == f"s3://{place.bucket}/p/_sinks/a/b" and "secret" not in repr(found)
    wanted = {"aws_server_side_encryption": "aws:kms", "aws_sse_kms_key_id": "k"}
    wanted |= {"aws_endpoint_url": place.server.endpoint, "aws_virtual_hosted_style_request": "false", "timeout": "7s"}
    assert wanted.items() <= dict(found.options).items() and found.options["aws_conditional_put"] == "etag"
    # As named, or where the server says that the bucket is: boto3 follows it there, delta-rs does not.
    wanted_region = "us-east-1" if place.server == SERVERS["s3-versitygw"]() else "eu-north-1"
    assert found.options["aws_region"] == wanted_region
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    with pytest.raises(Unreachable, match="no credentials were found; set AWS_PROFILE"):
        table_place(store, "_sinks/a/b/")
    with pytest.raises(UsageError, match="profile 'nobody' does not exist"):
        table_place(open_store(place.url("p", "profile=nobody")), "_sinks/a/b/")


def test_a_server_that_is_away_is_an_error_and_not_a_missing_table(warehouse: OpenWarehouse) -> None:
    TableRun(warehouse).step(batch(1))
    away = open_store("s3://bucket/p?endpoint=http://127.0.0.1:9&retry=none")
    with pytest.raises(Unreachable, match=r"http://127\.0\.0\.1:9 cannot be reached"):
        SinkTable(away, NAME, SINK).open()
