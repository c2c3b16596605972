"""Operators that read several inputs, on Spark: their state is that which the same steps leave in one process."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession

from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.errors import UsageError
from siltstone.operator import BroadcastState, MapState, Operator, Rows, State, ValueState
from siltstone.spark.inputs import columns_read, unite
from siltstone.spark.operations import stream_runner
from siltstone.spark.operations.holding import open_region
from siltstone.spark.step import run_step
from siltstone.spark.types import spark_type
from siltstone.stream import Stream
from siltstone.testing import StreamTester
from tests.arrow_frames import from_arrow
from tests.spark_runs import at
from tests.spark_streams import read_files, write_files
from tests.unit.test_inputs import OUTPUTS, SCHEMA

SUBTASKS = 3
AUCTIONS = {"id": pa.int64(), "Price": pa.string(), "tags": pa.list_(pa.string()), "unread": pa.int64()}
BIDS = {"auction": pa.string(), "Price": pa.int64(), "by": pa.struct({"name": pa.string()})}
TYPES = {"auctions": pa.schema(AUCTIONS), "bids": pa.schema(BIDS)}


class Prices(Operator):
    """Counts each input's rows per key, and keeps what it read of them."""

    name = "prices"
    key = {"auction": pa.int32()}  # noqa: RUF012
    reads = {"auctions": {"id": "auction"}, "bids": {"auction": "auction"}}  # noqa: RUF012
    inputs = {"auctions": ("Price", "tags"), "bids": ("Price", "by")}  # noqa: RUF012
    order_by = ("bids.Price", "auctions.Price", "auction")
    output = {"auction": pa.int32(), "rows": pa.int64()}  # noqa: RUF012
    rows = MapState({"of": pa.string()}, {"n": pa.int64(), "first": pa.string(), "last": pa.string()})

    def process(self, rows: Rows, state: State) -> pa.Table:
        """Count, in the order of the rows."""
        for name in self.input_names:
            own = rows.of(name)
            keys = own.keys.columns.append_column("of", pa.array([name] * len(own.keys), pa.string()))
            old = state.rows.get(keys)
            text = pa.array([str(row) for row in own.table.to_pylist()], pa.string())
            said = {"first": own.first(text), "last": own.last(text), "n": own.count(initial=old["n"])}
            state.rows.put(pa.table({**dict(zip(keys.column_names, keys.columns, strict=True)), **said}))
        return rows.keys.with_columns({"rows": rows.count()})


class Known(Operator):
    """Counts the rows of keys that a broadcast table has."""

    name = "known"
    key = {"auction": pa.int64()}  # noqa: RUF012
    reads = {"bids": {"auction": "auction"}}  # noqa: RUF012
    output = {"auction": pa.int64(), "newest": pa.string(), "all": pa.int64()}  # noqa: RUF012
    rows = ValueState({"n": pa.int64()})
    table = BroadcastState(
        "auctions", {"id": pa.int64()}, {"Price": pa.string(), "tags": pa.list_(pa.string())}, by="Price"
    )

    def process(self, rows: Rows, state: State) -> pa.Table:
        """Count, and show the table."""
        ids = {name: rows.keys.columns["auction"] for name in state.table.table.column_names[:1]}
        found = state.table.lookup(ids)
        keys = rows.keys.take(np.flatnonzero(found.found))
        state.rows.put(keys, {"n": state.rows.get(keys)["n"].fill_null(0).combine_chunks()})
        newest = found.values[found.values.column_names[0]].cast(pa.string())
        return rows.keys.with_columns({"newest": newest, "all": np.full(len(rows.keys), len(state.table.table))})


class KnownDoubles(Known):
    """Has a table of an operator's output."""

    table = BroadcastState("doubles", {"number": pa.int64()}, {"Price": pa.int64()}, by="Price")


class KnownBids(Known):
    """Has a table of the only source."""

    table = BroadcastState("source", {"auction": pa.string()}, {"Price": pa.int64()}, by="Price")
    names = BroadcastState("source", {"Price": pa.int64()}, {"auction": pa.string()}, by="auction")


class Doubles(Operator):
    """Hands its rows on, under another name of the key."""

    name = "doubles"
    key = {"auction": pa.int64()}  # noqa: RUF012
    reads = "bids"
    output = {"number": pa.int64(), "Price": pa.int64()}  # noqa: RUF012
    counts = ValueState({"n": pa.int64()})

    def process(self, rows: Rows, state: State) -> pa.Table:
        """Count, and hand on."""
        state.counts.put(rows.keys, {"n": rows.count(initial=state.counts.get(rows.keys)["n"])})
        return pa.table({"number": rows.table["auction"], "Price": rows.table["Price"]})


SOURCES: Any = {"auctions": None, "bids": None}
SHARED = Stream("shared", sources=SOURCES, operators=[Known()], max_parallelism=8)
SHARED_OUTPUT = Stream(
    "shared_output",
    sources=SOURCES,
    operators=[KnownDoubles(reads={"auctions": {"id": "auction"}}), Doubles(), Prices()],
    max_parallelism=8,
)
SHARED_ALONE = Stream(
    "shared_alone",
    None,
    operators=[KnownBids(reads={"doubles": {"number": "auction"}}), Doubles(reads="source")],
    max_parallelism=8,
)
BOTH = Stream("both", sources=SOURCES, operators=[Prices()], max_parallelism=8)
CHAIN = Stream(
    "chain",
    sources=SOURCES,
    operators=[
        Prices(
            reads={"auctions": {"id": "auction"}, "doubles": {"number": "auction"}},
            inputs={"auctions": ("tags",), "doubles": ("Price",)},
            order_by=("doubles.Price", "auctions.tags"),
        ),
        Doubles(),
        Prices(name="again"),
    ],
    max_parallelism=8,
)
ONE = Stream(
    "one",
    None,
    [
        Prices(
            reads={"source": {"auction": "auction"}, "doubles": {"number": "auction"}},
            inputs={"source": ("Price",), "doubles": ("Price",)},
            order_by=("doubles.Price", "source.Price"),
        ),
        Doubles(reads="source"),
    ],
    max_parallelism=8,
)
SOME: Any = [{"id": n % 7, "Price": f"a{n}", "tags": ["t"] * (n % 3), "unread": n} for n in range(20)]
FEW: Any = [{"auction": str(n % 5), "Price": n, "by": {"name": f"b{n}"} if n % 2 else None} for n in range(30)]
STEPS: list[dict[str, Any]] = [{"auctions": SOME, "bids": FEW}, {"bids": FEW[:3]}, {}, {"auctions": SOME[:5]}]


def frames_of(spark: SparkSession, rows: Mapping[str, Any]) -> dict[str, DataFrame]:
    return {name: from_arrow(spark, pa.Table.from_pylist(rows.get(name, []), of)) for name, of in TYPES.items()}


def read_by(stream: Stream, frames: Mapping[str, DataFrame]) -> dict[str, Sequence[str]]:
    readers = {name: [op for op in stream.operators if name in op.input_names] for name in frames}
    return {
        name: list(dict.fromkeys(c for op in readers[name] for c in columns_read(rows, op, None, name)))
        for name, rows in frames.items()
    }


@pytest.mark.parametrize(
    "stream", [BOTH, CHAIN, ONE, SHARED, SHARED_OUTPUT, SHARED_ALONE], ids=lambda stream: stream.name
)
def test_spark_leaves_the_state_that_one_process_leaves(spark: SparkSession, tmp_path: Path, stream: Stream) -> None:
    with ExitStack() as stack:
        place = stack.enter_context(OpenWarehouse.open_writable(str(tmp_path / "w")))
        region = open_region(at(tmp_path / "w", parallelism=SUBTASKS), stream, place, {}, SUBTASKS)
        schema: Any = TYPES if stream.sources else TYPES["bids"]
        tester = stack.enter_context(StreamTester(stream, parallelism=SUBTASKS, schema=schema))
        for rows in STEPS:
            batch, frames = None, frames_of(spark, rows)
            if rows:
                batch = unite(frames, read_by(stream, frames)) if stream.sources else frames["bids"]
            done = run_step(spark, batch, region.begin_step(ends=True))
            done.unpersist()
            for name, received in done.received.items():
                region.acknowledge(name, received)
            if stream.sources:
                tester.step(rows if rows else None)
            else:
                tester.step(rows.get("bids", []) if rows else None)
            region.complete()
            assert region.digest == tester.digest, rows
            counts = {name: sum(a.rows_in for a in received) for name, received in done.received.items()}
            if stream in (BOTH, SHARED):
                assert set(counts.values()) == {sum(map(len, rows.values()))}
        tester.replay(parallelism=1)


def test_each_output_goes_to_its_readers_and_its_sink(spark: SparkSession, tmp_path: Path) -> None:
    bids = [[(1, 7), (1, 12), (2, 30)], [(1, 3)], [], [(3, 50), (2, 70)]]
    sinks: dict[str, Any] = {"alerts": None, "alerts-high": None, "alerts-counts": None, "last": None}
    with OpenWarehouse.open_writable(str(tmp_path / "w")) as place:
        region = open_region(at(tmp_path / "w", parallelism=2), OUTPUTS, place, {}, 2)
        with StreamTester(OUTPUTS, parallelism=2, schema={"bids": SCHEMA["bids"]}) as tester:
            for rows in bids:
                table = pa.table({"auction": [a for a, _ in rows], "price": [p for _, p in rows]})
                table = table.cast(pa.schema(SCHEMA["bids"]))
                batch = from_arrow(spark, table) if rows else None
                done = run_step(spark, batch, region.begin_step(ends=True))
                done.unpersist()
                for name, received in done.received.items():
                    region.acknowledge(name, received)
                region.complete()
                tester.step({"bids": table} if rows else None)
                assert region.digest == tester.digest
            staged = {name: 0 for name in sinks}
            for output in place.catalog.outbox.list("outputs", outstanding=True):
                staged[output.name] += output.rows
            assert staged == {name: tester.delivered(name).num_rows for name in sinks}
            assert staged == {"alerts": 6, "alerts-high": 4, "alerts-counts": 8, "last": 4}


def test_a_key_that_does_not_fit_is_set_aside_with_its_own_value(spark: SparkSession, tmp_path: Path) -> None:
    stream = Stream("aside", sources=SOURCES, operators=[Prices()], on_bad_row="dead-letter", max_parallelism=8)
    rows: Any = {"auctions": [{"id": 1 << 40, "Price": "x"}, {"id": 1}], "bids": [{"auction": "1.5", "Price": 2}]}
    with OpenWarehouse.open_writable(str(tmp_path / "w")) as place:
        region = open_region(at(tmp_path / "w", parallelism=2), stream, place, {}, 2)
        frames = frames_of(spark, rows)
        done = run_step(spark, unite(frames, read_by(stream, frames)), region.begin_step(ends=True))
        assert sum(a.dead_letters for a in done.received["prices"]) == 2
        with StreamTester(stream, parallelism=2, schema=TYPES) as tester:
            tester.step(rows)
            shown = sorted(letter["row"] for letter in tester.dead_letters.to_pylist())
            assert shown[0] == '{"auctions": {"id": 1099511627776, "Price": "x", "tags": null}}'
            assert shown[1] == '{"bids": {"auction": "1.5", "Price": 2, "by": null}}'
            found = [a.digests["rows"] for a in sorted(done.received["prices"], key=lambda a: a.subtask)]
            for name, received in done.received.items():
                region.acknowledge(name, received)
            region.complete()
            assert region.digest == tester.digest and any(np.any(each) for each in found)


def test_columns_are_checked_by_input(spark: SparkSession) -> None:
    frames = frames_of(spark, {})
    assert columns_read(frames["bids"], Prices(), None, "bids") == ["auction", "Price", "by"]
    with pytest.raises(UsageError, match="reads Price, tags, which bids does not have"):
        columns_read(
            frames["bids"].drop("Price"), Prices(inputs={"bids": ("Price", "tags")}, order_by=()), None, "bids"
        )
    text = frames["auctions"].selectExpr("cast(null as timestamp) as id", "Price", "tags")
    with pytest.raises(UsageError, match="key column auction is timestamp in auctions"):
        columns_read(text, Prices(), None, "auctions")
    assert spark_type(pa.int32()).simpleString() == "int"


class Holding(Doubles):
    """Hands its rows on at the end of an interval only."""

    held = ValueState({"price": pa.int64()})

    def process(self, rows: Rows, state: State) -> None:
        """Keep the highest."""
        state.held.put(rows.keys, {"price": rows.max("Price", initial=state.held.get(rows.keys)["price"])})

    def drain(self, state: State) -> pa.Table:
        """A row, whether there were any or not."""
        return pa.table({"number": pa.array([1], pa.int64()), "Price": pa.array([2], pa.int64())})


def test_a_step_without_a_batch_of_ones_own_query_has_the_order_of_what_is_there(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Seen: such a step has no column of the source, by which it was to be sorted."""
    operators = [ONE.operators[0], Holding(reads="source")]
    stream, settings = Stream("own", operators=operators, max_parallelism=4), at(tmp_path / "w", checkpoint_steps=2)
    write_files(tmp_path / "in", [pa.table({"auction": ["1"], "Price": [5]})])
    rows = read_files(spark, tmp_path / "in", pa.schema({"auction": pa.string(), "Price": pa.int64()}))
    for _ in range(2):  # the second one has no batch at all
        with stream_runner(settings, stream, spark) as runner:
            writer = rows.writeStream.foreachBatch(runner).option("checkpointLocation", runner.checkpoint_location)
            writer.trigger(availableNow=True).start().awaitTermination()
    with OpenWarehouse.open_existing(settings.warehouse) as place:
        assert place.catalog.checkpoints.get("own", 1).statistics["operators"]["prices"]["rows_in"] == 3


def test_a_column_that_another_operator_does_not_put_out_is_named(spark: SparkSession, tmp_path: Path) -> None:
    """Seen: a KeyError."""
    reads = {"auctions": {"id": "auction"}, "doubles": {"nosuch": "auction"}}
    asks = Prices(reads=reads, inputs={"auctions": ("tags",), "doubles": ("Price",)}, order_by=())
    stream = Stream("asks", sources=SOURCES, operators=[asks, Doubles()], max_parallelism=8)
    with OpenWarehouse.open_writable(str(tmp_path / "w")) as place:
        region = open_region(at(tmp_path / "w", parallelism=2), stream, place, {}, 2)
        frames = frames_of(spark, STEPS[0])
        batch = unite(frames, {"auctions": ["id", "tags"], "bids": ["auction", "Price"]})
        with pytest.raises(UsageError, match="operator prices reads nosuch, which doubles does not have"):
            run_step(spark, batch, region.begin_step(ends=True))
