"""Edits of state without Spark: what is refused before anything changes, and what a step of changes does."""

from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from siltstone.catalog.records.steps import StepKind
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.chains.policies import PolicyOptions, policy_by_name
from siltstone.change.edit import COUNTS, Editable, cast_changes, check_columns
from siltstone.errors import UsageError
from siltstone.model import KeyGroupRange
from siltstone.operator import ListState, MapState, OpaqueState, Operator, Rows, State, ValueState, WindowState
from siltstone.state.schema import DELETED, TableSchema
from siltstone.stream import Stream
from tests.proofs import failures, restored_digest
from tests.region_run import RegionRun

POLICY = policy_by_name("marginal-cost", PolicyOptions())
MICROS = pa.timestamp("us")


class Meters(Operator):
    """Every kind of state, by meter."""

    name = "meters"
    key = {"meter": pa.float64()}  # noqa: RUF012
    totals = ValueState({"n": pa.int32(), "note": pa.string()})
    places = MapState(key={"x": pa.float32(), "y": pa.uint8()}, value={"n": pa.int64()})
    last = ListState({"n": pa.int64()})
    recent = WindowState({"n": pa.int64()}, order="n")
    sketch = OpaqueState(create=int, serialize=lambda n: n.to_bytes(8, "big"), deserialize=int.from_bytes)

    def process(self, rows: Rows, state: State) -> None:
        n = rows.table.column("n").combine_chunks().to_numpy()
        first = np.zeros(len(rows.keys), np.int64)
        first[rows.key_index] = n
        state.totals.put(rows.keys, {"n": pa.array(first, pa.int32()), "note": pa.nulls(len(first), pa.string())})
        cells = {"x": pa.array(n, pa.float32()), "y": pa.array(n % 7, pa.uint8())}
        state.places.put({"meter": rows.table["meter"], **cells, "n": n})
        state.last.append(rows.keys, rows.key_index, {"n": n})
        state.sketch[int(rows.key_groups.min())] += len(rows)


class Other(Operator):
    """Sees the rows too."""

    name = "other"
    key = {"meter": pa.float64()}  # noqa: RUF012
    seen = ValueState({"n": pa.int64()})

    def process(self, rows: Rows, state: State) -> None:
        state.seen.put(rows.keys, {"n": np.ones(len(rows.keys), np.int64)})


STREAM = Stream("plant", lambda spark, options: spark.sql(""), [Meters(), Other()], max_parallelism=16)
TOTALS = Meters().tables()["totals"]


def meters(values: list[float]) -> pa.Array:
    return pa.array(values, pa.float64())


def rows(count: int) -> pa.Table:
    return pa.table({"meter": np.arange(count) % 50 / 2, "n": np.arange(count)})


# What is refused


@pytest.mark.parametrize(
    ("operator", "variable", "said"),
    [
        ("meter", "totals", "no operator 'meter': it has meters, other"),
        ("meters", "total", "no variable 'total': it has totals, places, last, recent, sketch"),
        ("meters", "prepared", "no variable 'prepared'"),
        ("meters", "last.bounds", "no variable 'last.bounds'"),
    ],
)
def test_what_cannot_be_edited_is_refused(operator: str, variable: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        Editable.find(STREAM, operator, variable)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([("meter", pa.float64()), ("n", pa.int32())], "lacks column note, which rows that are not deleted"),
        ([("n", pa.int32()), ("note", pa.string())], "lacks key column meter"),
        ([("meter", pa.float64()), ("n", pa.int32()), ("note", pa.string()), ("m", pa.int8())], "unknown column 'm'"),
        ([("meter", pa.float64()), ("n", pa.string()), ("note", pa.string())], "column n is string, not int32"),
        ([("meter", pa.float64()), ("n", pa.int32()), ("note", pa.int8())], "column note is int8, not string"),
        ([("meter", pa.bool_()), ("n", pa.int32()), ("note", pa.string())], "column meter is bool, not double"),
        ([("meter", pa.float64()), (DELETED, pa.int8())], "column __deleted is int8, not bool"),
        ([("meter", pa.float64()), ("meter", pa.float64()), (DELETED, pa.bool_())], "has column meter twice"),
    ],
)
def test_columns_that_do_not_fit_are_refused(given: list[tuple[str, pa.DataType]], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        check_columns(pa.schema(given), TOTALS, "rows.parquet")


def total(**columns: Any) -> pa.Table:
    plain = {"meter": meters([1.0, 2.0]), "n": pa.array([1, 2], pa.int32()), "note": pa.array(["a", None])}
    return pa.table({name: column for name, column in (plain | columns).items() if column is not None})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (total(meter=meters([1.0, None])), "column meter is null in 1 rows"),  # pyright: ignore[reportArgumentType]
        (total(**{DELETED: pa.array([True, None])}), "column __deleted is null in 1 rows"),
        (total(n=pa.array([1, 2**31])), "column n does not fit int32: .*2147483648"),
        (total(n=pa.array([1.0, 2.5])), "column n does not fit int32: .*2.5"),
        (total(note=None, **{DELETED: pa.array([True, False])}), "lacks column note"),
    ],
)
def test_rows_that_do_not_fit_are_refused(given: pa.Table, said: str) -> None:
    check_columns(given.schema, TOTALS, "rows.parquet")
    with pytest.raises(UsageError, match=rf"^rows\.parquet.*{said}"):
        cast_changes(given, TOTALS, "rows.parquet")


@pytest.mark.parametrize(
    ("kind", "given", "kept"),
    [
        (pa.int32(), pa.array([1.0, -2.0, None]), [1, -2, None]),
        (pa.int32(), pa.array([1, 2, 3]).dictionary_encode(), [1, 2, 3]),
        (pa.uint64(), pa.array([Decimal(2**64 - 1)], pa.decimal128(20, 0)), [2**64 - 1]),
        (pa.float32(), pa.array([0.5, None, float("inf")]), [0.5, None, float("inf")]),
        (pa.float32(), pa.array([0.1]), "digits of double would be lost"),
        (pa.float64(), pa.array([2**53 + 1]), "does not fit double"),
        (pa.decimal128(5, 2), pa.array([Decimal("1.50")]), [Decimal("1.50")]),
        (pa.decimal128(5, 2), pa.array([Decimal("1.505")]), "does not fit decimal128"),
        (pa.decimal128(5, 2), pa.array([1.5, None, 0.1]), [Decimal("1.50"), None, Decimal("0.10")]),
        (pa.decimal128(5, 2), pa.array([1.505]), "digits of double would be lost"),
        (pa.decimal128(38, 0), pa.array([0.5]), "does not fit decimal128"),
        (pa.list_(pa.string()), pa.array([["a", None], None], pa.large_list(pa.large_string())), [["a", None], None]),
        (
            pa.struct([("s", pa.binary())]),
            pa.array([{"s": b"x"}], pa.struct([("s", pa.large_binary())])),
            [{"s": b"x"}],
        ),
        (pa.list_(pa.uint64()), pa.array([[2.0**63]]), "a value would change"),
        (pa.list_(pa.decimal128(38, 18)), pa.array([[2**64 - 1]], pa.list_(pa.uint64())), "does not fit"),
        (MICROS, pa.array([datetime(2020, 1, 1)], pa.timestamp("ns")), [datetime(2020, 1, 1)]),
        (MICROS, pa.array([1], pa.timestamp("ns")), "does not fit timestamp"),
        (MICROS, pa.array([datetime(2020, 1, 1)], pa.timestamp("us", "UTC")), "is timestamp.*, not timestamp"),
        (pa.date32(), pa.array([date(2020, 1, 1)], pa.date64()), [date(2020, 1, 1)]),
        (pa.date32(), pa.array([datetime(2020, 1, 1, tzinfo=UTC)]), "is timestamp.*, not date32"),
        (pa.string(), pa.array(["a", None], pa.large_string()), ["a", None]),
        (pa.binary(), pa.array([b"ab"], pa.binary(2)), [b"ab"]),
        (pa.bool_(), pa.array([1]), "is int64, not bool"),
        (pa.int8(), pa.nulls(2), [None, None]),
    ],
)
def test_values_are_cast_where_nothing_is_lost(kind: pa.DataType, given: pa.Array, kept: Any) -> None:
    schema = TableSchema(pa.schema([("k", pa.int64())]), pa.schema([]), pa.schema([("v", kind)]))
    table = pa.table({"k": np.arange(len(given)), "v": given})

    def both() -> pa.Table:
        check_columns(table.schema, schema, "rows")
        return cast_changes(table, schema, "rows")

    if isinstance(kept, str):
        with pytest.raises(UsageError, match=kept):
            both()
        return
    assert both().schema == schema.shown_changes
    assert both().column("v").to_pylist() == kept and both().column(DELETED).to_pylist() == [False] * len(kept)


# What an edit does


def edit(place: OpenWarehouse, variable: str, changes: pa.Table, parallelism: int = 2) -> tuple[dict[str, int], int]:
    """Take the stream over and edit; what was counted, and the new checkpoint."""
    run = RegionRun(place, STREAM, POLICY, parallelism)
    completed = run.edit("meters", variable, changes)
    return {name: sum(run.outputs["meters"].column(name).to_pylist()) for name in COUNTS.names}, completed.id


def state_of(place: OpenWarehouse, checkpoint: int, variable: str) -> dict[tuple[Any, ...], Any]:
    """Primary key -> values, as a restore rebuilds them."""
    from siltstone.format.manifests import read_manifests
    from siltstone.restore.export import rebuild, unit_tasks

    manifests = read_manifests(place.warehouse.store, place.catalog.chains.list_manifests("plant", checkpoint), "plant")
    found = {}
    for task in unit_tasks(manifests, checkpoint, 3, None)[0]:
        if task.unit.operator == "meters":
            table = rebuild(place.warehouse.store, task).tables[variable]
            width = len(table.schema.primary_key)
            for part, _ in table.scan(KeyGroupRange(0, 16)):
                for row in zip(*part.to_pydict().values(), strict=True):
                    found[row[:width]] = row[width:]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("parallelism", [1, 3])
def test_rows_are_put_and_deleted_and_nothing_else_changes(place: OpenWarehouse, parallelism: int) -> None:
    RegionRun(place, STREAM, POLICY, 2).step(rows(100))
    before = {name: state_of(place, 1, name) for name in ("totals", "places", "last", "last.bounds")}
    changes = pa.table(
        {
            "meter": meters([0.0, 0.5, 77.0, 1.0, 78.0]),
            "n": pa.array([1000, None, 3, None, None], pa.int64()),
            "note": pa.array(["new", "gone", None, None, None], pa.large_string()),
            DELETED: pa.array([False, False, False, True, True]),
        }
    )
    counts, checkpoint = edit(place, "totals", changes, parallelism)
    assert (counts, checkpoint) == ({"upserts": 3, "inserts": 1, "deletes": 1, "absent": 1}, 2)
    expected = before["totals"] | {(0.0,): (1000, "new"), (0.5,): (None, "gone"), (77.0,): (3, None)}
    del expected[1.0,]
    assert state_of(place, 2, "totals") == expected
    for name in ("places", "last", "last.bounds"):
        assert state_of(place, 2, name) == before[name]
    assert not failures(place, "plant")
    assert restored_digest(place, "plant", 2, 5) == place.catalog.checkpoints.get_latest("plant").digest
    [recorded] = place.catalog.edits.list("plant")
    assert (recorded.checkpoint, recorded.epoch, recorded.variable) == (2, 2, "totals")
    assert [step.kind for step in place.catalog.input_log.list("plant", 9)] == [StepKind.BATCH, StepKind.CHANGE]


@pytest.mark.slow
def test_a_stream_goes_on_from_what_was_edited(place: OpenWarehouse) -> None:
    run = RegionRun(place, STREAM, POLICY, 2)
    for count in (100, 60):
        run.step(rows(count))
    edit(place, "totals", total(n=pa.array([7, 8], pa.int32())))
    last = RegionRun(place, STREAM, POLICY, 3)
    completed = last.step(rows(2))
    assert completed is not None and not failures(place, "plant")
    found = state_of(place, completed.id, "totals")
    assert (found[1.0,], found[2.0,], found[0.0,]) == ((7, "a"), (8, None), (0, None))


@pytest.mark.slow
def test_map_keys_are_one_key_however_they_are_written(place: OpenWarehouse) -> None:
    """Zeros, NaNs and cast types are what the operator's own puts would have made of them."""
    RegionRun(place, STREAM, POLICY, 2).step(rows(1))
    nan = float("nan")
    first = pa.table(
        {
            "meter": meters([-0.0, nan, nan]),
            "x": pa.array([-0.0, nan, 0.0]),
            "y": pa.array([0, 255, 1]),
            "n": pa.array([5, 6, 7]),
        }
    )
    counts, _ = edit(place, "places", first)
    assert counts == {"upserts": 3, "inserts": 2, "deletes": 0, "absent": 0}
    gone = first.select(["meter", "x", "y"]).append_column(DELETED, pa.array([True] * 3))
    counts, checkpoint = edit(place, "places", gone, 1)
    assert counts == {"upserts": 0, "inserts": 0, "deletes": 3, "absent": 0}
    assert state_of(place, checkpoint, "places") == {} and not failures(place, "plant")
