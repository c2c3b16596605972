"""Rescaling and editing as users see them: through the command line, beside runs, and what is refused."""

import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.errors import CorruptObject, Fenced
from siltstone.format.manifests import read_manifest
from siltstone.settings import Settings
from siltstone.spark import operations
from siltstone.spark.operations.changing import hold_epoch_for_change
from siltstone.store.checksums import checksum_of
from siltstone.stream import find_stream
from tests.command_line import plain, siltstone
from tests.spark_streams import COUNTS

CONFIGURATION = 'streams = ["tests.spark_streams"]\nwarehouse = "w"\n'


@pytest.fixture(scope="module")
def project(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a warehouse in which `little` and `counts` have run, at parallelism 3."""
    path = tmp_path_factory.mktemp("changing")
    (path / "siltstone.toml").write_text(CONFIGURATION)
    for stream, batches in (("little", 3), ("counts", 2)):
        assert siltstone("run", stream, "--batches", batches, "--parallelism", 3, "--json", cwd=path).json
    return path


@pytest.fixture(autouse=True)
def inside(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project)


def state() -> tuple[Any, ...]:
    """All that a refused command must leave alone."""
    files = sorted(str(p) for p in Path("w").rglob("*") if not p.name.startswith("catalog.db"))
    with OpenWarehouse.open_existing("w") as place:
        names = [s.name for s in place.catalog.streams.list()]
        return (
            files,
            place.catalog.streams.list(),
            [(place.catalog.runs.list(n), place.catalog.checkpoints.list(n)) for n in names],
        )


def digests(stream: str, checkpoint: int) -> dict[str, dict[str, list[int]]]:
    with OpenWarehouse.open_existing("w") as place:
        manifest = read_manifest(place.warehouse.store, place.catalog.checkpoints.get(stream, checkpoint).manifest)
    return {op: {name: d.tolist() for name, d in by_name.items()} for op, by_name in manifest.digests.items()}


def parallelism(stream: str) -> int:
    with OpenWarehouse.open_existing("w") as place:
        return place.catalog.checkpoints.get_latest(stream).statistics["parallelism"]


def totals(at: str = "latest") -> dict[int, tuple[int, int]]:
    """What `counts` holds: key -> rows and sum."""
    shutil.rmtree("out", ignore_errors=True)
    assert siltstone("restore", "counts", "--at", at, "--to", "out").code == 0
    rows = pq.read_table("out/counts/totals").to_pylist()
    return {row["key"]: (row["rows"], row["sum"]) for row in rows}


def test_rescale_keeps_every_digest_and_is_what_later_runs_have() -> None:
    newest = siltstone("checkpoints", "little", "--json").json["checkpoints"][-1]
    done = siltstone("rescale", "little", "--parallelism", 7, "--json").json
    fields = ["stream", "checkpoint", "parallelism", "before", "rows", "bytes", "seconds", "digest", "proven"]
    assert list(done) == fields
    assert (done["checkpoint"], done["parallelism"], done["before"], done["proven"]) == (4, 7, 3, True)
    assert (done["rows"], done["digest"]) == (newest["rows"], newest["digest"])
    assert done["bytes"] == 0, "the run before was on this machine"
    assert digests("little", 4) == digests("little", 3)
    with OpenWarehouse.open_existing("w") as place:
        assert place.catalog.streams.get("little").parallelism == 7 == parallelism("little")
        assert [r.outcome for r in place.catalog.runs.list("little")] == ["done", "done"]
    assert siltstone("run", "little", "--batches", 1, "--json").json["rows"] == 300
    assert parallelism("little") == 7
    assert siltstone("run", "little", "--batches", 1, "--parallelism", 2, "--json").json["rows"] == 300
    assert parallelism("little") == 2
    [line] = plain(siltstone("rescale", "little", "--parallelism", 1))
    assert line.startswith("little: checkpoint 7 at parallelism 1 (before: 2): ") and ", proven, digest " in line
    assert siltstone("run", "little", "--json").json["rows"] == 300
    assert siltstone("verify", "little", "--all", "--json").json["failed"] == []
    sink = pq.read_table("w/sink/little/accounts").to_pandas() if Path("w/sink/little/accounts").is_dir() else None
    assert sink is None or not sink.duplicated("sequence").any()


@pytest.mark.parametrize(
    ("stream", "n", "said"),
    [
        ("counts", 9, "parallelism is 9: use 1 to max_parallelism 8"),
        ("counts", 0, "parallelism is 0: use 1 to max_parallelism 8"),
        ("breaking", 2, "no stream 'breaking' in this catalog"),
        ("unknown", 2, "unknown"),
    ],
)
def test_a_rescale_that_cannot_be_changes_nothing(stream: str, n: int, said: str) -> None:
    before = state()
    siltstone("rescale", stream, "--parallelism", n).failed(2, said)
    assert state() == before


def write(name: str, **columns: Any) -> str:
    pq.write_table(pa.table({n.replace("deleted", "__deleted"): c for n, c in columns.items()}), name)
    return name


INTS = {"key": pa.array([1, 50]), "rows": pa.array([7, 1]), "sum": pa.array([70, 5])}


def test_an_edit_is_a_new_proven_checkpoint(spark: SparkSession) -> None:
    before = totals()
    path = write(
        "fix.parquet",
        key=pa.array([1, 50, 2, 60], pa.int32()),
        rows=pa.array([7, 1, None, None], pa.int64()),
        sum=pa.array([70.0, 5.0, None, None]),
        deleted=pa.array([False, False, True, True]),
    )
    command = ["edit", "counts", "--operator", "counts", "--variable", "totals", "--from", path]
    unchanged = state()
    dry = siltstone(*command, "--dry-run", "--json").json
    assert (dry["checkpoint"], dry["upserts"], dry["deletes"], dry["inserts"]) == (None, 2, 2, None)
    [line] = plain(siltstone(*command, "--dry-run"))
    assert line == "counts: 2 rows of counts.totals would be put, 2 deleted" and state() == unchanged
    done = siltstone(*command, "--json").json
    fields = ["stream", "operator", "variable", "checkpoint", "upserts", "inserts", "deletes", "absent", "source"]
    assert list(done) == [*fields, "source_checksum", "digest", "proven", "failure", "seconds"]
    counted = [done[name] for name in ("checkpoint", "upserts", "inserts", "deletes", "absent", "proven", "failure")]
    assert counted == [3, 2, 1, 1, 1, True, None]
    assert totals() == {k: v for k, v in before.items() if k != 2} | {1: (7, 70), 50: (1, 5)}
    assert totals("2") == before and parallelism("counts") == 3
    shown = siltstone("show", "counts", "3", "--json").json
    checksum = checksum_of(Path(path).read_bytes())
    assert [step["kind"] for step in shown["steps"]] == ["change"]
    assert shown["edit"]["source_checksum"] == checksum
    listed = siltstone("checkpoints", "counts", "--json").json["checkpoints"]
    assert [c["edit"] for c in listed] == [None, None, shown["edit"]] and listed[-1]["proven"]
    assert shown["edit"]["source"] == str(Path(path).absolute())
    assert any("counts.totals: 2 put, 1 deleted, from /" in line for line in plain(siltstone("show", "counts", "3")))
    # From Python, with a DataFrame; and the stream goes on.
    settings = Settings(warehouse="w", streams=["tests.spark_streams"])
    frame = spark.createDataFrame([(60, 1, 2)], "key long, rows long, sum int")
    again = operations.edit(settings, find_stream("counts", settings.streams), "counts", "totals", frame)
    assert (again.checkpoint, again.upserts, again.source, again.proven) == (4, 1, "a DataFrame", True)
    assert siltstone("run", "counts", "--json").json["checkpoints"] == [5, 6]
    assert totals()[50] == (1, 5) and totals()[60] == (1, 2) and totals()[1] == (8, 78)
    assert siltstone("verify", "counts", "--all", "--json").json["failed"] == []


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        (INTS | {"more": pa.array([1, 2])}, "unknown column 'more'"),
        ({"rows": INTS["rows"], "sum": INTS["sum"]}, "lacks key column key"),
        ({"key": INTS["key"], "rows": INTS["rows"]}, "lacks column sum"),
        (INTS | {"rows": pa.array(["7", "1"])}, "column rows is string, not int64"),
        (INTS | {"sum": pa.array([0.5, 1.0])}, "column sum does not fit int64"),
        (INTS | {"key": pa.array([None, 1])}, "column key is null in 1 rows"),
        (INTS | {"key": pa.array([50, 50])}, "1 keys more than once, such as key 50"),
        (INTS | {"deleted": pa.array([True, None])}, "column __deleted is null in 1 rows"),
        ({name: column.slice(0, 0) for name, column in INTS.items()}, "has no rows"),
    ],
)
def test_rows_that_do_not_fit_change_nothing(columns: dict[str, pa.Array], said: str) -> None:
    path = write("bad.parquet", **columns)
    before = state()
    siltstone("edit", "counts", "--operator", "counts", "--variable", "totals", "--from", path).failed(2, said)
    assert state() == before


@pytest.mark.parametrize(
    ("stream", "operator", "variable", "path", "said"),
    [
        ("counts", "count", "totals", "good.parquet", "no operator 'count'"),
        ("counts", "counts", "total", "good.parquet", "no variable 'total'"),
        ("little", "accounts", "amounts", "good.parquet", "unknown column 'key': use those of the table, key_group"),
        ("little", "places", "large", "good.parquet", "unknown column 'key': use those of the table, "),
        ("counts", "counts", "totals", "missing.parquet", "is not there: name a Parquet file"),
        ("counts", "counts", "totals", "w", "is a directory: name a Parquet file"),
        ("counts", "counts", "totals", "siltstone.toml", "cannot be read as a Parquet file"),
        ("breaking", "counts", "totals", "good.parquet", "no stream 'breaking' in this catalog"),
    ],
)
def test_an_edit_that_cannot_be_changes_nothing(
    stream: str, operator: str, variable: str, path: str, said: str
) -> None:
    write("good.parquet", **INTS)
    before = state()
    siltstone("edit", stream, "--operator", operator, "--variable", variable, "--from", path).failed(2, said)
    assert state() == before


def doubled(rows: DataFrame) -> DataFrame:
    """What `--function` names."""
    return rows.where("key = 3").withColumn("sum", F.col("sum") * 2)


def nothing(rows: DataFrame) -> None:
    """No DataFrame."""


def test_an_edit_by_expressions_and_by_a_function_sees_the_state_as_it_is() -> None:
    before = totals()
    command = ["edit", "counts", "--operator", "counts", "--variable", "totals"]
    sets = ["--set", "sum = sum + rows", "--set", "rows=rows - 1", "--where", "key in (1, 4) and rows > 0"]
    unchanged = state()
    dry = siltstone(*command, *sets, "--dry-run", "--json").json
    assert (dry["upserts"], dry["checkpoint"]) == (2, None) and state() == unchanged
    done = siltstone(*command, *sets, "--json").json
    assert (done["upserts"], done["inserts"], done["deletes"], done["proven"]) == (2, 0, 0, True)
    assert done["source"] == "set sum = sum + rows, rows = rows - 1 where key in (1, 4) and rows > 0"
    expected = before | {key: (before[key][0] - 1, sum(before[key])) for key in (1, 4)}
    assert totals() == expected
    shown = siltstone("show", "counts", "latest", "--json").json["edit"]
    assert (shown["source"], shown["source_checksum"]) == (done["source"], None)
    done = siltstone(*command, "--delete", "--where", "key = 4", "--json").json
    assert (done["upserts"], done["deletes"], done["absent"], done["proven"]) == (0, 1, 0, True)
    del expected[4]
    done = siltstone(*command, "--function", "tests.spark.test_changing:doubled", "--json").json
    assert (done["upserts"], done["source"]) == (1, "function tests.spark.test_changing.doubled")
    assert totals() == expected | {3: (expected[3][0], 2 * expected[3][1])}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([], "an edit needs exactly one of --from, --set, --delete and --function"),
        (["--from", "good.parquet", "--delete"], "an edit needs exactly one of"),
        (["--delete"], "--delete needs --where"),
        (["--from", "good.parquet", "--where", "true"], "--where belongs to --set or --delete"),
        (["--set", "sum"], "--set 'sum' is not COLUMN=SQL"),
        (["--set", "sum=1", "--set", "sum=2"], "--set 'sum=2' is not COLUMN=SQL, each column once"),
        (["--set", "key=1"], "key is a key column, which an edit keeps: set value columns, rows, sum"),
        (["--set", "more=1"], "there is no column more: set value columns, rows, sum"),
        (["--set", "sum=missing + 1"], "missing"),
        (["--set", "sum=sum / 3"], "column sum does not fit int64"),
        (["--set", "sum='x'"], "column sum is string, not int64"),
        (["--delete", "--where", "key = 4711"], "has no rows; change what chooses them"),
        (["--function", "tests.spark.test_changing:absent"], "cannot be imported"),
        (["--function", "tests.spark.test_changing:INTS"], "INTS is not a function: give MODULE:NAME of one"),
        (["--function", "tests.spark.broken_edit:halve"], "cannot be imported: ZeroDivisionError"),
        (
            ["--function", "tests.spark.test_changing:nothing"],
            "returned NoneType: let it return",
        ),
    ],
)
def test_an_edit_of_the_state_that_cannot_be_changes_nothing(given: list[str], said: str) -> None:
    write("good.parquet", **INTS)
    before = state()
    siltstone("edit", "counts", "--operator", "counts", "--variable", "totals", *given).failed(2, said)
    assert state() == before


def test_what_a_newer_writer_has_deleted_is_no_damage(spark: SparkSession, tmp_path: Path) -> None:
    """Seen in a campaign: a frozen rescale woke up after others had run on and truncated, and asked for a recovery."""
    settings = Settings(warehouse=str(tmp_path / "w"), parallelism=2)
    operations.run(settings, COUNTS, operations.RunRequest(batches=1))
    with OpenWarehouse.open_existing(settings.warehouse) as place:
        with pytest.raises(Fenced), hold_epoch_for_change(settings, COUNTS, place, spark, {}):
            place.catalog.runs.begin("counts", "another")
            raise CorruptObject("a manifest is missing")
        with pytest.raises(CorruptObject), hold_epoch_for_change(settings, COUNTS, place, spark, {}):
            raise CorruptObject("a manifest is missing")
