"""Runs of the assets and checks, in this process, on the tests' own Spark."""

import os
import shutil
import sqlite3
from collections.abc import Iterator
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import dagster as dg
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from siltstone.catalog.records.checkpoints import CheckpointRecord
from siltstone.catalog.records.objects import ObjectKind
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.client import Client
from siltstone.dagster.assets.restored_state import RESTORED_EQUALS_CHECKPOINT
from siltstone.dagster.checks.facts import Subject
from siltstone.dagster.checks.suites import PROVEN
from siltstone.dagster.checks.validation import check
from siltstone.dagster.names import asset_of
from siltstone.dagster.partitions import hours_of
from siltstone.retention.deletion import delete_checkpoints
from siltstone.settings import load_settings
from tests.dagster_runs import Wing, checked, failure, made, plain
from tests.fault.small_stream import SMALL

BATCHES = 3
DAYS = replace(SMALL, event_days=(date(2020, 1, 1), date(2020, 1, 5)))
"""the same stream, which says of which days its first files are; a file holds five hours"""

pytestmark = pytest.mark.usefixtures("spark", "_small_is_registered")


@pytest.fixture(scope="module")
def _small_is_registered() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SILTSTONE_STREAMS", '["tests.fault.small_stream"]')
        yield


class Ran:
    """A run of the stream's job, and the warehouse it left."""

    def __init__(self, warehouse: Path) -> None:
        self.warehouse = warehouse
        self.wing = Wing(SMALL, str(warehouse), dg.DagsterInstance.ephemeral())
        self.result = self.wing.job(run={"batches": BATCHES, "parallelism": 2, "policy": "adjust-d"})
        assert self.result.success
        with OpenWarehouse.open_existing(str(warehouse)) as place:
            self.records = place.catalog.checkpoints.list(SMALL.name)


@pytest.fixture(scope="module")
def ran(spark: SparkSession, _small_is_registered: None, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """Once for all tests that only look."""
    return Ran(tmp_path_factory.mktemp("ran") / "warehouse")


@pytest.fixture
def wing(ran: Ran, tmp_path: Path) -> Iterator[Wing]:
    """What that run left, to go on with; afterwards it is as it was. At the same path, which Spark's logs name."""
    shutil.copytree(ran.warehouse, tmp_path / "as_it_was")
    yield Wing(SMALL, str(ran.warehouse), dg.DagsterInstance.ephemeral())
    shutil.rmtree(ran.warehouse)
    shutil.move(tmp_path / "as_it_was", ran.warehouse)


def records(wing: Wing) -> list[CheckpointRecord]:
    with OpenWarehouse.open_existing(wing.warehouse) as place:
        return place.catalog.checkpoints.list(wing.stream.name)


def test_every_part_of_a_run_is_an_event_with_what_it_took(ran: Ran) -> None:
    events, newest = made(ran.result), ran.records[-1]
    assert [r.id for r in ran.records] == [1, 2, 3]
    written = {
        f"{name}_{'base_checkpoint' if form == 'base' else 'delta_chain'}": record
        for record in ran.records
        for name, form in record.forms.items()
    }
    assert events.keys() == {*written, "accounts_sink", "checkpoints"}
    for name, record in written.items():
        event, said = events[name].metadata, record.statistics["operators"][asset_of(dg.AssetKey(name))[0]]
        assert events[name].version == event["digest"]
        assert event["checkpoint"] == record.id
        assert event["form"] == ("base" if name.endswith("base_checkpoint") else "delta")
        assert (event["bytes"], event["dagster/row_count"]) == (said["bytes"], said["state_rows"])
        assert event["rows_in"] == said["rows_in"] > 0 and event["seconds"] > 0
        assert 0 <= event["first_sqn"] <= event["last_sqn"] and event["last_sqn"] > 0
        assert event["D"] == record.d[asset_of(dg.AssetKey(name))[0]]
        assert event["amplification"] > 0.5
        assert event["chain"].endswith(str(record.id))
        assert sum(row["bytes"] for row in event["manifest"]) <= event["bytes"]
        assert all(row["object"].startswith("small/00000001/") for row in event["manifest"])
    bases = {name for name, record in written.items() if record.id == 1}
    assert bases == {f"{name}_base_checkpoint" for name in ("accounts", "daily", "places")}, "only the first took bases"

    event = events["checkpoints"]
    assert event.version == event.metadata["digest"] == newest.digest
    assert (event.metadata["checkpoints_made"], event.metadata["checkpoint"]) == (BATCHES, 3)
    assert event.metadata["rows"] == BATCHES * 300
    assert event.metadata["bytes"] == sum(r.bytes for r in ran.records)
    assert (event.metadata["chain"], event.metadata["chain_length"]) == ("1-3", 3)
    assert [row["checkpoint"] for row in event.metadata["newest_checkpoints"]] == [3, 2, 1]
    assert event.metadata["chain_picture"].startswith("![chain of small](data:image/svg+xml;base64,")
    assert len(event.metadata["chain_picture"]) < 200_000

    sink = events["accounts_sink"].metadata
    assert (sink["first_checkpoint"], sink["last_checkpoint"], sink["dagster/row_count"]) == (1, 3, BATCHES * 300)
    assert pq.read_table(sink["dagster/uri"]).num_rows == BATCHES * 300


def test_the_checks_of_the_run_pass_and_say_what_they_looked_at(ran: Ran) -> None:
    found = checked(ran.result)
    facts = {name: evaluation.metadata["facts"].value for name, evaluation in found.items()}
    operators = len(SMALL.operators)
    assert facts == {
        "digest": BATCHES,
        "no_gap": BATCHES * 8,  # tables that are kept incrementally
        "nothing_missing": facts["nothing_missing"],
        "restore_cost": BATCHES * operators,
        "space_amplification": BATCHES * operators,
        "no_orphan": 0,
        "sink_agrees": BATCHES,
    }
    assert isinstance(facts["nothing_missing"], int) and facts["nothing_missing"] > BATCHES
    assert all(evaluation.passed and "rows" not in evaluation.metadata for evaluation in found.values())
    with OpenWarehouse.open_existing(str(ran.warehouse)) as place:
        assert all(record.proven for record in place.catalog.checkpoints.list(SMALL.name))


def test_a_second_run_goes_on(wing: Wing, spark: SparkSession) -> None:
    result = wing.make("checkpoints", *_parts(), run={"batches": 1})
    assert result.success
    events = made(result)
    assert (events["checkpoints"].metadata["checkpoint"], events["checkpoints"].metadata["checkpoints_made"]) == (4, 1)
    assert events["accounts_sink"].metadata["first_checkpoint"] == 4
    with OpenWarehouse.open_existing(wing.warehouse) as place:
        assert place.catalog.runs.list(SMALL.name)[-1].who == f"Dagster run {result.run_id}"
    assert spark.range(3).count() == 3, "a session that ran before the run must outlive it"


def test_a_sample_is_what_is_new_and_what_was_proven_longest_ago(wing: Wing) -> None:
    stream = Client(load_settings(warehouse=wing.warehouse)).stream(SMALL.name)
    first, second = (set(stream.verify(sample=1).proven) for _ in range(2))
    assert first & second == {3} and first | second == {1, 2, 3}, "the newest, and the others in turn"
    one = records(wing)[0]
    with OpenWarehouse.open_existing(wing.warehouse) as place:
        place.catalog.checkpoints.record_proof(SMALL.name, 1, False, "an object was away", epoch=one.epoch)
    assert set(stream.verify(sample=0).proven) == {1, 3}
    assert all(record.proven for record in records(wing))


def test_digest_fails_for_damage_that_was_found_before_and_is_still_there(wing: Wing) -> None:
    stream = Client(load_settings(warehouse=wing.warehouse)).stream(SMALL.name)
    with OpenWarehouse.open_existing(wing.warehouse) as place:
        chain = place.catalog.objects.list(SMALL.name)
        base = next(each.name for each in chain if each.checkpoint == 1 and each.kind is ObjectKind.BASE)
        path = Path(wing.warehouse, "objects", base)
        path = path if path.is_file() else next(Path(wing.warehouse).rglob(Path(base).name))
        whole = path.read_bytes()
        path.chmod(0o600)
        path.write_bytes(whole[:-8] + b"damaged!")
    outcome = check(Subject(stream.settings, SMALL), PROVEN)
    assert not outcome.holds and {row["checkpoint"] for row in outcome.rows} == {1, 2, 3}
    assert all(row["reason"] for row in outcome.rows)
    path.write_bytes(whole)
    assert check(Subject(stream.settings, SMALL), PROVEN).holds, "what failed is proven again each time"


def _parts() -> list[str]:
    operators = [operator.name for operator in SMALL.operators]
    return [*(f"{name}_{part}" for name in operators for part in ("base_checkpoint", "delta_chain")), "accounts_sink"]


def test_materialization_and_snapshot_say_of_which_state_they_are(wing: Wing) -> None:
    newest = records(wing)[-1]
    result = wing.job("materialize", materialization={"operators": ["accounts", "places"]})
    assert result.success
    event = made(result)["materialization"]
    assert (event.version, event.metadata["checkpoint"]) == (newest.digest, 3)
    assert [row["operator"] for row in event.metadata["operators"]] == ["accounts", "places"]
    assert checked(result)["materialization_not_stalled"].passed

    first, second = wing.make("full_snapshot"), wing.make("full_snapshot")
    for result, taken in ((first, "now"), (second, "before")):
        event = made(result)["full_snapshot"]
        assert (event.version, event.metadata["dagster/row_count"]) == (newest.digest, newest.rows)
        assert event.metadata["taken"] == taken
        compared = checked(result)["restore_equals_snapshot"]
        assert compared.passed and compared.blocking
        assert compared.metadata["facts"].value == 9 * SMALL.max_parallelism  # tables, the opaque one included
    deep = wing.job("verify_deep")
    assert deep.success and checked(deep)["restore_equals_snapshot"].passed


def test_a_snapshot_that_cannot_be_taken_is_said_and_no_failure_where_a_schedule_asks(wing: Wing) -> None:
    shutil.rmtree(Path(wing.warehouse) / "work")
    asked = wing.job("snapshot", full_snapshot={"if_possible": True})
    assert asked.success and made(asked) == {}
    line, metadata = failure(wing.job("snapshot"))
    assert "on this machine; run the stream here" in line and metadata["error"] == "NoLiveState"


def test_hours_are_restored_once_each_in_a_single_run(wing: Wing) -> None:
    newest = records(wing)[-1]
    (*_, hour) = hours_of([newest.committed_at])
    later = f"{hour[:-2]}{int(hour[-2:]):02d}".replace("2026", "2126")  # an hour in which nothing was committed
    wing.instance.add_dynamic_partitions("small__hours", [hour, later])
    result = wing.make("restored_state", partitions=[hour, later])
    assert result.success
    events = made(result)
    assert events.keys() == {f"restored_state@{hour}", f"restored_state@{later}"}
    for event in events.values():
        assert event.version == event.metadata["digest"] == newest.digest
        assert (event.metadata["checkpoint"], event.metadata["dagster/row_count"]) == (3, newest.rows)
        assert event.metadata["restored"] == "now"
        path = Path(event.metadata["path"])
        assert path == Path(wing.warehouse) / "restored" / "small" / "series" / str(event.partition)
        tables = [p for p in path.glob("*/*") if p.name != "amounts"]  # that one is opaque: bytes, not rows
        assert sum(pq.read_table(table).num_rows for table in tables) == newest.rows
    root = path.parent
    assert sorted(p.name for p in root.iterdir()) == sorted([hour, later]), "nothing else is left"

    assert proofs(result) == {hour: (True, 3), later: (True, 3)}, "each partition has a proof of its own"

    before = {p: os.stat(p).st_mtime_ns for p in root.rglob("*")}
    again = made(wing.make("restored_state", partitions=[hour]))
    assert again[f"restored_state@{hour}"].metadata["restored"] == "before"
    assert again[f"restored_state@{hour}"].version == newest.digest
    assert {p: os.stat(p).st_mtime_ns for p in root.rglob("*")} == before


def proofs(result: dg.ExecuteInProcessResult) -> dict[str | None, tuple[bool, Any]]:
    """Partition -> whether the check of restored state passed, and of which checkpoint it was."""
    found = (e.asset_check_evaluation_data for e in result.all_events if e.event_type_value == "ASSET_CHECK_EVALUATION")
    return {
        e.partition: (e.passed, plain(e.metadata).get("checkpoint"))
        for e in found
        if e.check_name == RESTORED_EQUALS_CHECKPOINT
    }


def test_restored_files_that_were_changed_since_are_found_by_the_check_of_their_partition(wing: Wing) -> None:
    days = Wing(DAYS, wing.warehouse, wing.instance)
    keys = [f"2020-01-0{day}" for day in range(1, 6)]
    restored = days.make("restored_state", partitions=keys)
    assert {key: passed for key, (passed, _) in proofs(restored).items()} == dict.fromkeys(keys, True)
    first, *_, last = (Path(event.metadata["path"]) for event in made(restored).values())
    file = max(last.glob("accounts/totals/*"), key=lambda part: pq.read_metadata(part).num_rows)
    rows = pq.read_table(file)
    file.unlink()  # not through a link that the other day shares
    pq.write_table(rows.slice(1), file)
    check = dg.AssetCheckKey(dg.AssetKey(["small", "restored_state"]), RESTORED_EQUALS_CHECKPOINT)
    again = days.prove(check, keys)
    assert again.success and made(again) == {}, "only looked at"
    assert [passed for passed, _ in proofs(again).values()] == [True, True, True, True, False]
    shutil.rmtree(first)
    assert [passed for passed, _ in proofs(days.prove(check, keys)).values()] == [False, True, True, True, False]


def test_days_are_restored_in_one_run_and_show_what_was_known_then(wing: Wing) -> None:
    days = Wing(DAYS, wing.warehouse, wing.instance)
    keys = [f"2020-01-0{day}" for day in range(1, 6)]
    by_day = {
        key: max((r for r in records(wing) if str(r.event_time_max.date()) <= key), key=lambda r: r.id)  # type: ignore[union-attr]
        for key in keys
    }
    result = days.make("restored_state", partitions=keys)
    assert result.success
    events = made(result)
    assert {e.partition: (e.metadata["checkpoint"], e.version) for e in events.values()} == {
        key: (record.id, record.digest) for key, record in by_day.items()
    }
    files = [sorted(Path(e.metadata["path"]).glob("accounts/totals/*")) for e in events.values()]
    assert os.path.samefile(files[0][0], files[-1][0]), "days that show the same checkpoint share its files"


def test_partitions_whose_checkpoints_are_gone_say_so_and_the_others_are_restored(wing: Wing) -> None:
    """Neither an older checkpoint in place of what a day showed, nor an error that only the catalog understands."""
    days = Wing(DAYS, wing.warehouse, wing.instance)
    with sqlite3.connect(Path(wing.warehouse) / "catalog.db") as connection:
        for id, day in ((1, 1), (2, 2), (3, 4)):
            connection.execute(f"UPDATE checkpoint SET event_time_max = '2020-01-0{day} 12:00:00.0' WHERE id = {id}")
    with OpenWarehouse.open_existing(wing.warehouse) as place:
        delete_checkpoints(place, SMALL.name, [2])
    line, metadata = failure(days.make("restored_state", partitions=["2020-01-02"]))
    says = "2020-01-0{} of stream small cannot be restored: its checkpoint was deleted"
    assert line.startswith(says.format(2)) and "siltstone retention small" in line
    assert (metadata["exit_code"], metadata["error"]) == (2, "CheckpointGone")
    result = days.make("restored_state", partitions=[f"2020-01-0{day}" for day in range(1, 6)])
    assert result.success
    shown = {event.partition: event.metadata["checkpoint"] for event in made(result).values()}
    assert shown == {"2020-01-01": 1, "2020-01-04": 3, "2020-01-05": 3}
    observed = [event.asset_observation_data.asset_observation for event in result.get_asset_observation_events()]
    assert [o.partition for o in observed] == ["2020-01-02", "2020-01-03"]
    assert all(
        str(o.metadata["cannot be restored"].value).startswith(says.format(n)) for n, o in enumerate(observed, 2)
    )


def test_an_hour_that_can_never_be_restored_is_no_partition_any_more(wing: Wing) -> None:
    """Otherwise the automation asks for it for ever."""
    name, (hour,) = "small__hours", hours_of([records(wing)[-1].committed_at])
    gone = ["2020-01-01-00", "2020-01-01-01"]
    with sqlite3.connect(Path(wing.warehouse) / "catalog.db") as connection:
        for id in (1, 2):
            connection.execute(f"UPDATE checkpoint SET committed_at = '2020-01-01 0{id - 1}:30:00.0' WHERE id = {id}")
    with OpenWarehouse.open_existing(wing.warehouse) as place:
        delete_checkpoints(place, "small", [1, 2])
    wing.instance.add_dynamic_partitions(name, [*gone, hour])
    assert made(wing.make("restored_state", partitions=[gone[0], hour])), "of the range from one to the other"
    assert wing.instance.get_dynamic_partitions(name) == [hour]
    wing.instance.add_dynamic_partitions(name, gone[1:])
    line, _ = failure(wing.make("restored_state", partitions=gone[1:]))
    assert "cannot be restored: its checkpoint was deleted" in line
    assert wing.instance.get_dynamic_partitions(name) == [hour]
    # One that was restored, on this host or another, is still shown.
    wing.instance.add_dynamic_partitions(name, gone[1:])
    restored = dg.AssetMaterialization(dg.AssetKey(["small", "restored_state"]), partition=gone[1])
    wing.instance.report_runless_asset_event(restored)
    failure(wing.make("restored_state", partitions=gone[1:]))
    assert sorted(wing.instance.get_dynamic_partitions(name)) == [gone[1], hour]


@pytest.mark.parametrize(
    ("stream", "partition", "says"),
    [(SMALL, "nonsense", "use an hour like"), (SMALL, "1999-01-01-00", "1999"), (DAYS, "2020-01-01", "2020-01-01")],
)
def test_a_partition_without_a_checkpoint_is_one_clear_line(wing: Wing, stream: Any, partition: str, says: str) -> None:
    warehouse = Path(wing.warehouse)
    if stream is SMALL:
        wing.instance.add_dynamic_partitions("small__hours", [partition])
    else:
        _begin_later(warehouse)
    line, metadata = failure(Wing(stream, str(warehouse), wing.instance).make("restored_state", partitions=[partition]))
    assert says in line and "\n" not in line
    assert (metadata["exit_code"], metadata["error"]) in [(2, "UnknownCheckpoint"), (2, "UsageError")]
    assert not (warehouse / "restored").exists()


def _begin_later(warehouse: Path) -> None:
    """The events of the first checkpoint are of the second day."""
    with sqlite3.connect(warehouse / "catalog.db") as connection:
        connection.execute("UPDATE checkpoint SET event_time_max = '2020-01-02 00:00:00.000000'")


def test_a_day_out_of_range_is_no_partition(wing: Wing) -> None:
    with pytest.raises(dg.DagsterUnknownPartitionError, match="2020-01-06"):
        Wing(DAYS, wing.warehouse, wing.instance).make("restored_state", partitions=["2020-01-06"])


def test_damage_fails_the_check_by_name_and_blocks_what_is_made_from_it(wing: Wing) -> None:
    damaged = _flip_a_byte(wing.warehouse)
    (hour, *_) = hours_of([records(wing)[-1].committed_at])
    wing.instance.add_dynamic_partitions("small__hours", [hour])
    result = wing.make(
        "checkpoints", *_parts(), "materialization", "restored_state", "full_snapshot", run={"batches": 1}
    )
    assert not result.success
    check = checked(result)["digest"]
    assert not check.passed and check.severity is dg.AssetCheckSeverity.ERROR
    assert damaged in (check.description or "")
    rows = [dict(row.data) for row in check.metadata["rows"].records]  # type: ignore[union-attr]
    assert check.metadata["failing"].value == len(rows) >= 1
    assert damaged in {row["object"] for row in rows}
    assert {row["expected"] for row in rows} == {"proven True"}
    assert checked(result)["nothing_missing"].passed, "the object is there, with as many bytes"
    assert not {event.asset for event in made(result).values()} & {"materialization", "restored_state", "full_snapshot"}


def _flip_a_byte(warehouse: str) -> str:
    with OpenWarehouse.open_existing(warehouse) as place:
        (*_, damaged) = (o for o in place.catalog.objects.list(SMALL.name) if o.kind is ObjectKind.SEGMENT)
        path = place.warehouse.local.objects / damaged.name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.chmod(0o644)
    path.write_bytes(content)
    return damaged.name


def test_jobs_that_keep_the_store_say_what_they_did(wing: Wing) -> None:
    orphan = Path(wing.warehouse) / "objects" / "small" / "00000001" / "000000000002" / "lost.segment"
    orphan.write_bytes(b"nothing refers to this")
    for operation, said in (("sweep", {"deleted": 1}), ("truncate", {"dry_run": False}), ("recover", {})):
        result = wing.job(operation)
        assert result.success, operation
        (output,) = [e for e in result.all_events if e.event_type_value == "STEP_OUTPUT"]
        metadata = {name: value.value for name, value in output.step_output_data.metadata.items()}
        assert metadata.items() >= {"stream": "small", **said}.items()
    assert not orphan.exists()


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"batches": 0}, "batches is 0"),
        ({"policy": "guess"}, "guess"),
        ({"parallelism": 0}, "option parallelism"),
        ({"options": {"colour": "red"}}, "colour"),
    ],
)
def test_bad_config_is_one_clear_line_and_makes_no_checkpoint(
    tmp_path: Path, config: dict[str, Any], says: str
) -> None:
    wing = Wing(SMALL, str(tmp_path / "warehouse"), dg.DagsterInstance.ephemeral())
    line, metadata = failure(wing.job(run=config))
    assert says in line and "\n" not in line
    assert metadata["exit_code"] == 2


def test_a_step_of_an_unknown_stream_or_a_wrong_type_is_refused_before_anything_runs(tmp_path: Path) -> None:
    wing = Wing(SMALL, str(tmp_path / "warehouse"), dg.DagsterInstance.ephemeral())
    job = wing.definitions.resolve_job_def("small")
    with pytest.raises(dg.DagsterInvalidConfigError, match="nosuch__run"):
        job.execute_in_process(run_config={"ops": {"nosuch__run": {"config": {"batches": 1}}}})
    with pytest.raises(dg.DagsterInvalidConfigError, match="batches"):
        wing.job(run={"batches": "many"})
    assert not Path(wing.warehouse).exists()


def test_a_warehouse_that_is_missing_a_store_that_does_not_answer_and_a_stream_that_no_module_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wing = Wing(SMALL, str(tmp_path / "warehouse"), dg.DagsterInstance.ephemeral())
    line, metadata = failure(wing.job("sweep"))
    assert f"no warehouse at {wing.warehouse}" in line
    assert metadata["error"] == "UsageError"
    away = Wing(SMALL, f"redis://127.0.0.1:1/0?local={tmp_path / 'l'}&attempts=1", dg.DagsterInstance.ephemeral())
    line, metadata = failure(away.job(run={"batches": 1}))
    assert "127.0.0.1:1" in line and "\n" not in line and metadata["error"] == "Unreachable"
    monkeypatch.setenv("SILTSTONE_STREAMS", "[]")
    assert wing.job(run={"batches": 1}).success, "it runs as it was given to stream_definitions"
