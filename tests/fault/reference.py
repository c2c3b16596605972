"""What an undisturbed run of a stream has after each step, and the comparison of a warehouse with it.

The reference runs the same operators through the same consistent region, but without Spark, in one process and
without any crash: so Spark's part of the way is under test, too.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow as pa
import pyarrow.parquet as pq

from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.chains.policies import DEFAULT_POLICY, policy_by_name
from siltstone.format.manifests import read_manifests, variables_of
from siltstone.format.output import read_output, staged_schema
from siltstone.restore.export import UnitTask, rebuild
from siltstone.restore.plan_rules import plan_restore
from siltstone.restore.restore import MemoryState
from siltstone.stream import Stream
from streams import FLIGHTS
from streams.flights import UNKNOWN
from streams.flights_data import prepare
from tests import oracle_flights
from tests.fault.held_stream import HELD
from tests.fault.journal import Delivered
from tests.fault.small_stream import SMALL, purchases
from tests.region_run import RegionRun

WEEKS, MORE_WEEKS = 12, 3
"""of the flights' 53: what one warehouse of the campaign takes, and by how much a take-over may go beyond"""


@dataclass(frozen=True, eq=False)
class Reference:
    """An undisturbed run: the stream's input, and after each step the digest of the state and each sink's rows."""

    stream: Stream
    batches: Sequence[pa.Table]
    digests: Sequence[str]
    waited: Sequence[str]
    """the digests after a further step without rows, in which what the newest rows made due has fired"""
    outputs: Mapping[str, "SinkRows"]
    steps: int
    """how many a warehouse of the campaign takes"""
    oracle: Callable[[OpenWarehouse, int], None] | None = None
    """asserts that a checkpoint's state is what an independent computation says"""
    journaled: Collection[str] = ()
    """the sinks that keep a journal of deliveries, where the campaign runs it"""

    @property
    def written(self) -> Sequence[pa.Table]:
        """What its first sink has after each step."""
        return next(iter(self.outputs.values())).written

    def has(self, digest: str | None, batches: int) -> bool:
        """Whether this is the digest after that number of batches."""
        return batches > 0 and digest in (self.digests[batches - 1], self.waited[batches - 1])

    @property
    def whole(self) -> bool:
        """Whether its steps use the input up."""
        return self.steps == len(self.digests)


@dataclass(frozen=True, eq=False)
class SinkRows:
    """The rows of one sink, batch by batch."""

    written: Sequence[pa.Table]

    @cached_property
    def spans(self) -> dict[tuple[int, int], tuple[int, int]]:
        """The first and last input row of consecutive batches -> the first and last of these batches, from 1 on."""
        deliveries = [Delivered.of(0, rows) for rows in self.written]
        ends = [(each.first, each.last) for each in deliveries]
        return {
            (first, last): (begin, end)
            for begin, (first, _) in enumerate(ends, 1)
            for end, (_, last) in enumerate(ends[begin - 1 :], begin)
        }

    @cached_property
    def _deliveries(self) -> dict[tuple[int, int], Delivered]:
        return {}

    def delivery(self, begin: int, end: int) -> Delivered:
        """What a sink is to be handed of the batches from `begin` to `end`, under id 0."""
        if (begin, end) not in self._deliveries:
            self._deliveries[begin, end] = Delivered.of(0, pa.concat_tables(self.written[begin - 1 : end]))
        return self._deliveries[begin, end]


def _undisturbed(stream: Stream, batches: Iterable[pa.Table]) -> tuple[list[str], list[str], dict[str, SinkRows]]:
    digests, waited, written = [], [], dict[str, list[pa.Table]]((name, []) for name in stream.sinks)
    with TemporaryDirectory() as directory, OpenWarehouse.open_writable(f"{directory}/warehouse") as place:
        run = RegionRun(place, stream, policy_by_name(DEFAULT_POLICY))
        for rows in batches:
            completed = run.step(rows)
            assert completed is not None
            digests.append(completed.digest)
            for output in place.catalog.outbox.list(stream.name, outstanding=True):
                if output.checkpoint == completed.id:
                    parts = [part for each in output.objects for part in read_output(place.warehouse.store, each)]
                    schema = staged_schema(output.arrow_schema)
                    written[output.name].append(pa.Table.from_batches(parts, schema))
            waits = run.step_without_rows() if stream.is_timed else completed
            assert waits is not None
            waited.append(waits.digest)
    assert all(len(tables) == len(digests) for tables in written.values()), "each batch has rows for each sink"
    return digests, waited, {name: SinkRows(tables) for name, tables in written.items()}


@cache
def small() -> Reference:
    """The small stream, whole."""
    return _whole(SMALL)


@cache
def held() -> Reference:
    """The same with rows that are held back until a checkpoint."""
    return _whole(HELD)


def _whole(stream: Stream) -> Reference:
    batches = purchases()
    digests, waited, outputs = _undisturbed(stream, batches)
    journaled = [name for name, sink in stream.sinks.items() if sink is not None]
    return Reference(stream, batches, digests, waited, outputs, len(batches), journaled=journaled)


@cache
def flights() -> Reference:
    """The first weeks of flights, and a few more."""
    with TemporaryDirectory() as directory:
        prepare(Path(directory) / "week", "week")
        files = sorted((Path(directory) / "week").iterdir())
        batches = [pq.read_table(path) for path in islice(files, WEEKS + MORE_WEEKS)]
    place = batches[0].column_names.index("tailnum")
    named_ = [rows.set_column(place, "tailnum", rows["tailnum"].fill_null(UNKNOWN)) for rows in batches]
    digests, waited, outputs = _undisturbed(FLIGHTS, named_)
    return Reference(FLIGHTS, named_, digests, waited, outputs, WEEKS, _as_pandas_says)


def restored(place: OpenWarehouse, stream: Stream, checkpoint: int) -> dict[str, MemoryState]:
    """Operator -> its whole state at a checkpoint, rebuilt from the store alone."""
    store = place.warehouse.store
    manifests = read_manifests(store, place.catalog.chains.list_manifests(stream.name, checkpoint))
    states = {}
    handles = {c: m.handles for c, m in manifests.items()}
    for operator in stream.operators:
        variables = variables_of(manifests[checkpoint], operator.name)
        (unit,) = plan_restore(handles, checkpoint, stream.max_parallelism, 1, variables).units
        states[operator.name] = rebuild(store, UnitTask(unit, manifests, checkpoint, None))
    return states


def _as_pandas_says(place: OpenWarehouse, checkpoint: int) -> None:
    batches = place.catalog.input_log.get_position(FLIGHTS.name, checkpoint).next_batch
    flown = sum(len(rows) for rows in flights().batches[:batches])
    states = restored(place, FLIGHTS, checkpoint)
    tables = {
        (name, table): pa.concat_tables(rows for rows, _ in state.tables[table].scan(state.groups))
        for name, state in states.items()
        for table in state.tables
    }
    delays = states["aircraft"].opaque["delays"]
    oracle_flights.check(_expected(flown), tables, delays, FLIGHTS.max_parallelism)


@cache
def _expected(flown: int) -> oracle_flights.Expected:
    return oracle_flights.expected(oracle_flights.all_flights().head(flown))
