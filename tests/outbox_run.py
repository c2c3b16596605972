"""A stream with a sink, run without Spark: what its sink was handed, and runs that end at any moment."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from siltstone.catalog.database.tables import METADATA
from siltstone.catalog.records.outbox import OutputRecord
from siltstone.catalog.records.steps import with_ends
from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.chains.policies import PolicyOptions, policy_by_name
from siltstone.format.output import read_output, staged_schema
from siltstone.operator import Operator, Rows, State, ValueState
from siltstone.run.outbox import Give
from siltstone.run.region import Completed
from siltstone.sinks.parquet import ParquetSink
from siltstone.store.paths import epoch_marks, extract_prefix, stream_prefix
from siltstone.stream import DEAD_LETTERS, Stream
from tests.catalog_cases import engine_of
from tests.region_run import RegionRun

NAME, SINK = "tallies", "by_key"
POLICY = policy_by_name("marginal-cost", PolicyOptions(d_max=3, size_ratio_max=None))


class Tallies(Operator):
    """Adds up `n` by key, and hands on each row with the sum up to its call."""

    key = {"k": pa.int64()}  # noqa: RUF012
    inputs = ("n",)
    output = pa.schema([("k", pa.int64()), ("n", pa.int64()), ("sum", pa.int64())])
    totals = ValueState(value={"sum": pa.int64()})

    def process(self, rows: Rows, state: State) -> pa.Table:
        old = state.totals.get(rows.keys)["sum"].fill_null(0).to_numpy()
        new = old + np.bincount(rows.key_index, weights=rows.table.column("n").to_numpy(), minlength=len(rows.keys))
        new = new.astype(np.int64)
        state.totals.put(rows.keys, {"sum": new})
        columns = {name: rows.table.column(name) for name in ("k", "n")}
        return pa.table({**columns, "sum": new[rows.key_index]}, schema=self.output)


STREAM = Stream(
    NAME,
    source=lambda spark, _: spark.sql(""),
    operators=[Tallies(name=SINK)],
    sinks={SINK: ParquetSink()},
    max_parallelism=4,
)


def batch(n: int, rows: int = 10) -> pa.Table:
    """The n-th micro-batch: so many rows, each of them of no other batch."""
    return pa.table({"k": np.arange(rows) % 7, "n": np.arange(rows) + 1000 * n})


@dataclass
class Heard:
    """A sink: every delivery, in order. `fails` is raised in place of the next ones."""

    calls: list[tuple[int, list[dict[str, Any]]]] = field(default_factory=list)
    fails: BaseException | None = None

    def take(self, id: int, rows: pa.Table) -> None:
        """One delivery."""
        if self.fails is not None:
            raise self.fails
        self.calls.append((id, rows.sort_by([(name, "ascending") for name in rows.column_names[1:]]).to_pylist()))

    @property
    def ids(self) -> list[int]:
        """Of every delivery."""
        return [id for id, _ in self.calls]

    @property
    def inputs(self) -> list[int]:
        """The input rows that arrived, by a sink that skips ids it has."""
        by_id: dict[int, list[dict[str, Any]]] = {}
        for id, rows in self.calls:
            assert by_id.setdefault(id, rows) == rows, f"id {id} came with other rows"
        return sorted(row["n"] for rows in by_id.values() for row in rows)


class Outboxed(RegionRun):
    """One run of the stream, which hands its output to a sink as the stream's runner does.

    Args:
        delivers: whether it delivers at all; else it is as if it died before that.
        letters: the sink of dead letters.
    """

    def __init__(
        self,
        place: OpenWarehouse,
        heard: Heard,
        *,
        stream: Stream = STREAM,
        parallelism: int = 2,
        checkpoint_steps: int = 1,
        delivers: bool = True,
        letters: Heard | None = None,
        tables: frozenset[str] = frozenset(),
        **options: Any,
    ) -> None:
        super().__init__(place, stream, POLICY, parallelism, checkpoint_steps, tables=tables, **options)
        self.heard, self.delivers, self.letters = heard, delivers, letters or Heard()
        if delivers:
            self.deliver()

    @property
    def sinks(self) -> dict[str, Give]:
        """Those of all outputs."""
        return dict.fromkeys((SINK, DEAD_LETTERS), self.give)

    def give(self, output: OutputRecord) -> None:
        """Hand one output over."""
        store, schema = self.region.warehouse.store, staged_schema(output.arrow_schema)
        batches = [each for stored in output.objects for each in read_output(store, stored)]
        heard = self.letters if output.name == DEAD_LETTERS else self.heard
        heard.take(output.sink_id, pa.Table.from_batches(batches, schema))

    def deliver(self, *, checked: bool = False) -> None:
        """What is outstanding."""
        self.region.outbox.deliver(self.region.completed, self.sinks, checked=checked)

    def complete(self) -> Completed:
        """Commit, then deliver."""
        completed = super().complete()
        if self.delivers:
            self.deliver(checked=True)
        return completed


def roll_back(place: OpenWarehouse, checkpoint: int, stream: str = NAME) -> None:
    """Give up what lies above a checkpoint."""
    epoch = place.catalog.runs.begin(stream, "a test")
    place.catalog.rollbacks.roll_back(stream, epoch, checkpoint, "a test", "a test")


def delete_stream(place: OpenWarehouse) -> None:
    """Delete a stream: no command does it, but people do."""
    engine = engine_of(place.catalog.url)
    with engine.begin() as connection:
        for table in reversed(METADATA.sorted_tables):
            if "stream" in table.c:
                connection.execute(table.delete().where(table.c.stream == NAME))
            elif table.name == "stream":
                connection.execute(table.delete().where(table.c.name == NAME))
    engine.dispose()
    for prefix in (stream_prefix(NAME), epoch_marks(NAME), extract_prefix(NAME)):
        place.warehouse.store.delete([name for name, _ in place.warehouse.store.list(prefix)])


def follow_log(run: Outboxed) -> None:
    """Run what the input log holds again, with the same boundaries."""
    for step, ends in with_ends(run.region.logged_steps()):
        if step.batch_id is None:
            run.step_without_rows(step.kind, ends=ends)
        else:
            run.step(batch(step.batch_id + 1), ends=ends)


def write(place: OpenWarehouse, heard: Heard, count: int, **options: Any) -> Outboxed:
    """A run of the first micro-batches."""
    run = Outboxed(place, heard, **options)
    for n in range(1, count + 1):
        run.step(batch(n))
    return run


def inputs(numbers: Sequence[int], rows: int = 10) -> list[int]:
    """What these micro-batches hold."""
    return sorted(n for number in numbers for n in batch(number, rows).column("n").to_pylist())


def staged(place: OpenWarehouse) -> list[str]:
    """The staged objects in the store."""
    return [name for name, _ in place.warehouse.store.list(f"{NAME}/") if name.endswith(".output.arrow")]


def outstanding(place: OpenWarehouse, stream: str = NAME) -> list[int]:
    """Checkpoints whose output is to be delivered."""
    return [output.checkpoint for output in place.catalog.outbox.list(stream, outstanding=True)]


def damage(place: OpenWarehouse, checkpoint: int) -> None:
    """Alter what a checkpoint has staged."""
    for output in place.catalog.outbox.list(NAME):
        if output.checkpoint == checkpoint:
            for stored in output.objects:
                path = Path(place.warehouse.local.objects) / stored.name
                data = bytearray(path.read_bytes())
                data[len(data) // 2] ^= 1
                path.unlink()
                path.write_bytes(data)
